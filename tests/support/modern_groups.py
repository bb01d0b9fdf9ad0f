"""A KIP-848 group in a test: a world of topics and members, on a clock that only the test moves.

`ModernBench` performs the decisions of the pure machine and keeps the log that they make.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError
from millrace.groups.classic.effects import JoinRequest, JoinResult, LeaveRequest, LeaveResult, SyncRequest, SyncResult
from millrace.groups.classic.group import ClassicGroup
from millrace.groups.classic.records import GroupRecord
from millrace.groups.environment import Environment, HeartbeatResult
from millrace.groups.modern import classic_members
from millrace.groups.modern import protocol as modern
from millrace.groups.modern.group import ModernGroup
from millrace.groups.modern.protocol import ModernHeartbeat
from millrace.groups.modern.records import ModernRecord, read_entry, to_entry
from millrace.groups.modern.step import Step
from millrace.groups.settings import GroupSettings, GroupTimes
from millrace.groups.timers import CancelTimer, SetTimer, StartTimer, TimerEffect, TimerKey
from millrace.metadata.deltas import PartitionsAdded, PartitionState, TopicCreated, TopicDeleted

R = TypeVar("R")

ONE_REPLICA = PartitionState(replicas=(1,), isr=(1,), leader=1, leader_epoch=0)


def add_topic(image: ClusterImage, name: str, partitions: int) -> ClusterImage:
    """The image with a new topic."""
    topic_id = uuid.uuid5(uuid.NAMESPACE_DNS, f"{name}.{image.index}")
    return image.apply((TopicCreated(name, topic_id, (ONE_REPLICA,) * partitions),))


def add_partitions(image: ClusterImage, name: str, more: int) -> ClusterImage:
    """The image with more partitions of a topic."""
    topic = image.topics[name]
    return image.apply((PartitionsAdded(topic.topic_id, (ONE_REPLICA,) * more),))


def drop_topic(image: ClusterImage, name: str) -> ClusterImage:
    """The image without a topic."""
    return image.apply((TopicDeleted(name, image.topics[name].topic_id),))


def image_of(**topics: int) -> ClusterImage:
    """An image with these topics and their numbers of partitions."""
    image = ClusterImage()
    for name, partitions in topics.items():
        image = add_topic(image, name, partitions)
    return image


@dataclass
class ModernBench:
    """One group and its owner: timers, a log, and the topics of the cluster."""

    image: ClusterImage = field(default_factory=ClusterImage)
    settings: GroupSettings = field(default_factory=GroupSettings)
    times: GroupTimes = field(default_factory=lambda: GroupTimes(assignment_interval_ms=0))
    now_ms: int = 1_000_000
    group: ModernGroup = field(default_factory=lambda: ModernGroup("g"))
    timers: dict[TimerKey, int] = field(default_factory=dict)
    log: list[ModernRecord | GroupRecord] = field(default_factory=list)
    refuses: bool = False
    """Whether the log takes nothing: every event is taken back."""
    became_classic: ClassicGroup | None = None

    def environment(self) -> Environment:
        return Environment(self.image, self.settings, self.times, self.now_ms)

    def decide(self, decision: Callable[[Step], R]) -> R:
        """Let one event happen, or (ApiError) not happen."""
        step = Step(self.group, self.environment())
        try:
            result = decision(step)
        except ApiError:
            step.undo()
            raise
        if self.refuses and step.records:
            step.undo()
            raise Refused
        self.log += step.records
        for effect in step.timers:
            self._perform(effect)
        self.became_classic = step.became_classic
        return result

    def _perform(self, effect: TimerEffect) -> None:
        match effect:
            case SetTimer(key, delay_ms):
                self.timers[key] = self.now_ms + delay_ms
            case StartTimer(key, delay_ms):
                self.timers.setdefault(key, self.now_ms + delay_ms)
            case CancelTimer(key):
                self.timers.pop(key, None)

    def heartbeat(self, member_id: str, epoch: int, **changes: Any) -> HeartbeatResult:
        request = ModernHeartbeat(member_id, epoch, **changes)
        modern.check_request(request, self.settings.consumer_assignors)
        decision = modern.leave if request.is_leaving else modern.heartbeat
        return self.decide(lambda step: decision(step, request))

    def join(self, member_id: str, *topics: str, **changes: Any) -> HeartbeatResult:
        values: dict[str, Any] = {"rebalance_timeout_ms": 60_000, "topics": topics, "owned": (), **changes}
        return self.heartbeat(member_id, 0, **values)

    def classic_join(self, request: JoinRequest) -> JoinResult:
        return self.decide(lambda step: classic_members.join(step, request))

    def classic_sync(self, request: SyncRequest) -> SyncResult:
        return self.decide(lambda step: classic_members.sync(step, request))

    def classic_heartbeat(self, member_id: str, generation: int, instance_id: str | None = None) -> Any:
        return self.decide(lambda step: classic_members.heartbeat(step, member_id, instance_id, generation))

    def classic_leave(self, *requests: LeaveRequest) -> list[LeaveResult]:
        return self.decide(lambda step: classic_members.leave(step, requests))

    def advance(self, milliseconds: int) -> None:
        """Move time; timers fire in order, each at its own instant."""
        target = self.now_ms + milliseconds
        while self.timers:
            key, due = min(self.timers.items(), key=lambda item: item[1])
            if due > target:
                break
            del self.timers[key]
            self.now_ms = max(self.now_ms, due)
            try:
                self.decide(lambda step, key=key: modern.timer_fired(step, key))  # type: ignore[misc]
            except Refused:
                self.timers[key] = self.now_ms + 1_000
        self.now_ms = target

    def replayed(self) -> ModernGroup:
        """The group as a coordinator finds it that reads the latest record of every key, from bytes."""
        latest: dict[bytes, bytes | None] = {}
        for record in self.log:
            assert not isinstance(record, GroupRecord)
            key, value = to_entry(record)
            latest.pop(key, None)
            latest[key] = value
        group = ModernGroup("g")
        for key, value in latest.items():
            read = read_entry(int.from_bytes(key[:2], "big"), key, value)
            assert read is not None
            group.apply(read)
        return group


class Refused(Exception):
    """The log took nothing."""


def state_of(group: ModernGroup) -> dict[str, Any]:
    """Everything of a group that a replay must give again."""
    return {
        "epoch": group.epoch,
        "target_epoch": group.target_epoch,
        "members": group.members,
        "targets": {member_id: target for member_id, target in group.targets.items() if target},
        "patterns": group.patterns,
        "static_members": group.static_members,
        "owners": group.owners,
        "topic_counts": group.topic_counts,
        "pattern_counts": group.pattern_counts,
        "assignor_counts": group.assignor_counts,
        "classic_count": group.classic_count,
        "protocol_votes": group.protocol_votes,
    }
