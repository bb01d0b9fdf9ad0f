"""What this broker tells clients about others that are just going: hints, on which nothing here depends.

A client that learns of a failover all at once, the old leader gone from the list of brokers and the new one in its
place, may take a second to find its way (librdkafka drops what it knew of the partition, and asks again at its next
scan). So a broker that was fenced stays in the list for a while. And a client asks the moment its connection breaks,
before anybody has decided: told the dead leader once more, it does not ask again soon; told the dead leader first and
"no leader" then, it asks no sooner than at its next scan. So a leader whose connection has just broken is doubted, and
an answer that would have to name it waits until the controller has decided, or a moment has passed (`decided`).

Not here: who is alive (`liveness`), who leads (`elections`). Owner: the event loop.
"""

from __future__ import annotations

import asyncio
from typing import Final

from millrace.clock import Clock
from millrace.cluster.image import BrokerImage, ClusterImage
from millrace.metadata.deltas import BrokerFenced, BrokerRegistered, ChangeSet

LISTED_AFTER_FENCED_S: Final = 3.0
DOUBTED_S: Final = 1.0
NEWS_S: Final = 0.005
"""A dying process ends its newest connections first: clients may know of its death some milliseconds before brokers."""
HELD_S: Final = 0.4
"""How long an answer waits for a decision, which takes about 0.1 s: what comes later on the connection waits, too."""


class Presence:
    """Who left a moment ago, and who seems to."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._fenced_at: dict[int, float] = {}
        self._lost_at: dict[int, float] = {}
        self._undecided: set[asyncio.Future[None]] = set()

    def __repr__(self) -> str:
        return f"Presence(fenced {sorted(self._fenced_at)}, lost {sorted(self._lost_at)})"

    def follow(self, _old: ClusterImage, _new: ClusterImage, changes: ChangeSet) -> None:
        """Take note of a delta."""
        for change in changes:
            if isinstance(change, BrokerFenced) and change.fenced:
                self._fenced_at[change.broker_id] = self._clock.monotonic()
                self._lost_at.pop(change.broker_id, None)
            elif isinstance(change, BrokerFenced | BrokerRegistered):
                self._fenced_at.pop(change.broker_id, None)
                self._lost_at.pop(change.broker_id, None)
        self._tell()

    def lost(self, broker_id: int) -> None:
        """The connection to a broker broke. Said again and again it counts once: it may be only this broker's view."""
        self._lost_at.setdefault(broker_id, self._clock.monotonic())

    def reached(self, broker_id: int) -> None:
        """The broker answers."""
        self._lost_at.pop(broker_id, None)
        self._tell()

    def is_doubted(self, broker_id: int) -> bool:
        """Whether the broker seems to have died, and nobody has decided yet."""
        since = self._lost_at.get(broker_id)
        return since is not None and self._clock.monotonic() - since < DOUBTED_S

    @property
    def doubts(self) -> bool:
        """Whether anybody is doubted."""
        return any(self.is_doubted(broker_id) for broker_id in self._lost_at)

    async def news(self, image: ClusterImage) -> None:
        """Before a leader is named: let the news of its death arrive, if that is why somebody asks."""
        if len(image.live_brokers) > 1:
            await self._clock.sleep(NEWS_S)

    async def decided(self) -> None:
        """Return once nobody is doubted, or after `HELD_S`."""
        if not self.doubts:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._undecided.add(waiter)
        timer = self._clock.call_later(HELD_S, lambda: _wake(waiter))
        try:
            await waiter
        finally:
            timer.cancel()
            self._undecided.discard(waiter)

    def _tell(self) -> None:
        if self._undecided and not self.doubts:
            for waiter in self._undecided:
                _wake(waiter)

    def listed(self, image: ClusterImage) -> tuple[BrokerImage, ...]:
        """The brokers that clients are told of: those alive, and those fenced a moment ago."""
        if not self._fenced_at:
            return image.live_brokers
        earliest = self._clock.monotonic() - LISTED_AFTER_FENCED_S
        self._fenced_at = {each: since for each, since in self._fenced_at.items() if since >= earliest}
        known = (image.brokers[each] for each in sorted(image.brokers))
        return tuple(each for each in known if not each.fenced or each.broker_id in self._fenced_at)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
