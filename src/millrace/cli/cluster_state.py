"""What a cluster is, as any of its brokers tells it: read over the wire into the image that brokers themselves use.

An image from here lacks what clients are not told (epochs of brokers, settings but one) and is not kept current. Here
too: how well the cluster is, judged from an image by pure functions. Not here: what is printed (`cluster`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from millrace.cli.entry import refuse_other_protocol
from millrace.cli.output import CommandError
from millrace.cli.profiles import unreachable_text
from millrace.client.blocking import BlockingConnection
from millrace.client.sasl import SaslClient
from millrace.client.settings import Address, ClientSettings
from millrace.client.tls import context_for
from millrace.client.versions import known_code
from millrace.cluster.image import ClusterImage, TopicImage
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
)
from millrace.wire.messages.configs import DescribeConfigsRequest, DescribeConfigsResponse
from millrace.wire.messages.partitions import ListPartitionReassignmentsRequest, ListPartitionReassignmentsResponse
from millrace.wire.messages.quorum import DescribeQuorumRequest, DescribeQuorumResponse
from millrace.wire.schema import Request

REQUEST_TIMEOUT_MS: Final = 30_000
MIN_ISR: Final = "min.insync.replicas"
_METADATA_TOPIC: Final = "__cluster_metadata"
_NOBODY_THERE: Final = frozenset({ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT})


class Administration:
    """Asks a cluster. Any broker will do: each knows the metadata, and passes changes on to the controller."""

    def __init__(self, settings: ClientSettings, bootstrap: str) -> None:
        self._settings = settings
        self._bootstrap = bootstrap
        self._ssl = context_for(settings.security)
        self._sasl = SaslClient.for_security(settings.security)
        self._addresses: list[Address] = list(settings.bootstrap_servers)
        self._brokers: dict[int, Address] = {}
        self._connections: dict[Address, BlockingConnection] = {}

    @classmethod
    def of(cls, bootstrap: str, client: Mapping[str, str]) -> Self:
        """From the command line's options."""
        properties = {"socket.connection.setup.timeout.ms": "5000", "client.id": "millrace-cli", **client}
        return cls(ClientSettings.from_properties({**properties, "bootstrap.servers": bootstrap}), bootstrap)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections.values():
            connection.close()

    def ask(self, message: Request) -> Any:
        """The answer of the first broker that gives one. Nobody there is a CommandError."""
        failure: ApiError | None = None
        for address in self._addresses:
            try:
                answer = self._connection(address).request(message, timeout_ms=REQUEST_TIMEOUT_MS)
            except ApiError as error:
                if error.code not in _NOBODY_THERE:
                    raise
                if error.code == ErrorCode.NETWORK_EXCEPTION and failure is None:
                    refuse_other_protocol(address, self._settings.security.protocol)
                failure = error
                continue
            # Whoever answered is asked first the next time.
            self._addresses = [address, *(other for other in self._addresses if other != address)]
            return answer
        reason = failure.message if failure is not None else "no address"
        raise CommandError(f"no broker answers ({reason}){unreachable_text(self._bootstrap)}")

    def ask_broker(self, broker_id: int, message: Request, version: int | None = None) -> Any:
        """The answer of one broker, for what only it can tell; ApiError where it does not answer.

        `version` is for what brokers do not name in ApiVersions.
        """
        return self._connection(self._brokers[broker_id]).request(message, version, timeout_ms=REQUEST_TIMEOUT_MS)

    def learn(self, brokers: Mapping[int, Address]) -> None:
        """Where the brokers are, for the time when those we began with are gone."""
        self._brokers = dict(brokers)
        self._addresses = list(dict.fromkeys([*self._addresses, *brokers.values()]))

    def _connection(self, address: Address) -> BlockingConnection:
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = BlockingConnection(
                *address,
                client_id=self._settings.client_id,
                connect_timeout_ms=self._settings.connect_timeout_ms,
                ssl=self._ssl,
                sasl=self._sasl,
            )
        return connection


def check(code: int, what: str, text: str | None = None) -> None:
    """Raise what an error code in an answer means; 0 means nothing."""
    if code:
        name = known_code(code).name
        raise CommandError(f"{what}: {text} ({name})" if text else f"{what}: {name}")


# --- reading ----------------------------------------------------------------------------------------------------------


def read_cluster(admin: Administration, *, settings: bool = False) -> ClusterImage:
    """The cluster now; with `settings` also how many in-sync replicas each topic wants."""
    described: DescribeClusterResponse = admin.ask(DescribeClusterRequest(include_fenced_brokers=True))
    check(described.error_code, "the cluster cannot be described", described.error_message)
    admin.learn({each.broker_id: (each.host, each.port) for each in described.brokers if not each.is_fenced})
    metadata: MetadataResponse = admin.ask(MetadataRequest(topics=None, allow_auto_topic_creation=False))
    moving: ListPartitionReassignmentsResponse = admin.ask(ListPartitionReassignmentsRequest(topics=None))
    check(moving.error_code, "reassignments cannot be listed", moving.error_message)
    epoch, index = _metadata_log(admin)
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
        changes += _min_isr(admin, [topic.name or "" for topic in metadata.topics])
    return ClusterImage().apply(tuple(changes), index)


def _metadata_log(admin: Administration) -> tuple[int, int]:
    """The controller's epoch and the number of the newest delta; zeros where they are not told."""
    partitions = [DescribeQuorumRequest.PartitionData(partition_index=0)]
    topic = DescribeQuorumRequest.TopicData(topic_name=_METADATA_TOPIC, partitions=partitions)
    answer: DescribeQuorumResponse = admin.ask(DescribeQuorumRequest(topics=[topic]))
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


def _min_isr(admin: Administration, topics: list[str]) -> Iterable[Change]:
    resources = [
        DescribeConfigsRequest.DescribeConfigsResource(
            resource_type=ResourceType.TOPIC, resource_name=name, configuration_keys=[MIN_ISR]
        )
        for name in topics
    ]
    answer: DescribeConfigsResponse = admin.ask(DescribeConfigsRequest(resources=resources))
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
