"""Groups as people see them, whatever their protocol: classic, consumer (KIP-848) or share (queues).

Each kind has a request of its own that describes it, and knows no other kind; so they are asked in turn. Here too: how
far a group lags, and moving it, by a plan that can be looked at first. Not here: what only queues have
(`admin.queues`), the lag of all groups at once (`admin.overview`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from millrace.admin.errors import AdminError
from millrace.admin.topics import existing, offset_bounds
from millrace.admin.words import Sum, count_text
from millrace.client.cluster import LATEST, ClusterClient, raise_for
from millrace.client.versions import known_code
from millrace.errors import ApiError, ErrorCode, ProtocolError
from millrace.groups.subscription import read_assignment
from millrace.model import NO_BROKER, TopicPartition
from millrace.wire.messages.consumer_groups import ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse
from millrace.wire.messages.group_offsets import (
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from millrace.wire.messages.groups import (
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    ListGroupsRequest,
)
from millrace.wire.messages.share_groups import ShareGroupDescribeRequest, ShareGroupDescribeResponse
from millrace.wire.schema import Request

CLASSIC: Final = "classic"
CONSUMER: Final = "consumer"
SHARE: Final = "share"
TYPES: Final = (CLASSIC, CONSUMER, SHARE, "streams")
STATES: Final = (
    "empty",
    "stable",
    "assigning",
    "reconciling",
    "preparing-rebalance",
    "completing-rebalance",
    "not-ready",
    "dead",
)
_CLASSIC_MEMBER: Final = 0
_NOT_THIS_KIND: Final = {ErrorCode.GROUP_ID_NOT_FOUND, ErrorCode.UNSUPPORTED_VERSION}
"""What a broker says that has no such group of this kind, or does not know the kind at all."""


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """A line of a list."""

    name: str
    state: str
    type: str


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member; None is what its protocol does not have."""

    member_id: str
    client_id: str
    host: str
    partitions: tuple[TopicPartition, ...]
    instance_id: str | None = None
    epoch: int | None = None
    protocol: str = CLASSIC
    target: tuple[TopicPartition, ...] | None = None
    """What it is to have once everybody has given up what they should."""
    topics: tuple[str, ...] | None = None
    """What it subscribes to by name, where that is told."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group; None is what its protocol does not have."""

    name: str
    type: str
    state: str
    assignor: str | None
    members: tuple[MemberView, ...]
    epoch: int | None = None
    target_epoch: int | None = None


