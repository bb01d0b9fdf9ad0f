"""What a handler is given: the request's header, who asked, and the broker's services. No logic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from millrace.clock import Clock
    from millrace.cluster.controller import Controller
    from millrace.cluster.image import ClusterImage
    from millrace.cluster.peers import Peers
    from millrace.cluster.presence import Presence
    from millrace.config import BrokerConfig
    from millrace.errors import ErrorCode
    from millrace.groups.coordinator import GroupCoordinator
    from millrace.handlers.fetch_sessions import FetchSessions
    from millrace.queues.coordinator import ShareCoordinator
    from millrace.queues.partitions import SharePartitions
    from millrace.queues.persister import Persister
    from millrace.replication.replicas import Replicas
    from millrace.storage.logdirs import LogDirs
    from millrace.transactions.coordinator import TransactionCoordinator
    from millrace.transactions.producer_ids import ProducerIds
    from millrace.wire.frame import RequestHeader

RACK_AWARE_SELECTOR: Final = "RackAwareReplicaSelector"
"""The last part of the only `replica.selector.class` that Kafka brings along, besides its default, the leader."""


@dataclass(slots=True)
class Services:
    """The parts of a running broker that handlers may use; joined in `millrace.broker`."""

    config: BrokerConfig
    clock: Clock
    broker_id: int
    controller: Controller
    replicas: Replicas
    groups: GroupCoordinator
    share_state: ShareCoordinator
    transactions: TransactionCoordinator
    transaction_gate: TransactionGate
    """Who knows which transactions are under way."""
    queues: SharePartitions
    persister: Persister
    peers: Peers
    log_dirs: LogDirs
    fetch_sessions: FetchSessions
    producer_ids: ProducerIds
    presence: Presence
    advertised: Callable[[str], tuple[str, int]]
    """The host and port that a client of the named listener is told to use."""
    produce_lines: dict[Peer | None, asyncio.Future[None]] = field(default_factory=dict)
    """Of each connection whose Produce waits for the gate, what is done when the last of them is (`produce`)."""

    @property
    def image(self) -> ClusterImage:
        return self.controller.image

    @property
    def is_rack_aware(self) -> bool:
        """Whether consumers are sent to in-sync followers in their own rack."""
        return str(self.config.get("replica.selector.class") or "").endswith(RACK_AWARE_SELECTOR)

    @property
    def fetch_max_bytes(self) -> int:
        return self.config.get_int("fetch.max.bytes")

    @property
    def cluster_id(self) -> str:
        return self.controller.image.cluster_id


class TransactionGate(Protocol):
    """The transaction coordinators, on this broker or another, as the leader of a partition asks them (KIP-890)."""

    def adds_at_once(
        self, transactional_id: str, producer_id: int, producer_epoch: int, partitions: list[tuple[str, int]]
    ) -> bool:
        """Whether the partitions are part of the producer's transaction now; False: `admit` has to be asked."""

    async def admit(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: list[tuple[str, int]],
        *,
        add: bool,
    ) -> dict[tuple[str, int], ErrorCode]:
        """Whether the producer's transaction has these partitions, or with `add` have it get them.

        An error per partition (one that is not named has none), or `ApiError` for all of them.
        """


class Peer(Protocol):
    """The connection on which a request came."""

    @property
    def on_lost(self) -> dict[object, Callable[[], None]]:
        """What is called when the connection is gone; whoever adds something takes it away again."""

    def answer_room(self, context: RequestContext) -> int:
        """How many bytes of records the answer may have if it is made now, beyond its first batch; 0: wait."""

    def when_room(self, context: RequestContext, wake: Callable[[], None]) -> None:
        """Have `wake` called once, when it is worth asking for room again."""

    def forget_room(self, wake: Callable[[], None]) -> None:
        """Do not call `wake` any more; harmless when it has been."""

    def reserve(self, size_bytes: int) -> None:
        """Count so much until the request is answered; see `RequestContext.reserve`."""


@dataclass(slots=True)
class RequestContext:
    """One request as its handler sees it."""

    broker: Services
    header: RequestHeader
    version: int
    client_host: str
    listener: str
    peer: Peer | None = None
    principal: str = "User:ANONYMOUS"
    reserved_bytes: int = 0
    """Of the answer, counted before it is handed over; then it counts itself."""

    def reserve(self, size_bytes: int) -> None:
        """Have records counted that a handler has read and goes on to wait with."""
        if self.peer is not None:
            self.reserved_bytes += size_bytes
            self.peer.reserve(size_bytes)
