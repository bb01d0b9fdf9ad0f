"""What goes into the classic group state machine and what comes out of it, as data.

Requests are what a client asked, results are what it is told, effects are what the owner of the group must do: answer
a parked request, arm or disarm a timer, write the group's record. Nothing here behaves; `protocol` decides, `groups`
performs.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.errors import ErrorCode
from millrace.groups.timers import CancelTimer, SetTimer

NO_MEMBER_ID = ""
NO_GENERATION = -1
NO_LEADER = ""


@dataclass(frozen=True, slots=True)
class Protocol:
    """One assignment strategy a member supports, with the bytes it wants the leader to see."""

    name: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A JoinGroup, freed of its version: the two flags are what the version meant."""

    member_id: str
    instance_id: str | None
    protocol_type: str
    protocols: tuple[Protocol, ...]
    session_timeout_ms: int
    rebalance_timeout_ms: int
    client_id: str = ""
    client_host: str = ""
    new_member_id: str = ""
    """The id to give to a member that has none yet; the caller makes it, so that the machine stays deterministic."""
    requires_member_id: bool = True
    """v4+: a dynamic member without an id is sent away with one and must come back (KIP-394)."""
    may_skip_assignment: bool = True
    """v9+: a returning static leader may be told to keep the assignment as it is (KIP-814)."""


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """A SyncGroup; `assignments` is empty unless the sender leads the group."""

    member_id: str
    instance_id: str | None
    generation: int
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignments: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """One member of a LeaveGroup: by member id, or by instance id alone (an administrator's removal)."""

    member_id: str
    instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class JoinedMember:
    """A member as the leader sees it."""

    member_id: str
    instance_id: str | None
    metadata: bytes


@dataclass(frozen=True, slots=True)
class JoinResult:
    """The answer to a JoinGroup."""

    error: ErrorCode
    member_id: str
    generation: int = NO_GENERATION
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str = NO_LEADER
    skip_assignment: bool = False
    members: tuple[JoinedMember, ...] = ()


@dataclass(frozen=True, slots=True)
class SyncResult:
    """The answer to a SyncGroup."""

    error: ErrorCode
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignment: bytes = b""


@dataclass(frozen=True, slots=True)
class LeaveResult:
    """The answer for one member of a LeaveGroup."""

    member_id: str
    instance_id: str | None
    error: ErrorCode


@dataclass(frozen=True, slots=True)
class StoredMember:
    """A member as it is written to the log."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group as it is written to the log: what survives a restart."""

    protocol_type: str
    generation: int
    protocol_name: str | None
    leader: str | None
    state_timestamp_ms: int
    members: tuple[StoredMember, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerJoin:
    """Resolve the parked JoinGroup `ticket`."""

    ticket: int
    result: JoinResult


@dataclass(frozen=True, slots=True)
class AnswerSync:
    """Resolve the parked SyncGroup `ticket`."""

    ticket: int
    result: SyncResult


@dataclass(frozen=True, slots=True)
class Store:
    """Write the group's record; when it is durable, or has failed, report `stored(token)` unless the token is None."""

    record: StoredGroup
    token: int | None


Effect = AnswerJoin | AnswerSync | SetTimer | CancelTimer | Store
