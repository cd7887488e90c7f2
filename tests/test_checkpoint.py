"""A checkpoint on disk: its bytes, how it becomes visible, and what is refused when it is read."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from faults import Faults
from hypothesis import given, strategies as st
from property_kit import cases, scratch

from supervisor import contract
from supervisor.contract import CHUNK_BYTES, HEADER_BYTES, Manifest, Tensor
from trainer import checkpoint
from trainer.checkpoint import (
    CheckpointConflict,
    CheckpointDamaged,
    CheckpointNotWritten,
    NonFiniteState,
    StateMismatch,
)
from trainer.flat import Flat

CPU = torch.device("cpu")
RUN, NONCE = "run-a", "0123456789abcdef"
SMALL = (("embedding", (5, 3)), ("up", (4, 3)), ("head", (5, 3)))
SYSTEM_CALLS = ("write", "fsync", "link", "rename")


def table(shapes: Any = SMALL) -> tuple[Tensor, ...]:
    tensors, offset = [], 0
    for name, shape in shapes:
        tensors.append(Tensor(name, shape, "out,in", offset))
        offset += tensors[-1].size
    return tuple(tensors)


def flat_of(tensors: tuple[Tensor, ...] | None = None, seed: int = 0) -> Flat:
    """Buffers in which weights and both moments differ everywhere."""
    flat = Flat(tensors or table(), CPU)
    generator = torch.Generator().manual_seed(seed)
    for region in (flat.weights, flat.first_moments, flat.second_moments):
        region.copy_(torch.rand(flat.parameters, generator=generator))
    return flat


def state_of(step: int) -> contract.Json:
    kinds: dict[type, Any] = {dict: {}, str: "f" * 64, int: step}
    return {name: kinds[kind] for name, kind in contract.STATE_COMPONENTS.items()}


def draft(flat: Flat, step: int, **changes: Any) -> Manifest:
    made = Manifest(
        run_id=RUN,
        lineage=(),
        attempt=1,
        step=step,
        epoch=1,
        reason="cadence",
        requests=(),
        parameters=flat.parameters,
        size_bytes=contract.checkpoint_size_bytes(flat.parameters),
        chunks=(),
        binary_digest="",
        tensors=flat.tensors,
        state=state_of(step),
    )
    return replace(made, **changes)


def publish(
    directory: Path,
    flat: Flat,
    step: int,
    sync: Callable[[], None] = lambda: None,
    nonce: str = NONCE,
    **changes: Any,
) -> Manifest:
    return checkpoint.publish(directory, draft(flat, step, **changes), flat, nonce=nonce, sync=sync)


def binary(directory: Path, step: int) -> Path:
    return directory / f"{contract.checkpoint_stem(step)}.bin"


def manifest(directory: Path, step: int) -> Path:
    return directory / f"{contract.checkpoint_stem(step)}.json"


def synced() -> None:
    """Stands for the sync of the receipts: one fsync."""
    with open(__file__, "rb") as file:
        os.fsync(file.fileno())


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


# --- the bytes ------------------------------------------------------------------------------------


def test_a_bin_is_header_weights_m_v_and_nothing_else(tmp_path: Path) -> None:
    flat = flat_of()
    publish(tmp_path, flat, 123)
    raw = binary(tmp_path, 123).read_bytes()
    count = flat.parameters
    assert len(raw) == 8 + 12 * count
    assert struct.unpack("<ii", raw[:8]) == (123, count)
    numbers = array("f", raw[8:])
    regions = (flat.weights, flat.first_moments, flat.second_moments)
    assert numbers.tolist() == [number for region in regions for number in region.tolist()]


def test_the_manifest_proves_the_bin_and_names_every_tensor(tmp_path: Path) -> None:
    flat = flat_of()
    made = publish(tmp_path, flat, 7, reason="operator", requests=("a", "b"))
    read = checkpoint.read_manifest(tmp_path, 7)
    assert read == made
    assert (read.reason, read.requests, read.tensors) == ("operator", ("a", "b"), flat.tensors)
    assert read.binary_digest == contract.chunks_digest(read.chunks)
    assert checkpoint.verify(tmp_path, 7, RUN) == made


def test_chunks_are_proven_one_by_one_in_a_file_of_several(tmp_path: Path) -> None:
    flat = flat_of(table((("all", (400_000,)),)))
    made = publish(tmp_path, flat, 1)
    raw = binary(tmp_path, 1).read_bytes()
    assert len(made.chunks) == 2
    assert [contract.digest(raw[:CHUNK_BYTES]), contract.digest(raw[CHUNK_BYTES:])] == [
        *made.chunks
    ]
    loaded = Flat(flat.tensors, CPU)
    checkpoint.load(tmp_path, made, loaded)
    assert bytes(loaded.image) == raw


def test_load_fills_the_buffers_in_place(tmp_path: Path) -> None:
    flat = flat_of()
    made = publish(tmp_path, flat, 9)
    loaded = flat_of(seed=1)
    place = loaded.weights.data_ptr()
    checkpoint.load(tmp_path, made, loaded)
    assert loaded.weights.data_ptr() == place
    assert torch.equal(loaded.weights, flat.weights)
    assert torch.equal(loaded.first_moments, flat.first_moments)
    assert torch.equal(loaded.second_moments, flat.second_moments)


@cases(15)
@given(step=st.integers(0, contract.INT32_MAX), seed=st.integers(0, 1000))
def test_what_is_published_is_what_is_loaded(step: int, seed: int) -> None:
    with scratch() as directory:
        flat = flat_of(seed=seed)
        made = publish(directory, flat, step)
        assert checkpoint.steps(directory) == [step]
        loaded = Flat(flat.tensors, CPU)
        checkpoint.load(directory, made, loaded)
        assert bytes(loaded.image) == bytes(flat.image)


def test_steps_are_ordered_by_number_and_decoys_are_passed_over(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 3):
        publish(tmp_path, flat_of(), step)
    (tmp_path / "step_000005.bin").mkdir()
    (tmp_path / "step_000006.bin").symlink_to(binary(tmp_path, 3))
    for name in ("step_7.bin", "step_0000008.bin", ".tmp-0001-0123-step_000009.bin"):
        (tmp_path / name).write_bytes(b"")
    assert checkpoint.steps(tmp_path) == [3, 999_999, 1_000_000]


# --- becoming visible -----------------------------------------------------------------------------


def test_fc07_data_is_on_the_device_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename that lands before the data leaves, after a power loss, the right name over zeros
    (huggingface/transformers PR 28364, NodeDB-Lab/nodedb #78)."""
    flat = flat_of()
    calls = Faults(monkeypatch, (*SYSTEM_CALLS, "unlink")).calls
    publish(tmp_path, flat, 40, sync=lambda: calls.append(("sync", "receipts")))
    temporary = f"{contract.TEMPORARY_PREFIX}0001-{NONCE[:8]}-step_000040"
    assert calls == [
        ("write", f"{temporary}.bin"),
        ("fsync", f"{temporary}.bin"),
        ("write", f"{temporary}.json"),
        ("fsync", f"{temporary}.json"),
        ("sync", "receipts"),
        ("link", "step_000040.json"),
        ("fsync", tmp_path.name),
        ("link", "step_000040.bin"),
        ("fsync", tmp_path.name),
        ("unlink", f"{temporary}.bin"),
        ("unlink", f"{temporary}.json"),
    ]


