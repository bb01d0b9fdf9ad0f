"""`millrace produce`: records from lines of stdin, files and pipes, or from files that are still being written.

A record counts as delivered when the broker has acknowledged it, never before. Ctrl-C stops the reading and still
delivers every line that was read; a second Ctrl-C gives up waiting, and the count says what is missing. With
`--follow`, Ctrl-C is the ordinary end; positions are saved only when every line before them is acknowledged.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, Self

import typer

from millrace.cli.follow import Follower, Line, load_positions, save_positions
from millrace.cli.jsonrecords import OutgoingRecord, record_from_json
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, name_values
from millrace.cli.output import CommandError, count_text, print_error, print_json, print_remark, size_text
from millrace.cli.times import parse_time_ms
from millrace.clock import SystemClock

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

EPILOG: Final = (
    "Examples: `printf 'a:1\\nb:2\\n' | millrace produce orders --key-separator :` or "
    "`millrace consume orders --from-beginning --no-follow --json | millrace produce copy --json` or "
    "`millrace produce logs --follow '/var/log/*.log' --state logs.state`"
)
_PROGRESS_EVERY_S: Final = 0.1
_ERRORS_SHOWN: Final = 5
_READ_BYTES: Final = 1 << 18
_FOLLOW_EVERY_S: Final = 0.1
_SAVE_EVERY_S: Final = 0.5
_LINES_PER_ROUND: Final = 10_000

app = typer.Typer(add_completion=False, help="Send records from stdin, files or pipes.")


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


class Delivery:
    """One librdkafka producer and the count of what became of the records given to it.

    Only failures are reported back by the library, one by one; what is neither failed nor still queued was delivered.
    """

    def __init__(self, topic: str, open_with: Callable[[dict[str, Any]], Producer], settings: dict[str, Any]) -> None:
        self.topic = topic
        self.sent = 0
        self.sent_bytes = 0
        self.failed = 0
        self.failures: list[str] = []
        self._producer = open_with({**settings, "delivery.report.only.error": True, "on_delivery": self._on_report})

    def __repr__(self) -> str:
        return f"Delivery(topic={self.topic!r}, sent={self.sent}, failed={self.failed}, queued={len(self._producer)})"

    @property
    def delivered(self) -> int:
        return self.sent - self.failed - len(self._producer)

    @property
    def undelivered(self) -> int:
        return len(self._producer)

    def send(self, record: OutgoingRecord) -> None:
        optional: dict[str, Any] = {}
        if record.partition is not None:
            optional["partition"] = record.partition
        if record.timestamp_ms is not None:
            optional["timestamp"] = record.timestamp_ms
        if record.headers:
            optional["headers"] = list(record.headers)
        while True:
            try:
                self._producer.produce(self.topic, record.value, record.key, **optional)
            except BufferError:  # the client's queue is full: back-pressure on the reader
                self._producer.poll(0.1)
            else:
                break
        self.sent += 1
        self.sent_bytes += len(record.value or b"") + len(record.key or b"")

    def poll(self) -> None:
        self._producer.poll(0)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is settled; False when the time was not enough."""
        return self._producer.flush(timeout_s) == 0

    def abandon(self) -> None:
        """Give up what is still queued, so that closing does not wait for it."""
        self._producer.purge(blocking=False)

    def _on_report(self, error: KafkaError | None, _message: Message) -> None:
        if error is None:
            return
        from millrace.cli.connection import explain

        self.failed += 1
        if len(self.failures) < _ERRORS_SHOWN:
            self.failures.append(explain(error))


