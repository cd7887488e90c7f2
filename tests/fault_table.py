"""docs/faults.md, made of the marks that tests carry: a plugin of pytest, loaded by conftest.py.

What may live here: reading the marks of a collection, judging them, and writing the table. What
the cases are is in fault_cases.py.

Invariants:
- The table is a function of the marks and of the registry: no date, no version, no order of files.
- It is made of a whole collection only. Marks on tests that a run leaves out, soak tests by
  default, count like all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pytest
from fault_cases import GROUPS, Case

Groups = Mapping[str, Mapping[str, Case]]

# In the order of a life. `idle`: nothing runs, or the run has ended; `any`: wherever it is.
PHASES: Final = (
    *("idle", "starting", "loading", "running", "saving", "stopping", "backoff", "adoption"),
    "any",
)
HEADER: Final = ("case", "trouble", "phase", "what the product does", "test", "threads")
WIDTHS: Final = (5, 76, 8, 76, 0, 0)  # the last two columns are ragged, so that a line may end
NOT_SHOWN: Final = "Not shown by a test yet"
INTRODUCTION: Final = """\
# Known troubles, and what this product does about each

Supervisors and training jobs have failed in public, in many ways. Each way has a row here for
every phase in which a test shows that it is met: what went wrong elsewhere, in which threads
people tell of it, what happens here instead, and the test (`module::name` in `tests/`) that fails
when it does not.

This file is generated from the tests: `make faults`.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One mark: what one test shows about one case in one phase."""

    case: str
    phase: str
    does: str
    test: str


@dataclass(frozen=True, slots=True)
class Collection:
    """What the marks of a whole collection say, and what is wrong with them."""

    table: str
    problems: tuple[str, ...]


COLLECTION: Final = pytest.StashKey[Collection]()


# --- the hooks ---


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault-table",
        metavar="FILE",
        help="write the table of known troubles, made of the marks of all tests",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """First of all, so that what `-m` and `-k` leave out is still there."""
    left_out = {path.name for path in (config.rootpath / "tests").glob("test_*.py")} - {
        item.path.name for item in items
    }
    if not left_out:
        config.stash[COLLECTION] = made_of(items)
    wanted = config.getoption("--fault-table")
    if wanted is None:
        return
    if left_out:
        raise pytest.UsageError(f"--fault-table needs all tests; not collected: {sorted(left_out)}")
    if problems := config.stash[COLLECTION].problems:
        raise pytest.UsageError("\n".join(problems))
    (config.invocation_params.dir / wanted).write_text(config.stash[COLLECTION].table)


# --- from marks to rows ---


def made_of(items: Iterable[pytest.Item]) -> Collection:
    rows, problems = [], []
    for item in items:
        test = f"{item.path.stem}::{item.name.partition('[')[0]}"
        for mark in item.iter_markers("fault"):
            try:
                rows.append(row_of(mark, test))
            except ValueError as error:
                problems.append(f"{test}: {error}")
    problems += [problem for row in rows for problem in problems_of(row, GROUPS)]
    return Collection(render(rows, GROUPS), tuple(dict.fromkeys(problems)))


def row_of(mark: pytest.Mark, test: str) -> Row:
    if len(mark.args) != 1 or mark.kwargs.keys() != {"phase", "does"}:
        raise ValueError('a fault mark reads fault("SV-1", phase="running", does="what it does")')
    return Row(mark.args[0], mark.kwargs["phase"], mark.kwargs["does"], test)


def problems_of(row: Row, groups: Groups) -> Iterator[str]:
    case = cases_of(groups).get(row.case)
    if case is None:
        yield f"{row.test}: no case {row.case!r} in fault_cases.py"
    elif case.reason:
        yield f"{row.test}: {row.case} is shown here, so it is not 'not applicable'"
    if row.phase not in PHASES:
        yield f"{row.test}: {row.case}: phase {row.phase!r}; expected one of {', '.join(PHASES)}"
    if not row.does.strip() or "\n" in row.does:
        yield f"{row.test}: {row.case}: `does` is one line that says what the product does"


def cases_of(groups: Groups) -> dict[str, Case]:
    return {name: case for group in groups.values() for name, case in group.items()}


def not_shown(rows: Iterable[Row], groups: Groups) -> list[str]:
    """Cases that have neither a test nor a reason to have none."""
    shown = {row.case for row in rows}
    return [n for n, case in cases_of(groups).items() if n not in shown and not case.reason]


# --- the table ---


def render(rows: Sequence[Row], groups: Groups) -> str:
    missing = not_shown(rows, groups)
    parts = [INTRODUCTION]
    for heading, group in groups.items():
        lines = [line for n, case in group.items() for line in _lines_of(n, case, rows)]
        if lines:
            rule = tuple("-" * max(width, 4) for width in WIDTHS)
            parts.append("\n".join([f"## {heading}\n", _line(HEADER), _line(rule), *lines, ""]))
    if missing:
        found = cases_of(groups)
        listed = "".join(f"- {name}: {found[name].trouble}\n" for name in missing)
        parts.append(f"## {NOT_SHOWN}\n\n{listed}")
    return "\n".join(parts)


def _lines_of(name: str, case: Case, rows: Iterable[Row]) -> Iterator[str]:
    if case.reason:
        yield _line((name, case.trouble, "", f"not applicable: {case.reason}", "", case.threads))
    own = sorted({row for row in rows if row.case == name}, key=_order)
    for number, row in enumerate(own):
        trouble, threads = ("", "") if number else (case.trouble, case.threads)
        yield _line((name, trouble, row.phase, row.does, row.test, threads))


def _order(row: Row) -> tuple[int, str, str]:
    return PHASES.index(row.phase) if row.phase in PHASES else len(PHASES), row.test, row.does


def _line(cells: Sequence[str]) -> str:
    padded = (
        cell.replace("|", "\\|").ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)
    )
    return f"| {' | '.join(padded)} |"
