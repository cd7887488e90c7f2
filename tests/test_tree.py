"""An attempt is more than its main process: workers, orphans, daemons, and what holds them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs_kit import DEADLINE_SECONDS, Run, kill, wait_for_end, wait_until
from tree_kit import MECHANISMS, Leftovers, each_mechanism, run_of, zombies_of

from supervisor import (
    attendant,
    cgroup,
    child,
    contract,
    doctor,
    events as ev,
    orphans,
    proc,
    strays,
)
from supervisor.attendant import Attendant
from supervisor.cgroup import Cgroup
from supervisor.log import Log
from supervisor.rundir import RunDirectory, lock_holder, take_trainer_lock
from supervisor.tree import Member, Tree

# Of this session alone: what carries it is killed, wherever on this machine it was started.
NONCE = os.urandom(8).hex()


@pytest.fixture(params=MECHANISMS)
def tested(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Run, Leftovers]]:
    """A run, once with each mechanism that this machine has."""
    with run_of(tmp_path, request.param) as made:
        assert request.param in MECHANISMS
        yield made


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.fault("SV-2", phase="stopping", does="ends the trainer's own children with it")
@pytest.mark.fault("SV-1", phase="stopping", does="is not gone before its descendants are")
@pytest.mark.fault("SV-10", phase="stopping", does="finds a grandchild whose parent has ended")
def test_a_stop_leaves_no_descendant(tested: tuple[Run, Leftovers]) -> None:
    """TERM on a daemon left its programs' children running (circus #998, #214, #986); and a walk
    from parent to child does not find one whose parent has ended first (psutil #2534, #314)."""
    run, leftovers = tested
    run.faults = "worker@3,twins@4,stray@5"
    supervisor = run.hold(8)
    leftovers.wait_for(4)
    supervisor.send_signal(signal.SIGTERM)
    assert run.end(supervisor) == 0
    for pid in leftovers.pids():
        wait_for_end(pid)  # those with a session of their own get their SIGKILL at the very end
    assert run.file_status()["last_exit"]["cause"] == "stopped"


@pytest.mark.fault("SV-6", phase="running", does="ends a killed trainer's workers before a respawn")
@pytest.mark.fault("SV-4", phase="running", does="waits until nobody holds what the next one needs")
@pytest.mark.fault("SV-9", phase="running", does="kills session and nonce, not the direct child")
def test_a_killed_trainer_takes_its_workers_with_it(tested: tuple[Run, Leftovers]) -> None:
    """Loader workers survived a killed trainer and kept its memory (pytorch #5736, #1085, #8805); a
    child of the child kept what the next start needed (pm2 #6084); TERM reached the direct child
    only (pytorch PR 113231)."""
    run, leftovers = tested
    run.faults = "worker@5#1,stray@5#1,kill@6#1"
    run.gate(8)
    supervisor = run.start()
    run.wait_for_status(phase="running", attempt=2, step=8)
    assert leftovers.alive() == []
    assert len(leftovers.pids()) == 2
    run.open_gate()
    assert run.end(supervisor) == 0
    assert run.steps() == list(range(1, 31))


@pytest.mark.fault("FC-92", phase="running", does="restarts the whole group once one part is lost")
def test_a_launcher_that_loses_a_worker_is_restarted_as_a_group(
    tested: tuple[Run, Leftovers],
) -> None:
    """A part was lost and the job not failed, or everything was torn down for one part
    (skypilot #3907, #1410)."""
    run, leftovers = tested
    launcher = run.home / "launcher.py"
    launcher.write_text(LAUNCHER)
    saboteur = run.settings["trainer"]["command"][1]
    run.set("trainer", command=[sys.executable, str(launcher), saboteur])
    run.gate(8)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as sibling:
        supervisor = run.start()
        run.wait_for_status(phase="running", attempt=1, step=8)
        (other,) = leftovers.wait_for(1)
        kill(other)
        run.wait_for_status(phase="running", attempt=2, step=8)
        assert run.records("attempt_ended")[0]["code"] == 3
        assert sibling.poll() is None
        assert leftovers.wait_for(2)
        run.open_gate()
        assert run.end(supervisor) == 0
        sibling.kill()
    wait_for_end(leftovers.pids()[1])


# A worker that does nothing, and the one that trains. Whichever ends first ends the launcher.
LAUNCHER = """
import os, subprocess, sys, time
fd = int(os.environ["SUPERVISOR_TRAINER_LOCK_FD"])
other = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
with open(os.environ["SABOTEUR_LEFT"], "a") as file:
    file.write(f"{other.pid}\\n")
main = subprocess.Popen([sys.executable, sys.argv[1]], pass_fds=(fd,))
while True:
    if other.poll() is not None:
        sys.exit(3)
    if main.poll() is not None:
        sys.exit(main.returncode)
    time.sleep(0.01)
"""


def test_a_daemon_is_asked_then_killed_and_nothing_waits_for_it(tmp_path: Path) -> None:
    with run_of(tmp_path, "session") as (run, leftovers):
        run.faults = "daemon@5#1,kill@6#1"
        run.gate(8)
        supervisor = run.start()
        # The next attempt is there while the daemon of the first still has its time.
        (daemon,) = leftovers.wait_for(1)
        run.wait_for_status(phase="running", attempt=2, step=8)
        wait_for_end(daemon)
        wait_until(lambda: f"left: {daemon}" in log_of(run), "a line about it")
        run.open_gate()
        assert run.end(supervisor) == 0


def test_what_nothing_proves_is_left_alone(tmp_path: Path) -> None:
    """Not even because it was the trainer's child: it has thrown away whatever said so."""
    with run_of(tmp_path, "session") as (run, leftovers):
        run.faults = "bare@5#1,kill@6#1"
        assert run.finish() == 0
        assert leftovers.alive() == leftovers.pids() != []


def log_of(run: Run) -> str:
    return (run.directory / contract.SUPERVISOR_LOG_FILE).read_text()


@pytest.mark.fault("SV-34", phase="running", does="counts and logs an unknown pid, nothing else")
@pytest.mark.fault("SV-13", phase="running", does="leaves no zombie of an adopted orphan")
def test_orphans_become_no_zombies(tmp_path: Path) -> None:
    """Whoever adopts orphans has to wait for them, or they stay for ever (tini #95, dumb-init
    #212, bun PR 29930); and an unknown pid must not end the daemon (Supervisor #936)."""
    orphans_come_and_go(tmp_path, 50)


@pytest.mark.soak
def test_a_thousand_orphans_become_no_zombies(tmp_path: Path) -> None:
    orphans_come_and_go(tmp_path, 1000)


def orphans_come_and_go(home: Path, count: int) -> None:
    with run_of(home, "session") as (run, _):
        run.faults = f"orphans{count}@5"
        supervisor = run.hold(8)
        wait_until(lambda: orphans_logged(run) == count, f"{count} orphans in the log")
        assert zombies_of(supervisor.pid) == []
        assert run.status()["attempt"] == 1
        run.open_gate()
        assert run.end(supervisor) == 0
        assert run.records("attempt_ended")[0]["cause"] == "finished"


def orphans_logged(run: Run) -> int:
    lines = (line.partition("waited for ")[2] for line in log_of(run).splitlines())
    return sum(int(line.split()[0]) for line in lines if line)


@each_mechanism
def test_status_says_what_holds_an_attempt_together(mechanism: str, tmp_path: Path) -> None:
    with run_of(tmp_path, mechanism) as (run, _):
        supervisor = run.hold(3)
        assert run.status()["containment"] == mechanism
        trainer = run.status()["trainer_pid"]
        group = cgroup.of(trainer)
        assert (group is not None and group.path.name.startswith("attempt-")) == (
            mechanism == "cgroup"
        )
        run.open_gate()
        assert run.end(supervisor) == 0
        assert group is None or mechanism == "session" or not group.path.exists()


@each_mechanism
def test_doctor_says_what_holds_an_attempt_together(
    mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mechanism == "session":
        monkeypatch.setattr(cgroup, "MOUNTS", os.devnull)
    words = {"cgroup": "a control group for each attempt, below /", "session": "its session and"}
    finding = doctor._containment()
    assert finding.verdict == "good"
    assert words[mechanism] in finding.detail


@pytest.mark.fault("SV-76", phase="any", does="lets the kernel kill the trainer before itself")
def test_a_trainer_is_first_in_line_when_memory_runs_out(tmp_path: Path) -> None:
    """The kernel killed the supervisor and not the hog (balena-supervisor #39)."""
    with run_of(tmp_path, "session") as (run, _):
        supervisor = run.hold(3)
        scores = [
            int(Path(f"/proc/{pid}/oom_score_adj").read_text())
            for pid in (run.status()["trainer_pid"], supervisor.pid)
        ]
        assert scores[0] == 500 > scores[1]
        run.open_gate()
        assert run.end(supervisor) == 0


# --- the tree -------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run", "run")
    made.create()
    return made


SPAWNS = """
import os, signal, subprocess, sys
waits = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
workers = [
    subprocess.Popen(waits),
    subprocess.Popen(waits, env={}),
    subprocess.Popen(waits, start_new_session=True),
    subprocess.Popen(waits, start_new_session=True, env={}),
]
print(*(worker.pid for worker in workers), flush=True)
signal.pause()
"""


@pytest.fixture
def family(directory: RunDirectory) -> Iterator[tuple[child.Child, list[int]]]:
    """A trainer and four of its children: in its session or not, with its nonce or not."""
    lock_fd = take_trainer_lock(directory)
    assert lock_fd is not None
    made = child.spawn(
        (sys.executable, "-c", SPAWNS),
        environment={**os.environ, contract.ENV_NONCE: NONCE},
        home=directory.path,
        log_path=directory.log(1),
        lock_fd=lock_fd,
    )
    os.close(lock_fd)
    wait_until(lambda: directory.log(1).read_text().endswith("\n"), "its children")
    pids = [int(word) for word in directory.log(1).read_text().split()]
    yield made, pids
    made.send(signal.SIGKILL)
    wait_until(made.poll, "its end")
    made.close()
    for pid in pids:
        kill(pid)
        wait_for_end(pid)


def test_who_belongs_to_an_attempt_and_by_which_proof(
    directory: RunDirectory, family: tuple[child.Child, list[int]]
) -> None:
    made, (worker, bare_worker, daemon, bare_daemon) = family
    # While we keep its pid, its session proves as much as the nonce.
    kept = Tree(directory.trainer_lock, NONCE, made.pid, kept=True)
    assert set(kept.look()) == {
        Member(worker, ours=True, blocks=True),
        Member(bare_worker, ours=True, blocks=True),
        Member(daemon, ours=True, blocks=False),
    }
    # Afterwards the number of the session may be somebody else's.
    adopted = Tree(directory.trainer_lock, NONCE, made.pid)
    assert set(adopted.look()) == {
        Member(worker, ours=True, blocks=True),
        Member(bare_worker, ours=False, blocks=False),
        Member(daemon, ours=True, blocks=False),
    }
    adopted.signal(signal.SIGKILL)
    for pid in (worker, daemon):
        wait_for_end(pid)
    assert proc.start_ticks(bare_worker) is not None
    kept.signal(signal.SIGKILL)
    wait_for_end(bare_worker)
    assert proc.start_ticks(bare_daemon) is not None


@pytest.mark.fault("SV-33", phase="stopping", does="takes no such process for an ordinary answer")
def test_what_is_gone_is_as_good_as_signalled(
    directory: RunDirectory, family: tuple[child.Child, list[int]]
) -> None:
    """No such process at the time of the kill put an entry into a state without a way out
    (Supervisor #536, #445)."""
    made, pids = family
    tree = Tree(directory.trainer_lock, NONCE, made.pid, kept=True)
    for _ in range(2):
        tree.signal(signal.SIGKILL)
        for pid in pids[:3]:
            wait_for_end(pid)
    made.send(signal.SIGKILL)
    wait_until(made.poll, "its end")
    assert not made.send(signal.SIGKILL)
    made.close()
    with tree.proven(made.pid) as pidfd:
        assert pidfd is None
    assert tree.look() == ()


@pytest.mark.fault("SV-14", phase="running", does="binds no life to the thread that spawned it")
def test_a_child_outlives_the_thread_that_started_it(directory: RunDirectory) -> None:
    """A death signal for the end of the parent comes when the spawning thread ends (bubblewrap
    #692, python-prctl #14). No child of ours has asked for one."""
    made: list[child.Child] = []

    def start() -> None:
        lock_fd = take_trainer_lock(directory)
        assert lock_fd is not None
        made.append(
            child.spawn(
                (sys.executable, "-c", "print(input(), flush=True)"),
                environment=os.environ,
                home=directory.path,
                log_path=directory.log(1),
                lock_fd=lock_fd,
            )
        )
        os.close(lock_fd)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    wait_until(made[0].poll, "its own end")
    assert made[0].status() == (1, None)  # of its closed input, and not of a signal
    made[0].close()


def test_a_stray_is_given_its_time_and_then_killed(
    directory: RunDirectory, family: tuple[child.Child, list[int]]
) -> None:
    made, (worker, _, daemon, _) = family
    log = Log(directory.supervisor_log)
    tree = Tree(directory.trainer_lock, NONCE, made.pid, kept=True)
    held = strays.Strays(log)
    held.take(tree, tree.look(), kill_at=100.0)
    held.press(99.0)
    assert proc.start_ticks(daemon) is not None
    held.press(100.0)
    wait_for_end(daemon)
    held.press(101.0)
    assert proc.start_ticks(worker) is not None, "a death waits for this one; it is no stray"
    held.close()
    log.close()
    assert directory.supervisor_log.read_text().count("killed what an attempt left") == 1


def test_the_end_of_a_life_has_no_more_time_for_strays(
    directory: RunDirectory, family: tuple[child.Child, list[int]]
) -> None:
    made, (_, _, daemon, _) = family
    log = Log(directory.supervisor_log)
    tree = Tree(directory.trainer_lock, NONCE, made.pid, kept=True)
    held = strays.Strays(log)
    held.take(tree, tree.look(), kill_at=100.0)
    held.close()
    wait_for_end(daemon)
    log.close()


# --- orphans --------------------------------------------------------------------------------------

REAPS = """
import os, subprocess, sys
from supervisor import orphans
orphans.become_subreaper()
owned = orphans.Owned([sys.executable, "-S", "-c", "raise SystemExit(7)"])
os.waitid(os.P_PID, owned.pid, os.WEXITED | os.WNOWAIT)
assert orphans.reap() == (), "the status of an owned child is not ours to take"
assert owned.wait() == 7
middle = orphans.Owned(["/bin/sh", "-c", "sleep 0.1 & echo $!"], stdout=subprocess.PIPE)
orphan = int(middle.stdout.read())
assert middle.wait() == 0
while True:
    reaped = orphans.reap()
    if reaped:
        break
assert reaped == (orphan,), reaped
assert orphans.reap() == ()
"""


def test_an_owned_one_that_has_ended_hides_no_orphan() -> None:
    """The kernel shows the eldest first; one that its owner forgot hid every orphan after it."""
    owned = orphans.Owned(["/bin/true"])
    wait_for_end(owned.pid)
    later = [os.posix_spawn("/bin/true", ["true"], {}) for _ in range(3)]
    for pid in later:
        wait_for_end(pid)
    assert set(orphans.reap()) == set(later)
    assert owned.wait() == 0


def test_what_nobody_holds_any_more_is_an_orphan_like_any_other() -> None:
    dropped = orphans.Owned(["/bin/cat"], stdin=subprocess.PIPE)
    pid, end = dropped.pid, dropped.stdin
    assert end is not None
    del dropped
    assert orphans.reap() == ()
    end.close()
    wait_for_end(pid)
    assert orphans.reap() == (pid,)


def test_only_what_nobody_owns_is_reaped() -> None:
    done = subprocess.run([sys.executable, "-c", REAPS], timeout=DEADLINE_SECONDS, check=False)
    assert done.returncode == 0


# --- control groups -------------------------------------------------------------------------------


def fake_group(path: Path, *pids: int) -> Cgroup:
    path.mkdir(parents=True)
    (path / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    (path / "cgroup.kill").write_text("")
    return Cgroup(path)


def test_the_files_of_a_group(tmp_path: Path) -> None:
    group = fake_group(tmp_path / "attempt", 11, 0, 12)
    fake_group(tmp_path / "attempt" / "below", 13)
    assert group.members() == (11, 12, 13)
    assert group.procs == tmp_path / "attempt" / "cgroup.procs"
    assert group.kill()
    assert (tmp_path / "attempt" / "cgroup.kill").read_text() == "1"
    assert not group.remove(), "there is something in it"
    gone = Cgroup(tmp_path / "gone")
    assert (gone.members(), gone.kill(), gone.remove()) == ((), False, True)


MOUNTS = """
22 1 0:21 / /proc rw shared:1 - proc proc rw
30 1 0:26 {root} {point} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate
"""


@pytest.mark.parametrize(
    ("root", "inside", "found"),
    [
        ("/", "/user.slice/a.service", "user.slice/a.service"),
        ("/", "/", "."),
        ("/docker/0f", "/docker/0f/x", "x"),
        ("/docker/0f", "/elsewhere", None),
        ("/", None, None),
    ],
)
def test_where_a_process_is(
    root: str,
    inside: str | None,
    found: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(root=root, point=tmp_path / "a\\040b"))
    lines = "4:memory:/old\n" + (f"0::{inside}\n" if inside is not None else "")
    reads = Path.read_text

    def read_text(path: Path, *arguments: str, **options: str) -> str:
        own = str(path) == "/proc/77/cgroup"
        return lines if own else reads(path, *arguments, **options)

    monkeypatch.setattr(cgroup, "MOUNTS", str(mounts))
    monkeypatch.setattr(Path, "read_text", read_text)
    expected = None if found is None else Cgroup(tmp_path / "a b" / found)
    assert cgroup.of("77") == expected


def test_of_nobody_there_is_no_group() -> None:
    assert cgroup.of(2**22 - 3) is None


def delegated_in(path: Path, monkeypatch: pytest.MonkeyPatch) -> Cgroup | None:
    monkeypatch.setattr(cgroup, "of", lambda pid: Cgroup(path))
    return cgroup.delegated()


def test_only_what_was_given_to_us_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = fake_group(tmp_path / "unit")
    assert delegated_in(own.path, monkeypatch) == own, "the root of what a container sees"
    (own.path / "cgroup.events").write_text("populated 1\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert delegated_in(own.path, monkeypatch) == own, "that we can write is the permission"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert delegated_in(own.path, monkeypatch) is None, "root could write anywhere"
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"1")
    assert delegated_in(own.path, monkeypatch) == own, "a unit with Delegate=yes"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert delegated_in(own.path, monkeypatch) is None, "a mount that is read-only"


def test_a_group_that_could_not_be_killed_is_not_used(tmp_path: Path) -> None:
    assert cgroup.create(Cgroup(tmp_path), "attempt") is None  # no cgroup.kill: before 5.14
    assert not (tmp_path / "attempt").exists()
    assert cgroup.create(Cgroup(tmp_path / "gone"), "attempt") is None


def test_a_group_is_found_again_by_its_name(tmp_path: Path) -> None:
    made = fake_group(tmp_path / "attempt-1")
    assert cgroup.find(Cgroup(tmp_path), "attempt-1") == made
    assert cgroup.find(Cgroup(tmp_path), "attempt-1", os.getpid()) == made
    assert cgroup.find(Cgroup(tmp_path), "attempt-2") is None
    assert cgroup.find(None, "attempt-1") is None


def test_a_tree_with_a_group_has_all_that_is_in_it(
    tmp_path: Path, directory: RunDirectory, family: tuple[child.Child, list[int]]
) -> None:
    made, (_, _, _, bare_daemon) = family
    group = fake_group(tmp_path / "attempt", made.pid, bare_daemon)
    tree = Tree(directory.trainer_lock, NONCE, made.pid, kept=True, group=group)
    assert Member(bare_daemon, ours=True, blocks=True) in tree.look()
    tree.signal(signal.SIGTERM)
    assert (group.path / "cgroup.kill").read_text() == ""
    wait_for_end(bare_daemon)
    tree.signal(signal.SIGKILL)
    assert (group.path / "cgroup.kill").read_text() == "1"


# --- locks ----------------------------------------------------------------------------------------


def test_a_lock_is_found_where_the_list_of_the_kernel_is_no_answer(
    directory: RunDirectory, family: tuple[child.Child, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On overlayfs and btrfs the list names another device than stat; in a container it leaves out
    a lock whose taker has died. An empty list stands for both."""
    made, _ = family
    reads = Path.read_text

    def read_text(path: Path, *arguments: str, **options: str) -> str:
        return "" if str(path) == "/proc/locks" else reads(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert lock_holder(directory.trainer_lock) == made.pid
    directory.lock.touch()
    assert lock_holder(directory.lock) is None


def test_a_kernel_that_says_nothing_of_locks_gets_a_careful_answer(
    directory: RunDirectory, family: tuple[child.Child, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = family
    monkeypatch.setattr(proc, "_locks", lambda pid, fd, place: False)
    assert proc.lock_holders(directory.trainer_lock) == ()
    monkeypatch.setattr(proc, "_kernel_tells_of_locks", lambda: False)
    assert proc.lock_holders(directory.trainer_lock) == (made.pid,)


def test_it_is_seen_that_a_process_should_be_dead(tmp_path: Path) -> None:
    assert not proc.is_dying(os.getpid())
    assert not proc.is_dying(2**22 - 3)


@pytest.fixture
def attending(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Attendant]:
    """With a group of its own: the kernel's where we may make one, else files that look like it."""
    if "cgroup" not in MECHANISMS:
        monkeypatch.setattr(cgroup, "delegated", lambda: Cgroup(tmp_path))
        monkeypatch.setattr(cgroup, "create", lambda parent, name: fake_group(tmp_path / name))
    log = Log(directory.supervisor_log)
    made = Attendant(directory, log)
    yield made
    made.close()
    log.close()


def test_a_group_is_made_filled_killed_and_removed(
    directory: RunDirectory, attending: Attendant
) -> None:
    assert attending.containment == "cgroup"
    effect = ev.Spawn(1, NONCE, 0, 1)
    command = (sys.executable, "-c", SPAWNS)
    started = attending.spawn(effect, command, os.environ, directory.path)
    assert isinstance(started, ev.Spawned)
    wait_until(lambda: directory.log(1).read_text().endswith("\n"), "its children")
    pids = [int(word) for word in directory.log(1).read_text().split()]
    group = attending._tree.group
    assert group is not None
    assert group.path.name == attendant.group_name(NONCE)
    if "cgroup" in MECHANISMS:
        assert set(group.members()) == {started.pid, *pids}
    attending.kill()
    wait_until(attending.died, "its end")
    for pid in pids if "cgroup" in MECHANISMS else pids[:3]:
        wait_for_end(pid)  # also those that nothing else proves to be ours
    attending.begin_reaping()
    wait_until(lambda: attending.end_of_tree(100.0) == (), "an empty tree")
    assert attending.bury() == (None, signal.SIGKILL)
    if "cgroup" in MECHANISMS:
        assert not group.path.exists()
    else:
        assert (group.path / "cgroup.kill").read_text() == "1"
        assert group.procs.read_text() == "0\n"
        kill(pids[3])
        wait_for_end(pids[3])


def test_a_group_of_an_attempt_that_never_began_is_gone(
    directory: RunDirectory, attending: Attendant
) -> None:
    effect = ev.Spawn(1, NONCE, 0, 1)
    failed = attending.spawn(effect, ("true",), os.environ, directory.path / "nowhere")
    assert isinstance(failed, ev.SpawnFailed)
    parent = cgroup.delegated()
    assert parent is not None
    if "cgroup" in MECHANISMS:
        assert not (parent.path / attendant.group_name(NONCE)).exists()
