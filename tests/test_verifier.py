"""The helper process, the requests that it answers, and the loop's end of it."""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from checkpoint_kit import NONCE, RUN_ID, flip_bit, write_checkpoint
from runs_kit import wait_until

from supervisor import events as ev, housekeeping, orphans
from supervisor.checkpoint_requests import Requests
from supervisor.commit import Unwritable
from supervisor.contract import INT32_MAX, Json, checkpoint_size_bytes, temporary_name
from supervisor.housekeeping import HelperFailed, Housekeeper
from supervisor.options import Retention
from supervisor.readback import no_tick
from supervisor.rundir import RunDirectory
from supervisor.start import OPERATORS
from supervisor.state import Durable
from supervisor.verifier import Reply, Verifier

PATIENCE_SECONDS = 60.0
SELECT = {"do": "select", "run_id": RUN_ID, "lineage": [], "time": 5.0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


@pytest.fixture
def verifier(run: Path) -> Iterator[Verifier]:
    made = Verifier(run)
    yield made
    made.close()


def write(run: Path, *steps: int, **overrides: Any) -> None:
    for step in steps:
        write_checkpoint(run / "checkpoints", step, **overrides)


def readable(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(1000 * PATIENCE_SECONDS))


def replies(verifier: Verifier, count: int) -> list[Reply]:
    """What the loop does: wait on the one descriptor, then receive."""
    found: list[Reply] = []
    while len(found) < count:
        assert readable(verifier.fileno()), f"{len(found)} of {count} replies: {found}"
        found += verifier.receive()
    return found


def kill(pid: int | None) -> None:
    """SIGKILL, and back when the process is dead but not yet reaped."""
    assert pid is not None
    descriptor = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert readable(descriptor)
    finally:
        os.close(descriptor)


# --- requests ------------------------------------------------------------------------------------


def ask(run: Path, **request: Any) -> Json:
    return Requests(run, no_tick).answer(orjson.dumps({"id": 7, **request}))


def test_select_answers_with_a_summary_and_the_rejected(run: Path) -> None:
    write(run, 100, attempt=3, epoch=2, reason="operator", requests=("one", "two"))
    write(run, 200)
    flip_bit(run / "checkpoints/step_000200.bin", 200)
    reply = ask(run, **SELECT)
    assert reply["ok"]
    assert reply["id"] == 7
    ((step, reason, moved_to),) = reply["result"]["rejected"]
    assert (step, moved_to) == (200, "quarantine/step_000200.bin")
    assert "chunk 0 of 1" in reason
    chosen = reply["result"]["chosen"]
    digests = {chosen.pop("sha256"), chosen.pop("binary_digest")}
    assert {len(digest) for digest in digests} == {64}
    assert chosen == {
        "step": 100,
        "path": "checkpoints/step_000100.bin",
        "size_bytes": 80,
        "parameters": 6,
        "bare": False,
        "run_id": RUN_ID,
        "attempt": 3,
        "epoch": 2,
        "reason": "operator",
        "requests": ["one", "two"],
        "policy_digest": "1" * 64,
        "targets_seen": 1000,
        "bandit": {"kind": "ducb", "arms": {"prose": {"pulls": 100}}},
        "arms": {
            "prose": {"windows": 40, "cursor": 20, "round": 2},
            "code": {"windows": 40, "cursor": 0, "round": 2},
        },
    }


def test_select_obeys_the_ceiling_and_the_lineage(run: Path) -> None:
    write(run, 100, run_id="parent")
    write(run, 200, 300)
    assert ask(run, **SELECT, ceiling=250)["result"]["chosen"]["step"] == 200
    chosen = ask(run, **{**SELECT, "lineage": [["parent", 100]]}, ceiling=150)["result"]["chosen"]
    assert (chosen["step"], chosen["run_id"]) == (100, "parent")


def test_select_where_nothing_is_valid(run: Path) -> None:
    assert ask(run, **SELECT)["result"] == {
        "chosen": None,
        "rejected": [],
        "present": (),
    }


def test_a_bare_file_has_no_state_to_tell(run: Path) -> None:
    write(run, 100)
    (run / "checkpoints/step_000100.json").unlink()
    chosen = ask(run, **SELECT, bare_allowed=True)["result"]["chosen"]
    assert chosen["bare"] is True
    assert chosen["run_id"] is None
    assert (chosen["attempt"], chosen["reason"], chosen["requests"]) == (0, "", [])
    with_manifest = ask(run, **SELECT)["result"]
    assert with_manifest["chosen"] is None
    assert with_manifest["rejected"][0][1] == "step_000100.bin: no manifest beside it"


@pytest.mark.parametrize("arm", [None, 5, {}, {"sampler": []}, {"sampler": {"cursor": None}}])
def test_a_summary_takes_any_shape_of_an_arm(run: Path, arm: Any) -> None:
    made = write_checkpoint(run / "checkpoints", 100)
    write(run, 200, state={**made.state, "arms": {"odd": arm}, "updates": 200})
    arms = ask(run, **SELECT)["result"]["chosen"]["arms"]
    assert arms == {"odd": {"windows": None, "cursor": None, "round": None}}


def test_verify_answers_for_one_step(run: Path) -> None:
    write(run, 100, 200)
    flip_bit(run / "checkpoints/step_000200.bin", 200)
    request = {"do": "verify", "run_id": RUN_ID, "lineage": []}
    assert ask(run, **request, step=100)["result"]["step"] == 100
    for set_aside, moved_to in ((False, ""), (True, "quarantine/step_000200.bin")):
        reply = ask(run, **request, step=200, set_aside=set_aside, time=5.0)
        assert (reply["ok"], reply["kind"]) == (False, "damaged")
        assert reply["result"]["step"] == 200
        assert reply["result"]["moved_to"] == moved_to
        assert reply["result"]["reason"] in reply["error"]
        assert (run / "checkpoints/step_000200.bin").exists() == (not set_aside)
    gone = ask(run, **request, step=200)
    assert gone["kind"] == "damaged"
    assert gone["result"]["reason"] == "step_000200.bin: no such file"


def test_retain_supersede_and_clean(run: Path) -> None:
    write(run, 100, 200, 300, 400)
    request = {"do": "retain", "keep_superseded": 1, "keep_last": 2, "keep_every": 0, "pins": [100]}
    nothing: Json = {"names": [], "freed_bytes": 0}
    assert ask(run, **request, verified_steps=[300])["result"] == {"removed": [], **nothing}
    assert ask(run, **request, verified_steps=[400])["result"] == {"removed": [200], **nothing}
    assert ask(run, do="supersede", above_step=300)["result"] == {
        "moved": [[400, "superseded/step_000400.bin"]]
    }
    living = temporary_name(2, NONCE, "step_000500.bin")
    dead = temporary_name(1, NONCE, "step_000500.bin")
    (run / "quarantine").mkdir()
    for name in (f"checkpoints/{living}", f"checkpoints/{dead}", "quarantine/.tmp-12-reason"):
        (run / name).write_bytes(b"half")
    assert ask(run, do="clean", attempt=2, nonce=NONCE)["result"] == {
        "removed": [f"checkpoints/{dead}", "quarantine/.tmp-12-reason"]
    }
    assert ask(run, do="clean")["result"] == {"removed": [f"checkpoints/{living}"]}


def test_what_was_left_behind_is_retained_and_reclaimed(run: Path) -> None:
    write(run, 100, 200, 300, 400)
    ask(run, do="supersede", above_step=200)
    retain = {"do": "retain", "keep_last": 2, "keep_every": 0, "pins": [], "keep_superseded": 1}
    result = ask(run, **retain, verified_steps=[100, 200])["result"]
    assert result["removed"] == []
    # Newest first they were moved, oldest first they were written.
    assert result["names"] == ["superseded/step_000300.bin", "superseded/step_000300.json"]
    assert result["freed_bytes"] > 0
    reclaim = {"do": "reclaim", "wanted_bytes": 1, "keep_every": 0, "pins": []}
    result = ask(run, **reclaim, verified_steps=[100, 200], attempt=1, nonce=NONCE)["result"]
    assert result["names"] == ["superseded/step_000400.bin", "superseded/step_000400.json"]
    assert ask(run, **reclaim, verified_steps=[200])["result"]["names"] == []


@pytest.mark.parametrize(("do", "gone"), [("retain", "removed"), ("reclaim", "names")])
def test_a_reply_that_something_failed_says_what_had_gone(run: Path, do: str, gone: str) -> None:
    write(run, 100, 200, 300)
    left_and_in_the_way(run)
    fields = {"keep_last": 2, "keep_superseded": 1, "wanted_bytes": 2**40, "keep_every": 0}
    reply = ask(run, do=do, **fields, pins=[], verified_steps=[100, 200, 300])
    assert (reply["ok"], reply["kind"]) == (False, "os")
    assert "Not a directory" in reply["error"]
    assert reply["result"][gone] == ([100] if do == "retain" else [DEAD])


DEAD = f"checkpoints/{temporary_name(1, NONCE, 'step_000500.bin')}"


def left_and_in_the_way(run: Path) -> None:
    """Something that can go, and something that ends what would go after it."""
    (run / DEAD).write_bytes(b"half")
    (run / "superseded").write_bytes(b"in the way")


def test_an_error_of_the_machine_is_told_as_such(run: Path) -> None:
    (run / "superseded").write_bytes(b"in the way")
    write(run, 100)
    reply = ask(run, do="supersede", above_step=0)
    assert (reply["ok"], reply["kind"]) == (False, "os")
    assert "Not a directory" in reply["error"]
    assert (run / "checkpoints/step_000100.bin").exists()


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({"do": "format"}, "do 'format', not in"),
        ({}, "request .*: do is None"),
        ({"do": "select", "run_id": RUN_ID, "lineage": []}, "time is None, expected float"),
        ({**SELECT, "run_id": 5}, "run_id is 5, expected str"),
        ({**SELECT, "lineage": {}}, r"lineage is \{\}, expected list"),
        ({**SELECT, "lineage": [["parent"]]}, r"lineage is \[\['parent'\]\]"),
        ({**SELECT, "lineage": [[1, "parent"]]}, "lineage is"),
        ({**SELECT, "ceiling": True}, "ceiling is True, expected int"),
        ({"do": "supersede", "above_step": "1"}, "above_step is '1'"),
        ({"do": "clean", "attempt": 1}, "nonce is None"),
        (
            {
                "do": "retain",
                "keep_superseded": 1,
                "keep_last": 1,
                "keep_every": 0,
                "pins": [],
                "verified_steps": [],
            },
            r"checkpoint\.keep_last is 1",
        ),
        (
            {
                "do": "retain",
                "keep_superseded": 1,
                "keep_last": 2,
                "keep_every": 0,
                "pins": ["x"],
                "verified_steps": [],
            },
            "pins is",
        ),
    ],
)
def test_a_wrong_request_is_our_bug_and_touches_nothing(
    run: Path, request_: Json, error: str
) -> None:
    write(run, 100)
    before = sorted(path.name for path in run.rglob("*"))
    reply = Requests(run, no_tick).answer(orjson.dumps({"id": 7, **request_}))
    assert (reply["id"], reply["ok"], reply["kind"]) == (7, False, "ours")
    assert re.search(error, reply["error"])
    assert sorted(path.name for path in run.rglob("*")) == before


