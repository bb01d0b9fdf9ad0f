"""`millrace groups`: groups of every type, what they have read, how far they lag, who reads, and moving them.

A reset or an import is planned first and shown. The offsets of a group can move only while it has no
members, which the broker enforces. Groups that read a topic as a queue (share groups) are listed and described like
the others; they are moved by `millrace queues`. Not here: how groups are asked for (`cli.group_views`), what a file of
offsets looks like (`cli.offset_files`).
"""

from __future__ import annotations

import fnmatch
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, Yes, confirm, name_values
from millrace.cli.output import CommandError, Sum, count_text, print_error, print_json, print_remark, print_table
from millrace.cli.times import parse_time_ms
from millrace.cli.topics import offset_bounds
from millrace.clock import SystemClock
from millrace.model import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

    from millrace.cli.group_views import GroupView, MemberView
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
    from millrace.cli import group_views

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
    from millrace.cli import group_views
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
    target = Target(to_earliest, to_latest, to_offset, time_ms, by)
    if target.choices != 1:
        raise CommandError("give one of --to-earliest, --to-latest, --to-offset, --to-time, --by", exit_code=2)
    if bool(topics) == all_topics:
        raise CommandError("give either --topic or --all-topics", exit_code=2)
    from millrace.cli.connection import open_admin

    _check_movable(bootstrap, name_values(client, "--client"), name, now=execute)
    admin = open_admin(bootstrap, name_values(client, "--client"))
    committed = _committed(admin, name)
    chosen = sorted(committed) if all_topics else _chosen(admin, topics or [])
    if not chosen:
        raise CommandError(f"group '{name}' has no committed offsets")
    plan = _plan(admin, chosen, committed, target)
    if execute:
        _commit(admin, name, {partition: new for partition, (_, new) in plan.items()})
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
    from millrace.cli import group_views, offset_files
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
    from millrace.cli.connection import open_admin
    from millrace.cli.offset_files import read_offsets

    wanted = read_offsets(sys.stdin.read() if str(file) == "-" else file.read_text(), name)
    overrides = name_values(client, "--client")
    _check_movable(bootstrap, overrides, name, now=not dry_run)
    admin = open_admin(bootstrap, overrides)
    indexes: dict[str, list[str]] = {}
    for topic, index in wanted:
        indexes.setdefault(topic, []).append(str(index))
    _chosen(admin, [f"{topic}:{','.join(found)}" for topic, found in indexes.items()])
    committed = _committed(admin, name)
    plan = {
        place: (committed.get(place), min(max(wanted[TopicPartition(*place)], start), end))
        for place, (start, end) in offset_bounds(admin, sorted(wanted)).items()
    }
    if not as_json:
        _print_plan(plan)
    for place, (_, new) in sorted(plan.items()):
        if new != wanted[TopicPartition(*place)]:
            print_remark(
                f"{TopicPartition(*place)}: {wanted[TopicPartition(*place)]} is outside of the log, {new} is nearest"
            )
    if not dry_run:
        confirm(f"Commit {count_text(len(plan), 'offset')} for group {name}?", yes=yes)
        _commit(admin, name, {place: new for place, (_, new) in plan.items()})
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
    from millrace.cli import group_views
    from millrace.cli.connection import open_admin
    from millrace.cli.queue_consume import open_client

    overrides = name_values(client, "--client")
    _check_movable(bootstrap, overrides, name, now=False)
    chosen = _chosen(open_admin(bootstrap, overrides), topics)
    with open_client(bootstrap, overrides) as cluster:
        if group_views.describe_group(cluster, name) is None:
            raise CommandError(f"there is no group '{name}'; see: millrace groups list")
        committed = group_views.committed_offsets(cluster, name)
        doomed = sorted(committed.keys() & {TopicPartition(*place) for place in chosen})
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


def _plan_as_json(plan: Mapping[Partition, tuple[int | None, int]]) -> list[dict[str, Any]]:
    return [
        {"topic": topic, "partition": index, "from": old, "to": new}
        for (topic, index), (old, new) in sorted(plan.items())
    ]


def _print_plan(plan: Mapping[Partition, tuple[int | None, int]]) -> None:
    print_table(
        ["topic", "partition", "from", "to"], [(*place, old, new) for place, (old, new) in sorted(plan.items())]
    )


def _check_movable(bootstrap: str, overrides: Mapping[str, str], name: str, *, now: bool) -> None:
    """CommandError where the group cannot be reset; the broker would say so too, in words that need explaining."""
    from millrace.cli import group_views
    from millrace.cli.queue_consume import open_client

    with open_client(bootstrap, overrides) as cluster:
        group = group_views.describe_group(cluster, name)
    if group is None:
        return
    if group.type == group_views.SHARE:
        raise CommandError(f"'{name}' is a queue; move it with: millrace queues reset {name}")
    if now and group.members:
        raise CommandError(f"group '{name}' has {count_text(len(group.members), 'running member')}: stop them first")


def _committed(admin: AdminClient, group: str) -> dict[Partition, int]:
    from confluent_kafka import ConsumerGroupTopicPartitions

    from millrace.cli.connection import REQUEST_TIMEOUT_S, result

    request = [ConsumerGroupTopicPartitions(group)]
    answer = result(admin.list_consumer_group_offsets(request, request_timeout=REQUEST_TIMEOUT_S)[group])
    return {(one.topic, one.partition): one.offset for one in answer.topic_partitions if one.offset >= 0}


def _description(cluster: ClusterClient, name: str, *, may_be_gone: bool) -> dict[str, Any] | None:
    from millrace.cli import group_views

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
    from millrace.cli import group_views

    committed = group_views.committed_offsets(cluster, group.name)
    owners = {one: member.member_id for member in group.members for one in member.partitions}
    wanted = sorted(committed.keys() | owners.keys())
    ends = group_views.end_offsets(cluster, wanted)
    partitions = []
    for one in wanted:
        end, offset = ends.get(one), committed.get(one)
        partitions.append(
            {
                "topic": one.topic,
                "partition": one.partition,
                "committed": offset,
                "end_offset": end,
                "lag": None if end is None or offset is None else max(end - offset, 0),
                "member": owners.get(one),
            }
        )
    return partitions


def _queue_partitions(cluster: ClusterClient, group: GroupView) -> list[dict[str, Any]]:
    """A queue has no committed offset, but a start offset; and many may read one partition."""
    from millrace.cli import group_views
    from millrace.cli.queues import Position, positions_of

    known = positions_of(cluster, group.name)
    readers = Counter(one for member in group.members for one in member.partitions)
    wanted = sorted(known.keys() | readers.keys())
    ends = group_views.end_offsets(cluster, wanted)
    partitions = []
    for one in wanted:
        position = known.get(one, Position(None, None))
        partitions.append(
            {
                "topic": one.topic,
                "partition": one.partition,
                "start": position.start,
                "end_offset": ends.get(one),
                "lag": position.lag,
                "members": readers[one],
            }
        )
    return partitions


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
