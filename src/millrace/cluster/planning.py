"""What a request would change: pure functions from an image to a plan, or to an error per item.

Nothing here waits, writes or knows the wire. A `Plan` has one result per item asked for, in order, and the changes
that bring the good ones about; an item that failed has an `error` and no changes. The controller writes the changes.

Invariants: a plan made from an image applies to that image; two items of one request never work against each other (a
topic asked for twice fails twice); no change is planned for something that stays as it is.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Generic, TypeVar

from millrace.cluster.assignment import Candidate, place
from millrace.cluster.directories import DirectoryChoice
from millrace.cluster.image import ClusterImage, TopicImage, metric_name
from millrace.config import (
    SETTINGS,
    BrokerConfig,
    Kind,
    RefusedSubscription,
    Scope,
    format_value,
    validate_dynamic_broker,
    validate_overrides,
)
from millrace.errors import ApiError, ConfigError, ErrorCode
from millrace.metadata.deltas import (
    Change,
    ChangeSet,
    ConfigChanged,
    PartitionsAdded,
    PartitionState,
    ProducerIdsAllocated,
    ResourceType,
    TopicCreated,
    TopicDeleted,
)
from millrace.model import (
    AUDIT_LOG_TOPIC,
    CONSUMER_OFFSETS_TOPIC,
    SHARE_STATE_TOPIC,
    TRANSACTION_STATE_TOPIC,
    ZERO_UUID,
    invalid_topic_name_reason,
    new_topic_id,
)

R = TypeVar("R")

MAX_PARTITIONS_PER_REQUEST: Final = 10_000
PRODUCER_ID_BLOCK: Final = 1000
AUDIT_MESSAGE_BYTES: Final = 1024 * 1024
_MIN_SEGMENT_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Plan(Generic[R]):
    """One result per item, and what has to be written for the good ones."""

    results: R
    changes: ChangeSet = ()


# --- topics -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic as asked for. -1 means the cluster's default; `assignments` names the replicas of each partition."""

    name: str
    num_partitions: int = -1
    replication_factor: int = -1
    assignments: tuple[tuple[int, tuple[int, ...]], ...] = ()
    configs: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True, slots=True)
class TopicOutcome:
    """What became of one topic in a request."""

    name: str | None
    error: ApiError | None = None
    topic_id: uuid.UUID = ZERO_UUID
    num_partitions: int = -1
    replication_factor: int = -1
    configs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MorePartitions:
    """A topic that should have `count` partitions; `assignments` names the replicas of each new one."""

    name: str
    count: int
    assignments: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class TopicRef:
    """A topic by name or by id, whichever the request gave."""

    name: str | None = None
    topic_id: uuid.UUID = ZERO_UUID


def plan_create_topics(
    image: ClusterImage,
    topics: Sequence[NewTopic],
    config: BrokerConfig,
    make_id: Callable[[], uuid.UUID] = new_topic_id,
) -> Plan[list[TopicOutcome]]:
    """Create topics; see `NewTopic`."""
    if len(topics) > MAX_PARTITIONS_PER_REQUEST:  # not worth the time to look at each
        error = _too_many_partitions()
        return Plan([TopicOutcome(topic.name, error) for topic in topics])
    asked = Counter(topic.name for topic in topics)
    taken: dict[str, str] = {}
    results: list[TopicOutcome] = []
    changes: list[Change] = []
    partitions_left = MAX_PARTITIONS_PER_REQUEST
    for topic in topics:
        try:
            if asked[topic.name] > 1:
                raise ApiError(ErrorCode.INVALID_REQUEST, "the request names this topic more than once")
            _check_new_name(image, topic.name, taken)
            configs = _given_configs(topic.configs)
            _check_configs(Scope.TOPIC, configs, config)
            topic_id = make_id()
            partitions = _new_topic_partitions(image, topic, config, topic_id)
            if len(partitions) > partitions_left:
                raise _too_many_partitions()
        except ApiError as error:
            results.append(TopicOutcome(topic.name, error))
            continue
        partitions_left -= len(partitions)
        metric = metric_name(topic.name)
        if metric is not None:
            taken[metric] = topic.name
        changes.append(TopicCreated(topic.name, topic_id, partitions))
        if configs:
            changes.append(ConfigChanged(ResourceType.TOPIC, topic.name, tuple(configs.items())))
        replicas = len(partitions[0].replicas)
        results.append(TopicOutcome(topic.name, None, topic_id, len(partitions), replicas, configs))
    return Plan(results, tuple(changes))


