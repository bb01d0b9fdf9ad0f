"""`log dump`: every kind of file, sound and damaged."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import uuid
from pathlib import Path

import pytest

from millrace.cli.root import run
from millrace.model import TopicPartition, encode_uuid
from millrace.records.batch import read_header
from millrace.records.compression import Codec
from millrace.records.control import EndMarker, MarkerType, encode_end_marker
from millrace.records.decode import Header, Record
from millrace.records.encode import encode_batch
from millrace.storage import checkpoint
from millrace.storage.index import OffsetIndex, TimeIndex
from millrace.storage.producers import Producers

FIRST_MS = 1_700_000_000_000


def batch(base: int, count: int, codec: Codec = Codec.NONE, **extra: int) -> bytes:
    records = [
        Record(
            base + number, FIRST_MS + base + number, b"k%d" % number, b"\xff" if number else None, (Header("h", b"1"),)
        )
        for number in range(count)
    ]
    return encode_batch(records, compression=codec, leader_epoch=2, **extra)


def dumped(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> list[dict[str, object]]:
    assert run(["log", "dump", "--json", *map(str, argv)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    path = tmp_path / "00000000000000000000.log"
    path.write_bytes(
        batch(0, 3) + batch(3, 2, Codec.ZSTD) + batch(5, 1, producer_id=9, producer_epoch=1, base_sequence=4)
    )
    return path


def test_batches_of_a_segment(segment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = dumped(capsys, segment)
    assert [(one["base_offset"], one["last_offset"], one["codec"], one["crc_ok"]) for one in entries] == [
        (0, 2, "none", True),
        (3, 4, "zstd", True),
        (5, 5, "none", True),
    ]
    assert entries[1]["position"] == entries[0]["size"]
    assert (entries[2]["producer_id"], entries[2]["base_sequence"], entries[2]["leader_epoch"]) == (9, 4, 2)


def test_records_of_a_segment(segment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [one for one in dumped(capsys, segment, "--records") if one["is"] == "record"]
    assert [one["offset"] for one in records] == list(range(6))
    assert records[0]["value"] is None
    assert records[1]["value"] == {"base64": "/w=="}
    assert (records[4]["key"], records[4]["headers"]) == ("k1", [["h", "1"]])


def test_text_output_has_one_line_per_thing(segment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["log", "dump", str(segment), "--records", "--max", "2"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("batch base_offset=0 last_offset=2 count=3 ")
    assert second.startswith("  record offset=0 ")


@pytest.mark.parametrize("cut", [1, 30, 60, 61, 70])
def test_a_torn_end_is_reported_after_the_sound_part(
    segment: Path, cut: int, capsys: pytest.CaptureFixture[str]
) -> None:
    data = segment.read_bytes()
    last = len(batch(5, 1, producer_id=9, producer_epoch=1, base_sequence=4))
    segment.write_bytes(data[: len(data) - last + cut])
    assert run(["log", "dump", str(segment)]) == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2
    assert f"at byte {len(data) - last}" in captured.err


def test_a_wrong_crc_is_reported(segment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    assert run(["log", "dump", str(segment)]) == 1
    captured = capsys.readouterr()
    assert "crc_ok=false" in captured.out
    assert "the CRC of the batch is wrong" in captured.err


def test_an_empty_segment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "00000000000000000000.log"
    path.touch()
    assert dumped(capsys, path) == []


def test_an_offset_index_is_checked_against_its_segment(segment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = read_header(segment.read_bytes()).size_bytes
    index = OffsetIndex()
    index.append(4, first)
    path = segment.with_suffix(".index")
    path.write_bytes(index.pack() + bytes(80))  # Kafka preallocates
    assert dumped(capsys, path) == [{"is": "entry", "offset": 4, "position": first}]

    index = OffsetIndex()
    index.append(5, first)
    path.write_bytes(index.pack())
    assert run(["log", "dump", str(path)]) == 1
    assert f"offset 5 points to byte {first}, where the segment has 3 to 4" in capsys.readouterr().err


def test_a_time_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = TimeIndex()
    index.maybe_append(FIRST_MS, 2)
    index.maybe_append(FIRST_MS + 9, 7)
    path = tmp_path / "00000000000000000100.timeindex"
    path.write_bytes(index.pack())
    assert [(one["timestamp"], one["offset"]) for one in dumped(capsys, path)] == [(FIRST_MS, 102), (FIRST_MS + 9, 107)]


def test_a_producer_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    producers = Producers()
    producers.record(read_header(batch(0, 3, producer_id=9, producer_epoch=1, base_sequence=0)), 0, 1_700_000_000_000)
    path = tmp_path / "00000000000000000003.snapshot"
    path.write_bytes(producers.to_bytes())
    (entry,) = dumped(capsys, path)
    assert (entry["producer_id"], entry["last_sequence"], entry["last_offset"]) == (9, 2, 2)
    path.write_bytes(path.read_bytes()[:-1])
    assert run(["log", "dump", str(path)]) == 1


def test_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offsets = tmp_path / checkpoint.RECOVERY_POINTS
    offsets.write_bytes(checkpoint.render_offsets({TopicPartition("orders", 2): 77}))
    assert dumped(capsys, offsets) == [{"is": "entry", "topic": "orders", "partition": 2, "offset": 77}]
    epochs = tmp_path / checkpoint.LEADER_EPOCHS
    epochs.write_bytes(checkpoint.render_epochs([(0, 0), (3, 50)]))
    assert [(one["epoch"], one["start_offset"]) for one in dumped(capsys, epochs)] == [(0, 0), (3, 50)]
    metadata = tmp_path / checkpoint.PARTITION_METADATA
    topic_id = uuid.uuid4()
    metadata.write_bytes(checkpoint.render_partition_metadata(topic_id))
    (entry,) = dumped(capsys, metadata)
    assert entry["uuid"] == str(topic_id)
    offsets.write_bytes(b"0\n2\norders 2 77\n")
    assert run(["log", "dump", str(offsets)]) == 1


def test_the_files_of_a_data_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topic_id = uuid.uuid4()
    cleaned = tmp_path / checkpoint.CLEANED_OFFSETS
    cleaned.write_bytes(checkpoint.render_offsets({TopicPartition("users", 0): 5}))
    assert dumped(capsys, cleaned) == [{"is": "entry", "topic": "users", "partition": 0, "offset": 5}]
    logs = tmp_path / checkpoint.LOGS
    logs.write_bytes(checkpoint.render_logs({TopicPartition("users", 0): topic_id}))
    assert dumped(capsys, logs) == [
        {"is": "entry", "topic": "users", "partition": 0, "topic_id": encode_uuid(topic_id)}
    ]
    stopped = tmp_path / checkpoint.CLEAN_SHUTDOWN
    stopped.write_bytes(checkpoint.render_clean_shutdown(7))
    assert dumped(capsys, stopped) == [{"is": "clean_shutdown", "broker_epoch": 7}]
    meta = tmp_path / "meta.properties"
    meta.write_text("version=1\nnode.id=3\n")
    assert dumped(capsys, meta) == [
        {"is": "property", "name": "version", "value": "1"},
        {"is": "property", "name": "node.id", "value": "3"},
    ]
    meta.write_text("node.id=3\n")
    assert run(["log", "dump", str(meta)]) == 1
    assert "there is no version=1" in capsys.readouterr().err
    (tmp_path / "moved").touch()
    assert [one["is"] for one in dumped(capsys, tmp_path / "moved")] == ["moved"]


@pytest.mark.parametrize("suffix", [".deleted", ".cleaned", ".swap", ".cut-0"])
def test_files_on_their_way_in_or_out_are_read_like_what_they_were(
    segment: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    renamed = segment.rename(segment.with_name(segment.name + suffix))
    assert len(dumped(capsys, renamed)) == 3


def test_numbers_that_are_none_are_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / checkpoint.LOG_STARTS
    path.write_bytes(checkpoint.render(["orders 0 x"]))
    assert run(["log", "dump", str(path)]) == 1
    assert "'x' is no number" in capsys.readouterr().err


def test_a_lock_says_who_holds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / ".lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert dumped(capsys, path) == [{"is": "lock", "held_by": [os.getpid()]}]
    assert dumped(capsys, path) == [{"is": "lock", "held_by": []}]


def test_a_directory_stands_for_its_files(segment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = segment.parent
    (home / "orders-0").mkdir()
    (home / "orders-0" / "00000000000000000000.log").write_bytes(b"12345")
    (home / "orders-1.0123-delete").mkdir()
    (home / "notes.txt").touch()
    assert run(["log", "dump", "--json", str(home)]) == 0
    captured = capsys.readouterr()
    entries = [json.loads(line) for line in captured.out.splitlines()]
    assert [(one["file"], one["is"]) for one in entries] == [
        *[(str(segment), "batch")] * 3,
        (str(home / "orders-0"), "log"),
        (str(home / "orders-1.0123-delete"), "deleted_log"),
    ]
    assert (entries[3]["files"], entries[3]["size"]) == (1, 5)
    assert "notes.txt" in captured.err
    assert run(["log", "dump", str(home / "notes.txt")]) == 2
    assert run(["log", "dump", str(home / "nothing")]) == 1


def test_markers_of_transactions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "00000000000000000000.log"
    path.write_bytes(
        b"".join(
            encode_end_marker(EndMarker(kind, 5), producer_id=9, producer_epoch=2, timestamp_ms=FIRST_MS)
            for kind in (MarkerType.COMMIT, MarkerType.ABORT)
        )
    )
    markers = [one for one in dumped(capsys, path, "--records") if one["is"] == "marker"]
    shared = {"is": "marker", "offset": 0, "producer_id": 9, "producer_epoch": 2, "coordinator_epoch": 5}
    assert markers == [{**shared, "type": "COMMIT"}, {**shared, "type": "ABORT"}]


def test_a_control_batch_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "00000000000000000000.log"
    path.write_bytes(encode_batch([Record(0, FIRST_MS, b"\x00", None)], control=True, transactional=True))
    assert run(["log", "dump", str(path), "--records"]) == 1
    assert "in the batch at offset 0: a control record has no readable key" in capsys.readouterr().err


def test_a_transaction_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "00000000000000000000.txnindex"
    entry = struct.pack(">hqqqq", 0, 9, 3, 5, 6)
    path.write_bytes(entry)
    expected = {"is": "aborted", "producer_id": 9, "first_offset": 3, "last_offset": 5, "last_stable_offset": 6}
    assert dumped(capsys, path) == [expected]
    path.write_bytes(entry + entry[:-1])
    assert run(["log", "dump", str(path)]) == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert "at byte 34: not an aborted transaction, or one that is cut" in captured.err


def test_records_of_transaction_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = struct.pack(">hh", 0, 2) + b"id"
    # What Kafka 4.3 writes: version 0 without and version 1 with tagged fields.
    old = struct.pack(">hqhib", 0, 9, 2, 60_000, 1) + struct.pack(">ih", 1, 1) + b"t" + struct.pack(">iii", 2, 0, 3)
    old += struct.pack(">qq", FIRST_MS + 1, FIRST_MS)
    new = struct.pack(">hqhib", 1, 9, 3, 60_000, 5) + b"\x00" + struct.pack(">qq", FIRST_MS, -1)
    new += b"\x02\x00\x08" + struct.pack(">q", 9) + b"\x02\x02" + struct.pack(">h", 2)
    values = [old, new, None, struct.pack(">h", 7)]
    folder = tmp_path / "__transaction_state-17"
    folder.mkdir()
    path = folder / "00000000000000000000.log"
    path.write_bytes(encode_batch([Record(at, FIRST_MS, key, value) for at, value in enumerate(values)]))
    first, second, third, fourth = (one for one in dumped(capsys, path, "--records") if one["is"] == "record")
    assert (first["transactional_id"], first["state"], first["partitions"]) == ("id", "Ongoing", ["t-0", "t-3"])
    assert (first["producer_id"], first["producer_epoch"], first["timeout_ms"]) == (9, 2, 60_000)
    assert (first["started"], first["updated"]) == ("2023-11-14T22:13:20.000Z", "2023-11-14T22:13:20.001Z")
    assert (second["state"], second["started"], second["partitions"]) == ("CompleteAbort", None, [])
    assert (second["previous_producer_id"], second["transaction_version"]) == (9, 2)
    assert (third["transactional_id"], third["state"]) == ("id", None)
    assert (fourth["transactional_id"], fourth["version"]) == ("id", 7)

    path.write_bytes(encode_batch([Record(0, FIRST_MS, key, b"\x00\x01\x02")]))
    assert run(["log", "dump", str(path), "--records"]) == 1
    assert "at offset 0: " in capsys.readouterr().err
