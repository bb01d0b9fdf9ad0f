"""The replicas that this broker holds, kept equal to the cluster image.

The image says which partitions exist, who holds them and who leads; this module makes and removes replicas, tells each
its role, and gives their logs the settings of their topics. Lookups are by the name of a topic or by the 16 bytes of
its id, because that is how requests name it. Not here: fetching from leaders (`follower`) and asking for another ISR
(`proposals`), both of which are told here whom they concern.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from millrace.cluster.elections import Placement, may_be_in_sync
from millrace.cluster.image import ClusterImage, TopicImage
from millrace.config import LONG_MAX, BrokerConfig, TopicConfig, topic_config
from millrace.errors import ApiError, CorruptLogError, ErrorCode, LostLogError, MillraceError, StorageError
from millrace.metadata.deltas import (
    BrokerFenced,
    BrokerRegistered,
    ChangeSet,
    ConfigChanged,
    PartitionChanged,
    PartitionsAdded,
    PartitionState,
    ResourceType,
    TopicCreated,
    TopicDeleted,
)
from millrace.model import (
    FAILED_DIRECTORY,
    LOST_DIRECTORY,
    NO_BROKER,
    NO_EPOCH,
    STATE_TOPICS,
    UNASSIGNED_DIRECTORY,
    TopicPartition,
)
from millrace.records.batch import TimestampType
from millrace.replication.contention import Contention
from millrace.replication.counting import ReplicaCounts
from millrace.replication.gathering import Gathering
from millrace.replication.partition import Partition
from millrace.replication.throttle import ReplicationQuota, is_throttled
from millrace.replication.watermark import Watermark
from millrace.storage.log import Log
from millrace.storage.settings import FlushMode, LogConfig

if TYPE_CHECKING:
    from millrace.clock import Clock
    from millrace.storage.directory import LogDirectory
    from millrace.storage.logdirs import LogDirs

logger = logging.getLogger(__name__)

TopicKey = str | bytes
PartitionsListener = Callable[[str, "list[Partition]"], None]

DEFAULT_FLUSH_INTERVAL_MS: Final = 1000
"""How long `flush.mode=interval` waits where flush.ms does not say."""
COMPACT_STATE_AT_BYTES: Final = 512 * 1024
"""A coordinator reads its partitions, perhaps fifty, before it answers: of each, little more than this and its keys."""

_LEADER_RATE: Final = "leader.replication.throttled.rate"
_FOLLOWER_RATE: Final = "follower.replication.throttled.rate"

_NOWHERE: Final = frozenset({LOST_DIRECTORY, FAILED_DIRECTORY})

_UNKNOWN: Final = {
    str: (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no such topic or partition"),
    bytes: (ErrorCode.UNKNOWN_TOPIC_ID, "no topic has this id"),
}


class Followed(Protocol):
    """Who fetches for this broker's followers."""

    def assign(self, partition: Partition) -> None:
        """Follow the leader that the partition's state names; called again whenever that changes."""

    def forget(self, partition: Partition) -> None:
        """Do not fetch for it any more."""

    def brokers_changed(self, image: ClusterImage) -> None:
        """Brokers came, went or have other addresses."""


class _NobodyToFollow:
    """For a broker alone."""

    def assign(self, partition: Partition) -> None:
        """Nothing."""

    def forget(self, partition: Partition) -> None:
        """Nothing."""

    def brokers_changed(self, image: ClusterImage) -> None:
        """Nothing."""


