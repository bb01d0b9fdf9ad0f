"""A large cluster at a glance: all topics, sizes, offsets and groups with few requests, for lists and rates.

Each part is read by itself, so that a caller can have each as often as it is worth: where partitions lie (one request),
how large they are and where they end (one for each broker, or some), the groups and what they have committed (one for
each broker, or some). Lags are pure functions of the parts. There is one attempt at each: a broker that does not answer
leaves a gap, which is told, and never taken for nothing. Not here: one thing in detail (`admin.groups`,
`admin.log_dirs`, ...).

Ten thousand topics and groups are nothing special. A request names so many of them that a broker is not held up for
long, and what is kept of an answer are tuples by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, NamedTuple

from millrace.admin.asking import ask
from millrace.admin.groups import CLASSIC, SHARE, word
from millrace.admin.words import Sum
from millrace.client import requests
from millrace.client.blocking import BlockingConnection, Pending
from millrace.client.cluster import EARLIEST, LATEST, ClusterClient
from millrace.client.versions import version_for
from millrace.errors import ApiError, ErrorCode
from millrace.model import NO_BROKER, TopicPartition
from millrace.wire.messages.cluster import MetadataResponse
from millrace.wire.messages.group_offsets import OffsetFetchRequest, OffsetFetchResponse
from millrace.wire.messages.groups import ListGroupsRequest, ListGroupsResponse
from millrace.wire.messages.log_dirs import DescribeLogDirsRequest, DescribeLogDirsResponse
from millrace.wire.messages.share_groups import DescribeShareGroupOffsetsRequest, DescribeShareGroupOffsetsResponse
from millrace.wire.schema import Request

PARTITIONS_AT_ONCE: Final = 2000
GROUPS_AT_ONCE: Final = 500
_SINGLE_GROUPS_UNDER_WAY: Final = 50
_FIRST_OF_MANY_GROUPS: Final = 8
_LAST_BY_NAME: Final = 9


# --- topics -----------------------------------------------------------------------------------------------------------


class BrokerRow(NamedTuple):
    """A broker that runs."""

    broker_id: int
    host: str
    port: int
    rack: str | None


class PartitionRow(NamedTuple):
    """Where a partition lies; `leader` is -1 while there is none."""

    leader: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]

    @property
    def is_under_replicated(self) -> bool:
        return len(self.isr) < len(self.replicas)


class TopicRow(NamedTuple):
    """A topic; its partitions in the order of their numbers."""

    name: str
    internal: bool
    partitions: tuple[PartitionRow, ...]

    @property
    def replication_factor(self) -> int:
        return max((len(each.replicas) for each in self.partitions), default=0)

    @property
    def offline(self) -> int:
        """How many partitions have no leader."""
        return sum(each.leader == NO_BROKER for each in self.partitions)

    @property
    def under_replicated(self) -> int:
        return sum(each.is_under_replicated for each in self.partitions)


@dataclass(frozen=True, slots=True)
class Topology:
    """Who is there, and where every partition lies."""

    cluster_id: str | None
    controller_id: int
    brokers: tuple[BrokerRow, ...]
    topics: Mapping[str, TopicRow]
    """In the order of their names."""

    @property
    def partitions(self) -> int:
        return sum(len(topic.partitions) for topic in self.topics.values())


def read_topology(cluster: ClusterClient) -> Topology:
    """All brokers and topics, from one answer. Unreachable where nobody gives one."""
    answer: MetadataResponse = ask(cluster, requests.metadata(None))
    cluster.learn_brokers({each.node_id: (each.host, each.port) for each in answer.brokers})
    known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def shared(numbers: list[int]) -> tuple[int, ...]:
        """One object for the same replicas: there are few combinations, and many partitions."""
        found = tuple(numbers)
        return known.setdefault(found, found)

    topics = {}
    for topic in sorted(answer.topics, key=lambda each: each.name or ""):
        if topic.name is None or topic.error_code:
            continue
        partitions = sorted(topic.partitions, key=lambda each: each.partition_index)
        topics[topic.name] = TopicRow(
            topic.name,
            topic.is_internal,
            tuple(
                PartitionRow(each.leader_id, shared(each.replica_nodes), shared(each.isr_nodes)) for each in partitions
            ),
        )
    brokers = tuple(
        BrokerRow(each.node_id, each.host, each.port, each.rack)
        for each in sorted(answer.brokers, key=lambda each: each.node_id)
    )
    return Topology(answer.cluster_id, answer.controller_id, brokers, topics)


# --- sizes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes on disk. A topic of which no replica was told of is missing."""

    leaders: Mapping[str, tuple[int | None, ...]]
    """Per topic, of the leader of each partition."""
    totals: Mapping[str, int]
    """Per topic, all replicas together."""
    brokers: Mapping[int, int]
    """Per broker that answered."""
    silent: tuple[int, ...]
    """Brokers that did not, or that have a directory that failed: sums lack what they have."""

    def of_topic(self, name: str) -> Sum:
        """What the leaders of a topic have."""
        leaders = self.leaders.get(name, (None,))
        return Sum(sum(each or 0 for each in leaders), complete=None not in leaders)


