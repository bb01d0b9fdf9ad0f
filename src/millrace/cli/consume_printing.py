"""The records that `consume` has read, on stdout, until a limit is reached.

Owner of the consumer's assignment: which partitions are read and which are done. What has been written out may be
committed, nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from millrace.cli import consume_bounds as bounds
from millrace.cli.consume_bounds import End, Selection, Start
from millrace.cli.jsonrecords import record_to_json
from millrace.cli.output import CommandError, print_remark
from millrace.cli.template import ReceivedRecord
from millrace.clock import Clock, SystemClock
from millrace.model import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message

_POLL_S: Final = 0.2
_BATCH: Final = 1000
_LOOK_EVERY_S: Final = 2.0
_LOOK_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Limits:
    """When reading ends by itself, and whether more is waited for at the end of a partition."""

    max_records: int | None
    idle_timeout_s: float | None
    end: End
    follow: bool


class Ends:
    """The partitions that are not done yet, and where each of them will be; those that are open wait for a time."""

    def __init__(self, ends: Mapping[TopicPartition, int | None], time_ms: int | None) -> None:
        # By plain tuples, which cost less to make for every record than named ones, and are equal to them.
        self._ends: dict[tuple[str, int], int | None] = {}
        self._time_ms = time_ms
        self.add(ends)

    def __repr__(self) -> str:
        return f"Ends({self._ends})"

    def __contains__(self, partition: TopicPartition) -> bool:
        return partition in self._ends

    @property
    def all_reached(self) -> bool:
        return not self._ends

    def add(self, ends: Mapping[TopicPartition, int | None]) -> None:
        self._ends |= {(partition.topic, partition.partition): end for partition, end in ends.items()}

    def exclude(self, record: ReceivedRecord) -> bool:
        """Whether a record lies at or after the end of its partition; a partition that has reached it is done."""
        partition = (record.topic, record.partition)
        if partition not in self._ends:
            return True
        end = self._ends[partition]
        if end is None:
            reached = past = self._time_ms is not None and (record.timestamp_ms or 0) >= self._time_ms
        else:
            reached, past = record.offset >= end - 1, record.offset >= end
        if reached:
            del self._ends[partition]
        return past

    def reach(self, partition: TopicPartition, position: int | None = None) -> None:
        """A partition has been read up to `position`, or to its end as it was at the start."""
        end = self._ends.get(partition)
        if position is None or (end is not None and position >= end):
            self._ends.pop(partition, None)

    def overdue(self, now_ms: int) -> list[TopicPartition]:
        """Open partitions, once their time has passed."""
        if self._time_ms is None or now_ms < self._time_ms:
            return []
        return [TopicPartition(*partition) for partition, end in self._ends.items() if end is None]

    def keep_only(self, partitions: Iterable[TopicPartition]) -> None:
        kept = set(partitions)
        self._ends = {partition: end for partition, end in self._ends.items() if partition in kept}


class Printer:
    """Writes records until a limit is reached; what it has written may be committed."""

    def __init__(
        self, consumer: Consumer, limits: Limits, render: Callable[[ReceivedRecord], bytes], clock: Clock | None = None
    ) -> None:
        self.printed = 0
        self.on_progress: Callable[[int], None] | None = None
        self.on_wait: Callable[[], None] | None = None
        """Called once, when there is nothing to print for the first time."""
        self._consumer = consumer
        self._limits = limits
        self._render = render
        self._clock = clock or SystemClock()
        self._out = sys.stdout.buffer
        self._ends = Ends({}, limits.end.time_ms) if limits.end.given or not limits.follow else None
        self._begin: dict[TopicPartition, int] = {}
        """What is read, and where that began."""
        self._unwritten: dict[tuple[str, int], int] = {}
        """Where partitions begin that did not reach that far."""
        self._watched: Selection | None = None
        self._look_at = 0.0
        self._missed: set[TopicPartition] = set()
        """Partitions that were not there at the last look."""

    def __repr__(self) -> str:
        return f"Printer(printed={self.printed}, ends={self._ends})"

    def read(self, begin: Mapping[TopicPartition, int]) -> None:
        """Read these partitions from here on, beside those that are read already."""
        if self._ends is not None:
            found = bounds.end_offsets(self._consumer, begin, self._limits.end, follow=self._limits.follow)
            self._ends.add(bounds.unfinished(found, begin))
            begin = {partition: offset for partition, offset in begin.items() if partition in self._ends}
        if begin:
            # From an offset that is not written yet the library would go back to the first one.
            written = {one: min(offset, bounds.bounds(self._consumer, one)[1]) for one, offset in begin.items()}
            self._consumer.incremental_assign([bounds.for_library(one, offset) for one, offset in written.items()])
            self._unwritten |= {one: offset for one, offset in begin.items() if offset > written[one]}
        self._begin |= begin

    def watch(self, selection: Selection) -> None:
        """Also read partitions of the selection that appear later, from their beginning; notice those that go."""
        self._watched = selection
        self._look_at = self._clock.monotonic() + _LOOK_EVERY_S

    def join(self, partitions: Iterable[TopicPartition], selection: Selection) -> None:
        """Read what a group gives to this member; these partitions are there now."""
        if self._ends is not None:
            found = bounds.end_offsets(self._consumer, partitions, self._limits.end, follow=self._limits.follow)
            self._ends.add(bounds.unfinished(found, {}))
        self._consumer.subscribe(selection.subscription())

    def run(self, *, commits: bool) -> int:
        """Write records until a limit; returns how many. Ctrl-C loses nothing that was committed."""
        last_seen = self._clock.monotonic()
        while not self._done:
            messages = self._poll()
            written = [message for message in messages if self._write(message)]
            if written:
                self._out.flush()
                last_seen = self._clock.monotonic()
                if self.on_progress is not None:
                    self.on_progress(self.printed)
                if commits:
                    for message in written:
                        self._consumer.store_offsets(message=message)
            elif self._idle_too_long(self._clock.monotonic() - last_seen):
                break
            elif not messages:
                self._wait(commits=commits)
            self._fix_overdue_ends()
            self._look_again()
        return self.printed

    @property
    def _done(self) -> bool:
        if self._limits.max_records is not None and self.printed >= self._limits.max_records:
            return True
        return self._ends is not None and self._ends.all_reached

    def _idle_too_long(self, idle_s: float) -> bool:
        return self._limits.idle_timeout_s is not None and idle_s >= self._limits.idle_timeout_s

    def _wait(self, *, commits: bool) -> None:
        if commits and self._ends is not None:
            # Do not wait for partitions that the group gave to another member.
            mine = [TopicPartition(one.topic, one.partition) for one in self._consumer.assignment()]
            if mine:
                self._ends.keep_only(mine)
        if self.on_wait is not None:
            self.on_wait()
            self.on_wait = None

    def _poll(self) -> list[Message]:
        """One record is waited for and the rest taken as they are: batching must not delay what is there already."""
        first = self._consumer.poll(_POLL_S)
        if first is None:
            return []
        wanted = _BATCH
        if self._limits.max_records is not None:
            wanted = min(wanted, self._limits.max_records - self.printed)
        return [first, *self._consumer.consume(wanted - 1, 0)] if wanted > 1 else [first]

    def _write(self, message: Message) -> bool:
        """Write one record, unless the message is an event, or lies after the end of its partition."""
        problem = message.error()
        if problem is not None:
            self._handle(problem, message)
            return False
        record = _record(message)
        if self._unwritten and record.offset < self._unwritten.get((record.topic, record.partition), 0):
            return False
        if self._ends is not None and self._ends.exclude(record):
            self._consumer.pause([bounds.for_library(TopicPartition(record.topic, record.partition))])
            return False
        self._out.write(self._render(record))
        self.printed += 1
        return True

    def _handle(self, problem: KafkaError, message: Message) -> None:
        from millrace.cli.connection import explain, is_partition_end

        partition = TopicPartition(cast(str, message.topic()), cast(int, message.partition()))
        if is_partition_end(problem):
            # The last offsets of a partition may hold no record (control records, compaction).
            if self._ends is not None:
                self._ends.reach(partition, message.offset() if self._limits.follow else None)
        elif not problem.retriable():
            raise CommandError(explain(problem))

    def _fix_overdue_ends(self) -> None:
        """What has no record at the time of the end when that time has passed ends where it ends now."""
        overdue = [] if self._ends is None else self._ends.overdue(self._clock.wall_ms())
        if not overdue:
            return
        assert self._ends is not None
        self._ends.add(bounds.end_offsets(self._consumer, overdue, self._limits.end, follow=False))
        for position in self._consumer.position([bounds.for_library(one) for one in overdue]):
            partition = TopicPartition(position.topic, position.partition)
            begin = self._begin.get(partition, 0)
            self._ends.reach(partition, position.offset if position.offset >= 0 else begin)

    def _look_again(self) -> None:
        """See which partitions are new, and which are gone: the library tells nobody of a topic that was deleted."""
        if self._watched is None or self._clock.monotonic() < self._look_at:
            return
        self._look_at = self._clock.monotonic() + _LOOK_EVERY_S
        from confluent_kafka import KafkaException

        try:
            found = set(bounds.look_again(self._consumer, self._watched, _LOOK_TIMEOUT_S))
            new = bounds.begin_offsets(self._consumer, found - self._begin.keys(), Start(beginning=True))
            self.read(new)
        except KafkaException:
            return  # a broker that is away is noticed by reading, which goes on when it is back
        missing = self._begin.keys() - found
        gone, self._missed = missing & self._missed, missing - self._missed
        if gone:
            self._forget(gone)

    def _forget(self, gone: set[TopicPartition]) -> None:
        """What was not there twice in a row is gone; a broker that starts may not know of it at first."""
        assert self._watched is not None
        names = ", ".join(sorted({partition.topic for partition in gone}))
        self._consumer.incremental_unassign([bounds.for_library(partition) for partition in gone])
        for partition in gone:
            del self._begin[partition]
            if self._ends is not None:
                self._ends.reach(partition)
        if not self._begin and not self._watched.patterns:
            raise CommandError(f"{names}: deleted while it was read")
        print_remark(f"{names}: deleted while it was read")


def show_progress(stack: ExitStack, total: int | None) -> Callable[[int], None] | None:
    """A running count on stderr while records go into a file or a pipe; nothing where they are seen themselves."""
    if sys.stdout.isatty() or not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("reading"), BarColumn(), TextColumn("{task.completed:,.0f} records"), TimeElapsedColumn())
    progress = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
    task = progress.add_task("", total=total)
    return lambda printed: progress.update(task, completed=printed)


def render_json(record: ReceivedRecord) -> bytes:
    return record_to_json(**record._asdict()).encode()


def _record(message: Message) -> ReceivedRecord:
    kind, timestamp_ms = message.timestamp()
    return ReceivedRecord(
        topic=cast(str, message.topic()),
        partition=cast(int, message.partition()),
        offset=cast(int, message.offset()),
        timestamp_ms=timestamp_ms if kind else None,
        key=message.key(),
        value=message.value(),
        headers=cast("list[tuple[str, bytes | None]]", message.headers() or []),
    )
