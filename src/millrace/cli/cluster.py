"""`millrace cluster`: how the cluster is, elections, moving partitions, and taking a broker out.

Every subcommand asks any broker. Moving partitions is long enough to have a module of its own (`reassign`), and so is
judging how well the cluster is (`cluster_health`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from millrace.admin.cluster import Election, check_removable, describe_image, elect_leaders, read_cluster, remove_broker
from millrace.admin.leaderless import Leaderless, read_leaderless
from millrace.admin.log_dirs import read_log_dirs
from millrace.cli.cluster_health import cluster_health
from millrace.cli.entry import open_cluster
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, Yes, confirm, name_values
from millrace.cli.output import CommandError, count_text, print_error, print_json, print_table, size_text
from millrace.cli.reassign import reassign
from millrace.cluster.image import ClusterImage
from millrace.model import TopicPartition

NAMED: Final = 3
"""How many partitions are named that have the same reason."""

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Describe a cluster, elect leaders, move partitions."
)


@app.command(epilog="Example: millrace cluster describe --json")
def describe(
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Show brokers, the controller, and partitions that need attention."""
    with open_cluster(bootstrap, name_values(client, "--client")) as cluster:
        image = read_cluster(cluster, settings=True)
        leaderless = read_leaderless(cluster, image)
        log_dirs = [each.as_json() for each in read_log_dirs(cluster, image)]
    description = describe_image(image, {each.place: each.as_json() for each in leaderless}) | {"log_dirs": log_dirs}
    if as_json:
        print_json(description)
    else:
        _print_description(description)


def _print_description(told: dict[str, Any]) -> None:
    brokers = told["brokers"]
    live = sum(one["state"] != "fenced" for one in brokers)
    print_table(
        ["broker", "address", "rack", "state", "leaders", "preferred", "replicas", "in sync"],
        [list(one.values()) for one in brokers],
        title=(
            f"cluster {told['cluster_id']}  {live} of {count_text(len(brokers), 'broker')} live, "
            f"{count_text(told['topics'], 'topic')}, {count_text(told['partitions'], 'partition')}, "
            f"controller epoch {told['controller_epoch']}, metadata delta {told['metadata_delta']}"
        ),
    )
    _print_log_dirs(told["log_dirs"])
    problems = ("offline", "under_min_isr", "under_replicated", "reassigning")
    rows: dict[tuple[str, int], list[object]] = {}
    for problem in problems:
        for one in told[problem]:
            row = rows.setdefault(
                (one["topic"], one["partition"]),
                [one["topic"], one["partition"], one["leader"], numbers(one["replicas"]), numbers(one["isr"]), ""],
            )
            row[-1] = f"{row[-1]}, {_words(problem)}" if row[-1] else _words(problem)
    if rows:
        counted = ", ".join(f"{len(told[problem]):,} {_words(problem)}" for problem in problems)
        print_table(
            ["topic", "partition", "leader", "replicas", "isr", "problem"],
            [rows[place] for place in sorted(rows)],
            title=f"partitions: {counted}",
        )
    else:
        print("every partition has a leader and all its replicas in sync")
    _print_reasons(told["offline"])


def _print_log_dirs(directories: Sequence[dict[str, Any]]) -> None:
    """What lies on disk; a column for problems only where there are some."""
    has_problems = any(one["problem"] for one in directories)
    print_table(
        ["broker", "size", "free", "directory", *["problem"] * has_problems],
        [
            (
                one["broker"],
                *(None if one[field] is None else size_text(one[field]) for field in ("bytes", "free_bytes")),
                one["directory"],
                *[one["problem"]] * has_problems,
            )
            for one in directories
        ],
        title="log directories",
    )


def _print_reasons(offline: Sequence[dict[str, Any]]) -> None:
    """Why partitions have no leader, those with the same reason together."""
    places: dict[str, list[str]] = {}
    for one in offline:
        if "why" in one:
            places.setdefault(one["why"], []).append(f"{one['topic']}-{one['partition']}")
    for why, named in places.items():
        more = f" and {len(named) - NAMED:,} more" if len(named) > NAMED else ""
        print(f"{', '.join(named[:NAMED])}{more}: {why}")


def _words(problem: str) -> str:
    return problem.replace("_", "-")


def numbers(values: list[int] | tuple[int, ...]) -> str:
    return ",".join(map(str, values))


