"""The coordinator on a log in memory and a clock that only the test moves."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode, StorageError
from millrace.groups.classic.effects import JoinResult, LeaveRequest, SyncRequest
from millrace.groups.classic.group import GroupState
from millrace.groups.classic.records import group_key
from millrace.groups.coordinator import GroupCoordinator
from millrace.groups.offsets.committed import OffsetToCommit
from millrace.groups.settings import GroupSettings
from millrace.replication.state_topic import yield_to_loop
from support.groups import join_request
from support.state_topic import FakeLog, FakeRead, FakeTopic

NONE = ErrorCode.NONE
TOPIC_ID = uuid.UUID(int=77)
SETTINGS = GroupSettings(offsets_retention_ms=3_600_000, offsets_retention_check_interval_ms=60_000)


class Bench:
    """A coordinator whose partitions and clock the test holds."""

    def __init__(self, *, partitions: int = 1, commit_at_once: bool = True, settings: GroupSettings = SETTINGS) -> None:
        self.clock = ManualClock()
        self.fake = FakeTopic(partitions, commit_at_once=commit_at_once)
        self.settings = settings
        self.groups = self.make()

    def make(self) -> GroupCoordinator:
        return GroupCoordinator(clock=self.clock, settings=self.settings, state_topic=self.fake.topic)

    async def lead(self) -> None:
        for index in range(len(self.fake.partitions)):
            self.groups.partition_became_leader(index)
        await self.groups.loaded()

    async def restart(self) -> None:
        """Another coordinator on the same log."""
        await self.groups.stop()
        self.groups = self.make()
        await self.lead()

    async def advance(self, seconds: float) -> None:
        await run_ready()
        self.clock.advance(seconds)
        await run_ready()

    async def commit(self, offset: int, *, group: str = "g", topic: str = "t", **changes: object) -> list[ErrorCode]:
        return await self.groups.commit(group, [to_commit(offset, topic)], **changes)  # type: ignore[arg-type]

    async def committed(self, *, group: str = "g", topic: str = "t") -> int:
        held = await self.groups.fetch_offsets(group)
        found = held.get(topic, {}).get(0)
        return -1 if found is None else found.offset

    async def member(self, group: str = "g", *, client_id: str = "client") -> tuple[str, asyncio.Future[JoinResult]]:
        """A new member's id and its JoinGroup, which waits for the rebalance."""
        first = await self.groups.join(group, join_request(client_id=client_id))
        assert first.error is ErrorCode.MEMBER_ID_REQUIRED
        joining = spawn(self.groups.join(group, join_request(first.member_id, client_id=client_id)))
        await run_ready()
        return first.member_id, joining

    async def stable_member(self, group: str = "g") -> str:
        member_id, joining = await self.member(group)
        await self.advance(3)
        result = await joining
        sync = SyncRequest(member_id, None, result.generation, assignments=((member_id, b"all"),))
        assert (await self.groups.sync(group, sync)).assignment == b"all"
        return member_id

    def state(self, group: str = "g") -> GroupState:
        described = self.groups.describe(group)
        return GroupState.DEAD if described is None else described.state


def to_commit(offset: int, topic: str = "t", partition: int = 0, metadata: str = "") -> OffsetToCommit:
    return OffsetToCommit(topic, partition, TOPIC_ID, offset, -1, metadata)


def spawn(work: Awaitable[JoinResult]) -> asyncio.Future[JoinResult]:
    return asyncio.ensure_future(work)


async def run_ready() -> None:
    for _ in range(20):
        await yield_to_loop()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.lead()
    yield bench
    await bench.groups.stop()


@pytest.fixture
async def slow() -> AsyncIterator[Bench]:
    """A log that commits only when told to."""
    bench = Bench(commit_at_once=False)
    await bench.lead()
    yield bench
    await bench.groups.stop()