def _check_new_name(image: ClusterImage, name: str, taken: Mapping[str, str]) -> None:
    reason = invalid_topic_name_reason(name)
    if reason is not None:
        raise ApiError(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)
    if name in image.topics:
        raise ApiError(ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic '{name}' already exists.")
    metric = metric_name(name)
    if metric is not None:
        other = taken.get(metric) or image.names_by_metric_name.get(metric)
        if other is not None:
            text = f"topic {name} collides with topic {other}: '.' and '_' are the same in metric names"
            raise ApiError(ErrorCode.INVALID_TOPIC_EXCEPTION, text)


def _too_many_partitions() -> ApiError:
    text = f"one request may create at most {MAX_PARTITIONS_PER_REQUEST} partitions"
    return ApiError(ErrorCode.POLICY_VIOLATION, text)


def _given_configs(pairs: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    configs: dict[str, str] = {}
    for name, value in pairs:
        if value is None:
            raise ApiError(ErrorCode.INVALID_CONFIG, f"{_short(name)} has no value")
        configs[name] = value
    return configs


def _short(name: str) -> str:
    """A name from a request, in an error text that must fit a string of the protocol."""
    return name[:100]


def _check_configs(scope: Scope, configs: Mapping[str, str], config: BrokerConfig) -> None:
    try:
        validate_overrides(scope, configs, config)
    except ConfigError as error:
        raise ApiError(ErrorCode.INVALID_CONFIG, str(error)) from None


def _new_topic_partitions(
    image: ClusterImage, topic: NewTopic, config: BrokerConfig, topic_id: uuid.UUID
) -> tuple[PartitionState, ...]:
    if topic.assignments:
        if topic.num_partitions != -1 or topic.replication_factor != -1:
            text = "with replicas named one by one, num_partitions and replication_factor must be -1"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
        by_index = dict(topic.assignments)
        if len(by_index) != len(topic.assignments):
            raise ApiError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, "a partition is assigned more than once")
        if sorted(by_index) != list(range(len(by_index))):
            raise ApiError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, "partitions must be numbered from 0 without a gap")
        return _assigned(image, [by_index[index] for index in range(len(by_index))], 0, None)
    count = config.get_int("num.partitions") if topic.num_partitions == -1 else topic.num_partitions
    if count < 1:
        raise ApiError(ErrorCode.INVALID_PARTITIONS, f"a topic cannot have {count} partitions")
    if count > MAX_PARTITIONS_PER_REQUEST:
        raise _too_many_partitions()
    factor = (
        config.get_int("default.replication.factor") if topic.replication_factor == -1 else topic.replication_factor
    )
    if factor < 1:
        raise ApiError(ErrorCode.INVALID_REPLICATION_FACTOR, f"a partition cannot have {factor} replicas")
    return _placed(image, count, factor, topic_id.int)


def _placed(image: ClusterImage, count: int, factor: int, start: int) -> tuple[PartitionState, ...]:
    candidates = [Candidate(broker.broker_id, broker.rack) for broker in image.live_brokers if not broker.is_full]
    if factor > len(candidates):
        candidates = [Candidate(broker.broker_id, broker.rack) for broker in image.live_brokers]
    if factor > len(candidates):
        text = f"{factor} replicas need {factor} brokers, and {len(candidates)} are available"
        raise ApiError(ErrorCode.INVALID_REPLICATION_FACTOR, text)
    choose = DirectoryChoice(image)
    return tuple(
        PartitionState(replicas, replicas, replicas[0], directories=choose.for_replicas(replicas))
        for replicas in place(count, factor, candidates, start=start)
    )


def _assigned(
    image: ClusterImage, assignments: Sequence[tuple[int, ...]], first_index: int, factor: int | None
) -> tuple[PartitionState, ...]:
    states = []
    choose = DirectoryChoice(image)
    for index, replicas in enumerate(assignments, start=first_index):
        problem = None
        if not replicas:
            problem = f"partition {index} has no replicas"
        elif len(set(replicas)) != len(replicas):
            problem = f"partition {index} names a broker more than once"
        elif unknown := [broker_id for broker_id in replicas if broker_id not in image.brokers]:
            problem = f"partition {index} names broker {unknown[0]}, which is not registered"
        elif factor is not None and len(replicas) != factor:
            problem = f"partition {index} has {len(replicas)} replicas, the ones before have {factor}"
        if problem is not None:
            raise ApiError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, problem)
        factor = len(replicas)
        live = tuple(broker_id for broker_id in replicas if image.is_live(broker_id))
        if not live:
            text = f"none of the brokers of partition {index} is alive"
            raise ApiError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, text)
        states.append(PartitionState(replicas, live, live[0], directories=choose.for_replicas(replicas)))
    return tuple(states)