@pytest.mark.parametrize("line", [b"", b"[]", b"{", b'{"do": "clean"}', b'{"id": "x"}'])
def test_a_line_without_an_id_gets_the_id_zero(run: Path, line: bytes) -> None:
    reply = Requests(run, no_tick).answer(line)
    assert (reply["id"], reply["ok"], reply["kind"]) == (0, False, "ours")


# --- the process ---------------------------------------------------------------------------------


def start(run: Path, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "supervisor.verifier", "--directory", str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **options,
    )


def exchange(helper: subprocess.Popen[bytes], request: Json) -> Json:
    assert helper.stdin is not None
    assert helper.stdout is not None
    helper.stdin.write(orjson.dumps({"id": 1, **request}) + b"\n")
    helper.stdin.flush()
    reply: Json = orjson.loads(helper.stdout.readline())
    return reply


def finish(helper: subprocess.Popen[bytes], unread: bytes = b"") -> tuple[int, bytes]:
    """Closes the helper's input; its exit status and what it still said."""
    said, _ = helper.communicate(unread or None, timeout=PATIENCE_SECONDS)
    return helper.returncode, said


def test_the_helper_answers_in_order_and_ends_with_its_input(run: Path) -> None:
    write(run, 100, 200)
    helper = start(run)
    assert exchange(helper, SELECT)["result"]["chosen"]["step"] == 200
    assert exchange(helper, {"do": "supersede", "above_step": 100})["ok"]
    assert exchange(helper, SELECT)["result"]["chosen"]["step"] == 100
    assert finish(helper) == (0, b"")


