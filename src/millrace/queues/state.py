"""What the share coordinator knows of one share-partition, and which record each request leads to. Pure.

A plan looks at the state as it will be when everything appended so far is durable, and returns the record to append,
or raises the ApiError that the caller is told. `apply` is how a record changes the state, live and at a replay alike.

Fencing: the leader epoch that was seen last (a leader reads before it writes, which raises it) keeps an older leader
from writing; the state epoch, raised when a group is reset, keeps everybody away who knows only what was before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from millrace.errors import ApiError, ErrorCode
from millrace.queues.batches import StateBatch, combine
from millrace.queues.records import ShareKey, Snapshot, Update
from millrace.replication.state_topic import java_hash

NO_START: Final = -1
"""A start offset that the group's reset strategy has yet to choose."""
NO_COUNT: Final = -1
NOT_SAID: Final = -1
_NEW_EPOCH: Final = 0
_MIN_INT32: Final = 2**31
"""The hash whose absolute value does not fit: Java's, of the smallest int32."""


@dataclass(frozen=True, slots=True)
class SharePartitionState:
    """One share-partition: the latest snapshot with all updates since."""

    snapshot: Snapshot
    updates: int = 0
    """How many updates there were since the snapshot."""

    @property
    def leader_epoch(self) -> int:
        return self.snapshot.leader_epoch

    @property
    def state_epoch(self) -> int:
        return self.snapshot.state_epoch


@dataclass(frozen=True, slots=True)
class Summary:
    """A share-partition in short."""

    state_epoch: int = 0
    leader_epoch: int = 0
    start_offset: int = NO_START
    completed: int = NO_COUNT


@dataclass(frozen=True, slots=True)
class Write:
    """A leader's news of a share-partition."""

    state_epoch: int
    leader_epoch: int
    start_offset: int
    batches: Sequence[StateBatch]
    completed: int = NO_COUNT


@lru_cache(maxsize=10_000)
def partition_for(key: ShareKey, partitions: int) -> int:
    """Which partition of the state topic keeps a share-partition, as Kafka chooses it."""
    value = java_hash(str(key))
    if value == _MIN_INT32:
        return 0
    return (2**32 - value if value > _MIN_INT32 else value) % partitions


def apply(state: SharePartitionState | None, record: Snapshot | Update | None) -> SharePartitionState | None:
    """The state after a record of the log."""
    if record is None:
        return None
    if isinstance(record, Snapshot):
        # Epochs do not go back: whoever was fenced stays so.
        if state is not None:
            record = replace(
                record,
                leader_epoch=max(record.leader_epoch, state.leader_epoch),
                state_epoch=max(record.state_epoch, state.state_epoch),
            )
        return SharePartitionState(record)
    if state is None:
        # Its snapshot was cut off, because a later one (or the end) of the same share-partition is still to come.
        return None
    so_far = state.snapshot
    start = max(so_far.start_offset, record.start_offset)  # a write that comes late does not take it back
    merged = replace(
        so_far,
        start_offset=start,
        completed=record.completed,
        leader_epoch=max(so_far.leader_epoch, record.leader_epoch),
        batches=tuple(combine(so_far.batches, record.batches, start)),
    )
    return SharePartitionState(merged, state.updates + 1)


def plan_initialize(state: SharePartitionState | None, state_epoch: int, start_offset: int, now_ms: int) -> Snapshot:
    """Begin a share-partition, or begin it anew at another offset."""
    if state is not None:
        _check_state_epoch(state, state_epoch)
    return Snapshot(
        snapshot_epoch=_NEW_EPOCH if state is None else state.snapshot.snapshot_epoch + 1,
        state_epoch=state_epoch,
        leader_epoch=_NEW_EPOCH if state is None else state.leader_epoch,
        start_offset=start_offset,
        completed=NO_COUNT if start_offset == NO_START else 0,
        created_ms=now_ms,
        written_ms=now_ms,
        batches=(),
    )


def plan_read(state: SharePartitionState | None, leader_epoch: int) -> Update | None:
    """What a read leads to: nothing, or the news that another leader has come."""
    if state is None:
        raise ApiError(ErrorCode.INVALID_REQUEST, "the share-partition was not initialized")
    _check_leader_epoch(state, leader_epoch)
    if leader_epoch in {NOT_SAID, state.leader_epoch}:
        return None
    so_far = state.snapshot
    return Update(so_far.snapshot_epoch, leader_epoch, so_far.start_offset, so_far.completed, ())


def plan_write(
    state: SharePartitionState | None, write: Write, updates_per_snapshot: int, now_ms: int
) -> Snapshot | Update:
    """Keep a leader's news: as an update, or as a snapshot where there were enough of those."""
    if state is None:
        raise ApiError(ErrorCode.INVALID_REQUEST, "the share-partition was not initialized")
    _check_leader_epoch(state, write.leader_epoch)
    _check_state_epoch(state, write.state_epoch)
    _check_batches(write.batches)
    so_far = state.snapshot
    if state.updates < updates_per_snapshot:
        batches = tuple(combine((), write.batches, write.start_offset))
        return Update(so_far.snapshot_epoch, so_far.leader_epoch, write.start_offset, write.completed, batches)
    start = max(so_far.start_offset, write.start_offset)
    return Snapshot(
        snapshot_epoch=so_far.snapshot_epoch + 1,
        state_epoch=so_far.state_epoch,
        leader_epoch=so_far.leader_epoch,
        start_offset=start,
        completed=write.completed,
        created_ms=now_ms,
        written_ms=now_ms,
        batches=tuple(combine(so_far.batches, write.batches, start)),
    )


def plan_rewrite(state: SharePartitionState, now_ms: int) -> Snapshot:
    """The same state as a new snapshot, so that the log before it can go."""
    return replace(state.snapshot, snapshot_epoch=state.snapshot.snapshot_epoch + 1, written_ms=now_ms)


def _check_leader_epoch(state: SharePartitionState, leader_epoch: int) -> None:
    if leader_epoch != NOT_SAID and leader_epoch < state.leader_epoch:
        raise ApiError(ErrorCode.FENCED_LEADER_EPOCH, f"leader epoch {state.leader_epoch} was seen")


def _check_state_epoch(state: SharePartitionState, state_epoch: int) -> None:
    if state_epoch != NOT_SAID and state_epoch < state.state_epoch:
        raise ApiError(ErrorCode.FENCED_STATE_EPOCH, f"state epoch {state.state_epoch} was seen")


def _check_batches(batches: Sequence[StateBatch]) -> None:
    if any(batch.first_offset < 0 or batch.last_offset < batch.first_offset for batch in batches):
        raise ApiError(ErrorCode.INVALID_REQUEST, "a state batch ends before it begins")
