"""millrace beside Apache Kafka 4.3.0 on this machine: `make bench`.

Both brokers run during the whole comparison, both are warmed up with the same work first, and they take turns round by
round, so that a noisy moment hits both. The warm-up is not short: a JVM spends several times as much CPU on its first
GB as on its third, and a comparison with a cold Kafka would only flatter millrace. The cost of each GB of the warm-up
is printed, and a quantity that still improves from round to round is reported as drifting.

The clients are stock: Kafka's ProducerPerformance and librdkafka. They are often the limit themselves, so the broker's
CPU seconds per GB stand beside every throughput.

Like is compared with like: `flush.mode=os` with Kafka's default (page cache), `flush.mode=group` with Kafka at
`flush.messages=1` (both answer after the disk has the data). Transactions are compared in the page cache, with the log
of the coordinator: Kafka never waits for a flush of that, and millrace runs with `flush.mode=os` where a topic does not
say otherwise.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from rich.console import Console

from benches.system import workloads
from benches.system.process import cpu_use, resident_mb
from benches.system.report import Comparison, describe_machine
from support.kafka_jars import KafkaJars, KafkaUnavailable, kafka_jars
from support.servers import KafkaServer, MillraceServer, Server

RECORD_BYTES = 1000
TOPIC_CONFIG = {
    ("kafka", "os"): {},
    ("kafka", "flushed"): {"flush.messages": "1"},
    ("millrace", "os"): {"flush.mode": "os"},
    ("millrace", "flushed"): {"flush.mode": "group"},
}
CONSUME_PASSES = 4  # one pass takes about a second, too short to be told from noise
MODE_NAME = {"os": "page cache", "flushed": "flushed before ack"}
PRODUCERS = (1, 10)
"""In transactions; each count is a work of its own."""
WORK = ("produce", "produce-flushed", "transactions", "consume", "consume-python", "latency", "latency-flushed")


@dataclass(frozen=True, slots=True)
class Options:
    rounds: int
    warmup_gb: int
    records: int
    latency_s: float
    only: tuple[str, ...]
    sides: tuple[str, ...]


class Bench:
    """Runs work on both sides in turn and collects the values."""

    def __init__(self, options: Options, jars: KafkaJars, servers: dict[str, Server], result: Comparison) -> None:
        self._options = options
        self._jars = jars
        self._servers = servers
        self._result = result
        self._topics = (f"bench-{number}" for number in count(1))
        self._console = Console(stderr=True, width=120, log_path=False)

    def run(self) -> None:
        for side, server in self._servers.items():
            self._result.add(side, "start", "process start to first answer", "s", "lower", server.start_s)
            self._result.add(side, "start", "resident memory, idle", "MB", "lower", resident_mb(server.pid))
        self._warm_up()
        flushed = max(self._options.records // 2, 1)  # slower work: half the records still last longer
        for work, run in (
            ("produce", lambda side, keep: self._produce(side, "os", self._options.records, keep=keep)),
            ("produce-flushed", lambda side, keep: self._produce(side, "flushed", flushed, keep=keep)),
            *(("transactions", self._in_transactions(producers)) for producers in PRODUCERS),
            ("consume", self._consumer("librdkafka", workloads.consume)),
            ("consume-python", self._consumer("confluent-kafka in Python", workloads.consume_in_python)),
            ("latency", lambda side, keep: self._latency(side, "os", keep=keep)),
            ("latency-flushed", lambda side, keep: self._latency(side, "flushed", keep=keep)),
        ):
            if work in self._options.only:
                self._alternate(work, run)
        for side, server in self._servers.items():
            self._result.add(side, "all of the above", "resident memory after", "MB", "lower", resident_mb(server.pid))

    def _warm_up(self) -> None:
        """Produce and consume whole GBs on both sides, whatever is measured later; see the head of this module."""
        records = 1_000_000_000 // RECORD_BYTES
        for number in range(self._options.warmup_gb):
            for side, server in self._servers.items():
                topic = self._new_topic(side, "os")
                with cpu_use(server.pid) as cpu:
                    workloads.produce(self._jars, server.bootstrap, topic, records, RECORD_BYTES)
                workloads.consume(server.bootstrap, topic, records)
                workloads.delete_topic(server.bootstrap, topic)
                self._console.log(f"warm-up, GB {number + 1}: {side:9} {cpu.seconds:.2f} CPU s per produced GB")

    def _alternate(self, work: str, run: Callable[[str, bool], str]) -> None:
        for number, side in self._turns():
            said = run(side, number > 0)
            self._console.log(f"{work:16} {f'round {number}' if number else 'warm-up':8} {side:9} {said}")

    def _turns(self) -> Iterator[tuple[int, str]]:
        """Round 0 is not kept: it warms what is special to this work. Who goes first changes every round."""
        for number in range(self._options.rounds + 1):
            for side in self._options.sides if number % 2 else reversed(self._options.sides):
                yield number, side

    def _produce(self, side: str, mode: str, records: int, *, keep: bool) -> str:
        server, topic = self._servers[side], self._new_topic(side, mode)
        with cpu_use(server.pid) as cpu:
            seen = workloads.produce(self._jars, server.bootstrap, topic, records, RECORD_BYTES)
        workloads.delete_topic(server.bootstrap, topic)
        cpu_per_gb = cpu.seconds / (records * RECORD_BYTES / 1e9)
        if keep:
            work = f"produce 1,000 B, acks=all, {MODE_NAME[mode]}"
            self._result.add(side, work, "throughput", "records/s", "higher", seen.records_per_s)
            self._result.add(side, work, "broker CPU", "s per GB", "lower", cpu_per_gb)
        return f"{seen.records_per_s:,.0f} records/s, {cpu_per_gb:.2f} CPU s per GB"

    def _in_transactions(self, producers: int) -> Callable[[str, bool], str]:
        records = max(self._options.records // 2, producers)  # commits take their time

        def run(side: str, keep: bool) -> str:
            server, topic = self._servers[side], self._new_topic(side, "os", partitions=producers)
            with cpu_use(server.pid) as cpu:
                rate = workloads.produce_in_transactions(
                    self._jars, server.bootstrap, topic, records, RECORD_BYTES, producers
                )
            workloads.delete_topic(server.bootstrap, topic)
            cpu_per_gb = cpu.seconds / (records * RECORD_BYTES / 1e9)
            if keep:
                many = "1 producer" if producers == 1 else f"{producers} producers"
                work = f"produce 1,000 B in transactions of {workloads.TRANSACTION_MS} ms, {many}"
                self._result.add(side, work, "throughput", "records/s", "higher", rate)
                self._result.add(side, work, "broker CPU", "s per GB", "lower", cpu_per_gb)
            return f"{producers:2} producers: {rate:,.0f} records/s, {cpu_per_gb:.2f} CPU s per GB"

        return run

    def _consumer(self, client: str, consume: Callable[[str, str, int], float]) -> Callable[[str, bool], str]:
        filled: dict[str, str] = {}

        def run(side: str, keep: bool) -> str:
            server, records = self._servers[side], self._options.records
            if side not in filled:
                filled[side] = self._new_topic(side, "os")
                workloads.produce(self._jars, server.bootstrap, filled[side], records, RECORD_BYTES)
            with cpu_use(server.pid) as cpu:
                seconds = sum(consume(server.bootstrap, filled[side], records) for _ in range(CONSUME_PASSES))
            gigabytes = CONSUME_PASSES * records * RECORD_BYTES / 1e9
            if keep:
                work = f"consume 1,000 B, {client}"
                self._result.add(side, work, "throughput", "MB/s", "higher", gigabytes * 1000 / seconds)
                self._result.add(side, work, "broker CPU", "s per GB", "lower", cpu.seconds / gigabytes)
            return f"{gigabytes * 1000 / seconds:,.0f} MB/s, {cpu.seconds / gigabytes:.2f} CPU s per GB"

        return run

    def _latency(self, side: str, mode: str, *, keep: bool) -> str:
        server, topic = self._servers[side], self._new_topic(side, mode)
        p50, p99 = workloads.latency(server.bootstrap, topic, 500, self._options.latency_s)
        workloads.delete_topic(server.bootstrap, topic)
        if keep:
            work = f"end to end at 500 records/s, {MODE_NAME[mode]}"
            self._result.add(side, work, "p50", "ms", "lower", p50)
            self._result.add(side, work, "p99", "ms", "lower", p99)
        return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms"

    def _new_topic(self, side: str, mode: str, partitions: int = 1) -> str:
        topic = next(self._topics)
        workloads.create_topic(self._servers[side].bootstrap, topic, TOPIC_CONFIG[side, mode], partitions)
        return topic


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench", description="Compare millrace with Apache Kafka on this machine."
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each work on each side")
    parser.add_argument("--records", type=int, default=1_000_000, help="records of 1,000 B in a round")
    parser.add_argument("--warmup-gb", type=int, default=3, help="GBs produced and consumed on each side beforehand")
    parser.add_argument("--latency-seconds", type=float, default=10, help="length of a latency round")
    parser.add_argument("--only", action="append", choices=WORK, help="may be repeated; all work by default")
    parser.add_argument("--sides", default="kafka,millrace", help="kafka, millrace or both, comma separated")
    parser.add_argument("--name", default="comparison", help="the result goes to benches/results/NAME.json")
    given = parser.parse_args()
    only, sides = tuple(given.only or WORK), tuple(given.sides.split(","))
    options = Options(given.rounds, given.warmup_gb, given.records, given.latency_seconds, only, sides)
    try:
        jars = kafka_jars()
    except KafkaUnavailable as unavailable:
        print(f"the comparison needs Apache Kafka's jars: {unavailable}", file=sys.stderr)
        return 1
    arguments = f' ARGS="{shlex.join(sys.argv[1:])}"' if len(sys.argv) > 1 else ""
    result = Comparison(f"make bench{arguments}", describe_machine(), options.rounds)
    with ExitStack() as stack:
        makers: dict[str, Callable[[], Server]] = {
            "kafka": lambda: KafkaServer(jars),
            "millrace": lambda: MillraceServer({"flush.mode": "os"}),
        }
        servers = {side: stack.enter_context(makers[side]()) for side in sides}
        Bench(options, jars, servers, result).run()
    Console(width=120).print(result.table())
    for drift in result.drifting():
        print(f"still drifting: {drift}")
    path = Path(__file__).parents[1] / "results" / f"{given.name}.json"
    result.save(path)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
