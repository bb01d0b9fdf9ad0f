"""Which topics are meant, and when a partition is done; with brokers in tests/clients/test_consume_command.py."""

from __future__ import annotations

import pytest

from millrace.cli.consume_bounds import Selection, unfinished
from millrace.cli.consume_printing import Ends
from millrace.cli.output import CommandError
from millrace.cli.template import ReceivedRecord
from millrace.model import TopicPartition

FIRST, SECOND = TopicPartition("orders", 0), TopicPartition("orders", 1)


def record(partition: TopicPartition, offset: int, timestamp_ms: int = 0) -> ReceivedRecord:
    return ReceivedRecord(*partition, offset, timestamp_ms, None, b"", [])


def test_a_topic_that_begins_with_a_caret_is_a_pattern() -> None:
    selection = Selection.of(["users", "^orders-", "users"], ["^pay"], [3, 1, 3])
    assert selection == Selection(("users",), ("^pay", "^orders-"), (1, 3))
    assert selection.several
    assert not Selection.of(["users"], [], []).several
    assert Selection.of(["a", "b"], [], []).several
    with pytest.raises(CommandError, match="is no pattern"):
        Selection.of(["^("], [], [])


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("^orders", "orders-eu", True),
        ("orders", "orders-eu", True),
        ("^orders$", "orders-eu", False),
        ("^orders", "my-orders", False),
        ("^a|b", "b", True),
        ("^.*", "__consumer_offsets", False),
        ("^__consumer", "__consumer_offsets", True),
    ],
)
def test_a_pattern_matches_at_the_beginning_of_a_name(pattern: str, name: str, matches: bool) -> None:
    assert Selection((), (pattern,)).matches(name) is matches


def test_a_partition_is_done_at_its_last_offset_and_what_comes_after_is_left_out() -> None:
    ends = Ends({FIRST: 2, SECOND: 9}, None)
    assert not ends.exclude(record(FIRST, 0))
    assert not ends.exclude(record(FIRST, 1))
    assert FIRST not in ends
    assert ends.exclude(record(FIRST, 2))
    assert not ends.all_reached
    assert ends.exclude(record(SECOND, 12)), "8 was compacted away"
    assert ends.all_reached


def test_the_end_of_a_partition_counts_when_it_is_far_enough() -> None:
    ends = Ends({FIRST: 5}, None)
    ends.reach(FIRST, 4)
    assert FIRST in ends
    ends.reach(FIRST, 5)
    assert ends.all_reached


def test_an_open_end_is_fixed_by_a_record_or_by_the_clock() -> None:
    ends = Ends({FIRST: None, SECOND: None}, 1000)
    assert not ends.exclude(record(FIRST, 7, 999))
    ends.reach(FIRST, 8)
    assert FIRST in ends, "more may come before the time"
    assert ends.exclude(record(FIRST, 8, 1000))
    assert ends.exclude(record(FIRST, 9, 500)), "later offsets are after the end, whatever their time"
    assert ends.overdue(999) == []
    assert ends.overdue(1000) == [SECOND]


def test_what_is_finished_before_it_begins() -> None:
    assert unfinished({FIRST: 5, SECOND: None}, {FIRST: 5, SECOND: 5}) == {SECOND: None}
    assert unfinished({FIRST: 0, SECOND: 3}, {}) == {SECOND: 3}
