"""What `millrace top` shows, as lines: a screen of a given size, or whole tables where there is no terminal.

Pure: which rows come first, which sections get how many lines of a screen, and which columns give way where it is
narrow. Not here: what is shown (`admin.rates`), and when (`cli.top`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from millrace.admin.rates import BrokerFigures, Figures, Flow, GroupFigures, PartitionFigures, TopicFigures
from millrace.admin.words import count_text, size_text
from millrace.cli.output import printable
from millrace.model import NO_BROKER

KEYS: Final = {"r": "rate", "b": "bytes", "s": "size", "l": "lag", "n": "name"}
_GAP: Final = "  "
_SHORTEST_NAME: Final = 8
_NAMES_PERCENT: Final = 40
"""Of the width, for names, where not everything fits."""
_CUT: Final = "…"


class Section(NamedTuple):
    """A table: the first column is a name and gives way last; `drop` are the others, the least important first."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    drop: tuple[str, ...]
    weight: int = 1
    """How many lines it gets where another gets one."""


# --- what is in it ----------------------------------------------------------------------------------------------------


def sections(figures: Figures, sort: str, most: int | None = None) -> list[Section]:
    """In the order of the screen; `most` rows of each. Partitions only where there is something to say of them."""
    topics = ranked_topics(figures.topics, sort)[:most]
    groups = ranked_groups(figures.groups, sort)[:most]
    found = [
        Section(
            "topics",
            ("topic", "records/s", "bytes/s", "size", "lag", "groups", "partitions", "problems"),
            [_topic(each) for each in topics],
            ("groups", "partitions", "size", "lag", "bytes/s"),
            weight=2,
        ),
        Section(
            "groups",
            ("group", "lag", "change/s", "reads/s", "state", "type"),
            [_group(each) for each in groups],
            ("type", "state", "reads/s", "change/s"),
            weight=2,
        ),
        Section(
            "brokers",
            ("broker", "records/s", "bytes/s", "size", "leaders", "replicas", "out of sync", "address", "rack"),
            [_broker(each) for each in figures.brokers[:most]],
            ("rack", "address", "replicas", "size", "leaders", "bytes/s"),
        ),
        Section(
            "busiest partitions",
            ("partition", "records/s", "bytes/s", "of its topic", "leader", "size"),
            _busiest(figures, sort)[:most],
            ("size", "of its topic", "bytes/s"),
        ),
        Section(
            "partitions that need attention",
            ("partition", "problem", "leader", "isr", "replicas"),
            [_unwell(each) for each in figures.unwell[:most]],
            ("replicas", "isr", "leader"),
        ),
    ]
    return [each for each in found if each.rows]


def ranked_topics(topics: Iterable[TopicFigures], sort: str) -> list[TopicFigures]:
    """The largest first; those that are alike by name."""
    by: Mapping[str, Callable[[TopicFigures], float]] = {
        "rate": lambda each: each.flow.records or 0,
        "bytes": lambda each: each.flow.size_bytes or 0,
        "size": lambda each: each.size.known,
        "lag": lambda each: each.lag,
        "name": lambda _: 0,
    }
    return sorted(topics, key=lambda each: (-by[sort](each), each.name))


def ranked_groups(groups: Iterable[GroupFigures], sort: str) -> list[GroupFigures]:
    """By lag, whatever topics are sorted by, unless it is by name."""
    return sorted(groups, key=lambda each: (0 if sort == "name" else -each.lag.known, each.name))


def busiest(figures: Figures, sort: str) -> list[PartitionFigures]:
    """The partitions that take anything, those that take most first."""

    def taken(each: PartitionFigures) -> float:
        return (each.flow.size_bytes if sort == "bytes" else each.flow.records) or 0

    return sorted((each for each in figures.partitions if taken(each)), key=lambda each: (-taken(each), each.place))


def problem_of(partition: PartitionFigures) -> str:
    return "no leader" if partition.row.leader == NO_BROKER else "under-replicated"


