"""The decision which segments go."""

from __future__ import annotations

import pytest

from millrace.storage.retention import SegmentAge, expired_segments

SEGMENTS = [SegmentAge(i * 10, i * 10 + 10, 100, lambda i=i: i * 1000) for i in range(5)]  # type: ignore[misc]


def expired(**limits: int) -> int:
    arguments = {
        "now_ms": 5000,
        "retention_ms": -1,
        "retention_bytes": -1,
        "start_offset": 0,
        "deletable_below": 50,
    } | limits
    return expired_segments(SEGMENTS, **arguments)


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({}, 0),
        ({"retention_ms": 5000}, 0),
        ({"retention_ms": 4999}, 1),
        ({"retention_ms": 2500}, 3),
        ({"retention_ms": 0}, 5),
        ({"retention_ms": 0, "deletable_below": 30}, 3),
        ({"retention_ms": 0, "deletable_below": 29}, 2),
        ({"retention_bytes": 500}, 0),
        ({"retention_bytes": 401}, 0),
        ({"retention_bytes": 400}, 1),
        ({"retention_bytes": 0}, 5),
        ({"start_offset": 9}, 0),
        ({"start_offset": 10}, 1),
        ({"start_offset": 50}, 5),
        ({"start_offset": 20, "retention_ms": 2500}, 3),
        ({"now_ms": -(10**12), "retention_ms": 1}, 0),
    ],
)
def test_expired(limits: dict[str, int], count: int) -> None:
    assert expired(**limits) == count


def test_an_empty_segment_stays() -> None:
    assert (
        expired_segments(
            [SegmentAge(0, 0, 0, lambda: 0)],
            now_ms=10**12,
            retention_ms=0,
            retention_bytes=0,
            start_offset=0,
            deletable_below=0,
        )
        == 0
    )
