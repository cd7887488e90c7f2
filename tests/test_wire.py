"""The two sockets: who is heard, who is answered, and what is refused without a word."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from runs_kit import wait_until

from supervisor import contract, wire
from supervisor.contract import Json
from supervisor.wire import FromOperator, FromTrainer, Wire

NONCE = "0123456789abcdef"
LIFE: Json = {"attempt": 3, "nonce": NONCE}
HELLO: Json = {"pid": 1, "step": 40, "parameters": 6, "policy_digest": "p", "capabilities": []}


class Ends:
    """A server and the clients of one test, all through one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.wire = Wire(self.fd)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.peers: list[zmq.Socket[bytes]] = []

    def peer(self, name: str) -> zmq.Socket[bytes]:
        made = self.context.socket(zmq.DEALER)
        made.set(zmq.LINGER, 0)
        made.connect(f"ipc:///proc/self/fd/{self.fd}/{contract.SOCKETS}/{name}")
        self.peers.append(made)
        return made

    def trainer(self) -> zmq.Socket[bytes]:
        return self.peer(contract.TRAINER_SOCKET)

    def operator(self) -> zmq.Socket[bytes]:
        return self.peer(contract.OPERATOR_SOCKET)

    def hear(self) -> list[FromTrainer | FromOperator]:
        """What arrives next, as soon as something does."""
        return wait_until(self.wire.receive, "a message")

    def refusals(self, count: int) -> None:
        def all_refused() -> bool:
            assert self.wire.receive() == []
            return self.wire.refused >= count

        wait_until(all_refused, f"{count} refusals")

    def close(self) -> None:
        for peer in self.peers:
            peer.close(linger=0)
        self.context.term()
        self.wire.close()
        os.close(self.fd)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    made.close()


def up(verb: str, **content: object) -> bytes:
    return contract.encode_message(verb, **{**LIFE, **content})


def down(peer: zmq.Socket[bytes]) -> tuple[str, Json]:
    assert peer.poll(5000), "nothing came"
    return contract.parse_message(peer.recv(), contract.DOWN, "down")


def reply(peer: zmq.Socket[bytes]) -> Json:
    assert peer.poll(5000), "nothing came"
    return contract.parse_message(peer.recv(), contract.ANSWER, "reply")[1]


# --- the trainer's link ---------------------------------------------------------------------------


def test_a_trainer_that_says_hello_is_heard_and_answered(ends: Ends) -> None:
    ends.wire.expect(3, NONCE)
    trainer = ends.trainer()
    assert not ends.wire.send_trainer("exit", {}), "there is nobody yet"
    trainer.send(up("hello", **HELLO))
    assert ends.hear() == [FromTrainer("hello", LIFE | HELLO)]
    assert ends.wire.send_trainer("checkpoint", {"id": "c", "at": "now"})
    assert down(trainer) == ("checkpoint", {"id": "c", "at": "now"})


@pytest.mark.parametrize("life", [{"attempt": 2}, {"nonce": "f" * 16}, {"nonce": ""}])
def test_an_earlier_life_is_not_heard(ends: Ends, life: Json) -> None:
    ends.wire.expect(3, NONCE)
    stale = ends.trainer()
    stale.send(up("hello", **{**HELLO, **life}))
    stale.send(up("saved", step=9, digest="", reason="cadence", requests=[], seconds=0.1, **life))
    ends.refusals(2)
    assert not ends.wire.send_trainer("exit", {})


def test_nobody_is_heard_while_nobody_is_expected(ends: Ends) -> None:
    ends.trainer().send(up("hello", **HELLO))
    ends.refusals(1)


def test_a_new_attempt_fences_off_the_one_before(ends: Ends) -> None:
    ends.wire.expect(3, NONCE)
    trainer = ends.trainer()
    trainer.send(up("hello", **HELLO))
    ends.hear()
    ends.wire.expect(4, "f" * 16)
    assert not ends.wire.send_trainer("exit", {})
    trainer.send(up("step", step=41, loss=1.0))
    ends.refusals(1)


def test_whoever_speaks_first_without_a_hello_is_asked_who(ends: Ends) -> None:
    # Our trainer from before we were started: its word counts, and it is asked for its hello once.
    ends.wire.expect(3, NONCE)
    trainer = ends.trainer()
    trainer.send(up("step", step=41, loss=1.5))
    assert ends.hear() == [FromTrainer("step", LIFE | {"step": 41, "loss": 1.5})]
    assert down(trainer) == ("who", {})
    trainer.send(up("step", step=42, loss=1.5))
    ends.hear()
    trainer.send(up("hello", **HELLO))
    assert ends.hear() == [FromTrainer("hello", LIFE | HELLO)]
    assert not trainer.poll(0), "one question is enough"


def test_a_reconnected_trainer_is_answered_at_its_new_place(ends: Ends) -> None:
    ends.wire.expect(3, NONCE)
    first = ends.trainer()
    first.send(up("hello", **HELLO))
    ends.hear()
    first.close(linger=0)
    second = ends.trainer()
    second.send(up("hello", **HELLO))
    ends.hear()
    assert ends.wire.send_trainer("exit", {})
    assert down(second) == ("exit", {})


