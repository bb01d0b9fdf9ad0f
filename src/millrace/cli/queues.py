"""`millrace queues`: the groups that read topics as queues, how far they are, moving, setting and deleting them.

A queue is a share group. It has no committed offset: its start offset says that everything before was done with, and
what lies between there and the end may be waiting, taken or done. Reading from a queue is `millrace consume --queue`.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from millrace.cli import config_values
from millrace.cli.groups import Target
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, Yes, confirm, name_values
from millrace.cli.output import CommandError, print_error, print_json, print_remark, print_table
from millrace.cli.queue_consume import DEAD_LETTERS, DELIVERY_LIMIT, open_client, other_kind, require_topic
from millrace.cli.times import parse_time_ms
from millrace.client.cluster import EARLIEST, LATEST, ClusterClient, raise_for
from millrace.clock import SystemClock
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import ResourceType
from millrace.model import TopicPartition
from millrace.wire.messages.groups import DeleteGroupsRequest, DeleteGroupsResponse, ListGroupsRequest
from millrace.wire.messages.share_groups import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsResponse,
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsResponse,
    ShareGroupDescribeRequest,
    ShareGroupDescribeResponse,
)

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="List, describe, reset, alter and delete queues (share groups)."
)

_TYPE: Final = "share"
_LETTER_PREFIX: Final = "errors.deadletterqueue.topic.name.prefix"
_MAKES_LETTER_TOPICS: Final = "errors.deadletterqueue.auto.create.topics.enable"


@dataclass(frozen=True, slots=True)
class Position:
    """Where a queue is in a partition; None is what is not known, or has not begun."""

    start: int | None
    lag: int | None


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
        found = {}
        for answer in cluster.ask_every_broker(ListGroupsRequest(types_filter=[_TYPE])):
            raise_for(answer.error_code)
            found.update({each.group_id: each.group_state.lower() for each in answer.groups})
    queues = [
        {"queue": name, "state": state} for name, state in sorted(found.items()) if fnmatch.fnmatchcase(name, pattern)
    ]
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
        queues = [_description(cluster, name) for name in names]
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
        state = _described(cluster, name).group_state
        positions = positions_of(cluster, name)
        chosen = sorted(positions) if all_topics else _chosen(cluster, topics or [])
        if not chosen:
            raise CommandError(f"queue '{name}' has not read any topic")
        plan = _plan(cluster, chosen, target)
        if execute:
            if state.lower() != "empty":
                raise CommandError(f"queue '{name}' has running members: stop them first")
            _alter(cluster, name, plan)
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
        kind = other_kind(cluster, name)
        if kind is not None:
            raise CommandError(f"'{name}' is {kind}, and no queue; see: millrace configs set --group {name}")
        if settings.get(DEAD_LETTERS):
            _check_takes_dead_letters(cluster, settings[DEAD_LETTERS])
        not_set = config_values.change(cluster, config_values.group(name), settings, to_unset or ())
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
                _delete(cluster, name)
            except (CommandError, ApiError) as error:
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


def _delete(cluster: ClusterClient, name: str) -> None:
    _described(cluster, name)  # a consumer group of this name would be deleted as well

    def read(response: DeleteGroupsResponse) -> None:
        (result,) = response.results
        raise_for(result.error_code)

    try:
        cluster.ask_coordinator(name, f"deletion of queue '{name}'", DeleteGroupsRequest(groups_names=[name]), read)
    except ApiError as error:
        if error.code is ErrorCode.NON_EMPTY_GROUP:
            raise CommandError(f"queue '{name}' has running members: stop them first") from None
        raise


def _check_takes_dead_letters(cluster: ClusterClient, topic: str) -> None:
    """CommandError where letters could not be written: the queue would wait for that, and only brokers' logs tell."""
    from millrace.queues.dead_letters import TAKES_DEAD_LETTERS, unusable_reason
    from millrace.queues.settings import DeadLetterSettings

    exists = topic in cluster.topics([topic])
    takes = exists and config_values.read_value(cluster, config_values.topic(topic), TAKES_DEAD_LETTERS) == "true"
    rules = config_values.read_all(cluster, config_values.Resource(ResourceType.BROKER, str(cluster.broker_ids()[0])))
    if _LETTER_PREFIX not in rules:
        return  # a broker that knows no dead letters says so of the group's setting
    settings = DeadLetterSettings(
        name_prefix=rules[_LETTER_PREFIX].value or "", creates_topics=rules[_MAKES_LETTER_TOPICS].value == "true"
    )
    reason = unusable_reason(topic, source="", exists=exists, is_enabled=takes, settings=settings)
    if reason is None:
        return
    remedy = ""
    if topic.startswith(settings.name_prefix):
        made = f"configs set {TAKES_DEAD_LETTERS}=true --topic {topic}"
        remedy = "; see: millrace " + (made if exists else f"topics create {topic} --config {TAKES_DEAD_LETTERS}=true")
    raise CommandError(f"'{topic}' cannot take dead letters: {reason}{remedy}")


def _described(cluster: ClusterClient, name: str) -> ShareGroupDescribeResponse.DescribedGroup:
    def read(response: ShareGroupDescribeResponse) -> ShareGroupDescribeResponse.DescribedGroup:
        (group,) = response.groups
        raise_for(group.error_code, group.error_message)
        return group

    try:
        return cluster.ask_coordinator(name, f"queue '{name}'", ShareGroupDescribeRequest(group_ids=[name]), read)
    except ApiError as error:
        if error.code is not ErrorCode.GROUP_ID_NOT_FOUND:
            raise
        kind = other_kind(cluster, name)
        if kind is not None:
            raise CommandError(f"'{name}' is {kind}, and no queue; see: millrace groups describe {name}") from None
        raise CommandError(f"there is no queue '{name}'; see: millrace queues list") from None


