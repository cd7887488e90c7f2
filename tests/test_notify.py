"""Who is told of a run, of what, and that telling never costs the run anything."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from runs_kit import DEADLINE_SECONDS, PYTHON, Run, wait_until

from supervisor import channels, contract, events as ev, notices, notifier, start, webhook
from supervisor.channels import Channel, ChannelError
from supervisor.config import ConfigError
from supervisor.contract import ExitCode, Json
from supervisor.notices import Notice, Watch, judge, watch_of
from supervisor.notifier import QUEUE_MAX, Notifier

# --- what is worth telling ------------------------------------------------------------------------


def started(attempt: int, resume_step: int = 0) -> ev.AttemptStarted:
    return ev.AttemptStarted(attempt, "nonce", resume_step, 1)


def ended(attempt: int, cause: str = "crash", counted: bool = True) -> ev.AttemptEnded:
    return ev.AttemptEnded(attempt, cause, 1, None, 5, counted, 0, "")


def saved(step: int) -> ev.CheckpointCommitted:
    return ev.CheckpointCommitted(step, 1, "cadence", [], "")


def deaths(count: int, first: int = 1, cause: str = "crash", counted: bool = True) -> list[Any]:
    """So many lives that come to nothing, and the start of the next one."""
    lives = [(started(n), ended(n, cause, counted)) for n in range(first, first + count)]
    return [record for life in lives for record in life] + [started(first + count)]


def told(records: Sequence[ev.Record], watch: Watch | None = None) -> list[Notice]:
    watch = watch or Watch()
    found = []
    for record in records:
        watch, notice = judge(watch, record)
        if notice is not None:
            found.append(notice)
    return found


@pytest.mark.parametrize(
    ("record", "notice"),
    [
        (ev.RunFailed("no luck"), Notice("failed", "no luck")),
        (ev.RunFinished(30), Notice("finished", "reached step 30")),
        (ev.SupervisorEnded("stuck", "it holds on"), Notice("stuck", "it holds on")),
        (ev.Alarmed("disk", "1 GB left"), Notice("alarm", "1 GB left", "disk")),
        (
            ev.Alarmed("replay_diverged", "step 13: loss"),
            Notice("alarm", "step 13: loss", "replay_diverged"),
        ),
        (
            ev.Alarmed("checkpoint_quarantined", "step 20: bad chunk"),
            Notice("alarm", "step 20: bad chunk", "checkpoint_quarantined"),
        ),
    ],
)
def test_what_a_person_wants_to_know_is_told(record: ev.Record, notice: Notice) -> None:
    assert told([record]) == [notice]


def test_what_he_has_asked_for_or_can_look_up_is_not() -> None:
    quiet = [
        ev.Wished("stop", "request"),
        ev.SupervisorEnded("stopped", "stopped as asked"),
        ev.SupervisorEnded("failed", "the record before it says so"),
        ev.SupervisorEnded("finished", "the record before it says so"),
        ev.Alarmed("retention", "busy"),
        ev.CheckpointQuarantined(20, "bad chunk", "quarantine/"),
        ev.AlarmCleared("disk"),
        saved(10),
        *deaths(2),
    ]
    assert told(quiet) == []


def test_the_third_restart_without_progress_is_told_once() -> None:
    (notice,) = told(deaths(9))
    assert notice.event == "restarting"
    assert "attempt 4 begins from the start" in notice.reason
    assert told(deaths(2)) == []


def test_every_death_counts_that_nobody_asked_for() -> None:
    assert len(told(deaths(3, cause="again", counted=False))) == 1
    assert told(deaths(9, cause="stopped", counted=False)) == []


def test_progress_begins_the_count_again() -> None:
    again = ev.PolicySwitched("r", 2, 1, 5, "", "", "", "", "")
    for progress in (saved(10), again, ev.Wished("run", "request")):
        assert told([*deaths(2), progress, *deaths(2, first=4)]) == []
        assert len(told([*deaths(3), progress, *deaths(3, first=5)])) == 2


def test_the_same_checkpoint_again_is_no_progress() -> None:
    assert len(told([saved(10), *deaths(2), saved(10), ended(3), started(4, 10)])) == 1


def test_an_alarm_that_lasts_is_told_once_until_it_is_cleared() -> None:
    grows = [ev.Alarmed("disk", f"{size} bytes left") for size in (9, 8, 7)]
    assert [notice.reason for notice in told(grows)] == ["9 bytes left"]
    assert len(told([*grows, ev.AlarmCleared("disk"), *grows])) == 2


def test_an_alarm_that_is_an_event_is_told_each_time() -> None:
    bad = [ev.Alarmed("checkpoint_quarantined", f"step {step}: bad") for step in (20, 10)]
    assert len(told(bad)) == 2


RECORDS = st.sampled_from(
    [
        *(started(1), ended(1), ended(1, "again", False), saved(10), saved(20)),
        *(ev.Alarmed("disk", "low"), ev.AlarmCleared("disk"), ev.RunFailed("no luck")),
        *(ev.Wished("run", "r"), ev.Alarmed("replay_diverged", "step 1")),
    ]
)


@given(st.lists(RECORDS), st.lists(RECORDS))
def test_a_life_that_is_begun_again_tells_only_what_is_new(
    before: list[ev.Record], after: list[ev.Record]
) -> None:
    assert told(before) + told(after, watch_of(before)) == told([*before, *after])


def test_a_notification_has_all_that_is_needed_to_act() -> None:
    status = {
        **{"run": "mine", "run_id": "id", "directory": "/runs/mine", "step": 120},
        **{"target_step": 600, "attempt": 4, "loss": 1.5},
    }
    long = "x" * 10_000
    assert notices.compose(Notice("alarm", long, "disk"), status, 12.5) == {
        **{"schema_version": 1, "run": "mine", "run_id": "id", "directory": "/runs/mine"},
        **{"event": "alarm", "alarm": "disk", "reason": "x" * notices.REASON_CHARACTERS},
        **{"step": 120, "target_step": 600, "attempt": 4, "time": 12.5},
    }


# --- one process at a time ------------------------------------------------------------------------


class Desk:
    """A notifier with nobody around it; time is what the test says it is."""

    def __init__(self, home: Path, *commands: Sequence[str], **variables: str) -> None:
        self.home = home
        self.said: list[str] = []
        self.now = time.monotonic()
        self.notifier = Notifier(
            [Channel("notify", tuple(command)) for command in commands],
            {**os.environ, **variables},
            home,
            self.said.append,
        )

    def offer(self, event: str = "failed", **more: Any) -> None:
        self.notifier.offer({"event": event, **more})

    def advance(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.notifier.advance(self.now)

    def work_off(self) -> Json:
        def idle() -> bool:
            self.advance()
            return not self.notifier.busy

        wait_until(idle, f"all delivered; so far {self.said}")
        return self.notifier.counts()

    def pid(self) -> int:
        assert self.notifier._current is not None
        return self.notifier._current.process.pid


@pytest.fixture
def desks(tmp_path: Path) -> Iterator[Any]:
    with contextlib.ExitStack() as open_desks:

        def made(*commands: Sequence[str], **variables: str) -> Desk:
            desk = Desk(tmp_path, *commands, **variables)
            open_desks.callback(desk.notifier.close)
            return desk

        yield made


def shell(script: str, *arguments: str) -> list[str]:
    return ["/bin/sh", "-c", script, *arguments]


def counts(sent: int = 0, failed: int = 0, dropped: int = 0) -> Json:
    return {"sent": sent, "failed": failed, "dropped": dropped}


LOOK_AROUND = """\
import json, os, sys
seen = {
    "said": json.loads(sys.stdin.read()),
    "environment": dict(os.environ),
    "descriptors": sorted(os.listdir("/proc/self/fd"), key=int)[:-1],
    "leader": os.getsid(0) == os.getpid(),
    "home": os.getcwd(),
}
open("seen.new", "w").write(json.dumps(seen))
os.rename("seen.new", "seen")
"""


@pytest.mark.fault(
    "SV-77", phase="any", does="gives a notifier none of its own sockets, locks and secrets"
)
def test_a_notifier_gets_the_notification_and_nothing_else_of_ours(
    desks: Any, tmp_path: Path
) -> None:
    """Supervisors leaked the socket on which a service manager hears them into what they start, and
    with it the power to speak in their name (gpud PR#1232, systemd PR#27297)."""
    secret = {
        contract.ENV_NONCE: "nonce",
        contract.ENV_LOCK_FD: "9",
        channels.ENV_WEBHOOK: "https://example.org/secret",
        "NOTIFY_SOCKET": "/run/notify",
        "LISTEN_FDS": "1",
        "MINE": "kept",
    }
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        desk = desks([PYTHON, "-c", LOOK_AROUND], **secret)
        desk.offer("failed", reason="é\n\x1b[2J", step=7)
        assert desk.work_off() == counts(sent=1)
    finally:
        os.close(lock)
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["said"] == {"event": "failed", "reason": "é\n\x1b[2J", "step": 7}
    assert {name for name in secret if name in seen["environment"]} == {"MINE"}
    assert seen["descriptors"] == ["0", "1", "2"]
    assert (seen["leader"], seen["home"]) == (True, str(tmp_path))


def test_notifications_arrive_one_after_the_other_in_order_on_every_channel(
    desks: Any, tmp_path: Path
) -> None:
    # Each says when it begins and when it ends; two at once would interleave.
    script = 'echo "begin $0" >> log; cat >> log; echo "end $0" >> log'
    desk = desks(shell(script, "one"), shell(script, "two"))
    for event in ("restarting", "failed"):
        desk.offer(event)
    assert desk.work_off() == counts(sent=4)
    assert (tmp_path / "log").read_text().splitlines() == [
        line
        for event in ("restarting", "failed")
        for name in ("one", "two")
        for line in (f"begin {name}", json.dumps({"event": event}).replace(" ", ""), f"end {name}")
    ]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no such room >&2; exit 3", "exit code 3: no such room"),
        ("kill -9 $$", "signal 9"),
        ("printf 'first\\nlast \\033[2J\\n\\n' >&2; exit 1", "exit code 1: last \ufffd[2J"),
    ],
)
def test_a_notifier_that_fails_is_counted_and_its_words_are_kept(
    desks: Any, script: str, why: str
) -> None:
    desk = desks(shell(script))
    desk.offer("failed")
    assert desk.work_off() == counts(failed=1)
    assert desk.said == [f"notification of 'failed' not delivered (alarms.notify): {why}"]


