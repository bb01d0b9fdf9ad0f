"""`millrace groups`: groups of every type, what they have read, how far they lag, who reads, and moving them.

A reset or an import is planned first and shown. The offsets of a group can move only while it has no
members, which the broker enforces. Groups that read a topic as a queue (share groups) are listed and described like
the others; they are moved by `millrace queues`. Not here: how groups are asked for (`admin.groups`), what a file of
offsets looks like (`cli.offset_files`).
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.admin.times import parse_time_ms
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, Yes, confirm, name_values
from millrace.cli.output import CommandError, Sum, count_text, print_error, print_json, print_remark, print_table
from millrace.clock import SystemClock

if TYPE_CHECKING:
    from millrace.admin.groups import GroupView, MemberView, Shift
    from millrace.client.cluster import ClusterClient

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="List, describe, move and delete groups of every type."
)

Groups = Annotated[list[str], typer.Argument(metavar="GROUP...", show_default=False, help="Group names.")]
Group = Annotated[str, typer.Argument(metavar="GROUP", show_default=False, help="The group.")]
Topics = Annotated[
    list[str] | None,
    typer.Option("--topic", "-t", metavar="TOPIC[:P,P]", help="Which topics or partitions; repeatable."),
]


@app.command("list", epilog="Example: millrace groups list 'billing-*' --type consumer --state stable --json")
def list_groups(
    pattern: Annotated[str, typer.Argument(help="Only groups whose name matches, with * and ?.")] = "*",
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    types: Annotated[
        list[str] | None,
        typer.Option("--type", help="Only this type: classic, consumer (KIP-848), share (queues); repeatable."),
    ] = None,
    states: Annotated[
        list[str] | None, typer.Option("--state", help="Only this state: empty, stable, reconciling, ...; repeatable.")
    ] = None,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """List groups, their type and their state."""
    from millrace.admin import groups as group_views

    wanted_types = _known_words(types, group_views.TYPES, "--type")
    wanted_states = _known_words(states, group_views.STATES, "--state")
    from millrace.cli.queue_consume import open_client

    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        found = group_views.list_groups(cluster)
    groups = [
        {"group": one.name, "state": one.state, "type": one.type}
        for one in found
        if fnmatch.fnmatchcase(one.name, pattern)
        and (wanted_types is None or one.type in wanted_types)
        and (wanted_states is None or one.state in wanted_states)
    ]
    if as_json:
        print_json(groups)
    else:
        print_table(["group", "state", "type"], [list(one.values()) for one in groups])


def _known_words(said: list[str] | None, known: Sequence[str], option: str) -> list[str] | None:
    """What was said, or None for everything; a word that nobody has would quietly give an empty list."""
    if said is None:
        return None
    words = [one.strip().lower() for one in said]
    for one in words:
        if one not in known:
            raise CommandError(f"{option} is {', '.join(known[:-1])} or {known[-1]}, not '{one}'", exit_code=2)
    return words


@app.command(
    epilog="Examples: `millrace groups describe billing --members` or, of every type, `millrace groups describe --all`"
)
def describe(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[GROUP...]", show_default=False, help="Group names, unless --all.")
    ] = None,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    all_groups: Annotated[bool, typer.Option("--all", help="Every group, of every type.")] = False,
    members: Annotated[
        bool, typer.Option("--members", help="Also who the members are, their epochs and what they read.")
    ] = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Show type, state, epoch, offsets, lag and members of groups.

    A member of a consumer group (KIP-848) has an epoch, and a target that it gets to step by step: what it still waits
    for, and what it is still to give up, is shown beside what it reads. Where a partition cannot be asked for its end,
    the lag ends with `+ ?`, and is null in JSON.
    """
    if bool(names) == all_groups:
        raise CommandError("which groups? name them, or say --all", exit_code=2)
    from millrace.admin import groups as group_views
    from millrace.cli.queue_consume import open_client

    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        if all_groups:
            names = [one.name for one in group_views.list_groups(cluster)]
        groups = [group for name in names or () if (group := _description(cluster, name, may_be_gone=all_groups))]
    if as_json:
        print_json(groups)
        return
    for group in groups:
        _print_description(group, with_members=members)


def _print_description(group: dict[str, Any], *, with_members: bool) -> None:
    facts = {name: group[name] for name in ("state", "type", "epoch", "assignor") if group[name] is not None}
    told = " ".join(f"{name}={value}" for name, value in facts.items())
    lag = _lag(group["partitions"]).text("{:,}".format)
    is_queue = group["type"] == "share"
    fields = ("start", "end_offset", "lag", "members") if is_queue else ("committed", "end_offset", "lag", "member")
    print_table(
        ["topic", "partition", fields[0], "end", *fields[2:]],
        [(one["topic"], one["partition"], *(one[field] for field in fields)) for one in group["partitions"]],
        title=f"{group['group']}  {told} members={len(group['members'])} lag={lag}",
    )
    if with_members:
        columns = ["member", "instance", "client", "host", "protocol", "epoch", "partitions", "waits for", "gives up"]
        print_table(
            columns,
            [
                (
                    *(one[column] for column in columns[:6]),
                    *(" ".join(one[field]) or None for field in ("partitions", "waits_for", "gives_up")),
                )
                for one in group["members"]
            ],
            title=f"{group['group']}  members",
        )


