"""Partitions without a leader: what each replica has, why it does not lead, and who would after an unclean election.

Read from any broker (who was in sync or is eligible, which replicas are away) and from every live one (how far its logs
reach, which of its directories are there).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from millrace.admin.asking import ask, ask_broker
from millrace.client.cluster import ClusterClient
from millrace.cluster.elections import ElectionKind, LogEnd, PartitionKey, has_everything, plan_elections
from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import Change, PartitionChanged, PartitionState
from millrace.model import LOST_DIRECTORY, NO_BROKER, UNASSIGNED_DIRECTORY, TopicPartition
from millrace.wire.messages.brokers import GetReplicaLogInfoRequest, GetReplicaLogInfoResponse
from millrace.wire.messages.cluster import DescribeTopicPartitionsRequest, DescribeTopicPartitionsResponse
from millrace.wire.messages.log_dirs import DescribeLogDirsRequest, DescribeLogDirsResponse

LOG_INFO_VERSION = 0
"""Of a request that brokers do not name in ApiVersions."""


class Condition(StrEnum):
    """How a replica is; the value completes "broker 1 ..."."""

    THERE = "has a log that can be read"
    DOUBTED = "may have lost the end of its log"
    NOT_RUNNING = "is not running"
    REMOVED = "was removed from the cluster"
    SILENT = "does not answer"
    DIRECTORY_AWAY = "has a log directory that is not there"
    LOST = "has lost its log"
    DAMAGED = "has a damaged log"


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica of a partition without a leader."""

    broker: int
    condition: Condition
    end: LogEnd | None
    """How far its log reaches, where it can be told."""
    known_as: str | None
    """"in sync" or "eligible": it has everything that was acknowledged, as long as its log is whole."""


@dataclass(frozen=True, slots=True)
class Leaderless:
    """A partition without a leader."""

    place: TopicPartition
    replicas: tuple[ReplicaReport, ...]
    would_lead: int | None
    """Who an unclean election would make the leader."""
    loses: bool
    """Whether acknowledged records may be lost by that."""

    @property
    def why(self) -> str:
        """Why nobody leads, in words: first of those who could."""
        known = [each for each in self.replicas if each.known_as is not None]
        others = [each for each in self.replicas if each.known_as is None]
        clauses = [f"{_named(each, len(known))} {each.condition}" for each in known]
        clauses += [f"broker {each.broker} {_lacking(each.condition)}" for each in others]
        return "no leader; " + "; ".join(clauses)

    @property
    def consequence(self) -> str:
        """What an unclean election would do."""
        if self.would_lead is None:
            return "nobody can lead; start a broker that has a replica, or put its disk back"
        end = next(each.end for each in self.replicas if each.broker == self.would_lead)
        leads = f"broker {self.would_lead} would lead from offset {0 if end is None else end.offset}"
        if not self.loses:
            return f"{leads}; nothing that was acknowledged is lost"
        last = " and ".join(str(each.broker) for each in self.replicas if each.known_as is not None)
        return f"{leads}; what only broker {last} had is lost for good"

    def as_json(self) -> dict[str, Any]:
        return {
            "why": self.why,
            "would_lead": self.would_lead,
            "may_lose_acknowledged": self.loses,
            "replica_logs": [
                {
                    "broker": each.broker,
                    "condition": each.condition.name.lower(),
                    "last_leader_epoch": None if each.end is None else each.end.epoch,
                    "log_end": None if each.end is None else each.end.offset,
                    "known_as": each.known_as,
                }
                for each in self.replicas
            ],
        }


def _named(replica: ReplicaReport, known: int) -> str:
    if replica.known_as == "eligible":
        return f"broker {replica.broker}, eligible,"
    return f"broker {replica.broker}, the last in sync," if known == 1 else f"broker {replica.broker}, in sync last,"


def _lacking(condition: Condition) -> str:
    return "may lack acknowledged records" if condition is Condition.THERE else condition.value


def read_leaderless(
    cluster: ClusterClient, image: ClusterImage, places: Collection[TopicPartition] | None = None
) -> list[Leaderless]:
    """Those of the partitions, or of all, that have no leader; nobody is asked anything where there are none."""
    wanted = [
        TopicPartition(topic.name, index)
        for topic, index, state in image.partitions()
        if state.leader == NO_BROKER and (places is None or TopicPartition(topic.name, index) in places)
    ]
    if not wanted:
        return []
    image = _with_eligible(cluster, image, wanted)
    states = {place: image.topics[place.topic].partitions[place.partition] for place in wanted}
    wanted = sorted(place for place in wanted if states[place].leader == NO_BROKER)
    keys = {place: (image.topics[place.topic].topic_id, place.partition) for place in wanted}
    ends: dict[PartitionKey, dict[int, LogEnd | None]] = {key: {} for key in keys.values()}
    conditions: dict[tuple[TopicPartition, int], Condition] = {}
    for broker_id in sorted({replica for place in wanted for replica in states[place].replicas}):
        held = {keys[place]: place for place in wanted if broker_id in states[place].replicas}
        for key, end, condition in _ask(cluster, image, broker_id, held):
            conditions[held[key], broker_id] = condition
            if condition is Condition.THERE:
                ends[key][broker_id] = end
                if not image.is_present(states[held[key]], broker_id):
                    conditions[held[key], broker_id] = Condition.DOUBTED
    elected = image.apply(plan_elections(image, ElectionKind.UNCLEAN, wanted, ends).changes)
    found = []
    for place in wanted:
        state = states[place]
        leader = elected.topics[place.topic].partitions[place.partition].leader
        reports = tuple(
            ReplicaReport(each, conditions[place, each], ends[keys[place]].get(each), _known_as(state, each))
            for each in state.replicas
        )
        would_lead = None if leader == NO_BROKER else leader
        loses = would_lead is not None and not has_everything(image, state, would_lead)
        found.append(Leaderless(place, reports, would_lead, loses))
    return found


