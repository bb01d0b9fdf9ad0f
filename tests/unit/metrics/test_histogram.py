"""A value is counted in the first bucket whose bound it does not exceed."""

from __future__ import annotations

from millrace.metrics.histogram import SECONDS, Histogram


def test_bounds_belong_to_their_bucket() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 2.0, 4.0, 4.5, 100.0):
        histogram.record(value)
    assert histogram.value() == ((1.0, 2.0, 4.0), (2, 2, 1, 2), 113.5)


def test_the_bounds_of_times_rise() -> None:
    assert sorted({*SECONDS}) == [*SECONDS]
    assert len(Histogram().value().counts) == len(SECONDS) + 1
