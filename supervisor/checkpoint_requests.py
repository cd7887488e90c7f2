"""What the helper process does with one request: from a line of JSON to a reply.

What may live here: the table of requests, the check of their fields, the shape of their results.
What they do to files is `supervisor.checkpoints`; who sends them is `supervisor.verifier`.

A request has `id` and `do`, and:
- `select`: run_id, lineage, time; ceiling, bare_allowed -> chosen (a summary or null), rejected
  ([step, reason, moved to] each, newest first), present (all steps that were there);
- `verify`: step, run_id, lineage; bare_allowed, set_aside with time -> a summary;
- `retain`: keep_last, keep_every, keep_superseded, pins, verified_steps -> removed (steps), names
  and freed_bytes of what went from superseded/;
- `reclaim`: wanted_bytes, keep_every, pins, verified_steps; attempt and nonce of the living trainer
  -> removed, names, freed_bytes;
- `supersede`: above_step -> moved ([step, moved to] each, newest first);
- `clean`: attempt and nonce of the living trainer, or neither -> removed (names).

A reply has `id`, `ok` and `result`; where it is not ok also `error` and `kind`: "damaged" (the
checkpoint; result says step, reason, moved_to), "os" (the machine; result says errno or, where
files were to be removed, which ones are gone) or "ours" (the request was wrong, which is a bug).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from supervisor import checkpoints, reclaim
from supervisor.contract import (
    CHECKPOINTS,
    MESSAGE_BYTES_MAX,
    QUARANTINE,
    ContractError,
    Json,
    checkpoint_stem,
    parse_object,
)
from supervisor.readback import Damaged, Tick, Verified, verify


class Requests:
    """Does one request after the other on one run directory; `tick` runs where it may stop."""

    def __init__(self, run_directory: Path, tick: Tick) -> None:
        self._run_directory = run_directory
        self._tick = tick
        self._verbs: dict[str, Callable[[Json], Json]] = {
            "select": self._select,
            "verify": self._verify,
            "retain": self._retain,
            "reclaim": self._reclaim,
            "supersede": self._supersede,
            "clean": self._clean,
        }

    def answer(self, line: bytes) -> Json:
        """The reply to one request. Raises what `tick` raises, and whatever is a bug of ours."""
        number = 0
        try:
            request = parse_object(line, "request", MESSAGE_BYTES_MAX)
            number = _field(request, "id", int)
            verb = _field(request, "do", str)
            if verb not in self._verbs:
                raise ContractError(f"request {number}: do {verb!r}, not in {list(self._verbs)}")
            return {"id": number, "ok": True, "result": self._verbs[verb](request)}
        except Damaged as damage:
            result: Json = {
                "step": damage.step,
                "reason": damage.reason,
                "moved_to": damage.moved_to,
            }
            return _failure(number, "damaged", str(damage), result)
        except reclaim.Unfinished as error:
            return _failure(number, "os", str(error), _removal(error.done))
        except OSError as error:
            return _failure(number, "os", str(error), {"errno": error.errno})
        except ValueError as error:
            return _failure(number, "ours", str(error), {})

    def _select(self, request: Json) -> Json:
        selection = checkpoints.select(
            self._run_directory,
            _field(request, "run_id", str),
            _lineage(request),
            time=_field(request, "time", float),
            ceiling=_field(request, "ceiling", int, None),
            bare_allowed=_field(request, "bare_allowed", bool, False),
            tick=self._tick,
        )
        chosen = selection.chosen
        return {
            "chosen": None if chosen is None else summary(chosen),
            "rejected": [[one.step, one.reason, one.moved_to] for one in selection.rejected],
            "present": selection.present,
        }

    def _verify(self, request: Json) -> Json:
        step = _field(request, "step", int)
        directory = self._run_directory / CHECKPOINTS
        found = next((one for one in checkpoints.find(directory) if one.step == step), None)
        if found is None:
            raise Damaged(step, f"{checkpoint_stem(step)}{checkpoints.BINARY}: no such file")
        try:
            verified = verify(
                found,
                _field(request, "run_id", str),
                _lineage(request),
                bare_allowed=_field(request, "bare_allowed", bool, False),
                tick=self._tick,
            )
        except Damaged as damage:
            if _field(request, "set_aside", bool, False):
                damage.moved_to = checkpoints.quarantine(
                    self._run_directory, found, damage.reason, time=_field(request, "time", float)
                )
            raise
        return summary(verified)

    def _retain(self, request: Json) -> Json:
        done = reclaim.retain(
            self._run_directory,
            keep_last=_field(request, "keep_last", int),
            keep_every=_field(request, "keep_every", int),
            keep_superseded=_field(request, "keep_superseded", int),
            pins=_steps(request, "pins"),
            verified_steps=_steps(request, "verified_steps"),
            tick=self._tick,
        )
        return _removal(done)

    def _reclaim(self, request: Json) -> Json:
        done = reclaim.reclaim(
            self._run_directory,
            _field(request, "wanted_bytes", int),
            keep_every=_field(request, "keep_every", int),
            pins=_steps(request, "pins"),
            verified_steps=_steps(request, "verified_steps"),
            living=_living(request),
            tick=self._tick,
        )
        return _removal(done)

    def _supersede(self, request: Json) -> Json:
        above_step = _field(request, "above_step", int)
        moved = checkpoints.supersede(self._run_directory, above_step, tick=self._tick)
        return {"moved": [[one.step, one.moved_to] for one in moved]}

    def _clean(self, request: Json) -> Json:
        living = _living(request)
        return {
            "removed": [
                f"{name}/{leftover}"
                for name in (CHECKPOINTS, QUARANTINE)
                for leftover in checkpoints.clean_temporaries(self._run_directory / name, living)
            ]
        }


def _removal(done: reclaim.Reclaimed) -> Json:
    return {"removed": done.steps, "names": done.names, "freed_bytes": done.freed_bytes}


def summary(verified: Verified) -> Json:
    """What the loop needs to know of a checkpoint, small enough for one line: the manifest
    without its tensors, chunks, permutations and generators. Unknown values are null."""
    manifest = verified.manifest
    out: Json = {
        "step": verified.step,
        "path": f"{CHECKPOINTS}/{verified.path.name}",
        "sha256": verified.sha256,
        "binary_digest": verified.binary_digest,
        "size_bytes": verified.size_bytes,
        "parameters": verified.parameters,
        "bare": manifest is None,
    }
    if manifest is None:
        return out | {
            "run_id": None,
            "attempt": 0,
            "epoch": None,
            "reason": "",
            "requests": [],
            "policy_digest": None,
            "targets_seen": None,
            "bandit": {},
            "arms": {},
        }
    return out | {
        "run_id": manifest.run_id,
        "attempt": manifest.attempt,
        "epoch": manifest.epoch,
        "reason": manifest.reason,
        "requests": list(manifest.requests),
        "policy_digest": manifest.state["policy_digest"],
        "targets_seen": manifest.state["targets_seen"],
        "bandit": manifest.state["bandit"],
        "arms": {name: _arm_summary(arm) for name, arm in manifest.state["arms"].items()},
    }


def _arm_summary(arm: Any) -> Json:
    """The manifest checks that there are arms; what is in one is its trainer's own affair."""
    arm = arm if isinstance(arm, dict) else {}
    sampler = arm.get("sampler")
    sampler = sampler if isinstance(sampler, dict) else {}
    return {
        "windows": arm.get("windows"),
        "cursor": sampler.get("cursor"),
        "round": sampler.get("round"),
    }


_REQUIRED: Final = object()


def _field(request: Json, name: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = request.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _wrong(request, name, kind.__name__)
    return value


def _steps(request: Json, name: str) -> list[int]:
    steps: list[int] = _field(request, name, list)
    if not all(isinstance(step, int) for step in steps):
        raise _wrong(request, name, "steps")
    return steps


def _living(request: Json) -> tuple[int, str] | None:
    attempt = _field(request, "attempt", int, None)
    return None if attempt is None else (attempt, _field(request, "nonce", str))


def _lineage(request: Json) -> list[tuple[str, int]]:
    lineage = []
    for item in _field(request, "lineage", list):
        match item:
            case [str(run_id), int(last_step)]:
                lineage.append((run_id, last_step))
            case _:
                raise _wrong(request, "lineage", "[run id, last step] each")
    return lineage


def _wrong(request: Json, name: str, expected: str) -> ContractError:
    return ContractError(
        f"request {request.get('id')} {request.get('do')}: {name} is {request.get(name)!r},"
        f" expected {expected}"
    )


def _failure(number: int, kind: str, error: str, result: Json) -> Json:
    return {"id": number, "ok": False, "kind": kind, "error": error, "result": result}
