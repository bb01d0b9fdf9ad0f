"""A share group under everything that can happen to it: nobody reads what has not begun, in the end all is read.

Members come, go, crash, lose answers and change their minds; topics come, grow and go; offsets are set and deleted; the
share coordinator hears of share-partitions late, or not at all; the log refuses records; the coordinator is replaced by
one that has read the log. After every step members read only what the share coordinator knows; epochs only grow; and a
replay of the log gives the same group. When things have calmed down every partition of a subscribed topic has a reader
and every member has something to read, if there is anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from millrace.errors import ApiError, ErrorCode
from millrace.groups.share import partitions as share_partitions
from millrace.groups.share import protocol as share
from millrace.groups.share.step import Partitions
from support.modern_groups import Refused, add_partitions, add_topic, drop_topic, image_of
from support.share_groups import ShareBench, share_state_of

TOPICS = ("a", "b", "c")
_NOT_EMPTY = {ErrorCode.NON_EMPTY_GROUP}
_REJOIN = {ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID}


@dataclass
class Reader:
    """A member as its client sees itself."""

    member_id: str
    topics: tuple[str, ...]
    epoch: int = 0
    is_unsure: bool = False
    """An answer was lost, or was an error: the next heartbeat says everything."""
    is_gone: bool = False


def expect(error: ApiError, codes: set[ErrorCode]) -> None:
    """Other errors should not be there."""
    assert error.code in codes


class ShareGroups(RuleBasedStateMachine):
    """Whatever happens to one group."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = ShareBench(image_of(a=3, b=1))
        self.readers: list[Reader] = []
        self.known: set[tuple[UUID, int]] = set()
        """What the share coordinator has."""
        self.ids = 0
        self.group_epoch = 0

    def pick(self, which: int) -> Reader | None:
        present = [each for each in self.readers if not each.is_gone]
        return present[which % len(present)] if present else None

    # Members

    @rule(topics=st.sets(st.sampled_from(TOPICS), min_size=1))
    def join(self, topics: set[str]) -> None:
        self.ids += 1
        self.readers.append(Reader(f"m{self.ids:03}", tuple(topics)))
        self.beat_as(self.readers[-1])

    @rule(which=st.integers(0, 9), is_full=st.booleans(), is_lost=st.booleans())
    def beat(self, which: int, is_full: bool, is_lost: bool) -> None:
        reader = self.pick(which)
        if reader is not None:
            self.beat_as(reader, is_full=is_full, is_lost=is_lost)

    def beat_as(self, reader: Reader, *, is_full: bool = False, is_lost: bool = False) -> None:
        says_all = is_full or reader.is_unsure or reader.epoch == 0
        try:
            answer = self.bench.heartbeat(reader.member_id, reader.epoch, topics=reader.topics if says_all else None)
        except Refused:
            reader.is_unsure = True
            return
        except ApiError as error:
            expect(error, _REJOIN)
            reader.epoch = 0
            return
        reader.is_unsure = is_lost
        if not is_lost:
            assert answer.assignment is not None or not says_all
            reader.epoch = answer.epoch

    @rule(which=st.integers(0, 9), topics=st.sets(st.sampled_from(TOPICS), min_size=1))
    def subscribe(self, which: int, topics: set[str]) -> None:
        reader = self.pick(which)
        if reader is not None:
            reader.topics = tuple(topics)
            self.beat_as(reader, is_full=True)

    @rule(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        reader = self.pick(which)
        if reader is not None:
            reader.is_gone = True
            try:
                self.bench.heartbeat(reader.member_id, -1)
            except Refused:
                pass
            except ApiError as error:
                expect(error, _REJOIN)

    @rule(which=st.integers(0, 9))
    def crash(self, which: int) -> None:
        reader = self.pick(which)
        if reader is not None:
            reader.is_gone = True

    # The share coordinator

    @rule(works=st.booleans())
    def told(self, works: bool) -> None:
        """It hears of share-partitions, or cannot be reached."""
        if self.bench.untold:
            self.tell(self.bench.untold[0], works=works)

    def tell(self, partitions: Partitions, *, works: bool) -> None:
        if works:
            self.known |= {(topic_id, index) for topic_id, indices in partitions.items() for index in indices}
        finish = share_partitions.initialized if works else share_partitions.not_initialized
        try:
            self.bench.decide(lambda step: finish(step, partitions))
        except Refused:
            return
        self.bench.untold.pop(0)

    # The administrator

    @rule(name=st.sampled_from(TOPICS), works=st.booleans())
    def set_offsets(self, name: str, works: bool) -> None:
        topic = self.bench.image.topics.get(name)
        if topic is None:
            return
        partitions = {topic.topic_id: frozenset(range(len(topic.partitions)))}
        try:
            self.bench.decide(lambda step: share_partitions.begin_anew(step, partitions))
        except Refused:
            return
        except ApiError as error:
            expect(error, _NOT_EMPTY)
            assert self.bench.group.members
            return
        self.bench.untold.insert(0, partitions)
        self.tell(partitions, works=works)

    @rule(name=st.sampled_from(TOPICS), works=st.booleans())
    def delete_offsets(self, name: str, works: bool) -> None:
        try:
            deletion = self.bench.decide(lambda step: share_partitions.begin_deletion(step, [name]))
        except Refused:
            return
        except ApiError as error:
            expect(error, _NOT_EMPTY)
            return
        if not deletion.partitions:
            assert deletion.unknown == (name,)
            return
        self.known -= {(topic_id, index) for topic_id, indices in deletion.partitions.items() for index in indices}
        if works:
            try:
                self.bench.decide(lambda step: share_partitions.deleted(step, deletion.partitions))
            except Refused:
                return

    @rule()
    def delete_group(self) -> None:
        """All of it: what is left is a group that can begin anew."""
        try:
            partitions = self.bench.decide(share_partitions.begin_end)
            self.known -= {(topic_id, index) for topic_id, indices in partitions.items() for index in indices}
            self.bench.decide(lambda step: [step.write(record) for record in self.bench.group.tombstones()])
        except Refused:
            return
        except ApiError as error:
            expect(error, _NOT_EMPTY)
            return
        assert self.bench.group.is_blank
        self.group_epoch = 0
        self.bench.untold.clear()

    # The world

    @rule(name=st.sampled_from(TOPICS), partitions=st.integers(1, 3))
    def create_topic(self, name: str, partitions: int) -> None:
        if name not in self.bench.image.topics:
            self.bench.image = add_topic(self.bench.image, name, partitions)

    @rule(name=st.sampled_from(TOPICS))
    def grow_topic(self, name: str) -> None:
        if name in self.bench.image.topics:
            self.bench.image = add_partitions(self.bench.image, name, 1)

    @rule(name=st.sampled_from(TOPICS))
    def delete_topic(self, name: str) -> None:
        topic = self.bench.image.topics.get(name)
        if topic is None or self.bench.refuses:
            return
        self.bench.image = drop_topic(self.bench.image, name)
        self.bench.decide(lambda step: share_partitions.forget_topics(step, [topic.topic_id]))

    @rule(refuses=st.booleans())
    def fill_the_disk(self, refuses: bool) -> None:
        self.bench.refuses = refuses

    @rule(milliseconds=st.integers(1, 50_000))
    def wait(self, milliseconds: int) -> None:
        self.bench.advance(milliseconds)

    @rule()
    def fail_over(self) -> None:
        """Another coordinator has read the log; what this one was about to tell is lost."""
        bench = self.bench
        bench.group = bench.replayed()
        bench.untold.clear()
        bench.timers.clear()
        bench.decide(share.loaded)

    # What must hold

    @invariant()
    def a_replay_gives_the_same(self) -> None:
        assert share_state_of(self.bench.replayed()) == share_state_of(self.bench.group)

    @invariant()
    def only_what_has_begun_is_read(self) -> None:
        group, image = self.bench.group, self.bench.image
        for topic_id, begun in group.partitions.initialized.items():
            assert {(topic_id, index) for index in begun.partitions} <= self.known
        for member in group.members.values():
            for topic_id, indices in member.held.assigned.items():
                if topic_id in image.topics_by_id:
                    assert {(topic_id, index) for index in indices} <= self.known

    @invariant()
    def epochs_grow(self) -> None:
        group = self.bench.group
        assert group.epoch.epoch >= self.group_epoch
        self.group_epoch = group.epoch.epoch
        assert group.target_epoch.epoch <= group.epoch.epoch
        assert all(member.held.epoch <= max(group.target_epoch.epoch, 0) for member in group.members.values())

    @invariant()
    def members_have_sessions(self) -> None:
        assert {key.member_id for key in self.bench.timers} == set(self.bench.group.members)
        assert set(self.bench.group.targets) <= set(self.bench.group.members)

    @rule()
    def calm_down(self) -> None:
        """Those who are gone are missed, everybody else hears of everything."""
        bench = self.bench
        bench.refuses = False
        present = [each for each in self.readers if not each.is_gone]
        for _ in range(12):
            bench.advance(9_000)
            for reader in present:
                self.beat_as(reader)
            while bench.untold:
                self.tell(bench.untold[0], works=True)
        for reader in present:
            self.beat_as(reader)
        assert set(bench.group.members) == {each.member_id for each in present}
        read: set[tuple[UUID, int]] = set()
        for reader in present:
            assigned = bench.group.members[reader.member_id].held.assigned
            read |= {(topic_id, index) for topic_id, indices in assigned.items() for index in indices}
            assert bool(assigned) == any(name in bench.image.topics for name in reader.topics)
        wanted = {name for reader in present for name in reader.topics}
        assert read == {
            (topic.topic_id, index)
            for topic in bench.image.topics.values()
            if topic.name in wanted
            for index in range(len(topic.partitions))
        }


TestShareGroups = ShareGroups.TestCase
TestShareGroups.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
