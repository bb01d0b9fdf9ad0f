"""Records in and out, with kafka-python and aiokafka as independent oracles; the structural check; control records."""

from __future__ import annotations

import random
import warnings

import pytest
from aiokafka.record.default_records import DefaultRecordBatch as AioBatch
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AioBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ApiError, ErrorCode
from millrace.records.batch import HEADER_BYTES, crc_matches, read_header
from millrace.records.compression import Codec, compress, decompress
from millrace.records.control import EndMarker, MarkerType, decode_end_marker, encode_end_marker
from millrace.records.decode import Header, Record, check_records, decode_records
from millrace.records.encode import encode_batch, recompress
from support.batches import NOW_MS, batch, records, with_header, with_payload

with warnings.catch_warnings():
    # kafka-python loads its schemas by a call that Python 3.11 has deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka.record.default_records import DefaultRecordBatch as KafkaBatch
    from kafka.record.default_records import DefaultRecordBatchBuilder as KafkaBuilder

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
HEADERS = st.lists(st.builds(Header, TEXT, st.none() | st.binary(max_size=20)), max_size=4).map(tuple)
ROWS = st.lists(
    st.tuples(
        st.none() | st.binary(max_size=40), st.none() | st.binary(max_size=400), HEADERS, st.integers(-1000, 10**6)
    ),
    min_size=1,
    max_size=30,
)


def make(rows: list[tuple[bytes | None, bytes | None, tuple[Header, ...], int]], first: int = 0) -> list[Record]:
    return [
        Record(first + i, NOW_MS + delta, key, value, headers) for i, (key, value, headers, delta) in enumerate(rows)
    ]


