"""Every parser of foreign bytes takes an input or refuses it in its own words, whatever it is.

Inputs are random bytes and structures, and mutations of valid documents, also with their checksums
made right again. What a parser takes must survive what is done with it: be written again, shown,
journalled. CI shows each parser some thousands of inputs, fewer where files are written; the long
version shows a million to each.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoint_kit
import fuzz_kit
import orjson
import pytest
import tomli_w
from fuzz_kit import TOML_ALPHABET, Pairs, Source, campaign

from supervisor import (
    config,
    contract,
    durable,
    events as ev,
    journal,
    ledger,
    pivot,
    receipt_file,
    sidecars,
    status,
    view_commands,
)
from supervisor.contract import ContractError, Json
from supervisor.link import life_from_environment
from supervisor.machine import decide
from supervisor.records import RecordBroken
from supervisor.rows import LedgerDamaged
from supervisor.rundir import RunError
from supervisor.state import PHASES, Rules, State, fold

INPUTS, SOAK = 10_000, 1_000_000
ROOT = Path(__file__).parent.parent


@dataclass
class Parser:
    """One of them: valid documents, how it is called, what it may raise."""

    source: Source
    parse: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]


# --- messages -------------------------------------------------------------------------------------

LIFE: Json = {"attempt": 3, "nonce": "0123456789abcdef"}
MESSAGES: dict[str, tuple[Any, list[bytes]]] = {
    "up": (
        contract.UP,
        [
            contract.encode_message(
                "hello",
                **LIFE,
                pid=7,
                step=40,
                parameters=6,
                policy_digest="p",
                capabilities=["stop"],
            ),
            contract.encode_message("phase", **LIFE, phase="save", deadline_seconds=3.5),
            contract.encode_message("step", **LIFE, step=41, loss=2.25),
            contract.encode_message("step", **LIFE, step=41, loss="nan"),
            contract.encode_message("seen", **LIFE, id="r1"),
            contract.encode_message(
                "saved",
                **LIFE,
                step=50,
                digest="d",
                reason="operator",
                requests=["r1"],
                seconds=0.1,
            ),
            contract.encode_message("paused", **LIFE, step=50, id="r1"),
            contract.encode_message("farewell", **LIFE, why="stopped", step=50),
        ],
    ),
    "down": (
        contract.DOWN,
        [
            contract.encode_message("checkpoint", id="r1", at="boundary"),
            contract.encode_message("stop", id="r2", at="now"),
            contract.encode_message("pause", id="r3"),
            *(contract.encode_message(verb) for verb in ("exit", "resume", "who")),
        ],
    ),
    "ask": (
        contract.ASK,
        [
            *(contract.encode_message(verb, id="a") for verb in ("status", "stop", "restart")),
            contract.encode_message("checkpoint", id="b", at="now"),
            contract.encode_message("pin", id="c", step=50, why="fork"),
            contract.encode_message(
                "pivot",
                id="d",
                at="boundary",
                epoch=1,
                parent=1,
                to_step=50,
                policy="p",
                settings="s",
                policy_digest="d",
                reason="why not",
            ),
        ],
    ),
    "answer": (
        contract.ANSWER,
        [
            contract.encode_message("reply", id="a", outcome="done", why="", result={"step": 50}),
            contract.encode_message("reply", id="a", outcome="busy", result={}),
        ],
    ),
}


def message_parser(table: str) -> Parser:
    schema, documents = MESSAGES[table]

    def parse(data: bytes) -> object:
        verb, content = contract.parse_message(data, schema, "message")
        return contract.encode_message(verb, **content)

    return Parser(Source(table, documents), parse, (ContractError,))


# --- receipts and manifests -----------------------------------------------------------------------

RECEIPTS = [
    contract.encode_receipt(receipt).rstrip(b"\n")
    for receipt in (
        contract.Entry(1, 2.5),
        contract.Entry(2, float("nan"), 1.5e9, 1, 1, "prose", 20, 1e-3, 0.5, 0.01),
        contract.EnvironmentLine(1, {"torch": "2.6", "threads": 2, "switches": {"a": [True]}}),
        contract.AuditLine(10, 1.5e9, 1, 1, [{"prompt": "The ", "text": "end"}], {"prose": 0.5}),
        contract.EvaluationLine(10, 1, 2.5, {"prose": {"loss": 2.5}}),
        contract.ExitLine("stopped", 10, 0, ["r1"], "as asked"),
    )
]


def parse_receipt(data: bytes) -> object:
    return contract.encode_receipt(contract.parse_receipt(data, "receipt"))


def sealed_manifest(tree: Any) -> bytes:
    """With the digest that its content has, where it is an object that can have one."""
    text = fuzz_kit.write(tree).encode("utf-8", "surrogatepass")
    try:
        body = orjson.loads(text)
        body.pop("digest", None)
        body["digest"] = contract.digest(contract.canonical(body))
        return contract.canonical(body) + b"\n"
    except (ValueError, TypeError, AttributeError):
        return text


def manifests() -> list[bytes]:
    data = checkpoint_kit.binary(50, 6)
    return [checkpoint_kit.manifest(data, 50, 6, lineage=(("run-0", 40),)).to_bytes()]


def parse_manifest(data: bytes) -> object:
    return contract.parse_manifest(data, "manifest").to_bytes()


# --- ledger and journal ---------------------------------------------------------------------------

ENTRIES = [contract.Entry(n, 2.0 + n, 1.5e9 + n, 1, 1, "prose") for n in range(1, 6)]
LEDGERS = [
    b"[\n" + b",\n".join(orjson.dumps(entry.to_json()) for entry in ENTRIES) + b"\n]\n",
    b"[\n]\n",
]
ANDREA = [b"[[1, 4.5], [2, 4.25], [3, NaN]]", b"[\n[1, 4.5],\n[2, 4.25]\n]"]


def read_ledger(path: Path) -> Callable[[bytes], object]:
    def parse(data: bytes) -> object:
        path.write_bytes(data)
        entries, _ = ledger.read_entries(path)
        return [orjson.dumps(entry.to_json()) for entry in ledger.canonical(entries)]

    return parse


def open_ledger(path: Path) -> Callable[[bytes], object]:
    """Repairs it, appends to it; every reader must then take it whole."""

    def parse(data: bytes) -> object:
        for aside in path.parent.glob(f"{path.name}.dropped-*"):
            aside.unlink()
        path.write_bytes(data)
        opened = ledger.Ledger.open(path)
        try:
            tail = opened.tail(0, 2)
            for step in range(1, 4):
                tail.earlier(step)
            opened.append([contract.Entry(9, 1.0)])
            assert opened.binding(9)[0] == opened.count
        finally:
            opened.close()
        assert json.loads(path.read_bytes())[-1]["step"] == 9
        return ledger.read_entries(path)

    return parse


def journal_of(*records: ev.Record) -> bytes:
    return b"".join(sealed_lines([ev.record_to_json(record) for record in records]))


def sealed_lines(records: Sequence[Json]) -> list[bytes]:
    lines, check = [], ""
    for seq, record in enumerate(records, start=1):
        line, check = journal.encode_line(record, seq, 1.5e9, check)
        lines.append(line)
    return lines


def sealed_journal(tree: Any) -> bytes:
    """One line with a right check, its content as wild as it may be."""
    body = fuzz_kit.write(tree).encode("utf-8", "surrogatepass")
    check = journal._check("", body)
    return body[:-1] + f',"check":"{check}"}}\n'.encode()


RECORDS: list[ev.Record] = [
    ev.RunCreated("0f3a", "run", 30, "d1", "settings", "policy"),
    ev.SupervisorStarted("life", 7, "host", "1"),
    ev.AttemptStarted(1, "n", 0, 1),
    ev.AttemptSpawned(1, 8, 9, "boot"),
    ev.CheckpointCommitted(10, 1, "cadence", ["r1"], "bd"),
    ev.Evaluated(10, 2.5, {"prose": {}}),
    ev.AttemptEnded(1, "signal", None, 9, 12, True, 0, "words"),
    ev.Replied("r1", "checkpoint", "done", "", {"step": 10}),
]


def read_journal(path: Path) -> Callable[[bytes], object]:
    def parse(data: bytes) -> object:
        path.write_bytes(data)
        lines, torn = journal.read(path)
        records = [ev.record_from_json(line) for line in lines]
        return [record_of_json for record_of_json in records if record_of_json is not None], torn

    return parse


def open_journal(path: Path) -> Callable[[bytes], object]:
    def parse(data: bytes) -> object:
        path.write_bytes(data)
        opened, lines = journal.Journal.open(path)
        try:
            opened.append([{"record": "alarmed", "name": "a", "detail": "b"}], 1.5e9)
        finally:
            opened.close()
        assert len(journal.read(path)[0]) == len(lines) + 1
        return lines

    return parse


# --- settings -------------------------------------------------------------------------------------

TREE: Json = {
    "run": {"name": "run", "directory": "/tmp/run"},
    "model": {"width": 64, "heads": 2},
    "training": {"steps": 30, "learning_rate": 1e-3},
    "trainer": {"command": ["true"]},
    "samples": {"prompts": ["The ", "In "]},
    "policy": {
        "kind": "static",
        "warmup_steps": 3,
        "warmup_arms": ["a"],
        "arms": [{"name": "a", "files": ["a.txt"], "floor": 0.1}, {"name": "b", "files": ["b.md"]}],
    },
    "restart": {"delay_seconds": 0.5},
}
SETTINGS = [tomli_w.dumps(TREE).encode()]
POLICIES = [tomli_w.dumps({"policy": TREE["policy"], "training": {"learning_rate": 0.1}}).encode()]


def load_settings(path: Path) -> Callable[[bytes], object]:
    def parse(data: bytes) -> object:
        path.write_bytes(data)
        return config.parse_toml(config.dump(config.load(path)), "again")

    return parse


def parse_settings(data: bytes) -> object:
    """A manifest's configuration: JSON values that the contract has let through."""
    return config.dump(config.parse(contract.parse_object(data, "configuration", 10**6), "where"))


