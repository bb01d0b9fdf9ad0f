"""Moves of partitions as values: made from an image or a file, asked of the controller, limited in speed.

Not here: what is worth moving (`cluster.balance`). Limits are settings of
topics and brokers, as with Kafka's tool; whoever sets them takes them off again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from millrace.admin.asking import ask, check
from millrace.admin.cluster import health
from millrace.admin.errors import AdminError
from millrace.client.cluster import ClusterClient
from millrace.client.versions import known_code
from millrace.cluster.balance import plan_balance
from millrace.cluster.image import ClusterImage
from millrace.cluster.reassignments import Reassignment
from millrace.errors import ApiError
from millrace.metadata.deltas import ResourceType, TopicDeleted
from millrace.model import TopicPartition
from millrace.wire.messages.configs import (
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from millrace.wire.messages.partitions import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)

_RATES: Final = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
_REPLICAS: Final = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")
_CONTROLLER_TIMEOUT_MS: Final = 25_000
_SET: Final = 0
_DELETE: Final = 1


# --- plans ------------------------------------------------------------------------------------------------------------


def make_plan(
    image: ClusterImage,
    *,
    add: Sequence[int],
    drain: Sequence[int],
    topics: Sequence[str] | None,
    factor: int | None = None,
) -> list[Reassignment]:
    """The moves that give `add` their share and `drain` nothing, or even out what runs; of `topics` only, if given.

    With `factor`, partitions have so many replicas afterwards; not those of internal topics, whose settings say that,
    unless they are named.
    """
    for broker_id in (*add, *drain):
        if broker_id not in image.brokers:
            known = ", ".join(map(str, sorted(image.brokers)))
            raise AdminError(f"there is no broker {broker_id}; the brokers are {known}")
    for broker_id in add:
        if not image.is_live(broker_id):
            raise AdminError(f"broker {broker_id} is not running")
    targets = {broker.broker_id for broker in image.live_brokers}
    if add and not drain:
        # Brokers that are empty and were not named stay so.
        targets &= {replica for _, _, state in image.partitions() for replica in state.replicas} | set(add)
    try:
        if factor is not None and not topics:
            topics = [topic.name for topic in image.topics.values() if not topic.internal]
            if not topics:
                return []
        return plan_balance(only_topics(image, topics), brokers_in=targets, drain=set(drain), factor=factor)
    except ApiError as error:
        raise AdminError(error.message) from error


def only_topics(image: ClusterImage, topics: Sequence[str] | None) -> ClusterImage:
    """The image with no other topics."""

    if not topics:
        return image
    check_topics(image, topics)
    others = [topic for topic in image.topics.values() if topic.name not in topics]
    return image.apply(tuple(TopicDeleted(topic.name, topic.topic_id) for topic in others))


def check_topics(image: ClusterImage, topics: Iterable[str]) -> None:
    for name in topics:
        if image.topic(name) is None:
            raise AdminError(f"there is no topic '{name}'")


def parse_plan(text: str, source: str) -> list[Reassignment]:
    """`{"version": 1, "partitions": [{"topic": ..., "partition": ..., "replicas": [...]}, ...]}`."""

    try:
        rows = json.loads(text)["partitions"]
        plan = [
            Reassignment(str(row["topic"]), int(row["partition"]), tuple(map(int, row["replicas"]))) for row in rows
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise AdminError(
            f'{source} is no plan ({error}); it looks like {{"version": 1, "partitions": '
            '[{"topic": "orders", "partition": 0, "replicas": [1, 2, 3]}]}'
        ) from error
    return plan


def check_plan(image: ClusterImage, plan: Iterable[Reassignment]) -> list[Reassignment]:
    """The moves of a plan that change anything; a partition that does not exist is an error."""
    needed = []
    for move in plan:
        topic = image.topic(move.topic)
        if topic is None or not 0 <= move.index < len(topic.partitions):
            raise AdminError(f"there is no partition {move.topic}-{move.index}")
        if topic.partitions[move.index].replicas != move.replicas:
            needed.append(move)
    return needed


def render_plan(plan: Iterable[Reassignment]) -> dict[str, Any]:
    """What `parse_plan` reads."""
    return {
        "version": 1,
        "partitions": [
            {"topic": move.topic, "partition": move.index, "replicas": list(move.replicas or ())} for move in plan
        ],
    }


def replicas_now(image: ClusterImage, move: Reassignment) -> tuple[int, ...]:
    return image.topics[move.topic].partitions[move.index].replicas


def replicas_added(image: ClusterImage, move: Reassignment) -> tuple[int, ...]:
    now = replicas_now(image, move)
    return tuple(replica for replica in move.replicas or () if replica not in now)


# --- requests ---------------------------------------------------------------------------------------------------------


def submit(cluster: ClusterClient, plan: Sequence[Reassignment]) -> dict[tuple[str, int], ApiError]:
    """Ask the controller for the moves; returns those that it refused, with the reason."""

    topics: dict[str, list[AlterPartitionReassignmentsRequest.ReassignablePartition]] = {}
    for move in plan:
        replicas = None if move.replicas is None else list(move.replicas)
        item = AlterPartitionReassignmentsRequest.ReassignablePartition(partition_index=move.index, replicas=replicas)
        topics.setdefault(move.topic, []).append(item)
    answer: AlterPartitionReassignmentsResponse = ask(
        cluster,
        AlterPartitionReassignmentsRequest(
            timeout_ms=_CONTROLLER_TIMEOUT_MS,
            topics=[
                AlterPartitionReassignmentsRequest.ReassignableTopic(name=name, partitions=items)
                for name, items in topics.items()
            ],
        ),
    )
    check(answer.error_code, "the move was refused", answer.error_message)
    return {
        (topic.name, each.partition_index): ApiError(known_code(each.error_code), each.error_message or "")
        for topic in answer.responses
        for each in topic.partitions
        if each.error_code
    }


def under_way(cluster: ClusterClient) -> set[tuple[str, int]]:

    answer: ListPartitionReassignmentsResponse = ask(cluster, ListPartitionReassignmentsRequest(topics=None))
    check(answer.error_code, "moves cannot be listed", answer.error_message)
    return {(topic.name, each.partition_index) for topic in answer.topics for each in topic.partitions}


@dataclass(frozen=True, slots=True)
class Moving:
    """A partition that is being moved."""

    place: TopicPartition
    staying: tuple[int, ...]
    """Its replicas, without those that come."""
    adding: tuple[int, ...]
    removing: tuple[int, ...]
    isr: tuple[int, ...]

    def progress(self, sizes: Mapping[tuple[TopicPartition, int], int]) -> tuple[int, int]:
        """Bytes that those who come have, and that they are to have, by what each replica has on disk."""
        whole = max((sizes.get((self.place, each), 0) for each in self.staying), default=0)
        done = sum(whole if each in self.isr else min(sizes.get((self.place, each), 0), whole) for each in self.adding)
        return done, whole * len(self.adding)


def moving(image: ClusterImage, topics: Sequence[str] | None = None) -> list[Moving]:
    """What is being moved, of `topics` only, if given; AdminError where there is no such topic."""
    check_topics(image, topics or ())
    found = []
    for place in health(image).reassigning:
        if topics and place.topic not in topics:
            continue
        state = image.topics[place.topic].partitions[place.partition]
        staying = tuple(each for each in state.replicas if each not in state.adding)
        found.append(Moving(place, staying, state.adding, state.removing, state.isr))
    return found


# --- limits -----------------------------------------------------------------------------------------------------------

Settings = dict[tuple[ResourceType, str], dict[str, str | None]]
"""By resource, the settings to set, or to delete (None)."""


def limits(image: ClusterImage, plan: Sequence[Reassignment], rate: int) -> Settings:
    """The settings under which a move copies no faster than `rate` bytes per second and broker."""

    settings: Settings = {}
    leaders: dict[str, list[str]] = {}
    followers: dict[str, list[str]] = {}
    brokers: set[int] = set()
    for move in plan:
        now, added = replicas_now(image, move), replicas_added(image, move)
        leaders.setdefault(move.topic, []).extend(f"{move.index}:{replica}" for replica in now)
        followers.setdefault(move.topic, []).extend(f"{move.index}:{replica}" for replica in added)
        brokers.update(now, added)
    for broker_id in sorted(brokers):
        settings[ResourceType.BROKER, str(broker_id)] = dict.fromkeys(_RATES, str(rate))
    for topic, source in leaders.items():
        values = (",".join(source), ",".join(followers[topic]))
        settings[ResourceType.TOPIC, topic] = dict(zip(_REPLICAS, values, strict=True))
    return settings


def alter_settings(cluster: ClusterClient, settings: Settings) -> None:

    if not settings:
        return
    answer: IncrementalAlterConfigsResponse = ask(
        cluster,
        IncrementalAlterConfigsRequest(
            resources=[
                IncrementalAlterConfigsRequest.AlterConfigsResource(
                    resource_type=kind,
                    resource_name=name,
                    configs=[
                        IncrementalAlterConfigsRequest.AlterableConfig(
                            name=key, config_operation=_DELETE if value is None else _SET, value=value
                        )
                        for key, value in values.items()
                    ],
                )
                for (kind, name), values in settings.items()
            ]
        ),
    )
    for each in answer.responses:
        check(each.error_code, f"the limit for '{each.resource_name}'", each.error_message)


def lift_limits(cluster: ClusterClient, image: ClusterImage) -> bool:
    """Take the limits off every topic and broker that has one; whether there were any."""

    resources = [
        DescribeConfigsRequest.DescribeConfigsResource(
            resource_type=ResourceType.TOPIC, resource_name=name, configuration_keys=list(_REPLICAS)
        )
        for name in image.topics
    ]
    answer: DescribeConfigsResponse = ask(cluster, DescribeConfigsRequest(resources=resources))
    settings: Settings = {
        (ResourceType.TOPIC, result.resource_name): {config.name: None for config in result.configs if config.value}
        for result in answer.results
        if any(config.value for config in result.configs)
    }
    if settings:
        for broker_id in image.brokers:
            settings[ResourceType.BROKER, str(broker_id)] = dict.fromkeys(_RATES)
    alter_settings(cluster, settings)
    return bool(settings)
