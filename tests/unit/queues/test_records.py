"""The bytes of `__share_group_state`, compared with vectors worked out by hand from Kafka's definitions."""

from __future__ import annotations

import uuid

import pytest

from millrace.errors import ProtocolError
from millrace.queues.batches import RecordState, StateBatch
from millrace.queues.records import ShareKey, Snapshot, Update, entry, read_record

TOPIC_ID = uuid.UUID(int=0x0102030405060708090A0B0C0D0E0F10)
KEY = ShareKey("g", TOPIC_ID, 3)
SNAPSHOT = Snapshot(2, 5, 7, 42, 1, 0, 255, (StateBatch(43, 44, RecordState.ACKNOWLEDGED, 2),))
UPDATE = Update(2, 7, -1, -1, (StateBatch(43, 44, RecordState.ARCHIVED, 2),))

NAME = "0001 67 0102030405060708090a0b0c0d0e0f10 00000003"
BATCH = "000000000000002b 000000000000002c {:02x} 0002 00"


def test_a_snapshot() -> None:
    assert entry(KEY, SNAPSHOT) == (
        bytes.fromhex("0000" + NAME),
        bytes.fromhex(
            "0000 00000002 00000005 00000007 000000000000002a"  # version, epochs, start
            "0000000000000000 00000000000000ff"  # created, written
            "02" + BATCH.format(2) + "01 00 04 00000001"  # one tagged field: how many are done with
        ),
    )


def test_an_update() -> None:
    assert entry(KEY, UPDATE) == (
        bytes.fromhex("0001" + NAME),
        bytes.fromhex("0000 00000002 00000007 ffffffffffffffff 02" + BATCH.format(4) + "00"),
    )


@pytest.mark.parametrize("value", [SNAPSHOT, UPDATE, None])
def test_what_was_written_is_read(value: Snapshot | Update | None) -> None:
    assert read_record(*entry(KEY, value)) == (KEY, value)


def test_other_kinds_are_passed_over_and_nonsense_is_not() -> None:
    assert read_record(b"\x00\x09", b"") is None
    key, raw = entry(KEY, SNAPSHOT)
    assert raw is not None
    for bad_key, bad_value in ((b"\x00", raw), (key, b"\x00"), (key, raw[:20]), (key[:5], raw)):
        with pytest.raises(ProtocolError):
            read_record(bad_key, bad_value)
    with pytest.raises(ProtocolError, match="state nobody knows"):
        read_record(key, raw.replace(bytes.fromhex("000000000000002c02"), bytes.fromhex("000000000000002c09")))


def test_the_name_by_which_a_coordinator_is_found() -> None:
    assert str(KEY) == "g:AQIDBAUGBwgJCgsMDQ4PEA:3"
    assert ShareKey.parse(str(KEY)) == KEY
    assert ShareKey.parse("a:b:AQIDBAUGBwgJCgsMDQ4PEA:0").group_id == "a:b"
    for text in ("", "g", "g:3", ":AQIDBAUGBwgJCgsMDQ4PEA:3", "g:AQ:3", "g:AQIDBAUGBwgJCgsMDQ4PEA:x", "g:ä:0"):
        with pytest.raises(ValueError):
            ShareKey.parse(text)
