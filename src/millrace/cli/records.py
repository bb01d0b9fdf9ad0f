"""`millrace records delete`: the oldest records of a topic, up to an offset or a time, or all there are.

A log is only ever cut at its beginning, so what goes is said as where each partition begins afterwards. That is worked
out first and shown, and exactly that is asked for: records that arrive meanwhile stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from millrace.admin.times import parse_time_ms
from millrace.cli.choices import at_most_one
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, Yes, confirm, name_values
from millrace.cli.output import CommandError, count_text, print_error, print_json, print_remark, print_table
from millrace.cli.topics import offset_bounds
from millrace.clock import SystemClock

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Delete the oldest records of a topic.")


class Cut(NamedTuple):
    """What a partition loses: the offsets from `start` up to `to`."""

    partition: int
    start: int
    to: int
    end: int

    @property
    def records(self) -> int:
        """At most: offsets of compacted or transactional logs may hold no record."""
        return self.to - self.start


@app.callback()
def records() -> None:
    """Delete the oldest records of a topic."""


@app.command(
    epilog="Examples: `millrace records delete orders --before-time '7d ago'` or "
    "`millrace records delete orders --before-offset 1000 --partition 0` or "
    "`millrace records delete orders --all --yes`"
)
def delete(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, help="The topic.")],
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    before_offset: Annotated[
        int | None, typer.Option("--before-offset", min=0, help="Delete everything before this offset.")
    ] = None,
    before_time: Annotated[
        str | None,
        typer.Option(
            "--before-time", help="Delete up to the first record of this time: ISO 8601, milliseconds, or '7d ago'."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete every record that is there now.")] = False,
    partitions: Annotated[
        list[int] | None, typer.Option("--partition", "-p", min=0, help="Only in this partition, repeatable.")
    ] = None,
    yes: Yes = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Delete records before an offset or a time, or all; shows what will go, and asks."""
    at_most_one(
        {"--before-offset": before_offset, "--before-time": before_time, "--all": everything},
        "one of them says what goes",
    )
    if before_offset is None and before_time is None and not everything:
        raise CommandError("what should go? give --before-offset, --before-time or --all", exit_code=2)
    time_ms = None if before_time is None else parse_time_ms(before_time, now_ms=SystemClock().wall_ms())
    from millrace.cli.connection import open_admin, topic_partitions

    admin = open_admin(bootstrap, name_values(client, "--client"))
    there = topic_partitions(admin, topic)
    missing = sorted(set(partitions or ()) - set(there))
    if missing:
        raise CommandError(f"topic '{topic}' has no partition {missing[0]} (it has {len(there)})")
    chosen = sorted(set(partitions)) if partitions else there
    cuts = plan(admin, topic, chosen, before_offset=before_offset, time_ms=time_ms)
    lost = sum(cut.records for cut in cuts)
    if not lost:
        if as_json:
            print_json(_outcome(topic, cuts, {}))
        else:
            print_remark(f"{topic} has no such records")
        return
    if not as_json:
        rows = [(cut.partition, cut.start, cut.end, cut.to, f"{cut.records:,}") for cut in cuts]
        print_table(["partition", "start", "end", "new start", "records"], rows, title=topic)
    confirm(f"Delete {count_text(lost, 'record')} of {topic} for good?", yes=yes)
    failures = _delete(admin, topic, cuts)
    if as_json:
        print_json(_outcome(topic, cuts, failures))
    for partition, text in failures.items():
        print_error(f"{topic}-{partition}: {text}")
    gone = sum(cut.records for cut in cuts if cut.partition not in failures)
    if not as_json and gone:
        print(f"deleted {count_text(gone, 'record')} of {topic}")
    if failures:
        raise typer.Exit(1)


def plan(
    admin: AdminClient, topic: str, partitions: Iterable[int], *, before_offset: int | None, time_ms: int | None
) -> list[Cut]:
    """Where each partition would begin; all that is there goes where neither an offset nor a time is given."""
    bounds = offset_bounds(admin, [(topic, partition) for partition in partitions])
    at_time = {} if time_ms is None else _offsets_at(admin, topic, partitions, time_ms)
    cuts = []
    for (_, partition), (start, end) in bounds.items():
        wanted = end
        if before_offset is not None:
            wanted = before_offset
        elif at_time.get(partition, -1) >= 0:  # otherwise every record is older
            wanted = at_time[partition]
        cuts.append(Cut(partition, start, min(max(wanted, start), end), end))
    return cuts


def _offsets_at(admin: AdminClient, topic: str, partitions: Iterable[int], time_ms: int) -> dict[int, int]:
    """The first record that is not before this time, per partition; -1 where there is none."""
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import OffsetSpec

    from millrace.cli.connection import REQUEST_TIMEOUT_S, result

    wanted = {TopicPartition(topic, partition): OffsetSpec.for_timestamp(time_ms) for partition in partitions}
    futures = admin.list_offsets(wanted, request_timeout=REQUEST_TIMEOUT_S)
    return {one.partition: result(future).offset for one, future in futures.items()}


def _delete(admin: AdminClient, topic: str, cuts: list[Cut]) -> dict[int, str]:
    """Ask for it, and return why it failed, per partition."""
    from confluent_kafka import TopicPartition

    from millrace.cli.connection import REQUEST_TIMEOUT_S, explain_kafka_exception, result

    wanted = [TopicPartition(topic, cut.partition, cut.to) for cut in cuts if cut.records]
    futures: dict[TopicPartition, Future[Any]] = admin.delete_records(wanted, request_timeout=REQUEST_TIMEOUT_S)
    failures: dict[int, str] = {}
    for one, future in futures.items():
        try:
            result(future)
        except Exception as error:
            text = explain_kafka_exception(error)
            if text is None:
                raise
            failures[one.partition] = text
    return failures


def _outcome(topic: str, cuts: list[Cut], failures: dict[int, str]) -> dict[str, Any]:
    def of(cut: Cut) -> dict[str, Any]:
        done = {"partition": cut.partition, "from": cut.start, "to": cut.to, "records": cut.records}
        return {**done, "error": failures[cut.partition]} if cut.partition in failures else done

    return {"topic": topic, "partitions": [of(cut) for cut in cuts]}
