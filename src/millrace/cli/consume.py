"""`millrace consume`: records to stdout, as a tail, from a place in the log, as a member of a group, or from a queue.

Without a starting point it waits for new records, like `tail -f`. With one (`--from-beginning`, `--from-offset`,
`--from-time`) it reads up to the end as it was at the start and stops, like `tail`; `--follow` goes on, and so do
`--max` and `--timeout`, which say themselves when to stop. With an end (`--to-offset`, `--to-time`) it stops there, and
begins at the first record unless told otherwise. With `--group` offsets are committed, and only for records that have
been written out. With `--queue` everything is different: see `cli.queue_consume`.

Here are the options and which of them go together; what is read is `consume_bounds`, reading and printing
`consume_printing`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millrace.admin.times import parse_time_ms
from millrace.cli.choices import at_most_one, exclude, reading_settings
from millrace.cli.consume_bounds import End, Selection, Start, begin_offsets, find_partitions
from millrace.cli.consume_printing import Limits, Printer, render_json, show_progress
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, name_values
from millrace.cli.output import CommandError, print_remark
from millrace.cli.template import ReceivedRecord, compile_template, unescape
from millrace.clock import SystemClock

if TYPE_CHECKING:
    from confluent_kafka import Consumer

EPILOG: Final = (
    "Examples: `millrace consume orders --from-time '1h ago' --format '{timestamp} {key} {value}'` or "
    "`millrace consume orders --from-offset -10 --json` or `millrace consume orders payments --to-time '1h ago'` or "
    "`millrace consume --pattern '^orders-' --follow --format '{topic} {value}'`\n\n"
    "As a queue, where each record goes to one consumer of the group at a time and is done with once it was printed: "
    "`millrace consume jobs --queue workers`. With --exec a command gets the record on its standard input, and "
    "RECORD_TOPIC, RECORD_PARTITION, RECORD_OFFSET, RECORD_TIMESTAMP_MS, RECORD_DELIVERY_COUNT, RECORD_KEY and "
    "RECORD_HEADER_NAME in its environment. Its exit code decides: 0 accepts the record, 65 rejects it for good, "
    "126 and 127 (it cannot be started) end the reading, any other releases it, after a rest, for another try. "
    "`millrace consume jobs --queue workers --exec './resize.sh \"$RECORD_KEY\"'`, "
    "started several times, works in parallel."
)

app = typer.Typer(add_completion=False, help="Print records: new ones, from a place in the log, or as a group.")


@app.command(epilog=EPILOG)
def consume(
    topics: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC...", show_default=False, help="The topics to read; ^PATTERN is a pattern."),
    ] = None,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    from_beginning: Annotated[bool, typer.Option("--from-beginning", help="Start at the first record.")] = False,
    from_offset: Annotated[
        int | None, typer.Option("--from-offset", help="Start here in each partition; -10 is the last ten.")
    ] = None,
    from_time: Annotated[
        str | None, typer.Option("--from-time", help="Start at this time: ISO 8601, milliseconds, or '1h ago'.")
    ] = None,
    to_offset: Annotated[
        int | None,
        typer.Option("--to-offset", help="Stop before this offset in each partition; -10 is ten before the end."),
    ] = None,
    to_time: Annotated[
        str | None, typer.Option("--to-time", help="Stop before the first record of this time or later.")
    ] = None,
    patterns: Annotated[
        list[str] | None,
        typer.Option(
            "--pattern",
            metavar="REGEX",
            help="Topics whose name begins like this, with --follow also those that appear later; repeatable.",
        ),
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
    isolation: Annotated[
        str | None,
        typer.Option(
            "--isolation",
            help="read-committed (the default) waits for open transactions and leaves out aborted ones; "
            "read-uncommitted prints every record at once.",
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
    show_offsets: Annotated[
        bool,
        typer.Option("--offsets", help="Print partition and offset before values, of several topics also the topic."),
    ] = False,
    delimiter: Annotated[
        str | None, typer.Option("--delimiter", help="What follows each record; without it, a line feed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line; binary data as base64.")] = False,
    client: Client = None,
) -> None:
    """Print the records of topics."""
    clock = SystemClock()
    at_most_one(
        {"--from-beginning": from_beginning, "--from-offset": from_offset, "--from-time": from_time},
        "reading begins in one place",
    )
    at_most_one({"--to-offset": to_offset, "--to-time": to_time}, "reading ends in one place")
    columns = {
        "--timestamps": show_timestamps,
        "--offsets": show_offsets,
        "--headers": show_headers,
        "--keys": show_keys,
    }
    for name, value in {"--format": template, "--delimiter": delimiter, **columns}.items():
        exclude(("--json", as_json), (name, value), "JSON has every field, and an object per line")
    for name, value in columns.items():
        exclude(("--format", template), (name, value), "the format says what is printed")
    exclude(("--exec", exec_command), ("--delimiter", delimiter), "a command gets one record")
    chosen = partitions or any(one is not None for one in (from_offset, from_time, to_offset, to_time))
    if queue is None and exec_command is not None:
        raise CommandError(
            "--exec needs --queue GROUP: a record is accepted by the exit code of the command", exit_code=2
        )
    exclude(
        ("--queue", queue),
        ("--isolation", isolation),
        "what a queue hands out is a setting of its group, share.isolation.level; see: millrace queues alter --set",
    )
    if queue is not None and (group is not None or chosen or follow is False):
        raise CommandError(
            "a queue hands out what is next: --group, --from-offset, --from-time, --to-offset, --to-time, --partition "
            "and --no-follow do not go with --queue; see: millrace queues reset",
            exit_code=2,
        )
    if group is not None and chosen:
        raise CommandError("a group chooses its own partitions and offsets; see: millrace groups reset", exit_code=2)
    selection = Selection.of(topics or (), patterns or (), partitions or ())
    if not selection.names and not selection.patterns:
        raise CommandError("which topic? name one or more, or give a --pattern", exit_code=2)
    start = Start(
        from_beginning, from_offset, None if from_time is None else parse_time_ms(from_time, now_ms=clock.wall_ms())
    )
    end = End(to_offset, None if to_time is None else parse_time_ms(to_time, now_ms=clock.wall_ms()))
    if end.given and not start.given:
        start = Start(beginning=True)
    if follow is None:
        waits = max_records is not None or timeout is not None or group is not None
        follow = not end.given and (waits or not start.given)
    render: Callable[[ReceivedRecord], bytes] = render_json
    if not as_json:
        given = {name for name, wanted in columns.items() if wanted}
        render = compile_template(template if template is not None else _template(given, selection))
    ending = b"\n" if as_json or delimiter is None else unescape(delimiter).encode()
    overrides = {**name_values(client, "--client"), **reading_settings(isolation)}
    if queue is not None:
        from millrace.cli.queue_consume import QueueOptions, consume_queue, open_client

        if selection.several:
            raise CommandError("--queue reads one topic, by its name", exit_code=2)
        options = QueueOptions(selection.names[0], queue, exec_command, from_beginning, max_records, timeout)
        consume_queue(open_client(bootstrap, overrides), options, render, ending)
        return
    if group is not None:
        from millrace.cli.queue_consume import refuse_queue

        refuse_queue(bootstrap, overrides, group)
    from millrace.cli.connection import open_consumer

    limits = Limits(max_records, timeout, end, follow)
    subscribing = {} if group is None else selection.subscription_settings()
    settings = {**_settings(group, start, limits), **subscribing, **overrides}
    consumer = open_consumer(bootstrap, settings)
    try:
        printed = _print_records(consumer, selection, start, limits, group, lambda record: render(record) + ending)
    except KeyboardInterrupt:
        return
    finally:
        consumer.close()
    if max_records is not None and printed < max_records and timeout is not None and follow:
        print_remark(f"stopped after {timeout:g} s without a record: {printed} of {max_records} records")
        raise typer.Exit(1)


def _template(columns: set[str], selection: Selection) -> str:
    """What is printed of a record unless a format says so: the columns that were asked for, and the value."""
    fields = {
        "--timestamps": "{timestamp}",
        "--offsets": "{topic}\t{partition}\t{offset}" if selection.several else "{partition}\t{offset}",
        "--headers": "{headers}",
        "--keys": "{key}",
    }
    return "\t".join([*(field for name, field in fields.items() if name in columns), "{value}"])


def _settings(group: str | None, start: Start, limits: Limits) -> dict[str, Any]:
    return {
        "group.id": group if group is not None else "millrace-cli",
        "enable.auto.commit": group is not None,
        "enable.auto.offset.store": False,  # a record is stored for commit when it has been written out
        "auto.commit.interval.ms": 1000,
        "auto.offset.reset": "earliest" if start.beginning or group is None else "latest",
        "enable.partition.eof": limits.end.given or not limits.follow,
        "fetch.wait.max.ms": 500,
        "queued.max.messages.kbytes": 32_768,
    }


def _print_records(
    consumer: Consumer,
    selection: Selection,
    start: Start,
    limits: Limits,
    group: str | None,
    render: Callable[[ReceivedRecord], bytes],
) -> int:
    """Print until a limit is reached; returns how many records that were."""
    partitions = find_partitions(consumer, selection)
    if not partitions and not limits.follow:
        raise CommandError(f"there are no {selection}")
    printer = Printer(consumer, limits, render)
    if group is not None:
        printer.join(partitions, selection)
    else:
        printer.read(begin_offsets(consumer, partitions, start))
        if limits.follow and not selection.only:
            printer.watch(selection)
    with ExitStack() as stack:
        printer.on_progress = show_progress(stack, limits.max_records)
        if limits.follow and sys.stderr.isatty():
            printer.on_wait = lambda: print_remark(_what_is_waited_for(selection, start, limits, group))
        return printer.run(commits=group is not None)


def _what_is_waited_for(selection: Selection, start: Start, limits: Limits, group: str | None) -> str:
    """For a person in front of a terminal on which nothing happens."""
    what = f"waiting for {'more' if start.given else 'new'} records of {selection}"
    if group is not None:
        what += f" as a member of group {group}"
    ways = ["Ctrl-C ends"]
    if limits.idle_timeout_s is not None:
        ways.append(f"so do {limits.idle_timeout_s:g} s without one")
    if not start.given and group is None:
        ways.append("--from-beginning prints what is there")
    return f"{what}; {', '.join(ways)}"
