"""What a batch has to pass before it is appended, beyond its header (`records.batch.validate_produced`).

Pure: nothing is written, and what a topic does not ask for costs nothing.
"""

from __future__ import annotations

from millrace.errors import ApiError, ErrorCode
from millrace.records.batch import (
    HEADER_BYTES,
    STAMP_BYTES,
    BatchHeader,
    TimestampType,
    read_header,
    stamp_log_append_time,
)
from millrace.records.control import decode_end_marker
from millrace.records.decode import check_records
from millrace.records.encode import recompress
from millrace.storage.producers import Producers, Verification
from millrace.storage.settings import LogConfig


def prepare(
    header: BatchHeader, records: bytes | memoryview, config: LogConfig, now_ms: int
) -> tuple[BatchHeader, bytes | memoryview, int]:
    """What some topics ask of a client's batch: keys, a codec of their own, the broker's timestamps.

    Returns the batch as it is to be written, and how many of its first bytes the header takes the place of.
    """
    if config.compact or config.validate_records:
        check_records(records, require_keys=config.compact, max_bytes=config.max_decompressed_bytes)
    codec = config.target_codec
    if codec is not None and codec is not header.codec:
        records = recompress(records, codec, max_bytes=config.max_decompressed_bytes, level=config.compression_level)
        header = read_header(records)
        if len(records) > config.max_message_bytes:
            raise ApiError(
                ErrorCode.MESSAGE_TOO_LARGE,
                f"the batch has {len(records)} bytes as {codec.name.lower()}, "
                f"the topic allows {config.max_message_bytes}",
            )
    if config.timestamp_type is TimestampType.LOG_APPEND:
        return stamp_log_append_time(header, records, now_ms), records, HEADER_BYTES
    return header, records, STAMP_BYTES


def check_internal(
    records: bytes | memoryview,
    config: LogConfig,
    producers: Producers,
    verification: Verification | None,
    transaction_version: int,
) -> BatchHeader:
    """The header of a batch of the broker's own, which may be a control batch."""
    header = read_header(records)
    if header.size_bytes != len(records) or header.count < 1 or header.last_offset_delta < 0:
        raise ApiError(ErrorCode.INVALID_RECORD, "exactly one whole record batch is appended at a time")
    if len(records) > config.max_message_bytes:
        raise ApiError(
            ErrorCode.MESSAGE_TOO_LARGE,
            f"the record batch has {len(records)} bytes, the topic allows {config.max_message_bytes}",
        )
    if header.is_control:
        marker = decode_end_marker(records)
        if marker is not None:
            producers.check_marker(header.producer_id, header.producer_epoch, marker, transaction_version)
    elif header.producer_id >= 0:
        producers.check_internal(header, verification)
    return header
