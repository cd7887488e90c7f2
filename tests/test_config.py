"""Settings: what is accepted, what is said of the rest, what may change in a run that exists."""

from __future__ import annotations

import glob
import os
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w
from hypothesis import given, strategies as st
from property_kit import cases
from pydantic import ValidationError

from supervisor import changes, config, contract, curriculum, schema
from supervisor.config import ConfigError, Problem, Settings

ARM = '[[policy.arms]]\nname = "docs"\nbuiltin = "python-docs"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "small.toml"


def load(file: Path, text: str, *overrides: str, **environment: str) -> Settings:
    file.write_text(text)
    return config.load(file, overrides, environment)


def problems(file: Path, text: str, *overrides: str, **environment: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load(file, text, *overrides, **environment)
    assert str(caught.value).splitlines() == [str(problem) for problem in caught.value.problems]
    return caught.value.problems


def facts(found: list[Problem]) -> list[tuple[str, object, str]]:
    return [(problem.key, problem.value, problem.expected) for problem in found]


# --- reading --------------------------------------------------------------------------------------


def test_one_arm_is_enough_and_the_file_names_the_run(file: Path) -> None:
    read = load(file, ARM)
    assert (read.run.name, read.run.directory) == ("small", os.path.abspath("runs/small"))
    assert (read.run.shared, read.run.id) == (False, None)
    assert read.model.width == 128
    assert (read.training.steps, read.checkpoint.every, read.checkpoint.keep_last) == (600, 100, 5)
    assert (read.policy.arms[0].name, read.policy.arms[0].cap) == ("docs", 1.0)
    assert load(file, ARM, "run.name=other").run.directory == os.path.abspath("runs/other")
    assert load(file, ARM, "run.directory=here").run.directory == os.path.abspath("here")


def test_a_byte_order_mark_at_the_start_is_no_mistake(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf[training]\nsteps = 7\n" + ARM.encode())
    assert config.load(file).training.steps == 7


def test_a_file_that_is_not_there_is_told_as_that(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(tmp_path / "no.toml")
    place = tmp_path / "no.toml"
    words = "expected a file of settings, in TOML (No such file or directory)"
    assert str(caught.value) == f"{place}: {words}"


def test_a_run_without_a_directory_begins_where_runs_are(file: Path, tmp_path: Path) -> None:
    for place in (str(tmp_path), "elsewhere"):
        read = load(file, ARM, SUPERVISOR_RUNS=place)
        assert read.run.directory == os.path.abspath(os.path.join(place, "small"))
    read = load(file, ARM, "run.name=other", SUPERVISOR_RUNS=str(tmp_path))
    assert read.run.directory == str(tmp_path / "other")
    assert load(file, ARM, SUPERVISOR_RUNS="").run.directory == os.path.abspath("runs/small")
    here = load(file, '[run]\ndirectory = "here"\n' + ARM, SUPERVISOR_RUNS=str(tmp_path))
    assert here.run.directory == os.path.abspath("here")


def test_flags_over_environment_over_file_over_default(file: Path) -> None:
    text = "[training]\nsteps = 1\nseed = 2\nbatch_windows = 3\n" + ARM
    read = load(
        file,
        text,
        "training.steps=100",
        SUPERVISOR_TRAINING__STEPS="10",
        SUPERVISOR_TRAINING__SEED="20",
    )
    training = read.training
    assert (training.steps, training.seed, training.batch_windows) == (100, 20, 3)
    assert training.accumulate == 1
    keys = ("steps", "seed", "batch_windows", "accumulate")
    assert [read.origins[f"training.{key}"] for key in keys] == [
        "flag",
        "environment",
        "file",
        "default",
    ]
    assert read.origins["policy.arms"] == "file"
    assert read.origins["run.name"] == "default"
    assert set(read.origins) == set(leaf_keys())


def test_values_of_flags_and_environment_are_toml_or_else_text(file: Path) -> None:
    read = load(
        file,
        ARM,
        "training.learning_rate=1e-4",
        'samples.prompts=["a", "b=c"]',
        "trainer.device=cuda:1",
        "run.shared = true",
        "training.learning_rate = 2e-4",
        SUPERVISOR_RUN__NAME="night",
        SUPERVISOR_TRAINER__THREADS="auto",
    )
    assert read.training.learning_rate == 2e-4
    assert read.samples.prompts == ("a", "b=c")
    assert (read.trainer.device, read.trainer.threads) == ("cuda:1", "auto")
    assert (read.run.name, read.run.shared) == ("night", True)


def test_a_value_cannot_smuggle_in_a_second_key(file: Path) -> None:
    found = problems(file, ARM, "training.steps=1\nother = 2")
    assert facts(found) == [("training.steps", "1\nother = 2", "an integer of at least 1")]


def test_the_environment_of_a_supervised_trainer_is_no_setting(file: Path) -> None:
    reserved = {value: "7" for name, value in vars(contract).items() if name.startswith("ENV_")}
    assert len(reserved) >= 5
    others = {"SUPERVISOR_ENABLED": "1", "SUPERVISOR__": "1", "TRAINING__STEPS": "5", "A__B": "1"}
    assert load(file, ARM, **reserved, **others) == load(file, ARM)


def test_numbers_keep_their_kind(file: Path) -> None:
    read = load(file, "[stop]\ngrace_seconds = 30\n" + ARM)
    assert (read.stop.grace_seconds, type(read.stop.grace_seconds)) == (30.0, float)
    for wrong in ("true", '"1"', "1.0", "[1]", "1979-05-27"):
        (found,) = problems(file, f"[training]\nsteps = {wrong}\n{ARM}")
        assert found.expected == "an integer of at least 1"
    for wrong in ("true", '"1"', "nan", "inf", "-1.0", "0"):
        (found,) = problems(file, f"[stop]\ngrace_seconds = {wrong}\n{ARM}")
        assert found.expected == "a number above 0"
    (found,) = problems(file, f"[trainer]\ndeterministic = 1\n{ARM}")
    assert found.expected == "true or false"


def test_settings_are_frozen(file: Path) -> None:
    read = load(file, ARM)
    with pytest.raises(ValidationError):
        read.training.steps = 5
    with pytest.raises(TypeError):
        hash(read)


def test_relative_paths_are_of_the_working_directory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file.parent / "work").mkdir()
    monkeypatch.chdir(file.parent / "work")
    text = '[[policy.arms]]\nname = "own"\nfiles = ["a.txt", "/b/*.jsonl"]\n'
    read = load(file, text, "tokenizer.kind=json", "tokenizer.file=../t.json")
    assert read.policy.arms[0].files == (str(file.parent / "work" / "a.txt"), "/b/*.jsonl")
    assert read.tokenizer.file == str(file.parent / "t.json")


def test_a_directory_whose_name_looks_like_a_pattern_is_none(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text beside the settings was not found in a directory such as `run [1]`."""
    (file.parent / "run [1]").mkdir()
    monkeypatch.chdir(file.parent / "run [1]")
    for name in ("a.txt", "c.txt"):
        Path(name).touch()
    text = '[[policy.arms]]\nname = "own"\nfiles = ["[ab].txt"]\n'
    read = load(file, text, "run.directory=here")
    assert glob.glob(read.policy.arms[0].files[0]) == [str(Path.cwd() / "a.txt")]
    assert read.run.directory == str(Path.cwd() / "here")
    assert config.parse_toml(config.dump(read), "run.toml") == read


# --- mistakes -------------------------------------------------------------------------------------


def test_five_mistakes_are_five_problems(file: Path) -> None:
    found = problems(
        file,
        f"""
        [training]
        steps = "many"
        lerning_rate = 0.1
        [model]
        width = 130
        [checkpoint]
        keep_last = 1
        {ARM}
        floor = 0.5
        cap = 0.25
        """,
    )
    assert sorted(facts(found)) == [
        ("checkpoint.keep_last", 1, "an integer of at least 2"),
        ("model.width", 130, "a multiple of model.heads, 4"),
        ("policy.arms[0].floor", 0.5, "at most its cap, 0.25"),
        ("training.lerning_rate", 0.1, "a known key; did you mean training.learning_rate?"),
        ("training.steps", "many", "an integer of at least 1"),
    ]
    assert {problem.file for problem in found} == {str(file)}
    assert f'{file}: training.steps = "many": expected an integer of at least 1' in map(str, found)


def test_a_problem_names_where_the_value_came_from(file: Path) -> None:
    found = problems(
        file,
        "[checkpoint]\nevery = 0\n" + ARM,
        "training.seed=-1",
        "nonsense",
        ".=1",
        SUPERVISOR_HANG__FACTOR="0.5",
    )
    assert {(problem.file, problem.key) for problem in found} == {
        ("--set", "nonsense"),
        ("--set", ".=1"),
        (str(file), "checkpoint.every"),
        ("environment", "hang.factor"),
        ("--set", "training.seed"),
    }
    assert str(found[0]) == "--set: nonsense: expected the form section.key=value"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("[training]\nstep = 5", "did you mean training.steps?"),
        ("[trainng]\nsteps = 5", "did you mean training?"),
        ("[run]\nlearning_rate = 1", "did you mean training.learning_rate?"),
        ("[restart]\nxyzzy = 1", "one of delay_seconds, maximum_delay_seconds, deaths"),
        ("steps = 5", "did you mean training.steps?"),
    ],
)
def test_an_unknown_key_is_refused_with_what_it_may_have_meant(
    file: Path, text: str, meant: str
) -> None:
    (found,) = problems(file, f"{text}\n{ARM}")
    assert found.expected.startswith("a known key")
    assert found.expected.endswith(meant)


def test_an_unknown_key_of_an_arm_is_found(file: Path) -> None:
    (found,) = problems(file, ARM + "capp = 0.5\n")
    assert facts([found]) == [
        ("policy.arms[0].capp", 0.5, "a known key; did you mean policy.arms[0].cap?")
    ]


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("training = 5", "training", "a table"),
        ("[policy]\narms = 5", "policy.arms", "a list of tables [[policy.arms]]"),
        ("[policy]\narms = [5]", "policy.arms[0]", "a table"),
        ("[trainer]\nthreads = 0", "trainer.threads", 'an integer from 1 to 4096 or "auto"'),
        ("[trainer]\nthreads = 5000", "trainer.threads", 'an integer from 1 to 4096 or "auto"'),
        ("[trainer]\nthreads = true", "trainer.threads", 'an integer from 1 to 4096 or "auto"'),
        ("[samples]\ntemperature = 1e-40", "samples.temperature", "a number of at least 0.001"),
        ("[trainer]\ndevice = 'gpu'", "trainer.device", '"auto", "cpu" or "cuda:N"'),
        ("[trainer]\ncommand = 'engine --fast'", "trainer.command", "a list of at least one text"),
        ("[trainer]\ncommand = ['a', 5]", "trainer.command[1]", "text that is not empty"),
        ("[samples]\nprompts = []", "samples.prompts", "a list of at least one text"),
        ("[training]\nschedule = 'linear'", "training.schedule", 'one of "constant", "cosine"'),
        ("[model]\npreset = 'huge'", "model.preset", "one of"),
        ("[policy]\nkind = 'ucb2'", "policy.kind", 'one of "static", "ucb1", "ducb"'),
        ("[policy]\ngamma = 0.0", "policy.gamma", "a number above 0 and at most 1"),
        ("[policy]\ntext_discount = 1", "policy.text_discount", "true or false"),
        ("[policy]\nwindow_pulls = 0", "policy.window_pulls", "an integer of at least 1"),
        ("[run]\nname = 'a/b'", "run.name", "a name of at most 64 letters"),
        ("[run]\nname = '..'", "run.name", "a name of at most 64 letters"),
        ('[run]\nname = "a\\n"', "run.name", "a name of at most 64 letters"),
        ("[training]\nsteps = 2147483648", "training.steps", "at least 1 and at most 2147483647"),
        ("[training]\nseed = 9223372036854775808", "training.seed", "an integer from 0 to 2^63"),
    ],
)
def test_what_is_expected_in_place_of_a_wrong_value(
    file: Path, text: str, key: str, expected: str
) -> None:
    with_arm = text if "[policy]" in text else f"{text}\n{ARM}"
    found = problems(file, with_arm)[0]
    assert found.key == key
    assert expected in found.expected


def test_a_file_whose_name_cannot_name_a_run(tmp_path: Path) -> None:
    (found,) = problems(tmp_path / "my run.toml", ARM)
    assert (found.key, found.value) == ("run.name", "my run")
    assert "set run.name" in found.expected
    assert load(tmp_path / "my run.toml", ARM, "run.name=mine").run.name == "mine"


def test_a_file_that_is_no_toml_is_refused_with_line_and_column(file: Path) -> None:
    (found,) = problems(file, "[training]\nsteps = = 5\n")
    assert "line 2, column 9" in found.expected
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="expected TOML in UTF-8"):
        config.load(file)
    with pytest.raises(ConfigError, match="No such file"):
        config.load(file.parent / "absent.toml")


def test_a_long_or_strange_value_stays_on_one_line(file: Path) -> None:
    found = problems(file, '[trainer]\ndevice = "' + "x\\n\\u001b" * 100 + '"\n' + ARM)
    assert len(str(found[0]).removeprefix(str(file))) < 250
    assert "\n" not in str(found[0])
    assert "\x1b" not in str(found[0])


# --- rules between values -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("[model]\nheads = 3", "model.width", "a multiple of model.heads, 3"),
        ("[model]\nvocabulary = 300", "model.vocabulary", '257, as tokenizer.kind is "bytes"'),
        ("[model]\nwidth = 40000", "model.width", "a model of at most 2147483647 parameters"),
        ("[tokenizer]\nkind = 'segments'", "tokenizer.file", "a file, as tokenizer.kind is"),
        ("[tokenizer]\nfile = 'x'", "tokenizer.file", "no file, as tokenizer.kind is"),
        ("[training]\nwarmup_steps = 600", "training.warmup_steps", "fewer steps than the"),
        ("[restart]\ndelay_seconds = 400", "restart.delay_seconds", "at most restart.maximum_"),
        ("[policy]\nwarmup_steps = 5", "policy", "expected 0, or a number of steps"),
        (
            "[policy]\nwarmup_steps = 5\nwarmup_arms = ['gone']",
            "policy.warmup_arms[0]",
            "the name of an arm, one of docs",
        ),
    ],
)
def test_values_that_do_not_go_together(file: Path, text: str, key: str, expected: str) -> None:
    (found,) = problems(file, f"{text}\n{ARM}")
    assert found.key == key
    assert expected in found.expected


@pytest.mark.parametrize(
    ("arms", "key", "expected"),
    [
        ("", "policy", "at least one arm"),
        (ARM + ARM, "policy.arms[1].name", "a name that no earlier arm has"),
        (ARM + 'files = ["a"]', "policy.arms[0]", "either files or builtin"),
        ('[[policy.arms]]\nname = "a"', "policy.arms[0]", "either files or builtin"),
        ('[[policy.arms]]\nbuiltin = "python-docs"', "policy.arms[0].name", "a name of at most"),
        ('[[policy.arms]]\nname = "Prose!"\nbuiltin = "python-docs"', "policy.arms[0].name", "a-z"),
        (ARM + "cap = 0.9", "policy", "the caps of its 1 arms sum to 0.9"),
        (ARM + "weight = 0", "policy", "every weight is 0"),
        (ARM + "floor = 5e-324", "policy", "expected 0, or a share of at least 1e-06"),
    ],
)
def test_arms_that_cannot_be_scheduled(file: Path, arms: str, key: str, expected: str) -> None:
    found = problems(file, arms)
    assert found[0].key == key
    assert expected in found[0].expected


def test_a_rule_is_not_judged_on_a_value_that_is_itself_wrong(file: Path) -> None:
    """One mistake is one problem: no second one about the default that stood in for it."""
    assert len(problems(file, f"[samples]\nprompts = [5]\n{ARM}")) == 1
    (found,) = problems(file, ARM.replace("docs", "Prose!", 1))
    assert (found.key, found.value) == ("policy.arms[0].name", "Prose!")
    assert len(problems(file, f'[model]\nheads = "x"\nwidth = 130\n{ARM}')) == 1
    assert len(problems(file, ARM + "capp = 0.1\nfloor = 0.0\n")) == 1
    assert len(problems(file, f"[training]\nsteps = 0\nwarmup_steps = 700\n{ARM}")) == 1


def test_a_warm_up_that_its_caps_forbid_is_found_before_anything_starts(file: Path) -> None:
    """Fine for all arms, impossible for the two that warm up."""
    arms = "".join(ARM.replace("docs", f"docs{n}", 1) + "cap = 0.3\n" for n in range(4))
    assert len(load(file, arms).policy.arms) == 4
    (found,) = problems(
        file, arms, "policy.warmup_steps=10", 'policy.warmup_arms=["docs0", "docs1"]'
    )
    assert "phase warm-up: the caps of its 2 arms sum to 0.6" in found.expected


def test_another_program_needs_no_arms(file: Path) -> None:
    read = load(file, '[trainer]\ncommand = ["./engine", "--out", "."]\n')
    assert read.trainer.command == ("./engine", "--out", ".")
    assert len(problems(file, '[trainer]\ncommand = ["x"]\n' + ARM + ARM)) == 1


def test_the_schema_and_the_curriculum_know_the_same_words() -> None:
    fields = schema.Policy.model_fields
    assert get_args(fields["kind"].annotation) == curriculum.KINDS
    assert get_args(fields["bounds"].annotation) == curriculum.BOUNDS
    assert get_args(schema.Model.model_fields["preset"].annotation) == tuple(config.PRESETS)


@pytest.mark.parametrize(
    ("preset", "vocabulary", "parameters", "size_bytes"),
    [
        ("quickstart", 257, 1_065_216, 12_782_600),
        ("andrea-12m", 2_305, 12_780_288, 153_363_464),
        ("andrea-120m", 8_449, 98_698_752, 1_184_385_032),
    ],
)
def test_presets_have_the_published_sizes(
    preset: str, vocabulary: int, parameters: int, size_bytes: int
) -> None:
    model = schema.Model.model_validate({"preset": preset})
    assert config.parameter_count(model, vocabulary) == parameters
    assert contract.checkpoint_size_bytes(parameters) == size_bytes


def test_explicit_keys_override_a_preset(file: Path) -> None:
    model = load(file, '[model]\npreset = "andrea-12m"\nlayers = 2\n' + ARM).model
    assert (model.width, model.heads, model.layers, model.context) == (384, 12, 2, 1024)


# --- writing --------------------------------------------------------------------------------------

names = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,9}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
paths = texts.filter(lambda text: "\0" not in text).map(lambda text: os.path.abspath("/" + text))
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
counts = st.integers(1, contract.INT32_MAX)


@st.composite
def arms(draw: st.DrawFn) -> list[dict[str, Any]]:
    builtin = st.fixed_dictionaries({"builtin": st.just("python-docs")})
    files = st.fixed_dictionaries({"files": st.lists(paths, min_size=1, max_size=3)})
    return [
        {"name": name, "weight": draw(st.floats(1e-3, 1e3)), **draw(builtin | files)}
        for name in draw(st.lists(names, min_size=1, max_size=4, unique=True))
    ]


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Valid settings of every section, as a file would have them."""
    heads = draw(st.integers(1, 8))
    steps = draw(st.integers(2, contract.INT32_MAX))
    return {
        "run": {"name": "r", "directory": draw(paths), "shared": draw(st.booleans())},
        "model": {"heads": heads, "width": heads * draw(st.integers(1, 64)), "context": 7},
        "training": {
            "steps": steps,
            "seed": draw(st.integers(0, 2**63 - 1)),
            "learning_rate": draw(positive),
            "warmup_steps": draw(st.integers(0, steps - 1)),
            "minimum_rate_ratio": draw(st.floats(0, 1)),
        },
        "trainer": {"threads": draw(st.integers(1, 4096) | st.just("auto"))},
        "samples": {"prompts": draw(st.lists(texts, min_size=1, max_size=3))},
        "stop": {"grace_seconds": draw(positive)},
        "policy": {"arms": draw(arms())},
    }


@cases(200)
@given(trees())
def test_what_is_written_reads_back_as_an_equal_value(tree: dict[str, Any]) -> None:
    first = config.parse(tree, "tree")
    text = config.dump(first)
    assert config.parse(tomllib.loads(text), "text") == first
    assert config.parse(first.tree(), "again") == first
    assert config.dump(config.parse(tomllib.loads(text), "text")) == text
    resolved = config.resolve(first, "0" * 32)
    assert config.parse(tomllib.loads(config.dump(resolved)), "resolved") == resolved


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@cases(300)
@given(st.data())
def test_any_value_anywhere_is_taken_or_refused_by_name(data: st.DataObject) -> None:
    """Never another exception, and never silence about a wrong value."""
    tree = data.draw(trees())
    section, key = data.draw(st.sampled_from(leaf_keys())).split(".")
    value = data.draw(junk)
    tree.setdefault(section, {})[key] = value
    found: list[Problem] = []
    try:
        config.parse(tree, "tree")
    except ConfigError as error:
        found = error.problems
    assert all(problem.expected for problem in found)
    # The vocabulary follows the tokenizer.
    sections = {section, "model"} if section == "tokenizer" else {section}
    assert {problem.key.split(".")[0] for problem in found} <= sections


def test_a_run_file_is_a_configuration(file: Path) -> None:
    created = config.resolve(load(file, ARM), "f" * 32)
    run_file = file.parent / "run.toml"
    run_file.write_text(config.dump(created))
    assert config.load(run_file) == created


# --- a new run ------------------------------------------------------------------------------------


def test_a_new_run_decides_for_good_what_was_open(file: Path) -> None:
    read = load(file, ARM + "[training]\nsteps = 900\n[checkpoint]\nevery = 30\n")
    created = config.resolve(read, "f" * 32)
    assert created.run.id == "f" * 32
    assert created.trainer.threads == len(os.sched_getaffinity(0))
    assert created.training.schedule_steps == 900
    # They follow checkpoint.every, which a pivot may change.
    assert (created.samples.every, created.evaluation.every) == (None, None)
    assert created.origins == read.origins
    assert config.resolve(created, "f" * 32) == created


def test_what_was_given_stays_as_it_was(file: Path) -> None:
    given = ("trainer.threads=3", "training.schedule_steps=50", "samples.every=7")
    created = config.resolve(load(file, ARM, *given), "f" * 32)
    assert (created.trainer.threads, created.training.schedule_steps) == (3, 50)
    assert (created.samples.every, created.evaluation.every) == (7, None)


def test_processes_share_the_cores(file: Path) -> None:
    created = config.resolve(load(file, ARM, "trainer.processes=4096"), "f" * 32)
    assert created.trainer.threads == 1


def test_the_digest_is_of_the_policy_and_of_nothing_else(file: Path) -> None:
    read = load(file, ARM)
    digest = config.policy_digest(read)
    assert digest == config.policy_digest(load(file, "# a comment\n\n" + ARM, "training.seed=9"))
    assert digest != config.policy_digest(load(file, ARM + "weight = 2\n"))
    assert len(digest) == 64


# --- a run that exists ----------------------------------------------------------------------------


def leaf_keys() -> list[str]:
    """`section.key` of the whole schema; a list, of arms too, counts as one key."""
    return [
        f"{section}.{key}"
        for section, field in Settings.model_fields.items()
        for key in field.annotation.model_fields  # type: ignore[union-attr]
    ]


def test_every_key_has_a_class_of_change_and_no_class_has_a_key_too_many() -> None:
    known = (changes.IDENTITY, changes.PIVOT, changes.OPERATIONAL)
    assert all(changes.class_of(key) in known for key in leaf_keys())
    assert set(changes.CHANGES) == set(Settings.model_fields)
    for section, change in changes.CHANGES.items():
        if not isinstance(change, str):
            keys = {key.split(".")[1] for key in leaf_keys() if key.startswith(f"{section}.")}
            assert set(change) == keys


def other_value(value: Any) -> object:
    if isinstance(value, tuple):
        return (*value, "x")
    if isinstance(value, bool):
        return not value
    return 12 if value is None else value + type(value)(1)


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
@pytest.mark.parametrize("key", [key for key in leaf_keys() if key != "policy.arms"])
def test_every_changed_key_is_found_and_put_in_its_class(file: Path, key: str) -> None:
    """The other value need not be a valid one: what counts is that it is seen, and where."""
    created = config.resolve(load(file, ARM, "trainer.device=cpu"), "f" * 32)
    section, name = key.split(".")
    table = getattr(created, section)
    changed = table.model_copy(update={name: other_value(getattr(table, name))})
    found = config.compare(created, created.model_copy(update={section: changed}))
    by_class = {
        changes.IDENTITY: found.identity,
        changes.PIVOT: found.policy,
        changes.OPERATIONAL: found.operational,
    }
    assert [change.key for change in by_class.pop(changes.class_of(key))] == [key]
    assert list(by_class.values()) == [[], []]


def test_the_same_file_changes_nothing(file: Path) -> None:
    read = load(file, ARM)
    created = config.resolve(read, "f" * 32)
    assert config.compare(created, read) == config.Comparison([], [], [])


def test_fc61_a_changed_batch_is_refused_with_both_values(file: Path) -> None:
    """A batch size was changed between two starts while the saved sampler still counted in the old
    one, so that the position meant other data (bghira/SimpleTuner PR 3093). It is refused from the
    settings alone, before any state is read, with both values shown."""
    created = config.resolve(load(file, ARM, "training.batch_windows=8"), "f" * 32)
    found = config.compare(created, load(file, ARM, "training.batch_windows=16"))
    assert found.identity == [("training.batch_windows", 8, 16)]
    assert str(found.identity[0]) == "training.batch_windows: recorded 8, requested 16"
    assert not found.policy
    assert not found.operational


def test_fc40_a_longer_run_keeps_its_schedule(file: Path) -> None:
    """A run was extended with a larger total, and the learning rate was silently computed anew over
    the new length, or was zero (huggingface/transformers #18070). The horizon of the schedule is
    fixed when the run is created; a larger target leaves it alone, and a changed horizon is a
    change of policy that shows both."""
    created = config.resolve(load(file, ARM, "training.steps=600"), "f" * 32)
    longer = config.compare(created, load(file, ARM, "training.steps=800"))
    assert longer == config.Comparison([], [], [config.Change("training.steps", 600, 800)])
    extended = config.accept(created, longer.operational)
    assert (extended.training.steps, extended.training.schedule_steps) == (800, 600)
    assert extended.tree() == {
        **created.tree(),
        "training": {**created.tree()["training"], "steps": 800},
    }

    bent = config.compare(
        created, load(file, ARM, "training.steps=800", "training.schedule_steps=800")
    )
    assert bent.policy == [("training.schedule_steps", 600, 800)]
    shorter = config.compare(created, load(file, ARM, "training.steps=500"))
    assert shorter.identity == [("training.steps", 600, 500)]


@pytest.mark.parametrize(
    ("recorded", "requested", "identity"),
    [
        ("auto", "cpu", False),
        ("auto", "cuda:1", False),
        ("cuda", "auto", False),
        ("cuda:0", "cuda:1", False),
        ("cpu", "cuda", True),
        ("cuda:0", "cpu", True),
    ],
)
def test_a_device_of_another_type_makes_another_run_and_a_nearer_word_for_it_does_not(
    file: Path, recorded: str, requested: str, identity: bool
) -> None:
    created = config.resolve(load(file, ARM, f"trainer.device={recorded}"), "f" * 32)
    found = config.compare(created, load(file, ARM, f"trainer.device={requested}"))
    change = [("trainer.device", recorded, requested)]
    assert (found.identity, found.operational) == ((change, []) if identity else ([], change))


def test_fc38_two_runs_share_nothing(file: Path) -> None:
    """The state of the generators was kept in one file of the checkout, so that every later run
    inherited the stream of the first (BeingBeyond/Being-H #71). Two runs out of one file have
    directories, names and seeds of their own, and reading one leaves no trace in the other."""
    one = load(file, ARM, "run.name=one", "training.seed=1")
    two = load(file, ARM, "run.name=two", "training.seed=2")
    assert (one.training.seed, two.training.seed) == (1, 2)
    assert one.run.directory != two.run.directory
    assert not Path(one.run.directory).is_relative_to(two.run.directory)
    assert one == load(file, ARM, "run.name=one", "training.seed=1")
    assert sorted(path.name for path in file.parent.iterdir()) == [file.name]


def test_arms_are_compared_by_name(file: Path) -> None:
    two = ARM + '[[policy.arms]]\nname = "code"\nbuiltin = "python-source"\n'
    created = config.resolve(load(file, two), "f" * 32)
    found = config.compare(created, load(file, two + "cap = 0.75\n"))
    assert found.policy == [("policy.arms.code.cap", 1.0, 0.75)]
    gone = config.compare(created, load(file, ARM)).policy
    assert gone[0] == ("policy.arms", ["docs", "code"], ["docs"])
    assert ("policy.arms.code.builtin", "python-source", None) in gone
    more = config.compare(config.resolve(load(file, ARM), "f" * 32), load(file, two)).policy
    assert ("policy.arms.code.builtin", None, "python-source") in more
    turned = tomli_w.dumps({"policy": {"arms": tomllib.loads(two)["policy"]["arms"][::-1]}})
    assert config.compare(created, load(file, turned)).policy == [
        ("policy.arms", ["docs", "code"], ["code", "docs"])
    ]
