"""`millrace perf`: how fast a cluster takes records, gives them back, and how long one is on its way.

For any cluster that speaks Kafka's protocol. Without `--topic` it makes a topic and removes it again, however it ends.
Ctrl-C ends a measurement with the summary of what was done. What is measured how is `perf_runs`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millrace.cli import perf_runs
from millrace.cli.choices import exclude, sending_settings
from millrace.cli.consume_bounds import Selection, Start, begin_offsets, bounds, find_partitions
from millrace.cli.delivery import read_rules
from millrace.cli.interruptions import Interruptions
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, name_values
from millrace.cli.output import CommandError, print_error, print_json, print_remark
from millrace.cli.perf_runs import STAMP, Bench, Plan, Tally
from millrace.cli.perf_view import View, summary, summary_text
from millrace.clock import SystemClock

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Producer

DEFAULT_RECORDS: Final = 100_000
DEFAULT_RATE: Final = 1000.0
DEFAULT_SECONDS: Final = 10.0

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure throughput and latency of a cluster.")

Records = Annotated[
    int | None,
    typer.Option("--records", "-n", min=1, help=f"How many records; {DEFAULT_RECORDS:,} unless --duration is given."),
]
Duration = Annotated[float | None, typer.Option("--duration", min=0.1, help="End after so many seconds.")]
Size = Annotated[int, typer.Option("--size", "-s", min=1, help="Bytes of each record.")]
Rate = Annotated[float | None, typer.Option("--rate", "-r", min=0.001, help="Records per second, at even intervals.")]
Acks = Annotated[str, typer.Option("--acks", help="all, 1 or 0.")]
Compression = Annotated[str, typer.Option("--compression", "-z", help="none, gzip, snappy, lz4 or zstd.")]
Topic = Annotated[
    str | None, typer.Option("--topic", "-t", help="Use this topic; without it one is made, and removed afterwards.")
]
Partitions = Annotated[
    int | None, typer.Option("--partitions", "-p", min=1, help="Of the topic that is made; 1 unless given.")
]
Copies = Annotated[
    int | None,
    typer.Option("--replication-factor", min=1, help="Of the topic that is made; the broker's default unless given."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the summary.")]
JsonSummary = Annotated[bool, typer.Option("--json", help="The summary as JSON.")]


@app.callback()
def perf() -> None:
    """Measure throughput and latency of a cluster."""


@app.command(
    epilog="Examples: `millrace perf produce --size 1000` as fast as it goes, or "
    "`millrace perf produce --rate 5000 --duration 60 --partitions 6 --acks all` for latencies under a steady load"
)
def produce(
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    records: Records = None,
    duration: Duration = None,
    size: Size = 100,
    rate: Rate = None,
    acks: Acks = "all",
    compression: Compression = "none",
    topic: Topic = None,
    partitions: Partitions = None,
    copies: Copies = None,
    quiet: Quiet = False,
    client: Client = None,
    as_json: JsonSummary = False,
) -> None:
    """Send records; latencies are from when a record was due until it is acknowledged."""
    plan = Plan(_records(records, duration), duration, rate, size)
    sending = sending_settings(acks, compression)
    overrides = name_values(client, "--client")
    with _topic(bootstrap, overrides, topic, partitions, copies) as (name, _):
        producer = _open_producer(bootstrap, name, sending, overrides)
        _measure(
            "produce",
            name,
            plan,
            lambda bench, tally: perf_runs.produce(bench, producer, name, plan, tally),
            producer,
            quiet=quiet,
            as_json=as_json,
        )


@app.command(
    epilog="Examples: `millrace perf consume --records 1000000` of a topic that is filled first, or "
    "`millrace perf consume --topic orders`"
)
def consume(
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    records: Annotated[
        int | None,
        typer.Option(
            "--records",
            "-n",
            min=1,
            help=f"How many records; all, or {DEFAULT_RECORDS:,} of a topic that is made.",
        ),
    ] = None,
    duration: Duration = None,
    size: Annotated[
        int | None, typer.Option("--size", "-s", min=1, help="Bytes of each record of the topic that is made.")
    ] = None,
    compression: Annotated[
        str | None, typer.Option("--compression", "-z", help="Of the topic that is made: none, gzip, snappy, ...")
    ] = None,
    topic: Topic = None,
    partitions: Partitions = None,
    copies: Copies = None,
    quiet: Quiet = False,
    client: Client = None,
    as_json: JsonSummary = False,
) -> None:
    """Read a topic from its beginning, up to what is there; percentiles are of waits for the next records."""
    for option, value in {"--size": size, "--compression": compression}.items():
        exclude(("--topic", topic), (option, value), "its records are what they are")
    sending = sending_settings("all", compression or "none")
    overrides = name_values(client, "--client")
    with _topic(bootstrap, overrides, topic, partitions, copies) as (name, is_made):
        if is_made:
            filling = Plan(records or DEFAULT_RECORDS, None, None, size or 100)
            if not _fill(_open_producer(bootstrap, name, sending, overrides), name, filling, quiet=quiet):
                raise typer.Exit(130)
        plan = Plan(records, duration, None, size or 0)
        consumer = _open_consumer(bootstrap, overrides)
        try:
            begin = begin_offsets(consumer, find_partitions(consumer, Selection((name,))), Start(beginning=True))
            unread = {one: offset for one, offset in begin.items() if bounds(consumer, one)[1] > offset}
            _measure(
                "consume",
                name,
                plan,
                lambda bench, tally: perf_runs.consume(bench, consumer, unread, plan, tally),
                None,
                quiet=quiet,
                as_json=as_json,
            )
        finally:
            consumer.close()


@app.command(
    "end-to-end",
    epilog="Example: `millrace perf end-to-end --rate 2000 --duration 30 --size 1000 --partitions 3 --json`",
)
def end_to_end(
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    records: Annotated[int | None, typer.Option("--records", "-n", min=1, help="How many records.")] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration",
            min=0.1,
            help=f"End after so many seconds; {DEFAULT_SECONDS:.0f} unless --records is given.",
        ),
    ] = None,
    size: Annotated[int, typer.Option("--size", "-s", min=STAMP.size, help="Bytes of each record.")] = 100,
    rate: Annotated[
        float, typer.Option("--rate", "-r", min=0.001, help="Records per second, at even intervals.")
    ] = DEFAULT_RATE,
    acks: Acks = "all",
    compression: Compression = "none",
    topic: Topic = None,
    partitions: Partitions = None,
    copies: Copies = None,
    quiet: Quiet = False,
    client: Client = None,
    as_json: JsonSummary = False,
) -> None:
    """Send records and read them; latencies are from when a record was due until it was read."""
    if records is None and duration is None:
        duration = DEFAULT_SECONDS
    plan = Plan(records, duration, rate, size)
    sending = {**sending_settings(acks, compression), "linger.ms": 0, "delivery.report.only.error": True}
    overrides = name_values(client, "--client")
    with _topic(bootstrap, overrides, topic, partitions, copies) as (name, _):
        producer = _open_producer(bootstrap, name, sending, overrides)
        consumer = _open_consumer(bootstrap, {"enable.partition.eof": "false", **overrides})
        try:
            begin = begin_offsets(consumer, find_partitions(consumer, Selection((name,))), Start())
            _measure(
                "end-to-end",
                name,
                plan,
                lambda bench, tally: perf_runs.RoundTrip(bench, producer, consumer, plan, tally).run(begin),
                producer,
                quiet=quiet,
                as_json=as_json,
            )
        finally:
            consumer.close()


def _records(records: int | None, duration: float | None) -> int | None:
    return DEFAULT_RECORDS if records is None and duration is None else records


def _measure(
    test: str,
    topic: str,
    plan: Plan,
    run: Callable[[Bench, Tally], None],
    producer: Producer | None,
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run it under a view, and print what was done, however it ended."""
    clock, tally = SystemClock(), Tally()
    with Interruptions() as interruptions:
        try:
            with View(f"{test} {topic}", plan, clock, quiet=quiet) as view:
                run(Bench(clock, interruptions.came, view.show), tally)
        except KeyboardInterrupt:
            pass  # the second one: whatever is not acknowledged stays so
    unacknowledged = 0 if producer is None else len(producer)
    if unacknowledged and producer is not None:
        producer.purge(blocking=False)
    if as_json:
        print_json(summary(test, topic, plan, tally, unacknowledged))
    else:
        print(summary_text(test, topic, tally, unacknowledged))
    if tally.first_error is not None:
        print_error(tally.first_error)
    if interruptions.came():
        raise typer.Exit(130)
    if tally.failed or tally.lost or unacknowledged:
        raise typer.Exit(1)


