"""Devices, switches, the environment as it is read back, and the global generators."""

from __future__ import annotations

import base64
import json
import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.deterministic

from supervisor.unit import choose_environment
from trainer import device as devices
from trainer.device import DeviceError, GeneratorError
from trainer.model import Shape, build
from trainer.optimizer import AdamW

CPU = torch.device("cpu")
TINY = Shape(vocabulary=11, width=8, heads=2, layers=2, context=6)


@pytest.fixture
def switches() -> Iterator[None]:
    """Put torch's process-wide switches and the environment back."""
    threads = torch.get_num_threads()
    workspace = os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    yield
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("default")
    torch.set_float32_matmul_precision("highest")
    torch.set_flush_denormal(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if workspace is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace


def machine_with(monkeypatch: pytest.MonkeyPatch, cuda_devices: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda_devices)


# --- resolve --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cuda_devices", "expected"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cpu", 0, "cpu"),
        ("cpu", 2, "cpu"),
        ("cuda", 2, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_resolve(
    monkeypatch: pytest.MonkeyPatch, name: str, cuda_devices: int, expected: str
) -> None:
    machine_with(monkeypatch, cuda_devices)
    assert str(devices.resolve(name)) == expected


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_missing_cuda_is_refused_and_never_replaced(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    machine_with(monkeypatch, 0)
    with pytest.raises(DeviceError, match=rf"trainer\.device is '{name}', but torch .* no CUDA"):
        devices.resolve(name)


def test_a_device_number_too_high_is_refused_with_the_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine_with(monkeypatch, 2)
    with pytest.raises(DeviceError, match=r"has 2 CUDA devices \(cuda:0 to cuda:1\)"):
        devices.resolve("cuda:2")


@pytest.mark.parametrize(
    "name", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "auto:1", "CPU"]
)
def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine_with(monkeypatch, 2)
    with pytest.raises(DeviceError, match="expected 'auto', 'cpu', 'cuda' or 'cuda:N'"):
        devices.resolve(name)


# --- prepare and read back ------------------------------------------------------------------------


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("tf32", [True, False])
def test_what_is_prepared_is_what_is_read_back(deterministic: bool, tf32: bool) -> None:
    devices.prepare(CPU, threads=3, deterministic=deterministic, tf32=tf32)
    seen = devices.environment(CPU, Path("/"))
    assert seen["threads"] == 3
    assert seen["interop_threads"] == 1
    assert seen["deterministic"] is deterministic
    assert seen["denormals_flushed"] is True
    assert seen["cudnn_benchmark"] is False
    assert seen["cudnn_tf32"] is tf32
    assert seen["matmul_precision"] == ("high" if tf32 else "highest")
    assert vars(torch.utils)["deterministic"].fill_uninitialized_memory is False
    cublas = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if deterministic else {}
    assert {k: v for k, v in seen["variables"].items() if k.startswith("CUBLAS")} == cublas


@pytest.mark.usefixtures("switches")
def test_the_environment_is_read_from_torch_and_not_from_what_was_asked() -> None:
    devices.prepare(CPU, threads=1, deterministic=True)
    torch.set_num_threads(2)
    torch.set_deterministic_debug_mode("warn")
    torch.set_flush_denormal(False)
    torch.set_float32_matmul_precision("medium")
    seen = devices.environment(CPU, Path("/"))
    assert (seen["threads"], seen["deterministic"], seen["denormals_flushed"]) == (2, False, False)
    assert seen["matmul_precision"] == "medium"


@pytest.mark.usefixtures("switches")
def test_determinism_refuses_an_operation_without_a_deterministic_form() -> None:
    devices.prepare(CPU, threads=1, deterministic=True)
    place, value = torch.tensor([0, 0]), torch.tensor([1.0, 2.0])
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(2).put_(place, value)
    devices.prepare(CPU, threads=1, deterministic=False)
    torch.zeros(2).put_(place, value)


@pytest.mark.usefixtures("switches")
def test_a_workspace_setting_that_breaks_determinism_is_refused() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    devices.prepare(CPU, threads=1, deterministic=False)
    with pytest.raises(DeviceError, match=r"CUBLAS_WORKSPACE_CONFIG is ':0:0'.*unset it"):
        devices.prepare(CPU, threads=1, deterministic=True)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    devices.prepare(CPU, threads=1, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_no_threads_are_refused() -> None:
    with pytest.raises(DeviceError, match=r"trainer\.threads is 0, expected at least 1"):
        devices.prepare(CPU, threads=0, deterministic=True)


def test_a_fresh_process_is_prepared_once_and_again() -> None:
    """Interop threads may be set only once in a process; a second call must not trip over it."""
    script = """
        import json
        from pathlib import Path
        from trainer import device

        cpu = device.resolve("cpu")
        for threads in (1, 2):
            device.prepare(cpu, threads=threads, deterministic=True)
        print(json.dumps(device.environment(cpu, Path("/"))))
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"},
        text=True,
    )
    assert done.stderr == ""
    seen: dict[str, Any] = json.loads(done.stdout)
    assert (seen["threads"], seen["interop_threads"]) == (2, 1)
    assert seen["cpu_capability"] == "DEFAULT"
    assert seen["variables"]["ATEN_CPU_CAPABILITY"] == "default"
    assert seen["variables"]["OMP_NUM_THREADS"] == "1"


# --- environment ----------------------------------------------------------------------------------


def test_the_environment_names_what_the_bits_depend_on() -> None:
    seen = devices.environment(CPU, Path("/"))
    assert json.loads(json.dumps(seen)) == seen
    assert seen["python"] == platform.python_version()
    assert seen["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert set(seen["packages"]) == {"torch", "orjson", "pyzmq", "tokenizers"}
    assert all(seen["packages"][name] for name in ("torch", "orjson", "pyzmq"))
    assert (seen["cudnn"], seen["driver"]) == (None, None), "nothing on a CPU depends on them"
    assert seen["device"] == "cpu"
    assert seen["device_name"] == seen["cpu"] != ""
    assert seen["cpu_capability"] == torch.backends.cpu.get_cpu_capability()


def test_the_environment_is_the_same_when_nothing_changed() -> None:
    assert devices.environment(CPU, Path("/")) == devices.environment(CPU, Path("/"))


CHANGES_BITS = (
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA"),
    *("DNNL_DEFAULT_FPMATH_MODE", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"),
    *("CUDNN_CONV_WSCAP_DBG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("TORCH_BLAS_PREFER_CUBLASLT", "TORCH_CUDNN_V8_API_DISABLED", "TORCH_MKLDNN_MATMUL_MIN_DIM"),
)
CHANGES_NONE = (
    *("A_SECRET_TOKEN", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCH_LOGS", "TORCH_NCCL_TRACE"),
    *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "ONEDNN_VERBOSE", "MKL_VERBOSE"),
    *("CUBLASLT_LOG_LEVEL", "CUBLAS_LOGINFO_DBG", "CUDNN_LOGDEST_DBG", "OMP_DISPLAY_ENV"),
)


def test_only_variables_that_change_bits_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*CHANGES_BITS, *CHANGES_NONE):
        monkeypatch.setenv(name, "x")
    variables = devices.environment(CPU, Path("/"))["variables"]
    assert {name for name in CHANGES_BITS if variables.get(name) == "x"} == set(CHANGES_BITS)
    assert [name for name in CHANGES_NONE if name in variables] == []


def test_a_service_has_every_variable_that_changes_bits() -> None:
    """Else a run that was begun in a shell goes on as another one under systemd."""
    chosen, left_out = choose_environment(dict.fromkeys(CHANGES_BITS, "x"), [])
    assert (set(chosen), left_out) == (set(CHANGES_BITS), [])


def test_on_cuda_the_versions_below_torch_are_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(devices, "_DRIVER", tmp_path / "version")
    cuda = torch.device("cuda", 0)
    assert devices.environment(cuda, Path("/"))["driver"] is None
    (tmp_path / "version").write_text("580.65.06\n")
    seen = devices.environment(cuda, Path("/"))
    assert (seen["cudnn"], seen["driver"]) == (91002, "580.65.06")


def test_a_missing_package_is_recorded_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_PACKAGES", ("torch", "no-such-distribution"))
    assert devices.environment(CPU, Path("/"))["packages"]["no-such-distribution"] is None


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(directory), *identity, *arguments],
        capture_output=True,
        check=True,
        text=True,
    )
    return done.stdout.strip()


def test_the_commit_and_whether_tracked_files_changed(tmp_path: Path) -> None:
    assert devices.environment(CPU, tmp_path)["git"] is None
    git(tmp_path, "init", "-q")
    assert devices.environment(CPU, tmp_path)["git"] is None, "a repository without a commit"
    (tmp_path / "code.py").write_text("one\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "untracked.txt").write_text("noise\n")
    assert devices.environment(CPU, tmp_path)["git"] == {"commit": commit, "dirty": False}
    (tmp_path / "code.py").write_text("two\n")
    assert devices.environment(CPU, tmp_path)["git"] == {"commit": commit, "dirty": True}


def test_without_git_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.environment(CPU, Path.cwd())["git"] is None


# --- precision ------------------------------------------------------------------------------------


def test_autocast_changes_products_and_not_masters() -> None:
    left, right = torch.ones(2, 2), torch.ones(2, 2)
    with devices.autocast(CPU, "float32"):
        assert (left @ right).dtype == torch.float32
    with devices.autocast(CPU, "bfloat16"):
        assert (left @ right).dtype == torch.bfloat16
    assert left.dtype == torch.float32
    with pytest.raises(DeviceError, match=r"trainer\.precision is 'float16', expected one of"):
        devices.autocast(CPU, "float16")


# --- generators -----------------------------------------------------------------------------------


def test_restored_generators_draw_the_same_numbers() -> None:
    state = json.loads(json.dumps(devices.rng_state(CPU)))
    drawn = torch.randn(100)
    devices.restore_rng(state, CPU)
    assert torch.equal(torch.randn(100), drawn)


def test_reading_a_state_draws_nothing() -> None:
    assert devices.rng_state(CPU) == devices.rng_state(CPU)


def test_names_of_other_owners_are_let_be() -> None:
    devices.restore_rng(devices.rng_state(CPU) | {"samples": "not ours"}, CPU)


UNREADABLE = [
    (None, r"rng\.torch_cpu: expected base64 text, got NoneType"),
    (17, r"rng\.torch_cpu: expected base64 text, got int"),
    ("%%%", r"rng\.torch_cpu: not base64"),
    ("é", r"rng\.torch_cpu: not base64"),
    (base64.b64encode(bytes(16)).decode(), r"rng\.torch_cpu: torch refuses this state"),
    (base64.b64encode(bytes(5056)).decode(), r"rng\.torch_cpu: torch refuses this state"),
]


@pytest.mark.parametrize(("value", "message"), UNREADABLE)
def test_fc35_an_unreadable_generator_stops_the_resume(value: object, message: str) -> None:
    """A broad except around the loading of generator states let training go on with other random
    numbers (redai-studio/Relax PR 317). Every damaged component raises, by name."""
    with pytest.raises(GeneratorError, match=message):
        devices.restore_rng({"torch_cpu": value}, CPU)


def test_fc35_a_missing_component_stops_the_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same (redai-studio/Relax PR 317) for a component that was never saved: a run that moves
    to CUDA has no state for that generator. Nothing is restored by halves."""
    with pytest.raises(GeneratorError, match=r"rng\.torch_cpu"):
        devices.restore_rng({}, CPU)
    state = devices.rng_state(CPU)
    torch.randn(1)
    before = torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "set_rng_state", pytest.fail)
    told = r"rng\.torch_cuda: the checkpoint has no state of this .* supervisor rollback"
    with pytest.raises(GeneratorError, match=told):
        devices.restore_rng(state, torch.device("cuda", 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_on_cuda_both_generators_are_saved_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 1)
    restored: list[tuple[list[int], torch.device]] = []

    def get(device: torch.device) -> torch.Tensor:
        assert device == cuda
        return torch.tensor([1, 2, 3], dtype=torch.uint8)

    def put(state: torch.Tensor, device: torch.device) -> None:
        restored.append((state.tolist(), device))

    monkeypatch.setattr(torch.cuda, "get_rng_state", get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", put)
    state = devices.rng_state(cuda)
    assert set(state) == {"torch_cpu", "torch_cuda"}
    devices.restore_rng(state, cuda)
    assert restored == [([1, 2, 3], cuda)]


# --- the device of this machine -------------------------------------------------------------------


@pytest.mark.usefixtures("switches")
def test_an_update_on_the_device_of_this_machine_survives_a_restore() -> None:
    """On a CPU or on CUDA, whichever `auto` finds: train, copy to the host, restore, go on."""
    device = devices.resolve("auto")
    devices.prepare(device, threads=1, deterministic=True)
    tokens = torch.tensor([[1, 2, 3, 4]], device=device)

    def advance(updates: int) -> None:
        flat.zero_gradients()
        loss, count = model(tokens, tokens)
        (loss / count).backward()
        AdamW(flat, updates).update(
            learning_rate=0.01, weight_decay=0.01, clip_norm=1.0, loss=loss.item()
        )

    model = build(TINY, device, seed=1)
    flat = model.flat
    advance(0)
    saved = [region.clone() for region in flat.host_regions()]
    advance(1)
    straight = [region.clone() for region in flat.host_regions()]

    model = build(TINY, device, seed=None)
    flat, tensors = model.flat, flat.tensors
    flat.load(tensors, type(flat.host_regions())(*saved))
    model.assert_views()
    advance(1)
    for resumed, expected in zip(flat.host_regions(), straight, strict=True):
        assert torch.equal(resumed, expected)
