"""The state of one KIP-848 consumer group: what its records say, and what follows from them. No decisions.

The one way to change a group is `apply`, with a record. A coordinator applies a record when it writes it and when it
reads it back, so that a replay gives what was there. `apply` returns the record that takes the change back, for a
write that the log refuses. What follows from the records (who owns a partition, how many subscribe to a topic) is kept
along, so that a decision costs what it changes and not what there is. `protocol` decides.

Invariants after every record that was written here: a partition has one owner at the most; `static_members` names the
members with an instance id; the counts are those of the members.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final
from uuid import UUID

from millrace.cluster.image import ClusterImage
from millrace.groups.environment import topics_hash
from millrace.groups.epochs import NO_EPOCH_YET, NO_TARGET, NO_TARGET_YET, GroupEpoch, MemberState, Target, TargetEpoch
from millrace.groups.modern.records import (
    EpochRecord,
    Held,
    HeldRecord,
    MemberInfo,
    MemberRecord,
    ModernRecord,
    Owned,
    PatternRecord,
    Resolved,
    TargetEpochRecord,
    TargetRecord,
    TopicsRecord,
)

LEFT_FOR_NOW: Final = -2
"""The epoch of a static member that said it would come back."""


class ModernState(Enum):
    """The states of a consumer group, under the names that clients see."""

    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"


@dataclass(frozen=True, slots=True)
class Member:
    """A member: what it has said, and what it owns."""

    member_id: str
    info: MemberInfo = field(default_factory=MemberInfo)
    held: Held = field(default_factory=Held)

    @property
    def is_classic(self) -> bool:
        return self.info.classic is not None

    def is_reconciled_to(self, epoch: int) -> bool:
        return self.held.state is MemberState.STABLE and self.held.epoch == epoch


@dataclass(frozen=True, slots=True)
class Judged:
    """The rules of access under which a subscriber of a pattern knew some topics and not others."""

    rules: object
    at_ms: int


@dataclass(slots=True, eq=False)
class ModernGroup:
    """One group. Owned by its shard."""

    group_id: str
    epoch: GroupEpoch = NO_EPOCH_YET
    target_epoch: TargetEpoch = NO_TARGET_YET
    members: dict[str, Member] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    patterns: dict[str, Resolved] = field(default_factory=dict)
    has_topics_record: bool = False
    # What follows from the above.
    static_members: dict[str, str] = field(default_factory=dict)
    owners: dict[UUID, dict[int, str]] = field(default_factory=dict)
    topic_counts: Counter[str] = field(default_factory=Counter)
    pattern_counts: Counter[str] = field(default_factory=Counter)
    assignor_counts: Counter[str] = field(default_factory=Counter)
    classic_count: int = 0
    protocol_votes: Counter[str] = field(default_factory=Counter)
    # What is known only here, and found out again after a restart.
    seen_topics: object = None
    """The topics of the image for which the hash was last compared; None: never."""
    looked_at_ms: int = 0
    matched_names: AbstractSet[str] | None = None
    """The topics against which every pattern has been matched; None: not known."""
    judged: dict[str, Judged] = field(default_factory=dict)
    """By which rules each pattern was last matched as a whole; without an entry it has to be."""
    unheard: set[str] = field(default_factory=set)
    """Members that were told an assignment and have not said yet that it is what they own."""

    def __repr__(self) -> str:
        return (
            f"ModernGroup({self.group_id!r} {self.state.value} epoch {self.epoch.epoch}, {len(self.members)} members)"
        )

    # Queries

    @property
    def state(self) -> ModernState:
        if not self.members:
            return ModernState.EMPTY
        target_epoch = self.target_epoch.epoch
        if self.epoch.epoch > target_epoch:
            return ModernState.ASSIGNING
        if all(member.is_reconciled_to(target_epoch) for member in self.members.values()):
            return ModernState.STABLE
        return ModernState.RECONCILING

    @property
    def is_blank(self) -> bool:
        """Whether nothing of the group is in the log."""
        return not (self.members or self.targets or self.patterns or self.has_topics_record) and (
            self.epoch is NO_EPOCH_YET and self.target_epoch is NO_TARGET_YET
        )

    def static_member(self, instance_id: str | None) -> Member | None:
        member_id = None if instance_id is None else self.static_members.get(instance_id)
        return None if member_id is None else self.members.get(member_id)

    def owner_of(self, topic_id: UUID, partition: int) -> str | None:
        """Who has the partition, or has not yet said that it gave it up."""
        partitions = self.owners.get(topic_id)
        return None if partitions is None else partitions.get(partition)

    def target_of(self, member_id: str) -> Target:
        return self.targets.get(member_id, NO_TARGET)

    def preferred_assignor(self, default: str) -> str:
        """The assignor that most members want; those who say nothing have no vote."""
        return min(self.assignor_counts, key=lambda name: (-self.assignor_counts[name], name), default=default)

    def topics_of(self, info: MemberInfo) -> AbstractSet[str]:
        """The names a member subscribes to, whether there are such topics or not."""
        resolved = self.patterns.get(info.pattern) if info.pattern else None
        return {*info.topics, *resolved.topics} if resolved is not None else set(info.topics)

    @property
    def subscribed_topics(self) -> AbstractSet[str]:
        names = set(self.topic_counts)
        for resolved in self.patterns.values():
            names.update(resolved.topics)
        return names

    def is_subscribed_to(self, topic: str) -> bool:
        return topic in self.topic_counts or any(topic in resolved.topics for resolved in self.patterns.values())

    def metadata_hash(self, image: ClusterImage) -> int:
        return topics_hash(self.subscribed_topics, image)

    def supports_protocols(self, names: AbstractSet[str]) -> bool:
        """Whether a classic member with these protocols could be in the group: one must suit every classic member."""
        if not self.members:
            return bool(names)
        return any(self.protocol_votes[name] == self.classic_count for name in names)

    def waits_for_others(self, member: Member) -> bool:
        """Whether partitions of the member's target are still with somebody else."""
        for topic_id, partitions in self.target_of(member.member_id).items():
            assigned = member.held.assigned.get(topic_id, {})
            for partition in partitions:
                if partition not in assigned and self.owner_of(topic_id, partition) is not None:
                    return True
        return False

    # Changes

    def apply(self, record: ModernRecord) -> ModernRecord:
        """Make the record's change; the record that takes it back."""
        group_id = self.group_id
        match record:
            case EpochRecord(_, epoch):
                old_epoch, self.epoch = self.epoch, epoch or NO_EPOCH_YET
                return EpochRecord(group_id, None if old_epoch is NO_EPOCH_YET else old_epoch)
            case TargetEpochRecord(_, target_epoch):
                old_target, self.target_epoch = self.target_epoch, target_epoch or NO_TARGET_YET
                return TargetEpochRecord(group_id, None if old_target is NO_TARGET_YET else old_target)
            case MemberRecord(_, member_id, info):
                member = self.members.get(member_id)
                self._put(member_id, None if info is None else replace(member or Member(member_id), info=info))
                return MemberRecord(group_id, member_id, None if member is None else member.info)
            case HeldRecord(_, member_id, held):
                member = self.members.get(member_id)
                if held is not None or member is not None:
                    self._put(member_id, replace(member or Member(member_id), held=held or Held()))
                return HeldRecord(group_id, member_id, None if member is None else member.held)
            case TargetRecord(_, member_id, target):
                old = self.targets.pop(member_id, None)
                if target is not None:
                    self.targets[member_id] = target
                return TargetRecord(group_id, member_id, old)
            case PatternRecord(_, pattern, resolved):
                was = self.patterns.pop(pattern, None)
                if resolved is not None:
                    self.patterns[pattern] = resolved
                else:
                    self.judged.pop(pattern, None)
                return PatternRecord(group_id, pattern, was)
            case TopicsRecord(_, present):
                had, self.has_topics_record = self.has_topics_record, present is not None
                return TopicsRecord(group_id, had or None)

    def _put(self, member_id: str, member: Member | None) -> None:
        old = self.members.get(member_id)
        if old is not None:
            self._count(old.info, -1)
            self._disown(old)
            if old.info.instance_id is not None and self.static_members.get(old.info.instance_id) == member_id:
                del self.static_members[old.info.instance_id]
        if member is None:
            self.members.pop(member_id, None)
            self.unheard.discard(member_id)
            return
        self.members[member_id] = member
        self._count(member.info, 1)
        self._own(member_id, member.held.assigned)
        self._own(member_id, member.held.revoking)
        if member.info.instance_id is not None:
            self.static_members[member.info.instance_id] = member_id

    def _count(self, info: MemberInfo, change: int) -> None:
        for topic in info.topics:
            _add(self.topic_counts, topic, change)
        if info.pattern:
            _add(self.pattern_counts, info.pattern, change)
        if info.assignor is not None:
            _add(self.assignor_counts, info.assignor, change)
        if info.classic is not None:
            self.classic_count += change
            for name in {protocol.name for protocol in info.classic.protocols}:
                _add(self.protocol_votes, name, change)

    def _own(self, member_id: str, owned: Owned) -> None:
        for topic_id, partitions in owned.items():
            self.owners.setdefault(topic_id, {}).update(dict.fromkeys(partitions, member_id))

    def _disown(self, member: Member) -> None:
        for owned in (member.held.assigned, member.held.revoking):
            for topic_id, partitions in owned.items():
                owners = self.owners.get(topic_id, {})
                for partition in partitions:
                    # In a log that Kafka wrote, the next owner may come before the last one's farewell.
                    if owners.get(partition) == member.member_id:
                        del owners[partition]
                if not owners:
                    self.owners.pop(topic_id, None)

    def tombstones(self) -> list[ModernRecord]:
        """What removes everything of the group from the log, in an order that is safe at every point."""
        group_id = self.group_id
        ids = sorted({*self.members, *self.targets})
        gone: list[ModernRecord] = [HeldRecord(group_id, each, None) for each in ids]
        gone += [TargetRecord(group_id, each, None) for each in ids]
        gone.append(TargetEpochRecord(group_id, None))
        gone += [MemberRecord(group_id, each, None) for each in ids]
        gone += [PatternRecord(group_id, each, None) for each in self.patterns]
        if self.has_topics_record:
            gone.append(TopicsRecord(group_id, None))
        gone.append(EpochRecord(group_id, None))
        return gone


def _add(counts: Counter[str], name: str, change: int) -> None:
    counts[name] += change
    if not counts[name]:
        del counts[name]
