"""Plans: every rule of Kafka about topics, partitions and settings, as a function of an image."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import (
    AlterOp,
    ConfigAlteration,
    MorePartitions,
    NewTopic,
    TopicOutcome,
    TopicRef,
    auto_created_topic,
    plan_alter_configs,
    plan_create_partitions,
    plan_create_topics,
    plan_delete_topics,
    plan_ensure_topics,
    plan_producer_ids,
)
from millrace.config import BrokerConfig, topic_config
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import ConfigChanged, ResourceType
from support.metadata import cluster_of

CONFIG = BrokerConfig()
TOPIC, BROKER, GROUP, METRICS = (
    ResourceType.TOPIC, ResourceType.BROKER, ResourceType.GROUP, ResourceType.CLIENT_METRICS,
)  # fmt: skip


def numbered_ids() -> Callable[[], uuid.UUID]:
    numbers = itertools.count(100)
    return lambda: uuid.UUID(int=next(numbers))


def with_topics(image: ClusterImage, *topics: NewTopic) -> ClusterImage:
    plan = plan_create_topics(image, topics, CONFIG, numbered_ids())
    assert all(outcome.error is None for outcome in plan.results), plan.results
    return image.apply(plan.changes)


def codes(outcomes: list[TopicOutcome]) -> list[ErrorCode]:
    return [ErrorCode.NONE if outcome.error is None else outcome.error.code for outcome in outcomes]


def create(*topics: NewTopic, image: ClusterImage | None = None, config: BrokerConfig = CONFIG) -> list[ErrorCode]:
    """The codes of a creation; the plan must apply, and create just the topics without an error."""
    image = image or cluster_of(1, 2, 3)
    plan = plan_create_topics(image, topics, config, numbered_ids())
    after = image.apply(plan.changes)
    made = {outcome.name for outcome in plan.results if outcome.error is None}
    assert set(after.topics) - set(image.topics) == made
    return codes(plan.results)


def test_defaults_of_a_new_topic() -> None:
    config = BrokerConfig({"num.partitions": "4", "default.replication.factor": "2"})
    image = cluster_of(1, 2, 3)
    plan = plan_create_topics(image, [NewTopic("a")], config)
    (outcome,) = plan.results
    assert (outcome.num_partitions, outcome.replication_factor) == (4, 2)
    topic = image.apply(plan.changes).topics["a"]
    assert topic.topic_id == outcome.topic_id
    for state in topic.partitions:
        assert state.isr == state.replicas and state.leader == state.replicas[0]
        assert (state.leader_epoch, state.partition_epoch) == (0, 0)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../../etc/passwd", "a b", "ä", "a\0b", "x" * 250, "a\n"])
def test_bad_names(name: str) -> None:
    assert create(NewTopic(name)) == [ErrorCode.INVALID_TOPIC_EXCEPTION]


def test_names_that_are_taken() -> None:
    image = with_topics(cluster_of(1), NewTopic("a.b"), NewTopic("c"))
    assert create(NewTopic("a.b"), NewTopic("c"), image=image) == [ErrorCode.TOPIC_ALREADY_EXISTS] * 2
    assert create(NewTopic("a_b"), image=image) == [ErrorCode.INVALID_TOPIC_EXCEPTION]
    assert create(NewTopic("x.y"), NewTopic("x_y"), image=image) == [ErrorCode.NONE, ErrorCode.INVALID_TOPIC_EXCEPTION]
    assert create(NewTopic("d"), NewTopic("d"), NewTopic("e"), image=image) == [
        ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_REQUEST, ErrorCode.NONE,
    ]  # fmt: skip
    gone = image.apply(plan_delete_topics(image, [TopicRef("a.b")]).changes)
    assert create(NewTopic("a_b"), image=gone) == [ErrorCode.NONE]


@pytest.mark.parametrize(
    ("topic", "code"),
    [
        (NewTopic("a", 0), ErrorCode.INVALID_PARTITIONS),
        (NewTopic("a", -2), ErrorCode.INVALID_PARTITIONS),
        (NewTopic("a", 1, 0), ErrorCode.INVALID_REPLICATION_FACTOR),
        (NewTopic("a", 1, -2), ErrorCode.INVALID_REPLICATION_FACTOR),
        (NewTopic("a", 1, 4), ErrorCode.INVALID_REPLICATION_FACTOR),
        (NewTopic("a", 10_001), ErrorCode.POLICY_VIOLATION),
        (NewTopic("a", 2**31 - 1), ErrorCode.POLICY_VIOLATION),
        (NewTopic("a", 1, -1, ((0, (1,)),)), ErrorCode.INVALID_REQUEST),
        (NewTopic("a", -1, 1, ((0, (1,)),)), ErrorCode.INVALID_REQUEST),
        (NewTopic("a", assignments=((0, ()),)), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (NewTopic("a", assignments=((0, (1, 1)),)), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (NewTopic("a", assignments=((0, (9,)),)), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (NewTopic("a", assignments=((0, (1,)), (0, (2,)))), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (NewTopic("a", assignments=((1, (1,)),)), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (NewTopic("a", assignments=((0, (1,)), (1, (1, 2)))), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (NewTopic("a", configs=(("retention.ms", "x"),)), ErrorCode.INVALID_CONFIG),
        (NewTopic("a", configs=(("retention.ms", None),)), ErrorCode.INVALID_CONFIG),
        (NewTopic("a", configs=(("no.such", "1"),)), ErrorCode.INVALID_CONFIG),
        (NewTopic("a", configs=(("log.retention.ms", "1"),)), ErrorCode.INVALID_CONFIG),
        (
            NewTopic("a", configs=(("min.compaction.lag.ms", "2"), ("max.compaction.lag.ms", "1"))),
            ErrorCode.INVALID_CONFIG,
        ),
    ],
)
def test_topics_that_cannot_be(topic: NewTopic, code: ErrorCode) -> None:
    assert create(topic, NewTopic("good")) == [code, ErrorCode.NONE]


def test_partitions_per_request_are_limited_in_all() -> None:
    none, too_many = ErrorCode.NONE, ErrorCode.POLICY_VIOLATION
    assert create(NewTopic("a", 6000), NewTopic("b", 6000), NewTopic("c", 4000)) == [none, too_many, none]
    assert create(NewTopic("a", 10_000), NewTopic("b")) == [none, too_many]
    assert create(*(NewTopic(f"t{number}") for number in range(10_001))) == [too_many] * 10_001


def test_named_replicas() -> None:
    image = cluster_of(1, 2, 3, fenced=(3,))
    topic = with_topics(image, NewTopic("a", assignments=((1, (3, 2)), (0, (2, 1))))).topics["a"]
    assert [state.replicas for state in topic.partitions] == [(2, 1), (3, 2)]
    assert [(state.isr, state.leader) for state in topic.partitions] == [((2, 1), 2), ((2,), 2)]
    assert create(NewTopic("b", assignments=((0, (3,)),)), image=image) == [ErrorCode.INVALID_REPLICA_ASSIGNMENT]
    assert create(NewTopic("b", 1, 3), image=image) == [ErrorCode.INVALID_REPLICATION_FACTOR]


def test_missing_topics_are_made_and_others_left() -> None:
    image = with_topics(cluster_of(1), NewTopic("there", 3))
    plan = plan_ensure_topics(image, ["there", "new", "bad name", "new"], CONFIG)
    assert codes(plan.results) == [
        ErrorCode.NONE, ErrorCode.NONE, ErrorCode.INVALID_TOPIC_EXCEPTION, ErrorCode.NONE,
    ]  # fmt: skip
    assert plan.results[0].num_partitions == 3
    assert set(image.apply(plan.changes).topics) == {"there", "new"}


@pytest.mark.parametrize("brokers", [1, 2, 5])
def test_internal_topics_fit_the_cluster(brokers: int) -> None:
    image = cluster_of(*range(1, brokers + 1))
    names = ["__consumer_offsets", "__transaction_state", "__share_group_state"]
    plan = plan_ensure_topics(image, names, CONFIG)
    assert codes(plan.results) == [ErrorCode.NONE] * 3
    after = image.apply(plan.changes)
    for name in names:
        topic = after.topics[name]
        assert topic.internal and len(topic.partitions) == 50
        assert topic.replication_factor == min(3, brokers)
        config = topic_config(after.topic_overrides(name), CONFIG)
        assert config.segment_bytes == 104_857_600
        assert config.min_insync_replicas <= topic.replication_factor
        assert config.compact == (name != "__share_group_state")
    assert auto_created_topic("plain", image, CONFIG) == NewTopic("plain")


def test_deletion_by_name_and_by_id() -> None:
    image = with_topics(cluster_of(1), NewTopic("a", configs=(("retention.ms", "1"),)), NewTopic("b"), NewTopic("c"))
    b, c = image.topics["b"].topic_id, image.topics["c"].topic_id
    plan = plan_delete_topics(
        image, [TopicRef("a"), TopicRef(topic_id=b), TopicRef("zz"), TopicRef(topic_id=uuid.UUID(int=5))]
    )
    assert codes(plan.results) == [
        ErrorCode.NONE, ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID,
    ]  # fmt: skip
    assert plan.results[1].name == "b"
    after = image.apply(plan.changes)
    assert set(after.topics) == {"c"} and not after.configs
    for refs in (
        [TopicRef("c"), TopicRef("c")],
        [TopicRef(topic_id=c), TopicRef(topic_id=c)],
        [TopicRef("c"), TopicRef(topic_id=c)],
        [TopicRef(), TopicRef("c", c)],
        [TopicRef("zz"), TopicRef("zz")],
    ):
        refused = plan_delete_topics(image, refs)
        assert codes(refused.results) == [ErrorCode.INVALID_REQUEST] * 2 and not refused.changes


def test_more_partitions() -> None:
    image = with_topics(cluster_of(1, 2, 3), NewTopic("a", 2, 2), NewTopic("b"), NewTopic("c"))
    plan = plan_create_partitions(
        image, [MorePartitions("a", 5), MorePartitions("b", 3, ((2,), (3,))), MorePartitions("nope", 2)]
    )
    assert codes(plan.results) == [ErrorCode.NONE, ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    after = image.apply(plan.changes)
    assert after.topics["a"].partitions[:2] == image.topics["a"].partitions
    assert len(after.topics["a"].partitions) == 5
    assert all(len(state.replicas) == 2 for state in after.topics["a"].partitions)
    assert [state.replicas for state in after.topics["b"].partitions[1:]] == [(2,), (3,)]


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (MorePartitions("a", 2), ErrorCode.INVALID_PARTITIONS),
        (MorePartitions("a", 1), ErrorCode.INVALID_PARTITIONS),
        (MorePartitions("a", -1), ErrorCode.INVALID_PARTITIONS),
        (MorePartitions("a", 2**31 - 1), ErrorCode.POLICY_VIOLATION),
        (MorePartitions("a", 3, ()), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (MorePartitions("a", 3, ((1,), (2,))), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (MorePartitions("a", 3, ((1, 2),)), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (MorePartitions("a", 3, ((7,),)), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
    ],
)
def test_partitions_that_cannot_be(wanted: MorePartitions, code: ErrorCode) -> None:
    image = with_topics(cluster_of(1, 2), NewTopic("a", 2, 1))
    plan = plan_create_partitions(image, [wanted])
    assert codes(plan.results) == [code] and not plan.changes


def test_a_topic_named_twice_gets_no_partitions() -> None:
    image = with_topics(cluster_of(1), NewTopic("a"), NewTopic("b"))
    plan = plan_create_partitions(image, [MorePartitions("a", 2), MorePartitions("a", 3), MorePartitions("b", 2)])
    assert codes(plan.results) == [ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_REQUEST, ErrorCode.NONE]


# --- settings ---------------------------------------------------------------------------------------------------------


def alter(image: ClusterImage, kind: int, name: str, *operations: tuple[str, int, str | None]) -> ClusterImage:
    plan = plan_alter_configs(image, [ConfigAlteration(kind, name, operations)], CONFIG)
    (error,) = plan.results
    if error is not None:
        raise error
    return image.apply(plan.changes)


@pytest.fixture
def image() -> ClusterImage:
    return with_topics(cluster_of(1, 2), NewTopic("a"))


def test_set_and_delete(image: ClusterImage) -> None:
    image = alter(image, TOPIC, "a", ("retention.ms", AlterOp.SET, "5"), ("flush.mode", AlterOp.SET, "os"))
    assert image.topic_overrides("a") == {"retention.ms": "5", "flush.mode": "os"}
    image = alter(image, TOPIC, "a", ("retention.ms", AlterOp.DELETE, None), ("segment.ms", AlterOp.DELETE, None))
    assert image.topic_overrides("a") == {"flush.mode": "os"}
    assert (TOPIC, "a") not in alter(image, TOPIC, "a", ("flush.mode", AlterOp.DELETE, "ignored")).configs


def test_append_and_subtract_begin_with_the_default(image: ClusterImage) -> None:
    image = alter(image, TOPIC, "a", ("cleanup.policy", AlterOp.APPEND, "compact"))
    assert image.topic_overrides("a")["cleanup.policy"] == "delete,compact"
    image = alter(image, TOPIC, "a", ("cleanup.policy", AlterOp.APPEND, "compact,delete"))
    assert image.topic_overrides("a")["cleanup.policy"] == "delete,compact"
    image = alter(image, TOPIC, "a", ("cleanup.policy", AlterOp.SUBTRACT, "delete"))
    assert image.topic_overrides("a")["cleanup.policy"] == "compact"
    image = alter(image, TOPIC, "a", ("cleanup.policy", AlterOp.SUBTRACT, "compact,delete"))
    assert image.topic_overrides("a")["cleanup.policy"] == ""
    with pytest.raises(ApiError) as caught:
        alter(image, TOPIC, "a", ("retention.ms", AlterOp.APPEND, "5"))
    assert caught.value.code is ErrorCode.INVALID_CONFIG


def test_replacing_all(image: ClusterImage) -> None:
    image = alter(image, TOPIC, "a", ("retention.ms", AlterOp.SET, "5"), ("flush.mode", AlterOp.SET, "os"))
    plan = plan_alter_configs(
        image, [ConfigAlteration(TOPIC, "a", (("retention.ms", AlterOp.SET, "6"),), replace_all=True)], CONFIG
    )
    assert plan.changes == (ConfigChanged(TOPIC, "a", (("flush.mode", None), ("retention.ms", "6"))),)


def test_what_stays_the_same_is_no_change(image: ClusterImage) -> None:
    image = alter(image, TOPIC, "a", ("retention.ms", AlterOp.SET, "5"))
    plan = plan_alter_configs(image, [ConfigAlteration(TOPIC, "a", (("retention.ms", AlterOp.SET, "5"),))], CONFIG)
    assert plan.results == [None] and plan.changes == ()


@pytest.mark.parametrize(
    ("kind", "name", "operation", "code"),
    [
        (TOPIC, "a", ("retention.ms", 0, "x"), ErrorCode.INVALID_CONFIG),
        (TOPIC, "a", ("no.such", 0, "x"), ErrorCode.INVALID_CONFIG),
        (TOPIC, "a", ("no.such", 2, "x"), ErrorCode.INVALID_CONFIG),
        (TOPIC, "a", ("retention.ms", 0, None), ErrorCode.INVALID_REQUEST),
        (TOPIC, "a", ("retention.ms", 4, "1"), ErrorCode.INVALID_REQUEST),
        (TOPIC, "zz", ("retention.ms", 0, "1"), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (TOPIC, "", ("retention.ms", 0, "1"), ErrorCode.INVALID_REQUEST),
        (TOPIC, "a/b", ("retention.ms", 0, "1"), ErrorCode.INVALID_TOPIC_EXCEPTION),
        (BROKER, "1", ("log.dirs", 0, "/x"), ErrorCode.INVALID_REQUEST),
        (BROKER, "1", ("log.retention.ms", 0, "x"), ErrorCode.INVALID_REQUEST),
        (BROKER, "", ("ssl.keystore.location", 0, "x"), ErrorCode.INVALID_REQUEST),
        (BROKER, "9", ("log.retention.ms", 0, "1"), ErrorCode.INVALID_REQUEST),
        (BROKER, "one", ("log.retention.ms", 0, "1"), ErrorCode.INVALID_REQUEST),
        (BROKER, "-1", ("log.retention.ms", 0, "1"), ErrorCode.INVALID_REQUEST),
        (GROUP, "g", ("consumer.session.timeout.ms", 0, "1"), ErrorCode.INVALID_CONFIG),
        (GROUP, "", ("consumer.session.timeout.ms", 0, "45000"), ErrorCode.INVALID_REQUEST),
        (METRICS, "m", ("interval.ms", 0, "1"), ErrorCode.INVALID_REQUEST),
        (METRICS, "m", ("interval.ms", 0, "soon"), ErrorCode.INVALID_CONFIG),
        (METRICS, "m", ("no.such", 0, "x"), ErrorCode.INVALID_REQUEST),
        (METRICS, "m", ("match", 0, "client_id=("), ErrorCode.INVALID_CONFIG),
        (METRICS, "m", ("metrics", 0, "a,"), ErrorCode.INVALID_CONFIG),
        (METRICS, "", ("metrics", 0, "a"), ErrorCode.INVALID_REQUEST),
        (ResourceType.BROKER_LOGGER, "1", ("root", 0, "INFO"), ErrorCode.INVALID_REQUEST),
        (0, "x", ("a", 0, "b"), ErrorCode.INVALID_REQUEST),
        (77, "x", ("a", 0, "b"), ErrorCode.INVALID_REQUEST),
    ],
)
def test_alterations_that_are_refused(
    image: ClusterImage, kind: int, name: str, operation: tuple[str, int, str | None], code: ErrorCode
) -> None:
    plan = plan_alter_configs(image, [ConfigAlteration(kind, name, (operation,))], CONFIG)
    (error,) = plan.results
    assert error is not None and error.code is code and not plan.changes


def test_one_bad_resource_does_not_stop_the_others(image: ClusterImage) -> None:
    good = ConfigAlteration(BROKER, "", (("log.retention.ms", 0, "5"),))
    bad = ConfigAlteration(TOPIC, "a", (("retention.ms", 0, "5"), ("retention.ms", 0, "6")))
    twice = ConfigAlteration(GROUP, "g", (("share.isolation.level", 0, "read_committed"),))
    plan = plan_alter_configs(image, [bad, good, twice, twice], CONFIG)
    assert [error and error.code for error in plan.results] == [
        ErrorCode.INVALID_REQUEST, None, ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_REQUEST,
    ]  # fmt: skip
    assert image.apply(plan.changes).config(BROKER, "") == {"log.retention.ms": "5"}


def test_producer_ids_are_never_given_twice() -> None:
    image = cluster_of(1)
    blocks = []
    for _ in range(3):
        plan = plan_producer_ids(image, 1)
        blocks.append(plan.results)
        image = image.apply(plan.changes)
    assert blocks == [range(1000), range(1000, 2000), range(2000, 3000)]


names = st.sampled_from(["a", "b", "a.b", "a_b", "", "c/d", "e"])
counts = st.integers(-2, 4)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.builds(NewTopic, names, counts, counts), max_size=6),
    st.lists(st.builds(NewTopic, names, counts, counts), max_size=6),
    st.lists(st.builds(MorePartitions, names, st.integers(-1, 6)), max_size=4),
    st.lists(st.builds(TopicRef, names), max_size=4),
)
def test_every_plan_applies_to_the_image_it_was_made_from(
    first: list[NewTopic], second: list[NewTopic], more: list[MorePartitions], doomed: list[TopicRef]
) -> None:
    image = cluster_of(1, 2, 3)
    for topics in (first, second):
        plan = plan_create_topics(image, topics, CONFIG, numbered_ids() if topics is first else uuid.uuid4)
        assert len(plan.results) == len(topics)
        image = image.apply(plan.changes)
    for grown in (plan_create_partitions(image, more),):
        image = image.apply(grown.changes)
        for wanted, outcome in zip(more, grown.results, strict=True):
            if outcome.error is None:
                assert len(image.topics[wanted.name].partitions) == wanted.count
    deleted = plan_delete_topics(image, doomed)
    image = image.apply(deleted.changes)
    for ref, outcome in zip(doomed, deleted.results, strict=True):
        assert outcome.error is not None or ref.name not in image.topics
    assert len(image.topics) == len(image.topics_by_id)
