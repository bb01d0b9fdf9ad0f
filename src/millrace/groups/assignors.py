"""Server-side assignors: who gets which partition. Pure functions of the members' subscriptions and present targets.

`uniform` gives every member the same number of partitions, as nearly as subscriptions allow, and moves as few as it
can. `range` gives neighbouring partitions of each topic to a member, the same ones of topics with equally many
partitions, whatever was before. Neither looks at racks, as in Kafka 4.3.

Every partition of a topic that anybody subscribes to is given to exactly one of its subscribers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from millrace.groups.modern_records import Target

_MAX_PASSES: Final = 16
"""Passes over the topics to even out members with unlike subscriptions; two or three are the rule."""


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A member, as an assignor sees it."""

    member_id: str
    topics: AbstractSet[UUID]
    target: Target
    instance_id: str | None = None


Assignment = dict[str, Target]
Assignor = Callable[[Sequence[Subscriber], Mapping[UUID, int]], Assignment]


def uniform(members: Sequence[Subscriber], partitions: Mapping[UUID, int]) -> Assignment:
    """Evenly, with as few moves as possible; `partitions` has the number of every topic that exists."""
    members = sorted(members, key=lambda member: member.member_id)
    if not members:
        return {}
    first = members[0].topics
    if all(member.topics is first or member.topics == first for member in members):
        shares = _alike(members, {topic: partitions[topic] for topic in sorted(first) if topic in partitions})
    else:
        shares = _unlike(members, partitions)
    return {member.member_id: _as_target(share) for member, share in zip(members, shares, strict=True)}


def range_(members: Sequence[Subscriber], partitions: Mapping[UUID, int]) -> Assignment:
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


def _alike(members: Sequence[Subscriber], partitions: Mapping[UUID, int]) -> list[_Share]:
    """Everybody subscribes to the same: each keeps up to its quota, and the rest goes to those below theirs."""
    least, more = divmod(sum(partitions.values()), len(members))
    free = {topic: bytearray(b"\1") * count for topic, count in partitions.items()}
    shares: list[_Share] = []
    sizes: list[int] = []
    over: list[int] = []
    for position, member in enumerate(members):
        share: _Share = {}
        size = 0
        for topic, indices in member.target.items():
            available = free.get(topic)
            if available is None:
                continue
            kept = share[topic] = []
            for index in indices:
                # What two had at once (a target that was being replaced) stays with the first.
                if size <= least and index < len(available) and available[index]:
                    available[index] = 0
                    kept.append(index)
                    size += 1
        shares.append(share)
        sizes.append(size)
        if size > least:
            over.append(position)
    # Only so many may have one more than the others: the last ones of those who do give it back.
    for position in over[more:]:
        topic = next(topic for topic, kept in reversed(shares[position].items()) if kept)
        free[topic][shares[position][topic].pop()] = 1
        sizes[position] -= 1
    left = max(more - len(over), 0)
    rest = ((topic, index) for topic, available in free.items() for index, is_free in enumerate(available) if is_free)
    # Those who have the fewest come first, so that the extra ones go to them.
    for position in sorted(range(len(members)), key=sizes.__getitem__):
        quota = least
        if left and sizes[position] <= least:
            quota += 1
            left -= 1
        for _ in range(quota - sizes[position]):
            topic, index = next(rest)
            shares[position].setdefault(topic, []).append(index)
    return shares


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
