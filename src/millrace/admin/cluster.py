"""What a cluster is, as any of its brokers tells it: read over the wire into the image that brokers themselves use.

An image from here lacks what clients are not told (epochs of brokers, settings but one) and is not kept current. Here
too: which partitions are not as they should be, judged from an image by pure functions; elections; forgetting a broker.
Not here: what is wrong, in words (`admin.health`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from millrace.admin.asking import ask, check, newest_version
from millrace.admin.errors import AdminError
from millrace.admin.words import count_text
from millrace.client.cluster import ClusterClient
from millrace.client.versions import known_code
from millrace.cluster.image import BrokerImage, ClusterImage, TopicImage
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import (
    BrokerRegistered,
    Change,
    ClusterCreated,
    ConfigChanged,
    ControllerChanged,
    Endpoint,
    PartitionState,
    ResourceType,
    TopicCreated,
)
from millrace.model import NO_BROKER, TopicPartition
from millrace.wire.messages.cluster import (
    DescribeClusterRequest,
    DescribeClusterResponse,
    MetadataRequest,
    MetadataResponse,
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
)
from millrace.wire.messages.configs import DescribeConfigsRequest, DescribeConfigsResponse
from millrace.wire.messages.partitions import (
    ElectLeadersRequest,
    ElectLeadersResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)
from millrace.wire.messages.quorum import DescribeQuorumRequest, DescribeQuorumResponse

MIN_ISR: Final = "min.insync.replicas"
_FENCED_FROM: Final = 2
_METADATA_TOPIC: Final = "__cluster_metadata"
_ELECTION_TIMEOUT_MS: Final = 30_000


# --- reading ----------------------------------------------------------------------------------------------------------


def read_cluster(cluster: ClusterClient, *, settings: bool = False) -> ClusterImage:
    """The cluster now; with `settings` also how many in-sync replicas each topic wants."""
    described = _described(cluster)
    check(described.error_code, "the cluster cannot be described", described.error_message)
    cluster.learn_brokers({each.broker_id: (each.host, each.port) for each in described.brokers if not each.is_fenced})
    metadata: MetadataResponse = ask(cluster, MetadataRequest(topics=None, allow_auto_topic_creation=False))
    moving: ListPartitionReassignmentsResponse = ask(cluster, ListPartitionReassignmentsRequest(topics=None))
    check(moving.error_code, "reassignments cannot be listed", moving.error_message)
    epoch, index = _metadata_log(cluster)
    changes: list[Change] = [
        ClusterCreated(described.cluster_id),
        ControllerChanged(described.controller_id, epoch),
        *(
            BrokerRegistered(each.broker_id, -1, (Endpoint("", each.host, each.port),), each.rack, each.is_fenced)
            for each in described.brokers
        ),
        *_topics(metadata, moving),
    ]
    if settings:
        changes += _min_isr(cluster, [topic.name or "" for topic in metadata.topics])
    return ClusterImage().apply(tuple(changes), index)


def _described(cluster: ClusterClient) -> DescribeClusterResponse:
    """With the brokers that do not run, where they are told of: Kafka before 4.0 forgets them."""
    tells = newest_version(cluster, DescribeClusterRequest) >= _FENCED_FROM
    answer: DescribeClusterResponse = ask(cluster, DescribeClusterRequest(include_fenced_brokers=tells))
    return answer


def _metadata_log(cluster: ClusterClient) -> tuple[int, int]:
    """The controller's epoch and the number of the newest delta; zeros where they are not told."""
    partitions = [DescribeQuorumRequest.PartitionData(partition_index=0)]
    topic = DescribeQuorumRequest.TopicData(topic_name=_METADATA_TOPIC, partitions=partitions)
    try:
        answer: DescribeQuorumResponse = ask(cluster, DescribeQuorumRequest(topics=[topic]))
    except ApiError as error:
        if error.code is not ErrorCode.UNSUPPORTED_VERSION:
            raise
        return 0, 0  # Kafka with ZooKeeper has no quorum
    for described in (partition for topic in answer.topics for partition in topic.partitions):
        if not described.error_code:
            return described.leader_epoch, described.high_watermark
    return 0, 0


