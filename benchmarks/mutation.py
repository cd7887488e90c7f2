"""How many small faults in the pure lifecycle go unnoticed by its tests.

    python benchmarks/mutation.py [MODULE ...] [--since REVISION] [--jobs N] [--worlds N]
                                  [--sample N --seed S]

Each mutant changes one thing in one module of the lifecycle: a guard is taken away, a comparison
turned, a statement deleted, a cell of the table emptied. It is killed by the tests of the pure
machine, or else by seeded worlds; what neither notices is printed, with its line. Nothing on disk
is changed: the mutant lives in a forked process.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
MODULES = ("machine", "moves", "requests", "pivoting", "vigil", "blame", "patience", "state")
TESTS = ("test_machine.py", "test_vigil.py", "test_pivoting.py", "test_patience.py")
PATIENCE = 10.0  # times what the unchanged module takes
TOLD_EVERY = 25
PRELOADED = ("hypothesis", "orjson", "psutil", "pydantic", "pytest", "zmq")
SURVIVED, KILLED_BY_TESTS, KILLED_BY_WORLDS, ENDLESS = 0, 10, 11, 12

TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    what: str
    source: str


# --- making them ---


def changed_since(revision: str, module: str) -> set[int]:
    """The lines of a module that a revision of git does not have, or has otherwise."""
    path = f"supervisor/{module}.py"
    command = ["git", "-C", str(ROOT), "diff", "--no-ext-diff", "-U0", revision, "--", path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return lines_added(done.stdout)


def lines_added(patch: str) -> set[int]:
    """From the heads of its hunks, each of which is @@ -from[,count] +from[,count] @@."""
    found: set[int] = set()
    for first, count in re.findall(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", patch, re.MULTILINE):
        found.update(range(int(first), int(first) + int(count or 1)))
    return found


def mutants_of(module: str) -> Iterator[Mutant]:
    text = (ROOT / "supervisor" / f"{module}.py").read_text()
    for number, original in enumerate(ast.walk(ast.parse(text))):
        for kind in KINDS:
            if not kind(copy.deepcopy(original)):
                continue
            changed = ast.parse(text)
            node = next(itertools.islice(ast.walk(changed), number, None))
            what = kind(node)
            source = ast.unparse(ast.fix_missing_locations(changed))
            yield Mutant(module, getattr(node, "lineno", 0), what, source)


def _turn(node: ast.AST) -> str:
    if not isinstance(node, ast.Compare) or type(node.ops[0]) not in TURNED:
        return ""
    before = ast.unparse(node)
    node.ops[0] = TURNED[type(node.ops[0])]()
    return f"{before} -> {ast.unparse(node)}"


def _always(node: ast.AST) -> str:
    return _guard(node, True)


def _never(node: ast.AST) -> str:
    return _guard(node, False)


def _guard(node: ast.AST, value: bool) -> str:
    if isinstance(node, ast.If | ast.IfExp):
        before = ast.unparse(node.test)
        node.test = ast.Constant(value)
        return f"if {before} -> {value}"
    if isinstance(node, ast.match_case) and node.guard is not None and not value:
        before = ast.unparse(node.guard)
        node.guard = ast.Constant(value)
        return f"case if {before} -> {value}"
    return ""


def _first_operand(node: ast.AST) -> str:
    return _operand(node, 0)


def _last_operand(node: ast.AST) -> str:
    return _operand(node, -1)


def _operand(node: ast.AST, which: int) -> str:
    """An `and` or `or` without one of its operands."""
    if not isinstance(node, ast.BoolOp):
        return ""
    before = ast.unparse(node)
    gone = node.values.pop(which)
    if len(node.values) == 1:
        node.values.append(copy.deepcopy(node.values[0]))
    return f"{before}: without {ast.unparse(gone)}"


def _number(node: ast.AST) -> str:
    if not isinstance(node, ast.Constant) or type(node.value) not in (int, float, bool):
        return ""
    before = node.value
    node.value = not before if isinstance(before, bool) else before + 1
    return f"{before} -> {node.value}"


def _deletions(node: ast.AST) -> str:
    """A statement that only does something is gone. (A docstring does nothing.)"""
    doomed = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if not doomed:
        return ""
    assert isinstance(node, ast.Expr)
    before = ast.unparse(node)
    node.value = ast.Constant(None)
    return f"deleted: {before.splitlines()[0]}"


def _keyword(node: ast.AST) -> str:
    """`turn.set` of one thing less."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("turn.set", "replace"):
        return ""
    if len(node.keywords) < 2:
        return ""
    gone = node.keywords.pop()
    return f"{ast.unparse(node.func)}: without {ast.unparse(gone)}"


def _cell(node: ast.AST) -> str:
    """A cell of the table that ignores its event. A row is a dict from event types to handlers."""
    if not isinstance(node, ast.Dict) or not node.values:
        return ""
    keys = [ast.unparse(key) for key in node.keys if key is not None]
    if not keys or not all(key.startswith("ev.") for key in keys):
        return ""
    return "cells"


KINDS = (_turn, _always, _never, _first_operand, _last_operand, _number, _deletions, _keyword)


