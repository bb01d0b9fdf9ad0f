"""Who leads a partition and who is in sync with it: pure decisions, from an image to the changes that follow.

Nothing here waits or writes; the controller plans every change through these functions, against its newest image. Not
here: moves of replicas to other brokers (`reassignments`), who is alive (`liveness`, `membership`).

Invariants (docs/coordination.md, 3 to 6)
- The ISR is never empty, and a leader is in it.
- Either every member of an ISR is live, or none is: the dead leave while a live member is left, and the last ones to
  die stay, because only they are known to have every committed record.
- A leader comes from the ISR, unless the topic allows unclean election; then the ISR is the new leader alone.
- A new incarnation of a broker counts as dead and come back: it keeps its place in an ISR only where nobody else lives.
- Every change of a leader, to nobody and to a new incarnation of the same broker too, raises the leader epoch by one.
  Every change of a partition raises its partition epoch by one.
- What happens to several brokers in one change is judged together: if all members of an ISR die at once, all stay.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from millrace.cluster.image import BrokerImage, ClusterImage, TopicImage
from millrace.cluster.planning import Plan
from millrace.config import BrokerConfig, topic_config
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import (
    BrokerFenced,
    BrokerRegistered,
    Change,
    PartitionChanged,
    PartitionState,
)
from millrace.model import NO_BROKER, TopicPartition

AllowsUnclean = Callable[[str], bool]
"""Whether a topic, by name, would rather lose records than be without a leader."""


def never_unclean(_topic: str) -> bool:
    """No topic allows unclean election."""
    return False


def unclean_topics(image: ClusterImage, config: BrokerConfig) -> AllowsUnclean:
    """What the settings of the topics and of the cluster say."""
    default = topic_config({}, config).unclean_leader_election_enable

    def allows(topic: str) -> bool:
        overrides = image.topic_overrides(topic)
        if "unclean.leader.election.enable" not in overrides:
            return default
        return topic_config(overrides, config).unclean_leader_election_enable

    return allows


# --- one partition ----------------------------------------------------------------------------------------------------


def settle(
    state: PartitionState, live: Collection[int], *, gone: Collection[int] = (), unclean: bool = False
) -> PartitionState:
    """The partition when the brokers in `live` are there, and those in `gone` have died since `state` was decided.

    A broker in both died and came back: it is there, but what it remembers of its logs is no longer taken on trust.
    """
    trusted = tuple(member for member in state.isr if member in live and member not in gone)
    if trusted:
        if state.leader in trusted:
            return advanced(state, isr=trusted)
        return advanced(state, isr=trusted, leader=_first(state.replicas, trusted))
    returned = [replica for replica in state.replicas if replica in state.isr and replica in live]
    if not returned and unclean:
        returned = [replica for replica in state.replicas if replica in live]
    if not returned:
        return advanced(state, leader=NO_BROKER)
    leader = returned[0]
    return advanced(state, isr=(leader,), leader=leader, new_leadership=leader in gone)


def _first(replicas: Iterable[int], members: Collection[int]) -> int:
    return next((replica for replica in replicas if replica in members), NO_BROKER)


def advanced(
    state: PartitionState,
    *,
    isr: tuple[int, ...] | None = None,
    leader: int | None = None,
    replicas: tuple[int, ...] | None = None,
    adding: tuple[int, ...] | None = None,
    removing: tuple[int, ...] | None = None,
    new_leadership: bool = False,
) -> PartitionState:
    """`state` with these values and the epochs that follow; the same object where nothing is different."""
    changed = replace(
        state,
        isr=state.isr if isr is None else isr,
        leader=state.leader if leader is None else leader,
        replicas=state.replicas if replicas is None else replicas,
        adding=state.adding if adding is None else adding,
        removing=state.removing if removing is None else removing,
    )
    if changed == state and not new_leadership:
        return state
    raised = int(new_leadership or changed.leader != state.leader)
    return replace(changed, leader_epoch=state.leader_epoch + raised, partition_epoch=state.partition_epoch + 1)


# --- brokers that come and go -----------------------------------------------------------------------------------------


def plan_brokers(
    image: ClusterImage,
    *,
    fence: Mapping[int, int] | None = None,
    unfence: Mapping[int, int] | None = None,
    register: Sequence[BrokerRegistered] = (),
    allows_unclean: AllowsUnclean = never_unclean,
) -> Plan[None]:
    """Brokers that die, count again, and come (as a new incarnation), all at once, with the elections that follow.

    `fence` and `unfence` map broker ids to the epoch that is meant: an order for another incarnation is void.
    """
    changes: list[Change] = []
    gone: set[int] = set()
    live = {broker.broker_id for broker in image.live_brokers}
    for change in register:
        known = image.brokers.get(change.broker_id)
        if known is None or known.broker_epoch < change.broker_epoch:
            changes.append(change)
            gone.add(change.broker_id)
            live.discard(change.broker_id)
            if not change.fenced:
                live.add(change.broker_id)
    registered = {change.broker_id for change in changes if isinstance(change, BrokerRegistered)}
    for broker in _meant(image, fence or {}, registered):
        if not broker.fenced:
            changes.append(BrokerFenced(broker.broker_id, broker.broker_epoch, fenced=True))
            gone.add(broker.broker_id)
            live.discard(broker.broker_id)
    for broker in _meant(image, unfence or {}, registered | gone):
        if broker.fenced:
            changes.append(BrokerFenced(broker.broker_id, broker.broker_epoch, fenced=False))
            live.add(broker.broker_id)
    if changes:
        changes += _settle_all(image, live, gone, allows_unclean)
    return Plan(None, tuple(changes))


def _meant(image: ClusterImage, epochs: Mapping[int, int], other: Collection[int]) -> list[BrokerImage]:
    return [
        broker
        for broker_id, epoch in epochs.items()
        if broker_id not in other
        and (broker := image.brokers.get(broker_id)) is not None
        and broker.broker_epoch == epoch
    ]


def _settle_all(
    image: ClusterImage, live: set[int], gone: set[int], allows_unclean: AllowsUnclean
) -> list[PartitionChanged]:
    changes = []
    for topic in image.topics.values():
        unclean = allows_unclean(topic.name)
        for index, state in enumerate(topic.partitions):
            if state.leader != NO_BROKER and gone.isdisjoint(state.isr):
                continue  # its members live on: nothing here can touch it
            settled = settle(state, live, gone=gone, unclean=unclean)
            if settled is not state:
                changes.append(PartitionChanged(topic.topic_id, index, settled))
    return changes


def plan_registrations(
    image: ClusterImage,
    members: Sequence[BrokerRegistered],
    *,
    dead: Mapping[int, int] | None = None,
    alive: Mapping[int, int] | None = None,
    allows_unclean: AllowsUnclean = never_unclean,
) -> Plan[None]:
    """What the image has to learn from who is registered in the store: newcomers, and those who are gone.

    `dead` are brokers that are registered still but known to have died, with the epoch of the incarnation that did;
    `alive` are those known to live although they may be fenced.
    """
    there = {member.broker_id for member in members}
    fence = {broker.broker_id: broker.broker_epoch for broker in image.live_brokers if broker.broker_id not in there}
    return plan_brokers(
        image,
        fence={**(dead or {}), **fence},
        unfence=alive,
        register=members,
        allows_unclean=allows_unclean,
    )


# --- ISR proposals of leaders -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IsrProposal:
    """An ISR that a leader asks for, with the epochs it saw. Members are (broker id, broker epoch or -1 if unknown).

    A leader that cannot serve the partition proposes an ISR without itself, and another member is elected.
    """

    topic_id: uuid.UUID
    index: int
    leader_epoch: int
    partition_epoch: int
    isr: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class IsrOutcome:
    """What became of one proposal, and the partition as it is now (None where there is none or it was refused)."""

    error: ErrorCode
    state: PartitionState | None = None


def plan_isr(
    image: ClusterImage,
    broker_id: int,
    proposals: Sequence[IsrProposal],
    *,
    complete: Callable[[PartitionState], PartitionState] = lambda state: state,
) -> Plan[list[IsrOutcome]]:
    """Proposals of the leader `broker_id`, each judged after those before it; one outcome each, in order.

    `complete` ends a reassignment that the new ISR makes complete; it sees the partition before the epochs are raised.
    """
    outcomes: list[IsrOutcome] = []
    changed: dict[tuple[uuid.UUID, int], PartitionState] = {}
    for proposal in proposals:
        key = (proposal.topic_id, proposal.index)
        state = changed.get(key) or image.partition(*key)
        error = _isr_error(image, state, broker_id, proposal)
        if error is not ErrorCode.NONE or state is None:
            outcomes.append(IsrOutcome(error))
            continue
        after = _with_isr(state, tuple(member for member, _ in proposal.isr), complete)
        if after is state:
            # The ISR as it is: raising the epoch makes every earlier proposal void that may still be on its way.
            after = replace(state, partition_epoch=state.partition_epoch + 1)
        changed[key] = after
        moved = after.leader != broker_id
        outcomes.append(IsrOutcome(ErrorCode.NEW_LEADER_ELECTED if moved else ErrorCode.NONE, after))
    changes = tuple(PartitionChanged(topic_id, index, state) for (topic_id, index), state in changed.items())
    return Plan(outcomes, changes)


def _isr_error(image: ClusterImage, state: PartitionState | None, broker_id: int, proposal: IsrProposal) -> ErrorCode:
    """The first thing that is wrong with a proposal, in the order in which Kafka's controller looks."""
    if proposal.topic_id not in image.topics_by_id:
        return ErrorCode.UNKNOWN_TOPIC_ID
    if state is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if proposal.leader_epoch > state.leader_epoch or proposal.partition_epoch > state.partition_epoch:
        return ErrorCode.NOT_CONTROLLER  # the leader knows more than this image: there is a newer controller
    if proposal.leader_epoch < state.leader_epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    if broker_id != state.leader:
        return ErrorCode.INVALID_REQUEST
    if proposal.partition_epoch < state.partition_epoch:
        return ErrorCode.INVALID_UPDATE_VERSION
    members = [member for member, _ in proposal.isr]
    if not members or len(set(members)) != len(members) or not set(members) <= set(state.replicas):
        return ErrorCode.INVALID_REQUEST
    if not all(_is_eligible(image, member, epoch) for member, epoch in proposal.isr):
        return ErrorCode.INELIGIBLE_REPLICA
    return ErrorCode.NONE


