"""The records of share groups: bytes as Kafka writes them, and back."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import ProtocolError
from millrace.groups.epochs import GroupEpoch, TargetEpoch
from millrace.groups.records import read_record
from millrace.groups.share.records import (
    Begun,
    PartitionStates,
    PartitionStatesRecord,
    ShareEpochRecord,
    ShareHeld,
    ShareHeldRecord,
    ShareInfo,
    ShareMemberRecord,
    ShareRecord,
    ShareTargetEpochRecord,
    ShareTargetRecord,
    share_entry,
)

TOPIC = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
NAMES = st.text(max_size=6)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
TARGETS = st.dictionaries(
    st.uuids(), st.sets(st.integers(0, 99), min_size=1).map(lambda each: tuple(sorted(each))), max_size=3
)
INFOS = st.builds(ShareInfo, st.none() | NAMES, NAMES, NAMES, st.sets(NAMES).map(lambda each: tuple(sorted(each))))
BEGUN = st.dictionaries(st.uuids(), st.builds(Begun, NAMES, st.frozensets(st.integers(0, 99), min_size=1)), max_size=3)
PARTITION_STATES = st.builds(PartitionStates, BEGUN, BEGUN, st.dictionaries(st.uuids(), NAMES, max_size=3))
RECORDS = st.one_of(
    st.builds(ShareEpochRecord, NAMES, st.none() | st.builds(GroupEpoch, INT32, INT64)),
    st.builds(ShareMemberRecord, NAMES, NAMES, st.none() | INFOS),
    st.builds(ShareTargetEpochRecord, NAMES, st.none() | st.builds(TargetEpoch, INT32, INT64)),
    st.builds(ShareTargetRecord, NAMES, NAMES, st.none() | TARGETS),
    st.builds(ShareHeldRecord, NAMES, NAMES, st.none() | st.builds(ShareHeld, INT32, INT32, TARGETS)),
    st.builds(PartitionStatesRecord, NAMES, st.none() | PARTITION_STATES),
)


@given(RECORDS)
def test_what_is_read_is_what_was_written(record: ShareRecord) -> None:
    assert read_record(*share_entry(record), 0) == record


GROUP, MEMBER = "000167", "00016d"


@pytest.mark.parametrize(
    ("record", "key", "value"),
    [
        (
            ShareMemberRecord("g", "m", ShareInfo(None, "c", "/h", ("t",))),
            "000a" + GROUP + MEMBER,
            "0000" + "00" + "0263" + "032f68" + "02" + "0274" + "00",
        ),
        (
            ShareEpochRecord("g", GroupEpoch(7, 2)),
            "000b" + GROUP,
            "0000" + "00000007" + "0000000000000002" + "00",
        ),
        (
            ShareTargetEpochRecord("g", TargetEpoch(7, 3)),
            "000c" + GROUP,
            "0000" + "00000007" + "01" + "00" + "08" + "0000000000000003",
        ),
        (
            ShareTargetRecord("g", "m", {TOPIC: (4,)}),
            "000d" + GROUP + MEMBER,
            "0000" + "02" + TOPIC.hex + "02" + "00000004" + "00" + "00",
        ),
        (
            ShareHeldRecord("g", "m", ShareHeld(3, 2, {TOPIC: (4,)})),
            "000e" + GROUP + MEMBER,
            "0000" + "00000003" + "00000002" + "00" + "02" + TOPIC.hex + "02" + "00000004" + "00" + "00",
        ),
        (
            PartitionStatesRecord("g", PartitionStates({TOPIC: Begun("t", frozenset({4}))}, {}, {TOPIC: "u"})),
            "000f" + GROUP,
            "0000"
            + ("02" + TOPIC.hex + "0274" + "02" + "00000004" + "00")
            + "01"
            + ("02" + TOPIC.hex + "0275" + "00")
            + "00",
        ),
    ],
)
def test_the_bytes_are_kafkas(record: ShareRecord, key: str, value: str) -> None:
    written_key, written_value = share_entry(record)
    assert written_key.hex() == key
    assert written_value is not None
    assert written_value.hex() == value


def test_a_value_without_a_version() -> None:
    key, _ = share_entry(PartitionStatesRecord("g", None))
    with pytest.raises(ProtocolError):
        read_record(key, b"\0", 0)
