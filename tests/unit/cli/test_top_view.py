"""The screen of `millrace top`: what comes first, what fits, what gives way."""

from __future__ import annotations

import json

import pytest

from millrace.admin.overview import PartitionRow
from millrace.admin.rates import BrokerFigures, Figures, Flow, GroupFigures, PartitionFigures, TopicFigures
from millrace.admin.words import Sum
from millrace.cli import top_view
from millrace.cli.choices import TOP_SORTS
from millrace.cli.top_view import KEYS, Section
from millrace.model import TopicPartition

LED = PartitionRow(1, (1, 2), (1, 2))
LACKING = PartitionRow(1, (1, 2), (1,))
LEADERLESS = PartitionRow(-1, (2,), (2,))


def topic(name: str, records: float | None, size_bytes: float | None, size: int, lag: int) -> TopicFigures:
    return TopicFigures(name, 3, Flow(records, size_bytes), Sum(size, complete=True), 1, lag, 0, 0)


def group(name: str, lag: int, *, change: float | None = None) -> GroupFigures:
    return GroupFigures(name, "consumer", "stable", Sum(lag, complete=True), 5.0, change)


def partition(name: str, index: int, flow: Flow, row: PartitionRow = LED) -> PartitionFigures:
    return PartitionFigures(TopicPartition(name, index), row, flow, 1000)


FIGURES = Figures(
    cluster_id="c",
    seconds=2.0,
    flow=Flow(1234.5, 5e6),
    brokers=tuple(
        BrokerFigures(number, f"host:{number}", None, number == 2, 3, 6, 0, Flow(10, 20), 10**9) for number in (1, 2)
    ),
    topics=(topic("a", 5, 900, 10, 70), topic("b", 1000, 10, 30, 0), topic("c", None, None, 20, 80)),
    groups=(group("early", 3, change=-2.4), group("late", 5000, change=12.6), group("at\x1b[2Jend", 0, change=0.2)),
    partitions=(
        partition("a", 0, Flow(5, 900)),
        partition("b", 0, Flow(900, 1)),
        partition("b", 1, Flow(100, 9)),
        partition("b", 2, Flow(0, 0)),
        partition("c", 0, Flow(None, None), LEADERLESS),
        partition("c", 1, Flow(None, None), LACKING),
    ),
    silent=(2,),
)


@pytest.mark.parametrize(
    ("sort", "expected"), [("rate", "bac"), ("bytes", "abc"), ("size", "bca"), ("lag", "cab"), ("name", "abc")]
)
def test_topics_are_sorted(sort: str, expected: str) -> None:
    assert "".join(each.name for each in top_view.ranked_topics(FIGURES.topics, sort)) == expected


def test_every_sort_has_a_key() -> None:
    assert tuple(KEYS.values()) == TOP_SORTS
    for sort in TOP_SORTS:
        assert top_view.screen(FIGURES, sort, width=100, height=40)


def test_groups_that_lag_come_first() -> None:
    assert [each.name for each in top_view.ranked_groups(FIGURES.groups, "rate")] == ["late", "early", "at\x1b[2Jend"]
    assert [each.name for each in top_view.ranked_groups(FIGURES.groups, "name")] == ["at\x1b[2Jend", "early", "late"]


def test_busiest_partitions() -> None:
    assert [str(each.place) for each in top_view.busiest(FIGURES, "rate")] == ["b-0", "b-1", "a-0"]
    assert [str(each.place) for each in top_view.busiest(FIGURES, "bytes")] == ["a-0", "b-1", "b-0"]


def test_a_wide_screen_has_everything() -> None:
    lines = [line.text for line in top_view.screen(FIGURES, "rate", width=160, height=60)]
    assert lines[0] == (
        "1,234 records/s, 5.0 MB/s, 2 brokers, 3 topics, 9 partitions, 0 under-replicated, 0 without a leader, "
        "no answer from 2"
    )
    assert "sorted by rate" in lines[1]
    text = "\n".join(lines)
    for section in top_view.sections(FIGURES, "rate"):
        for row in section.rows:
            assert row[0] in text
    assert any(line.split()[:5] == ["b-0", "900", "1", "B", "90%"] for line in lines)
    assert "c-0        no leader" in text
    assert "+13" in text
    assert "-2" in text


def test_names_cannot_move_the_cursor() -> None:
    text = "\n".join(line.text for line in top_view.screen(FIGURES, "rate", width=160, height=60))
    assert "\x1b" not in text
    assert "at\\x1b[2Jend" in text


@pytest.mark.parametrize("width", [1, 10, 20, 40, 60, 80, 200])
@pytest.mark.parametrize("height", [1, 3, 6, 10, 20, 50])
def test_it_fits(width: int, height: int) -> None:
    lines = top_view.screen(FIGURES, "rate", width=width, height=height)
    assert len(lines) <= height
    assert max(len(line.text) for line in lines) <= width


def test_a_low_screen_has_rows_of_what_matters_most() -> None:
    heads = [line.text.split()[0] for line in top_view.screen(FIGURES, "rate", width=100, height=11) if line.bold]
    assert heads[1:] == ["TOPIC", "GROUP"]


def test_trouble_is_said_instead_of_the_keys() -> None:
    lines = top_view.screen(FIGURES, "rate", width=100, height=20, remark="no answer since 12:00:00")
    assert (lines[1].text, lines[1].bold) == ("no answer since 12:00:00", True)


SECTION = Section(
    "topics",
    ("topic", "records/s", "size", "rack", "lag"),
    [("a-name-that-is-long", "10", "1.0 MB", "-", "5"), ("short", "1,000", "20 B", "-", "-")],
    ("lag", "size"),
)


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (80, ["TOPIC", "RECORDS/S", "SIZE", "LAG"]),
        (32, ["TOPIC", "RECORDS/S", "SIZE"]),
        (24, ["TOPIC", "RECORDS/S"]),
    ],
)
def test_columns_give_way(width: int, expected: list[str]) -> None:
    lines = top_view.table(SECTION, SECTION.rows, width)
    assert lines[0].split() == expected


def test_figures_stand_flush_right_and_names_are_cut_last() -> None:
    assert top_view.table(SECTION, SECTION.rows, 22) == [
        "TOPIC     RECORDS/S",
        "a-name-…         10",
        "short         1,000",
    ]


def test_json_has_all_and_no_made_up_rates() -> None:
    told = json.loads(json.dumps(top_view.as_json(FIGURES, "rate", None)))
    assert [each["topic"] for each in told["topics"]] == ["b", "a", "c"]
    assert told["topics"][2]["records_per_s"] is None
    assert told["groups"][0] == {
        "group": "late",
        "type": "consumer",
        "state": "stable",
        "lag": 5000,
        "lag_change_per_s": 12.6,
        "reads_per_s": 5.0,
    }
    assert [(each["topic"], each["problem"]) for each in told["unwell_partitions"]] == [
        ("c", "no leader"),
        ("c", "under-replicated"),
    ]
    assert len(top_view.as_json(FIGURES, "rate", 1)["busiest_partitions"]) == 1
