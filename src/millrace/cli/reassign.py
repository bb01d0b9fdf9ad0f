"""`millrace cluster reassign`: move partitions to other brokers, with a plan to look at first and a way back.

The brokers do the work (KIP-455), so that a move goes on when this command ends. What is worth moving is decided in
`cluster.balance`, how it is asked for in `admin.moves`. A limit on the speed is taken off when the move is over, by
this command or, where it was interrupted, by the next `--status`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from millrace.admin import moves
from millrace.admin.cluster import elect_leaders, read_cluster
from millrace.admin.errors import AdminError
from millrace.admin.log_dirs import largest_replicas, read_log_dirs
from millrace.cli.entry import open_cluster
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, Yes, confirm, name_values
from millrace.cli.output import CommandError, count_text, print_error, print_json, print_remark, print_table, size_text
from millrace.client.cluster import ClusterClient
from millrace.cluster.image import ClusterImage
from millrace.cluster.reassignments import Reassignment
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition

POLL_S: Final = 0.5


def reassign(
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    add_brokers: Annotated[
        str | None, typer.Option("--add-brokers", metavar="ID,...", help="Give these brokers their share.")
    ] = None,
    drain: Annotated[
        list[int] | None, typer.Option("--drain", metavar="ID", help="Move everything off this broker; repeatable.")
    ] = None,
    factor: Annotated[
        int | None,
        typer.Option(
            "--replication-factor",
            "-r",
            min=1,
            help="Give partitions so many replicas: of all topics but the internal ones, or of --topic.",
        ),
    ] = None,
    topics: Annotated[
        list[str] | None, typer.Option("--topic", "-t", help="Only this topic; repeatable. All topics unless given.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="A plan as JSON, in the form of Kafka's tool, instead of ours.")
    ] = None,
    throttle: Annotated[
        int | None, typer.Option("--throttle", min=1, metavar="BYTES_PER_SECOND", help="The limit per broker.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan; with --json, as a --file.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show what is being moved.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Take back what is being moved.")] = False,
    yes: Yes = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Move partitions: even out all brokers, add some, drain one, or have more replicas.

    Without --add-brokers, --drain or --file, partitions are spread evenly over the brokers that run. Clients notice
    nothing but leaders that move. Ctrl-C leaves the move running.
    """
    chosen = _brokers_to_add(add_brokers)
    modes = [status, cancel, file is not None, bool(chosen or drain or factor)]
    if sum(modes) > 1:
        planned = "--add-brokers/--drain/--replication-factor"
        raise CommandError(f"--status, --cancel, --file and {planned} exclude each other", exit_code=2)
    with open_cluster(bootstrap, name_values(client, "--client")) as cluster:
        image = read_cluster(cluster)
        if status:
            _show_status(cluster, image, topics, as_json=as_json)
            return
        if cancel:
            _cancel(cluster, image, topics, yes=yes, as_json=as_json)
            return
        if moving := [state for _, _, state in image.partitions() if state.is_reassigning]:
            raise CommandError(
                f"{count_text(len(moving), 'partition')} are being moved: wait (--status) or take it back (--cancel)"
            )
        if file is not None:
            plan = moves.check_plan(image, moves.parse_plan(file.read_text(), str(file)))
        else:
            plan = moves.make_plan(image, add=chosen, drain=drain or [], topics=topics, factor=factor)
        _execute(cluster, image, plan, throttle, dry_run=dry_run, yes=yes, as_json=as_json)


def _brokers_to_add(text: str | None) -> list[int]:
    if text is None:
        return []
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() for word in words):
        raise CommandError(f"--add-brokers wants ids such as 4,5, not '{text}'", exit_code=2)
    return [int(word) for word in words]


def _show_plan(cluster: ClusterClient, image: ClusterImage, plan: Sequence[Reassignment]) -> None:
    sizes = largest_replicas(read_log_dirs(cluster, image))
    copied = [(TopicPartition(move.topic, move.index), len(moves.replicas_added(image, move))) for move in plan]
    size_bytes = sum(sizes.get(place, 0) * count for place, count in copied)
    print_table(
        ["topic", "partition", "now", "then"],
        [
            (move.topic, move.index, _numbers(moves.replicas_now(image, move)), _numbers(move.replicas or ()))
            for move in plan
        ],
    )
    print_remark(
        f"{count_text(len(plan), 'partition')}, {count_text(sum(count for _, count in copied), 'new replica')}, "
        f"about {size_text(size_bytes)} to copy"
    )


