"""The share coordinator's decisions."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from millrace.errors import ApiError, ErrorCode
from millrace.queues.batches import RecordState, StateBatch
from millrace.queues.records import ShareKey, Snapshot, Update
from millrace.queues.state import (
    SharePartitionState,
    Write,
    apply,
    partition_for,
    plan_initialize,
    plan_read,
    plan_rewrite,
    plan_write,
)

ACKNOWLEDGED = RecordState.ACKNOWLEDGED
BEGUN = Snapshot(0, 3, 5, 10, 0, 100, 100, ())


def batch(first: int, last: int) -> StateBatch:
    return StateBatch(first, last, ACKNOWLEDGED, 1)


def news(
    *, state_epoch: int = 3, leader_epoch: int = 5, start: int = -1, batches: tuple[StateBatch, ...] = ()
) -> Write:
    return Write(state_epoch, leader_epoch, start, batches, completed=len(batches))


def test_a_share_partition_begins() -> None:
    assert plan_initialize(None, 1, -1, 7) == Snapshot(0, 1, 0, -1, -1, 7, 7, ())
    assert plan_initialize(None, 1, 20, 7) == Snapshot(0, 1, 0, 20, 0, 7, 7, ())


def test_it_begins_anew_only_in_the_same_or_a_later_state_epoch() -> None:
    state = SharePartitionState(replace(BEGUN, batches=(batch(11, 12),)))
    again = plan_initialize(state, 4, 2, 7)
    assert again == Snapshot(1, 4, 5, 2, 0, 7, 7, ())
    after = apply(state, again)
    assert after is not None
    assert (after.snapshot.start_offset, after.snapshot.batches) == (2, ())
    with pytest.raises(ApiError) as refused:
        plan_initialize(after, 3, 0, 8)
    assert refused.value.code is ErrorCode.FENCED_STATE_EPOCH


def test_what_was_not_begun_is_neither_read_nor_written() -> None:
    for attempt in (lambda: plan_read(None, 1), lambda: plan_write(None, news(), 500, 0)):
        with pytest.raises(ApiError) as refused:
            attempt()
        assert refused.value.code is ErrorCode.INVALID_REQUEST


def test_reading_fences_earlier_leaders() -> None:
    state: SharePartitionState | None = SharePartitionState(BEGUN)
    assert plan_read(state, 5) is None
    assert plan_read(state, -1) is None
    update = plan_read(state, 6)
    assert update == Update(0, 6, 10, 0, ())
    state = apply(state, update)
    with pytest.raises(ApiError) as refused:
        plan_write(state, news(leader_epoch=5), 500, 0)
    assert refused.value.code is ErrorCode.FENCED_LEADER_EPOCH
    with pytest.raises(ApiError):
        plan_read(state, 5)
    assert plan_write(state, news(leader_epoch=6), 500, 0)
    with pytest.raises(ApiError) as refused:
        plan_write(state, news(leader_epoch=6, state_epoch=2), 500, 0)
    assert refused.value.code is ErrorCode.FENCED_STATE_EPOCH


def test_every_so_many_updates_there_is_a_snapshot() -> None:
    state: SharePartitionState | None = SharePartitionState(BEGUN)
    kinds = []
    for number in range(7):
        record = plan_write(state, news(start=10 + number, batches=(batch(20 + number, 20 + number),)), 2, number)
        kinds.append(type(record))
        state = apply(state, record)
    assert kinds == [Update, Update, Snapshot, Update, Update, Snapshot, Update]
    assert state is not None
    assert state.snapshot == Snapshot(2, 3, 5, 16, 1, 5, 5, (batch(20, 26),))


def test_a_late_write_does_not_take_the_start_back() -> None:
    state = apply(SharePartitionState(BEGUN), plan_write(SharePartitionState(BEGUN), news(start=30), 500, 0))
    for per_snapshot in (500, 0):
        after = apply(state, plan_write(state, news(start=20, batches=(batch(25, 32),)), per_snapshot, 0))
        assert after is not None
        assert (after.snapshot.start_offset, after.snapshot.batches) == (30, (batch(30, 32),))


def test_a_state_batch_must_have_an_order() -> None:
    with pytest.raises(ApiError) as refused:
        plan_write(SharePartitionState(BEGUN), news(batches=(batch(5, 4),)), 500, 0)
    assert refused.value.code is ErrorCode.INVALID_REQUEST


def test_an_update_whose_snapshot_was_cut_off_means_nothing() -> None:
    assert apply(None, Update(0, 1, 5, 0, ())) is None
    assert apply(SharePartitionState(BEGUN), None) is None


def test_a_rewrite_changes_nothing_but_its_number_and_time() -> None:
    state = apply(
        SharePartitionState(BEGUN), plan_write(SharePartitionState(BEGUN), news(batches=(batch(11, 12),)), 500, 0)
    )
    assert state is not None
    after = apply(state, plan_rewrite(state, 900))
    assert after == SharePartitionState(replace(state.snapshot, snapshot_epoch=1, written_ms=900))


def test_the_partition_of_a_key_is_by_the_absolute_value_of_its_hash() -> None:
    # hashCode of "g:AQIDBAUGBwgJCgsMDQ4PEA:0" and of its neighbours, worked out in Java's way.
    topic_id = uuid.UUID(int=0x0102030405060708090A0B0C0D0E0F10)
    for partition in range(20):
        key = ShareKey("g", topic_id, partition)
        value = 0
        for character in str(key):
            value = (value * 31 + ord(character)) & 0xFFFFFFFF
        signed = value - 2**32 if value >= 2**31 else value
        assert partition_for(key, 50) == abs(signed) % 50
