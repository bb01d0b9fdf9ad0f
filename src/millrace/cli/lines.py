"""What `produce` reads: where a record ends in a stream of bytes, and how those bytes become a record.

A line ends with a line feed, or a carriage return and a line feed: neither is part of the record. With a delimiter that
was asked for, every other byte is. Not here: files that are still being written (`follow`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from millrace.cli.interruptions import Interruptions
from millrace.cli.jsonrecords import OutgoingRecord, record_from_json
from millrace.cli.output import CommandError

_READ_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Framing:
    """What ends a record: a delimiter, or None for the end of the stream."""

    delimiter: bytes | None = b"\n"
    is_line: bool = True


@dataclass(frozen=True, slots=True)
class LineReader:
    """How a line becomes a record."""

    is_json: bool
    key: bytes | None
    key_separator: bytes | None
    null: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int | None
    partition: int | None

    def record(self, line: bytes) -> OutgoingRecord:
        if self.is_json:
            parsed = record_from_json(line)
            return OutgoingRecord(
                key=parsed.key if parsed.key is not None else self.key,
                value=parsed.value,
                headers=parsed.headers + self.headers,
                timestamp_ms=self.timestamp_ms if self.timestamp_ms is not None else parsed.timestamp_ms,
                partition=self.partition if self.partition is not None else parsed.partition,
            )
        key, value = self.key, line
        if self.key_separator is not None:
            before, found, after = line.partition(self.key_separator)
            if not found:
                raise CommandError(f"no key separator '{self.key_separator.decode()}' in the line")
            key, value = before, after
        return OutgoingRecord(
            key=key,
            value=None if self.null is not None and value == self.null else value,
            headers=self.headers,
            timestamp_ms=self.timestamp_ms,
            partition=self.partition,
        )


def read_lines(files: list[Path], interruptions: Interruptions, framing: Framing) -> Iterator[tuple[str, bytes]]:
    """Each record's bytes, and where they stand, for error messages. Ends early when interrupted."""
    for path in files:
        if str(path) == "-":
            yield from _lines_of("stdin", sys.stdin.buffer, interruptions, framing)
        else:
            with path.open("rb") as stream:
                yield from _lines_of(str(path), stream, interruptions, framing)
        if interruptions.came():
            return


def _lines_of(
    name: str, stream: IO[bytes], interruptions: Interruptions, framing: Framing
) -> Iterator[tuple[str, bytes]]:
    if framing.delimiter is None:
        yield name, stream.read()
        return
    ending = b"\r" if framing.is_line else b""
    rest = b""
    number = 0
    while True:
        interruptions.wait_readable(stream.fileno())
        if interruptions.came():
            return  # what has been read is sent; the beginning of a line is not a line
        chunk = os.read(stream.fileno(), _READ_BYTES)
        *complete, rest = (rest + chunk).split(framing.delimiter)
        for line in complete:
            number += 1
            yield f"{name}:{number}", line.removesuffix(ending)
        if not chunk:
            break
    if rest:
        yield f"{name}:{number + 1}", rest.removesuffix(ending)