@pytest.mark.parametrize("unread", [b"", b'{"id": 1, "do": "supersede", "above'])
def test_the_helper_ends_without_a_request_and_in_the_middle_of_one(
    run: Path, unread: bytes
) -> None:
    write(run, 100)
    assert finish(start(run), unread) == (0, b"")
    assert (run / "checkpoints/step_000100.bin").exists()


@pytest.mark.parametrize(
    "request_",
    [
        SELECT,
        {"do": "supersede", "above_step": 0},
        {
            "do": "retain",
            "keep_superseded": 1,
            "keep_last": 2,
            "keep_every": 0,
            "pins": [],
            "verified_steps": [300],
        },
    ],
)
def test_the_helper_stops_inside_a_request_when_its_input_closes(run: Path, request_: Json) -> None:
    """The supervisor is gone before the work begins: nothing is answered, and nothing is moved."""
    write(run, 100, 200, 300)
    before = sorted(os.listdir(run / "checkpoints"))
    helper = start(run)
    assert finish(helper, orjson.dumps({"id": 1, **request_}) + b"\n") == (0, b"")
    assert sorted(os.listdir(run / "checkpoints")) == before


def test_the_helper_ends_when_nobody_reads_its_replies(run: Path) -> None:
    write(run, 100)
    helper = start(run)
    assert helper.stdin is not None
    assert helper.stdout is not None
    helper.stdout.close()
    helper.stdin.write(orjson.dumps({"id": 1, **SELECT}) + b"\n")
    helper.stdin.flush()
    assert helper.wait(PATIENCE_SECONDS) == 0
    helper.stdin.close()