@app.command(epilog="Example: millrace groups reset billing --topic orders --to-time '1h ago' --execute")
def reset(
    name: Group,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    topics: Topics = None,
    all_topics: Annotated[bool, typer.Option("--all-topics", help="All topics the group has committed.")] = False,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="To the first record.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="After the last record.")] = False,
    to_offset: Annotated[int | None, typer.Option("--to-offset", min=0, help="To this offset.")] = None,
    to_time: Annotated[
        str | None, typer.Option("--to-time", help="To this time: ISO 8601, milliseconds, or '1h ago'.")
    ] = None,
    by: Annotated[int | None, typer.Option("--by", help="So many records on, or back if negative.")] = None,
    execute: Annotated[bool, typer.Option("--execute/--dry-run", help="Do it, or only show the plan.")] = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Move the committed offsets of a group that has no running members."""
    time_ms = None if to_time is None else parse_time_ms(to_time, now_ms=SystemClock().wall_ms())
    from millrace.admin import groups as group_views
    from millrace.admin.topics import chosen_partitions
    from millrace.cli.queue_consume import open_client

    target = group_views.Target(to_earliest, to_latest, to_offset, time_ms, by)
    if target.choices != 1:
        raise CommandError("give one of --to-earliest, --to-latest, --to-offset, --to-time, --by", exit_code=2)
    if bool(topics) == all_topics:
        raise CommandError("give either --topic or --all-topics", exit_code=2)
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        group_views.check_movable(cluster, name, now=execute)
        committed = group_views.committed_offsets(cluster, name)
        chosen = sorted(committed) if all_topics else chosen_partitions(cluster, topics or [])
        if not chosen:
            raise CommandError(f"group '{name}' has no committed offsets")
        missing = [each for each in chosen if each not in committed]
        if by is not None and missing:
            raise CommandError(f"--by: the group has no offset for {missing[0]}")
        plan = group_views.plan_reset(cluster, chosen, committed, target)
        if execute:
            group_views.execute(cluster, name, plan)
    if as_json:
        print_json({"group": name, "executed": execute, "partitions": _plan_as_json(plan)})
        return
    _print_plan(plan)
    print_remark("done" if execute else "a plan only; say --execute to do it")


@app.command(
    "export",
    epilog="Examples: `millrace groups export billing > billing.csv`, and later or elsewhere "
    "`millrace groups import billing billing.csv`. Kafka's kafka-consumer-groups reads the same file with --from-file.",
)
def export_offsets(
    name: Group,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: Client = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of CSV.")] = False,
) -> None:
    """Print the committed offsets of a group as a file to import: lines of topic,partition,offset."""
    from millrace.admin import groups as group_views
    from millrace.cli import offset_files
    from millrace.cli.queue_consume import open_client

    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        group = group_views.describe_group(cluster, name)
        if group is None:
            raise CommandError(f"there is no group '{name}'; see: millrace groups list")
        if group.type == group_views.SHARE:
            raise CommandError(f"'{name}' is a queue; it commits no offsets")
        offsets = group_views.committed_offsets(cluster, name)
    if not offsets:
        raise CommandError(f"group '{name}' has no committed offsets")
    if as_json:
        print_json(offset_files.as_json(name, offsets))
    else:
        print(offset_files.csv_text(offsets), end="")


@app.command("import", epilog="Example: millrace groups import billing billing.csv --dry-run")
def import_offsets(
    name: Group,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", show_default=False, help="What `groups export` wrote; - is stdin.")
    ],
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    yes: Yes = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Commit the offsets of a file for a group that has no running members.

    The file is CSV as Kafka's kafka-consumer-groups writes it (topic,partition,offset), or JSON. The group need not
    exist. An offset that lies outside of its partition becomes the nearest that does not.
    """
    from millrace.admin import groups as group_views
    from millrace.admin.topics import chosen_partitions
    from millrace.cli.offset_files import read_offsets
    from millrace.cli.queue_consume import open_client

    wanted = read_offsets(sys.stdin.read() if str(file) == "-" else file.read_text(), name)
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        group_views.check_movable(cluster, name, now=not dry_run)
        indexes: dict[str, list[str]] = {}
        for topic, index in wanted:
            indexes.setdefault(topic, []).append(str(index))
        chosen_partitions(cluster, [f"{topic}:{','.join(found)}" for topic, found in indexes.items()])
        plan = group_views.plan_import(cluster, wanted, group_views.committed_offsets(cluster, name))
        if not as_json:
            _print_plan(plan)
        for each in plan:
            if each.new != wanted[each.place]:
                print_remark(f"{each.place}: {wanted[each.place]} is outside of the log, {each.new} is nearest")
        if not dry_run:
            confirm(f"Commit {count_text(len(plan), 'offset')} for group {name}?", yes=yes)
            group_views.execute(cluster, name, plan)
    if as_json:
        print_json({"group": name, "executed": not dry_run, "partitions": _plan_as_json(plan)})
    else:
        print_remark("a plan only" if dry_run else "done")


@app.command(
    "delete-offsets", epilog="Example: millrace groups delete-offsets billing --topic orders --partition 3 --yes"
)
def delete_offsets(
    name: Group,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    topics: Topics = None,
    partitions: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", min=0, help="Only this partition of the topic; repeatable."),
    ] = None,
    yes: Yes = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Forget what a group has committed for topics that it no longer reads."""
    if not topics:
        raise CommandError("which topics? say --topic", exit_code=2)
    if partitions and (len(topics) > 1 or ":" in topics[0]):
        raise CommandError("--partition goes with one --topic TOPIC", exit_code=2)
    if partitions:
        topics = [f"{topics[0]}:{','.join(map(str, partitions))}"]
    from millrace.admin import groups as group_views
    from millrace.admin.topics import chosen_partitions
    from millrace.cli.queue_consume import open_client

    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        group_views.check_movable(cluster, name, now=False)
        chosen = chosen_partitions(cluster, topics)
        if group_views.describe_group(cluster, name) is None:
            raise CommandError(f"there is no group '{name}'; see: millrace groups list")
        committed = group_views.committed_offsets(cluster, name)
        doomed = sorted(committed.keys() & set(chosen))
        if not doomed:
            raise CommandError(f"group '{name}' has committed nothing for {', '.join(topics)}")
        confirm(f"Forget {count_text(len(doomed), 'offset')} of group {name}?", yes=yes)
        failures = group_views.delete_offsets(cluster, name, doomed)
    outcomes = [
        {
            "topic": each.topic,
            "partition": each.partition,
            "offset": committed[each],
            "result": failures.get(each, "deleted"),
        }
        for each in doomed
    ]
    if as_json:
        print_json({"group": name, "partitions": outcomes})
    else:
        print_table(["topic", "partition", "offset", "result"], [list(one.values()) for one in outcomes])
    for each, reason in failures.items():
        print_error(f"{each}: {reason}")
    if failures:
        raise typer.Exit(1)


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


def _plan_as_json(plan: Iterable[Shift]) -> list[dict[str, Any]]:
    return [
        {"topic": each.place.topic, "partition": each.place.partition, "from": each.old, "to": each.new}
        for each in plan
    ]


def _print_plan(plan: Iterable[Shift]) -> None:
    print_table(["topic", "partition", "from", "to"], [(*each.place, each.old, each.new) for each in plan])


def _description(cluster: ClusterClient, name: str, *, may_be_gone: bool) -> dict[str, Any] | None:
    from millrace.admin import groups as group_views

    group = group_views.describe_group(cluster, name)
    if group is None:
        if may_be_gone:
            return None
        raise CommandError(f"there is no group '{name}'; see: millrace groups list")
    is_queue = group.type == group_views.SHARE
    partitions = _queue_partitions(cluster, group) if is_queue else _partitions(cluster, group)
    return {
        "group": name,
        "type": group.type,
        "state": group.state,
        "epoch": group.epoch,
        "target_epoch": group.target_epoch,
        "assignor": group.assignor,
        "lag": _lag(partitions).or_none,
        "members": [_member(one) for one in group.members],
        "partitions": partitions,
    }


def _lag(partitions: list[dict[str, Any]]) -> Sum:
    """What was never read has no lag; what cannot be asked for its end has one that is not known."""
    return Sum(
        sum(one["lag"] or 0 for one in partitions), complete=all(one["end_offset"] is not None for one in partitions)
    )


def _member(member: MemberView) -> dict[str, Any]:
    has = set(member.partitions)
    target = has if member.target is None else set(member.target)
    return {
        "member": member.member_id,
        "instance": member.instance_id,
        "client": member.client_id,
        "host": member.host,
        "protocol": member.protocol,
        "epoch": member.epoch,
        "partitions": [str(one) for one in member.partitions],
        "waits_for": [str(one) for one in sorted(target - has)],
        "gives_up": [str(one) for one in sorted(has - target)],
    }


def _partitions(cluster: ClusterClient, group: GroupView) -> list[dict[str, Any]]:
    from millrace.admin.groups import read_lag

    return [
        {
            "topic": each.place.topic,
            "partition": each.place.partition,
            "committed": each.committed,
            "end_offset": each.end,
            "lag": each.lag,
            "member": each.member,
        }
        for each in read_lag(cluster, group)
    ]


def _queue_partitions(cluster: ClusterClient, group: GroupView) -> list[dict[str, Any]]:
    """A queue has no committed offset, but a start offset; and many may read one partition."""
    from millrace.admin.queues import read_partitions

    return [
        {
            "topic": each.place.topic,
            "partition": each.place.partition,
            "start": each.start,
            "end_offset": each.end,
            "lag": each.lag,
            "members": each.members,
        }
        for each in read_partitions(cluster, group)
    ]
