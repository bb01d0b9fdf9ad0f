"""A live group changes its protocol: classic to KIP-848 and back, member by member, while it works.

Pure. A classic group becomes a consumer group when the first member of the new protocol joins it (`upgrade`), and
becomes classic again when the last one is gone (`downgrade`). Members keep their ids, epochs go on where generations
were, and nobody has to give up anything. What classic members of a consumer group are told meanwhile is in
`classic_members`. `group.consumer.migration.policy` says which way is open.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from uuid import UUID

from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode, ProtocolError
from millrace.groups.classic.effects import StoredGroup
from millrace.groups.classic.group import ClassicGroup, GroupState
from millrace.groups.classic.group import Member as ClassicMember
from millrace.groups.epochs import GroupEpoch, TargetEpoch
from millrace.groups.modern.group import Member, ModernGroup
from millrace.groups.modern.records import (
    ClassicInfo,
    EpochRecord,
    Held,
    HeldRecord,
    MemberInfo,
    MemberRecord,
    ModernRecord,
    TargetEpochRecord,
    TargetRecord,
)
from millrace.groups.settings import GroupSettings
from millrace.groups.subscription import (
    CONSUMER_PROTOCOL_TYPE,
    read_assignment,
    read_subscription,
    write_assignment,
)

_OWN_DATA_IS_A_HINT: Final = frozenset({"range", "roundrobin", "sticky", "cooperative-sticky"})
"""Assignors whose assignments say everything: librdkafka puts what a member told the leader into the user data of its
assignment, other clients what made it, and none needs it back. Kafka refuses them once a group has rebalanced twice.
"""


def check_upgrade(group: ClassicGroup, settings: GroupSettings) -> None:
    """ApiError GROUP_ID_NOT_FOUND where a classic group with members cannot become a consumer group."""
    cannot = f"Cannot upgrade classic group {group.group_id} to consumer group because"
    if not settings.may_upgrade:
        raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"{cannot} online upgrade is disabled.")
    if not group.uses_consumer_protocol:
        raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"{cannot} the group does not use the consumer embedded protocol.")
    if len(group.members) > settings.consumer_max_size:
        raise ApiError(
            ErrorCode.GROUP_ID_NOT_FOUND, f"{cannot} the group size exceeds the consumer group maximum size."
        )


def upgrade(classic: ClassicGroup, image: ClusterImage) -> list[ModernRecord]:
    """The records of the consumer group that a classic group with members becomes."""
    group_id, generation = classic.group_id, classic.generation
    draft = ModernGroup(group_id)
    taken: set[tuple[UUID, int]] = set()
    try:
        members = [_upgraded(classic, member, image, taken) for member in classic.members.values()]
    except ProtocolError as error:
        raise ApiError(
            ErrorCode.GROUP_ID_NOT_FOUND,
            f"classic group {group_id} cannot become a consumer group, what its members say cannot be read: {error}",
        ) from error
    records: list[ModernRecord] = [MemberRecord(group_id, member.member_id, member.info) for member in members]
    for record in records:
        draft.apply(record)
    records.append(EpochRecord(group_id, GroupEpoch(generation, draft.metadata_hash(image))))
    for member in members:
        target = {topic_id: tuple(sorted(owned)) for topic_id, owned in member.held.assigned.items()}
        records.append(TargetRecord(group_id, member.member_id, target))
    records.append(TargetEpochRecord(group_id, TargetEpoch(generation)))
    records += [HeldRecord(group_id, member.member_id, member.held) for member in members]
    return records


def _upgraded(
    classic: ClassicGroup, member: ClassicMember, image: ClusterImage, taken: set[tuple[UUID, int]]
) -> Member:
    subscription = read_subscription(member.metadata(classic.protocol_name) or member.protocols[0].metadata)
    assigned: dict[UUID, dict[int, int]] = {}
    if member.assignment:
        assignment = read_assignment(member.assignment)
        if assignment.user_data and classic.protocol_name not in _OWN_DATA_IS_A_HINT:
            raise ProtocolError("the user data of a custom assignor would be lost")
        for each in assignment.assigned_partitions:
            topic = image.topics.get(each.topic)
            for index in each.partitions:
                # Clients made this assignment: that no partition is in it twice is not ours to believe.
                if topic is not None and (topic.topic_id, index) not in taken:
                    taken.add((topic.topic_id, index))
                    assigned.setdefault(topic.topic_id, {})[index] = classic.generation
    info = MemberInfo(
        instance_id=member.instance_id,
        rack_id=subscription.rack_id or None,
        client_id=member.client_id,
        client_host=member.client_host,
        topics=tuple(sorted(set(subscription.topics))),
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        classic=ClassicInfo(member.session_timeout_ms, member.protocols),
    )
    return Member(member.member_id, info, Held(classic.generation, classic.generation, assigned=assigned))


def can_downgrade(group: ModernGroup, leaving: Collection[str], settings: GroupSettings) -> bool:
    """Whether only classic members are left once `leaving` are gone, and the group may become classic."""
    staying = [member for member in group.members.values() if member.member_id not in leaving]
    return (
        bool(staying)
        and all(member.is_classic for member in staying)
        and settings.may_downgrade
        and len(staying) <= settings.max_size
    )


def downgrade(
    group: ModernGroup, leaving: Collection[str], image: ClusterImage, now_ms: int
) -> tuple[ClassicGroup, StoredGroup]:
    """The classic group that a consumer group becomes, and its record; its members go on with their targets."""
    classic = ClassicGroup(
        group.group_id,
        state=GroupState.STABLE,
        state_timestamp_ms=now_ms,
        generation=group.epoch.epoch,
        protocol_type=CONSUMER_PROTOCOL_TYPE,
    )
    for member in group.members.values():
        if member.member_id in leaving:
            continue
        assert member.info.classic is not None
        classic.add_member(
            ClassicMember(
                member_id=member.member_id,
                instance_id=member.info.instance_id,
                client_id=member.info.client_id,
                client_host=member.info.client_host,
                session_timeout_ms=member.info.classic.session_timeout_ms,
                rebalance_timeout_ms=member.info.rebalance_timeout_ms,
                protocols=member.info.classic.protocols,
            ),
            CONSUMER_PROTOCOL_TYPE,
        )
    classic.protocol_name = classic.select_protocol()
    classic.refresh_subscribed_topics()
    for each in classic.members.values():
        each.assignment = assignment_bytes(
            {topic_id: list(indices) for topic_id, indices in group.target_of(each.member_id).items()},
            each.metadata(classic.protocol_name),
            image,
        )
    return classic, classic.to_record({each.member_id: each.assignment for each in classic.members.values()})


def assignment_bytes(partitions: dict[UUID, list[int]], metadata: bytes, image: ClusterImage) -> bytes:
    """Partitions as a classic consumer with this metadata is told of them; topics that are gone are left out."""
    named = {}
    for topic_id, indices in partitions.items():
        topic = image.topics_by_id.get(topic_id)
        if topic is not None:
            named[topic.name] = indices
    return write_assignment(named, metadata)
