"""Who answers: the watch that finds a dead process long before its session with the store times out.

The controller keeps a connection to every broker, and every broker one to the controller; each is asked once a second
who it is. A process that died breaks its connections, and its machine refuses new ones: the controller fences it, or,
if it is the controller, the others ask each other whether it refuses all of them, and one takes its office over.
Silence without a refusal may be a pause or a cut network, and waits for as long as a session would. What follows from
what was heard is decided in `evidence`; one task acts on it. Not here: elections (`elections`), the office
(`membership`).

Invariants
- Nothing here makes the cluster safe. Whoever is wrongly taken for dead is fenced by its epochs, counts again as soon
  as it answers, and loses nothing but its place in the ISRs.
- A verdict is checked again at the moment it is written: it may have waited for the store.
- A controller that does not reach half of the others is more likely to be cut off than they all are dead: it resigns.
- A controller that somebody reaches is not deposed, whomever else it refuses.
- Time in which this process itself did not run is nobody's silence.
- A broker counts again only after an answer to a question that was asked after it was fenced.

Owner: the event loop; `run` is the one task that decides, with one task per peer that only asks and notes, and one that
asks around while the controller refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Final

from millrace.client.connection import Connection
from millrace.clock import Clock
from millrace.cluster.channel import within
from millrace.cluster.dialer import Dialer, TurnedAway, inter_broker_endpoint
from millrace.cluster.elections import plan_brokers, topic_rules
from millrace.cluster.evidence import (
    Health,
    Hearsay,
    Verdict,
    is_majority,
    is_refusal_confirmed,
    judge,
    refuses,
    takeover_delay_s,
    takeover_s,
)
from millrace.cluster.image import ClusterImage
from millrace.cluster.membership import ClusterMember
from millrace.cluster.planning import Plan
from millrace.cluster.view import MetadataView
from millrace.cluster.writer import MetadataWriter
from millrace.config import BrokerConfig
from millrace.errors import ApiError, ErrorCode, MillraceError
from millrace.metadata.deltas import Endpoint
from millrace.tasks import Tasks, awaited
from millrace.wire.messages.brokers import BrokerHeartbeatRequest

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S: Final = 1.0
PROBES_PER_SESSION: Final = 4
"""At least: with a short session timeout they are asked more often."""
PROBE_TIMEOUT_MS: Final = 2000
RETRY_S: Final = 0.05
"""Between two attempts to reach a broker that refused: well within the time in which two refusals count."""
UNREACHABLE_RETRY_S: Final = 0.5
TICK_S: Final = 0.5
STALL_S: Final = 2.0
"""A tick that comes so late means that this process did not run."""
INQUIRY_S: Final = 0.3
"""How long others are given to say whether they reach a broker. Dead, it refuses them within `RETRY_S`."""
LOGIN_S: Final = 0.6
"""What a call may take longer where TLS and a login come first: a handful of turns between two sites."""
HEARTBEAT_VERSION: Final = 1
_FOREVER_MS: Final = 1 << 40


# --- the watch over one peer ------------------------------------------------------------------------------------------


class Peer:
    """One incarnation of a broker, asked again and again by a task of its own."""

    def __init__(
        self,
        broker_id: int,
        broker_epoch: int,
        endpoint: Endpoint,
        *,
        dialer: Dialer,
        interval_s: float,
        clock: Clock,
        changed: asyncio.Event,
    ) -> None:
        self.health = Health(broker_id, broker_epoch, clock.monotonic())
        self.endpoint = endpoint
        self._dialer = dialer
        self._interval_s = interval_s
        self._clock = clock
        self._changed = changed
        self._wake = asyncio.Event()
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        return f"Peer({self.health})"

    def ask_now(self) -> None:
        """Do not wait for the next turn."""
        self._wake.set()

    def resume(self, now_s: float) -> None:
        """Begin the watch anew: what lies before does not count as silence."""
        self._note(replace(self.health, since_s=now_s))

    def called(self) -> None:
        """It called here."""
        self._note(replace(self.health, called_s=self._clock.monotonic()))

    async def is_refusing(self) -> bool | None:
        """Ask it now; whether it refuses, None where that is not known soon."""
        asked_s = now_s = self._clock.monotonic()
        self.ask_now()
        while (refusing := is_refusal_confirmed(self.health, asked_s, now_s)) is None:
            try:
                await within(self._clock, self._news.wait(), asked_s + INQUIRY_S - now_s)
            except ApiError:
                break
            now_s = self._clock.monotonic()
        return refusing

    async def watch(self) -> None:
        """Ask until cancelled."""
        while True:
            try:
                connection = await self._dialer.open(self.endpoint, self.health.broker_id, timeout_ms=PROBE_TIMEOUT_MS)
            except TurnedAway:
                self._note(self.health.turned_away(self._clock.monotonic()))
                await self._pause(UNREACHABLE_RETRY_S)
                continue
            except ApiError as error:
                if is_refusal(error):
                    self._refused()
                    await self._pause(UNREACHABLE_RETRY_S if refuses(self.health) else RETRY_S)
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
        lost = awaited(connection.read_raw(timeout_ms=_FOREVER_MS))
        lost.add_done_callback(lambda _: self._wake.set())
        try:
            while not lost.done():
                await self._probe(connection)
                stale = self.health.refused_s is not None and not refuses(self.health)
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
            self._note(self.health.answered(asked_s, going=response.error_code != ErrorCode.NONE))
        elif response.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED:
            self._dialer.not_allowed(self.health.broker_id)
            self._note(self.health.turned_away(self._clock.monotonic()))

    def _refused(self) -> None:
        self._note(self.health.refused(self._clock.monotonic()))

    def _note(self, health: Health) -> None:
        before, self.health = self.health, health
        if before.answered_s is None or health.going or (before.refused_s, health.refused_s) != (None, None):
            self._changed.set()
        news, self._news = self._news, asyncio.Event()
        news.set()

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


# --- asking around ----------------------------------------------------------------------------------------------------


class Inquiry:
    """The question to the other brokers whether a controller that refuses this one refuses them, too."""

    def __init__(self, accused: Health, controller_epoch: int, turn_s: float, dialer: Dialer, clock: Clock) -> None:
        self.accused = accused
        self.controller_epoch = controller_epoch
        self.turn_s = turn_s
        """When it is this broker's turn to take over, among several who might."""
        self.hearsay: Hearsay | None = None
        """What was said last; None until there was time to say something."""
        self._dialer = dialer
        self._clock = clock

    def __repr__(self) -> str:
        return f"Inquiry({self.accused}, {self.hearsay})"

    async def ask(self, witnesses: Mapping[int, Endpoint]) -> None:
        """Ask each of them once, all at the same time."""
        words = await asyncio.gather(*(self._word_of(*witness) for witness in witnesses.items()))
        said = list(zip(witnesses, words, strict=True))
        self.hearsay = Hearsay(
            reach_it=frozenset(broker_id for broker_id, word in said if word is _Word.REACHES_IT),
            are_refused=frozenset(broker_id for broker_id, word in said if word is _Word.IS_REFUSED),
            dead_too=frozenset(broker_id for broker_id, word in said if word is _Word.REFUSES_TO_BE_ASKED),
        )

    async def _word_of(self, witness: int, endpoint: Endpoint) -> _Word:
        limit_s = 2 * INQUIRY_S + (LOGIN_S if self._dialer.is_secured else 0.0)
        try:
            return await within(self._clock, self._ask(witness, endpoint), limit_s)
        except MillraceError as error:
            refused = isinstance(error, ApiError) and is_refusal(error)
            return _Word.REFUSES_TO_BE_ASKED if refused else _Word.NOTHING

    async def _ask(self, witness: int, endpoint: Endpoint) -> _Word:
        accused = self.accused
        async with await self._dialer.open(endpoint, witness, timeout_ms=PROBE_TIMEOUT_MS) as connection:
            request = BrokerHeartbeatRequest(
                broker_id=accused.broker_id, broker_epoch=accused.broker_epoch, want_fence=True
            )
            response = await connection.request(request, HEARTBEAT_VERSION)
        if response.error_code != ErrorCode.NONE:
            return _Word.NOTHING
        return _Word.IS_REFUSED if response.is_fenced else _Word.REACHES_IT