def _fill(producer: Producer, topic: str, plan: Plan, *, quiet: bool) -> bool:
    """Write what is to be read; False when that was interrupted."""
    clock, tally = SystemClock(), Tally()
    with Interruptions() as interruptions, View(f"filling {topic}", plan, clock, quiet=quiet) as view:
        perf_runs.produce(Bench(clock, interruptions.came, view.show), producer, topic, plan, tally)
    if tally.first_error is not None:
        raise CommandError(f"filling {topic}: {tally.first_error}")
    return not interruptions.came()


def _open_producer(bootstrap: str, topic: str, sending: dict[str, Any], overrides: dict[str, str]) -> Producer:
    from millrace.cli.connection import open_producer

    rules = read_rules(bootstrap, overrides, topic).client_settings()
    return open_producer(bootstrap, {**sending, "message.timeout.ms": 60_000, **rules, **overrides})


def _open_consumer(bootstrap: str, overrides: dict[str, str]) -> Consumer:
    from millrace.cli.connection import open_consumer

    settings = {
        "group.id": "millrace-perf",
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "enable.partition.eof": True,
        **overrides,
    }
    return open_consumer(bootstrap, settings)


@contextmanager
def _topic(
    bootstrap: str, overrides: dict[str, str], name: str | None, partitions: int | None, copies: int | None
) -> Iterator[tuple[str, bool]]:
    """The topic that was named, or one that is made here and removed at the end; and whether it is made."""
    from confluent_kafka.admin import NewTopic

    from millrace.cli.connection import (
        REQUEST_TIMEOUT_S,
        explain_kafka_exception,
        open_admin,
        result,
        topic_partitions,
    )

    for option, value in {"--partitions": partitions, "--replication-factor": copies}.items():
        exclude(("--topic", name), (option, value), "it is there already")
    admin = open_admin(bootstrap, overrides)
    if name is not None:
        topic_partitions(admin, name)
        yield name, False
        return
    made = f"millrace-perf-{secrets.token_hex(4)}"
    wanted = NewTopic(made, partitions or 1, copies or -1)
    result(admin.create_topics([wanted], request_timeout=REQUEST_TIMEOUT_S)[made])
    try:
        yield made, True
    finally:
        try:
            result(admin.delete_topics([made], request_timeout=REQUEST_TIMEOUT_S)[made])
        except Exception as error:
            text = explain_kafka_exception(error)
            if text is None:
                raise
            print_remark(f"topic {made} is left behind: {text}")
