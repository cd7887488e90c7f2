"""The shape of the source: who may import whom, how long a module may be, what may not be in it."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor import config

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    path for package in ("supervisor", "trainer") for path in (ROOT / package).rglob("*.py")
)
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))

LINES_MAX = 450
# Read as one thing each: the vocabulary as a table, the loop from waiting to acting.
LONGER = {"supervisor/contract.py": 800, "supervisor/daemon.py": 650}

# What a trainer may import of the supervisor; what these import comes with them.
FOR_TRAINERS = {"contract", "config", "curriculum", "coherence", "link"}

PURE = {
    *("foreign", "contract", "events", "projection", "bandit", "policy", "curriculum_state"),
    *("mixture", "curriculum", "coherence", "replay", "records", "state", "moves", "pivoting"),
    *(
        "requests",
        "machine",
        "patience",
        "blame",
        "causes",
        "vigil",
        "shortage",
        "saving",
        "notices",
    ),
}
IMPURE = {
    *("asyncio", "multiprocessing", "os", "pathlib", "random", "secrets", "select", "signal"),
    *("socket", "subprocess", "sys", "tempfile", "threading", "time", "zmq"),
}

FORBIDDEN = [
    (r"\bpickle\b", "pickle"),
    (r"\bmarshal\b", "marshal"),
    (r"torch\.(load|save)\b", "torch.load, torch.save"),
    (r"(?<![\w.])(eval|exec)\(", "eval, exec"),
    (r"shell\s*=\s*True", "a shell"),
    (r"os\.(system|popen)\b", "a shell"),
]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def dotted_name_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def each_module(test: object) -> object:
    return pytest.mark.parametrize("path", MODULES, ids=name_of)(test)


def imports_of(path: Path) -> Iterator[str]:
    """Absolute dotted names of all that a module imports, also inside functions.

    `from a import b` gives both `a` and `a.b`, since b may be a module.
    """
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: a relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_there_is_something_to_check() -> None:
    assert {"supervisor/contract.py", "supervisor/config.py"} <= {name_of(path) for path in MODULES}
    assert CONFIGS


@each_module
def test_module_is_short_and_says_what_may_live_in_it(path: Path) -> None:
    text = path.read_text()
    limit = LONGER.get(name_of(path), LINES_MAX)
    assert len(text.splitlines()) <= limit, f"more than {limit} lines"
    assert ast.get_docstring(ast.parse(text)), "no docstring"


@pytest.mark.fault(
    "SV-67", phase="any", does="has no call in its source that could run what a message says"
)
@each_module
def test_module_has_none_of_the_forbidden_text(path: Path) -> None:
    code = _code_of(path)
    assert [word for pattern, word in FORBIDDEN if re.search(pattern, code)] == []


def _code_of(path: Path) -> str:
    """The module without comments and docstrings, which may name what they forbid."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return ast.unparse(tree)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "torch.load(path)",
        "eval(text)",
        "exec(text)",
        "run(line, shell=True)",
        "os.system(line)",
    ],
)
def test_forbidden_text_would_be_found(line: str, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(f'"""No eval( here."""\nmodel.eval()\n{line}\n')
    assert [word for pattern, word in FORBIDDEN if re.search(pattern, _code_of(module))]
    module.write_text('"""No eval( here."""\nmodel.eval()  # not exec(\n')
    assert not [word for pattern, word in FORBIDDEN if re.search(pattern, _code_of(module))]


@each_module
def test_imports_point_one_way(path: Path) -> None:
    package, imported = path.relative_to(ROOT).parts[0], set(imports_of(path))
    roots = {name.partition(".")[0] for name in imported}
    if package == "supervisor":
        assert not roots & {"trainer", "torch", "numpy"}
    else:
        modules = {name.split(".")[1] for name in imported if name.startswith("supervisor.")}
        assert modules <= FOR_TRAINERS, "a trainer needs more than the surface for trainers"


@each_module
def test_decisions_are_pure(path: Path) -> None:
    if path.parent.name == "supervisor" and path.stem in PURE:
        imported = set(imports_of(path))
        assert not {name.partition(".")[0] for name in imported} & IMPURE
        ours = {name.split(".")[1] for name in imported if name.startswith("supervisor.")}
        assert ours <= PURE, "a pure module depends on one that is not"


@each_module
def test_only_the_settings_import_pydantic(path: Path) -> None:
    if name_of(path) not in ("supervisor/config.py", "supervisor/schema.py"):
        assert "pydantic" not in {name.partition(".")[0] for name in imports_of(path)}


def layers() -> dict[str, int]:
    """Module -> layer, from the map in the package's docstring."""
    described = ast.get_docstring(ast.parse((ROOT / "supervisor/__init__.py").read_bytes())) or ""
    rows = re.findall(r"^ +([0-9]) +([a-z_]+)\.py +[a-z]", described, re.MULTILINE)
    return {module: int(layer) for layer, module in rows}


def test_the_map_names_every_module() -> None:
    found = {path.stem for path in (ROOT / "supervisor").glob("*.py")} - {"__init__"}
    assert sorted(layers()) == sorted(found)


@each_module
def test_a_module_imports_only_from_its_own_layer_and_those_below(path: Path) -> None:
    layer = layers()
    if path.parent.name == "supervisor" and path.stem in layer:
        ours = {name.split(".")[1] for name in imports_of(path) if name.startswith("supervisor.")}
        assert [name for name in ours & set(layer) if layer[name] > layer[path.stem]] == []


def test_the_supervisor_alone_needs_six_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=! ]", requirement)[0] for requirement in project["dependencies"]}
    assert names == {"click", "orjson", "psutil", "pydantic", "pyzmq", "tomli-w"}
    assert project["scripts"] == {"supervisor": "supervisor.__main__:main"}


def test_every_dependency_is_pinned_in_the_constraints() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin) for pin in pins)
    assert {re.split(r"[<>=! ]", one)[0] for one in wanted} <= {pin.split("==")[0] for pin in pins}


def test_ci_runs_what_the_readme_tells_people_to_run() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    assert re.findall(r"^make (\w+)$", script.read_text(), re.MULTILINE) == ["check", "test"]
    targets = re.findall(r"^(\w+): \.venv$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"run", "test", "check", "soak"} <= set(targets)


def modules_after(*lines: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after `lines`."""
    report = "import json, sys; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, report])],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_command_loads_neither_torch_nor_numpy() -> None:
    assert not modules_after("import supervisor.__main__") & {"torch", "numpy", "trainer"}


@pytest.mark.parametrize("arguments", [["--help"], ["status"], ["start", "--help"]], ids=str)
def test_quick_commands_load_nothing_heavy(arguments: list[str], run_home: Path) -> None:
    loaded = modules_after(
        "import os, sys",
        "from supervisor.__main__ import main",
        f"os.chdir({str(run_home)!r})",
        f"sys.argv = ['supervisor', *{arguments!r}]",
        "try: main()",
        "except SystemExit: pass",
    )
    assert "supervisor" in loaded
    assert not loaded & {"torch", "numpy", "pydantic", "textual", "starlette", "tomli_w"}


def test_settings_do_not_load_torch() -> None:
    loaded = modules_after("import supervisor.config, supervisor.link")
    assert "pydantic" in loaded
    assert not loaded & {"torch", "numpy", "trainer"}


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_every_configuration_that_we_ship_is_valid(path: Path) -> None:
    settings = config.load(path)
    assert settings.run.name == path.stem
    assert config.parse(settings.tree(), "again") == settings
