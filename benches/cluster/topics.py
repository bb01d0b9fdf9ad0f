"""Topics of a cluster as an administrator sees them: created, complete, led by whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

SILENT = {"log_level": 0}  # brokers are killed here: connections that are refused are no news
MIN_INSYNC = {"min.insync.replicas": "2"}
"""On both sides: Kafka's default is 1, that of `millrace up --brokers 3` is 2."""
_ASK_S = 5.0
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition as the broker that was asked sees it."""

    topic: str
    index: int
    leader: int
    isr: frozenset[int]
    replicas: frozenset[int]

    @property
    def whole(self) -> bool:
        return self.leader in self.isr and self.isr == self.replicas


class Topics:
    """Creates, deletes and watches topics of one cluster."""

    def __init__(self, bootstrap: str) -> None:
        # Polls are frequent and a broker may just have died: a client that waits longer to connect to it again would
        # measure its own patience.
        quick = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 100}
        self._admin = AdminClient({**SILENT, **quick, "bootstrap.servers": bootstrap})

    def create(self, topic: str, placement: Sequence[Sequence[int]], config: dict[str, str]) -> None:
        """`placement` are the replicas of each partition, the leader first; returns when all are in sync."""
        new = NewTopic(topic, len(placement), replica_assignment=[list(each) for each in placement], config=config)
        self._admin.create_topics([new])[topic].result(timeout=60)
        self.wait_whole({topic: len(placement)}, 60)

    def create_many(self, counts: dict[str, int], config: dict[str, str], timeout_s: float) -> None:
        """Topics with so many partitions each, RF 3, placed by the cluster, in one request."""
        new = [NewTopic(topic, count, replication_factor=3, config=config) for topic, count in counts.items()]
        for created in self._admin.create_topics(new, request_timeout=timeout_s, operation_timeout=timeout_s).values():
            created.result(timeout=timeout_s)

    def delete(self, topic: str) -> None:
        self._admin.delete_topics([topic])[topic].result(timeout=60)

    def controller(self) -> int:
        return int(self._admin.list_topics(timeout=_ASK_S).controller_id)

    def partitions(self, topics: dict[str, int]) -> list[Partition] | None:
        """All partitions of `topics`, which name their counts; None while one is missing or nobody answers."""
        try:
            seen = self._admin.list_topics(timeout=_ASK_S).topics  # of all: to ask for one by name may create it
        except KafkaException:
            return None
        found = [
            Partition(topic, index, each.leader, frozenset(each.isrs), frozenset(each.replicas))
            for topic in topics
            if topic in seen
            for index, each in seen[topic].partitions.items()
        ]
        return found if len(found) == sum(topics.values()) else None

    def wait(self, topics: dict[str, int], good: Callable[[Partition], bool], timeout_s: float) -> float:
        """The moment (monotonic) when all partitions were seen `good`, and still are at the next looks.

        Each look may be answered by another broker, and one that has not heard of a change yet tells the past.
        """
        deadline = time.monotonic() + timeout_s
        since: float | None = None
        looks = 0
        while True:
            seen = self.partitions(topics)
            now = time.monotonic()
            bad = [each for each in seen if not good(each)] if seen is not None else None
            if bad == []:
                since = now if since is None else since
                looks += 1
                if looks == 3:
                    return since
            else:
                since, looks = None, 0
            if now > deadline:
                left = "the topics are not known" if bad is None else f"{len(bad)} partitions, as {bad[0]}"
                raise RuntimeError(f"not settled within {timeout_s:.0f} s: {left}")
            time.sleep(_PAUSE_S)

    def wait_whole(self, topics: dict[str, int], timeout_s: float) -> float:
        """As `wait`, for a leader and every replica in sync."""
        return self.wait(topics, lambda each: each.whole, timeout_s)
