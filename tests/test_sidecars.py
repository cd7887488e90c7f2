"""The small files of a run: absent, whole, or an error that names the file and what to do."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from supervisor import contract, foreign, sidecars
from supervisor.contract import ContractError, Json
from supervisor.rundir import RunError
from supervisor.sidecars import read_samples, read_state, read_status, read_training

SAMPLE: Json = {"step": 10, "prompt": "The ", "text": "end"}


def written(tmp_path: Path, value: object) -> Path:
    path = tmp_path / contract.STATUS_FILE
    path.write_bytes(orjson.dumps(value))
    return path


def test_what_is_not_there_is_empty(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    assert read_samples(tmp_path / "x") == []
    assert read_state(tmp_path / "x") == {}
    assert read_training(tmp_path / "x") == {}


def test_a_status_has_every_key_that_readers_rely_on(tmp_path: Path) -> None:
    """Also one that an earlier version wrote, or that a later one has added to."""
    written(tmp_path, {"phase": "running", "mood": "good", "checkpoint": {"step": 10}})
    found = read_status(tmp_path)
    assert found is not None
    assert (found["phase"], found["mood"], found["step"]) == ("running", "good", None)
    assert found["checkpoint"] == {"step": 10, "path": None, "verified": None}
    assert found["last_exit"] == {"cause": None, "code": None, "signal": None}
    assert found["alarms"] == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([], "expected an object"),
        ({"phase": 1}, "phase: expected text"),
        ({"step": -1}, "step: expected an integer of at least 0"),
        ({"step": 2**31}, "step: expected an integer of at most 2147483647"),
        ({"run": "../up"}, "run: expected the name of a run"),
        ({"loss": []}, "loss: expected a number"),
        ({"checkpoint": []}, "checkpoint: expected an object"),
        ({"checkpoint": {"verified": 1}}, "checkpoint verified: expected true or false"),
        ({"alarms": [{"name": 3}]}, "alarms name: expected text"),
    ],
)
def test_a_status_that_is_none_is_told(tmp_path: Path, wrong: object, words: str) -> None:
    path = written(tmp_path, wrong)
    with pytest.raises(RunError) as told:
        read_status(tmp_path)
    assert str(path) in str(told.value)
    assert words in str(told.value)
    assert "the next start begins it anew" in str(told.value)


@pytest.mark.parametrize("wrong", [{}, [1], [{**SAMPLE, "step": "ten"}], [{**SAMPLE, "text": 1}]])
def test_samples_that_are_none_are_told(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(RunError, match="expected"):
        read_samples(written(tmp_path, wrong))
    assert read_samples(written(tmp_path, [SAMPLE])) == [SAMPLE]


def test_training_holds_an_object_for_each_attempt(tmp_path: Path) -> None:
    assert read_training(written(tmp_path, {"attempt-0001": {}})) == {"attempt-0001": {}}
    with pytest.raises(RunError, match="attempt: expected an object"):
        read_training(written(tmp_path, {"attempt-0001": 1}))
    with pytest.raises(RunError, match="expected an object"):
        read_state(written(tmp_path, None))


def test_a_file_beyond_the_limit_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecars, "SIDECAR_BYTES_MAX", 10)
    with pytest.raises(RunError, match="11 bytes, more than the limit of 10"):
        read_samples(written(tmp_path, [SAMPLE]))


# --- bounds of foreign JSON -----------------------------------------------------------------------


def test_depth_and_number_of_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    most = foreign.DEPTH_MAX
    deep = b"[" * (most - 1) + b"]" * (most - 1)
    assert foreign.parse_object(b'{"a":' + deep + b"}", "x", 10_000)
    with pytest.raises(ContractError, match="nested deeper than 64 levels"):
        foreign.parse_object(b'{"a":[' + deep + b"]}", "x", 10_000)
    monkeypatch.setattr(foreign, "VALUES_MAX", 4)
    assert foreign.parse_object(b'{"a":[1,2]}', "x", 10_000) == {"a": [1, 2]}
    with pytest.raises(ContractError, match="more than 4 values"):
        foreign.parse_object(b'{"a":[1,2,3,4]}', "x", 10_000)
    with pytest.raises(ContractError, match="11 bytes, more than the limit of 10"):
        foreign.parse_object(b'{"a":[1,2]}', "x", 10)


def test_an_identifier_is_short_and_text_is_text() -> None:
    assert foreign.identifier("r1", "x") == "r1"
    for wrong in ("", "x" * 129, 1, None):
        with pytest.raises(ContractError):
            foreign.identifier(wrong, "x")
    with pytest.raises(ContractError, match="not Unicode text"):
        foreign.text("\ud800", "x")
    assert foreign.text("\U0001f600", "x") == "\U0001f600"
