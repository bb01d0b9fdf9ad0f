"""`millrace transactions`: which transactions there are, which of them hang, and ending those (KIP-664).

A transaction that takes long keeps read_committed readers waiting. Its coordinator aborts it after its timeout; where
its producer is gone for good, `terminate` need not wait for that. One that only a partition knows of has nobody to end
it: `find-hanging` finds it, `abort` ends it in that partition. How they are asked for is
`admin.transactions`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from typing import Annotated, Any, Final

import typer

from millrace.admin.errors import AdminError
from millrace.admin.times import duration_text, iso_utc, parse_duration_ms
from millrace.admin.topics import require_topic
from millrace.admin.transactions import (
    STATES,
    ProducerView,
    TransactionView,
    describe_producers,
    describe_transaction,
    fence,
    find_owners,
    hanging,
    list_transactions,
    write_abort_marker,
)
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, Yes, confirm, name_values
from millrace.cli.output import CommandError, print_error, print_json, print_table
from millrace.cli.queue_consume import open_client
from millrace.client.cluster import ClusterClient
from millrace.clock import SystemClock
from millrace.errors import ApiError
from millrace.model import TopicPartition

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="List, describe and end transactions; find those that hang."
)

_LONGEST: Final = "15m"
"""Kafka's default of transaction.max.timeout.ms: an older one should have been ended by its coordinator."""

Ids = Annotated[list[str], typer.Argument(metavar="TRANSACTIONAL_ID...", show_default=False, help="Transactional ids.")]
Partition = Annotated[int, typer.Option("--partition", "-p", min=0, help="The partition.")]
Partitions = Annotated[
    list[int] | None, typer.Option("--partition", "-p", min=0, help="Only this partition, repeatable.")
]


@app.command(
    "list",
    epilog="Examples: `millrace transactions list 'billing-*' --state ongoing` or "
    "`millrace transactions list --older-than 10m --json`",
)
def list_(
    pattern: Annotated[str, typer.Argument(help="Only transactional ids that match, with * and ?.")] = "*",
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            metavar="TRANSACTION-STATE",
            help="Only this state: empty, ongoing, prepare-abort, ...; repeatable.",
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="DURATION", help="Only those that run for longer, such as 10m."),
    ] = None,
    producer_ids: Annotated[
        list[int] | None, typer.Option("--producer-id", min=0, help="Only this producer's, repeatable.")
    ] = None,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """List transactional ids, their producers and their states."""
    wanted = [state.lower() for state in states or ()]
    for state in wanted:
        if state not in STATES:
            raise CommandError(f"--state is {', '.join(STATES)}, not '{state}'", exit_code=2)
    running_ms = None if older_than is None else parse_duration_ms(older_than)
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        found = list_transactions(cluster, states=wanted, producer_ids=producer_ids or (), running_ms=running_ms)
    columns = ("transactional_id", "coordinator", "producer_id", "state")
    rows = [
        (each.transactional_id, each.coordinator, each.producer_id, each.state)
        for each in found
        if fnmatch.fnmatchcase(each.transactional_id, pattern)
    ]
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table([column.replace("_", " ") for column in columns], rows)


