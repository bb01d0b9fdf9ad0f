"""The command that `consume --queue GROUP --exec COMMAND` runs for a record: what it is told, and what its end means.

Exit code 0 accepts, 65 rejects, 126 and 127 are what a shell says of a command that it could not start, and anything
else failed. A command that cannot be started would fail for every record of the queue, so that ends the reading. One
that failed may go better later: the record stays with this member for a rest that grows, and is then released. It is
not released at once, because others would take it and fail as quickly, and five deliveries are soon used up; and
nothing else is taken meanwhile, because what failed may well be a neighbour of the command that all records need.
Not here: queues (`cli.queue_consume`).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from millrace.cli.output import CommandError, count_text
from millrace.client.queue import QueueRecord
from millrace.clock import SystemClock

REJECT_EXIT_CODE: Final = 65
"""EX_DATAERR of sysexits.h: the input is wrong, and will be wrong for everybody."""
_NOT_STARTED: Final = {126: "not executable", 127: "not found"}
_GRACE_S: Final = 5.0
_LOOK_S: Final = 0.2
_FIRST_REST_S: Final = 1.0
_LONGEST_REST_S: Final = 30.0
_NAMED: Final = 5
_REMEMBERED: Final = 10_000
_LONGEST_VARIABLE: Final = 32 * 4096 - 2
"""The most that Linux starts a program with: 32 pages for a variable, with its "=" and its zero byte."""
_WORD: Final = re.compile(r"\s*([A-Za-z0-9_./+-]+)(?=\s|\Z)")


class Ending(Enum):
    """How a command ended."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    FAILED = "failed"
    NOT_STARTED = "not started"


def ending_of(exit_code: int) -> Ending:
    """Anything that has no meaning of its own, signals too, may go better next time."""
    if exit_code == 0:
        return Ending.ACCEPTED
    if exit_code == REJECT_EXIT_CODE:
        return Ending.REJECTED
    return Ending.NOT_STARTED if exit_code in _NOT_STARTED else Ending.FAILED


def exit_text(exit_code: int) -> str:
    """`-9` as `killed by signal 9`, `127` as `exit code 127: not found`."""
    if exit_code < 0:
        return f"killed by signal {-exit_code}"
    reason = _NOT_STARTED.get(exit_code)
    return f"exit code {exit_code}" + (f": {reason}" if reason else "")


def rest_s(failures: int) -> float:
    """How long to rest after so many failures: a second, then twice as long each time, half a minute at most."""
    return float(min(_FIRST_REST_S * 2.0 ** min(failures - 1, 16), _LONGEST_REST_S))


def check_command(command: str) -> None:
    """CommandError where a shell would not even start it, before a record is taken for it.

    Only what is certain: the syntax, and a first word that is plain. The rest its exit code tells.
    """
    if not command.strip():  # a shell is content with nothing, and would accept every record
        raise CommandError("--exec needs a command", exit_code=2)
    syntax = _shell("-n", "-c", command)
    if syntax.returncode:
        reason = syntax.stderr.decode(errors="replace").strip().splitlines()
        raise CommandError(f"--exec: {reason[0] if reason else 'the shell does not understand it'}", exit_code=2)
    found = _WORD.match(command)
    if found is None:
        return
    word = found[1]
    if "/" not in word:
        exit_code = 0 if _shell("-c", 'command -v -- "$1"', "sh", word).returncode == 0 else 127
    elif not Path(word).is_file():
        exit_code = 127
    else:
        exit_code = 0 if os.access(word, os.X_OK) else 126
    if exit_code:
        raise CommandError(f"--exec: '{word}' cannot be started: {_NOT_STARTED[exit_code]}")


def _shell(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["/bin/sh", *words], capture_output=True, check=False)  # noqa: S603 - the user's own words


