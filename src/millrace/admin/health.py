"""Whether a cluster is well, judged: what is wrong, a line each.

Read from any broker (who is missing, which partitions lack a leader or replicas) and from every live one (its
directories). A move that is under way is nothing wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from millrace.admin.asking import ask_broker
from millrace.admin.cluster import health, partitions, read_cluster
from millrace.admin.leaderless import Leaderless, read_leaderless
from millrace.admin.words import size_text
from millrace.client.cluster import ClusterClient
from millrace.client.versions import known_code
from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError
from millrace.metadata.deltas import ResourceType
from millrace.model import NO_BROKER, TopicPartition
from millrace.storage.space import Space, is_full
from millrace.wire.messages.configs import DescribeConfigsRequest, DescribeConfigsResponse
from millrace.wire.messages.log_dirs import DescribeLogDirsRequest, DescribeLogDirsResponse

RESERVE: Final = "log.dirs.min.free.bytes"


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


def read_health(cluster: ClusterClient) -> Report:
    """Ask the cluster. Unreachable where nobody answers."""
    image = read_cluster(cluster, settings=True)
    return report(image, read_leaderless(cluster, image), directory_problems(cluster, image))


def report(image: ClusterImage, leaderless: Sequence[Leaderless], directories: Iterable[Problem]) -> Report:
    """What is wrong with a cluster, from what was read of it."""
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


def directory_problems(cluster: ClusterClient, image: ClusterImage) -> Iterator[Problem]:
    """Of the log directories of all brokers that run: those that failed or are full, and brokers that do not answer."""
    for broker in image.live_brokers:
        broker_id = broker.broker_id
        try:
            answer: DescribeLogDirsResponse = ask_broker(cluster, broker_id, DescribeLogDirsRequest(topics=[]))
        except ApiError as error:
            yield Problem("broker-silent", f"broker {broker_id} does not answer: {error.message}", broker_id)
            continue
        for directory in answer.results:
            if directory.error_code:
                why = known_code(directory.error_code).name
                text = f"broker {broker_id}: log directory {directory.log_dir} is offline ({why})"
                yield Problem("directory-offline", text, broker_id)
            elif _may_be_full(directory) and _is_full(directory, _reserve_bytes(cluster, broker_id)):
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


def _reserve_bytes(cluster: ClusterClient, broker_id: int) -> int:
    """What a broker keeps free on its disks; 0 where it has no such setting."""
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=ResourceType.BROKER, resource_name=str(broker_id), configuration_keys=[RESERVE]
    )
    answer: DescribeConfigsResponse = ask_broker(cluster, broker_id, DescribeConfigsRequest(resources=[resource]))
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