@app.command(epilog="Example: millrace transactions describe billing-1 --json")
def describe(
    ids: Ids,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Show producer, state, age and partitions of transactional ids."""
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        found = [_require(cluster, name) for name in dict.fromkeys(ids)]
    now_ms = SystemClock().wall_ms()
    if as_json:
        print_json([_transaction_fields(each, now_ms) for each in found])
        return
    for each in found:
        age = "" if each.start_ms is None else f" running={duration_text(now_ms - each.start_ms)}"
        title = (
            f"{each.transactional_id}  state={each.state} producer={each.producer_id} epoch={each.producer_epoch} "
            f"timeout={duration_text(each.timeout_ms)}{age}"
        )
        print_table(["topic", "partition"], each.partitions, title=title)


@app.command("describe-producers", epilog="Example: millrace transactions describe-producers orders --partition 0")
def show_producers(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, help="The topic.")],
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    partitions: Partitions = None,
    broker_id: Annotated[
        int | None, typer.Option("--broker-id", min=0, help="As this broker's replicas have them; not the leaders'.")
    ] = None,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Show the producers that write to a topic, and where their open transactions begin."""
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        chosen = _chosen(cluster, [topic], partitions or (), broker_id)
        found = describe_producers(cluster, chosen, broker_id=broker_id)
    _print_producers(found, as_json=as_json)


@app.command(
    "find-hanging",
    epilog="Examples: `millrace transactions find-hanging` or, of one topic, "
    "`millrace transactions find-hanging orders --older-than 1h`",
)
def find_hanging(
    topics: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC...", show_default=False, help="Where to look; in every topic unless given."),
    ] = None,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    partitions: Partitions = None,
    broker_id: Annotated[
        int | None, typer.Option("--broker-id", min=0, help="Look at this broker's replicas; not at the leaders.")
    ] = None,
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than",
            metavar="DURATION",
            help="Only if the last record is older; at least the longest timeout that the cluster allows.",
        ),
    ] = _LONGEST,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Find open transactions that no coordinator will end."""
    older_than_ms = parse_duration_ms(older_than)
    now_ms = SystemClock().wall_ms()
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        chosen = _chosen(cluster, topics, partitions or (), broker_id)
        producers = describe_producers(cluster, chosen, broker_id=broker_id)
        # Whoever no coordinator knew of could hang: only of these the coordinators are asked.
        suspects = hanging(producers, {}, now_ms=now_ms, older_than_ms=older_than_ms)
        owners = find_owners(cluster, suspects)
    _print_producers(hanging(suspects, owners, now_ms=now_ms, older_than_ms=older_than_ms), as_json=as_json)


@app.command(
    epilog="Examples: `millrace transactions abort orders --partition 0 --start-offset 1042` or "
    "`millrace transactions abort orders --partition 0 --producer-id 7 --yes`"
)
def abort(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, help="The topic.")],
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    partition: Partition,
    start_offset: Annotated[
        int | None, typer.Option("--start-offset", min=0, help="Where the transaction begins (see find-hanging).")
    ] = None,
    producer_id: Annotated[int | None, typer.Option("--producer-id", min=0, help="Whose transaction it is.")] = None,
    producer_epoch: Annotated[
        int | None, typer.Option("--producer-epoch", min=0, help="With --producer-id, if the partition has another.")
    ] = None,
    coordinator_epoch: Annotated[
        int | None, typer.Option("--coordinator-epoch", help="With --producer-epoch; 0 unless given.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also if its coordinator has it: the transaction may be torn.")
    ] = False,
    yes: Yes = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Abort a hanging transaction in one partition.

    The partition's leader writes the marker, and no coordinator hears of it. What a coordinator still has is refused,
    for it would end the rest of it otherwise: that is what `millrace transactions terminate` is for.
    """
    if (start_offset is None) == (producer_id is None):
        raise CommandError("give either --start-offset or --producer-id", exit_code=2)
    if producer_epoch is not None and producer_id is None:
        raise CommandError("--producer-epoch needs --producer-id", exit_code=2)
    if coordinator_epoch is not None and producer_epoch is None:
        raise CommandError("--coordinator-epoch needs --producer-epoch", exit_code=2)
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        (place,) = _chosen(cluster, [topic], [partition], None)
        if producer_id is not None and producer_epoch is not None:
            epoch = None if coordinator_epoch is None or coordinator_epoch < 0 else coordinator_epoch
            found = ProducerView(place, producer_id, producer_epoch, epoch, None, None, None)
        else:
            found = _open_transaction(cluster, place, start_offset, producer_id)
        if not force:
            _refuse_if_known(cluster, found)
        begin = "" if found.start_offset is None else f" from offset {found.start_offset} on"
        confirm(f"Abort the transaction of producer {found.producer_id} in {place}{begin}?", yes=yes)
        write_abort_marker(
            cluster,
            place,
            producer_id=found.producer_id,
            producer_epoch=found.producer_epoch,
            coordinator_epoch=found.coordinator_epoch,
        )
    if as_json:
        print_json({**_producer_fields(found), "result": "aborted"})
    else:
        print(f"aborted the transaction of producer {found.producer_id} in {place}")