def test_a_trainer_that_went_away_loses_messages_and_nothing_else(ends: Ends) -> None:
    ends.wire.expect(3, NONCE)
    trainer = ends.trainer()
    trainer.send(up("hello", **HELLO))
    ends.hear()
    trainer.close(linger=0)
    wait_until(lambda: not ends.wire.send_trainer("who", {}), "an end of the connection")


def test_a_peer_that_does_not_read_costs_no_time(ends: Ends) -> None:
    ends.wire.expect(3, NONCE)
    trainer = ends.trainer()
    trainer.send(up("hello", **HELLO))
    ends.hear()
    filler = {"id": "x" * 60_000, "at": "now"}
    sent = 0
    while ends.wire.send_trainer("checkpoint", filler):
        sent += 1
        assert sent < 10_000, "a queue without a limit"


GARBAGE = [
    [b""],
    [b"\xff\x00"],
    [b"[]"],
    [b"{}"],
    [b"1", b"2"],
    [b"[" * 50_000],
    [b'{"version": 2, "verb": "stop", "id": "x"}'],
    [contract.encode_message("dance", id="x", attempt=3, nonce=NONCE)],
    [contract.encode_message("step", attempt=3, nonce=NONCE)],
    [contract.encode_message("step", attempt=3, nonce=NONCE, step="many", loss=1.0)],
    [contract.encode_message("step", attempt=True, nonce=NONCE, step=1, loss=1.0)],
    [up("hello", **HELLO | {"parameters": 0})],  # no checkpoint has that size
]


@pytest.mark.fault(
    "SV-67", phase="running", does="counts and drops what is no message of a known shape"
)
def test_garbage_from_a_trainer_is_counted_and_dropped(ends: Ends) -> None:
    ends.wire.expect(3, NONCE)
    trainer = ends.trainer()
    for parts in GARBAGE:
        trainer.send_multipart(parts)
    ends.refusals(len(GARBAGE))
    trainer.send(up("hello", **HELLO))
    assert ends.hear() == [FromTrainer("hello", LIFE | HELLO)]


@pytest.mark.fault(
    "SV-67", phase="running", does="takes no message beyond its limit, and serves the others"
)
@pytest.mark.parametrize("end", [Ends.trainer, Ends.operator])
def test_an_oversized_frame_ends_its_connection_only(
    ends: Ends, end: Callable[[Ends], zmq.Socket[bytes]]
) -> None:
    ends.wire.expect(3, NONCE)
    loud, quiet = end(ends), ends.operator()
    loud.send(b"x" * (contract.MESSAGE_BYTES_MAX + 1))
    quiet.send(contract.encode_message("status", id="s"))
    assert ends.hear() == [FromOperator("status", {"id": "s"})]


# --- the operators --------------------------------------------------------------------------------


def test_a_request_is_answered_to_whoever_asked(ends: Ends) -> None:
    one, other = ends.operator(), ends.operator()
    one.send(contract.encode_message("status", id="a"))
    other.send(contract.encode_message("checkpoint", id="b", at="boundary"))
    heard: list[object] = []
    while len(heard) < 2:
        heard += ends.hear()
    assert FromOperator("status", {"id": "a"}) in heard
    assert FromOperator("checkpoint", {"id": "b", "at": "boundary"}) in heard
    ends.wire.reply("b", "done", "", {"step": 7})
    ends.wire.reply("a", "refused", "no", {})
    assert reply(other) == {"id": "b", "outcome": "done", "why": "", "result": {"step": 7}}
    assert reply(one) == {"id": "a", "outcome": "refused", "why": "no", "result": {}}


@pytest.mark.fault("SV-62", phase="running", does="answers each of two that ask under one id")
def test_two_that_ask_under_one_id_are_both_answered_and_once(ends: Ends) -> None:
    operators = [ends.operator(), ends.operator()]
    for operator in (*operators, operators[0]):
        operator.send(contract.encode_message("stop", id="same"))
    heard: list[object] = []
    while len(heard) < 3:
        heard += ends.hear()
    ends.wire.reply("same", "done", "", {})
    ends.wire.reply("same", "done", "", {})
    for operator in operators:
        assert reply(operator)["outcome"] == "done"
        assert not operator.poll(50)


@pytest.mark.fault(
    "SV-67", phase="running", does="knows a fixed list of verbs, and refuses others by name"
)
def test_garbage_from_an_operator_is_refused_with_the_reason(ends: Ends) -> None:
    operator = ends.operator()
    operator.send(contract.encode_message("dance", id="x"))
    ends.refusals(1)
    refused = reply(operator)
    assert (refused["id"], refused["outcome"]) == ("", "refused")
    assert "unknown verb 'dance'" in refused["why"]
    for parts in GARBAGE:
        operator.send_multipart(parts)
    ends.refusals(1 + len(GARBAGE))


