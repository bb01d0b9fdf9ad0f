"""The hand-tuned readers and writers of Produce and Fetch against the declared messages, at every version."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ProtocolError
from millrace.wire import hot
from millrace.wire.codec import decode, encode
from millrace.wire.messages.fetch import FetchRequest, FetchResponse
from millrace.wire.messages.produce import ProduceRequest, ProduceResponse

PRODUCE_VERSIONS = range(3, 14)
FETCH_VERSIONS = range(4, 19)

names = st.text(max_size=20)
ids = st.uuids().filter(lambda value: value.int > 0)
int16s = st.integers(-(2**15), 2**15 - 1)
int32s = st.integers(-(2**31), 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)
blobs = st.binary(max_size=300)


def topic_key(version: int, first_by_id: int, name: str, topic_id: uuid.UUID) -> hot.TopicKey:
    return topic_id.bytes if version >= first_by_id else name


produce_requests = st.builds(
    ProduceRequest,
    transactional_id=st.none() | names,
    acks=int16s,
    timeout_ms=int32s,
    topic_data=st.lists(
        st.builds(
            ProduceRequest.TopicProduceData,
            name=names,
            topic_id=ids,
            partition_data=st.lists(
                st.builds(ProduceRequest.PartitionProduceData, index=int32s, records=st.none() | blobs), max_size=3
            ),
        ),
        max_size=3,
    ),
)


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
@given(request=produce_requests)
@settings(max_examples=40, deadline=None)
def test_a_produce_request_reads_as_declared(version: int, request: ProduceRequest) -> None:
    call = hot.read_produce(version, memoryview(encode(request, version)), 0)
    assert (call.transactional_id, call.acks, call.timeout_ms) == (
        request.transactional_id,
        request.acks,
        request.timeout_ms,
    )
    assert [
        (key, [(item.partition, None if item.records is None else bytes(item.records)) for item in partitions])
        for key, partitions in call.topics
    ] == [
        (
            topic_key(version, 13, topic.name, topic.topic_id),
            [(item.index, item.records) for item in topic.partition_data],
        )
        for topic in request.topic_data
    ]


fetch_requests = st.builds(
    FetchRequest,
    replica_id=int32s,
    max_wait_ms=int32s,
    min_bytes=int32s,
    max_bytes=int32s,
    isolation_level=st.integers(0, 1),
    session_id=int32s,
    session_epoch=int32s,
    topics=st.lists(
        st.builds(
            FetchRequest.FetchTopic,
            topic=names,
            topic_id=ids,
            partitions=st.lists(
                st.builds(
                    FetchRequest.FetchPartition,
                    partition=int32s,
                    current_leader_epoch=int32s,
                    fetch_offset=int64s,
                    last_fetched_epoch=int32s,
                    log_start_offset=int64s,
                    partition_max_bytes=int32s,
                ),
                max_size=3,
            ),
        ),
        max_size=3,
    ),
    forgotten_topics_data=st.lists(
        st.builds(FetchRequest.ForgottenTopic, topic=names, topic_id=ids, partitions=st.lists(int32s, max_size=3)),
        max_size=2,
    ),
    rack_id=names,
)


@pytest.mark.parametrize("version", FETCH_VERSIONS)
@given(request=fetch_requests)
@settings(max_examples=40, deadline=None)
def test_a_fetch_request_reads_as_declared(version: int, request: FetchRequest) -> None:
    if version >= 15:
        request.replica_state = FetchRequest.ReplicaState(replica_id=request.replica_id, replica_epoch=7)
        request.replica_id = -1
    if version < 7:
        request.forgotten_topics_data = []
        request.session_id, request.session_epoch = 0, -1
    if version < 12:
        for topic in request.topics:
            for item in topic.partitions:
                item.last_fetched_epoch = -1
    raw = encode(request, version)
    declared, _ = decode(FetchRequest, version, raw)
    call = hot.read_fetch(version, memoryview(raw), 0)
    assert call.replica_id == (declared.replica_state.replica_id if version >= 15 else declared.replica_id)
    for name in ("max_wait_ms", "min_bytes", "max_bytes", "isolation_level", "session_id", "session_epoch", "rack_id"):
        assert getattr(call, name) == getattr(declared, name), name
    assert call.topics == [
        (
            topic_key(version, 13, topic.topic, topic.topic_id),
            [
                (
                    item.partition,
                    item.current_leader_epoch,
                    item.fetch_offset,
                    item.last_fetched_epoch,
                    item.log_start_offset,
                    item.partition_max_bytes,
                )
                for item in topic.partitions
            ],
        )
        for topic in declared.topics
    ]
    assert call.forgotten == [
        (topic_key(version, 13, topic.topic, topic.topic_id), topic.partitions)
        for topic in declared.forgotten_topics_data
    ]


numbers = st.integers(0, 2**31 - 1)
hints = st.none() | st.builds(
    hot.LeaderHint, numbers, numbers, st.text(max_size=20), numbers, st.none() | st.text(max_size=5)
)
produce_results = st.builds(
    hot.ProduceResult,
    int32s,
    int16s,
    int64s,
    int64s,
    int64s,
    st.none() | st.text(max_size=20),
    hints,
    st.lists(st.tuples(int32s, st.none() | st.text(max_size=20)), max_size=3),
)


def endpoints(cls: Any, results: Iterable[hot.ProduceResult | hot.FetchResult]) -> list[Any]:
    """The brokers that the hints name, once each."""
    named = {result.leader.leader_id: result.leader for result in results if result.leader is not None}
    return [
        cls.NodeEndpoint(node_id=hint.leader_id, host=hint.host, port=hint.port, rack=hint.rack)
        for hint in named.values()
    ]


def current_leader(cls: Any, hint: hot.LeaderHint | None) -> Any:
    if hint is None:
        return cls.LeaderIdAndEpoch()
    return cls.LeaderIdAndEpoch(leader_id=hint.leader_id, leader_epoch=hint.leader_epoch)


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
@given(
    topics=st.lists(st.tuples(names, ids, st.lists(produce_results, max_size=3)), max_size=3),
    correlation_id=int32s,
    throttle_time_ms=int32s,
)
@settings(max_examples=40, deadline=None)
def test_a_produce_response_writes_as_declared(
    version: int,
    topics: list[tuple[str, uuid.UUID, list[hot.ProduceResult]]],
    correlation_id: int,
    throttle_time_ms: int,
) -> None:
    keyed = [(topic_key(version, 13, name, topic_id), results) for name, topic_id, results in topics]
    answer = hot.ThrottledProduce(keyed, throttle_time_ms) if throttle_time_ms else keyed
    raw = b"".join(hot.write_produce(correlation_id, version, answer))
    declared = ProduceResponse(
        throttle_time_ms=throttle_time_ms,
        responses=[
            ProduceResponse.TopicProduceResponse(
                name=name,
                topic_id=topic_id,
                partition_responses=[
                    ProduceResponse.PartitionProduceResponse(
                        index=result.partition,
                        error_code=result.error_code,
                        base_offset=result.base_offset,
                        log_append_time_ms=result.log_append_time_ms,
                        log_start_offset=result.log_start_offset,
                        error_message=result.error_message,
                        record_errors=[
                            ProduceResponse.BatchIndexAndErrorMessage(batch_index=place, batch_index_error_message=text)
                            for place, text in result.record_errors
                        ]
                        if version >= 8
                        else [],
                        **({"current_leader": current_leader(ProduceResponse, result.leader)} if version >= 10 else {}),
                    )
                    for result in results
                ],
            )
            for name, topic_id, results in topics
        ],
    )
    if version >= 10:
        declared.node_endpoints = endpoints(ProduceResponse, (each for _, _, results in topics for each in results))
    assert raw == framed(correlation_id, encode(declared, version), flexible=version >= 9)


fetch_results = st.builds(
    hot.FetchResult,
    int32s,
    int16s,
    int64s,
    int64s,
    int64s,
    blobs,
    st.integers(-1, 2**31 - 1),
    st.none() | st.tuples(numbers, st.integers(0, 2**63 - 1)),
    hints,
    st.none() | st.lists(st.tuples(int64s, int64s), max_size=3),
)


@pytest.mark.parametrize("version", FETCH_VERSIONS)
@given(
    topics=st.lists(st.tuples(names, ids, st.lists(fetch_results, max_size=3)), max_size=3),
    correlation_id=int32s,
    error_code=int16s,
    session_id=int32s,
    throttle_time_ms=int32s,
)
@settings(max_examples=40, deadline=None)
def test_a_fetch_response_writes_as_declared(
    version: int,
    topics: list[tuple[str, uuid.UUID, list[hot.FetchResult]]],
    correlation_id: int,
    error_code: int,
    session_id: int,
    throttle_time_ms: int,
) -> None:
    if version < 7:
        error_code = session_id = 0
    keyed = [(topic_key(version, 13, name, topic_id), results) for name, topic_id, results in topics]
    reply = hot.FetchReply(error_code, session_id, keyed, throttle_time_ms)
    raw = b"".join(hot.write_fetch(correlation_id, version, reply))
    declared = FetchResponse(
        throttle_time_ms=throttle_time_ms,
        error_code=error_code,
        session_id=session_id,
        responses=[
            FetchResponse.FetchableTopicResponse(
                topic=name,
                topic_id=topic_id,
                partitions=[
                    FetchResponse.PartitionData(
                        partition_index=result.partition,
                        error_code=result.error_code,
                        high_watermark=result.high_watermark,
                        last_stable_offset=result.last_stable_offset,
                        log_start_offset=result.log_start_offset,
                        aborted_transactions=None
                        if result.aborted is None
                        else [
                            FetchResponse.AbortedTransaction(producer_id=producer_id, first_offset=first_offset)
                            for producer_id, first_offset in result.aborted
                        ],
                        records=bytes(result.records),
                        **(fetch_hints(result) if version >= 12 else {}),
                        **({"preferred_read_replica": result.preferred_read_replica} if version >= 11 else {}),
                    )
                    for result in results
                ],
            )
            for name, topic_id, results in topics
        ],
    )
    if version >= 16:
        declared.node_endpoints = endpoints(FetchResponse, (each for _, _, results in topics for each in results))
    assert raw == framed(correlation_id, encode(declared, version), flexible=version >= 12)


def fetch_hints(result: hot.FetchResult) -> dict[str, Any]:
    diverging = FetchResponse.EpochEndOffset()
    if result.diverging is not None:
        diverging = FetchResponse.EpochEndOffset(epoch=result.diverging[0], end_offset=result.diverging[1])
    return {"current_leader": current_leader(FetchResponse, result.leader), "diverging_epoch": diverging}


def framed(correlation_id: int, body: bytes, *, flexible: bool) -> bytes:
    payload = correlation_id.to_bytes(4, "big", signed=True) + (b"\0" if flexible else b"") + body
    return len(payload).to_bytes(4, "big") + payload


@pytest.mark.parametrize("version", [3, 8, 9, 12, 13])
@given(request=produce_requests, data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_produce_request_is_a_protocol_error_or_a_request(
    version: int, request: ProduceRequest, data: st.DataObject
) -> None:
    check_damage(hot.read_produce, encode(request, version), version, data)


@pytest.mark.parametrize("version", [4, 6, 11, 12, 13, 18])
@given(request=fetch_requests, data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_fetch_request_is_a_protocol_error_or_a_request(
    version: int, request: FetchRequest, data: st.DataObject
) -> None:
    if version < 7:
        request.forgotten_topics_data = []
    if version >= 15:
        request.replica_id = -1
    if version < 12:
        for topic in request.topics:
            for item in topic.partitions:
                item.last_fetched_epoch = -1
    check_damage(hot.read_fetch, encode(request, version), version, data)


def check_damage(read, raw: bytes, version: int, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    for candidate in (bytes(damaged), bytes(damaged[:cut]), raw[:cut], raw + b"\0"):
        try:
            read(version, memoryview(candidate), 0)
        except ProtocolError:
            continue
