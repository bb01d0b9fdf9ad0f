"""`millrace log dump`: what lies in the files of a log directory, and whether it is sound.

It reads files, never a broker, and never writes; a running broker's files can be read too. Each line is one thing in
the file (a batch, a record, an index entry, a producer, a checkpoint entry); the byte layouts belong to `records` and
`storage`. Damage is reported on stderr and gives exit code 1, after everything that could be read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from millrace.cli.jsonrecords import bytes_to_json
from millrace.cli.output import CommandError, print_error
from millrace.cli.times import iso_utc
from millrace.errors import ApiError
from millrace.model import encode_uuid
from millrace.records.batch import HEADER_BYTES, Batch, crc_matches, read_header, split
from millrace.records.control import decode_end_marker
from millrace.records.decode import iter_records
from millrace.storage import checkpoint
from millrace.storage.files import Files
from millrace.storage.index import OffsetIndex, TimeIndex
from millrace.storage.producers import Producers
from millrace.storage.txnindex import TransactionIndex

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look into log directories.")

Entry = dict[str, Any]
_UNKNOWN_SIZE: Final = 2**31


class Damage(CommandError):
    """The file is not what its name says, from here on."""


@app.callback()
def log() -> None:
    """Look into log directories."""


@app.command(
    epilog="Example: millrace log dump millrace-data/broker-1/data/orders-0/00000000000000000000.log --records"
)
def dump(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", show_default=False, help="Files of a log directory.")
    ],
    *,
    records: Annotated[bool, typer.Option("--records", "-r", help="Also every record of a segment.")] = False,
    max_entries: Annotated[
        int | None, typer.Option("--max", "-n", min=1, help="Stop after so many lines per file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Print segments, indexes, snapshots and checkpoints, and check them."""
    damaged = False
    for path in files:
        if not path.is_file():
            raise CommandError(f"there is no file '{path}'")
        if len(files) > 1 and not as_json:
            print(f"# {path}")
        try:
            for number, entry in enumerate(reader_of(path)(path, records), start=1):
                _print_entry(entry, as_json=as_json)
                if number == max_entries:
                    break
        except Damage as error:
            sys.stdout.flush()
            print_error(f"{path}: {error}")
            damaged = True
    if damaged:
        raise typer.Exit(1)


def reader_of(path: Path) -> Callable[[Path, bool], Iterator[Entry]]:
    """How a file of this name is read."""
    reader = _BY_SUFFIX.get(path.suffix) or _BY_NAME.get(path.name)
    if reader is None:
        known = ", ".join([*(f"*{suffix}" for suffix in _BY_SUFFIX), *_BY_NAME])
        raise CommandError(f"'{path.name}' is no file of a log directory; known are {known}", exit_code=2)
    return reader


def _print_entry(entry: Entry, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(entry, ensure_ascii=False))
        return
    kind = entry.pop("is")
    indent = "  " if kind == "record" else ""
    print(indent + " ".join([kind, *(f"{name}={_text(value)}" for name, value in entry.items())]))


def _text(value: Any) -> str:
    if isinstance(value, str) and value and value.isprintable() and " " not in value:
        return value
    return json.dumps(value, ensure_ascii=False)


# Segments.


def _segment(path: Path, records: bool) -> Iterator[Entry]:
    for position, batch in _batches(path):
        yield _batch_entry(batch, position)
        if not crc_matches(batch.data):
            raise Damage(f"at byte {position}: the CRC of the batch is wrong")
        if records:
            yield from _record_entries(batch)


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


def _record_entries(batch: Batch) -> Iterator[Entry]:
    if batch.header.is_control:
        marker = decode_end_marker(batch.data)
        if marker is not None:
            yield {"is": "marker", "offset": batch.header.base_offset, "type": marker.type.name.lower()}
        return
    try:
        for record in iter_records(batch.data):
            yield {
                "is": "record",
                "offset": record.offset,
                "timestamp": record.timestamp_ms,
                "time": iso_utc(record.timestamp_ms) if record.timestamp_ms >= 0 else None,
                "key": bytes_to_json(record.key),
                "value": bytes_to_json(record.value),
                "headers": [[header.key, bytes_to_json(header.value)] for header in record.headers],
            }
    except ApiError as error:
        raise Damage(f"in the batch at offset {batch.header.base_offset}: {error.message}") from None


# Indexes.


def _base_offset(path: Path) -> int:
    if not path.stem.isdecimal():
        raise Damage("the name of a segment's file is its base offset")
    return int(path.stem)


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
    segment = path.with_suffix(".log")
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
    for one in TransactionIndex(Files(), path).entries():
        yield {"is": "aborted", **one._asdict()}


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
        yield {"is": "entry", "topic": topic, "partition": int(partition), "offset": int(offset)}


def _epoch_checkpoint(path: Path, _records: bool) -> Iterator[Entry]:
    entries = checkpoint.parse(path.read_bytes(), 2)
    if entries is None:
        raise Damage("not a checkpoint of leader epochs")
    for epoch, offset in entries:
        yield {"is": "entry", "epoch": int(epoch), "start_offset": int(offset)}


def _partition_metadata(path: Path, _records: bool) -> Iterator[Entry]:
    topic_id = checkpoint.read_partition_metadata(Files(), path)
    if topic_id is None:
        raise Damage("holds no topic id")
    yield {"is": "topic", "topic_id": encode_uuid(topic_id), "uuid": str(topic_id)}


_BY_SUFFIX: Final[dict[str, Callable[[Path, bool], Iterator[Entry]]]] = {
    ".log": _segment,
    ".index": _offset_index,
    ".timeindex": _time_index,
    ".txnindex": _transaction_index,
    ".snapshot": _snapshot,
}
_BY_NAME: Final[dict[str, Callable[[Path, bool], Iterator[Entry]]]] = {
    checkpoint.RECOVERY_POINTS: _offset_checkpoint,
    checkpoint.LOG_STARTS: _offset_checkpoint,
    checkpoint.HIGH_WATERMARKS: _offset_checkpoint,
    checkpoint.LEADER_EPOCHS: _epoch_checkpoint,
    checkpoint.PARTITION_METADATA: _partition_metadata,
}
