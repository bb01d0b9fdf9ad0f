"""One event of one share group, and what every such event may have to do: bump the epoch, compute targets, give a
member its target, remove a member.

Pure. A `ShareStep` applies each record to the group as it decides on it, so that what follows sees it, and remembers
how to take everything back: an event that ends in an error, or whose records the log refuses, has not happened. Not
here: what requests and timers mean (`protocol`), which share-partitions there are (`partitions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from millrace.cluster.image import ClusterImage
from millrace.groups.assignors import Subscriber
from millrace.groups.environment import Environment, existing, topics_hash
from millrace.groups.epochs import GroupEpoch, Target, TargetEpoch
from millrace.groups.share.assignor import simple
from millrace.groups.share.group import ShareGroup, ShareMember
from millrace.groups.share.records import (
    ShareEpochRecord,
    ShareHeld,
    ShareHeldRecord,
    ShareInfo,
    ShareMemberRecord,
    ShareRecord,
    ShareTargetEpochRecord,
    ShareTargetRecord,
    share_entry,
)
from millrace.groups.timers import CancelTimer, SetTimer, TimerEffect, TimerKey, TimerKind
from millrace.replication.state_topic import Entry

_LOOK_INTERVAL_MS: Final = 1_000
"""The metadata of a cluster can change all the time: so often at the most a group sees what that means to it."""

Partitions = Mapping[UUID, frozenset[int]]
"""Share-partitions of one group, by topic."""


@dataclass(slots=True)
class ShareStep:
    """One event: what is known, and what has been decided so far."""

    group: ShareGroup
    env: Environment
    records: list[ShareRecord] = field(default_factory=list)
    """What goes to the log, in this order."""
    timers: list[TimerEffect] = field(default_factory=list)
    to_initialize: Partitions = field(default_factory=dict)
    """What the share coordinator has to be told of when the records are durable."""
    _undo: list[ShareRecord] = field(default_factory=list)

    @property
    def group_id(self) -> str:
        return self.group.group_id

    def entries(self) -> list[Entry]:
        """The records, for the log."""
        return [share_entry(record) for record in self.records]

    def write(self, record: ShareRecord) -> None:
        """Decide on a record: it counts at once."""
        self._undo.append(self.group.apply(record))
        self.records.append(record)

    def undo(self, from_record: int = 0) -> None:
        """Take the records from the given one on back."""
        for record in reversed(self._undo[from_record:]):
            self.group.apply(record)
        # What was seen on the way may have been part of it.
        self.group.seen_topics = None
        self.group.assigned_from = None

    def set_session(self, member_id: str) -> None:
        """The member has shown itself."""
        key = TimerKey(TimerKind.SESSION, member_id)
        self.timers.append(SetTimer(key, self.env.times.session_timeout_ms))

    def end_session(self, member_id: str) -> None:
        self.timers.append(CancelTimer(TimerKey(TimerKind.SESSION, member_id)))


def update_member(step: ShareStep, member_id: str, info: ShareInfo) -> bool:
    """A member has said something about itself; whether that changes what it subscribes to."""
    old = step.group.members.get(member_id)
    if old is None or info != old.info:
        step.write(ShareMemberRecord(step.group.group_id, member_id, info))
    return old is None or old.info.topics != info.topics


def bump_epoch(step: ShareStep, *, has_changed: bool) -> bool:
    """Begin a new epoch where members have changed, or the topics they subscribe to; whether one was begun."""
    group, image = step.group, step.env.image
    is_new_view = group.seen_topics is not image.topics and (
        group.seen_topics is None or not 0 <= step.env.now_ms - group.looked_at_ms < _LOOK_INTERVAL_MS
    )
    if not (has_changed or is_new_view):
        return False
    if is_new_view:
        group.seen_topics, group.looked_at_ms = image.topics, step.env.now_ms
    metadata_hash = topics_hash(group.topic_counts.keys(), image)
    if not has_changed and metadata_hash == group.epoch.metadata_hash:
        return False
    step.write(ShareEpochRecord(group.group_id, GroupEpoch(group.epoch.epoch + 1, metadata_hash)))
    return True


def lacks_readers(step: ShareStep) -> bool:
    """Whether share-partitions that may be read, and that somebody subscribes to, are in nobody's target."""
    group = step.group
    initialized = group.partitions.initialized
    if group.assigned_from is initialized or not group.members:
        return False
    covered: dict[UUID, set[int]] = {}
    for target in group.targets.values():
        for topic_id, indices in target.items():
            covered.setdefault(topic_id, set()).update(indices)
    for topic_id in existing(group.topic_counts.keys(), step.env.image.topics):
        begun = initialized.get(topic_id)
        if begun is not None and not begun.partitions <= covered.get(topic_id, set()):
            return True
    group.assigned_from = initialized
    return False


def update_targets(step: ShareStep) -> None:
    """Compute the targets of this epoch, unless they are there, or the last ones are too young."""
    group, env = step.group, step.env
    if group.target_epoch.epoch >= group.epoch.epoch:
        return
    age_ms = env.now_ms - group.target_epoch.timestamp_ms
    # While nobody reads anything, as when the first members come, there is nothing to be spared.
    if any(group.targets.values()) and 0 <= age_ms < env.times.assignment_interval_ms:
        return
    for member_id, target in _new_targets(group, env.image).items():
        if target != group.target_of(member_id):
            step.write(ShareTargetRecord(group.group_id, member_id, target))
    step.write(ShareTargetEpochRecord(group.group_id, TargetEpoch(group.epoch.epoch, env.now_ms)))
    group.assigned_from = group.partitions.initialized


def _new_targets(group: ShareGroup, image: ClusterImage) -> dict[str, Target]:
    members = group.members.values()
    # Most members say the same, so what it means is worked out once.
    said = {member.info.topics for member in members}
    topics_of = {names: existing(set(names), image.topics).keys() for names in said}
    return simple(
        [Subscriber(each.member_id, topics_of[each.info.topics], group.target_of(each.member_id)) for each in members],
        {topic_id: sorted(begun.partitions) for topic_id, begun in group.partitions.initialized.items()},
    )


def give_target(step: ShareStep, member_id: str, *, has_changed: bool) -> ShareMember:
    """Give a member its target; the member as it is then."""
    group = step.group
    member = group.members[member_id]
    held, epoch = member.held, group.target_epoch.epoch
    if held.epoch == epoch and not has_changed:
        return member
    subscribed = existing(set(member.info.topics), step.env.image.topics)
    assigned = {topic_id: own for topic_id, own in group.target_of(member_id).items() if topic_id in subscribed}
    previous = held.epoch if held.epoch != epoch else held.previous_epoch
    given = ShareHeld(epoch, previous, assigned)
    if given != held:
        step.write(ShareHeldRecord(group.group_id, member_id, given))
    return group.members[member_id]


def fence(step: ShareStep, member_id: str) -> None:
    """Remove a member; the others learn of it in a new epoch."""
    group_id = step.group.group_id
    step.write(ShareHeldRecord(group_id, member_id, None))
    step.write(ShareTargetRecord(group_id, member_id, None))
    step.write(ShareMemberRecord(group_id, member_id, None))
    step.end_session(member_id)
    bump_epoch(step, has_changed=True)
