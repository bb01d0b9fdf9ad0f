"""The bytes of `__transaction_state`. Those called Kafka's were written by `TransactionLog` of Kafka 4.3.0."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import ProtocolError
from millrace.model import TopicPartition
from millrace.transactions.records import entry, read_record
from millrace.transactions.state import Transaction, TransactionState

KEY = bytes.fromhex("0000000662616e6b2d31")
CLASSIC = bytes.fromhex(
    "000000000000000012677fff0000ea6002000000010002696e0000000200000001000000000000018bcfe569f40000018bcfe56800"
)
FLEXIBLE = bytes.fromhex(
    "000100000000000012677fff0000ea60020203696e030000000100000000000000018bcfe569f40000018bcfe56800"
    "03000800000000000012670108000000000000126802020002"
)
EMPTY = bytes.fromhex("0001000000000000126700000000ea6000000000018bcfe569f4ffffffffffffffff00")
OURS = bytes.fromhex(
    "000100000000000012677fff0000ea60020203696e030000000000000001000000018bcfe569f40000018bcfe56800"
    "04000800000000000012670108000000000000126802020002859f01027ffe"
)
"""What Kafka's `TransactionLog.read` was seen to read as it reads the one above."""

PREPARED = Transaction(
    producer_id=4711,
    producer_epoch=32767,
    timeout_ms=60_000,
    state=TransactionState.PREPARE_COMMIT,
    partitions=frozenset({TopicPartition("in", 0), TopicPartition("in", 1)}),
    previous_producer_id=4711,
    next_producer_id=4712,
    last_producer_epoch=32766,
    start_ms=1_700_000_000_000,
    updated_ms=1_700_000_000_500,
    version=2,
)


def test_what_kafka_wrote_is_read() -> None:
    assert read_record(KEY, FLEXIBLE) == ("bank-1", PREPARED)
    assert read_record(KEY, EMPTY) == ("bank-1", Transaction(4711, 0, 60_000, updated_ms=1_700_000_000_500))
    before = read_record(KEY, CLASSIC)
    assert before is not None and before[1] is not None
    assert before[1].partitions == PREPARED.partitions
    assert (before[1].version, before[1].next_producer_id, before[1].last_producer_epoch) == (0, -1, -1)


def test_what_we_write_is_kafkas_and_one_field_more() -> None:
    assert entry("bank-1", PREPARED) == (KEY, OURS)
    assert entry("bank-1", None) == (KEY, None)
    assert read_record(KEY, None) == ("bank-1", None)


def test_what_is_not_readable() -> None:
    assert read_record(b"\x00\x01rest", b"") is None
    for key, value in ((b"\x00", None), (KEY, b"\x00"), (KEY, b"\x00\x09" + OURS[2:]), (KEY, OURS[:20])):
        with pytest.raises(ProtocolError):
            read_record(key, value)
    unknown = bytearray(CLASSIC)
    unknown[16] = 9
    with pytest.raises(ProtocolError):
        read_record(KEY, bytes(unknown))


@given(
    st.text(min_size=1),
    st.builds(
        Transaction,
        producer_id=st.integers(0, 2**63 - 1),
        producer_epoch=st.integers(0, 32767),
        timeout_ms=st.integers(1, 2**31 - 1),
        state=st.sampled_from(list(TransactionState)[1:6]),
        partitions=st.frozensets(st.builds(TopicPartition, st.sampled_from("abc"), st.integers(0, 9))),
        previous_producer_id=st.integers(-1, 2**63 - 1),
        next_producer_id=st.integers(-1, 2**63 - 1),
        last_producer_epoch=st.integers(-1, 32767),
        start_ms=st.integers(-1, 2**62),
        updated_ms=st.integers(-1, 2**62),
        version=st.sampled_from([0, 1, 2]),
    ),
)
def test_everything_comes_back(transactional_id: str, transaction: Transaction) -> None:
    assert read_record(*entry(transactional_id, transaction)) == (transactional_id, transaction)
