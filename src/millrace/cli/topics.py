"""`millrace topics`: create, list, describe, alter and delete topics.

Every subcommand that takes several topics does what it can for each, reports each failure on its own line and exits
non-zero if there was one.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, Yes, confirm, name_values
from millrace.cli.output import (
    CommandError,
    Sum,
    print_error,
    print_json,
    print_remark,
    print_table,
    size_text,
)

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient, ConfigEntry

    from millrace.admin.log_dirs import LogDirectory

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Create, list, describe, alter and delete topics.")

_ON_TOPIC: Final = "DYNAMIC_TOPIC_CONFIG"
_SOURCES: Final = {
    _ON_TOPIC: "the topic",
    "DYNAMIC_BROKER_CONFIG": "the broker",
    "DYNAMIC_DEFAULT_BROKER_CONFIG": "all brokers",
    "STATIC_BROKER_CONFIG": "the broker's file",
    "DEFAULT_CONFIG": "default",
}
"""Where a value comes from, in Kafka's words and in plain ones."""

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
        list[str] | None,
        typer.Option("--config", "--set", "-c", metavar="NAME=VALUE", help="A topic setting, repeatable."),
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
    sizes: Annotated[bool, typer.Option("--sizes", help="Also how much lies on disk, in all replicas.")] = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """List topics, with their partitions and how many records they hold.

    A partition without a leader cannot be counted: its topic's sum ends with `+ ?`, and is null in JSON.
    """
    from millrace.cli.connection import REQUEST_TIMEOUT_S, open_admin

    overrides = name_values(client, "--client")
    admin = open_admin(bootstrap, overrides)
    metadata = admin.list_topics(timeout=REQUEST_TIMEOUT_S)
    names = sorted(
        name
        for name in metadata.topics
        if fnmatch.fnmatchcase(name, pattern) and (internal or not name.startswith("__"))
    )
    partitions = {name: metadata.topics[name].partitions for name in names}
    led = {name: [index for index, one in partitions[name].items() if one.leader >= 0] for name in names}
    bounds = offset_bounds(admin, [(name, index) for name in names for index in led[name]])
    records = {
        name: Sum(
            sum(end - start for start, end in (bounds[name, index] for index in led[name])),
            complete=len(led[name]) == len(partitions[name]),
        )
        for name in names
    }
    on_disk = _sizes_on_disk(_read_log_dirs(bootstrap, overrides), partitions) if sizes else {}
    topics = [
        {
            "topic": name,
            "partitions": len(partitions[name]),
            "offline": len(partitions[name]) - len(led[name]),
            "replication_factor": max((len(one.replicas) for one in partitions[name].values()), default=0),
            "records": records[name].or_none,
            **({"bytes": on_disk[name].or_none} if sizes else {}),
        }
        for name in names
    ]
    if as_json:
        print_json(topics)
        return
    rows: list[list[object]] = [
        [one["topic"], one["partitions"], one["replication_factor"], records[name].text("{:,}".format)]
        for name, one in zip(names, topics, strict=True)
    ]
    if sizes:
        rows = [[*row, on_disk[name].text(size_text)] for name, row in zip(names, rows, strict=True)]
    print_table(["topic", "partitions", "replicas", "records", *["size"] * sizes], rows)
    offline = [f"{one['offline']} of {one['topic']}" for one in topics if one["offline"]]
    if offline:
        print_remark(f"without a leader and not counted: {', '.join(offline)}; see: millrace cluster describe")


