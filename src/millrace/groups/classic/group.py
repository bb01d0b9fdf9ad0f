"""The state of one classic group: values and bookkeeping, no decisions.

`protocol` and `rebalance` decide what happens; this module keeps what they decided consistent. Invariants after every
call: the leader is a member or there is none; `static_members` names exactly the members with an instance id;
`awaiting_join` counts the members with a parked JoinGroup; `votes` counts the supporters of each protocol; an id is
never both pending and a member.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from millrace.errors import ErrorCode
from millrace.groups.classic.effects import JoinedMember, Protocol, StoredGroup, StoredMember
from millrace.groups.subscription import CONSUMER_PROTOCOL_TYPE, subscribed_topics
from millrace.model import NO_TIMESTAMP


class GroupState(Enum):
    """The states of a classic group, under the names that clients see."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


_REACHED_FROM: dict[GroupState, frozenset[GroupState]] = {
    GroupState.EMPTY: frozenset({GroupState.PREPARING_REBALANCE, GroupState.DEAD}),
    GroupState.PREPARING_REBALANCE: frozenset(
        {GroupState.EMPTY, GroupState.STABLE, GroupState.COMPLETING_REBALANCE},
    ),
    GroupState.COMPLETING_REBALANCE: frozenset({GroupState.PREPARING_REBALANCE}),
    GroupState.STABLE: frozenset({GroupState.COMPLETING_REBALANCE}),
    GroupState.DEAD: frozenset(GroupState),
}


@dataclass(slots=True)
class Member:
    """A member of a group; the tickets are its parked requests."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[Protocol, ...]
    assignment: bytes = b""
    is_new: bool = False
    """True until the first rebalance that includes the member: it cannot heartbeat before."""
    join_ticket: int | None = None
    sync_ticket: int | None = None

    @property
    def is_static(self) -> bool:
        return self.instance_id is not None

    @property
    def is_excused(self) -> bool:
        """Whether a passed session deadline says nothing, because we are the ones who keep the member waiting."""
        return not self.is_new and (self.join_ticket is not None or self.sync_ticket is not None)

    def metadata(self, protocol_name: str | None) -> bytes:
        """What the member sent for the protocol; empty where it does not support it."""
        return next((each.metadata for each in self.protocols if each.name == protocol_name), b"")


@dataclass(frozen=True, slots=True)
class PendingAssignment:
    """The leader's assignment, while its record is on the way to the log."""

    generation: int
    assignments: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class PendingReplacement:
    """A static member that came back under a new id, while its record is on the way to the log."""

    generation: int
    ticket: int
    old_member_id: str
    new_member_id: str
    old_leader: str
    old_protocols: tuple[Protocol, ...]
    old_session_timeout_ms: int
    old_rebalance_timeout_ms: int
    may_skip_assignment: bool


@dataclass(frozen=True, slots=True)
class InitialDelay:
    """How long the first rebalance of an empty group still waits for company."""

    delay_ms: int
    remaining_ms: int