def _is_eligible(image: ClusterImage, broker_id: int, broker_epoch: int) -> bool:
    broker = image.brokers.get(broker_id)
    return broker is not None and not broker.fenced and broker_epoch in {-1, broker.broker_epoch}


def _with_isr(
    state: PartitionState, isr: tuple[int, ...], complete: Callable[[PartitionState], PartitionState]
) -> PartitionState:
    if set(isr) == set(state.isr):
        isr = state.isr
    target = complete(replace(state, isr=isr))
    leader = state.leader if state.leader in target.isr else _first(target.replicas, target.isr)
    return advanced(
        state,
        isr=target.isr,
        leader=leader,
        replicas=target.replicas,
        adding=target.adding,
        removing=target.removing,
        # A replica that is removed must not go on under the epoch in which it was one.
        new_leadership=not set(state.replicas) <= set(target.replicas),
    )


# --- elections that somebody asks for ---------------------------------------------------------------------------------


class ElectionKind(IntEnum):
    """What a leader is wanted for; the numbers are the protocol's."""

    PREFERRED = 0
    UNCLEAN = 1


ElectionResult = tuple[TopicPartition, ApiError | None]

_TEXTS: Final = {
    ErrorCode.ELECTION_NOT_NEEDED: "the partition has the leader it should have",
    ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE: "the preferred leader is not alive and in sync",
    ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE: "no replica of the partition is alive",
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: "there is no such partition",
}


