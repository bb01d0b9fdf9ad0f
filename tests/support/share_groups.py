"""A share group in a test: a world of topics and members, on a clock that only the test moves.

`ShareBench` performs the decisions of the pure machine and keeps the log that they make. What the share coordinator is
to be told waits in `untold` until the test says how that went.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError
from millrace.groups.environment import LEAVING, Environment, HeartbeatResult
from millrace.groups.settings import GroupSettings, GroupTimes
from millrace.groups.share import partitions as share_partitions
from millrace.groups.share import protocol as share
from millrace.groups.share.group import ShareGroup
from millrace.groups.share.protocol import ShareHeartbeat
from millrace.groups.share.records import ShareRecord, read_share_entry, share_entry
from millrace.groups.share.step import Partitions, ShareStep
from millrace.groups.timers import CancelTimer, SetTimer, TimerKey
from support.modern_groups import Refused

R = TypeVar("R")


@dataclass
class ShareBench:
    """One group and its owner: timers, a log, and the topics of the cluster."""

    image: ClusterImage = field(default_factory=ClusterImage)
    settings: GroupSettings = field(default_factory=GroupSettings)
    times: GroupTimes = field(default_factory=lambda: GroupTimes(assignment_interval_ms=0))
    now_ms: int = 1_000_000
    group: ShareGroup = field(default_factory=lambda: ShareGroup("g"))
    timers: dict[TimerKey, int] = field(default_factory=dict)
    log: list[ShareRecord] = field(default_factory=list)
    untold: list[Partitions] = field(default_factory=list)
    refuses: bool = False
    """Whether the log takes nothing: every event is taken back."""

    def decide(self, decision: Callable[[ShareStep], R]) -> R:
        """Let one event happen, or (ApiError) not happen."""
        step = ShareStep(self.group, Environment(self.image, self.settings, self.times, self.now_ms))
        try:
            result = decision(step)
        except ApiError:
            step.undo()
            raise
        if self.refuses and step.records:
            step.undo()
            raise Refused
        self.log += step.records
        if step.to_initialize:
            self.untold.append(step.to_initialize)
        for effect in step.timers:
            match effect:
                case SetTimer(key, delay_ms):
                    self.timers[key] = self.now_ms + delay_ms
                case CancelTimer(key):
                    self.timers.pop(key, None)
        return result

    def heartbeat(self, member_id: str, epoch: int, **changes: Any) -> HeartbeatResult:
        request = ShareHeartbeat(member_id, epoch, **changes)
        share.check_request(request)
        decision = share.leave if epoch == LEAVING else share.heartbeat
        return self.decide(lambda step: decision(step, request))

    def join(self, member_id: str, *topics: str, **changes: Any) -> HeartbeatResult:
        return self.heartbeat(member_id, 0, topics=topics, **changes)

    def tell(self) -> None:
        """The share coordinator hears everything."""
        while self.untold:
            partitions = self.untold.pop(0)
            self.decide(lambda step: share_partitions.initialized(step, partitions))  # noqa: B023 - called at once

    def heartbeat_until_stable(self, member_id: str) -> HeartbeatResult:
        """Heartbeats until nothing changes any more; the last answer that said what to read, or the last one."""
        said = None
        while True:
            self.tell()
            before = len(self.log)
            answer = self.heartbeat(member_id, self.group.members[member_id].held.epoch)
            said = answer if answer.assignment is not None else said
            if len(self.log) == before:
                return said or answer

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
                self.decide(lambda step, key=key: share.timer_fired(step, key))  # type: ignore[misc]
            except Refused:
                self.timers[key] = self.now_ms + 1_000
        self.now_ms = target

    def replayed(self) -> ShareGroup:
        """The group as a coordinator finds it that reads the latest record of every key, from bytes."""
        latest: dict[bytes, bytes | None] = {}
        for record in self.log:
            key, value = share_entry(record)
            latest.pop(key, None)
            latest[key] = value
        group = ShareGroup("g")
        for key, value in latest.items():
            read = read_share_entry(int.from_bytes(key[:2], "big"), key, value)
            assert read is not None
            group.apply(read)
        return group


def share_state_of(group: ShareGroup) -> dict[str, Any]:
    """Everything of a group that a replay must give again."""
    return {
        "epoch": group.epoch,
        "target_epoch": group.target_epoch,
        "members": group.members,
        "targets": {member_id: target for member_id, target in group.targets.items() if target},
        "partitions": group.partitions,
        "topic_counts": group.topic_counts,
    }
