"""What a handler is given: the request's header, who asked and what they may, and the broker's services."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from millrace.errors import ApiError, ErrorCode
from millrace.handlers.counting import RequestCounts
from millrace.handlers.needs import CODES, NOTHING, Needs
from millrace.security.acls import CLUSTER_NAME, OPERATIONS_OF, Operation, ResourceKind
from millrace.security.authorizer import NO_AUTHORIZER, Authorizer
from millrace.security.metering import ClientQuotas, Meter
from millrace.security.sessions import ANONYMOUS, Session

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Coroutine

    from millrace.clock import Clock
    from millrace.cluster.controller import Controller
    from millrace.cluster.image import ClusterImage
    from millrace.cluster.peers import Peers
    from millrace.cluster.presence import Presence
    from millrace.config import BrokerConfig
    from millrace.groups.coordinator import GroupCoordinator
    from millrace.handlers.fetch_sessions import FetchSessions
    from millrace.queues.coordinator import ShareCoordinator
    from millrace.queues.partitions import SharePartitions
    from millrace.queues.persister import Persister
    from millrace.replication.replicas import Replicas
    from millrace.security.audit import Audit, Notes
    from millrace.security.tokens import TokenPasswords
    from millrace.storage.logdirs import LogDirs
    from millrace.telemetry.manager import ClientTelemetry
    from millrace.transactions.coordinator import TransactionCoordinator
    from millrace.transactions.producer_ids import ProducerIds
    from millrace.wire.frame import RequestHeader
    from millrace.wire.messages.sasl import SaslAuthenticateResponse, SaslHandshakeResponse

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
    tokens: TokenPasswords
    authorizer: Authorizer = NO_AUTHORIZER
    quotas: ClientQuotas = field(default_factory=ClientQuotas)
    audit: Audit | None = None
    """Where logins and decisions on rights are written down, if they are."""
    telemetry: ClientTelemetry | None = None
    """Where metrics go that clients push, if they may."""
    counts: RequestCounts = field(default_factory=RequestCounts)
    """What is counted of requests."""
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


class Login(Protocol):
    """The login of a connection, as the two requests for it ask: how far it is decides what they mean."""

    def handshake(
        self, mechanism: str, version: int
    ) -> SaslHandshakeResponse | Coroutine[Any, Any, SaslHandshakeResponse]:
        """Begin a login by `mechanism`."""

    def authenticate(self, message: bytes) -> SaslAuthenticateResponse | Coroutine[Any, Any, SaslAuthenticateResponse]:
        """Take a message of the login that has begun."""


class Peer(Protocol):
    """The connection on which a request came."""

    port: int
    """Of the client's end; 0 where there is none."""
    software: tuple[str, str] | None
    """Name and version of the client's, if it has said so (KIP-511)."""

    @property
    def login(self) -> Login | None:
        """None on a listener without SASL."""

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
    session: Session = ANONYMOUS
    """Who asks."""
    needs: Needs = NOTHING
    """What the API has declared; nothing else can be asked for."""
    is_judged: bool = False
    """Whether a right was asked for: an answer of an API that judges does not leave before."""
    is_forwarded: bool = False
    """Whether another broker passed it on for `session`: it is for the controller, and goes no further."""
    meter: Meter | None = None
    """What the request uses of a quota, if whoever asks has one."""
    notes: Notes | None = None
    """For the audit log, if there is one."""
    reserved_bytes: int = 0
    """Of the answer, counted before it is handed over; then it counts itself."""

    def reserve(self, size_bytes: int) -> None:
        """Have records counted that a handler has read and goes on to wait with."""
        if self.peer is not None:
            self.reserved_bytes += size_bytes
            self.peer.reserve(size_bytes)

    def note_error(self, code: int) -> None:
        """Have an error counted that is in the answer of Produce or Fetch; those of others are found in theirs."""
        self.broker.counts[self.header.api_key].failed(code)

    def check_broker_listener(self) -> None:
        """Clients have no business here: where brokers have a listener of their own, only it is open to this."""
        if self.listener != self.broker.config.inter_broker_listener:
            raise ApiError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "this is for brokers, on the listener of brokers")

    def rights(self, operation: Operation, kind: ResourceKind) -> Rights:
        """What tells of each resource of a kind whether whoever asks may; `anything` where nobody is refused."""
        self._ask(operation, kind)
        authorizer, notes = self.broker.authorizer, self.notes
        if not authorizer.enabled:
            return partial(notes.noted, anything, operation, kind) if notes and notes.wants_allowed else anything
        may = authorizer.rights(self.session, self.client_host, operation, kind)
        return may if notes is None else partial(notes.noted, may, operation, kind)

    def may(self, operation: Operation, kind: ResourceKind, name: str = CLUSTER_NAME) -> bool:
        """Whether whoever asks may do this."""
        self._ask(operation, kind)
        return self._noted(operation, kind, name)

    def may_any(self, operation: Operation, kind: ResourceKind) -> bool:
        """Whether there is a resource of this kind on which whoever asks may."""
        self._ask(operation, kind)
        allowed = self.broker.authorizer.may_any(self.session, self.client_host, operation, kind)
        if self.notes is not None:
            self.notes.note(operation, kind, "", allowed=allowed)
        return allowed

    def demand(self, operation: Operation, kind: ResourceKind, name: str = CLUSTER_NAME) -> None:
        """`may`, or ApiError with the code for what was refused."""
        if not self.may(operation, kind, name):
            raise self.refusal(operation, kind, name)

    def refusal(self, operation: Operation, kind: ResourceKind, name: str = CLUSTER_NAME) -> ApiError:
        """What somebody is told who may not."""
        return ApiError(CODES[kind], f"{self.session.principal} may not {operation.name} {_named(kind, name)}")

    def whole_refusal(self) -> ApiError | None:
        """Why the request is refused as a whole, before its handler sees it; None where it is not."""
        operation = self.needs.whole
        if operation is None or self._noted(operation, ResourceKind.CLUSTER, CLUSTER_NAME):
            return None
        return self.refusal(operation, ResourceKind.CLUSTER)

    def allowed_operations(self, kind: ResourceKind, name: str = CLUSTER_NAME) -> int:
        """Everything that whoever asks may do with a resource, a bit each, numbered as in ACLs (KIP-430)."""
        may = self.broker.authorizer.may
        return sum(
            1 << operation
            for operation in OPERATIONS_OF[kind]
            if may(self.session, self.client_host, operation, kind, name)
        )

    def _noted(self, operation: Operation, kind: ResourceKind, name: str) -> bool:
        allowed = self.broker.authorizer.may(self.session, self.client_host, operation, kind, name)
        if self.notes is not None:
            self.notes.note(operation, kind, name, allowed=allowed)
        return allowed

    def _ask(self, operation: Operation, kind: ResourceKind) -> None:
        if (operation, kind) not in self.needs.judged:
            raise RuntimeError(f"{operation.name} on {kind.name} was asked for and is not declared: {self.needs}")
        self.is_judged = True


Rights = Callable[[str], bool]
"""Whether somebody may do one thing with the resource of that name."""


def anything(name: str) -> bool:  # noqa: ARG001 - one of `Rights`
    """Without rules everybody may."""
    return True


def _named(kind: ResourceKind, name: str) -> str:
    return "the cluster" if kind is ResourceKind.CLUSTER else f"{kind.name.lower().replace('_', ' ')} {name!r}"
