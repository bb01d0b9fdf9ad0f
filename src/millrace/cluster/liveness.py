"""Who answers: the watch that finds a dead process long before its session with the store times out.

The controller keeps a connection to every broker, and every broker one to the controller; each is asked once a second
who it is. A process that died breaks its connections, and its machine refuses new ones: refused twice in a row, the
controller fences the broker, or, if it is the controller that is dead, a broker takes its office over. Silence without
a refusal may be a pause or a cut network, and waits for as long as a session would. The decisions are functions of what
was heard (`judge`, `takeover_delay_s`); one task acts on them. Not here: elections (`elections`), the office
(`membership`).

Invariants
- Nothing here makes the cluster safe. Whoever is wrongly taken for dead is fenced by its epochs, counts again as soon
  as it answers, and loses nothing but its place in the ISRs.
- A verdict is checked again at the moment it is written: it may have waited for the store.
- A controller that does not reach half of the others is more likely to be cut off than they all are dead: it resigns.
- Time in which this process itself did not run is nobody's silence.
- A broker counts again only after an answer to a question that was asked after it was fenced.

Owner: the event loop; `run` is the one task that decides, with one task per peer that only asks and notes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from millrace.client.connection import Connection
from millrace.clock import Clock
from millrace.cluster.channel import client_id, inter_broker_endpoint
from millrace.cluster.elections import plan_brokers, topic_rules
from millrace.cluster.image import ClusterImage
from millrace.cluster.membership import ClusterMember
from millrace.cluster.planning import Plan
from millrace.cluster.view import MetadataView
from millrace.cluster.writer import MetadataWriter
from millrace.config import BrokerConfig
from millrace.errors import ApiError, ErrorCode, MillraceError
from millrace.metadata.deltas import Endpoint
from millrace.wire.messages.brokers import BrokerHeartbeatRequest

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S: Final = 1.0
PROBES_PER_SESSION: Final = 4
"""At least: with a short session timeout they are asked more often."""
PROBE_TIMEOUT_MS: Final = 2000
REFUSED_TWICE_S: Final = 0.2
RETRY_S: Final = 0.05
"""Between two attempts to reach a broker that refused: well within the time in which two refusals count as death."""
UNREACHABLE_RETRY_S: Final = 0.5
TICK_S: Final = 0.5
STALL_S: Final = 2.0
"""A tick that comes so late means that this process did not run."""
TAKEOVER_STEP_S: Final = 0.1
HEARTBEAT_VERSION: Final = 1
_FOREVER_MS: Final = 1 << 40


# --- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Health:
    """What was heard of one incarnation of a broker. Times are seconds of the monotonic clock."""

    broker_id: int
    broker_epoch: int
    since_s: float
    """When the watch began, or was resumed after a stall of this process."""
    answered_s: float | None = None
    """When the newest question was asked that it answered as itself."""
    going: bool = False
    """It answered that it is shutting down."""
    refused_s: tuple[float, ...] = ()
    """The refusals (or answers of somebody else at its address) since it was last reached; the newest two."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the controller does: brokers by id, with the epoch that is meant."""

    fence: Mapping[int, int]
    unfence: Mapping[int, int]
    resign: bool = False


def is_dead(health: Health) -> bool:
    """Whether its machine said so, twice within a short time."""
    return len(health.refused_s) == 2 and health.refused_s[1] - health.refused_s[0] <= REFUSED_TWICE_S


def is_silent(health: Health, now_s: float, silence_s: float) -> bool:
    """Whether it has not answered for as long as a session lasts."""
    heard_s = health.since_s if health.answered_s is None else max(health.since_s, health.answered_s)
    return now_s - heard_s >= silence_s


