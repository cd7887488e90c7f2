"""A process of our own: started, proven, signalled, and told apart from everybody else's."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs_kit import kill, wait_for_end, wait_until

from supervisor import attendant, cgroup, child, contract, events as ev, evidence, proc
from supervisor.attendant import Attendant
from supervisor.log import Log
from supervisor.rundir import RunDirectory, take_trainer_lock
from supervisor.tree import Tree

# Of this session alone: what carries it is killed, wherever on this machine it was started.
NONCE = os.urandom(8).hex()
WAITS = "import signal; print('up', flush=True); signal.pause()"
DEAF = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()"


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run", "run")
    made.create()
    return made


@contextlib.contextmanager
def spawned(
    directory: RunDirectory, *command: str, nonce: str = NONCE, home: Path | None = None
) -> Iterator[child.Child]:
    """A trainer of attempt 1, ended and reaped at the end."""
    lock_fd = take_trainer_lock(directory)
    assert lock_fd is not None
    made = child.spawn(
        command,
        environment={**os.environ, contract.ENV_NONCE: nonce},
        home=home or directory.path,
        log_path=directory.log(1),
        lock_fd=lock_fd,
    )
    os.close(lock_fd)
    try:
        yield made
    finally:
        made.send(signal.SIGKILL)
        assert made.process is not None
        made.process.wait()
        made.close()


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def wait_for_output(directory: RunDirectory, text: str) -> None:
    wait_until(lambda: text in directory.log(1).read_text(), f"{text!r} in the log")


def is_dead(made: child.Child) -> bool:
    return wait_until(made.poll, "its end")


# --- spawn ----------------------------------------------------------------------------------------


def test_a_trainer_leads_a_session_of_its_own_and_holds_the_lock(directory: RunDirectory) -> None:
    with spawned(directory, *python(WAITS)) as made:
        wait_for_output(directory, "up")
        assert os.getsid(made.pid) == made.pid
        assert take_trainer_lock(directory) is None
        (holder,) = child.holders(directory.trainer_lock, NONCE)
        assert (holder.pid, holder.ours, holder.leader) == (made.pid, True, True)
        assert "signal.pause" in holder.command
        assert proc.start_ticks(made.pid) == made.start_ticks
        assert not made.poll()
    assert child.holders(directory.trainer_lock, NONCE) == ()


@pytest.mark.fault("SV-29", phase="starting", does="ignores SIGUSR1 until the program takes it")
@pytest.mark.fault("SV-17", phase="starting", does="prepares the child in a program, no callback")
def test_a_request_that_comes_too_early_cannot_kill(directory: RunDirectory) -> None:
    """A callback between fork and exec deadlocks in a parent with threads (cpython #82616,
    gprofiler PR 931)."""
    # From the first instruction on: SIGUSR1 is ignored before the program itself begins.
    with spawned(directory, *python(WAITS)) as made:
        wait_for_output(directory, "up")
        assert not proc.handles_signal(made.pid, signal.SIGUSR1)
        assert made.send(signal.SIGUSR1)
        assert made.send(signal.SIGUSR1)
        assert not made.poll()


def test_a_handler_is_seen(directory: RunDirectory) -> None:
    code = "import signal; signal.signal(10, print); print('up', flush=True); signal.pause()"
    with spawned(directory, *python(code)) as made:
        wait_for_output(directory, "up")
        assert proc.handles_signal(made.pid, signal.SIGUSR1)
        assert not proc.handles_signal(made.pid, signal.SIGTERM)
    assert not proc.handles_signal(made.pid, signal.SIGUSR1)


def test_the_command_is_arguments_and_never_text_for_a_shell(
    directory: RunDirectory, tmp_path: Path
) -> None:
    odd = f"$(touch {tmp_path / 'made'}); ' \" `x` \\"
    with spawned(directory, *python("import sys; print(sys.argv[1])"), odd) as made:
        assert is_dead(made)
    assert directory.log(1).read_text() == odd + "\n"
    assert not (tmp_path / "made").exists()


def test_a_log_is_appended_to(directory: RunDirectory) -> None:
    directory.log(1).write_text("before\n")
    with spawned(directory, *python("print('after')")) as made:
        assert is_dead(made)
    assert directory.log(1).read_text() == "before\nafter\n"


def test_it_runs_where_the_operator_stood(directory: RunDirectory, tmp_path: Path) -> None:
    code = "import os; print(os.getcwd())"
    with spawned(directory, *python(code), home=tmp_path) as made:
        assert is_dead(made)
    assert directory.log(1).read_text() == f"{tmp_path}\n"


@pytest.mark.fault("SV-33", phase="stopping", does="takes 'no such process' for an answer")
def test_how_it_ended(directory: RunDirectory) -> None:
    with spawned(directory, *python("raise SystemExit(7)")) as made:
        assert made.status() == (None, None)
        assert is_dead(made)
        assert made.status() == (7, None)
        assert not made.send(signal.SIGTERM)
    with spawned(directory, *python(WAITS)) as made:
        made.send(signal.SIGKILL)
        assert is_dead(made)
        assert made.status() == (None, signal.SIGKILL)


def test_a_zombie_counts_as_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    wait_for_end(process.pid)
    assert proc.start_ticks(process.pid) is None
    process.wait()
    assert proc.start_ticks(process.pid) is None


@pytest.mark.parametrize("fails", ["os.pidfd_open", "proc.start_ticks"])
def test_a_trainer_that_cannot_be_watched_is_ended_before_its_start_has_failed(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """It trained on, unwatched, while the run said that it had not been started, and kept the lock
    from those that came after it."""

    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    lock_fd = take_trainer_lock(directory)
    assert lock_fd is not None
    with monkeypatch.context() as patched:
        patched.setattr(f"supervisor.child.{fails}", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            child.spawn(
                python(WAITS),
                environment=os.environ,
                home=directory.path,
                log_path=directory.log(1),
                lock_fd=lock_fd,
            )
    os.close(lock_fd)
    assert proc.is_free(directory.trainer_lock)


# --- identity -------------------------------------------------------------------------------------


def record_of(made: child.Child) -> ev.AttemptSpawned:
    return ev.AttemptSpawned(1, made.pid, made.start_ticks, proc.boot_id())


@pytest.mark.fault(
    "SV-71", phase="adoption", does="wants pid, start time, boot, nonce and lock to agree"
)
def test_a_trainer_is_adopted_by_its_identity(directory: RunDirectory) -> None:
    with spawned(directory, *python(WAITS)) as made:
        lock = directory.trainer_lock
        for main in (record_of(made), None):
            adopted = child.adopt(made.pid, lock, NONCE, main)
            assert adopted is not None
            assert (adopted.pid, adopted.start_ticks) == (made.pid, made.start_ticks)
            assert not adopted.poll()
            adopted.close()
        assert child.adopt(made.pid, lock, "another nonce") is None
        assert child.adopt(made.pid, lock, "") is None
        assert child.adopt(os.getpid(), lock, NONCE) is None
        for wrong in (
            ev.AttemptSpawned(1, made.pid + 1, made.start_ticks, proc.boot_id()),
            ev.AttemptSpawned(1, made.pid, made.start_ticks + 1, proc.boot_id()),
            ev.AttemptSpawned(1, made.pid, made.start_ticks, "another boot"),
        ):
            assert child.adopt(made.pid, lock, NONCE, wrong) is None
    assert child.adopt(made.pid, lock, NONCE) is None


TITLED = (
    "import ctypes; fields = open('/proc/self/stat').read().rpartition(')')[2].split();"
    " start, end = int(fields[47]), int(fields[48]); ctypes.memset(start, 0x20, end - start);"
)


def test_a_trainer_that_writes_a_title_over_its_environment_is_adopted(
    directory: RunDirectory,
) -> None:
    """Programs that rename themselves use the memory of their environment for the longer name, and
    with that the nonce is gone from /proc."""
    with spawned(directory, *python(TITLED + WAITS)) as made:
        wait_until(lambda: "up" in directory.log(1).read_text(), "its title")
        assert contract.ENV_NONCE not in proc.environment(made.pid)
        lock, main = directory.trainer_lock, record_of(made)
        adopted = child.adopt(made.pid, lock, NONCE, main)
        assert adopted is not None
        adopted.close()
        assert [holder.ours for holder in child.holders(lock, NONCE, main)] == [True]
        # Without a record only the nonce could have proven it.
        assert child.adopt(made.pid, lock, NONCE) is None


def test_an_environment_is_read_in_the_middle_of_an_exec(tmp_path: Path) -> None:
    """Between two programs of one process the kernel shows an empty environment for a moment: a
    start that fell on it took the trainer for a stranger."""
    script = tmp_path / "again.sh"
    script.write_text('n=$1; [ "$n" = 0 ] && { read -r _; exit; }; exec /bin/sh "$0" $((n - 1))\n')
    with subprocess.Popen(
        ["/bin/sh", str(script), "2000"],
        env={contract.ENV_NONCE: NONCE, "PATH": os.environ["PATH"]},
        stdin=subprocess.PIPE,
    ) as made:
        waits = f"{script}\0".encode() + b"0\0"
        while not Path(f"/proc/{made.pid}/cmdline").read_bytes().endswith(waits):
            assert proc.carries(made.pid, NONCE)


def test_a_process_with_no_environment_is_no_riddle() -> None:
    with subprocess.Popen(["/bin/cat"], env={}, stdin=subprocess.PIPE) as made:
        assert proc.environment(made.pid) == {}
    assert proc.environment(made.pid) == {}


def test_of_an_adopted_one_the_kernel_tells_how_it_ended(directory: RunDirectory) -> None:
    """From the zombie that its parent has not waited for; afterwards a newer kernel still knows,
    and an older one says nothing."""
    with spawned(directory, *python(WAITS)) as made:
        adopted = child.adopt(made.pid, directory.trainer_lock, NONCE)
        assert adopted is not None
        assert adopted.status() == (None, None)
        assert adopted.send(signal.SIGTERM)
        assert is_dead(adopted)
        assert adopted.status() == (None, signal.SIGTERM)
        assert made.process is not None
        made.process.wait()
        assert adopted.status() in ((None, signal.SIGTERM), (None, None))
        adopted.close()
        adopted.close()
        assert not adopted.send(signal.SIGTERM)


@contextlib.contextmanager
def decoys(lock_fd: int, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of ours that hold the lock; every second one carries another nonce, the others
    carry none."""
    made = [
        subprocess.Popen(
            python(WAITS),
            pass_fds=(lock_fd,),
            env=os.environ | ({contract.ENV_NONCE: "another nonce"} if number % 2 else {}),
            stdout=subprocess.DEVNULL,
        )
        for number in range(count)
    ]
    try:
        yield made
    finally:
        for decoy in made:
            decoy.kill()
            decoy.wait()