def read_sizes(cluster: ClusterClient, topology: Topology) -> Sizes:
    """How large all logs are; one request for each broker."""
    questions = {each.broker_id: [DescribeLogDirsRequest(topics=None)] for each in topology.brokers}
    leaders: dict[str, list[int | None]] = {
        name: [None] * len(topic.partitions) for name, topic in topology.topics.items()
    }
    totals: dict[str, int] = {}
    brokers: dict[int, int] = {}
    silent: set[int] = {each.broker_id for each in topology.brokers}
    for node, _, answer in _ask_nodes(cluster, questions):
        told: DescribeLogDirsResponse | None = answer
        if told is None or told.error_code:
            continue
        if not any(directory.error_code for directory in told.results):
            silent.discard(node)
        brokers[node] = 0
        for topic in (topic for directory in told.results for topic in directory.topics):
            row = topology.topics.get(topic.name)
            if row is None:
                continue  # made since
            of_leaders = leaders[topic.name]
            for each in topic.partitions:
                brokers[node] += each.partition_size
                totals[topic.name] = totals.get(topic.name, 0) + each.partition_size
                index = each.partition_index
                if index < len(row.partitions) and row.partitions[index].leader == node and not each.is_future_key:
                    of_leaders[index] = each.partition_size
    return Sizes({name: tuple(found) for name, found in leaders.items()}, totals, brokers, tuple(sorted(silent)))


# --- offsets ----------------------------------------------------------------------------------------------------------

Offsets = Mapping[str, tuple[int | None, ...]]
"""Per topic, one of each partition; None where nobody could be asked."""


def read_ends(cluster: ClusterClient, topology: Topology, topics: Collection[str] | None = None) -> Offsets:
    """The offset after the last record, of all partitions or of those of some topics."""
    return _read_offsets(cluster, topology, topics, LATEST)


def read_starts(cluster: ClusterClient, topology: Topology, topics: Collection[str] | None = None) -> Offsets:
    """The offset of the first record."""
    return _read_offsets(cluster, topology, topics, EARLIEST)


def _read_offsets(cluster: ClusterClient, topology: Topology, topics: Collection[str] | None, when: int) -> Offsets:
    wanted = topology.topics if topics is None else [name for name in topology.topics if name in set(topics)]
    by_leader: dict[int, list[TopicPartition]] = {}
    for name in wanted:
        for index, each in enumerate(topology.topics[name].partitions):
            if each.leader != NO_BROKER:
                by_leader.setdefault(each.leader, []).append(TopicPartition(name, index))
    questions = {
        node: [
            requests.list_offsets(
                dict.fromkeys(part, when), {}, read_committed=False, timeout_ms=cluster.settings.request_timeout_ms
            )
            for part in _parts(places, PARTITIONS_AT_ONCE)
        ]
        for node, places in by_leader.items()
    }
    found: dict[str, list[int | None]] = {name: [None] * len(topology.topics[name].partitions) for name in wanted}
    for _, _, answer in _ask_nodes(cluster, questions):
        if answer is None:
            continue
        for (name, index), offset, error in requests.read_list_offsets(answer):
            if error is None:
                found[name][index] = offset
    return {name: tuple(offsets) for name, offsets in found.items()}


