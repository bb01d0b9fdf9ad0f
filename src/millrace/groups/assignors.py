"""Server-side assignors: who gets which partition. Pure functions of the members' subscriptions and present targets.

`uniform` gives every member the same number of partitions, as nearly as subscriptions allow, and moves as few as it
can. `range` gives neighbouring partitions of each topic to a member, the same ones of topics with equally many
partitions, whatever was before.

Where members say in which rack they are, `uniform` prefers partitions with a replica there: in what a member keeps when
it must give up some, and in what it is given. Even shares come first, and nothing moves for a rack alone. Members with
unlike subscriptions, and `range`, go without; in Kafka 4.3 no assignor looks at racks.

Every partition of a topic that anybody subscribes to is given to exactly one of its subscribers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from typing import Final
from uuid import UUID

from millrace.groups.epochs import Target

_MAX_PASSES: Final = 16
"""Passes over the topics to even out members with unlike subscriptions; two or three are the rule."""


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A member, as an assignor sees it."""

    member_id: str
    topics: AbstractSet[UUID]
    target: Target
    instance_id: str | None = None
    rack_id: str | None = None


Racks = Mapping[UUID, Sequence[AbstractSet[str]]]
"""For the partitions of topics, in order, where their replicas are; topics for which that is not known are absent."""
NO_RACKS: Final[Racks] = {}

Assignment = dict[str, Target]
Assignor = Callable[[Sequence[Subscriber], Mapping[UUID, int], Racks], Assignment]


def uniform(members: Sequence[Subscriber], partitions: Mapping[UUID, int], racks: Racks = NO_RACKS) -> Assignment:
    """Evenly, with as few moves as possible; `partitions` has the number of every topic that exists."""
    members = sorted(members, key=lambda member: member.member_id)
    if not members:
        return {}
    first = members[0].topics
    if all(member.topics is first or member.topics == first for member in members):
        shares = _alike(members, {topic: partitions[topic] for topic in sorted(first) if topic in partitions}, racks)
    else:
        shares = _unlike(members, partitions)
    return {member.member_id: _as_target(share) for member, share in zip(members, shares, strict=True)}


def range_(members: Sequence[Subscriber], partitions: Mapping[UUID, int], _racks: Racks = NO_RACKS) -> Assignment:
    """Neighbouring partitions; static members first, by their instance id, so that a restart changes nothing."""
    ordered = sorted(members, key=lambda member: (member.instance_id is None, member.instance_id or member.member_id))
    takers: dict[UUID, list[str]] = {}
    for member in ordered:
        for topic in member.topics:
            if topic in partitions:
                takers.setdefault(topic, []).append(member.member_id)
    shares: dict[str, dict[UUID, tuple[int, ...]]] = {member.member_id: {} for member in ordered}
    for topic, names in takers.items():
        least, more = divmod(partitions[topic], len(names))
        start = 0
        for position, name in enumerate(names):
            end = start + least + (position < more)
            if end > start:
                shares[name][topic] = tuple(range(start, end))
            start = end
    return dict(shares)


ASSIGNORS: Final[Mapping[str, Assignor]] = {"uniform": uniform, "range": range_}

_Share = dict[UUID, list[int]]


def _as_target(share: _Share) -> Target:
    return {topic: tuple(sorted(indices)) for topic, indices in share.items() if indices}


def _alike(members: Sequence[Subscriber], partitions: Mapping[UUID, int], racks: Racks) -> list[_Share]:
    """Everybody subscribes to the same: each keeps up to its quota, and the rest goes to those below theirs."""
    least, more = divmod(sum(partitions.values()), len(members))
    free = {topic: bytearray(b"\1") * count for topic, count in partitions.items()}
    owned: list[list[tuple[UUID, int]]] = []
    over: list[int] = []
    for position, member in enumerate(members):
        kept: list[tuple[UUID, int]] = []
        for topic, index in _nearest_first(member, racks):
            available = free.get(topic)
            # What two had at once (a target that was being replaced) stays with the first.
            if len(kept) <= least and available is not None and index < len(available) and available[index]:
                available[index] = 0
                kept.append((topic, index))
        owned.append(kept)
        if len(kept) > least:
            over.append(position)
    # Only so many may have one more than the others: the last ones of those who do give it back.
    for position in over[more:]:
        topic, index = owned[position].pop()
        free[topic][index] = 1
    left = max(more - len(over), 0)
    # Those who have the fewest come first, so that the extra ones go to them.
    wanted: dict[int, int] = {}
    for position in sorted(range(len(members)), key=lambda each: len(owned[each])):
        size = len(owned[position])
        has_extra = left > 0 and size <= least
        left -= has_extra
        wanted[position] = max(least + has_extra - size, 0)
    _give_near(members, wanted, free, owned, racks)
    rest = ((topic, index) for topic, available in free.items() for index, is_free in enumerate(available) if is_free)
    for position, count in wanted.items():
        owned[position] += islice(rest, count)
    return [_by_topic(each) for each in owned]