@app.command(epilog=EPILOG)
def produce(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, help="Where the records go.")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE...]", show_default=False, help="Files of lines; - or nothing is stdin."),
    ] = None,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    key: Annotated[str | None, typer.Option("--key", "-k", help="The key of every record.")] = None,
    key_separator: Annotated[
        str | None, typer.Option("--key-separator", "-K", help="Split each line into key and value here, once.")
    ] = None,
    headers: Annotated[
        list[str] | None,
        typer.Option("--header", "--headers", "-H", metavar="NAME=VALUE", help="A header of every record, repeatable."),
    ] = None,
    is_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Lines are JSON: value, key, headers, timestamp, partition. The summary is JSON too."
        ),
    ] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Each file is one record, newlines and all.")] = False,
    null: Annotated[str | None, typer.Option("--null", help="A value equal to this text becomes a tombstone.")] = None,
    timestamp: Annotated[
        str | None, typer.Option("--timestamp", help="Of every record: ISO 8601, milliseconds, or '1h ago'.")
    ] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", min=0, help="Send all to this partition.")
    ] = None,
    compression: Annotated[str, typer.Option("--compression", "-z", help="none, gzip, snappy, lz4 or zstd.")] = "none",
    acks: Annotated[str, typer.Option("--acks", help="all, 1 or 0.")] = "all",
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0.1,
            help="Seconds a record may take to be delivered [default: 60; for ever with --follow].",
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Send lines as they are written to the files, over rotation; * and ? in quotes."
        ),
    ] = False,
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="With --follow: also what the files hold already.")
    ] = False,
    state: Annotated[
        Path | None, typer.Option("--state", metavar="FILE", help="With --follow: go on where the last run stopped.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
    client: Client = None,
) -> None:
    """Send each line as a record and wait until all are acknowledged."""
    if compression not in {"none", "gzip", "snappy", "lz4", "zstd"}:
        raise CommandError(f"--compression is none, gzip, snappy, lz4 or zstd, not '{compression}'", exit_code=2)
    if acks not in {"all", "-1", "1", "0"}:
        raise CommandError(f"--acks is all, 1 or 0, not '{acks}'", exit_code=2)
    if follow:
        _require_followable(files, is_json=is_json, whole=whole, key_separator=key_separator)
    elif from_beginning or state is not None:
        raise CommandError("--from-beginning and --state go with --follow", exit_code=2)
    timeout_s = timeout if timeout is not None else 60.0
    clock = SystemClock()
    reader = LineReader(
        is_json=is_json,
        key=None if key is None else key.encode(),
        key_separator=None if key_separator is None else _unescape(key_separator),
        null=None if null is None else null.encode(),
        headers=tuple((name, value.encode()) for name, value in _header_pairs(headers)),
        timestamp_ms=None if timestamp is None else parse_time_ms(timestamp, now_ms=clock.wall_ms()),
        partition=partition,
    )
    settings = {
        "acks": acks,
        "compression.type": compression,
        "enable.idempotence": acks in {"all", "-1"},
        "linger.ms": 5,
        # 0 is for ever: whoever follows files waits for a broker that is away
        "message.timeout.ms": 0 if follow and timeout is None else round(timeout_s * 1000),
        "queue.buffering.max.messages": 200_000,
        "queue.buffering.max.kbytes": 131_072,
        **name_values(client, "--client"),
    }
    from millrace.cli.connection import open_producer

    delivery = Delivery(topic, lambda merged: open_producer(bootstrap, merged), settings)
    began = clock.monotonic()
    problem = None
    with Interruptions() as interruptions:
        try:
            if follow:
                tail = Tail(delivery, reader, interruptions, state)
                problem = tail.run([str(file) for file in files or ()], from_beginning=from_beginning)
            else:
                problem = _send_all(delivery, reader, files or [Path("-")], interruptions, whole=whole, quiet=quiet)
            settled = delivery.flush(timeout_s + 5)
            if follow and settled and problem is None and not delivery.failures:
                tail.save()
        except KeyboardInterrupt:
            settled = False
    unsettled = delivery.undelivered
    if not settled:
        delivery.abandon()
    _summarise(delivery, unsettled, clock.monotonic() - began, is_json=is_json, quiet=quiet)
    if problem:
        print_error(problem)
    if interruptions.came() and not follow:
        raise typer.Exit(130)
    if problem or delivery.failed or unsettled:
        raise typer.Exit(1)


class Interruptions:
    """Ctrl-C as something to look at: the first one is remembered, a second one raises KeyboardInterrupt.

    An exception in the middle of a read would lose the lines that were read but not yet sent. So reads wait with
    `wait_readable`, which a signal ends, and the loop looks at `came` when no line is in its hands.
    """

    def __init__(self) -> None:
        self._asked = False
        self._wake_up, self._woken = socket.socketpair()

    def __enter__(self) -> Self:
        self._wake_up.setblocking(False)
        self._woken.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)
        signal.set_wakeup_fd(self._previous_fd)
        self._wake_up.close()
        self._woken.close()

    def came(self) -> bool:
        return self._asked

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

    def wait_readable(self, fd: int) -> None:
        """Return when `fd` has something to read, or a signal came."""
        select.select([fd, self._wake_up.fileno()], [], [])

    def wait(self, seconds: float) -> None:
        """Return after this time, or when a signal came."""
        select.select([self._wake_up.fileno()], [], [], seconds)