def test_clients_that_never_get_an_answer_are_forgotten(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "CLIENTS_REMEMBERED", 2)
    operator = ends.operator()
    for number in range(4):
        operator.send(contract.encode_message("stop", id=f"s{number}"))
    heard: list[object] = []
    while len(heard) < 4:
        heard += ends.hear()
    for number in range(4):
        ends.wire.reply(f"s{number}", "done", "", {})
    assert [reply(operator)["id"] for _ in range(2)] == ["s2", "s3"]
    assert not operator.poll(50)


def test_an_id_that_waits_is_that_of_one_verb(ends: Ends) -> None:
    """The refusal is for who has it wrong; who asked first has the reply."""
    first, second = ends.operator(), ends.operator()
    first.send(contract.encode_message("checkpoint", id="c", at="boundary"))
    assert [event.verb for event in ends.hear()] == ["checkpoint"]
    second.send(contract.encode_message("stop", id="c"))
    while not second.poll(10):
        assert ends.wire.receive() == []
    assert "that of a checkpoint" in reply(second)["why"]
    ends.wire.reply("c", "done", "", {})
    assert reply(first)["outcome"] == "done"
    assert not second.poll(50)


@pytest.mark.fault(
    "SV-62", phase="running", does="drops a reply to who has left, and answers the next"
)
def test_an_answer_to_someone_who_left_is_dropped(ends: Ends) -> None:
    operator = ends.operator()
    operator.send(contract.encode_message("stop", id="gone"))
    ends.hear()
    operator.close(linger=0)
    other = ends.operator()
    other.send(contract.encode_message("status", id="s"))
    ends.hear()
    ends.wire.reply("gone", "done", "", {})
    ends.wire.reply("s", "done", "", {})
    assert reply(other)["id"] == "s"


def test_one_wake_up_is_bounded(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FRAMES_PER_WAKE_UP", 10)
    operator = ends.operator()
    for number in range(25):
        operator.send(contract.encode_message("status", id=str(number)))
    counts: list[int] = []
    while sum(counts) < 25:
        counts.append(len(ends.hear()))
    assert max(counts) <= 10


# --- the sockets ----------------------------------------------------------------------------------


@pytest.mark.fault(
    "SV-66", phase="starting", does="binds inside a directory that is owner-only already"
)
@pytest.mark.fault("SV-57", phase="stopping", does="takes its sockets with it when it ends")
@pytest.mark.fault("SV-66", phase="any", does="keeps its sockets in a directory of mode 0700")
def test_only_the_owner_reaches_the_sockets_and_they_go_with_their_supervisor(
    tmp_path: Path,
) -> None:
    ends = Ends(tmp_path)
    sockets = tmp_path / contract.SOCKETS
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    assert {path.name for path in sockets.iterdir()} == {"trainer", "operator"}
    ends.close()
    assert list(sockets.iterdir()) == []


@pytest.mark.fault(
    "SV-57", phase="starting", does="binds over the socket files that a killed one left"
)
@pytest.mark.fault("SV-57", phase="starting", does="takes over socket files that were left behind")
def test_sockets_of_a_killed_supervisor_are_taken_over(tmp_path: Path) -> None:
    sockets = tmp_path / contract.SOCKETS
    sockets.mkdir(mode=0o700)
    (sockets / contract.OPERATOR_SOCKET).touch()
    ends = Ends(tmp_path)
    operator = ends.operator()
    operator.send(contract.encode_message("status", id="s"))
    assert ends.hear() == [FromOperator("status", {"id": "s"})]
    ends.close()


def test_the_last_reply_still_leaves(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    operator = ends.operator()
    operator.send(contract.encode_message("stop", id="s"))
    ends.hear()
    ends.wire.reply("s", "done", "", {"phase": "stopped"})
    ends.wire.close()
    assert reply(operator)["result"] == {"phase": "stopped"}
    operator.close(linger=0)
    ends.context.term()
    os.close(ends.fd)


def test_a_trainer_of_an_older_version_is_understood_and_spoken_to_in_its_own(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor was upgraded while the trainer trained."""
    old_hello, old_step = up("hello", **HELLO), up("step", step=41, loss=1.0, novelty="x")
    monkeypatch.setattr(contract, "CONTRACT_VERSION", 3)
    ends.wire.expect(3, NONCE)
    trainer = ends.trainer()
    trainer.send(old_step)
    assert ends.hear() == [FromTrainer("step", {**LIFE, "step": 41, "loss": 1.0})]
    who = trainer.recv()
    assert (b'"version":1' in who, b'"who"' in who) == (True, True)
    trainer.send(old_hello)
    ends.hear()
    ends.wire.send_trainer("stop", {"id": "s", "at": "now"})
    assert b'"version":1' in trainer.recv()
    # The next attempt is of our own version.
    trainer.send(up("hello", **HELLO))
    ends.hear()
    ends.wire.send_trainer("exit", {})
    assert b'"version":3' in trainer.recv()
