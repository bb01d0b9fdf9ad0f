"""How long a producer waits when brokers go: the longest gap between acknowledgements.

One librdkafka producer (acks=all, idempotent, 200 records/s, otherwise at its defaults) writes to a topic with RF 3.
First, several times, kill -9 of the leader of its only partition. Then, three partitions, so that every broker leads
one: each broker in turn gets SIGTERM, is started again and must be in every ISR before the next. A gap is one between
two acknowledgements of the same partition. At the end the log must hold exactly what was sent.

The sides run one after the other, each alone on the machine, with brokers at their defaults: millrace flushes before it
acknowledges, Kafka does not.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import count, pairwise
from types import TracebackType
from typing import Self

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from rich.console import Console

from benches.cluster.report import GAP, KILL, ROLLING, START, START_TIME, ClusterComparison, finish
from benches.cluster.sides import add_options, make_cluster, new_result
from benches.cluster.topics import MIN_INSYNC, SILENT, Topics
from support.servers import Cluster

RATE_PER_S = 200
STEADY_S = 2.0
"""Before something happens and after it."""
PATIENCE_S = 120.0
PLACEMENT = ((1, 2, 3), (2, 3, 1), (3, 1, 2))


@dataclass(frozen=True, slots=True)
class Gap:
    """Two acknowledgements of a partition with none between them."""

    seconds: float
    began: float
    partition: int


class Writer:
    """Writes at a steady rate from a thread of its own, and knows when each acknowledgement came."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._partitions = partitions
        self._producer = Producer(
            {**SILENT, "bootstrap.servers": bootstrap, "acks": "all", "enable.idempotence": True, "linger.ms": 0}
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._acked: dict[int, list[float]] = defaultdict(list)
        self._failed: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        while self._thread.is_alive():
            if kind is not None:
                self._producer.purge()  # the brokers may be gone: nobody waits for what is still in the queue
            self._thread.join(0.2)

    def wait_steady(self, seconds: float = STEADY_S) -> None:
        """Until every partition has had acknowledgements at its rate for so long, counted from now."""
        wanted = int(seconds * RATE_PER_S / self._partitions)
        start = {index: len(self._acked[index]) for index in range(self._partitions)}
        deadline = time.monotonic() + PATIENCE_S
        while any(len(self._acked[index]) < before + wanted for index, before in start.items()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._topic}: no acknowledgements for {PATIENCE_S:.0f} s; {self._failed[:3]}")
            time.sleep(0.01)

    def finish(self) -> None:
        """Stop writing, and see that every record was acknowledged and lies in the log once."""
        self._stop.set()
        self._thread.join()
        if self._failed:
            raise RuntimeError(f"{self._topic}: {len(self._failed)} records failed: {self._failed[:3]}")
        consumer = Consumer({**SILENT, "bootstrap.servers": self._bootstrap, "group.id": "bench"})
        try:
            for index in range(self._partitions):
                place = TopicPartition(self._topic, index)
                _, end = consumer.get_watermark_offsets(place, timeout=30)
                if end != len(self._acked[index]):
                    raise RuntimeError(f"{place}: {len(self._acked[index])} acknowledged, {end} in the log")
        finally:
            consumer.close()

    def longest_gap(self, since: float, until: float) -> Gap:
        """Of any partition, among the gaps that ended in this span of time."""
        gaps = [
            Gap(later - earlier, earlier, index)
            for index, acked in self._acked.items()
            for earlier, later in pairwise(acked)
            if since < later <= until
        ]
        return max(gaps, key=lambda gap: gap.seconds)

    def _write(self) -> None:
        due = time.monotonic()
        for number in count():
            if self._stop.is_set():
                break
            # The queue takes 100,000 records, more than any gap leaves behind: this does not fail.
            self._producer.produce(
                self._topic, str(number).encode(), partition=number % self._partitions, on_delivery=self._delivered
            )
            due += 1 / RATE_PER_S
            while (left := due - time.monotonic()) > 0 and not self._stop.is_set():
                self._producer.poll(left)  # returns after each callback, so that none waits for the next record
        if self._producer.flush(PATIENCE_S):
            self._failed.append("records were left in the queue")

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failed.append(str(error))
        else:
            self._acked[message.partition() or 0].append(time.monotonic())


class Bench:
    """The two measurements on one cluster."""

    def __init__(self, side: str, cluster: Cluster, result: ClusterComparison, console: Console) -> None:
        self._side = side
        self._cluster = cluster
        self._result = result
        self._console = console
        self._admin = Topics(cluster.bootstrap)

    def kill_leader(self, number: int) -> None:
        """Each time another broker leads, so that it is the controller once in a while, too."""
        topic = f"killed-{number}"
        self._admin.create(topic, [PLACEMENT[number % len(PLACEMENT)]], MIN_INSYNC)
        with Writer(self._cluster.bootstrap, topic, 1) as writer:
            writer.wait_steady()
            leader = self._leader(topic)
            also = " and controller" if self._side == "millrace" and self._admin.controller() == leader else ""
            since = time.monotonic()
            self._cluster.kill(leader)
            writer.wait_steady()
            until = time.monotonic()
            writer.finish()
            gap_s = writer.longest_gap(since, until).seconds
        self._result.add(self._side, KILL, GAP, "s", "lower", gap_s)
        self._console.log(f"{self._side:9} kill -9 of {leader}, leader{also}: longest gap {gap_s:.3f} s")
        self._cluster.restart(leader)
        self._admin.wait_whole({topic: 1}, PATIENCE_S)

    def rolling_restart(self, number: int) -> None:
        topic = f"rolling-{number}"
        self._admin.create(topic, PLACEMENT, MIN_INSYNC)
        spans: dict[int, tuple[float, float]] = {}
        with Writer(self._cluster.bootstrap, topic, len(PLACEMENT)) as writer:
            writer.wait_steady()
            for broker_id in self._cluster.broker_ids:
                since = time.monotonic()
                self._cluster.terminate(broker_id)
                self._cluster.restart(broker_id)
                self._admin.wait_whole({topic: len(PLACEMENT)}, PATIENCE_S)
                writer.wait_steady()
                spans[broker_id] = since, time.monotonic()
            writer.finish()
            for broker_id, (since, until) in spans.items():
                gap = writer.longest_gap(since, until)
                self._result.add(self._side, ROLLING, GAP, "s", "lower", gap.seconds)
                self._result.add(self._side, ROLLING, "SIGTERM to full ISR and steady", "s", "lower", until - since)
                where = f"in partition {gap.partition}, {gap.began - since:+.3f} s from SIGTERM"
                self._console.log(f"{self._side:9} restart of {broker_id}: longest gap {gap.seconds:.3f} s {where}")

    def _leader(self, topic: str) -> int:
        seen = self._admin.partitions({topic: 1})
        if seen is None or seen[0].leader not in self._cluster.broker_ids:
            raise RuntimeError(f"{topic} has no leader: {seen}")
        return seen[0].leader


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-cluster ARGS=failover", description="How long a producer waits when brokers die or restart."
    )
    add_options(parser, name="cluster-failover", sides="kafka,millrace", rounds=5)
    parser.add_argument("--rolls", type=int, default=1, help="rolling restarts of the whole cluster")
    given = parser.parse_args(arguments)
    result = new_result("failover", arguments, given.rounds)
    console = Console(stderr=True, width=120, log_path=False)
    for side in given.sides:
        with make_cluster(side) as cluster:
            result.add(side, START, START_TIME, "s", "lower", cluster.start_s)
            bench = Bench(side, cluster, result, console)
            for number in range(given.rounds):
                bench.kill_leader(number)
            for number in range(given.rolls):
                bench.rolling_restart(number)
    return finish(result, given.name, given.update)
