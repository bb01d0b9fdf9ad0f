"""A classic group with members as a consumer group: what is carried over, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

import pytest

from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode
from millrace.groups.classic.effects import Protocol
from millrace.groups.classic.group import ClassicGroup, GroupState, Member
from millrace.groups.modern import migration
from millrace.groups.modern.group import ModernGroup, ModernState
from millrace.groups.settings import GroupSettings
from millrace.groups.subscription import Assignment, Subscription, read_assignment
from millrace.wire.codec import encode
from support.modern_groups import image_of

GENERATION = 7


@dataclass
class World:
    """A classic group that was assigned something by one of its clients."""

    image: ClusterImage = field(default_factory=lambda: image_of(orders=4, bills=1))
    assignor: str = "cooperative-sticky"
    classic: ClassicGroup = field(default_factory=lambda: ClassicGroup("g", state=GroupState.STABLE))

    @property
    def orders(self) -> UUID:
        return self.image.topics["orders"].topic_id

    def add(self, member_id: str, *partitions: int, topic: str = "orders", user_data: bytes | None = None) -> Member:
        said = Subscription(topics=["orders"], rack_id="r1")
        given = Assignment(
            assigned_partitions=[Assignment.TopicPartition(topic=topic, partitions=list(partitions))],
            user_data=user_data,
        )
        member = Member(
            member_id=member_id,
            instance_id=None,
            client_id="client",
            client_host="/127.0.0.1",
            session_timeout_ms=10_000,
            rebalance_timeout_ms=60_000,
            protocols=(Protocol(self.assignor, b"\0\3" + encode(said, 3)),),
        )
        member.assignment = b"\0\3" + encode(given, 3)
        self.classic.add_member(member, "consumer")
        self.classic.generation = GENERATION
        self.classic.protocol_name = self.assignor
        return member

    def upgraded(self) -> ModernGroup:
        group = ModernGroup("g")
        for record in migration.upgrade(self.classic, self.image):
            group.apply(record)
        return group


@pytest.fixture
def world() -> World:
    return World()


def test_members_keep_what_they_have_and_their_generation(world: World) -> None:
    world.add("one", 0, 1)
    world.add("two", 2, 3)
    group = world.upgraded()
    assert group.state is ModernState.STABLE
    assert group.epoch.epoch == group.target_epoch.epoch == GENERATION
    assert group.epoch.metadata_hash == group.metadata_hash(world.image), "nothing has to be assigned anew"
    for member_id, owned in (("one", {0, 1}), ("two", {2, 3})):
        member = group.members[member_id]
        assert member.held.assigned == {world.orders: dict.fromkeys(owned, GENERATION)}
        assert group.target_of(member_id) == {world.orders: tuple(sorted(owned))}
        assert (member.info.rack_id, member.info.topics) == ("r1", ("orders",))
        assert member.info.classic is not None


def test_a_partition_that_clients_gave_away_twice_has_one_owner(world: World) -> None:
    world.add("one", 0, 1)
    world.add("two", 1, 2)
    group = world.upgraded()
    assert group.members["two"].held.assigned == {world.orders: {2: GENERATION}}


def test_what_is_assigned_of_a_topic_that_is_gone_is_left_out(world: World) -> None:
    world.add("one", 0, topic="deleted")
    assert world.upgraded().members["one"].held.assigned == {}


@pytest.mark.parametrize("assignor", ["range", "roundrobin", "sticky", "cooperative-sticky"])
def test_user_data_of_everyday_assignors_is_not_needed(world: World, assignor: str) -> None:
    """librdkafka hands a member's own user data back to it from the second rebalance on."""
    world.assignor = assignor
    world.add("one", 0, user_data=b"what I had before")
    assert world.upgraded().members["one"].held.assigned == {world.orders: {0: GENERATION}}


def test_user_data_of_an_assignor_of_ones_own_keeps_the_group_classic(world: World) -> None:
    world.assignor = "streams"
    world.add("one", 0, user_data=b"tasks")
    with pytest.raises(ApiError) as refused:
        world.upgraded()
    assert refused.value.code is ErrorCode.GROUP_ID_NOT_FOUND


def test_what_cannot_be_read_keeps_the_group_classic(world: World) -> None:
    world.add("one", 0).assignment = b"\0\3\0\0"
    with pytest.raises(ApiError) as refused:
        world.upgraded()
    assert refused.value.code is ErrorCode.GROUP_ID_NOT_FOUND


@pytest.mark.parametrize(
    "settings",
    [
        GroupSettings(migration_policy="downgrade"),
        GroupSettings(migration_policy="disabled"),
        GroupSettings(consumer_max_size=1),
    ],
)
def test_settings_can_forbid_the_change(world: World, settings: GroupSettings) -> None:
    world.add("one", 0)
    world.add("two", 1)
    migration.check_upgrade(world.classic, GroupSettings())
    with pytest.raises(ApiError) as refused:
        migration.check_upgrade(world.classic, settings)
    assert refused.value.code is ErrorCode.GROUP_ID_NOT_FOUND


def test_a_group_of_something_else_than_consumers_stays_as_it_is(world: World) -> None:
    world.add("one", 0)
    world.classic.protocol_type = "connect"
    with pytest.raises(ApiError) as refused:
        migration.check_upgrade(world.classic, GroupSettings())
    assert refused.value.code is ErrorCode.GROUP_ID_NOT_FOUND


def test_there_and_back_again(world: World) -> None:
    world.add("one", 0, 1)
    world.add("two", 2, 3)
    group = world.upgraded()
    assert migration.can_downgrade(group, ["two"], GroupSettings())
    assert not migration.can_downgrade(group, ["one", "two"], GroupSettings()), "nobody would be left"
    assert not migration.can_downgrade(group, ["two"], GroupSettings(migration_policy="upgrade"))
    classic, stored = migration.downgrade(group, ["two"], world.image, 5_000)
    assert (classic.generation, classic.protocol_name, list(classic.members)) == (
        GENERATION,
        "cooperative-sticky",
        ["one"],
    )
    assignment = read_assignment(classic.members["one"].assignment)
    assert [(each.topic, each.partitions) for each in assignment.assigned_partitions] == [("orders", [0, 1])]
    assert stored.members[0].assignment == classic.members["one"].assignment