def _numbers(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


# --- doing it ---------------------------------------------------------------------------------------------------------


def _execute(
    cluster: ClusterClient,
    image: ClusterImage,
    plan: list[Reassignment],
    throttle: int | None,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    if not plan:
        _tell(plan, "nothing to move", as_json=as_json)
        return
    if not as_json:
        _show_plan(cluster, image, plan)
    if dry_run:
        _tell(plan, "a plan only; say it again without --dry-run", as_json=as_json)
        return
    confirm(f"Move {count_text(len(plan), 'partition')}?", yes=yes)
    if throttle is not None:
        moves.alter_settings(cluster, moves.limits(image, plan, throttle))
    failed = moves.submit(cluster, plan)
    begun = [move for move in plan if (move.topic, move.index) not in failed]
    try:
        _wait(cluster, begun)
    except KeyboardInterrupt:
        limited = "; the limit stays until the end is seen by --status" if throttle is not None else ""
        print_remark(
            "\nthe move goes on; see it with: millrace cluster reassign --status, "
            f"take it back with: millrace cluster reassign --cancel{limited}"
        )
        raise typer.Exit(130) from None
    if throttle is not None:
        moves.lift_limits(cluster, image)
    _finish(cluster, begun, failed, as_json=as_json)


def _tell(plan: Iterable[Reassignment], words: str, *, as_json: bool) -> None:
    if as_json:
        print_json(moves.render_plan(plan))
    else:
        print(words)


def _finish(
    cluster: ClusterClient, begun: list[Reassignment], failed: Mapping[tuple[str, int], ApiError], *, as_json: bool
) -> None:
    """Give the leadership to the replicas that stand first, and tell what became of the plan."""
    after = read_cluster(cluster)
    moved = [
        move
        for move in begun
        if (topic := after.topic(move.topic)) is not None and topic.partitions[move.index].replicas == move.replicas
    ]
    _elect_preferred(cluster, moved)
    for (topic_name, index), error in failed.items():
        print_error(f"{topic_name}-{index}: {error.message} ({error.code.name})")
    if len(moved) < len(begun):
        print_error(f"{count_text(len(begun) - len(moved), 'partition')} did not arrive: the move was taken back")
    _tell(moved, f"moved {count_text(len(moved), 'partition')}", as_json=as_json)
    if failed or len(moved) < len(begun):
        raise typer.Exit(1)


def _wait(cluster: ClusterClient, plan: Sequence[Reassignment]) -> None:
    """Return when no move of the plan is under way."""
    wanted = {(move.topic, move.index) for move in plan}
    pause = threading.Event()
    with _progress(len(wanted)) as show:
        while True:
            left = len(wanted & moves.under_way(cluster))
            show(len(wanted) - left)
            if not left:
                return
            pause.wait(POLL_S)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a line per step elsewhere."""
    if not sys.stderr.isatty():
        told = -1

        def tell(done: int) -> None:
            nonlocal told
            if done != told:
                told = done
                print_remark(f"{done:,} of {count_text(total, 'partition')} moved")

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("moving partitions"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


def _elect_preferred(cluster: ClusterClient, plan: Sequence[Reassignment]) -> None:
    """Best effort: the controller does it anyway, a little later."""
    if plan:
        with suppress(AdminError):
            elect_leaders(cluster, [TopicPartition(move.topic, move.index) for move in plan])


# --- what is under way ------------------------------------------------------------------------------------------------


def _show_status(cluster: ClusterClient, image: ClusterImage, topics: Sequence[str] | None, *, as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {
            "topic": each.place.topic,
            "partition": each.place.partition,
            "replicas": list(each.staying),
            "adding": list(each.adding),
            "removing": list(each.removing),
            "isr": list(each.isr),
        }
        for each in moves.moving(image, topics)
    ]
    if as_json:
        print_json(rows)
    elif rows:
        print_table(
            ["topic", "partition", "replicas", "adding", "removing", "isr"],
            [
                [
                    row["topic"],
                    row["partition"],
                    *(_numbers(row[key]) for key in ("replicas", "adding", "removing", "isr")),
                ]
                for row in rows
            ],
        )
    else:
        print("nothing is being moved")
    if not rows and not topics and moves.lift_limits(cluster, image):
        print_remark("took off the limits of a move that is over")


def _cancel(
    cluster: ClusterClient, image: ClusterImage, topics: Sequence[str] | None, *, yes: bool, as_json: bool
) -> None:
    places = [each.place for each in moves.moving(image, topics)]
    failed: dict[tuple[str, int], ApiError] = {}
    if places:
        confirm(f"Take back the move of {count_text(len(places), 'partition')}?", yes=yes)
        failed = moves.submit(cluster, [Reassignment(topic, index, None) for topic, index in places])
    if not topics:
        moves.lift_limits(cluster, image)
    taken_back = [place for place in places if tuple(place) not in failed]
    if as_json:
        print_json([{"topic": topic, "partition": index, "result": "taken back"} for topic, index in taken_back])
    else:
        print(f"took back {count_text(len(taken_back), 'partition')}")
    # What arrived in this moment is no failure, only too late.
    failed = {place: error for place, error in failed.items() if error.code != ErrorCode.NO_REASSIGNMENT_IN_PROGRESS}
    for (topic, index), error in failed.items():
        print_error(f"{topic}-{index}: {error.message} ({error.code.name})")
    if failed:
        raise typer.Exit(1)