def test_signals_to_the_whole_service_do_not_end_the_helper(run: Path) -> None:
    write(run, 100)
    helper = start(run)
    exchange(helper, SELECT)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        helper.send_signal(number)
    assert exchange(helper, SELECT)["result"]["chosen"]["step"] == 100
    assert finish(helper) == (0, b"")


def test_a_second_helper_touches_nothing_until_the_first_is_gone(run: Path) -> None:
    write(run, 100)
    first = start(run)
    exchange(first, SELECT)
    second = start(run)
    assert second.stdin is not None
    assert second.stdout is not None
    second.stdin.write(b'{"id": 1, "do": "supersede", "above_step": 0}\n')
    second.stdin.flush()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not waits_for_lock(second.pid):
        assert second.poll() is None
        assert time.monotonic() < deadline
    assert exchange(first, SELECT)["result"]["chosen"]["step"] == 100
    assert finish(first) == (0, b"")
    assert orjson.loads(second.stdout.readline())["result"]["moved"][0][0] == 100
    assert finish(second) == (0, b"")


def waits_for_lock(pid: int) -> bool:
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and str(pid) in line.split() for line in lines)


@pytest.mark.parametrize("arguments", [[], ["--directory"], ["--run", "x"], ["x", "y", "z"]])
def test_the_helper_refuses_other_arguments(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "supervisor.verifier", *arguments],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert b"usage: python -m supervisor.verifier --directory RUN" in done.stderr


def test_the_helper_loads_nothing_heavy() -> None:
    code = "import supervisor.verifier, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.decode().split()}
    assert not loaded & {"torch", "numpy", "pydantic", "zmq", "asyncio", "click", "trainer"}


# --- the loop's end ------------------------------------------------------------------------------