async def test_a_rebalance_of_three_from_join_to_assignment(bench: Bench) -> None:
    members = [await bench.member(client_id=f"c{number}") for number in range(3)]
    await bench.advance(12)
    results = [await joining for _, joining in members]
    assert {result.generation for result in results} == {1}
    leader = next(result for result in results if result.members)
    assert {member.member_id for member in leader.members} == {member_id for member_id, _ in members}
    everything = tuple((member_id, member_id.encode()) for member_id, _ in members)
    syncs = [
        asyncio.ensure_future(
            bench.groups.sync(
                "g",
                SyncRequest(member_id, None, 1, assignments=everything if member_id == leader.member_id else ()),
            )
        )
        for member_id, _ in members
    ]
    for (member_id, _), sync in zip(members, syncs, strict=True):
        assert (await sync).assignment == member_id.encode()
    described = bench.groups.describe("g")
    assert described is not None
    assert (described.state, described.protocol_name, len(described.members)) == (GroupState.STABLE, "range", 3)
    assert {member.client_id for member in described.members} == {"c0", "c1", "c2"}


async def test_member_ids_begin_with_the_client_or_the_instance(bench: Bench) -> None:
    dynamic = await bench.groups.join("g", join_request(client_id="app"))
    assert dynamic.member_id.startswith("app-")
    joining = spawn(bench.groups.join("h", join_request(instance_id="red", client_id="app")))
    await bench.advance(3)
    assert (await joining).member_id.startswith("red-")


@pytest.mark.parametrize("timeout_ms", [5_999, 1_800_001, -1])
async def test_session_timeouts_have_limits(bench: Bench, timeout_ms: int) -> None:
    result = await bench.groups.join("g", join_request(session_timeout_ms=timeout_ms))
    assert result.error is ErrorCode.INVALID_SESSION_TIMEOUT


async def test_a_member_of_an_unknown_group_is_unknown(bench: Bench) -> None:
    assert (await bench.groups.join("g", join_request("ghost"))).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert (await bench.groups.sync("g", SyncRequest("ghost", None, 1))).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert bench.groups.heartbeat("g", "ghost", None, 1) is ErrorCode.UNKNOWN_MEMBER_ID
    (left,) = bench.groups.leave("g", [LeaveRequest("ghost")])
    assert left.error is ErrorCode.UNKNOWN_MEMBER_ID
    assert bench.groups.describe("g") is None


async def test_a_refused_join_leaves_no_group_behind(bench: Bench) -> None:
    result = await bench.groups.join("g", join_request(protocols=()))
    assert result.error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert bench.groups.describe("g") is None
    assert bench.fake[0].log.end_offset == 0


async def test_a_client_that_hangs_up_stays_a_member(bench: Bench) -> None:
    member_id, joining = await bench.member()
    joining.cancel()
    await bench.advance(3)
    described = bench.groups.describe("g")
    assert described is not None
    assert [member.member_id for member in described.members] == [member_id]
    # It comes back on another connection and finds its generation.
    again = await bench.groups.join("g", join_request(member_id))
    assert (again.error, again.generation) == (NONE, 1)


async def test_sessions_end_without_heartbeats(bench: Bench) -> None:
    member_id = await bench.stable_member()
    for _ in range(5):
        await bench.advance(9)
        assert bench.groups.heartbeat("g", member_id, None, 1) is NONE
    await bench.advance(10)
    assert bench.state() is GroupState.EMPTY
    assert bench.groups.heartbeat("g", member_id, None, 1) is ErrorCode.UNKNOWN_MEMBER_ID


async def test_commits_are_visible_when_durable_and_not_before(slow: Bench) -> None:
    committing = asyncio.ensure_future(slow.commit(5))
    await run_ready()
    assert not committing.done()
    assert await slow.committed() == -1
    slow.fake[0].commit()
    assert await committing == [NONE]
    assert await slow.committed() == 5


async def test_a_cancelled_commit_takes_effect_all_the_same(slow: Bench) -> None:
    committing = asyncio.ensure_future(slow.commit(5))
    await run_ready()
    committing.cancel()
    await run_ready()
    slow.fake[0].commit()
    await run_ready()
    assert await slow.committed() == 5


async def test_commits_take_effect_in_the_order_of_the_log(slow: Bench) -> None:
    commits = [asyncio.ensure_future(slow.commit(offset)) for offset in range(10)]
    await run_ready()
    slow.fake[0].commit(4)
    await run_ready()
    assert await slow.committed() == 3
    assert [commit.done() for commit in commits] == [True] * 4 + [False] * 6
    slow.fake[0].commit()
    await asyncio.gather(*commits)
    assert await slow.committed() == 9