class _Word(Enum):
    """What one witness says."""

    REACHES_IT = "reaches it"
    IS_REFUSED = "is refused"
    REFUSES_TO_BE_ASKED = "refuses to be asked"
    NOTHING = "nothing"


# --- the owner --------------------------------------------------------------------------------------------------------


class Liveness:
    """Watches whom this broker has to watch in its present role, and acts."""

    def __init__(
        self,
        view: MetadataView,
        writer: MetadataWriter,
        member: ClusterMember,
        config: BrokerConfig,
        dialer: Dialer,
        clock: Clock,
    ) -> None:
        self._view = view
        self._writer = writer
        self._member = member
        self._config = config
        self._silence_s = config.session_timeout_ms / 1000
        self._dialer = dialer
        self._clock = clock
        self._peers: dict[int, Peer] = {}
        self._tasks = Tasks(clock)
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._fenced_s: dict[int, float] = {}
        self._inquiry: Inquiry | None = None
        """What is asked about the controller while it refuses this broker."""
        self._asking: asyncio.Task[None] | None = None
        self._look_again_s = float("inf")
        """When a decision is due that nothing heard till then need bring about."""
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"Liveness({list(self._peers.values())})"

    def suspect(self, broker_id: int) -> None:
        """Somebody was refused by that broker: ask it now."""
        peer = self._peers.get(broker_id)
        if peer is not None:
            peer.ask_now()

    def called(self, broker_id: int) -> None:
        """That broker called here: it lives."""
        peer = self._peers.get(broker_id)
        if peer is not None:
            peer.called()

    async def is_refused_by(self, broker_id: int, broker_epoch: int) -> bool | None:
        """Whether that incarnation of a broker refuses this one, asked now; None where nobody here knows."""
        peer = self._peers.get(broker_id)
        return await peer.is_refusing() if peer is not None and peer.health.broker_epoch == broker_epoch else None

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
            self._drop_inquiry()
            await self._watch_only({})

    async def _next(self) -> None:
        timer = self._clock.call_later(self._tick_s(), self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    def _tick_s(self) -> float:
        return min(TICK_S, max(self._look_again_s - self._clock.monotonic(), 0.0))

    def _resume(self, now_s: float) -> None:
        for peer in self._peers.values():
            peer.resume(now_s)

    async def _step(self, now_s: float) -> None:
        image = self._view.image
        was_fenced = self._member.broker_id in self._fenced_s
        self._note_fenced(image, now_s)
        await self._watch_only(self._wanted(image))
        self._look_again_s = float("inf")
        if self._writer.is_open:
            self._drop_inquiry()
            await self._reign(now_s)
        else:
            if not was_fenced and self._member.broker_id in self._fenced_s:
                self.suspect(image.controller_id)  # a call shows the controller that this broker lives
            self._stand_by(image, now_s)

    # --- whom to watch ------------------------------------------------------------------------------------------------

    def _note_fenced(self, image: ClusterImage, now_s: float) -> None:
        fenced = {broker.broker_id for broker in image.brokers.values() if broker.fenced}
        self._fenced_s = {broker_id: self._fenced_s.get(broker_id, now_s) for broker_id in fenced}

    def _wanted(self, image: ClusterImage) -> dict[int, tuple[int, Endpoint]]:
        own_id = self._member.broker_id
        if self._writer.is_open:
            ids = self._registered(image)
        else:
            ids = [image.controller_id]
        return {
            broker_id: (image.brokers[broker_id].broker_epoch, endpoint)
            for broker_id, endpoint in self._endpoints(image, ids).items()
            if broker_id != own_id
        }

    def _registered(self, image: ClusterImage) -> list[int]:
        """Those of the image who have a session with the store, as far as is known here."""
        membership = self._member.membership
        if membership is None:
            return list(image.brokers)
        there = {member.registration.broker_id for member in membership.members}
        return [broker_id for broker_id in image.brokers if broker_id in there]

    def _endpoints(self, image: ClusterImage, broker_ids: Iterable[int]) -> dict[int, Endpoint]:
        found = ((broker_id, inter_broker_endpoint(image, broker_id)) for broker_id in broker_ids)
        return {broker_id: endpoint for broker_id, endpoint in found if endpoint is not None}

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
                self._watches[broker_id] = self._tasks.keep(f"watch-broker-{broker_id}", peer.watch)
        if ended:
            await asyncio.wait(ended)

    def _new_peer(self, broker_id: int, broker_epoch: int, endpoint: Endpoint) -> Peer:
        return Peer(
            broker_id,
            broker_epoch,
            endpoint,
            dialer=self._dialer,
            interval_s=min(PROBE_INTERVAL_S, self._silence_s / PROBES_PER_SESSION),
            clock=self._clock,
            changed=self._changed,
        )

    # --- what to do ---------------------------------------------------------------------------------------------------

    def _verdict(self, now_s: float) -> Verdict:
        health = [peer.health for peer in self._peers.values()]
        registered = len(self._registered(self._view.image))
        return judge(health, self._fenced_s, registered=registered, now_s=now_s, silence_s=self._silence_s)

    async def _reign(self, now_s: float) -> None:
        verdict = self._verdict(now_s)
        if verdict.again_s is not None:
            self._look_again_s = verdict.again_s
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
        if peer is None or not refuses(peer.health):
            self._drop_inquiry()
            return
        controller, inquiry = peer.health, self._inquiry
        if inquiry is None or inquiry.controller_epoch != image.controller_epoch:
            self._drop_inquiry()
            self._inquire(image, controller, now_s)
            return
        if inquiry.hearsay is None:
            return  # there are some who have not been heard
        at_s = takeover_s(
            controller,
            inquiry.hearsay,
            registered=len(self._registered(image)),
            is_fenced=self._member.broker_id in self._fenced_s,
            turn_s=inquiry.turn_s,
            now_s=now_s,
        )
        if at_s is None:
            self._member.stand_back()
        elif now_s < at_s:
            self._look_again_s = at_s
        else:
            self._take_over(image, inquiry, controller)

    def _take_over(self, image: ClusterImage, inquiry: Inquiry, controller: Health) -> None:
        assert inquiry.hearsay is not None
        inquiry.turn_s = self._clock.monotonic() + PROBE_INTERVAL_S  # for another attempt, if this one comes to nothing
        logger.warning("the controller, broker %d, is dead: taking over", controller.broker_id)
        dead = {controller.broker_id: controller.broker_epoch}
        if not is_majority(inquiry.hearsay, len(self._registered(image))):
            # They have had the same time to show that they live.
            known = image.brokers.keys() & inquiry.hearsay.dead_too
            dead |= {broker_id: image.brokers[broker_id].broker_epoch for broker_id in known}
        self._member.take_over(image.controller_epoch, dead)

    def _inquire(self, image: ClusterImage, controller: Health, now_s: float) -> None:
        own_id = self._member.broker_id
        turn_s = now_s + takeover_delay_s(image, own_id)
        inquiry = self._inquiry = Inquiry(controller, image.controller_epoch, turn_s, self._dialer, self._clock)
        logger.info("the controller, broker %d, refuses: asking the others about it", controller.broker_id)

        async def ask_until_dropped() -> None:
            while True:
                image = self._view.image
                ids = {*self._registered(image)} - {own_id, controller.broker_id}
                await inquiry.ask(self._endpoints(image, ids))
                self._changed.set()
                is_reached = inquiry.hearsay is not None and inquiry.hearsay.reach_it
                await self._clock.sleep(PROBE_INTERVAL_S if is_reached else UNREACHABLE_RETRY_S)

        self._asking = self._tasks.keep(f"ask-about-broker-{controller.broker_id}", ask_until_dropped)

    def _drop_inquiry(self) -> None:
        asking, self._asking, self._inquiry = self._asking, None, None
        if asking is not None:
            asking.cancel()
            self._member.stand_back()
