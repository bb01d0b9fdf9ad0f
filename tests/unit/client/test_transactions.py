"""Transactions of a client, against a scripted coordinator: versions, retries, and what may not be asked twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from millrace.client import transactions
from millrace.client.cluster import ClusterClient
from millrace.client.producing import BatchProducer
from millrace.client.settings import ClientSettings
from millrace.client.transactions import Transaction
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.records.decode import Record
from millrace.records.encode import encode_batch
from millrace.wire.keys import ApiKey
from millrace.wire.messages.groups import FindCoordinatorResponse
from millrace.wire.messages.produce import ProduceResponse
from millrace.wire.messages.producers import InitProducerIdResponse
from millrace.wire.messages.transactions import AddPartitionsToTxnResponse, EndTxnResponse
from support.fake_broker import HOST, FakeBroker, metadata

T0 = TopicPartition("t", 0)


class Coordinators:
    """Two brokers; ids coordinate where `owner` says. Answers of `codes` come first, one per request of their kind."""

    def __init__(self, stack: ExitStack) -> None:
        self.brokers = [stack.enter_context(FakeBroker()), stack.enter_context(FakeBroker())]
        self.owner: dict[str, int] = {}
        self.codes: dict[ApiKey, list[Any]] = {}
        self.begun: list[str] = []
        self.ended: list[tuple[int, str, bool]] = []
        for number, broker in enumerate(self.brokers):
            broker.answers[ApiKey.METADATA] = lambda _: metadata(self.brokers, {"t": [1, 1]})
            broker.answers[ApiKey.FIND_COORDINATOR] = self.find
            broker.answers[ApiKey.INIT_PRODUCER_ID] = self.init
            broker.answers[ApiKey.ADD_PARTITIONS_TO_TXN] = self.add
            broker.answers[ApiKey.END_TXN] = lambda request, number=number: self.end(number, request)
            broker.answers[ApiKey.PRODUCE] = self.produce

    def client(self, **more: str) -> ClusterClient:
        named = {name.replace("_", "."): value for name, value in more.items()}
        properties = {"bootstrap.servers": self.brokers[0].bootstrap, "retry.backoff.ms": "1", **named}
        return ClusterClient(ClientSettings.from_properties(properties))

    def asked(self, key: ApiKey) -> list[Any]:
        return [request for broker in self.brokers for request in broker.asked(key)]

    def find(self, request: Any) -> Any:
        assert request.key_type == 1
        places = [(name, self.brokers[self.owner.get(name, 0)].port) for name in request.coordinator_keys]
        if not places:
            return FindCoordinatorResponse(host=HOST, port=self.brokers[self.owner.get(request.key, 0)].port)
        return FindCoordinatorResponse(
            coordinators=[FindCoordinatorResponse.Coordinator(key=name, host=HOST, port=port) for name, port in places]
        )

    def init(self, request: Any) -> Any:
        code = self.next_code(ApiKey.INIT_PRODUCER_ID)
        if code is ConnectionError:
            return code
        if not code:
            self.begun.append(request.transactional_id)
        return InitProducerIdResponse(error_code=code, producer_id=7, producer_epoch=3)

    def add(self, request: Any) -> Any:
        code = self.next_code(ApiKey.ADD_PARTITIONS_TO_TXN)
        result = AddPartitionsToTxnResponse.AddPartitionsToTxnPartitionResult
        return AddPartitionsToTxnResponse(
            results_by_topic_v3_and_below=[
                AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult(
                    name=topic.name,
                    results_by_partition=[
                        result(partition_index=index, partition_error_code=code) for index in topic.partitions
                    ],
                )
                for topic in request.v3_and_below_topics
            ]
        )

    def end(self, number: int, request: Any) -> Any:
        code = self.next_code(ApiKey.END_TXN)
        if code is ConnectionError:
            return code
        if not code:
            self.ended.append((number, request.transactional_id, request.committed))
        return EndTxnResponse(error_code=code)

    def produce(self, request: Any) -> Any:
        answers = [
            ProduceResponse.PartitionProduceResponse(index=each.index, base_offset=0)
            for each in request.topic_data[0].partition_data
        ]
        return ProduceResponse(responses=[ProduceResponse.TopicProduceResponse(name="t", partition_responses=answers)])

    def next_code(self, key: ApiKey) -> Any:
        codes = self.codes.get(key, [])
        return codes.pop(0) if codes else 0


@pytest.fixture
def coordinators() -> Iterator[Coordinators]:
    with ExitStack() as stack:
        yield Coordinators(stack)


def never() -> str:
    raise AssertionError("no other id is wanted")


def test_begin_waits_for_the_end_of_the_one_before(coordinators: Coordinators) -> None:
    coordinators.codes[ApiKey.INIT_PRODUCER_ID] = [
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.CONCURRENT_TRANSACTIONS,
    ]
    with coordinators.client() as client:
        assert transactions.begin(client, "a", 1000, never) == Transaction("a", 7, 3)
    requests = coordinators.asked(ApiKey.INIT_PRODUCER_ID)
    assert [each.transaction_timeout_ms for each in requests] == [1000] * 3
    assert len(coordinators.asked(ApiKey.FIND_COORDINATOR)) == 2  # a coordinator that is busy is still the one


def test_a_begin_without_an_answer_is_never_repeated_under_its_id(coordinators: Coordinators) -> None:
    coordinators.codes[ApiKey.INIT_PRODUCER_ID] = [ConnectionError, ConnectionError]
    names = iter(["b", "c"])
    with coordinators.client() as client:
        assert transactions.begin(client, "a", 1000, lambda: next(names)).transactional_id == "c"
    assert [each.transactional_id for each in coordinators.asked(ApiKey.INIT_PRODUCER_ID)] == ["a", "b", "c"]


def test_all_are_ended_by_their_coordinators_and_again_until_each_has_answered(coordinators: Coordinators) -> None:
    coordinators.owner = {"b": 1, "d": 1}
    coordinators.codes[ApiKey.END_TXN] = [ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.NOT_COORDINATOR, ConnectionError]
    wanted = [Transaction(name, 1, 0) for name in "abcd"]
    with coordinators.client() as client:
        assert transactions.end(client, wanted, commit=True) == {}
    assert sorted(set(coordinators.ended)) == [(0, "a", True), (0, "c", True), (1, "b", True), (1, "d", True)]
    together = [each for each in coordinators.asked(ApiKey.FIND_COORDINATOR) if each.coordinator_keys]
    assert together[0].coordinator_keys == ["a", "b", "c", "d"]


def test_who_refuses_is_told_and_the_others_are_ended(coordinators: Coordinators) -> None:
    coordinators.codes[ApiKey.END_TXN] = [ErrorCode.PRODUCER_FENCED]
    wanted = [Transaction(name, 1, 0) for name in "ab"]
    with coordinators.client() as client:
        refused = transactions.end(client, wanted, commit=False)
    assert {each: error.code for each, error in refused.items()} == {wanted[0]: ErrorCode.PRODUCER_FENCED}
    assert coordinators.ended == [(0, "b", False)]


def test_brokers_that_find_one_coordinator_at_a_time(coordinators: Coordinators) -> None:
    for broker in coordinators.brokers:
        broker.max_versions[ApiKey.FIND_COORDINATOR] = 3
    coordinators.owner = {"b": 1}
    with coordinators.client() as client:
        assert transactions.end(client, [Transaction(name, 1, 0) for name in "ab"], commit=True) == {}
    assert sorted(coordinators.ended) == [(0, "a", True), (1, "b", True)]


def test_an_end_that_nobody_answers_is_an_error(coordinators: Coordinators) -> None:
    coordinators.codes[ApiKey.END_TXN] = [ErrorCode.COORDINATOR_NOT_AVAILABLE] * 10_000
    with coordinators.client(default_api_timeout_ms="50") as client, pytest.raises(ApiError, match=r"'a': gave up"):
        transactions.end(client, [Transaction("a", 1, 0)], commit=True)


def test_the_classic_protocol_is_spoken_with_brokers_that_know_the_newer_one(coordinators: Coordinators) -> None:
    with coordinators.client() as client:
        transaction = transactions.begin(client, "a", 1000, never)
        producer = BatchProducer(client, transaction=transaction)
        for number in range(2):
            batch = encode_batch(
                [Record(0, 1, None, b"v")],
                producer_id=producer.producer_id,
                producer_epoch=producer.producer_epoch,
                base_sequence=producer.next_sequence(T0),
                transactional=True,
            )
            assert producer.next_sequence(T0) == number
            producer.add(T0, batch, 1)
            producer.flush()
    (added,) = coordinators.asked(ApiKey.ADD_PARTITIONS_TO_TXN)  # once for each partition
    assert (added.v3_and_below_transactional_id, added.v3_and_below_producer_epoch) == ("a", 3)
    keys = [key for key, _ in coordinators.brokers[0].seen]
    assert keys.index(ApiKey.ADD_PARTITIONS_TO_TXN) < keys.index(ApiKey.PRODUCE)
    produced = coordinators.asked(ApiKey.PRODUCE)
    # From version 13 on topics have ids, and 12 would let the broker end the transaction by the rules of version 2.
    assert [(each.transactional_id, each.topic_data[0].name) for each in produced] == [("a", "t")] * 2


def test_a_transaction_that_is_not_open_any_more_is_found(coordinators: Coordinators) -> None:
    coordinators.codes[ApiKey.ADD_PARTITIONS_TO_TXN] = [ErrorCode.INVALID_PRODUCER_EPOCH]
    one, other = Transaction("a", 1, 0), Transaction("b", 2, 0)
    with coordinators.client() as client:
        ended = transactions.not_open(client, {one: [T0], other: [T0]})
        assert list(ended) == [one]
        coordinators.codes[ApiKey.ADD_PARTITIONS_TO_TXN] = [ErrorCode.INVALID_PRODUCER_EPOCH]
        with pytest.raises(ApiError, match="transaction 'a'"):
            transactions.add_partitions(client, one, [T0])


def test_what_nobody_knows_of_is_given_up_without_a_word(coordinators: Coordinators) -> None:
    coordinators.codes[ApiKey.END_TXN] = [ConnectionError]
    coordinators.codes[ApiKey.INIT_PRODUCER_ID] = [ErrorCode.CONCURRENT_TRANSACTIONS]
    with coordinators.client() as client:
        transactions.abandon(client, Transaction("a", 1, 0))
        transactions.shut_out(client, ["b", "c"])
    assert coordinators.begun == ["c"]


def test_brokers_without_transactions(coordinators: Coordinators) -> None:
    with coordinators.client() as client:
        assert transactions.are_served(client)
    for broker in coordinators.brokers:
        del broker.answers[ApiKey.END_TXN]
    with coordinators.client() as client:
        assert not transactions.are_served(client)