def judge(peers: Sequence[Health], fenced_s: Mapping[int, float], *, now_s: float, silence_s: float) -> Verdict:
    """What a controller does about its peers; `fenced_s` says which of them are fenced, and since when."""
    live = [peer for peer in peers if peer.broker_id not in fenced_s]
    dead = [peer for peer in live if is_dead(peer)]
    asked = [peer for peer in live if not is_dead(peer)]
    silent = [peer for peer in asked if is_silent(peer, now_s, silence_s)]
    unfence = {
        peer.broker_id: peer.broker_epoch
        for peer in peers
        if peer.broker_id in fenced_s
        and not peer.going
        and not peer.refused_s
        and peer.answered_s is not None
        and peer.answered_s >= fenced_s[peer.broker_id]
    }
    reached = len(asked) - len(silent)
    if silent and reached * 2 < len(asked) and len(asked) > 1:
        return Verdict({peer.broker_id: peer.broker_epoch for peer in dead}, {}, resign=True)
    return Verdict({peer.broker_id: peer.broker_epoch for peer in (*dead, *silent)}, unfence)


def takeover_delay_s(image: ClusterImage, broker_id: int) -> float:
    """How long a broker waits before it takes a dead controller's office: one after another, so that one is enough."""
    candidates = [broker.broker_id for broker in image.live_brokers if broker.broker_id != image.controller_id]
    rank = candidates.index(broker_id) if broker_id in candidates else len(candidates)
    return rank * TAKEOVER_STEP_S


# --- the watch over one peer ------------------------------------------------------------------------------------------


