"""`millrace consume`: records to stdout, as a tail, from a place in the log, as a member of a group, or from a queue.

Without a starting point it waits for new records, like `tail -f`. With one (`--from-beginning`, `--from-offset`,
`--from-time`) it reads up to the end as it was at the start and stops, like `tail`; `--follow` goes on, and so do
`--max` and `--timeout`, which say themselves when to stop. With `--group` offsets are committed, and only for records
that have been written out. With `--queue` everything is different: see `cli.queue_consume`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from millrace.cli.jsonrecords import record_to_json
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, name_values
from millrace.cli.output import CommandError, print_remark
from millrace.cli.template import ReceivedRecord, compile_template, unescape
from millrace.cli.times import parse_time_ms
from millrace.clock import SystemClock

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

EPILOG: Final = (
    "Examples: `millrace consume orders --from-time '1h ago' --format '{timestamp} {key} {value}'` or "
    "`millrace consume orders --from-offset -10 --json`\n\n"
    "As a queue, where each record goes to one consumer of the group at a time and is done with once it was printed: "
    "`millrace consume jobs --queue workers`. With --exec a command gets the record on its standard input, and "
    "RECORD_TOPIC, RECORD_PARTITION, RECORD_OFFSET, RECORD_TIMESTAMP_MS, RECORD_DELIVERY_COUNT, RECORD_KEY and "
    "RECORD_HEADER_NAME in its environment. Its exit code decides: 0 accepts the record, 65 rejects it for good, "
    "126 and 127 (it cannot be started) end the reading, any other releases it, after a rest, for another try. "
    "`millrace consume jobs --queue workers --exec './resize.sh \"$RECORD_KEY\"'`, "
    "started several times, works in parallel."
)
_POLL_S: Final = 0.2
_BATCH: Final = 1000

app = typer.Typer(add_completion=False, help="Print records: new ones, from a place in the log, or as a group.")


@dataclass(frozen=True, slots=True)
class Start:
    """Where reading begins; at most one field is set, and none means at the end."""

    beginning: bool = False
    offset: int | None = None
    time_ms: int | None = None

    @property
    def given(self) -> bool:
        return self.beginning or self.offset is not None or self.time_ms is not None


@dataclass(frozen=True, slots=True)
class Limits:
    """When reading ends by itself. `stop_offsets` are the end offsets at the start, or None to follow."""

    max_records: int | None
    idle_timeout_s: float | None
    stop_offsets: dict[int, int] | None


@app.command(epilog=EPILOG)
def consume(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, help="The topic to read.")],
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    from_beginning: Annotated[bool, typer.Option("--from-beginning", help="Start at the first record.")] = False,
    from_offset: Annotated[
        int | None, typer.Option("--from-offset", help="Start here in each partition; -10 is the last ten.")
    ] = None,
    from_time: Annotated[
        str | None, typer.Option("--from-time", help="Start at this time: ISO 8601, milliseconds, or '1h ago'.")
    ] = None,
    partitions: Annotated[
        list[int] | None, typer.Option("--partition", "-p", min=0, help="Only this partition, repeatable.")
    ] = None,
    group: Annotated[str | None, typer.Option("--group", "-g", help="Read as a member of this consumer group.")] = None,
    queue: Annotated[
        str | None, typer.Option("--queue", "-q", metavar="GROUP", help="Read as a queue, sharing it with this group.")
    ] = None,
    exec_command: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="COMMAND",
            help="With --queue: run this for each record, in a shell. Exit 0 accepts, 65 rejects, others release.",
        ),
    ] = None,
    max_records: Annotated[int | None, typer.Option("--max", "-n", min=1, help="Stop after this many records.")] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0.0, help="Stop after so many seconds without a record.")
    ] = None,
    follow: Annotated[
        bool | None,
        typer.Option("--follow/--no-follow", "-f", show_default=False, help="Wait for more at the end, or stop there."),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--format", help="{topic} {partition} {offset} {timestamp} {timestamp_ms} {key} {value} {headers}"
        ),
    ] = None,
    show_keys: Annotated[bool, typer.Option("--keys", help="Print keys before values.")] = False,
    show_headers: Annotated[bool, typer.Option("--headers", help="Print headers before values.")] = False,
    show_timestamps: Annotated[bool, typer.Option("--timestamps", help="Print timestamps before values.")] = False,
    show_offsets: Annotated[bool, typer.Option("--offsets", help="Print partition and offset before values.")] = False,
    delimiter: Annotated[str, typer.Option("--delimiter", help="What follows each record.")] = "\\n",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line; binary data as base64.")] = False,
    client: Client = None,
) -> None:
    """Print the records of a topic."""
    clock = SystemClock()
    starts = [from_beginning, from_offset is not None, from_time is not None]
    if sum(starts) > 1:
        raise CommandError("--from-beginning, --from-offset and --from-time exclude each other", exit_code=2)
    if queue is None and exec_command is not None:
        raise CommandError(
            "--exec needs --queue GROUP: a record is accepted by the exit code of the command", exit_code=2
        )
    if queue is not None and (group is not None or any(starts[1:]) or partitions or follow is False):
        raise CommandError(
            "a queue hands out what is next: --group, --from-offset, --from-time, --partition and --no-follow "
            "do not go with --queue; see: millrace queues reset",
            exit_code=2,
        )
    if group is not None and (any(starts[1:]) or partitions):
        raise CommandError("a group chooses its own partitions and offsets; see: millrace groups reset", exit_code=2)
    start = Start(
        from_beginning, from_offset, None if from_time is None else parse_time_ms(from_time, now_ms=clock.wall_ms())
    )
    render: Callable[[ReceivedRecord], bytes] = _render_json
    if not as_json:
        columns = [
            name
            for name, shown in (
                ("{timestamp}", show_timestamps),
                ("{partition}\t{offset}", show_offsets),
                ("{headers}", show_headers),
                ("{key}", show_keys),
                ("{value}", True),
            )
            if shown
        ]
        render = compile_template(template if template is not None else "\t".join(columns))
    if follow is None:
        follow = not start.given or max_records is not None or timeout is not None or group is not None
    ending = b"\n" if as_json else unescape(delimiter).encode()
    if queue is not None:
        from millrace.cli.queue_consume import QueueOptions, consume_queue, open_client

        options = QueueOptions(topic, queue, exec_command, from_beginning, max_records, timeout)
        consume_queue(open_client(bootstrap, name_values(client, "--client")), options, render, ending)
        return

    from millrace.cli.connection import open_consumer, topic_partitions

    consumer = open_consumer(bootstrap, _settings(group, start, follow, name_values(client, "--client")))
    try:
        chosen = topic_partitions(consumer, topic)
        if partitions:
            missing = sorted(set(partitions) - set(chosen))
            if missing:
                raise CommandError(f"topic '{topic}' has no partition {missing[0]} (it has {len(chosen)})")
            chosen = sorted(set(partitions))
        stop_offsets = None if follow else _end_offsets(consumer, topic, chosen)
        if group is None:
            begin = _begin_offsets(consumer, topic, chosen, start)
            if stop_offsets is not None:
                stop_offsets = _unfinished(stop_offsets, {one.partition: one.offset for one in begin})
            consumer.assign(begin)
        else:
            from millrace.cli.queue_consume import refuse_queue

            refuse_queue(bootstrap, name_values(client, "--client"), group)
            consumer.subscribe([topic])
            if stop_offsets is not None:
                stop_offsets = {index: end for index, end in stop_offsets.items() if end > 0}
        limits = Limits(max_records, timeout, stop_offsets)
        with ExitStack() as stack:
            show = _progress(stack, max_records)
            printer = Printer(consumer, limits, lambda record: render(record) + ending, show)
            printed = printer.run(commits=group is not None)
    except KeyboardInterrupt:
        return
    finally:
        consumer.close()
    if max_records is not None and printed < max_records and stop_offsets is None:
        print_remark(f"stopped after {timeout:g} s without a record: {printed} of {max_records} records")
        raise typer.Exit(1)


def _settings(group: str | None, start: Start, follow: bool, overrides: dict[str, str]) -> dict[str, Any]:
    return {
        "group.id": group if group is not None else "millrace-cli",
        "enable.auto.commit": group is not None,
        "enable.auto.offset.store": False,  # a record is stored for commit when it has been written out
        "auto.commit.interval.ms": 1000,
        "auto.offset.reset": "earliest" if start.beginning or group is None else "latest",
        "enable.partition.eof": not follow,
        "fetch.wait.max.ms": 500,
        "queued.max.messages.kbytes": 32_768,
        **overrides,
    }


def _end_offsets(consumer: Consumer, topic: str, partitions: list[int]) -> dict[int, int]:
    from confluent_kafka import TopicPartition

    from millrace.cli.connection import REQUEST_TIMEOUT_S

    ends = {}
    for index in partitions:
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, index), timeout=REQUEST_TIMEOUT_S)
        ends[index] = high if high > low else 0
    return ends


def _begin_offsets(consumer: Consumer, topic: str, partitions: list[int], start: Start) -> list[TopicPartition]:
    """Numbers where the library has numbers, so that 'already at the end' can be seen without reading."""
    from confluent_kafka import TopicPartition

    from millrace.cli.connection import REQUEST_TIMEOUT_S

    if start.time_ms is not None:
        wanted = [TopicPartition(topic, index, start.time_ms) for index in partitions]
        found = consumer.offsets_for_times(wanted, timeout=REQUEST_TIMEOUT_S)
        begin = {one.partition: one.offset for one in found}
    else:
        begin = {}
    positions = []
    for index in partitions:
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, index), timeout=REQUEST_TIMEOUT_S)
        if start.time_ms is not None:
            offset = begin[index] if begin[index] >= 0 else high
        elif start.beginning:
            offset = low
        elif start.offset is None:
            offset = high
        elif start.offset < 0:
            offset = max(low, high + start.offset)
        else:
            offset = max(low, start.offset)
        positions.append(TopicPartition(topic, index, offset))
    return positions


def _unfinished(stop_offsets: dict[int, int], begin: dict[int, int]) -> dict[int, int]:
    """The partitions that still have something to read."""
    return {index: end for index, end in stop_offsets.items() if begin[index] < end}


def _progress(stack: ExitStack, total: int | None) -> Callable[[int], None] | None:
    """A running count on stderr while records go into a file or a pipe; nothing where they are seen themselves."""
    if sys.stdout.isatty() or not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("reading"), BarColumn(), TextColumn("{task.completed:,.0f} records"), TimeElapsedColumn())
    progress = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
    task = progress.add_task("", total=total)
    return lambda printed: progress.update(task, completed=printed)


class Printer:
    """Writes records until a limit is reached; what it has written may be committed."""

    def __init__(
        self,
        consumer: Consumer,
        limits: Limits,
        render: Callable[[ReceivedRecord], bytes],
        show: Callable[[int], None] | None = None,
    ) -> None:
        self.printed = 0
        self._show = show
        self._consumer = consumer
        self._limits = limits
        self._render = render
        self._out = sys.stdout.buffer
        self._waiting_for = None if limits.stop_offsets is None else dict(limits.stop_offsets)

    def __repr__(self) -> str:
        return f"Printer(printed={self.printed}, waiting_for={self._waiting_for})"

    def run(self, *, commits: bool) -> int:
        """Write records until a limit; returns how many. Ctrl-C loses nothing that was committed."""
        clock = SystemClock()
        last_seen = clock.monotonic()
        while not self._done:
            messages = self._poll()
            written = [message for message in messages if self._write(message)]
            if written:
                self._out.flush()
                last_seen = clock.monotonic()
                if self._show is not None:
                    self._show(self.printed)
                if commits:
                    for message in written:
                        self._consumer.store_offsets(message=message)
            elif self._idle_too_long(clock.monotonic() - last_seen):
                break
            elif commits and not messages:
                self._forget_partitions_of_others()
        return self.printed

    @property
    def _done(self) -> bool:
        if self._limits.max_records is not None and self.printed >= self._limits.max_records:
            return True
        return self._waiting_for is not None and not self._waiting_for

    def _idle_too_long(self, idle_s: float) -> bool:
        return self._limits.idle_timeout_s is not None and idle_s >= self._limits.idle_timeout_s

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
        """Write one record, unless the message is an event, or lies after the end as it was at the start."""
        problem = message.error()
        if problem is not None:
            self._handle(problem, message)
            return False
        record = _record(message)
        if self._waiting_for is not None:
            end = self._waiting_for.get(record.partition)
            if end is None or record.offset >= end - 1:
                self._waiting_for.pop(record.partition, None)
            if end is None or record.offset >= end:
                return False
        self._out.write(self._render(record))
        self.printed += 1
        return True

    def _handle(self, problem: KafkaError, message: Message) -> None:
        from millrace.cli.connection import explain, is_partition_end

        if is_partition_end(problem):
            # The last offsets of a partition may hold no record (control records, compaction).
            if self._waiting_for is not None:
                self._waiting_for.pop(cast(int, message.partition()), None)
        elif not problem.retriable():
            raise CommandError(explain(problem))

    def _forget_partitions_of_others(self) -> None:
        """Do not wait for partitions that the group gave to another member."""
        mine = {one.partition for one in self._consumer.assignment()}
        if mine and self._waiting_for is not None:
            for index in self._waiting_for.keys() - mine:
                del self._waiting_for[index]


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


def _render_json(record: ReceivedRecord) -> bytes:
    return record_to_json(**record._asdict()).encode()
