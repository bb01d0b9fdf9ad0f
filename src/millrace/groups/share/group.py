"""The state of one share group: what its records say, and what follows from them. No decisions.

The one way to change a group is `apply`, with a record. A coordinator applies a record when it writes it and when it
reads it back, so that a replay gives what was there. `apply` returns the record that takes the change back, for a
write that the log refuses. `protocol` and `partitions` decide.

Unlike in a KIP-848 group a partition may have many readers, so nobody waits for anybody: a member has what it was
given. Invariant after every record that was written here: nobody reads a share-partition that is not initialized.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from uuid import UUID

from millrace.groups.epochs import NO_EPOCH_YET, NO_TARGET, NO_TARGET_YET, GroupEpoch, Target, TargetEpoch
from millrace.groups.share.records import (
    PartitionStates,
    PartitionStatesRecord,
    ShareEpochRecord,
    ShareHeld,
    ShareHeldRecord,
    ShareInfo,
    ShareMemberRecord,
    ShareRecord,
    ShareTargetEpochRecord,
    ShareTargetRecord,
    Topics,
)


class ShareState(Enum):
    """The states of a share group, under the names that clients see."""

    EMPTY = "Empty"
    STABLE = "Stable"


@dataclass(frozen=True, slots=True)
class ShareMember:
    """A member: what it has said, and what it was told to read."""

    member_id: str
    info: ShareInfo = field(default_factory=ShareInfo)
    held: ShareHeld = field(default_factory=ShareHeld)


NO_PARTITIONS = PartitionStates()


@dataclass(slots=True, eq=False)
class ShareGroup:
    """One group. Owned by its shard."""

    group_id: str
    epoch: GroupEpoch = NO_EPOCH_YET
    target_epoch: TargetEpoch = NO_TARGET_YET
    members: dict[str, ShareMember] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    partitions: PartitionStates = NO_PARTITIONS
    # What follows from the above.
    topic_counts: Counter[str] = field(default_factory=Counter)
    # What is known only here, and found out again after a restart.
    seen_topics: object = None
    """The topics of the image for which the hash was last compared; None: never."""
    looked_at_ms: int = 0
    asked_ms: dict[UUID, int] = field(default_factory=dict)
    """When the share coordinator was last told of a topic that is being initialized."""
    assigned_from: Topics | None = None
    """The initialized share-partitions that the targets are known to cover; None: not known."""

    def __repr__(self) -> str:
        return f"ShareGroup({self.group_id!r} {self.state.value} epoch {self.epoch.epoch}, {len(self.members)} members)"

    @property
    def state(self) -> ShareState:
        return ShareState.STABLE if self.members else ShareState.EMPTY

    @property
    def is_blank(self) -> bool:
        """Whether nothing of the group is in the log."""
        return not (self.members or self.targets) and (
            self.epoch is NO_EPOCH_YET and self.target_epoch is NO_TARGET_YET and self.partitions is NO_PARTITIONS
        )

    def target_of(self, member_id: str) -> Target:
        return self.targets.get(member_id, NO_TARGET)

    def apply(self, record: ShareRecord) -> ShareRecord:
        """Make the record's change; the record that takes it back."""
        group_id = self.group_id
        match record:
            case ShareEpochRecord(_, epoch):
                old_epoch, self.epoch = self.epoch, epoch or NO_EPOCH_YET
                return ShareEpochRecord(group_id, None if old_epoch is NO_EPOCH_YET else old_epoch)
            case ShareTargetEpochRecord(_, target_epoch):
                old_target, self.target_epoch = self.target_epoch, target_epoch or NO_TARGET_YET
                return ShareTargetEpochRecord(group_id, None if old_target is NO_TARGET_YET else old_target)
            case ShareMemberRecord(_, member_id, info):
                member = self.members.get(member_id)
                self._put(member_id, None if info is None else replace(member or ShareMember(member_id), info=info))
                return ShareMemberRecord(group_id, member_id, None if member is None else member.info)
            case ShareHeldRecord(_, member_id, held):
                member = self.members.get(member_id)
                if held is not None or member is not None:
                    self._put(member_id, replace(member or ShareMember(member_id), held=held or ShareHeld()))
                return ShareHeldRecord(group_id, member_id, None if member is None else member.held)
            case ShareTargetRecord(_, member_id, target):
                old = self.targets.pop(member_id, None)
                if target is not None:
                    self.targets[member_id] = target
                return ShareTargetRecord(group_id, member_id, old)
            case PartitionStatesRecord(_, states):
                were, self.partitions = self.partitions, states or NO_PARTITIONS
                return PartitionStatesRecord(group_id, None if were is NO_PARTITIONS else were)

    def _put(self, member_id: str, member: ShareMember | None) -> None:
        old = self.members.pop(member_id, None)
        if old is not None:
            self.topic_counts.subtract(old.info.topics)
        if member is not None:
            self.members[member_id] = member
            self.topic_counts.update(member.info.topics)
        for topic in old.info.topics if old is not None else ():
            if not self.topic_counts[topic]:
                del self.topic_counts[topic]

    def tombstones(self) -> list[ShareRecord]:
        """What removes everything of the group from the log, in an order that is safe at every point."""
        group_id = self.group_id
        ids = sorted({*self.members, *self.targets})
        gone: list[ShareRecord] = [ShareHeldRecord(group_id, each, None) for each in ids]
        gone += [ShareTargetRecord(group_id, each, None) for each in ids]
        gone.append(ShareTargetEpochRecord(group_id, None))
        gone += [ShareMemberRecord(group_id, each, None) for each in ids]
        gone.append(PartitionStatesRecord(group_id, None))
        gone.append(ShareEpochRecord(group_id, None))
        return gone