class Killed(BaseException):
    """Stands for SIGKILL: nothing that the code would do afterwards happens."""


def killed_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """From system call `number` on, every call fails, those that would clean up included."""
    seen = 0

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen > number:
                raise Killed
            return original(*arguments, **named)

        return call

    for name in (*SYSTEM_CALLS, "unlink"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))


def test_fc01_a_kill_at_any_call_leaves_only_whole_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill during a save left a short file at the final name, and loading it died with an
    unexpected end of file (Lightning-AI/pytorch-lightning #688)."""
    for number in range(11):
        directory = tmp_path / str(number)
        directory.mkdir()
        publish(directory, flat_of(), 20)
        with monkeypatch.context() as kill:
            killed_at(kill, number)
            with pytest.raises(Killed):
                publish(directory, flat_of(seed=1), 40, sync=synced)
        committed = number >= 8  # call 7 is the link of the .bin
        assert checkpoint.steps(directory) == ([20, 40] if committed else [20])
        for step in checkpoint.steps(directory):
            checkpoint.verify(directory, step, RUN)
        # The next life writes the same step, whatever the last one left.
        made = publish(directory, flat_of(seed=1), 40, attempt=2, nonce="fedcba9876543210")
        assert checkpoint.verify(directory, 40, RUN) == made
        assert made.attempt == (1 if committed else 2)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
def test_fc02_a_write_that_fails_leaves_the_set_before_it_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A failed write left zero-byte parts and .tmp files inside the set that was then taken for
    the last one (facebookresearch/metaseq #53)."""
    publish(tmp_path, flat_of(), 20)
    before = contents(tmp_path)
    for number in range(8):
        with monkeypatch.context() as patch:
            faults = Faults(patch, SYSTEM_CALLS)
            faults.fail_at(number, code)
            with pytest.raises(CheckpointNotWritten, match=r"checkpoint 40 .* untouched"):
                publish(tmp_path, flat_of(seed=1), 40, sync=synced)
            assert faults.failed == 1
        left = contents(tmp_path)
        assert not [name for name in left if name.startswith(contract.TEMPORARY_PREFIX)]
        assert {name: left[name] for name in before} == before
        selection = checkpoint.select(tmp_path, RUN)
        assert selection.chosen is not None
        assert (selection.chosen.step, selection.rejected) == (20, ())
    assert publish(tmp_path, flat_of(seed=1), 40).step == 40


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: original(fd, bytes(data)[:100]))
        made = publish(tmp_path, flat_of(), 1)
    assert checkpoint.verify(tmp_path, 1) == made


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_fc08_a_full_disk_keeps_the_old_one_and_files_keep_the_mode_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, mode: int
) -> None:
    """A full disk truncated the only good file, and the fix for that made new files owner-only
    whatever the run's own mode was (NVIDIA/NVFlare PR 5011 and its review)."""
    before = os.umask(umask)
    try:
        kept = publish(tmp_path, flat_of(), 20)
        with monkeypatch.context() as patch:
            Faults(patch, SYSTEM_CALLS).fail_always(errno.ENOSPC, only="write")
            with pytest.raises(CheckpointNotWritten, match="injected ENOSPC"):
                publish(tmp_path, flat_of(seed=1), 40)
    finally:
        os.umask(before)
    loaded = Flat(table(), CPU)
    checkpoint.load(tmp_path, kept, loaded)
    assert torch.equal(loaded.weights, flat_of().weights)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "step_000020.bin": mode,
        "step_000020.json": mode,
    }


