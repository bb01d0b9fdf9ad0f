"""Offsets of open transactions."""

from __future__ import annotations

from millrace.groups.offsets.committed import CommittedOffset
from millrace.groups.offsets.pending import GroupPartition, PendingOffsets

ORDERS = GroupPartition("g", "orders", 0)
USERS = GroupPartition("g", "users", 1)


def at(record_offset: int) -> CommittedOffset:
    return CommittedOffset(100 + record_offset, record_offset=record_offset)


def test_a_transaction_ends_with_its_last_offset_of_each_partition() -> None:
    pending = PendingOffsets()
    pending.put(1, ORDERS, at(3))
    pending.put(1, ORDERS, at(5))
    pending.put(1, USERS, at(6))
    pending.put(2, ORDERS, at(7))
    assert pending.of_group("g") == {("orders", 0), ("users", 1)}
    assert pending.end(1, 8) == [(ORDERS, at(5)), (USERS, at(6))]
    assert pending.of_group("g") == {("orders", 0)}, "the other producer's"
    assert pending.end(1, 8) == []
    assert pending.end(2, 9) == [(ORDERS, at(7))]
    assert not pending.of_group("g")
    assert repr(pending) == "PendingOffsets(0 producers)"


def test_a_marker_ends_nothing_that_lies_behind_it() -> None:
    pending = PendingOffsets()
    pending.put(1, ORDERS, at(3))
    pending.put(1, USERS, at(5))
    assert pending.end(1, 4) == [(ORDERS, at(3))]
    assert pending.of_group("g") == {("users", 1)}


def test_what_is_withdrawn_is_withdrawn_from_every_transaction() -> None:
    pending = PendingOffsets()
    pending.put(1, ORDERS, at(3))
    pending.put(2, ORDERS, at(4))
    pending.put(2, GroupPartition("h", "orders", 0), at(5))
    pending.withdraw(ORDERS)
    pending.withdraw(ORDERS)
    pending.withdraw(GroupPartition("nobody", "orders", 0))
    assert not pending.of_group("g")
    assert pending.end(1, 9) == []
    assert list(pending.of_topic("orders")) == [("h", 0, at(5))]
    assert list(pending.of_topic("users")) == []
