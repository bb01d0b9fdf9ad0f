"""What an overview makes of its parts, and brokers that answer as old ones do, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from millrace.admin import overview
from millrace.admin.overview import Committed, GroupRow, TopicLag
from millrace.admin.words import Sum
from millrace.client.cluster import ClusterClient
from millrace.client.settings import ClientSettings
from millrace.errors import ErrorCode
from millrace.wire.keys import ApiKey
from millrace.wire.messages.group_offsets import OffsetFetchRequest, OffsetFetchResponse
from millrace.wire.messages.groups import ListGroupsResponse
from support.fake_broker import HOST, Answer, FakeBroker, metadata

ENDS: overview.Offsets = {"orders": (10, 20), "silent": (None,), "empty": (0,)}
COMMITS: overview.Commits = {
    "all": (Committed("orders", 0, 10), Committed("orders", 1, 20)),
    "late": (Committed("orders", 0, 4), Committed("orders", 1, 20)),
    "ahead": (Committed("orders", 0, 12),),
    "gone": (Committed("deleted", 0, 5),),
    "unsure": (Committed("orders", 1, 15), Committed("silent", 0, 3)),
    "grown": (Committed("empty", 3, 0),),
    "queue": (Committed("orders", 0, 2, told_lag=3),),
    "new": (),
}


def test_lags_of_groups() -> None:
    assert overview.group_lags(COMMITS, ENDS) == {
        "all": Sum(0, complete=True),
        "late": Sum(6, complete=True),
        "ahead": Sum(0, complete=True),
        "gone": Sum(0, complete=True),
        "unsure": Sum(5, complete=False),
        "grown": Sum(0, complete=False),
        "queue": Sum(3, complete=True),
        "new": Sum(0, complete=True),
    }


def test_lags_of_topics() -> None:
    lags = overview.topic_lags(COMMITS, ENDS)
    assert lags["orders"] == TopicLag(groups=5, largest=6, total=14)
    assert lags["silent"] == TopicLag(groups=1, largest=0, total=0)


def test_records_between_offsets() -> None:
    starts = {"orders": (2, 20), "silent": (0,)}
    assert overview.records(starts, ENDS, "orders") == Sum(8, complete=True)
    assert overview.records(starts, ENDS, "silent") == Sum(0, complete=False)
    assert overview.records(starts, ENDS, "nobody asked") == Sum(0, complete=False)


@contextmanager
def client_of(broker: FakeBroker) -> Iterator[ClusterClient]:
    settings = ClientSettings.from_properties({"bootstrap.servers": broker.bootstrap, "request.timeout.ms": "2000"})
    with ClusterClient(settings) as client:
        client.learn_brokers({1: (HOST, broker.port)})
        yield client


def single(request: OffsetFetchRequest) -> OffsetFetchResponse:
    """As a broker before Kafka 3.0 answers."""
    if request.group_id == "refused":
        return OffsetFetchResponse(error_code=int(ErrorCode.GROUP_AUTHORIZATION_FAILED))
    each = OffsetFetchResponse.OffsetFetchResponsePartition(partition_index=1, committed_offset=7)
    return OffsetFetchResponse(topics=[OffsetFetchResponse.OffsetFetchResponseTopic(name="orders", partitions=[each])])


@pytest.mark.parametrize("count", [1, 120])
def test_old_brokers_are_asked_for_one_group_at_a_time(count: int) -> None:
    rows = [GroupRow(f"group-{number}", "classic", "empty", 1) for number in range(count)]
    rows += [GroupRow("refused", "classic", "empty", 1), GroupRow("queue", "share", "empty", 1)]
    answers: dict[ApiKey, Answer] = {ApiKey.OFFSET_FETCH: single}
    with FakeBroker(answers) as broker, client_of(broker) as client:
        broker.max_versions[ApiKey.OFFSET_FETCH] = 7
        commits = overview.read_commits(client, rows)
    assert commits == {row.name: (Committed("orders", 1, 7),) for row in rows[:count]}


def test_who_does_not_answer_is_told_and_asked_once() -> None:
    asked = []

    def hang_up(request: object) -> type[ConnectionError]:
        asked.append(request)
        return ConnectionError

    rows = [GroupRow(f"group-{number}", "classic", "empty", 1) for number in range(2 * overview.GROUPS_AT_ONCE)]
    answers: dict[ApiKey, Answer] = {ApiKey.LIST_GROUPS: hang_up, ApiKey.OFFSET_FETCH: hang_up}
    with FakeBroker(answers) as broker:
        broker.answers[ApiKey.METADATA] = lambda _: metadata([broker], {})
        with client_of(broker) as client:
            topology = overview.read_topology(client)
            assert overview.read_groups(client, topology) == overview.Groups((), silent=(1,))
            assert overview.read_commits(client, rows) == {}
    assert len(asked) == 2


def test_groups_of_old_brokers_have_no_type() -> None:
    listed = ListGroupsResponse.ListedGroup(group_id="g", protocol_type="consumer", group_state="PreparingRebalance")
    answers: dict[ApiKey, Answer] = {ApiKey.LIST_GROUPS: lambda _: ListGroupsResponse(groups=[listed])}
    with FakeBroker(answers) as broker:
        broker.max_versions[ApiKey.LIST_GROUPS] = 4
        broker.answers[ApiKey.METADATA] = lambda _: metadata([broker], {})
        with client_of(broker) as client:
            found = overview.read_groups(client, overview.read_topology(client))
    assert found.rows == (GroupRow("g", "classic", "preparing-rebalance", 1),)
