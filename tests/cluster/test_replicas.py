"""The comparison of replicas on disk: every kind of difference below the high watermark is found, none above it."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.records.batch import STAMP
from support.batches import batch
from support.checker_replicas import compare, compare_compacted, vanished

RECORDS = 3


def written(directory: Path, epochs: list[int], *, segments: int = 1, tail: bytes = b"") -> None:
    """A replica of one batch of three records per epoch given, in so many segments."""
    directory.mkdir(parents=True)
    parts = [stamped(position * RECORDS, epoch) for position, epoch in enumerate(epochs)]
    share = -(-len(parts) // segments)
    for start in range(0, len(parts), share):
        content = b"".join(parts[start : start + share])
        (directory / f"{start * RECORDS:020}.log").write_bytes(content)
    last = max(directory.glob("*.log"))
    last.write_bytes(last.read_bytes() + tail)
    starts = {epoch: position * RECORDS for position, epoch in reversed(list(enumerate(epochs)))}
    lines = [f"{epoch} {start}" for epoch, start in sorted(starts.items())]
    (directory / "leader-epoch-checkpoint").write_text("\n".join(["0", str(len(lines)), *lines, ""]))


def stamped(base_offset: int, epoch: int) -> bytes:
    data = bytearray(batch(RECORDS))
    STAMP.pack_into(data, 0, base_offset, len(data) - 12, epoch)
    return bytes(data)


@pytest.fixture
def pair(tmp_path: Path) -> dict[int, Path]:
    return {1: tmp_path / "a" / "topic-0", 2: tmp_path / "b" / "topic-0"}


def test_equal_replicas_may_have_other_segments_and_tails(pair: dict[int, Path]) -> None:
    written(pair[1], [0, 0, 2, 2])
    written(pair[2], [0, 0, 2, 2], segments=2, tail=bytes(500))
    assert compare(pair, 12) == []


def test_what_is_not_committed_may_differ(pair: dict[int, Path]) -> None:
    written(pair[1], [0, 0, 1])
    written(pair[2], [0, 0, 2, 2])
    assert compare(pair, 6) == []


def test_a_byte_that_differs_is_found(pair: dict[int, Path]) -> None:
    for path in pair.values():
        written(path, [0, 0])
    log = pair[2] / f"{0:020}.log"
    log.write_bytes(log.read_bytes()[:-1] + b"!")
    assert compare(pair, 6) == ["topic-0 of brokers 1 and 2 differ at offset 3"]


def test_another_epoch_is_found_in_the_log_and_in_the_checkpoint(pair: dict[int, Path]) -> None:
    written(pair[1], [0, 1, 1])
    written(pair[2], [0, 2, 2])
    found = compare(pair, 9)
    assert "differ at offset 3" in found[0]
    assert found[1] == "topic-0: leader epochs of broker 1 [(0, 0), (1, 3)], of broker 2 [(0, 0), (2, 3)]"


def test_a_replica_that_ends_too_early_is_found(pair: dict[int, Path]) -> None:
    written(pair[1], [0, 0, 0])
    written(pair[2], [0, 0])
    assert compare(pair, 9)[0] == "topic-0 of broker 2 ends at 6, before 9"


def test_a_gap_is_found_even_where_all_replicas_have_it(pair: dict[int, Path]) -> None:
    for path in pair.values():
        written(path, [0, 0, 0])
        log = path / f"{0:020}.log"
        size = len(stamped(0, 0))
        log.write_bytes(log.read_bytes()[:size] + log.read_bytes()[2 * size :])
    assert compare(pair, 9)[0] == "topic-0 of broker 1: offset 6 follows 3"


def test_a_replica_that_vanished_is_found(pair: dict[int, Path]) -> None:
    written(pair[1], [0, 0])
    pair[2].mkdir(parents=True)
    missing = ["topic-0 of broker 2 has vanished", "topic-0 of broker 3 has vanished"]
    assert vanished("topic-0", {**pair, 3: None}, 6) == missing
    assert vanished("topic-0", {**pair, 3: None}, 0) == []
    assert vanished("topic-0", {1: pair[1]}, 6) == []


def test_compacted_replicas_may_differ_in_what_is_superseded_only(pair: dict[int, Path]) -> None:
    written(pair[1], [0, 0, 0])
    written(pair[2], [0, 0])
    assert compare_compacted(pair, 6, b"k9") == []
    assert compare_compacted(pair, 9, b"k9") == ["topic-0 of brokers 1 and 2 differ at offset 6"]
    log = pair[2] / f"{0:020}.log"
    log.write_bytes(log.read_bytes()[len(stamped(0, 0)) :])
    assert compare_compacted(pair, 6, b"k9") == ["topic-0 of brokers 1 and 2 differ at offset 0"]
    log.write_bytes(stamped(1, 0) + stamped(3, 0))
    assert "differ at offset" in compare_compacted(pair, 6, b"k0")[0]
