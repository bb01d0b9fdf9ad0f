"""Spark on millrace with nothing but pip beside Spark's JVM connector on Apache Kafka: `make bench-spark`.

Four processes live through the whole run: two brokers, and for each a Spark session (`local[2]`, 1 GB) in a process of
its own, so that neither has the other's jars or its warm code. The sides take turns, who goes first changes every
round, and the first rounds are thrown away: a JVM's first queries are several times slower than its later ones.

Both topics of a read are filled by the same program (Kafka's ProducerPerformance, same seed). Both brokers keep data in
the page cache (`flush.mode=os` here, which is Kafka's default). Formats and brokers are at their defaults otherwise.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console

from benches.spark import queries
from benches.spark.queries import Load, Query, Side, Timing
from benches.spark.report import READ, SINK, STREAM, THROUGHPUT, SparkComparison, bar_of
from benches.system import workloads
from benches.system.report import describe_machine
from support.kafka_jars import KafkaJars, KafkaUnavailable, kafka_jars
from support.maven import JarsUnavailable
from support.servers import KafkaServer, MillraceServer, Server
from support.spark_sessions import connector_jars

PARTITIONS = 4
SMALL_FACTOR = 5  # so many more records of 100 B: a query must last for seconds
SIDES = ("kafka", "millrace")
TOPIC_CONFIG = {"kafka": {}, "millrace": {"flush.mode": "os"}}


@dataclass(frozen=True, slots=True)
class Work:
    """One line of the result."""

    title: str
    value_bytes: int
    query: Query
    fills: bool  # whether the query needs a full topic, or writes one


WORK = {
    "read-1000": Work(f"{READ}, 1,000 B", 1000, queries.read, fills=True),
    "read-100": Work(f"{READ}, 100 B", 100, queries.read, fills=True),
    "stream-1000": Work(f"{STREAM}, 1,000 B", 1000, queries.stream, fills=True),
    "sink-1000": Work(f"{SINK}, 1,000 B", 1000, queries.write, fills=False),
}


@dataclass(frozen=True, slots=True)
class Options:
    rounds: int
    warmup_rounds: int
    records: int
    stream_batches: int
    only: tuple[str, ...]


class SparkProcess:
    """A child process with a Spark session in it."""

    def __init__(self, side: Side) -> None:
        context = multiprocessing.get_context(
            "spawn"
        )  # a fork would share librdkafka's threads, or what is left of them
        self._pool = ProcessPoolExecutor(1, mp_context=context)
        self._pool.submit(queries.start, side).result()

    def run(self, query: Query, load: Load) -> Timing:
        return self._pool.submit(queries.perform, query, load).result()

    def close(self) -> None:
        try:
            self._pool.submit(queries.stop).result()
        finally:
            self._pool.shutdown()


@contextmanager
def spark_process(side: Side) -> Iterator[SparkProcess]:
    process = SparkProcess(side)
    try:
        yield process
    finally:
        process.close()


class Bench:
    """Runs work on both sides in turn and collects the values."""

    def __init__(
        self,
        options: Options,
        jars: KafkaJars,
        servers: dict[str, Server],
        sparks: dict[str, SparkProcess],
        result: SparkComparison,
    ) -> None:
        self._options = options
        self._jars = jars
        self._servers = servers
        self._sparks = sparks
        self._result = result
        self._numbers = count(1)
        self._filled: dict[tuple[str, int], Load] = {}
        self._console = Console(stderr=True, width=120, log_path=False)

    def run(self) -> None:
        for name in self._options.only:
            work = WORK[name]
            for number, side in self._turns():
                load = self._load(side, work)
                timing = self._sparks[side].run(work.query, load)
                if not work.fills:
                    self._check_and_delete(side, load)
                if number > 0:
                    self._keep(side, work, load, timing)
                rate, megabytes = load.records / timing.seconds, load.records * load.value_bytes / 1e6 / timing.seconds
                when = f"round {number}" if number > 0 else "warm-up"
                self._console.log(f"{name:12} {when:8} {side:9} {rate:11,.0f} records/s, {megabytes:6,.0f} MB/s")

    def _keep(self, side: str, work: Work, load: Load, timing: Timing) -> None:
        rate = load.records / timing.seconds
        self._result.add(side, work.title, THROUGHPUT, "records/s", "higher", rate)
        if timing.batches_s is not None:
            rate = load.records / timing.batches_s
            self._result.add(side, work.title, "without the query's start", "records/s", "higher", rate)

    def _turns(self) -> Iterator[tuple[int, str]]:
        for number in range(1 - self._options.warmup_rounds, self._options.rounds + 1):
            for side in SIDES if number % 2 else reversed(SIDES):
                yield number, side

    def _load(self, side: str, work: Work) -> Load:
        """A topic of the work's own where it writes; where it reads, one full topic per side and size of record."""
        if not work.fills:
            return self._new_topic(side, work.value_bytes)
        key = (side, work.value_bytes)
        if key not in self._filled:
            self._filled[key] = load = self._new_topic(side, work.value_bytes)
            bootstrap = self._servers[side].bootstrap
            workloads.produce(self._jars, bootstrap, load.topic, load.records, load.value_bytes)
        return self._filled[key]

    def _new_topic(self, side: str, value_bytes: int) -> Load:
        topic = f"bench-{next(self._numbers)}"
        admin = AdminClient({**workloads.QUIET, "bootstrap.servers": self._servers[side].bootstrap})
        admin.create_topics([NewTopic(topic, PARTITIONS, 1, config=TOPIC_CONFIG[side])])[topic].result(timeout=30)
        records = self._options.records * (SMALL_FACTOR if value_bytes < 1000 else 1)
        return Load(topic, records, value_bytes, self._options.stream_batches)

    def _check_and_delete(self, side: str, load: Load) -> None:
        bootstrap = self._servers[side].bootstrap
        consumer = Consumer({**workloads.QUIET, "bootstrap.servers": bootstrap, "group.id": "bench"})
        try:
            places = [TopicPartition(load.topic, index) for index in range(PARTITIONS)]
            written = sum(consumer.get_watermark_offsets(place, timeout=30)[1] for place in places)
        finally:
            consumer.close()
        if written != load.records:
            raise RuntimeError(f"{side}: {written:,} records in the topic, expected {load.records:,}")
        workloads.delete_topic(bootstrap, load.topic)


