"""The records of `__transaction_state`, in the format that Kafka writes and reads.

A key begins with an int16 that says what the record is (0, the only kind), a value with an int16 version. The latest
record of a transactional id says everything about it; one without a value says that the id is forgotten.

Version 1 of the value has room for more: Kafka's tagged fields, and one of ours with the epoch from which the current
one was reached. Kafka does not write that down, and therefore takes a producer that repeats InitProducerId after a
failover for a fenced one (KAFKA-20310, KAFKA-20357). Its readers skip what they do not know.

What is not here: what the records mean (`state`).
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Final

from millrace.errors import ProtocolError
from millrace.model import NO_PRODUCER_EPOCH, TopicPartition
from millrace.transactions.state import EPOCH_VERSION, Transaction, TransactionState
from millrace.wire.codec import decode, encode
from millrace.wire.schema import Data, Struct, array, int8, int16, int32, int64, string

_PREFIX: Final = struct.Struct(">h")
_KIND: Final = 0
_KEY_VERSION: Final = 0
_VALUE_VERSION: Final = 1
_LAST_EPOCH_TAG: Final = 20357
"""Far from the tags that Kafka gives out one by one."""
_NOT_SAID: Final = -2
"""Of the last epoch: Kafka wrote the record."""


class TransactionLogKey(Data, versions="0"):
    """Names a transactional id."""

    transactional_id: str = string()


class TransactionLogValue(Data, versions="0-1", flexible="1+"):
    """The state of a transactional id."""

    class PartitionsSchema(Struct):
        topic: str = string()
        partition_ids: list[int] = array(int32)

    producer_id: int = int64()
    previous_producer_id: int = int64("1+", tag=0, default=-1)
    next_producer_id: int = int64("1+", tag=1, default=-1)
    producer_epoch: int = int16()
    next_producer_epoch: int = int16("1+", tag=3, default=-1)
    transaction_timeout_ms: int = int32()
    transaction_status: int = int8()
    transaction_partitions: list[PartitionsSchema] | None = array(PartitionsSchema, nullable=True)
    transaction_last_update_timestamp_ms: int = int64()
    transaction_start_timestamp_ms: int = int64()
    client_transaction_version: int = int16("1+", tag=2, default=0)
    last_producer_epoch: int = int16("1+", tag=_LAST_EPOCH_TAG, default=_NOT_SAID)


def entry(transactional_id: str, transaction: Transaction | None) -> tuple[bytes, bytes | None]:
    """Key and value of a record; None: the id is forgotten."""
    key = _PREFIX.pack(_KIND) + encode(TransactionLogKey(transactional_id=transactional_id), _KEY_VERSION)
    return key, None if transaction is None else _value(transaction)


def read_record(key: bytes, value: bytes | None) -> tuple[str, Transaction | None] | None:
    """What a record says, or None for a kind that is not known; ProtocolError where it cannot be read."""
    if len(key) < _PREFIX.size:
        raise ProtocolError("the key of a transaction's record is too short to say what it is")
    (kind,) = _PREFIX.unpack_from(key)
    if kind != _KIND:
        return None
    name, _ = decode(TransactionLogKey, _KEY_VERSION, key, _PREFIX.size)
    return name.transactional_id, None if value is None else _read_value(value)


def _value(transaction: Transaction) -> bytes:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sorted(transaction.partitions):
        by_topic.setdefault(topic, []).append(partition)
    value = TransactionLogValue(
        producer_id=transaction.producer_id,
        previous_producer_id=transaction.previous_producer_id,
        next_producer_id=transaction.next_producer_id,
        producer_epoch=transaction.producer_epoch,
        transaction_timeout_ms=transaction.timeout_ms,
        transaction_status=transaction.state,
        # As in Kafka: no list at all while nothing can be in it.
        transaction_partitions=None
        if transaction.state is TransactionState.EMPTY
        else [TransactionLogValue.PartitionsSchema(topic=topic, partition_ids=ids) for topic, ids in by_topic.items()],
        transaction_last_update_timestamp_ms=transaction.updated_ms,
        transaction_start_timestamp_ms=transaction.start_ms,
        client_transaction_version=transaction.version,
        last_producer_epoch=transaction.last_producer_epoch,
    )
    return _PREFIX.pack(_VALUE_VERSION) + encode(value, _VALUE_VERSION)


def _read_value(raw: bytes) -> Transaction:
    if len(raw) < _PREFIX.size:
        raise ProtocolError("the value of a transaction's record is too short to have a version")
    (version,) = _PREFIX.unpack_from(raw)
    value, _ = decode(TransactionLogValue, version, raw, _PREFIX.size)
    try:
        state = TransactionState(value.transaction_status)
    except ValueError as error:
        raise ProtocolError(f"a transaction's record has a state nobody knows: {error}") from error
    return Transaction(
        producer_id=value.producer_id,
        producer_epoch=value.producer_epoch,
        timeout_ms=value.transaction_timeout_ms,
        state=state,
        partitions=_partitions(value.transaction_partitions or ()),
        previous_producer_id=value.previous_producer_id,
        next_producer_id=value.next_producer_id,
        last_producer_epoch=_last_epoch(value, state),
        start_ms=value.transaction_start_timestamp_ms,
        updated_ms=value.transaction_last_update_timestamp_ms,
        version=value.client_transaction_version,
    )


def _partitions(stored: Collection[TransactionLogValue.PartitionsSchema]) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition(each.topic, partition) for each in stored for partition in each.partition_ids)


def _last_epoch(value: TransactionLogValue, state: TransactionState) -> int:
    if value.last_producer_epoch != _NOT_SAID:
        return value.last_producer_epoch
    ends = state not in {TransactionState.EMPTY, TransactionState.ONGOING}
    if ends and value.client_transaction_version >= EPOCH_VERSION and value.producer_epoch > 0:
        return value.producer_epoch - 1
    return NO_PRODUCER_EPOCH
