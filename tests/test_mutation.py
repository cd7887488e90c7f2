"""The measurement of what the lifecycle's tests notice, on one change that they must and none."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from benchmarks import mutation
from benchmarks.mutation import KILLED_BY_TESTS, KILLED_BY_WORLDS, SURVIVED, Mutant
from supervisor import vigil


def source(module: str) -> str:
    return (Path(mutation.ROOT) / "supervisor" / f"{module}.py").read_text()


@pytest.mark.timeout(300)
def test_a_fault_is_noticed_and_no_fault_is_not() -> None:
    """Without the second half, tests that do not even run would be a perfect score."""
    assert vigil.__file__ == str(Path(mutation.ROOT) / "supervisor" / "vigil.py"), "it is here"
    whole = source("vigil")
    broken = whole.replace("if turn.now < state.patience.deadline(limits):", "if False:")
    assert broken != whole
    mutants = [Mutant("vigil", 0, "none", whole), Mutant("vigil", 0, "broken", broken)]
    codes = {mutant.what: code for mutant, code in mutation.judged(mutants, 1, 3, inf)}
    assert codes["none"] == SURVIVED
    assert codes["broken"] in (KILLED_BY_TESTS, KILLED_BY_WORLDS)


def test_every_mutant_is_another_program_and_says_where() -> None:
    found = list(mutation.mutants_of("shortage"))
    assert len({mutant.source for mutant in found}) == len(found) > 5
    lines = source("shortage").splitlines()
    for mutant in found:
        compile(mutant.source, mutant.what, "exec")
        assert 0 < mutant.line <= len(lines)


def test_the_lines_of_a_change_are_read_from_its_patch() -> None:
    patch = "\n".join(
        [
            "+++ b/x.py",
            "@@ -3 +4 @@ def f():",
            "+a",
            "@@ -9,0 +11,2 @@",
            "+b",
            "+c",
            "@@ -20,2 +23,0 @@",
        ]
    )
    assert mutation.lines_added(patch) == {4, 11, 12}
    assert mutation.lines_added("") == set()


def test_each_cell_of_the_table_is_changed() -> None:
    found = list(mutation.cells_of("machine"))
    assert len(found) > 100
    assert all(" -> " in mutant.what for mutant in found)
