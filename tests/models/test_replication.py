"""Replication against its promise: what was acknowledged is in the log of every leader that comes, at its offset.

Four brokers with real replicas, logs and rules, two disks each, and a controller that changes; three partitions with
idempotent producers. A seed drives it: `support.simulated_cluster` has what may happen, `support.simulated_promises`
what must hold after every step, and `test_mutations` shows that it would be noticed if it did not.

`MILLRACE_SIM_SEEDS=5000` makes a long run of it. A failure names its seed and shows the last steps; the same seed gives
the same run.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from millrace.storage.settings import FlushMode
from support.simulated_cluster import simulate

SEEDS = int(os.environ.get("MILLRACE_SIM_SEEDS", "1000"))


@pytest.mark.timeout(300 + SEEDS)
@pytest.mark.parametrize("flush_mode", [FlushMode.OS, FlushMode.GROUP])
def test_every_promise_is_kept(flush_mode: FlushMode) -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        happened.update(simulate(seed, flush_mode))
    # The runs must have been about something: each of these at least so often in a hundred runs.
    expected = {
        "ack": 800,
        "duplicate": 1000,
        "leader": 500,
        "crash": 250,
        "reign": 150,
        "divergence": 100,
        "fenced": 60,
        "moved": 25,
        "lost disk": 200,
        "returned disk": 8,
        "failed disk": 25,
        "lost log": 10,
        "FENCED_LEADER_EPOCH": 100,
        "UNKNOWN_LEADER_EPOCH": 40,
        "NOT_ENOUGH_REPLICAS": 700,
        "OUT_OF_ORDER_SEQUENCE_NUMBER": 8,
    }
    rare = {name: happened[name] for name, least in expected.items() if happened[name] * 100 < least * SEEDS}
    assert not rare or SEEDS < 100, f"of {happened} too seldom: {rare}"
    # With all the disks that are lost, most partitions must have somebody left who has everything.
    assert happened["offline"] < SEEDS or SEEDS < 100, f"{happened['offline']} of {3 * SEEDS} partitions were lost"
