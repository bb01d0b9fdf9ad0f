"""A synchronous client of a whole cluster: finds the leader, asks it, and asks again when it has moved or restarts.

One thread at a time; pickles as its settings. Not here: read-ahead (`fetching`), sequences and
requests in flight (`producing`), what bytes mean (`requests`).

Invariants: only failures that pass by themselves are retried, with fresh metadata and a growing pause, until
`retry_timeout_ms`; then one ApiError names the partition and the last cause. Topics are created by asking
only where the caller says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import IntEnum
from ssl import SSLContext
from typing import Any, Final, NamedTuple, Self, TypeVar

from millrace.client import requests, versions
from millrace.client.blocking import BlockingConnection, Pending, ReceiveBuffer
from millrace.client.requests import EARLIEST, LATEST, Fetched, Outcome, PartitionInfo, TopicInfo
from millrace.client.retrying import Attempts, is_retriable
from millrace.client.sasl import SaslClient
from millrace.client.settings import Address, ClientSettings
from millrace.client.tls import context_for
from millrace.clock import Clock, SystemClock
from millrace.errors import ApiError, ErrorCode
from millrace.model import NO_BROKER, TopicPartition
from millrace.wire.messages.cluster import MetadataResponse
from millrace.wire.messages.groups import FindCoordinatorRequest
from millrace.wire.messages.producers import InitProducerIdRequest
from millrace.wire.schema import Request

__all__ = [
    "EARLIEST",
    "LATEST",
    "ClusterClient",
    "CoordinatorKind",
    "FetchUnderWay",
    "Fetched",
    "PartitionInfo",
    "TopicInfo",
]

T = TypeVar("T")
V = TypeVar("V")

_ONE_COORDINATOR_VERSION: Final = 3
_STABLE_PRODUCER_VERSION: Final = 5
_NOBODY_THERE: Final = frozenset({ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT})
_PREFERRED_REPLICA_S: Final = 300.0
"""How long a leader's advice to read from another replica holds, as in Kafka's consumer."""


class CoordinatorKind(IntEnum):
    """What a coordinator coordinates; the number is the one FindCoordinator sends."""

    GROUP = 0
    TRANSACTION = 1


class FetchUnderWay(NamedTuple):
    """A fetch that was sent; `receive_fetch` takes it. To give it up, close its connection."""

    partition: TopicPartition
    node: int
    connection: BlockingConnection
    pending: Pending
    timeout_ms: int


class ClusterClient:
    """Every method returns what was asked for, or raises ApiError (ConfigError for TLS that cannot work)."""

    def __init__(self, settings: ClientSettings, *, clock: Clock | None = None) -> None:
        self.settings = settings
        self._clock = clock or SystemClock()
        self._connections: dict[Address, BlockingConnection] = {}
        self._brokers: dict[int, Address] = {}
        self._topics: dict[str, TopicInfo] = {}
        self._coordinators: dict[tuple[CoordinatorKind, str], Address] = {}
        """By what is coordinated, and its name."""
        self._suspects: set[Address] = set()
        """Brokers that failed when others could be asked instead: they are asked last."""
        self._read_replicas: dict[TopicPartition, tuple[int, float]] = {}
        self._ssl: SSLContext | None = None
        self._sasl = SaslClient.for_security(settings.security)

    def __repr__(self) -> str:
        servers = ",".join(f"{host}:{port}" for host, port in self.settings.bootstrap_servers)
        connected = sum(connection.is_connected for connection in self._connections.values())
        return f"ClusterClient({servers}, {connected} connections)"

    def __reduce__(self) -> tuple[type[ClusterClient], tuple[ClientSettings]]:
        return ClusterClient, (self.settings,)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connections; the next request makes new ones."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def interrupt(self) -> None:
        """From another thread: what is being waited for fails as if the connection were lost, and may be tried again.

        Who wants it to end for good has `pause` raise, which comes before each further attempt.
        """
        for connection in list(self._connections.values()):
            connection.interrupt()

    # Metadata.

    def topics(self, names: Collection[str] | None = None) -> dict[str, TopicInfo]:
        """The topics of these names, or all; names that do not exist are absent."""
        if names is not None and not names:
            return {}
        return self.refresh(names, self.attempts("metadata"))

    def partition_count(self, name: str, *, create: bool = False) -> int:
        """How many partitions a topic has now; one that was created a moment ago is waited for, shortly.

        With `create`, one that is missing is created by asking, where the brokers do that (auto.create.topics.enable).
        """
        attempts = self.attempts(f"topic '{name}'")
        missing = "it does not exist, and the brokers create none by themselves" if create else "it does not exist"
        while True:
            topic = self.refresh([name], attempts, create=create).get(name)
            if topic is not None:
                return len(topic.partitions)
            attempts.failed(ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{missing}; create it first"))

    # Reading.

    def list_offsets(
        self, wanted: Mapping[TopicPartition, int], *, read_committed: bool = False
    ) -> dict[TopicPartition, int | None]:
        """The offset of the first record at or after a time in ms, or of EARLIEST or LATEST, per partition.

        None where no record is that young. With `read_committed`, LATEST is the last stable offset.
        """

        def build(part: Mapping[TopicPartition, int]) -> Request:
            return requests.list_offsets(
                part,
                {partition: self._leadership(partition).leader_epoch for partition in part},
                read_committed=read_committed,
                timeout_ms=self.settings.request_timeout_ms,
            )

        return self.ask_leaders("offsets of", wanted, build, requests.read_list_offsets)

    def fetch(
        self,
        partition: TopicPartition,
        offset: int,
        *,
        max_bytes: int,
        max_wait_ms: int,
        read_committed: bool = False,
        buffer: ReceiveBuffer | None = None,
    ) -> Fetched:
        """Record batches from `offset` on (in `buffer`, when one is lent); empty when none came within `max_wait_ms`.

        At least one whole batch when there is one, however large it is. OFFSET_OUT_OF_RANGE is raised at once.
        """
        attempts = self.attempts(f"fetch of {partition} at offset {offset}")
        while True:
            self.learn([partition], attempts)
            replica = self._read_replicas.get(partition)
            try:
                sent = self.send_fetch(
                    partition, offset, max_bytes=max_bytes, max_wait_ms=max_wait_ms, read_committed=read_committed
                )
                fetched = self.receive_fetch(sent, buffer)
            except ApiError as error:
                if self._read_replicas.pop(partition, None) is not None:
                    continue  # the replica may lag behind or be gone: the leader knows
                attempts.failed(error)
                self.refresh([partition.topic], attempts)
                continue
            if fetched.records or self._read_replicas.get(partition) == replica:
                return fetched

    def send_fetch(
        self,
        partition: TopicPartition,
        offset: int,
        *,
        max_bytes: int,
        max_wait_ms: int,
        read_committed: bool = False,
    ) -> FetchUnderWay:
        """One attempt at a `fetch`, of which only the first half is done here. ApiError: it could not be sent."""
        node, leadership = self._where_to_read(partition)
        message = requests.fetch(
            partition,
            offset,
            leader_epoch=leadership.leader_epoch,
            max_bytes=max_bytes,
            max_wait_ms=max_wait_ms,
            read_committed=read_committed,
            rack=self.settings.client_rack,
        )
        connection = self.connection(node)
        timeout_ms = self.settings.request_timeout_ms + max_wait_ms
        return FetchUnderWay(partition, node, connection, self.send(connection, message), timeout_ms)

    def receive_fetch(self, sent: FetchUnderWay, buffer: ReceiveBuffer | None = None) -> Fetched:
        """The other half: its answer (in `buffer`, when one is lent), which may also be an ApiError of any kind.

        The advice to read from another replica holds from the next fetch on.
        """
        response = sent.connection.receive(sent.pending, timeout_ms=sent.timeout_ms, buffer=buffer)
        fetched = requests.read_fetch(response, sent.partition)
        advised = fetched.preferred_read_replica
        if advised not in (NO_BROKER, sent.node) and advised in self._brokers:
            self._read_replicas[sent.partition] = (advised, self._clock.monotonic() + _PREFERRED_REPLICA_S)
        return fetched

    # Writing.

    def init_producer_id(self) -> tuple[int, int]:
        """A new producer id and its epoch, for an idempotent producer."""
        message = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=0)
        attempts = self.attempts("a producer id")
        while True:
            try:
                response = self.ask(self._any_connection(), message, at_most=_STABLE_PRODUCER_VERSION)
                raise_for(response.error_code)
                return response.producer_id, response.producer_epoch
            except ApiError as error:
                attempts.failed(error)

    def produce(
        self, batches: Mapping[TopicPartition, bytes], *, acks: int = -1, timeout_ms: int | None = None
    ) -> dict[TopicPartition, int]:
        """Append one batch per partition and return their base offsets, -1 where acks=0 tells nothing.

        A batch is sent again as it is, so with a producer id and a sequence in it it is stored once; without them a
        retry may store it twice.
        """
        limit_ms = self.settings.request_timeout_ms if timeout_ms is None else timeout_ms
        return self.ask_leaders(
            "produce to",
            batches,
            lambda part: requests.produce(part, acks=acks, timeout_ms=limit_ms),
            requests.read_produce,
            unanswered=-1,
        )

    # Groups.

    def commit_offsets(self, group_id: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit as a stand-alone consumer; fails when the group has members of its own."""
        if offsets:
            message = requests.offset_commit(group_id, offsets)
            self._offsets_of(group_id, message, offsets, requests.read_offset_commit)

    def committed_offsets(
        self, group_id: str, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int | None]:
        """What the group committed; None where it has not."""
        if not partitions:
            return {}
        message = requests.offset_fetch(group_id, partitions)
        return self._offsets_of(group_id, message, partitions, requests.read_offset_fetch)

    def ask_coordinator(
        self,
        key: str,
        what: str,
        message: Request,
        read: Callable[[Any], V],
        *,
        kind: CoordinatorKind = CoordinatorKind.GROUP,
        at_most: int | None = None,
    ) -> V:
        """What `read` makes of the coordinator's answer; an ApiError of `read` counts as one of the request."""
        attempts = self.attempts(what)
        while True:
            try:
                return read(self.ask(self.coordinator(key, kind), message, at_most=at_most))
            except ApiError as error:
                self.forget_coordinator(key, kind)
                attempts.failed(error)

    def ask_leaders(
        self,
        what: str,
        wanted: Mapping[TopicPartition, T],
        build: Callable[[Mapping[TopicPartition, T]], Request],
        read: Callable[[Any], Iterable[Outcome[V]]],
        *,
        unanswered: V | None = None,
    ) -> dict[TopicPartition, V]:
        """Ask the leaders of all partitions at once, and again for those that failed, until all have answered."""
        results: dict[TopicPartition, V] = {}
        missing = dict(wanted)
        attempts = self.attempts(what)
        while missing:
            self.learn(missing, attempts)
            errors: dict[TopicPartition, ApiError] = {}
            asked: list[tuple[BlockingConnection, Pending, Mapping[TopicPartition, T]]] = []
            for node, part in self._by_leader(missing, errors).items():
                try:
                    connection = self.connection(node)
                    asked.append((connection, self.send(connection, build(part)), part))
                except ApiError as error:
                    errors.update(dict.fromkeys(part, error))
            for connection, pending, sent in asked:
                try:
                    outcomes = self._outcomes(connection, pending, sent, read, unanswered)
                except ApiError as error:
                    errors.update(dict.fromkeys(sent, error))
                    continue
                for partition, outcome in outcomes.items():
                    if outcome.error is None:
                        results[partition] = outcome.value
                        del missing[partition]
                    else:
                        errors[partition] = outcome.error
            if errors:
                partition, failure = _worst(errors)
                attempts.failed(failure, about=str(partition))
                self.refresh({partition.topic for partition in errors}, attempts)
        return {partition: results[partition] for partition in wanted}

    def ask_every_broker(self, message: Request) -> list[Any]:
        """The answers of all brokers of the cluster; whoever does not answer fails the whole."""
        self.refresh([], self.attempts("the brokers"))
        return [self.ask(self.connection(node), message) for node in sorted(self._brokers)]

    def ask_any_broker(self, what: str, message: Request, read: Callable[[Any], V], *, at_most: int | None = None) -> V:
        """Like `ask_coordinator`, for what any broker can answer."""
        attempts = self.attempts(what)
        while True:
            try:
                return read(self.ask(self._any_connection(), message, at_most=at_most))
            except ApiError as error:
                attempts.failed(error)

    def ask_first(self, message: Request) -> Any:
        """One attempt at what any broker can answer, with each broker that is known until one does."""
        failure: ApiError | None = None
        for address in self._addresses():
            try:
                answer = self.ask(self._connection_to(address), message)
            except ApiError as error:
                if error.code not in _NOBODY_THERE:
                    raise
                self._suspects.add(address)
                failure = error
            else:
                self._suspects.discard(address)
                return answer
        self._suspects.clear()
        assert failure is not None
        raise failure

    def ask_broker(self, node: int, what: str, message: Request, read: Callable[[Any], V]) -> V:
        """Like `ask_coordinator`, of the broker with this id; BROKER_NOT_AVAILABLE, at once, where there is none."""
        attempts = self.attempts(what)
        self.refresh([], attempts)
        while True:
            connection = self.connection(node)
            try:
                return read(self.ask(connection, message))
            except ApiError as error:
                attempts.failed(error)

    def broker_ids(self) -> list[int]:
        """The brokers of the cluster, as it says now."""
        self.refresh([], self.attempts("the brokers"))
        return sorted(self._brokers)

    def learn_brokers(self, brokers: Mapping[int, Address]) -> None:
        """Where the brokers are, as somebody else has learned it."""
        self._brokers = dict(brokers)

    def serves(self, *wanted: type[Request]) -> bool:
        """Whether the brokers know these requests, by what one of them says."""
        attempts = self.attempts("the brokers")
        while True:
            try:
                return {each.api_key for each in wanted} <= self._any_connection().offered.keys()
            except ApiError as error:
                attempts.failed(error)

    def newest_version(self, wanted: type[Request]) -> int:
        """The newest version of a request that both sides know, by what one broker says; one attempt.

        ApiError UNSUPPORTED_VERSION where there is none.
        """
        return versions.version_for(wanted, self._any_connection().offered)

    # For those that keep requests in flight, or try again, themselves.

    def coordinator(self, key: str, kind: CoordinatorKind = CoordinatorKind.GROUP) -> BlockingConnection:
        """The connection to a coordinator; one attempt to find it, when it is not known."""
        address = self._coordinators.get((kind, key))
        if address is None:
            message = FindCoordinatorRequest(key=key, key_type=kind)
            response = self.ask(self._any_connection(), message, at_most=_ONE_COORDINATOR_VERSION)
            raise_for(response.error_code, response.error_message)
            address = self._coordinators[kind, key] = (response.host, response.port)
        return self._connection_to(address)

    def forget_coordinator(self, key: str, kind: CoordinatorKind = CoordinatorKind.GROUP) -> None:
        """Whoever coordinates this is to be found anew: the one that is known failed."""
        self._coordinators.pop((kind, key), None)

    def learn_transaction_coordinators(self, transactional_ids: Iterable[str]) -> None:
        """One request for all coordinators that are not known yet, where the brokers take it; what fails stays so."""
        unknown = [each for each in transactional_ids if (CoordinatorKind.TRANSACTION, each) not in self._coordinators]
        if len(unknown) < 2:
            return
        connection = self._any_connection()
        if connection.offered[FindCoordinatorRequest.api_key].high <= _ONE_COORDINATOR_VERSION:
            return
        message = FindCoordinatorRequest(key_type=CoordinatorKind.TRANSACTION, coordinator_keys=unknown)
        for found in self.ask(connection, message).coordinators:
            if not found.error_code:
                self._coordinators[CoordinatorKind.TRANSACTION, found.key] = (found.host, found.port)

    def attempts(self, what: str) -> Attempts:
        """A fresh count of failures at `what`, under this client's settings."""
        return Attempts(what, self.settings, self._clock, self.pause)

    def pause(self, seconds: float) -> None:
        """Wait between two attempts."""
        threading.Event().wait(seconds)

    def leader(self, partition: TopicPartition) -> int:
        """The broker that leads `partition` as far as is known; ApiError (retriable) while none does."""
        return self._leadership(partition).leader

    def connection(self, node: int) -> BlockingConnection:
        """The connection to a broker by its id."""
        if node not in self._brokers:
            raise ApiError(ErrorCode.BROKER_NOT_AVAILABLE, f"broker {node} is not part of the cluster at the moment")
        return self._connection_to(self._brokers[node])

    def send(self, connection: BlockingConnection, message: Request, *, at_most: int | None = None) -> Pending:
        """Send at the newest version that both sides know and that names topics."""
        cap = requests.LAST_VERSION_BY_NAME.get(type(message)) if at_most is None else at_most
        return connection.send(message, versions.version_for(type(message), connection.offered, at_most=cap))

    def ask(
        self,
        connection: BlockingConnection,
        message: Request,
        *,
        at_most: int | None = None,
        timeout_ms: int | None = None,
    ) -> Any:
        """One attempt at a request of which only the answer matters."""
        return connection.receive(self.send(connection, message, at_most=at_most), timeout_ms=timeout_ms)

    def refresh(
        self, names: Collection[str] | None, attempts: Attempts, *, create: bool = False
    ) -> dict[str, TopicInfo]:
        """Learn again who leads these topics, or all; failures count as `attempts`."""
        message = requests.metadata(names, create=create)
        while True:
            address: Address | None = None
            try:
                connection = self._any_connection()
                address = (connection.host, connection.port)
                response: MetadataResponse = self.ask(connection, message)
                topics = requests.read_topics(response, all_topics=names is None)
            except ApiError as error:
                if address is not None:
                    self._suspects.add(address)
                attempts.failed(error)
                continue
            self._suspects.discard(address)
            self._brokers = {each.node_id: (each.host, each.port) for each in response.brokers}
            for name in list(self._topics) if names is None else names:
                if name not in topics:
                    self._topics.pop(name, None)
            self._topics.update(topics)
            return topics

    def known_topics(self, names: Iterable[str]) -> dict[str, TopicInfo]:
        """These topics as they were last learned; the others are absent."""
        return {name: self._topics[name] for name in names if name in self._topics}

    def learn(self, partitions: Iterable[TopicPartition], attempts: Attempts) -> None:
        """One request for all topics that are not known yet, instead of one for each."""
        unknown = {partition.topic for partition in partitions} - self._topics.keys()
        if unknown:
            self.refresh(unknown, attempts)

    # Inside.

    def _connection_to(self, address: Address) -> BlockingConnection:
        connection = self._connections.get(address)
        if connection is None:
            if self._ssl is None:
                self._ssl = context_for(self.settings.security)
            connection = self._connections[address] = BlockingConnection(
                *address,
                client_id=self.settings.client_id,
                timeout_ms=self.settings.request_timeout_ms,
                connect_timeout_ms=self.settings.connect_timeout_ms,
                ssl=self._ssl,
                sasl=self._sasl,
            )
        return connection

    def _addresses(self) -> list[Address]:
        """Whom to ask what any broker can tell: those we are connected to, then the cluster, then where we began."""
        connected = [address for address, connection in self._connections.items() if connection.is_connected]
        known = dict.fromkeys([*connected, *self._brokers.values(), *self.settings.bootstrap_servers])
        return sorted(known, key=self._suspects.__contains__)

    def _any_connection(self) -> BlockingConnection:
        """A connection to some broker that answers."""
        failure: ApiError | None = None
        for address in self._addresses():
            connection = self._connection_to(address)
            try:
                _ = connection.offered
            except ApiError as error:
                if not is_retriable(error.code):
                    raise
                self._suspects.add(address)
                failure = error
            else:
                return connection
        self._suspects.clear()
        assert failure is not None
        raise failure

    def _leadership(self, partition: TopicPartition) -> PartitionInfo:
        topic = self._topics.get(partition.topic)
        if topic is None:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic '{partition.topic}'")
        info = topic.partitions.get(partition.partition)
        if info is None:
            raise ApiError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"topic '{partition.topic}' has {len(topic.partitions)} partitions, and no {partition.partition}",
            )
        if info.leader == NO_BROKER:
            raise ApiError(ErrorCode.LEADER_NOT_AVAILABLE, f"{partition} has no leader")
        return info

    def _where_to_read(self, partition: TopicPartition) -> tuple[int, PartitionInfo]:
        leadership = self._leadership(partition)
        advised = self._read_replicas.get(partition)
        if advised is None:
            return leadership.leader, leadership
        node, until = advised
        if self._clock.monotonic() >= until or node not in self._brokers:
            del self._read_replicas[partition]
            return leadership.leader, leadership
        return node, leadership

    def _outcomes(
        self,
        connection: BlockingConnection,
        pending: Pending,
        part: Mapping[TopicPartition, T],
        read: Callable[[Any], Iterable[Outcome[V]]],
        unanswered: V | None,
    ) -> dict[TopicPartition, Outcome[V]]:
        if unanswered is not None and not versions.is_answered(pending.request):
            return {partition: Outcome(partition, unanswered, None) for partition in part}
        return requests.answered(part, read(connection.receive(pending)))

    def _by_leader(
        self, wanted: Mapping[TopicPartition, T], errors: dict[TopicPartition, ApiError]
    ) -> dict[int, dict[TopicPartition, T]]:
        leaders: dict[int, dict[TopicPartition, T]] = {}
        for partition, value in wanted.items():
            try:
                leaders.setdefault(self.leader(partition), {})[partition] = value
            except ApiError as error:
                errors[partition] = error
        return leaders

    def _offsets_of(
        self,
        group_id: str,
        message: Request,
        partitions: Collection[TopicPartition],
        read: Callable[[Any], Iterator[Outcome[V]]],
    ) -> dict[TopicPartition, V]:
        def values(response: Any) -> dict[TopicPartition, V]:
            outcomes = requests.answered(partitions, read(response))
            for outcome in outcomes.values():
                if outcome.error is not None:
                    raise outcome.error
            return {partition: outcome.value for partition, outcome in outcomes.items()}

        return self.ask_coordinator(group_id, f"offsets of group '{group_id}'", message, values)


def _worst(errors: Mapping[TopicPartition, ApiError]) -> tuple[TopicPartition, ApiError]:
    """The failure to tell: one that will not pass, if there is one."""
    return next(
        ((partition, error) for partition, error in errors.items() if not is_retriable(error.code)),
        next(iter(errors.items())),
    )


def raise_for(code: int, message: str | None = None) -> None:
    """ApiError where a response says so."""
    if code:
        raise ApiError(versions.known_code(code), message or "")
