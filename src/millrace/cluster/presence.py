"""What this broker tells clients about others that are just going: hints, on which nothing here depends.

A client that learns of a failover all at once, the old leader gone from the list of brokers and the new one in its
place, may take a second to find its way (librdkafka drops what it knew of the partition, and asks again at its next
scan). And one that asks before the failover is decided is told the dead leader once more, and does not ask again
soon. So a broker that was fenced stays in the list for a while, and a leader whose connection has just broken is
"not available" until the controller has decided, or a moment has passed.

Not here: who is alive (`liveness`), who leads (`elections`). Owner: the event loop.
"""

from __future__ import annotations

from typing import Final

from millrace.clock import Clock
from millrace.cluster.image import BrokerImage, ClusterImage
from millrace.metadata.deltas import BrokerFenced, BrokerRegistered, ChangeSet

LISTED_AFTER_FENCED_S: Final = 3.0
DOUBTED_S: Final = 1.0


class Presence:
    """Who left a moment ago, and who seems to."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._fenced_at: dict[int, float] = {}
        self._lost_at: dict[int, float] = {}

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

    def lost(self, broker_id: int) -> None:
        """The connection to a broker broke. Said again and again it counts once: it may be only this broker's view."""
        self._lost_at.setdefault(broker_id, self._clock.monotonic())

    def reached(self, broker_id: int) -> None:
        """The broker answers."""
        self._lost_at.pop(broker_id, None)

    def is_doubted(self, broker_id: int) -> bool:
        """Whether the broker seems to have died, and nobody has decided yet."""
        since = self._lost_at.get(broker_id)
        return since is not None and self._clock.monotonic() - since < DOUBTED_S

    def listed(self, image: ClusterImage) -> tuple[BrokerImage, ...]:
        """The brokers that clients are told of: those alive, and those fenced a moment ago."""
        if not self._fenced_at:
            return image.live_brokers
        earliest = self._clock.monotonic() - LISTED_AFTER_FENCED_S
        self._fenced_at = {each: since for each, since in self._fenced_at.items() if since >= earliest}
        known = (image.brokers[each] for each in sorted(image.brokers))
        return tuple(each for each in known if not each.fenced or each.broker_id in self._fenced_at)