@dataclass(slots=True, eq=False)
class ClassicGroup:
    """One group. Owned by its shard; changed only by `protocol` and `rebalance`."""

    group_id: str
    state: GroupState = GroupState.EMPTY
    previous_state: GroupState = GroupState.DEAD
    state_timestamp_ms: int = NO_TIMESTAMP
    generation: int = 0
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader_id: str | None = None
    members: dict[str, Member] = field(default_factory=dict)
    static_members: dict[str, str] = field(default_factory=dict)
    pending_join: set[str] = field(default_factory=set)
    """Ids handed out with MEMBER_ID_REQUIRED whose owners have not come back yet."""
    pending_sync: set[str] = field(default_factory=set)
    subscribed_topics: frozenset[str] | None = None
    """None: not known (no rebalance yet, another protocol type, or metadata that cannot be read)."""
    awaiting_join: int = 0
    votes: Counter[str] = field(default_factory=Counter)
    new_member_added: bool = False
    initial_delay: InitialDelay | None = None
    pending_stores: dict[int, PendingAssignment | PendingReplacement] = field(default_factory=dict)
    next_token: int = 0
    rebalances: int = 0
    """Generations that were begun and not counted yet (`ClassicGroups`)."""

    def __repr__(self) -> str:
        return (
            f"ClassicGroup({self.group_id!r} {self.state.value} generation {self.generation}, "
            f"{len(self.members)} members, {len(self.pending_join)} pending)"
        )

    # Queries

    @property
    def uses_consumer_protocol(self) -> bool:
        return self.protocol_type == CONSUMER_PROTOCOL_TYPE

    @property
    def is_idle(self) -> bool:
        """Whether nobody is in the group nor on the way into it."""
        return self.state is GroupState.EMPTY and not self.members and not self.pending_join

    @property
    def is_simple(self) -> bool:
        """Whether the group only keeps offsets: it has no record of its own and is gone with its last offset."""
        return self.protocol_type is None and self.state_timestamp_ms == NO_TIMESTAMP and self.is_idle

    @property
    def can_rebalance(self) -> bool:
        return self.state in _REACHED_FROM[GroupState.PREPARING_REBALANCE]

    @property
    def has_all_members_joined(self) -> bool:
        return self.awaiting_join == len(self.members) and not self.pending_join

    @property
    def rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    def supports(self, protocol_type: str, protocols: tuple[Protocol, ...]) -> bool:
        """Whether a member with these protocols could be in the group: one of them must suit everybody."""
        if self.state is GroupState.EMPTY:
            return bool(protocol_type) and bool(protocols)
        return protocol_type == self.protocol_type and any(
            self.votes[each.name] == len(self.members) for each in protocols
        )

    def check_member(self, member_id: str, instance_id: str | None) -> ErrorCode:
        """NONE where the ids name a member: an instance id outranks the member id and fences its earlier owners."""
        if instance_id is not None:
            owner = self.static_members.get(instance_id)
            if owner is None:
                return ErrorCode.UNKNOWN_MEMBER_ID
            if owner != member_id:
                return ErrorCode.FENCED_INSTANCE_ID
        return ErrorCode.NONE if member_id in self.members else ErrorCode.UNKNOWN_MEMBER_ID

    def select_protocol(self) -> str:
        """The protocol with the most votes among those that every member supports; the first voted for wins a tie."""
        candidates = {name for name, count in self.votes.items() if count == len(self.members)}
        ballots: Counter[str] = Counter()
        for member in self.members.values():
            ballots[next(each.name for each in member.protocols if each.name in candidates)] += 1
        return ballots.most_common(1)[0][0]

    def is_subscribed_to(self, topic: str) -> bool:
        """Whether members consume the topic; a consumer group that cannot tell is taken to."""
        if self.subscribed_topics is None:
            return self.uses_consumer_protocol
        return topic in self.subscribed_topics

    def joined_members(self) -> tuple[JoinedMember, ...]:
        """The members as the leader gets them."""
        return tuple(
            JoinedMember(member.member_id, member.instance_id, member.metadata(self.protocol_name))
            for member in self.members.values()
        )

    # Changes

    def move_to(self, state: GroupState, now_ms: int) -> None:
        """Enter a state; the table above says from where that is possible."""
        assert self.state in _REACHED_FROM[state], f"{self.state} -> {state}"
        self.previous_state = self.state
        self.state = state
        self.state_timestamp_ms = now_ms

    def add_member(self, member: Member, protocol_type: str) -> None:
        """Let a member in; the first one names the protocol type and leads."""
        if not self.members:
            self.protocol_type = protocol_type
        if member.instance_id is not None:
            assert member.instance_id not in self.static_members
            self.static_members[member.instance_id] = member.member_id
        if self.leader_id is None:
            self.leader_id = member.member_id
        self.members[member.member_id] = member
        self._count_votes(member, 1)
        if member.join_ticket is not None:
            self.awaiting_join += 1
        self.pending_join.discard(member.member_id)

    def remove_member(self, member_id: str) -> None:
        """Forget a member or a pending id; its parked requests must have been taken before."""
        member = self.members.pop(member_id, None)
        if member is not None:
            self._count_votes(member, -1)
            if member.join_ticket is not None:
                self.awaiting_join -= 1
            if member.instance_id is not None:
                self.static_members.pop(member.instance_id, None)
        if self.leader_id == member_id:
            self.leader_id = next(iter(self.members), None)
        self.pending_join.discard(member_id)
        self.pending_sync.discard(member_id)

    def rename_static_member(self, instance_id: str, old_member_id: str, new_member_id: str) -> Member:
        """Give a static member another id and keep everything else, its place as leader included."""
        member = self.members.pop(old_member_id)
        member.member_id = new_member_id
        self.members[new_member_id] = member
        self.static_members[instance_id] = new_member_id
        if self.leader_id == old_member_id:
            self.leader_id = new_member_id
        if old_member_id in self.pending_sync:
            self.pending_sync.remove(old_member_id)
            self.pending_sync.add(new_member_id)
        return member

    def update_protocols(self, member: Member, protocols: tuple[Protocol, ...]) -> None:
        """Replace what a member supports."""
        self._count_votes(member, -1)
        member.protocols = protocols
        self._count_votes(member, 1)

    def park_join(self, member: Member, ticket: int) -> int | None:
        """Hold a JoinGroup; the ticket that it replaces, if any, is the caller's to answer."""
        replaced, member.join_ticket = member.join_ticket, ticket
        if replaced is None:
            self.awaiting_join += 1
        return replaced

    def take_join(self, member: Member) -> int | None:
        """The member's parked JoinGroup, which is no longer parked."""
        ticket, member.join_ticket = member.join_ticket, None
        if ticket is not None:
            self.awaiting_join -= 1
        return ticket

    def take_sync(self, member: Member) -> int | None:
        """The member's parked SyncGroup, which is no longer parked."""
        ticket, member.sync_ticket = member.sync_ticket, None
        return ticket

    def elect_joined_leader(self) -> bool:
        """Make sure that the leader takes part in the coming generation; False where nobody joined."""
        if self.leader_id is None:
            return False
        if self.members[self.leader_id].join_ticket is not None:
            return True
        joined = next((each.member_id for each in self.members.values() if each.join_ticket is not None), None)
        if joined is None:
            return False
        self.leader_id = joined
        return True

    def begin_generation(self, now_ms: int) -> None:
        """The join phase is over: next generation, protocol chosen, waiting for the leader's assignment."""
        self.generation += 1
        self.rebalances += 1
        self.pending_sync.clear()
        self.initial_delay = None
        self.new_member_added = False
        self.protocol_name = self.select_protocol() if self.members else None
        self.refresh_subscribed_topics()
        self.move_to(GroupState.COMPLETING_REBALANCE if self.members else GroupState.EMPTY, now_ms)

    def refresh_subscribed_topics(self) -> None:
        """Read the subscriptions of the current generation."""
        self.subscribed_topics = None
        if not self.uses_consumer_protocol:
            return
        topics: set[str] = set()
        for member in self.members.values():
            subscription = subscribed_topics(member.metadata(self.protocol_name)) if self.protocol_name else None
            if subscription is None:
                return
            topics.update(subscription)
        self.subscribed_topics = frozenset(topics)

    def new_token(self, pending: PendingAssignment | PendingReplacement) -> int:
        """Remember a write that is on its way."""
        token = self.next_token
        self.next_token += 1
        self.pending_stores[token] = pending
        return token

    def _count_votes(self, member: Member, change: int) -> None:
        for protocol in member.protocols:
            self.votes[protocol.name] += change
            if not self.votes[protocol.name]:
                del self.votes[protocol.name]

    # The log

    def to_record(self, assignments: dict[str, bytes]) -> StoredGroup:
        """What is written at the end of a rebalance."""
        return StoredGroup(
            protocol_type=self.protocol_type or "",
            generation=self.generation,
            protocol_name=self.protocol_name,
            leader=self.leader_id,
            state_timestamp_ms=self.state_timestamp_ms,
            members=tuple(
                StoredMember(
                    member_id=member.member_id,
                    instance_id=member.instance_id,
                    client_id=member.client_id,
                    client_host=member.client_host,
                    rebalance_timeout_ms=member.rebalance_timeout_ms,
                    session_timeout_ms=member.session_timeout_ms,
                    subscription=member.metadata(self.protocol_name),
                    assignment=assignments.get(member.member_id, b""),
                )
                for member in self.members.values()
            ),
        )

    @classmethod
    def from_record(cls, group_id: str, record: StoredGroup) -> ClassicGroup:
        """The group as its last completed rebalance left it."""
        group = cls(
            group_id,
            state=GroupState.STABLE if record.members else GroupState.EMPTY,
            state_timestamp_ms=record.state_timestamp_ms,
            generation=record.generation,
            protocol_type=record.protocol_type or None,
            protocol_name=record.protocol_name,
        )
        for stored in record.members:
            member = Member(
                member_id=stored.member_id,
                instance_id=stored.instance_id,
                client_id=stored.client_id,
                client_host=stored.client_host,
                session_timeout_ms=stored.session_timeout_ms,
                # Records before version 1 have no rebalance timeout.
                rebalance_timeout_ms=(
                    stored.session_timeout_ms if stored.rebalance_timeout_ms == -1 else stored.rebalance_timeout_ms
                ),
                # Only the protocol that was chosen is stored.
                protocols=(Protocol(record.protocol_name or "", stored.subscription),),
                assignment=stored.assignment,
            )
            group.add_member(member, record.protocol_type)
        if record.leader in group.members:
            group.leader_id = record.leader
        group.refresh_subscribed_topics()
        return group