def plan_ensure_topics(
    image: ClusterImage,
    names: Sequence[str],
    config: BrokerConfig,
    make_id: Callable[[], uuid.UUID] = new_topic_id,
    *,
    configs: tuple[tuple[str, str | None], ...] = (),
) -> Plan[list[TopicOutcome]]:
    """Create those of `names` that do not exist, as auto-creation does; the others are fine as they are."""
    missing = [name for name in dict.fromkeys(names) if name not in image.topics]
    made_topics = [auto_created_topic(name, image, config, configs) for name in missing]
    plan = plan_create_topics(image, made_topics, config, make_id)
    made = {outcome.name: outcome for outcome in plan.results}
    results = []
    for name in names:
        topic = image.topic(name)
        if topic is None:
            results.append(made[name])
        else:
            results.append(TopicOutcome(name, None, topic.topic_id, len(topic.partitions), topic.replication_factor))
    return Plan(results, plan.changes)


def auto_created_topic(
    name: str, image: ClusterImage, config: BrokerConfig, configs: tuple[tuple[str, str | None], ...] = ()
) -> NewTopic:
    """How a topic is made when nobody said how. Internal topics take as many replicas as there are brokers, at most."""
    brokers = max(len(image.live_brokers), 1)

    def fitting(setting: str, limit: int) -> int:
        return min(config.get_int(setting), limit)

    def segment_bytes(setting: str) -> str:
        return str(max(config.get_int(setting), _MIN_SEGMENT_BYTES))

    if name == CONSUMER_OFFSETS_TOPIC:
        return NewTopic(
            name,
            config.get_int("offsets.topic.num.partitions"),
            fitting("offsets.topic.replication.factor", brokers),
            configs=(
                ("cleanup.policy", "compact"),
                ("compression.type", "producer"),
                ("segment.bytes", segment_bytes("offsets.topic.segment.bytes")),
            ),
        )
    if name == TRANSACTION_STATE_TOPIC:
        factor = fitting("transaction.state.log.replication.factor", brokers)
        return NewTopic(
            name,
            config.get_int("transaction.state.log.num.partitions"),
            factor,
            configs=(
                ("cleanup.policy", "compact"),
                ("compression.type", "uncompressed"),
                ("min.insync.replicas", str(fitting("transaction.state.log.min.isr", factor))),
                ("segment.bytes", segment_bytes("transaction.state.log.segment.bytes")),
                ("unclean.leader.election.enable", "false"),
            ),
        )
    if name == AUDIT_LOG_TOPIC:
        return NewTopic(
            name,
            config.get_int("audit.log.topic.num.partitions"),
            fitting("audit.log.topic.replication.factor", brokers),
            configs=(
                ("cleanup.policy", "delete"),
                # Its batches must pass, however small the broker's own setting is.
                ("max.message.bytes", str(AUDIT_MESSAGE_BYTES)),
                ("retention.ms", str(config.get_int("audit.log.topic.retention.ms"))),
            ),
        )
    if name == SHARE_STATE_TOPIC:
        factor = fitting("share.coordinator.state.topic.replication.factor", brokers)
        return NewTopic(
            name,
            config.get_int("share.coordinator.state.topic.num.partitions"),
            factor,
            configs=(
                ("cleanup.policy", "delete"),
                ("compression.type", "producer"),
                ("min.insync.replicas", str(fitting("share.coordinator.state.topic.min.isr", factor))),
                ("retention.ms", "-1"),
                ("segment.bytes", segment_bytes("share.coordinator.state.topic.segment.bytes")),
            ),
        )
    return NewTopic(name, configs=configs)


def plan_delete_topics(image: ClusterImage, topics: Sequence[TopicRef]) -> Plan[list[TopicOutcome]]:
    """Delete topics named or identified; one that is referred to twice, in whatever way, is not deleted."""
    found = [_resolve(image, ref) for ref in topics]
    times = Counter(topic.topic_id for topic in found if isinstance(topic, TopicImage))
    asked = Counter(topics)
    results: list[TopicOutcome] = []
    changes: list[Change] = []
    for ref, topic in zip(topics, found, strict=True):
        if asked[ref] > 1 and (ref.name is None) != (ref.topic_id == ZERO_UUID):
            error = ApiError(ErrorCode.INVALID_REQUEST, "the request names this topic more than once")
            results.append(TopicOutcome(ref.name, error, ref.topic_id))
        elif isinstance(topic, ApiError):
            results.append(TopicOutcome(ref.name, topic, ref.topic_id))
        elif times[topic.topic_id] > 1:
            error = ApiError(ErrorCode.INVALID_REQUEST, "the request gives both the name and the id of this topic")
            results.append(TopicOutcome(ref.name, error, ref.topic_id))
        else:
            results.append(TopicOutcome(topic.name, None, topic.topic_id))
            changes.append(TopicDeleted(topic.name, topic.topic_id))
    return Plan(results, tuple(changes))


