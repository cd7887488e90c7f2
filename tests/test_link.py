"""The trainer's side: receipts, requests, signals, and what happens while nobody listens."""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from runs_kit import wait_until

from supervisor import contract, link as link_module
from supervisor.contract import AuditLine, ContractError, Entry, ExitLine, Json
from supervisor.link import Life, Link, ReceiptNotWritten, life_from_environment
from supervisor.output import ForgivingFile
from supervisor.wire import FromOperator, FromTrainer, Wire

NONCE = "0123456789abcdef"


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path, 3, NONCE, 1, 40, supervised=True, lock_fd=0)


@pytest.fixture
def alone(life: Life) -> Iterator[Link]:
    """A link of a process that nobody supervises."""
    with Link(dataclasses.replace(life, supervised=False)) as link:
        yield link


class Server:
    """A supervisor reduced to its socket."""

    def __init__(self, directory: Path) -> None:
        self.fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.wire = Wire(self.fd)
        self.wire.expect(3, NONCE)

    def hear(self, link: Link, verb: str) -> Json:
        """The next message of this kind, while the trainer looks at its boundaries."""

        def found() -> Json | None:
            link.poll()
            for message in self.wire.receive():
                assert not isinstance(message, FromOperator)
                if message.verb == verb:
                    return message.content
            return None

        return wait_until(found, f"a message {verb}")

    def close(self) -> None:
        self.wire.close()
        os.close(self.fd)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.close()


@pytest.fixture
def linked(life: Life, server: Server) -> Iterator[Link]:
    """A link whose hello has been heard."""
    with Link(life) as link:
        link.hello(40, 6, "p")
        server.hear(link, "hello")
        yield link


def lines(link: Link) -> list[Json]:
    return [orjson.loads(line) for line in link.receipts_path.read_bytes().splitlines()]


# --- which life -----------------------------------------------------------------------------------

ENVIRONMENT = {
    contract.ENV_RUN_DIRECTORY: "/runs/a",
    contract.ENV_ATTEMPT: "3",
    contract.ENV_NONCE: NONCE,
    contract.ENV_EPOCH: "2",
    contract.ENV_RESUME_STEP: "40",
    contract.ENV_LOCK_FD: "7",
}


def test_a_life_comes_with_the_environment() -> None:
    assert life_from_environment(ENVIRONMENT) == Life(
        Path("/runs/a"), 3, NONCE, 2, 40, supervised=True, lock_fd=7
    )
    assert life_from_environment({"PATH": "/bin"}) is None


@pytest.mark.parametrize("name", sorted(ENVIRONMENT.keys() - {contract.ENV_ATTEMPT}))
def test_half_a_life_is_refused_by_name(name: str) -> None:
    for wrong in ({}, {name: ""}):
        broken = {key: value for key, value in ENVIRONMENT.items() if key != name} | wrong
        with pytest.raises(ContractError, match=name):
            life_from_environment(broken)


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(ContractError, match="expected a number, got 'x'"):
        life_from_environment(ENVIRONMENT | {contract.ENV_EPOCH: "x"})


# --- receipts -------------------------------------------------------------------------------------


def test_a_receipt_is_one_line_and_one_write(alone: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        written.append(bytes(data))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    alone.record(Entry(41, 2.5, attempt=3, epoch=1))
    alone.record(Entry(42, float("nan"), attempt=3, epoch=1))
    alone.record(AuditLine(42, 1.0, 3, 1, [{"prompt": "a\n", "text": "b\nc"}], {}))
    assert [data.count(b"\n") for data in written] == [1, 1, 1]
    assert all(data.endswith(b"\n") for data in written)
    assert b"".join(written) == alone.receipts_path.read_bytes()
    first, second, audit = lines(alone)
    assert (first["step"], second["loss"], audit["kind"]) == (41, "nan", "audit")


def test_disk_space_is_reserved_ahead_and_not_part_of_the_file(alone: Link) -> None:
    alone.record(Entry(41, 2.5))
    stat = alone.receipts_path.stat()
    assert stat.st_blocks * 512 >= 4 * 1024 * 1024
    assert stat.st_size < 100


def test_a_receipt_that_is_cut_goes_on_where_it_was_cut(
    alone: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:5]))
    alone.record(Entry(41, 2.5))
    alone.record(Entry(42, 2.5))
    assert [line["step"] for line in lines(alone)] == [41, 42]