@app.command(
    epilog="Examples: `millrace cluster elect --topic orders --partition 3` or, if nobody leads and no disk comes "
    "back, `millrace cluster elect --unclean --topic orders`"
)
def elect(
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    topic: Annotated[
        str | None, typer.Option("--topic", "-t", help="Only partitions of this topic; all topics unless given.")
    ] = None,
    partition: Annotated[int | None, typer.Option("--partition", "-p", min=0, help="Only this partition.")] = None,
    unclean: Annotated[
        bool,
        typer.Option(
            "--unclean",
            help="Give partitions without a leader the live replica with the longest log; shows what each has, and "
            "asks, because records may be lost.",
        ),
    ] = False,
    yes: Yes = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Make preferred replicas the leaders again, or elect from what is left."""
    if partition is not None and topic is None:
        raise CommandError("--partition needs --topic", exit_code=2)
    leaderless: list[Leaderless] = []
    with open_cluster(bootstrap, name_values(client, "--client")) as cluster:
        wanted: list[TopicPartition] | None = None
        if topic is not None or unclean:
            image = read_cluster(cluster)
            wanted = None if topic is None else _chosen(image, topic, partition)
        if unclean:
            leaderless = read_leaderless(cluster, image, wanted)
            if leaderless and not as_json:
                _print_leaderless(leaderless)
            if leaderless:
                at_a_price = ", although acknowledged records may be lost" * any(each.loses for each in leaderless)
                confirm(f"Elect these leaders{at_a_price}?", yes=yes)
            wanted = [each.place for each in leaderless]  # what was shown and no other
        elections = elect_leaders(cluster, wanted, unclean=unclean)
    shown_before = {each.place: each.as_json() for each in leaderless}
    outcomes = [
        {"topic": each.place.topic, "partition": each.place.partition, "result": _election_result(each)}
        | (shown_before.get(each.place, {}) if as_json else {})
        for each in elections
    ]
    failed = [each.error for each in elections if each.error is not None and each.is_refused]
    if as_json:
        print_json(outcomes)
    elif shown := [one for one in outcomes if one["result"] != "not needed"]:
        print_table(["topic", "partition", "result"], [list(one.values()) for one in shown])
    else:
        print("no partition needed an election")
    if failed:
        reason = f"{failed[0].message or 'refused'} ({failed[0].code.name})"
        print_error(f"{count_text(len(failed), 'partition')} got no new leader: {reason}")
        raise typer.Exit(1)


def _print_leaderless(leaderless: Sequence[Leaderless]) -> None:
    """What each replica has, and what would follow."""
    rows: list[list[object]] = []
    for each in leaderless:
        for one in each.replicas:
            end = ("-", "-") if one.end is None else (str(one.end.epoch), str(one.end.offset))
            leads = "would lead" if one.broker == each.would_lead else ""
            rows.append([*each.place, one.broker, one.condition.value, *end, one.known_as or "-", leads])
    columns = ["topic", "partition", "broker", "which", "last epoch", "log end", "known as", ""]
    print_table(columns, rows, title=f"{count_text(len(leaderless), 'partition')} without a leader")
    for each in leaderless:
        print(f"{each.place.topic}-{each.place.partition}: {each.consequence}")


def _election_result(election: Election) -> str:
    if election.error is None:
        return "elected"
    return "not needed" if election.is_needless else election.error.code.name


def _chosen(image: ClusterImage, topic: str, partition: int | None) -> list[TopicPartition]:
    found = image.topic(topic)
    if found is None:
        raise CommandError(f"there is no topic '{topic}'")
    if partition is not None and partition >= len(found.partitions):
        raise CommandError(f"topic '{topic}' has no partition {partition} (it has {len(found.partitions)})")
    indexes = range(len(found.partitions)) if partition is None else [partition]
    return [TopicPartition(topic, index) for index in indexes]


app.command("health", epilog="Examples: `millrace cluster health && ./deploy`; `millrace cluster health --watch`")(
    cluster_health
)
app.command(
    "reassign",
    epilog="Examples: `millrace cluster reassign --drain 3 --throttle 50000000`; "
    "`millrace cluster reassign --replication-factor 3 --topic orders`",
)(reassign)


@app.command(epilog="Example: millrace cluster remove 3")
def remove(
    broker: Annotated[int, typer.Argument(min=0, show_default=False, help="The id of a broker that was stopped.")],
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    yes: Yes = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Forget a broker for good, once it holds nothing and was stopped."""
    with open_cluster(bootstrap, name_values(client, "--client")) as cluster:
        image = read_cluster(cluster)
        check_removable(image, broker)
        confirm(f"Forget broker {broker}?", yes=yes)
        remove_broker(cluster, broker)
    if as_json:
        print_json({"broker": broker, "result": "removed"})
    else:
        print(f"removed broker {broker}")
