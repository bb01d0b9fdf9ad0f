"""The assignor of share groups, `simple`: who reads which partitions. Pure.

Partitions are spread evenly over the members, and where there are more members than partitions, members over the
partitions: every partition has a reader, and every member something to read. Balance comes first, then that members
keep what they have. Where members subscribe to different topics this holds for each topic by itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from uuid import UUID

from millrace.groups.assignors import Assignment, Subscriber

_Slot = tuple[UUID, int]


def simple(members: Sequence[Subscriber], partitions: Mapping[UUID, Sequence[int]]) -> Assignment:
    """A target for each member; `partitions` has those that may be read, by topic."""
    shares: dict[str, set[_Slot]] = {member.member_id: set() for member in members}
    members = sorted(members, key=lambda member: member.member_id)
    topics = {topic for member in members for topic in member.topics if topic in partitions}
    if all(member.topics == members[0].topics for member in members):
        _spread(members, [(topic, index) for topic in sorted(topics) for index in partitions[topic]], shares)
    else:
        for topic in topics:
            readers = [member for member in members if topic in member.topics]
            _spread(readers, [(topic, index) for index in partitions[topic]], shares)
    return {member_id: _as_target(share) for member_id, share in shares.items()}


def _as_target(share: set[_Slot]) -> dict[UUID, tuple[int, ...]]:
    target: dict[UUID, list[int]] = {}
    for topic, index in sorted(share):
        target.setdefault(topic, []).append(index)
    return {topic: tuple(indices) for topic, indices in target.items()}


def _spread(members: Sequence[Subscriber], slots: Sequence[_Slot], shares: Mapping[str, set[_Slot]]) -> None:
    """Add these partitions to the members' shares: each to equally many members, each member equally many."""
    if not (members and slots):
        return
    readers_each = -(-len(members) // len(slots))
    least, more = divmod(readers_each * len(slots), len(members))
    missing = dict.fromkeys(slots, readers_each)
    has = {
        member.member_id: [slot for topic, own in member.target.items() for slot in ((topic, i) for i in own)]
        for member in members
    }
    has = {member_id: [slot for slot in own if slot in missing] for member_id, own in has.items()}
    room: list[tuple[int, str]] = []
    # Those who have the most get the larger quotas, so that they need not give anything up.
    for position, member in enumerate(sorted(members, key=lambda each: -len(has[each.member_id]))):
        quota = least + (position < more)
        for slot in has[member.member_id]:
            if quota and missing[slot]:
                missing[slot] -= 1
                quota -= 1
                shares[member.member_id].add(slot)
        if quota:
            room.append((-quota, member.member_id))
    heapq.heapify(room)
    for slot in slots:
        _fill(slot, missing[slot], room, shares)


def _fill(slot: _Slot, count: int, room: list[tuple[int, str]], shares: Mapping[str, set[_Slot]]) -> None:
    """Find `count` more readers, those with the most room first. Whoever reads the partition already is passed over:
    then it has one reader less than others."""
    passed: list[tuple[int, str]] = []
    while count and room:
        quota, member_id = heapq.heappop(room)
        if slot in shares[member_id]:
            passed.append((quota, member_id))
            continue
        shares[member_id].add(slot)
        count -= 1
        if quota + 1:
            passed.append((quota + 1, member_id))
    for each in passed:
        heapq.heappush(room, each)
