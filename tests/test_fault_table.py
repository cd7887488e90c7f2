"""docs/faults.md is what the tests show: no more, no less, and nothing older."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from fault_cases import CASES, TROUBLE_CHARACTERS_MAX, Case
from fault_table import (
    COLLECTION,
    NOT_SHOWN,
    PHASES,
    Collection,
    Groups,
    Row,
    not_shown,
    problems_of,
    render,
    row_of,
)
from runs_kit import DEADLINE_SECONDS

ROOT: Final = Path(__file__).parent.parent

# Cases that wait for their test; to be emptied.
NOT_SHOWN_YET: Final[tuple[str, ...]] = ()


def collect(root: Path, target: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """What `make faults` does, in the checkout `root`."""
    options = ("--collect-only", "-q", f"--fault-table={target}")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *more],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_SECONDS,
        check=False,
    )


@pytest.fixture(scope="module")
def collection(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Collection:
    """That of this session, if it began with all tests; else one of its own."""
    found = request.config.stash.get(COLLECTION, None)
    if found is not None:
        return found
    target = tmp_path_factory.mktemp("faults") / "faults.md"
    made = collect(ROOT, target)
    if made.returncode:
        return Collection("", tuple((made.stdout + made.stderr).splitlines()))
    return Collection(target.read_text(), ())


def test_every_mark_names_a_known_case_and_a_phase(collection: Collection) -> None:
    assert collection.problems == ()


def test_the_document_is_what_the_tests_show(collection: Collection) -> None:
    assert (ROOT / "docs" / "faults.md").read_text() == collection.table, "make faults"


def test_every_case_is_shown_or_says_why_not(collection: Collection) -> None:
    _, _, listed = collection.table.partition(f"## {NOT_SHOWN}\n")
    cases = [line.split(":")[0].removeprefix("- ") for line in listed.splitlines() if line]
    assert tuple(cases) == NOT_SHOWN_YET


def test_the_registry_has_every_case_once_and_in_order() -> None:
    supervisors = [f"SV-{number}" for number in range(1, 80)]
    field = [f"FC-{number}" for number in range(66, 93)]
    assert list(CASES) == [*supervisors, "FC-08", "FC-16", "FC-22", *field]
    for name, case in CASES.items():
        assert case.threads, name
        assert 0 < len(case.trouble) <= TROUBLE_CHARACTERS_MAX, name
        assert "\n" not in case.trouble + case.threads + case.reason, name


# --- that its verdict can be a bad one ------------------------------------------------------------

GROUPS: Final[Groups] = {
    "One": {"A-1": Case("it broke", "x #1"), "A-2": Case("it hung", "x #2", "it has no parts")},
    "Two": {"B-1": Case("it a|b leaked", "y #1")},
}
SHOWN: Final = Row("A-1", "running", "mends it", "test_x::test_y")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row("A-9", "running", "mends it", "test_x::test_y"), "no case 'A-9'"),
        (Row("A-1", "sleeping", "mends it", "test_x::test_y"), "phase 'sleeping'"),
        (Row("A-1", "running", " ", "test_x::test_y"), "`does` is one line"),
        (Row("A-1", "running", "two\nlines", "test_x::test_y"), "`does` is one line"),
        (Row("A-2", "running", "mends it", "test_x::test_y"), "is shown here"),
    ],
)
def test_a_wrong_mark_is_named_with_its_test(row: Row, words: str) -> None:
    (problem,) = problems_of(row, GROUPS)
    assert problem.startswith("test_x::test_y: ")
    assert words in problem


def test_a_right_mark_is_no_problem() -> None:
    for phase in PHASES:
        assert list(problems_of(Row("A-1", phase, "mends it", "test_x::test_y"), GROUPS)) == []


@pytest.mark.parametrize(
    "mark",
    [
        pytest.mark.fault("A-1"),
        pytest.mark.fault("A-1", phase="running"),
        pytest.mark.fault("A-1", "running", does="mends it"),
        pytest.mark.fault("A-1", phase="running", does="mends it", note="x"),
        pytest.mark.fault(phase="running", does="mends it"),
    ],
)
def test_a_mark_has_a_case_a_phase_and_what_is_done(mark: pytest.MarkDecorator) -> None:
    with pytest.raises(ValueError, match="a fault mark reads"):
        row_of(mark.mark, "test_x::test_y")


def test_what_has_neither_a_test_nor_a_reason_is_listed() -> None:
    assert not_shown([], GROUPS) == ["A-1", "B-1"]
    assert not_shown([SHOWN], GROUPS) == ["B-1"]
    table = render([SHOWN], GROUPS)
    assert table.endswith(f"## {NOT_SHOWN}\n\n- B-1: it a|b leaked\n")
    assert NOT_SHOWN not in render([SHOWN, Row("B-1", "any", "a", "b")], GROUPS)


def cells(table: str) -> list[tuple[str, ...]]:
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [tuple(cell.strip() for cell in line[1:-1].split(" | ")) for line in lines]


def test_rows_come_by_case_then_by_phase_and_say_the_trouble_once() -> None:
    later = Row("A-1", "stopping", "stops it", "test_a::test_b")
    table = render([later, SHOWN, SHOWN, Row("B-1", "any", "a|b", "test_x::test_z")], GROUPS)
    found = cells(table)
    assert found[2:5] == [
        ("A-1", "it broke", "running", "mends it", "test_x::test_y", "x #1"),
        ("A-1", "", "stopping", "stops it", "test_a::test_b", ""),
        ("A-2", "it hung", "", "not applicable: it has no parts", "", "x #2"),
    ]
    assert found[-1] == ("B-1", "it a\\|b leaked", "any", "a\\|b", "test_x::test_z", "y #1")
    assert render([SHOWN, later, Row("B-1", "any", "a|b", "test_x::test_z")], GROUPS) == table


# --- the command ----------------------------------------------------------------------------------

MARKED = """
import pytest

