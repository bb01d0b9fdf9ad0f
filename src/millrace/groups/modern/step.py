"""One event of one KIP-848 group, and what every such event may have to do: bump the epoch, compute targets, reconcile
a member, remove members.

Pure. A `Step` applies each record to the group as it decides on it, so that what follows sees it, and remembers how to
take everything back: an event that ends in an error, or whose records the log refuses, has not happened. Not here:
what requests and timers mean (`protocol`, `classic_members`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Final

from millrace.errors import ApiError, ErrorCode
from millrace.groups import patterns
from millrace.groups.assignors import ASSIGNORS
from millrace.groups.classic.group import ClassicGroup
from millrace.groups.classic.records import GroupRecord, group_entry
from millrace.groups.environment import Environment
from millrace.groups.epochs import GroupEpoch, MemberState, TargetEpoch
from millrace.groups.modern import migration
from millrace.groups.modern.group import Judged, Member, ModernGroup
from millrace.groups.modern.records import (
    EpochRecord,
    HeldRecord,
    MemberInfo,
    MemberRecord,
    ModernRecord,
    PatternRecord,
    Resolved,
    TargetEpochRecord,
    TargetRecord,
    TopicsRecord,
    to_entry,
)
from millrace.groups.modern.target import Goal, OwnedNow, new_targets, reconcile, subscribed_ids
from millrace.groups.timers import CancelTimer, SetTimer, TimerEffect, TimerKey, TimerKind
from millrace.replication.state_topic import Entry

MAX_PATTERNS: Final = 100
"""Different patterns in one group: each is matched against every new topic."""
_LOOK_INTERVAL_MS: Final = 1_000
"""The metadata of a cluster can change all the time: so often at the most a group sees what that means to it."""
_JUDGE_INTERVAL_MS: Final = 10_000
"""Rules of access can change all the time, too, and then every topic is looked at: Kafka's interval."""


@dataclass(slots=True)
class Step:
    """One event: what is known, and what has been decided so far."""

    group: ModernGroup
    env: Environment
    records: list[ModernRecord | GroupRecord] = field(default_factory=list)
    """What goes to the log, in this order."""
    timers: list[TimerEffect] = field(default_factory=list)
    may_know: Callable[[str], bool] | None = None
    """The topics that whoever sent a heartbeat may know of: a pattern matches no others, and without anybody none."""
    rules: object = None
    """The rules of access that `may_know` goes by; other rules are another object."""
    became_classic: ClassicGroup | None = None
    """The classic group that takes this one's place."""
    _undo: list[ModernRecord | None] = field(default_factory=list)

    @property
    def group_id(self) -> str:
        return self.group.group_id

    def entries(self) -> list[Entry]:
        """The records, for the log."""
        return [group_entry(each) if isinstance(each, GroupRecord) else to_entry(each) for each in self.records]

    def write(self, record: ModernRecord | GroupRecord) -> None:
        """Decide on a record: it counts at once. Those of classic groups say nothing about this one."""
        self._undo.append(None if isinstance(record, GroupRecord) else self.group.apply(record))
        self.records.append(record)

    def undo(self, from_record: int = 0) -> None:
        """Take the records from the given one on back."""
        for record in reversed(self._undo[from_record:]):
            if record is not None:
                self.group.apply(record)
        # The look at the cluster's topics may have been part of it.
        self.group.seen_topics = None
        self.group.matched_names = None
        self.group.judged.clear()

    def set_timer(self, kind: TimerKind, member_id: str, delay_ms: int) -> None:
        self.timers.append(SetTimer(TimerKey(kind, member_id), max(delay_ms, 0)))

    def cancel_timer(self, kind: TimerKind, member_id: str) -> None:
        self.timers.append(CancelTimer(TimerKey(kind, member_id)))

    def cancel_timers(self, member_id: str) -> None:
        for kind in TimerKind:
            self.cancel_timer(kind, member_id)

    def renew_session(self, member: Member) -> None:
        classic = member.info.classic
        timeout_ms = self.env.times.session_timeout_ms if classic is None else classic.session_timeout_ms
        self.set_timer(TimerKind.SESSION, member.member_id, timeout_ms)


