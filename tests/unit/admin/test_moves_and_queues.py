"""How far a move is, by what lies on disk; queues where brokers know none."""

from __future__ import annotations

import pytest

from millrace.admin import queues
from millrace.admin.moves import Moving
from millrace.client.cluster import ClusterClient
from millrace.client.settings import ClientSettings
from millrace.model import TopicPartition
from millrace.wire.keys import ApiKey
from millrace.wire.messages.groups import ListGroupsResponse
from support.fake_broker import FakeBroker, metadata

PLACE = TopicPartition("orders", 3)


@pytest.mark.parametrize(
    ("isr", "sizes", "expected"),
    [
        ((1,), {}, (0, 0)),
        ((1,), {1: 1000}, (0, 2000)),
        ((1,), {1: 1000, 2: 400, 3: 100}, (500, 2000)),
        ((1,), {1: 1000, 2: 1200}, (1000, 2000)),
        ((1, 2), {1: 1000, 2: 900, 3: 100}, (1100, 2000)),
    ],
    ids=["nothing known", "not begun", "under way", "longer for a moment", "one has arrived"],
)
def test_progress_of_a_move(isr: tuple[int, ...], sizes: dict[int, int], expected: tuple[int, int]) -> None:
    moving = Moving(PLACE, staying=(1,), adding=(2, 3), removing=(), isr=isr)
    other = {(TopicPartition("orders", 2), 2): 5000}
    assert moving.progress({(PLACE, broker): size for broker, size in sizes.items()} | other) == expected


def test_brokers_that_know_no_types_have_no_queues() -> None:
    listed = ListGroupsResponse.ListedGroup(group_id="g", protocol_type="consumer", group_state="Stable")
    with FakeBroker({ApiKey.LIST_GROUPS: lambda _: ListGroupsResponse(groups=[listed])}) as broker:
        broker.answers[ApiKey.METADATA] = lambda _: metadata([broker], {})
        broker.max_versions[ApiKey.LIST_GROUPS] = 4
        settings = ClientSettings.from_properties({"bootstrap.servers": broker.bootstrap})
        with ClusterClient(settings) as client:
            assert queues.list_queues(client) == []
