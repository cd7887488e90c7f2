"""What the data of a policy cannot carry out is refused before anything is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import tomli_w
import trainer_kit as kit
from exactness_kit import TrainedRun

from supervisor import data_check, pivot

# The arms have 15 and 6 pulls a round (see trainer_kit), and a run is 12 steps.
TOO_FEW, ENOUGH = 0.5, 0.75


def policy(home: Path, **keys: Any) -> dict[str, Any]:
    return {"kind": "static", **kit.tree(home)["policy"], **keys}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedRun]:
    home = tmp_path_factory.mktemp("trained")
    first = policy(home, maximum_epochs=ENOUGH)
    with contextlib.closing(TrainedRun(home, policy=first)) as run:
        yield run.trained()


def policy_file(run: TrainedRun, **keys: Any) -> Path:
    file = run.home / "policy.toml"
    file.write_text(tomli_w.dumps({"policy": policy(run.home, **keys)}))
    return file


def test_a_run_that_its_epochs_cannot_fill_is_not_begun(tmp_path: Path) -> None:
    with contextlib.closing(
        TrainedRun(tmp_path, policy=policy(tmp_path, maximum_epochs=TOO_FEW))
    ) as run:
        assert run.finish() == 2
        assert "policy.maximum_epochs is 0.5, which leaves room for 10 of the 12" in run.output()
        assert not run.directory.exists()


def test_the_check_of_the_trainer_plans(tmp_path: Path) -> None:
    path = kit.write_config(tmp_path, policy=policy(tmp_path, maximum_epochs=TOO_FEW))
    code, _, told = kit.command("check", "--config", str(path))
    assert code == 78
    assert "policy.maximum_epochs is 0.5, which leaves room for 10 of the 12" in told
    assert "Traceback" not in told


def test_a_pivot_counts_what_the_base_has_spent(trained: TrainedRun) -> None:
    """Twelve more steps, after a rollback to step 4, would have been enough without a past."""
    file, journal = policy_file(trained, maximum_epochs=ENOUGH + 0.01), trained.records()
    proposal = pivot.propose(trained.directory, file, at="boundary", reason="", to_step=4)
    assert proposal.bandit is not None
    spent = {name: arm["source"]["pulls"] for name, arm in proposal.bandit["arms"].items()}
    assert sum(spent.values()) == 4
    file = policy_file(trained, maximum_epochs=TOO_FEW)
    with pytest.raises(pivot.PolicyRefused, match=r"maximum_epochs is 0\.5, which .* 6 of the 8"):
        pivot.propose(trained.directory, file, at="boundary", reason="", to_step=4)
    refused = trained.supervisor(
        *("rollback", str(trained.directory), "--to-step", "4", "--policy", str(file))
    )
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    assert trained.records() == journal


def test_a_policy_with_epochs_can_be_tried(trained: TrainedRun) -> None:
    file = str(policy_file(trained, maximum_epochs=5.0))
    place = (file, str(trained.directory), "--pulls", "50", "--json")
    tried = trained.supervisor("policy", "check", *place)
    assert tried.returncode == 0, tried.stderr
    assert sum(row["share"] for row in orjson.loads(tried.stdout)["arms"]) == pytest.approx(1.0)


def test_a_longer_run_that_its_epochs_cannot_fill_is_not_recorded(trained: TrainedRun) -> None:
    before = trained.records()
    assert trained.finish("--set", "training.steps=400") == 2
    assert "maximum_epochs is 0.75, which leaves room for 3 of the 388" in trained.output()
    assert trained.records() == before
    assert trained.finish("--set", "training.steps=14") == 0
    assert len(trained.history()) == 14


def add_text(run: TrainedRun) -> None:
    with (run.home / "prose.jsonl").open("ab") as file:
        file.write(orjson.dumps({"text": "A page that nobody had read before, of the old ferry."}))
        file.write(b"\n")


@pytest.fixture
def other_text(tmp_path: Path) -> Iterator[TrainedRun]:
    """A finished run, one of whose arms has got more text since."""
    with contextlib.closing(TrainedRun(tmp_path, policy=policy(tmp_path))) as run:
        run.trained()
        add_text(run)
        yield run


def test_more_text_for_an_arm_is_taken_on_by_a_pivot(other_text: TrainedRun) -> None:
    """Under its name it is another arm: fresh cursor, and no restart in between is refused."""
    run = other_text
    assert run.finish("--set", "training.steps=20") == 1
    assert "Put back what the run began with, pivot to other text" in run.output()
    before = run.manifest(12).state["arms"]
    # The file says what ruled before: it is the text that is new.
    dry = run.supervisor("policy", "diff", str(policy_file(run)), str(run.directory))
    assert f'policy.arms.prose.text: recorded "{before["prose"]["corpus_digest"]}"' in dry.stdout
    done = run.supervisor("pivot", str(run.directory), "--policy", str(policy_file(run)))
    assert done.returncode == 0, done.stderr
    assert run.finish() == 0, run.output()
    assert [entry.epoch for entry in run.history()] == [1] * 12 + [2] * 8
    after, bandit = (run.manifest(20).state[name] for name in ("arms", "bandit"))
    assert after["prose"]["corpus_digest"] != before["prose"]["corpus_digest"]
    assert after["code"]["corpus_digest"] == before["code"]["corpus_digest"]
    pulls = {name: arm["pulls"] for name, arm in bandit["arms"].items()}
    assert after["prose"]["sampler"]["cursor"] == 4 * pulls["prose"]
    assert pulls["code"] < 6 < after["code"]["sampler"]["round"] * 6 + 1, "it went on"
    left = [(arm["name"], arm["fingerprint"]) for arm in bandit["retired"]]
    assert left == [("prose", before["prose"]["corpus_digest"])]


def test_a_plain_restart_with_more_text_stays_refused_after_a_pivot(
    other_text: TrainedRun,
) -> None:
    run = other_text
    done = run.supervisor("pivot", str(run.directory), "--policy", str(policy_file(run)))
    assert done.returncode == 0, done.stderr
    assert run.finish("--set", "training.steps=16") == 0, run.output()
    add_text(run)
    assert run.finish("--set", "training.steps=20") == 1
    assert "Put back what the run began with, pivot to other text" in run.output()


def test_a_policy_that_leans_on_one_arm_is_allowed_with_a_warning(trained: TrainedRun) -> None:
    arms = [arm | {"cap": 0.75} for arm in policy(trained.home)["arms"]]
    file = str(policy_file(trained, arms=arms))
    words = "warning: phase main: without arm code the caps of the others sum to 0.75, less than 1"
    place = str(trained.directory)
    dry = trained.supervisor("pivot", place, "--policy", file, "--dry-run")
    assert (dry.returncode, words in dry.stderr) == (0, True)
    tried = trained.supervisor("policy", "check", file, place, "--json")
    assert (tried.returncode, words in tried.stderr) == (0, True)
    assert len(orjson.loads(tried.stdout)["warnings"]) == 2


def test_settings_meant_for_another_command_are_not_checked(
    trained: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUPERVISOR_POLICY__MAXIMUM_EPOCHS", "0.001")
    monkeypatch.setenv("PYTHONPATH", str(kit.ROOT))
    file = policy_file(trained, maximum_epochs=5.0)
    found = pivot.propose(trained.directory, file, at="boundary", reason="", to_step=None)
    assert found.bandit is not None


def test_data_that_is_not_loaded_in_time_is_a_refusal(
    trained: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_check, "CHECK_SECONDS", 0.001)
    with pytest.raises(pivot.PolicyRefused, match=r"not loaded within 0\.001 s"):
        pivot.propose(
            trained.directory, policy_file(trained), at="boundary", reason="", to_step=None
        )
