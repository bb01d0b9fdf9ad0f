"""What clients did and saw, as an append-only file per client process: the evidence that `support.checker` judges.

    one line:  time_ns process op type action key value offset generation      separated by one space, -1 for unknown
    type:      invoke | ok | fail | info
    action:    send    an invoke and one outcome each; `op` counts the sends of a process, `value` is unique
               poll    one `ok` line per record a consumer was given; `op` numbers the poll call
               final   the same, by the fresh client that reads everything after healing
               assign  a consumer began anew: a new `generation`, positions may jump
               take    one `ok` line per record a member of a queue was given, after an invoke of the request where that
                       is known; `op` numbers the request, `generation` is the delivery count
               accept  a member of a queue is done with a record: an invoke and one outcome each
               commit  a member of a group commits `offset`: an invoke and one outcome each, per partition
    of transactions, whose number within the process is `op` in all lines that belong to one:
               send    as above, all before the end; where it copies a record, `offset` of the invoke is that record's
               offsets the transaction moves a group to `offset` of `key`: an invoke only, the end decides
               end     `key` is commit or abort: an invoke and one outcome; `fail` proves that it was not committed
               stable  after healing: `offset` is the last stable offset of `key`, `value` its high watermark
               balance what a bank found to be the sum (`value`) of its accounts; `key` is the bank

`fail` is for errors that prove nothing was appended; whatever may have reached a log is `info`, and so is an invoke
without an outcome. Times are CLOCK_MONOTONIC, which all processes of one machine share.

A record's bytes are its value (8), the CRC-32 of its payload (4) and the payload, so a reader knows what it was given.

Invariant: the line of an invoke is in the file before the client library gets the record, so a killed process leaves no
record that its history does not know.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

UNKNOWN: Final = -1
DAMAGED: Final = -2
"""The value of a record whose bytes are not what any producer wrote."""

_RECORD_HEAD: Final = struct.Struct(">QI")
_COUNTER_BITS: Final = 32
_POSITION_BITS: Final = 10
COMMIT: Final = "commit"
ABORT: Final = "abort"
"""The keys of `end`."""


class Outcome(StrEnum):
    INVOKE = "invoke"
    OK = "ok"
    FAIL = "fail"
    INFO = "info"


class Action(StrEnum):
    SEND = "send"
    POLL = "poll"
    FINAL = "final"
    ASSIGN = "assign"
    COMMIT = "commit"
    TAKE = "take"
    ACCEPT = "accept"
    OFFSETS = "offsets"
    END = "end"
    STABLE = "stable"
    BALANCE = "balance"


class Event(NamedTuple):
    """One line of a history."""

    time_ns: int
    process: str
    op: int
    type: Outcome
    action: Action
    key: str
    value: int = UNKNOWN
    offset: int = UNKNOWN
    generation: int = 0


def value_of(producer: int, counter: int) -> int:
    """The value of a producer's `counter`-th record."""
    return producer << _COUNTER_BITS | counter


def value_in_transaction(producer: int, transaction: int, position: int) -> int:
    """The value of the record at this position of a producer's transaction; values grow in the order of sending."""
    return value_of(producer, transaction << _POSITION_BITS | position)


def producer_of(value: int) -> int:
    return value >> _COUNTER_BITS


def encode_record(value: int, payload: bytes) -> bytes:
    return _RECORD_HEAD.pack(value, zlib.crc32(payload)) + payload


def decode_record(data: bytes | None) -> int:
    """The value in a record, or DAMAGED."""
    if data is None or len(data) < _RECORD_HEAD.size:
        return DAMAGED
    value, crc = _RECORD_HEAD.unpack_from(data)
    return int(value) if zlib.crc32(data[_RECORD_HEAD.size :]) == crc else DAMAGED


class HistoryWriter:
    """Appends the events of one client process. Owner: one thread."""

    def __init__(self, path: Path, process: str) -> None:
        self.process = process
        self._file = path.open("a", encoding="ascii")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(
        self,
        outcome: Outcome,
        action: Action,
        key: str,
        *,
        op: int,
        value: int = UNKNOWN,
        offset: int = UNKNOWN,
        generation: int = 0,
    ) -> None:
        """One event, now; it is in the file after the next `flush`."""
        now_ns = time.monotonic_ns()
        self._file.write(f"{now_ns} {self.process} {op} {outcome} {action} {key} {value} {offset} {generation}\n")

    def flush(self) -> None:
        """Hand what was written to the operating system, where it outlives this process."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()


_OUTCOMES: Final = {str(one): one for one in Outcome}
_ACTIONS: Final = {str(one): one for one in Action}


def parse(line: str) -> Event:
    time_ns, process, op, outcome, action, key, value, offset, generation = line.split(" ")
    return Event(
        int(time_ns),
        process,
        int(op),
        _OUTCOMES[outcome],
        _ACTIONS[action],
        key,
        int(value),
        int(offset),
        int(generation),
    )


def read_histories(paths: Iterable[Path]) -> list[Event]:
    """The events of all files in the order of their times; a last line that a kill cut short is left out."""
    events: list[Event] = []
    for path in paths:
        with path.open(encoding="ascii") as lines:
            events += [parse(line[:-1]) for line in lines if line.endswith("\n")]
    events.sort(key=lambda event: event.time_ns)
    return events