@pytest.mark.fault("FC-79", phase="any", does="signals nothing that is not provably the attempt's")
@pytest.mark.fault("SV-11", phase="any", does="kills only what carries the attempt's nonce")
def test_only_what_is_proven_ours_is_signalled(directory: RunDirectory) -> None:
    """Killing a tree by its names or its parents reached processes that had nothing to do with it,
    down to the test session itself (NVIDIA/TensorRT-LLM PR 16404)."""
    lock_fd = take_trainer_lock(directory)
    assert lock_fd is not None
    lock = directory.trainer_lock
    made = child.spawn(
        python(WAITS),
        environment={**os.environ, contract.ENV_NONCE: NONCE},
        home=directory.path,
        log_path=directory.log(1),
        lock_fd=lock_fd,
    )
    with decoys(lock_fd, 2) as strangers:
        os.close(lock_fd)
        others = {decoy.pid for decoy in strangers}
        wait_until(lambda: len(child.holders(lock, NONCE)) == 3, "three holders")
        ours = {holder.pid for holder in child.holders(lock, NONCE) if holder.ours}
        assert ours == {made.pid}
        left = Tree(lock, NONCE).signal(signal.SIGKILL)
        assert {member.pid for member in left} == {made.pid, *others}
        assert is_dead(made)
        made.close()
        left = Tree(lock, "").signal(signal.SIGKILL)
        assert {member.pid for member in left if member.blocks} == others
        assert [decoy.poll() for decoy in strangers] == [None, None]