def _topics(metadata: MetadataResponse, moving: ListPartitionReassignmentsResponse) -> Iterable[Change]:
    moves = {
        TopicPartition(topic.name, each.partition_index): each for topic in moving.topics for each in topic.partitions
    }
    for topic in sorted(metadata.topics, key=lambda topic: topic.name or ""):
        name = topic.name or ""
        states = []
        for partition in sorted(topic.partitions, key=lambda partition: partition.partition_index):
            move = moves.get(TopicPartition(name, partition.partition_index))
            states.append(
                PartitionState(
                    tuple(partition.replica_nodes),
                    tuple(partition.isr_nodes),
                    partition.leader_id,
                    partition.leader_epoch,
                    adding=tuple(move.adding_replicas) if move else (),
                    removing=tuple(move.removing_replicas) if move else (),
                )
            )
        yield TopicCreated(name, topic.topic_id, tuple(states))


def _min_isr(cluster: ClusterClient, topics: list[str]) -> Iterable[Change]:
    resources = [
        DescribeConfigsRequest.DescribeConfigsResource(
            resource_type=ResourceType.TOPIC, resource_name=name, configuration_keys=[MIN_ISR]
        )
        for name in topics
    ]
    answer: DescribeConfigsResponse = ask(cluster, DescribeConfigsRequest(resources=resources))
    for result in answer.results:
        # A topic that was deleted in this moment has no settings.
        for config in result.configs:
            yield ConfigChanged(ResourceType.TOPIC, result.resource_name, ((config.name, config.value),))


# --- judging ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Health:
    """The partitions that are not as they should be; one may stand in several lists."""

    under_replicated: tuple[TopicPartition, ...]
    under_min_isr: tuple[TopicPartition, ...]
    offline: tuple[TopicPartition, ...]
    reassigning: tuple[TopicPartition, ...]

    @property
    def is_good(self) -> bool:
        return not (self.under_replicated or self.under_min_isr or self.offline)


def health(image: ClusterImage) -> Health:
    """Judge every partition; `under_min_isr` only where the image has the setting."""
    under_replicated, under_min_isr, offline, reassigning = [], [], [], []
    for topic, index, state in partitions(image):
        place = TopicPartition(topic.name, index)
        if is_under_replicated(state):
            under_replicated.append(place)
        # As its leader counts: a partition cannot have more in sync than it has replicas.
        wanted = min(int(image.topic_overrides(topic.name).get(MIN_ISR, "0")), len(state.replicas))
        if sum(image.is_live(member) for member in state.isr) < wanted:
            under_min_isr.append(place)
        if state.leader == NO_BROKER:
            offline.append(place)
        if state.is_reassigning:
            reassigning.append(place)
    return Health(tuple(under_replicated), tuple(under_min_isr), tuple(offline), tuple(reassigning))


def is_under_replicated(state: PartitionState) -> bool:
    """Whether a replica is missing from the ISR; those that a move adds or takes away are not counted."""
    passing = {*state.adding, *state.removing}
    return any(replica not in state.isr for replica in state.replicas if replica not in passing)


def partitions(image: ClusterImage) -> Iterable[tuple[TopicImage, int, PartitionState]]:
    """Every partition, in the order of names and numbers."""
    for name in sorted(image.topics):
        topic = image.topics[name]
        for index, state in enumerate(topic.partitions):
            yield topic, index, state


# --- telling ----------------------------------------------------------------------------------------------------------


