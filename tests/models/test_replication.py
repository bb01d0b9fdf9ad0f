"""Replication against its promise: what was acknowledged is in the log of every leader that comes, at its offset.

Four brokers with real replicas, logs and rules, two disks each, and a controller that changes; three partitions with
idempotent producers. A seed drives it: `support.simulated_cluster` has what may happen, `support.simulated_promises`
what must hold after every step, and `test_mutations` shows that it would be noticed if it did not.

Some more runs have transactions (`support.simulated_transactional_cluster`, `support.simulated_transactions`).

`MILLRACE_SIM_SEEDS=5000` makes a long run of it. A failure names its seed and shows the last steps; the same seed gives
the same run.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from millrace.storage.settings import FlushMode
from support.simulated_cluster import simulate
from support.simulated_transactional_cluster import TransactionalCluster

SEEDS = int(os.environ.get("MILLRACE_SIM_SEEDS", "1000"))
TRANSACTIONAL_SEEDS = SEEDS // 10


@pytest.mark.timeout(300 + SEEDS)
@pytest.mark.parametrize("flush_mode", [FlushMode.OS, FlushMode.GROUP])
def test_every_promise_is_kept(flush_mode: FlushMode) -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        happened.update(simulate(seed, flush_mode))
    expect(
        happened,
        SEEDS,
        {
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
        },
    )
    # With all the disks that are lost, most partitions must have somebody left who has everything.
    assert happened["offline"] < SEEDS or SEEDS < 100, f"{happened['offline']} of {3 * SEEDS} partitions were lost"


@pytest.mark.timeout(300 + SEEDS)
@pytest.mark.parametrize("flush_mode", [FlushMode.OS, FlushMode.GROUP])
def test_every_promise_about_transactions_is_kept(flush_mode: FlushMode) -> None:
    happened: Counter[str] = Counter()
    for seed in range(TRANSACTIONAL_SEEDS):
        happened.update(simulate(seed, flush_mode, TransactionalCluster))
    expect(
        happened,
        TRANSACTIONAL_SEEDS,
        {
            "committed": 80,
            "aborted": 200,
            "whole": 70,
            "transactional append": 500,
            "marker": 800,
            "coordinator": 150,
            "fenced client": 60,
            "timed out": 8,
            "leader": 500,
            "crash": 120,
            "PRODUCER_FENCED": 80,
            "INVALID_PRODUCER_EPOCH": 60,
            "INVALID_TXN_STATE": 10,
            "marker TRANSACTION_COORDINATOR_FENCED": 2,
            "marker INVALID_PRODUCER_EPOCH": 2,
        },
    )


def expect(happened: Counter[str], runs: int, expected: dict[str, int]) -> None:
    """The runs must have been about something: each of these at least so often in a hundred runs."""
    rare = {name: happened[name] for name, least in expected.items() if happened[name] * 100 < least * runs}
    assert not rare or runs < 100, f"of {happened} too seldom: {rare}"
