"""`millrace topics`: create, list, describe, alter and delete topics.

Every subcommand that takes several topics does what it can for each, reports each failure on its own line and exits
non-zero if there was one.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, Yes, confirm, name_values
from millrace.cli.output import CommandError, print_error, print_json, print_table

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient, ConfigEntry

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Create, list, describe, alter and delete topics.")

Names = Annotated[list[str], typer.Argument(metavar="TOPIC...", show_default=False, help="Topic names.")]


@app.command(epilog="Example: millrace topics create orders --partitions 6 --config retention.ms=86400000")
def create(
    names: Names,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    partitions: Annotated[
        int | None, typer.Option("--partitions", "-p", min=1, help="Partitions; the broker's default unless given.")
    ] = None,
    replication_factor: Annotated[
        int | None, typer.Option("--replication-factor", "-r", min=1, help="Copies; the broker's default unless given.")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option("--config", "-c", metavar="NAME=VALUE", help="A topic setting, repeatable.")
    ] = None,
    if_not_exists: Annotated[bool, typer.Option("--if-not-exists", help="An existing topic is no error.")] = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Create topics."""
    from confluent_kafka import KafkaError
    from confluent_kafka.admin import NewTopic

    from millrace.cli.connection import REQUEST_TIMEOUT_S, open_admin

    settings = name_values(config, "--config")
    admin = open_admin(bootstrap, name_values(client, "--client"))
    wanted = [NewTopic(name, partitions or -1, replication_factor or -1, config=settings) for name in names]
    futures = admin.create_topics(wanted, request_timeout=REQUEST_TIMEOUT_S)
    tolerated = {KafkaError.TOPIC_ALREADY_EXISTS: "exists"} if if_not_exists else {}
    _finish(futures, done="created", tolerated=tolerated, as_json=as_json)


@app.command("list", epilog="Example: millrace topics list 'orders*' --json")
def list_topics(
    pattern: Annotated[str, typer.Argument(help="Only topics whose name matches, with * and ?.")] = "*",
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    internal: Annotated[bool, typer.Option("--internal", help="Also internal topics.")] = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """List topics, with their partitions and how many records they hold."""
    from millrace.cli.connection import REQUEST_TIMEOUT_S, open_admin

    admin = open_admin(bootstrap, name_values(client, "--client"))
    metadata = admin.list_topics(timeout=REQUEST_TIMEOUT_S)
    names = sorted(
        name
        for name in metadata.topics
        if fnmatch.fnmatchcase(name, pattern) and (internal or not name.startswith("__"))
    )
    partitions = {name: metadata.topics[name].partitions for name in names}
    # A partition without a leader has nobody to ask: its records are not counted.
    led = {name: [index for index, one in partitions[name].items() if one.leader >= 0] for name in names}
    bounds = offset_bounds(admin, [(name, index) for name in names for index in led[name]])
    topics = [
        {
            "topic": name,
            "partitions": len(partitions[name]),
            "replication_factor": max((len(one.replicas) for one in partitions[name].values()), default=0),
            "records": sum(end - start for start, end in (bounds[name, index] for index in led[name])),
        }
        for name in names
    ]
    if as_json:
        print_json(topics)
    else:
        print_table(
            ["topic", "partitions", "replicas", "records"],
            [(one["topic"], one["partitions"], one["replication_factor"], f"{one['records']:,}") for one in topics],
        )


@app.command(epilog="Example: millrace topics describe orders --all-configs")
def describe(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TOPIC...]", show_default=False, help="Topic names; all with a filter if none."),
    ] = None,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    all_configs: Annotated[bool, typer.Option("--all-configs", help="Also settings left at their default.")] = False,
    under_replicated: Annotated[
        bool, typer.Option("--under-replicated", help="Only partitions with a replica that is not in sync.")
    ] = False,
    unavailable: Annotated[bool, typer.Option("--unavailable", help="Only partitions without a leader.")] = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Show leaders, replicas, offsets and settings of topics."""
    from confluent_kafka.admin import RESOURCE_TOPIC, ConfigResource

    from millrace.cli.connection import REQUEST_TIMEOUT_S, open_admin, result, topic_partitions

    filtered = under_replicated or unavailable
    if not names and not filtered:
        raise CommandError("which topics? name them, or say --under-replicated or --unavailable", exit_code=2)
    admin = open_admin(bootstrap, name_values(client, "--client"))
    for name in names or ():
        topic_partitions(admin, name)
    metadata = admin.list_topics(timeout=REQUEST_TIMEOUT_S)
    chosen = {
        name: {
            index: one
            for index, one in sorted(metadata.topics[name].partitions.items())
            if not filtered
            or (under_replicated and set(one.isrs) != set(one.replicas))
            or (unavailable and one.leader < 0)
        }
        for name in names or sorted(metadata.topics)
    }
    if filtered:
        chosen = {name: partitions for name, partitions in chosen.items() if partitions}
    names = list(chosen)
    # A partition without a leader has nobody to ask for its offsets.
    bounds = offset_bounds(
        admin, [(name, index) for name, found in chosen.items() for index, one in found.items() if one.leader >= 0]
    )
    resources = [ConfigResource(RESOURCE_TOPIC, name) for name in names]
    configs = {}
    if resources:
        futures = admin.describe_configs(resources, request_timeout=REQUEST_TIMEOUT_S)
        configs = {resource.name: result(future) for resource, future in futures.items()}
    topics = [
        {
            "topic": name,
            "partitions": [
                {
                    "partition": index,
                    "leader": one.leader,
                    "replicas": list(one.replicas),
                    "isr": list(one.isrs),
                    "start_offset": bounds.get((name, index), (None, None))[0],
                    "end_offset": bounds.get((name, index), (None, None))[1],
                }
                for index, one in chosen[name].items()
            ],
            "configs": _config_values(configs[name], all_configs),
        }
        for name in names
    ]
    if as_json:
        print_json(topics)
        return
    if not topics:
        print("no such partition")
    for topic in topics:
        _print_description(topic)


@app.command(
    epilog="Example: millrace topics alter orders --partitions 12 --set retention.ms=3600000 --unset max.message.bytes"
)
def alter(
    name: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, help="The topic.")],
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    partitions: Annotated[
        int | None, typer.Option("--partitions", "-p", min=1, help="The new number of partitions; it can only grow.")
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
    """Add partitions or change settings."""
    from confluent_kafka.admin import (
        RESOURCE_TOPIC,
        AlterConfigOpType,
        ConfigEntry,
        ConfigResource,
        NewPartitions,
    )

    from millrace.cli.connection import REQUEST_TIMEOUT_S, open_admin, result, topic_partitions

    settings = name_values(to_set, "--set")
    if partitions is None and not settings and not to_unset:
        raise CommandError("nothing to alter: give --partitions, --set or --unset", exit_code=2)
    admin = open_admin(bootstrap, name_values(client, "--client"))
    topic_partitions(admin, name)
    if settings or to_unset:
        entries = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in settings.items()
        ]
        entries += [ConfigEntry(key, None, incremental_operation=AlterConfigOpType.DELETE) for key in to_unset or ()]
        resource = ConfigResource(RESOURCE_TOPIC, name, incremental_configs=entries)
        for config_future in admin.incremental_alter_configs([resource], request_timeout=REQUEST_TIMEOUT_S).values():
            result(config_future)
    if partitions is not None:
        created = admin.create_partitions([NewPartitions(name, partitions)], request_timeout=REQUEST_TIMEOUT_S)
        result(created[name])
    if as_json:
        print_json({"topic": name, "result": "altered"})
    else:
        print(f"altered {name}")


@app.command(epilog="Example: millrace topics delete orders --yes")
def delete(
    names: Names,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    yes: Yes = False,
    if_exists: Annotated[bool, typer.Option("--if-exists", help="A missing topic is no error.")] = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Delete topics and everything in them."""
    from confluent_kafka import KafkaError

    from millrace.cli.connection import REQUEST_TIMEOUT_S, open_admin

    confirm(f"Delete {', '.join(names)} and all records?", yes=yes)
    admin = open_admin(bootstrap, name_values(client, "--client"))
    futures = admin.delete_topics(list(names), request_timeout=REQUEST_TIMEOUT_S)
    tolerated = {KafkaError.UNKNOWN_TOPIC_OR_PART: "missing"} if if_exists else {}
    _finish(futures, done="deleted", tolerated=tolerated, as_json=as_json)