def _resolve(image: ClusterImage, ref: TopicRef) -> TopicImage | ApiError:
    if ref.name is None:
        if ref.topic_id == ZERO_UUID:
            return ApiError(ErrorCode.INVALID_REQUEST, "neither a topic name nor a topic id was given")
        topic = image.topics_by_id.get(ref.topic_id)
        return topic or ApiError(ErrorCode.UNKNOWN_TOPIC_ID, "no topic has this id")
    if ref.topic_id != ZERO_UUID:
        return ApiError(ErrorCode.INVALID_REQUEST, "give a topic name or a topic id, not both")
    topic = image.topics.get(ref.name)
    return topic or ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no topic has this name")


def plan_create_partitions(image: ClusterImage, topics: Sequence[MorePartitions]) -> Plan[list[TopicOutcome]]:
    """Add partitions to topics; existing ones are never touched, and there is no way back."""
    asked = Counter(topic.name for topic in topics)
    results: list[TopicOutcome] = []
    changes: list[Change] = []
    partitions_left = MAX_PARTITIONS_PER_REQUEST
    for wanted in topics:
        try:
            if asked[wanted.name] > 1:
                raise ApiError(ErrorCode.INVALID_REQUEST, "the request names this topic more than once")
            topic = image.topic(wanted.name)
            if topic is None:
                raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {wanted.name}")
            added = _added_partitions(image, topic, wanted)
            if len(added) > partitions_left:
                raise _too_many_partitions()
        except ApiError as error:
            results.append(TopicOutcome(wanted.name, error))
            continue
        partitions_left -= len(added)
        changes.append(PartitionsAdded(topic.topic_id, added))
        results.append(TopicOutcome(wanted.name, None, topic.topic_id, wanted.count, topic.replication_factor))
    return Plan(results, tuple(changes))


def _added_partitions(image: ClusterImage, topic: TopicImage, wanted: MorePartitions) -> tuple[PartitionState, ...]:
    current = len(topic.partitions)
    more = wanted.count - current
    if more <= 0:
        text = f"topic {topic.name} has {current} partitions, and {wanted.count} is not more"
        raise ApiError(ErrorCode.INVALID_PARTITIONS, text)
    if more > MAX_PARTITIONS_PER_REQUEST:
        raise _too_many_partitions()
    if wanted.assignments is None:
        return _placed(image, more, topic.replication_factor, topic.topic_id.int + current)
    if len(wanted.assignments) != more:
        text = f"{more} partitions would be new, and replicas are named for {len(wanted.assignments)}"
        raise ApiError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, text)
    return _assigned(image, wanted.assignments, current, topic.replication_factor)


# --- configs ----------------------------------------------------------------------------------------------------------