def override_settings(path: Path) -> Callable[[bytes], object]:
    path.write_bytes(SETTINGS[0])

    def parse(data: bytes) -> object:
        text = data.decode("utf-8", "surrogateescape").replace("\0", "")
        environment = {f"SUPERVISOR_{text}": "1"}
        overrides = [text] if "=" in text else [f"training.steps={text}"]
        return config.load(path, overrides, environment)

    return parse


def propose_policy(home: Path) -> Callable[[bytes], object]:
    recorded = config.resolve(config.parse(TREE, "tree"), "0f3a")
    created = ev.RunCreated("0f3a", "run", 30, "d1", config.dump(recorded), "")
    (home / contract.JOURNAL_FILE).write_bytes(journal_of(created))
    file = home / "policy.toml"

    def parse(data: bytes) -> object:
        file.write_bytes(data)
        proposal = pivot.propose(home, file, at="boundary", reason="", to_step=None)
        return contract.encode_message("pivot", id="x", **proposal.content)

    return parse


# --- sidecars -------------------------------------------------------------------------------------

STATUS: Json = {
    "schema_version": 1,
    "run": "run",
    "phase": "running",
    "trainer_phase": "step",
    "wish": "run",
    "step": 12,
    "target_step": 30,
    "attempt": 1,
    "restarts": 0,
    "epoch": 1,
    "loss": 2.5,
    "loss_ema": "nan",
    "steps_per_second": 9.5,
    "evaluation": {"step": 10, "loss": 2.5, "arms": {}},
    "checkpoint": {"step": 10, "path": "/tmp/run/checkpoints/step_000010.bin", "verified": True},
    "supervisor_pid": 7,
    "trainer_pid": 8,
    "replay": {"verified_steps": 1, "diverged_steps": 1, "first_diverged_step": 3},
    "last_exit": {"cause": "signal", "code": None, "signal": 9},
    "alarms": [{"name": "a", "detail": "b"}],
    "reason": None,
}