def test_who_only_reads_the_lock_file_does_not_hold_it(directory: RunDirectory) -> None:
    """A backup, or a curious person, must not keep a run from starting."""
    with spawned(directory, *python(WAITS)) as made:
        reads = "import sys; sys.stdin.read()"
        with (
            open(directory.trainer_lock, "rb") as file,
            subprocess.Popen(python(reads), stdin=subprocess.PIPE, pass_fds=(file.fileno(),)),
        ):
            assert proc.lock_holders(directory.trainer_lock) == (made.pid,)
            assert not proc.is_free(directory.trainer_lock)
            made.send(signal.SIGKILL)
            assert is_dead(made)
            assert proc.lock_holders(directory.trainer_lock) == ()
            assert proc.is_free(directory.trainer_lock)


def test_nobody_asks_the_file_server_behind_a_descriptor_of_somebody_else(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that hangs in a read of data on a file server that is gone: whoever asked what its
    descriptors stand for would hang like it, and nobody would end it."""
    asked = []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: object, *arguments: Any, **options: Any) -> Any:
            asked.extend(re.findall(r"^/proc/\d+/fd/.+", str(path)))
            return call(path, *arguments, **options)

        return called

    lock = directory.trainer_lock
    inherits = (
        "import os, subprocess, sys;"
        f"fd = int(os.environ[{contract.ENV_LOCK_FD!r}]);"
        "heir = subprocess.Popen(['cat'], stdin=subprocess.PIPE, pass_fds=(fd,));"
        "print('heir', heir.pid, flush=True); heir.wait()"
    )
    with spawned(directory, *python(inherits)) as made, open(lock, "rb") as file:
        wait_for_output(directory, "heir")
        heir = int(directory.log(1).read_text().split()[1])
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(file.fileno(),)):
            monkeypatch.setattr(os, "stat", watched(os.stat))
            monkeypatch.setattr(os, "open", watched(os.open))
            assert set(proc.lock_holders(lock)) == {made.pid, heir}
            assert asked == []
            monkeypatch.undo()


def test_a_lock_of_another_file_of_the_same_name_is_not_ours(
    directory: RunDirectory, tmp_path: Path
) -> None:
    other = RunDirectory(tmp_path / "other", "other")
    other.create()
    directory.trainer_lock.touch()
    with spawned(other, *python(WAITS)) as made:
        assert proc.lock_holders(other.trainer_lock) == (made.pid,)
        assert proc.lock_holders(directory.trainer_lock) == ()


def test_a_lock_that_is_not_there_has_no_holders(tmp_path: Path) -> None:
    assert child.holders(tmp_path / "nothing", NONCE) == ()


# --- the death of an attempt ----------------------------------------------------------------------


@pytest.fixture
def attending(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attendant]:
    """One that has no control groups, wherever these tests run."""
    monkeypatch.setattr(cgroup, "MOUNTS", os.devnull)
    log = Log(directory.supervisor_log)
    made = Attendant(directory, log)
    yield made
    made.close()
    log.close()


def begin(attending: Attendant, directory: RunDirectory, *command: str) -> ev.Spawned:
    effect = ev.Spawn(1, NONCE, 0, 1)
    started = attending.spawn(effect, command, os.environ, directory.path)
    assert isinstance(started, ev.Spawned)
    return started


def stray_code(code: str) -> str:
    """A trainer that leaves a process of another session behind and ends."""
    return (
        "import os, subprocess, sys\n"
        f"fd = int(os.environ[{contract.ENV_LOCK_FD!r}])\n"
        f"stray = subprocess.Popen([sys.executable, '-c', {code!r}], stdout=subprocess.PIPE,\n"
        "    pass_fds=(fd,), start_new_session=True, env={**os.environ, **ENV})\n"
        "stray.stdout.readline()\n"
        "print(stray.pid, flush=True)\n"
        "os._exit(0)\n"
    )


@pytest.mark.fault("SV-4", phase="backoff", does="waits until nothing of the dead attempt is left")
@pytest.mark.fault(
    "SV-10", phase="backoff", does="finds a grandchild whose parent is gone, by the lock it holds"
)
def test_a_death_is_complete_when_nobody_holds_the_lock(
    directory: RunDirectory, attending: Attendant
) -> None:
    code = "ENV = {}\n" + stray_code(DEAF)
    begin(attending, directory, *python(code))
    wait_until(attending.died, "its death")
    assert not attending.died(), "a death is told once"
    assert not attending.alive
    stray = int(directory.log(1).read_text())
    attending.begin_reaping()
    # It is asked first, and it is deaf.
    assert attending.end_of_tree(100.1) is None
    assert proc.start_ticks(stray) is not None
    assert attending.end_of_tree(100.2) is None
    assert attending.end_of_tree(100.1 + attendant.TERM_SECONDS) is None
    wait_for_end(stray)
    assert attending.end_of_tree(100.5 + attendant.TERM_SECONDS) == ()
    assert attending.bury() == (0, None)
    assert attending.last_words(1) == str(stray)


def test_a_lock_that_cannot_be_opened_is_a_start_that_failed(
    directory: RunDirectory, attending: Attendant
) -> None:
    """A disk that fails for a moment; the next try may find it well."""
    directory.trainer_lock.unlink(missing_ok=True)
    directory.trainer_lock.mkdir()
    refused = attending.spawn(ev.Spawn(1, NONCE, 0, 1), python(WAITS), os.environ, directory.path)
    assert isinstance(refused, ev.SpawnFailed)
    assert "Is a directory" in refused.why
    directory.trainer_lock.rmdir()


@pytest.mark.fault(
    "SV-35", phase="backoff", does="waits for a bounded time, names who is left, starts nothing"
)
def test_a_process_that_is_not_proven_ours_is_named_after_a_bounded_time(
    directory: RunDirectory, attending: Attendant
) -> None:
    code = f"ENV = {{{contract.ENV_NONCE!r}: 'another'}}\n" + stray_code(WAITS)
    begin(attending, directory, *python(code))
    wait_until(attending.died, "its death")
    stray = int(directory.log(1).read_text())
    attending.begin_reaping()
    killed_at = 100.1 + attendant.TERM_SECONDS
    assert attending.end_of_tree(100.1) is None
    assert attending.end_of_tree(killed_at) is None
    assert attending.end_of_tree(killed_at + attendant.LIMIT_SECONDS - 1) is None
    assert attending.end_of_tree(killed_at + attendant.LIMIT_SECONDS) == (stray,)
    assert proc.start_ticks(stray) is not None
    refused = attending.spawn(ev.Spawn(2, NONCE, 0, 1), python(WAITS), os.environ, directory.path)
    assert isinstance(refused, ev.SpawnFailed)
    assert refused.why == "trainer.lock is still held"
    kill(stray)
    wait_for_end(stray)


def test_the_environment_of_an_attempt(directory: RunDirectory, attending: Attendant) -> None:
    code = "import os; print({k: v for k, v in os.environ.items() if k.startswith('SUPERVISOR_')})"
    effect = ev.Spawn(3, NONCE, 40, 2)
    attending.spawn(effect, python(code), {"PATH": os.environ["PATH"]}, directory.path)
    wait_until(attending.died, "its end")
    told = directory.log(3).read_text()
    for name, value in (
        (contract.ENV_ATTEMPT, "3"),
        (contract.ENV_NONCE, NONCE),
        (contract.ENV_EPOCH, "2"),
        (contract.ENV_RESUME_STEP, "40"),
        (contract.ENV_RUN_DIRECTORY, str(directory.path)),
    ):
        assert f"'{name}': '{value}'" in told
    assert attending.bury() == (0, None)


def test_a_pause_of_ours_gives_nobody_up(directory: RunDirectory, attending: Attendant) -> None:
    """The bound counts from what was done, not from the clock: a supervisor that slept through all
    of it still asks, and still kills, before it gives up."""
    code = "ENV = {}\n" + stray_code(DEAF)
    begin(attending, directory, *python(code))
    wait_until(attending.died, "its death")
    stray = int(directory.log(1).read_text())
    attending.begin_reaping()
    late = 100.0 + 10 * attendant.LIMIT_SECONDS
    assert attending.end_of_tree(late) is None
    assert proc.start_ticks(stray) is not None
    later = late + 10 * attendant.LIMIT_SECONDS
    assert attending.end_of_tree(later) is None
    wait_for_end(stray)
    assert attending.end_of_tree(later + attendant.LIMIT_SECONDS) == ()
    assert attending.bury() == (0, None)


def test_a_main_process_that_does_not_end_is_nobodys_death(
    directory: RunDirectory, attending: Attendant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor never becomes readable. How long that may go on is the machine's to say."""
    begin(attending, directory, *python(WAITS))
    with monkeypatch.context() as patched:
        patched.setattr(child.Child, "poll", lambda self: False)
        attending.kill()
        assert not attending.died()
        attending.begin_reaping()
        for number in range(1, 100):
            assert attending.end_of_tree(number * attendant.LIMIT_SECONDS) is None
    wait_until(attending.died, "its end")
    assert attending.end_of_tree(10_000.0) == ()
    assert attending.bury() == (None, signal.SIGKILL)


@pytest.mark.fault("SV-29", phase="loading", does="sends SIGUSR1 only where /proc shows a handler")
def test_a_signal_without_a_handler_is_not_sent(
    directory: RunDirectory, attending: Attendant
) -> None:
    begin(attending, directory, *python(WAITS))
    wait_for_output(directory, "up")
    attending.signal("USR1")
    assert "SIGUSR1 not sent" in directory.supervisor_log.read_text()
    attending.signal("TERM")
    wait_until(attending.died, "its end")
    assert attending.bury() == (None, signal.SIGTERM)
    attending.signal("TERM")  # nobody is there, and nothing happens


@pytest.mark.fault(
    "SV-2", phase="stopping", does="kills grandchildren too, also those of another session"
)
def test_a_kill_reaches_everything_that_is_proven_ours(
    directory: RunDirectory, attending: Attendant
) -> None:
    keeps = "ENV = {}\n" + stray_code(DEAF).replace("os._exit(0)", "stray.wait()")
    begin(attending, directory, *python(keeps))
    wait_until(lambda: directory.log(1).exists() and directory.log(1).read_text(), "the stray")
    stray = int(directory.log(1).read_text())
    attending.kill()
    wait_for_end(stray)
    wait_until(attending.died, "its end")
    assert attending.bury() == (None, signal.SIGKILL)


def test_last_words_are_the_last_line_that_says_something(
    directory: RunDirectory, attending: Attendant
) -> None:
    assert attending.last_words(1) == ""
    directory.log(1).write_bytes(b"first\nlast \xff word\n\n  \n")
    assert attending.last_words(1) == "last � word"
    directory.log(1).write_text("x" * 5000)
    assert attending.last_words(1) == "x" * evidence.WORDS_CHARACTERS


def test_a_process_that_is_ending_is_no_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that exits gives up its memory, and with it its environment, some milliseconds
    before it closes the lock. A supervisor that starts just then must wait for it, not give up.
    A zombie reads like that for longer; here it is said to have the lock open."""
    lock = tmp_path / "trainer.lock"
    lock.touch()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    wait_for_end(ended.pid)
    monkeypatch.setattr(proc, "lock_holders", lambda path: (ended.pid,))
    (holder,) = child.holders(lock, NONCE)
    assert (holder.pid, holder.ours, holder.command) == (ended.pid, True, "unknown")
    (unnamed,) = child.holders(lock, "")
    assert not unnamed.ours
    ended.wait()
