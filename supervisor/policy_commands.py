"""Commands about the policy: pivot, rollback, and looking at policies.

What may live here: arguments, the difference for a person to read, one request and its answer in
words. What is checked first is `pivot`; what the supervisor then does is `pivoting`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from supervisor.contract import TRAINER_LOCK_FILE, ExitCode, Json
from supervisor.terminal import (
    complain,
    exits,
    find,
    json_option,
    print_json,
    request_id_option,
    run_argument,
    timeout_option,
)

if TYPE_CHECKING:
    from supervisor.pivot import Proposal


@click.command(epilog=exits("1 refused or given up", "124 no reply in time"))
@run_argument
@click.option("--policy", "policy_file", required=True, type=click.Path(), help="[policy], TOML.")
@click.option("--at", type=click.Choice(["boundary", "now"]), default="boundary", show_default=True)
@click.option("--dry-run", is_flag=True, help="Check and show the difference; change nothing.")
@click.option("--reason", default="", help="Goes on record with the pivot.")
@timeout_option(3600.0)
@request_id_option
@json_option
def pivot(
    run: str | None,
    policy_file: str,
    at: str,
    dry_run: bool,
    reason: str,
    timeout_seconds: float,
    request_id: str | None,
    as_json: bool,
) -> int:
    """Change the policy in the middle of a run, as one crash-safe transaction.

    The policy is checked first (bounds, data, what may change), without touching the run. Then the
    trainer pauses at the next checkpoint boundary, samples and state are archived, the history
    stays, and training goes on under the new policy from that checkpoint.
    """
    return _pivot(
        run, Path(policy_file), at, None, reason, dry_run, timeout_seconds, request_id, as_json
    )


@click.command(epilog=exits("1 refused or given up", "124 no reply in time"))
@run_argument
@click.option(
    "--to-step",
    type=click.IntRange(0),
    required=True,
    help="A checkpoint that the run still has.",
)
@click.option(
    "--policy",
    "policy_file",
    type=click.Path(),
    help="A new policy; else the one that ruled at that step.",
)
@click.option("--dry-run", is_flag=True, help="Check and show the difference; change nothing.")
@click.option("--reason", default="", help="Goes on record with the rollback.")
@timeout_option(3600.0)
@request_id_option
@json_option
def rollback(
    run: str | None,
    to_step: int,
    policy_file: str | None,
    dry_run: bool,
    reason: str,
    timeout_seconds: float,
    request_id: str | None,
    as_json: bool,
) -> int:
    """Go back to a checkpoint and train on from there; what came after it stays on record.

    The same transaction as a pivot, with an older base. Checkpoints above the base move to
    superseded/; the history keeps every entry, and the later ones rule.
    """
    file = Path(policy_file) if policy_file else None
    return _pivot(run, file, "now", to_step, reason, dry_run, timeout_seconds, request_id, as_json)


def _pivot(
    run: str | None,
    policy_file: Path | None,
    at: str,
    to_step: int | None,
    reason: str,
    dry_run: bool,
    timeout_seconds: float,
    request_id: str | None,
    as_json: bool,
) -> int:
    from supervisor import client, pivot as checking
    from supervisor.config import ConfigError

    directory = find(run).resolve()
    if request_id is not None and _show_done(directory, request_id, as_json):
        return 0
    try:
        proposal = checking.propose(directory, policy_file, at=at, reason=reason, to_step=to_step)
    except (ConfigError, checking.PolicyRefused) as refusal:
        return complain(str(refusal), ExitCode.USAGE)
    if dry_run and as_json:
        print_json(_plan(proposal))
        return 0
    for change in proposal.changes:
        click.echo(f"  {change}", err=as_json)
    _warn(proposal.warnings)
    if dry_run:
        click.echo("checked; nothing was changed")
        return 0
    id = request_id or client.new_request_id()
    try:
        answer = client.ask(
            directory, "pivot", id=id, timeout_seconds=timeout_seconds, **proposal.content
        )
    except client.NoSupervisor:
        return _pivot_unsupervised(directory, id, proposal.content, as_json)
    except client.DeadlinePassed as error:
        return complain(str(error), ExitCode.DEADLINE)
    if answer.outcome != "done":
        return complain(f"{answer.outcome}: {answer.why}", ExitCode.FAILED)
    _show_result(id, answer.result, as_json)
    # Committed, and yet the new trainer never was ready.
    return complain(answer.why, ExitCode.FAILED) if answer.why else 0


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)


def _plan(proposal: Proposal) -> Json:
    """What a request would say and change; `epoch` is the one that it was checked against."""
    asked = ("at", "epoch", "parent", "to_step", "policy_digest", "reason")
    return {
        "schema_version": 1,
        **{name: proposal.content[name] for name in asked},
        "changes": [change._asdict() for change in proposal.changes],
        "warnings": proposal.warnings,
    }


def _show_result(id: str, result: Json, as_json: bool) -> None:
    if as_json:
        print_json({"schema_version": 1, "id": id, **result})
        return
    click.echo(
        f"epoch {result['epoch']} begins with step {result['first_step']}; the old policy is in"
        f" archive/{result['archive']}"
    )


def _show_done(directory: Path, id: str, as_json: bool) -> bool:
    """Whether this very request has been carried out; if so, what came of it is shown."""
    from supervisor import pivot as checking
    from supervisor.moves import pivot_result

    epoch = checking.epoch_of(checking.durable_of(directory), id)
    if epoch is not None:
        _show_result(id, pivot_result(epoch), as_json)
    return epoch is not None


def _pivot_unsupervised(directory: Path, id: str, content: Json, as_json: bool) -> int:
    """A run that is stopped, failed or finished: this process is its supervisor for the switch."""
    from supervisor import moves, pivot as checking, start as starting
    from supervisor.rundir import lock_holder

    if lock_holder(directory / TRAINER_LOCK_FILE) is not None:
        return complain(
            "the trainer trains without a supervisor; `supervisor start` takes it over, then pivot",
            ExitCode.FAILED,
        )
    try:
        code = starting.resume_directory(
            directory, os.environ, starting.Request(None, id, False, content)
        )
    except starting.Refused as refusal:
        return complain(str(refusal), refusal.code)
    if _show_done(directory, id, as_json):
        return code
    reply = moves.answered(checking.durable_of(directory), id, "pivot")
    why = "no answer is on record" if reply is None else reply.why
    return complain(f"refused: {why}", ExitCode.FAILED)


@click.group(epilog=exits())
def policy() -> None:
    """Look at policies: `show`, `diff`, `check`."""


@policy.command(epilog=exits(), name="show")
@run_argument
@click.option(
    "--epoch", type=click.IntRange(1), default=None, help="Which one; the ruling one by default."
)
@json_option
def policy_show(run: str | None, epoch: int | None, as_json: bool) -> int:
    """The policy of an epoch, as submitted, and how it came to rule."""
    from supervisor import pivot as checking
    from supervisor.rundir import RunError

    durable = checking.durable_of(find(run))
    wanted = durable.epoch if epoch is None else epoch
    found = next((one for one in durable.epochs if one.number == wanted), None)
    if found is None:
        raise RunError(f"no epoch {wanted}; there are {[one.number for one in durable.epochs]}")
    shown: Json = {
        "schema_version": 1,
        "epoch": found.number,
        "first_step": found.base_step + 1,
        "parent": found.parent if found.number > 1 else None,
        "policy_digest": found.policy_digest,
        "archive": found.archive or None,
        "policy": found.policy,
    }
    if as_json:
        print_json(shown)
        return 0
    click.echo(f"# epoch {found.number}, from step {found.base_step + 1} on")
    click.echo(found.policy)
    return 0


@policy.command(epilog=exits(), name="diff")
@click.argument("policy_file", type=click.Path())
@run_argument
@json_option
def policy_diff(policy_file: str, run: str | None, as_json: bool) -> int:
    """What a policy file would change in a run."""
    return _pivot(run, Path(policy_file), "boundary", None, "", True, 1.0, None, as_json)


@policy.command(epilog=exits(), name="check")
@click.argument("policy_file", type=click.Path())
@run_argument
@click.option(
    "--pulls",
    type=click.IntRange(1, 1_000_000),
    default=1000,
    show_default=True,
    help="How many to simulate.",
)
@json_option
def policy_check(policy_file: str, run: str | None, pulls: int, as_json: bool) -> int:
    """Bounds and data of a policy file, and the picks that it would make."""
    from supervisor import pivot as checking
    from supervisor.config import ConfigError

    directory = find(run)
    try:
        proposal = checking.propose(
            directory,
            Path(policy_file),
            at="boundary",
            reason="",
            to_step=None,
            same_allowed=True,
        )
    except (ConfigError, checking.PolicyRefused) as refusal:
        return complain(str(refusal), ExitCode.USAGE)
    _warn(proposal.warnings)
    rows = simulate(proposal.settings, proposal.bandit, pulls)
    if as_json:
        print_json(
            {"schema_version": 1, "pulls": pulls, "arms": rows, "warnings": proposal.warnings}
        )
        return 0
    for row in rows:
        click.echo(
            f"{row['arm']:<24} {row['share']:6.1%}  floor {row['floor']:6.1%}  cap"
            f" {row['cap']:6.1%}  {sparkline(row['counts'])}"
        )
    return 0


def simulate(settings: Any, bandit: Json | None, pulls: int, buckets: int = 20) -> list[Json]:
    """The picks that a fresh bandit of this policy makes when every arm's loss falls alike. Without
    `bandit`, the one that the data makes, nothing is known of epochs and nothing is limited by
    them."""
    from supervisor import config, curriculum

    policy = config.curriculum_policy(settings.policy)
    if bandit is None:
        tuning = replace(policy.tuning, maximum_epochs=None)
        state = curriculum.create(replace(policy, tuning=tuning))
    else:
        state = curriculum.from_json(policy, bandit)
    counts = {arm.name: [0] * buckets for arm in settings.policy.arms}
    for number in range(pulls):
        arm, state = curriculum.next_arm(state)
        counts[arm][number * buckets // pulls] += 1
        state = curriculum.observe(state, arm, 4.0 - 2.0 * number / pulls)
    return [
        {
            "arm": arm.name,
            "share": sum(counts[arm.name]) / pulls,
            "floor": arm.floor,
            "cap": arm.cap,
            "counts": counts[arm.name],
        }
        for arm in settings.policy.arms
    ]


def sparkline(counts: list[int]) -> str:
    """One character a bucket, from empty to the fullest."""
    bars = " ▁▂▃▄▅▆▇█"
    most = max(counts) or 1
    return "".join(bars[round(count / most * (len(bars) - 1))] for count in counts)
