"""Groups as the command line shows them, whatever their protocol: classic, consumer (KIP-848) or share (queues).

Each kind has a request of its own that describes it, and knows no other kind; so they are asked in turn. Not here:
what is printed (`cli.groups`, `cli.queues`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

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
from millrace.wire.messages.groups import DescribeGroupsRequest, DescribeGroupsResponse, ListGroupsRequest
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
        (ShareGroupDescribeRequest(group_ids=[name]), _share_group),
        (DescribeGroupsRequest(groups=[name]), _classic_group),
    )
    for request, read in kinds:
        try:
            return cluster.ask_coordinator(name, f"group '{name}'", request, read)
        except ApiError as error:
            if error.code not in _NOT_THIS_KIND:
                raise
    return None


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


def _share_group(response: ShareGroupDescribeResponse) -> GroupView:
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
