"""What is counted of a broker's queues: plain numbers, read when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace.queues.acquisition import AcknowledgeType, Acquired, Changes


class QueueCounts:
    """The counts of all share-partitions of one broker. Owner: the event loop."""

    __slots__ = (
        "acknowledged",
        "archived",
        "dead_letter_failures",
        "dead_letters",
        "delivered",
        "lock_timeouts",
        "redelivered",
    )

    def __init__(self) -> None:
        self.delivered = 0
        self.redelivered = 0
        """Of those, the ones that somebody had before."""
        self.acknowledged: dict[AcknowledgeType, int] = {}
        self.lock_timeouts = 0
        self.archived = 0
        """Records that nobody will get any more, though nobody has accepted them."""
        self.dead_letters = 0
        self.dead_letter_failures = 0

    def __repr__(self) -> str:
        return f"QueueCounts({self.delivered} delivered, {self.redelivered} again, {self.archived} archived)"

    def acquired(self, batches: Iterable[Acquired]) -> int:
        """Records were given to a member; returns how many."""
        delivered = 0
        for batch in batches:
            count = batch.last_offset - batch.first_offset + 1
            delivered += count
            if batch.delivery_count > 1:
                self.redelivered += count
        self.delivered += delivered
        return delivered

    def acknowledge(self, pieces: Iterable[tuple[int, int, AcknowledgeType]]) -> None:
        """A member's word for its records counts."""
        for first, last, kind in pieces:
            self.acknowledged[kind] = self.acknowledged.get(kind, 0) + last - first + 1

    def changed(self, changes: Changes) -> None:
        self.lock_timeouts += changes.timed_out
        self.archived += changes.given_up
