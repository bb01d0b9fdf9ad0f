"""A million records of 100,000 keys are compacted while somebody produces: seconds, memory, latency.

    PYTHONPATH=tests python benches/micro/compaction_bench.py [--records 1000000] [--keys 100000] [--codec none]

A broker of its own is filled, and left alone with a producer that sends one record at a time with acks=all: its latency
then is the idle one. Then compaction is let loose, and the same producer goes on until it is done. Exits with 1 when a
bar is missed: 100 MB of extra memory, and twice the idle latency at p99.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

from support.servers import MillraceServer

MAX_EXTRA_MB: Final = 100
MAX_RATIO: Final = 2.0
LOOK_EVERY_S: Final = 0.25
LONGEST_S: Final = 120.0
DAY_MS: Final = str(24 * 3600 * 1000)


def fill(bootstrap: str, records: int, keys: int, codec: str) -> None:
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 20,
            "compression.type": codec,
            "queue.buffering.max.messages": 10**6,
        }
    )
    chosen = random.Random(1)
    noise = chosen.randbytes(2**20)
    for number in range(records):
        key = b"key-%08d" % chosen.randrange(keys)
        place = number * 7919 % (len(noise) - 100)
        value = noise[place : place + 100]
        while True:
            try:
                producer.produce("state", key=key, value=value)
                break
            except BufferError:
                producer.poll(0.1)
        if number % 1000 == 0:
            producer.poll(0)
    if producer.flush(120):
        raise SystemExit("the topic could not be filled")


class Latency:
    """A producer that waits for each of its records."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0, "acks": "all"})

    def measure(self, goes_on: Callable[[], bool], pause_s: float = 0.003) -> list[float]:
        """Milliseconds per record."""
        found = []
        while goes_on():
            start = time.perf_counter()
            self._producer.produce("other", value=b"x" * 100)
            self._producer.flush(30)
            found.append((time.perf_counter() - start) * 1000)
            time.sleep(pause_s)
        return found


class Watch:
    """What the broker and its child take, and whether they are done; a look is dear, so there are few."""

    def __init__(self, pid: int, directory: Path) -> None:
        self._broker = psutil.Process(pid)
        self._directory = directory
        self._looked_at = 0.0
        self._began_at = time.perf_counter()
        self.worker_mb = 0.0
        self.before_mb = self.most_mb = self._taken_mb()

    def _taken_mb(self) -> float:
        own_mb = float(self._broker.memory_info().rss / 2**20)
        for child in self._broker.children():
            try:
                worker_mb = child.memory_info().rss / 2**20
            except psutil.NoSuchProcess:
                continue
            self.worker_mb = max(self.worker_mb, worker_mb)
            own_mb += worker_mb
        return own_mb

    def goes_on(self) -> bool:
        if time.perf_counter() - self._looked_at < LOOK_EVERY_S:
            return True
        self._looked_at = time.perf_counter()
        if self._looked_at - self._began_at > LONGEST_S:
            raise SystemExit("the topic was not compacted in time")
        self.most_mb = max(self.most_mb, self._taken_mb())
        return not is_compacted(self._directory)


def is_compacted(directory: Path) -> bool:
    written = directory.parent / "cleaner-offset-checkpoint"
    lines = written.read_text().splitlines() if written.exists() else []
    cleaned = [int(line.split()[2]) for line in lines if line.startswith("state 0 ")]
    bases = sorted(int(path.stem) for path in directory.glob("*.log"))
    return bool(cleaned) and cleaned[0] >= bases[-1]


def size_mb(directory: Path) -> float:
    return sum(path.stat().st_size for path in directory.glob("*.log")) / 2**20


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--codec", default="none")
    parser.add_argument("--idle-s", type=float, default=20.0)
    options = parser.parse_args()
    with MillraceServer({"log.cleaner.backoff.ms": "500"}) as server:
        admin = AdminClient({"bootstrap.servers": server.bootstrap})
        config = {
            "cleanup.policy": "compact",
            "segment.bytes": str(16 * 2**20),
            "min.compaction.lag.ms": DAY_MS,
            "min.cleanable.dirty.ratio": "0.01",
            "flush.mode": "os",
        }
        topics = [NewTopic("state", 1, 1, config=config), NewTopic("other", 1, 1)]
        for created in admin.create_topics(topics).values():
            created.result()
        fill(server.bootstrap, options.records, options.keys, options.codec)
        directory = server.partition_dir("state", 0)
        before_mb = size_mb(directory)
        latency = Latency(server.bootstrap)
        ends_at = time.perf_counter() + 3
        latency.measure(lambda: time.perf_counter() < ends_at)
        ends_at = time.perf_counter() + options.idle_s
        idle = latency.measure(lambda: time.perf_counter() < ends_at)

        watch = Watch(server.pid, directory)
        let_loose = ConfigEntry("min.compaction.lag.ms", "0", incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, "state", incremental_configs=[let_loose])
        for changed in admin.incremental_alter_configs([resource]).values():
            changed.result()
        started_at = time.perf_counter()
        during = latency.measure(watch.goes_on)
        took_s = time.perf_counter() - started_at
        extra_mb = watch.most_mb - watch.before_mb
        ratio = p99(during) / p99(idle)
        print(f"{options.records} records of {options.keys} keys, {options.codec}: "
              f"{before_mb:.0f} MB to {size_mb(directory):.0f} MB in {took_s:.1f} s")  # fmt: skip
        print(f"extra memory {extra_mb:.0f} MB (the process {watch.worker_mb:.0f} MB), bar {MAX_EXTRA_MB}")
        print(f"produce idle    p50 {statistics.median(idle):.2f} ms, p99 {p99(idle):.2f} ms, {len(idle)} records")
        print(
            f"produce during  p50 {statistics.median(during):.2f} ms, p99 {p99(during):.2f} ms, {len(during)} records"
        )
        print(f"p99 {ratio:.2f} times the idle one, bar {MAX_RATIO}")
        return 0 if extra_mb < MAX_EXTRA_MB and ratio < MAX_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