def run_command(
    command: str,
    content: bytes,
    record: QueueRecord,
    *,
    tend: Callable[[], float],
    is_asked_to_stop: Callable[[], bool],
) -> int:
    """The exit code of the command. `tend` is called all the while, and says how soon it wants to be called again.

    Asked to stop, the command gets SIGTERM with everything it started, and five seconds later SIGKILL.
    """
    process = subprocess.Popen(  # noqa: S603 - the user's own words
        ["/bin/sh", "-c", command],
        stdin=subprocess.PIPE,
        env={**os.environb, **environment(record)},
        start_new_session=True,  # a Ctrl-C is for this program, which then asks the command to stop
    )
    to_write: bytes | None = content
    killed_at: float | None = None
    clock = SystemClock()
    within_s = tend()
    while True:
        try:
            process.communicate(to_write, timeout=min(within_s, _LOOK_S) or 0.01)
            return process.returncode
        except subprocess.TimeoutExpired:
            to_write = None  # what is left of it is being written
        except KeyboardInterrupt:
            _end(process, signal.SIGKILL)
            process.wait()
            raise
        if is_asked_to_stop() and killed_at is None:
            killed_at = clock.monotonic() + _GRACE_S
            _end(process, signal.SIGTERM)
        elif killed_at is not None and clock.monotonic() >= killed_at:
            _end(process, signal.SIGKILL)
        within_s = tend()


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the command and everything it started."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def environment(record: QueueRecord) -> dict[bytes, bytes]:
    """What the command is told of a record. What an environment cannot hold (a zero byte, too long) is left out."""
    known: dict[str, bytes | None] = {
        "RECORD_TOPIC": record.partition.topic.encode(),
        "RECORD_PARTITION": b"%d" % record.partition.partition,
        "RECORD_OFFSET": b"%d" % record.record.offset,
        "RECORD_TIMESTAMP_MS": b"%d" % record.record.timestamp_ms,
        "RECORD_DELIVERY_COUNT": b"%d" % record.delivery_count,
        "RECORD_KEY": record.record.key,
    }
    for header in record.record.headers:
        known.setdefault("RECORD_HEADER_" + re.sub(r"[^A-Z0-9]", "_", header.key.upper()), header.value)
    return {
        name.encode(): value
        for name, value in known.items()
        if value is not None and len(name) + len(value) <= _LONGEST_VARIABLE and b"\0" not in value
    }


@dataclass(slots=True)
class _Named:
    """How many records, and the names of the first few."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        self.count += 1
        if len(self.first) < _NAMED:
            self.first.append(name)

    def __str__(self) -> str:
        more = self.count - len(self.first)
        return ", ".join(self.first) + (f" and {more:,} more" if more else "")


@dataclass(slots=True)
class Tally:
    """What became of the records that this command took, told at the end; names are `topic-partition@offset`."""

    accepted: int = 0
    rejected: _Named = field(default_factory=_Named)
    given_up: _Named = field(default_factory=_Named)
    back: dict[str, None] = field(default_factory=dict)
    """Failed here, and went back to the queue; what became of them there is not known, unless they came here again."""

    def accept(self, name: str) -> None:
        self.accepted += 1
        self.back.pop(name, None)

    def reject(self, name: str) -> None:
        self.rejected.add(name)
        self.back.pop(name, None)

    def give_up(self, name: str) -> None:
        self.given_up.add(name)
        self.back.pop(name, None)

    def give_back(self, name: str) -> None:
        self.back[name] = None
        if len(self.back) > _REMEMBERED:
            del self.back[next(iter(self.back))]

    @property
    def lost(self) -> int:
        """How many records nobody will get again."""
        return self.rejected.count + self.given_up.count

    @property
    def all_accepted(self) -> bool:
        return not self.lost and not self.back

    def lines(self) -> list[str]:
        """The summary."""
        back = _Named()
        for name in self.back:
            back.add(name)
        others = (("rejected", self.rejected), ("given up", self.given_up), ("back in the queue", back))
        counts = [f"{named.count:,} {what}" for what, named in others if named.count]
        return [
            ", ".join([f"{count_text(self.accepted, 'record')} accepted", *counts]),
            *(f"{what}: {named}" for what, named in others if named.count),
        ]