def word(state: str) -> str:
    """`PreparingRebalance` as `preparing-rebalance`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", state).lower()


def list_groups(cluster: ClusterClient) -> list[ListedGroup]:
    """Every group of the cluster, by name. Each broker knows those it coordinates."""
    found: dict[str, ListedGroup] = {}
    for answer in cluster.ask_every_broker(ListGroupsRequest()):
        raise_for(answer.error_code)
        for each in answer.groups:
            # Brokers before Kafka 3.8 know no types, because they have one.
            found[each.group_id] = ListedGroup(each.group_id, word(each.group_state), word(each.group_type) or CLASSIC)
    return [found[name] for name in sorted(found)]


def describe_group(cluster: ClusterClient, name: str) -> GroupView | None:
    """The group, or None where there is none of this name."""
    kinds: tuple[tuple[Request, Callable[[Any], GroupView]], ...] = (
        (ConsumerGroupDescribeRequest(group_ids=[name]), _consumer_group),
        (ShareGroupDescribeRequest(group_ids=[name]), share_group),
        (DescribeGroupsRequest(groups=[name]), _classic_group),
    )
    for request, read in kinds:
        try:
            return cluster.ask_coordinator(name, f"group '{name}'", request, read)
        except ApiError as error:
            if error.code not in _NOT_THIS_KIND:
                raise
    return None


def other_kind(cluster: ClusterClient, name: str) -> str | None:
    """`a consumer group`, where a group that is to be a queue is one of another kind; None where nothing is wrong."""
    found = describe_group(cluster, name)
    if found is None or found.type == SHARE:
        return None
    return "a consumer group" if found.type in (CLASSIC, CONSUMER) else f"a {found.type} group"


def committed_offsets(cluster: ClusterClient, name: str) -> dict[TopicPartition, int]:
    """Everything that the group has committed."""

    def read(response: OffsetFetchResponse) -> dict[TopicPartition, int]:
        raise_for(response.error_code)
        found = {}
        for topic in response.topics:
            for each in topic.partitions:
                raise_for(each.error_code)
                if each.committed_offset >= 0:
                    found[TopicPartition(topic.name, each.partition_index)] = each.committed_offset
        return found

    request = OffsetFetchRequest(group_id=name, topics=None)
    return cluster.ask_coordinator(name, f"offsets of group '{name}'", request, read)


def delete_offsets(
    cluster: ClusterClient, name: str, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, str]:
    """Have the group forget what it has committed; those that could not be forgotten, with the reason."""
    topics: dict[str, list[OffsetDeleteRequest.OffsetDeleteRequestPartition]] = {}
    for each in partitions:
        topics.setdefault(each.topic, []).append(
            OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=each.partition)
        )
    request = OffsetDeleteRequest(
        group_id=name,
        topics=[
            OffsetDeleteRequest.OffsetDeleteRequestTopic(name=topic, partitions=indexes)
            for topic, indexes in topics.items()
        ],
    )

    def read(response: OffsetDeleteResponse) -> dict[TopicPartition, str]:
        raise_for(response.error_code)
        answers = {
            TopicPartition(topic.name, each.partition_index): each.error_code
            for topic in response.topics
            for each in topic.partitions
        }
        # What was not answered was not done.
        codes = {each: answers.get(each, ErrorCode.UNKNOWN_SERVER_ERROR) for each in partitions}
        return {each: _reason(code) for each, code in codes.items() if code}

    return cluster.ask_coordinator(name, f"offsets of group '{name}'", request, read)


def delete_group(cluster: ClusterClient, name: str) -> None:
    """Delete a group of any kind that has no members; ApiError NON_EMPTY_GROUP where it has."""

    def read(response: DeleteGroupsResponse) -> None:
        (result,) = response.results
        raise_for(result.error_code)

    cluster.ask_coordinator(name, f"deletion of group '{name}'", DeleteGroupsRequest(groups_names=[name]), read)


def _reason(code: int) -> str:
    known = known_code(code)
    if known is ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC:
        return f"a running member reads the topic ({known.name})"
    return known.name


def end_offsets(cluster: ClusterClient, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """Of the partitions that still exist and have a leader to ask: a group may have read a topic that was deleted."""
    wanted = list(partitions)
    topics = cluster.topics({each.topic for each in wanted})
    led = {
        each: LATEST
        for each in wanted
        if each.topic in topics
        and each.partition in topics[each.topic].partitions
        and topics[each.topic].partitions[each.partition].leader != NO_BROKER
    }
    return {each: offset for each, offset in cluster.list_offsets(led).items() if offset is not None}


# --- lag --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """How far a group is in one partition; None is what is not known, or was never read."""

    place: TopicPartition
    committed: int | None
    end: int | None
    member: str | None

    @property
    def lag(self) -> int | None:
        return None if self.end is None or self.committed is None else max(self.end - self.committed, 0)


def read_lag(cluster: ClusterClient, group: GroupView) -> list[PartitionLag]:
    """Of every partition that the group has committed or reads now, in their order; not of queues."""
    committed = committed_offsets(cluster, group.name)
    owners = {each: member.member_id for member in group.members for each in member.partitions}
    wanted = sorted(committed.keys() | owners.keys())
    ends = end_offsets(cluster, wanted)
    return [PartitionLag(each, committed.get(each), ends.get(each), owners.get(each)) for each in wanted]


def total_lag(partitions: Iterable[PartitionLag]) -> Sum:
    """What was never read has no lag; what cannot be asked for its end has one that is not known."""
    known = list(partitions)
    return Sum(sum(each.lag or 0 for each in known), complete=all(each.end is not None for each in known))


# --- moving -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """Where a reset moves offsets to; exactly one field is set."""

    earliest: bool = False
    latest: bool = False
    offset: int | None = None
    time_ms: int | None = None
    by: int | None = None

    @property
    def choices(self) -> int:
        return sum([self.earliest, self.latest, *(one is not None for one in (self.offset, self.time_ms, self.by))])


@dataclass(frozen=True, slots=True)
class Shift:
    """One line of a plan: the offset before, if there is one, and the one after it."""

    place: TopicPartition
    old: int | None
    new: int


def check_movable(cluster: ClusterClient, name: str, *, now: bool) -> None:
    """AdminError where a group cannot be moved; the broker would say so too, in words that need explaining."""
    group = describe_group(cluster, name)
    if group is None:
        return
    if group.type == SHARE:
        raise AdminError(f"'{name}' is a queue", remedy=f"move it with: millrace queues reset {name}")
    if now and group.members:
        raise AdminError(f"group '{name}' has {count_text(len(group.members), 'running member')}: stop them first")


def plan_reset(
    cluster: ClusterClient,
    chosen: Iterable[TopicPartition],
    committed: Mapping[TopicPartition, int],
    target: Target,
) -> list[Shift]:
    """A move of these partitions, of those that still exist: what `shifts` says."""
    there = existing(cluster, chosen)
    bounds = offset_bounds(cluster, there)
    by_time = cluster.list_offsets(dict.fromkeys(there, target.time_ms)) if target.time_ms is not None else {}
    return shifts(bounds, committed, target, by_time)


def shifts(
    bounds: Mapping[TopicPartition, tuple[int, int]],
    committed: Mapping[TopicPartition, int],
    target: Target,
    by_time: Mapping[TopicPartition, int | None],
) -> list[Shift]:
    """Old and new offset per partition, in their order; a new one always lies inside the log."""
    plan = []
    for place, (start, end) in sorted(bounds.items()):
        old = committed.get(place)
        if target.earliest:
            new = start
        elif target.latest:
            new = end
        elif target.offset is not None:
            new = target.offset
        elif target.by is not None:
            if old is None:
                raise AdminError(f"the group has no offset for {place}")
            new = old + target.by
        else:
            at_time = by_time.get(place)
            new = end if at_time is None else at_time
        plan.append(Shift(place, old, min(max(new, start), end)))
    return plan


def plan_import(
    cluster: ClusterClient, wanted: Mapping[TopicPartition, int], committed: Mapping[TopicPartition, int]
) -> list[Shift]:
    """A move to these very offsets, or to the nearest that lie inside the log; the partitions must exist."""
    bounds = offset_bounds(cluster, sorted(wanted))
    return [
        Shift(place, committed.get(place), min(max(wanted[place], start), end))
        for place, (start, end) in bounds.items()
    ]


def execute(cluster: ClusterClient, name: str, plan: Iterable[Shift]) -> None:
    """Commit what a plan says. The broker refuses where the group has members."""
    cluster.commit_offsets(name, {each.place: each.new for each in plan})


# --- answers ----------------------------------------------------------------------------------------------------------


def _consumer_group(response: ConsumerGroupDescribeResponse) -> GroupView:
    (group,) = response.groups
    raise_for(group.error_code, group.error_message)
    return GroupView(
        name=group.group_id,
        type=CONSUMER,
        state=word(group.group_state),
        assignor=group.assignor_name or None,
        epoch=group.group_epoch,
        target_epoch=group.assignment_epoch,
        members=tuple(
            MemberView(
                member_id=each.member_id,
                client_id=each.client_id,
                host=each.client_host,
                partitions=_named(each.assignment.topic_partitions),
                instance_id=each.instance_id,
                epoch=each.member_epoch,
                protocol=CLASSIC if each.member_type == _CLASSIC_MEMBER else CONSUMER,
                target=_named(each.target_assignment.topic_partitions),
            )
            for each in group.members
        ),
    )


def share_group(response: ShareGroupDescribeResponse) -> GroupView:
    """What the coordinator of one says of it."""
    (group,) = response.groups
    raise_for(group.error_code, group.error_message)
    return GroupView(
        name=group.group_id,
        type=SHARE,
        state=word(group.group_state),
        assignor=group.assignor_name or None,
        epoch=group.group_epoch,
        target_epoch=group.assignment_epoch,
        members=tuple(
            MemberView(
                member_id=each.member_id,
                client_id=each.client_id,
                host=each.client_host,
                partitions=_named(each.assignment.topic_partitions),
                epoch=each.member_epoch,
                protocol=SHARE,
                topics=tuple(each.subscribed_topic_names),
            )
            for each in group.members
        ),
    )


def _classic_group(response: DescribeGroupsResponse) -> GroupView:
    (group,) = response.groups
    raise_for(group.error_code, group.error_message)
    state = word(group.group_state)
    if state == "dead":
        # What brokers say before they learned to say that there is none.
        raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND)
    return GroupView(
        name=group.group_id,
        type=CLASSIC,
        state=state,
        assignor=group.protocol_data or None,
        members=tuple(
            MemberView(
                member_id=each.member_id,
                client_id=each.client_id,
                host=each.client_host,
                partitions=_assigned(each.member_assignment),
                instance_id=each.group_instance_id,
            )
            for each in group.members
        ),
    )


def _named(topics: Iterable[Any]) -> tuple[TopicPartition, ...]:
    return tuple(sorted(TopicPartition(each.topic_name, index) for each in topics for index in each.partitions))


def _assigned(assignment: bytes) -> tuple[TopicPartition, ...]:
    """What a classic consumer reads; other members of classic groups (Connect) have assignments of their own."""
    if not assignment:
        return ()
    try:
        topics = read_assignment(assignment).assigned_partitions
    except ProtocolError:
        return ()
    return tuple(sorted(TopicPartition(each.topic, index) for each in topics for index in each.partitions))