class Replicas:
    """All replicas of this broker. Owner: the event loop; changed only by `apply`."""

    def __init__(self, *, broker_id: int, config: BrokerConfig, log_dirs: LogDirs, clock: Clock) -> None:
        self._broker_id = broker_id
        self._config = config
        self._log_dirs = log_dirs
        log_dirs.on_moved = self._log_moved
        log_dirs.moves.bytes_per_s = lambda: config.get_int("replica.alter.log.dirs.io.max.bytes.per.second")
        self._clock = clock
        self._topics: dict[TopicKey, list[Partition | None]] = {}
        """By name and by id, the same list: a partition's place is its index, None where another broker leads it."""
        self._names: dict[bytes, str] = {}
        self._held: dict[TopicPartition, Partition] = {}
        self._image = ClusterImage()
        self._leader_quota = ReplicationQuota(config.get_int(_LEADER_RATE), clock)
        self._follower_quota = ReplicationQuota(config.get_int(_FOLLOWER_RATE), clock)
        self._contention = Contention()
        self._gathering: dict[int, Gathering] = {}
        self.counts = ReplicaCounts()
        """Of all replicas, and of those that are gone."""
        self.closing = False
        self.followed: Followed = _NobodyToFollow()
        self.wants_isr: Callable[[Partition], object] | None = None
        """Given to every partition: called when its leader wants another ISR."""
        self.on_led: list[PartitionsListener] = []
        """Partitions that this broker leads from now on, in a new leader epoch."""
        self.on_unled: list[PartitionsListener] = []
        """Partitions that this broker led until now."""
        self.on_deleted: list[Callable[[str, uuid.UUID], None]] = []
        self.on_misplaced: Callable[[], object] = lambda: None
        """Called when a replica may lie elsewhere than the image says: see `misplaced`."""

    def __repr__(self) -> str:
        return f"Replicas({len(self)} partitions)"

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Partition]:
        return iter(tuple(self._held.values()))

    # --- lookups ------------------------------------------------------------------------------------------------------

    def find(self, key: TopicKey, index: int) -> Partition:
        """The led partition a request means; raises what the client must be told where there is none."""
        partition = self._find(key, index)
        if partition is None:
            raise ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "another broker leads this partition")
        return partition

    def find_readable(self, key: TopicKey, index: int) -> Partition:
        """The same, or a follower: what a consumer may read from."""
        partition = self._find(key, index) or self._held.get(TopicPartition(self.name_of(key), index))
        if partition is None:
            raise ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "this broker has no replica of this partition")
        return partition

    def _find(self, key: TopicKey, index: int) -> Partition | None:
        partitions = self._topics.get(key)
        if partitions is None:
            code, text = _UNKNOWN[type(key)]
            raise ApiError(code, text)
        if not 0 <= index < len(partitions):
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"partition {index} does not exist")
        return partitions[index]

    def name_of(self, key: TopicKey) -> str:
        """The name of the topic that a request means; empty for an id that is not known."""
        return key if isinstance(key, str) else self._names.get(key, "")

    def led(self, key: TopicKey, index: int) -> Partition | None:
        """The partition, if this broker leads it."""
        partitions = self._topics.get(key)
        return partitions[index] if partitions and 0 <= index < len(partitions) else None

    def gathering_for(self, broker_id: int) -> Gathering:
        """How much the answers to a follower should bring, of all partitions that it has from here."""
        found = self._gathering.get(broker_id)
        if found is None:
            found = self._gathering[broker_id] = Gathering(self._contention)
        return found

    def held(self, topic: str, index: int) -> Partition | None:
        """The replica, leader or follower, if this broker has one."""
        return self._held.get(TopicPartition(topic, index))

    def leader_of(self, key: TopicKey, index: int) -> tuple[int, int] | None:
        """Who leads a partition, and in which epoch, as far as the image knows: a hint for a client that came here."""
        topic = self._image.topic(key) if isinstance(key, str) else self._image.topics_by_id.get(uuid.UUID(bytes=key))
        if topic is None or not 0 <= index < len(topic.partitions):
            return None
        state = topic.partitions[index]
        return (state.leader, state.leader_epoch) if self._image.is_live(state.leader) else None

    def watermarks(self, places: Iterable[tuple[TopicKey, int]]) -> list[Watermark]:
        """The high watermarks of those places that exist, for a long poll to watch."""
        marks = []
        for key, index in places:
            partitions = self._topics.get(key)
            if partitions is None or not 0 <= index < len(partitions):
                continue
            partition = partitions[index] or self._held.get(TopicPartition(self.name_of(key), index))
            if partition is not None:
                marks.append(partition.high_watermark)
        return marks

    def high_watermarks(self) -> dict[TopicPartition, int]:
        """Of every replica, for the checkpoint that the next start takes them from."""
        return {place: partition.known_high_watermark for place, partition in self._held.items()}

    def directory_failed(self, directory: LogDirectory) -> None:
        """A disk is gone: whoever waits for its partitions is told. The controller hears of it (`reports`)."""
        lost = ApiError(ErrorCode.KAFKA_STORAGE_ERROR, str(directory.failure))
        for partition in self:
            if TopicPartition(partition.topic, partition.index) in directory.logs:
                partition.high_watermark.fail(lost)
                self.followed.forget(partition)

    def directory_space_changed(self, directory: LogDirectory) -> None:
        """A directory is full, or has space again: its replicas take no more records, or take them again."""
        for place in directory.logs:
            partition = self._held.get(place)
            if partition is not None:
                self._note_space(place, partition)
                if not partition.is_leader:
                    self._follow(place, partition)

    def _note_space(self, place: TopicPartition, partition: Partition) -> None:
        partition.is_full = place.topic not in STATE_TOPICS and self._log_dirs.is_full(place)

    def misplaced(self) -> list[Placement]:
        """The replicas that do not lie where the image says: moved, damaged, or gone."""
        found = []
        for place, partition in self._held.items():
            state = partition.state
            known = state.directory_of(self._broker_id) if self._broker_id in state.replicas else LOST_DIRECTORY
            if known in _NOWHERE:
                continue
            actual = self._log_dirs.whereabouts(place, partition.topic_id)
            if actual is None or actual == known:
                continue
            # One that nobody counts on begins anew as soon as it has a leader (`_open_log`).
            if actual not in _NOWHERE or self._is_counted_on(state):
                found.append(Placement(partition.topic_id, partition.index, actual))
        return found

    def _is_counted_on(self, state: PartitionState) -> bool:
        return self._broker_id in state.isr or self._broker_id in state.elr

    def log_end(self, topic_id: uuid.UUID, index: int) -> tuple[int, int, int]:
        """The epoch of the last record of a replica, its log's end, and the leader epoch that it knows of.

        ApiError where this broker has no such replica, or its log is of no use.
        """
        topic = self._image.topics_by_id.get(topic_id)
        place = None if topic is None else TopicPartition(topic.name, index)
        partition = None if place is None else self._held.get(place)
        if partition is None or place is None:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "this broker has no replica of this partition")
        log = self._log_dirs.get(place)
        if log is None:
            if self._log_dirs.whereabouts(place, topic_id) is None and self._is_here(partition.state):
                return NO_EPOCH, 0, partition.leader_epoch
            raise ApiError(ErrorCode.KAFKA_STORAGE_ERROR, f"the log of {place} is gone")
        if self._log_dirs.topic_id(place) not in (None, topic_id):  # of an earlier topic of that name
            return NO_EPOCH, 0, partition.leader_epoch
        if self._log_dirs.whereabouts(place, topic_id) not in self._log_dirs.online:
            raise ApiError(ErrorCode.KAFKA_STORAGE_ERROR, f"the log of {place} is offline")
        try:
            return log.latest_epoch, log.end_offset, partition.leader_epoch
        except StorageError as error:
            raise ApiError(ErrorCode.KAFKA_STORAGE_ERROR, str(error)) from None

    def _is_here(self, state: PartitionState) -> bool:
        """Whether this broker has the directory in which its replica lies."""
        directory = state.directory_of(self._broker_id)
        return directory == UNASSIGNED_DIRECTORY or directory in self._log_dirs.online

    def _log_moved(self, place: TopicPartition) -> None:
        self.on_misplaced()
        partition = self._held.get(place)
        if partition is not None:
            try:
                partition.reopen_log()
            except StorageError as error:
                logger.error("the log of %s cannot be opened where it lies now: %s", place, error)  # noqa: TRY400

    def begin_closing(self) -> None:
        """Let every long poll answer with what there is."""
        self.closing = True
        for partition in self:
            partition.high_watermark.notify()

    # --- following the image ------------------------------------------------------------------------------------------

    def load(self, image: ClusterImage) -> None:
        """Take over everything the image holds; the logs stay closed."""
        self._image = image
        self._take_rates()
        self.followed.brokers_changed(image)
        self._log_dirs.choose_between_twins(self._assigned_directory)
        for topic in image.topics.values():
            self._take(topic, range(len(topic.partitions)))

        strays = [place for place in self._log_dirs.logs() if place not in self._held]
        if strays:
            logger.warning(
                "%d logs belong to no topic of this broker and are left alone, among them %s", len(strays), strays[0]
            )

    def apply(self, old: ClusterImage, new: ClusterImage, changes: ChangeSet) -> None:
        """Follow one delta."""
        self._image = new
        touched: dict[uuid.UUID, set[int]] = {}
        for change in changes:
            if isinstance(change, TopicDeleted):
                with _apart(f"the topic {change.topic_id} that is deleted"):
                    self._remove(old.topics_by_id.get(change.topic_id))
            elif isinstance(change, TopicCreated):
                touched[change.topic_id] = set(range(len(change.partitions)))
            elif isinstance(change, PartitionsAdded):
                count = len(new.topics_by_id[change.topic_id].partitions) if change.topic_id in new.topics_by_id else 0
                touched.setdefault(change.topic_id, set()).update(range(count - len(change.partitions), count))
            elif isinstance(change, PartitionChanged):
                touched.setdefault(change.topic_id, set()).add(change.index)
            elif isinstance(change, ConfigChanged):
                with _apart(f"the settings of {change.name or 'all brokers'}"):
                    self._reconfigure(change)
        if any(isinstance(change, BrokerRegistered | BrokerFenced) for change in changes):
            self.followed.brokers_changed(new)
            for partition in self:
                with _apart(partition):
                    partition.reconsider()
        for topic_id, indexes in touched.items():
            topic = new.topics_by_id.get(topic_id)
            if topic is not None:  # created and deleted again within one delta
                self._take(topic, sorted(indexes))

    def _take(self, topic: TopicImage, indexes: Iterable[int]) -> None:
        """Give these partitions of a topic the roles that the image says."""
        slots = self._topics.setdefault(topic.name, [])
        self._topics[topic.topic_id.bytes] = slots
        self._names[topic.topic_id.bytes] = topic.name
        slots.extend([None] * (len(topic.partitions) - len(slots)))
        led: list[Partition] = []
        unled: list[Partition] = []
        for index in indexes:
            state = topic.partitions[index]
            before = slots[index]
            epoch_before = None if before is None else before.leader_epoch
            with _apart(f"{topic.name}-{index}"):
                self._take_one(topic, index, state)
            held = self._held.get(TopicPartition(topic.name, index))
            partition = slots[index] = held if held is not None and held.is_leader else None
            if before is not None and partition is None:
                unled.append(before)
            elif partition is not None and partition.leader_epoch != epoch_before:
                led.append(partition)
        for listeners, partitions in ((self.on_unled, unled), (self.on_led, led)):
            if partitions:
                for listener in listeners:
                    with _apart(topic.name):
                        listener(topic.name, partitions)

    def _take_one(self, topic: TopicImage, index: int, state: PartitionState) -> None:
        """Give the replica its new role."""
        place = TopicPartition(topic.name, index)
        partition = self._held.get(place)
        if self._broker_id not in state.replicas:
            if partition is not None:
                self._drop(partition, ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"{place} was moved to other brokers"))
            return
        if partition is None:
            partition = self._held[place] = self._make(topic, index)
        self._compare_place(place, partition, state)
        self._note_space(place, partition)
        if state.leader == self._broker_id:
            self.followed.forget(partition)
            partition.lead(state)
            return
        partition.follow(state)
        self._follow(place, partition)

    def _follow(self, place: TopicPartition, partition: Partition) -> None:
        """Fetch for a follower, if it can take what comes.

        One whose disk is full goes on while it is in the ISR: commits wait for it, and what its leader has taken still
        finds room in the reserve.
        """
        has_room = not partition.is_full or self._broker_id in partition.state.isr
        if not has_room or not self._is_here(partition.state):
            self.followed.forget(partition)
            return
        if partition.open_log is not None and self._is_hopeless(place, partition.open_log):
            partition.forget_log()
        self.followed.assign(partition)

    def _assigned_directory(self, place: TopicPartition) -> str | None:
        """Where the image says that this broker's replica lies; None where it has none."""
        topic = self._image.topic(place.topic)
        if topic is None or place.partition >= len(topic.partitions):
            return None
        state = topic.partitions[place.partition]
        return state.directory_of(self._broker_id) if self._broker_id in state.replicas else None

    def _compare_place(self, place: TopicPartition, partition: Partition, state: PartitionState) -> None:
        """Have the controller told where a replica lies, where the image says something else."""
        actual = self._log_dirs.whereabouts(place, partition.topic_id)
        if actual is None:
            return
        if actual == state.directory_of(self._broker_id):
            self._log_dirs.give_up_missing(place)
        else:
            self.on_misplaced()

    def _make(self, topic: TopicImage, index: int) -> Partition:
        place = TopicPartition(topic.name, index)
        partition = Partition(
            topic.name,
            index,
            topic.topic_id,
            open_log=lambda: self._open_log(place, topic.topic_id),
            clock=self._clock,
            broker_id=self._broker_id,
            high_watermark=self._log_dirs.high_watermarks.get(place, 0),
            max_lag_s=self._config.get_int("replica.lag.time.max.ms") / 1000,
            counts=self.counts,
        )
        config = self._topic_config(topic.name)
        partition.min_insync_replicas = config.min_insync_replicas
        self._limit(partition, config)
        partition.wants_isr = self.wants_isr
        partition.write_failed = lambda error: self._log_dirs.note_failed_write(place, error)
        partition.is_eligible = lambda broker_id, broker_epoch: (
            broker_id in partition.state.replicas
            and may_be_in_sync(self._image, topic.name, partition.state, broker_id, broker_epoch)
        )
        return partition

    def _open_log(self, place: TopicPartition, topic_id: uuid.UUID) -> Log:
        """The partition's log, new or as it was; one that was made for an earlier topic of that name is set aside.

        A follower that nobody counts on, and whose log is damaged or gone, begins anew with what its leader has. A
        leader never does: what is damaged there may be the only copy.
        """
        config = self._log_config(place.topic)
        partition = self._held.get(place)
        state = None if partition is None else partition.state
        if state is not None and not self._is_here(state):
            raise StorageError(f"the directory of {place} is not there")
        existing = self._log_dirs.get(place)
        if existing is not None:
            found_id = self._log_dirs.topic_id(place)
            if found_id in (None, topic_id) and not self._is_hopeless(place, existing):
                if found_id is None:
                    self._log_dirs.set_topic_id(place, topic_id)
                existing.apply_config(config)
                return existing
            kept = self._log_dirs.set_aside(place)
            if found_id in (None, topic_id):
                logger.error("the log of %s is damaged, kept as %s, and fetched again from its leader", place, kept)
            else:
                logger.warning("%s is a new topic; the log of an earlier one of that name is kept as %s", place, kept)
        elif self._log_dirs.is_missing(place, topic_id):
            if state is None or self._is_counted_on(state) or state.leader in (NO_BROKER, self._broker_id):
                raise LostLogError(f"the log of {place} is gone")
            logger.error("the log of %s is gone, and is fetched again from its leader", place)
            self._log_dirs.give_up_missing(place)
        directory = UNASSIGNED_DIRECTORY if state is None else state.directory_of(self._broker_id)
        log = self._log_dirs.create_log(place, topic_id, config, directory)
        if partition is not None:
            partition.forget_log()  # what is remembered of a high watermark was of another log
            self._note_space(place, partition)
        return log

    def _is_hopeless(self, place: TopicPartition, log: Log) -> bool:
        partition = self._held.get(place)
        if not isinstance(log.failure, CorruptLogError) or partition is None or partition.is_leader:
            return False
        return partition.state.leader != NO_BROKER and not self._is_counted_on(partition.state)

    def _remove(self, topic: TopicImage | None) -> None:
        if topic is None:  # created and deleted within one delta
            return
        slots = self._topics.pop(topic.name, [])
        self._topics.pop(topic.topic_id.bytes, None)
        self._names.pop(topic.topic_id.bytes, None)
        led = [partition for partition in slots if partition is not None]
        gone = ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {topic.name} was deleted")
        for index in range(len(topic.partitions)):
            partition = self._held.get(TopicPartition(topic.name, index))
            if partition is not None:
                self._drop(partition, gone)
        if led:
            for listener in self.on_unled:
                listener(topic.name, led)
        for deleted in self.on_deleted:
            deleted(topic.name, topic.topic_id)

    def _drop(self, partition: Partition, reason: ApiError) -> None:
        place = TopicPartition(partition.topic, partition.index)
        if self._held.pop(place, None) is not None:
            self.counts.retire(partition.bytes_in, partition.records_in, partition.bytes_out, partition.records_out)
        self._log_dirs.high_watermarks.pop(place, None)
        self.followed.forget(partition)
        partition.close(reason)
        try:
            self._log_dirs.delete_log(place, self._config.get_int("log.segment.delete.delay.ms"))
        except StorageError as error:
            logger.error("the log of %s could not be removed: %s", place, error)  # noqa: TRY400

    # --- settings -----------------------------------------------------------------------------------------------------

    def _reconfigure(self, change: ConfigChanged) -> None:
        """Give open logs their new settings; closed ones read them when they open."""
        if change.resource_type is ResourceType.TOPIC:
            names = [change.name]
        elif change.resource_type is ResourceType.BROKER:
            names = [key for key in self._topics if isinstance(key, str)]
            self._take_rates()
        else:
            return
        for name in names:
            places = (TopicPartition(name, index) for index in range(len(self._topics.get(name, ()))))
            partitions = [partition for place in places if (partition := self._held.get(place)) is not None]
            if not partitions:
                continue
            topic = self._topic_config(name)
            config, min_isr = self._log_config(name), topic.min_insync_replicas
            for partition in partitions:
                with _apart(partition):
                    self._limit(partition, topic)
                    if partition.is_open:
                        partition.apply_config(config)
                    if partition.min_insync_replicas != min_isr:
                        partition.set_min_insync_replicas(min_isr)

    def _take_rates(self) -> None:
        self._leader_quota.set_rate(self._config.get_int(_LEADER_RATE))
        self._follower_quota.set_rate(self._config.get_int(_FOLLOWER_RATE))

    def _limit(self, partition: Partition, config: TopicConfig) -> None:
        """Put a replica under this broker's quotas as far as its topic says so."""

        def quota(limit: ReplicationQuota, replicas: tuple[str, ...]) -> ReplicationQuota | None:
            named = is_throttled(replicas, partition.index, self._broker_id)
            return limit if named and limit.rate_bytes_per_s < LONG_MAX else None

        partition.leader_quota = quota(self._leader_quota, config.leader_replication_throttled_replicas)
        partition.follower_quota = quota(self._follower_quota, config.follower_replication_throttled_replicas)

    def _topic_config(self, topic: str) -> TopicConfig:
        return topic_config(self._image.topic_overrides(topic), self._config)

    def _log_config(self, topic: str) -> LogConfig:
        config = self._topic_config(topic)
        expiration_ms = self._config.get_int("producer.id.expiration.ms")
        return log_config(config, internal=topic in STATE_TOPICS, producer_expiration_ms=expiration_ms)


