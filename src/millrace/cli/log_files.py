"""The files of a data directory, each as the entries it holds: what `millrace log dump` prints.

The byte layouts belong to `records`, `storage` and `metadata`; here is which file is read how. A file is known by its
name; `.deleted`, `.cleaned`, `.swap` and `.tmp` after a name say that it is on its way in or out, and it is read like
the file it was or will be. Nothing here writes, locks or asks a broker: a running broker's files can be read too.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from millrace.admin.times import iso_utc
from millrace.cli.jsonrecords import bytes_to_json
from millrace.cli.output import HIDDEN, CommandError
from millrace.cli.transaction_log import describe_transaction_state
from millrace.errors import ApiError, ProtocolError
from millrace.metadata import embedded
from millrace.model import TRANSACTION_STATE_TOPIC, decode_uuid, encode_uuid
from millrace.records.batch import HEADER_BYTES, Batch, crc_matches, read_header, split
from millrace.records.control import decode_end_marker
from millrace.records.decode import Record, iter_records
from millrace.security import exposure, hiding
from millrace.storage import checkpoint, directory, move, names
from millrace.storage.files import Files
from millrace.storage.index import OffsetIndex, TimeIndex
from millrace.storage.producers import Producers
from millrace.storage.segment import CLEANED_SUFFIX, DELETED_SUFFIX, SWAP_SUFFIX
from millrace.storage.txnindex import ENTRY_BYTES, TransactionIndex

Entry = dict[str, Any]
Reader = Callable[[Path, bool], Iterator[Entry]]
_UNKNOWN_SIZE: Final = 2**31
_PASSING: Final = (DELETED_SUFFIX, CLEANED_SUFFIX, SWAP_SUFFIX, ".tmp")
_CUT: Final = re.compile(r"\.cut-\d+\Z")
_COPY_TRIES: Final = 20


class Damage(CommandError):
    """The file is not what its name says, from here on."""


def reader_of(path: Path) -> Reader | None:
    """How a file of this name is read; None where no broker writes one."""
    name = _plain_name(path)
    return _BY_NAME.get(name) or _BY_SUFFIX.get(Path(name).suffix)


def known_names() -> list[str]:
    """The names that are known, for a person who gave another one."""
    return [*(f"*{suffix}" for suffix in _BY_SUFFIX), *_BY_NAME]


def directory_entry(path: Path) -> Entry:
    """One line for a directory: what it is, by its name, and how much is in it."""
    partition = names.partition_named(path.name)
    kind = "log" if partition is not None else "directory"
    for suffix, meaning in _ASIDE.items():
        if path.name.endswith(suffix):
            kind = meaning
    sizes = [one.stat().st_size for one in path.iterdir() if one.is_file()]
    return {"is": kind, "name": path.name, "files": len(sizes), "size": sum(sizes)}


def _plain_name(path: Path) -> str:
    """The name without what says that the file is on its way in or out."""
    name = path.name
    while name.endswith(_PASSING):
        name = name.rpartition(".")[0]
    return _CUT.sub("", name)


# Segments.


def _segment(path: Path, records: bool) -> Iterator[Entry]:
    partition = names.partition_named(path.absolute().parent.name)
    is_state = partition is not None and partition.topic == TRANSACTION_STATE_TOPIC
    describe = _transaction_state if is_state else _key_and_value
    for position, batch in _batches(path):
        yield _batch_entry(batch, position)
        if not crc_matches(batch.data):
            raise Damage(f"at byte {position}: the CRC of the batch is wrong")
        if records:
            yield from _record_entries(batch, describe)


def _batches(path: Path) -> Iterator[tuple[int, Batch]]:
    """Each batch and where it begins; only one of them is in memory at a time."""
    size_bytes = path.stat().st_size
    position = 0
    with path.open("rb") as file:
        while head := file.read(HEADER_BYTES):
            try:
                length = read_header(head).size_bytes
                if length < HEADER_BYTES or position + length > size_bytes:
                    raise Damage(f"at byte {position}: a batch of {length} bytes, but {size_bytes - position} are left")
                (batch,) = split(head + file.read(length - HEADER_BYTES))
            except ApiError as error:
                raise Damage(f"at byte {position}: {error.message}") from None
            yield position, batch
            position += length


def _batch_entry(batch: Batch, position: int) -> Entry:
    header = batch.header
    codec = header.codec.name.lower() if header.codec_id <= 4 else f"unknown-{header.codec_id}"
    return {
        "is": "batch",
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "count": header.count,
        "position": position,
        "size": header.size_bytes,
        "codec": codec,
        "timestamp_type": header.timestamp_type.name.lower(),
        "max_timestamp": header.max_timestamp_ms,
        "leader_epoch": header.leader_epoch,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "base_sequence": header.base_sequence,
        "last_sequence": header.last_sequence,
        "transactional": header.is_transactional,
        "control": header.is_control,
        "crc": header.crc,
        "crc_ok": crc_matches(batch.data),
    }


def _record_entries(batch: Batch, describe: Callable[[Record], Entry]) -> Iterator[Entry]:
    try:
        if batch.header.is_control:
            yield from _marker_entries(batch)
            return
        for record in iter_records(batch.data):
            yield {
                "is": "record",
                "offset": record.offset,
                "timestamp": record.timestamp_ms,
                "time": iso_utc(record.timestamp_ms) if record.timestamp_ms >= 0 else None,
                **describe(record),
                "headers": [[header.key, bytes_to_json(header.value)] for header in record.headers],
            }
    except ApiError as error:
        raise Damage(f"in the batch at offset {batch.header.base_offset}: {error.message}") from None


def _marker_entries(batch: Batch) -> Iterator[Entry]:
    marker = decode_end_marker(batch.data)
    if marker is not None:
        yield {
            "is": "marker",
            "offset": batch.header.base_offset,
            "type": marker.type.name,
            "producer_id": batch.header.producer_id,
            "producer_epoch": batch.header.producer_epoch,
            "coordinator_epoch": marker.coordinator_epoch,
        }


def _key_and_value(record: Record) -> Entry:
    return {"key": bytes_to_json(record.key), "value": bytes_to_json(record.value)}


def _transaction_state(record: Record) -> Entry:
    try:
        return describe_transaction_state(record.key, record.value)
    except ProtocolError as error:
        raise Damage(f"at offset {record.offset}: {error}") from None


# Indexes.


def _base_offset(path: Path) -> int:
    stem = Path(_plain_name(path)).stem
    if not stem.isdecimal():
        raise Damage("the name of a segment's file is its base offset")
    return int(stem)


def _without_preallocated_tail(data: bytes, entry_bytes: int) -> bytes:
    """Kafka preallocates the index of an active segment with zeros; an entry of zeros is real only as the first."""
    end = len(data) - len(data) % entry_bytes
    while end > entry_bytes and not any(data[end - entry_bytes : end]):
        end -= entry_bytes
    return data[:end] if any(data[:end]) else b""


def _offset_index(path: Path, _records: bool) -> Iterator[Entry]:
    base = _base_offset(path)
    index = OffsetIndex.parse(_without_preallocated_tail(path.read_bytes(), 8), _UNKNOWN_SIZE)
    if index is None:
        raise Damage("not an offset index: the entries do not increase, or the last one is cut")
    segment = path.with_name(path.name.replace(".index", ".log", 1))
    content = segment.read_bytes() if segment.is_file() else None
    for relative, position in zip(index.offsets, index.positions, strict=True):
        yield {"is": "entry", "offset": base + relative, "position": position}
        if content is None:
            continue
        try:
            header = read_header(content, position)
        except ApiError:
            raise Damage(f"offset {base + relative} points to byte {position}, after the end of the segment") from None
        if not header.base_offset <= base + relative <= header.last_offset:
            raise Damage(
                f"offset {base + relative} points to byte {position}, where the segment has "
                f"{header.base_offset} to {header.last_offset}"
            )


def _time_index(path: Path, _records: bool) -> Iterator[Entry]:
    base = _base_offset(path)
    index = TimeIndex.parse(_without_preallocated_tail(path.read_bytes(), 12))
    if index is None:
        raise Damage("not a time index: the entries do not increase, or the last one is cut")
    for timestamp_ms, relative in zip(index.timestamps, index.offsets, strict=True):
        yield {"is": "entry", "timestamp": timestamp_ms, "time": iso_utc(timestamp_ms), "offset": base + relative}


def _transaction_index(path: Path, _records: bool) -> Iterator[Entry]:
    entries = TransactionIndex(Files(), path).entries()
    for one in entries:
        yield {"is": "aborted", **one._asdict()}
    if len(entries) * ENTRY_BYTES != path.stat().st_size:
        raise Damage(f"at byte {len(entries) * ENTRY_BYTES}: not an aborted transaction, or one that is cut")


# Producer snapshots and checkpoints.


def _snapshot(path: Path, _records: bool) -> Iterator[Entry]:
    producers = Producers.from_bytes(path.read_bytes())
    if producers is None:
        raise Damage("not a producer snapshot, or its CRC is wrong")
    for producer in producers:
        yield {
            "is": "producer",
            "producer_id": producer.producer_id,
            "producer_epoch": producer.epoch,
            "coordinator_epoch": producer.coordinator_epoch,
            "last_timestamp": producer.heard_ms,
            "transaction_first_offset": producer.transaction_first_offset,
            "last_sequence": producer.last_sequence,
            "last_offset": producer.last_offset,
            "batches": [mark._asdict() for mark in producer.batches],
        }


def _offset_checkpoint(path: Path, _records: bool) -> Iterator[Entry]:
    entries = checkpoint.parse(path.read_bytes(), 3)
    if entries is None:
        raise Damage("not a checkpoint of offsets")
    for topic, partition, offset in entries:
        yield {"is": "entry", "topic": topic, "partition": _number(partition), "offset": _number(offset)}


def _logs_checkpoint(path: Path, _records: bool) -> Iterator[Entry]:
    entries = checkpoint.parse(path.read_bytes(), 3)
    if entries is None:
        raise Damage("not a checkpoint of logs")
    for topic, partition, topic_id in entries:
        if decode_uuid(topic_id) is None:
            raise Damage(f"'{topic_id}' is no topic id")
        yield {"is": "entry", "topic": topic, "partition": _number(partition), "topic_id": topic_id}


def _epoch_checkpoint(path: Path, _records: bool) -> Iterator[Entry]:
    entries = checkpoint.parse(path.read_bytes(), 2)
    if entries is None:
        raise Damage("not a checkpoint of leader epochs")
    for epoch, offset in entries:
        yield {"is": "entry", "epoch": _number(epoch), "start_offset": _number(offset)}


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise Damage(f"'{text}' is no number") from None


def _partition_metadata(path: Path, _records: bool) -> Iterator[Entry]:
    topic_id = checkpoint.read_partition_metadata(Files(), path)
    if topic_id is None:
        raise Damage("holds no topic id")
    yield {"is": "topic", "topic_id": encode_uuid(topic_id), "uuid": str(topic_id)}


# A directory's own files.


def _properties(path: Path, _records: bool) -> Iterator[Entry]:
    fields = directory.parse_meta(path.read_bytes())
    for name, value in fields.items():
        yield {"is": "property", "name": name, "value": value}
    if fields.get("version") != "1":
        raise Damage("not the properties of a data directory: there is no version=1")


def _clean_shutdown(path: Path, _records: bool) -> Iterator[Entry]:
    epoch = checkpoint.read_clean_shutdown(path.read_bytes())
    yield {"is": "clean_shutdown", "broker_epoch": epoch}


def _moved(_path: Path, _records: bool) -> Iterator[Entry]:
    yield {"is": "moved", "means": "this log has taken the place of the one in another directory"}


def _lock(path: Path, _records: bool) -> Iterator[Entry]:
    """Who holds the lock, as the kernel lists it: trying to take it could get in the way of a broker that starts."""
    yield {"is": "lock", "held_by": _holders(path.stat().st_ino)}


def _holders(inode: int) -> list[int] | None:
    """The processes that hold a file's lock; None where the system does not tell."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    # 1: FLOCK  ADVISORY  WRITE 4242 fe:01:1835011 0 EOF
    locks = [line.split() for line in lines if " FLOCK " in line and "->" not in line]
    return [int(lock[4]) for lock in locks if lock[5].rpartition(":")[2] == str(inode)]


