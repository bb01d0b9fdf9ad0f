"""The door to the control plane: every broker has one, and the one that is elected also writes.

It joins the view of the metadata log (`view`), the writer (`writer`), this broker's place in the cluster
(`membership`), the way to the controller (`channel`), the watch over the others (`liveness`) and the elections for
which replicas are asked (`recovery`). What other parts may ask is here; what it means is in `planning`, `elections` and
`reassignments`.

Calls that change the cluster come in two kinds. Those that a client asks for work on the controller only, and answer
NOT_CONTROLLER elsewhere: the API layer forwards the client's request as it is. Those that a broker itself needs
(`propose_isr`, `next_producer_id_block`, `ensure_topics`, `leave`) work everywhere: they go to the controller and
return when this broker's own image has what came of them.

Owner: the event loop. `load` comes first (the image as it was), then `start` (announce this broker, be in the image).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from millrace.clock import Clock, SystemClock
from millrace.cluster import planning
from millrace.cluster.channel import (
    RETRIABLE,
    ControllerChannel,
    Unsent,
    persist,
    within,
)
from millrace.cluster.dialer import Dialer
from millrace.cluster.elections import (
    ElectionKind,
    IsrOutcome,
    IsrProposal,
    Placement,
    plan_brokers,
    plan_by_settings,
    plan_directories,
    plan_elections,
    plan_isr,
    plan_placements,
    plan_rebalance,
    topic_rules,
)
from millrace.cluster.image import ClusterImage, TopicImage
from millrace.cluster.internal_topics import plan_growth
from millrace.cluster.lease import Lease
from millrace.cluster.liveness import Liveness
from millrace.cluster.membership import ClusterMember
from millrace.cluster.planning import ConfigAlteration, MorePartitions, NewTopic, Plan, TopicOutcome, TopicRef
from millrace.cluster.reassignments import Reassignment, completed, plan_reassignments
from millrace.cluster.recovery import Recovery
from millrace.cluster.survey import AskLogEnds, Questions, nobody_to_ask
from millrace.cluster.tokens import plan_remove_expired
from millrace.cluster.view import ImageListener, MetadataView
from millrace.cluster.writer import MetadataWriter, not_controller
from millrace.config import BrokerConfig
from millrace.errors import ApiError, ErrorCode, StorageError
from millrace.metadata.deltas import (
    NO_DIRECTORIES,
    BrokerUnregistered,
    ChangeSet,
    Directories,
    Endpoint,
    ResourceType,
)
from millrace.metadata.store import BrokerRegistration, MetadataStore
from millrace.model import NO_BROKER, ZERO_UUID, TopicPartition, decode_uuid
from millrace.tasks import Tasks
from millrace.wire.messages.brokers import (
    AllocateProducerIdsRequest,
    AssignReplicasToDirsRequest,
    BrokerHeartbeatRequest,
)
from millrace.wire.messages.partitions import AlterPartitionRequest
from millrace.wire.messages.topics import CreateTopicsRequest
from millrace.wire.schema import Request

__all__ = [
    "Controller",
    "ElectionKind",
    "HeartbeatAnswer",
    "IsrOutcome",
    "IsrProposal",
    "Reassignment",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

DELTAS_PER_SNAPSHOT: Final = 1000
LEAVE_TIMEOUT_S: Final = 5.0
GROW_INTERVAL_S = 5.0
"""How often internal topics are looked at that lack replicas."""
ALTER_PARTITION_VERSION: Final = 3
ALLOCATE_PRODUCER_IDS_VERSION: Final = 0
HEARTBEAT_VERSION: Final = 1
DIRECTORIES_VERSION: Final = 2
ASSIGN_REPLICAS_VERSION: Final = 0
CREATE_TOPICS_VERSION: Final = 7


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """What a BrokerHeartbeat is answered."""

    error: ErrorCode
    is_fenced: bool = False
    should_shut_down: bool = False


class Controller:
    """One broker's part in the control plane."""

    def __init__(
        self,
        store: MetadataStore,
        config: BrokerConfig,
        *,
        clock: Clock | None = None,
        dialer: Dialer | None = None,
        deltas_per_snapshot: int = DELTAS_PER_SNAPSHOT,
        liveness: bool | None = None,
    ) -> None:
        """`liveness` says whether the brokers watch each other: by default if they share a ZooKeeper.

        The session of a broker in the same process ends with it, and nobody has to look.
        """
        self.broker_id = config.broker_id
        self._store = store
        self._config = config
        self._clock = clock or SystemClock()
        self._view = MetadataView(store, self._clock)
        self._writer = MetadataWriter(store, self._view, deltas_per_snapshot=deltas_per_snapshot)
        self._member = ClusterMember(store, self._view, self._writer, config, self._clock)
        dialer = dialer or Dialer(config, self._clock)
        self._channel = ControllerChannel(self._view, dialer, self._clock)
        # Clients' requests may take long, and a connection is answered in order: ISR changes do not wait behind them.
        self._forwarding = ControllerChannel(self._view, dialer, self._clock)
        self.on_fatal: Callable[[str], object] = lambda _reason: None
        """Called when this broker can take no further part and should stop: the reason, in words."""
        self._member.on_displaced = lambda: self.on_fatal(f"another process runs as broker {self.broker_id}")
        watched = config.get("zookeeper.connect") is not None if liveness is None else liveness
        self._liveness: Liveness | None = None
        self._lease: Lease | None = None
        if watched:
            self._liveness = Liveness(self._view, self._writer, self._member, config, dialer, self._clock)
            session_s = config.session_timeout_ms / 1000
            self._lease = Lease(store, self._view, self._member, session_s=session_s, clock=self._clock)
        self._recovery = Recovery(self._view, self._writer, config, self._clock)
        self._ask_log_ends: AskLogEnds = nobody_to_ask
        self._tasks = Tasks(self._clock)
        self._dynamic_settings: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
        self._view.on_image(self._image_changed)

    def __repr__(self) -> str:
        role = f"controller, epoch {self._writer.epoch}" if self.is_controller else "follower"
        return f"Controller(broker {self.broker_id}, {role}, {self.image!r})"

    @property
    def image(self) -> ClusterImage:
        return self._view.image

    @property
    def broker_epoch(self) -> int:
        """The number of this incarnation; it changes when the session with the store had to be renewed."""
        return self._member.broker_epoch

    @property
    def is_controller(self) -> bool:
        return self._writer.is_open

    @property
    def is_connected(self) -> bool:
        """Whether the metadata store, ZooKeeper perhaps, answers this broker."""
        return self._member.is_connected

    @property
    def is_registered(self) -> bool:
        """Whether this broker is live in its own image, in the incarnation that it is."""
        return self._has_this_broker(self.image)

    @property
    def holds_lease(self) -> bool:
        """Whether this broker cannot have been replaced without hearing of it; see `lease`."""
        return self._lease is None or self._lease.is_held

    # --- life ---------------------------------------------------------------------------------------------------------

    async def load(self) -> ClusterImage:
        """Open the store and fold what is in it; listeners see only what comes later."""
        await self._store.open()
        image = await self._view.load()
        self._take_dynamic_settings()
        return image

    async def start(
        self,
        endpoints: Sequence[Endpoint],
        *,
        directories: Callable[[], Directories] = lambda: NO_DIRECTORIES,
        boot_id: str = "",
        clean_epoch: int = -1,
    ) -> None:
        """Announce this broker with the addresses it listens on, and be live in its own image.

        `directories` are its log directories at any time; `clean_epoch` is the incarnation after which it was stopped
        cleanly. Cancelled half-way, call `stop`.
        """

        def describe(last_epoch: int) -> BrokerRegistration:
            # An incarnation that goes on under another epoch has lost nothing.
            lasting = clean_epoch if last_epoch < 0 else last_epoch
            return BrokerRegistration(
                self.broker_id, tuple(endpoints), self._config.rack, directories(), boot_id, lasting
            )

        self._tasks.keep("metadata-follow", self._follow, fatal=self._end_for_good)
        self._tasks.keep("metadata-write", self._writer.run)
        await self._member.join(describe)
        self._tasks.keep("membership", self._member.run)
        self._tasks.keep("leader-rebalance", self._keep_leaders_even)
        self._tasks.keep("internal-topics", self._grow_internal_topics)
        self._tasks.keep("expired-tokens", self._remove_expired_tokens)
        if self._liveness is not None:
            self._tasks.keep("liveness", self._liveness.run)
        if self._lease is not None:
            self._tasks.keep("lease", self._lease.run)
        await self._view.wait_for(self._has_this_broker)

    def recover_with(self, ask: AskLogEnds) -> None:
        """Give leaders to partitions without one from now on, by what `ask` tells of their replicas (`recovery`)."""
        self._ask_log_ends = ask
        self._tasks.keep("recovery", lambda: self._recovery.run(ask))

    def _has_this_broker(self, image: ClusterImage) -> bool:
        broker = image.brokers.get(self.broker_id)
        return broker is not None and broker.broker_epoch == self.broker_epoch and not broker.fenced

    async def stop(self) -> None:
        """End the tasks and the session; whoever still waits for a change gets NOT_CONTROLLER."""
        await self._tasks.stop()
        await self._member.stop()
        self._writer.end()
        self._view.fail(not_controller())
        await self._channel.close()
        await self._forwarding.close()
        await self._store.close()

    def _end_for_good(self, reason: str) -> None:
        self.on_fatal(reason)  # looked up now: it may be set after the start

    async def _follow(self) -> None:
        await self._view.follow()
        self._writer.end("the metadata log cannot be followed")
        failure = self._view.failure
        raise StorageError("the metadata log has ended" if failure is None else failure.message)

    async def _keep_leaders_even(self) -> None:
        """As controller, give leadership back to preferred leaders from time to time."""
        while True:
            await self._clock.sleep(self._config.get_int("leader.imbalance.check.interval.seconds"))
            if not self.is_controller or not self._config.get_bool("auto.leader.rebalance.enable"):
                continue
            try:
                moved = await self.rebalance_leaders()
            except ApiError as error:
                logger.warning("leadership could not be given back: %s", error)
            else:
                if moved:
                    logger.info("%d preferred leaders lead again", moved)

    async def _grow_internal_topics(self) -> None:
        """As controller, give internal topics the replicas that they could not have when they were made."""
        while True:
            await self._clock.sleep(GROW_INTERVAL_S)
            if not self.is_controller or not plan_growth(self.image, self._config).changes:
                continue
            try:
                grown = await self.change(lambda image: plan_growth(image, self._config))
            except ApiError as error:
                logger.warning("internal topics could not grow: %s", error)
            else:
                if grown:
                    logger.info("%d partitions of internal topics get more replicas", grown)

    async def _remove_expired_tokens(self) -> None:
        """As controller, forget delegation tokens that are over."""
        while True:
            await self._clock.sleep(self._config.get_int("delegation.token.expiry.check.interval.ms") / 1000)
            now_ms = self._clock.wall_ms()
            while self.is_controller and plan_remove_expired(self.image, now_ms).changes:
                try:
                    removed = await self.change(lambda image: plan_remove_expired(image, now_ms))  # noqa: B023
                except ApiError as error:
                    logger.warning("expired delegation tokens could not be removed: %s", error)
                    break
                logger.info("%d delegation tokens have expired", removed)

    # --- following ----------------------------------------------------------------------------------------------------

    def on_image(self, listener: ImageListener) -> Callable[[], None]:
        """Call `listener(old, new, changes)` for every delta from now on; returns what ends that."""
        return self._view.on_image(listener)

    async def wait_for_image(self, predicate: Callable[[ClusterImage], bool], timeout_s: float) -> None:
        """Return once `predicate(image)` holds; ApiError REQUEST_TIMED_OUT."""
        await self._view.wait_for(predicate, timeout_s)

    def _image_changed(self, old: ClusterImage, new: ClusterImage, _changes: ChangeSet) -> None:
        if old.configs is not new.configs:
            self._take_dynamic_settings()

    def _take_dynamic_settings(self) -> None:
        kind = ResourceType.BROKER
        layers = (self.image.config(kind, ""), self.image.config(kind, str(self.broker_id)))
        if layers != self._dynamic_settings:
            self._dynamic_settings = layers
            self._config.apply_dynamic(*layers)

    # --- on the controller: what clients ask for ----------------------------------------------------------------------

    async def change(self, plan: Callable[[ClusterImage], Plan[T]]) -> T:
        """Plan against the newest image, write what comes out, and return the results once the image has it.

        Cancelled, the change may still happen. ApiError NOT_CONTROLLER where this broker may not write.
        """
        return await self._writer.change(plan)

    async def create_topics(self, topics: Sequence[NewTopic], *, validate_only: bool = False) -> list[TopicOutcome]:
        """Create topics, or say what would happen; one outcome each, in order."""
        return await self._do(lambda image: planning.plan_create_topics(image, topics, self._config), validate_only)

    async def delete_topics(self, topics: Sequence[TopicRef]) -> list[TopicOutcome]:
        """Delete topics by name or id; one outcome each, in order."""
        return await self.change(lambda image: planning.plan_delete_topics(image, topics))

    async def create_partitions(
        self, topics: Sequence[MorePartitions], *, validate_only: bool = False
    ) -> list[TopicOutcome]:
        """Add partitions; one outcome each, in order."""
        return await self._do(lambda image: planning.plan_create_partitions(image, topics), validate_only)

    async def alter_configs(
        self, alterations: Sequence[ConfigAlteration], *, validate_only: bool = False
    ) -> list[ApiError | None]:
        """Change settings, step by step or all at once (`replace_all`); an error or None each, in order."""
        results = await self._do(
            lambda image: planning.plan_alter_configs(image, alterations, self._config), validate_only
        )
        if not validate_only and any(_has_consequences(alteration) for alteration in alterations):
            await self.change(lambda image: plan_by_settings(image, topic_rules(image, self._config)))
        return results

    async def elect_leaders(
        self, kind: ElectionKind, partitions: Sequence[TopicPartition] | None
    ) -> list[tuple[TopicPartition, ApiError | None]]:
        """Elect preferred or unclean leaders, of all partitions that need it if None is given; see `elections`.

        For an unclean election the replicas are asked first what they have.
        """
        if not self.is_controller:
            raise not_controller()
        questions = _without_leader(self.image, partitions) if kind is ElectionKind.UNCLEAN else {}
        survey = await self._ask_log_ends(questions)
        return await self.change(
            lambda image: plan_elections(
                image, kind, partitions, survey.ends_in(image), rules_of=topic_rules(image, self._config)
            )
        )

    async def alter_reassignments(
        self, items: Sequence[Reassignment], *, allow_replication_factor_change: bool = True
    ) -> list[ApiError | None]:
        """Begin or take back moves of replicas; an error or None each, in order."""
        return await self.change(
            lambda image: plan_reassignments(
                image,
                items,
                allow_replication_factor_change=allow_replication_factor_change,
                rules_of=topic_rules(image, self._config),
            )
        )

    async def unregister_broker(self, broker_id: int) -> None:
        """Forget a broker that is gone for good; ApiError for one that is not known or that is alive."""

        def plan(image: ClusterImage) -> Plan[None]:
            if broker_id not in image.brokers:
                raise ApiError(ErrorCode.BROKER_ID_NOT_REGISTERED, f"there is no broker {broker_id}")
            if image.is_live(broker_id) or self._is_registered(broker_id):
                text = f"broker {broker_id} is alive: stop it first"
                raise ApiError(ErrorCode.INVALID_REQUEST, text)
            return Plan(None, (BrokerUnregistered(broker_id),))

        await self.change(plan)

    def _is_registered(self, broker_id: int) -> bool:
        membership = self._member.membership
        return membership is not None and any(m.registration.broker_id == broker_id for m in membership.members)

    async def rebalance_leaders(self) -> int:
        """Give leadership back to every preferred leader that can take it; returns how many did."""
        return await self.change(plan_rebalance)

    async def _do(self, plan: Callable[[ClusterImage], Plan[T]], validate_only: bool) -> T:
        if validate_only:
            if not self.is_controller:
                raise not_controller()
            return plan(self.image).results
        return await self.change(plan)

    # --- on the controller: what other brokers ask for ----------------------------------------------------------------

    async def alter_partition(
        self, broker_id: int, broker_epoch: int, proposals: Sequence[IsrProposal]
    ) -> list[IsrOutcome]:
        """Judge ISR proposals of a leader; one outcome each, in order. ApiError STALE_BROKER_EPOCH, NOT_CONTROLLER."""

        def plan(image: ClusterImage) -> Plan[list[IsrOutcome]]:
            _check_epoch(image, broker_id, broker_epoch)
            return plan_isr(image, broker_id, proposals, complete=completed, rules_of=topic_rules(image, self._config))

        return await self.change(plan)

    async def take_directories(self, broker_id: int, broker_epoch: int, directories: Directories) -> None:
        """A broker's directories are these now; the elections that follow have happened when this returns.

        ApiError STALE_BROKER_EPOCH, NOT_CONTROLLER.
        """

        def plan(image: ClusterImage) -> Plan[None]:
            _check_epoch(image, broker_id, broker_epoch)
            return plan_directories(image, broker_id, directories, rules_of=topic_rules(image, self._config))

        await self.change(plan)

    async def take_placements(
        self, broker_id: int, broker_epoch: int, placements: Sequence[Placement]
    ) -> list[ErrorCode]:
        """A broker's replicas lie there now; a code each, in order. ApiError STALE_BROKER_EPOCH, NOT_CONTROLLER."""

        def plan(image: ClusterImage) -> Plan[list[ErrorCode]]:
            _check_epoch(image, broker_id, broker_epoch)
            return plan_placements(image, broker_id, placements, rules_of=topic_rules(image, self._config))

        return await self.change(plan)

    async def allocate_producer_ids(self, broker_id: int, broker_epoch: int) -> range:
        """A block of producer ids for a broker. ApiError STALE_BROKER_EPOCH, NOT_CONTROLLER."""

        def plan(image: ClusterImage) -> Plan[range]:
            _check_epoch(image, broker_id, broker_epoch)
            return planning.plan_producer_ids(image, broker_id)

        return await self.change(plan)

    async def heartbeat(
        self,
        broker_id: int,
        broker_epoch: int,
        *,
        caller: int | None = None,
        want_fence: bool = False,
        want_shut_down: bool = False,
    ) -> HeartbeatAnswer:
        """Answer a BrokerHeartbeat of the broker `caller`, which means one of three things.

        With `want_shut_down` the broker asks the controller to be fenced: its leaderships have moved when the answer
        comes. ApiError STALE_BROKER_EPOCH, NOT_CONTROLLER. With `want_fence` the sender is refused by the broker that
        it names, and would have it fenced: the answer is whether it refuses this one, too. Without, it is a probe: the
        sender says whom it believes to talk to, and the answer is whether this is that incarnation and means to stay.
        """
        if self._liveness is not None and caller is not None:
            self._liveness.called(caller)
        if want_shut_down:
            await self._fence(broker_id, broker_epoch)
            return HeartbeatAnswer(ErrorCode.NONE, is_fenced=True, should_shut_down=True)
        if want_fence:
            return await self._testify(broker_id, broker_epoch)
        if (broker_id, broker_epoch) != (self.broker_id, self.broker_epoch):
            return HeartbeatAnswer(ErrorCode.STALE_BROKER_EPOCH)
        if self._member.leaving:
            return HeartbeatAnswer(ErrorCode.BROKER_NOT_AVAILABLE)
        return HeartbeatAnswer(ErrorCode.NONE, is_fenced=not self.image.is_live(broker_id))

    async def _testify(self, broker_id: int, broker_epoch: int) -> HeartbeatAnswer:
        refused = await self._liveness.is_refused_by(broker_id, broker_epoch) if self._liveness is not None else None
        if refused is None:
            return HeartbeatAnswer(ErrorCode.BROKER_NOT_AVAILABLE)
        return HeartbeatAnswer(ErrorCode.NONE, is_fenced=refused)

    async def _fence(self, broker_id: int, broker_epoch: int) -> None:
        def plan(image: ClusterImage) -> Plan[None]:
            _check_epoch(image, broker_id, broker_epoch)
            return plan_brokers(image, fence={broker_id: broker_epoch}, rules_of=topic_rules(image, self._config))

        await self.change(plan)

    # --- on every broker: what it needs itself ------------------------------------------------------------------------

    async def propose_isr(self, proposals: Sequence[IsrProposal]) -> list[ErrorCode]:
        """Ask the controller for new ISRs; a code each, in order, once this broker's image has what was accepted.

        NEW_LEADER_ELECTED means accepted, and that another broker leads now. ApiError when the controller cannot be
        reached for the time being. Cancelled or failed, the proposals may still be accepted: the image will tell.
        """
        outcomes = await persist(lambda left_s: self._propose(proposals, left_s), clock=self._clock)
        return [outcome.error for outcome in outcomes]

    async def _propose(self, proposals: Sequence[IsrProposal], left_s: float) -> list[IsrOutcome]:
        if self.is_controller:
            judged = self.alter_partition(self.broker_id, self.broker_epoch, proposals)
            return await within(self._clock, judged, left_s)
        deadline_s = self._clock.monotonic() + left_s
        request = _alter_partition_request(self.broker_id, self.broker_epoch, proposals)
        response = await self._channel.request(request, ALTER_PARTITION_VERSION, left_s)
        _raise_for(response.error_code)
        answers = {
            (topic.topic_id, partition.partition_index): partition
            for topic in response.topics
            for partition in topic.partitions
        }
        outcomes = []
        for proposal in proposals:
            answer = answers.get((proposal.topic_id, proposal.index))
            if answer is None:
                outcomes.append(IsrOutcome(ErrorCode.UNKNOWN_SERVER_ERROR))
                continue
            code = ErrorCode(answer.error_code)
            outcomes.append(IsrOutcome(code))
            if code in {ErrorCode.NONE, ErrorCode.NEW_LEADER_ELECTED}:
                # An accepted proposal that changed nothing has left the epoch where it was.
                epoch = max(answer.partition_epoch, proposal.partition_epoch + (code is not ErrorCode.NONE))
                left_s = max(deadline_s - self._clock.monotonic(), 0.001)
                await self._view.wait_for(_reached(proposal, epoch), left_s)
        return outcomes

    async def report_directories(self, directories: Directories, known: Sequence[str]) -> None:
        """Tell the controller which of the `known` directories are there and which are full.

        ApiError when it cannot be reached for the time being.
        """
        await persist(lambda left_s: self._report_directories(directories, known, left_s), clock=self._clock)

    async def _report_directories(self, directories: Directories, known: Sequence[str], left_s: float) -> None:
        if self.is_controller:
            taken = self.take_directories(self.broker_id, self.broker_epoch, directories)
            return await within(self._clock, taken, left_s)
        request = BrokerHeartbeatRequest(
            broker_id=self.broker_id,
            broker_epoch=self.broker_epoch,
            current_metadata_offset=self.image.index,
            offline_log_dirs=[_directory_uuid(each) for each in known if each not in directories.online],
            cordoned_log_dirs=[_directory_uuid(each) for each in directories.full],
        )
        response = await self._channel.request(request, DIRECTORIES_VERSION, left_s)
        _raise_for(response.error_code)
        return None

    async def report_placements(self, placements: Sequence[Placement]) -> list[ErrorCode]:
        """Tell the controller where replicas lie, or that they are lost; a code each, in order.

        ApiError when it cannot be reached for the time being.
        """
        return await persist(lambda left_s: self._report_placements(placements, left_s), clock=self._clock)

    async def _report_placements(self, placements: Sequence[Placement], left_s: float) -> list[ErrorCode]:
        if self.is_controller:
            taken = self.take_placements(self.broker_id, self.broker_epoch, placements)
            return await within(self._clock, taken, left_s)
        request = _assign_replicas_request(self.broker_id, self.broker_epoch, placements)
        response = await self._channel.request(request, ASSIGN_REPLICAS_VERSION, left_s)
        _raise_for(response.error_code)
        answers = {
            (topic.topic_id, partition.partition_index): ErrorCode(partition.error_code)
            for directory in response.directories
            for topic in directory.topics
            for partition in topic.partitions
        }
        return [answers.get((each.topic_id, each.index), ErrorCode.UNKNOWN_SERVER_ERROR) for each in placements]

    async def next_producer_id_block(self) -> range:
        """A block of producer ids that nobody else ever gets; a failed or cancelled call may waste one."""
        return await persist(self._next_block, clock=self._clock)

    async def _next_block(self, left_s: float) -> range:
        if self.is_controller:
            return await within(self._clock, self.allocate_producer_ids(self.broker_id, self.broker_epoch), left_s)
        request = AllocateProducerIdsRequest(broker_id=self.broker_id, broker_epoch=self.broker_epoch)
        response = await self._channel.request(request, ALLOCATE_PRODUCER_IDS_VERSION, left_s)
        _raise_for(response.error_code)
        return range(response.producer_id_start, response.producer_id_start + response.producer_id_len)

    async def ensure_topics(
        self, names: Sequence[str], *, configs: tuple[tuple[str, str | None], ...] = ()
    ) -> list[TopicOutcome]:
        """Create those of `names` that are missing, as auto-creation does; one outcome each, in order.

        The topics without an error are in this broker's image when it returns. `configs`: settings of those that are
        made now, where they are not internal.
        """
        if all(name in self.image.topics for name in names):
            return planning.plan_ensure_topics(self.image, names, self._config).results
        return await persist(lambda left_s: self._ensure(names, configs, left_s), clock=self._clock)

    async def _ensure(
        self, names: Sequence[str], configs: tuple[tuple[str, str | None], ...], left_s: float
    ) -> list[TopicOutcome]:
        if self.is_controller:
            made = self.change(lambda image: planning.plan_ensure_topics(image, names, self._config, configs=configs))
            return await within(self._clock, made, left_s)
        image = self.image
        missing = [name for name in dict.fromkeys(names) if name not in image.topics]
        deadline_s = self._clock.monotonic() + left_s
        request = _create_topics_request(
            [planning.auto_created_topic(name, image, self._config, configs) for name in missing]
        )
        response = await self._channel.request(request, CREATE_TOPICS_VERSION, left_s)
        failed: dict[str, ApiError] = {}
        for result in response.topics:
            code = ErrorCode(result.error_code)
            if code in RETRIABLE:
                raise ApiError(code, result.error_message or "")
            # Another broker may have been first, which is as good.
            if code not in {ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS}:
                failed[result.name] = ApiError(code, result.error_message or "")
        expected = [name for name in missing if name not in failed]
        left_s = max(deadline_s - self._clock.monotonic(), 0.001)
        await self._view.wait_for(lambda image: all(name in image.topics for name in expected), left_s)
        return [
            TopicOutcome(name, failed[name]) if name in failed else _outcome(name, self.image.topic(name))
            for name in names
        ]

    async def ensure_internal_topic(self, name: str) -> TopicImage:
        """The internal topic `name`, created now if it is missing; ApiError where it cannot be."""
        (outcome,) = await self.ensure_topics([name])
        topic = self.image.topic(name)
        if topic is None:
            raise outcome.error or ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{name} was deleted meanwhile")
        return topic

    async def leave(self) -> bool:
        """Controlled shutdown: have this broker fenced, so that its leaderships have moved before it stops.

        Returns when this broker's image says so, when there is nobody to move anything to, or after a few seconds:
        a stop must not hang on others. Whether they have moved is the result. From now on the broker stands for no
        election and answers probes with "going"; if it is the controller, it leaves the office in the same delta.
        """
        self._member.leaving = True
        others = [broker for broker in self.image.live_brokers if broker.broker_id != self.broker_id]
        if not others or not self.image.is_live(self.broker_id):
            return False
        try:
            await persist(self._leave, clock=self._clock, timeout_s=LEAVE_TIMEOUT_S)
            await self._view.wait_for(lambda image: not image.is_live(self.broker_id), LEAVE_TIMEOUT_S)
        except ApiError as error:
            logger.warning("leadership could not be moved before the stop: %s", error)
            return False
        return True

    async def _leave(self, left_s: float) -> None:
        if self.is_controller:
            await within(self._clock, self._member.resign({self.broker_id: self.broker_epoch}), left_s)
            return
        request = BrokerHeartbeatRequest(
            broker_id=self.broker_id,
            broker_epoch=self.broker_epoch,
            current_metadata_offset=self.image.index,
            want_shut_down=True,
        )
        response = await self._channel.request(request, HEARTBEAT_VERSION, left_s)
        _raise_for(response.error_code)

    async def forward(self, message: Request, version: int, timeout_ms: int) -> Any:
        """Send a request as it is to the controller and return its response.

        It is sent at most once: tried again is only the way there. ApiError NOT_CONTROLLER where this broker is the
        controller meanwhile.
        """

        async def attempt(left_s: float) -> Any:
            if self.is_controller:
                raise ApiError(ErrorCode.NOT_CONTROLLER, "this broker is the controller now")
            return await self._forwarding.request(message, version, left_s)

        return await persist(
            attempt,
            clock=self._clock,
            timeout_s=timeout_ms / 1000,
            may_repeat=lambda error: isinstance(error, Unsent),
        )

    def suspect(self, broker_id: int) -> None:
        """A hint that somebody was refused a connection by that broker: it is looked at now, not at the next turn."""
        if self._liveness is not None:
            self._liveness.suspect(broker_id)


