"""Producing to three brokers with RF 3 and acks=all, millrace beside Apache Kafka.

The sides take turns, each alone on the machine: a turn starts a cluster, warms it up, measures all work and ends it.
With both up at once it would take fewer minutes, but would not be the same to both: four idle JVMs take CPU and memory
from the other side, three idle brokers of millrace hardly any. Who goes first changes from turn to turn, so that a
machine that gets slower or faster over the minutes does so for both.

A topic has three partitions, placed by hand and alike on both sides so that every broker leads one, and
`min.insync.replicas` is 2 on both. The CPU is that of the whole cluster: three brokers and ZooKeeper here, three
brokers and a controller there.

Like is compared with like: `flush.mode=os` with Kafka's default (page cache), `flush.mode=group` with Kafka at
`flush.messages=1` (a broker counts a record as written when its disk has it).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from rich.console import Console

from benches.cluster.producer import Amount, Producer
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
from benches.cluster.sides import add_options, cpu_use, delete, make_cluster, new_result, resident_mb_of
from benches.cluster.topics import MIN_INSYNC, Topics
from benches.system import workloads
from support.kafka_jars import kafka_jars
from support.servers import Cluster

PLACEMENT = ((1, 2, 3), (2, 3, 1), (3, 1, 2))
TOPIC_CONFIG = {
    ("kafka", PAGE_CACHE): {},
    ("kafka", FLUSHED): {"flush.messages": "1"},
    ("millrace", PAGE_CACHE): {"flush.mode": "os"},
    ("millrace", FLUSHED): {"flush.mode": "group"},
}
CONSUME_PASSES = 8  # one pass is too short to be told from noise
RECORDS = 700_000
"""Three replicas of a run are then less than 3 GB. A virtual machine may have lent its free memory to the host and get
it back page by page, which makes a write many times as expensive; the first few GB are usually still there."""
NOT_COUNTED = 0.3
"""Of what is counted, so much is sent first: buffers fill, and a broker that adapts to the load does so in a second."""
WARMUP_ROUNDS = 2
"""Of each work, not kept: they warm what is special to it."""


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of producing."""

    client: str
    settings: tuple[str, ...]
    mode: str
    share: int = 1
    """What is slower takes so much fewer records, and still lasts as long."""

    def amount(self, records: int) -> Amount:
        counted = records // self.share
        return Amount(counted, int(counted * NOT_COUNTED))

    @property
    def title(self) -> str:
        return f"{PRODUCE}, {self.client}, {self.mode}"


DEFAULTS: tuple[str, ...] = ()
LARGE = ("batch.size=131072", "linger.ms=10")
WORK = {
    "produce": Work("client defaults", DEFAULTS, PAGE_CACHE, share=4),
    "produce-128k": Work("128 KiB batches, linger 10 ms", LARGE, PAGE_CACHE),
    "produce-flushed": Work("client defaults", DEFAULTS, FLUSHED, share=10),
    "produce-128k-flushed": Work("128 KiB batches, linger 10 ms", LARGE, FLUSHED),
}
CONSUME = "consume"


