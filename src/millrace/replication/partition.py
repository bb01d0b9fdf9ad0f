"""One partition as its leader sees it: append, commit, read.

Invariants
- A record is acknowledged with acks=all, and shown to consumers, only below the high watermark.
- In `flush.mode=group` the high watermark never passes what fdatasync has put on disk; in the other modes it is the end
  of the log (a process may die, a machine may not).
- The high watermark never goes back while the partition is led.
- Every append carries the leader epoch under which it was made.

The log opens at first use: thousands of idle partitions cost an object each and no file. What is not here: followers
and the ISR, which arrive with the cluster; bytes on disk (`storage.log`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from millrace.errors import ApiError, ErrorCode
from millrace.replication.watermark import Reached, Watermark
from millrace.storage.settings import FlushMode

if TYPE_CHECKING:
    from millrace.clock import Clock
    from millrace.storage.log import Appended, Log, ReadResult
    from millrace.storage.recovery import LogPosition


class Partition:
    """A led replica of one partition. Owner: the event loop; nothing here awaits while it holds a half-made change."""

    def __init__(
        self,
        topic: str,
        index: int,
        topic_id: uuid.UUID,
        *,
        leader_epoch: int,
        open_log: Callable[[], Log],
        clock: Clock,
    ) -> None:
        self.topic = topic
        self.index = index
        self.topic_id = topic_id
        self.leader_epoch = leader_epoch
        self._open_log = open_log
        self._clock = clock
        self._log: Log | None = None
        self._committed: LogPosition | None = None
        self._closed = False
        self.high_watermark = Watermark(0)

    def __repr__(self) -> str:
        state = "unopened" if self._log is None else f"high watermark {self.high_watermark.offset}"
        return f"Partition({self.topic}-{self.index}, epoch {self.leader_epoch}, {state})"

    @property
    def log(self) -> Log:
        """The log on disk, opened now if it was not yet."""
        if self._log is None:
            if self._closed:
                raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{self.topic}-{self.index} was deleted")
            log = self._open_log()
            log.on_flushed.append(self._commit_flushed)
            self._log = log
            # What recovery kept but could not know to be on disk is committed by the flush that follows it.
            self._commit(log.flushed if log.config.flush_mode is FlushMode.GROUP else log.end)
        return self._log

    @property
    def committed(self) -> LogPosition:
        """Where consumers may read up to."""
        if self._committed is None:
            _ = self.log
        assert self._committed is not None
        return self._committed

    @property
    def is_open(self) -> bool:
        return self._log is not None

    # --------------------------------------------------------------------------------------------------------- writing

    def append(self, records: bytes | memoryview, *, from_client: bool = True) -> Appended:
        """Append whole batches now; the caller asks `when_committed` if it wants more than that."""
        log = self.log
        appended = log.append(
            records, leader_epoch=self.leader_epoch, now_ms=self._clock.wall_ms(), from_client=from_client
        )
        if log.config.flush_mode is not FlushMode.GROUP:
            self._commit(log.end)
        return appended

    def when_committed(self, last_offset: int, reached: Reached) -> bool:
        """Have `reached` called once `last_offset` is committed; False, and no call, where it already is."""
        return self.high_watermark.when(last_offset + 1, reached)

    async def wait_committed(self, last_offset: int) -> None:
        """Return once `last_offset` is committed. Cancellation leaves the records where they are."""
        future = self.high_watermark.reach(last_offset + 1)
        if future is not None:
            await future

    def _commit_flushed(self) -> None:
        assert self._log is not None
        self._commit(self._log.flushed)

    def _commit(self, position: LogPosition) -> None:
        if self._committed is None or position.offset > self._committed.offset:
            self._committed = position
            self.high_watermark.advance(position.offset)

    # --------------------------------------------------------------------------------------------------------- reading

    def check_leader_epoch(self, epoch: int) -> None:
        """Refuse a client whose idea of the leadership is not ours (KIP-320)."""
        if epoch < 0 or epoch == self.leader_epoch:
            return
        if epoch < self.leader_epoch:
            raise ApiError(ErrorCode.FENCED_LEADER_EPOCH, f"leader epoch {epoch} is over; it is {self.leader_epoch}")
        raise ApiError(ErrorCode.UNKNOWN_LEADER_EPOCH, f"leader epoch {epoch} has not begun; it is {self.leader_epoch}")

    def read(self, offset: int, max_bytes: int, *, at_least_one: bool) -> ReadResult:
        """Committed batches from the one that holds `offset` on; raises OFFSET_OUT_OF_RANGE outside the log."""
        log = self.log
        if offset < log.start_offset or offset > log.end_offset:
            raise ApiError(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {offset} is not in {log.start_offset}..{log.end_offset}"
            )
        return log.read(offset, max_bytes, limit=self.committed, at_least_one=at_least_one)

    def delete_records_before(self, offset: int) -> int:
        """Move the start of the log up to `offset` (-1: the high watermark); returns the new start."""
        target = self.high_watermark.offset if offset == -1 else offset
        if target < 0 or target > self.committed.offset:
            raise ApiError(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {offset} is beyond the high watermark {self.committed.offset}"
            )
        self.log.delete_records_before(target)
        return self.log.start_offset

    def enforce_retention(self) -> None:
        """Drop segments that are too old or too many; never one that is not committed."""
        self.log.enforce_retention(self._clock.wall_ms(), self.committed.offset)

    # ---------------------------------------------------------------------------------------------------------- ending

    def close(self, reason: ApiError) -> None:
        """End every wait with `reason`; the log is its directory's to close or delete."""
        self._closed = True
        self.high_watermark.fail(reason)
        if self._log is not None:
            self._log.on_flushed.remove(self._commit_flushed)
