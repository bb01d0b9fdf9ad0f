"""`millrace transactions` against scripted brokers, one of which coordinates and one of which leads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from millrace.admin.transactions import ProducerView, TransactionView, hanging
from millrace.cli.root import run
from millrace.clock import SystemClock
from millrace.errors import ErrorCode
from millrace.model import TopicPartition
from millrace.wire.keys import ApiKey
from millrace.wire.messages.groups import FindCoordinatorRequest, FindCoordinatorResponse
from millrace.wire.messages.producers import DescribeProducersResponse, InitProducerIdResponse
from millrace.wire.messages.transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
    WriteTxnMarkersResponse,
)
from millrace.wire.schema import Response
from support.fake_broker import HOST, FakeBroker, metadata

HOUR_MS = 3_600_000
ORDERS = TopicPartition("orders", 0)


class Scene:
    """Broker 1 coordinates `billing-1` (producer 7, ongoing in orders-0); broker 2 leads orders-0 and orders-1.

    In orders-0 producer 7 has a transaction from offset 40 on and producer 8, whom no coordinator knows, one from 12.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.now_ms = SystemClock().wall_ms()
        self.coordinator, self.leader = (stack.enter_context(FakeBroker()) for _ in range(2))
        self.marker_error = ErrorCode.NONE
        self.fencing = [ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.NONE]
        shared: dict[ApiKey, Callable[[Any], Response]] = {
            ApiKey.METADATA: lambda _: metadata([self.coordinator, self.leader], {"orders": [2, 2]}),
            ApiKey.FIND_COORDINATOR: self._find,
        }
        self.coordinator.answers = {
            **shared,
            ApiKey.LIST_TRANSACTIONS: self._list,
            ApiKey.DESCRIBE_TRANSACTIONS: self._describe,
            ApiKey.INIT_PRODUCER_ID: self._fence,
        }
        self.leader.answers = {
            **shared,
            ApiKey.LIST_TRANSACTIONS: lambda _: ListTransactionsResponse(),
            ApiKey.DESCRIBE_PRODUCERS: lambda _: self._producers(),
            ApiKey.WRITE_TXN_MARKERS: lambda _: self._marked(),
        }

    def _find(self, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
        assert request.key_type == 1, "a coordinator of transactions"
        return FindCoordinatorResponse(node_id=1, host=HOST, port=self.coordinator.port)

    def _list(self, request: ListTransactionsRequest) -> ListTransactionsResponse:
        wanted = request.producer_id_filters
        found = [(7, "billing-1", "Ongoing"), (9, "audit", "CompleteCommit")]
        return ListTransactionsResponse(
            transaction_states=[
                ListTransactionsResponse.TransactionState(
                    transactional_id=name, producer_id=producer_id, transaction_state=state
                )
                for producer_id, name, state in found
                if not wanted or producer_id in wanted
            ]
        )

    def _describe(self, request: DescribeTransactionsRequest) -> DescribeTransactionsResponse:
        cls = DescribeTransactionsResponse
        (name,) = request.transactional_ids
        if name != "billing-1":
            unknown = cls.TransactionState(transactional_id=name, error_code=ErrorCode.TRANSACTIONAL_ID_NOT_FOUND)
            return cls(transaction_states=[unknown])
        return cls(
            transaction_states=[
                cls.TransactionState(
                    transactional_id=name,
                    transaction_state="Ongoing",
                    transaction_timeout_ms=60_000,
                    transaction_start_time_ms=self.now_ms - HOUR_MS,
                    producer_id=7,
                    producer_epoch=3,
                    topics=[cls.TopicData(topic="orders", partitions=[0])],
                )
            ]
        )

    def _producers(self) -> DescribeProducersResponse:
        cls = DescribeProducersResponse
        old_ms = self.now_ms - HOUR_MS
        producers = [
            cls.ProducerState(producer_id=7, producer_epoch=3, last_timestamp=old_ms, current_txn_start_offset=40),
            cls.ProducerState(
                producer_id=8,
                producer_epoch=1,
                coordinator_epoch=-1,
                last_timestamp=old_ms,
                current_txn_start_offset=12,
            ),
            cls.ProducerState(producer_id=9, producer_epoch=0, last_timestamp=old_ms),
        ]
        partitions = [
            cls.PartitionResponse(partition_index=0, active_producers=producers),
            cls.PartitionResponse(partition_index=1),
        ]
        return cls(topics=[cls.TopicResponse(name="orders", partitions=partitions)])

    def _marked(self) -> WriteTxnMarkersResponse:
        cls = WriteTxnMarkersResponse
        partition = cls.WritableTxnMarkerPartitionResult(partition_index=0, error_code=self.marker_error)
        topic = cls.WritableTxnMarkerTopicResult(name="orders", partitions=[partition])
        return cls(markers=[cls.WritableTxnMarkerResult(producer_id=8, topics=[topic])])

    def _fence(self, _: Any) -> InitProducerIdResponse:
        return InitProducerIdResponse(error_code=self.fencing.pop(0), producer_id=7, producer_epoch=4)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with ExitStack() as stack:
        made = Scene(stack)
        monkeypatch.setenv("MILLRACE_BOOTSTRAP", made.leader.bootstrap)
        yield made


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def show(*words: str) -> Any:
        assert run(["transactions", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return show


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def refuse(*words: str, code: int = 1) -> str:
        assert run(["transactions", *words]) == code
        return capsys.readouterr().err

    return refuse


def test_every_coordinator_is_asked_for_its_transactions(scene: Scene, shown: Callable[..., Any]) -> None:
    assert shown("list") == [
        {"transactional_id": "audit", "coordinator": 1, "producer_id": 9, "state": "complete-commit"},
        {"transactional_id": "billing-1", "coordinator": 1, "producer_id": 7, "state": "ongoing"},
    ]
    assert [each["transactional_id"] for each in shown("list", "bill*")] == ["billing-1"]
    assert scene.leader.asked(ApiKey.LIST_TRANSACTIONS), "the other broker, too"


@pytest.mark.usefixtures("scene")
def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["transactions", "list", "billing-*"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["billing-1", "1", "7", "ongoing"]
    assert run(["transactions", "describe", "billing-1"]) == 0
    title, _, row = capsys.readouterr().out.splitlines()
    assert title == "billing-1  state=ongoing producer=7 epoch=3 timeout=1m running=1h"
    assert row.split() == ["orders", "0"]


def test_filters_go_to_the_brokers(scene: Scene, shown: Callable[..., Any]) -> None:
    filters = ("--state", "prepare-abort", "--state", "Ongoing", "--older-than", "90s", "--producer-id", "7")
    assert [each["producer_id"] for each in shown("list", *filters)] == [7]
    (request,) = scene.coordinator.asked(ApiKey.LIST_TRANSACTIONS)
    assert request.state_filters == ["PrepareAbort", "Ongoing"]
    assert (request.duration_filter, request.producer_id_filters) == (90_000, [7])


@pytest.mark.usefixtures("scene")
def test_what_makes_no_sense_is_refused(refused: Callable[..., str]) -> None:
    assert "--state is empty, ongoing" in refused("list", "--state", "open", code=2)
    assert "'soon' is no duration" in refused("list", "--older-than", "soon", code=2)
    assert "either --start-offset or --producer-id" in refused("abort", "orders", "-p", "0", code=2)
    both = ("--start-offset", "12", "--producer-epoch", "1")
    assert "--producer-epoch needs --producer-id" in refused("abort", "orders", "-p", "0", *both, code=2)
    assert "topic 'orders' has no partition 5" in refused("describe-producers", "orders", "-p", "5")
    assert "there is no topic 'order'; did you mean 'orders'?" in refused("find-hanging", "order")
    assert "--partition needs a topic" in refused("find-hanging", "-p", "0", code=2)


def test_a_transaction_is_described_by_its_coordinator(
    scene: Scene, shown: Callable[..., Any], refused: Callable[..., str]
) -> None:
    (described,) = shown("describe", "billing-1")
    assert described["running_ms"] >= HOUR_MS
    assert (described["state"], described["producer_epoch"], described["timeout_ms"]) == ("ongoing", 3, 60_000)
    assert described["partitions"] == [{"topic": "orders", "partition": 0}]
    assert "there is no transactional id 'nobody'" in refused("describe", "nobody")
    assert scene.leader.asked(ApiKey.DESCRIBE_TRANSACTIONS) == []


@pytest.mark.usefixtures("scene")
def test_producers_of_a_partition(shown: Callable[..., Any]) -> None:
    rows = shown("describe-producers", "orders")
    assert [(row["producer_id"], row["start_offset"]) for row in rows] == [(7, 40), (8, 12), (9, None)]
    assert rows[1]["coordinator_epoch"] is None


@pytest.mark.usefixtures("scene")
def test_what_no_coordinator_knows_hangs(shown: Callable[..., Any]) -> None:
    (row,) = shown("find-hanging")
    assert (row["topic"], row["partition"], row["producer_id"], row["start_offset"]) == ("orders", 0, 8, 12)
    assert shown("find-hanging", "orders", "--older-than", "2h") == []


def test_a_hanging_transaction_is_aborted_by_the_leader(scene: Scene, shown: Callable[..., Any]) -> None:
    done = shown("abort", "orders", "-p", "0", "--start-offset", "12", "--yes")
    assert (done["result"], done["producer_id"]) == ("aborted", 8)
    (request,) = scene.leader.asked(ApiKey.WRITE_TXN_MARKERS)
    (marker,) = request.markers
    assert (marker.producer_id, marker.producer_epoch, marker.transaction_result) == (8, 1, False)
    assert marker.coordinator_epoch == 0, "which is not above any, where the partition has none"
    assert [(topic.name, topic.partition_indexes) for topic in marker.topics] == [("orders", [0])]


def test_abort_by_producer_takes_what_it_is_told(scene: Scene, shown: Callable[..., Any]) -> None:
    shown("abort", "orders", "-p", "0", "--producer-id", "8", "--yes")
    epochs = ("--producer-epoch", "5", "--coordinator-epoch", "2")
    shown("abort", "orders", "-p", "0", "--producer-id", "8", *epochs, "--yes")
    markers = [request.markers[0] for request in scene.leader.asked(ApiKey.WRITE_TXN_MARKERS)]
    assert [(marker.producer_epoch, marker.coordinator_epoch) for marker in markers] == [(1, 0), (5, 2)]


def test_what_a_coordinator_has_is_not_torn(
    scene: Scene, shown: Callable[..., Any], refused: Callable[..., str]
) -> None:
    words = ("abort", "orders", "-p", "0", "--start-offset", "40", "--yes")
    assert "the coordinator of 'billing-1' has it as ongoing" in refused(*words)
    assert scene.leader.asked(ApiKey.WRITE_TXN_MARKERS) == []
    assert shown(*words, "--force")["producer_id"] == 7


def test_nothing_is_aborted_without_a_word(scene: Scene, refused: Callable[..., str]) -> None:
    assert "say --yes" in refused("abort", "orders", "-p", "0", "--start-offset", "12")
    assert "say --yes" in refused("terminate", "billing-1")
    assert "no open transaction beginning at offset 13" in refused(
        "abort", "orders", "-p", "0", "--start-offset", "13", "--yes"
    )
    assert scene.leader.asked(ApiKey.WRITE_TXN_MARKERS) == scene.coordinator.asked(ApiKey.INIT_PRODUCER_ID) == []


def test_a_refusal_of_the_leader_is_told(scene: Scene, refused: Callable[..., str]) -> None:
    scene.marker_error = ErrorCode.INVALID_PRODUCER_EPOCH
    told = refused("abort", "orders", "-p", "0", "--start-offset", "12", "--yes")
    assert "INVALID_PRODUCER_EPOCH" in told and "orders-0" in told


def test_terminate_waits_until_the_coordinator_has_ended_it(scene: Scene, shown: Callable[..., Any]) -> None:
    (done,) = shown("terminate", "billing-1", "--yes")
    assert done == {
        "transactional_id": "billing-1", "result": "terminated", "producer_id": 7, "producer_epoch": 4
    }  # fmt: skip
    asked = scene.coordinator.asked(ApiKey.INIT_PRODUCER_ID)
    assert len(asked) == 2, "the first time the coordinator only began to abort"
    assert (asked[0].transactional_id, asked[0].transaction_timeout_ms, asked[0].producer_id) == (
        "billing-1",
        60_000,
        -1,
    )


def test_terminate_makes_no_new_id(scene: Scene, refused: Callable[..., str]) -> None:
    assert "there is no transactional id 'nobody'" in refused("terminate", "nobody", "--yes")
    assert scene.coordinator.asked(ApiKey.INIT_PRODUCER_ID) == []


def test_hanging_is_decided_by_partition_and_age() -> None:
    def producer(start: int | None, at_ms: int, partition: TopicPartition = ORDERS) -> ProducerView:
        return ProducerView(partition, 7, 0, None, 0, at_ms, start)

    owner = TransactionView("id", 7, 0, "ongoing", 60_000, 0, (ORDERS,))
    elsewhere = producer(1, 0, TopicPartition("orders", 1))
    found = hanging([producer(1, 0), elsewhere, producer(None, 0)], {7: owner}, now_ms=HOUR_MS, older_than_ms=60_000)
    assert found == [elsewhere], "its coordinator will end the first, and the last has nothing open"
    assert hanging([producer(1, HOUR_MS - 60_000)], {}, now_ms=HOUR_MS, older_than_ms=60_000) == []
    assert len(hanging([producer(1, HOUR_MS - 60_001)], {}, now_ms=HOUR_MS, older_than_ms=60_000)) == 1