def show_status(home: Path) -> Callable[[bytes], object]:
    def parse(data: bytes) -> object:
        (home / contract.STATUS_FILE).write_bytes(data)
        found, code = status.observe(home)
        assert found is not None
        return view_commands.status_text(found, code), orjson.dumps(found)

    return parse


def sidecar(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def parse(data: bytes) -> object:
        path.write_bytes(data)
        return orjson.dumps(read(path))

    return parse


def parse_life(data: bytes) -> object:
    names = [contract.ENV_NONCE, contract.ENV_EPOCH, contract.ENV_RESUME_STEP, contract.ENV_LOCK_FD]
    values = data.decode("utf-8", "surrogateescape").split(",")
    environment = dict(zip(names, values, strict=False))
    environment |= {contract.ENV_RUN_DIRECTORY: values[0], contract.ENV_ATTEMPT: values[-1]}
    return life_from_environment(environment)


# --- all of them ----------------------------------------------------------------------------------


def parsers(home: Path) -> dict[str, Parser]:
    lines = [journal_of(*RECORDS), *(journal_of(record) for record in RECORDS)]
    bodies = [orjson.dumps({"seq": 1, "time": 1.5, **ev.record_to_json(r)}) for r in RECORDS]

    def settings(name: str, documents: list[bytes]) -> Source:
        return Source(name, documents, TOML_ALPHABET)

    statuses = Source("status", [orjson.dumps(STATUS)])
    samples = [orjson.dumps([{"step": 10, "prompt": "The ", "text": "end", "arm_shares": {}}])]
    training = [orjson.dumps({"attempt-0001": {"torch": "2.6"}})]
    return {
        **{f"message {table}": message_parser(table) for table in MESSAGES},
        "receipt": Parser(Source("receipt", RECEIPTS), parse_receipt, (ContractError,)),
        "manifest": Parser(
            Source("manifest", manifests(), seal=sealed_manifest),
            parse_manifest,
            (ContractError,),
        ),
        "ledger read": Parser(
            Source("ledger read", LEDGERS + ANDREA),
            read_ledger(home / "a.json"),
            (ContractError,),
        ),
        "ledger open": Parser(
            Source("ledger open", LEDGERS), open_ledger(home / "c.json"), (LedgerDamaged,)
        ),
        "journal read": Parser(
            Source("journal read", lines),
            read_journal(home / "a.jsonl"),
            (journal.JournalDamaged, RecordBroken),
        ),
        "journal record": Parser(
            Source("journal record", bodies, seal=sealed_journal),
            read_journal(home / "b.jsonl"),
            (journal.JournalDamaged, RecordBroken),
        ),
        "journal open": Parser(
            Source("journal open", lines),
            open_journal(home / "c.jsonl"),
            (journal.JournalDamaged,),
        ),
        "settings file": Parser(
            settings("settings file", SETTINGS),
            load_settings(home / "a.toml"),
            (config.ConfigError,),
        ),
        "settings tree": Parser(
            Source("settings tree", [orjson.dumps(TREE)]),
            parse_settings,
            (config.ConfigError, ContractError),
        ),
        "settings overrides": Parser(
            settings("settings overrides", [b"training.steps=800", b"9", b"TRAINING__SEED"]),
            override_settings(home / "b.toml"),
            (config.ConfigError,),
        ),
        "policy file": Parser(
            settings("policy file", POLICIES),
            propose_policy(home),
            (config.ConfigError, pivot.PolicyRefused),
        ),
        "status": Parser(statuses, show_status(home), (RunError,)),
        "samples": Parser(
            Source("samples", samples),
            sidecar(home / "s", sidecars.read_samples),
            (RunError,),
        ),
        "state": Parser(
            Source("state", [b'{"step": 1, "epoch": 1, "bandit": {}}']),
            sidecar(home / "t", sidecars.read_state),
            (RunError,),
        ),
        "training": Parser(
            Source("training", training),
            sidecar(home / "u", sidecars.read_training),
            (RunError,),
        ),
        "environment": Parser(
            Source("environment", [b"n,1,40,7,3"], "0123456789,-+. \n"),
            parse_life,
            (ContractError,),
        ),
    }


NAMES = sorted(
    [f"message {table}" for table in MESSAGES]
    + ["receipt", "manifest", "ledger read", "ledger open", "journal read"]
    + ["journal record", "journal open", "settings file", "settings tree", "settings overrides"]
    + ["policy file", "status", "samples", "state", "training", "environment"]
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing here is about durability, so nothing waits for a disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
    for module in (durable, receipt_file):
        monkeypatch.setattr(module, "preallocate", lambda descriptor, offset, size: True)
    in_memory = os.access("/dev/shm", os.W_OK)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if in_memory else tmp_path) as home:
        yield Path(home)


@pytest.mark.fault("SV-67", phase="any", does="takes or refuses every message, and runs none")
@pytest.mark.fault("SV-69", phase="any", does="tolerates garbage in every file of a run")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_every_input_is_taken_or_refused_in_the_words_of_its_parser(name: str, home: Path) -> None:
    """Pickled frames and dotted names over ZeroMQ ran code of whoever sent them (sglang #24618);
    a garbled state file kept a daemon from starting (aiida-core #2459)."""
    run_campaign(name, home, INPUTS)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", NAMES)
def test_a_million_inputs_are_taken_or_refused(name: str, home: Path) -> None:
    run_campaign(name, home, SOAK)


def run_campaign(name: str, home: Path, inputs: int) -> None:
    parser = parsers(home)[name]
    tally = campaign(name, parser.source, parser.parse, parser.refusals, inputs)
    assert tally.refused > inputs // 10, "most inputs should be wrong"
    assert tally.accepted > inputs // 200, "some inputs should be right"


def test_the_names_are_those_of_all_parsers(home: Path) -> None:
    assert sorted(parsers(home)) == NAMES


def test_a_campaign_that_finds_something_says_how_to_find_it_again() -> None:
    def parse(data: bytes) -> object:
        raise KeyError("x") if data == b"wrong" else ContractError("refused")

    source = Source("s", [b"[1]"])
    assert campaign("p", source, lambda data: None, (ContractError,), 10).accepted == 10
    inputs = iter([b"a", b"wrong"])
    source.draw = lambda: next(inputs)  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=r"p: input 1 of its seed.*KeyError(.|\n)*b'wrong'"):
        campaign("p", source, parse, (ContractError,), 2)


