"""A disk that forgets what was not synced: with flush.mode=group nothing that counted as flushed is lost.

The directory after each power cut is the content of every file at its last sync, under the names made durable; variants
keep a random part of what was not synced (a torn tail, or pages written out of order).
"""

from __future__ import annotations

import errno
import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.clock import ManualClock
from millrace.errors import StorageError
from millrace.model import TopicPartition
from millrace.records.batch import crc_matches, split
from millrace.records.decode import decode_records
from millrace.storage.log import Log
from millrace.storage.logdirs import LogDirs
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS, batch
from support.disk import FaultyFiles, fast_directory

CONFIG = LogConfig(flush_mode=FlushMode.GROUP, segment_bytes=2000, index_interval_bytes=200)

PAGE_BYTES = 256
"""Small enough for several in a segment of these tests."""


@pytest.fixture
def root() -> Iterator[Path]:
    with fast_directory() as path:
        yield path / "data"


def contents(log: Log) -> list[bytes | None]:
    found: list[bytes | None] = []
    offset = log.start_offset
    while offset < log.end_offset:
        result = log.read(offset, 1 << 20)
        for _, data in split(result.data):
            assert crc_matches(data)
            found += [record.value for record in decode_records(data)]
        offset = result.next_offset
    return found


def survivors(rng: random.Random, mode: str):  # type: ignore[no-untyped-def]
    """What a disk keeps of the bytes that were not synced."""

    def torn(path: Path, durable: bytes, current: bytes) -> bytes:
        if mode == "nothing" or len(current) <= len(durable):
            return durable
        cut = rng.randint(len(durable), len(current))
        if mode == "prefix":
            return durable + current[len(durable) : cut]
        # The file has its new length, but some of its pages never made it: they read as zeros.
        kept = bytearray(current)
        for page in range(0, len(current), PAGE_BYTES):
            start, end = max(page, len(durable)), min(page + PAGE_BYTES, len(current))
            if start < end and rng.random() < 0.5:
                kept[start:end] = bytes(end - start)
        return bytes(kept)

    return torn


@pytest.mark.parametrize("mode", ["nothing", "prefix", "holes"])
@pytest.mark.parametrize("seed", range(12))
def test_flushed_records_survive_power_cuts(root: Path, seed: int, mode: str) -> None:
    rng = random.Random(f"{mode} {seed}")
    files = FaultyFiles(root)
    partitions = [TopicPartition("topic", index) for index in range(3)]
    written: dict[TopicPartition, list[bytes | None]] = {partition: [] for partition in partitions}
    flushed: dict[TopicPartition, int] = dict.fromkeys(partitions, 0)
    sequence = dict.fromkeys(partitions, 0)
    for _ in range(4):
        dirs = LogDirs.open([root], node_id=1, clock=ManualClock(), config=CONFIG, files=files)
        for partition in partitions:
            log = dirs.create_log(partition, uuid.uuid4())
            assert log.failure is None
            held = contents(log)
            assert len(held) >= flushed[partition], "a flushed record was lost"
            assert held == written[partition][: len(held)], "what is there is a prefix of what was written"
            written[partition] = held
            sequence[partition] = len(held)
        for _ in range(rng.randint(1, 60)):
            partition = rng.choice(partitions)
            log = dirs.logs()[partition]
            action = rng.random()
            if action < 0.8:
                count = rng.randint(1, 4)
                data = batch(
                    count,
                    size=rng.randint(1, 120),
                    producer_id=7,
                    producer_epoch=0,
                    sequence=sequence[partition],
                    timestamp_ms=NOW_MS + rng.randint(0, 1000),
                )
                log.append(data, leader_epoch=rng.randint(0, 3), now_ms=NOW_MS)
                written[partition] += [record.value for record in decode_records(data)]
                sequence[partition] += count
            elif action < 0.95:
                log.flush()
                flushed[partition] = log.end_offset
            else:
                dirs.checkpoint()
        dirs.abandon()
        files.crash(survivors(rng, mode))
    dirs = LogDirs.open([root], node_id=1, clock=ManualClock(), config=CONFIG, files=files)
    dirs.close()
    dirs = LogDirs.open([root], node_id=1, clock=ManualClock(), config=CONFIG, files=files)
    assert dirs.clean_start
    for partition in partitions:
        assert len(contents(dirs.logs()[partition])) >= flushed[partition]
    dirs.abandon()


@pytest.mark.parametrize("call", ["pwritev", "datasync", "sync_directory", "rename", "open", "truncate"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_anywhere_loses_nothing_flushed(root: Path, call: str, number: int) -> None:
    """Each possible call fails once, at every point of a short history; then the power is cut."""
    for after in range(0, 60, 4):
        files = FaultyFiles(root)
        dirs = LogDirs.open([root], node_id=1, clock=ManualClock(), config=CONFIG, files=files)
        partition = TopicPartition("topic", after)
        flushed = 0
        written = 0
        files.fail(call, number, after=after, partial_bytes=after)
        try:
            log = dirs.create_log(partition, uuid.uuid4())
            for step in range(30):
                log.append(batch(2, size=90), leader_epoch=step // 8, now_ms=NOW_MS)
                written = log.end_offset
                if step % 5 == 4:
                    log.flush()
                    flushed = log.end_offset
        except StorageError:
            pass
        dirs.abandon()
        files.crash()
        dirs = LogDirs.open([root], node_id=1, clock=ManualClock(), config=CONFIG, files=files)
        recovered = dirs.get(partition)
        if flushed:
            assert recovered is not None and recovered.failure is None
            assert flushed <= len(contents(recovered)) <= written
        dirs.abandon()
        files.crash()


def test_without_flushes_a_power_cut_loses_data_but_not_the_broker(root: Path) -> None:
    files = FaultyFiles(root)
    dirs = LogDirs.open([root], node_id=1, clock=ManualClock(), config=CONFIG, files=files)
    log = dirs.create_log(TopicPartition("topic", 0), uuid.uuid4())
    for _ in range(100):
        log.append(batch(1, size=90), leader_epoch=0, now_ms=NOW_MS)
    dirs.checkpoint()
    dirs.abandon()
    files.crash()
    dirs = LogDirs.open([root], node_id=1, clock=ManualClock(), config=CONFIG, files=files)
    assert all(log.failure is None for log in dirs.logs().values())
    dirs.close()
