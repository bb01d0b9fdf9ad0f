"""From what members want to what they own: the targets of a group, and the next step of one member towards its own.

Pure. `new_targets` asks an assignor; `reconcile` says what a member owns after a heartbeat. A member first gives up
what is not its own any more, says so, and only then moves to the epoch of its target and gets what is free of it. The
others go on reading meanwhile. Not here: when either happens (`protocol`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from uuid import UUID

from millrace.cluster.image import ClusterImage
from millrace.groups.assignors import NO_RACKS, Assignor, Racks, Subscriber
from millrace.groups.environment import existing
from millrace.groups.epochs import MemberState, Target
from millrace.groups.modern.group import Member, ModernGroup
from millrace.groups.modern.records import NOTHING, Held, Owned

OwnedNow = Sequence[tuple[UUID, Sequence[int]]]
"""What a member says it owns."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Where a member is to get, and what it says it has; None: it did not say."""

    target: Target
    epoch: int
    subscribed: AbstractSet[UUID]
    """The topics it subscribes to that there are."""
    owned_now: OwnedNow | None


def new_targets(group: ModernGroup, image: ClusterImage, assignor: Assignor) -> dict[str, Target]:
    """What every member is to own: a target for each, empty where there is nothing for it."""
    # Most members say the same, so what it means is worked out once.
    known: dict[tuple[tuple[str, ...], str | None], AbstractSet[UUID]] = {}
    partitions: dict[UUID, int] = {}
    subscribers = []
    for member in group.members.values():
        said = member.info.topics, member.info.pattern
        topics = known.get(said)
        if topics is None:
            found = existing(group.topics_of(member.info), image.topics)
            partitions.update((topic_id, len(topic.partitions)) for topic_id, topic in found.items())
            topics = known[said] = found.keys()
        info = member.info
        target = group.target_of(member.member_id)
        subscribers.append(Subscriber(member.member_id, topics, target, info.instance_id, info.rack_id))
    has_racks = any(each.rack_id is not None for each in subscribers)
    return assignor(subscribers, partitions, replica_racks(image, partitions) if has_racks else NO_RACKS)


def replica_racks(image: ClusterImage, topic_ids: Iterable[UUID]) -> Racks:
    """In which racks the partitions of topics have replicas."""
    rack_of = {broker.broker_id: broker.rack for broker in image.brokers.values() if broker.rack}
    if not rack_of:
        return NO_RACKS
    return {
        topic_id: [
            {rack_of[each] for each in partition.replicas if each in rack_of}
            for partition in image.topics_by_id[topic_id].partitions
        ]
        for topic_id in topic_ids
    }


def subscribed_ids(group: ModernGroup, member: Member, image: ClusterImage) -> AbstractSet[UUID]:
    """The topics a member subscribes to that there are."""
    return existing(group.topics_of(member.info), image.topics).keys()


def reconcile(group: ModernGroup, member: Member, goal: Goal, *, subscription_changed: bool) -> Held:
    """What the member owns from now on; what it owned until now, where nothing changes."""
    held = member.held
    if held.state is MemberState.STABLE and held.epoch == goal.epoch:
        return _drop_unsubscribed(held, goal) if subscription_changed else held
    if held.state is MemberState.UNREVOKED_PARTITIONS and _still_has(held.revoking, goal.owned_now):
        return _drop_unsubscribed(held, goal) if subscription_changed else held
    return _next(group, member, goal)


def _next(group: ModernGroup, member: Member, goal: Goal) -> Held:
    held = member.held
    keeps: dict[UUID, Mapping[int, int]] = {}
    gives: dict[UUID, Mapping[int, int]] = {}
    gets: dict[UUID, list[int]] = {}
    waits = False
    for topic_id in {**goal.target, **held.assigned}:
        wanted = frozenset(goal.target.get(topic_id, ())) if topic_id in goal.subscribed else frozenset[int]()
        has = held.assigned.get(topic_id, {})
        kept = {index: epoch for index, epoch in has.items() if index in wanted}
        given = {index: epoch for index, epoch in has.items() if index not in wanted}
        if kept:
            keeps[topic_id] = kept
        if given:
            gives[topic_id] = given
        for index in sorted(wanted.difference(kept)):
            # What the member itself was still giving up is free for it.
            if group.owner_of(topic_id, index) in (None, member.member_id):
                gets.setdefault(topic_id, []).append(index)
            else:
                waits = True
    if gives and _still_has(gives, goal.owned_now):
        return Held(held.epoch, held.epoch, MemberState.UNREVOKED_PARTITIONS, keeps, gives)
    for topic_id, indices in gets.items():
        keeps[topic_id] = {**keeps.get(topic_id, {}), **dict.fromkeys(indices, goal.epoch)}
    state = MemberState.UNRELEASED_PARTITIONS if waits else MemberState.STABLE
    return Held(goal.epoch, held.epoch, state, keeps)


def _drop_unsubscribed(held: Held, goal: Goal) -> Held:
    """Take away what the member no longer subscribes to, without waiting for a new target."""
    dropped = [topic_id for topic_id in held.assigned if topic_id not in goal.subscribed]
    if not dropped:
        return held
    assigned = {topic_id: own for topic_id, own in held.assigned.items() if topic_id not in dropped}
    revoking = dict(held.revoking)
    for topic_id in dropped:
        revoking[topic_id] = {**revoking.get(topic_id, {}), **held.assigned[topic_id]}
    if _still_has(revoking, goal.owned_now):
        return Held(held.epoch, held.epoch, MemberState.UNREVOKED_PARTITIONS, assigned, revoking)
    return replace(held, previous_epoch=held.epoch, assigned=assigned, revoking=NOTHING)


def _still_has(revoking: Owned, owned_now: OwnedNow | None) -> bool:
    """Whether the member may still have some of these; a member that does not say is taken to."""
    if owned_now is None:
        return True
    return any(index in revoking.get(topic_id, {}) for topic_id, indices in owned_now for index in indices)


def is_within(owned_now: OwnedNow | None, assigned: Owned) -> bool:
    """Whether a member has nothing but what it was given."""
    if owned_now is None:
        return False
    return all(index in assigned.get(topic_id, {}) for topic_id, indices in owned_now for index in indices)


def flatten(owned: Owned) -> Iterable[tuple[UUID, tuple[int, ...]]]:
    """Partitions by topic, ascending, without their epochs."""
    return ((topic_id, tuple(sorted(partitions))) for topic_id, partitions in owned.items())
