"""`millrace cluster`: how the cluster is, elections, moving partitions, and taking a broker out.

Every subcommand asks any broker. Moving partitions is long enough to have a module of its own (`reassign`), and so is
judging how well the cluster is (`cluster_health`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from millrace.cli.cluster_health import cluster_health
from millrace.cli.cluster_state import Administration, check, health, read_cluster
from millrace.cli.leaderless import Leaderless, read_leaderless
from millrace.cli.log_dirs import read_log_dirs
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, Yes, confirm, name_values
from millrace.cli.output import CommandError, count_text, print_error, print_json, print_table, size_text
from millrace.cli.reassign import reassign
from millrace.client.versions import known_code
from millrace.cluster.image import BrokerImage, ClusterImage
from millrace.errors import ErrorCode
from millrace.model import TopicPartition
from millrace.wire.messages.cluster import UnregisterBrokerRequest, UnregisterBrokerResponse
from millrace.wire.messages.partitions import ElectLeadersRequest, ElectLeadersResponse

NAMED: Final = 3
"""How many partitions are named that have the same reason."""
_AS_WISHED: Final[Mapping[int, str]] = {ErrorCode.NONE: "elected", ErrorCode.ELECTION_NOT_NEEDED: "not needed"}

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
    with Administration.of(bootstrap, name_values(client, "--client")) as admin:
        image = read_cluster(admin, settings=True)
        leaderless = read_leaderless(admin, image)
        log_dirs = [each.as_json() for each in read_log_dirs(admin, image)]
    description = describe_image(image, leaderless) | {"log_dirs": log_dirs}
    if as_json:
        print_json(description)
    else:
        _print_description(description)


def describe_image(image: ClusterImage, leaderless: Sequence[Leaderless] = ()) -> dict[str, Any]:
    """Everything `describe` tells."""
    found = health(image)
    reasons = {each.place: each.as_json() for each in leaderless}
    return {
        "cluster_id": image.cluster_id,
        "controller": image.controller_id,
        "controller_epoch": image.controller_epoch,
        "metadata_delta": image.index,
        "topics": len(image.topics),
        "partitions": sum(len(topic.partitions) for topic in image.topics.values()),
        "brokers": [_broker(image, image.brokers[broker_id]) for broker_id in sorted(image.brokers)],
        "under_replicated": [_partition(image, place) for place in found.under_replicated],
        "under_min_isr": [_partition(image, place) for place in found.under_min_isr],
        "offline": [_partition(image, place) | reasons.get(place, {}) for place in found.offline],
        "reassigning": [_partition(image, place) for place in found.reassigning],
    }


def _broker(image: ClusterImage, broker: BrokerImage) -> dict[str, Any]:
    states = [state for topic in image.topics.values() for state in topic.partitions]
    broker_id = broker.broker_id
    (endpoint,) = broker.endpoints
    return {
        "broker": broker_id,
        "address": f"{endpoint.host}:{endpoint.port}",
        "rack": broker.rack,
        "state": "fenced" if broker.fenced else "controller" if broker_id == image.controller_id else "live",
        "leaders": sum(state.leader == broker_id for state in states),
        "preferred": sum(state.replicas[:1] == (broker_id,) for state in states),
        "replicas": sum(broker_id in state.replicas for state in states),
        "in_sync": sum(broker_id in state.isr for state in states),
    }


def _partition(image: ClusterImage, place: TopicPartition) -> dict[str, Any]:
    state = image.topics[place.topic].partitions[place.partition]
    described: dict[str, Any] = {
        "topic": place.topic,
        "partition": place.partition,
        "leader": state.leader,
        "replicas": list(state.replicas),
        "isr": list(state.isr),
    }
    if state.is_reassigning:
        described |= {"adding": list(state.adding), "removing": list(state.removing)}
    return described


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
    with Administration.of(bootstrap, name_values(client, "--client")) as admin:
        wanted = None
        if topic is not None or unclean:
            image = read_cluster(admin)
            wanted = None if topic is None else [_chosen(image, topic, partition)]
        if unclean:
            leaderless = read_leaderless(admin, image, None if wanted is None else _named(wanted))
            if leaderless and not as_json:
                _print_leaderless(leaderless)
            if leaderless:
                at_a_price = ", although acknowledged records may be lost" * any(each.loses for each in leaderless)
                confirm(f"Elect these leaders{at_a_price}?", yes=yes)
            wanted = _topics(each.place for each in leaderless)  # what was shown and no other
        request = ElectLeadersRequest(election_type=int(unclean), topic_partitions=wanted, timeout_ms=30_000)
        answer: ElectLeadersResponse = admin.ask(request)
    check(answer.error_code, "no election")
    shown_before = {each.place: each.as_json() for each in leaderless}
    outcomes = [
        {"topic": each.topic, "partition": one.partition_id, "result": _election_result(one.error_code)}
        | (shown_before.get(TopicPartition(each.topic, one.partition_id), {}) if as_json else {})
        for each in answer.replica_election_results
        for one in each.partition_result
    ]
    failed = [one for one in outcomes if one["result"] not in _AS_WISHED.values()]
    if as_json:
        print_json(outcomes)
    elif shown := [one for one in outcomes if one["result"] != "not needed"]:
        print_table(["topic", "partition", "result"], [list(one.values()) for one in shown])
    else:
        print("no partition needed an election")
    if failed:
        refused = next(one for one in _results(answer) if one.error_code not in _AS_WISHED)
        reason = f"{refused.error_message or 'refused'} ({known_code(refused.error_code).name})"
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


def _topics(places: Iterable[TopicPartition]) -> list[ElectLeadersRequest.TopicPartitions]:
    indexes: dict[str, list[int]] = {}
    for topic, index in places:
        indexes.setdefault(topic, []).append(index)
    return [ElectLeadersRequest.TopicPartitions(topic=name, partitions=held) for name, held in indexes.items()]


def _named(wanted: Iterable[ElectLeadersRequest.TopicPartitions]) -> set[TopicPartition]:
    return {TopicPartition(each.topic, index) for each in wanted for index in each.partitions}


def _election_result(code: int) -> str:
    known = known_code(code)
    return _AS_WISHED.get(known, known.name)


def _results(answer: ElectLeadersResponse) -> Iterable[ElectLeadersResponse.PartitionResult]:
    return (one for each in answer.replica_election_results for one in each.partition_result)


def _chosen(image: ClusterImage, topic: str, partition: int | None) -> Any:
    found = image.topic(topic)
    if found is None:
        raise CommandError(f"there is no topic '{topic}'")
    if partition is not None and partition >= len(found.partitions):
        raise CommandError(f"topic '{topic}' has no partition {partition} (it has {len(found.partitions)})")
    indexes = range(len(found.partitions)) if partition is None else [partition]
    return ElectLeadersRequest.TopicPartitions(topic=topic, partitions=list(indexes))


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
    with Administration.of(bootstrap, name_values(client, "--client")) as admin:
        image = read_cluster(admin)
        held = sum(broker in state.replicas for topic in image.topics.values() for state in topic.partitions)
        if held:
            raise CommandError(
                f"broker {broker} holds {count_text(held, 'replica')}; move them away first with: "
                f"millrace cluster reassign --drain {broker}"
            )
        if broker not in image.brokers:
            raise CommandError(f"there is no broker {broker}; the brokers are {numbers(sorted(image.brokers))}")
        if image.is_live(broker):
            raise CommandError(f"broker {broker} is running; stop it first, it holds nothing any more")
        confirm(f"Forget broker {broker}?", yes=yes)
        answer: UnregisterBrokerResponse = admin.ask(UnregisterBrokerRequest(broker_id=broker))
        check(answer.error_code, f"broker {broker}", answer.error_message)
    if as_json:
        print_json({"broker": broker, "result": "removed"})
    else:
        print(f"removed broker {broker}")