class Peer:
    """One incarnation of a broker, asked again and again by a task of its own."""

    def __init__(
        self,
        broker_id: int,
        broker_epoch: int,
        endpoint: Endpoint,
        *,
        own_id: int,
        interval_s: float,
        clock: Clock,
        changed: asyncio.Event,
    ) -> None:
        self.health = Health(broker_id, broker_epoch, clock.monotonic())
        self.endpoint = endpoint
        self._own_id = own_id
        self._interval_s = interval_s
        self._clock = clock
        self._changed = changed
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"Peer({self.health})"

    def ask_now(self) -> None:
        """Do not wait for the next turn."""
        self._wake.set()

    def resume(self, now_s: float) -> None:
        """Begin the watch anew: what lies before does not count as silence."""
        self._note(since_s=now_s)

    async def watch(self) -> None:
        """Ask until cancelled."""
        while True:
            try:
                connection = await Connection.open(
                    self.endpoint.host,
                    self.endpoint.port,
                    client_id=client_id(self._own_id),
                    timeout_ms=PROBE_TIMEOUT_MS,
                    clock=self._clock,
                    negotiate=False,
                )
            except ApiError as error:
                if is_refusal(error):
                    self._refused()
                    await self._pause(UNREACHABLE_RETRY_S if is_dead(self.health) else RETRY_S)
                else:
                    await self._pause(UNREACHABLE_RETRY_S)
                continue
            opened_s = self._clock.monotonic()
            try:
                await self._ask(connection)
            except MillraceError:
                pass  # the connection is lost, or the answer does not come: try to reach it again, at once
            finally:
                await connection.close()
            if self.health.answered_s is None or self.health.answered_s < opened_s:
                # Somebody takes connections and says nothing: asking without a pause would help nobody.
                self._wake.clear()
                await self._pause(UNREACHABLE_RETRY_S)

    async def _ask(self, connection: Connection) -> None:
        # A broker says nothing on its own: what comes of waiting for it is the news that the connection is lost.
        lost = asyncio.create_task(connection.read_raw(timeout_ms=_FOREVER_MS))
        lost.add_done_callback(lambda _: self._wake.set())
        try:
            while not lost.done():
                await self._probe(connection)
                stale = self.health.refused_s and not is_dead(self.health)
                await self._pause(RETRY_S if stale else self._interval_s)
        finally:
            lost.cancel()
            with contextlib.suppress(asyncio.CancelledError, MillraceError):
                await lost

    async def _probe(self, connection: Connection) -> None:
        asked_s = self._clock.monotonic()
        request = BrokerHeartbeatRequest(broker_id=self.health.broker_id, broker_epoch=self.health.broker_epoch)
        response = await connection.request(request, HEARTBEAT_VERSION)
        if response.error_code == ErrorCode.STALE_BROKER_EPOCH:
            self._refused()
        elif response.error_code in {ErrorCode.NONE, ErrorCode.BROKER_NOT_AVAILABLE}:
            going = response.error_code != ErrorCode.NONE
            self._note(answered_s=asked_s, refused_s=(), going=going)

    def _refused(self) -> None:
        self._note(refused_s=(*self.health.refused_s, self._clock.monotonic())[-2:])

    def _note(
        self,
        *,
        since_s: float | None = None,
        answered_s: float | None = None,
        going: bool | None = None,
        refused_s: tuple[float, ...] | None = None,
    ) -> None:
        health = self.health
        self.health = Health(
            health.broker_id,
            health.broker_epoch,
            health.since_s if since_s is None else since_s,
            health.answered_s if answered_s is None else answered_s,
            health.going if going is None else going,
            health.refused_s if refused_s is None else refused_s,
        )
        if health.answered_s is None or self.health.refused_s or health.refused_s or going:
            self._changed.set()

    async def _pause(self, seconds: float) -> None:
        timer = self._clock.call_later(seconds, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            self._wake.clear()
            timer.cancel()


def is_refusal(error: ApiError) -> bool:
    """Whether the other machine itself said that nobody listens there, at every address it has."""
    cause = error.__cause__
    if isinstance(cause, ConnectionRefusedError):
        return True
    # A name with several addresses fails with one text for all of them.
    refused, any_error = f"[Errno {errno.ECONNREFUSED}]", "[Errno"
    text = str(cause)
    return isinstance(cause, OSError) and refused in text and text.count(refused) == text.count(any_error)


# --- the owner --------------------------------------------------------------------------------------------------------


class Liveness:
    """Watches whom this broker has to watch in its present role, and acts."""

    def __init__(
        self,
        view: MetadataView,
        writer: MetadataWriter,
        member: ClusterMember,
        config: BrokerConfig,
        listener: str,
        clock: Clock,
    ) -> None:
        self._view = view
        self._writer = writer
        self._member = member
        self._config = config
        self._silence_s = config.get_int("zookeeper.session.timeout.ms") / 1000
        self._listener = listener
        self._clock = clock
        self._peers: dict[int, Peer] = {}
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._fenced_s: dict[int, float] = {}
        self._takeover: tuple[int, float] | None = None
        """The epoch of a dead controller, and when it is this broker's turn to take over."""
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"Liveness({list(self._peers.values())})"

    def suspect(self, broker_id: int) -> None:
        """Somebody was refused by that broker: ask it now."""
        peer = self._peers.get(broker_id)
        if peer is not None:
            peer.ask_now()

    async def run(self) -> None:
        """Watch, decide and act, until cancelled."""
        forget = self._view.on_image(lambda *_: self._changed.set())
        tick_s = self._clock.monotonic()
        try:
            while True:
                now_s = self._clock.monotonic()
                if now_s - tick_s > STALL_S:
                    self._resume(now_s)
                tick_s = now_s
                self._changed.clear()
                try:
                    await self._step(now_s)
                except MillraceError as error:
                    logger.warning("broker %d: %s", self._member.broker_id, error)
                except Exception:  # the root of the task: without a watch no failure is noticed in time
                    logger.exception("broker %d could not look after the others", self._member.broker_id)
                await self._next()
        finally:
            forget()
            await self._watch_only({})

    async def _next(self) -> None:
        timer = self._clock.call_later(self._tick_s(), self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    def _tick_s(self) -> float:
        if self._takeover is None:
            return TICK_S
        return min(TICK_S, max(self._takeover[1] - self._clock.monotonic(), 0.0))

    def _resume(self, now_s: float) -> None:
        for peer in self._peers.values():
            peer.resume(now_s)

    async def _step(self, now_s: float) -> None:
        image = self._view.image
        self._note_fenced(image, now_s)
        await self._watch_only(self._wanted(image))
        if self._writer.is_open:
            self._takeover = None
            await self._reign(now_s)
        else:
            self._stand_by(image, now_s)

    # --- whom to watch ------------------------------------------------------------------------------------------------

    def _note_fenced(self, image: ClusterImage, now_s: float) -> None:
        fenced = {broker.broker_id for broker in image.brokers.values() if broker.fenced}
        self._fenced_s = {broker_id: self._fenced_s.get(broker_id, now_s) for broker_id in fenced}

    def _wanted(self, image: ClusterImage) -> dict[int, tuple[int, Endpoint]]:
        own_id = self._member.broker_id
        if self._writer.is_open:
            membership = self._member.membership
            there = {member.registration.broker_id for member in membership.members} if membership else set()
            ids = [broker_id for broker_id in image.brokers if broker_id in there]
        else:
            ids = [image.controller_id]
        wanted = {}
        for broker_id in ids:
            endpoint = inter_broker_endpoint(image, broker_id, self._listener)
            if broker_id != own_id and endpoint is not None:
                wanted[broker_id] = (image.brokers[broker_id].broker_epoch, endpoint)
        return wanted

    async def _watch_only(self, wanted: Mapping[int, tuple[int, Endpoint]]) -> None:
        over = [
            broker_id
            for broker_id, peer in self._peers.items()
            if wanted.get(broker_id) != (peer.health.broker_epoch, peer.endpoint)
        ]
        ended = []
        for broker_id in over:
            del self._peers[broker_id]
            task = self._watches.pop(broker_id)
            task.cancel()
            ended.append(task)
        for broker_id, (epoch, endpoint) in wanted.items():
            if broker_id not in self._peers:
                peer = self._peers[broker_id] = self._new_peer(broker_id, epoch, endpoint)
                self._watches[broker_id] = asyncio.create_task(peer.watch(), name=f"watch-broker-{broker_id}")
        if ended:
            await asyncio.wait(ended)

    def _new_peer(self, broker_id: int, broker_epoch: int, endpoint: Endpoint) -> Peer:
        return Peer(
            broker_id,
            broker_epoch,
            endpoint,
            own_id=self._member.broker_id,
            interval_s=min(PROBE_INTERVAL_S, self._silence_s / PROBES_PER_SESSION),
            clock=self._clock,
            changed=self._changed,
        )

    # --- what to do ---------------------------------------------------------------------------------------------------

    def _verdict(self, now_s: float) -> Verdict:
        health = [peer.health for peer in self._peers.values()]
        return judge(health, self._fenced_s, now_s=now_s, silence_s=self._silence_s)

    async def _reign(self, now_s: float) -> None:
        verdict = self._verdict(now_s)
        if verdict.fence or verdict.unfence:
            logger.warning("brokers taken for dead: %s, alive again: %s", dict(verdict.fence), dict(verdict.unfence))
            await self._writer.change(self._plan(verdict))
        if verdict.resign:
            logger.warning("broker %d is cut off from the others", self._member.broker_id)
            # Its own partitions are better led by those who reach each other.
            await self._member.resign({self._member.broker_id: self._member.broker_epoch})

    def _plan(self, verdict: Verdict) -> Callable[[ClusterImage], Plan[None]]:
        def plan(image: ClusterImage) -> Plan[None]:
            now = self._verdict(self._clock.monotonic())
            return plan_brokers(
                image,
                fence={b: e for b, e in verdict.fence.items() if now.fence.get(b) == e},
                unfence={b: e for b, e in verdict.unfence.items() if now.unfence.get(b) == e},
                rules_of=topic_rules(image, self._config),
            )

        return plan

    def _stand_by(self, image: ClusterImage, now_s: float) -> None:
        peer = self._peers.get(image.controller_id)
        if peer is None or not is_dead(peer.health):
            self._takeover = None
            return
        epoch = image.controller_epoch
        if self._takeover is None or self._takeover[0] != epoch:
            self._takeover = (epoch, now_s + takeover_delay_s(image, self._member.broker_id))
        if now_s >= self._takeover[1]:
            self._takeover = (epoch, now_s + PROBE_INTERVAL_S)
            logger.warning("the controller, broker %d, is dead: taking over", image.controller_id)
            self._member.take_over(epoch, {peer.health.broker_id: peer.health.broker_epoch})
