"""What a cluster does now: rates of topics, partitions, brokers and groups, from two looks at it.

Any Kafka can be asked, because only offsets, sizes and commits are looked at (`admin.overview`); what came and was
deleted between two looks is not seen. `read_sample` asks, everything else is pure. None is what cannot be told: a
partition that nobody answered for, an offset that fell (the topic was made anew), a log that shrank (old records went)
or has another leader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from millrace.admin import overview
from millrace.admin.overview import Commits, Groups, Offsets, PartitionRow, Sizes, Topology
from millrace.admin.words import Sum
from millrace.client.cluster import ClusterClient
from millrace.clock import Clock
from millrace.model import NO_BROKER, TopicPartition


@dataclass(frozen=True, slots=True)
class Sample:
    """One look. Offsets, sizes and commits have moments of their own: in a large cluster a look takes seconds."""

    topology: Topology
    ends: Offsets
    ends_at_s: float
    sizes: Sizes
    sizes_at_s: float
    groups: Groups
    commits: Commits
    commits_at_s: float


def read_sample(cluster: ClusterClient, clock: Clock, wanted: Callable[[overview.TopicRow], bool]) -> Sample:
    """Look at the topics that are wanted. Unreachable where nobody answers; what one broker leaves open is None."""
    topology = overview.read_topology(cluster)
    names = [name for name, topic in topology.topics.items() if wanted(topic)]
    ends_at_s = clock.monotonic()
    ends = overview.read_ends(cluster, topology, names)
    sizes_at_s = clock.monotonic()
    sizes = overview.read_sizes(cluster, topology)
    groups = overview.read_groups(cluster, topology)
    commits_at_s = clock.monotonic()
    commits = overview.read_commits(cluster, groups.rows)
    return Sample(topology, ends, ends_at_s, sizes, sizes_at_s, groups, commits, commits_at_s)


# --- figures ----------------------------------------------------------------------------------------------------------


class Flow(NamedTuple):
    """What comes in, per second."""

    records: float | None
    size_bytes: float | None


class PartitionFigures(NamedTuple):
    """A partition and what it takes."""

    place: TopicPartition
    row: PartitionRow
    flow: Flow
    size_bytes: int | None


class TopicFigures(NamedTuple):
    """A topic: what it takes, what it has, and how its readers are."""

    name: str
    partitions: int
    flow: Flow
    size: Sum
    groups: int
    lag: int
    """Of the group that is furthest behind."""
    under_replicated: int
    offline: int


class BrokerFigures(NamedTuple):
    """A broker: what it leads, what it takes as the leader, and its replicas that lag behind."""

    broker_id: int
    address: str
    rack: str | None
    is_controller: bool
    leaders: int
    replicas: int
    out_of_sync: int
    flow: Flow
    size_bytes: int | None
    """All that it has on disk; None where it does not answer."""


class GroupFigures(NamedTuple):
    """A group: how far it is behind, and how fast it reads."""

    name: str
    type: str
    state: str
    lag: Sum
    reads: float | None
    """Records per second, by what it commits."""
    change: float | None
    """How fast its lag grows, per second; less than zero where it catches up."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything that two looks tell, of the topics that were looked at."""

    cluster_id: str | None
    seconds: float | None
    """Between the two; None for a first look, which knows no rates."""
    flow: Flow
    brokers: tuple[BrokerFigures, ...]
    topics: tuple[TopicFigures, ...]
    groups: tuple[GroupFigures, ...]
    partitions: tuple[PartitionFigures, ...]
    silent: tuple[int, ...]
    """Brokers that did not answer everything."""

    @property
    def unwell(self) -> list[PartitionFigures]:
        """Partitions without a leader, then those that lack replicas in sync."""
        found = [each for each in self.partitions if each.row.leader == NO_BROKER or each.row.is_under_replicated]
        return sorted(found, key=lambda each: (each.row.leader != NO_BROKER, each.place))


def figures(before: Sample | None, now: Sample, *, only_readers: bool = False) -> Figures:
    """What `now` says, and the rates since `before`; with `only_readers`, groups that read what was looked at."""
    partitions = tuple(_partitions(before, now))
    groups_lags = overview.group_lags(now.commits, now.ends)
    return Figures(
        cluster_id=now.topology.cluster_id,
        seconds=None if before is None else now.ends_at_s - before.ends_at_s,
        flow=_together(each.flow for each in partitions),
        brokers=tuple(_brokers(now, partitions)),
        topics=tuple(_topics(now, partitions)),
        groups=tuple(
            each
            for each in _groups(before, now, groups_lags)
            if not only_readers or any(one.topic in now.ends for one in now.commits.get(each.name, ()))
        ),
        partitions=partitions,
        silent=tuple(sorted({*now.sizes.silent, *now.groups.silent})),
    )


def _partitions(before: Sample | None, now: Sample) -> Iterable[PartitionFigures]:
    for topic, ends in now.ends.items():
        rows = now.topology.topics[topic].partitions
        sizes = now.sizes.leaders.get(topic, ())
        for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
            place = TopicPartition(topic, index)
            size = _at(sizes, index)
            yield PartitionFigures(place, row, _flow(before, now, place, end, size), size)