@dataclass(frozen=True, slots=True)
class Options:
    turns: int
    rounds: int
    warmup_runs: int
    records: int
    only: tuple[str, ...]
    sides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One side, alone on the machine."""

    side: str
    cluster: Cluster
    admin: Topics
    producer: Producer


class Bench:
    """Runs all work on one side after the other and collects the values."""

    def __init__(self, options: Options, result: ClusterComparison) -> None:
        self._options = options
        self._result = result
        self._jars = kafka_jars()
        self._names = (f"bench-{number}" for number in count(1))
        self._console = Console(stderr=True, width=120, log_path=False)

    def run(self) -> None:
        for turn in range(self._options.turns):
            for side in reversed(self._options.sides) if turn % 2 else self._options.sides:
                self._console.log(f"turn {turn + 1} of {self._options.turns}: {side}")
                with make_cluster(side) as cluster, Producer(self._jars, cluster.bootstrap) as producer:
                    self._take(Turn(side, cluster, Topics(cluster.bootstrap), producer))

    def _take(self, turn: Turn) -> None:
        side, cluster = turn.side, turn.cluster
        self._result.add(side, START, START_TIME, "s", "lower", cluster.start_s)
        self._result.add(side, START, "resident memory, idle", "MB", "lower", resident_mb_of(cluster))
        for number in range(1, self._options.warmup_runs + 1):
            # Of both kinds of batches, whatever is measured later. A side is warm when its cost per GB falls no more.
            said = self._produced(WORK["produce" if number % 2 else "produce-128k"], turn)(False)
            self._console.log(f"{'warm-up':20} run {number:<4} {side:9} {said}")
        for name in self._options.only:
            run = self._consumed(turn) if name == CONSUME else self._produced(WORK[name], turn)
            for number in range(1 - WARMUP_ROUNDS, self._options.rounds + 1):
                said = run(number > 0)
                what = f"round {number}" if number > 0 else "warm-up"
                self._console.log(f"{name:20} {what:8} {side:9} {said}")
        self._result.add(side, "all of the above", "resident memory after", "MB", "lower", resident_mb_of(cluster))

    def _produced(self, work: Work, turn: Turn) -> Callable[[bool], str]:
        amount = work.amount(self._options.records)
        side, cluster, admin = turn.side, turn.cluster, turn.admin

        def run(keep: bool) -> str:
            topic = next(self._names)
            admin.create(topic, PLACEMENT, {**MIN_INSYNC, **TOPIC_CONFIG[side, work.mode]})
            os.sync()  # or the cores and the disk are still busy with what the run before left in memory
            with cpu_use(cluster) as cpu:
                records_per_s = turn.producer.produce(topic, amount, work.settings)
            self._look_at(side, admin, topic, work.title)
            delete(cluster, admin, topic)
            cpu_per_gb = cpu.seconds / amount.gigabytes
            if keep:
                self._result.add(side, work.title, THROUGHPUT, "records/s", "higher", records_per_s)
                self._result.add(side, work.title, "cluster's CPU", "s per GB", "lower", cpu_per_gb)
            return f"{records_per_s:,.0f} records/s, {cpu_per_gb:.2f} CPU s per GB"

        return run

    def _look_at(self, side: str, admin: Topics, topic: str, title: str) -> None:
        """A leader that lost its followers on the way acknowledged alone, which is less work: that is to be told."""
        seen = admin.partitions({topic: len(PLACEMENT)})
        if seen is None or not all(each.whole for each in seen) or len({each.leader for each in seen}) != 3:
            note = f"{side}, {title}: not every replica was in sync or at its place at the end of a run"
            self._console.log(note, style="red")
            if note not in self._result.notes:
                self._result.notes.append(note)

    def _consumed(self, turn: Turn) -> Callable[[bool], str]:
        """One partition, as benches.system has it: the driver can then tell a missing record by its offset."""
        side, cluster = turn.side, turn.cluster
        topic, amount = next(self._names), WORK["produce"].amount(self._options.records)
        turn.admin.create(topic, PLACEMENT[:1], {**MIN_INSYNC, **TOPIC_CONFIG[side, PAGE_CACHE]})
        turn.producer.produce(topic, amount, DEFAULTS)

        def run(keep: bool) -> str:
            with cpu_use(cluster) as cpu:
                seconds = sum(workloads.consume(cluster.bootstrap, topic, amount.total) for _ in range(CONSUME_PASSES))
            gigabytes = CONSUME_PASSES * amount.gigabytes
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
    parser.add_argument("--turns", type=int, default=3, help="how often each side is started and takes its rounds (3)")
    parser.add_argument(
        "--records",
        type=int,
        default=RECORDS,
        help=f"of 1,000 B, counted in a run with large batches ({RECORDS}); with small ones a share of it",
    )
    parser.add_argument("--warmup-runs", type=int, default=16, help="in every turn, not counted (16)")
    every = (*WORK, CONSUME)
    parser.add_argument("--only", action="append", choices=every, help="may be repeated; all work by default")
    given = parser.parse_args(arguments)
    only = tuple(given.only or every)
    options = Options(given.turns, given.rounds, given.warmup_runs, given.records, only, given.sides)
    result = new_result("throughput", arguments, options.turns * options.rounds)
    result.turns = options.turns
    Bench(options, result).run()
    return finish(result, given.name, given.update)
