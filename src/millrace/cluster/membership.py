"""This broker's place in the cluster: its session, its registration, and whether it is the controller.

One task does what `next_step` decides from what is known; small feeders only note what they hear and wake it. Not here:
what a reign writes (`writer`), who else is alive (`liveness`).

Invariants
- Nothing here makes the cluster safe: a broker that wrongly takes itself for the controller is stopped by the fence of
  the store at its next write.
- While the session is suspended nothing is decided; when it has expired the reign is over at once, and the broker
  registers again, under a new broker epoch.
- A reign begins with one delta that says who reigns and what the image has to learn from the registrations as they are
  after the election: nobody who came or went before it is missed, or judged by an older list.
- A broker that leaves, that found itself cut off from the others, or whose id another process has taken, does not
  stand for election.

Owner: the event loop; `run` is the one task that registers, stands for election and reconciles.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from millrace.clock import Clock
from millrace.cluster.elections import plan_brokers, plan_registrations, topic_rules
from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import Plan
from millrace.cluster.view import MetadataView
from millrace.cluster.writer import MetadataWriter, not_controller
from millrace.config import BrokerConfig
from millrace.errors import ApiError, ErrorCode, MillraceError
from millrace.metadata.deltas import BrokerRegistered, Change, ClusterCreated, ControllerChanged
from millrace.metadata.store import BrokerRegistration, Membership, MetadataStore, SessionState
from millrace.model import NO_BROKER
from millrace.tasks import Tasks

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.05
STORE_RETRY_S: Final = 0.2
RESIGNED_S: Final = 10.0
"""How long a controller that was cut off leaves the office to others."""


@dataclass(frozen=True, slots=True)
class MembershipFacts:
    """All that `next_step` decides from: what this broker knows of its session, its registration and the controller."""

    broker_id: int
    session: SessionState
    broker_epoch: int
    """Of the registration in this session; -1 where there is none."""
    reign: int | None
    """The controller epoch this broker holds."""
    membership: Membership | None
    image_controller: tuple[int, int]
    """Who is controller according to the image, and its epoch."""
    may_stand: bool = True
    leaving: bool = False
    refused: int | None = None
    """The epoch of a controller that is known to be dead although its session still lives."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until something changes."""


@dataclass(frozen=True, slots=True)
class Register:
    """Announce this broker."""


@dataclass(frozen=True, slots=True)
class Stand:
    """Try to become controller, in place of the holder of `replacing` where there is one."""

    replacing: int | None


@dataclass(frozen=True, slots=True)
class StepDown:
    """The reign is over."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reconcile:
    """As controller: bring the image in line with who is registered."""


@dataclass(frozen=True, slots=True)
class Displaced:
    """Another process has registered under this broker's id."""


Describe: TypeAlias = Callable[[int], BrokerRegistration]
Step: TypeAlias = Wait | Register | Stand | StepDown | Reconcile | Displaced


def next_step(facts: MembershipFacts) -> Step:
    """What a broker with these facts does next."""
    membership = facts.membership
    if facts.session is not SessionState.CONNECTED:
        return Wait()
    if facts.broker_epoch < 0:
        return Wait() if facts.leaving else Register()
    if membership is None:
        return Wait()
    if _is_displaced(facts, membership):
        return Displaced()
    if facts.reign is not None:
        if membership.controller_epoch > facts.reign:
            return StepDown(f"broker {membership.controller_id} has epoch {membership.controller_epoch}")
        return Reconcile()
    if not facts.may_stand:
        return Wait()
    if membership.controller_id is None:
        return Stand(None)
    # The office is taken as far as the store knows. It can be had if its holder is known to be gone: refused by its
    # machine, resigned in the log, or an earlier incarnation of this very broker.
    epoch = membership.controller_epoch
    resigned = facts.image_controller == (NO_BROKER, epoch)
    if facts.refused == epoch or resigned or membership.controller_id == facts.broker_id:
        return Stand(epoch)
    return Wait()


def _is_displaced(facts: MembershipFacts, membership: Membership) -> bool:
    return any(
        member.registration.broker_id == facts.broker_id and member.broker_epoch > facts.broker_epoch
        for member in membership.members
    )


def first_changes(
    image: ClusterImage,
    config: BrokerConfig,
    membership: Membership,
    *,
    controller_epoch: int,
    broker_id: int,
    dead: dict[int, int],
) -> list[Change]:
    """The first delta of a reign."""
    changes: list[Change] = [] if image.cluster_id else [ClusterCreated(_new_cluster_id())]
    changes.append(ControllerChanged(broker_id, controller_epoch))
    own = {member.registration.broker_id: member.broker_epoch for member in membership.members}.get(broker_id)
    plan = plan_registrations(
        image,
        registered(membership),
        dead=dead,
        # Whoever reigns is alive: if an earlier controller took it for dead, that is over.
        alive={} if own is None else {broker_id: own},
        rules_of=topic_rules(image, config),
    )
    changes.extend(plan.changes)
    return changes


