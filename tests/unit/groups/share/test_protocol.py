"""The share group protocol: what a heartbeat, a farewell and a timer lead to."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.config import BrokerConfig
from millrace.errors import ApiError, ErrorCode
from millrace.groups.settings import GroupSettings, GroupTimes
from millrace.groups.share import partitions as share_partitions
from millrace.groups.share.group import ShareState
from millrace.groups.share.records import Begun, PartitionStates
from support.modern_groups import Refused, add_partitions, add_topic, drop_topic, image_of
from support.share_groups import ShareBench


@pytest.fixture
def bench() -> ShareBench:
    return ShareBench(image_of(orders=4, sales=2))


def id_of(bench: ShareBench, name: str = "orders") -> Any:
    return bench.image.topics[name].topic_id


def read_by(bench: ShareBench, member_id: str, name: str = "orders") -> tuple[int, ...]:
    return bench.group.members[member_id].held.assigned.get(id_of(bench, name), ())


def refused(bench: ShareBench, member_id: str, epoch: int, **changes: Any) -> ErrorCode:
    with pytest.raises(ApiError) as caught:
        bench.heartbeat(member_id, epoch, **changes)
    return caught.value.code


# Members


def test_a_member_gets_what_it_subscribes_to_once_that_has_begun(bench: ShareBench) -> None:
    joined = bench.join("m1", "orders")
    assert (joined.epoch, joined.assignment, joined.interval_ms) == (1, (), 1_000)
    assert bench.untold == [{id_of(bench): frozenset(range(4))}]
    assert bench.heartbeat("m1", 1).assignment is None
    bench.tell()
    answer = bench.heartbeat("m1", 1)
    assert (answer.epoch, answer.assignment) == (2, ((id_of(bench), (0, 1, 2, 3)),))
    assert answer.interval_ms == 5_000
    assert bench.heartbeat("m1", 2).assignment is None, "nothing is new"
    assert bench.group.state is ShareState.STABLE


def test_members_share_evenly_and_partitions_are_read_by_many(bench: ShareBench) -> None:
    bench.join("m1", "orders")
    bench.heartbeat_until_stable("m1")
    for number in range(2, 7):
        bench.join(f"m{number}", "orders")
    for number in range(1, 7):
        bench.heartbeat_until_stable(f"m{number}")
    readers: list[int] = []
    for number in range(1, 7):
        own = read_by(bench, f"m{number}")
        assert 1 <= len(own) <= 2
        readers += own
    assert sorted(readers) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_member_that_did_not_hear_its_new_epoch_goes_on(bench: ShareBench) -> None:
    bench.join("m1", "orders")
    bench.tell()
    assert bench.heartbeat("m1", 1).epoch == 2
    assert bench.heartbeat("m1", 1).assignment == ((id_of(bench), (0, 1, 2, 3)),), "the answer may have been lost"
    late = bench.heartbeat("m1", 1, topics=("orders",))
    assert (late.epoch, late.assignment) == (2, ((id_of(bench), (0, 1, 2, 3)),))
    assert refused(bench, "m1", 3) is ErrorCode.FENCED_MEMBER_EPOCH
    bench.heartbeat("m1", 2, topics=("sales",))
    bench.heartbeat_until_stable("m1")
    assert refused(bench, "m1", 1) is ErrorCode.FENCED_MEMBER_EPOCH
    assert bench.join("m1", "sales").epoch == bench.group.members["m1"].held.epoch, "it begins anew where it is"


def test_a_member_that_is_not_heard_of_is_removed(bench: ShareBench) -> None:
    bench.join("m1", "orders")
    bench.join("m2", "orders")
    bench.heartbeat_until_stable("m1")
    bench.heartbeat_until_stable("m2")
    bench.advance(44_000)
    bench.heartbeat_until_stable("m2")
    bench.advance(2_000)
    assert list(bench.group.members) == ["m2"]
    assert refused(bench, "m1", 2) is ErrorCode.UNKNOWN_MEMBER_ID
    bench.heartbeat_until_stable("m2")
    assert read_by(bench, "m2") == (0, 1, 2, 3)


def test_a_member_says_farewell(bench: ShareBench) -> None:
    bench.join("m1", "orders")
    epoch = bench.group.epoch.epoch
    left = bench.heartbeat("m1", -1)
    assert (left.member_id, left.epoch, left.assignment) == ("m1", -1, None)
    assert bench.group.state is ShareState.EMPTY
    assert bench.group.epoch.epoch == epoch + 1
    assert not bench.timers
    assert refused(bench, "m1", -1) is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_full_group_takes_nobody_new(bench: ShareBench) -> None:
    bench.settings = GroupSettings(share_max_size=1)
    bench.join("m1", "orders")
    assert refused(bench, "m2", 0, topics=("orders",)) is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert bench.heartbeat("m1", 1).epoch == 1


@pytest.mark.parametrize(
    ("member_id", "epoch", "changes"),
    [
        ("", 0, {"topics": ("orders",)}),
        ("m", 0, {}),
        ("m", 0, {"topics": ()}),
        ("m", -2, {}),
        ("m", 1, {"rack_id": ""}),
    ],
)
def test_malformed_heartbeats(bench: ShareBench, member_id: str, epoch: int, changes: dict[str, Any]) -> None:
    assert refused(bench, member_id, epoch, **changes) is ErrorCode.INVALID_REQUEST
    assert bench.group.is_blank


def test_what_a_member_says_of_itself_is_kept(bench: ShareBench) -> None:
    bench.join("m1", "sales", "orders", "orders", rack_id="r", client_id="app", client_host="/10.0.0.1")
    info = bench.group.members["m1"].info
    assert (info.topics, info.rack_id, info.client_id, info.client_host) == (
        ("orders", "sales"),
        "r",
        "app",
        "/10.0.0.1",
    )
    before = bench.group.epoch
    bench.heartbeat("m1", 1, client_id="app", client_host="/10.0.0.2")
    assert bench.group.members["m1"].info.rack_id == "r"
    assert bench.group.epoch == before, "where it is does not matter to others"


# Topics


def test_partitions_and_topics_come_and_go(bench: ShareBench) -> None:
    bench.join("m1", "orders", "later")
    bench.heartbeat_until_stable("m1")
    bench.image = add_partitions(bench.image, "orders", 2)
    bench.heartbeat("m1", bench.group.members["m1"].held.epoch)
    assert bench.untold == [{id_of(bench): frozenset({4, 5})}], "though it was asked for the others just now"
    bench.advance(1_000)
    bench.heartbeat_until_stable("m1")
    assert read_by(bench, "m1") == (0, 1, 2, 3, 4, 5)
    bench.image = add_topic(bench.image, "later", 1)
    bench.advance(1_000)
    bench.heartbeat_until_stable("m1")
    assert read_by(bench, "m1", "later") == (0,)
    gone = id_of(bench)
    bench.image = drop_topic(bench.image, "orders")
    bench.decide(lambda step: share_partitions.forget_topics(step, [gone]))
    bench.advance(1_000)
    bench.heartbeat_until_stable("m1")
    assert list(bench.group.members["m1"].held.assigned) == [id_of(bench, "later")]
    assert gone not in bench.group.partitions.initialized


def test_a_topic_made_anew_is_another_one(bench: ShareBench) -> None:
    bench.join("m1", "sales")
    bench.heartbeat_until_stable("m1")
    before = id_of(bench, "sales")
    bench.image = add_topic(drop_topic(bench.image, "sales"), "sales", 2)
    bench.advance(1_000)
    bench.heartbeat_until_stable("m1")
    assert id_of(bench, "sales") != before
    assert read_by(bench, "m1", "sales") == (0, 1)


def test_what_could_not_be_begun_is_tried_again_with_the_next_heartbeat(bench: ShareBench) -> None:
    bench.join("m1", "sales")
    failed = bench.untold.pop()
    bench.decide(lambda step: share_partitions.not_initialized(step, failed))
    answer = bench.heartbeat("m1", 1)
    assert answer.interval_ms == 1_000
    assert bench.untold == [failed]


def test_what_was_never_answered_is_tried_again_after_a_while(bench: ShareBench) -> None:
    bench.join("m1", "sales")
    lost = bench.untold.pop()
    bench.advance(share_partitions.RETRY_MS - 1)
    bench.heartbeat("m1", 1)
    assert not bench.untold
    bench.advance(1)
    bench.heartbeat("m1", 1)
    assert bench.untold == [lost]
    bench.untold.clear()
    bench.group = bench.replayed()
    bench.heartbeat("m1", 1)
    assert bench.untold == [lost], "the next coordinator does not know what was answered"


# Targets


def test_targets_are_not_computed_too_often_but_the_first_ones_at_once(bench: ShareBench) -> None:
    bench.times = GroupTimes(assignment_interval_ms=1_000)
    bench.join("m1", "sales")
    bench.heartbeat_until_stable("m1")
    assert read_by(bench, "m1", "sales") == (0, 1)
    second = bench.join("m2", "sales")
    assert (second.assignment, second.interval_ms) == ((), 1_000)
    bench.advance(1_000)
    answer = bench.heartbeat("m2", second.epoch)
    assert answer.assignment is not None
    assert answer.interval_ms == 5_000
    assert len(answer.assignment[0][1]) == 1


def test_an_assignment_that_the_log_refused_is_made_again(bench: ShareBench) -> None:
    bench.join("m1", "sales")
    bench.tell()
    bench.refuses = True
    with pytest.raises(Refused):
        bench.heartbeat("m1", 1)
    bench.refuses = False
    assert bench.heartbeat("m1", 1).assignment == ((id_of(bench, "sales"), (0, 1)),)


def test_a_beginning_that_the_log_refused_is_told_again(bench: ShareBench) -> None:
    bench.refuses = True
    with pytest.raises(Refused):
        bench.join("m1", "sales")
    assert bench.group.is_blank
    bench.refuses = False
    bench.join("m1", "sales")
    assert bench.untold == [{id_of(bench, "sales"): frozenset({0, 1})}]


def test_who_unsubscribes_stops_reading_at_once(bench: ShareBench) -> None:
    bench.times = GroupTimes(assignment_interval_ms=60_000)
    bench.join("m1", "orders", "sales")
    bench.heartbeat_until_stable("m1")
    answer = bench.heartbeat("m1", bench.group.members["m1"].held.epoch, topics=("sales",))
    assert answer.assignment == ((id_of(bench, "sales"), (0, 1)),)


# What an administrator does


def test_offsets_are_set_for_a_group_without_members(bench: ShareBench) -> None:
    partitions = {id_of(bench): frozenset({1, 2})}
    bench.decide(lambda step: share_partitions.begin_anew(step, partitions))
    assert bench.group.partitions == PartitionStates(initializing={id_of(bench): Begun("orders", frozenset({1, 2}))})
    bench.decide(lambda step: share_partitions.initialized(step, partitions))
    assert bench.group.partitions == PartitionStates(initialized={id_of(bench): Begun("orders", frozenset({1, 2}))})
    bench.join("m1", "orders")
    assert bench.untold == [{id_of(bench): frozenset({0, 3})}]
    with pytest.raises(ApiError) as caught:
        bench.decide(lambda step: share_partitions.begin_anew(step, partitions))
    assert caught.value.code is ErrorCode.NON_EMPTY_GROUP


def test_offsets_are_deleted_and_what_was_interrupted_is_deleted_again(bench: ShareBench) -> None:
    bench.join("m1", "orders")
    bench.heartbeat_until_stable("m1")
    with pytest.raises(ApiError) as caught:
        bench.decide(lambda step: share_partitions.begin_deletion(step, ["orders"]))
    assert caught.value.code is ErrorCode.NON_EMPTY_GROUP
    bench.heartbeat("m1", -1)
    deletion = bench.decide(lambda step: share_partitions.begin_deletion(step, ["orders", "sales", "nothing"]))
    assert deletion.partitions == {id_of(bench): frozenset(range(4))}
    assert deletion.unknown == ("sales", "nothing")
    assert bench.group.partitions == PartitionStates(deleting={id_of(bench): "orders"})
    again = bench.decide(lambda step: share_partitions.begin_deletion(step, ["orders"]))
    assert again.partitions == deletion.partitions
    bench.decide(lambda step: share_partitions.deleted(step, again.partitions))
    assert bench.group.partitions == PartitionStates()
    bench.join("m1", "orders")
    assert bench.untold == [{id_of(bench): frozenset(range(4))}]


def test_the_end_of_a_group_takes_everything_it_may_have_begun(bench: ShareBench) -> None:
    bench.join("m1", "orders", "sales")
    sales = {id_of(bench, "sales"): frozenset({0})}
    bench.decide(lambda step: share_partitions.initialized(step, sales))
    bench.heartbeat("m1", -1)
    partitions = bench.decide(share_partitions.begin_end)
    assert partitions == {id_of(bench): frozenset(range(4)), id_of(bench, "sales"): frozenset({0, 1})}
    assert bench.decide(share_partitions.begin_end) == partitions, "the first attempt may have been interrupted"


def test_what_was_forgotten_meanwhile_does_not_come_back(bench: ShareBench) -> None:
    bench.join("m1", "orders")
    bench.image = drop_topic(bench.image, "orders")
    (late,) = bench.untold
    bench.decide(lambda step: share_partitions.forget_topics(step, late))
    bench.tell()
    assert bench.group.partitions == PartitionStates()


def test_a_group_has_times_of_its_own() -> None:
    broker = BrokerConfig({
        "group.share.session.timeout.ms": "50000",
        "group.share.heartbeat.interval.ms": "6000",
        "group.share.assignment.interval.ms": "2000",
    })  # fmt: skip
    assert GroupTimes.of_share_group({}, broker) == GroupTimes(50_000, 6_000, 2_000)
    own = {"share.session.timeout.ms": "55000", "consumer.session.timeout.ms": "46000"}
    assert GroupTimes.of_share_group(own, broker) == GroupTimes(55_000, 6_000, 2_000)
    assert GroupTimes.of_consumers(own, broker).session_timeout_ms == 46_000
