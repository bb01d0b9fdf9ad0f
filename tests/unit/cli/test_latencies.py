"""Percentiles against the sorted list of everything."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from millrace.cli.latencies import PERCENTILES, Latencies

durations = st.lists(st.integers(0, 10**11), min_size=1, max_size=300)


def measured(microseconds: list[int]) -> Latencies:
    latencies = Latencies()
    for us in microseconds:
        latencies.add((us + 0.5) / 1e6)
    return latencies


@given(durations)
def test_a_percentile_is_within_one_percent_and_never_too_small(microseconds: list[int]) -> None:
    latencies = measured(microseconds)
    ordered = sorted(microseconds)
    for share in (*PERCENTILES.values(), 0.001, 1.0):
        exact = ordered[math.ceil(share * len(ordered)) - 1]
        assert exact <= latencies.percentile_us(share) <= max(exact * 1.01, exact)
    assert latencies.summary_ms()["max"] == ordered[-1] / 1000


@given(durations, durations)
def test_what_came_since(before: list[int], after: list[int]) -> None:
    latencies = measured(before)
    earlier = latencies.copy()
    for us in after:
        latencies.add((us + 0.5) / 1e6)
    window, alone = latencies.since(earlier), measured(after)
    assert window.count == len(after)
    for share in PERCENTILES.values():
        assert alone.percentile_us(share) <= window.percentile_us(share) <= max(after) * 1.01 + 1
    assert earlier.count == len(before)


def test_nothing_measured() -> None:
    assert Latencies().summary_ms() == {"p50": 0, "p95": 0, "p99": 0, "p99.9": 0, "max": 0}
    assert Latencies().since(Latencies()).max_us == 0
