"""The records of KIP-848 groups: bytes as Kafka writes them, and back."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import ProtocolError
from millrace.groups.classic.effects import Protocol
from millrace.groups.epochs import GroupEpoch, MemberState, TargetEpoch
from millrace.groups.modern.records import (
    ClassicInfo,
    EpochRecord,
    Held,
    HeldRecord,
    MemberInfo,
    MemberRecord,
    ModernRecord,
    PatternRecord,
    Resolved,
    TargetEpochRecord,
    TargetRecord,
    TopicsRecord,
    to_entry,
)
from millrace.groups.records import read_record

TOPIC = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
NAMES = st.text(max_size=6)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
INDICES = st.sets(st.integers(0, 99), min_size=1).map(lambda each: tuple(sorted(each)))
OWNED = st.dictionaries(st.uuids(), st.dictionaries(st.integers(0, 99), INT32, min_size=1), max_size=3)
INFOS = st.builds(
    MemberInfo,
    instance_id=st.none() | NAMES,
    rack_id=st.none() | NAMES,
    client_id=NAMES,
    client_host=NAMES,
    topics=st.sets(NAMES).map(lambda each: tuple(sorted(each))),
    pattern=st.none() | st.text(min_size=1, max_size=6),
    rebalance_timeout_ms=INT32,
    assignor=st.none() | NAMES,
    classic=st.none()
    | st.builds(ClassicInfo, INT32, st.lists(st.builds(Protocol, NAMES, st.binary(max_size=9))).map(tuple)),
)
HELD = st.builds(Held, INT32, INT32, st.sampled_from(MemberState), OWNED, OWNED)
RESOLVED = st.builds(Resolved, st.sets(NAMES).map(lambda each: tuple(sorted(each))), INT64, INT64)
RECORDS = st.one_of(
    st.builds(EpochRecord, NAMES, st.none() | st.builds(GroupEpoch, INT32, INT64)),
    st.builds(TopicsRecord, NAMES, st.none()),
    st.builds(MemberRecord, NAMES, NAMES, st.none() | INFOS),
    st.builds(TargetEpochRecord, NAMES, st.none() | st.builds(TargetEpoch, INT32, INT64)),
    st.builds(TargetRecord, NAMES, NAMES, st.none() | st.dictionaries(st.uuids(), INDICES, max_size=3)),
    st.builds(HeldRecord, NAMES, NAMES, st.none() | HELD),
    st.builds(PatternRecord, NAMES, NAMES, st.none() | RESOLVED),
)


@given(RECORDS)
def test_what_is_read_is_what_was_written(record: ModernRecord) -> None:
    assert read_record(*to_entry(record), 0) == record


def test_the_bytes_are_kafkas() -> None:
    key, value = to_entry(EpochRecord("g", GroupEpoch(7, 2)))
    assert key.hex() == "0003" + "000167"
    assert value is not None
    assert value.hex() == "0000" + "00000007" + "01" + "00" + "08" + "0000000000000002"
    key, value = to_entry(HeldRecord("g", "m", Held(3, 2, MemberState.UNRELEASED_PARTITIONS, {TOPIC: {4: 3}})))
    assert key.hex() == "0008" + "000167" + "00016d"
    assert value is not None
    assert value.hex() == (
        "0000" + "00000003" + "00000002" + "02"
        "02" + TOPIC.hex + "02" + "00000004" + "01" + "00" + "05" + "02" + "00000003"
        "01" + "00"
    )  # fmt: skip
    key, value = to_entry(MemberRecord("g", "m", MemberInfo(client_id="c", client_host="/h", topics=("t",))))
    assert key.hex() == "0005" + "000167" + "00016d"
    assert value is not None
    assert value.hex() == "0000" + "00" + "00" + "0263" + "032f68" + "02" + "0274" + "00" + "ffffffff" + "00" + "00"


def test_owned_partitions_of_older_brokers_have_no_epochs() -> None:
    key, _ = to_entry(HeldRecord("g", "m", None))
    old = bytes.fromhex(
        "0000" + "00000003" + "00000002" + "00" + "02" + TOPIC.hex + "02" + "00000004" + "00" + "01" + "00"
    )
    assert read_record(key, old, 0) == HeldRecord("g", "m", Held(3, 2, assigned={TOPIC: {4: 0}}))


def test_a_state_of_newer_brokers_is_unknown() -> None:
    key, _ = to_entry(HeldRecord("g", "m", None))
    read = read_record(key, bytes.fromhex("0000" + "00000003" + "00000002" + "09" + "01" + "01" + "00"), 0)
    assert read == HeldRecord("g", "m", Held(3, 2, MemberState.UNKNOWN))


def test_what_older_brokers_knew_of_topics_is_only_noticed() -> None:
    key, _ = to_entry(TopicsRecord("g", None))
    assert read_record(key, b"whatever", 0) == TopicsRecord("g", True)


def test_a_value_without_a_version() -> None:
    key, _ = to_entry(EpochRecord("g", None))
    with pytest.raises(ProtocolError):
        read_record(key, b"\0", 0)