def compare(options: Options, jars: KafkaJars, connector: list[Path], result: SparkComparison) -> None:
    with ExitStack() as stack:
        servers: dict[str, Server] = {
            "kafka": stack.enter_context(KafkaServer(jars)),
            "millrace": stack.enter_context(MillraceServer()),
        }
        sides = {
            "kafka": Side("kafka", servers["kafka"].bootstrap, tuple(connector)),
            "millrace": Side("millrace", servers["millrace"].bootstrap),
        }
        sparks = {name: stack.enter_context(spark_process(side)) for name, side in sides.items()}
        Bench(options, jars, servers, sparks, result).run()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-spark", description="Compare Spark on millrace with Spark on Apache Kafka, on this machine."
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each work on each side")
    parser.add_argument("--warmup-rounds", type=int, default=4, help="rounds before them that are not counted")
    parser.add_argument("--records", type=int, default=2_000_000, help="records of 1,000 B; of 100 B 5 times that")
    parser.add_argument("--stream-batches", type=int, default=5, help="micro-batches in which a stream reads them")
    parser.add_argument("--only", action="append", choices=tuple(WORK), help="may be repeated; all work by default")
    parser.add_argument("--name", default="spark", help="the result goes to benches/results/NAME.json")
    parser.add_argument("--update", type=Path, help="a Markdown page whose table is replaced, docs/performance.md")
    given = parser.parse_args()
    options = Options(given.rounds, given.warmup_rounds, given.records, given.stream_batches, tuple(given.only or WORK))
    try:
        jars, connector = kafka_jars(), connector_jars()
    except (KafkaUnavailable, JarsUnavailable) as unavailable:
        print(f"the comparison needs Apache Kafka and Spark's connector: {unavailable}", file=sys.stderr)
        return 1
    arguments = f' ARGS="{shlex.join(sys.argv[1:])}"' if len(sys.argv) > 1 else ""
    result = SparkComparison(f"make bench-spark{arguments}", describe_machine(), options.rounds)
    compare(options, jars, connector, result)
    Console(width=140).print(result.table())
    for drift in result.drifting():
        print(f"still drifting: {drift}")
    for row in result.rows:
        bar = bar_of(row)
        if bar is not None and (row.ratio or 0) < bar:
            print(f"below its bar of {bar}: {row.work}")
    path = Path(__file__).parents[1] / "results" / f"{given.name}.json"
    result.save(path)
    print(f"written to {path}")
    if given.update is not None:
        result.update(given.update)
    return 0


if __name__ == "__main__":
    sys.exit(main())
