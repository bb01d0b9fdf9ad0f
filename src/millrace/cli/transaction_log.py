"""The records of `__transaction_state`, as `millrace log dump --records` shows them.

As they were written, not as a coordinator understands them: a dump is for looking at what is strange.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from millrace.admin.transactions import STATE_NAMES
from millrace.cli.times import iso_utc
from millrace.errors import ProtocolError
from millrace.transactions.records import TransactionLogKey, TransactionLogValue
from millrace.wire.codec import decode

_PREFIX: Final = struct.Struct(">h")


def describe_transaction_state(key: bytes | None, value: bytes | None) -> dict[str, Any]:
    """What a record says: the transactional id and its state, or that it is forgotten; ProtocolError where it is none.

    A kind of record or a version that is not known is shown by its number: the next Kafka may write it.
    """
    if key is None or len(key) < _PREFIX.size:
        raise ProtocolError("a record of __transaction_state has no key that says what it is")
    (kind,) = _PREFIX.unpack_from(key)
    if kind != 0:
        return {"kind": kind}
    name, _ = decode(TransactionLogKey, 0, key, _PREFIX.size)
    if value is None:
        return {"transactional_id": name.transactional_id, "state": None}
    if len(value) < _PREFIX.size:
        raise ProtocolError("a record of __transaction_state has no version in its value")
    (version,) = _PREFIX.unpack_from(value)
    if not TransactionLogValue.min_version <= version <= TransactionLogValue.max_version:
        return {"transactional_id": name.transactional_id, "version": version}
    state, _ = decode(TransactionLogValue, version, value, _PREFIX.size)
    return {"transactional_id": name.transactional_id, **_fields(state)}


def _fields(value: TransactionLogValue) -> dict[str, Any]:
    status = value.transaction_status
    return {
        "state": STATE_NAMES[status] if 0 <= status < len(STATE_NAMES) else status,
        "producer_id": value.producer_id,
        "producer_epoch": value.producer_epoch,
        "previous_producer_id": value.previous_producer_id,
        "next_producer_id": value.next_producer_id,
        "next_producer_epoch": value.next_producer_epoch,
        "timeout_ms": value.transaction_timeout_ms,
        "partitions": [
            f"{each.topic}-{index}" for each in value.transaction_partitions or () for index in each.partition_ids
        ],
        "started": _time(value.transaction_start_timestamp_ms),
        "updated": _time(value.transaction_last_update_timestamp_ms),
        "transaction_version": value.client_transaction_version,
    }


def _time(timestamp_ms: int) -> str | None:
    return None if timestamp_ms < 0 else iso_utc(timestamp_ms)
