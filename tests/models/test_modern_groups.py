"""A KIP-848 group under everything that can happen to it: no partition has two owners, and in the end each has one.

Members come, go, crash, restart, lose answers, change their minds, speak the classic protocol; topics come, grow and
go; the log refuses records; the coordinator is replaced by one that has read the log. After every step what members
have is within what the coordinator thinks they have, which is disjoint; epochs only grow; and a replay of the log gives
the same group. When things have calmed down every partition of a subscribed topic is with one of its subscribers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millrace.errors import ApiError, ErrorCode
from millrace.groups.classic.effects import LeaveRequest, Protocol, SyncRequest
from millrace.groups.modern import protocol as modern
from millrace.groups.modern.group import ModernState
from millrace.groups.modern.step import Step
from millrace.groups.settings import GroupSettings
from millrace.groups.subscription import Subscription, read_assignment
from millrace.wire.codec import encode
from support.groups import join_request
from support.modern_groups import ModernBench, Refused, add_partitions, add_topic, drop_topic, image_of, state_of

TOPICS = ("a", "b", "c")
PATTERNS = ("a|b", ".*", "x.*", "")
Partition = tuple[UUID, int]

_REJOIN = {ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.GROUP_ID_NOT_FOUND}

_FINAL = {ErrorCode.UNRELEASED_INSTANCE_ID, ErrorCode.FENCED_INSTANCE_ID}


@dataclass
class Consumer:
    """A member as its client sees itself."""

    member_id: str
    topics: tuple[str, ...]
    pattern: str | None = None
    instance_id: str | None = None
    assignor: str | None = None
    epoch: int = 0
    owned: set[Partition] = field(default_factory=set)
    told: set[Partition] = field(default_factory=set)
    said: set[Partition] | None = None
    """What the coordinator has heard that it owns; a heartbeat says it again only when it has changed."""
    is_careless: bool = False
    """It goes on after a lost answer as if there had been none."""
    is_unsure: bool = False
    """An answer was lost: the next heartbeat says everything."""
    is_classic: bool = False
    is_gone: bool = False
    """It crashed, left or was replaced: it does nothing any more."""

    def forget_everything(self) -> None:
        self.epoch, self.owned, self.told, self.said = 0, set(), set(), None


def by_topic(partitions: set[Partition]) -> list[tuple[UUID, list[int]]]:
    topics: dict[UUID, list[int]] = {}
    for topic_id, index in sorted(partitions):
        topics.setdefault(topic_id, []).append(index)
    return list(topics.items())


class Groups(RuleBasedStateMachine):
    """Whatever happens to one group."""

    def __init__(self) -> None:
        super().__init__()
        # Never downgraded: that ends the group, and is a test of its own.
        self.bench = ModernBench(image_of(a=3, b=2), GroupSettings(migration_policy="upgrade"))
        self.consumers: list[Consumer] = []
        self.ids = 0
        self.epochs: dict[str, int] = {}
        self.group_epoch = 0

    def new_id(self) -> str:
        self.ids += 1
        return f"m{self.ids:03}"

    def pick(self, which: int, *, is_classic: bool = False) -> Consumer | None:
        present = [each for each in self.consumers if not each.is_gone and each.is_classic == is_classic]
        return present[which % len(present)] if present else None

    # Members of the new protocol

    @initialize(patterns=st.lists(st.sampled_from((None, None, "a|b", ".*")), max_size=4))
    def begin(self, patterns: list[str | None]) -> None:
        for pattern in patterns:
            self.join({"a"} if pattern is None else set(), pattern, None, None)

    @rule(
        topics=st.sets(st.sampled_from(TOPICS)),
        pattern=st.sampled_from((None, *PATTERNS)),
        instance_id=st.sampled_from((None, None, "i1", "i2")),
        assignor=st.sampled_from((None, "uniform", "range")),
        is_careless=st.booleans(),
    )
    def join(
        self,
        topics: set[str],
        pattern: str | None,
        instance_id: str | None,
        assignor: str | None,
        is_careless: bool = False,
    ) -> None:
        consumer = Consumer(self.new_id(), tuple(topics), pattern, instance_id, assignor, is_careless=is_careless)
        self.consumers.append(consumer)
        self.beat_as(consumer, is_full=True, is_lost=False)

    @rule(which=st.integers(0, 9), is_full=st.booleans(), is_lost=st.booleans())
    def beat(self, which: int, is_full: bool, is_lost: bool) -> None:
        consumer = self.pick(which)
        if consumer is not None:
            self.beat_as(consumer, is_full=is_full, is_lost=is_lost)

    def beat_as(self, consumer: Consumer, *, is_full: bool, is_lost: bool) -> None:
        changes: dict[str, Any] = {}
        if is_full or consumer.is_unsure or consumer.epoch == 0:
            changes = {
                "rebalance_timeout_ms": 30_000,
                "topics": consumer.topics,
                "pattern": consumer.pattern,
                "assignor": consumer.assignor,
                "owned": by_topic(consumer.owned),
            }
        elif consumer.owned == consumer.told and consumer.owned != consumer.said:
            changes = {"owned": by_topic(consumer.owned)}
        try:
            answer = self.bench.heartbeat(
                consumer.member_id, consumer.epoch, instance_id=consumer.instance_id, **changes
            )
        except Refused:
            return
        except ApiError as error:
            consumer.is_gone = self.is_final(error)
            consumer.forget_everything()
            return
        if consumer.instance_id is not None and consumer.epoch == 0:
            self.replaced(consumer)
        consumer.is_unsure = is_lost and not consumer.is_careless
        if is_lost:
            # What it was told before and has not done yet may be another's by now, which the lost answer said.
            consumer.told = set(consumer.owned)
            return
        if "owned" in changes:
            consumer.said = set(consumer.owned)
        consumer.epoch = answer.epoch
        if answer.assignment is not None:
            consumer.told = {(topic_id, index) for topic_id, indices in answer.assignment for index in indices}

    def is_final(self, error: ApiError) -> bool:
        """Whether a refused member gives up, and not begins anew; other errors should not be there."""
        assert error.code in _REJOIN | _FINAL
        return error.code in _FINAL

    def replaced(self, consumer: Consumer) -> None:
        for each in self.consumers:
            if each is not consumer and each.instance_id == consumer.instance_id:
                each.is_gone = True
                each.forget_everything()

    @rule(which=st.integers(0, 9))
    def act(self, which: int) -> None:
        """The application has given up what it was told to, and uses what it got."""
        consumer = self.pick(which)
        if consumer is not None:
            consumer.owned = set(consumer.told)

    @rule(which=st.integers(0, 9), topics=st.sets(st.sampled_from(TOPICS)), pattern=st.sampled_from((None, *PATTERNS)))
    def subscribe(self, which: int, topics: set[str], pattern: str | None) -> None:
        consumer = self.pick(which)
        if consumer is not None:
            consumer.topics, consumer.pattern = tuple(topics), pattern or ""
            self.beat_as(consumer, is_full=True, is_lost=False)

    @rule(which=st.integers(0, 9), for_now=st.booleans())
    def leave(self, which: int, for_now: bool) -> None:
        consumer = self.pick(which)
        if consumer is None:
            return
        consumer.is_gone = True
        consumer.forget_everything()
        epoch = -2 if for_now and consumer.instance_id else -1
        try:
            self.bench.heartbeat(consumer.member_id, epoch, instance_id=consumer.instance_id)
        except Refused:
            pass
        except ApiError as error:
            self.is_final(error)

    @rule(which=st.integers(0, 9), is_classic=st.booleans())
    def crash(self, which: int, is_classic: bool) -> None:
        consumer = self.pick(which, is_classic=is_classic)
        if consumer is not None:
            consumer.is_gone = True
            consumer.forget_everything()

    # Classic members

    @precondition(lambda self: self.bench.group.members)
    @rule(topics=st.sets(st.sampled_from(TOPICS)), instance_id=st.sampled_from((None, "i1", "i3")))
    def join_classic(self, topics: set[str], instance_id: str | None) -> None:
        consumer = Consumer(self.new_id(), tuple(topics), instance_id=instance_id, is_classic=True)
        self.consumers.append(consumer)
        self.rejoin(consumer)

    @rule(which=st.integers(0, 9), is_lost=st.booleans())
    def beat_classic(self, which: int, is_lost: bool) -> None:
        consumer = self.pick(which, is_classic=True)
        if consumer is not None:
            self.beat_classic_as(consumer, is_lost=is_lost)

    def beat_classic_as(self, consumer: Consumer, *, is_lost: bool) -> None:
        if consumer.epoch == 0:
            # Who joins an empty group makes a classic one of it, which is not in this world: then it stays away.
            if self.bench.group.members:
                self.rejoin(consumer)
            return
        try:
            error = self.bench.classic_heartbeat(consumer.member_id, consumer.epoch, consumer.instance_id)
        except Refused:
            return
        except ApiError as refusal:
            error = refusal.code
        if is_lost:
            return
        if error is ErrorCode.REBALANCE_IN_PROGRESS:
            self.rejoin(consumer)
        elif error is not ErrorCode.NONE:
            self.end_classic(consumer, error)

    def end_classic(self, consumer: Consumer, error: ErrorCode) -> None:
        if error is ErrorCode.FENCED_INSTANCE_ID:
            consumer.is_gone = True
        consumer.forget_everything()

    def rejoin(self, consumer: Consumer) -> None:
        names = {self.bench.image.topics_by_id[each].name: indices for each, indices in by_topic(consumer.owned)
                 if each in self.bench.image.topics_by_id}  # fmt: skip
        subscription = Subscription(
            topics=list(consumer.topics),
            owned_partitions=[
                Subscription.TopicPartition(topic=name, partitions=indices) for name, indices in names.items()
            ],
        )
        is_known = consumer.member_id in self.bench.group.members
        request = join_request(
            consumer.member_id if consumer.instance_id is None or is_known else "",
            instance_id=consumer.instance_id,
            protocols=(Protocol("cooperative-sticky", b"\0\3" + encode(subscription, 3)),),
            new_member_id=consumer.member_id,
            session_timeout_ms=10_000,
            rebalance_timeout_ms=10_000,
        )
        try:
            joined = self.bench.classic_join(request)
            if consumer.instance_id is not None:
                self.replaced(consumer)
            synced = self.bench.classic_sync(SyncRequest(consumer.member_id, consumer.instance_id, joined.generation))
        except Refused:
            return
        except ApiError as error:
            self.end_classic(consumer, error.code)
            return
        consumer.epoch = joined.generation
        if synced.error is ErrorCode.NONE:
            topics = self.bench.image.topics
            consumer.owned = consumer.told = {
                (topics[each.topic].topic_id, index)
                for each in read_assignment(synced.assignment).assigned_partitions
                for index in each.partitions
            }

    @rule(which=st.integers(0, 9))
    def leave_classic(self, which: int) -> None:
        consumer = self.pick(which, is_classic=True)
        if consumer is None:
            return
        consumer.is_gone = True
        consumer.forget_everything()
        try:
            self.bench.classic_leave(LeaveRequest(consumer.member_id, consumer.instance_id))
        except Refused:
            pass

    # The rest of the world

    @rule(seconds=st.sampled_from((1, 5, 9)))
    def wait(self, seconds: int) -> None:
        self.bench.advance(seconds * 1_000)

    @rule(name=st.sampled_from(TOPICS), partitions=st.integers(1, 4))
    def change_topic(self, name: str, partitions: int) -> None:
        image = self.bench.image
        if name not in image.topics:
            self.bench.image = add_topic(image, name, partitions)
        elif partitions == 1:
            self.bench.image = drop_topic(image, name)
        else:
            self.bench.image = add_partitions(image, name, partitions)

    @rule(refuses=st.booleans())
    def refuse(self, refuses: bool) -> None:
        self.bench.refuses = refuses

    @rule()
    def fail_over(self) -> None:
        self.bench.group = self.bench.replayed()
        self.bench.timers.clear()
        step = Step(self.bench.group, self.bench.environment())
        modern.loaded(step)
        for effect in step.timers:
            self.bench._perform(effect)

    # What must hold

    @invariant()
    def nobody_has_what_is_anothers(self) -> None:
        held: dict[Partition, str] = {}
        for member in self.bench.group.members.values():
            for owned in (member.held.assigned, member.held.revoking):
                for topic_id, indices in owned.items():
                    for index in indices:
                        assert (topic_id, index) not in held, f"{index} is with {held[topic_id, index]} too"
                        held[topic_id, index] = member.member_id
                        assert self.bench.group.owner_of(topic_id, index) == member.member_id
        for consumer in self.consumers:
            if consumer.member_id in self.bench.group.members:
                for partition in consumer.owned:
                    # What was deleted may be anybody's.
                    if partition[0] in self.bench.image.topics_by_id:
                        assert held.get(partition) == consumer.member_id, (consumer, partition)

    @invariant()
    def epochs_only_grow(self) -> None:
        group = self.bench.group
        assert group.epoch.epoch >= self.group_epoch
        assert group.target_epoch.epoch <= group.epoch.epoch
        self.group_epoch = group.epoch.epoch
        for member in group.members.values():
            if member.held.epoch >= 0:
                assert member.held.epoch >= self.epochs.get(member.member_id, 0)
                self.epochs[member.member_id] = member.held.epoch

    @invariant()
    def replay_equals_live(self) -> None:
        assert state_of(self.bench.replayed()) == state_of(self.bench.group)

    def teardown(self) -> None:
        """Everybody who is still there goes on: the group comes to rest.

        So it does when its topics have grown, and when somebody has come and everybody lost the next answer; and that
        before anybody is removed for being slow.
        """
        self.bench.refuses = False
        self.come_to_rest(seconds=60)
        for name in list(self.bench.image.topics):
            self.bench.image = add_partitions(self.bench.image, name, 1)
        self.come_to_rest(seconds=25)
        self.join(set(TOPICS), None, None, None)
        for consumer in self.consumers:
            if not consumer.is_gone and not consumer.is_classic:
                self.beat_as(consumer, is_full=False, is_lost=True)
        self.come_to_rest(seconds=25)

    def come_to_rest(self, seconds: int) -> None:
        for _ in range(seconds):
            for consumer in self.consumers:
                if consumer.is_gone:
                    continue
                if not consumer.is_classic:
                    self.beat_as(consumer, is_full=False, is_lost=False)
                    consumer.owned = set(consumer.told)
                else:
                    self.beat_classic_as(consumer, is_lost=False)
            self.bench.advance(1_000)
        self.nobody_has_what_is_anothers()
        self.replay_equals_live()
        self.everything_has_an_owner()

    def everything_has_an_owner(self) -> None:
        group, image = self.bench.group, self.bench.image
        present = {each.member_id: each for each in self.consumers if not each.is_gone and each.epoch}
        assert set(group.members) == set(present)
        assert group.state is (ModernState.STABLE if present else ModernState.EMPTY)
        for member_id, consumer in present.items():
            assigned = group.members[member_id].held.assigned
            assert consumer.owned == {(topic_id, each) for topic_id, own in assigned.items() for each in own}
        wanted = {
            (image.topics[name].topic_id, index)
            for member in group.members.values()
            for name in group.topics_of(member.info)
            if name in image.topics
            for index in range(len(image.topics[name].partitions))
        }
        assert {(topic_id, index) for topic_id, owners in group.owners.items() for index in owners} == wanted
        for topic_id, index in wanted:
            owner = group.owner_of(topic_id, index)
            assert owner is not None
            assert image.topics_by_id[topic_id].name in group.topics_of(group.members[owner].info)


TestGroups = Groups.TestCase
TestGroups.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