# --- one publisher, and names that stay -----------------------------------------------------------


def test_fc06_a_second_publisher_at_the_same_time_is_refused(tmp_path: Path) -> None:
    """Several processes renamed the same temporary directory and late ones hit a missing path
    (huggingface/transformers PR 27820, #28015, #27925)."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(CheckpointConflict, match="only one trainer may write"):
            publish(tmp_path, flat_of(), 20)
        assert contents(tmp_path) == {}
    finally:
        os.close(descriptor)
    assert publish(tmp_path, flat_of(), 20).step == 20


def test_fc06_publishing_inside_a_publication_is_refused_and_the_first_one_lands(
    tmp_path: Path,
) -> None:
    """The same trouble, in the middle of a save (huggingface/transformers #28015)."""

    def intrude() -> None:
        with pytest.raises(CheckpointConflict):
            publish(tmp_path, flat_of(seed=1), 20, attempt=2, nonce="fedcba9876543210")

    made = publish(tmp_path, flat_of(), 20, sync=intrude)
    assert checkpoint.verify(tmp_path, 20, RUN) == made


def test_equal_content_is_kept_with_the_manifest_that_was_first(tmp_path: Path) -> None:
    first = publish(tmp_path, flat_of(), 20)
    before = contents(tmp_path)
    again = publish(tmp_path, flat_of(), 20, attempt=2, reason="operator")
    assert again == first
    assert contents(tmp_path) == before


def test_other_content_is_a_conflict_and_touches_nothing(tmp_path: Path) -> None:
    first = publish(tmp_path, flat_of(), 20)
    before = contents(tmp_path)
    with pytest.raises(CheckpointConflict, match=r"never replaced") as caught:
        publish(tmp_path, flat_of(seed=1), 20, attempt=2)
    assert first.binary_digest in str(caught.value)
    assert contents(tmp_path) == before


def test_a_bin_without_a_sound_manifest_is_a_conflict_too(tmp_path: Path) -> None:
    publish(tmp_path, flat_of(), 20)
    manifest(tmp_path, 20).write_bytes(b"{}")
    with pytest.raises(CheckpointConflict, match=r"step_000020\.bin exists, but step_000020\.json"):
        publish(tmp_path, flat_of(), 20)


@pytest.mark.parametrize("seed", [0, 1], ids=["equal content", "other content"])
def test_a_manifest_without_its_bin_was_never_committed_and_gives_way(
    tmp_path: Path, seed: int
) -> None:
    """What a kill between the two links leaves behind."""
    publish(tmp_path, flat_of(seed=seed), 20)
    binary(tmp_path, 20).unlink()
    assert checkpoint.steps(tmp_path) == []
    made = publish(tmp_path, flat_of(), 20, attempt=2)
    assert made.attempt == 2
    assert checkpoint.verify(tmp_path, 20, RUN) == made


@pytest.mark.parametrize("region", ["weights", "first_moments", "second_moments"])
def test_fc102_a_value_that_is_not_finite_is_never_published(tmp_path: Path, region: str) -> None:
    """The last checkpoint already held the NaN, so that there was nothing to go back to
    (Rikorose/DeepFilterNet #30, karpathy/nanoGPT #215)."""
    flat = flat_of()
    for value in (float("nan"), float("inf"), float("-inf")):
        getattr(flat, region)[17] = value
        with pytest.raises(NonFiniteState, match=rf"step 20: {region} hold"):
            publish(tmp_path, flat, 20)
    assert contents(tmp_path) == {}


# --- what is refused ------------------------------------------------------------------------------


def test_fc29_missing_or_zeroed_moments_are_refused(tmp_path: Path) -> None:
    """Optimizer state that was not there was silently started from zero, and the loss jumped
    (PaddlePaddle/Paddle #49382, NVlabs/stylegan2-ada-pytorch #108)."""
    flat = flat_of()
    made = publish(tmp_path, flat, 20)
    raw = binary(tmp_path, 20).read_bytes()
    moments = HEADER_BYTES + 4 * flat.parameters
    for forged in (
        raw[:moments],
        raw[:moments] + bytes(len(raw) - moments),
        raw[: moments + 4 * flat.parameters] + bytes(4 * flat.parameters),
    ):
        binary(tmp_path, 20).write_bytes(forged)
        with pytest.raises(CheckpointDamaged, match=r"step_000020\.bin"):
            checkpoint.load(tmp_path, made, Flat(flat.tensors, CPU))
        assert checkpoint.select(tmp_path, RUN).chosen is None


def test_fc30_tensors_are_bound_by_name_and_not_by_position(tmp_path: Path) -> None:
    """A changed order of parameters gave each tensor another one's moments
    (pytorch/pytorch #1489, Lightning-AI/pytorch-lightning #17025)."""
    written = flat_of()
    made = publish(tmp_path, written, 20)
    loaded = Flat(table(tuple(reversed(SMALL))), CPU)
    checkpoint.load(tmp_path, made, loaded)
    for region in ("weights", "first_moments", "second_moments"):
        for name, _ in SMALL:
            ours = loaded.view(getattr(loaded, region), name)
            assert torch.equal(ours, written.view(getattr(written, region), name)), (region, name)


def test_fc30_an_unknown_name_is_refused(tmp_path: Path) -> None:
    """The same trouble where a name has no counterpart (pytorch/pytorch #1489)."""
    made = publish(tmp_path, flat_of(), 20)
    renamed = Flat(table((("embedding", (5, 3)), ("down", (4, 3)), ("head", (5, 3)))), CPU)
    with pytest.raises(StateMismatch, match=r"unknown tensors \['up'\], missing \['down'\]"):
        checkpoint.load(tmp_path, made, renamed)
    assert not renamed.weights.any()


def test_fc31_another_vocabulary_is_refused_at_load_with_both_shapes(tmp_path: Path) -> None:
    """A changed vocabulary crashed inside the optimizer's step instead of at loading
    (OpenNMT/OpenNMT-py PR 2030, X-LANCE/text2sql-lgesql #18)."""
    made = publish(tmp_path, flat_of(), 20)
    larger = Flat(table((("embedding", (6, 3)), ("up", (4, 3)), ("head", (6, 3)))), CPU)
    with pytest.raises(StateMismatch, match=r"embedding is \(5, 3\).* this model has \(6, 3\)"):
        checkpoint.load(tmp_path, made, larger)
    assert not larger.weights.any()


@cases(40)
@given(data=st.data(), member=st.sampled_from(["bin", "json"]))
def test_fc11_one_flipped_bit_anywhere_condemns_the_pair(data: st.DataObject, member: str) -> None:
    """The presence of metadata counted as validity: a flipped bit loaded and the run drifted
    (pytorch/torchtitan #4011)."""
    with scratch() as directory:
        publish(directory, flat_of(), 20)
        older = publish(directory, flat_of(), 10)
        path = directory / f"step_000020.{member}"
        raw = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(raw) * 8 - 1))
        raw[place // 8] ^= 1 << place % 8
        path.write_bytes(raw)
        selection = checkpoint.select(directory, RUN)
        assert selection.chosen == older
        assert [step for step, _ in selection.rejected] == [20]


def test_a_short_file_is_damaged(tmp_path: Path) -> None:
    publish(tmp_path, flat_of(), 20)
    for cut in (511, 100, 8, 1, 0):
        os.truncate(binary(tmp_path, 20), cut)
        with pytest.raises(CheckpointDamaged, match=rf"{cut} bytes, its manifest says 512"):
            checkpoint.verify(tmp_path, 20)


def test_fc03_selection_falls_back_and_says_why(tmp_path: Path) -> None:
    """The machine died while saving, the newest file was bad and nothing fell back
    (allenai/allennlp #2129); and so for a missing member (huggingface/transformers #35782)."""
    for step in (10, 20, 30, 40):
        publish(tmp_path, flat_of(seed=step), step)
    manifest(tmp_path, 40).unlink()
    shutil.copy(binary(tmp_path, 10), binary(tmp_path, 30))
    shutil.copy(manifest(tmp_path, 10), manifest(tmp_path, 20))
    selection = checkpoint.select(tmp_path, RUN)
    assert selection.chosen is not None
    assert selection.chosen.step == 10
    assert [step for step, _ in selection.rejected] == [40, 30, 20]
    reasons = [reason for _, reason in selection.rejected]
    assert "No such file" in reasons[0]
    assert "have digest" in reasons[1]
    assert reasons[2] == "step_000020.json: written for step 10"


def test_a_checkpoint_of_another_run_is_never_selected(tmp_path: Path) -> None:
    publish(tmp_path, flat_of(), 20, run_id="run-b")
    selection = checkpoint.select(tmp_path, RUN)
    assert selection.chosen is None
    assert selection.rejected == ((20, "it belongs to run run-b, this is run-a"),)


def test_a_header_that_disagrees_is_damaged_even_with_digests_that_fit(tmp_path: Path) -> None:
    """One part of a checkpoint came silently from an older step (mosaicml/composer PR 2146)."""
    flat = flat_of()
    older = publish(tmp_path, flat, 10)
    forged = replace(older, step=20, state=state_of(20))
    shutil.copy(binary(tmp_path, 10), binary(tmp_path, 20))
    manifest(tmp_path, 20).write_bytes(forged.to_bytes())
    with pytest.raises(CheckpointDamaged, match="header says step 10"):
        checkpoint.load(tmp_path, checkpoint.read_manifest(tmp_path, 20), flat)


def test_fc35_a_manifest_without_a_component_is_refused(tmp_path: Path) -> None:
    """A broad except around loading the random state let training go on with other streams
    (redai-studio/Relax PR 317 review); here nothing is optional."""
    publish(tmp_path, flat_of(), 20)
    raw = manifest(tmp_path, 20).read_bytes()
    for component in contract.STATE_COMPONENTS:
        body = orjson.loads(raw)
        del body["state"][component], body["digest"]
        body["digest"] = contract.digest(contract.canonical(body))
        manifest(tmp_path, 20).write_bytes(contract.canonical(body) + b"\n")
        with pytest.raises(CheckpointDamaged, match=rf"missing \['{component}'\]"):
            checkpoint.read_manifest(tmp_path, 20)


def test_a_failure_that_says_nothing_about_the_bytes_condemns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, flat_of(), 20)

    def denied(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(PermissionError):
        checkpoint.select(tmp_path, RUN)


# --- set aside ------------------------------------------------------------------------------------


def test_what_is_set_aside_frees_the_name_and_keeps_bytes_and_reason(tmp_path: Path) -> None:
    directory, quarantine = tmp_path / "checkpoints", tmp_path / "quarantine"
    directory.mkdir()
    expected: dict[str, bytes] = {}
    for suffix, place in (("", "step_000020"), (".2", "step_000020.2"), (".3", "step_000020.3")):
        publish(directory, flat_of(seed=len(suffix)), 20)
        pair = contents(directory)
        moved = checkpoint.set_aside(tmp_path, 20, f"reason{suffix}", 1.5)
        assert moved == f"quarantine/{place}.bin"
        assert contents(directory) == {}
        expected |= {f"{place}.bin": pair["step_000020.bin"]}
        expected |= {f"{place}.json": pair["step_000020.json"]}
        reason = orjson.loads((quarantine / f"{place}.reason.json").read_bytes())
        assert reason == {
            "step": 20,
            "reason": f"reason{suffix}",
            "time": 1.5,
            "names": ["step_000020.bin", "step_000020.json"],
            "moved_to": moved,
        }
    kept = contents(quarantine)
    assert {name: kept[name] for name in expected} == expected


def test_a_lone_bin_is_set_aside_too(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    publish(directory, flat_of(), 20)
    manifest(directory, 20).unlink()
    checkpoint.set_aside(tmp_path, 20, "no manifest", 0.0)
    assert contents(directory) == {}
    names = {path.name for path in (tmp_path / "quarantine").iterdir()}
    assert names == {"step_000020.bin", "step_000020.reason.json"}