class Tail:
    """Sends what is written to files, each line with its host and its file as headers.

    The key is host and file unless one was given, so that the lines of a file stay in order in one partition.
    """

    def __init__(
        self, delivery: Delivery, reader: LineReader, interruptions: Interruptions, state: Path | None
    ) -> None:
        self._delivery = delivery
        self._reader = reader
        self._interruptions = interruptions
        self._state = state
        self._host = socket.gethostname()
        self._clock = SystemClock()
        self._follower: Follower | None = None
        self._lines: Iterator[Line] = iter(())

    def run(self, names: list[str], *, from_beginning: bool) -> str | None:
        """Until Ctrl-C; returns what stopped it early, if something is wrong."""
        positions = load_positions(self._state) if self._state is not None else {}
        self._follower = Follower(names, from_beginning=from_beginning, positions=positions)
        due = self._clock.monotonic() + _SAVE_EVERY_S
        unsaved = True  # a restart goes on from here even if nothing is written until then
        while not self._interruptions.came():
            sent = self._send_new()
            self._delivery.poll()
            if self._delivery.failures:
                return "stopped at the first failure"
            unsaved = unsaved or sent > 0
            if unsaved and self._state is not None and self._clock.monotonic() >= due:
                if self._settle():
                    self.save()
                    unsaved = False
                due = self._clock.monotonic() + _SAVE_EVERY_S
            if not sent:
                self._interruptions.wait(_FOLLOW_EVERY_S)
        return None

    def save(self) -> None:
        """Note the positions, when everything before them has been acknowledged."""
        if self._state is not None and self._follower is not None:
            save_positions(self._state, self._follower.positions())

    def _send_new(self) -> int:
        """Send the lines that are new. A signal is looked at between two lines, with none in our hands."""
        assert self._follower is not None
        sent = 0
        for line in self._lines:
            record = self._reader.record(line.text)
            headers = (*record.headers, ("host", self._host.encode()), ("file", line.path.encode()))
            key = record.key if record.key is not None else f"{self._host}:{line.path}".encode()
            self._delivery.send(replace(record, key=key, headers=headers))
            self._delivery.poll()
            sent += 1
            if self._interruptions.came() or self._delivery.failures or sent >= _LINES_PER_ROUND:
                return sent
        self._lines = self._follower.lines()  # only now: a round that was left early goes on where it stopped
        return sent

    def _settle(self) -> bool:
        """Wait until nothing is in flight; False when that was interrupted or something failed."""
        while not self._delivery.flush(_FOLLOW_EVERY_S):
            if self._interruptions.came():
                return False
        return not self._delivery.failures


def _require_followable(files: list[Path] | None, *, is_json: bool, whole: bool, key_separator: str | None) -> None:
    if not files or any(str(file) == "-" for file in files):
        raise CommandError("--follow wants files: millrace produce TOPIC --follow FILE...", exit_code=2)
    if is_json or whole or key_separator is not None:
        raise CommandError("--follow sends lines as they are: without --json, --whole and --key-separator", exit_code=2)