@app.command(epilog="Example: millrace transactions terminate billing-1 --yes")
def terminate(
    ids: Ids,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    yes: Yes = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """End what transactional ids have begun, and fence their producers.

    Their coordinator aborts an ongoing transaction as if a new producer of the id had come. A producer that still runs
    fails with its next request and has to begin anew.
    """
    confirm(f"Terminate the transactions of {', '.join(ids)}, and fence the producers?", yes=yes)
    outcomes: list[dict[str, Any]] = []
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        for name in dict.fromkeys(ids):
            try:
                # Asking for a producer id would make an id that does not exist.
                producer_id, epoch = fence(cluster, _require(cluster, name))
            except (CommandError, AdminError, ApiError) as error:
                outcomes.append({"transactional_id": name, "result": "failed", "error": str(error)})
                print_error(str(error))
                continue
            outcome = {"result": "terminated", "producer_id": producer_id, "producer_epoch": epoch}
            outcomes.append({"transactional_id": name, **outcome})
            if not as_json:
                print(f"terminated {name}")
    if as_json:
        print_json(outcomes)
    if any(one["result"] == "failed" for one in outcomes):
        raise typer.Exit(1)


def _require(cluster: ClusterClient, name: str) -> TransactionView:
    found = describe_transaction(cluster, name)
    if found is None:
        raise CommandError(f"there is no transactional id '{name}'; see: millrace transactions list")
    return found


def _chosen(
    cluster: ClusterClient, topics: Collection[str] | None, indexes: Collection[int], broker_id: int | None
) -> list[TopicPartition]:
    """The partitions that are meant; on a broker, those that it has a replica of."""
    for name in topics or ():
        require_topic(cluster, name)
    infos = cluster.topics(topics or None)
    for name in topics or ():
        missing = sorted(set(indexes) - set(infos[name].partitions))
        if missing:
            raise CommandError(f"topic '{name}' has no partition {missing[0]} (it has {len(infos[name].partitions)})")
    if indexes and not topics:
        raise CommandError("--partition needs a topic", exit_code=2)
    return [
        TopicPartition(name, index)
        for name, info in sorted(infos.items())
        for index, place in sorted(info.partitions.items())
        if (not indexes or index in indexes) and (broker_id is None or broker_id in place.replicas)
    ]


def _open_transaction(
    cluster: ClusterClient, place: TopicPartition, start_offset: int | None, producer_id: int | None
) -> ProducerView:
    for each in describe_producers(cluster, [place]):
        if each.start_offset is not None and (each.start_offset == start_offset or each.producer_id == producer_id):
            return each
    which = f"beginning at offset {start_offset}" if producer_id is None else f"of producer {producer_id}"
    raise CommandError(
        f"{place} has no open transaction {which}; see: millrace transactions describe-producers {place.topic}"
    )


def _refuse_if_known(cluster: ClusterClient, producer: ProducerView) -> None:
    owner = find_owners(cluster, [producer]).get(producer.producer_id)
    if owner is not None and producer.partition in owner.partitions:
        raise CommandError(
            f"it does not hang: the coordinator of '{owner.transactional_id}' has it as {owner.state} and will end it; "
            f"see: millrace transactions terminate {owner.transactional_id} (or say --force)"
        )


def _transaction_fields(each: TransactionView, now_ms: int) -> dict[str, Any]:
    return {
        "transactional_id": each.transactional_id,
        "state": each.state,
        "producer_id": each.producer_id,
        "producer_epoch": each.producer_epoch,
        "timeout_ms": each.timeout_ms,
        "started": None if each.start_ms is None else iso_utc(each.start_ms),
        "running_ms": None if each.start_ms is None else now_ms - each.start_ms,
        "partitions": [{"topic": topic, "partition": partition} for topic, partition in each.partitions],
    }


def _producer_fields(each: ProducerView) -> dict[str, Any]:
    return {
        "topic": each.partition.topic,
        "partition": each.partition.partition,
        "producer_id": each.producer_id,
        "producer_epoch": each.producer_epoch,
        "coordinator_epoch": each.coordinator_epoch,
        "last_sequence": each.last_sequence,
        "last_time": None if each.last_timestamp_ms is None else iso_utc(each.last_timestamp_ms),
        "start_offset": each.start_offset,
    }


def _print_producers(producers: Collection[ProducerView], *, as_json: bool) -> None:
    rows = [_producer_fields(each) for each in producers]
    if as_json:
        print_json(rows)
        return
    columns = ["topic", "partition", "producer", "epoch", "coordinator epoch", "last sequence", "last time"]
    print_table([*columns, "transaction from"], [list(row.values()) for row in rows])