def test_requests_are_answered_in_order_under_their_ids(run: Path, verifier: Verifier) -> None:
    write(run, 100, 200)
    ids = [
        verifier.submit(SELECT),
        verifier.submit({"do": "supersede", "above_step": 100}),
        verifier.submit({"do": "verify", "run_id": RUN_ID, "lineage": [], "step": 200}),
        verifier.submit(SELECT),
    ]
    found = replies(verifier, 4)
    assert [reply.id for reply in found] == ids == [1, 2, 3, 4]
    assert [reply.do for reply in found] == ["select", "supersede", "verify", "select"]
    assert [reply.ok for reply in found] == [True, True, False, True]
    assert (found[2].kind, found[2].result["step"]) == ("damaged", 200)
    assert found[3].result["chosen"]["step"] == 100
    assert verifier.receive() == []


def test_submit_and_receive_do_not_wait_for_a_helper_that_stands_still(
    run: Path, verifier: Verifier
) -> None:
    """Requests larger than any socket buffer, to a stopped process; it gets them all later."""
    assert verifier.pid is not None
    os.kill(verifier.pid, signal.SIGSTOP)
    pins = list(range(10_000, 50_000))
    request = {
        "do": "retain",
        "keep_superseded": 1,
        "keep_last": 2,
        "keep_every": 0,
        "verified_steps": [],
        "pins": pins,
    }
    ids = [verifier.submit(request) for _ in range(5)]
    assert verifier.receive() == []
    os.kill(verifier.pid, signal.SIGCONT)
    found = replies(verifier, 5)
    assert [reply.id for reply in found] == ids
    assert all(reply.ok for reply in found)


def test_the_death_of_an_idle_helper_is_noticed_and_the_next_request_starts_another(
    run: Path, verifier: Verifier
) -> None:
    write(run, 100)
    descriptor, first = verifier.fileno(), verifier.pid
    kill(first)
    assert readable(descriptor)
    assert verifier.receive() == []
    assert not verifier.pid
    verifier.submit(SELECT)
    assert verifier.pid not in (None, first)
    assert verifier.fileno() == descriptor
    (reply,) = replies(verifier, 1)
    assert reply.result["chosen"]["step"] == 100


def test_a_request_to_a_helper_whose_death_was_not_noticed_yet_is_not_lost(
    run: Path, verifier: Verifier
) -> None:
    write(run, 100)
    kill(verifier.pid)
    ids = [verifier.submit(SELECT), verifier.submit(SELECT)]
    found = replies(verifier, 2)
    assert [reply.id for reply in found] == ids
    assert [reply.ok for reply in found] == [True, True]


def test_a_death_during_a_request_fails_that_one_only(run: Path, verifier: Verifier) -> None:
    write(run, 100)
    assert verifier.pid is not None
    os.kill(verifier.pid, signal.SIGSTOP)
    verifier.submit({"do": "supersede", "above_step": 0})
    verifier.submit(SELECT)
    kill(verifier.pid)
    failed, answered = replies(verifier, 2)
    assert (failed.id, failed.do, failed.ok, failed.kind) == (1, "supersede", False, "os")
    assert "by signal 9 during supersede" in failed.error
    assert (answered.id, answered.ok) == (2, True)
    assert answered.result["chosen"]["step"] == 100