def _flow(before: Sample | None, now: Sample, place: TopicPartition, end: int | None, size: int | None) -> Flow:
    if before is None:
        return Flow(None, None)
    records = _per_second(_at(before.ends.get(place.topic, ()), place.partition), end, now.ends_at_s - before.ends_at_s)
    if _leader(before, place) != _leader(now, place):
        return Flow(records, None)
    old = _at(before.sizes.leaders.get(place.topic, ()), place.partition)
    return Flow(records, _per_second(old, size, now.sizes_at_s - before.sizes_at_s))


def _leader(sample: Sample, place: TopicPartition) -> int | None:
    topic = sample.topology.topics.get(place.topic)
    if topic is None or place.partition >= len(topic.partitions):
        return None
    return topic.partitions[place.partition].leader


def _at(values: tuple[int | None, ...], index: int) -> int | None:
    return values[index] if index < len(values) else None


def _per_second(before: int | None, now: int | None, seconds: float) -> float | None:
    if before is None or now is None or now < before or seconds <= 0:
        return None
    return (now - before) / seconds


def _together(flows: Iterable[Flow]) -> Flow:
    """The sum of what is known; None where nothing is."""
    records: float | None = None
    size_bytes: float | None = None
    for flow in flows:
        if flow.records is not None:
            records = (records or 0.0) + flow.records
        if flow.size_bytes is not None:
            size_bytes = (size_bytes or 0.0) + flow.size_bytes
    return Flow(records, size_bytes)


def _topics(now: Sample, partitions: Iterable[PartitionFigures]) -> Iterable[TopicFigures]:
    flows: dict[str, list[Flow]] = {}
    for each in partitions:
        flows.setdefault(each.place.topic, []).append(each.flow)
    lags = overview.topic_lags(now.commits, now.ends)
    for name in now.ends:
        row = now.topology.topics[name]
        lag = lags.get(name, overview.TopicLag(0, 0, 0))
        yield TopicFigures(
            name=name,
            partitions=len(row.partitions),
            flow=_together(flows.get(name, ())),
            size=now.sizes.of_topic(name),
            groups=lag.groups,
            lag=lag.largest,
            under_replicated=row.under_replicated,
            offline=row.offline,
        )


def _brokers(now: Sample, partitions: Iterable[PartitionFigures]) -> Iterable[BrokerFigures]:
    flows: dict[int, list[Flow]] = {}
    for each in partitions:
        flows.setdefault(each.row.leader, []).append(each.flow)
    leaders: dict[int, int] = {}
    replicas: dict[int, int] = {}
    out_of_sync: dict[int, int] = {}
    for row in (row for topic in now.topology.topics.values() for row in topic.partitions):
        leaders[row.leader] = leaders.get(row.leader, 0) + 1
        for broker_id in row.replicas:
            replicas[broker_id] = replicas.get(broker_id, 0) + 1
            if broker_id not in row.isr:
                out_of_sync[broker_id] = out_of_sync.get(broker_id, 0) + 1
    for broker in now.topology.brokers:
        broker_id = broker.broker_id
        yield BrokerFigures(
            broker_id=broker_id,
            address=f"{broker.host}:{broker.port}",
            rack=broker.rack,
            is_controller=broker_id == now.topology.controller_id,
            leaders=leaders.get(broker_id, 0),
            replicas=replicas.get(broker_id, 0),
            out_of_sync=out_of_sync.get(broker_id, 0),
            flow=_together(flows.get(broker_id, ())),
            size_bytes=now.sizes.brokers.get(broker_id),
        )


def _groups(before: Sample | None, now: Sample, lags: Mapping[str, Sum]) -> Iterable[GroupFigures]:
    old_lags = {} if before is None else overview.group_lags(before.commits, before.ends)
    seconds = 0.0 if before is None else now.commits_at_s - before.commits_at_s
    for row in now.groups.rows:
        lag = lags.get(row.name, Sum(0, complete=False))
        old_lag = old_lags.get(row.name)
        has_change = old_lag is not None and old_lag.complete and lag.complete and seconds > 0
        yield GroupFigures(
            name=row.name,
            type=row.type,
            state=row.state,
            lag=lag,
            reads=None if before is None else _reads(before, now, row.name, seconds),
            change=(lag.known - old_lag.known) / seconds if has_change and old_lag is not None else None,
        )


def _reads(before: Sample, now: Sample, name: str, seconds: float) -> float | None:
    """By the offsets that moved on; one that moved back was reset, and counts for nothing."""
    old = {(each.topic, each.partition): each.offset for each in before.commits.get(name, ())}
    moved = [
        max(each.offset - old[each.topic, each.partition], 0)
        for each in now.commits.get(name, ())
        if each.topic in now.ends and (each.topic, each.partition) in old
    ]
    return sum(moved) / seconds if moved and seconds > 0 else None
