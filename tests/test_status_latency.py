"""The measurement of status latency, at a size that takes a moment."""

from __future__ import annotations

from pathlib import Path

from benchmarks import status_latency
from benchmarks.status_latency import ACKNOWLEDGED, IDLE, VERIFYING, WRITING, Row, table


def test_a_status_is_answered_beside_every_part_of_a_checkpoint(tmp_path: Path) -> None:
    """One round trip at least falls into the writing and into the reading back of each size."""
    rows = status_latency.measure(tmp_path, 1_000_000, 3, 0.0)
    found = {row.name: row for row in rows}
    assert list(found) == [IDLE, WRITING, VERIFYING, ACKNOWLEDGED]
    assert all(row.count >= 3 for row in rows[:3])
    assert all(0 < row.p50 <= row.p99 <= row.maximum for row in rows)
    assert found[IDLE].ratio == 1.0


def test_the_table_is_in_milliseconds_with_the_ratio_to_idle() -> None:
    text = table([Row("idle", 200, 0.001, 0.002, 0.003, 1.0), Row("writing", 7, 1, 2, 3, 1000.0)])
    head, idle, writing = text.splitlines()
    assert head.split() == ["status", "beside", "count", "p50", "p99", "max", "p99/idle"]
    assert idle.split() == ["idle", "200", "1.00", "ms", "2.00", "ms", "3.00", "ms", "1.00"]
    assert writing.split()[-1] == "1000.00"


def test_a_quantile_is_a_value_that_was_measured() -> None:
    values = [float(n) for n in range(1, 201)]
    assert status_latency._quantile(values, 0.5) == 100.0
    assert status_latency._quantile(values, 0.99) == 198.0
    assert status_latency._quantile([3.0], 0.99) == 3.0
