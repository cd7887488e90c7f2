"""An arm whose source is gone must not live on in any sum.

The first system carried an arm `repo-docstrings` with weight 1.546 through a restart although its
source no longer existed; beside three live unit weights it would have taken 34% of the mass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import trainer_kit as kit

from supervisor import config, contract, curriculum
from supervisor.contract import CHECKPOINTS, Manifest
from trainer import checkpoint
from trainer.corpus import DataError

LIVE = ("essays", "verse", "notes")
ZOMBIE = "repo-docstrings"


@pytest.fixture(autouse=True)
def _switches(run_home: Path) -> Iterator[None]:
    with kit.switches_restored():
        yield


def sections(home: Path, *names: str, kind: str = "ducb", steps: int = 12) -> dict[str, Any]:
    for name in names:
        lines = (orjson.dumps({"text": f"{name} {text}"}) + b"\n" for text in kit.PROSE)
        (home / f"{name}.jsonl").write_bytes(b"".join(lines))
    arms = [
        {
            "name": name,
            "files": [str(home / f"{name}.jsonl")],
            "weight": 1.546 if name == ZOMBIE else 1.0,
            "floor": 0.1,
        }
        for name in names
    ]
    return {
        "policy": {"kind": kind, "arms": arms},
        "training": {"steps": steps, "schedule_steps": 40},
    }


def newest(settings: config.Settings) -> Manifest:
    directory = Path(settings.run.directory) / CHECKPOINTS
    return checkpoint.read_manifest(directory, checkpoint.steps(directory)[-1])


@pytest.fixture
def left_behind(run_home: Path) -> config.Settings:
    """A run on four arms, stopped after 12 steps."""
    settings = kit.settings_of(run_home, **sections(run_home, *LIVE, ZOMBIE))
    kit.live(settings)
    return settings


def pivoted(home: Path, steps: int = 40) -> config.Settings:
    return kit.settings_of(home, **sections(home, *LIVE, steps=steps))


def test_a_plain_restart_without_the_source_is_refused_and_names_the_pivot(
    run_home: Path, left_behind: config.Settings
) -> None:
    before = kit.content_of(Path(left_behind.run.directory) / CHECKPOINTS)
    (run_home / f"{ZOMBIE}.jsonl").unlink()
    longer = kit.settings_of(run_home, **sections_without_writing(left_behind, steps=40))
    with pytest.raises(DataError, match=rf"(?s){ZOMBIE}.*supervisor pivot --policy FILE"):
        kit.live(longer, attempt=2)
    assert kit.content_of(Path(left_behind.run.directory) / CHECKPOINTS) == before


def sections_without_writing(settings: config.Settings, steps: int) -> dict[str, Any]:
    tree = settings.tree()
    return {"policy": tree["policy"], "training": {"steps": steps, "schedule_steps": 40}}


def test_after_a_pivot_the_arm_has_no_share_no_count_and_no_exploration(
    run_home: Path, left_behind: config.Settings
) -> None:
    (run_home / f"{ZOMBIE}.jsonl").unlink()
    lived = kit.live(pivoted(run_home), attempt=2, epoch=2)
    state = lived.loop.training.curriculum
    assert set(curriculum.shares(state)) == set(LIVE)
    assert sum(curriculum.shares(state).values()) == pytest.approx(1.0)
    pulls = Counter(entry.arm for entry in lived.entries)
    assert set(pulls) == set(LIVE)
    assert sum(pulls.values()) == 28
    assert [arm.name for arm in state.retired] == [ZOMBIE]
    assert state.retired[0].pulls > 0
    saved = newest(pivoted(run_home)).state
    assert set(saved["arms"]) == set(LIVE)
    assert set(saved["bandit"]["arms"]) == set(LIVE)


@pytest.mark.parametrize("changed", [False, True], ids=["the same text", "other text"])
def test_an_arm_that_comes_back_goes_on_where_it_was_left(
    run_home: Path, left_behind: config.Settings, changed: bool
) -> None:
    """By a second pivot; it must not serve again what it has served. Other text is another arm."""
    before = newest(left_behind).state["arms"][ZOMBIE]
    away = pivoted(run_home, steps=20)
    kit.live(away, attempt=2, epoch=2)
    kept = {ZOMBIE: {before["corpus_digest"]: before["sampler"]}}
    assert newest(away).state["retired"] == kept
    back = sections(run_home, *LIVE, ZOMBIE, steps=40)
    if changed:
        with (run_home / f"{ZOMBIE}.jsonl").open("ab") as file:
            file.write(orjson.dumps({"text": "A page that nobody had read."}) + b"\n")
    lived = kit.live(kit.settings_of(run_home, **back), attempt=3, epoch=3)
    training = lived.loop.training
    pulls = [entry.arm for entry in lived.entries].count(ZOMBIE)
    drawn_before = -(-before["sampler"]["cursor"] // 4)
    assert drawn_before > 0 < pulls
    assert training.samplers[ZOMBIE].draws == pulls + (0 if changed else drawn_before)
    assert newest(left_behind).state["retired"] == (kept if changed else {})


def test_what_would_have_happened_with_the_zombie_in_the_sums() -> None:
    """The first system's figures: 34.0079% of the mass beside three live unit weights, 8.8111%
    beside sixteen. Sums here run over the configured arms only, so neither can come out."""
    beside_three, beside_sixteen = 1.546 / (1.546 + 3), 1.546 / (1.546 + 16)
    assert beside_three == pytest.approx(0.340079, abs=5e-7)
    assert beside_sixteen == pytest.approx(0.088111, abs=5e-7)
    arms = tuple(curriculum.ArmPolicy(name, 1.0, 0.0, 1.0) for name in LIVE)
    policy = curriculum.Policy("static", "share", 0, (), arms)
    state = curriculum.create(policy)
    assert curriculum.shares(state) == pytest.approx(dict.fromkeys(LIVE, 1 / 3))


def test_a_forged_manifest_with_the_zombie_is_refused_by_name(
    run_home: Path, left_behind: config.Settings
) -> None:
    """Re-signed, so that every digest is right: what is refused is the content itself."""
    (run_home / f"{ZOMBIE}.jsonl").unlink()
    settings = pivoted(run_home, steps=20)
    kit.live(settings, attempt=2, epoch=2)
    directory = Path(settings.run.directory) / CHECKPOINTS
    honest = newest(settings)
    bandit = orjson.loads(orjson.dumps(honest.state["bandit"]))
    bandit["arms"][ZOMBIE] = {**bandit["arms"][LIVE[0]], "weight": 1546000}
    forged = replace(honest, state={**honest.state, "bandit": bandit})
    path = directory / f"{contract.checkpoint_stem(honest.step)}.json"
    path.write_bytes(forged.to_bytes())
    with pytest.raises(curriculum.StateError, match=ZOMBIE):
        kit.live(pivoted(run_home, steps=24), attempt=3, epoch=2)


def test_straight_through_resumed_twice_and_across_a_pivot_the_draws_are_the_same(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Arms and windows: a pivot begins the bandit anew but keeps every cursor, so two runs that
    pivot at the same step draw the same, however often each was resumed."""

    def draws(*stops: int) -> list[tuple[str | None, int | None]]:
        home = tmp_path_factory.mktemp("home")
        found = []
        old = kit.settings_of(home, **sections(home, *LIVE, ZOMBIE, steps=12))
        attempt = 0
        for stop in (*(s for s in stops if s < 12), None):
            attempt += 1
            script = {} if stop is None else {stop: kit.term}
            found += kit.live(old, attempt=attempt, script=script).entries
        new = pivoted(home)
        for stop in (*(s for s in stops if s > 12), None):
            attempt += 1
            script = {} if stop is None else {stop: kit.term}
            found += kit.live(new, attempt=attempt, epoch=2, script=script).entries
        return [(entry.arm, entry.targets_seen) for entry in found]

    straight = draws()
    assert len(straight) == 40
    assert draws(3, 7, 19, 33) == straight