# The metadata of a broker that is alone.


def _metadata(path: Path, records: bool) -> Iterator[Entry]:
    """The metadata log: counters, the snapshot, and the deltas after it; with `records` also every change in them."""
    database = path.with_name(embedded.FILE_NAME)
    with tempfile.TemporaryDirectory(prefix="millrace-dump-") as folder:
        copy = _copied_database(database, Path(folder))
        try:
            connection = sqlite3.connect(copy)
            try:
                yield from _metadata_entries(connection, records)
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise Damage(f"not a metadata log: {error}") from None


def _copied_database(database: Path, folder: Path) -> Path:
    """A copy of the database with its write-ahead log, both of the same moment.

    A running broker holds the file's lock, and reading it without the write-ahead log would show an old state.
    """
    parts = [database, database.with_name(database.name + "-wal")]
    for _ in range(_COPY_TRIES):
        before = _states(parts)
        for part in parts:
            if part.exists():
                shutil.copyfile(part, folder / part.name)
            else:
                (folder / part.name).unlink(missing_ok=True)
        if _states(parts) == before:
            return folder / database.name
    raise CommandError(f"{database} changes all the time: try again, or stop the broker first")


def _states(paths: list[Path]) -> list[tuple[int, int] | None]:
    states: list[tuple[int, int] | None] = []
    for path in paths:
        try:
            status = path.stat()
        except FileNotFoundError:
            states.append(None)
        else:
            states.append((status.st_size, status.st_mtime_ns))
    return states