def plan_elections(
    image: ClusterImage, kind: ElectionKind, partitions: Sequence[TopicPartition] | None
) -> Plan[list[ElectionResult]]:
    """Elect the preferred leader, or any leader at the price of records; None means every partition that needs it.

    With None, partitions that need no election are not in the results.
    """
    everything = partitions is None
    wanted = (
        [TopicPartition(topic.name, index) for topic, index, _ in image.partitions()]
        if partitions is None
        else list(dict.fromkeys(partitions))
    )
    live = {broker.broker_id for broker in image.live_brokers}
    results: list[ElectionResult] = []
    changes: list[Change] = []
    for partition in wanted:
        topic, state = _find(image, partition)
        code, after = _elect(state, kind, live)
        if code is ErrorCode.ELECTION_NOT_NEEDED and everything:
            continue
        results.append((partition, None if code is ErrorCode.NONE else ApiError(code, _TEXTS[code])))
        if topic is not None and after is not None:
            changes.append(PartitionChanged(topic.topic_id, partition.partition, after))
    return Plan(results, tuple(changes))


def _find(image: ClusterImage, partition: TopicPartition) -> tuple[TopicImage | None, PartitionState | None]:
    topic = image.topic(partition.topic)
    if topic is None or not 0 <= partition.partition < len(topic.partitions):
        return None, None
    return topic, topic.partitions[partition.partition]


def _elect(state: PartitionState | None, kind: ElectionKind, live: set[int]) -> tuple[ErrorCode, PartitionState | None]:
    if state is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, None
    if kind is ElectionKind.PREFERRED:
        preferred = state.replicas[0]
        if state.leader == preferred:
            return ErrorCode.ELECTION_NOT_NEEDED, None
        if preferred not in live or preferred not in state.isr:
            return ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, None
        return ErrorCode.NONE, advanced(state, leader=preferred)
    if state.leader != NO_BROKER:
        return ErrorCode.ELECTION_NOT_NEEDED, None
    after = settle(state, live, unclean=True)
    return (ErrorCode.NONE, after) if after is not state else (ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, None)


def plan_rebalance(image: ClusterImage) -> Plan[int]:
    """Give leadership back to every preferred leader that can take it; the result is how many did."""
    live = {broker.broker_id for broker in image.live_brokers}
    changes = []
    for topic, index, state in image.partitions():
        if state.leader != NO_BROKER:
            _, after = _elect(state, ElectionKind.PREFERRED, live)
            if after is not None:
                changes.append(PartitionChanged(topic.topic_id, index, after))
    return Plan(len(changes), tuple(changes))


def plan_unclean(image: ClusterImage, allows_unclean: AllowsUnclean) -> Plan[int]:
    """Elect somebody where nobody leads and the topic allows an unclean election; the result is how many."""
    live = {broker.broker_id for broker in image.live_brokers}
    changes = []
    for topic, index, state in image.partitions():
        if state.leader == NO_BROKER and allows_unclean(topic.name):
            after = settle(state, live, unclean=True)
            if after is not state:
                changes.append(PartitionChanged(topic.topic_id, index, after))
    return Plan(len(changes), tuple(changes))