async def test_a_commit_that_takes_too_long_is_answered_and_may_still_happen(slow: Bench) -> None:
    committing = asyncio.ensure_future(slow.commit(5))
    await slow.advance(5)
    with pytest.raises(ApiError) as late:
        await committing
    assert late.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
    slow.fake[0].commit()
    await run_ready()
    assert await slow.committed() == 5


async def test_stable_reads_wait_for_commits_under_way(slow: Bench) -> None:
    committing = asyncio.ensure_future(slow.commit(5))
    await run_ready()
    reading = asyncio.ensure_future(slow.groups.fetch_offsets("g", require_stable=True))
    await run_ready()
    assert not reading.done()
    slow.fake[0].commit()
    assert (await reading)["t"][0].offset == 5
    await committing


@pytest.mark.parametrize(
    ("refusal", "answer"),
    [
        (ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.COORDINATOR_NOT_AVAILABLE),
        (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.NOT_COORDINATOR),
        (ErrorCode.KAFKA_STORAGE_ERROR, ErrorCode.NOT_COORDINATOR),
        (ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.INVALID_COMMIT_OFFSET_SIZE),
    ],
)
async def test_a_refused_write_is_told_in_the_coordinators_words(
    bench: Bench, refusal: ErrorCode, answer: ErrorCode
) -> None:
    bench.fake[0].refuse = refusal
    with pytest.raises(ApiError) as refused:
        await bench.commit(5)
    assert refused.value.code is answer
    bench.fake[0].refuse = None
    assert await bench.committed() == -1
    assert await bench.commit(6) == [NONE]


async def test_an_assignment_that_cannot_be_written_is_not_given_out(bench: Bench) -> None:
    member_id, joining = await bench.member()
    await bench.advance(3)
    await joining
    bench.fake[0].refuse = ErrorCode.NOT_ENOUGH_REPLICAS
    result = await bench.groups.sync("g", SyncRequest(member_id, None, 1, assignments=((member_id, b"a"),)))
    assert result.error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert bench.state() is GroupState.PREPARING_REBALANCE


async def test_members_commit_with_their_generation(bench: Bench) -> None:
    member_id = await bench.stable_member()
    assert await bench.commit(3, member_id=member_id, generation=1) == [NONE]
    for ids, expected in (
        ({"member_id": member_id, "generation": 2}, ErrorCode.ILLEGAL_GENERATION),
        ({"member_id": "ghost", "generation": 1}, ErrorCode.UNKNOWN_MEMBER_ID),
        ({}, ErrorCode.UNKNOWN_MEMBER_ID),
    ):
        with pytest.raises(ApiError) as refused:
            await bench.commit(4, **ids)
        assert refused.value.code is expected
    with pytest.raises(ApiError) as missing:
        await bench.commit(4, group="none", generation=1, has_member_epochs=False)
    assert missing.value.code is ErrorCode.ILLEGAL_GENERATION


async def test_too_much_metadata_is_refused_for_its_partition_alone(bench: Bench) -> None:
    errors = await bench.groups.commit("g", [to_commit(1, "t", 0, "x" * 4_096), to_commit(2, "t", 1, "x" * 4_097)])
    assert errors == [NONE, ErrorCode.OFFSET_METADATA_TOO_LARGE]
    assert set((await bench.groups.fetch_offsets("g"))["t"]) == {0}


async def test_groups_and_offsets_survive_a_restart(bench: Bench) -> None:
    member_id = await bench.stable_member()
    await bench.commit(41, member_id=member_id, generation=1)
    await bench.commit(42, member_id=member_id, generation=1)
    await bench.commit(7, group="simple")
    await bench.restart()
    assert await bench.committed() == 42
    assert await bench.committed(group="simple") == 7
    assert bench.state() is GroupState.STABLE
    assert bench.state("simple") is GroupState.EMPTY
    assert bench.groups.heartbeat("g", member_id, None, 1) is NONE
    assert (await bench.groups.sync("g", SyncRequest(member_id, None, 1))).assignment == b"all"
    assert await bench.commit(43, member_id=member_id, generation=1) == [NONE]


async def test_foreign_and_damaged_records_do_not_stop_a_load(bench: Bench) -> None:
    await bench.commit(1)
    bench.fake.topic.append(0, [(b"\x00\x03\x00\x01g", b"\x00\x00"), (b"\x00\x01", b"x"), (b"", b"")], 0)
    bench.fake.topic.append(0, [(group_key("broken"), b"\x00\x09")], 0)
    await bench.commit(2)
    await bench.restart()
    assert await bench.committed() == 2
    assert bench.groups.describe("broken") is None


