"""The control plane under hostile and careless peers: real supervisors, real sockets.

What one peer does must cost the others nothing: not their replies, not the memory of the
supervisor, not the run.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from ledger_kit import holds
from runs_kit import DEADLINE_SECONDS, Run, wait_until
from zmtp import GREETING, Client, frame

from supervisor import client, contract, journal, wire
from supervisor.contract import Json
from supervisor.link import Life, Link
from supervisor.rundir import RunDirectory, RunError, lock_holder
from supervisor.wire import FromTrainer, Wire

CLIENTS = 1_000
FILES_NEEDED = 4_096
STATUS = contract.encode_message("status", id="s")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        yield made


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process has a descriptor for each client, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(FILES_NEEDED, hard)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_kilobytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError(f"process {pid} has no memory")


def reply(data: bytes) -> Json:
    return contract.parse_message(data, contract.ANSWER, "reply")[1]


def assert_complete(run: Run, steps: int = 30) -> None:
    assert run.steps() == list(range(1, steps + 1))
    bound = [record for record in run.records("checkpoint_committed") if record["ledger_entries"]]
    for record in bound:
        count, sha256 = record["ledger_entries"], record["ledger_sha256"]
        assert holds(run.ledger_path, count, sha256)
    assert len(bound) >= steps // 10


# --- who may reach a socket -----------------------------------------------------------------------


@pytest.mark.fault("SV-66", phase="starting", does="refuses a socket directory others may enter")
@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_a_socket_directory_that_others_may_enter_is_refused(run: Run, mode: int) -> None:
    """Permissions that were set after the bind left a moment in which anybody could connect
    (twisted #11389)."""
    sockets = run.directory / contract.SOCKETS
    sockets.mkdir(parents=True)
    sockets.chmod(mode)
    assert run.finish() == contract.ExitCode.USAGE
    assert f"mode {mode:04o}" in run.output()
    assert "Remove it and start again" in run.output()
    assert list(sockets.iterdir()) == []
    sockets.rmdir()
    assert run.finish() == 0


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.mark.fault("SV-66", phase="starting", does="refuses a socket directory of another user")
def test_a_socket_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / contract.SOCKETS).mkdir(mode=0o700)
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with opened(tmp_path) as fd, pytest.raises(RunError, match=f"belongs to user {stranger}"):
        Wire(fd)


def test_a_link_in_place_of_the_socket_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / contract.SOCKETS).symlink_to("elsewhere")
    with opened(tmp_path) as fd, pytest.raises(RunError, match="expected a directory"):
        Wire(fd)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.fault("SV-66", phase="starting", does="binds under a mask that leaves others out")
