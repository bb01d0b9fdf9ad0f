"""The batch header and the checks of a produced batch: each kind of damage has its own answer."""

from __future__ import annotations

import pytest

from millrace.errors import ApiError, ErrorCode
from millrace.records.batch import (
    HEADER_BYTES,
    BatchHeader,
    ProduceLimits,
    TimestampType,
    add_sequence,
    crc_matches,
    read_header,
    split,
    stamp_log_append_time,
    validate_produced,
)
from millrace.records.compression import Codec
from millrace.records.decode import decode_records
from support.batches import NOW_MS, batch, from_producer, with_header

LIMITS = ProduceLimits(max_message_bytes=10_000, timestamp_before_max_ms=1000, timestamp_after_max_ms=1000)


def refused(data: bytes, limits: ProduceLimits = LIMITS) -> ErrorCode:
    with pytest.raises(ApiError) as error:
        validate_produced(data, limits, NOW_MS)
    with pytest.raises(ApiError):
        validate_produced(memoryview(data), limits, NOW_MS)
    return error.value.code


class TestHeader:
    def test_fields(self) -> None:
        data = batch(
            3, codec=Codec.LZ4, producer_id=9, producer_epoch=2, sequence=5, transactional=True, leader_epoch=4
        )
        header = read_header(b"xx" + data, 2)
        assert header.size_bytes == len(data)
        assert (header.base_offset, header.last_offset, header.next_offset, header.count) == (0, 2, 3, 3)
        assert (header.leader_epoch, header.magic, header.codec) == (4, 2, Codec.LZ4)
        assert (header.base_timestamp_ms, header.max_timestamp_ms) == (NOW_MS, NOW_MS + 2)
        assert (header.producer_id, header.producer_epoch, header.base_sequence, header.last_sequence) == (9, 2, 5, 7)
        assert header.is_transactional and not header.is_control and header.has_producer
        assert header.timestamp_type is TimestampType.CREATE
        assert header.pack() == data[:HEADER_BYTES]

    def test_sequences_wrap(self) -> None:
        assert add_sequence(2**31 - 1, 1) == 0
        assert read_header(from_producer(1, 2**31 - 2, 4)).last_sequence == 1
        assert read_header(batch(1)).last_sequence == -1

    @pytest.mark.parametrize("size", [0, 1, 60])
    def test_a_short_header_is_corrupt(self, size: int) -> None:
        with pytest.raises(ApiError) as error:
            read_header(batch(1)[:size])
        assert error.value.code is ErrorCode.CORRUPT_MESSAGE
        with pytest.raises(ApiError):
            read_header(batch(1), -1)

    def test_unknown_codec(self) -> None:
        header = read_header(with_header(batch(1), attributes=6))
        assert header.codec_id == 6
        with pytest.raises(ApiError) as error:
            _ = header.codec
        assert error.value.code is ErrorCode.UNSUPPORTED_COMPRESSION_TYPE


class TestSplit:
    def test_batches_are_views(self) -> None:
        parts = [batch(i + 1) for i in range(4)]
        found = list(split(b"".join(parts)))
        assert [bytes(data) for _, data in found] == parts
        assert [header.count for header, _ in found] == [1, 2, 3, 4]
        assert list(split(b"")) == []

    def test_a_partial_end(self) -> None:
        whole = batch(1) + batch(2)
        for size in range(len(batch(1)), len(whole)):
            assert len(list(split(whole[:size], partial_end=True))) == 1
            if size > len(batch(1)):
                with pytest.raises(ApiError):
                    list(split(whole[:size]))

    @pytest.mark.parametrize("fields", [{"magic": 1}, {"batch_length": -1}, {"batch_length": 48}, {"batch_length": 0}])
    def test_damage_is_corrupt(self, fields: dict[str, int]) -> None:
        for partial_end in (True, False):
            with pytest.raises(ApiError) as error:
                list(split(with_header(batch(1), **fields), partial_end=partial_end))
            assert error.value.code is ErrorCode.CORRUPT_MESSAGE