@pytest.mark.parametrize("code", ["sys.exit(3)", "sys.stdin.readline(); sys.exit(3)"])
def test_a_helper_that_always_ends_fails_each_request_once(
    run: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """A broken installation costs one reply a request, not a storm of new processes."""
    with_code(monkeypatch, f"import sys; {code}")
    verifier = Verifier(run)
    try:
        assert "readline" in code or readable(verifier.fileno())
        verifier.receive()
        for number in (1, 2, 3):
            assert verifier.submit(SELECT) == number
            (reply,) = replies(verifier, 1)
            assert (reply.id, reply.ok, reply.kind) == (number, False, "ours")
            assert "with exit status 3 during select" in reply.error
        assert verifier.pid is None
    finally:
        verifier.close()


def test_a_helper_that_closes_its_output_is_killed_and_replaced(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_code(
        monkeypatch,
        "import os, signal, sys; sys.stdin.readline(); os.close(0); os.close(1); signal.pause()",
    )
    verifier = Verifier(run)
    try:
        verifier.submit(SELECT)
        (reply,) = replies(verifier, 1)
        assert "by signal 9" in reply.error
    finally:
        verifier.close()


@pytest.mark.parametrize("answer", ['{"id": 9, "ok": true, "result": {}}', "nonsense", "[]"])
def test_a_reply_that_is_none_of_ours_is_a_bug(
    run: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    with_code(monkeypatch, f"import sys; sys.stdin.readline(); print({answer!r}, flush=True)")
    verifier = Verifier(run)
    try:
        verifier.submit(SELECT)
        with pytest.raises(ValueError, match="reply of the verifier"):
            replies(verifier, 1)
    finally:
        verifier.close()


def test_half_a_reply_of_a_dead_helper_is_forgotten(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = run / "lives"
    lives.write_bytes(b"")
    code = f"""
import sys
sys.stdin.readline()
with open({str(lives)!r}, "r+") as file:
    first = not file.read()
    file.write("one")
print('{{"id": 1, "ok"' if first else '{{"id": 2, "ok": true, "result": {{}}}}', flush=True,
      end="" if first else None)
"""
    with_code(monkeypatch, code)
    verifier = Verifier(run)
    try:
        verifier.submit(SELECT)
        verifier.submit(SELECT)
        assert [reply.ok for reply in replies(verifier, 2)] == [False, True]
    finally:
        verifier.close()


def with_code(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Every helper that is started from here on runs `code` instead."""
    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return real([sys.executable, "-c", code], **options)

    monkeypatch.setattr("supervisor.verifier.Owned", popen)


def test_a_helper_that_cannot_be_watched_counts_as_not_started(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = Verifier(run)
    kill(verifier.pid)
    verifier.receive()
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", out_of_descriptors)
        verifier.submit(SELECT)
        (refused,) = verifier.receive()
    assert "no verifier can be started: [Errno 24]" in refused.error
    assert verifier.pid is None
    assert os.listdir("/proc/self/fd") == before
    verifier.submit(SELECT)
    assert [reply.ok for reply in replies(verifier, 1)] == [True]
    verifier.close()
    wait_until(orphans.reap, "the end of the one that was killed")


def out_of_descriptors(pid: int) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_where_no_helper_can_be_started_each_request_fails_without_leftovers(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = Verifier(run)
    command = verifier._command
    monkeypatch.setattr(verifier, "_command", [str(run / "missing")])
    kill(verifier.pid)
    verifier.receive()
    before = os.listdir("/proc/self/fd")
    ids = [verifier.submit(SELECT) for _ in range(3)]
    found = verifier.receive()
    assert [(reply.id, reply.ok, reply.kind) for reply in found] == [(i, False, "os") for i in ids]
    assert "no verifier can be started: [Errno 2]" in found[0].error
    assert len(os.listdir("/proc/self/fd")) == len(before)
    monkeypatch.setattr(verifier, "_command", command)
    verifier.submit(SELECT)
    assert [reply.ok for reply in replies(verifier, 1)] == [True]
    verifier.close()


def test_close_ends_a_helper_in_the_middle_of_its_work(run: Path) -> None:
    """The file is 26 GB of holes, half a minute of hashing; closing does not wait for it."""
    write(run, 100, parameters=6)
    with (run / "checkpoints/step_000200.bin").open("wb") as file:
        file.write((200).to_bytes(4, "little") + INT32_MAX.to_bytes(4, "little"))
        file.truncate(checkpoint_size_bytes(INT32_MAX))
    verifier = Verifier(run)
    verifier.submit({**SELECT, "bare_allowed": True})
    pid = verifier.pid
    assert pid is not None
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not has_open(pid, "step_000200.bin"):
        assert time.monotonic() < deadline
    verifier.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    assert (run / "checkpoints/step_000200.bin").exists()
    verifier.close()


def has_open(pid: int, name: str) -> bool:
    descriptors = Path(f"/proc/{pid}/fd")
    for descriptor in list(descriptors.iterdir()):
        try:
            if os.readlink(descriptor).endswith(name):
                return True
        except FileNotFoundError:
            continue
    return False


@pytest.mark.fault("SV-53", phase="any", does="leaks no descriptor over twenty lives of its helper")
def test_twenty_lives_leave_no_descriptor_and_no_zombie(run: Path) -> None:
    write(run, 100)
    verifier = Verifier(run)
    before = len(os.listdir("/proc/self/fd"))
    found: list[Reply] = []
    pids = []
    for _ in range(20):
        pids.append(verifier.pid)
        kill(verifier.pid)
        found += verifier.receive()
        verifier.submit({"do": "clean"})
    assert len(os.listdir("/proc/self/fd")) == before
    found += replies(verifier, 1)
    assert [reply.id for reply in found] == list(range(1, 21))
    verifier.close()
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid or 0, os.WNOHANG)


SUPERVISOR = """
import sys, signal
from pathlib import Path
from supervisor.verifier import Verifier
verifier = Verifier(Path(sys.argv[1]))
print(verifier.pid, flush=True)
signal.pause()
"""


def test_the_helper_of_a_killed_supervisor_ends(run: Path) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(run)], stdout=subprocess.PIPE
    )
    assert supervisor.stdout is not None
    descriptor = os.pidfd_open(int(supervisor.stdout.readline()))
    try:
        supervisor.kill()
        supervisor.wait()
        assert readable(descriptor)
    finally:
        os.close(descriptor)
        supervisor.stdout.close()


def test_the_operators_own_files_do_not_become_modules_of_the_helper(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("orjson", "hashlib", "supervisor"):
        (run / f"{name}.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(run)
    verifier = Verifier(Path("."))
    try:
        verifier.submit(SELECT)
        (reply,) = replies(verifier, 1)
        assert reply.ok
    finally:
        verifier.close()


def test_fc13_a_killed_helper_has_pruned_nothing_that_was_needed(run: Path) -> None:
    """The window between a new checkpoint and the removal of old ones: the helper is killed while
    it retains, again and again, and the newest verified one is always there for the next.

    KempnerInstitute/KempnerForge #102.
    """
    verifier = Verifier(run)
    try:
        for newest in range(500, 1500, 100):
            write(
                run, *(step for step in (newest - 200, newest - 100, newest) if not has(run, step))
            )
            verifier.submit(
                {
                    "do": "retain",
                    "keep_superseded": 5,
                    "keep_last": 2,
                    "keep_every": 0,
                    "pins": [],
                    "verified_steps": [newest],
                }
            )
            kill(verifier.pid)
            replies(verifier, 1)
            verifier.submit(SELECT)
            (reply,) = replies(verifier, 1)
            assert reply.result["chosen"]["step"] == newest
            assert reply.result["rejected"] == []
    finally:
        verifier.close()


def has(run: Path, step: int) -> bool:
    return (run / f"checkpoints/step_{step:06d}.bin").exists()


# --- errands --------------------------------------------------------------------------------------

KEEP = Retention(2, 0, 0)


def known(*verified: int) -> Durable:
    """The record of a run with an attempt that is under way, and checkpoints that are proven."""
    opened = ev.AttemptStarted(2, NONCE, 0, 1)
    return Durable(open=opened, attempt=2, verified=frozenset(verified))


class House:
    """A housekeeper with nobody around it."""

    def __init__(self, run: Path) -> None:
        self.events: list[ev.Event] = []
        self.alarms: list[tuple[str, str]] = []
        self.keeper = Housekeeper(
            RunDirectory(run, RUN_ID),
            RUN_ID,
            (),
            False,
            emit=self.events.append,
            alarm=lambda name, detail: self.alarms.append((name, detail)),
            seen=lambda checkpoint: None,
        )

    @property
    def helper(self) -> int | None:
        return self.keeper._verifier.pid

    def wait_for_event(self) -> ev.Event:
        pause = select.poll()
        pause.register(self.keeper.fileno(), select.POLLIN)
        while not self.events:
            pause.poll(10)
            self.keeper.receive()
        return self.events.pop()


@pytest.fixture
def house(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(housekeeping, "RETRY_SECONDS", 0.01)
    made = House(run)
    yield made
    made.keeper.close()


@pytest.mark.parametrize("errand", ["select", "clear"])
def test_an_errand_that_a_start_needs_outlives_its_helper(
    run: Path, house: House, errand: str
) -> None:
    """The kernel may choose the helper when memory runs out; the run must not end of it."""
    write(run, 100, 200)
    keeper = house.keeper
    kill_during(house, lambda: keeper.select(250) if errand == "select" else keeper.clear(100))
    ((name, detail),) = house.alarms
    assert name == "helper"
    assert "by signal 9 during" in detail
    assert house.keeper.busy
    found = house.wait_for_event()
    if errand == "select":
        assert isinstance(found, ev.Selected)
        assert found.step == 200
    else:
        assert isinstance(found, ev.Cleared)
        assert found.superseded == (200,)
    assert house.alarms[-1] == ("helper", "")
    assert not house.keeper.busy


@pytest.mark.parametrize("errand", ["retain", "reclaim"])
def test_what_an_errand_removed_before_it_failed_is_told(
    run: Path, house: House, errand: str
) -> None:
    write(run, 100, 200, 300)
    left_and_in_the_way(run)
    if errand == "retain":
        house.keeper.retain(KEEP, known(100, 200), 300)
    else:
        house.keeper.reclaim(2**40, KEEP, known(100, 200, 300), lambda freed: None)
    found = house.wait_for_event()
    assert isinstance(found, ev.Removed)
    assert (found.steps, found.names) == (((100,), ()) if errand == "retain" else ((), (DEAD,)))
    ((name, detail),) = house.alarms
    assert name == "retention"
    assert "Not a directory" in detail


def test_a_helper_that_was_killed_has_not_said_that_nothing_can_go(run: Path, house: House) -> None:
    freed: list[int | None] = []
    kill_during(house, lambda: house.keeper.reclaim(1, KEEP, known(), freed.append))
    assert freed == [None]
    assert house.alarms[0][0] == "retention"
    assert house.events == []


def kill_during(house: House, errand: Callable[[], object]) -> None:
    helper = house.helper
    assert helper is not None
    os.kill(helper, signal.SIGSTOP)  # it does not come to an answer
    errand()
    kill(helper)
    house.keeper.receive()


def test_a_killed_helper_is_asked_again_to_read_a_checkpoint_back(run: Path, house: House) -> None:
    write(run, 100)
    kill_during(house, lambda: house.keeper.verify(100))
    ((name, detail),) = house.alarms
    assert name == "verification"
    assert detail.startswith("step 100: the verifier ended by signal 9")
    found = house.wait_for_event()
    assert isinstance(found, ev.Verified)
    assert (found.step, found.problem) == (100, "")
    assert house.alarms[-1] == ("verification", "")
    assert not house.keeper.busy


def test_what_cannot_be_read_back_is_given_up_with_an_alarm(
    run: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house.keeper._verifier, "_command", [sys.executable, "-c", "exit(3)"])
    kill(house.helper)
    house.keeper.receive()
    house.keeper.verify(100)
    found = house.wait_for_event()
    assert isinstance(found, ev.Unverified)
    assert found.step == 100
    assert len(house.alarms) == housekeeping.TRIES
    assert house.alarms[-1][1].startswith("step 100, 5 times: the verifier ended with exit status")
    assert not house.keeper.busy


def test_a_disk_that_refuses_again_and_again_is_no_fault_of_the_helper(
    run: Path, house: House
) -> None:
    """After a rollback that is on record, what is beyond its base has to go aside first."""
    write(run, 100, 200)
    (run / "superseded").symlink_to("/dev/full")
    house.keeper.clear(100)
    with pytest.raises(Unwritable, match=r"clear|supersede") as refused:
        house.wait_for_event()
    assert refused.value.errno in OPERATORS
    assert has(run, 200)


def test_an_errand_that_fails_again_and_again_ends_this_life(
    run: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house.keeper._verifier, "_command", [sys.executable, "-c", "exit(3)"])
    kill(house.helper)
    house.keeper.receive()
    house.keeper.select(250)
    with pytest.raises(HelperFailed, match=r"select, 5 times: .*exit status 3"):
        house.wait_for_event()
    assert len(house.alarms) == housekeeping.TRIES - 1