def offset_bounds(admin: AdminClient, partitions: list[tuple[str, int]]) -> dict[tuple[str, int], tuple[int, int]]:
    """The first offset and the one after the last, per partition."""
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import OffsetSpec

    from millrace.cli.connection import REQUEST_TIMEOUT_S, result

    if not partitions:
        return {}
    ends: list[dict[tuple[str, int], int]] = []
    for spec in (OffsetSpec.earliest(), OffsetSpec.latest()):  # type: ignore[no-untyped-call]
        wanted = {TopicPartition(topic, index): spec for topic, index in partitions}
        futures = admin.list_offsets(wanted, request_timeout=REQUEST_TIMEOUT_S)
        ends.append({(one.topic, one.partition): result(future).offset for one, future in futures.items()})
    return {partition: (ends[0][partition], ends[1][partition]) for partition in partitions}


def _config_values(entries: Mapping[str, ConfigEntry], everything: bool) -> dict[str, str | None]:
    return {
        name: entry.value for name, entry in sorted(entries.items()) if everything or not (entry.is_default or False)
    }


def _print_description(topic: dict[str, Any]) -> None:
    settings = " ".join(f"{key}={value}" for key, value in topic["configs"].items())
    print_table(
        ["partition", "leader", "replicas", "isr", "start", "end"],
        [
            (
                one["partition"],
                one["leader"],
                ",".join(map(str, one["replicas"])),
                ",".join(map(str, one["isr"])),
                one["start_offset"],
                one["end_offset"],
            )
            for one in topic["partitions"]
        ],
        title=f"{topic['topic']}  {settings}".rstrip(),
    )


def _finish(futures: Mapping[str, Future[Any]], *, done: str, tolerated: Mapping[int, str], as_json: bool) -> None:
    """Wait for one answer per topic and report them all; exit non-zero when one failed."""
    from millrace.cli.connection import error_of, explain_kafka_exception, result

    outcomes: list[dict[str, str]] = []
    failed = False
    for name, future in futures.items():
        outcome = {"topic": name, "result": done}
        try:
            result(future)
        except Exception as error:
            kafka_error = error_of(error)
            if kafka_error is not None and kafka_error.code() in tolerated:
                outcome["result"] = tolerated[kafka_error.code()]
            else:
                text = explain_kafka_exception(error)
                if text is None:
                    raise
                failed = True
                outcome = {"topic": name, "result": "failed", "error": text}
                print_error(f"topic '{name}': {text}")
        outcomes.append(outcome)
    if as_json:
        print_json(outcomes)
    else:
        for outcome in outcomes:
            if outcome["result"] != "failed":
                print(f"{outcome['result']} {outcome['topic']}")
    if failed:
        raise typer.Exit(1)
