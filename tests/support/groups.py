"""A classic group in a test: performs the effects of the state machine on a clock that only the test moves."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import Any

from millrace.errors import ErrorCode
from millrace.groups.classic import protocol as classic
from millrace.groups.classic.effects import (
    AnswerJoin,
    AnswerSync,
    Effect,
    JoinRequest,
    JoinResult,
    LeaveRequest,
    LeaveResult,
    Protocol,
    Store,
    StoredGroup,
    SyncRequest,
    SyncResult,
)
from millrace.groups.classic.group import ClassicGroup
from millrace.groups.settings import GroupSettings
from millrace.groups.timers import CancelTimer, SetTimer, TimerKey


def subscription(*topics: str) -> bytes:
    """A ConsumerProtocolSubscription, version 0."""
    names = b"".join(struct.pack(">h", len(topic)) + topic.encode() for topic in topics)
    return struct.pack(">hi", 0, len(topics)) + names + struct.pack(">i", -1)


RANGE = Protocol("range", subscription("orders"))
STICKY = Protocol("cooperative-sticky", subscription("orders"))


def join_request(member_id: str = "", *, instance_id: str | None = None, **changes: Any) -> JoinRequest:
    """A consumer's JoinGroup with everyday values."""
    values: dict[str, Any] = {
        "protocol_type": "consumer",
        "protocols": (RANGE,),
        "session_timeout_ms": 10_000,
        "rebalance_timeout_ms": 60_000,
        "client_id": "client",
        "client_host": "/127.0.0.1",
        **changes,
    }
    return JoinRequest(member_id=member_id, instance_id=instance_id, **values)


@dataclass
class GroupBench:
    """One group and its owner: timers, parked requests and a log that confirms when told to."""

    settings: GroupSettings = field(default_factory=GroupSettings)
    now_ms: int = 1_000_000
    group: ClassicGroup = field(default_factory=lambda: ClassicGroup("g"))
    timers: dict[TimerKey, int] = field(default_factory=dict)
    answers: dict[int, JoinResult | SyncResult] = field(default_factory=dict)
    parked: set[int] = field(default_factory=set)
    log: list[StoredGroup] = field(default_factory=list)
    unconfirmed: list[tuple[StoredGroup, int | None]] = field(default_factory=list)
    confirm_at_once: bool = True
    _ids: int = 0

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case AnswerJoin(ticket, result) | AnswerSync(ticket, result):
                    assert ticket not in self.answers, f"ticket {ticket} is answered twice"
                    self.answers[ticket] = result
                    self.parked.discard(ticket)
                case SetTimer(key, delay_ms):
                    assert delay_ms >= 0
                    self.timers[key] = self.now_ms + delay_ms
                case CancelTimer(key):
                    self.timers.pop(key, None)
                case Store(record, token):
                    self.unconfirmed.append((record, token))
        if self.confirm_at_once:
            self.confirm_all()

    def confirm_all(self) -> None:
        while self.unconfirmed:
            self.confirm()

    def confirm(self, error: ErrorCode = ErrorCode.NONE) -> None:
        """The oldest write is durable, or has failed."""
        record, token = self.unconfirmed.pop(0)
        if error is ErrorCode.NONE:
            self.log.append(record)
        if token is not None:
            self.perform(classic.stored(self.group, token, error, self.settings, self.now_ms))

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    def join(self, request: JoinRequest) -> int:
        """The ticket; its answer is in `answers` as soon as there is one."""
        ticket = self.new_id()
        self.parked.add(ticket)
        if not request.new_member_id:
            request = replace(request, new_member_id=f"member-{ticket}")
        self.perform(classic.join(self.group, request, ticket, self.settings, self.now_ms))
        return ticket

    def joined(self, ticket: int) -> JoinResult:
        result = self.answers[ticket]
        assert isinstance(result, JoinResult)
        return result

    def synced(self, ticket: int) -> SyncResult:
        result = self.answers[ticket]
        assert isinstance(result, SyncResult)
        return result

    def sync(self, request: SyncRequest) -> int:
        ticket = self.new_id()
        self.parked.add(ticket)
        self.perform(classic.sync(self.group, request, ticket, self.settings, self.now_ms))
        return ticket

    def heartbeat(self, member_id: str, generation: int, instance_id: str | None = None) -> ErrorCode:
        error, effects = classic.heartbeat(self.group, member_id, instance_id, generation)
        self.perform(effects)
        return error

    def check_commit(self, member_id: str, generation: int, instance_id: str | None = None) -> ErrorCode:
        error, effects = classic.check_commit(self.group, member_id, instance_id, generation)
        self.perform(effects)
        return error

    def leave(self, *members: LeaveRequest) -> list[LeaveResult]:
        results, effects = classic.leave(self.group, members, self.settings, self.now_ms)
        self.perform(effects)
        return results

    def advance(self, milliseconds: int) -> None:
        """Move time; timers fire in order, each at its own instant."""
        target = self.now_ms + milliseconds
        while self.timers:
            key, due = min(self.timers.items(), key=lambda item: item[1])
            if due > target:
                break
            del self.timers[key]
            self.now_ms = max(self.now_ms, due)
            self.perform(classic.timer_fired(self.group, key, self.settings, self.now_ms))
        self.now_ms = target

    def admit(self, *, instance_id: str | None = None, **changes: Any) -> tuple[str, int]:
        """A new member's id and the ticket of the JoinGroup that is parked for it."""
        if instance_id is not None:
            ticket = self.join(join_request(instance_id=instance_id, **changes))
            return f"member-{ticket}", ticket
        member_id = self.joined(self.join(join_request(**changes))).member_id
        return member_id, self.join(join_request(member_id, **changes))

    def stabilise(self, members: int = 1, **changes: Any) -> list[str]:
        """A stable group of new dynamic members."""
        admitted = [self.admit(**changes) for _ in range(members)]
        self.advance(self.settings.initial_rebalance_delay_ms * (members + 1))
        self.assign()
        return [member_id for member_id, _ in admitted]

    def assign(self) -> None:
        """Every member syncs, the leader with an assignment that names its member and generation."""
        group = self.group
        assignments = tuple((each, assignment_of(each, group.generation)) for each in group.members)
        for member in list(group.members.values()):
            is_leader = member.member_id == group.leader_id
            self.sync(
                SyncRequest(
                    member.member_id,
                    member.instance_id,
                    group.generation,
                    assignments=assignments if is_leader else (),
                )
            )


def assignment_of(member_id: str, generation: int) -> bytes:
    return f"{member_id}@{generation}".encode()