@pytest.mark.soak
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.fault("SV-37", phase="running", does="counts every death")
def test_deaths(n):
    raise AssertionError("it is collected only")

@pytest.mark.fault("SV-37", phase="{phase}", does="counts this one too")
def test_more():
    pass
"""
SETTINGS = """
[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = ["-p", "fault_table", "--strict-markers", "-m", "not soak"]
markers = ["soak: long", "fault(case, phase, does): a row"]
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_marked.py").write_text(MARKED.format(phase="backoff"))
    (tmp_path / "tests" / "test_other.py").write_text("def test_nothing(): pass\n")
    return tmp_path


def test_the_command_writes_the_table_and_no_soak_test_is_forgotten(checkout: Path) -> None:
    made = collect(checkout, checkout / "faults.md")
    assert made.returncode == 0, made.stdout
    found = [row for row in cells((checkout / "faults.md").read_text()) if row[0] == "SV-37"]
    assert [(row[2], row[3], row[4]) for row in found] == [
        ("running", "counts every death", "test_marked::test_deaths"),
        ("backoff", "counts this one too", "test_marked::test_more"),
    ]


def test_the_command_refuses_half_a_collection(checkout: Path) -> None:
    made = collect(checkout, checkout / "faults.md", "tests/test_marked.py")
    assert made.returncode == 4
    assert "not collected: ['test_other.py']" in made.stderr
    assert not (checkout / "faults.md").exists()


def test_the_command_refuses_a_wrong_mark(checkout: Path) -> None:
    (checkout / "tests" / "test_marked.py").write_text(MARKED.format(phase="asleep"))
    made = collect(checkout, checkout / "faults.md")
    assert made.returncode == 4
    assert "test_marked::test_more: SV-37: phase 'asleep'" in made.stderr
    assert not (checkout / "faults.md").exists()
