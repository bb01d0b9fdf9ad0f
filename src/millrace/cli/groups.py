"""`millrace groups`: what consumer groups have read, how far they lag, and moving them.

A reset is planned first and shown; only `--execute` commits it. The offsets of a group can move only while it has no
members, which the broker enforces.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, Yes, confirm, name_values
from millrace.cli.output import CommandError, print_error, print_json, print_remark, print_table
from millrace.cli.times import parse_time_ms
from millrace.cli.topics import offset_bounds
from millrace.clock import SystemClock

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

app = typer.Typer(no_args_is_help=True, add_completion=False, help="List, describe, reset and delete consumer groups.")

Groups = Annotated[list[str], typer.Argument(metavar="GROUP...", show_default=False, help="Group names.")]
Partition = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a reset moves offsets to; exactly one field is set."""

    earliest: bool = False
    latest: bool = False
    offset: int | None = None
    time_ms: int | None = None
    by: int | None = None

    @property
    def choices(self) -> int:
        return sum([self.earliest, self.latest, *(one is not None for one in (self.offset, self.time_ms, self.by))])


@app.command("list", epilog="Example: millrace groups list 'billing-*' --json")
def list_groups(
    pattern: Annotated[str, typer.Argument(help="Only groups whose name matches, with * and ?.")] = "*",
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """List consumer groups and their state."""
    from millrace.cli.connection import REQUEST_TIMEOUT_S, open_admin, result

    admin = open_admin(bootstrap, name_values(client, "--client"))
    listing = result(admin.list_consumer_groups(request_timeout=REQUEST_TIMEOUT_S))
    if listing.errors and not listing.valid:
        raise listing.errors[0]
    groups = sorted(
        ({"group": one.group_id, "state": _word(one.state), "type": _word(one.type)} for one in listing.valid),
        key=lambda one: one["group"],
    )
    groups = [one for one in groups if fnmatch.fnmatchcase(one["group"], pattern)]
    if as_json:
        print_json(groups)
    else:
        print_table(["group", "state", "type"], [list(one.values()) for one in groups])


@app.command(epilog="Example: millrace groups describe billing --members")
def describe(
    names: Groups,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    members: Annotated[bool, typer.Option("--members", help="Also who the members are and what they read.")] = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Show committed offsets, lag and members of groups."""
    from millrace.cli.connection import open_admin

    admin = open_admin(bootstrap, name_values(client, "--client"))
    groups = [_description(admin, name) for name in names]
    if as_json:
        print_json(groups)
        return
    for group in groups:
        print_table(
            ["topic", "partition", "committed", "end", "lag", "member"],
            [
                (one["topic"], one["partition"], one["committed"], one["end_offset"], one["lag"], one["member"])
                for one in group["partitions"]
            ],
            title=(
                f"{group['group']}  state={group['state']} type={group['type']} members={len(group['members'])}"
                f" lag={group['lag']:,}"
            ),
        )
        if members:
            print_table(
                ["member", "client", "host", "partitions"],
                [(one["member"], one["client"], one["host"], " ".join(one["partitions"])) for one in group["members"]],
            )


@app.command(epilog="Example: millrace groups reset billing --topic orders --to-time '1h ago' --execute")
def reset(
    name: Annotated[str, typer.Argument(metavar="GROUP", show_default=False, help="The group.")],
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    topics: Annotated[
        list[str] | None,
        typer.Option("--topic", "-t", metavar="TOPIC[:P,P]", help="Which topics or partitions; repeatable."),
    ] = None,
    all_topics: Annotated[bool, typer.Option("--all-topics", help="All topics the group has committed.")] = False,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="To the first record.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="After the last record.")] = False,
    to_offset: Annotated[int | None, typer.Option("--to-offset", min=0, help="To this offset.")] = None,
    to_time: Annotated[
        str | None, typer.Option("--to-time", help="To this time: ISO 8601, milliseconds, or '1h ago'.")
    ] = None,
    by: Annotated[int | None, typer.Option("--by", help="So many records on, or back if negative.")] = None,
    execute: Annotated[
        bool, typer.Option("--execute/--dry-run", help="Do it, or only show the plan (the default).")
    ] = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Move the committed offsets of a group that has no running members."""
    time_ms = None if to_time is None else parse_time_ms(to_time, now_ms=SystemClock().wall_ms())
    target = Target(to_earliest, to_latest, to_offset, time_ms, by)
    if target.choices != 1:
        raise CommandError("give one of --to-earliest, --to-latest, --to-offset, --to-time, --by", exit_code=2)
    if bool(topics) == all_topics:
        raise CommandError("give either --topic or --all-topics", exit_code=2)
    from millrace.cli.connection import open_admin

    admin = open_admin(bootstrap, name_values(client, "--client"))
    committed = _committed(admin, name)
    chosen = sorted(committed) if all_topics else _chosen(admin, topics or [])
    if not chosen:
        raise CommandError(f"group '{name}' has no committed offsets")
    plan = _plan(admin, chosen, committed, target)
    if execute:
        _commit(admin, name, {partition: new for partition, (_, new) in plan.items()})
    rows = [(topic, index, old, new) for (topic, index), (old, new) in sorted(plan.items())]
    if as_json:
        fields = ("topic", "partition", "from", "to")
        partitions = [dict(zip(fields, row, strict=True)) for row in rows]
        print_json({"group": name, "executed": execute, "partitions": partitions})
        return
    print_table(["topic", "partition", "from", "to"], rows)
    print_remark("done" if execute else "a plan only; say --execute to do it")


@app.command(epilog="Example: millrace groups delete billing --yes")
def delete(
    names: Groups,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    yes: Yes = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Delete groups that have no members, with their offsets."""
    from millrace.cli.connection import REQUEST_TIMEOUT_S, explain_kafka_exception, open_admin, result

    confirm(f"Delete {', '.join(names)} and their offsets?", yes=yes)
    admin = open_admin(bootstrap, name_values(client, "--client"))
    outcomes: list[dict[str, str]] = []
    for name, future in admin.delete_consumer_groups(list(names), request_timeout=REQUEST_TIMEOUT_S).items():
        try:
            result(future)
        except Exception as error:
            text = explain_kafka_exception(error)
            if text is None:
                raise
            outcomes.append({"group": name, "result": "failed", "error": text})
            print_error(f"group '{name}': {text}")
        else:
            outcomes.append({"group": name, "result": "deleted"})
            if not as_json:
                print(f"deleted {name}")
    if as_json:
        print_json(outcomes)
    if any(one["result"] == "failed" for one in outcomes):
        raise typer.Exit(1)


def _word(value: Any) -> str:
    """librdkafka's enum members as the protocol's words."""
    name = getattr(value, "name", None)
    return "unknown" if name is None else str(name).lower().replace("_", "-")


def _committed(admin: AdminClient, group: str) -> dict[Partition, int]:
    from confluent_kafka import ConsumerGroupTopicPartitions

    from millrace.cli.connection import REQUEST_TIMEOUT_S, result

    request = [ConsumerGroupTopicPartitions(group)]
    answer = result(admin.list_consumer_group_offsets(request, request_timeout=REQUEST_TIMEOUT_S)[group])
    return {(one.topic, one.partition): one.offset for one in answer.topic_partitions if one.offset >= 0}


def _description(admin: AdminClient, name: str) -> dict[str, Any]:
    from millrace.cli.connection import REQUEST_TIMEOUT_S, result

    described = result(admin.describe_consumer_groups([name], request_timeout=REQUEST_TIMEOUT_S)[name])
    committed = _committed(admin, name)
    state = _word(described.state)
    if state == "dead" and not committed:
        raise CommandError(f"there is no group '{name}'")
    owners: dict[Partition, str] = {}
    members = []
    for member in described.members:
        assigned = member.assignment.topic_partitions if member.assignment else []
        for one in assigned:
            owners[one.topic, one.partition] = member.member_id
        members.append(
            {
                "member": member.member_id,
                "client": member.client_id,
                "host": member.host,
                "partitions": [f"{one.topic}-{one.partition}" for one in assigned],
            }
        )
    wanted = sorted(committed.keys() | owners.keys())
    bounds = _existing_bounds(admin, wanted)
    partitions = []
    for partition in wanted:
        end = bounds[partition][1] if partition in bounds else None
        offset = committed.get(partition)
        partitions.append(
            {
                "topic": partition[0],
                "partition": partition[1],
                "committed": offset,
                "end_offset": end,
                "lag": None if end is None or offset is None else max(end - offset, 0),
                "member": owners.get(partition),
            }
        )
    return {
        "group": name,
        "type": _word(getattr(described, "type", None)),
        "state": state,
        "assignor": described.partition_assignor or None,
        "lag": sum(one["lag"] or 0 for one in partitions),
        "members": members,
        "partitions": partitions,
    }


def _existing_bounds(admin: AdminClient, partitions: list[Partition]) -> dict[Partition, tuple[int, int]]:
    """Offsets of the partitions that still exist: a group may have read a topic that was deleted since."""
    from millrace.cli.connection import REQUEST_TIMEOUT_S

    topics = admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics
    return offset_bounds(
        admin, [(topic, index) for topic, index in partitions if topic in topics and index in topics[topic].partitions]
    )


def _chosen(admin: AdminClient, topics: list[str]) -> list[Partition]:
    """`orders` is every partition of it, `orders:0,3` two of them."""
    from millrace.cli.connection import topic_partitions

    chosen: list[Partition] = []
    for text in topics:
        topic, colon, indexes = text.partition(":")
        existing = topic_partitions(admin, topic)
        if not colon:
            chosen += [(topic, index) for index in existing]
            continue
        for index in indexes.split(","):
            if not index.strip().isdigit() or int(index) not in existing:
                raise CommandError(f"topic '{topic}' has no partition '{index}' (it has {len(existing)})")
            chosen.append((topic, int(index)))
    return chosen


def _plan(
    admin: AdminClient, chosen: list[Partition], committed: dict[Partition, int], target: Target
) -> dict[Partition, tuple[int | None, int]]:
    """Old and new offset per partition; a new one always lies inside the log."""
    bounds = _existing_bounds(admin, chosen)
    by_time = _offsets_at(admin, list(bounds), target.time_ms) if target.time_ms is not None else {}
    plan: dict[Partition, tuple[int | None, int]] = {}
    for partition, (start, end) in bounds.items():
        old = committed.get(partition)
        if target.earliest:
            new = start
        elif target.latest:
            new = end
        elif target.offset is not None:
            new = target.offset
        elif target.by is not None:
            if old is None:
                raise CommandError(f"--by: the group has no offset for {partition[0]}-{partition[1]}")
            new = old + target.by
        else:
            new = by_time[partition] if by_time[partition] >= 0 else end
        plan[partition] = (old, min(max(new, start), end))
    return plan


def _offsets_at(admin: AdminClient, partitions: list[Partition], time_ms: int) -> dict[Partition, int]:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import OffsetSpec

    from millrace.cli.connection import REQUEST_TIMEOUT_S, result

    wanted = {TopicPartition(topic, index): OffsetSpec.for_timestamp(time_ms) for topic, index in partitions}
    futures = admin.list_offsets(wanted, request_timeout=REQUEST_TIMEOUT_S)
    return {(one.topic, one.partition): result(future).offset for one, future in futures.items()}


def _commit(admin: AdminClient, group: str, offsets: dict[Partition, int]) -> None:
    from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

    from millrace.cli.connection import REQUEST_TIMEOUT_S, explain, result

    wanted = [TopicPartition(topic, index, offset) for (topic, index), offset in offsets.items()]
    request = [ConsumerGroupTopicPartitions(group, wanted)]
    answer = result(admin.alter_consumer_group_offsets(request, request_timeout=REQUEST_TIMEOUT_S)[group])
    failed = [one for one in answer.topic_partitions if one.error is not None]
    if failed:
        raise CommandError(f"{failed[0].topic}-{failed[0].partition}: {explain(failed[0].error)}")
