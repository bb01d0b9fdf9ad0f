"""Models of the classic group state machine: a hostile world, and a world of clients that keep the rules.

The hostile one sends anything at any time and checks what must hold whatever happens. The orderly one has clients that
heartbeat and rejoin in time, and checks what they are owed: no UNKNOWN_MEMBER_ID, and in the end one generation with
all of them in it.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millrace.errors import ErrorCode
from millrace.groups.classic.effects import JoinResult, LeaveRequest, SyncRequest, SyncResult
from millrace.groups.classic.group import ClassicGroup, GroupState
from millrace.groups.settings import GroupSettings
from millrace.groups.timers import TimerKind
from support.groups import RANGE, STICKY, GroupBench, assignment_of, join_request

INSTANCES = ("red", "green")
PROTOCOLS = ((RANGE,), (STICKY, RANGE), (RANGE, STICKY), (STICKY,))

MODEL = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)


def check_bookkeeping(group: ClassicGroup) -> None:
    members = group.members
    if members:
        assert group.leader_id in members
    else:
        assert group.leader_id is None
    assert {key for key, member in members.items() if member.member_id != key} == set()
    assert group.static_members == {
        member.instance_id: member.member_id for member in members.values() if member.instance_id is not None
    }
    assert group.awaiting_join == sum(member.join_ticket is not None for member in members.values())
    assert group.votes == Counter(each.name for member in members.values() for each in member.protocols)
    assert not group.pending_join & members.keys()
    assert group.pending_sync <= members.keys()
    if group.state is GroupState.EMPTY:
        assert not members
    if group.state in {GroupState.STABLE, GroupState.COMPLETING_REBALANCE}:
        assert members
        assert group.protocol_name is not None
        assert group.votes[group.protocol_name] == len(members)
    if group.state is not GroupState.COMPLETING_REBALANCE:
        assert all(member.sync_ticket is None for member in members.values())


class HostileWorld(RuleBasedStateMachine):
    @initialize(max_size=st.sampled_from([2, 4, 1000]))
    def start(self, max_size: int) -> None:
        self.bench = GroupBench(GroupSettings(max_size=max_size, max_pending_members=5), confirm_at_once=False)
        self.highest_generation = 0
        self.member_ids: list[str] = ["", "nobody"]
        self.sync_generation: dict[int, tuple[str, int]] = {}
        self.predecessor: dict[str, str] = {}
        """Which id a restarted static member had before."""

    def _note(self) -> None:
        for result in self.bench.answers.values():
            if isinstance(result, JoinResult) and result.member_id and result.member_id not in self.member_ids:
                self.member_ids.append(result.member_id)
        for member_id in self.bench.group.members:
            if member_id not in self.member_ids:
                self.member_ids.append(member_id)

    @rule(
        data=st.data(),
        instance_id=st.sampled_from([None, None, *INSTANCES]),
        protocols=st.sampled_from(PROTOCOLS),
        session_ms=st.sampled_from([6_000, 30_000]),
        rebalance_ms=st.sampled_from([0, 5_000, 60_000]),
        version=st.sampled_from([3, 5, 9]),
        protocol_type=st.sampled_from(["consumer", "consumer", "consumer", "connect", ""]),
    )
    def join(
        self,
        data: st.DataObject,
        instance_id: str | None,
        protocols: tuple[object, ...],
        session_ms: int,
        rebalance_ms: int,
        version: int,
        protocol_type: str,
    ) -> None:
        group = self.bench.group
        member_id = data.draw(st.sampled_from(self.member_ids))
        before = group.static_members.get(instance_id) if instance_id else None
        self.bench.join(
            join_request(
                member_id,
                instance_id=instance_id if version >= 5 else None,
                protocols=protocols,
                session_timeout_ms=session_ms,
                rebalance_timeout_ms=rebalance_ms,
                protocol_type=protocol_type,
                requires_member_id=version >= 4,
                may_skip_assignment=version >= 9,
            )
        )
        after = group.static_members.get(instance_id) if instance_id else None
        if before is not None and after is not None and before != after:
            self.predecessor[after] = before
            # The former owner of the instance id is out, for every request it may still send.
            assert self.bench.heartbeat(before, group.generation, instance_id) is ErrorCode.FENCED_INSTANCE_ID
            assert self.bench.check_commit(before, group.generation, instance_id) is ErrorCode.FENCED_INSTANCE_ID
        self._note()

    @rule(data=st.data(), off_by=st.sampled_from([0, 0, 0, 0, -1, 1]))
    def sync(self, data: st.DataObject, off_by: int) -> None:
        group = self.bench.group
        member_id = data.draw(st.sampled_from(self.member_ids))
        generation = group.generation + off_by
        assignments = tuple((each, assignment_of(each, generation)) for each in group.members)
        member = group.members.get(member_id)
        ticket = self.bench.sync(
            SyncRequest(member_id, member.instance_id if member else None, generation, assignments=assignments)
        )
        self.sync_generation[ticket] = (member_id, generation)

    @rule(data=st.data(), off_by=st.sampled_from([0, 0, 0, -1]))
    def heartbeat(self, data: st.DataObject, off_by: int) -> None:
        group = self.bench.group
        member_id = data.draw(st.sampled_from(self.member_ids))
        error = self.bench.heartbeat(member_id, group.generation + off_by)
        if member_id not in group.members:
            assert error is ErrorCode.UNKNOWN_MEMBER_ID
        elif off_by:
            assert error is ErrorCode.ILLEGAL_GENERATION
        elif group.state is GroupState.PREPARING_REBALANCE:
            assert error is ErrorCode.REBALANCE_IN_PROGRESS
        else:
            assert error is ErrorCode.NONE

    @rule(data=st.data(), by_instance=st.booleans())
    def leave(self, data: st.DataObject, by_instance: bool) -> None:
        if by_instance:
            request = LeaveRequest("", data.draw(st.sampled_from(INSTANCES)))
        else:
            request = LeaveRequest(data.draw(st.sampled_from(self.member_ids)))
        (result,) = self.bench.leave(request)
        if result.error is ErrorCode.NONE:
            assert request.member_id not in self.bench.group.members

    @rule(milliseconds=st.sampled_from([1, 500, 3_000, 7_000, 61_000]))
    def wait(self, milliseconds: int) -> None:
        self.bench.advance(milliseconds)

    @precondition(lambda self: self.bench.unconfirmed)
    @rule(error=st.sampled_from([ErrorCode.NONE, ErrorCode.NONE, ErrorCode.NONE, ErrorCode.NOT_COORDINATOR]))
    def confirm(self, error: ErrorCode) -> None:
        self.bench.confirm(error)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "bench"):
            return
        group = self.bench.group
        check_bookkeeping(group)
        assert group.generation >= self.highest_generation
        self.highest_generation = group.generation
        assert len(group.pending_join) <= 5
        waiting = {member.join_ticket for member in group.members.values()} | {
            member.sync_ticket for member in group.members.values()
        }
        assert self.bench.parked == waiting - {None}
        if group.state is GroupState.PREPARING_REBALANCE:
            assert any(key.kind is TimerKind.JOIN for key in self.bench.timers)
        sessions = {key.member_id for key in self.bench.timers if key.kind is TimerKind.SESSION}
        assert sessions <= group.members.keys() | group.pending_join
        for member in group.members.values():
            assert member.member_id in sessions or member.is_excused
        self._check_answers()

    def _check_answers(self) -> None:
        leaders: dict[int, set[str]] = {}
        for ticket, result in self.bench.answers.items():
            if isinstance(result, SyncResult):
                if result.error is ErrorCode.NONE and result.assignment:
                    # An assignment reaches only its member, and only in the generation it was made for. A restarted
                    # static member inherits that of its former self.
                    owner, generation = result.assignment.decode().rsplit("@", 1)
                    asked_by, asked_for = self.sync_generation[ticket]
                    assert int(generation) == asked_for
                    assert self._origin(asked_by) == self._origin(owner)
            elif result.error is ErrorCode.NONE:
                assert result.generation > 0
                if result.members:
                    assert result.leader == result.member_id
                    assert result.leader in {member.member_id for member in result.members}
                    leaders.setdefault(result.generation, set()).add(self._origin(result.member_id))
        assert all(len(names) == 1 for names in leaders.values())

    def _origin(self, member_id: str) -> str:
        while member_id in self.predecessor:
            member_id = self.predecessor[member_id]
        return member_id

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        # Whatever state this is: when writes are confirmed and time passes, nobody waits any more.
        self.bench.confirm_at_once = True
        self.bench.confirm_all()
        for _ in range(6):
            self.bench.advance(600_000)
        self.holds()
        assert not self.bench.parked
        assert self.bench.group.state is GroupState.EMPTY
        assert not self.bench.timers
        assert not self.bench.group.pending_stores


class Client:
    """A consumer that keeps the rules; `crashed` ones fall silent."""

    def __init__(self, name: str, *, static: bool) -> None:
        self.name = name
        self.instance_id = name if static else None
        self.member_id = ""
        self.generation = -1
        self.ticket: int | None = None
        self.phase = "outside"
        self.protocols = (RANGE,)
        self.next_beat_ms = 0
        self.assignment = b""

    def __repr__(self) -> str:
        return f"Client({self.name}, {self.member_id}, {self.phase}, generation {self.generation})"


SESSION_MS = 10_000
REBALANCE_MS = 30_000


class OrderlyWorld(RuleBasedStateMachine):
    """Clients react to every answer at once, or up to two seconds late: far inside their timeouts."""

    @initialize(confirm_at_once=st.booleans())
    def start(self, confirm_at_once: bool) -> None:
        self.bench = GroupBench(GroupSettings(initial_rebalance_delay_ms=1_000), confirm_at_once=confirm_at_once)
        self.clients: list[Client] = []
        self.names = 0

    @precondition(lambda self: len(self.clients) < 6)
    @rule(static=st.booleans(), older=st.booleans())
    def arrive(self, static: bool, older: bool) -> None:
        self.names += 1
        client = Client(f"c{self.names}", static=static)
        self.clients.append(client)
        self._act(client)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.clients.remove(data.draw(st.sampled_from(self.clients)))

    @precondition(lambda self: any(client.instance_id for client in self.clients))
    @rule(data=st.data())
    def restart_static(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from([each for each in self.clients if each.instance_id]))
        client.member_id, client.ticket, client.phase, client.generation = "", None, "outside", -1
        self._act(client)

    @precondition(lambda self: any(client.member_id for client in self.clients))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from([each for each in self.clients if each.member_id]))
        (result,) = self.bench.leave(LeaveRequest(client.member_id, client.instance_id))
        assert result.error is ErrorCode.NONE
        self.clients.remove(client)

    @precondition(lambda self: any(client.phase == "stable" for client in self.clients))
    @rule(data=st.data(), protocols=st.sampled_from([(RANGE,), (RANGE, STICKY), (STICKY, RANGE)]))
    def change_subscription(self, data: st.DataObject, protocols: tuple[object, ...]) -> None:
        client = data.draw(st.sampled_from([each for each in self.clients if each.phase == "stable"]))
        client.protocols = protocols  # type: ignore[assignment]
        client.phase = "rejoin"
        self._act(client)

    @rule(milliseconds=st.integers(1, 2_000), rounds=st.integers(1, 4))
    def time_passes(self, milliseconds: int, rounds: int) -> None:
        for _ in range(rounds):
            self.bench.advance(milliseconds)
            if not self.bench.confirm_at_once:
                self.bench.confirm_all()
            for client in list(self.clients):
                self._act(client)

    def _act(self, client: Client) -> None:
        """One thing that the client has to do, if there is one."""
        self._read_answer(client)
        bench = self.bench
        if client.phase in {"outside", "rejoin"}:
            client.ticket = bench.join(
                join_request(
                    client.member_id,
                    instance_id=client.instance_id,
                    protocols=client.protocols,
                    session_timeout_ms=SESSION_MS,
                    rebalance_timeout_ms=REBALANCE_MS,
                )
            )
            client.phase = "joining"
            if (result := bench.answers.get(client.ticket)) and result.error is ErrorCode.MEMBER_ID_REQUIRED:
                assert isinstance(result, JoinResult)
                client.member_id, client.phase = result.member_id, "outside"
                client.ticket = None
        elif client.phase == "sync":
            group = bench.group
            assignments = tuple((each, assignment_of(each, client.generation)) for each in group.members)
            client.ticket = bench.sync(
                SyncRequest(
                    client.member_id,
                    client.instance_id,
                    client.generation,
                    assignments=assignments if group.leader_id == client.member_id else (),
                )
            )
            client.phase = "syncing"
        elif client.phase == "stable" and bench.now_ms >= client.next_beat_ms:
            client.next_beat_ms = bench.now_ms + 3_000
            error = bench.heartbeat(client.member_id, client.generation, client.instance_id)
            assert error in {ErrorCode.NONE, ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.ILLEGAL_GENERATION}, error
            if error is not ErrorCode.NONE:
                client.phase = "rejoin"
        self._read_answer(client)

    def _read_answer(self, client: Client) -> None:
        if client.ticket is None or client.ticket not in self.bench.answers:
            return
        result = self.bench.answers[client.ticket]
        client.ticket = None
        assert result.error in {ErrorCode.NONE, ErrorCode.REBALANCE_IN_PROGRESS}, (client, result.error)
        if result.error is not ErrorCode.NONE:
            client.phase = "rejoin"
        elif isinstance(result, JoinResult):
            client.member_id, client.generation, client.phase = result.member_id, result.generation, "sync"
        else:
            client.assignment, client.phase = result.assignment, "stable"
            client.next_beat_ms = self.bench.now_ms + 3_000

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "bench"):
            check_bookkeeping(self.bench.group)
            self._at_most_one_owner()

    def _at_most_one_owner(self) -> None:
        group = self.bench.group
        owned = [
            client.assignment
            for client in self.clients
            if client.phase == "stable" and client.generation == group.generation
        ]
        assert len(owned) == len(set(owned))

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.confirm_at_once = True
        self.bench.confirm_all()
        self.time_passes(2_000, 60)
        group = self.bench.group
        assert {client.phase for client in self.clients} <= {"stable"}
        assert group.state is (GroupState.STABLE if self.clients else GroupState.EMPTY)
        assert group.members.keys() == {client.member_id for client in self.clients}
        assert all(client.generation == group.generation for client in self.clients)
        if self.clients:
            assert self.bench.log[-1].generation == group.generation


TestHostileWorld = HostileWorld.TestCase
TestHostileWorld.settings = MODEL
TestOrderlyWorld = OrderlyWorld.TestCase
TestOrderlyWorld.settings = MODEL