def test_a_parser_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(data: bytes) -> object:
        while True:
            pass

    monkeypatch.setattr(fuzz_kit, "CPU_SECONDS_MAX", 0.05)
    with pytest.raises(AssertionError, match="Stuck"):
        campaign("p", Source("s", [b"[1]"]), parse, (ContractError,), 1)


def test_the_same_seed_gives_the_same_inputs() -> None:
    one, other = (Source("s", RECEIPTS) for _ in range(2))
    assert [one.draw() for _ in range(500)] == [other.draw() for _ in range(500)]


# --- what is taken is borne by the lifecycle ------------------------------------------------------


@pytest.mark.parametrize("table", ["up", "ask"])
def test_what_is_taken_from_a_peer_is_borne_by_the_lifecycle(table: str) -> None:
    check_lifecycle(table, INPUTS)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("table", ["up", "ask"])
def test_a_million_messages_are_borne_by_the_lifecycle(table: str) -> None:
    check_lifecycle(table, SOAK)


def check_lifecycle(table: str, inputs: int) -> None:
    """The machine decides on it in every phase, and what it then wants to journal and to answer
    can be written, and read again by the next life."""
    schema, documents = MESSAGES[table]
    source, chance = Source(f"lifecycle {table}", documents), random.Random(table)
    states = [state_in(phase) for phase in PHASES if phase != "idle"]
    taken = 0
    for _ in range(inputs):
        data = source.draw()
        try:
            verb, content = contract.parse_message(data, schema, "message")
        except ContractError:
            continue
        if verb == "status":
            continue
        taken += 1
        asked = {"to_step": None, **content} if verb == "pivot" else {}
        event: ev.Event = (
            ev.Heard(1.0, verb, content)
            if table == "up"
            else ev.Asked(
                1.0,
                content["id"],
                verb,
                content.get("at", "now"),
                step=content.get("step", 0),
                why=content.get("why", ""),
                content=asked,
            )
        )
        _, effects = decide(Rules(), chance.choice(states), event)
        for effect in effects:
            if isinstance(effect, ev.Append):
                line, _ = journal.encode_line(ev.record_to_json(effect.record), 1, 1.0, "")
                record, _ = journal.decode_line(line.rstrip(b"\n"), 1, "")
                assert ev.record_from_json(record) == effect.record, data
            elif isinstance(effect, ev.Reply | ev.Send):
                orjson.dumps(effect)
            elif isinstance(effect, ev.Verify):
                contract.checkpoint_stem(effect.step)
    assert taken > inputs // 50