@app.command(
    epilog="Examples: `millrace topics describe orders --all-configs` or `millrace topics describe orders --sizes`"
)
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
    sizes: Annotated[
        bool, typer.Option("--sizes", help="Also what each replica has on disk, and in which directory.")
    ] = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Show leaders, replicas, offsets, settings and sizes of topics."""
    from millrace.cli.connection import REQUEST_TIMEOUT_S, open_admin, topic_partitions

    filtered = under_replicated or unavailable
    if not names and not filtered:
        raise CommandError("which topics? name them, or say --under-replicated or --unavailable", exit_code=2)
    overrides = name_values(client, "--client")
    admin = open_admin(bootstrap, overrides)
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
    configs = _described_configs(admin, names)
    log_dirs = _read_log_dirs(bootstrap, overrides) if sizes else []
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
                    **({"logs": _replica_logs(log_dirs, name, index, one.replicas)} if sizes else {}),
                }
                for index, one in chosen[name].items()
            ],
            "configs": {key: entry.value for key, entry in _shown(configs[name], all_configs).items()},
            "config_sources": {key: _source(entry) for key, entry in _shown(configs[name], all_configs).items()},
        }
        for name in names
    ]
    if as_json:
        print_json(topics)
        return
    if not topics:
        print("no such partition")
    for topic in topics:
        _print_description(topic, all_configs=all_configs, sizes=sizes)


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
        list[str] | None,
        typer.Option("--set", "--config", "-c", metavar="NAME=VALUE", help="A setting to change, repeatable."),
    ] = None,
    to_unset: Annotated[
        list[str] | None,
        typer.Option("--unset", metavar="NAME", help="A setting to put back to its default, repeatable."),
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
    unset = list(dict.fromkeys(to_unset or ()))
    if partitions is None and not settings and not unset:
        raise CommandError("nothing to alter: give --partitions, --set or --unset", exit_code=2)
    if both := settings.keys() & set(unset):
        raise CommandError(f"--set and --unset of the same setting: {', '.join(sorted(both))}", exit_code=2)
    admin = open_admin(bootstrap, name_values(client, "--client"))
    topic_partitions(admin, name)
    if settings or unset:
        present = _described_configs(admin, [name])[name]
        _require_known([*settings, *unset], present)
        was_set = [key for key in unset if _source(present[key]) == _ON_TOPIC]
        for key in unset:
            if key not in was_set:
                print_remark(f"{key} is not set on {name}: it is {present[key].value} already")
        unset = was_set
    if settings or unset:
        entries = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in settings.items()
        ]
        entries += [ConfigEntry(key, None, incremental_operation=AlterConfigOpType.DELETE) for key in unset]
        resource = ConfigResource(RESOURCE_TOPIC, name, incremental_configs=entries)
        for config_future in admin.incremental_alter_configs([resource], request_timeout=REQUEST_TIMEOUT_S).values():
            result(config_future)
    if partitions is not None:
        created = admin.create_partitions([NewPartitions(name, partitions)], request_timeout=REQUEST_TIMEOUT_S)
        result(created[name])
    outcome = "altered" if settings or unset or partitions is not None else "unchanged"
    if as_json:
        print_json({"topic": name, "result": outcome})
    else:
        print(f"{outcome} {name}")


def _described_configs(admin: AdminClient, names: list[str]) -> dict[str, dict[str, ConfigEntry]]:
    from confluent_kafka.admin import RESOURCE_TOPIC, ConfigResource

    from millrace.cli.connection import REQUEST_TIMEOUT_S, result

    if not names:
        return {}
    resources = [ConfigResource(RESOURCE_TOPIC, name) for name in names]
    futures = admin.describe_configs(resources, request_timeout=REQUEST_TIMEOUT_S)
    return {resource.name: result(future) for resource, future in futures.items()}


def _require_known(settings: list[str], known: Mapping[str, ConfigEntry]) -> None:
    """Brokers take the removal of a setting that does not exist for done."""
    from difflib import get_close_matches

    for name in settings:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "see: millrace topics describe TOPIC --all-configs"
            raise CommandError(f"there is no topic setting '{name}'; {hint}")


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


def _shown(entries: Mapping[str, ConfigEntry], everything: bool) -> dict[str, ConfigEntry]:
    return {name: entry for name, entry in sorted(entries.items()) if everything or not (entry.is_default or False)}


def _source(entry: ConfigEntry) -> str:
    from confluent_kafka.admin import ConfigSource

    return ConfigSource(entry.source).name  # the library declares an enum and gives a number


def _read_log_dirs(bootstrap: str, overrides: Mapping[str, str]) -> list[LogDirectory]:
    from millrace.admin.cluster import read_cluster
    from millrace.admin.log_dirs import read_log_dirs
    from millrace.cli.entry import open_cluster

    with open_cluster(bootstrap, overrides) as cluster:
        return read_log_dirs(cluster, read_cluster(cluster))


def _sizes_on_disk(log_dirs: list[LogDirectory], topics: Mapping[str, Mapping[int, Any]]) -> dict[str, Sum]:
    """Per topic, all replicas together; one that no broker has told of leaves the sum incomplete."""
    from millrace.admin.log_dirs import replica_sizes

    sizes = replica_sizes(log_dirs)
    sums = {}
    for name, partitions in topics.items():
        wanted = {((name, index), broker) for index, one in partitions.items() for broker in one.replicas}
        known = {key: size for key, size in sizes.items() if key[0][0] == name}
        sums[name] = Sum(sum(known.values()), complete=wanted <= known.keys())
    return sums


def _replica_logs(log_dirs: list[LogDirectory], topic: str, index: int, replicas: list[int]) -> list[dict[str, Any]]:
    """What lies on disk of a partition; a replica that no broker has told of has nothing but its broker."""
    found = [
        {
            "broker": directory.broker,
            "directory": directory.path,
            "bytes": log.size_bytes,
            "lag": log.lag if log.lag >= 0 else None,
            "future": log.future,
        }
        for directory in log_dirs
        for log in directory.logs
        if log.place == (topic, index)
    ]
    silent = [broker for broker in replicas if broker not in {one["broker"] for one in found}]
    nothing = {"directory": None, "bytes": None, "lag": None, "future": False}
    return sorted([*found, *({"broker": broker, **nothing} for broker in silent)], key=lambda one: one["broker"])


def _print_description(topic: dict[str, Any], *, all_configs: bool, sizes: bool) -> None:
    settings = "" if all_configs else " ".join(f"{key}={value}" for key, value in topic["configs"].items())
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
    if sizes:
        print_table(
            ["partition", "broker", "size", "lag", "directory"],
            [
                (
                    part["partition"],
                    log["broker"],
                    None if log["bytes"] is None else size_text(log["bytes"]),
                    log["lag"],
                    f"{log['directory']} (moving there)" if log["future"] else log["directory"],
                )
                for part in topic["partitions"]
                for log in part["logs"]
            ],
            title=f"{topic['topic']}  on disk",
        )
    if all_configs:
        print_table(
            ["setting", "value", "source"],
            [(key, value, _SOURCES.get(topic["config_sources"][key])) for key, value in topic["configs"].items()],
            title=f"{topic['topic']}  settings",
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
