"""What the journal says of a ledger, held against its bytes."""

from __future__ import annotations

from pathlib import Path

from supervisor.ledger_proof import Begin, Binding, prove_ledger


def holds(path: Path, count: int, sha256: str) -> bool:
    """Whether the first `count` entries are those that were bound."""
    binding = Binding(count, sha256, seq=1)
    proof = prove_ledger(path, [binding], Begin(), writing=False, advance=lambda size_bytes: None)
    return proof.bound == count