def heading(figures: Figures) -> str:
    """One line about the whole."""
    partitions = sum(each.partitions for each in figures.topics)
    offline = sum(each.offline for each in figures.topics)
    lacking = sum(each.under_replicated for each in figures.topics)
    parts = [
        f"{_rate(figures.flow.records)} records/s",
        f"{_bytes(figures.flow)}/s",
        count_text(len(figures.brokers), "broker"),
        count_text(len(figures.topics), "topic"),
        count_text(partitions, "partition"),
        f"{lacking:,} under-replicated",
        f"{offline:,} without a leader",
    ]
    if figures.silent:
        parts.append(f"no answer from {', '.join(map(str, figures.silent))}")
    return ", ".join(parts)


def _topic(each: TopicFigures) -> tuple[str, ...]:
    problems = [f"{each.offline:,} offline"] * bool(each.offline)
    problems += [f"{each.under_replicated:,} under-replicated"] * bool(each.under_replicated)
    return (
        each.name,
        _rate(each.flow.records),
        _bytes(each.flow),
        each.size.text(size_text),
        f"{each.lag:,}" if each.groups else "-",
        f"{each.groups:,}",
        f"{each.partitions:,}",
        ", ".join(problems) or "-",
    )


def _group(each: GroupFigures) -> tuple[str, ...]:
    change = "-" if each.change is None else f"{each.change:+,.0f}" if round(each.change) else "0"
    return printable(each.name), each.lag.text("{:,}".format), change, _rate(each.reads), each.state, each.type


def _broker(each: BrokerFigures) -> tuple[str, ...]:
    return (
        f"{each.broker_id}{' (controller)' * each.is_controller}",
        _rate(each.flow.records),
        _bytes(each.flow),
        "no answer" if each.size_bytes is None else size_text(each.size_bytes),
        f"{each.leaders:,}",
        f"{each.replicas:,}",
        f"{each.out_of_sync:,}",
        each.address,
        each.rack or "-",
    )


def _busiest(figures: Figures, sort: str) -> list[tuple[str, ...]]:
    totals = {each.name: each.flow.records or 0 for each in figures.topics}
    return [
        (
            str(each.place),
            _rate(each.flow.records),
            _bytes(each.flow),
            _share(each.flow.records, totals[each.place.topic]),
            str(each.row.leader),
            "-" if each.size_bytes is None else size_text(each.size_bytes),
        )
        for each in busiest(figures, sort)
    ]


def _unwell(each: PartitionFigures) -> tuple[str, ...]:
    return (
        str(each.place),
        problem_of(each),
        "-" if each.row.leader == NO_BROKER else str(each.row.leader),
        ",".join(map(str, each.row.isr)) or "-",
        ",".join(map(str, each.row.replicas)),
    )


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _bytes(flow: Flow) -> str:
    return "-" if flow.size_bytes is None else size_text(flow.size_bytes)


def _share(part: float | None, whole: float) -> str:
    return "-" if part is None or not whole else f"{part / whole:.0%}"


# --- how it fits ------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A line of the screen; `bold` where it is a heading."""

    text: str
    bold: bool = False


def screen(
    figures: Figures, sort: str, *, width: int, height: int, most: int | None = None, remark: str = ""
) -> list[Line]:
    """Exactly what fits: the whole first, then what the keys do or what is wrong, then tables of `most` rows."""
    shown = sections(figures, sort, most)
    room = _share_out([len(each.rows) for each in shown], [each.weight for each in shown], height - 2)
    lines = [Line(cut(heading(figures), width), bold=True)]
    lines.append(Line(cut(remark or f"sorted by {sort}; keys: {_keys()}; q or Ctrl-C ends", width), bold=bool(remark)))
    for section, rows in zip(shown, room, strict=True):
        if rows:
            head, *body = table(section, section.rows[:rows], width)
            lines += [Line(""), Line(head, bold=True), *map(Line, body)]
    return lines[:height]


def _keys() -> str:
    return " ".join(f"{key}={name}" for key, name in KEYS.items())


def _share_out(wanted: Sequence[int], weights: Sequence[int], lines: int) -> list[int]:
    """How many rows each section gets: in turn, until the lines are used up; the first row costs an empty line and the
    names of the columns.
    """
    given = [0] * len(wanted)
    while True:
        before = lines
        for index, weight in enumerate(weights):
            for _ in range(weight):
                cost = 1 if given[index] else 3
                if given[index] < wanted[index] and cost <= lines:
                    given[index] += 1
                    lines -= cost
        if lines == before:
            return given


