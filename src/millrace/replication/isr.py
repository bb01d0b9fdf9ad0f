"""Which replicas count: pure rules over what a leader knows of its followers.

Not here: who they are and what follows for a leader (`leadership`), asking for a change of the ISR (`proposals`).
Offsets are log ends as the replica promised them by fetching, so in `flush.mode=group` they are on that replica's disk.

Invariants (docs/coordination.md has the reasons):
- The high watermark is never above the log end of a member of the ISR, of one that is proposed to join it, or of the
  leader itself; a proposed removal changes nothing until it has happened.
- A replica joins only when it has everything up to the high watermark and to the start of the leader's epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

UNKNOWN_OFFSET: Final = -1
NEVER: Final = float("-inf")


@dataclass(slots=True)
class Follower:
    """What a leader knows of one follower in this leader epoch. Times are monotonic seconds."""

    broker_id: int
    log_end: int = UNKNOWN_OFFSET
    broker_epoch: int = -1
    caught_up_at: float = NEVER
    """When it last had everything that the leader had."""
    log_start: int = UNKNOWN_OFFSET
    _fetched_at: float = NEVER
    _leader_end: int = UNKNOWN_OFFSET

    def fetched(self, offset: int, broker_epoch: int, leader_end: int, now: float) -> None:
        """It asks for `offset`, so it has everything below.

        A follower of a busy leader may never be at its end; that it has reached what was the end at its last fetch
        shows that it was in step then.
        """
        if offset >= leader_end:
            self.caught_up_at = now
        elif offset >= self._leader_end >= 0:
            self.caught_up_at = max(self.caught_up_at, self._fetched_at)
        self.log_end = offset
        self.broker_epoch = broker_epoch
        self._fetched_at = now
        self._leader_end = leader_end

    def forgotten(self) -> Follower:
        """The same follower before its first fetch; an incarnation that is over stays over."""
        return Follower(self.broker_id, broker_epoch=self.broker_epoch)

    def is_in_step(self, leader_end: int, now: float, max_lag_s: float) -> bool:
        """Whether it has everything, or had it no longer than `max_lag_s` ago."""
        return self.log_end == leader_end or now - self.caught_up_at <= max_lag_s


def high_watermark(
    own_end: int, members: Collection[int], joining: Collection[int], followers: Mapping[int, Follower]
) -> int:
    """The largest offset that the leader and all of `members` and `joining` have; UNKNOWN_OFFSET while one is silent.

    `members` is the ISR with those proposed for it. `joining` are followers in step that are about to be proposed: the
    mark waits for them, or a busy partition would run away from them for ever.
    """
    lowest = own_end
    for broker_id in members:
        follower = followers.get(broker_id)
        if follower is not None:  # the leader itself is no follower
            lowest = min(lowest, follower.log_end)
    for broker_id in joining:
        lowest = min(lowest, followers[broker_id].log_end)
    return lowest


def may_join(follower: Follower, mark: int, epoch_start: int) -> bool:
    """Whether a follower outside of the ISR has what every member must have."""
    return follower.log_end >= max(mark, epoch_start, 0)


def lagging(
    isr: Iterable[int], followers: Mapping[int, Follower], leader_end: int, now: float, max_lag_s: float
) -> list[int]:
    """The members of the ISR that have been behind for too long."""
    return [
        broker_id
        for broker_id in isr
        if broker_id in followers and not followers[broker_id].is_in_step(leader_end, now, max_lag_s)
    ]