class AlterOp(IntEnum):
    """What to do with one setting; the numbers are the protocol's."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


@dataclass(frozen=True, slots=True)
class ConfigAlteration:
    """What should change in one resource: (name, operation, value) each."""

    resource_type: int
    name: str
    operations: tuple[tuple[str, int, str | None], ...]
    replace_all: bool = False
    """The old AlterConfigs: what is not named goes back to its default."""


_SCOPES: Final = {
    ResourceType.TOPIC: Scope.TOPIC,
    ResourceType.BROKER: Scope.BROKER,
    ResourceType.GROUP: Scope.GROUP,
    ResourceType.CLIENT_METRICS: Scope.CLIENT_METRICS,
}


def plan_alter_configs(
    image: ClusterImage, alterations: Sequence[ConfigAlteration], config: BrokerConfig
) -> Plan[list[ApiError | None]]:
    """Change settings of topics, brokers, groups and client-metrics subscriptions; one error or None each."""
    asked = Counter((alteration.resource_type, alteration.name) for alteration in alterations)
    results: list[ApiError | None] = []
    changes: list[Change] = []
    for alteration in alterations:
        try:
            if asked[alteration.resource_type, alteration.name] > 1:
                raise ApiError(ErrorCode.INVALID_REQUEST, "each resource may appear only once")
            change = _plan_alteration(image, alteration, config)
        except ApiError as error:
            results.append(error)
            continue
        results.append(None)
        if change is not None:
            changes.append(change)
    return Plan(results, tuple(changes))


def _plan_alteration(image: ClusterImage, alteration: ConfigAlteration, config: BrokerConfig) -> ConfigChanged | None:
    try:
        resource_type = ResourceType(alteration.resource_type)
        scope = _SCOPES[resource_type]
    except (ValueError, KeyError):
        text = f"resources of type {alteration.resource_type} have no settings that can change"
        raise ApiError(ErrorCode.INVALID_REQUEST, text) from None
    _check_resource(image, resource_type, alteration.name)
    names = [name for name, _, _ in alteration.operations]
    if len(set(names)) != len(names):
        raise ApiError(ErrorCode.INVALID_REQUEST, "a setting is named more than once")
    valueless = [
        name for name, operation, value in alteration.operations if value is None and operation != AlterOp.DELETE
    ]
    if valueless:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"{_short(valueless[0])}: a value is needed")
    before = image.config(resource_type, alteration.name)
    after = altered(before, alteration, scope)
    _check_altered(scope, after, alteration.name, config)
    values = tuple((name, after.get(name)) for name in sorted({*before, *after}) if before.get(name) != after.get(name))
    return ConfigChanged(resource_type, alteration.name, values) if values else None


def altered(before: Mapping[str, str], alteration: ConfigAlteration, scope: Scope) -> dict[str, str]:
    """The settings of a resource once the alteration is made; ApiError where it is none."""
    after: dict[str, str] = {} if alteration.replace_all else dict(before)
    for name, operation, value in alteration.operations:
        _operate(scope, after, name, operation, value or "")
    return after


def _check_resource(image: ClusterImage, resource_type: ResourceType, name: str) -> None:
    if resource_type is ResourceType.TOPIC:
        reason = invalid_topic_name_reason(name)
        if not name:
            raise ApiError(ErrorCode.INVALID_REQUEST, "topics have no common settings; name a topic")
        if reason is not None:
            raise ApiError(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)
        if name not in image.topics:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
    elif resource_type is ResourceType.BROKER:
        if name and (not name.isascii() or not name.isdigit()):
            raise ApiError(ErrorCode.INVALID_REQUEST, "a broker is named by its number, or '' for all")
        if name and int(name[:10]) not in image.brokers:
            raise ApiError(ErrorCode.INVALID_REQUEST, f"there is no broker {name[:10]}")
    elif not name:
        raise ApiError(ErrorCode.INVALID_REQUEST, "the resource has no name")


def _operate(scope: Scope, values: dict[str, str], name: str, operation: int, value: str) -> None:
    if operation == AlterOp.SET:
        values[name] = value
    elif operation == AlterOp.DELETE:
        values.pop(name, None)
    elif operation in (AlterOp.APPEND, AlterOp.SUBTRACT):
        setting = SETTINGS[scope].get(name)
        if setting is None or setting.kind is not Kind.LIST:
            verb = AlterOp(operation).name.lower()
            raise ApiError(ErrorCode.INVALID_CONFIG, f"{_short(name)} is not a list, so {verb} makes no sense")
        current = values.get(name, format_value(setting.default) or "")
        items = [item for item in current.split(",") if item]
        given = value.split(",")
        if operation == AlterOp.APPEND:
            items += [item for item in dict.fromkeys(given) if item not in items]
        else:
            items = [item for item in items if item not in given]
        values[name] = ",".join(items)
    else:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"there is no operation {operation}")


def _check_altered(scope: Scope, values: Mapping[str, str], name: str, config: BrokerConfig) -> None:
    try:
        if scope is Scope.BROKER:
            validate_dynamic_broker(values, per_broker=bool(name))
        else:
            validate_overrides(scope, values, config)
    except ConfigError as error:
        # Kafka answers INVALID_REQUEST here for brokers (KAFKA-13609) and for some faults of subscriptions, and clients
        # may rely on it.
        wrong_value = scope is not Scope.BROKER and not isinstance(error, RefusedSubscription)
        raise ApiError(ErrorCode.INVALID_CONFIG if wrong_value else ErrorCode.INVALID_REQUEST, str(error)) from None


# --- producer ids -----------------------------------------------------------------------------------------------------


def plan_producer_ids(image: ClusterImage, broker_id: int) -> Plan[range]:
    """Take the next block of producer ids for a broker; ids are never given twice, even if a broker dies with some."""
    first = image.next_producer_id
    end = first + PRODUCER_ID_BLOCK
    if end > 2**63 - 1:
        raise ApiError(ErrorCode.UNKNOWN_SERVER_ERROR, "there are no producer ids left")
    return Plan(range(first, end), (ProducerIdsAllocated(broker_id, end, PRODUCER_ID_BLOCK),))