def state_in(phase: str) -> State:
    records = [*RECORDS[:3], ev.AttemptSpawned(1, 8, 9, "boot"), *RECORDS[4:5]]
    stage = "loading" if phase == "starting" else ""
    return State(durable=fold(records), phase=phase, stage=stage, linked=True, history_step=10)


# --- bombs ----------------------------------------------------------------------------------------

BOMBS = ROOT / "tests" / "bombs.py"


@pytest.mark.fault("SV-67", phase="any", does="bounds what a message or a file can cost in memory")
def test_a_small_input_cannot_take_much_memory_or_time() -> None:
    """A text of a few hundred kilobytes that becomes gigabytes, or minutes, in its parser: nested
    brackets, a million empty lists, a key of ten thousand parts."""
    done = subprocess.run(
        [sys.executable, str(BOMBS)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "bombs refused" in done.stdout


def test_a_complaint_about_a_huge_value_is_short() -> None:
    """It goes back in a reply, and a reply that is larger than a message may be is never read."""
    huge = "\0" * (contract.MESSAGE_BYTES_MAX - 200)
    for frame in (
        contract.encode_message(huge, id="x"),
        contract.encode_message("checkpoint", id="x", at=huge),
        contract.encode_message("status", id=huge),
        contract.encode_message("status", id={huge: 1}),
        orjson.dumps({"version": huge, "verb": "status"}),
    ):
        with pytest.raises(ContractError) as refused:
            contract.parse_message(frame, contract.ASK, "request")
        assert len(str(refused.value)) < 1_000


def test_pairs_write_a_key_twice() -> None:
    assert fuzz_kit.write(Pairs([("a", 1), ("a", [True, None])])) == '{"a":1,"a":[true,null]}'
