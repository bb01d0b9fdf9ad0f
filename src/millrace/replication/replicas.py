"""The partitions that this broker holds, kept equal to the cluster image.

The image says which partitions exist; this module makes and removes them, and gives their logs the settings of their
topics. Lookups are by the name of a topic or by the 16 bytes of its id, because that is how requests name it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from millrace.cluster.image import ClusterImage, TopicImage
from millrace.config import LONG_MAX, BrokerConfig, TopicConfig, topic_config
from millrace.errors import ApiError, ErrorCode, StorageError
from millrace.metadata.deltas import ChangeSet, ConfigChanged, PartitionsAdded, ResourceType, TopicCreated, TopicDeleted
from millrace.model import INTERNAL_TOPICS, TopicPartition
from millrace.records.batch import TimestampType
from millrace.replication.partition import Partition
from millrace.replication.watermark import Watermark
from millrace.storage.log import Log
from millrace.storage.settings import FlushMode, LogConfig

if TYPE_CHECKING:
    from millrace.clock import Clock
    from millrace.storage.logdirs import LogDirectory, LogDirs

logger = logging.getLogger(__name__)

TopicKey = str | bytes
PartitionsListener = Callable[[str, "list[Partition]"], None]

DEFAULT_FLUSH_INTERVAL_MS: Final = 1000
"""How long `flush.mode=interval` waits where flush.ms does not say."""

_UNKNOWN: Final = {
    str: (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no such topic or partition"),
    bytes: (ErrorCode.UNKNOWN_TOPIC_ID, "no topic has this id"),
}


class Replicas:
    """All partitions of this broker. Owner: the event loop; changed only by `apply`."""

    def __init__(self, *, broker_id: int, config: BrokerConfig, log_dirs: LogDirs, clock: Clock) -> None:
        self._broker_id = broker_id
        self._config = config
        self._log_dirs = log_dirs
        self._clock = clock
        self._topics: dict[TopicKey, list[Partition | None]] = {}
        """By name and by id, the same list: a partition's place is its index, None where another broker holds it."""
        self._image = ClusterImage()
        self.closing = False
        self.on_added: list[PartitionsListener] = []
        self.on_removed: list[PartitionsListener] = []

    def __repr__(self) -> str:
        return f"Replicas({len(self)} partitions)"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Partition]:
        for key, partitions in tuple(self._topics.items()):
            if isinstance(key, str):
                yield from (partition for partition in partitions if partition is not None)

    # --------------------------------------------------------------------------------------------------------- lookups

    def find(self, key: TopicKey, index: int) -> Partition:
        """The partition a request means; raises what the client must be told where there is none."""
        partitions = self._topics.get(key)
        if partitions is None:
            code, text = _UNKNOWN[type(key)]
            raise ApiError(code, text)
        if not 0 <= index < len(partitions):
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"partition {index} does not exist")
        partition = partitions[index]
        if partition is None:
            raise ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "another broker leads this partition")
        return partition

    def get(self, topic: str, index: int) -> Partition | None:
        partitions = self._topics.get(topic)
        return partitions[index] if partitions and 0 <= index < len(partitions) else None

    def watermarks(self, places: Iterable[tuple[TopicKey, int]]) -> list[Watermark]:
        """The high watermarks of those places that exist, for a long poll to watch."""
        marks = []
        for key, index in places:
            partitions = self._topics.get(key)
            if partitions and 0 <= index < len(partitions) and (partition := partitions[index]) is not None:
                marks.append(partition.high_watermark)
        return marks

    def directory_failed(self, directory: LogDirectory) -> None:
        """A disk is gone: whoever waits for its partitions is told."""
        lost = ApiError(ErrorCode.KAFKA_STORAGE_ERROR, str(directory.failure))
        for partition in self:
            if TopicPartition(partition.topic, partition.index) in directory.logs:
                partition.high_watermark.fail(lost)

    def begin_closing(self) -> None:
        """Let every long poll answer with what there is."""
        self.closing = True
        for partition in self:
            partition.high_watermark.notify()

    # -------------------------------------------------------------------------------------------- following the image

    def load(self, image: ClusterImage) -> None:
        """Take over everything the image holds; the logs stay closed."""
        self._image = image
        for topic in image.topics.values():
            self._add(topic)

        known = {TopicPartition(partition.topic, partition.index) for partition in self}
        strays = [place for place in self._log_dirs.logs() if place not in known]
        if strays:
            logger.warning(
                "%d logs belong to no topic of this cluster and are left alone, among them %s", len(strays), strays[0]
            )

    def apply(self, old: ClusterImage, new: ClusterImage, changes: ChangeSet) -> None:
        """Follow one delta."""
        self._image = new
        for change in changes:
            if isinstance(change, TopicDeleted):
                self._remove(old.topics_by_id[change.topic_id])
            elif isinstance(change, TopicCreated | PartitionsAdded):
                topic = new.topics_by_id.get(change.topic_id)
                if topic is not None:  # created and deleted again within one delta
                    self._add(topic)
            elif isinstance(change, ConfigChanged):
                self._reconfigure(change)

    def _add(self, topic: TopicImage) -> None:
        partitions = self._topics.setdefault(topic.name, [])
        self._topics[topic.topic_id.bytes] = partitions
        added = []
        for index in range(len(partitions), len(topic.partitions)):
            state = topic.partitions[index]
            partition = None
            if state.leader == self._broker_id:
                partition = self._make(topic, index, state.leader_epoch)
                added.append(partition)
            partitions.append(partition)
        if added:
            for listener in self.on_added:
                listener(topic.name, added)

    def _make(self, topic: TopicImage, index: int, leader_epoch: int) -> Partition:
        place = TopicPartition(topic.name, index)
        return Partition(
            topic.name,
            index,
            topic.topic_id,
            leader_epoch=leader_epoch,
            open_log=lambda: self._open_log(place, topic.topic_id),
            clock=self._clock,
        )

    def _open_log(self, place: TopicPartition, topic_id: uuid.UUID) -> Log:
        """The partition's log, new or as it was; one that was made for an earlier topic of that name is set aside."""
        config = self._log_config(place.topic)
        existing = self._log_dirs.get(place)
        if existing is not None:
            found_id = self._log_dirs.topic_id(place)
            if found_id in (None, topic_id):
                if found_id is None:
                    self._log_dirs.set_topic_id(place, topic_id)
                existing.apply_config(config)
                return existing
            kept = self._log_dirs.set_aside(place)
            logger.warning("%s is a new topic; the log of an earlier one of that name is kept as %s", place, kept)
        return self._log_dirs.create_log(place, topic_id, config)

    def _remove(self, topic: TopicImage) -> None:
        partitions = self._topics.pop(topic.name, [])
        self._topics.pop(topic.topic_id.bytes, None)
        removed = [partition for partition in partitions if partition is not None]
        gone = ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {topic.name} was deleted")
        for partition in removed:
            partition.close(gone)
            try:
                self._log_dirs.delete_log(TopicPartition(topic.name, partition.index))
            except StorageError as error:
                logger.error("the log of %s-%d could not be removed: %s", topic.name, partition.index, error)  # noqa: TRY400
        for listener in self.on_removed:
            listener(topic.name, removed)

    # ------------------------------------------------------------------------------------------------------- settings

    def _reconfigure(self, change: ConfigChanged) -> None:
        """Give open logs their new settings; closed ones read them when they open."""
        if change.resource_type is ResourceType.TOPIC:
            names = [change.name]
        elif change.resource_type is ResourceType.BROKER:
            names = [key for key in self._topics if isinstance(key, str)]
        else:
            return
        for name in names:
            partitions = [item for item in self._topics.get(name, ()) if item is not None and item.is_open]
            if partitions:
                config = self._log_config(name)
                for partition in partitions:
                    partition.log.apply_config(config)

    def _log_config(self, topic: str) -> LogConfig:
        config = topic_config(self._image.topic_overrides(topic), self._config)
        expiration_ms = self._config.get_int("producer.id.expiration.ms")
        return log_config(config, internal=topic in INTERNAL_TOPICS, producer_expiration_ms=expiration_ms)