async def test_while_loading_clients_are_told_to_wait(bench: Bench) -> None:
    await bench.commit(1)
    await bench.groups.stop()
    bench.groups = bench.make()
    bench.groups.partition_became_leader(0)
    with pytest.raises(ApiError) as loading:
        await bench.groups.fetch_offsets("g")
    assert loading.value.code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert bench.groups.heartbeat("g", "anybody", None, 1) is NONE
    assert bench.groups.list_groups()[0] is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    await bench.groups.loaded()
    assert await bench.committed() == 1


async def test_partitions_that_are_not_led_are_not_answered_for() -> None:
    bench = Bench(partitions=2)
    bench.groups.partition_became_leader(0)
    await bench.groups.loaded()
    here = next(f"g{number}" for number in range(99) if bench.groups.partition_for(f"g{number}") == 0)
    there = next(f"g{number}" for number in range(99) if bench.groups.partition_for(f"g{number}") == 1)
    assert await bench.commit(1, group=here) == [NONE]
    with pytest.raises(ApiError) as other:
        await bench.commit(1, group=there)
    assert other.value.code is ErrorCode.NOT_COORDINATOR
    # The partition has moved to another epoch, and nobody has told the coordinator yet.
    bench.fake[0].leader_epoch += 1
    with pytest.raises(ApiError) as stale:
        await bench.groups.fetch_offsets(here)
    assert stale.value.code is ErrorCode.NOT_COORDINATOR
    assert bench.groups.heartbeat(here, "m", None, 1) is ErrorCode.NOT_COORDINATOR
    bench.groups.partition_became_leader(0)
    await bench.groups.loaded()
    assert await bench.committed(group=here) == 1
    await bench.groups.stop()


async def test_a_lost_partition_sends_everybody_away(slow: Bench) -> None:
    _, joining = await slow.member()
    committing = asyncio.ensure_future(slow.commit(5, group="other"))
    await run_ready()
    slow.groups.partition_lost(0)
    assert (await joining).error is ErrorCode.NOT_COORDINATOR
    with pytest.raises(ApiError) as lost:
        await committing
    assert lost.value.code is ErrorCode.NOT_COORDINATOR


async def test_a_parked_sync_is_answered_at_shutdown(bench: Bench) -> None:
    (_, one), (second, two) = await bench.member(), await bench.member()
    await bench.advance(9)
    await asyncio.gather(one, two)
    follower = second if (await one).members else (await one).member_id
    syncing = asyncio.ensure_future(bench.groups.sync("g", SyncRequest(follower, None, 1)))
    await run_ready()
    bench.groups.begin_closing()
    assert (await syncing).error is ErrorCode.NOT_COORDINATOR
    with pytest.raises(ApiError) as closed:
        await bench.groups.join("g", join_request())
    assert closed.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE


async def test_a_log_that_fails_is_loaded_again(slow: Bench) -> None:
    committing = asyncio.ensure_future(slow.commit(5))
    await run_ready()
    slow.fake[0].high_watermark.fail(ApiError(ErrorCode.KAFKA_STORAGE_ERROR))
    with pytest.raises(ApiError) as failed:
        await committing
    assert failed.value.code is ErrorCode.NOT_COORDINATOR
    await slow.advance(1)
    assert await loading(slow)  # what is in the log is not committed yet
    slow.fake[0].commit()
    await run_ready()
    assert await slow.committed() == 5


async def loading(bench: Bench) -> bool:
    with pytest.raises(ApiError) as refused:
        await bench.committed()
    return refused.value.code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS


