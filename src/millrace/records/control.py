"""Control batches: the end-of-transaction markers that a leader writes for a coordinator.

    key:   int16 version = 0 | int16 type (0 abort, 1 commit)
    value: int16 version = 0 | int32 coordinator epoch

A reader that meets a type it does not know skips the batch; an ordinary consumer never shows control records.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from millrace.errors import ApiError, ErrorCode
from millrace.records.compression import Buffer
from millrace.records.decode import Record, decode_records
from millrace.records.encode import encode_batch

_KEY: Final = struct.Struct(">hh")
_VALUE: Final = struct.Struct(">hi")


class MarkerType(IntEnum):
    """How a transaction ended."""

    ABORT = 0
    COMMIT = 1


@dataclass(frozen=True, slots=True)
class EndMarker:
    """What one end-of-transaction marker says."""

    type: MarkerType
    coordinator_epoch: int


def encode_end_marker(
    marker: EndMarker, *, producer_id: int, producer_epoch: int, timestamp_ms: int, leader_epoch: int = -1
) -> bytes:
    """The control batch of one marker, at base offset 0: the leader's log stamps the real one."""
    record = Record(0, timestamp_ms, _KEY.pack(0, marker.type), _VALUE.pack(0, marker.coordinator_epoch))
    return encode_batch(
        [record],
        leader_epoch=leader_epoch,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        transactional=True,
        control=True,
    )


def decode_end_marker(batch: Buffer) -> EndMarker | None:
    """The marker in a control batch; None for a batch without records or a control type that is not a marker."""
    records = decode_records(batch)
    if not records:
        return None
    key, value = records[0].key, records[0].value
    if key is None or len(key) < _KEY.size:
        raise ApiError(ErrorCode.INVALID_RECORD, "a control record has no readable key")
    version, kind = _KEY.unpack_from(key)
    if version < 0 or kind < 0:
        raise ApiError(ErrorCode.INVALID_RECORD, f"a control record has version {version} and type {kind}")
    if kind not in {MarkerType.ABORT, MarkerType.COMMIT}:
        return None
    if value is None or len(value) < _VALUE.size:
        raise ApiError(ErrorCode.INVALID_RECORD, "an end-of-transaction marker has no readable value")
    return EndMarker(MarkerType(kind), _VALUE.unpack_from(value)[1])