def test_a_second_life_of_one_attempt_appends(life: Life) -> None:
    for step in (41, 42):
        with Link(dataclasses.replace(life, supervised=False)) as link:
            link.record(Entry(step, 1.0))
    assert [line["step"] for line in lines(link)] == [41, 42]


def test_the_exit_record_is_the_last_line_and_durable(
    alone: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        synced.append((name, alone.receipts_path.stat().st_size))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    alone.record(Entry(41, 2.5))
    alone.farewell("data", 41, 65, "the corpus has changed")
    parsed = contract.parse_receipt(alone.receipts_path.read_bytes().splitlines()[-1], "last")
    assert parsed == ExitLine("data", 41, 65, [], "the corpus has changed")
    size = alone.receipts_path.stat().st_size
    assert synced == [(contract.RECEIPTS, size), (alone.receipts_path.name, size)]


# --- a disk that refuses --------------------------------------------------------------------------


class Refusal:
    """Fails some of the calls of `os.write` on the receipts; before each, `then` may act."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: list[Callable[[], object]]) -> None:
        self.refused = 0
        self.then = then
        self._real = os.write
        monkeypatch.setattr(os, "write", self._write)
        monkeypatch.setattr(link_module, "RETRY_SECONDS", 0.01)

    def _write(self, descriptor: int, data: bytes) -> int:
        if not data.startswith(b"{") or not self.then:
            return self._real(descriptor, data)
        self.refused += 1
        self.then.pop(0)()
        raise OSError(errno.ENOSPC, "No space left on device")


def nothing() -> None:
    """What happens while the disk refuses."""


def test_a_receipt_that_the_disk_refuses_is_waited_for(
    linked: Link, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer neither loses the step nor makes another one."""
    refusal = Refusal(monkeypatch, [nothing] * 7)
    linked.record(Entry(41, 2.5))
    assert refusal.refused == 7
    assert [line["step"] for line in lines(linked)] == [40, 41]
    told = server.hear(linked, "unsaved")
    assert (told["step"], told["errno"], told["requests"]) == (41, errno.ENOSPC, [])
    assert "No space left" in told["why"]


def test_who_waits_to_record_still_hears_a_request_and_answers_it(
    linked: Link, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.wire.send_trainer("checkpoint", {"id": "c", "at": "boundary"})
    server.hear(linked, "seen")
    Refusal(monkeypatch, [nothing])
    linked.record(Entry(41, 2.5))
    assert server.hear(linked, "unsaved")["requests"] == ["c"]
    assert linked.due(cadence=True).requests == (), "it has failed, which was its answer"


def test_who_wants_to_stop_does_not_wait_for_ever(
    alone: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.install_signal_handlers()
    stop = functools.partial(signal.raise_signal, signal.SIGTERM)
    refusal = Refusal(monkeypatch, [nothing, nothing, stop, *[nothing] * 100])
    with pytest.raises(ReceiptNotWritten, match=r"receipt of step 41 .* No space left"):
        alone.record(Entry(41, 2.5))
    assert refusal.refused == 2 + link_module.LAST_TRIES
    with pytest.raises(OSError, match="No space left"):
        alone.farewell("checkpoint", 41, 74)
    assert refusal.refused == 2 + 2 * link_module.LAST_TRIES
    refusal.then.clear()
    alone.sync()
    assert [line.get("why", line["step"]) for line in lines(alone)] == [41, "checkpoint"]


def test_an_unreservable_disk_still_takes_receipts(
    alone: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reserve is for a full disk; that there is none must not be what ends a receipt."""
    asked = []

    def refuse(descriptor: int, offset: int, size_bytes: int) -> bool:
        asked.append(offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("supervisor.receipt_file.preallocate", refuse)
    for step in range(41, 45):
        alone.record(Entry(step, 2.5))
    assert [line["step"] for line in lines(alone)] == [41, 42, 43, 44]
    assert asked == [0], "a full disk is not asked at every step"
    monkeypatch.setattr("supervisor.receipt_file.RESERVE_AGAIN_SECONDS", 0.0)
    alone._receipts._reserve_at = 0.0
    alone.record(Entry(45, 2.5))
    alone.record(Entry(46, 2.5))
    assert len(asked) == 3


def test_the_reserve_is_renewed_before_it_is_used_up(
    alone: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.receipt_file.RESERVE_BYTES", 1000)
    asked: list[tuple[int, int]] = []

    def reserve(descriptor: int, offset: int, size_bytes: int) -> bool:
        asked.append((offset, size_bytes))
        return True

    monkeypatch.setattr("supervisor.receipt_file.preallocate", reserve)
    for step in range(100, 200):
        before = alone.receipts_path.stat().st_size if asked else 0
        alone.record(Entry(step, 2.5))
        assert asked[-1][0] + asked[-1][1] >= before + 1000
    assert len(asked) > 2


def test_what_a_failed_sync_may_have_lost_is_written_again(
    alone: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a lost write once; the next sync that succeeds proves nothing."""
    alone.record(Entry(41, 2.5))
    alone.sync()
    first = alone.receipts_path.read_bytes()
    alone.record(Entry(42, 2.5))
    written: list[tuple[bytes, int]] = []
    real = os.fsync

    def lose(descriptor: int) -> None:
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(os, "fsync", lose)
    with pytest.raises(OSError, match="lost"):
        alone.sync()
    monkeypatch.setattr(os, "fsync", real)
    pwrite = os.pwrite

    def note(descriptor: int, data: bytes, offset: int) -> int:
        written.append((bytes(data), offset))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", note)
    alone.record(Entry(43, 2.5))
    alone.sync()
    whole = alone.receipts_path.read_bytes()
    assert written == [(whole[len(first) :], len(first))]
    assert [line["step"] for line in lines(alone)] == [41, 42, 43]
    alone.sync()
    assert len(written) == 1


def test_a_save_that_fails_is_said_and_training_goes_on(
    linked: Link, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.wire.send_trainer("checkpoint", {"id": "c", "at": "now"})
    server.hear(linked, "seen")
    tries = []

    def write() -> str:
        tries.append(1)
        if len(tries) < 4:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return "saved"

    requests = linked.due(cadence=False).requests
    assert linked.save(write, 41, requests, must=False) is None
    told = server.hear(linked, "unsaved")
    assert (told["errno"], told["requests"]) == (errno.EDQUOT, ["c"])
    monkeypatch.setattr(link_module, "RETRY_SECONDS", 0.01)
    assert linked.save(write, 42, (), must=True) == "saved"
    assert len(tries) == 4


def test_a_failed_request_may_be_asked_again(linked: Link, server: Server) -> None:
    def write() -> str:
        raise OSError(errno.EIO, "Input/output error")

    for _ in range(2):
        server.wire.send_trainer("checkpoint", {"id": "c", "at": "now"})
        server.hear(linked, "seen")
        assert linked.save(write, 41, linked.due(cadence=False).requests, must=False) is None
        assert server.hear(linked, "unsaved")["requests"] == ["c"]


def test_a_save_that_failed_is_owed_at_a_later_boundary_until_one_succeeds(
    alone: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was tried again with the next cadence only, hours later; a SIGUSR1 was forgotten."""
    alone.install_signal_handlers()
    now = [100.0]
    monkeypatch.setattr("supervisor.link.time.monotonic", lambda: now[0])

    def fail() -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    signal.raise_signal(signal.SIGUSR1)
    for _ in range(2):
        assert alone.due(cadence=False).reason == "sigusr1"
        assert alone.save(fail, 41, (), must=False) is None
        now[0] += link_module.SAVE_AGAIN_SECONDS - 1
        assert alone.due(cadence=False).reason is None, "not every step tries"
        now[0] += 1
    assert alone.due(cadence=False).reason == "sigusr1"
    alone.saved(44, "d", "sigusr1", (), 0.5)
    assert alone.due(cadence=False).reason is None
    assert alone.due(cadence=True).reason == "cadence"
    assert alone.save(fail, 50, (), must=False) is None
    signal.raise_signal(signal.SIGUSR1)
    assert alone.due(cadence=False).reason == "sigusr1", "who asks anew is not made to wait"
    assert alone.save(fail, 51, (), must=False) is None
    now[0] += link_module.SAVE_AGAIN_SECONDS
    signal.raise_signal(signal.SIGTERM)
    due = alone.due(cadence=False)
    assert (due.reason, due.stop) == ("sigterm", True)


def test_an_owed_save_is_no_boundary_of_the_cadence(
    linked: Link, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(link_module, "SAVE_AGAIN_SECONDS", 0.0)
    assert linked.save(fail, 40, (), must=False) is None
    server.wire.send_trainer("pause", {"id": "p"})
    server.hear(linked, "seen")
    server.wire.send_trainer("checkpoint", {"id": "later", "at": "boundary"})
    server.hear(linked, "seen")
    assert linked.due(cadence=False) == link_module.Due("cadence", (), False, None)
    linked.saved(41, "d", "cadence", (), 0.5)
    assert linked.due(cadence=False).reason is None


def test_a_disk_that_is_full_is_told_of_once_in_the_log(
    alone: Link, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Refusal(monkeypatch, [nothing] * 50)
    alone.record(Entry(41, 2.5))
    assert capsys.readouterr().err.count("step 41 is not saved") == 1


def test_prints_that_the_disk_refuses_cost_their_line_and_not_the_training(
    life: Life, tmp_path: Path
) -> None:
    """Also at the interpreter's end, where a failing flush would make the status 120."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from supervisor.link import Life, Link\n"
        f"life = Life(Path({str(tmp_path)!r}), 3, 'n', 1, 0, supervised=False)\n"
        "with Link(life) as link:\n"
        "    link.forgive_output()\n"
        "    print('lost', flush=True)\n"
        "    sys.stderr.write('lost too')\n"
        "    print('and this', end='')\n"
    )
    command = [sys.executable, "-c", program]
    with open("/dev/full", "wb") as full:
        assert subprocess.run(command, stdout=full, stderr=full, timeout=30).returncode == 0
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout, done.stderr) == ("lost\nand this", "lost too")


def test_what_was_lost_is_counted_once_there_is_room(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    room = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    try:
        file = ForgivingFile(os.dup(full))
        assert file.write(b"12345\n") == 6
        assert file.write(b"678\n") == 4
        os.dup2(room, file.fileno())
        assert file.write(b"9\n") == 2
        assert file.write(b"10\n") == 3
        assert (tmp_path / "log").read_bytes() == b"(10 bytes before this were lost)\n9\n10\n"
    finally:
        for descriptor in (full, room, file.fileno()):
            os.close(descriptor)


# --- signals --------------------------------------------------------------------------------------


def dispositions() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]


@pytest.mark.fault(
    "FC-75", phase="stopping", does="puts the handlers of before back, after a failure too"
)
def test_fc75_handlers_are_back_after_return_and_after_failure(life: Life) -> None:
    """A handler that stayed installed after training swallowed a later SIGTERM
    (NVIDIA-NeMo/Megatron-Bridge PR 5975)."""
    before = dispositions()
    with Link(life) as link:
        assert link.install_signal_handlers() is None
        assert dispositions() != before
    assert dispositions() == before

    def fail() -> None:
        with Link(life) as link:
            link.install_signal_handlers()
            raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed"):
        fail()
    assert dispositions() == before


@pytest.mark.fault(
    "FC-76", phase="loading", does="takes requests by the link alone in a thread, and says so"
)
def test_fc76_a_thread_trains_without_handlers_and_says_so(linked: Link, server: Server) -> None:
    """Installing handlers from a thread that is not the main one failed
    (Lightning-AI/pytorch-lightning #3651)."""
    before = dispositions()
    said: list[str | None] = []
    trainer = threading.Thread(target=lambda: said.append(linked.install_signal_handlers()))
    trainer.start()
    trainer.join()
    assert said[0] is not None
    assert "requests arrive by the supervisor's link only" in said[0]
    assert dispositions() == before
    server.wire.send_trainer("stop", {"id": "s", "at": "now"})
    server.hear(linked, "seen")
    assert linked.due(cadence=False).stop


@pytest.mark.fault("SV-23", phase="running", does="notes a signal, and saves at the next boundary")
@pytest.mark.fault("FC-70", phase="running", does="does nothing in a handler but take a note")
def test_sigterm_stops_and_sigusr1_saves_at_the_next_boundary(alone: Link) -> None:
    alone.install_signal_handlers()
    assert not alone.stop_wanted()
    assert alone.due(cadence=False).reason is None
    signal.raise_signal(signal.SIGUSR1)
    due = alone.due(cadence=False)
    assert (due.reason, due.requests, due.stop) == ("sigusr1", (), False)
    assert alone.due(cadence=False).reason is None, "a request is served once"
    signal.raise_signal(signal.SIGTERM)
    assert alone.stop_wanted()
    due = alone.due(cadence=True)
    assert (due.reason, due.stop) == ("sigterm", True)


@pytest.mark.fault(
    "FC-69", phase="running", does="takes 10,000 signals while it prints, without an error"
)
def test_fc69_ten_thousand_signals_lose_nothing_and_raise_nothing(
    alone: Link, capfd: pytest.CaptureFixture[str]
) -> None:
    """Logging inside a handler raised re-entrant I/O errors
    (facebookincubator/submitit #1714)."""
    alone.install_signal_handlers()
    for number in range(10_000):
        signal.raise_signal(signal.SIGUSR1)
        if number % 100 == 0:
            print("a busy program prints", flush=True)
    assert alone.due(cadence=False).reason == "sigusr1"
    signal.raise_signal(signal.SIGTERM)
    assert alone.due(cadence=False).stop
    assert capfd.readouterr().err == ""


@pytest.mark.fault("SV-27", phase="running", does="takes no worker's SIGTERM for the trainer's")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 15), (signal.SIGUSR1, 0)])
def test_a_signal_to_a_forked_worker_is_not_one_to_the_trainer(
    alone: Link, number: signal.Signals, status: int
) -> None:
    """A worker's TERM looked like its parent's (ace PR 1425). It ends the worker, as it would end
    any process: one that only inherited a flag to set would never go."""
    alone.install_signal_handlers()
    pid = os.fork()
    if pid == 0:
        signal.raise_signal(number)
        os._exit(0 if not alone.stop_wanted() else 1)
    assert os.waitpid(pid, 0)[1] == status
    assert not alone.stop_wanted()
    assert alone.due(cadence=False).reason is None


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.fault(
    "SV-22", phase="running", does="acknowledges a request by its id before it serves it"
)
def test_requests_are_acknowledged_and_due_when_they_say(linked: Link, server: Server) -> None:
    server.wire.send_trainer("checkpoint", {"id": "later", "at": "boundary"})
    assert server.hear(linked, "seen")["id"] == "later"
    assert linked.due(cadence=False).reason is None
    server.wire.send_trainer("checkpoint", {"id": "now", "at": "now"})
    assert server.hear(linked, "seen")["id"] == "now"
    due = linked.due(cadence=False)
    assert (due.reason, due.requests, due.stop) == ("operator", ("now",), False)
    due = linked.due(cadence=True)
    assert (due.reason, set(due.requests)) == ("operator", {"later", "now"})
    linked.saved(50, "d", "operator", due.requests, 0.5)
    saved = server.hear(linked, "saved")
    assert (saved["step"], set(saved["requests"])) == (50, {"later", "now"})
    assert linked.due(cadence=True).reason == "cadence"
    assert linked.due(cadence=True).requests == ()


def test_a_frame_that_nobody_understands_is_told_and_dropped(
    linked: Link, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mistake of a supervisor, or a verb of a newer one, must not end a training."""
    server.wire.send_trainer("dance", {"id": "x"})
    server.wire.send_trainer("checkpoint", {"id": "now", "at": "some day"})
    server.wire.send_trainer("checkpoint", {"id": "after", "at": "now"})
    assert server.hear(linked, "seen")["id"] == "after"
    assert linked.due(cadence=False).requests == ("after",)
    told = capsys.readouterr().err
    assert "unknown verb 'dance'" in told
    assert "field at: expected one of ('now', 'boundary'), got 'some day'" in told


def test_a_stop_is_named_in_its_checkpoint_and_in_the_farewell(
    linked: Link, server: Server
) -> None:
    server.wire.send_trainer("stop", {"id": "s", "at": "now"})
    server.hear(linked, "seen")
    assert linked.stop_wanted()
    due = linked.due(cadence=False)
    assert (due.reason, due.requests, due.stop) == ("operator", ("s",), True)
    linked.saved(41, "d", "operator", due.requests, 0.5)
    linked.farewell("stopped", 41, 0)
    farewell = server.hear(linked, "farewell")
    assert (farewell["why"], farewell["step"]) == ("stopped", 41)
    assert lines(linked)[-1]["requests"] == ["s"]


def test_a_stop_at_a_boundary_waits_for_it(linked: Link, server: Server) -> None:
    server.wire.send_trainer("stop", {"id": "s", "at": "boundary"})
    server.hear(linked, "seen")
    assert not linked.stop_wanted()
    assert not linked.due(cadence=False).stop
    assert linked.due(cadence=True).stop


@pytest.mark.fault("SV-65", phase="adoption", does="answers a request again that it served before")
def test_a_request_that_was_served_is_answered_and_not_served_again(
    linked: Link, server: Server
) -> None:
    server.wire.send_trainer("checkpoint", {"id": "c", "at": "now"})
    server.hear(linked, "seen")
    linked.saved(41, "d", "operator", linked.due(cadence=False).requests, 0.5)
    first = server.hear(linked, "saved")
    # A supervisor that never heard of it, because the one before died, asks again.
    server.wire.send_trainer("checkpoint", {"id": "c", "at": "now"})
    assert server.hear(linked, "saved") == first
    assert linked.due(cadence=False).reason is None


def test_a_pause_waits_for_the_cadence_and_for_the_word_to_exit(
    linked: Link, server: Server
) -> None:
    server.wire.send_trainer("pause", {"id": "p"})
    server.hear(linked, "seen")
    assert linked.due(cadence=False).pause is None
    due = linked.due(cadence=True)
    assert (due.pause, due.reason, due.requests) == ("p", "pivot", ("p",))
    linked.paused(50, "p")
    server.hear(linked, "paused")
    assert linked.due(cadence=True).pause is None
    assert not linked.wait_for_exit(0.01), "nobody said so: it trains on"
    server.wire.send_trainer("exit", {})
    assert linked.wait_for_exit(30.0)
    assert linked.due(cadence=False).stop


def test_a_paused_trainer_hears_sigterm(alone: Link) -> None:
    alone.install_signal_handlers()
    signal.raise_signal(signal.SIGTERM)
    assert alone.wait_for_exit(30.0)


# --- nobody listens -------------------------------------------------------------------------------


def test_without_a_supervisor_nothing_waits_and_nothing_is_lost(life: Life) -> None:
    with Link(life) as link:
        link.hello(40, 6, "p")
        link.phase("step")
        for step in range(41, 61):
            link.record(Entry(step, 1.0, attempt=3, epoch=1))
            assert link.due(cadence=False).reason is None
        link.saved(60, "d", "cadence", (), 0.5)
        link.farewell("finished", 60, 0)
    assert [line.get("step") for line in lines(link)] == [40, *range(41, 61), 60]


def test_a_supervisor_that_comes_late_hears_the_hello_and_the_newest_checkpoint(
    life: Life, tmp_path: Path
) -> None:
    with Link(life) as link:
        link.hello(40, 6, "p")
        link.saved(50, "d", "cadence", (), 0.5)
        link.saved(60, "d", "cadence", (), 0.5)
        server = Server(tmp_path)
        heard: list[FromTrainer | FromOperator] = []

        def both() -> bool:
            link.poll()
            heard.extend(server.wire.receive())
            return len(heard) >= 2

        wait_until(both, "a hello and a checkpoint")
        assert [(m.verb, m.content["step"]) for m in heard] == [("hello", 40), ("saved", 60)]
        link.poll()
        assert not link._owed
        server.close()


def test_a_supervisor_that_is_replaced_asks_who_and_is_told(life: Life, tmp_path: Path) -> None:
    server = Server(tmp_path)
    with Link(life) as link:
        link.hello(40, 6, "p")
        server.hear(link, "hello")
        server.close()
        server = Server(tmp_path)

        def speaks() -> bool:
            link.phase("step")
            return bool(server.wire.receive())

        wait_until(speaks, "a word on the new connection")
        hello = server.hear(link, "hello")
        assert (hello["pid"], hello["step"]) == (os.getpid(), 40)
        server.close()


def test_a_run_directory_that_is_renamed_is_followed(life: Life, tmp_path: Path) -> None:
    directory = tmp_path / "before"
    directory.mkdir()
    with Link(dataclasses.replace(life, run_directory=directory)) as link:
        link.record(Entry(41, 1.0))
        moved = directory.rename(tmp_path / "after")
        assert link.directory.resolve() == moved
        link.sync()
        server = Server(moved)
        link.hello(40, 6, "p")
        server.hear(link, "hello")
        server.close()


def test_closing_twice_is_harmless(life: Life) -> None:
    link = Link(life)
    link.install_signal_handlers()
    link.close()
    link.close()