def describe_image(
    image: ClusterImage, reasons: Mapping[TopicPartition, Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """All that is worth telling of a cluster, as JSON has it; `reasons` say more of partitions without a leader."""
    found = health(image)
    return {
        "cluster_id": image.cluster_id,
        "controller": image.controller_id,
        "controller_epoch": image.controller_epoch,
        "metadata_delta": image.index,
        "topics": len(image.topics),
        "partitions": sum(len(topic.partitions) for topic in image.topics.values()),
        "brokers": [_broker(image, image.brokers[broker_id]) for broker_id in sorted(image.brokers)],
        "under_replicated": [_partition(image, place) for place in found.under_replicated],
        "under_min_isr": [_partition(image, place) for place in found.under_min_isr],
        "offline": [_partition(image, place) | dict((reasons or {}).get(place, {})) for place in found.offline],
        "reassigning": [_partition(image, place) for place in found.reassigning],
    }


def _broker(image: ClusterImage, broker: BrokerImage) -> dict[str, Any]:
    states = [state for topic in image.topics.values() for state in topic.partitions]
    broker_id = broker.broker_id
    (endpoint,) = broker.endpoints
    return {
        "broker": broker_id,
        "address": f"{endpoint.host}:{endpoint.port}",
        "rack": broker.rack,
        "state": "fenced" if broker.fenced else "controller" if broker_id == image.controller_id else "live",
        "leaders": sum(state.leader == broker_id for state in states),
        "preferred": sum(state.replicas[:1] == (broker_id,) for state in states),
        "replicas": sum(broker_id in state.replicas for state in states),
        "in_sync": sum(broker_id in state.isr for state in states),
    }


def _partition(image: ClusterImage, place: TopicPartition) -> dict[str, Any]:
    state = image.topics[place.topic].partitions[place.partition]
    described: dict[str, Any] = {
        "topic": place.topic,
        "partition": place.partition,
        "leader": state.leader,
        "replicas": list(state.replicas),
        "isr": list(state.isr),
    }
    if state.is_reassigning:
        described |= {"adding": list(state.adding), "removing": list(state.removing)}
    return described


# --- changing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Election:
    """What became of one partition; `error` is None where it has a new leader."""

    place: TopicPartition
    error: ApiError | None

    @property
    def is_needless(self) -> bool:
        """Whether it had the right leader before."""
        return self.error is not None and self.error.code is ErrorCode.ELECTION_NOT_NEEDED

    @property
    def is_refused(self) -> bool:
        return self.error is not None and not self.is_needless


def elect_leaders(
    cluster: ClusterClient, places: Iterable[TopicPartition] | None, *, unclean: bool = False
) -> list[Election]:
    """Make preferred replicas the leaders of these partitions, or of all; or whoever is left, at the price of records.

    One answer for each partition of which the controller tells.
    """
    wanted: list[ElectLeadersRequest.TopicPartitions] | None = None
    if places is not None:
        indexes: dict[str, list[int]] = {}
        for topic, index in places:
            indexes.setdefault(topic, []).append(index)
        wanted = [ElectLeadersRequest.TopicPartitions(topic=name, partitions=held) for name, held in indexes.items()]
    request = ElectLeadersRequest(election_type=int(unclean), topic_partitions=wanted, timeout_ms=_ELECTION_TIMEOUT_MS)
    answer: ElectLeadersResponse = ask(cluster, request)
    check(answer.error_code, "no election")
    return [
        Election(
            TopicPartition(topic.topic, each.partition_id),
            ApiError(known_code(each.error_code), each.error_message or "") if each.error_code else None,
        )
        for topic in answer.replica_election_results
        for each in topic.partition_result
    ]


def remove_broker(cluster: ClusterClient, broker_id: int) -> None:
    """Have the cluster forget a broker for good."""
    answer: UnregisterBrokerResponse = ask(cluster, UnregisterBrokerRequest(broker_id=broker_id))
    check(answer.error_code, f"broker {broker_id}", answer.error_message)


def check_removable(image: ClusterImage, broker_id: int) -> None:
    """AdminError where a broker still holds replicas, does not exist or runs."""
    held = sum(broker_id in state.replicas for topic in image.topics.values() for state in topic.partitions)
    if held:
        raise AdminError(
            f"broker {broker_id} holds {count_text(held, 'replica')}",
            remedy=f"move them away first with: millrace cluster reassign --drain {broker_id}",
        )
    if broker_id not in image.brokers:
        known = ",".join(map(str, sorted(image.brokers)))
        raise AdminError(f"there is no broker {broker_id}; the brokers are {known}")
    if image.is_live(broker_id):
        raise AdminError(f"broker {broker_id} is running; stop it first, it holds nothing any more")
