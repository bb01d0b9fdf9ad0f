"""The bytes of `__consumer_offsets`, compared with vectors worked out by hand from Kafka's definitions."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ProtocolError
from millrace.groups.classic.effects import StoredGroup, StoredMember
from millrace.groups.classic.records import GroupMetadataValue, GroupRecord, group_key, group_value
from millrace.groups.offsets.committed import CommittedOffset
from millrace.groups.offsets.records import OffsetRecord, offset_key, offset_value
from millrace.groups.records import read_record
from millrace.wire.codec import encode

TOPIC_ID = uuid.UUID(int=0x0102030405060708090A0B0C0D0E0F10)


def test_the_key_of_an_offset() -> None:
    assert offset_key("g", "orders", 3) == bytes.fromhex(
        "0001"  # an offset commit
        "0001 67"  # g
        "0006 6f7264657273"  # orders
        "00000003"
    )


def test_the_value_of_an_offset_is_version_4_with_the_topic_id_as_a_tag() -> None:
    committed = CommittedOffset(42, 7, "m", commit_timestamp_ms=1_700_000_000_000, topic_id=TOPIC_ID)
    assert offset_value(committed) == bytes.fromhex(
        "0004"
        "000000000000002a"  # offset
        "00000007"  # leader epoch
        "02 6d"  # metadata, compact
        "0000018bcfe56800"  # commit timestamp
        "01 00 10"  # one tagged field: tag 0, 16 bytes
        "0102030405060708090a0b0c0d0e0f10"
    )


def test_an_unknown_topic_id_is_left_out() -> None:
    assert offset_value(CommittedOffset(1, commit_timestamp_ms=0)) == bytes.fromhex(
        "0004 0000000000000001 ffffffff 01 0000000000000000 00"
    )


def test_an_offset_with_its_own_expiry_is_version_1() -> None:
    committed = CommittedOffset(5, leader_epoch=7, metadata="", commit_timestamp_ms=16, expire_timestamp_ms=255)
    assert offset_value(committed) == bytes.fromhex("0001 0000000000000005 0000 0000000000000010 00000000000000ff")


def test_the_key_of_a_group() -> None:
    assert group_key("crew") == bytes.fromhex("0002 0004 63726577")


def test_the_value_of_a_group_is_version_4() -> None:
    group = StoredGroup(
        protocol_type="consumer",
        generation=3,
        protocol_name="range",
        leader="m-1",
        state_timestamp_ms=256,
        members=(
            StoredMember(
                member_id="m-1",
                instance_id=None,
                client_id="c",
                client_host="/h",
                rebalance_timeout_ms=60_000,
                session_timeout_ms=10_000,
                subscription=b"\x01\x02",
                assignment=b"",
            ),
        ),
    )
    assert group_value(group) == bytes.fromhex(
        "0004"
        "09 636f6e73756d6572"  # consumer
        "00000003"  # generation
        "06 72616e6765"  # range
        "04 6d2d31"  # the leader
        "0000000000000100"  # since when
        "02"  # one member
        "04 6d2d31"  # member id
        "00"  # no instance id
        "02 63"  # client id
        "03 2f68"  # client host
        "0000ea60"  # rebalance timeout
        "00002710"  # session timeout
        "03 0102"  # subscription
        "01"  # assignment
        "00"  # no tagged fields of the member
        "00"  # nor of the group
    )


def test_an_empty_group() -> None:
    assert group_value(StoredGroup("", 0, None, None, 1)) == bytes.fromhex(
        "0004 01 00000000 00 00 0000000000000001 01 00"
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0000 0000000000000009 0001 6d 0000000000000005", CommittedOffset(9, -1, "m", 5)),
        ("0001 0000000000000009 0001 6d 0000000000000005 0000000000000006", CommittedOffset(9, -1, "m", 5, 6)),
        ("0002 0000000000000009 0001 6d 0000000000000005", CommittedOffset(9, -1, "m", 5)),
        ("0003 0000000000000009 00000002 0001 6d 0000000000000005", CommittedOffset(9, 2, "m", 5)),
    ],
)
@pytest.mark.parametrize("kind", ["0000", "0001"])
def test_older_offset_values_are_read(kind: str, value: str, expected: CommittedOffset) -> None:
    key = bytes.fromhex(kind + "0001 67 0001 74 00000002")
    record = read_record(key, bytes.fromhex(value), -1)
    assert record == OffsetRecord("g", "t", 2, expected)


def test_older_group_values_are_read() -> None:
    member = GroupMetadataValue.MemberMetadata(
        member_id="m", client_id="c", client_host="h", session_timeout=10, subscription=b"s", assignment=b"a"
    )
    value = GroupMetadataValue(protocol_type="consumer", generation=1, protocol="range", leader="m", members=[member])
    for version in range(4):
        raw = version.to_bytes(2, "big") + encode(value, version)
        record = read_record(group_key("g"), raw, 0)
        assert isinstance(record, GroupRecord)
        assert record.value is not None
        assert record.value.state_timestamp_ms == -1
        assert record.value.members[0].rebalance_timeout_ms == -1
        assert record.value.members[0].assignment == b"a"


def test_a_tombstone_has_no_value() -> None:
    assert read_record(offset_key("g", "t", 0), None, 9) == OffsetRecord("g", "t", 0, None)
    assert read_record(group_key("g"), None, 9) == GroupRecord("g", None)


@pytest.mark.parametrize("kind", [9, 17, 18, 19, 999, -1])
def test_records_of_other_protocols_are_passed_over(kind: int) -> None:
    key = kind.to_bytes(2, "big", signed=True) + b"\x00\x01gwhatever"
    assert read_record(key, b"\x00\x00anything", 0) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"", b""),
        (b"\x00", None),
        (b"\x00\x01", None),
        (b"\x00\x01\x00\xff", None),
        (bytes.fromhex("0001 0001 67 0001 74 00000002"), b""),
        (bytes.fromhex("0001 0001 67 0001 74 00000002"), b"\x00\x63rest"),
        (bytes.fromhex("0002 0001 67"), b"\x00\x04\x7f"),
    ],
)
def test_damage_is_a_protocol_error(key: bytes, value: bytes | None) -> None:
    with pytest.raises(ProtocolError):
        read_record(key, value, 0)


_TEXT = st.text(max_size=20)
_INT32 = st.integers(-(2**31), 2**31 - 1)
_INT64 = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=200, deadline=None)
@given(
    _TEXT, _TEXT, _INT32,
    st.builds(
        CommittedOffset, offset=_INT64, leader_epoch=_INT32, metadata=_TEXT, commit_timestamp_ms=_INT64,
        topic_id=st.uuids(), record_offset=st.integers(0, 2**40),
    ),
)  # fmt: skip
def test_offsets_come_back_as_they_were(group: str, topic: str, partition: int, committed: CommittedOffset) -> None:
    key, value = offset_key(group, topic, partition), offset_value(committed)
    assert read_record(key, value, committed.record_offset) == OffsetRecord(group, topic, partition, committed)


@settings(max_examples=200, deadline=None)
@given(
    _TEXT,
    st.builds(
        StoredGroup,
        protocol_type=_TEXT, generation=_INT32, protocol_name=st.none() | _TEXT, leader=st.none() | _TEXT,
        state_timestamp_ms=_INT64,
        members=st.lists(
            st.builds(
                StoredMember, member_id=_TEXT, instance_id=st.none() | _TEXT, client_id=_TEXT, client_host=_TEXT,
                rebalance_timeout_ms=_INT32, session_timeout_ms=_INT32, subscription=st.binary(max_size=9),
                assignment=st.binary(max_size=9),
            ),
            max_size=3,
        ).map(tuple),
    ),
)  # fmt: skip
def test_groups_come_back_as_they_were(group_id: str, group: StoredGroup) -> None:
    key, value = group_key(group_id), group_value(group)
    assert read_record(key, value, 0) == GroupRecord(group_id, group)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([kind.to_bytes(2) for kind in range(20)]),
    st.binary(max_size=60),
    st.none() | st.builds(bytes.__add__, st.sampled_from([version.to_bytes(2) for version in range(6)]), st.binary()),
)
def test_any_bytes_are_read_or_refused(kind: bytes, rest: bytes, value: bytes | None) -> None:
    """Behind a kind and a version that are known, or nearly: what looks at the rest must be reached."""
    key = kind + rest
    try:
        read_record(key, value, 0)
    except ProtocolError:
        pass