def log_config(config: TopicConfig, *, internal: bool, producer_expiration_ms: int) -> LogConfig:
    """What storage needs to know of a topic's settings. Internal state is always flushed before it is acknowledged."""
    return LogConfig(
        segment_bytes=config.segment_bytes,
        segment_ms=config.segment_ms,
        segment_index_bytes=config.segment_index_bytes,
        index_interval_bytes=config.index_interval_bytes,
        retention_ms=config.retention_ms,
        retention_bytes=config.retention_bytes,
        max_message_bytes=config.max_message_bytes,
        timestamp_type=TimestampType.LOG_APPEND
        if config.message_timestamp_type == "LogAppendTime"
        else TimestampType.CREATE,
        timestamp_before_max_ms=config.message_timestamp_before_max_ms,
        timestamp_after_max_ms=config.message_timestamp_after_max_ms,
        compact=config.compact,
        delete=config.delete,
        flush_mode=FlushMode.GROUP if internal else _flush_mode(config),
        flush_interval_ms=config.flush_ms if config.flush_ms < LONG_MAX else DEFAULT_FLUSH_INTERVAL_MS,
        validate_records=config.validate_records,
        producer_expiration_ms=producer_expiration_ms,
        compression_type=config.compression_type,
        file_delete_delay_ms=config.file_delete_delay_ms,
    )


def _flush_mode(config: TopicConfig) -> FlushMode:
    """The mode that keeps every promise of flush.mode, flush.messages and flush.ms."""
    mode = FlushMode(config.flush_mode)
    if config.flush_messages < LONG_MAX:
        return FlushMode.GROUP
    if mode is FlushMode.OS and config.flush_ms < LONG_MAX:
        return FlushMode.INTERVAL
    return mode
