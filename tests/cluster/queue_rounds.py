"""One round of a fault test of a queue (KIP-932): as in `group_rounds`, with members that take and accept.

A round is green when nothing acknowledged was lost in the topic, every record of it was accepted, none was given again
after that, and the queue was drained once the cluster had healed.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.group_rounds import GroupClients, GroupScale, GroupStage
from cluster.rounds import TROUBLE, Fault, Result, Scale, create_topic, disturb, high_watermarks, judge
from millrace.admin.queues import Position, positions_of
from millrace.errors import ApiError
from millrace.model import TopicPartition
from support.checker_queues import check_queue
from support.cluster_processes import ClusterProcesses, wait_for
from support.group_configs import set_group_configs
from support.servers import ServerFailed

STATE_TOPIC: Final = "__share_group_state"
SETTINGS: Final = (
    # The group's state in one partition, and that of its share-partitions in another: their leaders coordinate.
    ("offsets.topic.num.partitions", "1"),
    ("share.coordinator.state.topic.num.partitions", "1"),
    ("group.share.min.session.timeout.ms", "1000"),
    ("group.share.session.timeout.ms", "2000"),
    ("group.share.min.heartbeat.interval.ms", "100"),
    ("group.share.heartbeat.interval.ms", "400"),
    ("group.share.min.record.lock.duration.ms", "1000"),
    ("group.share.record.lock.duration.ms", "2000"),
    # Every fault costs the records that it finds held one delivery.
    ("group.share.delivery.count.limit", "10"),
)
_DRAINED_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class QueueScale(GroupScale):
    """How large a round with a queue is."""

    library_every: int = 3
    """Which members read with librdkafka; 0: none. Only what the others are given twice can be told."""


SHORT_QUEUE: Final = QueueScale(
    acked=2_000, bounces=1, rate=1_500, session_timeout_ms=3000, outage_s=5, members=4, partitions=4, library_every=4
)
FULL_QUEUE: Final = QueueScale(
    acked=100_000, bounces=3, rate=3_000, session_timeout_ms=6000, outage_s=30, members=20, partitions=10
)


class QueueClients(GroupClients):
    """Producers and the members of one queue."""

    def __init__(self, client: Mapping[str, str], topic: str, scale: QueueScale, directory: Path) -> None:
        self._library_every = scale.library_every
        earliest = {"share.auto.offset.reset": "earliest"}
        set_group_configs(client["bootstrap.servers"], f"group-of-{topic}", earliest, client)
        super().__init__(client, topic, scale, directory)

    def start_member(self) -> None:
        self._started += 1
        by_library = bool(self._library_every) and self._started % self._library_every == 0
        options = ["--group", self.group, *(["--library"] if by_library else [])]
        self._start("member", self._started, *options, module="cluster.queue_member")
        self.running.append(self._started)

    def wait_at_rest(self) -> None:
        """Everybody is a member and reads something."""

        def everybody_reads() -> bool | None:
            view = self.describe()
            there = view is not None and len(view.members) == len(self.running)
            return True if there and view is not None and all(each.partitions for each in view.members) else None

        wait_for(everybody_reads, _DRAINED_WITHIN_S, f"the queue has not got {len(self.running)} members", pause_s=0.1)

    def _committed(self) -> dict[TopicPartition, int]:
        """Of a queue, up to where everything is done with."""
        wanted = [TopicPartition(self._topic, index) for index in range(self.partitions)]

        def answered() -> dict[TopicPartition, int] | None:
            try:
                found = positions_of(self._cluster, self.group)
            except ApiError:
                return None
            return {each: (found[each].start if each in found else None) or 0 for each in wanted}

        return wait_for(answered, _DRAINED_WITHIN_S, "nobody tells where the queue is", pause_s=0.1)

    def _wait_everything_committed(self) -> None:
        """Nothing waits, and nothing is held: no lag. The start that is kept may be behind what is done with."""
        ends = high_watermarks(self._client, self._topic, self.partitions)
        left: dict[int, Position | None] = {}

        def drained() -> bool | None:
            try:
                found = positions_of(self._cluster, self.group)
            except ApiError:
                return None
            left.clear()
            for index, end in ends.items():
                position = found.get(TopicPartition(self._topic, index))
                if end and (position is None or position.lag != 0):
                    left[index] = position
            return None if left else True

        try:
            wait_for(drained, _DRAINED_WITHIN_S, "the queue is not drained", pause_s=0.2)
        except ServerFailed as error:
            raise ServerFailed(f"{error}: {left}, the ends are {ends}") from None


class QueueStage(GroupStage):
    """What a fault of a queue acts on."""

    def state_coordinator(self) -> int:
        """Who keeps what became of records."""
        return self.cluster.leader(STATE_TOPIC, 0)


def run_queue_round(cluster: ClusterProcesses, fault: Fault, scale: Scale, seed: int = 0) -> Result:
    """One round on a running cluster, with its own topic and queue; everything that is wrong is in the result."""
    assert isinstance(scale, QueueScale)
    result = Result()
    started = time.monotonic()
    topic = f"round-{uuid.uuid4().hex[:8]}"
    directory = cluster.home / "history" / topic
    directory.mkdir(parents=True)
    try:
        create_topic(cluster, topic, scale.partitions)
        with QueueClients(cluster.client_settings, topic, scale, directory) as clients:
            stage = QueueStage(cluster, clients, topic, scale, random.Random(seed), result.marks, members=clients)
            clients.wait_at_rest()
            result.failures += disturb(stage, fault, result)
            clients.resume_members()
            result.failures += clients.stop()
            counts = check_queue(judge(stage, result), result.report)
            result.marks.append(
                f"{counts.taken} deliveries, {counts.accepted} records accepted, {counts.undecided} without an answer"
            )
    except TROUBLE as error:
        result.failures.append(f"{type(error).__name__}: {error}")
    result.failures += [f"{broker} died by itself" for broker in cluster.brokers.values() if broker.died()]
    result.seconds = time.monotonic() - started
    return result