def _send_all(
    delivery: Delivery, reader: LineReader, files: list[Path], interruptions: Interruptions, *, whole: bool, quiet: bool
) -> str | None:
    """Read and send everything; returns what stopped it early, if something is wrong."""
    clock = SystemClock()
    with ExitStack() as stack:
        show = _progress(stack, files, quiet=quiet)
        read_bytes = 0
        due = clock.monotonic()
        try:
            for place, line in _lines(files, interruptions, whole=whole):
                read_bytes += len(line) + 1
                try:
                    delivery.send(reader.record(line))
                except CommandError as error:
                    return f"{place}: {error}"
                delivery.poll()
                if delivery.failures:
                    return "stopped at the first failure"
                if show and clock.monotonic() >= due:
                    show(delivery, read_bytes)
                    due = clock.monotonic() + _PROGRESS_EVERY_S
        except OSError as error:
            return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return None


def _lines(files: list[Path], interruptions: Interruptions, *, whole: bool) -> Iterator[tuple[str, bytes]]:
    """Each line without its line feed, and where it stands, for error messages. Ends early when interrupted."""
    for path in files:
        if str(path) == "-":
            yield from _lines_of("stdin", sys.stdin.buffer, interruptions, whole=whole)
        else:
            with path.open("rb") as stream:
                yield from _lines_of(str(path), stream, interruptions, whole=whole)
        if interruptions.came():
            return


def _lines_of(
    name: str, stream: IO[bytes], interruptions: Interruptions, *, whole: bool
) -> Iterator[tuple[str, bytes]]:
    if whole:
        yield name, stream.read()
        return
    rest = b""
    number = 0
    while True:
        interruptions.wait_readable(stream.fileno())
        if interruptions.came():
            return  # what has been read is sent; the beginning of a line is not a line
        chunk = os.read(stream.fileno(), _READ_BYTES)
        *complete, rest = (rest + chunk).split(b"\n")
        for line in complete:
            number += 1
            yield f"{name}:{number}", line
        if not chunk:
            break
    if rest:
        yield f"{name}:{number + 1}", rest


def _progress(stack: ExitStack, files: list[Path], *, quiet: bool) -> Callable[[Delivery, int], None] | None:
    """A bar (files) or a running rate (pipes) on stderr; nothing for a person typing lines, or without a terminal."""
    from_stdin = any(str(path) == "-" for path in files)
    if quiet or not sys.stderr.isatty() or (from_stdin and sys.stdin.isatty()):
        return None
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    total = None if from_stdin else sum(path.stat().st_size for path in files if path.exists())
    progress = stack.enter_context(
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
    )
    task = progress.add_task("sending", total=total, rate="")
    clock = SystemClock()
    began = clock.monotonic()

    def show(delivery: Delivery, read_bytes: int) -> None:
        elapsed = max(clock.monotonic() - began, 1e-9)
        rate = f"{delivery.delivered:,} delivered, {delivery.delivered / elapsed:,.0f}/s"
        progress.update(task, completed=read_bytes if total is not None else None, rate=rate)

    return show


def _summarise(delivery: Delivery, unsettled: int, elapsed_s: float, *, is_json: bool, quiet: bool) -> None:
    delivered = delivery.sent - delivery.failed - unsettled
    for text in delivery.failures:
        print_error(f"not delivered: {text}")
    if quiet:
        return
    if is_json:
        print_json(
            {
                "topic": delivery.topic,
                "delivered": delivered,
                "failed": delivery.failed,
                "unsettled": unsettled,
                "bytes": delivery.sent_bytes,
                "seconds": round(elapsed_s, 3),
            }
        )
        return
    rate = f"{delivered / max(elapsed_s, 1e-9):,.0f} records/s"
    remark = (
        f"{count_text(delivered, 'record')} delivered to {delivery.topic} ({size_text(delivery.sent_bytes)}, {rate})"
    )
    if delivery.failed:
        remark += f", {delivery.failed:,} failed"
    if unsettled:
        remark += f", {unsettled:,} unknown (never acknowledged)"
    print_remark(remark)


def _header_pairs(headers: list[str] | None) -> list[tuple[str, str]]:
    pairs = []
    for header in headers or ():
        name, equals, value = header.partition("=")
        if not equals or not name:
            raise CommandError(f"--header wants name=value, not '{header}'", exit_code=2)
        pairs.append((name, value))
    return pairs


def _unescape(text: str) -> bytes:
    r"""`\t` and friends as the shell leaves them."""
    return text.replace("\\t", "\t").replace("\\0", "\0").replace("\\n", "\n").encode()
