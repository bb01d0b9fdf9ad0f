"""What one append and one read cost: `python benches/micro/log_bench.py [--profile]`.

Prints microseconds per call for typical batches, in a temporary directory (`--data` names another place), with
`flush.mode=os`, so that only Python and system calls are counted. The CRC of the payload is shown apart.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import tempfile
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

from crc32c import crc32c

from millrace.clock import SystemClock
from millrace.model import TopicPartition
from millrace.records.batch import ProduceLimits, validate_produced
from millrace.records.decode import check_records
from millrace.records.encode import Record, encode_batch
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.logdirs import LogDirs
from millrace.storage.settings import FlushMode, LogConfig

NOW_MS = 1_700_000_000_000
CONFIG = LogConfig(flush_mode=FlushMode.OS)


def batch_of(record_bytes: int, batch_bytes: int, *, producer_id: int = -1, sequence: int = -1) -> bytes:
    """A batch of random records, about `batch_bytes` long."""
    count = max(batch_bytes // record_bytes, 1)
    value = os.urandom(max(record_bytes - 12, 1))
    return encode_batch(
        [Record(i, NOW_MS, None, value) for i in range(count)],
        producer_id=producer_id,
        producer_epoch=0 if producer_id >= 0 else -1,
        base_sequence=sequence,
    )


def microseconds(call: Callable[[], object], count: int, rounds: int = 5) -> float:
    """The best of a few rounds, per call."""
    call()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, time.perf_counter() - start)
    return best / count * 1e6


def measure_append(directory: Path, batch: bytes, count: int) -> float:
    log = Log.open(directory, CONFIG, clock=SystemClock(), files=Files())
    try:
        view = memoryview(batch)
        return microseconds(lambda: log.append(view, leader_epoch=0, now_ms=NOW_MS), count)
    finally:
        log.close()


def measure_read(directory: Path, batch: bytes, max_bytes: int) -> tuple[float, float]:
    """(a reader that goes on from batch to batch, a reader that starts anywhere)"""
    log = Log.open(directory, CONFIG, clock=SystemClock(), files=Files())
    try:
        view = memoryview(batch)
        while log.size_bytes < 64 * 1024 * 1024:
            log.append(view, leader_epoch=0, now_ms=NOW_MS)
        reads = 0
        start = time.perf_counter()
        offset = 0
        while offset < log.end_offset:
            offset = log.read(offset, max_bytes).next_offset
            reads += 1
        going_on = (time.perf_counter() - start) / reads * 1e6
        end = log.end_offset
        seed = 12345
        count = 2000
        start = time.perf_counter()
        for _ in range(count):
            seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
            log.read(seed % end, max_bytes)
        return going_on, (time.perf_counter() - start) / count * 1e6
    finally:
        log.close()


def measure_start(directory: Path, partitions: int) -> tuple[float, float, float]:
    """(create, clean stop, clean start) of so many partitions with one batch each, in milliseconds."""
    batch = batch_of(1000, 1000)
    dirs = LogDirs.open([directory], node_id=1, clock=SystemClock(), config=CONFIG, files=Files(sync=False))
    start = time.perf_counter()
    for index in range(partitions):
        dirs.create_log(TopicPartition("topic", index), uuid.uuid4())
    created = time.perf_counter()
    for log in dirs.logs().values():
        log.append(batch, leader_epoch=0, now_ms=NOW_MS)
    appended = time.perf_counter()
    dirs.close()
    closed = time.perf_counter()
    dirs = LogDirs.open([directory], node_id=1, clock=SystemClock(), config=CONFIG, files=Files(sync=False))
    opened = time.perf_counter()
    assert sum(log.end_offset for log in dirs.logs().values()) == partitions
    dirs.close()
    return (created - start) * 1000, (closed - appended) * 1000, (opened - closed) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=None, help="where to write (a temporary directory)")
    parser.add_argument("--profile", action="store_true", help="where the time of an append goes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.data) as root:
        base = Path(root)
        for record_bytes, batch_bytes in ((100, 100), (1000, 1000), (1000, 16_384), (100, 131_072)):
            batch = batch_of(record_bytes, batch_bytes)
            directory = base / f"a-{record_bytes}-{batch_bytes}"
            directory.mkdir()
            count = min(20_000, 64 * 1024 * 1024 // len(batch))
            append_us = measure_append(directory, batch, count)
            crc_us = microseconds(partial(crc32c, memoryview(batch)[21:]), 2000)
            validate_us = microseconds(partial(validate_produced, batch, ProduceLimits(), NOW_MS), 2000)
            check_us = microseconds(partial(check_records, batch), 100)
            print(
                f"append {batch_bytes:>7} B of {record_bytes:>4} B records: {append_us:7.1f} us, "
                f"of it header checks {validate_us - crc_us:5.1f} us and CRC {crc_us:5.1f} us; "
                f"check_records would add {check_us:7.1f} us"
            )
            directory = base / f"r-{record_bytes}-{batch_bytes}"
            directory.mkdir()
            for max_bytes in (batch_bytes + 200, 1024 * 1024):
                path = directory / str(max_bytes)
                path.mkdir()
                going_on, anywhere = measure_read(path, batch, max_bytes)
                print(f"  read {max_bytes:>8} B: going on {going_on:7.1f} us, anywhere {anywhere:7.1f} us")
        for partitions in (50, 2000):
            directory = base / f"s-{partitions}"
            created, closed, opened = measure_start(directory, partitions)
            print(
                f"{partitions} partitions: create {created:.1f} ms, clean stop {closed:.1f} ms, start {opened:.1f} ms"
            )
        if arguments.profile:
            directory = base / "profile"
            directory.mkdir()
            log = Log.open(directory, CONFIG, clock=SystemClock(), files=Files())
            view = memoryview(batch_of(1000, 16_384))
            profile = cProfile.Profile()
            profile.enable()
            for _ in range(20_000):
                log.append(view, leader_epoch=0, now_ms=NOW_MS)
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(12)
            log.close()


if __name__ == "__main__":
    main()
