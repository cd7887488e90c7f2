"""The device, the switches that decide the bits, and what the process really runs on.

What may live here: everything that is global to a torch process. Settings come in as arguments;
what goes out as fact is read back from torch, the system and the environment, never copied from a
setting.

Invariants:
- `prepare` runs before the first tensor operation: threads inherit the denormal flag from the
  thread that starts them, and cuBLAS reads its workspace setting once.
- Nothing here seeds or draws from a generator; it only reads and restores their states.
- Importing this module, or calling it, never loads torch's compiler (2 s of a restart).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.utils.deterministic

PRECISIONS: Final = ("float32", "bfloat16")

# cuBLAS is deterministic only with a fixed workspace (its documentation, "Reproducibility").
_CUBLAS_VARIABLE: Final = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_DETERMINISTIC: Final = (":4096:8", ":16:8")

# Variables by which the libraries under torch choose kernels, threads or precision. Of TORCH_ and
# NVIDIA_ only some do: the others say where caches lie, what a container may see, how processes
# talk. What is only logged or shown changes no bit and is left out everywhere.
_VARIABLE_PREFIXES: Final = (
    *("ATEN_", "MKL_", "OMP_", "ONEDNN_", "DNNL_", "CUBLAS_", "CUBLASLT_", "CUDNN_"),
    *("TORCH_ALLOW_TF32_", "TORCH_BLAS_", "TORCH_CUDNN_", "TORCH_LINALG_", "TORCH_LINEAR_"),
    *("TORCH_MKLDNN_", "NVIDIA_TF32_"),
)
_SHOWS_ONLY: Final = re.compile(r"_(LOG|VERBOSE|DISPLAY|JIT_DUMP|JIT_PROFILE)")
_PACKAGES: Final = ("torch", "orjson", "pyzmq", "tokenizers")  # the last one may be missing
_DRIVER: Final = Path("/sys/module/nvidia/version")
_GIT_SECONDS: Final = 5.0

CPU_GENERATOR: Final = "torch_cpu"
CUDA_GENERATOR: Final = "torch_cuda"


class DeviceError(ValueError):
    """The settings ask for a device or a switch that this machine does not have."""


class DeviceAway(RuntimeError):
    """The device that the run is trained on is not there now. It may be later: try again."""


class GeneratorError(ValueError):
    """The saved state of a generator is missing or unreadable: an exact resume is impossible."""


# --- choosing and preparing ----------------------------------------------------------------------


def resolve(name: str) -> torch.device:
    """The device meant by `auto`, `cpu`, `cuda` or `cuda:N`. Raises DeviceError."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    family, _, index = name.partition(":")
    if name not in ("auto", "cuda") and not (family == "cuda" and index.isdecimal()):
        raise DeviceError(f"trainer.device is {name!r}, expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"trainer.device is {name!r}, but torch {torch.__version__} finds no CUDA device;"
            " use 'auto' or 'cpu', or check the driver with nvidia-smi"
        )
    number, count = int(index or 0), torch.cuda.device_count()
    if number >= count:
        raise DeviceError(
            f"trainer.device is {name!r}, but this machine has {count} CUDA devices (cuda:0 to"
            f" cuda:{count - 1})"
        )
    return torch.device("cuda", number)


def resolve_again(name: str, trained_on: object, step: int) -> torch.device:
    """The device meant by `name` for a run whose checkpoint `step` is from the device `trained_on`
    (None: nobody knows).

    A run stays on the type of device that it began on: on another one it would be another run, and
    have no state for that one's generator. Raises DeviceAway where there is no CUDA device at all,
    as before a driver is up; DeviceError where `name` means another type.
    """
    if trained_on is None:
        return resolve(name)
    kind = str(trained_on).partition(":")[0]
    if kind == "cuda" and name != "cpu" and not torch.cuda.is_available():
        raise DeviceAway(
            f"checkpoint {step} was trained on {trained_on}, but torch {torch.__version__} finds no"
            f" CUDA device now (trainer.device is {name!r}); nothing is trained elsewhere instead."
            " Try again once nvidia-smi shows the device; a supervisor does so by itself"
        )
    place = resolve(name)
    if place.type != kind:
        raise DeviceError(
            f"checkpoint {step} was trained on {trained_on}, but trainer.device is {name!r}, which"
            f" means {place} now; a run stays on the type of device that it began on. Start it with"
            f" --set trainer.device={kind}, or begin another run"
        )
    return place


def prepare(device: torch.device, *, threads: int, deterministic: bool, tf32: bool = False) -> None:
    """Set every switch that decides bits or speed. Raises DeviceError for an impossible one.

    Denormals are flushed always: the moments of rows that get no more gradient sink into them and
    make an update up to ten times slower. `threads` is for one operation; operations never run
    beside each other.
    """
    if threads < 1:
        raise DeviceError(f"trainer.threads is {threads}, expected at least 1")
    torch.set_flush_denormal(True)
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:  # may be set only once in a process
        torch.set_num_interop_threads(1)
    _set_determinism(deterministic)
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _set_determinism(deterministic: bool) -> None:
    if deterministic:
        workspace = os.environ.setdefault(_CUBLAS_VARIABLE, _CUBLAS_DETERMINISTIC[0])
        if workspace not in _CUBLAS_DETERMINISTIC:
            raise DeviceError(
                f"{_CUBLAS_VARIABLE} is {workspace!r} in the environment, but trainer.deterministic"
                f" needs one of {_CUBLAS_DETERMINISTIC}; unset it"
            )
    # The same flag as use_deterministic_algorithms, which would import the compiler.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    # Filling every fresh buffer with NaN would cost time and prove nothing that tests don't.
    # (A property that torch puts in the module's place at run time, where mypy cannot see it.)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[object]:
    """The context of a forward pass: products in `precision`, masters and sums in float32.

    bfloat16 has float32's range, so no loss scaler is needed. Raises DeviceError.
    """
    if precision not in PRECISIONS:
        raise DeviceError(f"trainer.precision is {precision!r}, expected one of {PRECISIONS}")
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


