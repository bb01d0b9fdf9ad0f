"""Bad input, record batches: headers that lie, records that do not fit, and who may write what.

The broker vouches for a batch's header and CRC. It looks at the records inside only where it must: on compacted topics
and where it compresses again. Elsewhere a batch with a valid CRC is stored as it came, so nonsense inside it is allowed
to be accepted, but it must do no harm then or later, when the broker looks for a timestamp in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.errors import ErrorCode
from millrace.records.batch import CRC_START, HEADER_BYTES, BatchHeader, read_header, with_crc
from millrace.records.compression import Codec, compress
from millrace.records.encode import Header, Record, encode_batch
from millrace.wire.messages.offsets import ListOffsetsRequest
from millrace.wire.messages.produce import ProduceRequest
from millrace.wire.primitives import uvarint, varint
from support.raw import RawClient, WatchedBroker, batch, error_codes, produce_request

E = ErrorCode
INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1
DAMAGED = {E.CORRUPT_MESSAGE, E.INVALID_RECORD}

PLAIN, COMPACTED, RECOMPRESSED, STAMPED = "plain", "compacted", "recompressed", "stamped"
VALIDATED = "validated"
TOPICS = {
    PLAIN: {},
    COMPACTED: {"cleanup.policy": "compact"},
    VALIDATED: {"validate.records": "true"},
    RECOMPRESSED: {"compression.type": "gzip"},
    STAMPED: {"message.timestamp.type": "LogAppendTime"},
}


@pytest.fixture(scope="module")
def broker() -> Iterator[WatchedBroker]:
    with WatchedBroker() as running:
        with running.connect() as client:
            for name, config in TOPICS.items():
                client.create_topic(name, config=config)
        yield running


def altered(*values: bytes, payload: bytes | None = None, **fields: Any) -> bytes:
    """A batch with some header fields changed and a CRC that fits all the same."""
    sound = batch(*values)
    header = read_header(sound)._replace(**fields)
    return with_payload(
        header, sound[HEADER_BYTES:] if payload is None else payload, keep_length="batch_length" in fields
    )


def with_payload(header: BatchHeader, payload: bytes, *, keep_length: bool = False) -> bytes:
    if not keep_length:
        header = header._replace(batch_length=HEADER_BYTES - 12 + len(payload))
    return with_crc(header, payload).pack() + payload


def patched(data: bytes, position: int, value: bytes) -> bytes:
    return data[:position] + value + data[position + len(value) :]


def now_ms() -> int:
    return int(time.time() * 1000)


SOUND = batch(b"a", b"b", b"c")
FUTURE_MS = now_ms() + 10 * 3_600_000

BAD_HEADERS: dict[str, tuple[bytes, set[ErrorCode]]] = {
    "crc-wrong": (patched(SOUND, CRC_START - 4, b"\0\0\0\0"), {E.CORRUPT_MESSAGE}),
    "crc-of-other-bytes": (SOUND[:-1] + bytes([SOUND[-1] ^ 1]), {E.CORRUPT_MESSAGE}),
    "magic-0": (altered(magic=0), DAMAGED),
    "magic-1": (altered(magic=1), DAMAGED),
    "magic-3": (altered(magic=3), DAMAGED),
    "magic-255": (altered(magic=-1), DAMAGED),
    "length-minus-1": (altered(batch_length=-1), DAMAGED),
    "length-minimum": (altered(batch_length=-(2**31)), DAMAGED),
    "length-0": (altered(batch_length=0), DAMAGED),
    "length-under-the-header": (altered(batch_length=48), DAMAGED),
    "length-one-short": (altered(batch_length=len(batch()) - 13), DAMAGED),
    "length-one-long": (altered(batch_length=len(batch()) - 11), DAMAGED),
    "length-maximum": (altered(batch_length=INT_MAX), DAMAGED),
    "cut-to-1-byte": (SOUND[:1], DAMAGED),
    "cut-in-the-length": (SOUND[:11], DAMAGED),
    "cut-at-the-magic": (SOUND[:16], DAMAGED),
    "cut-in-the-header": (SOUND[:60], DAMAGED),
    "cut-in-the-records": (SOUND[:-1], DAMAGED),
    "zeros": (bytes(200), DAMAGED),
    "ones": (b"\xff" * 200, DAMAGED),
    "trailing-byte": (SOUND + b"\0", DAMAGED),
    "trailing-bytes": (SOUND + bytes(100), DAMAGED),
    "two-batches": (SOUND + SOUND, {E.INVALID_RECORD}),
    "two-compressed-batches": (
        batch(b"a", compression=Codec.GZIP) + batch(b"b", compression=Codec.GZIP),
        {E.INVALID_RECORD},
    ),
    "last-delta-too-small": (altered(b"a", b"b", last_offset_delta=0), DAMAGED),
    "last-delta-too-large": (altered(b"a", b"b", last_offset_delta=9), DAMAGED),
    "last-delta-negative": (altered(last_offset_delta=-1), DAMAGED),
    "last-delta-maximum": (altered(last_offset_delta=INT_MAX), DAMAGED),
    "count-0": (altered(count=0), DAMAGED),
    "count-0-and-delta-to-match": (altered(count=0, last_offset_delta=-1, payload=b""), DAMAGED),
    "count-minus-1": (altered(count=-1), DAMAGED),
    "count-minimum": (altered(count=-(2**31), last_offset_delta=INT_MAX), DAMAGED),
    "count-maximum": (altered(count=INT_MAX), DAMAGED),
    "base-offset-minimum": (altered(base_offset=-(2**63)), DAMAGED | {E.NONE}),
    "base-offset-maximum": (altered(base_offset=LONG_MAX), DAMAGED | {E.NONE}),
    "codec-5": (altered(attributes=5), DAMAGED | {E.UNSUPPORTED_COMPRESSION_TYPE}),
    "codec-6": (altered(attributes=6), DAMAGED | {E.UNSUPPORTED_COMPRESSION_TYPE}),
    "codec-7": (altered(attributes=7), DAMAGED | {E.UNSUPPORTED_COMPRESSION_TYPE}),
    "control": (batch(control=True), {E.INVALID_RECORD}),
    "control-with-producer": (
        batch(control=True, producer_id=1, producer_epoch=0, base_sequence=0),
        {E.INVALID_RECORD},
    ),
    "producer-without-sequence": (batch(producer_id=1, producer_epoch=0, base_sequence=-1), {E.INVALID_RECORD}),
    "producer-with-sequence-minimum": (
        batch(producer_id=1, producer_epoch=0, base_sequence=-(2**31)),
        {E.INVALID_RECORD},
    ),
    "producer-without-epoch": (
        batch(producer_id=1, producer_epoch=-1, base_sequence=0),
        {E.INVALID_RECORD, E.INVALID_PRODUCER_EPOCH},
    ),
    "transactional-without-producer": (
        batch(transactional=True),
        {E.INVALID_RECORD, E.INVALID_TXN_STATE, E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED},
    ),
    "transactional-without-id": (
        batch(transactional=True, producer_id=3, producer_epoch=0, base_sequence=0),
        {E.INVALID_RECORD, E.INVALID_TXN_STATE, E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED},
    ),
    "timestamp-in-the-future": (altered(max_timestamp_ms=FUTURE_MS), {E.INVALID_TIMESTAMP}),
    "timestamps-in-the-future": (
        encode_batch([Record(0, FUTURE_MS, b"k", b"v")]),
        {E.INVALID_TIMESTAMP},
    ),
    "timestamp-maximum": (altered(max_timestamp_ms=LONG_MAX), {E.INVALID_TIMESTAMP}),
    "timestamp-type-of-the-broker": (altered(attributes=0x08), {E.INVALID_TIMESTAMP}),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_batch_whose_header_lies_is_refused(broker: WatchedBroker, case: str) -> None:
    records, allowed = BAD_HEADERS[case]
    with broker.unharmed(), broker.connect() as client:
        before = client.produce(PLAIN, SOUND)
        assert before.error_code == 0
        answer = client.produce(PLAIN, records)
        assert ErrorCode(answer.error_code) in allowed, answer
        after = client.produce(PLAIN, SOUND)
        assert after.error_code == 0
        if answer.error_code != 0:
            assert answer.base_offset == -1
            assert after.base_offset == before.base_offset + 3, "something was written"


def test_a_bad_batch_does_not_spoil_the_others_of_its_request(broker: WatchedBroker) -> None:
    request = ProduceRequest(
        acks=-1,
        timeout_ms=5000,
        topic_data=[
            ProduceRequest.TopicProduceData(
                name=name, partition_data=[ProduceRequest.PartitionProduceData(index=0, records=records)]
            )
            for name, records in ((PLAIN, SOUND), (COMPACTED, SOUND[:-1]), (STAMPED, SOUND))
        ],
    )
    with broker.unharmed(), broker.connect() as client:
        response = client.call(request, 9)
        codes = [topic.partition_responses[0].error_code for topic in response.responses]
        assert codes == [0, E.CORRUPT_MESSAGE, 0]


def test_a_bad_batch_without_acks_closes_the_connection(broker: WatchedBroker) -> None:
    """There is no reply that could say so; a good one leaves the connection open."""
    with broker.unharmed(), broker.connect() as client:
        client.request(produce_request(PLAIN, SOUND, acks=0), 9)
        client.alive()
        client.request(produce_request(PLAIN, SOUND[:-1], acks=0), 9)
        client.expect_close()


@pytest.mark.parametrize("version", [3, 6])
def test_zstd_before_its_version_is_refused(broker: WatchedBroker, version: int) -> None:
    with broker.unharmed(), broker.connect() as client:
        answer = client.produce(PLAIN, batch(compression=Codec.ZSTD), version=version)
        assert answer.error_code == E.UNSUPPORTED_COMPRESSION_TYPE
        assert client.produce(PLAIN, batch(compression=Codec.ZSTD), version=7).error_code == 0


def test_a_batch_over_the_limit_is_too_large(broker: WatchedBroker) -> None:
    with broker.unharmed(), broker.connect() as client:
        client.create_topic("small", config={"max.message.bytes": "1000"})
        assert client.produce("small", batch(bytes(2000))).error_code == E.MESSAGE_TOO_LARGE
        assert client.produce("small", batch(bytes(500))).error_code == 0
        # A limit on what is stored: what it decompresses to is another matter.
        assert client.produce("small", batch(bytes(2000), compression=Codec.GZIP)).error_code == 0
        assert client.produce(PLAIN, batch(bytes(2_000_000))).error_code == E.MESSAGE_TOO_LARGE


def test_sequences_of_a_producer(broker: WatchedBroker) -> None:
    def numbered(sequence: int, epoch: int = 0) -> bytes:
        return batch(producer_id=900, producer_epoch=epoch, base_sequence=sequence)

    with broker.unharmed(), broker.connect() as client:
        first = client.produce(PLAIN, numbered(0))
        assert first.error_code == 0
        assert client.produce(PLAIN, numbered(5)).error_code == E.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert client.produce(PLAIN, numbered(INT_MAX)).error_code == E.OUT_OF_ORDER_SEQUENCE_NUMBER
        again = client.produce(PLAIN, numbered(0))
        assert (again.error_code, again.base_offset) == (0, first.base_offset)
        assert client.produce(PLAIN, numbered(7, epoch=1)).error_code == E.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert client.produce(PLAIN, numbered(0, epoch=1)).error_code == 0
        assert client.produce(PLAIN, numbered(1, epoch=0)).error_code in {E.INVALID_PRODUCER_EPOCH, E.PRODUCER_FENCED}


# --- inside the batch -------------------------------------------------------------------------------------------------


def record(
    *,
    length: bytes | None = None,
    timestamp_delta: bytes = b"\0",
    offset_delta: bytes = b"\0",
    key: bytes = varint(1) + b"k",
    value: bytes = varint(1) + b"v",
    headers: bytes = varint(0),
    attributes: bytes = b"\0",
    more: bytes = b"",
) -> bytes:
    body = attributes + timestamp_delta + offset_delta + key + value + headers + more
    return (varint(len(body)) if length is None else length) + body


def holding(payload: bytes, count: int = 1, codec: Codec = Codec.NONE) -> bytes:
    header = read_header(batch(*[b"v"] * count))._replace(attributes=int(codec))
    return with_payload(header, compress(codec, payload))


OVERLONG_INT = b"\x80\x80\x80\x80\x80\x01"
OVERLONG_LONG = b"\x80" * 10 + b"\x01"

BAD_RECORDS: dict[str, tuple[bytes, int]] = {
    "length-minus-1": (record(length=varint(-1)), 1),
    "length-minimum": (record(length=varint(-(2**31))), 1),
    "length-0": (record(length=varint(0)), 1),
    "length-1": (record(length=varint(1)), 1),
    "length-too-small": (record(length=varint(5)), 1),
    "length-over-the-rest": (record(length=varint(1000)), 1),
    "length-maximum": (record(length=varint(INT_MAX)), 1),
    "length-overlong": (record(length=OVERLONG_INT), 1),
    "length-cut": (b"\x80", 1),
    "timestamp-overlong": (record(timestamp_delta=OVERLONG_LONG), 1),
    "offset-overlong": (record(offset_delta=OVERLONG_INT), 1),
    "offset-delta-wrong": (record(offset_delta=varint(5)), 1),
    "offset-delta-negative": (record(offset_delta=varint(-1)), 1),
    "key-minus-2": (record(key=varint(-2)), 1),
    "key-over-the-rest": (record(key=varint(100) + b"k"), 1),
    "key-maximum": (record(key=varint(INT_MAX)), 1),
    "key-minimum": (record(key=varint(-(2**31))), 1),
    "value-minus-2": (record(value=varint(-2)), 1),
    "value-over-the-rest": (record(value=varint(100) + b"v"), 1),
    "value-maximum": (record(value=varint(INT_MAX)), 1),
    "value-minimum": (record(value=varint(-(2**31))), 1),
    "header-count-minus-1": (record(headers=varint(-1)), 1),
    "header-count-huge": (record(headers=varint(1_000_000)), 1),
    "header-count-maximum": (record(headers=varint(INT_MAX)), 1),
    "header-key-null": (record(headers=varint(1) + varint(-1) + varint(0)), 1),
    "header-key-minus-2": (record(headers=varint(1) + varint(-2) + varint(0)), 1),
    "header-key-over-the-rest": (record(headers=varint(1) + varint(50) + b"h"), 1),
    "header-value-minus-2": (record(headers=varint(1) + varint(1) + b"h" + varint(-2)), 1),
    "header-value-over-the-rest": (record(headers=varint(1) + varint(1) + b"h" + varint(50)), 1),
    "bytes-after-the-headers": (record(more=b"more"), 1),
    "bytes-after-the-record": (record() + b"trailing", 1),
    "more-records-than-counted": (record() + record(offset_delta=varint(1)), 1),
    "fewer-records-than-counted": (record(), 3),
    "no-records": (b"", 1),
    "garbage": (b"\xff" * 100, 1),
    "zeros": (bytes(100), 1),
    "unsigned-length": (uvarint(2**32 - 1) + bytes(20), 1),
}


def look_for_timestamps(client: RawClient, topic: str) -> None:
    """Have the broker search its log by timestamp; it may find nothing, but it must answer."""
    for timestamp in (-3, 1, now_ms() - 60_000, now_ms()):
        wanted = [ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=timestamp)]
        topics = [ListOffsetsRequest.ListOffsetsTopic(name=topic, partitions=wanted)]
        response = client.call(ListOffsetsRequest(replica_id=-1, topics=topics), 7, within_s=1)
        assert error_codes(response) <= {E.NONE, E.CORRUPT_MESSAGE, E.INVALID_RECORD}


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP], ids=["plain", "gzip"])
@pytest.mark.parametrize("case", BAD_RECORDS)
def test_records_that_lie_are_refused_where_the_broker_reads_them(
    broker: WatchedBroker, case: str, codec: Codec
) -> None:
    payload, count = BAD_RECORDS[case]
    records = holding(payload, count, codec)
    with broker.unharmed(), broker.connect() as client:
        for topic in (COMPACTED, VALIDATED):
            assert client.produce(topic, records).error_code in DAMAGED
            assert client.produce(topic, SOUND).error_code == 0


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_records_that_lie_do_no_harm_where_they_are_stored(broker: WatchedBroker, case: str) -> None:
    payload, count = BAD_RECORDS[case]
    topic = f"lies-{case}"
    with broker.unharmed(), broker.connect() as client:
        client.create_topic(topic)
        for codec in (Codec.NONE, Codec.GZIP):
            records = holding(payload, count, codec)
            answer = client.produce(topic, records)
            assert answer.error_code in DAMAGED | {E.NONE}
            if answer.error_code == 0:
                stored = bytes(client.fetch(topic, answer.base_offset).records or b"")
                assert stored[CRC_START:] == records[CRC_START:]
            look_for_timestamps(client, topic)
            assert client.produce(topic, SOUND).error_code == 0
            look_for_timestamps(client, topic)


@pytest.mark.parametrize("topic", [PLAIN, STAMPED, RECOMPRESSED])
@pytest.mark.parametrize(
    "timestamps",
    [(-1, -1), (LONG_MAX, 0), (-(2**63), -(2**63)), (0, -5), (-5, 0)],
    ids=["none", "base-maximum", "minimum", "max-negative", "base-negative"],
)
def test_odd_timestamps_do_no_harm(broker: WatchedBroker, topic: str, timestamps: tuple[int, int]) -> None:
    base, largest = timestamps
    with broker.unharmed(), broker.connect() as client:
        answer = client.produce(topic, altered(base_timestamp_ms=base, max_timestamp_ms=largest))
        assert answer.error_code in DAMAGED | {E.NONE, E.INVALID_TIMESTAMP}
        look_for_timestamps(client, topic)


def test_a_compacted_topic_wants_keys(broker: WatchedBroker) -> None:
    with broker.unharmed(), broker.connect() as client:
        for codec in Codec:
            assert client.produce(COMPACTED, batch(b"v", key=None, compression=codec)).error_code == E.INVALID_RECORD
            assert client.produce(COMPACTED, batch(None, key=None, compression=codec)).error_code == E.INVALID_RECORD
            assert client.produce(COMPACTED, batch(None, key=b"k", compression=codec)).error_code == 0
        mixed = encode_batch([Record(0, now_ms(), b"k", b"v"), Record(1, now_ms(), None, b"v")])
        assert client.produce(COMPACTED, mixed).error_code == E.INVALID_RECORD
        empty_key = client.produce(COMPACTED, batch(b"v", key=b""))
        assert empty_key.error_code == 0


def test_what_is_odd_but_sound_is_stored_as_it_is(broker: WatchedBroker) -> None:
    odd = [
        encode_batch([Record(0, now_ms(), None, None)]),
        encode_batch([Record(0, now_ms(), b"", b"", (Header("", None), Header("", b"")))]),
        encode_batch([Record(0, now_ms(), bytes(300), bytes(70_000), (Header("h" * 300, bytes(300)),) * 50)]),
        encode_batch([Record(offset, -1, b"k", b"v") for offset in range(1000)]),
    ]
    with broker.unharmed(), broker.connect() as client:
        for records in odd:
            answer = client.produce(PLAIN, records)
            assert answer.error_code == 0
            stored = bytes(client.fetch(PLAIN, answer.base_offset).records or b"")
            assert stored[CRC_START : len(records)] == records[CRC_START:]
            for topic in (COMPACTED, RECOMPRESSED, STAMPED):
                assert client.produce(topic, records).error_code in {E.NONE, E.INVALID_RECORD}


def test_internal_topics_are_not_for_clients(broker: WatchedBroker) -> None:
    with broker.unharmed(), broker.connect() as client:
        for topic in ("__consumer_offsets", "__transaction_state", "__share_group_state"):
            for records in (SOUND, SOUND[:-1], b""):
                answer = client.produce(topic, records)
                assert answer.error_code in {E.INVALID_TOPIC_EXCEPTION, E.UNKNOWN_TOPIC_OR_PARTITION}
