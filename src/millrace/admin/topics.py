"""Topics made, grown and deleted, and their records cut off from the front; each answer with its error, if any.

Not here: what is in them (`client.fetching`), their settings (`admin.configs`), all of them at a glance
(`admin.overview`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Final

from millrace.admin.errors import AdminError
from millrace.client.cluster import EARLIEST, LATEST, ClusterClient, raise_for
from millrace.client.requests import Outcome, by_topic
from millrace.client.versions import known_code
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.wire.messages.records import DeleteRecordsRequest, DeleteRecordsResponse
from millrace.wire.messages.topics import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
)

_TIMEOUT_MS: Final = 15_000
_LAST_DELETION_BY_NAME: Final = 5
_BY_BROKER: Final = -1
"""As many as the broker makes where nobody says."""


def require_topic(cluster: ClusterClient, topic: str) -> None:
    """AdminError where there is no such topic, with one whose name is near."""
    if topic in cluster.topics([topic]):
        return
    near = get_close_matches(topic, cluster.topics(), n=1)
    raise AdminError(f"there is no topic '{topic}'" + (f"; did you mean '{near[0]}'?" if near else ""))


def chosen_partitions(cluster: ClusterClient, texts: Iterable[str]) -> list[TopicPartition]:
    """`orders` is every partition of it, `orders:0,3` two of them; AdminError where there is no such one."""
    chosen: list[TopicPartition] = []
    for text in texts:
        topic, colon, indexes = text.partition(":")
        require_topic(cluster, topic)
        existing = sorted(cluster.known_topics([topic])[topic].partitions)
        if not colon:
            chosen += [TopicPartition(topic, index) for index in existing]
            continue
        for index in indexes.split(","):
            if not index.strip().isdigit() or int(index) not in existing:
                raise AdminError(f"topic '{topic}' has no partition '{index}' (it has {len(existing)})")
            chosen.append(TopicPartition(topic, int(index)))
    return chosen


def create_topics(
    cluster: ClusterClient,
    names: Collection[str],
    *,
    partitions: int | None = None,
    replication_factor: int | None = None,
    settings: Mapping[str, str] | None = None,
    only_try: bool = False,
) -> dict[str, ApiError | None]:
    """Make topics that are alike; an error or None for each. With `only_try` nothing is made."""
    request = CreateTopicsRequest(
        topics=[
            CreateTopicsRequest.CreatableTopic(
                name=name,
                num_partitions=partitions or _BY_BROKER,
                replication_factor=replication_factor or _BY_BROKER,
                configs=[
                    CreateTopicsRequest.CreatableTopicConfig(name=key, value=value)
                    for key, value in (settings or {}).items()
                ],
            )
            for name in dict.fromkeys(names)
        ],
        timeout_ms=_TIMEOUT_MS,
        validate_only=only_try,
    )

    def read(response: CreateTopicsResponse) -> dict[str, ApiError | None]:
        return _answers(names, ((each.name, each.error_code, each.error_message) for each in response.topics))

    return cluster.ask_any_broker("new topics", request, read)


def delete_topics(cluster: ClusterClient, names: Collection[str]) -> dict[str, ApiError | None]:
    """Delete topics and everything in them; an error or None for each."""
    request = DeleteTopicsRequest(topic_names=list(dict.fromkeys(names)), timeout_ms=_TIMEOUT_MS)

    def read(response: DeleteTopicsResponse) -> dict[str, ApiError | None]:
        return _answers(names, ((each.name or "", each.error_code, each.error_message) for each in response.responses))

    return cluster.ask_any_broker("the deletion of topics", request, read, at_most=_LAST_DELETION_BY_NAME)


def add_partitions(cluster: ClusterClient, topic: str, count: int) -> None:
    """Have a topic grow to `count` partitions; ApiError where that is not possible."""
    cls = CreatePartitionsRequest
    request = cls(topics=[cls.CreatePartitionsTopic(name=topic, count=count, assignments=None)], timeout_ms=_TIMEOUT_MS)

    def read(response: CreatePartitionsResponse) -> None:
        for each in response.results:
            raise_for(each.error_code, each.error_message)

    cluster.ask_any_broker(f"new partitions of topic '{topic}'", request, read)


def delete_records(cluster: ClusterClient, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Delete the records before an offset (-1: all there are), per partition; where each begins now."""
    cls = DeleteRecordsRequest

    def build(part: Mapping[TopicPartition, int]) -> DeleteRecordsRequest:
        topics = [
            cls.DeleteRecordsTopic(
                name=name,
                partitions=[
                    cls.DeleteRecordsPartition(partition_index=index, offset=part[TopicPartition(name, index)])
                    for index in indexes
                ],
            )
            for name, indexes in by_topic(part).items()
        ]
        return cls(topics=topics, timeout_ms=_TIMEOUT_MS)

    def read(response: DeleteRecordsResponse) -> Iterator[Outcome[int]]:
        for topic in response.topics:
            for each in topic.partitions:
                error = ApiError(known_code(each.error_code)) if each.error_code else None
                yield Outcome(TopicPartition(topic.name, each.partition_index), each.low_watermark, error)

    return cluster.ask_leaders("deletion of records of", before, build, read)


def existing(cluster: ClusterClient, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
    """Those that there are: a group may have read a topic that was deleted since."""
    wanted = list(partitions)
    topics = cluster.topics({each.topic for each in wanted})
    return [each for each in wanted if each.topic in topics and each.partition in topics[each.topic].partitions]


def offset_bounds(
    cluster: ClusterClient, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, tuple[int, int]]:
    """The first offset and the one after the last, per partition."""
    first = cluster.list_offsets(dict.fromkeys(partitions, EARLIEST))
    last = cluster.list_offsets(dict.fromkeys(partitions, LATEST))
    return {each: (first[each] or 0, last[each] or 0) for each in partitions}


def _answers(names: Iterable[str], told: Iterable[tuple[str, int, str | None]]) -> dict[str, ApiError | None]:
    found = {name: ApiError(known_code(code), text or "") if code else None for name, code, text in told}
    # What was not answered was not done.
    return {name: found.get(name, ApiError(ErrorCode.UNKNOWN_SERVER_ERROR, "no answer")) for name in names}
