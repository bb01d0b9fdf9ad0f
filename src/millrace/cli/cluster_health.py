"""`millrace cluster health`: whether a cluster is well, as an exit code, and what is wrong, a line each.

Read from any broker (who is missing, which partitions lack a leader or replicas) and from every live one (its
directories). What `describe` shows in tables is here judged: a move that is under way is nothing wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final

import typer

from millrace.cli.cluster_state import Administration, health, partitions, read_cluster
from millrace.cli.leaderless import Leaderless, read_leaderless
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, name_values
from millrace.cli.output import CommandError, count_text, print_json, size_text
from millrace.client.versions import known_code
from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError
from millrace.metadata.deltas import ResourceType
from millrace.model import NO_BROKER, TopicPartition
from millrace.storage.space import Space, is_full
from millrace.wire.messages.configs import DescribeConfigsRequest, DescribeConfigsResponse
from millrace.wire.messages.log_dirs import DescribeLogDirsRequest, DescribeLogDirsResponse

LOOK_EVERY_S: Final = 2.0
RESERVE: Final = "log.dirs.min.free.bytes"
_pause: Final = threading.Event()  # never set: a wait on it is a pause


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `kind` is for scripts, `text` for people."""

    kind: str
    text: str
    broker: int | None = None
    place: TopicPartition | None = None

    def as_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {"problem": self.kind}
        if self.broker is not None:
            told["broker"] = self.broker
        if self.place is not None:
            told |= {"topic": self.place.topic, "partition": self.place.partition}
        return told | {"text": self.text}


@dataclass(frozen=True, slots=True)
class Report:
    """How a cluster was at one moment."""

    cluster_id: str
    brokers: int
    live_brokers: int
    topics: int
    partitions: int
    problems: tuple[Problem, ...]

    @property
    def lines(self) -> list[str]:
        if self.problems:
            return [problem.text for problem in self.problems]
        counted = ", ".join(
            [
                count_text(self.brokers, "broker"),
                count_text(self.topics, "topic"),
                count_text(self.partitions, "partition"),
            ]
        )
        return [f"healthy: {counted}"]

    def as_json(self) -> dict[str, Any]:
        return {
            "healthy": not self.problems,
            "cluster_id": self.cluster_id,
            "brokers": self.brokers,
            "live_brokers": self.live_brokers,
            "topics": self.topics,
            "partitions": self.partitions,
            "problems": [problem.as_json() for problem in self.problems],
        }