async def test_a_log_that_cannot_be_read_is_tried_again_with_growing_pauses(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.commit(7)
    reading = Unreadable(bench.fake[0].log)
    await bench.groups.stop()
    bench.groups = bench.make()
    bench.groups.partition_became_leader(0)
    for pause_s in (0.1, 0.2, 0.4, 0.8):
        await run_ready()
        assert await loading(bench)
        bench.clock.advance(pause_s * 0.9)
        await run_ready()
        tried = reading.tried
        await bench.advance(pause_s * 0.1 + 0.001)
        assert reading.tried == tried + 1
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 5
    assert "the disk does not answer" in caplog.text
    reading.is_over = True
    await bench.advance(2)
    assert await bench.committed() == 7


async def test_a_load_ends_with_the_leadership(bench: Bench) -> None:
    await bench.commit(7)
    reading = Unreadable(bench.fake[0].log)
    await bench.groups.stop()
    bench.groups = bench.make()
    bench.groups.partition_became_leader(0)
    await run_ready()
    bench.groups.partition_lost(0)
    tried = reading.tried
    await bench.advance(100)
    assert reading.tried == tried
    with pytest.raises(ApiError) as lost:
        await bench.committed()
    assert lost.value.code is ErrorCode.NOT_COORDINATOR


class Unreadable:
    """A log whose reads fail until that is over."""

    def __init__(self, log: FakeLog) -> None:
        self.tried = 0
        self.is_over = False
        self._read = log.read
        log.read = self.read  # type: ignore[method-assign]

    def read(self, *args: Any, **kwargs: Any) -> FakeRead:
        self.tried += 1
        if not self.is_over:
            raise StorageError("the disk does not answer")
        return self._read(*args, **kwargs)


async def test_nothing_is_answered_that_is_not_committed_yet(slow: Bench) -> None:
    committing = asyncio.ensure_future(slow.commit(5))
    await run_ready()
    await slow.groups.stop()
    with pytest.raises(ApiError):
        await committing
    # Another leader, which has everything in its log, but does not know whether the others have it, too.
    slow.fake[0].leader_epoch += 1
    slow.groups = slow.make()
    slow.groups.partition_became_leader(0)
    await run_ready()
    assert await loading(slow)
    slow.fake[0].commit()
    await run_ready()
    assert await slow.committed() == 5


async def test_offsets_of_an_empty_group_expire_with_it(bench: Bench) -> None:
    member_id = await bench.stable_member()
    await bench.commit(1, member_id=member_id, generation=1)
    bench.groups.leave("g", [LeaveRequest(member_id)])
    await bench.advance(3_500)
    assert await bench.committed() == 1
    await bench.advance(200)
    assert await bench.committed() == -1
    assert bench.groups.describe("g") is None
    await bench.restart()
    assert bench.groups.describe("g") is None
    assert await bench.committed() == -1


async def test_a_commit_under_way_does_not_expire_with_what_it_replaces(slow: Bench) -> None:
    first = asyncio.ensure_future(slow.commit(1))
    await run_ready()
    slow.fake[0].commit()
    await first
    await slow.advance(3_599)
    second = asyncio.ensure_future(slow.commit(2))
    await run_ready()
    await slow.advance(2)
    slow.fake[0].commit()
    await second
    assert await slow.committed() == 2
    await slow.advance(60)
    assert await slow.committed() == 2


async def test_a_retention_of_its_own(bench: Bench) -> None:
    await bench.commit(1, retention_ms=30_000)
    await bench.restart()
    assert await bench.committed() == 1
    await bench.advance(61)
    assert await bench.committed() == -1


async def test_groups_are_deleted_when_empty(bench: Bench) -> None:
    await bench.groups.commit("g", [to_commit(1, "t", number) for number in range(2_500)])
    member_id = await bench.stable_member("busy")
    assert await bench.groups.delete_groups(["g", "busy", "none", "g"]) == {
        "g": NONE,
        "busy": ErrorCode.NON_EMPTY_GROUP,
        "none": ErrorCode.GROUP_ID_NOT_FOUND,
    }
    assert bench.groups.describe("g") is None
    await bench.restart()
    assert bench.groups.describe("g") is None
    assert await bench.committed() == -1
    assert bench.groups.heartbeat("busy", member_id, None, 1) is NONE


async def test_a_group_being_deleted_takes_nobody_in(slow: Bench) -> None:
    first = asyncio.ensure_future(slow.commit(1))
    await run_ready()
    slow.fake[0].commit()
    await first
    deleting = asyncio.ensure_future(slow.groups.delete_groups(["g"]))
    await run_ready()
    result = await slow.groups.join("g", join_request())
    assert result.error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    slow.fake[0].commit()
    assert await deleting == {"g": NONE}
    assert (await slow.groups.join("g", join_request())).error is ErrorCode.MEMBER_ID_REQUIRED


async def test_a_deletion_that_is_refused_leaves_the_group(bench: Bench) -> None:
    await bench.commit(1)
    bench.fake[0].refuse = ErrorCode.NOT_ENOUGH_REPLICAS
    assert await bench.groups.delete_groups(["g"]) == {"g": ErrorCode.COORDINATOR_NOT_AVAILABLE}
    bench.fake[0].refuse = None
    assert await bench.committed() == 1
    assert bench.state() is GroupState.EMPTY
    assert await bench.commit(2) == [NONE]


async def test_offsets_are_deleted_unless_subscribed(bench: Bench) -> None:
    member_id = await bench.stable_member()
    for topic in ("orders", "users"):
        await bench.commit(1, topic=topic, member_id=member_id, generation=1)
    results = await bench.groups.delete_offsets("g", [("orders", 0), ("users", 0), ("users", 9)])
    assert results == {
        ("orders", 0): ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC, ("users", 0): NONE, ("users", 9): NONE,
    }  # fmt: skip
    assert await bench.committed(topic="users") == -1
    assert await bench.committed(topic="orders") == 1
    with pytest.raises(ApiError) as missing:
        await bench.groups.delete_offsets("none", [("t", 0)])
    assert missing.value.code is ErrorCode.GROUP_ID_NOT_FOUND


async def test_other_protocols_guard_their_offsets_while_they_have_members(bench: Bench) -> None:
    first = await bench.groups.join("g", join_request(protocol_type="connect"))
    spawn(bench.groups.join("g", join_request(first.member_id, protocol_type="connect")))
    await bench.advance(3)
    with pytest.raises(ApiError) as busy:
        await bench.groups.delete_offsets("g", [("t", 0)])
    assert busy.value.code is ErrorCode.NON_EMPTY_GROUP


async def test_offsets_of_deleted_topics_go_with_them(bench: Bench) -> None:
    await bench.commit(1, topic="gone")
    await bench.commit(2, topic="kept")
    bench.groups.topics_deleted({"gone": TOPIC_ID, "kept": uuid.UUID(int=78)})
    await run_ready()
    assert await bench.committed(topic="gone") == -1
    assert await bench.committed(topic="kept") == 2


async def test_listing_filters_by_state_and_type(bench: Bench) -> None:
    await bench.commit(1, group="simple")
    await bench.stable_member("busy")

    def names(*filters: list[str]) -> set[str]:
        error, found = bench.groups.list_groups(*filters)
        assert error is NONE
        return {group.group_id for group in found}

    assert names() == {"simple", "busy"}
    assert names(["Stable"]) == names([" stable "]) == {"busy"}
    assert names(["empty", "stable"]) == {"simple", "busy"}
    assert names(["nonsense"]) == set()
    assert names([], ["Classic"]) == {"simple", "busy"}
    assert names([], ["consumer"]) == set()


async def test_an_empty_group_id_is_refused_where_membership_begins(bench: Bench) -> None:
    for request in (
        bench.groups.join("", join_request()),
        bench.groups.sync("", SyncRequest("m", None, 1)),
        bench.groups.delete_offsets("", []),
    ):
        with pytest.raises(ApiError) as refused:
            await request
        assert refused.value.code is ErrorCode.INVALID_GROUP_ID
    assert bench.groups.heartbeat("", "m", None, 1) is ErrorCode.INVALID_GROUP_ID
    # For the sake of old tools, offsets may be kept without a name.
    assert await bench.commit(1, group="") == [NONE]


async def test_nothing_is_left_behind(bench: Bench) -> None:
    for _ in range(3):
        member_id = await bench.stable_member()
        bench.groups.leave("g", [LeaveRequest(member_id)])
    await bench.advance(4_000)
    (shard,) = bench.groups._shards.values()
    assert not shard.classic.groups
    assert not shard.classic._parked_joins
    assert not shard.classic._parked_syncs
    assert len(shard._timers) == 0
    assert not shard._writer._writes
    assert not shard.offsets._under_way
    assert "0 groups" in repr(bench.groups)


async def test_many_joins_of_one_group_make_one_generation(bench: Bench) -> None:
    request = join_request(requires_member_id=False)
    joining = [spawn(bench.groups.join("big", request)) for _ in range(300)]
    await bench.advance(60)
    results = await asyncio.gather(*joining)
    assert {result.generation for result in results} == {1}
    assert len({result.member_id for result in results}) == 300
    assert sum(bool(result.members) for result in results) == 1
