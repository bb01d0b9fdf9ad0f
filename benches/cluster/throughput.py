"""Producing to three brokers with RF 3 and acks=all, millrace beside Apache Kafka.

Both clusters run during the whole comparison, are warmed up with the same work and take turns round by round; see
benches.system for why. A topic has three partitions, placed by hand and alike on both sides so that every broker leads
one, and `min.insync.replicas` is 2 on both. The CPU is that of the whole cluster: three brokers and ZooKeeper here,
three brokers and a controller there.

Like is compared with like: `flush.mode=os` with Kafka's default (page cache), `flush.mode=group` with Kafka at
`flush.messages=1` (a broker counts a record as written when its disk has it).
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count

from rich.console import Console

from benches.cluster.report import (
    FLUSHED,
    PAGE_CACHE,
    PRODUCE,
    START,
    START_TIME,
    THROUGHPUT,
    ClusterComparison,
    finish,
)
from benches.cluster.sides import add_options, cpu_use, make_cluster, new_result, resident_mb_of
from benches.cluster.topics import MIN_INSYNC, Topics
from benches.system import workloads
from benches.system.workloads import CLIENT_FLAGS
from millrace.local.children import spawn
from support.kafka_jars import PRODUCER_PERFORMANCE, KafkaJars, kafka_jars
from support.servers import Cluster

RECORD_BYTES = 1000
PLACEMENT = ((1, 2, 3), (2, 3, 1), (3, 1, 2))
TOPIC_CONFIG = {
    ("kafka", PAGE_CACHE): {},
    ("kafka", FLUSHED): {"flush.messages": "1"},
    ("millrace", PAGE_CACHE): {"flush.mode": "os"},
    ("millrace", FLUSHED): {"flush.mode": "group"},
}
CONSUME_PASSES = 4  # one pass is too short to be told from noise
CLIENT_WARMUP_RECORDS = 200_000
"""Sent first in every run and not counted: a fresh JVM compiles for seconds, on the cores that the brokers need."""
STEADY = re.compile(r"^(\d+) steady state records sent, ([\d.]+) records/sec ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of producing."""

    client: str
    settings: tuple[str, ...]
    mode: str
    share: int = 1
    """What is slower takes so much fewer records, and still lasts as long."""

    @property
    def title(self) -> str:
        return f"{PRODUCE}, {self.client}, {self.mode}"


DEFAULTS: tuple[str, ...] = ()
LARGE = ("batch.size=131072", "linger.ms=10")
WORK = {
    "produce": Work("client defaults", DEFAULTS, PAGE_CACHE),
    "produce-128k": Work("128 KiB batches, linger 10 ms", LARGE, PAGE_CACHE),
    "produce-flushed": Work("client defaults", DEFAULTS, FLUSHED, share=4),
    "produce-128k-flushed": Work("128 KiB batches, linger 10 ms", LARGE, FLUSHED),
}
CONSUME = "consume"


@dataclass(frozen=True, slots=True)
class Options:
    rounds: int
    warmup_runs: int
    records: int
    only: tuple[str, ...]
    sides: tuple[str, ...]


def produce(jars: KafkaJars, bootstrap: str, topic: str, records: int, settings: tuple[str, ...]) -> float:
    """Records per second by Kafka's ProducerPerformance, warm, with acks=all and these client settings."""
    total = CLIENT_WARMUP_RECORDS + records
    amount = ("--num-records", str(total), "--warmup-records", str(CLIENT_WARMUP_RECORDS))
    load = ("--topic", topic, *amount, "--record-size", str(RECORD_BYTES), "--throughput", "-1")
    # In one: of a repeated option the tool keeps the last.
    options = ("--bootstrap-server", bootstrap, *load, "--command-property", "acks=all", *settings)
    with tempfile.TemporaryFile() as output:
        # Not `jars.run`: this one ends with the driver, also when that is killed.
        client = spawn(jars.command(PRODUCER_PERFORMANCE, *options, flags=CLIENT_FLAGS), log=output)
        try:
            status = client.wait(900)
        except BaseException:
            client.kill()
            client.wait()
            raise
        output.seek(0)
        said = output.read().decode(errors="replace")
    summaries = STEADY.findall(said)
    if status != 0 or not summaries or int(summaries[-1][0]) != records:
        raise RuntimeError(f"ProducerPerformance failed ({status}):\n{said[-4000:]}")
    return float(summaries[-1][1])