def records(starts: Offsets, ends: Offsets, topic: str) -> Sum:
    """How many offsets lie between the first and the last record of a topic."""
    spans = [
        None if start is None or end is None else max(end - start, 0)
        for start, end in zip_longest(starts.get(topic, ()), ends.get(topic, (None,)))
    ]
    return Sum(sum(each or 0 for each in spans), complete=None not in spans)


# --- groups -----------------------------------------------------------------------------------------------------------


class GroupRow(NamedTuple):
    """A group, and the broker that coordinates it."""

    name: str
    type: str
    state: str
    coordinator: int


@dataclass(frozen=True, slots=True)
class Groups:
    """Every group that a broker told of."""

    rows: tuple[GroupRow, ...]
    """In the order of their names."""
    silent: tuple[int, ...]
    """Brokers that did not answer: their groups are missing."""


def read_groups(cluster: ClusterClient, topology: Topology) -> Groups:
    """All groups of every type; one request for each broker, which knows those that it coordinates."""
    questions = {each.broker_id: [ListGroupsRequest()] for each in topology.brokers}
    rows: dict[str, GroupRow] = {}
    silent = []
    for node, _, answer in _ask_nodes(cluster, questions):
        told: ListGroupsResponse | None = answer
        if told is None or told.error_code:
            silent.append(node)
            continue
        for each in told.groups:
            # Brokers before Kafka 3.8 know no types, because they have one.
            rows[each.group_id] = GroupRow(
                each.group_id, word(each.group_type) or CLASSIC, word(each.group_state), node
            )
    return Groups(tuple(rows[name] for name in sorted(rows)), tuple(sorted(silent)))


class Committed(NamedTuple):
    """How far a group is in a partition: what it has committed, or where it starts if it is a queue.

    A queue's lag is told by the broker, where it does; others have it from the end of the partition.
    """

    topic: str
    partition: int
    offset: int
    told_lag: int | None = None


Commits = Mapping[str, tuple[Committed, ...]]
"""By group. One that could not be asked is missing; one that has committed nothing has nothing."""


def read_commits(cluster: ClusterClient, groups: Iterable[GroupRow]) -> Commits:
    """What many groups have committed; some hundred in a request, where the brokers take that (Kafka 3.0)."""
    found: dict[str, tuple[Committed, ...]] = {}
    names: dict[str, str] = {}
    by_node: dict[int, tuple[list[str], list[str]]] = {}
    for each in groups:
        by_node.setdefault(each.coordinator, ([], []))[each.type == SHARE].append(each.name)
    questions: dict[int, list[Request]] = {}
    singles: dict[int, list[Request]] = {}
    for node, (consumers, queues) in by_node.items():
        questions[node] = [_queue_question(part) for part in _parts(queues, GROUPS_AT_ONCE)]
        if _takes_many(cluster, node):
            questions[node] += [_group_question(part) for part in _parts(consumers, GROUPS_AT_ONCE)]
        else:
            singles[node] = [OffsetFetchRequest(group_id=name, topics=None) for name in consumers]
    for _, _, answer in _ask_nodes(cluster, questions, at_most={OffsetFetchRequest: _LAST_BY_NAME}):
        if isinstance(answer, OffsetFetchResponse):
            found.update(_groups_told(answer, names))
        elif isinstance(answer, DescribeShareGroupOffsetsResponse):
            found.update(_queues_told(answer, names))
    for _, message, answer in _ask_nodes(cluster, singles, under_way=_SINGLE_GROUPS_UNDER_WAY):
        if answer is not None and not answer.error_code:
            found[message.group_id] = tuple(_commits_of(answer.topics, names))
    return found


def _takes_many(cluster: ClusterClient, node: int) -> bool:
    try:
        return version_for(OffsetFetchRequest, cluster.connection(node).offered) >= _FIRST_OF_MANY_GROUPS
    except ApiError:
        return True  # it does not answer, and will be found out


def _group_question(names: Sequence[str]) -> Request:
    group = OffsetFetchRequest.OffsetFetchRequestGroup
    return OffsetFetchRequest(groups=[group(group_id=name, topics=None) for name in names])


def _queue_question(names: Sequence[str]) -> Request:
    group = DescribeShareGroupOffsetsRequest.DescribeShareGroupOffsetsRequestGroup
    return DescribeShareGroupOffsetsRequest(groups=[group(group_id=name, topics=None) for name in names])


