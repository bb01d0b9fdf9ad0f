"""What the cluster is: the fold of the metadata log, immutable.

`apply` makes a new image from an old one and a change-set; at delta N every broker has the same image. Not here:
deciding on changes (`planning`) and writing them (`controller`).

Invariants: an image never changes, so it may be kept and compared across awaits; topics by name and by id hold the same
objects; the configs of a topic go with it. A change that does not fit (a partition of a topic that is not there) means
that the log is damaged, and raises StorageError: no broker may go on with an image of its own.

A change costs the same with ten topics and with ten thousand: the big maps are split into buckets, and only the
buckets that a change touches are copied.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar

from millrace.errors import StorageError
from millrace.metadata.deltas import (
    NO_DIRECTORIES,
    AclsChanged,
    BrokerFenced,
    BrokerRegistered,
    BrokerUnregistered,
    Change,
    ChangeSet,
    ClusterCreated,
    ConfigChanged,
    ControllerChanged,
    Directories,
    DirectoriesChanged,
    Endpoint,
    PartitionChanged,
    PartitionsAdded,
    PartitionState,
    ProducerIdsAllocated,
    QuotaChanged,
    ResourceType,
    ScramChanged,
    TokenChanged,
    TokenRemoved,
    TopicCreated,
    TopicDeleted,
)
from millrace.model import FAILED_DIRECTORY, INTERNAL_TOPICS, LOST_DIRECTORY, STATE_TOPICS, UNASSIGNED_DIRECTORY
from millrace.security.acls import NO_ACLS, AclTable
from millrace.security.quotas import QuotaEntity
from millrace.security.scram import ScramCredential, ScramMechanism
from millrace.security.tokens import DelegationToken

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_BUCKETS: Final = 256


class PersistentMap(Mapping[K, V], Generic[K, V]):
    """An immutable mapping whose changed copies share what did not change."""

    __slots__ = ("_buckets", "_length")

    def __init__(self, items: Iterable[tuple[K, V]] = ()) -> None:
        nothing: dict[K, V] = {}  # shared by all slots that are empty, and never changed: whoever edits copies
        buckets = [nothing] * _BUCKETS
        for key, value in items:
            slot = hash(key) % _BUCKETS
            if buckets[slot] is nothing:
                buckets[slot] = {}
            buckets[slot][key] = value
        self._buckets: tuple[dict[K, V], ...] = tuple(buckets)
        self._length = sum(map(len, buckets))

    def __getitem__(self, key: K) -> V:
        return self._buckets[hash(key) % _BUCKETS][key]

    def __contains__(self, key: object) -> bool:
        return key in self._buckets[hash(key) % _BUCKETS]

    def __iter__(self) -> Iterator[K]:
        for bucket in self._buckets:
            yield from bucket

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"PersistentMap({dict(self)!r})"

    def edited(self, edits: Mapping[K, V | None]) -> PersistentMap[K, V]:
        """A copy with these values; None removes a key."""
        if not edits:
            return self
        buckets = list(self._buckets)
        copied: set[int] = set()
        length = self._length
        for key, value in edits.items():
            slot = hash(key) % _BUCKETS
            if slot not in copied:
                copied.add(slot)
                buckets[slot] = buckets[slot].copy()
            bucket = buckets[slot]
            length -= len(bucket)
            if value is None:
                bucket.pop(key, None)
            else:
                bucket[key] = value
            length += len(bucket)
        changed: PersistentMap[K, V] = PersistentMap.__new__(PersistentMap)
        changed._buckets = tuple(buckets)
        changed._length = length
        return changed


_NOWHERE: Final = frozenset({LOST_DIRECTORY, FAILED_DIRECTORY})


@dataclass(frozen=True, slots=True)
class BrokerImage:
    """A registered broker. A fenced one is known but counts as gone."""

    broker_id: int
    broker_epoch: int
    endpoints: tuple[Endpoint, ...]
    rack: str | None
    fenced: bool
    directories: Directories = NO_DIRECTORIES
    boot_id: str = ""

    def has_directory(self, directory: str) -> bool:
        """Whether what lies in `directory` is there, as far as the broker has said."""
        if directory in _NOWHERE:
            return False
        online = self.directories.online
        return not online or directory in online or directory == UNASSIGNED_DIRECTORY

    @property
    def is_full(self) -> bool:
        """Whether no directory has room for more records."""
        return bool(self.directories.full) and len(self.directories.full) == len(self.directories.online)

    def endpoint(self, listener: str) -> Endpoint | None:
        """Where clients of `listener` reach it, if it has that listener."""
        return next((endpoint for endpoint in self.endpoints if endpoint.listener == listener), None)


@dataclass(frozen=True, slots=True)
class TopicImage:
    """A topic and its partitions, by number."""

    name: str
    topic_id: uuid.UUID
    partitions: tuple[PartitionState, ...]

    @property
    def internal(self) -> bool:
        return self.name in INTERNAL_TOPICS

    @property
    def replication_factor(self) -> int:
        """How many replicas the partitions have; during a move, how many they will have."""
        state = self.partitions[0]
        return len(state.replicas) - len(state.removing)


@dataclass(frozen=True, slots=True)
class ClusterImage:
    """The cluster after delta `index`."""

    index: int = 0
    cluster_id: str = ""
    controller_id: int = -1
    controller_epoch: int = 0
    next_producer_id: int = 0
    brokers: Mapping[int, BrokerImage] = field(default_factory=dict)
    topics: PersistentMap[str, TopicImage] = field(default_factory=PersistentMap)
    topics_by_id: PersistentMap[uuid.UUID, TopicImage] = field(default_factory=PersistentMap)
    configs: PersistentMap[tuple[ResourceType, str], Mapping[str, str]] = field(default_factory=PersistentMap)
    names_by_metric_name: PersistentMap[str, str] = field(default_factory=PersistentMap)
    """Topics with '.' or '_' in their name, by that name with '_' for '.': two such names collide in metrics."""
    users: PersistentMap[tuple[str, ScramMechanism], ScramCredential] = field(default_factory=PersistentMap)
    """What is known of passwords, by user and mechanism."""
    acls: AclTable = NO_ACLS
    quotas: PersistentMap[QuotaEntity, Mapping[str, float]] = field(default_factory=PersistentMap)
    tokens: PersistentMap[str, DelegationToken] = field(default_factory=PersistentMap)

    def apply(self, changes: ChangeSet, index: int | None = None) -> ClusterImage:
        """The image after `changes`, which are delta `index` (the next one if not said)."""
        edit = _Edit(self)
        for change in changes:
            _APPLY[type(change)](edit, change)
        return edit.finish(self.index + 1 if index is None else index)

    def topic(self, name: str) -> TopicImage | None:
        return self.topics.get(name)

    def config(self, resource_type: ResourceType, name: str) -> Mapping[str, str]:
        """The settings given to one resource; empty where there are none."""
        return self.configs.get((resource_type, name), _NO_CONFIG)

    def topic_overrides(self, name: str) -> Mapping[str, str]:
        """The settings given to the topic itself."""
        return self.config(ResourceType.TOPIC, name)

    def partition(self, topic_id: uuid.UUID, index: int) -> PartitionState | None:
        """One partition, or None where there is no such topic or no such number in it."""
        topic = self.topics_by_id.get(topic_id)
        if topic is None or not 0 <= index < len(topic.partitions):
            return None
        return topic.partitions[index]

    def partitions(self) -> Iterator[tuple[TopicImage, int, PartitionState]]:
        """Every partition of every topic."""
        for topic in self.topics.values():
            for index, state in enumerate(topic.partitions):
                yield topic, index, state

    def led_by(self, broker_id: int) -> Iterator[tuple[TopicImage, int, PartitionState]]:
        """The partitions that a broker leads; a look at all of them, milliseconds for thousands."""
        return (item for item in self.partitions() if item[2].leader == broker_id)

    def in_sync_on(self, broker_id: int) -> Iterator[tuple[TopicImage, int, PartitionState]]:
        """The partitions that have a broker in their ISR."""
        return (item for item in self.partitions() if broker_id in item[2].isr)

    def held_by(self, broker_id: int) -> Iterator[tuple[TopicImage, int, PartitionState]]:
        """The partitions that have a replica on a broker."""
        return (item for item in self.partitions() if broker_id in item[2].replicas)

    @property
    def live_brokers(self) -> tuple[BrokerImage, ...]:
        """Every broker that is not fenced, by id."""
        return tuple(
            self.brokers[broker_id] for broker_id in sorted(self.brokers) if not self.brokers[broker_id].fenced
        )

    def is_live(self, broker_id: int) -> bool:
        broker = self.brokers.get(broker_id)
        return broker is not None and not broker.fenced

    def is_present(self, state: PartitionState, broker_id: int) -> bool:
        """Whether the replica of a broker is there: the broker lives, and has the directory in which it lies."""
        broker = self.brokers.get(broker_id)
        return broker is not None and not broker.fenced and broker.has_directory(state.directory_of(broker_id))

    def takes_records(self, topic: str, state: PartitionState, broker_id: int) -> bool:
        """Whether a replica that is there can grow: its directory is not full, or the topic may use the reserve."""
        full = self.brokers[broker_id].directories.full
        return not full or topic in STATE_TOPICS or state.directory_of(broker_id) not in full

    def as_changes(self) -> ChangeSet:
        """Changes that build this image from an empty one; what a snapshot holds."""
        changes: list[Change] = []
        if self.cluster_id:
            changes.append(ClusterCreated(self.cluster_id))
        if self.controller_epoch:
            changes.append(ControllerChanged(self.controller_id, self.controller_epoch))
        changes.extend(map(_registration, self.brokers.values()))
        changes.extend(TopicCreated(topic.name, topic.topic_id, topic.partitions) for topic in self.topics.values())
        changes.extend(
            ConfigChanged(kind, name, tuple(values.items())) for (kind, name), values in self.configs.items()
        )
        if self.next_producer_id:
            changes.append(ProducerIdsAllocated(-1, self.next_producer_id, 0))
        changes.extend(ScramChanged(*key, credential) for key, credential in self.users.items())
        if self.acls:
            changes.append(AclsChanged(added=tuple(self.acls)))
        changes.extend(QuotaChanged(entity, tuple(values.items())) for entity, values in self.quotas.items())
        changes.extend(map(TokenChanged, self.tokens.values()))
        return tuple(changes)

    def __repr__(self) -> str:
        return (
            f"ClusterImage({self.cluster_id or 'new'}, delta {self.index}, controller {self.controller_id}"
            f" epoch {self.controller_epoch}, {len(self.brokers)} brokers, {len(self.topics)} topics)"
        )


def changes_between(old: ClusterImage, new: ClusterImage) -> ChangeSet:
    """Changes that turn `old` into `new`: what happened, for a follower that missed how."""
    changes: list[Change] = []
    if old.cluster_id != new.cluster_id:
        changes.append(ClusterCreated(new.cluster_id))
    if (old.controller_id, old.controller_epoch) != (new.controller_id, new.controller_epoch):
        changes.append(ControllerChanged(new.controller_id, new.controller_epoch))
    changes.extend(BrokerUnregistered(broker_id) for broker_id in old.brokers if broker_id not in new.brokers)
    changes.extend(
        _registration(broker) for broker in new.brokers.values() if old.brokers.get(broker.broker_id) != broker
    )
    changes.extend(
        TopicDeleted(topic.name, topic.topic_id)
        for topic in old.topics.values()
        if topic.topic_id not in new.topics_by_id
    )
    for topic in new.topics.values():
        changes.extend(_topic_changes(old.topics_by_id.get(topic.topic_id), topic))
    for kind, name in {*old.configs, *new.configs}:
        # The settings of a deleted topic went with it, whatever has its name now.
        lost = kind is ResourceType.TOPIC and name in old.topics and _is_another(old.topics[name], new.topics.get(name))
        before = {} if lost else old.config(kind, name)
        after = new.config(kind, name)
        values = tuple((key, after.get(key)) for key in {*before, *after} if before.get(key) != after.get(key))
        if values:
            changes.append(ConfigChanged(kind, name, values))
    if old.next_producer_id != new.next_producer_id:
        changes.append(ProducerIdsAllocated(-1, new.next_producer_id, 0))
    changes.extend(_security_changes(old, new))
    return tuple(changes)


def _security_changes(old: ClusterImage, new: ClusterImage) -> Iterator[Change]:
    for key in {*old.users, *new.users}:
        if old.users.get(key) != (credential := new.users.get(key)):
            yield ScramChanged(*key, credential)
    if old.acls != new.acls:
        added, removed = (
            tuple(acl for acl in one if acl not in other) for one, other in ((new.acls, old.acls), (old.acls, new.acls))
        )
        yield AclsChanged(added, removed)
    for entity in {*old.quotas, *new.quotas}:
        before, after = old.quotas.get(entity, {}), new.quotas.get(entity, {})
        values = tuple((key, after.get(key)) for key in {*before, *after} if before.get(key) != after.get(key))
        if values:
            yield QuotaChanged(entity, values)
    for token_id in {*old.tokens, *new.tokens}:
        token = new.tokens.get(token_id)
        if token is None:
            yield TokenRemoved(token_id)
        elif old.tokens.get(token_id) != token:
            yield TokenChanged(token)


def _registration(broker: BrokerImage) -> BrokerRegistered:
    return BrokerRegistered(
        broker.broker_id,
        broker.broker_epoch,
        broker.endpoints,
        broker.rack,
        broker.fenced,
        broker.directories,
        broker.boot_id,
    )


def _is_another(old: TopicImage, new: TopicImage | None) -> bool:
    return new is None or new.topic_id != old.topic_id


def _topic_changes(old: TopicImage | None, new: TopicImage) -> Iterator[Change]:
    if old is None:
        yield TopicCreated(new.name, new.topic_id, new.partitions)
        return
    if old is new:
        return
    for index, (before, after) in enumerate(zip(old.partitions, new.partitions, strict=False)):
        if before != after:
            yield PartitionChanged(new.topic_id, index, after)
    added = new.partitions[len(old.partitions) :]
    if added:
        yield PartitionsAdded(new.topic_id, added)


_NO_CONFIG: Final[Mapping[str, str]] = {}


def metric_name(topic: str) -> str | None:
    """The name under which `topic` may collide with another, or None for a name that cannot."""
    return topic.replace(".", "_") if "." in topic or "_" in topic else None


class _Edit:
    """An image while a change-set is applied to it: the edits so far, on top of the old maps."""

    def __init__(self, image: ClusterImage) -> None:
        self.image = image
        self.values: dict[str, Any] = {}
        self.brokers: dict[int, BrokerImage] | None = None
        self.topics: dict[str, TopicImage | None] = {}
        self.ids: dict[uuid.UUID, TopicImage | None] = {}
        self.configs: dict[tuple[ResourceType, str], Mapping[str, str] | None] = {}
        self.partitions: dict[uuid.UUID, list[PartitionState]] = {}
        """Topics with changed partitions. A failover changes thousands of one topic: they are copied once."""
        self.metric_names: dict[str, str | None] = {}
        self.users: dict[tuple[str, ScramMechanism], ScramCredential | None] = {}
        self.acls = image.acls
        self.quotas: dict[QuotaEntity, Mapping[str, float] | None] = {}
        self.tokens: dict[str, DelegationToken | None] = {}

    def finish(self, index: int) -> ClusterImage:
        image = self.image
        for topic_id in tuple(self.partitions):
            self.put_topic(self.topic_by_id(topic_id))
        if self.brokers is not None:
            self.values["brokers"] = self.brokers
        return replace(
            image,
            index=index,
            topics=image.topics.edited(self.topics),
            topics_by_id=image.topics_by_id.edited(self.ids),
            configs=image.configs.edited(self.configs),
            names_by_metric_name=image.names_by_metric_name.edited(self.metric_names),
            users=image.users.edited(self.users),
            acls=self.acls,
            quotas=image.quotas.edited(self.quotas),
            tokens=image.tokens.edited(self.tokens),
            **self.values,
        )

    def put_topic(self, topic: TopicImage) -> None:
        self.topics[topic.name] = topic
        self.ids[topic.topic_id] = topic

    def topic_by_id(self, topic_id: uuid.UUID) -> TopicImage:
        topic = self.ids[topic_id] if topic_id in self.ids else self.image.topics_by_id.get(topic_id)
        if topic is None:
            raise StorageError(f"the metadata log changes topic {topic_id}, which does not exist")
        changed = self.partitions.pop(topic_id, None)
        return topic if changed is None else replace(topic, partitions=tuple(changed))

    def has_topic(self, name: str) -> bool:
        return self.topics[name] is not None if name in self.topics else name in self.image.topics

    def broker_map(self) -> dict[int, BrokerImage]:
        if self.brokers is None:
            self.brokers = dict(self.image.brokers)
        return self.brokers

    # one method per change

    def cluster_created(self, change: ClusterCreated) -> None:
        self.values["cluster_id"] = change.cluster_id

    def controller_changed(self, change: ControllerChanged) -> None:
        self.values["controller_id"] = change.broker_id
        self.values["controller_epoch"] = change.controller_epoch

    def broker_registered(self, change: BrokerRegistered) -> None:
        self.broker_map()[change.broker_id] = BrokerImage(
            change.broker_id,
            change.broker_epoch,
            change.endpoints,
            change.rack,
            change.fenced,
            change.directories,
            change.boot_id,
        )

    def directories_changed(self, change: DirectoriesChanged) -> None:
        brokers = self.broker_map()
        broker = brokers.get(change.broker_id)
        if broker is not None and broker.broker_epoch == change.broker_epoch:
            brokers[change.broker_id] = replace(broker, directories=change.directories)

    def broker_fenced(self, change: BrokerFenced) -> None:
        brokers = self.broker_map()
        broker = brokers.get(change.broker_id)
        # A fence meant for an earlier incarnation must not hit the one that came after it.
        if broker is not None and broker.broker_epoch == change.broker_epoch:
            brokers[change.broker_id] = replace(broker, fenced=change.fenced)

    def broker_unregistered(self, change: BrokerUnregistered) -> None:
        self.broker_map().pop(change.broker_id, None)

    def topic_created(self, change: TopicCreated) -> None:
        if self.has_topic(change.name):
            raise StorageError(f"the metadata log creates topic {change.name} twice")
        self.put_topic(TopicImage(change.name, change.topic_id, change.partitions))
        metric = metric_name(change.name)
        if metric is not None:
            self.metric_names[metric] = change.name

    def topic_deleted(self, change: TopicDeleted) -> None:
        topic = self.topic_by_id(change.topic_id)
        self.topics[topic.name] = None
        self.ids[topic.topic_id] = None
        self.configs[ResourceType.TOPIC, topic.name] = None
        metric = metric_name(topic.name)
        if metric is not None:
            self.metric_names[metric] = None

    def partitions_added(self, change: PartitionsAdded) -> None:
        topic = self.topic_by_id(change.topic_id)
        self.put_topic(replace(topic, partitions=topic.partitions + change.partitions))

    def partition_changed(self, change: PartitionChanged) -> None:
        partitions = self.partitions.get(change.topic_id)
        if partitions is None:
            partitions = self.partitions[change.topic_id] = list(self.topic_by_id(change.topic_id).partitions)
        if not 0 <= change.index < len(partitions):
            raise StorageError(
                f"the metadata log changes partition {change.index} of topic {change.topic_id}, which does not exist"
            )
        partitions[change.index] = change.state

    def config_changed(self, change: ConfigChanged) -> None:
        key = (change.resource_type, change.name)
        current = self.configs[key] if key in self.configs else self.image.configs.get(key)
        values = dict(current or {})
        for name, value in change.values:
            if value is None:
                values.pop(name, None)
            else:
                values[name] = value
        self.configs[key] = values or None

    def producer_ids_allocated(self, change: ProducerIdsAllocated) -> None:
        self.values["next_producer_id"] = change.next_id

    def scram_changed(self, change: ScramChanged) -> None:
        self.users[change.user, change.mechanism] = change.credential

    def acls_changed(self, change: AclsChanged) -> None:
        self.acls = self.acls.edited(change.added, change.removed)

    def quota_changed(self, change: QuotaChanged) -> None:
        entity = change.entity
        current = self.quotas[entity] if entity in self.quotas else self.image.quotas.get(entity)
        values = dict(current or {})
        for key, value in change.values:
            if value is None:
                values.pop(key, None)
            else:
                values[key] = value
        self.quotas[entity] = values or None

    def token_changed(self, change: TokenChanged) -> None:
        self.tokens[change.token.token_id] = change.token

    def token_removed(self, change: TokenRemoved) -> None:
        self.tokens[change.token_id] = None


_APPLY: Final[Mapping[type[Any], Callable[[_Edit, Any], None]]] = {
    ClusterCreated: _Edit.cluster_created,
    ControllerChanged: _Edit.controller_changed,
    BrokerRegistered: _Edit.broker_registered,
    DirectoriesChanged: _Edit.directories_changed,
    BrokerFenced: _Edit.broker_fenced,
    BrokerUnregistered: _Edit.broker_unregistered,
    TopicCreated: _Edit.topic_created,
    TopicDeleted: _Edit.topic_deleted,
    PartitionsAdded: _Edit.partitions_added,
    PartitionChanged: _Edit.partition_changed,
    ConfigChanged: _Edit.config_changed,
    ProducerIdsAllocated: _Edit.producer_ids_allocated,
    ScramChanged: _Edit.scram_changed,
    AclsChanged: _Edit.acls_changed,
    QuotaChanged: _Edit.quota_changed,
    TokenChanged: _Edit.token_changed,
    TokenRemoved: _Edit.token_removed,
}
