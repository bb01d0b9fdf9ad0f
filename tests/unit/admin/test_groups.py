"""Groups of every type as one view: which request describes them, and what the answers of old and new brokers mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from millrace.admin import groups as group_views
from millrace.client.cluster import ClusterClient
from millrace.errors import ApiError, ErrorCode
from millrace.groups.subscription import write_assignment
from millrace.model import TopicPartition
from millrace.wire.messages.consumer_groups import ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse
from millrace.wire.messages.groups import (
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    ListGroupsRequest,
    ListGroupsResponse,
)
from millrace.wire.messages.share_groups import ShareGroupDescribeRequest, ShareGroupDescribeResponse
from millrace.wire.schema import Request, Response

Consumers = ConsumerGroupDescribeResponse
Shares = ShareGroupDescribeResponse
Classics = DescribeGroupsResponse


class Brokers:
    """Says what it was given to say; a request that it does not know is UNSUPPORTED_VERSION."""

    def __init__(self, answers: dict[type[Request], list[Response]]) -> None:
        self.answers = answers
        self.asked: list[type[Request]] = []

    def ask_coordinator(self, _group: str, _what: str, message: Request, read: Callable[[Any], Any]) -> Any:
        self.asked.append(type(message))
        if type(message) not in self.answers:
            raise ApiError(ErrorCode.UNSUPPORTED_VERSION)
        (answer,) = self.answers[type(message)]
        return read(answer)

    def ask_every_broker(self, message: Request) -> list[Any]:
        return list(self.answers[type(message)])


def describe(answers: dict[type[Request], list[Response]]) -> group_views.GroupView | None:
    return group_views.describe_group(cast("ClusterClient", Brokers(answers)), "g")


MISSING = int(ErrorCode.GROUP_ID_NOT_FOUND)
NO_CONSUMER_GROUP: dict[type[Request], list[Response]] = {
    ConsumerGroupDescribeRequest: [Consumers(groups=[Consumers.DescribedGroup(group_id="g", error_code=MISSING)])]
}
NO_SHARE_GROUP: dict[type[Request], list[Response]] = {
    ShareGroupDescribeRequest: [Shares(groups=[Shares.DescribedGroup(group_id="g", error_code=MISSING)])]
}


def classic(**changes: Any) -> dict[type[Request], list[Response]]:
    values: dict[str, Any] = {"group_id": "g", "group_state": "Stable", **changes}
    return {DescribeGroupsRequest: [Classics(groups=[Classics.DescribedGroup(**values)])]}


def test_a_consumer_group_whose_members_are_on_their_way() -> None:
    def partitions(*indices: int) -> Consumers.Assignment:
        return Consumers.Assignment(
            topic_partitions=[Consumers.TopicPartitions(topic_name="orders", partitions=list(indices))]
        )

    members = [
        Consumers.Member(
            member_id="m1",
            instance_id="i1",
            client_id="c",
            client_host="/h",
            member_epoch=6,
            assignment=partitions(1, 0),
            target_assignment=partitions(0),
            member_type=1,
        ),
        Consumers.Member(
            member_id="m2", member_epoch=7, assignment=partitions(), target_assignment=partitions(1), member_type=0
        ),
    ]
    group = Consumers.DescribedGroup(
        group_id="g",
        group_state="Reconciling",
        group_epoch=7,
        assignment_epoch=7,
        assignor_name="uniform",
        members=members,
    )
    view = describe({ConsumerGroupDescribeRequest: [Consumers(groups=[group])]})
    assert view is not None
    assert (view.type, view.state, view.epoch, view.target_epoch) == ("consumer", "reconciling", 7, 7)
    first, second = view.members
    assert (first.instance_id, first.epoch, first.protocol) == ("i1", 6, "consumer")
    assert first.partitions == (TopicPartition("orders", 0), TopicPartition("orders", 1))
    assert first.target == (TopicPartition("orders", 0),)
    assert (second.protocol, second.partitions, second.target) == ("classic", (), (TopicPartition("orders", 1),))


def test_a_share_group_is_found_where_there_is_no_consumer_group() -> None:
    member = Shares.Member(
        member_id="m1",
        member_epoch=3,
        assignment=Shares.Assignment(
            topic_partitions=[Shares.TopicPartitions(topic_name="jobs", partitions=[0])],
        ),
    )
    group = Shares.DescribedGroup(group_id="g", group_state="Stable", group_epoch=3, members=[member])
    view = describe({**NO_CONSUMER_GROUP, ShareGroupDescribeRequest: [Shares(groups=[group])]})
    assert view is not None
    assert (view.type, view.epoch) == ("share", 3)
    assert (view.members[0].partitions, view.members[0].target) == ((TopicPartition("jobs", 0),), None)


def test_a_classic_group_of_a_broker_that_knows_no_other() -> None:
    assignment = write_assignment({"orders": [1, 0]}, b"\0\3")
    members = [
        Classics.DescribedGroupMember(member_id="m1", member_assignment=assignment),
        Classics.DescribedGroupMember(member_id="connect", member_assignment=b"\0"),
        Classics.DescribedGroupMember(member_id="waiting"),
    ]
    view = describe(classic(protocol_data="range", members=members))
    assert view is not None
    assert (view.type, view.state, view.assignor, view.epoch) == ("classic", "stable", "range", None)
    assert [each.partitions for each in view.members] == [
        (TopicPartition("orders", 0), TopicPartition("orders", 1)),
        (),
        (),
    ]


@pytest.mark.parametrize("missing", [classic(error_code=MISSING, group_state=""), classic(group_state="Dead")])
def test_a_group_that_there_is_not(missing: dict[type[Request], list[Response]]) -> None:
    assert describe({**NO_CONSUMER_GROUP, **NO_SHARE_GROUP, **missing}) is None


def test_other_errors_are_errors() -> None:
    refused = int(ErrorCode.GROUP_AUTHORIZATION_FAILED)
    with pytest.raises(ApiError) as error:
        describe({**NO_CONSUMER_GROUP, **NO_SHARE_GROUP, **classic(error_code=refused)})
    assert error.value.code is ErrorCode.GROUP_AUTHORIZATION_FAILED


def test_a_list_of_several_brokers() -> None:
    listed = ListGroupsResponse.ListedGroup
    brokers = Brokers(
        {
            ListGroupsRequest: [
                ListGroupsResponse(
                    groups=[listed(group_id="b", group_state="PreparingRebalance", group_type="Classic")]
                ),
                ListGroupsResponse(groups=[listed(group_id="a", group_state="Empty"), listed(group_id="c")]),
            ]
        }
    )
    found = group_views.list_groups(cast("ClusterClient", brokers))
    assert [(each.name, each.state, each.type) for each in found] == [
        ("a", "empty", "classic"),
        ("b", "preparing-rebalance", "classic"),
        ("c", "", "classic"),
    ]