@contextmanager
def _apart(what: object) -> Iterator[None]:
    """One replica that raises while a delta is applied does not keep the rest of the delta from the others."""
    try:
        yield
    except MillraceError as error:
        logger.error("the new state of the cluster could not be applied to %s: %s", what, error)  # noqa: TRY400
    except Exception:
        logger.exception("the new state of the cluster could not be applied to %s", what)


def log_config(config: TopicConfig, *, internal: bool, producer_expiration_ms: int) -> LogConfig:
    """What storage needs to know of a topic's settings."""
    return LogConfig(
        segment_bytes=config.segment_bytes,
        segment_ms=config.segment_ms,
        segment_jitter_ms=config.segment_jitter_ms,
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
        min_cleanable_ratio=config.min_cleanable_dirty_ratio,
        min_compaction_lag_ms=config.min_compaction_lag_ms,
        max_compaction_lag_ms=config.max_compaction_lag_ms,
        delete_retention_ms=config.delete_retention_ms,
        compact_at_bytes=COMPACT_STATE_AT_BYTES if internal else None,
        flush_mode=_flush_mode(config),
        flush_interval_ms=config.flush_ms if config.flush_ms < LONG_MAX else DEFAULT_FLUSH_INTERVAL_MS,
        validate_records=config.validate_records,
        producer_expiration_ms=producer_expiration_ms,
        compression_type=config.compression_type,
        compression_level=config.compression_level,
        file_delete_delay_ms=config.file_delete_delay_ms,
    )


def _flush_mode(config: TopicConfig) -> FlushMode:
    """The mode that keeps every promise of flush.mode, flush.messages and flush.ms."""
    mode = FlushMode(config.flush_mode)
    if config.flushes_before_promise:
        return FlushMode.GROUP
    if mode is FlushMode.OS and config.flush_ms < LONG_MAX:
        return FlushMode.INTERVAL
    return mode