def registered(membership: Membership) -> list[BrokerRegistered]:
    """The registrations as changes of the image; those it has already change nothing."""
    return [
        BrokerRegistered(
            member.registration.broker_id,
            member.broker_epoch,
            member.registration.endpoints,
            member.registration.rack,
            directories=member.registration.directories,
            boot_id=member.registration.boot_id,
            clean_epoch=member.registration.clean_epoch,
        )
        for member in membership.members
    ]


class ClusterMember:
    """Registers, stands for election, and as controller keeps the image in line with the registrations."""

    def __init__(
        self, store: MetadataStore, view: MetadataView, writer: MetadataWriter, config: BrokerConfig, clock: Clock
    ) -> None:
        self.broker_id = config.broker_id
        self.broker_epoch = -1
        """Of the newest registration; it outlives the session, because the image keeps it until the next."""
        self.leaving = False
        self.on_displaced: Callable[[], object] = lambda: None
        self._store = store
        self._view = view
        self._writer = writer
        self._config = config
        self._clock = clock
        self._describe: Describe | None = None
        self._registered = False
        self._session = SessionState.CONNECTED
        self._membership: Membership | None = None
        self._displaced = False
        self._refused: int | None = None
        self._dead: dict[int, int] = {}
        self._resigned_until_s = float("-inf")
        self._wake = asyncio.Event()
        self._tasks = Tasks(clock)
        self._watcher: asyncio.Task[None] | None = None
        writer.on_lost = self._wake.set

    def __repr__(self) -> str:
        return f"ClusterMember(broker {self.broker_id} epoch {self.broker_epoch}, {self._session.name}, {self._writer})"

    @property
    def membership(self) -> Membership | None:
        """Who is registered, as last heard."""
        return self._membership

    @property
    def is_connected(self) -> bool:
        """Whether the store answers this broker, as far as its session knows."""
        return self._session is SessionState.CONNECTED

    @property
    def registration(self) -> int | None:
        """The broker epoch of the registration in the session that lives; None where there is none."""
        return self.broker_epoch if self._registered else None

    # --- life ---------------------------------------------------------------------------------------------------------

    async def join(self, describe: Describe) -> None:
        """Register and try to become controller; errors of the store come out. Then `run` goes on.

        `describe` says what this broker is at that moment, given its last epoch (-1 at the start).
        """
        self._describe = describe
        await self._register()
        epoch = await self._store.elect(self.broker_id)
        if epoch is not None:
            try:
                await self._reign(epoch, {})
            except ApiError as error:
                if error.code is not ErrorCode.NOT_CONTROLLER:  # replaced in the same moment: `run` goes on from there
                    raise

    async def run(self) -> None:
        """Go on until cancelled."""
        forget = self._view.on_image(lambda old, new, _: self._image_changed(old, new))
        self._tasks.keep("sessions", self._watch_sessions)
        if self._watcher is None:
            self._watch_afresh()
        try:
            while True:
                self._wake.clear()
                if await self._perform(next_step(self._facts())):
                    await self._wake.wait()
        finally:
            forget()
            await self.stop()

    async def stop(self) -> None:
        """End what `join` may have begun where `run` never ran."""
        self._watcher = None
        await self._tasks.stop()

    def take_over(self, controller_epoch: int, dead: dict[int, int]) -> None:
        """The controller of this epoch is dead, and so are these brokers, by id and epoch: stand in its place."""
        self._refused = controller_epoch
        self._dead = dict(dead)
        self._wake.set()

    def stand_back(self) -> None:
        """Nobody is known to be dead any more: what `take_over` said and has not come about is void."""
        self._refused = None

    async def resign(self, fence: dict[int, int]) -> None:
        """Leave the office to others for a while; the log says so, and that these brokers are gone.

        ApiError NOT_CONTROLLER where this broker does not hold the office.
        """
        epoch = self._writer.epoch
        if epoch is None:
            raise not_controller()
        logger.info("broker %d resigns as controller", self.broker_id)
        self._resigned_until_s = self._clock.monotonic() + RESIGNED_S
        self._clock.call_later(RESIGNED_S, self._wake.set)

        def plan(image: ClusterImage) -> Plan[None]:
            gone = plan_brokers(image, fence=fence, rules_of=topic_rules(image, self._config))
            return Plan(None, (*gone.changes, ControllerChanged(NO_BROKER, epoch)))

        await self._writer.change(plan)

    # --- what is heard ------------------------------------------------------------------------------------------------

    async def _watch_sessions(self) -> None:
        async with contextlib.aclosing(self._store.sessions()) as sessions:
            async for state in sessions:
                self._session_is(state)

    def _session_is(self, state: SessionState) -> None:
        if state is not self._session:
            logger.info("broker %d: the session is %s", self.broker_id, state.name.lower())
        self._session = state
        if state is SessionState.CONNECTED:
            self._writer.reachable.set()
        else:
            self._writer.reachable.clear()
        if state is SessionState.EXPIRED:
            self._registered = False
            self._writer.end("the session has expired")
            self._writer.reachable.set()  # whatever was queued is refused, which needs no store
        self._wake.set()

    def _watch_afresh(self) -> asyncio.Future[None]:
        """Listen to the registrations from now on; the future is done when the first list is there."""
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._watcher is not None:
            self._watcher.cancel()
        self._membership = None
        self._watcher = self._tasks.keep("registrations", lambda: self._watch_membership(first))
        return first

    async def _watch_membership(self, first: asyncio.Future[None]) -> None:
        while True:
            try:
                async with contextlib.aclosing(self._store.membership()) as memberships:
                    async for membership in memberships:
                        self._membership = membership
                        if not first.done():
                            first.set_result(None)
                        self._wake.set()
                return
            except MillraceError as error:
                logger.warning("the registrations cannot be read: %s", error)
                await self._clock.sleep(STORE_RETRY_S)

    def _image_changed(self, old: ClusterImage, new: ClusterImage) -> None:
        if old.controller_epoch != new.controller_epoch or old.controller_id != new.controller_id:
            self._wake.set()

    # --- what is done -------------------------------------------------------------------------------------------------

    def _facts(self) -> MembershipFacts:
        image = self._view.image
        cut_off = self._clock.monotonic() < self._resigned_until_s
        return MembershipFacts(
            broker_id=self.broker_id,
            session=self._session,
            broker_epoch=self.broker_epoch if self._registered else -1,
            reign=self._writer.epoch,
            membership=self._membership,
            image_controller=(image.controller_id, image.controller_epoch),
            may_stand=not (self.leaving or cut_off or self._displaced),
            leaving=self.leaving,
            refused=self._refused,
        )

    async def _perform(self, step: Step) -> bool:
        """Do one step; whether the next one has to wait for news."""
        try:
            match step:
                case Register():
                    await self._register()
                case Stand(replacing):
                    await self._stand(replacing)
                case StepDown(reason):
                    self._writer.end(reason)
                case Reconcile():
                    return await self._reconcile()
                case Displaced():
                    self._be_displaced()
                    return True
                case Wait():
                    return True
        except MillraceError as error:
            logger.warning("broker %d: %s", self.broker_id, error)
            await self._clock.sleep(STORE_RETRY_S)
        except Exception:  # the root of the task: a broker that stops looking after its place is lost for the cluster
            logger.exception("broker %d could not %s", self.broker_id, step)
            await self._clock.sleep(STORE_RETRY_S)
        return False

    async def _register(self) -> None:
        assert self._describe is not None
        self.broker_epoch = await self._store.register(self._describe(self.broker_epoch))
        self._registered = True

    async def _stand(self, replacing: int | None) -> None:
        epoch = await self._store.elect(self.broker_id, replacing=replacing)
        if epoch is None:
            # Another one was faster; the news of it is on its way.
            await self._clock.sleep(RETRY_S)
        else:
            # What was found out about the brokers holds for the reign of the one that was refused, not for later ones.
            await self._reign(epoch, self._dead if replacing is not None and replacing == self._refused else {})

    async def _reign(self, epoch: int, dead: dict[int, int]) -> None:
        await self._watch_afresh()
        membership = self._membership
        assert membership is not None

        def first(image: ClusterImage) -> list[Change]:
            return first_changes(
                image, self._config, membership, controller_epoch=epoch, broker_id=self.broker_id, dead=dead
            )

        await self._writer.begin(epoch, first)
        logger.info("broker %d is controller, epoch %d", self.broker_id, epoch)

    async def _reconcile(self) -> bool:
        """Write what the registrations and the image differ in; whether there was nothing to do."""
        membership = self._membership
        assert membership is not None

        def plan(image: ClusterImage) -> Plan[None]:
            return plan_registrations(image, registered(membership), rules_of=topic_rules(image, self._config))

        if not self._writer.is_open or not plan(self._view.image).changes:
            return True
        await self._writer.change(plan)
        return False

    def _be_displaced(self) -> None:
        if not self._displaced:
            self._displaced = True
            logger.critical("another process runs as broker %d: this one takes no further part", self.broker_id)
            self._writer.end("another process has this broker's id")
            self.on_displaced()


def _new_cluster_id() -> str:
    """22 characters, as Kafka writes its ids: base64 of a random UUID that does not begin with a dash."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode("ascii")
        if not text.startswith("-"):
            return text
