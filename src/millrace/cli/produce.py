"""`millrace produce`: records from lines of stdin, files and pipes, or from files that are still being written.

A record counts as delivered when the broker has acknowledged it, never before. Ctrl-C stops the reading and still
delivers every line that was read; a second Ctrl-C gives up waiting, and the count says what is missing. With
`--follow`, Ctrl-C is the ordinary end; positions are saved only when every line before them is acknowledged.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from millrace.cli.choices import exclude, sending_settings
from millrace.cli.delivery import Delivery, TopicRules, failure_texts, read_rules
from millrace.cli.follow import Follower, Line, load_positions, save_positions
from millrace.cli.interruptions import Interruptions
from millrace.cli.lines import Framing, LineReader, read_lines
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, name_values
from millrace.cli.output import CommandError, count_text, print_error, print_json, print_remark, size_text
from millrace.cli.template import unescape
from millrace.cli.times import parse_time_ms
from millrace.clock import SystemClock

EPILOG: Final = (
    "Examples: `printf 'a:1\\nb:2\\n' | millrace produce orders --key-separator :` or "
    "`millrace consume orders --from-beginning --no-follow --json | millrace produce copy --json` or "
    "`millrace produce logs --follow '/var/log/*.log' --state logs.state`"
)
_PROGRESS_EVERY_S: Final = 0.1
_FOLLOW_EVERY_S: Final = 0.1
_SAVE_EVERY_S: Final = 0.5
_LINES_PER_ROUND: Final = 10_000

app = typer.Typer(add_completion=False, help="Send records from stdin, files or pipes.")


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
    delimiter: Annotated[
        str | None,
        typer.Option(
            "--delimiter", help="What ends each record, byte for byte; without it a line end, which is \\n or \\r\\n."
        ),
    ] = None,
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
            help="Seconds a record may take to be delivered; 60 unless given, for ever with --follow.",
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
    sending = sending_settings(acks, compression)
    for first, second, why in (
        (("--key", key), ("--key-separator", key_separator), "each line brings its own key"),
        (("--json", is_json), ("--key-separator", key_separator), "the key is a field of the JSON"),
        (("--json", is_json), ("--null", null), "a tombstone is a value of null"),
        (("--whole", whole), ("--delimiter", delimiter), "a file is one record"),
    ):
        exclude(first, second, why)
    if follow:
        _require_followable(files, is_json=is_json, whole=whole, key_separator=key_separator, delimiter=delimiter)
    elif from_beginning or state is not None:
        raise CommandError("--from-beginning and --state go with --follow", exit_code=2)
    timeout_s = timeout if timeout is not None else 60.0
    clock = SystemClock()
    framing = Framing(None) if whole else Framing()
    if delimiter is not None:
        framing = Framing(_bytes(delimiter, "--delimiter"), is_line=False)
    reader = LineReader(
        is_json=is_json,
        key=None if key is None else key.encode(),
        key_separator=None if key_separator is None else _bytes(key_separator, "--key-separator"),
        null=None if null is None else null.encode(),
        headers=tuple((name, value.encode()) for name, value in _header_pairs(headers)),
        timestamp_ms=None if timestamp is None else parse_time_ms(timestamp, now_ms=clock.wall_ms()),
        partition=partition,
    )
    overrides = name_values(client, "--client")
    rules = read_rules(bootstrap, overrides, topic)
    settings = {
        **sending,
        "linger.ms": 5,
        # 0 is for ever: whoever follows files waits for a broker that is away
        "message.timeout.ms": 0 if follow and timeout is None else round(timeout_s * 1000),
        "queue.buffering.max.messages": 200_000,
        "queue.buffering.max.kbytes": 131_072,
        **rules.client_settings(),
        **overrides,
    }
    from millrace.cli.connection import open_producer

    delivery = Delivery(topic, lambda merged: open_producer(bootstrap, merged), settings, rules)
    began = clock.monotonic()
    problem = None
    with Interruptions() as interruptions:
        try:
            if follow:
                tail = Tail(delivery, reader, interruptions, state, quiet=quiet)
                problem = tail.run([str(file) for file in files or ()], from_beginning=from_beginning)
            else:
                source = files or [Path("-")]
                _say_what_is_waited_for(topic, source, reader, framing, quiet=quiet)
                problem = _send_all(delivery, reader, source, interruptions, framing, quiet=quiet)
            delivered_all = delivery.flush(timeout_s + 5)
            if follow and delivered_all and problem is None and not delivery.failures:
                tail.save()
        except KeyboardInterrupt:
            delivered_all = False
    unacknowledged = delivery.undelivered
    if not delivered_all:
        delivery.abandon()
    for text in failure_texts(delivery.failures, topic, lambda: _rules_now(bootstrap, overrides, topic)):
        print_error(f"not delivered: {text}")
    if not quiet:
        _summarise(delivery, unacknowledged, clock.monotonic() - began, is_json=is_json)
    if problem:
        print_error(problem)
    if interruptions.came() and not follow:
        raise typer.Exit(130)
    if problem or delivery.failed or unacknowledged:
        raise typer.Exit(1)


class Tail:
    """Sends what is written to files, each line with its host and its file as headers.

    The key is host and file unless one was given, so that the lines of a file stay in order in one partition.
    """

    def __init__(
        self,
        delivery: Delivery,
        reader: LineReader,
        interruptions: Interruptions,
        state: Path | None,
        *,
        quiet: bool = False,
    ) -> None:
        self._delivery = delivery
        self._reader = reader
        self._interruptions = interruptions
        self._state = state
        self._quiet = quiet
        self._host = socket.gethostname()
        self._clock = SystemClock()
        self._follower: Follower | None = None
        self._lines: Iterator[Line] = iter(())

    def run(self, names: list[str], *, from_beginning: bool) -> str | None:
        """Until Ctrl-C; returns what stopped it early, if something is wrong."""
        positions = load_positions(self._state) if self._state is not None else {}
        self._follower = Follower(names, from_beginning=from_beginning, positions=positions)
        self._say_what_is_waited_for(self._follower)
        due = self._clock.monotonic() + _SAVE_EVERY_S
        unsaved = True  # a restart goes on from here even if nothing is written until then
        while not self._interruptions.came():
            try:
                sent = self._send_new()
            except CommandError as error:
                return str(error)
            self._delivery.poll()
            if self._delivery.failures:
                return "stopped at the first failure"
            unsaved = unsaved or sent > 0
            if unsaved and self._state is not None and self._clock.monotonic() >= due:
                if self._wait_delivered():
                    self.save()
                    unsaved = False
                due = self._clock.monotonic() + _SAVE_EVERY_S
            if not sent:
                self._interruptions.wait(_FOLLOW_EVERY_S)
        return None

    def _say_what_is_waited_for(self, follower: Follower) -> None:
        """A file that is not there may be a typo, so that is said in a log, too; the rest is for a person who looks."""
        if self._quiet:
            return
        for name in follower.missing():
            print_remark(f"waiting for {name}, which is not there yet")
        if sys.stderr.isatty():
            files = count_text(len(follower.paths), "file")
            print_remark(f"sending what is written to {files} to {self._delivery.topic}; Ctrl-C ends")

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
            self._delivery.send(replace(record, key=key, headers=headers), line.path)
            self._delivery.poll()
            sent += 1
            if self._interruptions.came() or self._delivery.failures or sent >= _LINES_PER_ROUND:
                return sent
        self._lines = self._follower.lines()  # only now: a round that was left early goes on where it stopped
        return sent

    def _wait_delivered(self) -> bool:
        """Wait until nothing is in flight; False when that was interrupted or something failed."""
        while not self._delivery.flush(_FOLLOW_EVERY_S):
            if self._interruptions.came():
                return False
        return not self._delivery.failures


def _require_followable(
    files: list[Path] | None, *, is_json: bool, whole: bool, key_separator: str | None, delimiter: str | None
) -> None:
    if not files or any(str(file) == "-" for file in files):
        raise CommandError("--follow wants files: millrace produce TOPIC --follow FILE...", exit_code=2)
    if is_json or whole or key_separator is not None or delimiter is not None:
        raise CommandError(
            "--follow sends lines as they are: without --json, --whole, --key-separator and --delimiter", exit_code=2
        )


def _say_what_is_waited_for(
    topic: str, files: list[Path], reader: LineReader, framing: Framing, *, quiet: bool
) -> None:
    """For a person who is expected to type: what, and how it ends."""
    typed = any(str(path) == "-" for path in files) and sys.stdin.isatty()
    if quiet or not typed or not sys.stderr.isatty():
        return
    if framing.delimiter is None:
        what = "everything is one record"
    elif reader.is_json:
        what = "a line is a record, as JSON"
    elif reader.key_separator is not None:
        what = f"a line is a record: key{reader.key_separator.decode()}value"
    else:
        what = "a line is a record"
    print_remark(f"type what goes to {topic}: {what}; Ctrl-D ends")


def _send_all(
    delivery: Delivery,
    reader: LineReader,
    files: list[Path],
    interruptions: Interruptions,
    framing: Framing,
    *,
    quiet: bool,
) -> str | None:
    """Read and send everything; returns what stopped it early, if something is wrong."""
    clock = SystemClock()
    with ExitStack() as stack:
        show = _progress(stack, files, quiet=quiet)
        read_bytes = 0
        due = clock.monotonic()
        try:
            for place, line in read_lines(files, interruptions, framing):
                read_bytes += len(line) + 1
                try:
                    delivery.send(reader.record(line), place)
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


def _rules_now(bootstrap: str, overrides: dict[str, str], topic: str) -> TopicRules:
    """As `read_rules`, also when the broker is gone."""
    try:
        return read_rules(bootstrap, overrides, topic)
    except CommandError:
        return TopicRules()


def _summarise(delivery: Delivery, unacknowledged: int, elapsed_s: float, *, is_json: bool) -> None:
    delivered = delivery.sent - delivery.failed - unacknowledged
    if is_json:
        print_json(
            {
                "topic": delivery.topic,
                "delivered": delivered,
                "failed": delivery.failed,
                "unsettled": unacknowledged,
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
    if unacknowledged:
        remark += f", {unacknowledged:,} unknown (never acknowledged)"
    print_remark(remark)


def _header_pairs(headers: list[str] | None) -> list[tuple[str, str]]:
    pairs = []
    for header in headers or ():
        name, equals, value = header.partition("=")
        if not equals or not name:
            raise CommandError(f"--header wants name=value, not '{header}'", exit_code=2)
        pairs.append((name, value))
    return pairs


def _bytes(text: str, option: str) -> bytes:
    r"""`\t` and friends as the shell leaves them."""
    if not text:
        raise CommandError(f"{option} wants at least one character", exit_code=2)
    return unescape(text).encode()