def update_member(step: Step, member_id: str, info: MemberInfo) -> bool:
    """A member has said something about itself; whether that changes what it subscribes to."""
    group = step.group
    old = group.members.get(member_id)
    before = old.info if old is not None else MemberInfo()
    if info.pattern and info.pattern not in group.pattern_counts:
        patterns.check(info.pattern)
        if len(group.pattern_counts) >= MAX_PATTERNS:
            raise ApiError(ErrorCode.INVALID_REGULAR_EXPRESSION, f"the group has {MAX_PATTERNS} patterns already")
    if old is None or info != before:
        step.write(MemberRecord(group.group_id, member_id, info))
    if before.pattern != info.pattern:
        if before.pattern and before.pattern not in group.pattern_counts:
            step.write(PatternRecord(group.group_id, before.pattern, None))
        if info.pattern and info.pattern not in group.patterns:
            _match(step, info.pattern)
    return old is None or before.topics != info.topics or before.pattern != info.pattern


def match_by_new_rules(step: Step, pattern: str | None) -> bool:
    """Match the pattern of whoever sent a heartbeat anew, where rules of access have changed since that was last done.

    A topic that the sender may no longer know of is no longer meant, and one that it may know of now is. Whether the
    pattern stands for other topics than before.
    """
    if not pattern or step.rules is None:
        return False
    judged = step.group.judged.get(pattern)
    if judged is not None and (judged.rules is step.rules or 0 <= step.env.now_ms - judged.at_ms < _JUDGE_INTERVAL_MS):
        return False
    return _match(step, pattern)


def _match(step: Step, pattern: str) -> bool:
    """Match a pattern against every topic that may be known; whether it stands for other topics than before."""
    group = step.group
    group.judged[pattern] = Judged(step.rules, step.env.now_ms)
    resolved = group.patterns.get(pattern)
    found = patterns.matching(pattern, filter(step.may_know, step.env.image.topics))
    if resolved is not None:
        if found == set(resolved.topics):
            return False
        if group.matched_names is not None:
            # Somebody else may still know of what is left out now, and finds it with the next look.
            group.matched_names = group.matched_names - (set(resolved.topics) - found)
    step.write(PatternRecord(group.group_id, pattern, _resolved(step, found)))
    return True


def _resolved(step: Step, topics: Collection[str]) -> Resolved:
    return Resolved(tuple(sorted(topics)), step.env.image.index, step.env.now_ms)


def bump_epoch(step: Step, *, has_changed: bool) -> None:
    """Begin a new epoch where members have changed, or the topics they subscribe to."""
    group, image = step.group, step.env.image
    can_look = step.may_know is not None or not group.patterns
    is_new_view = (can_look and group.seen_topics is not image.topics) and (
        group.seen_topics is None or not 0 <= step.env.now_ms - group.looked_at_ms < _LOOK_INTERVAL_MS
    )
    if not (has_changed or is_new_view):
        return
    if is_new_view:
        group.seen_topics, group.looked_at_ms = image.topics, step.env.now_ms
        _match_new_topics(step)
    metadata_hash = group.metadata_hash(image)
    if has_changed or metadata_hash != group.epoch.metadata_hash:
        step.write(EpochRecord(group.group_id, GroupEpoch(group.epoch.epoch + 1, metadata_hash)))
        if group.has_topics_record:
            step.write(TopicsRecord(group.group_id, None))


def _match_new_topics(step: Step) -> None:
    group = step.group
    if not group.patterns:
        group.matched_names = None
        return
    names = frozenset(step.env.image.topics)
    # What may not be known now is looked at again the next time.
    known = frozenset(filter(step.may_know, names))
    fresh = known if group.matched_names is None else known - group.matched_names
    for pattern, resolved in list(group.patterns.items()):
        found = names.intersection(resolved.topics) | patterns.matching(pattern, fresh)
        if found != set(resolved.topics):
            step.write(PatternRecord(group.group_id, pattern, _resolved(step, found)))
    group.matched_names = known