def _check_epoch(image: ClusterImage, broker_id: int, broker_epoch: int) -> None:
    broker = image.brokers.get(broker_id)
    if broker is None or broker.broker_epoch != broker_epoch:
        raise ApiError(ErrorCode.STALE_BROKER_EPOCH, f"broker {broker_id} has another epoch than {broker_epoch}")


def _raise_for(error_code: int) -> None:
    if error_code != ErrorCode.NONE:
        raise ApiError(ErrorCode(error_code), "the controller refused")


def _reached(proposal: IsrProposal, partition_epoch: int) -> Callable[[ClusterImage], bool]:
    def holds(image: ClusterImage) -> bool:
        state = image.partition(proposal.topic_id, proposal.index)
        return state is None or state.partition_epoch >= partition_epoch

    return holds


def _alter_partition_request(
    broker_id: int, broker_epoch: int, proposals: Sequence[IsrProposal]
) -> AlterPartitionRequest:
    topics: dict[Any, list[AlterPartitionRequest.PartitionData]] = {}
    for proposal in proposals:
        topics.setdefault(proposal.topic_id, []).append(
            AlterPartitionRequest.PartitionData(
                partition_index=proposal.index,
                leader_epoch=proposal.leader_epoch,
                partition_epoch=proposal.partition_epoch,
                new_isr_with_epochs=[
                    AlterPartitionRequest.BrokerState(broker_id=member, broker_epoch=epoch)
                    for member, epoch in proposal.isr
                ],
            )
        )
    return AlterPartitionRequest(
        broker_id=broker_id,
        broker_epoch=broker_epoch,
        topics=[
            AlterPartitionRequest.TopicData(topic_id=topic_id, partitions=partitions)
            for topic_id, partitions in topics.items()
        ],
    )