def _groups_told(answer: OffsetFetchResponse, names: dict[str, str]) -> Iterator[tuple[str, tuple[Committed, ...]]]:
    for group in answer.groups:
        if not group.error_code:
            yield group.group_id, tuple(_commits_of(group.topics, names))


def _commits_of(topics: Iterable[Any], names: dict[str, str]) -> Iterator[Committed]:
    for topic in topics:
        name = names.setdefault(topic.name, topic.name)  # one text for all groups that read it
        for each in topic.partitions:
            if each.committed_offset >= 0 and not each.error_code:
                yield Committed(name, each.partition_index, each.committed_offset)


def _queues_told(
    answer: DescribeShareGroupOffsetsResponse, names: dict[str, str]
) -> Iterator[tuple[str, tuple[Committed, ...]]]:
    for group in answer.groups:
        if not group.error_code:
            yield (
                group.group_id,
                tuple(
                    Committed(
                        names.setdefault(topic.topic_name, topic.topic_name),
                        each.partition_index,
                        each.start_offset,
                        each.lag if each.lag >= 0 else None,
                    )
                    for topic in group.topics
                    for each in topic.partitions
                    if each.start_offset >= 0 and not each.error_code
                ),
            )


# --- lags -------------------------------------------------------------------------------------------------------------


def lag_of(committed: Committed, ends: Offsets) -> int | None:
    """Of a group in one partition; None where the end is not known."""
    if committed.told_lag is not None:
        return committed.told_lag
    offsets = ends.get(committed.topic, ())
    end = offsets[committed.partition] if committed.partition < len(offsets) else None
    return None if end is None else max(end - committed.offset, 0)


def group_lags(commits: Commits, ends: Offsets) -> dict[str, Sum]:
    """Of each group, over all that it has committed; topics that are gone do not count."""
    lags = {}
    for name, committed in commits.items():
        found = [lag_of(each, ends) for each in committed if each.topic in ends]
        lags[name] = Sum(sum(each or 0 for each in found), complete=None not in found)
    return lags


class TopicLag(NamedTuple):
    """What a topic's readers are behind, each by itself."""

    groups: int
    largest: int
    total: int


def topic_lags(commits: Commits, ends: Offsets) -> dict[str, TopicLag]:
    """Of each topic that a group has read: how many groups, and how far they are behind, the last one and together."""
    by_topic: dict[str, dict[str, int]] = {}
    for name, committed in commits.items():
        for each in committed:
            of_groups = by_topic.setdefault(each.topic, {})
            of_groups[name] = of_groups.get(name, 0) + (lag_of(each, ends) or 0)
    return {
        topic: TopicLag(len(of_groups), max(of_groups.values()), sum(of_groups.values()))
        for topic, of_groups in by_topic.items()
    }


# --- asking -----------------------------------------------------------------------------------------------------------


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _ask_nodes(
    cluster: ClusterClient,
    questions: Mapping[int, Sequence[Request]],
    *,
    at_most: Mapping[type[Request], int] | None = None,
    under_way: int = 1,
) -> Iterator[tuple[int, Any, Any]]:
    """Ask all brokers at once, each its questions in turn; its id, the question and the answer, or None for none.

    A broker that fails once is not asked again; what it does not serve is just that one question.
    """
    failed: set[int] = set()
    rounds = max((len(each) for each in questions.values()), default=0)
    for first in range(0, rounds, under_way):
        sent: list[tuple[int, Request, BlockingConnection | None, Pending | None]] = []
        for node, messages in questions.items():
            for message in messages[first : first + under_way]:
                connection, pending = None, None
                if node not in failed:
                    try:
                        connection = cluster.connection(node)
                        pending = cluster.send(connection, message, at_most=(at_most or {}).get(type(message)))
                    except ApiError as error:
                        _note_failure(failed, node, error)
                sent.append((node, message, connection, pending))
        for node, message, connection, pending in sent:
            answer = None
            if connection is not None and pending is not None and node not in failed:
                try:
                    answer = connection.receive(pending)
                except ApiError as error:
                    _note_failure(failed, node, error)
            yield node, message, answer


def _note_failure(failed: set[int], node: int, error: ApiError) -> None:
    if error.code is not ErrorCode.UNSUPPORTED_VERSION:
        failed.add(node)