class Bench:
    """Runs work on both sides in turn and collects the values."""

    def __init__(self, options: Options, clusters: dict[str, Cluster], result: ClusterComparison) -> None:
        self._options = options
        self._clusters = clusters
        self._result = result
        self._jars = kafka_jars()
        self._admins = {side: Topics(cluster.bootstrap) for side, cluster in clusters.items()}
        self._names = (f"bench-{number}" for number in count(1))
        self._console = Console(stderr=True, width=120, log_path=False)

    def run(self) -> None:
        for side, cluster in self._clusters.items():
            self._result.add(side, START, START_TIME, "s", "lower", cluster.start_s)
            self._result.add(side, START, "resident memory, idle", "MB", "lower", resident_mb_of(cluster))
        self._warm_up()
        for name in self._options.only:
            self._alternate(name, self._consumer() if name == CONSUME else self._producer(WORK[name]))
        for side, cluster in self._clusters.items():
            memory_mb = resident_mb_of(cluster)
            self._result.add(side, "all of the above", "resident memory after", "MB", "lower", memory_mb)

    def _warm_up(self) -> None:
        """Runs of both kinds of batches on both sides, whatever is measured later; their cost per GB is shown."""
        for number in range(self._options.warmup_runs):
            work = WORK["produce-128k" if number % 2 else "produce"]
            for side in self._clusters:
                said = self._producer(work)(side, False)
                self._console.log(f"warm-up, run {number + 1}: {side:9} {said}")

    def _alternate(self, name: str, run: Callable[[str, bool], str]) -> None:
        for number, side in self._turns():
            said = run(side, number > 0)
            self._console.log(f"{name:20} {f'round {number}' if number else 'warm-up':8} {side:9} {said}")

    def _turns(self) -> Iterator[tuple[int, str]]:
        """Round 0 is not kept: it warms what is special to this work. Who goes first changes every round."""
        for number in range(self._options.rounds + 1):
            for side in self._options.sides if number % 2 else reversed(self._options.sides):
                yield number, side

    def _producer(self, work: Work) -> Callable[[str, bool], str]:
        records = self._options.records // work.share

        def run(side: str, keep: bool) -> str:
            cluster, admin, topic = self._clusters[side], self._admins[side], next(self._names)
            admin.create(topic, PLACEMENT, {**MIN_INSYNC, **TOPIC_CONFIG[side, work.mode]})
            os.sync()  # or the cores and the disk are still busy with what the run before left in memory
            with cpu_use(cluster) as cpu:
                records_per_s = produce(self._jars, cluster.bootstrap, topic, records, work.settings)
            self._look_at(side, topic, work.title)
            admin.delete(topic)
            cpu_per_gb = cpu.seconds / ((CLIENT_WARMUP_RECORDS + records) * RECORD_BYTES / 1e9)
            if keep:
                self._result.add(side, work.title, THROUGHPUT, "records/s", "higher", records_per_s)
                self._result.add(side, work.title, "cluster's CPU", "s per GB", "lower", cpu_per_gb)
            return f"{records_per_s:,.0f} records/s, {cpu_per_gb:.2f} CPU s per GB"

        return run

    def _look_at(self, side: str, topic: str, title: str) -> None:
        """A leader that lost its followers on the way acknowledged alone, which is less work: that is to be told."""
        seen = self._admins[side].partitions({topic: len(PLACEMENT)})
        if seen is None or not all(each.whole for each in seen) or len({each.leader for each in seen}) != 3:
            note = f"{side}, {title}: not every replica was in sync or at its place at the end of a run"
            self._console.log(note, style="red")
            if note not in self._result.notes:
                self._result.notes.append(note)

    def _consumer(self) -> Callable[[str, bool], str]:
        """One partition, as benches.system has it: the driver can then tell a missing record by its offset."""
        filled: dict[str, str] = {}

        def run(side: str, keep: bool) -> str:
            cluster, records = self._clusters[side], self._options.records
            if side not in filled:
                filled[side] = next(self._names)
                config = {**MIN_INSYNC, **TOPIC_CONFIG[side, PAGE_CACHE]}
                self._admins[side].create(filled[side], PLACEMENT[:1], config)
                produce(self._jars, cluster.bootstrap, filled[side], records, DEFAULTS)
            with cpu_use(cluster) as cpu:
                passes = (workloads.consume(cluster.bootstrap, filled[side], records) for _ in range(CONSUME_PASSES))
                seconds = sum(passes)
            gigabytes = CONSUME_PASSES * records * RECORD_BYTES / 1e9
            if keep:
                work = "consume 1,000 B, RF 3, 1 partition, librdkafka"
                self._result.add(side, work, THROUGHPUT, "MB/s", "higher", gigabytes * 1000 / seconds)
                self._result.add(side, work, "cluster's CPU", "s per GB", "lower", cpu.seconds / gigabytes)
            return f"{gigabytes * 1000 / seconds:,.0f} MB/s, {cpu.seconds / gigabytes:.2f} CPU s per GB"

        return run


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-cluster", description="Compare three brokers of millrace with three of Apache Kafka."
    )
    add_options(parser, name="cluster-throughput", sides="kafka,millrace", rounds=3)
    parser.add_argument(
        "--records",
        type=int,
        default=400_000,
        help="of 1,000 B in a run; a quarter of that where small batches are flushed",
    )
    parser.add_argument("--warmup-runs", type=int, default=8, help="runs on each side beforehand that are not counted")
    every = (*WORK, CONSUME)
    parser.add_argument("--only", action="append", choices=every, help="may be repeated; all work by default")
    given = parser.parse_args(arguments)
    only = tuple(given.only or every)
    options = Options(given.rounds, given.warmup_runs, given.records, only, given.sides)
    result = new_result("throughput", arguments, options.rounds)
    with ExitStack() as stack:
        clusters = {side: stack.enter_context(make_cluster(side)) for side in options.sides}
        Bench(options, clusters, result).run()
    return finish(result, given.name, given.update)