def _nearest_first(member: Subscriber, racks: Racks) -> list[tuple[UUID, int]]:
    had = [(topic, index) for topic, indices in member.target.items() for index in indices]
    if member.rack_id is not None and racks:
        had.sort(key=lambda each: not _is_near(member.rack_id, each, racks))
    return had


def _is_near(rack_id: str | None, partition: tuple[UUID, int], racks: Racks) -> bool:
    topic, index = partition
    known = racks.get(topic, ())
    return index < len(known) and rack_id in known[index]


def _give_near(
    members: Sequence[Subscriber],
    wanted: dict[int, int],
    free: Mapping[UUID, bytearray],
    owned: Sequence[list[tuple[UUID, int]]],
    racks: Racks,
) -> None:
    """Give members what is free in their racks, as far as they want something."""
    near: dict[str, list[tuple[UUID, int]]] = {}
    for topic, available in free.items():
        for index, where in enumerate(racks.get(topic, ())):
            if index < len(available) and available[index]:
                for rack_id in where:
                    near.setdefault(rack_id, []).append((topic, index))
    for candidates in near.values():
        candidates.reverse()
    for position, count in wanted.items():
        candidates = near.get(members[position].rack_id or "", [])
        missing = count
        while missing and candidates:
            topic, index = candidates.pop()
            if free[topic][index]:
                free[topic][index] = 0
                owned[position].append((topic, index))
                missing -= 1
        wanted[position] = missing


def _by_topic(partitions: Sequence[tuple[UUID, int]]) -> _Share:
    share: _Share = {}
    for topic, index in partitions:
        share.setdefault(topic, []).append(index)
    return share


def _unlike(members: Sequence[Subscriber], partitions: Mapping[UUID, int]) -> list[_Share]:
    """Subscriptions differ: keep what can be kept, give the rest to the least loaded, then even out."""
    takers: dict[UUID, list[int]] = {}
    for position, member in enumerate(members):
        for topic in member.topics:
            if topic in partitions:
                takers.setdefault(topic, []).append(position)
    owners = {topic: [-1] * partitions[topic] for topic in takers}
    loads = [_keep(position, member, owners) for position, member in enumerate(members)]
    # Topics with the least choice first: many partitions for few members.
    order = sorted(takers, key=lambda topic: (-partitions[topic] / len(takers[topic]), len(takers[topic]), topic))
    for topic in order:
        least = [(loads[position], position) for position in takers[topic]]
        heapq.heapify(least)
        held = owners[topic]
        for index, owner in enumerate(held):
            if owner < 0:
                load, position = least[0]
                held[index] = position
                loads[position] = load + 1
                heapq.heapreplace(least, (load + 1, position))
    shared = [topic for topic in order if len(takers[topic]) > 1]
    for _ in range(_MAX_PASSES):
        if not sum(_even_out(takers[topic], owners[topic], loads) for topic in shared):
            break
    shares: list[_Share] = [{} for _ in members]
    for topic, held in owners.items():
        for index, position in enumerate(held):
            shares[position].setdefault(topic, []).append(index)
    return shares


def _keep(position: int, member: Subscriber, owners: Mapping[UUID, list[int]]) -> int:
    """Leave a member what it has, subscribes to, and nobody else has kept; how many partitions that is."""
    kept = 0
    for topic, indices in member.target.items():
        held = owners.get(topic)
        if held is None or topic not in member.topics:
            continue
        for index in indices:
            if index < len(held) and held[index] < 0:
                held[index] = position
                kept += 1
    return kept


def _even_out(takers: Sequence[int], held: list[int], loads: list[int]) -> int:
    """Move partitions of one topic from its most to its least loaded subscribers; how many were moved."""
    owned: dict[int, list[int]] = {}
    for index, position in enumerate(held):
        owned.setdefault(position, []).append(index)
    least = [(loads[position], position) for position in takers]
    most = [(-loads[position], -position) for position in owned]
    heapq.heapify(least)
    heapq.heapify(most)
    moved = 0
    while most:
        load, giver = -most[0][0], -most[0][1]
        if load != loads[giver]:
            heapq.heapreplace(most, (-loads[giver], -giver))
            continue
        low, taker = least[0]
        if low != loads[taker]:
            heapq.heapreplace(least, (loads[taker], taker))
            continue
        if load - low <= 1:
            break
        if not owned[giver]:
            heapq.heappop(most)
            continue
        index = owned[giver].pop()
        held[index] = taker
        loads[giver] -= 1
        loads[taker] += 1
        moved += 1
    return moved