def update_targets(step: Step) -> None:
    """Compute the targets of this epoch, unless they are there, or the last ones are too young."""
    group, env = step.group, step.env
    if group.target_epoch.epoch >= group.epoch.epoch:
        return
    computed_ms = group.target_epoch.timestamp_ms
    if computed_ms and 0 <= env.now_ms - computed_ms < env.times.assignment_interval_ms:
        return
    assignor = ASSIGNORS.get(group.preferred_assignor(env.settings.consumer_assignors[0]), ASSIGNORS["uniform"])
    for member_id, target in new_targets(group, env.image, assignor).items():
        if target != group.target_of(member_id):
            step.write(TargetRecord(group.group_id, member_id, target))
    step.write(TargetEpochRecord(group.group_id, TargetEpoch(group.epoch.epoch, env.now_ms)))


def reconcile_member(step: Step, member_id: str, owned_now: OwnedNow | None, *, subscription_changed: bool) -> Member:
    """Take a member one step towards its target; the member as it is then."""
    group = step.group
    member = group.members[member_id]
    epoch = group.target_epoch.epoch
    if not subscription_changed and member.is_reconciled_to(epoch):
        return member
    if member.held.state is MemberState.UNKNOWN and (owned_now is None or owned_now):
        raise ApiError(
            ErrorCode.FENCED_MEMBER_EPOCH,
            "it is not known what the member owns: it has to rejoin",
        )
    goal = Goal(group.target_of(member_id), epoch, subscribed_ids(group, member, step.env.image), owned_now)
    held = reconcile(group, member, goal, subscription_changed=subscription_changed)
    if held == member.held:
        return member
    step.write(HeldRecord(group.group_id, member_id, held))
    if not member.is_classic:
        if held.state is MemberState.UNREVOKED_PARTITIONS:
            step.set_timer(TimerKind.REBALANCE, member_id, member.info.rebalance_timeout_ms)
        else:
            step.cancel_timer(TimerKind.REBALANCE, member_id)
    return group.members[member_id]


def replace_static(step: Step, old: Member, member_id: str) -> None:
    """A static member comes back under another id: it gets everything that its former self had."""
    group = step.group
    target = group.target_of(old.member_id)
    remove_member(step, old.member_id)
    step.write(MemberRecord(group.group_id, member_id, old.info))
    step.write(TargetRecord(group.group_id, member_id, target))
    step.write(HeldRecord(group.group_id, member_id, replace(old.held, epoch=0, previous_epoch=0)))
    step.cancel_timers(old.member_id)


def remove_member(step: Step, member_id: str) -> None:
    """Remove what the log has of a member, and nothing else."""
    group_id = step.group.group_id
    step.write(HeldRecord(group_id, member_id, None))
    step.write(TargetRecord(group_id, member_id, None))
    step.write(MemberRecord(group_id, member_id, None))


def fence(step: Step, member_ids: Collection[str]) -> None:
    """Remove members. The others learn of it in a new epoch, or as a classic group if they are all classic."""
    if not member_ids:
        return
    group = step.group
    if migration.can_downgrade(group, member_ids, step.env.settings):
        become_classic(step, member_ids)
        return
    for member_id in member_ids:
        pattern = group.members[member_id].info.pattern
        remove_member(step, member_id)
        step.cancel_timers(member_id)
        if pattern and pattern not in group.pattern_counts and pattern in group.patterns:
            step.write(PatternRecord(group.group_id, pattern, None))
    bump_epoch(step, has_changed=True)


def become_classic(step: Step, leaving: Collection[str]) -> None:
    """End as a consumer group: the members that stay are a classic group from now on."""
    group = step.group
    classic, stored = migration.downgrade(group, leaving, step.env.image, step.env.now_ms)
    for member_id in group.members:
        step.cancel_timers(member_id)
    for record in group.tombstones():
        step.write(record)
    step.write(GroupRecord(group.group_id, stored))
    step.became_classic = classic
