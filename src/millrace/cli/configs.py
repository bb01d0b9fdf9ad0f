"""`millrace configs`: settings of topics, groups, brokers, loggers and subscriptions to metrics of clients.

Where their values come from, and changing them. One command for all, with the names that docs/configuration.md lists.
Not here: how they are read and changed (`admin.configs`); shortcuts for one noun (`topics alter`, `queues alter`).
"""

from __future__ import annotations

from typing import Annotated, Final

import typer

from millrace.admin import configs as config_values
from millrace.admin.configs import ALL_BROKERS, ConfigValue, Resource
from millrace.admin.topics import require_topic
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, name_values
from millrace.cli.output import CommandError, print_json, print_remark, print_table
from millrace.cli.queue_consume import open_client
from millrace.client.cluster import ClusterClient
from millrace.metadata.deltas import ResourceType

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Show and change settings of topics, groups and brokers."
)

Topic = Annotated[str | None, typer.Option("--topic", "-t", metavar="TOPIC", help="Of this topic.")]
Group = Annotated[str | None, typer.Option("--group", "-g", metavar="GROUP", help="Of this group, or queue.")]
Broker = Annotated[int | None, typer.Option("--broker", metavar="ID", min=0, help="Of this broker.")]
Brokers = Annotated[bool, typer.Option("--brokers", help="Of all brokers: what holds if one has no value of its own.")]
Loggers = Annotated[
    int | None,
    typer.Option("--loggers", metavar="ID", min=0, help="The levels of this broker's loggers, until it stops."),
]
ClientMetrics = Annotated[
    str | None,
    typer.Option("--client-metrics", metavar="NAME", help="Of this subscription to metrics of clients (KIP-714)."),
]
_CHOICES: Final = "--topic, --group, --broker, --brokers, --loggers or --client-metrics"


@app.command(
    epilog="Examples: `millrace configs get --topic orders`, `millrace configs get --broker 1 --all`, "
    "`millrace configs get retention.ms --topic orders --json`"
)
def get(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", show_default=False, help="Only these settings.")
    ] = None,
    *,
    topic: Topic = None,
    group: Group = None,
    broker: Broker = None,
    brokers: Brokers = False,
    loggers: Loggers = None,
    client_metrics: ClientMetrics = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also settings left at their default.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Show settings, and where each value comes from: those that are not the default, those named, or all."""
    resource = _resource(topic, group, broker, brokers, loggers, client_metrics)
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        _require(cluster, resource)
        if names:
            values = config_values.read_named(cluster, resource, names)
        else:
            found = config_values.read_all(cluster, resource).values()
            values = [each for each in found if everything or not each.is_default]
    if as_json:
        print_json([_json(each) for each in values])
    elif values:
        print_table(["name", "value", "source"], [(each.name, each.shown, each.plain_source) for each in values])
    else:
        hint = "" if resource == ALL_BROKERS else "; say --all to see the defaults"
        print_remark(f"nothing is set for {resource}{hint}")


@app.command(
    "set",
    epilog="Examples: `millrace configs set retention.ms=86400000 --topic orders`, "
    "`millrace configs set share.delivery.count.limit=3 --group workers`, "
    "`millrace configs set log.retention.ms=3600000 --brokers`, "
    "`millrace configs set 'metrics=*' interval.ms=60000 --client-metrics all`",
)
def set_values(
    pairs: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", show_default=False, help="What to set.")],
    *,
    topic: Topic = None,
    group: Group = None,
    broker: Broker = None,
    brokers: Brokers = False,
    loggers: Loggers = None,
    client_metrics: ClientMetrics = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Set settings, all of them or none; they hold at once."""
    resource = _resource(topic, group, broker, brokers, loggers, client_metrics)
    settings = name_values(pairs, "set")
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        _require(cluster, resource)
        config_values.change(cluster, resource, settings)
    if as_json:
        print_json([{"name": name, "value": value, "result": "set"} for name, value in settings.items()])
    else:
        for name, value in settings.items():
            print(f"set {name}={value} for {resource}")


@app.command(
    epilog="Examples: `millrace configs unset retention.ms --topic orders`, "
    "`millrace configs unset errors.deadletterqueue.topic.name --group workers`"
)
def unset(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", show_default=False, help="What to unset.")],
    *,
    topic: Topic = None,
    group: Group = None,
    broker: Broker = None,
    brokers: Brokers = False,
    loggers: Loggers = None,
    client_metrics: ClientMetrics = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Take settings back, so that the next source (all brokers, the broker's file, the default) holds."""
    resource = _resource(topic, group, broker, brokers, loggers, client_metrics)
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        _require(cluster, resource)
        not_set = config_values.change(cluster, resource, {}, names)
    if as_json:
        print_json([{"name": name, "result": "not set" if name in not_set else "unset"} for name in names])
        return
    for name in names:
        if name in not_set:
            print_remark(f"{name} is not set for {resource}")
        else:
            print(f"unset {name} for {resource}")


def _resource(
    topic: str | None,
    group: str | None,
    broker: int | None,
    brokers: bool,
    loggers: int | None,
    client_metrics: str | None,
) -> Resource:
    chosen = [
        *([] if topic is None else [config_values.topic(topic)]),
        *([] if group is None else [config_values.group(group)]),
        *([] if broker is None else [Resource(ResourceType.BROKER, str(broker))]),
        *([ALL_BROKERS] if brokers else []),
        *([] if loggers is None else [Resource(ResourceType.BROKER_LOGGER, str(loggers))]),
        *([] if client_metrics is None else [Resource(ResourceType.CLIENT_METRICS, client_metrics)]),
    ]
    if len(chosen) != 1:
        raise CommandError(f"whose settings? give one of {_CHOICES}", exit_code=2)
    if not chosen[0].name and chosen[0] != ALL_BROKERS:
        raise CommandError("a topic, group or subscription needs a name", exit_code=2)
    return chosen[0]


def _require(cluster: ClusterClient, resource: Resource) -> None:
    """CommandError where there is no such topic or broker. Others may have settings before there are such."""
    if resource.type is ResourceType.TOPIC:
        require_topic(cluster, resource.name)
    elif resource.broker_id is not None:
        existing = cluster.broker_ids()
        if resource.broker_id not in existing:
            known = ", ".join(map(str, existing))
            raise CommandError(f"there is no broker {resource.broker_id} in the cluster, which has {known}")


def _json(each: ConfigValue) -> dict[str, object]:
    return {
        "name": each.name,
        "value": each.value,
        "source": each.source,
        "sensitive": each.sensitive,
        "read_only": each.read_only,
    }
