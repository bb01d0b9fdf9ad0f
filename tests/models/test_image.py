"""The cluster image against a naive model: plain dictionaries, copied and changed with no cleverness.

Random change-sets are applied to both, split into deltas in different ways, and folded through a snapshot; all must
agree, and images taken on the way must not have changed since.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from millrace.cluster.image import ClusterImage, PersistentMap, changes_between
from millrace.metadata.deltas import (
    AclsChanged,
    BrokerFenced,
    BrokerRegistered,
    BrokerUnregistered,
    Change,
    ClusterCreated,
    ConfigChanged,
    ControllerChanged,
    PartitionChanged,
    PartitionsAdded,
    PartitionState,
    ProducerIdsAllocated,
    QuotaChanged,
    QuotaEntity,
    ResourceType,
    ScramChanged,
    TokenChanged,
    TokenRemoved,
    TopicCreated,
    TopicDeleted,
    decode,
    encode,
)
from millrace.security.acls import Acl
from millrace.security.scram import ScramCredential, ScramMechanism
from millrace.security.tokens import DelegationToken
from support.metadata import acls, credentials, endpoints, partition_states, tokens


@dataclass
class NaiveCluster:
    """The same fold, written as plainly as possible."""

    cluster_id: str = ""
    controller: tuple[int, int] = (-1, 0)
    next_producer_id: int = 0
    brokers: dict[int, list[Any]] = field(default_factory=dict)
    topics: dict[str, tuple[uuid.UUID, list[PartitionState]]] = field(default_factory=dict)
    configs: dict[tuple[ResourceType, str], dict[str, str]] = field(default_factory=dict)
    users: dict[tuple[str, ScramMechanism], ScramCredential] = field(default_factory=dict)
    acls: set[Acl] = field(default_factory=set)
    quotas: dict[QuotaEntity, dict[str, float]] = field(default_factory=dict)
    tokens: dict[str, DelegationToken] = field(default_factory=dict)

    def name_of(self, topic_id: uuid.UUID) -> str:
        (name,) = [name for name, (known, _) in self.topics.items() if known == topic_id]
        return name

    def apply(self, change: Change) -> None:
        match change:
            case ClusterCreated(cluster_id):
                self.cluster_id = cluster_id
            case ControllerChanged(broker_id, epoch):
                self.controller = (broker_id, epoch)
            case BrokerRegistered(broker_id, epoch, reachable_at, rack, fenced):
                self.brokers[broker_id] = [epoch, reachable_at, rack, fenced]
            case BrokerFenced(broker_id, epoch, fenced):
                if broker_id in self.brokers and self.brokers[broker_id][0] == epoch:
                    self.brokers[broker_id][3] = fenced
            case BrokerUnregistered(broker_id):
                self.brokers.pop(broker_id, None)
            case TopicCreated(name, topic_id, partitions):
                self.topics[name] = (topic_id, list(partitions))
            case TopicDeleted(_, topic_id):
                name = self.name_of(topic_id)
                del self.topics[name]
                self.configs.pop((ResourceType.TOPIC, name), None)
            case PartitionsAdded(topic_id, partitions):
                self.topics[self.name_of(topic_id)][1].extend(partitions)
            case PartitionChanged(topic_id, index, state):
                self.topics[self.name_of(topic_id)][1][index] = state
            case ConfigChanged(kind, name, values):
                config = self.configs.setdefault((kind, name), {})
                for key, value in values:
                    config.pop(key, None)
                    if value is not None:
                        config[key] = value
                if not config:
                    del self.configs[kind, name]
            case ProducerIdsAllocated(_, next_id, _):
                self.next_producer_id = next_id
            case _:
                self.apply_security(change)

    def apply_security(self, change: Change) -> None:
        match change:
            case ScramChanged(user, mechanism, credential):
                self.users.pop((user, mechanism), None)
                if credential is not None:
                    self.users[user, mechanism] = credential
            case AclsChanged(added, removed):
                self.acls = (self.acls - set(removed)) | set(added)
            case QuotaChanged(entity, values):
                quota = self.quotas.setdefault(entity, {})
                for key, value in values:
                    quota.pop(key, None)
                    if value is not None:
                        quota[key] = value
                if not quota:
                    del self.quotas[entity]
            case TokenChanged(token):
                self.tokens[token.token_id] = token
            case TokenRemoved(token_id):
                self.tokens.pop(token_id, None)


def as_plain(image: ClusterImage) -> NaiveCluster:
    return NaiveCluster(
        cluster_id=image.cluster_id,
        controller=(image.controller_id, image.controller_epoch),
        next_producer_id=image.next_producer_id,
        brokers={b.broker_id: [b.broker_epoch, b.endpoints, b.rack, b.fenced] for b in image.brokers.values()},
        topics={name: (topic.topic_id, list(topic.partitions)) for name, topic in image.topics.items()},
        configs={key: dict(values) for key, values in image.configs.items()},
        users=dict(image.users),
        acls=set(image.acls),
        quotas={key: dict(values) for key, values in image.quotas.items()},
        tokens=dict(image.tokens),
    )


class ImageModel(RuleBasedStateMachine):
    """Grows one random history of changes; every step applies a change-set of one or more of them."""

    topics = Bundle("topics")

    def __init__(self) -> None:
        super().__init__()
        self.image = ClusterImage()
        self.naive = NaiveCluster()
        self.history: list[tuple[Change, ...]] = []
        self.kept: list[tuple[ClusterImage, NaiveCluster]] = []
        self.pending: list[Change] = []
        self.names = 0

    def change(self, change: Change) -> None:
        self.pending.append(change)
        self.naive.apply(change)

    @rule()
    def end_of_delta(self) -> None:
        changes = tuple(self.pending)
        self.pending.clear()
        self.image = self.image.apply(changes)
        self.history.append(changes)
        if len(self.kept) < 5:
            self.kept.append((self.image, copy.deepcopy(self.naive)))

    @rule(target=topics, number=st.integers(0, 12), partitions=st.lists(partition_states, min_size=1, max_size=3))
    def create_topic(self, number: int, partitions: list[PartitionState]) -> uuid.UUID:
        self.names += 1
        name = f"topic.{number}"
        if name in self.naive.topics:
            return self.naive.topics[name][0]
        topic_id = uuid.UUID(int=1000 + self.names)
        self.change(TopicCreated(name, topic_id, tuple(partitions)))
        return topic_id

    def exists(self, topic_id: uuid.UUID) -> bool:
        return any(known == topic_id for known, _ in self.naive.topics.values())

    @rule(topic_id=topics)
    def delete_topic(self, topic_id: uuid.UUID) -> None:
        if self.exists(topic_id):
            self.change(TopicDeleted(self.naive.name_of(topic_id), topic_id))

    @rule(topic_id=topics, partitions=st.lists(partition_states, max_size=2))
    def add_partitions(self, topic_id: uuid.UUID, partitions: list[PartitionState]) -> None:
        if self.exists(topic_id):
            self.change(PartitionsAdded(topic_id, tuple(partitions)))

    @rule(topic_id=topics, state=partition_states, where=st.integers(0, 100))
    def change_partition(self, topic_id: uuid.UUID, state: PartitionState, where: int) -> None:
        if self.exists(topic_id):
            count = len(self.naive.topics[self.naive.name_of(topic_id)][1])
            self.change(PartitionChanged(topic_id, where % count, state))

    @rule(
        kind=st.sampled_from(ResourceType),
        name=st.sampled_from(["", "1", "topic.0", "topic.1"]),
        values=st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.text(max_size=3)), min_size=1, max_size=3),
    )
    def change_config(self, kind: ResourceType, name: str, values: list[tuple[str, str | None]]) -> None:
        self.change(ConfigChanged(kind, name, tuple(values)))

    @rule(broker_id=st.integers(0, 3), epoch=st.integers(0, 5), where=endpoints, fenced=st.booleans())
    def change_broker(self, broker_id: int, epoch: int, where: Any, fenced: bool) -> None:
        self.change(BrokerRegistered(broker_id, epoch, (where,), None, fenced))

    @rule(broker_id=st.integers(0, 3), epoch=st.integers(0, 5), fenced=st.booleans())
    def fence_broker(self, broker_id: int, epoch: int, fenced: bool) -> None:
        self.change(BrokerFenced(broker_id, epoch, fenced))

    @rule(user=st.sampled_from("ab"), mechanism=st.sampled_from(ScramMechanism), credential=st.none() | credentials)
    def change_user(self, user: str, mechanism: ScramMechanism, credential: ScramCredential | None) -> None:
        self.change(ScramChanged(user, mechanism, credential))

    @rule(added=st.lists(acls, max_size=3), removed=st.lists(acls, max_size=3))
    def change_acls(self, added: list[Acl], removed: list[Acl]) -> None:
        self.change(AclsChanged(tuple(added), tuple(removed)))

    @rule(
        entity=st.sampled_from([(("user", "a"),), (("client-id", None), ("user", "a"))]),
        values=st.lists(st.tuples(st.sampled_from("xy"), st.none() | st.floats(0, 10)), min_size=1, max_size=2),
    )
    def change_quota(self, entity: QuotaEntity, values: list[tuple[str, float | None]]) -> None:
        self.change(QuotaChanged(entity, tuple(values)))

    @rule(token=tokens)
    def change_token(self, token: DelegationToken) -> None:
        self.change(TokenChanged(token))

    @rule(token_id=st.sampled_from(["t1", "t2", "t3"]))
    def remove_token(self, token_id: str) -> None:
        self.change(TokenRemoved(token_id))

    @rule(broker_id=st.integers(0, 3))
    def remove_broker(self, broker_id: int) -> None:
        self.change(BrokerUnregistered(broker_id))

    @rule(
        broker_id=st.integers(0, 3), epoch=st.integers(1, 9), next_id=st.integers(1, 10**6), cluster=st.text(max_size=3)
    )
    def change_the_rest(self, broker_id: int, epoch: int, next_id: int, cluster: str) -> None:
        self.change(ControllerChanged(broker_id, epoch))
        self.change(ProducerIdsAllocated(broker_id, next_id, 10))
        self.change(ClusterCreated(cluster))

    @invariant()
    def the_fold_is_the_models(self) -> None:
        if self.pending:
            return
        assert as_plain(self.image) == self.naive
        assert {topic.topic_id: topic for topic in self.image.topics.values()} == dict(self.image.topics_by_id)
        assert set(self.image.names_by_metric_name.values()) == set(self.image.topics)

    def names_kept(self, image: ClusterImage, topic_id: uuid.UUID) -> bool:
        """Whether a topic that lived on only grew, as topics do outside of this test."""
        later = self.image.topics_by_id.get(topic_id)
        return later is None or len(later.partitions) >= len(image.topics_by_id[topic_id].partitions)

    def teardown(self) -> None:
        self.end_of_delta()
        for image, naive in self.kept:
            assert as_plain(image) == naive
            if all(self.names_kept(image, topic_id) for topic_id in image.topics_by_id):
                assert image.apply(changes_between(image, self.image), self.image.index) == self.image
        everything = tuple(change for changes in self.history for change in changes)
        at_once = ClusterImage().apply(everything)
        stored = ClusterImage()
        for changes in self.history:
            stored = stored.apply(decode(encode(changes)))
        snapshot = ClusterImage().apply(decode(encode(self.image.as_changes())), self.image.index)
        for other in (at_once, stored, snapshot):
            assert as_plain(other) == self.naive
        assert stored == self.image == snapshot


TestImage = ImageModel.TestCase
TestImage.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.integers(), st.integers(), max_size=20),
    st.lists(st.dictionaries(st.integers(), st.none() | st.integers(), max_size=8), max_size=8),
)
def test_persistent_map_is_a_dictionary(start: dict[int, int], edits: list[Mapping[int, int | None]]) -> None:
    mapping, model = PersistentMap(start.items()), dict(start)
    for edit in edits:
        before, snapshot = mapping, dict(mapping)
        mapping = mapping.edited(edit)
        for key, value in edit.items():
            model.pop(key, None)
            if value is not None:
                model[key] = value
        assert dict(before) == snapshot
        assert dict(mapping) == model and len(mapping) == len(model)
        assert all(key in mapping and mapping[key] == model[key] for key in model)
    assert mapping.get("absent") is None  # type: ignore[call-overload]