# --- what it really runs on ----------------------------------------------------------------------


def environment(device: torch.device, directory: Path) -> dict[str, Any]:
    """Everything that the bits may depend on, read back; `git` is about `directory`.

    Two runs whose environments are equal may claim equal bits; a difference is to be reported.
    """
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _package_version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": _cudnn_version() if device.type == "cuda" else None,
        "driver": _driver_version() if device.type == "cuda" else None,
        "device": str(device),
        "device_name": _device_name(device),
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic": torch.get_deterministic_debug_mode() == 2,
        "denormals_flushed": _denormals_flushed(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLE_PREFIXES) and not _SHOWS_ONLY.search(name)
        },
        "git": _git(directory),
    }


def environment_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What the bits may depend on and what has changed since: exactness is not claimed then."""
    return [
        f"{key}: then {saved.get(key)!r}, now {now.get(key)!r}"
        for key in sorted(saved.keys() | now.keys())
        if saved.get(key) != now.get(key)
    ]


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cudnn_version() -> int | None:
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return version


def _driver_version() -> str | None:
    """Of the kernel's module; None where the kernel does not show it, as to some containers."""
    try:
        return _DRIVER.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_model()


def _cpu_model() -> str:
    """The model name of the first processor; the architecture where the kernel names none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _denormals_flushed() -> bool:
    """Whether a product that must be subnormal comes out as zero: torch has no way to ask."""
    smallest = torch.finfo(torch.float32).tiny
    return (torch.tensor([smallest]) * 0.5).item() == 0.0


def _git(directory: Path) -> dict[str, Any] | None:
    """`commit` and `dirty` (tracked files changed; None if unknown), None outside a work tree."""
    commit = _git_answer(directory, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changes = _git_answer(directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "dirty": None if changes is None else bool(changes.strip())}


def _git_answer(directory: Path, *arguments: str) -> str | None:
    # fsmonitor names a program that git would run; a directory's own config is not ours to trust.
    command = ["git", "-C", str(directory), "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=False,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            timeout=_GIT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


# --- generators -----------------------------------------------------------------------------------


def rng_state(device: torch.device) -> dict[str, str]:
    """The states of torch's global generators that a run on `device` uses, as base64 by name."""
    state = {CPU_GENERATOR: encode_bytes(torch.get_rng_state())}
    if device.type == "cuda":
        state[CUDA_GENERATOR] = encode_bytes(torch.cuda.get_rng_state(device))
    return state


def restore_rng(state: Mapping[str, object], device: torch.device) -> None:
    """Put the global generators back. Other names in `state` belong to others and are let be.

    Raises GeneratorError when a component that a run on `device` needs is missing or unreadable.
    """
    for name in (CPU_GENERATOR, *([CUDA_GENERATOR] if device.type == "cuda" else [])):
        if name not in state:
            raise GeneratorError(
                f"rng.{name}: the checkpoint has no state of this generator, so a run on {device}"
                " cannot go on from it exactly. Set trainer.device to what wrote it, or go on from"
                " an earlier checkpoint that has one: supervisor rollback --to-step STEP"
            )
    cpu = decode_bytes(state[CPU_GENERATOR], CPU_GENERATOR)
    cuda = decode_bytes(state[CUDA_GENERATOR], CUDA_GENERATOR) if device.type == "cuda" else None
    with _refused_by_torch(CPU_GENERATOR):
        torch.set_rng_state(cpu)
    if cuda is not None:
        with _refused_by_torch(CUDA_GENERATOR):
            torch.cuda.set_rng_state(cuda, device)


def encode_bytes(state: torch.Tensor) -> str:
    """A uint8 tensor of shape (n,) as base64."""
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def decode_bytes(state: object, name: str) -> torch.Tensor:
    """The uint8 tensor of shape (n,) in a base64 text. Raises GeneratorError."""
    if not isinstance(state, str):
        raise GeneratorError(f"rng.{name}: expected base64 text, got {type(state).__name__}")
    try:
        raw = base64.b64decode(state, validate=True)
    except (binascii.Error, ValueError) as error:
        raise GeneratorError(f"rng.{name}: not base64 ({error})") from error
    return torch.tensor(list(raw), dtype=torch.uint8)


@contextlib.contextmanager
def _refused_by_torch(name: str) -> Iterator[None]:
    """torch answers a state of the wrong size or content with a bare RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise GeneratorError(f"rng.{name}: torch refuses this state ({error})") from error