def cluster_health(
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Look again and again, and tell when something changes; until Ctrl-C.")
    ] = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Say whether the cluster is well: exits with 0, or with 1 and a line for each problem."""
    settings = name_values(client, "--client")
    if not watch:
        report = look(bootstrap, settings)
        _show(report, as_json=as_json)
        raise typer.Exit(1 if report.problems else 0)
    last: Report | None = None
    try:
        for last in _changes(bootstrap, settings):
            _show(last, as_json=as_json, at=datetime.now().astimezone())
    except KeyboardInterrupt:
        pass
    raise typer.Exit(1 if last is None or last.problems else 0)


def _changes(bootstrap: str, settings: Mapping[str, str]) -> Iterator[Report]:
    """The report now, and again whenever it is another one."""
    last: Report | None = None
    while True:
        try:
            report = look(bootstrap, settings)
        except (CommandError, ApiError) as error:  # it may come back
            report = Report("", 0, 0, 0, 0, (Problem("unreachable", str(error)),))
        if report != last:
            last = report
            yield report
        _pause.wait(LOOK_EVERY_S)


def _show(report: Report, *, as_json: bool, at: datetime | None = None) -> None:
    if as_json:
        print_json(report.as_json() if at is None else {"time_ms": int(at.timestamp() * 1000), **report.as_json()})
    else:
        for line in report.lines:
            print(line if at is None else f"{at:%H:%M:%S} {line}", flush=True)


def look(bootstrap: str, settings: Mapping[str, str]) -> Report:
    """Ask the cluster. CommandError where nobody answers."""
    with Administration.of(bootstrap, settings) as admin:
        image = read_cluster(admin, settings=True)
        leaderless = read_leaderless(admin, image)
        directories = list(_directory_problems(admin, image))
    return Report(
        image.cluster_id,
        len(image.brokers),
        len(image.live_brokers),
        len(image.topics),
        sum(len(topic.partitions) for topic in image.topics.values()),
        (*_broker_problems(image), *directories, *_partition_problems(image, leaderless)),
    )


def _broker_problems(image: ClusterImage) -> Iterator[Problem]:
    if image.controller_id == NO_BROKER:
        yield Problem("no-controller", "there is no controller: nothing can be changed, and no leader elected")
    for broker_id in sorted(image.brokers):
        if not image.is_live(broker_id):
            gone_for_good = f"if it is gone for good: millrace cluster remove {broker_id}"
            yield Problem("broker-missing", f"broker {broker_id} is not running ({gone_for_good})", broker_id)


def _directory_problems(admin: Administration, image: ClusterImage) -> Iterator[Problem]:
    for broker in image.live_brokers:
        broker_id = broker.broker_id
        try:
            answer: DescribeLogDirsResponse = admin.ask_broker(broker_id, DescribeLogDirsRequest(topics=[]))
        except ApiError as error:
            yield Problem("broker-silent", f"broker {broker_id} does not answer: {error.message}", broker_id)
            continue
        for directory in answer.results:
            if directory.error_code:
                why = known_code(directory.error_code).name
                text = f"broker {broker_id}: log directory {directory.log_dir} is offline ({why})"
                yield Problem("directory-offline", text, broker_id)
            elif _may_be_full(directory) and _is_full(directory, _reserve_bytes(admin, broker_id)):
                free = f"{size_text(directory.usable_bytes)} free, see {RESERVE}"
                text = (
                    f"broker {broker_id}: log directory {directory.log_dir} is full ({free}) and takes no more records"
                )
                yield Problem("directory-full", text, broker_id)


def _may_be_full(directory: DescribeLogDirsResponse.DescribeLogDirsResult) -> bool:
    """Whether it would be worth asking for the reserve; Kafka before 3.3 does not tell sizes."""
    return directory.usable_bytes >= 0 and _is_full(directory, directory.total_bytes)


def _is_full(directory: DescribeLogDirsResponse.DescribeLogDirsResult, reserve_bytes: int) -> bool:
    return is_full(Space(directory.total_bytes, directory.usable_bytes), reserve_bytes, was_full=False)


def _reserve_bytes(admin: Administration, broker_id: int) -> int:
    """What a broker keeps free on its disks; 0 where it has no such setting."""
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=ResourceType.BROKER, resource_name=str(broker_id), configuration_keys=[RESERVE]
    )
    answer: DescribeConfigsResponse = admin.ask_broker(broker_id, DescribeConfigsRequest(resources=[resource]))
    return next((int(each.value or 0) for found in answer.results for each in found.configs if each.name == RESERVE), 0)


def _partition_problems(image: ClusterImage, leaderless: Sequence[Leaderless]) -> Iterable[Problem]:
    """One for each partition, the worst: no leader, too few in sync to write, a replica that is missing."""
    reasons = {each.place: each.why for each in leaderless}
    judged = health(image)
    offline, below, lacking = (
        set(places) for places in (judged.offline, judged.under_min_isr, judged.under_replicated)
    )
    for topic, index, state in partitions(image):
        place = TopicPartition(topic.name, index)
        sync = f"replicas {_numbers(state.replicas)}, in sync {_numbers(state.isr)}"
        if place in offline:
            yield Problem("no-leader", f"{topic.name}-{index}: {reasons.get(place, 'no leader')}", place=place)
        elif place in below:
            text = f"{topic.name}-{index}: under min.insync.replicas, acks=all is refused; {sync}"
            yield Problem("under-min-isr", text, place=place)
        elif place in lacking:
            yield Problem("under-replicated", f"{topic.name}-{index}: under-replicated; {sync}", place=place)


def _numbers(values: Iterable[int]) -> str:
    return ",".join(map(str, values))