def positions_of(cluster: ClusterClient, name: str) -> dict[TopicPartition, Position]:
    """Of every partition that the queue has taken up."""
    request = DescribeShareGroupOffsetsRequest(
        groups=[DescribeShareGroupOffsetsRequest.DescribeShareGroupOffsetsRequestGroup(group_id=name, topics=None)]
    )

    def read(response: DescribeShareGroupOffsetsResponse) -> dict[TopicPartition, Position]:
        (group,) = response.groups
        raise_for(group.error_code, group.error_message)
        found = {}
        for topic in group.topics:
            for each in topic.partitions:
                raise_for(each.error_code, each.error_message)
                start, lag = (None if value < 0 else value for value in (each.start_offset, each.lag))
                found[TopicPartition(topic.topic_name, each.partition_index)] = Position(start, lag)
        return found

    return cluster.ask_coordinator(name, f"offsets of queue '{name}'", request, read)


def _description(cluster: ClusterClient, name: str) -> dict[str, Any]:
    described = _described(cluster, name)
    members = []
    readers: dict[TopicPartition, int] = {}
    for member in described.members:
        assigned = [
            TopicPartition(topic.topic_name, index)
            for topic in member.assignment.topic_partitions
            for index in topic.partitions
        ]
        for each in assigned:
            readers[each] = readers.get(each, 0) + 1
        members.append(
            {
                "member": member.member_id,
                "client": member.client_id,
                "host": member.client_host,
                "topics": member.subscribed_topic_names,
                "partitions": [str(each) for each in sorted(assigned)],
            }
        )
    positions = positions_of(cluster, name)
    wanted = sorted(positions.keys() | readers.keys())
    ends = _existing_offsets(cluster, wanted, LATEST)
    partitions = [
        {
            "topic": each.topic,
            "partition": each.partition,
            "start": positions[each].start if each in positions else None,
            "end": ends.get(each),
            "lag": positions[each].lag if each in positions else None,
            "members": readers.get(each, 0),
        }
        for each in wanted
    ]
    return {
        "queue": name,
        "state": described.group_state.lower(),
        "assignor": described.assignor_name or None,
        "lag": sum(one["lag"] or 0 for one in partitions),
        "members": members,
        "partitions": partitions,
    }


def _existing_offsets(cluster: ClusterClient, wanted: list[TopicPartition], when: int) -> dict[TopicPartition, int]:
    """Of the partitions that still exist: a queue may have read a topic that was deleted since."""
    topics = cluster.topics({each.topic for each in wanted})
    existing = {
        each: when for each in wanted if each.topic in topics and each.partition in topics[each.topic].partitions
    }
    return {each: offset for each, offset in cluster.list_offsets(existing).items() if offset is not None}


def _chosen(cluster: ClusterClient, topics: list[str]) -> list[TopicPartition]:
    """`jobs` is every partition of it, `jobs:0,3` two of them."""
    chosen: list[TopicPartition] = []
    for text in topics:
        topic, colon, indexes = text.partition(":")
        require_topic(cluster, topic)
        count = cluster.partition_count(topic)
        if not colon:
            chosen += [TopicPartition(topic, index) for index in range(count)]
            continue
        for index in indexes.split(","):
            if not index.strip().isdigit() or int(index) >= count:
                raise CommandError(f"topic '{topic}' has no partition '{index}' (it has {count})")
            chosen.append(TopicPartition(topic, int(index)))
    return chosen


def _plan(cluster: ClusterClient, chosen: list[TopicPartition], target: Target) -> dict[TopicPartition, int]:
    """The new start per partition, always inside the log."""
    first = _existing_offsets(cluster, chosen, EARLIEST)
    last = _existing_offsets(cluster, chosen, LATEST)
    by_time = _existing_offsets(cluster, chosen, target.time_ms) if target.time_ms is not None else {}
    plan = {}
    for each, low in first.items():
        high = last[each]
        if target.earliest:
            new = low
        elif target.offset is not None:
            new = target.offset
        else:
            new = by_time.get(each, high)
        plan[each] = min(max(new, low), high)
    return plan


def _alter(cluster: ClusterClient, name: str, offsets: dict[TopicPartition, int]) -> None:
    topics: dict[str, list[AlterShareGroupOffsetsRequest.AlterShareGroupOffsetsRequestPartition]] = {}
    for each, offset in sorted(offsets.items()):
        topics.setdefault(each.topic, []).append(
            AlterShareGroupOffsetsRequest.AlterShareGroupOffsetsRequestPartition(
                partition_index=each.partition, start_offset=offset
            )
        )
    request = AlterShareGroupOffsetsRequest(
        group_id=name,
        topics=[
            AlterShareGroupOffsetsRequest.AlterShareGroupOffsetsRequestTopic(topic_name=topic, partitions=partitions)
            for topic, partitions in topics.items()
        ],
    )

    def read(response: AlterShareGroupOffsetsResponse) -> None:
        raise_for(response.error_code, response.error_message)
        for topic in response.responses:
            for each in topic.partitions:
                raise_for(each.error_code, each.error_message)

    cluster.ask_coordinator(name, f"reset of queue '{name}'", request, read)
