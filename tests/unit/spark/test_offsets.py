"""Offsets as values: JSON, limits, what is lost, how ranges are split."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import ConfigError
from millrace.model import TopicPartition
from millrace.spark.offsets import (
    GROUP_TO,
    SPLIT_FROM,
    SPLIT_TO,
    OffsetRange,
    available,
    data_loss_advice,
    describe,
    from_json,
    group,
    is_delayed,
    limited,
    parse_offsets,
    parse_partitions,
    plan,
    split,
    to_json,
)

A0, A1, A2, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("a", 2), TopicPartition("b", 0)

partitions = st.builds(TopicPartition, st.sampled_from(["a", "b", "c.d"]), st.integers(0, 300))
lags = st.dictionaries(partitions, st.tuples(st.integers(0, 10**12), st.integers(0, 10**9)), min_size=1, max_size=20)


def test_json_is_ordered_by_topic_and_by_number() -> None:
    offsets = {B0: 1, TopicPartition("a", 10): 2, TopicPartition("a", 9): 3}
    assert json.dumps(to_json(offsets)) == '{"a": {"9": 3, "10": 2}, "b": {"0": 1}}'


@given(st.dictionaries(partitions, st.integers(-2, 2**63 - 1)))
def test_json_comes_back_as_it_was(offsets: dict[TopicPartition, int]) -> None:
    assert from_json(json.loads(json.dumps(to_json(offsets))), "it") == offsets


@pytest.mark.parametrize(
    "text", ["", "[]", "1", '{"a": 1}', '{"a": {"x": 1}}', '{"a": {"0": "1"}}', '{"a": {"0": true}}', "{}", '{"a": {}}']
)
def test_malformed_offsets_name_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="option 'startingOffsets' is not JSON of the expected form"):
        parse_offsets(text, "startingOffsets")


def test_assigned_partitions() -> None:
    assert parse_partitions('{"b": [0], "a": [1, 0, 1]}', "assign") == (A0, A1, B0)


@pytest.mark.parametrize("text", ["", "a,b", '{"a": 0}', '{"a": ["0"]}', '{"a": [-1]}', '{"a": [true]}', "{}"])
def test_malformed_partitions_name_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="option 'assign'"):
        parse_partitions(text, "assign")


def test_a_limit_is_shared_in_proportion() -> None:
    assert limited({A0: 0, A1: 100}, {A0: 300, A1: 200}, 100) == {A0: 75, A1: 125}


def test_a_limit_that_is_not_reached_changes_nothing() -> None:
    assert limited({A0: 0, A1: 5}, {A0: 50, A1: 5}, 50) == {A0: 50, A1: 5}


def test_a_small_partition_is_not_starved() -> None:
    assert limited({A0: 0, A1: 0}, {A0: 1_000_000, A1: 1}, 10) == {A0: 9, A1: 1}


@given(lags, st.integers(1, 10**9))
def test_limits_are_exact_unless_there_are_more_partitions(
    lag: dict[TopicPartition, tuple[int, int]], most: int
) -> None:
    start = {each: begin for each, (begin, _) in lag.items()}
    end = {each: begin + behind for each, (begin, behind) in lag.items()}
    found = limited(start, end, most)
    waiting = [each for each in lag if end[each] > start[each]]
    assert found.keys() == end.keys()
    assert all(start[each] <= found[each] <= end[each] for each in end)
    assert all(found[each] > start[each] for each in waiting)
    total = sum(found[each] - start[each] for each in end)
    assert total <= max(most, len(waiting)) + len(waiting)
    assert total >= min(most, sum(behind for _, behind in lag.values())) - len(waiting)


def test_three_equal_partitions_leave_no_rest() -> None:
    found = limited({A0: 0, A1: 0, A2: 0}, {A0: 1000, A1: 1000, A2: 1000}, 100)
    assert sum(found.values()) == 100
    assert sorted(found.values()) == [33, 33, 34]


def test_available_counts_new_partitions_from_zero() -> None:
    assert available({A0: 10}, {A0: 15, A1: 4}) == 9


@pytest.mark.parametrize(
    ("count", "waited_ms", "delayed"), [(9, 0, True), (10, 0, False), (9, 1000, False), (0, 999, True)]
)
def test_delay(count: int, waited_ms: int, delayed: bool) -> None:
    assert is_delayed(count, at_least=10, since_last_ms=waited_ms, longest_ms=1000) is delayed


def test_a_plan_without_losses() -> None:
    found = plan({A0: 5, A1: 7}, {A0: 10, A1: 7, B0: 3}, {A0: 0, A1: 7, B0: 1})
    assert found.ranges == (OffsetRange(A0, 5, 10), OffsetRange(B0, 1, 3))
    assert found.losses == ()


def test_offsets_below_the_start_of_the_log_are_lost() -> None:
    found = plan({A0: 5}, {A0: 10}, {A0: 8})
    assert found.ranges == (OffsetRange(A0, 8, 10),)
    assert found.losses == (
        "offsets 5 to 7 of partition a-0 are gone: its log begins at offset 8 (retention or deleted records)",
    )


def test_a_range_that_is_all_gone() -> None:
    found = plan({A0: 5}, {A0: 10}, {A0: 20})
    assert found.ranges == ()
    assert found.losses == (
        "offsets 5 to 9 of partition a-0 are gone: its log begins at offset 20 (retention or deleted records)",
    )


def test_nothing_to_read_is_no_loss() -> None:
    assert plan({A0: 5}, {A0: 5}, {A0: 8}).losses == ()


@pytest.mark.parametrize("end", [{A0: 10}, {}])
def test_a_deleted_partition_is_a_loss(end: dict[TopicPartition, int]) -> None:
    found = plan({A0: 5}, end, {})
    assert found.ranges == ()
    assert found.losses == ("partition a-0 is gone; it had been read up to offset 5",)


def test_a_topic_that_was_made_again_is_read_from_its_beginning() -> None:
    found = plan({A0: 100}, {A0: 7}, {A0: 0})
    assert found.ranges == (OffsetRange(A0, 0, 7),)
    assert "ends at offset 7 although it had been read up to 100" in found.losses[0]


def test_advice_is_one_line_that_says_what_to_do() -> None:
    text = data_loss_advice(["one", "two", "three", "four", "five"])
    assert "one; two; three; and 2 more" in text
    assert "failOnDataLoss" in text
    assert "\n" not in text


def test_descriptions_are_short() -> None:
    assert describe([B0, A0]) == "a-0, b-0"
    assert describe(TopicPartition("a", number) for number in range(200)) == "a-0, a-1, a-2, a-3, a-4 and 195 more"


def test_one_task_per_range_by_default() -> None:
    ranges = [OffsetRange(A0, 0, 10), OffsetRange(A1, 5, 5), OffsetRange(B0, 0, 900_000)]
    assert split(ranges, min_partitions=None, max_records=None, cores=8) == [ranges[0], ranges[2]]


def test_large_ranges_are_split_over_idle_cores() -> None:
    pieces = split(
        [OffsetRange(A0, 0, 10), OffsetRange(B0, 0, 4_000_000)], min_partitions=None, max_records=None, cores=4
    )
    assert [(each.start, each.end) for each in pieces if each.partition == B0] == [
        (0, 1_333_333),
        (1_333_333, 2_666_666),
        (2_666_666, 4_000_000),
    ]


def test_pieces_do_not_become_small() -> None:
    pieces = split([OffsetRange(A0, 0, SPLIT_FROM + 1)], min_partitions=None, max_records=None, cores=64)
    assert len(pieces) == 2
    assert min(each.size for each in pieces) >= SPLIT_TO


def test_enough_ranges_are_not_split() -> None:
    ranges = [OffsetRange(A0, 0, 5_000_000), OffsetRange(A1, 0, 5_000_000)]
    assert split(ranges, min_partitions=None, max_records=None, cores=2) == ranges


def test_at_least_so_many_tasks() -> None:
    pieces = split([OffsetRange(A0, 0, 100), OffsetRange(A1, 0, 900)], min_partitions=10, max_records=None, cores=2)
    assert [each.size for each in pieces] == [100] * 10


def test_at_most_so_many_records_per_task() -> None:
    pieces = split([OffsetRange(A0, 7, 32)], min_partitions=None, max_records=10, cores=2)
    assert [(each.start, each.end) for each in pieces] == [(7, 15), (15, 23), (23, 32)]


@given(
    st.lists(st.tuples(partitions, st.integers(0, 10**9), st.integers(0, 10**7)), unique_by=lambda each: each[0]),
    st.none() | st.integers(1, 50),
    st.none() | st.integers(10**5, 10**7),
    st.integers(1, 64),
)
def test_splitting_reads_the_same_offsets(
    parts: list[tuple[TopicPartition, int, int]], least: int | None, most: int | None, cores: int
) -> None:
    ranges = [OffsetRange(partition, start, start + size) for partition, start, size in parts]
    pieces = split(ranges, min_partitions=least, max_records=most, cores=cores)
    assert all(each.size > 0 for each in pieces)
    if most is not None:
        assert all(each.size <= most for each in pieces)
    for whole in ranges:
        of_this = [each for each in pieces if each.partition == whole.partition]
        edges = [whole.start, *(each.end for each in of_this)]
        assert [each.start for each in of_this] == edges[:-1]
        assert edges[-1] == whole.end


def test_a_range_has_a_task_of_its_own_when_there_are_few() -> None:
    ranges = [OffsetRange(A0, 0, 1), OffsetRange(A1, 0, 1), OffsetRange(A2, 0, 1), OffsetRange(B0, 0, 1)]
    assert group(ranges, cores=2) == [(each,) for each in ranges]


def test_many_small_ranges_share_tasks() -> None:
    ranges = [OffsetRange(TopicPartition("a", number), 0, 5) for number in range(200)]
    assert [sum(each.size for each in members) for members in group(ranges, cores=2)] == [250] * 4


def test_a_large_range_is_not_joined_by_others() -> None:
    large = OffsetRange(B0, 0, 100 * GROUP_TO)
    small = [OffsetRange(TopicPartition("a", number), 0, 10) for number in range(200)]
    groups = group([*small, large], cores=2)
    assert len(groups) == 101
    assert (large,) in groups


@given(
    st.lists(st.tuples(partitions, st.integers(1, 10**6)), unique_by=lambda each: each[0], max_size=100),
    st.integers(1, 8),
)
def test_grouping_loses_nothing(parts: list[tuple[TopicPartition, int]], cores: int) -> None:
    ranges = [OffsetRange(partition, 0, size) for partition, size in parts]
    groups = group(ranges, cores=cores)
    assert sorted((each for members in groups for each in members), key=lambda each: each.partition) == sorted(
        ranges, key=lambda each: each.partition
    )
    assert len(groups) >= min(len(ranges), 2 * cores)