def _known_as(state: PartitionState, broker_id: int) -> str | None:
    if broker_id in state.isr:
        return "in sync"
    return "eligible" if broker_id in state.elr else None


def _with_eligible(cluster: ClusterClient, image: ClusterImage, wanted: Iterable[TopicPartition]) -> ClusterImage:
    """With what Metadata does not tell: who is eligible, and whose log is away although its broker lives.

    Kafka before 3.8 does not tell that at all.
    """
    if not cluster.serves(DescribeTopicPartitionsRequest):
        return image
    topics = [
        DescribeTopicPartitionsRequest.TopicRequest(name=name) for name in sorted({each.topic for each in wanted})
    ]
    changes: list[Change] = []
    cursor: DescribeTopicPartitionsRequest.Cursor | None = None
    while True:
        answer: DescribeTopicPartitionsResponse = ask(
            cluster, DescribeTopicPartitionsRequest(topics=topics, cursor=cursor)
        )
        for topic in answer.topics:
            for each in topic.partitions:
                state = image.partition(topic.topic_id, each.partition_index)
                if state is None:
                    continue
                known = replace(
                    state,
                    replicas=tuple(each.replica_nodes),
                    isr=tuple(each.isr_nodes),
                    leader=each.leader_id,
                    elr=tuple(each.eligible_leader_replicas or ()),
                    directories=tuple(
                        LOST_DIRECTORY if replica in each.offline_replicas else UNASSIGNED_DIRECTORY
                        for replica in each.replica_nodes
                    ),
                )
                changes.append(PartitionChanged(topic.topic_id, each.partition_index, known))
        if answer.next_cursor is None:
            return image.apply(tuple(changes), image.index)
        cursor = DescribeTopicPartitionsRequest.Cursor(
            topic_name=answer.next_cursor.topic_name, partition_index=answer.next_cursor.partition_index
        )


_Answers = Iterable[tuple[PartitionKey, LogEnd | None, Condition]]


def _ask(
    cluster: ClusterClient, image: ClusterImage, broker_id: int, held: dict[PartitionKey, TopicPartition]
) -> _Answers:
    """How far the logs of a broker reach, or why that cannot be told; one answer for each."""
    if not image.is_live(broker_id):
        condition = Condition.NOT_RUNNING if broker_id in image.brokers else Condition.REMOVED
        return [(key, None, condition) for key in held]
    topics: dict[Any, list[int]] = defaultdict(list)
    for topic_id, index in held:
        topics[topic_id].append(index)
    request = GetReplicaLogInfoRequest(
        topic_partitions=[
            GetReplicaLogInfoRequest.TopicPartitions(topic_id=topic_id, partitions=indexes)
            for topic_id, indexes in topics.items()
        ]
    )
    try:
        answer: GetReplicaLogInfoResponse = ask_broker(cluster, broker_id, request, LOG_INFO_VERSION)
        told = {
            (topic.topic_id, each.partition): each
            for topic in answer.topic_partition_log_info_list
            for each in topic.partition_log_info
        }
        is_useless = any(each.error_code == ErrorCode.KAFKA_STORAGE_ERROR for each in told.values())
        disks = _Disks(ask_broker(cluster, broker_id, DescribeLogDirsRequest(topics=None))) if is_useless else None
    except ApiError:
        return [(key, None, Condition.SILENT) for key in held]
    answers: list[tuple[PartitionKey, LogEnd | None, Condition]] = []
    for key, place in held.items():
        info = told.get(key)
        if info is not None and info.error_code == ErrorCode.NONE:
            answers.append((key, LogEnd(info.last_written_leader_epoch, info.log_end_offset), Condition.THERE))
        elif info is not None and disks is not None and info.error_code == ErrorCode.KAFKA_STORAGE_ERROR:
            answers.append((key, None, disks.condition(place)))
        else:
            answers.append((key, None, Condition.SILENT))
    return answers


class _Disks:
    """What a broker says of its directories, to tell why a log is of no use."""

    def __init__(self, answer: DescribeLogDirsResponse) -> None:
        self._some_away = any(each.error_code for each in answer.results)
        self._with_files = {
            TopicPartition(topic.name, each.partition_index)
            for directory in answer.results
            for topic in directory.topics
            for each in topic.partitions
            if each.partition_size > 0
        }

    def condition(self, place: TopicPartition) -> Condition:
        if place in self._with_files:
            return Condition.DAMAGED
        return Condition.DIRECTORY_AWAY if self._some_away else Condition.LOST
