"""Thousands of partitions with RF 3 on three brokers: created, a broker killed, the broker back.

Times are those at which an ordinary client sees it: metadata is polled, and beside it stands when a record had been
acknowledged in every partition (acks=all, `min.insync.replicas=2`), because metadata that names a leader does not mean
that it serves. Each round has a cluster of its own.
"""

from __future__ import annotations

import argparse
import time

from confluent_kafka import KafkaError, Message, Producer
from rich.console import Console

from benches.cluster.report import CREATE, MANY, MOVED, REJOINED, ClusterComparison, finish
from benches.cluster.sides import add_options, make_cluster, new_result, resident_mb_of
from benches.cluster.topics import MIN_INSYNC, SILENT, Topics
from support.servers import Cluster

PATIENCE_S = 300.0


class Bench:
    """One round on one cluster."""

    def __init__(self, side: str, cluster: Cluster, counts: dict[str, int], result: ClusterComparison) -> None:
        self._side = side
        self._cluster = cluster
        self._counts = counts
        self._result = result
        self._admin = Topics(cluster.bootstrap)
        self._console = Console(stderr=True, width=120, log_path=False)

    def run(self, killed: int) -> None:
        """Create, kill, restart; `killed` names the broker."""
        start = time.monotonic()
        self._admin.create_many(self._counts, MIN_INSYNC, PATIENCE_S)
        self._add("create them, request answered", time.monotonic() - start)
        self._add(CREATE, self._admin.wait_whole(self._counts, PATIENCE_S) - start)
        self._fill(b"before")
        self._add("resident memory of the cluster", resident_mb_of(self._cluster), unit="MB")

        start = time.monotonic()
        self._cluster.kill(killed)
        led = self._admin.wait(self._counts, lambda each: each.leader not in (-1, killed), PATIENCE_S)
        self._add(MOVED, led - start)
        self._fill(b"failed over")
        self._add("kill -9 a broker: a record acked in each", time.monotonic() - start)

        start = time.monotonic()
        self._cluster.restart(killed)
        self._add("restart it: ready", time.monotonic() - start)
        self._add(REJOINED, self._admin.wait_whole(self._counts, PATIENCE_S) - start)

    def _add(self, quantity: str, value: float, unit: str = "s") -> None:
        work = f"{sum(self._counts.values()):,} {MANY}"
        self._result.add(self._side, work, quantity, unit, "lower", value)
        self._console.log(f"{self._side:9} {quantity}: {value:.2f} {unit}")

    def _fill(self, value: bytes) -> None:
        """A record into each partition, all acknowledged."""
        failed: list[str] = []

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failed.append(f"{message.topic()}-{message.partition()}: {error}")

        # The metadata is polled ten times faster than a client does on its own, so that the time is the cluster's.
        settings = {"acks": "all", "retry.backoff.ms": 50, "topic.metadata.refresh.fast.interval.ms": 100}
        producer = Producer({**SILENT, **settings, "bootstrap.servers": self._cluster.bootstrap})
        for topic, count in self._counts.items():
            for index in range(count):
                producer.produce(topic, value, partition=index, on_delivery=delivered)
            producer.poll(0)
        if left := producer.flush(PATIENCE_S):
            raise RuntimeError(f"{left} records were not acknowledged in {PATIENCE_S:.0f} s")
        if failed:
            raise RuntimeError(f"{len(failed)} records failed, as {failed[0]}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-cluster ARGS=partitions", description="Many partitions: creation, failover, return."
    )
    add_options(parser, name="cluster-partitions", sides="millrace", rounds=1)
    parser.add_argument("--partitions", type=int, default=2000, help="in all")
    parser.add_argument("--topics", type=int, default=20, help="among which they are divided")
    given = parser.parse_args(arguments)
    share, rest = divmod(given.partitions, given.topics)
    counts = {f"many-{number}": share + (number < rest) for number in range(given.topics)}
    result = new_result("partitions", arguments, given.rounds)
    for number in range(given.rounds):
        for side in given.sides:
            with make_cluster(side) as cluster:
                Bench(side, cluster, counts, result).run(cluster.broker_ids[number % 3])
    return finish(result, given.name, given.update)