def table(section: Section, rows: Sequence[tuple[str, ...]], width: int) -> list[str]:
    """The names of the columns and the rows. What does not fit gives way: columns that say nothing, columns in the
    order of `drop`, and the ends of names: the long ones first, at last all.
    """
    kept = [
        index
        for index in range(len(section.columns))
        if index == 0 or section.columns[index] in ("records/s", "lag") or any(row[index] != "-" for row in rows)
    ]
    drop = [section.columns.index(name) for name in section.drop]
    widths = _widths(section, rows)
    if _total(widths[index] for index in kept) > width:
        widths[0] = min(widths[0], max(width * _NAMES_PERCENT // 100, _SHORTEST_NAME))
    while _total(widths[index] for index in kept) > width:
        index = next((each for each in drop if each in kept), None)
        if index is None:
            break
        kept.remove(index)
    too_much = _total(widths[index] for index in kept) - width
    if too_much > 0:
        widths[0] = max(widths[0] - too_much, _SHORTEST_NAME)
    right = [bool(index) and all(_is_figure(row[index]) for row in rows) for index in range(len(section.columns))]
    lines = []
    for row in [tuple(name.upper() for name in section.columns), *rows]:
        cells = [
            cut(row[index], widths[index]).rjust(widths[index])
            if right[index]
            else cut(row[index], widths[index]).ljust(widths[index])
            for index in kept
        ]
        lines.append(cut(_GAP.join(cells).rstrip(), width))
    return lines


def _is_figure(cell: str) -> bool:
    return cell[:1].isdigit() or cell[:1] in "+-"


def _widths(section: Section, rows: Sequence[tuple[str, ...]]) -> list[int]:
    return [max(map(len, column)) for column in zip(section.columns, *rows, strict=True)]


def _total(widths: Iterable[int]) -> int:
    found = list(widths)
    return sum(found) + len(_GAP) * (len(found) - 1)


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + _CUT


# --- for scripts ------------------------------------------------------------------------------------------------------


def as_json(figures: Figures, sort: str, most: int | None) -> dict[str, Any]:
    """Everything, in the order of the screen; a rate that is not known is null."""
    return {
        "cluster_id": figures.cluster_id,
        "seconds": None if figures.seconds is None else round(figures.seconds, 3),
        **_flow(figures.flow),
        "silent_brokers": list(figures.silent),
        "topics": [
            {
                "topic": each.name,
                "partitions": each.partitions,
                **_flow(each.flow),
                "bytes": each.size.or_none,
                "groups": each.groups,
                "lag": each.lag,
                "under_replicated": each.under_replicated,
                "offline": each.offline,
            }
            for each in ranked_topics(figures.topics, sort)[:most]
        ],
        "groups": [
            {
                "group": each.name,
                "type": each.type,
                "state": each.state,
                "lag": each.lag.or_none,
                "lag_change_per_s": _rounded(each.change),
                "reads_per_s": _rounded(each.reads),
            }
            for each in ranked_groups(figures.groups, sort)[:most]
        ],
        "brokers": [
            {
                "broker": each.broker_id,
                "address": each.address,
                "rack": each.rack,
                "controller": each.is_controller,
                **_flow(each.flow),
                "bytes": each.size_bytes,
                "leaders": each.leaders,
                "replicas": each.replicas,
                "out_of_sync": each.out_of_sync,
            }
            for each in figures.brokers
        ],
        "busiest_partitions": [
            {
                "topic": each.place.topic,
                "partition": each.place.partition,
                "leader": each.row.leader,
                **_flow(each.flow),
                "bytes": each.size_bytes,
            }
            for each in busiest(figures, sort)[:most]
        ],
        "unwell_partitions": [
            {
                "topic": each.place.topic,
                "partition": each.place.partition,
                "problem": problem_of(each),
                "leader": each.row.leader,
                "replicas": list(each.row.replicas),
                "isr": list(each.row.isr),
            }
            for each in figures.unwell[:most]
        ],
    }


def _flow(flow: Flow) -> dict[str, float | None]:
    return {"records_per_s": _rounded(flow.records), "bytes_per_s": _rounded(flow.size_bytes)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