def _assign_replicas_request(
    broker_id: int, broker_epoch: int, placements: Sequence[Placement]
) -> AssignReplicasToDirsRequest:
    grouped: dict[str, dict[uuid.UUID, list[AssignReplicasToDirsRequest.PartitionData]]] = {}
    for each in placements:
        partitions = grouped.setdefault(each.directory, {}).setdefault(each.topic_id, [])
        partitions.append(AssignReplicasToDirsRequest.PartitionData(partition_index=each.index))
    return AssignReplicasToDirsRequest(
        broker_id=broker_id,
        broker_epoch=broker_epoch,
        directories=[
            AssignReplicasToDirsRequest.DirectoryData(
                id_=_directory_uuid(directory),
                topics=[
                    AssignReplicasToDirsRequest.TopicData(topic_id=topic_id, partitions=partitions)
                    for topic_id, partitions in topics.items()
                ],
            )
            for directory, topics in grouped.items()
        ],
    )


def _directory_uuid(directory: str) -> uuid.UUID:
    return decode_uuid(directory) or ZERO_UUID


def _create_topics_request(topics: Sequence[NewTopic]) -> CreateTopicsRequest:
    return CreateTopicsRequest(
        topics=[
            CreateTopicsRequest.CreatableTopic(
                name=topic.name,
                num_partitions=topic.num_partitions,
                replication_factor=topic.replication_factor,
                configs=[
                    CreateTopicsRequest.CreatableTopicConfig(name=name, value=value) for name, value in topic.configs
                ],
            )
            for topic in topics
        ]
    )


def _outcome(name: str, topic: TopicImage | None) -> TopicOutcome:
    if topic is None:  # deleted in the moment it came
        error = ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{name} was deleted meanwhile")
        return TopicOutcome(name, error)
    return TopicOutcome(name, None, topic.topic_id, len(topic.partitions), topic.replication_factor)


def _without_leader(image: ClusterImage, partitions: Sequence[TopicPartition] | None) -> Questions:
    """The live replicas of the partitions that have no leader, of all or of these."""
    wanted = None if partitions is None else set(partitions)
    return {
        (topic.topic_id, index): tuple(filter(image.is_live, state.replicas))
        for topic, index, state in image.partitions()
        if state.leader == NO_BROKER and (wanted is None or TopicPartition(topic.name, index) in wanted)
    }


def _has_consequences(alteration: ConfigAlteration) -> bool:
    """Whether partitions may have to be decided on again: see `plan_by_settings`."""
    return alteration.replace_all or any(name == "min.insync.replicas" for name, _, _ in alteration.operations)