def test_a_socket_is_for_its_owner_from_its_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever mask the supervisor was started under."""
    modes = []
    bind = zmq.Socket.bind

    def looked_at(self: zmq.Socket[bytes], address: str) -> object:
        made = bind(self, address)
        modes.append(os.stat(address.removeprefix("ipc://")).st_mode & 0o777)
        return made

    monkeypatch.setattr(zmq.Socket, "bind", looked_at)
    before = os.umask(0)
    try:
        with opened(tmp_path) as fd:
            Wire(fd).close()
        assert os.umask(0) == 0, "and it is put back"
    finally:
        os.umask(before)
    assert modes == [0o700, 0o700]


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_run_directory_that_others_may_write_in_is_refused(tmp_path: Path, mode: int) -> None:
    """They could put a socket directory of theirs into the place of ours."""
    directory = RunDirectory(tmp_path / "run", "run")
    directory.path.mkdir()
    directory.path.chmod(mode)
    with pytest.raises(RunError, match=rf"mode {mode:04o}.*chmod go-w"):
        directory.create()
    directory.path.chmod(0o755)
    directory.create()


@pytest.mark.fault("SV-68", phase="running", does="listens on no port")
def test_a_supervisor_listens_on_no_port(run: Run) -> None:
    """A port that was picked and let go again was somebody else's a moment later
    (jupyter_client #276). Sockets of a file system have no such moment, and no network."""
    supervisor = run.hold(3)
    links = [
        os.readlink(path)
        for path in Path(f"/proc/{supervisor.pid}/fd").iterdir()
        if path.is_symlink()
    ]
    ours = {link.removeprefix("socket:[").rstrip("]") for link in links if "socket:[" in link}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        path = Path(f"/proc/{supervisor.pid}/net/{table}")
        rows = path.read_text().splitlines()[1:] if path.exists() else []
        assert not ours & {row.split()[9] for row in rows}


# --- socket files that go away --------------------------------------------------------------------


def answers(run: Run) -> bool:
    with contextlib.suppress(client.DeadlinePassed):
        id = client.new_request_id()
        return bool(client.ask(run.directory, "status", id=id, timeout_seconds=0.5).result)
    return False


@pytest.mark.fault("SV-57", phase="running", does="binds a socket file again that was removed")
@pytest.mark.parametrize("what", ["files", "directory"])
def test_sockets_that_a_cleaner_removed_come_back(run: Run, what: str) -> None:
    """The socket file was removed under a living daemon, which nobody could reach any more
    (Supervisor #480, #1723)."""
    supervisor = run.hold(12)
    sockets = run.directory / contract.SOCKETS
    for name in (contract.OPERATOR_SOCKET, contract.TRAINER_SOCKET):
        (sockets / name).unlink()
    if what == "directory":
        sockets.rmdir()
    wait_until(lambda: answers(run), "an answer", looks=60)
    assert sockets.stat().st_mode & 0o777 == 0o700
    assert run.ask("checkpoint", at="now").result["step"] == 12, "the old link still carries"
    assert run.ask("restart").outcome == "done", "and a new trainer finds the new socket"
    assert run.status()["alarms"] == []
    run.open_gate()
    assert run.end(supervisor) == 0
    assert_complete(run)


def bound_again(made: Wire, path: Path) -> bool:
    assert made.look_after() == ""
    return path.is_socket()


def test_a_socket_that_was_replaced_is_taken_back_and_nothing_leaks(tmp_path: Path) -> None:
    with opened(tmp_path) as fd, contextlib.closing(Wire(fd)) as made:
        path = tmp_path / contract.SOCKETS / contract.OPERATOR_SOCKET
        numbers = set()
        for _ in range(20):
            path.unlink()
            path.touch()
            wait_until(lambda: bound_again(made, path), "a socket")
            numbers.add(descriptors(os.getpid()))
        assert max(numbers) - min(numbers) <= 1


def test_sockets_that_cannot_come_back_are_an_alarm_and_not_an_end(run: Run) -> None:
    supervisor = run.hold(12)
    sockets = run.directory / contract.SOCKETS
    sockets.rename(run.directory / "away")
    sockets.touch()
    alarm = run.wait_for_record("alarmed", name="sockets")
    assert "socket operator is away and cannot be made again" in alarm["detail"]
    sockets.unlink()
    run.wait_for_record("alarm_cleared", name="sockets")
    wait_until(lambda: answers(run), "an answer", looks=60)
    run.open_gate()
    assert run.end(supervisor) == 0
    assert_complete(run)


# --- how many, and how careless -------------------------------------------------------------------


@pytest.mark.fault("SV-53", phase="running", does="serves and restarts beyond descriptor 1023")
def test_a_thousand_clients_at_once_are_served_and_forgotten(run: Run, many_files: None) -> None:
    """A daemon that called select() died when it had more than 1023 descriptors (Supervisor #26,
    #489)."""
    supervisor = run.hold(12)
    before = descriptors(supervisor.pid)
    with contextlib.ExitStack() as connections:
        crowd = [connections.enter_context(Client(run.directory)) for _ in range(CLIENTS)]
        for number, one in enumerate(crowd):
            one.greet().send(contract.encode_message("status", id=f"s{number}"))
        for number, one in enumerate(crowd):
            answer = reply(one.receive())
            assert (answer["id"], answer["outcome"]) == (f"s{number}", "done")
        assert descriptors(supervisor.pid) >= CLIENTS
        assert run.ask("restart").outcome == "done"
    wait_until(lambda: descriptors(supervisor.pid) <= before + 2, "as few descriptors as before")
    run.open_gate()
    assert run.end(supervisor) == 0
    assert_complete(run)


def test_a_client_that_never_reads_costs_little_and_nobody_else_anything(run: Run) -> None:
    supervisor = run.hold(12)
    with Client(run.directory) as deaf:
        deaf.greet()
        run.status()
        before = memory_kilobytes(supervisor.pid)
        for number in range(30):
            requests = (contract.encode_message("status", id=f"{number}-{n}") for n in range(100))
            deaf.socket.sendall(b"".join(map(frame, requests)))
            assert run.status()["phase"] == "running"
        wait_until(lambda: run.status()["control"]["messages_unheard"] > 1_000, "lost replies")
        assert memory_kilobytes(supervisor.pid) - before < 32 * 1024
    assert run.ask("checkpoint", at="now").result["step"] == 12


def test_clients_that_stop_in_the_middle_disturb_nobody(run: Run) -> None:
    """Before a word, in the greeting, in a frame, after a request: each of them dies or stays."""
    supervisor = run.hold(12)
    before = descriptors(supervisor.pid)
    request = frame(contract.encode_message("checkpoint", id="c", at="boundary"))
    with contextlib.ExitStack() as connections:
        for stay in (True, False):
            for said in (
                b"",
                GREETING[:1],
                GREETING[:30],
                GREETING,
                b"\0" * 100,
                b"GET / \r\n",
            ):
                for _ in range(10):
                    one = Client(run.directory)
                    one.socket.sendall(said)
                    connections.enter_context(one) if stay else one.close()
            for size in (1, len(request) // 2, len(request)):
                one = Client(run.directory).greet()
                one.socket.sendall(request[:size])
                connections.enter_context(one) if stay else one.close()
        assert run.status()["phase"] == "running"
        assert run.ask("checkpoint", at="now").result["step"] == 12
    wait_until(lambda: descriptors(supervisor.pid) <= before + 2, "as few descriptors as before")
    run.open_gate()
    assert run.end(supervisor) == 0
    assert_complete(run)


def test_a_reply_that_is_too_large_for_a_message_says_so(tmp_path: Path) -> None:
    """The client would take it for a broken connection and wait for another."""
    with opened(tmp_path) as fd, contextlib.closing(Wire(fd)) as made, Client(tmp_path) as asking:
        asking.greet().send(STATUS)
        wait_until(made.receive, "the request")
        made.reply("s", "done", "", {"text": "x" * contract.MESSAGE_BYTES_MAX})
        answer = reply(asking.receive())
    assert (answer["id"], answer["outcome"], answer["result"]) == ("s", "refused", {})
    assert "more than a message may have" in answer["why"]


@pytest.mark.fault("SV-60", phase="stopping", does="ends although its peers do not read")
def test_a_supervisor_ends_although_its_clients_do_not_read(run: Run) -> None:
    """The end of a process hung in the end of its messaging context (pyzmq #102)."""
    supervisor = run.hold(12)
    with contextlib.ExitStack() as connections:
        for said in (b"", GREETING, GREETING[:20]):
            connections.enter_context(Client(run.directory)).socket.sendall(said)
        deaf = connections.enter_context(Client(run.directory)).greet()
        requests = (contract.encode_message("status", id=f"s{n}") for n in range(500))
        deaf.socket.sendall(b"".join(map(frame, requests)))
        assert run.ask("stop").result["phase"] == "stopped"
        assert run.end(supervisor) == 0


@pytest.mark.fault("SV-62", phase="running", does="counts replies that nobody waits for any more")
def test_a_late_reply_is_counted_and_can_be_asked_for_again(run: Run) -> None:
    """Replies to a client that had gone vanished without a trace (libzmq #4503)."""
    run.hold(12)
    with pytest.raises(client.DeadlinePassed) as passed:
        client.ask(run.directory, "checkpoint", id="late", timeout_seconds=0.3, at="boundary")
    assert passed.value.id == "late"
    assert "--request-id late" in str(passed.value)
    run.gate(25)
    run.wait_for_record("replied", id="late")
    wait_until(lambda: run.status()["control"]["messages_unheard"] >= 1, "a lost reply")
    assert run.ask("checkpoint", "late", at="boundary").result["step"] == 20


# --- failures that are told apart -----------------------------------------------------------------


@pytest.mark.fault("SV-64", phase="any", does="tells four failures of a request apart")
@pytest.mark.fault("SV-65", phase="any", does="gives the same id the same reply, in any life")
def test_four_failures_are_told_apart(run: Run) -> None:
    """All that a client ever said was that it had timed out (circus #135, #725); a command that was
    sent again after that ran twice (prime-agent #821)."""
    run.faults = "deaf@12#1"
    supervisor = run.start()
    run.wait_for_status(phase="running")
    refused = run.ask("pin", "p", step=11, why="fork")
    assert (refused.outcome, "no checkpoint of step 11" in refused.why) == ("refused", True)
    with pytest.raises(client.DeadlinePassed, match="--request-id s"):
        client.ask(run.directory, "stop", id="s", timeout_seconds=0.3)
    busy = run.ask("restart", "r")
    assert (busy.outcome, busy.why) == ("busy", "a stop is under way")
    done = run.supervisor("restart", str(run.directory), "--timeout", "5")
    assert (done.returncode, "busy: a stop is under way" in done.stderr) == (1, True)
    os.kill(run.status()["trainer_pid"], signal.SIGKILL)
    assert run.end(supervisor) == 0
    with pytest.raises(client.NoSupervisor, match="no supervisor is running"):
        run.ask("status")
    # Another life gives the same answers under the same ids.
    run.faults = ""
    run.hold(20)
    assert run.ask("pin", "p", step=11, why="fork") == refused
    assert run.ask("restart", "r") == busy
    assert run.ask("stop", "s").result["phase"] == "stopped"
    assert run.status()["phase"] == "running", "the stop of the life before is not done again"


def test_a_last_reply_is_heard_although_its_sender_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop that took as long as the client waits between two looks was done, and its client said
    that there was no supervisor: the reply had come, and the lock was free by then."""
    (tmp_path / contract.SOCKETS).mkdir()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as supervisor:
        supervisor.bind(f"ipc://{tmp_path}/{contract.SOCKETS}/{contract.OPERATOR_SOCKET}")
        looks: list[str] = []

        def look(path: Path) -> int | None:
            looks.append(path.name)
            if len(looks) == 1:
                return os.getpid()
            if len(looks) == 2:
                peer, _ = supervisor.recv_multipart()
                result: Json = {"phase": "stopped"}
                supervisor.send_multipart(
                    [peer, contract.encode_message("reply", id="s", outcome="done", result=result)]
                )
            return None

        monkeypatch.setattr(client, "lock_holder", look)
        answer = client.ask(tmp_path, "stop", id="s", timeout_seconds=DEADLINE_SECONDS)
        assert (answer.outcome, answer.result, len(looks)) == ("done", {"phase": "stopped"}, 2)
        # The third look and those after it find nobody, and nobody replies.
        with pytest.raises(client.NoSupervisor):
            client.ask(tmp_path, "stop", id="t", timeout_seconds=DEADLINE_SECONDS)
        supervisor.close(linger=0)


def test_an_id_of_another_verb_is_refused_in_words(run: Run) -> None:
    """A stop that got the answer of a checkpoint was taken for done."""
    supervisor = run.hold(12)
    place = (str(run.directory), "--request-id", "mine")
    assert run.supervisor("checkpoint", *place).returncode == 0
    policy = run.home / "policy.toml"
    policy.write_text("[training]\nwarmup_steps = 9\n")
    for command in (["stop"], ["restart"], ["pivot", "--policy", str(policy)]):
        done = run.supervisor(command[0], *place, *command[1:])
        assert done.returncode == 1
        assert done.stderr.endswith("refused: this id is that of a checkpoint that was answered\n")
    run.open_gate()
    assert run.end(supervisor) == 0
    done = run.supervisor("pivot", *place, "--policy", str(policy))
    assert (done.returncode, "that of a checkpoint" in done.stderr) == (1, True)


@pytest.mark.fault("SV-59", phase="any", does="says no supervisor as soon as the lock is free")
def test_who_waits_is_told_when_the_supervisor_dies(run: Run) -> None:
    """A request socket waited for ever for a server that had died (libzmq #1227)."""
    supervisor = run.hold(12)
    waiting = subprocess.Popen(
        run.command("checkpoint", str(run.directory), "--at", "boundary", "--request-id", "w"),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=run.variables(),
        text=True,
    )
    log = run.directory / "logs" / "attempt-0001.log"
    assert log.exists()
    wait_until(lambda: descriptors_of_operator(run, supervisor.pid) > 0, "a client")
    run.kill_supervisor(supervisor)
    _, told = waiting.communicate(timeout=DEADLINE_SECONDS)
    assert waiting.returncode == 1
    assert "no supervisor is running" in told


def descriptors_of_operator(run: Run, pid: int) -> int:
    """Connections to the operator's socket, as the kernel lists them."""
    rows = Path(f"/proc/{pid}/net/unix").read_text().splitlines()
    name = f"/{contract.SOCKETS}/{contract.OPERATOR_SOCKET}"
    return sum(row.endswith(name) and row.split()[5] == "03" for row in rows)


@pytest.mark.fault("SV-64", phase="running", does="answers what it does not understand")
def test_a_newer_or_unknown_request_is_refused_in_words(run: Run) -> None:
    run.hold(3)
    newer = b'{"version": 2, "verb": "status", "id": "n"}'
    with Client(run.directory) as speaker:
        speaker.greet()
        for request, words in (
            (newer, "this side speaks 1"),
            (contract.encode_message("dance", id="d"), "unknown verb 'dance'"),
            (contract.encode_message("checkpoint", id="x" * 200, at="now"), "1 to 128 characters"),
            (contract.encode_message("pin", id="p", step=-1, why=""), "at least 0"),
        ):
            speaker.send(request)
            answer = reply(speaker.receive())
            assert answer["outcome"] == "refused"
            assert words in answer["why"]
        speaker.send(STATUS)
        assert reply(speaker.receive())["outcome"] == "done"
    assert run.records("replied") == []


@pytest.mark.fault("SV-56", phase="running", does="refuses a second supervisor before it binds")
@pytest.mark.fault("SV-70", phase="running", does="keeps the lock file of the first")
def test_a_second_supervisor_takes_nothing_from_the_first(run: Run) -> None:
    """A second bind took the socket over without a word (libzmq #2059); a second start deleted the
    pid file of the first (Supervisor #878)."""
    first = run.hold(12)
    lock = run.directory / contract.LOCK_FILE
    sockets = run.directory / contract.SOCKETS
    before = lock.read_bytes(), sorted(path.stat().st_ino for path in sockets.iterdir())
    assert run.finish() == contract.ExitCode.USAGE
    assert f"already supervised by process {first.pid}" in run.output()
    assert before == (lock.read_bytes(), sorted(path.stat().st_ino for path in sockets.iterdir()))
    assert run.status()["supervisor_pid"] == first.pid


@pytest.mark.fault("SV-73", phase="adoption", does="leaves the lock with nobody but itself")
def test_a_trainer_does_not_keep_the_lock_of_its_supervisor(run: Run) -> None:
    """A lock that a child had inherited blocked the next start, and named a dead process
    (KiroCrew PR 810)."""
    supervisor = run.hold(12)
    trainer = run.status()["trainer_pid"]
    lock = run.directory / contract.LOCK_FILE
    assert lock_holder(lock) == supervisor.pid
    run.kill_supervisor(supervisor)
    os.kill(trainer, 0)
    assert lock_holder(lock) is None
    second = run.start()
    wait_until(lambda: lock_holder(lock) == second.pid, "the next owner")
    run.open_gate()
    assert run.end(second) == 0
    assert_complete(run)


# --- events ---------------------------------------------------------------------------------------


@pytest.mark.fault("SV-61", phase="any", does="numbers its events in a file that misses none")
def test_whoever_comes_late_to_the_events_has_missed_none(run: Run) -> None:
    """The first messages of a subscription were lost, and later ones at a full queue (libzmq #2267,
    #4394). There is no subscription here: events are the journal's lines, which are numbered."""
    run.set("checkpoint", every=2)
    seen: list[list[Json]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            with contextlib.suppress(FileNotFoundError):
                seen.append(journal.read(run.directory / contract.JOURNAL_FILE)[0])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert run.finish() == 0
    finally:
        over.set()
        watcher.join()
    final = run.records()
    for records in seen:
        assert [record["seq"] for record in records] == list(range(1, len(records) + 1))
        assert records == final[: len(records)]
    assert len({len(records) for records in seen}) > 2, "it was looked at while it grew"


# --- a trainer that says wrong things -------------------------------------------------------------


class FakeTrainer:
    """Another process on the trainer's socket. It may know the nonce, and lies."""

    def __init__(self, run: Run, nonce: str) -> None:
        self.life: Json = {"attempt": 1, "nonce": nonce}
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.fd = os.open(run.directory, os.O_RDONLY | os.O_DIRECTORY)
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(
            f"ipc:///proc/self/fd/{self.fd}/{contract.SOCKETS}/{contract.TRAINER_SOCKET}"
        )

    def say(self, verb: str, **content: object) -> None:
        self.socket.send(contract.encode_message(verb, **{**self.life, **content}))

    def babble(self) -> None:
        """Stale, early, late, doubled, out of order, beyond all bounds, and no message at all."""
        hello: Json = {"pid": 1, "parameters": 6, "policy_digest": "", "capabilities": []}
        saved: Json = {"digest": "", "reason": "operator", "requests": ["x"], "seconds": 0.1}
        self.say("farewell", why="finished", step=30)
        self.say("paused", step=20, id="nobody")
        for step in (29, 3, 2**31 - 1, -1, 2**40):
            self.say("hello", step=step, **hello)
            self.say("step", step=step, loss=1.0)
            self.say("step", step=step, loss=1.0)
        self.say("saved", step=-5, **saved)
        self.say("saved", step=2**40, **saved)
        self.say("saved", step=20, **{**saved, "requests": [{"id": 1}]})
        for _ in range(3):
            self.say("saved", step=20, **saved)
        self.say("seen", id="stop-1")
        self.say("phase", phase="p" * 300)
        self.say("hello", step=1, attempt=99, **hello)
        for garbage in (b"", b"\xff", b"[" * 50_000, b"null", contract.encode_message("dance")):
            self.socket.send(garbage)
        self.socket.send_multipart([b"two", b"frames"])

    def shout(self) -> None:
        self.socket.send(b"x" * (contract.MESSAGE_BYTES_MAX + 1))

    def close(self) -> None:
        self.socket.close(linger=2000)
        self.context.term()
        os.close(self.fd)


@pytest.mark.parametrize("knows", [True, False], ids=["right nonce", "wrong nonce"])
def test_whatever_a_trainer_says_the_history_is_what_it_did(run: Run, knows: bool) -> None:
    """A checkpoint that was announced and is not there is set aside by the read-back, and the run
    ends as if nobody had said anything."""
    supervisor = run.hold(12)
    nonce = run.records("attempt_started")[0]["nonce"] if knows else "f" * 16
    liar = FakeTrainer(run, nonce)
    try:
        liar.babble()
        liar.shout()
        refused = 6 + (5 + 5 if knows else 20)
        wait_until(lambda: run.status()["control"]["frames_refused"] >= refused, "the refusals")
    finally:
        liar.close()
    status = run.status()
    assert (status["phase"], status["attempt"], status["wish"]) == ("running", 1, "run")
    if knows:
        run.wait_for_record("checkpoint_quarantined", step=20)
    else:
        assert [one["step"] for one in run.records("checkpoint_committed")] == [10]
    run.open_gate()
    assert run.end(supervisor) == 0
    assert_complete(run)
    assert run.checkpoints() == [10, 20, 30]
    assert run.file_status()["restarts"] == 0


@pytest.mark.fault("FC-68", phase="running", does="is asked by message, without any signal")
def test_requests_need_no_signal(run: Run) -> None:
    """Libraries own the user signals: a tool that moved to another one broke the next
    (submitit PR 1697, Lightning #14610)."""
    run.faults = "unsignalled@hello"
    supervisor = run.hold(12)
    trainer = run.status()["trainer_pid"]
    ignored = next(
        line
        for line in Path(f"/proc/{trainer}/status").read_text().splitlines()
        if line.startswith("SigIgn:")
    )
    mask = int(ignored.split()[1], 16)
    assert all(mask >> (number - 1) & 1 for number in (signal.SIGTERM, signal.SIGUSR1))
    assert run.ask("checkpoint", at="now").result["step"] == 12
    assert run.ask("restart").result["attempt"] == 2
    run.gate(15)
    run.wait_for_status(step=15)
    stopped = run.ask("stop").result
    assert (stopped["phase"], stopped["step"]) == ("stopped", 15)
    assert run.end(supervisor) == 0


# --- a link in a process that was forked ----------------------------------------------------------


@pytest.mark.fault("SV-63", phase="running", does="is silent in a forked child of the trainer")
def test_a_forked_child_says_nothing_on_the_link_and_writes_no_receipt(tmp_path: Path) -> None:
    """A socket that was inherited across a fork misbehaved in both processes (pyzmq #983)."""
    with opened(tmp_path) as fd, contextlib.closing(Wire(fd)) as made:
        made.expect(3, "n")
        with Link(Life(tmp_path, 3, "n", 1, 0, supervised=True, lock_fd=0)) as link:
            link.hello(0, 6, "p")
            wait_until(lambda: heard_by(made, link), "the hello")
            before = link.receipts_path.read_bytes()
            pid = os.fork()
            if pid == 0:
                os._exit(child_of_trainer(link))
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert link.receipts_path.read_bytes() == before
            link.phase("save")
            heard = wait_until(made.receive, "the parent")
    assert [message.verb for message in heard] == ["phase"]
    assert isinstance(heard[0], FromTrainer)


def heard_by(made: Wire, link: Link) -> object:
    link.poll()
    return made.receive()


def child_of_trainer(link: Link) -> int:
    """0 where nothing of the link works here."""
    link.phase("evaluate")
    link.poll()
    try:
        link.record(contract.Entry(1, 2.0))
    except RuntimeError:
        return 0
    return 1


def test_the_queue_for_one_peer_is_short() -> None:
    """What waits for a peer, at most: this many messages of the largest size, in each direction."""
    assert wire.FRAMES_QUEUED_MAX * contract.MESSAGE_BYTES_MAX <= 32 * 1024 * 1024
