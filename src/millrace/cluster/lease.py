"""How long this broker may take its own image for the truth without asking: until the cluster could have gone on alone.

The controller gives a broker's partitions to others when its session has expired, or when it has been silent for as
long as a session lasts. A broker that knows that it was heard less than that long ago has not been replaced behind its
back; one that was paused or cut off cannot know, and learns it late. The lease tells the two apart, by the clock of
this machine alone.

Who needs it: whoever gives something away that no epoch can take back (records of a queue). Everybody else is fenced
when it writes. Not here: what to do without a lease (`queues.partition` asks the share coordinator).

Invariants
- A lease counts from before the question was sent, and the image has all that was in the log when it was answered.
- It is granted to one registration, and lasts for less than the session by more than the time between two probes of
  `liveness`: whoever was heard by the store was heard by the controller so much earlier at most.
- A broker that is told that it was replaced hears that from the log, at once; the lease is for those who hear nothing.

Owner: the event loop; `run` is the one task that renews.
"""

from __future__ import annotations

from typing import Final

from millrace.clock import Clock
from millrace.cluster.membership import ClusterMember
from millrace.cluster.view import MetadataView
from millrace.metadata.store import MetadataStore

SHARE_OF_SESSION: Final = 0.6
"""A probe of `liveness` comes at least every quarter of a session."""
RENEWALS_PER_LEASE: Final = 4


class Lease:
    """Whether this broker is where its image says, as far as time can tell."""

    def __init__(
        self, store: MetadataStore, view: MetadataView, member: ClusterMember, *, session_s: float, clock: Clock
    ) -> None:
        self._store = store
        self._view = view
        self._member = member
        self._lasts_s = session_s * SHARE_OF_SESSION
        self._clock = clock
        self._until_s = float("-inf")

    def __repr__(self) -> str:
        return f"Lease(for {self._until_s - self._clock.monotonic():.1f} s)"

    @property
    def is_held(self) -> bool:
        return self._clock.monotonic() < self._until_s

    async def run(self) -> None:
        """Renew until cancelled. While the store does not answer the question waits, and the lease runs out."""
        while True:
            await self._renew()
            await self._clock.sleep(self._lasts_s / RENEWALS_PER_LEASE)

    async def _renew(self) -> None:
        asked_s = self._clock.monotonic()
        registration = self._member.registration
        await self._view.wait_applied(await self._store.end())
        known = self._view.image.brokers.get(self._member.broker_id)
        if registration is None or registration != self._member.registration:
            return  # a session has ended meanwhile
        if known is not None and known.broker_epoch == registration and not known.fenced:
            self._until_s = asked_s + self._lasts_s