def test_a_notifier_that_cannot_be_started_is_counted_and_the_next_is_tried(
    desks: Any, tmp_path: Path
) -> None:
    desk = desks(["./is-not-there"], shell("cat > told"))
    desk.offer("finished")
    assert desk.work_off() == counts(sent=1, failed=1)
    assert "cannot be started" in desk.said[0]
    assert (tmp_path / "told").read_text() == '{"event":"finished"}\n'


# A child in the notifier's own process group and one in another, which a group's kill would miss.
HANG_WITH_A_TREE = """\
import os, signal, subprocess, sys
children = [
    subprocess.Popen(["sleep", "1000"]),
    subprocess.Popen(["sleep", "1000"], process_group=0),
]
open("pids.new", "w").write(" ".join(str(child.pid) for child in children))
os.rename("pids.new", "pids")
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
"""


def pids_of(tmp_path: Path) -> list[int]:
    path = tmp_path / "pids"
    wait_until(path.exists, "the notifier's children")
    return [int(word) for word in path.read_text().split()]


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def test_a_notifier_that_does_not_end_is_killed_with_all_it_started(
    desks: Any, tmp_path: Path
) -> None:
    bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        desk = desks([PYTHON, "-c", HANG_WITH_A_TREE + "\nwhile True: signal.pause()"])
        desk.offer("failed")
        desk.advance()
        pids = [desk.pid(), *pids_of(tmp_path)]
        desk.advance(notifier.LIMIT_SECONDS - 1)
        assert all(alive(pid) for pid in pids), "its time is not up yet"
        desk.advance(1)
        assert desk.work_off() == counts(failed=1)
        wait_until(lambda: not any(alive(pid) for pid in pids), "the end of its tree")
        assert desk.said[0].endswith("killed: it had not ended after 30 s")
        assert alive(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()


def test_what_a_notifier_leaves_behind_ends_with_it(desks: Any, tmp_path: Path) -> None:
    desk = desks([PYTHON, "-c", HANG_WITH_A_TREE])
    desk.offer("failed")
    assert desk.work_off() == counts(sent=1)
    wait_until(lambda: not any(alive(pid) for pid in pids_of(tmp_path)), "the end of what it left")


def test_the_loop_is_woken_when_a_notifier_ends(desks: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    desk = desks(shell("read line < gate"))
    assert not readable(desk.notifier.fileno())
    desk.offer("failed")
    desk.advance()
    assert not readable(desk.notifier.fileno())
    (tmp_path / "gate").write_text("go\n")
    wait_until(lambda: readable(desk.notifier.fileno()), "the wake-up")
    desk.advance()
    assert desk.notifier.counts() == counts(sent=1)
    assert not readable(desk.notifier.fileno())


def readable(descriptor: int) -> bool:
    look = select.poll()
    look.register(descriptor, select.POLLIN)
    return bool(look.poll(0))


def test_a_notifier_that_reads_nothing_and_floods_its_stderr_holds_up_nobody(desks: Any) -> None:
    script = "head -c 1000000 /dev/zero | tr '\\0' x >&2; echo >&2; echo enough >&2; exit 1"
    desk = desks(shell(script))
    desk.offer("failed", reason="y" * 500_000)
    assert desk.work_off() == counts(failed=1)
    assert desk.said[0].endswith("exit code 1: enough")


def test_the_queue_is_bounded_and_the_newest_stay(desks: Any, tmp_path: Path) -> None:
    desk = desks(shell("cat >> log"))
    for number in range(QUEUE_MAX + 5):
        desk.offer("alarm", number=number)
    assert desk.work_off() == counts(sent=QUEUE_MAX, dropped=5)
    lines = (tmp_path / "log").read_text().splitlines()
    arrived = [json.loads(line)["number"] for line in lines]
    assert arrived == list(range(5, QUEUE_MAX + 5))
    assert desk.said[0] == ("notification of 'alarm' dropped (alarms.notify): too many wait")


def test_closing_ends_what_runs_and_counts_what_waits(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ["sleep", "1000"])
    for event in ("restarting", "failed"):
        desk.offer(event)
    desk.advance()
    pid = desk.pid()
    desk.notifier.close()
    assert not alive(pid)
    assert desk.notifier.counts() == counts(failed=1, dropped=1)
    assert [line.rpartition(": ")[2] for line in desk.said] == [
        "this life of the supervisor ends"
    ] * 2


def test_nobody_is_told_where_nobody_wants_to_be(desks: Any) -> None:
    desk = desks()
    desk.offer("failed")
    assert not desk.notifier.busy
    assert desk.work_off() == counts()


# --- the webhook ----------------------------------------------------------------------------------


class Server:
    """An HTTP server of our own that keeps what it gets."""

    def __init__(self) -> None:
        self.answer = 204
        self.requests: list[tuple[str, str, str, bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                kind = self.headers.get("Content-Type", "")
                outer.requests.append((self.command, self.path, kind, body))
                self.send_response(outer.answer)
                if 300 <= outer.answer < 400:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST = handle_one

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: what came is in `requests`."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook/SECRET"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    with contextlib.closing(Server()) as made:
        yield made


def hook(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return subprocess.run(
        [sys.executable, "-P", "-m", "supervisor.webhook", *arguments],
        input='{"event":"failed"}\n',
        capture_output=True,
        text=True,
        env=plain | variables,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


def secret_file(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "hook.url"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_webhook_gets_the_same_object_as_json(server: Server, tmp_path: Path) -> None:
    by_environment = hook(**{channels.ENV_WEBHOOK: server.url})
    by_file = hook("--file", str(secret_file(tmp_path, f"{server.url}\n")))
    assert (by_environment.returncode, by_file.returncode) == (0, 0)
    one = ("POST", "/hook/SECRET", "application/json", b'{"event":"failed"}\n')
    assert server.requests == [one, one]


@pytest.mark.parametrize("answer", [301, 307, 404, 500])
def test_only_a_success_is_one_and_the_secret_stays_secret(server: Server, answer: int) -> None:
    server.answer = answer
    done = hook(**{channels.ENV_WEBHOOK: server.url})
    assert done.returncode == ExitCode.FAILED
    assert f" answered {answer}" in done.stderr
    assert "SECRET" not in done.stderr
    assert [request[:2] for request in server.requests] == [("POST", "/hook/SECRET")]


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "127.0.0.1:nonsense", "a..b", "[::1"])
def test_a_host_that_cannot_be_reached_is_told_without_the_secret(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = hook(**{channels.ENV_WEBHOOK: f"http://{host.format(port=port)}/SECRET"})
    assert done.returncode == ExitCode.FAILED
    assert "was not reached: " in done.stderr
    assert "SECRET" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_webhook_without_a_url_says_where_one_comes_from() -> None:
    done = hook()
    assert done.returncode == ExitCode.CONFIGURATION
    assert channels.ENV_WEBHOOK in done.stderr


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        ("https://example.org/x", 0o640, "chmod 600"),
        ("https://example.org/x", 0o604, "mode 0604"),
        ("file:///etc/passwd", 0o600, "expected one URL"),
        ("https://example.org/x\nand more", 0o600, "expected one URL"),
        ("", 0o600, "expected one URL"),
    ],
)
def test_a_secret_that_others_can_read_is_refused_and_so_is_none(
    tmp_path: Path, text: str, mode: int, expected: str
) -> None:
    path = secret_file(tmp_path, text, mode)
    with pytest.raises(ChannelError, match=r"alarms\.webhook_file") as refused:
        channels.read_url(path)
    assert expected in str(refused.value)
    assert "example.org" not in str(refused.value)


def test_the_url_of_the_environment_goes_first_and_is_in_no_argument() -> None:
    url, other = "https://example.org/a", "https://example.org/b"
    (by_setting,) = channels.channels((), url, None, {})
    (by_environment,) = channels.channels((), url, None, {channels.ENV_WEBHOOK: other})
    (over_file,) = channels.channels((), None, "/secret", {channels.ENV_WEBHOOK: other})
    (by_file,) = channels.channels((), None, "/secret", {})
    assert by_setting.environment == {channels.ENV_WEBHOOK: url}
    assert by_environment.environment == over_file.environment == {channels.ENV_WEBHOOK: other}
    assert by_file.command[-2:] == ("--file", "/secret")
    for channel in (by_setting, by_environment, over_file, by_file):
        assert "example.org" not in " ".join(channel.command)
    both = channels.channels(("prog", "arg"), url, None, {})
    assert [channel.name for channel in both] == ["notify", "webhook"]


def test_a_url_is_taken_from_where_the_arguments_say(tmp_path: Path) -> None:
    path = secret_file(tmp_path, "https://example.org/f")
    variables = {channels.ENV_WEBHOOK: "https://example.org/e"}
    assert webhook.url_of(["--file", str(path)], variables) == "https://example.org/f"
    assert webhook.url_of([], variables) == "https://example.org/e"
    with pytest.raises(ChannelError, match="usage"):
        webhook.url_of(["--url", "https://example.org/x"], variables)


# --- a run ----------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        made.set("alarms", notify=shell('cat >> "$0"', str(tmp_path / "told")))
        yield made


def told_of(run: Run) -> list[Json]:
    path = run.home / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def told_events(run: Run) -> list[tuple[str, str | None]]:
    return [(one["event"], one["alarm"]) for one in told_of(run)]


def own_log(run: Run) -> str:
    return (run.directory / contract.SUPERVISOR_LOG_FILE).read_text()


@pytest.mark.fault("SV-48", phase="any", does="acts on alarms.notify: the command is run")
def test_the_end_of_a_run_is_told_before_its_supervisor_goes(run: Run) -> None:
    """A heartbeat option was in the help for months and nothing read it (aprender #521)."""
    assert run.finish() == 0
    (told,) = told_of(run)
    created = run.records("run_created")[0]
    assert told.pop("time") > 0
    assert told == {
        **{"schema_version": 1, "run": "run", "run_id": created["run_id"]},
        **{"directory": str(run.directory), "event": "finished", "alarm": None},
        **{"reason": "reached step 30", "step": 30, "target_step": 30, "attempt": 1},
    }
    assert run.file_status()["notifications"] == counts(sent=1)


def test_a_supervisor_waits_for_a_notifier_that_takes_its_time(run: Run, server: Server) -> None:
    run.patch("daemon", "SETTLE_SECONDS", 0.0)
    run.environment["no_proxy"] = "127.0.0.1"
    # Two that go one after the other, and the second is a Python that has to start.
    run.set("alarms", webhook=server.url)
    assert run.finish() == 0
    assert told_events(run) == [("finished", None)]
    assert [json.loads(body)["event"] for _, _, _, body in server.requests] == ["finished"]


def test_nobody_is_told_that_a_run_stopped_as_he_asked(run: Run) -> None:
    supervisor = run.hold(5)
    assert run.supervisor("stop", str(run.directory)).returncode == 0
    assert run.end(supervisor) == 0
    assert told_of(run) == []


@pytest.mark.fault(
    "FC-91", phase="backoff", does="tells of a run that goes round in circles, then of its failure"
)
def test_a_run_that_goes_round_in_circles_is_told_and_then_its_failure(run: Run) -> None:
    """A job was made again and again; nobody saw how often, or why the first time (defilantech
    LLMKube #1856)."""
    run.faults = "crash1@5"
    run.set("restart", deaths=5, maximum_delay_seconds=0.05)
    assert run.finish() == 1
    assert [event for event, _ in told_events(run)] == ["restarting", "failed"]
    restarting, failed = told_of(run)
    assert (restarting["attempt"], failed["attempt"]) == (4, 5)
    assert "5 deaths without a new checkpoint" in failed["reason"]
    assert "the saboteur crashes" in failed["reason"]
    assert run.file_status()["attempt"] == run.file_status()["restarts"] == 5


def test_a_divergence_is_told(run: Run) -> None:
    run.faults = "kill@15#1,wrong@13#2"
    assert run.finish() == 0
    assert told_events(run) == [("alarm", "replay_diverged"), ("finished", None)]
    assert told_of(run)[0]["reason"].startswith("step 13")


def test_a_damaged_checkpoint_is_told(run: Run) -> None:
    supervisor = run.hold(15)
    run.wait_for_record("checkpoint_verified", step=10)
    run.kill_supervisor(supervisor)
    pid = run.file_status()["trainer_pid"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid), "the trainer's end")
    binary = run.directory / contract.CHECKPOINTS / "step_000010.bin"
    content = bytearray(binary.read_bytes())
    content[-1] ^= 1
    binary.chmod(0o600)
    binary.write_bytes(content)
    run.open_gate()
    run.start("--from-scratch")
    wait_until(lambda: len(told_of(run)) == 2, "two notifications")
    assert told_events(run) == [("alarm", "checkpoint_quarantined"), ("finished", None)]
    assert told_of(run)[0]["reason"].startswith("step 10: ")


@pytest.mark.fault("SV-48", phase="any", does="acts on alarms.webhook, and on one beside notify")
def test_a_failing_notifier_costs_the_run_nothing_and_is_seen(run: Run, server: Server) -> None:
    """What is configured and does not work must show, like what works (aprender #521)."""
    run.environment["no_proxy"] = "127.0.0.1"
    run.set("alarms", notify=shell("echo the line is dead >&2; exit 7"), webhook=server.url)
    assert run.finish() == 0
    assert run.file_status()["notifications"] == counts(sent=1, failed=1)
    assert "not delivered (alarms.notify): exit code 7: the line is dead" in own_log(run)
    assert json.loads(server.requests[0][3])["event"] == "finished"
    shown = run.supervisor("status", str(run.directory)).stdout
    assert "notifier    1 notifications delivered, 1 failed" in shown


def test_a_notifier_that_hangs_holds_up_neither_the_loop_nor_the_end(run: Run) -> None:
    run.patch("notifier", "LIMIT_SECONDS", 1.0)
    run.faults = "crash1@15#1,wrong@13#2"
    run.set("alarms", notify=["sleep", "1000"])
    supervisor = run.hold(20)
    assert run.status()["step"] == 20, "it answers while the notifier hangs"
    run.open_gate()
    assert run.end(supervisor) == 0
    assert run.file_status()["notifications"] == counts(failed=2)
    assert own_log(run).count("killed: it had not ended after 1 s") == 2


@pytest.mark.fault("SV-48", phase="any", does="acts on alarms.webhook_file and SUPERVISOR_WEBHOOK")
@pytest.mark.parametrize("source", ["file", "environment"])
def test_a_webhook_is_posted_to_and_its_secret_is_kept(
    run: Run, server: Server, source: str
) -> None:
    """Options that are shown and never used are promises that nobody keeps (aprender #521)."""
    run.settings["alarms"] = {}
    run.environment["no_proxy"] = "127.0.0.1"
    run.faults = "environment@5"
    if source == "file":
        run.set("alarms", webhook_file=str(secret_file(run.home, server.url)))
    else:
        run.write_config()
        run.environment[channels.ENV_WEBHOOK] = server.url
    assert run.finish() == 0
    ((method, path, _, body),) = server.requests
    assert (method, path) == ("POST", "/hook/SECRET")
    assert json.loads(body)["event"] == "finished"
    assert run.file_status()["notifications"] == counts(sent=1)
    log = (run.directory / contract.LOGS / "attempt-0001.log").read_text()
    assert contract.ENV_NONCE in log
    assert channels.ENV_WEBHOOK not in log, "a trainer has no use for it"
    files = [file for file in run.directory.rglob("*") if file.is_file()]
    assert [file for file in files if b"SECRET" in file.read_bytes()] == []


@pytest.mark.parametrize(
    ("alarms", "expected"),
    [
        ({"notify": ["is-not-there", "x"]}, "'is-not-there' is none on PATH"),
        ({"notify": [""]}, "alarms.notify"),
        ({"webhook": "ftp://example.org"}, "expected a URL, https://HOST/PATH"),
        (
            {"webhook_file": "/is/not/there"},
            "alarms.webhook_file = '/is/not/there': expected a file",
        ),
        (
            {"webhook": "https://example.org/x", "webhook_file": "/secret"},
            "alarms.webhook: expected no value, as alarms.webhook_file has one",
        ),
    ],
)
def test_what_could_never_deliver_is_refused_at_the_start(
    run: Run, alarms: Json, expected: str
) -> None:
    run.settings["alarms"] = alarms
    run.write_config()
    with pytest.raises((start.Refused, ConfigError)) as refused:
        start.start_from_file(str(run.config), (), os.environ, start.Request())
    assert expected in str(refused.value)
    assert not run.directory.exists()