def cells_of(module: str) -> Iterator[Mutant]:
    """Each cell of each row of the table, emptied and swapped with its neighbour."""
    text = (ROOT / "supervisor" / f"{module}.py").read_text()
    rows = [n for n in ast.walk(ast.parse(text)) if _cell(n)]
    for row, found in enumerate(rows):
        assert isinstance(found, ast.Dict)
        for index, value in enumerate(found.values):
            key = found.keys[index]
            if key is None:
                continue
            for other in ("_ignore", "_impossible", ast.unparse(found.values[index - 1])):
                if other == ast.unparse(value) or other.startswith("_ANYWHERE"):
                    continue
                tree = ast.parse(text)
                changed = [n for n in ast.walk(tree) if _cell(n)][row]
                assert isinstance(changed, ast.Dict)
                changed.values[index] = ast.parse(other, mode="eval").body
                what = f"{ast.unparse(key)}: {ast.unparse(value)} -> {other}"
                yield Mutant(module, value.lineno, what, ast.unparse(tree))


# --- trying them ---


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutant instead of the module."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != f"supervisor.{self.mutant.module}":
            return None
        return importlib.util.spec_from_loader(name, self)

    def exec_module(self, module: ModuleType) -> None:
        code = compile(self.mutant.source, f"mutant of {self.mutant.module}", "exec")
        exec(code, module.__dict__)


def verdict(mutant: Mutant, worlds: int) -> int:
    """In a process of its own: 0 if nothing was noticed."""
    _forget_modules()
    sys.meta_path.insert(0, Finder(mutant))
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import pytest

    tests = [str(ROOT / "tests" / name) for name in TESTS]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is PRELOADED
    if pytest.main([*options, *tests]) != 0:
        return KILLED_BY_TESTS
    import test_simulation

    try:
        test_simulation.simulate_all(range(worlds))
    except Exception:  # whatever it is, it was noticed
        return KILLED_BY_WORLDS
    return SURVIVED


def _forget_modules() -> None:
    """What is imported already, by a test that measures, say, would be taken instead of the mutant,
    or would have taken its names from the module that is not one."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith((f"{ROOT}/supervisor/", f"{ROOT}/tests/")):
            del sys.modules[name]


def begin(mutant: Mutant, worlds: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    code = KILLED_BY_TESTS
    try:
        code = verdict(mutant, worlds)
    finally:
        os._exit(code)


def judged(
    mutants: Sequence[Mutant], jobs: int, worlds: int, limit_seconds: float
) -> Iterator[tuple[Mutant, int]]:
    """Each mutant and what became of it: an exit code, or ENDLESS."""
    waiting = list(reversed(mutants))
    running: dict[int, tuple[Mutant, int, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            pid = begin(mutant, worlds)
            running[pid] = (mutant, os.pidfd_open(pid), time.monotonic() + limit_seconds)
        poller = select.poll()
        for _, pidfd, _ in running.values():
            poller.register(pidfd, select.POLLIN)
        poller.poll(1000)
        for pid, (mutant, pidfd, limit) in list(running.items()):
            if time.monotonic() > limit:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                os.close(pidfd)
                del running[pid]
                code = os.waitstatus_to_exitcode(status)
                yield mutant, code if code >= 0 else ENDLESS


def main() -> int:
    for name in PRELOADED:  # once, and not in each mutant's process
        importlib.import_module(name)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("modules", nargs="*", default=MODULES)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--worlds", type=int, default=300)
    parser.add_argument("--since", help="only on lines that are new since that revision of git")
    parser.add_argument("--sample", type=int, help="try so many, chosen by --seed")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    mutants = [m for module in arguments.modules for m in mutants_of(module)]
    if "machine" in arguments.modules:
        mutants += cells_of("machine")
    mutants = [m for m in {m.source: m for m in mutants}.values()]
    if arguments.since:
        new = {module: changed_since(arguments.since, module) for module in arguments.modules}
        mutants = [m for m in mutants if m.line in new[m.module]]
    if arguments.sample:
        mutants = random.Random(arguments.seed).sample(mutants, min(arguments.sample, len(mutants)))
    unchanged = Mutant("state", 0, "", (ROOT / "supervisor" / "state.py").read_text())
    begun = time.monotonic()
    unnoticed = list(judged([unchanged] * arguments.jobs, arguments.jobs, arguments.worlds, inf))
    if {code for _, code in unnoticed} != {SURVIVED}:
        print("what is not changed at all is noticed too: the tests fail, or do not run")
        return 1
    limit_seconds = PATIENCE * (time.monotonic() - begun)
    print(f"{len(mutants)} mutants of {', '.join(arguments.modules)}", flush=True)
    tally: Counter[tuple[str, int]] = Counter()
    for mutant, code in judged(mutants, arguments.jobs, arguments.worlds, limit_seconds):
        tally[mutant.module, code] += 1
        if code == SURVIVED:
            print(f"survived  {mutant.module}.py:{mutant.line}  {mutant.what}", flush=True)
        if tally.total() % TOLD_EVERY == 0:
            print(f"{tally.total()} of {len(mutants)}", file=sys.stderr, flush=True)
    heads = ("module", "mutants", "by tests", "by worlds", "endless", "survived", "score")
    print("".join(f"{head:<12}" for head in heads))
    for module in arguments.modules:
        tests, worlds, endless, left = (
            tally[module, code] for code in (KILLED_BY_TESTS, KILLED_BY_WORLDS, ENDLESS, SURVIVED)
        )
        total = sum(count for (name, _), count in tally.items() if name == module)
        score = 100 * (total - left) / max(1, total)
        row = (module, total, tests, worlds, endless, left, f"{score:.1f}%")
        print("".join(f"{cell:<12}" for cell in row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