class TestRoundTrip:
    @settings(deadline=None, max_examples=80)
    @given(rows=ROWS, codec=st.sampled_from(Codec), first=st.integers(0, 2**62))
    def test_records_come_back(
        self, rows: list[tuple[bytes | None, bytes | None, tuple[Header, ...], int]], codec: Codec, first: int
    ) -> None:
        given_records = make(rows, first)
        data = encode_batch(given_records, compression=codec)
        assert crc_matches(data)
        assert decode_records(data) == given_records
        check_records(data)
        for other in Codec:
            again = recompress(data, other, max_bytes=1 << 20)
            assert crc_matches(again) and decode_records(again) == given_records
            assert read_header(again).codec is other

    @pytest.mark.parametrize("level", [1, 2, 9, 12, 17])
    def test_lz4_has_the_same_frame_at_every_level(self, level: int) -> None:
        """Kafka's Java reader takes independent blocks only."""
        for plain in (b"", b"a", bytes(range(256)) * 800, random.Random(1).randbytes(200_000)):
            packed = compress(Codec.LZ4, plain, level)
            assert packed.startswith(bytes.fromhex("04224d18604082")) and packed.endswith(bytes(4))
            assert bytes(decompress(Codec.LZ4, packed)) == plain

    def test_extreme_timestamps_and_lengths(self) -> None:
        rows = [
            Record(0, 0, b"", b"", (Header("", None), Header("h" * 200, b"x" * 9000))),
            Record(1, 2**62, None, None),
            Record(2, -(2**40), b"k" * 70, b"v" * 100_000),
        ]
        assert decode_records(encode_batch(rows)) == rows

    def test_a_compacted_batch_keeps_its_gaps(self) -> None:
        rows = [records(1, first=i)[0] for i in (5, 9, 10)]
        data = encode_batch(rows, base_offset=2)
        header = read_header(data)
        assert (header.base_offset, header.last_offset, header.count) == (2, 10, 3)
        assert [record.offset for record in decode_records(data)] == [5, 9, 10]

    def test_an_empty_batch_is_not_made(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            encode_batch([])


class TestOracles:
    """Bytes of other people's clients, and other people's clients on our bytes."""

    @settings(deadline=None, max_examples=40)
    @given(rows=ROWS, codec=st.sampled_from(Codec), library=st.sampled_from(["kafka-python", "aiokafka"]))
    def test_both_ways(
        self, rows: list[tuple[bytes | None, bytes | None, tuple[Header, ...], int]], codec: Codec, library: str
    ) -> None:
        given_records = make(rows)
        if library == "kafka-python":
            builder = KafkaBuilder(
                magic=2,
                compression_type=int(codec),
                is_transactional=0,
                producer_id=77,
                producer_epoch=3,
                base_sequence=11,
                batch_size=1 << 30,
            )
        else:
            builder = AioBuilder(
                magic=2,
                compression_type=int(codec),
                is_transactional=0,
                producer_id=77,
                producer_epoch=3,
                base_sequence=11,
                batch_size=1 << 30,
            )
        for record in given_records:
            headers = [(header.key, header.value) for header in record.headers]
            assert builder.append(record.offset, record.timestamp_ms, record.key, record.value, headers) is not None
        theirs = bytes(builder.build())
        assert crc_matches(theirs)
        assert decode_records(theirs) == given_records
        check_records(theirs)
        header = read_header(theirs)
        assert (header.producer_id, header.producer_epoch, header.base_sequence) == (77, 3, 11)

        ours = encode_batch(
            given_records, compression=codec, producer_id=77, producer_epoch=3, base_sequence=11, leader_epoch=-1
        )
        reader = KafkaBatch(ours) if library == "kafka-python" else AioBatch(bytearray(ours))
        assert reader.validate_crc()
        assert [
            Record(r.offset, r.timestamp, r.key, r.value, tuple(Header(k, v) for k, v in r.headers)) for r in reader
        ] == given_records


def refused(data: bytes) -> ErrorCode:
    with pytest.raises(ApiError) as decoded:
        decode_records(data)
    with pytest.raises(ApiError) as checked:
        check_records(data)
    assert decoded.value.code is checked.value.code
    return checked.value.code


def record_bytes(body: bytes, length: bytes | None = None) -> bytes:
    """One batch with exactly one record of these bytes."""
    assert len(body) < 64
    return with_payload(batch(1), (bytes([len(body) * 2]) if length is None else length) + body)


GOOD_BODY = b"\x00\x00\x00\x02k\x02v\x00"


class TestDamage:
    def test_the_template_is_good(self) -> None:
        assert decode_records(record_bytes(GOOD_BODY)) == [Record(0, NOW_MS, b"k", b"v")]
        check_records(record_bytes(GOOD_BODY))

    @pytest.mark.parametrize(
        "data",
        [
            record_bytes(GOOD_BODY, b"\x01"),
            record_bytes(GOOD_BODY, b"\x7f"),
            record_bytes(GOOD_BODY, b"\x0e"),
            record_bytes(GOOD_BODY, b"\x12"),
            record_bytes(GOOD_BODY, b"\x00"),
            record_bytes(GOOD_BODY, b"\xff\xff\xff\xff\x0f"),
            record_bytes(GOOD_BODY, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
            record_bytes(GOOD_BODY, b"\x80\x80\x80\x80\x80\x80"),
            record_bytes(b"\x00\x00\x00\x03\x02v\x00"),
            record_bytes(b"\x00\x00\x00\x02k\x03\x00"),
            record_bytes(b"\x00\x00\x00\x40k\x02v\x00"),
            record_bytes(b"\x00\x00\x00\x02k\x40v\x00"),
            record_bytes(b"\x00\x00\x00\xff\xff\xff\xff\x0fk\x02v\x00"),
            record_bytes(b"\x00\x00\x00\xfe\xff\xff\xff\x0fk\x02v\x00"),
            record_bytes(b"\x00\x00\x00\x02k\xff\xff\xff\xff\x0f\x00"),
            record_bytes(b"\x00\x00\x00\x02k\x02v\x01"),
            record_bytes(b"\x00\x00\x00\x02k\x02v\x02"),
            record_bytes(b"\x00\x00\x00\x02k\x02v\xfe\xff\xff\xff\x0f"),
            record_bytes(b"\x00\x00\x00\x02k\x02v\x02\x01\x01"),
            record_bytes(b"\x00\x00\x00\x02k\x02v\x02\x02\xff\x01"),
            record_bytes(b"\x00\x00\x00\x02k\x02v\x02\x02h\x40"),
            record_bytes(GOOD_BODY + b"\x00"),
            record_bytes(GOOD_BODY[:-1]),
            record_bytes(b""),
            record_bytes(b"\x00\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01\x00\x02k\x02v\x00"),
            with_payload(batch(1), b""),
            with_payload(batch(1), bytes([len(GOOD_BODY) * 2]) + GOOD_BODY + b"\x00"),
            with_header(batch(3), count=2, last_offset_delta=1),
            with_header(batch(3), count=4, last_offset_delta=3),
            with_header(batch(3), count=2**31 - 1, last_offset_delta=2**31 - 2),
        ],
        ids=lambda data: data[HEADER_BYTES : HEADER_BYTES + 20].hex(),
    )
    def test_record_level_damage(self, data: bytes) -> None:
        assert refused(data) is ErrorCode.INVALID_RECORD

    def test_offset_deltas_must_count(self) -> None:
        with pytest.raises(ApiError):
            check_records(record_bytes(b"\x00\x00\x02\x02k\x02v\x00"))

    def test_a_compacted_topic_needs_keys(self) -> None:
        data = encode_batch([Record(0, 0, b"k", None), Record(1, 0, None, b"v")])
        check_records(data)
        with pytest.raises(ApiError) as error:
            check_records(data, require_keys=True)
        assert error.value.code is ErrorCode.INVALID_RECORD
        check_records(encode_batch([Record(0, 0, b"", b"v")]), require_keys=True)

    @pytest.mark.parametrize("codec", list(Codec)[1:])
    def test_bad_streams(self, codec: Codec) -> None:
        data = batch(3, codec=codec)
        assert refused(with_payload(data, data[HEADER_BYTES:-3])) is ErrorCode.INVALID_RECORD
        assert refused(with_payload(data, b"nonsense")) is ErrorCode.INVALID_RECORD
        assert refused(with_payload(data, b"")) is ErrorCode.INVALID_RECORD
        with pytest.raises(ApiError):
            recompress(with_payload(data, b"nonsense"), Codec.NONE, max_bytes=1000)
        with pytest.raises(ApiError):
            decode_records(batch(200, codec=codec), max_bytes=100)

    def test_header_damage(self) -> None:
        for data in (
            b"",
            batch(1)[:60],
            with_header(batch(1), batch_length=5),
            with_header(batch(1), batch_length=999),
        ):
            assert refused(data) is ErrorCode.CORRUPT_MESSAGE
        assert refused(with_header(batch(1), attributes=5)) is ErrorCode.UNSUPPORTED_COMPRESSION_TYPE

    def test_a_negative_count(self) -> None:
        assert refused(with_header(batch(1), count=-1)) is ErrorCode.INVALID_RECORD
        assert refused(with_payload(batch(1), b"", count=-1)) is ErrorCode.INVALID_RECORD


class TestControl:
    @pytest.mark.parametrize("kind", MarkerType)
    def test_markers_round_trip(self, kind: MarkerType) -> None:
        data = encode_end_marker(EndMarker(kind, 42), producer_id=7, producer_epoch=2, timestamp_ms=NOW_MS)
        header = read_header(data)
        assert header.is_control and header.is_transactional and header.base_sequence == -1
        assert (header.producer_id, header.producer_epoch) == (7, 2)
        assert crc_matches(data)
        assert decode_end_marker(data) == EndMarker(kind, 42)
        record = decode_records(data)[0]
        assert record.key == bytes([0, 0, 0, kind]) and record.value == bytes([0, 0, 0, 0, 0, 42])

    def test_other_control_records(self) -> None:
        def control(key: bytes | None, value: bytes | None) -> bytes:
            return encode_batch([Record(0, 0, key, value)], control=True)

        assert decode_end_marker(control(b"\x00\x00\x00\x02", b"")) is None
        for key, value in (
            (None, b""),
            (b"\x00", b""),
            (b"\xff\xff\x00\x00", b""),
            (b"\x00\x00\x00\x00", None),
            (b"\x00\x00\x00\x01", b"\x00\x00"),
        ):
            with pytest.raises(ApiError):
                decode_end_marker(control(key, value))

    def test_control_batches_are_not_compressed(self) -> None:
        data = encode_end_marker(EndMarker(MarkerType.ABORT, 0), producer_id=7, producer_epoch=2, timestamp_ms=0)
        with pytest.raises(ApiError):
            recompress(data, Codec.GZIP, max_bytes=1000)
