"""`millrace queues`: the groups that read topics as queues, how far they are, moving, setting and deleting them.

A queue is a share group. Reading from a queue is `millrace consume --queue`. Not here: how queues are asked for
(`admin.queues`).
"""

from __future__ import annotations

import fnmatch
from typing import Annotated, Any

import typer

from millrace.admin import queues as admin_queues
from millrace.admin.errors import AdminError
from millrace.admin.groups import GroupView, Target
from millrace.admin.queues import DEAD_LETTERS, DELIVERY_LIMIT, Position, QueuePartition
from millrace.admin.topics import chosen_partitions
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, Yes, confirm, name_values
from millrace.cli.output import CommandError, print_error, print_json, print_remark, print_table
from millrace.cli.queue_consume import open_client
from millrace.cli.times import parse_time_ms
from millrace.clock import SystemClock
from millrace.errors import ApiError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="List, describe, reset, alter and delete queues (share groups)."
)


@app.command("list", epilog="Example: millrace queues list 'work*' --json")
def list_queues(
    pattern: Annotated[str, typer.Argument(help="Only queues whose group matches, with * and ?.")] = "*",
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """List the groups that read topics as queues, and their state."""
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        found = admin_queues.list_queues(cluster)
    queues = [{"queue": each.name, "state": each.state} for each in found if fnmatch.fnmatchcase(each.name, pattern)]
    if as_json:
        print_json(queues)
    else:
        print_table(["queue", "state"], [list(each.values()) for each in queues])


@app.command(epilog="Example: millrace queues describe workers --members")
def describe(
    names: Annotated[list[str], typer.Argument(metavar="GROUP...", show_default=False, help="Group names.")],
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    members: Annotated[bool, typer.Option("--members", help="Also who the members are and what they read.")] = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Show where queues are, how many records wait, and who reads."""
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        views = [admin_queues.describe_queue(cluster, name) for name in names]
        queues = [_description(each, admin_queues.read_partitions(cluster, each)) for each in views]
    if as_json:
        print_json(queues)
        return
    for queue in queues:
        title = f"{queue['queue']}  state={queue['state']} members={len(queue['members'])} lag={queue['lag']:,}"
        columns = ("topic", "partition", "start", "end", "lag", "members")
        print_table(columns, [[row[column] for column in columns] for row in queue["partitions"]], title=title)
        if members:
            print_table(
                ["member", "client", "host", "partitions"],
                [(one["member"], one["client"], one["host"], " ".join(one["partitions"])) for one in queue["members"]],
            )


@app.command(epilog="Example: millrace queues reset workers --topic jobs --to-time '1h ago' --execute")
def reset(
    name: Annotated[str, typer.Argument(metavar="GROUP", show_default=False, help="The queue's group.")],
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    topics: Annotated[
        list[str] | None,
        typer.Option("--topic", "-t", metavar="TOPIC[:P,P]", help="Which topics or partitions; repeatable."),
    ] = None,
    all_topics: Annotated[bool, typer.Option("--all-topics", help="All topics the queue has read.")] = False,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="To the first record.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="After the last record.")] = False,
    to_offset: Annotated[int | None, typer.Option("--to-offset", min=0, help="To this offset.")] = None,
    to_time: Annotated[
        str | None, typer.Option("--to-time", help="To this time: ISO 8601, milliseconds, or '1h ago'.")
    ] = None,
    execute: Annotated[
        bool, typer.Option("--execute/--dry-run", help="Do it, or only show the plan (the default).")
    ] = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Move a queue that has no running members: what lies after its new start is delivered, done before or not."""
    time_ms = None if to_time is None else parse_time_ms(to_time, now_ms=SystemClock().wall_ms())
    target = Target(to_earliest, to_latest, to_offset, time_ms)
    if target.choices != 1:
        raise CommandError("give one of --to-earliest, --to-latest, --to-offset, --to-time", exit_code=2)
    if bool(topics) == all_topics:
        raise CommandError("give either --topic or --all-topics", exit_code=2)
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        queue = admin_queues.describe_queue(cluster, name)
        positions = admin_queues.positions_of(cluster, name)
        chosen = sorted(positions) if all_topics else chosen_partitions(cluster, topics or [])
        if not chosen:
            raise CommandError(f"queue '{name}' has not read any topic")
        plan = admin_queues.plan_reset(cluster, chosen, target)
        if execute:
            admin_queues.execute(cluster, queue, plan)
    rows = [
        (each.topic, each.partition, positions.get(each, Position(None, None)).start, new)
        for each, new in sorted(plan.items())
    ]
    if as_json:
        fields = ("topic", "partition", "from", "to")
        partitions = [dict(zip(fields, row, strict=True)) for row in rows]
        print_json({"queue": name, "executed": execute, "partitions": partitions})
        return
    print_table(["topic", "partition", "from", "to"], rows)
    print_remark("done" if execute else "a plan only; say --execute to do it")


@app.command(
    epilog="Examples: `millrace queues alter workers --dead-letters dlq.jobs`, "
    "`millrace queues alter workers --delivery-limit 3 --set share.redelivery.backoff.ms=1000`"
)
def alter(
    name: Annotated[str, typer.Argument(metavar="GROUP", show_default=False, help="The queue's group.")],
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    dead_letters: Annotated[
        str | None,
        typer.Option("--dead-letters", metavar="TOPIC", help="Send what is given up to this topic; '' to nowhere."),
    ] = None,
    delivery_limit: Annotated[
        int | None, typer.Option("--delivery-limit", min=1, help="Give a record up after so many deliveries.")
    ] = None,
    to_set: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting to change, repeatable.")
    ] = None,
    to_unset: Annotated[
        list[str] | None, typer.Option("--unset", metavar="NAME", help="A setting to put back to its default.")
    ] = None,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Change settings of a queue: where its dead letters go, how often a record is tried, any other.

    They hold at once, and may be given before the queue is first read. `millrace configs get --group GROUP` shows them.
    """
    settings = name_values(to_set, "--set")
    if dead_letters is not None:
        settings[DEAD_LETTERS] = dead_letters
    if delivery_limit is not None:
        settings[DELIVERY_LIMIT] = str(delivery_limit)
    if not settings and not to_unset:
        raise CommandError("nothing to alter: give --dead-letters, --delivery-limit, --set or --unset", exit_code=2)
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        not_set = admin_queues.change_settings(cluster, name, settings, to_unset or ())
    for setting in not_set:
        print_remark(f"{setting} is not set for queue '{name}'")
    if as_json:
        print_json({"queue": name, "result": "altered"})
    elif settings or len(not_set) < len(set(to_unset or ())):
        print(f"altered {name}")


@app.command(epilog="Example: millrace queues delete workers --yes")
def delete(
    names: Annotated[list[str], typer.Argument(metavar="GROUP...", show_default=False, help="Group names.")],
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    yes: Yes = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Delete queues that nobody reads, with what became of their records; the records and the settings stay."""
    confirm(f"Delete {', '.join(names)} and what became of the records?", yes=yes)
    outcomes: list[dict[str, str]] = []
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        for name in dict.fromkeys(names):
            try:
                admin_queues.delete_queue(cluster, name)
            except (AdminError, ApiError) as error:
                outcomes.append({"queue": name, "result": "failed", "error": str(error)})
                print_error(str(error))
            else:
                outcomes.append({"queue": name, "result": "deleted"})
                if not as_json:
                    print(f"deleted {name}")
    if as_json:
        print_json(outcomes)
    if any(one["result"] == "failed" for one in outcomes):
        raise typer.Exit(1)


def _description(queue: GroupView, partitions: list[QueuePartition]) -> dict[str, Any]:
    return {
        "queue": queue.name,
        "state": queue.state,
        "assignor": queue.assignor,
        "lag": sum(each.lag or 0 for each in partitions),
        "members": [
            {
                "member": each.member_id,
                "client": each.client_id,
                "host": each.host,
                "topics": list(each.topics or ()),
                "partitions": [str(one) for one in each.partitions],
            }
            for each in queue.members
        ],
        "partitions": [
            {
                "topic": each.place.topic,
                "partition": each.place.partition,
                "start": each.start,
                "end": each.end,
                "lag": each.lag,
                "members": each.members,
            }
            for each in partitions
        ],
    }