class TestValidation:
    @pytest.mark.parametrize("codec", Codec)
    def test_good_batches_pass(self, codec: Codec) -> None:
        for data in (batch(5, codec=codec), from_producer(1, 0, 3), with_header(batch(2), leader_epoch=77)):
            assert validate_produced(data, LIMITS, NOW_MS) == read_header(data)
            assert validate_produced(memoryview(data), LIMITS, NOW_MS).count > 1

    def test_any_flipped_bit_behind_the_crc_is_corrupt(self) -> None:
        data = batch(2)
        for position in range(17, len(data)):
            for bit in range(8):
                damaged = bytearray(data)
                damaged[position] ^= 1 << bit
                assert refused(bytes(damaged)) is ErrorCode.CORRUPT_MESSAGE

    def test_every_cut_is_refused(self) -> None:
        data = batch(2)
        assert refused(b"") is ErrorCode.INVALID_RECORD
        for size in range(1, len(data)):
            assert refused(data[:size]) is ErrorCode.CORRUPT_MESSAGE

    @pytest.mark.parametrize(
        ("fields", "code"),
        [
            ({"magic": 0}, ErrorCode.INVALID_RECORD),
            ({"magic": 1}, ErrorCode.INVALID_RECORD),
            ({"magic": 3}, ErrorCode.CORRUPT_MESSAGE),
            ({"magic": -1}, ErrorCode.CORRUPT_MESSAGE),
            ({"batch_length": -1}, ErrorCode.CORRUPT_MESSAGE),
            ({"batch_length": 0}, ErrorCode.CORRUPT_MESSAGE),
            ({"batch_length": -(2**31)}, ErrorCode.CORRUPT_MESSAGE),
            ({"batch_length": 2**31 - 1}, ErrorCode.CORRUPT_MESSAGE),
            ({"batch_length": 60}, ErrorCode.INVALID_RECORD),
            ({"crc": 0}, ErrorCode.CORRUPT_MESSAGE),
            ({"count": 0}, ErrorCode.INVALID_RECORD),
            ({"count": -1}, ErrorCode.INVALID_RECORD),
            ({"count": 2**31 - 1}, ErrorCode.INVALID_RECORD),
            ({"last_offset_delta": 5}, ErrorCode.INVALID_RECORD),
            ({"last_offset_delta": -1}, ErrorCode.INVALID_RECORD),
            ({"last_offset_delta": -1, "count": 0}, ErrorCode.INVALID_RECORD),
            ({"base_offset": 1}, ErrorCode.INVALID_RECORD),
            ({"base_offset": -1}, ErrorCode.INVALID_RECORD),
            ({"attributes": 5}, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
            ({"attributes": 7}, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
            ({"attributes": 0x20}, ErrorCode.INVALID_RECORD),
            ({"attributes": 0x08}, ErrorCode.INVALID_TIMESTAMP),
            ({"attributes": 0x10}, ErrorCode.INVALID_RECORD),
            ({"producer_id": 1}, ErrorCode.INVALID_RECORD),
            ({"producer_id": 1, "base_sequence": -1, "producer_epoch": 0}, ErrorCode.INVALID_RECORD),
            ({"producer_id": 1, "base_sequence": 0, "producer_epoch": -1}, ErrorCode.INVALID_RECORD),
            ({"max_timestamp_ms": NOW_MS + 1001}, ErrorCode.INVALID_TIMESTAMP),
            ({"max_timestamp_ms": 2**63 - 1}, ErrorCode.INVALID_TIMESTAMP),
            ({"base_timestamp_ms": NOW_MS - 1001}, ErrorCode.INVALID_TIMESTAMP),
            ({"base_timestamp_ms": -5}, ErrorCode.INVALID_TIMESTAMP),
        ],
    )
    def test_bad_headers(self, fields: dict[str, int], code: ErrorCode) -> None:
        assert refused(with_header(batch(2), **fields)) is code

    def test_two_batches_and_trailing_bytes(self) -> None:
        assert refused(batch(1) + batch(1)) is ErrorCode.INVALID_RECORD
        assert refused(batch(1) + b"\x00") is ErrorCode.INVALID_RECORD

    def test_too_large(self) -> None:
        data = batch(1, size=500)
        limits = ProduceLimits(max_message_bytes=len(data) - 1)
        assert refused(data, limits) is ErrorCode.MESSAGE_TOO_LARGE
        validate_produced(data, ProduceLimits(max_message_bytes=len(data)), NOW_MS)

    def test_no_timestamp_is_always_in_time(self) -> None:
        data = with_header(batch(1), base_timestamp_ms=-1, max_timestamp_ms=-1)
        assert validate_produced(data, LIMITS, NOW_MS).max_timestamp_ms == -1

    def test_default_limits_are_kafkas(self) -> None:
        limits = ProduceLimits()
        validate_produced(batch(1, timestamp_ms=0), limits, NOW_MS)
        assert refused(batch(1, timestamp_ms=NOW_MS + 3_600_001), limits) is ErrorCode.INVALID_TIMESTAMP


@pytest.mark.parametrize("codec", Codec)
def test_log_append_time(codec: Codec) -> None:
    data = batch(3, codec=codec)
    header: BatchHeader = stamp_log_append_time(read_header(data), data, NOW_MS + 99)
    stamped = header.pack() + data[HEADER_BYTES:]
    assert crc_matches(stamped) and not crc_matches(header._replace(crc=header.crc ^ 1).pack() + data[HEADER_BYTES:])
    assert {record.timestamp_ms for record in decode_records(stamped)} == {NOW_MS + 99}