def _metadata_entries(connection: sqlite3.Connection, records: bool) -> Iterator[Entry]:
    for name, value in connection.execute("SELECT name, value FROM counters ORDER BY name"):
        yield {"is": "counter", "name": name, "value": value}
    for index, data in connection.execute("SELECT idx, data FROM snapshot"):
        yield from _change_set({"is": "snapshot", "index": index}, data, records)
    for index, epoch, data in connection.execute("SELECT idx, controller_epoch, data FROM deltas ORDER BY idx"):
        yield from _change_set({"is": "delta", "index": index, "controller_epoch": epoch}, data, records)


def _change_set(entry: Entry, data: bytes, records: bool) -> Iterator[Entry]:
    """As it was written, not as this version understands it: a dump is for looking at what is strange."""
    try:
        changes = [(kind, fields) for kind, fields in json.loads(data)["changes"]]
    except (ValueError, KeyError, TypeError):
        raise Damage(f"{entry['is']} {entry['index']} is no change-set") from None
    yield {**entry, "size": len(data), "changes": [kind for kind, _ in changes]}
    if records:
        for kind, fields in changes:
            yield {"is": "change", "change": kind, "fields": _without_secrets(kind, fields)}


def _without_secrets(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What is kept of passwords, and settings that are secrets, are in the file for the broker alone."""
    if kind == "scram_changed" and fields.get("credential") is not None:
        return {**fields, "credential": HIDDEN}
    if kind == "config_changed":
        values = fields.get("values", [])
        return {**fields, "values": [[name, HIDDEN if _is_secret(name) else value] for name, value in values]}
    return fields


def _is_secret(name: str) -> bool:
    """By the table, and for a name that is not there any more by what it says."""
    return exposure.is_secret(name) or hiding.is_secret(name)


_ASIDE: Final = {
    names.DELETE_SUFFIX: "deleted_log",
    names.FUTURE_SUFFIX: "future_log",
    names.STRAY_SUFFIX: "stray_log",
}
_BY_SUFFIX: Final[dict[str, Reader]] = {
    ".log": _segment,
    ".index": _offset_index,
    ".timeindex": _time_index,
    ".txnindex": _transaction_index,
    ".snapshot": _snapshot,
}
_BY_NAME: Final[dict[str, Reader]] = {
    checkpoint.RECOVERY_POINTS: _offset_checkpoint,
    checkpoint.LOG_STARTS: _offset_checkpoint,
    checkpoint.HIGH_WATERMARKS: _offset_checkpoint,
    checkpoint.CLEANED_OFFSETS: _offset_checkpoint,
    checkpoint.LOGS: _logs_checkpoint,
    checkpoint.LEADER_EPOCHS: _epoch_checkpoint,
    checkpoint.PARTITION_METADATA: _partition_metadata,
    checkpoint.CLEAN_SHUTDOWN: _clean_shutdown,
    directory.META: _properties,
    directory.LOCK: _lock,
    move.MARK: _moved,
    embedded.FILE_NAME: _metadata,
    f"{embedded.FILE_NAME}-wal": _metadata,  # read together, whichever is named
}
