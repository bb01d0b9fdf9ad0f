"""Who leads a partition and who is in sync with it: pure decisions, from an image to the changes that follow.

Nothing here waits or writes; the controller plans every change through these functions, against its newest image. Not
here: elections for which replicas are asked what they have (`recovery`), moves of replicas to other brokers
(`reassignments`), in which directory a replica lies (`directories`), who is alive (`liveness`, `membership`).

A replica is *there* if its broker lives and has the directory in which it lies; otherwise it is *away*. A directory
that failed, was replaced or does not hold the log any more is no different from a broker that died.

Invariants (docs/coordination.md, 3 to 6 and 15 to 17)
- The ISR is never empty, and a leader is in it.
- Where somebody leads every member of the ISR is there: those that are away leave while a member is left, and the last
  ones stay, because only they are known to have every committed record.
- If the last ones were several, none of them leads by coming back: which one does is decided by what they have.
- A leader comes from the ISR or from the eligible leader replicas (`PartitionState.elr`), unless the topic or a person
  allows unclean election; then the ISR is the new leader alone.
- Whoever leaves an ISR that is then smaller than min.insync.replicas is eligible as long as it stays so: while there
  is an eligible replica outside of the ISR, the leader commits nothing.
- A new incarnation of a broker counts as dead and come back: it keeps its place in an ISR only where nobody else lives.
- A replica that may have less than it promised lies in LOST_DIRECTORY, and is away until it is made anew.
- Every change of a leader, to nobody and to a new incarnation of the same broker too, raises the leader epoch by one.
  Every change of a partition raises its partition epoch by one.
- What happens to several brokers in one change is judged together: if all members of an ISR die at once, all stay.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, NamedTuple

from millrace.cluster.directories import (
    DirectoryChoice,
    directories_by_replica,
    directory_after_restart,
    is_gone,
    located,
    with_directory,
)
from millrace.cluster.image import BrokerImage, ClusterImage, TopicImage
from millrace.cluster.planning import Plan
from millrace.config import BrokerConfig, topic_config
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import (
    BrokerFenced,
    BrokerRegistered,
    Change,
    Directories,
    DirectoriesChanged,
    PartitionChanged,
    PartitionState,
)
from millrace.model import (
    FAILED_DIRECTORY,
    LOST_DIRECTORY,
    NO_BROKER,
    STATE_TOPICS,
    UNASSIGNED_DIRECTORY,
    TopicPartition,
)


@dataclass(frozen=True, slots=True)
class TopicRules:
    """What the settings of a topic mean for its elections."""

    unclean: bool = False
    """Whether it would rather lose records than be without a leader."""
    min_isr: int = 1
    flushed: bool = True
    """Whether a replica promises only what is on its disk."""


RulesOf = Callable[[str], TopicRules]
"""The rules of a topic, by name."""

_DEFAULT_RULES: Final = TopicRules()
_RULING: Final = frozenset({"unclean.leader.election.enable", "min.insync.replicas", "flush.mode", "flush.messages"})


def default_rules(_topic: str) -> TopicRules:
    """No unclean election, one replica in sync, everything promised is on disk."""
    return _DEFAULT_RULES


def topic_rules(image: ClusterImage, config: BrokerConfig) -> RulesOf:
    """What the settings of the topics and of the cluster say."""

    def rules(overrides: Mapping[str, str]) -> TopicRules:
        settings = topic_config(overrides, config)
        return TopicRules(
            settings.unclean_leader_election_enable,
            settings.min_insync_replicas,
            settings.flushes_before_promise,
        )

    default = rules({})

    def of(topic: str) -> TopicRules:
        overrides = image.topic_overrides(topic)
        return default if _RULING.isdisjoint(overrides) else rules(overrides)

    return of


# --- one partition ----------------------------------------------------------------------------------------------------


def next_state(
    state: PartitionState,
    there: Collection[int],
    *,
    gone: Collection[int] = (),
    full: Collection[int] = (),
    rules: TopicRules = _DEFAULT_RULES,
) -> PartitionState:
    """The partition when the replicas in `there` are there, and those in `gone` went away since `state` was decided.

    A replica in both went and came back: it is there, but what it remembers of its log is no longer taken on trust. One
    in `full` has everything but can take no more: it makes room for those that can. The partition epoch is the
    caller's business (`numbered`).
    """
    if awaits_recovery(state):
        return changed(state, min_isr=rules.min_isr)
    trusted = tuple(member for member in state.isr if member in there and member not in gone)
    if trusted:
        isr = tuple(member for member in trusted if member not in full) or trusted
        leader = state.leader if state.leader in isr else _first(state.replicas, isr)
        return changed(state, isr=isr, leader=leader, min_isr=rules.min_isr)
    if len(state.isr) == 1:
        able = [each for each in state.replicas if each in (*state.isr, *state.elr) and each in there]
    else:  # all died at once
        able = [each for each in state.replicas if each in state.elr and each in there and each not in gone]
    if able:
        leader = min(able, key=lambda each: (each in full, each not in state.isr))
        return changed(state, isr=(leader,), leader=leader, min_isr=rules.min_isr, new_leadership=leader in gone)
    return changed(state, leader=NO_BROKER, min_isr=rules.min_isr)


def awaits_recovery(state: PartitionState) -> bool:
    """Whether several died at once, so that those who come back are asked what they have before one of them leads."""
    return state.leader == NO_BROKER and len(state.isr) > 1


def led_from_nobody(
    image: ClusterImage, state: PartitionState, leader: int, rules: TopicRules, choose: DirectoryChoice
) -> PartitionState:
    """A partition without a leader with this one, which has a log.

    If it is not one of those who have everything, whatever they had does not count any more.
    """
    after = changed(state, isr=(leader,), leader=leader, min_isr=rules.min_isr)
    if not has_everything(image, state, leader):
        after = replace(after, elr=())
    if not image.is_present(state, leader):  # its broker will say where the log is
        online = image.brokers[leader].directories.online
        directory = online[0] if len(online) == 1 else UNASSIGNED_DIRECTORY
        after = replace(after, directories=with_directory(after, leader, directory))
    return numbered(state, _made_anew(after, Attendance(image.brokers), choose))


def has_everything(image: ClusterImage, state: PartitionState, broker_id: int) -> bool:
    """Whether a replica is there and known to have every committed record."""
    return broker_id in (*state.isr, *state.elr) and image.is_present(state, broker_id)


def _first(replicas: Iterable[int], members: Collection[int]) -> int:
    return next((replica for replica in replicas if replica in members), NO_BROKER)


def changed(
    state: PartitionState,
    *,
    isr: tuple[int, ...] | None = None,
    leader: int | None = None,
    replicas: tuple[int, ...] | None = None,
    directories: tuple[str, ...] | None = None,
    adding: tuple[int, ...] | None = None,
    removing: tuple[int, ...] | None = None,
    new_leadership: bool = False,
    min_isr: int = 1,
) -> PartitionState:
    """`state` with these values, and the eligible replicas and the leader epoch that follow; then see `numbered`."""
    isr = state.isr if isr is None else isr
    leader = state.leader if leader is None else leader
    replicas = state.replicas if replicas is None else replicas
    directories = state.directories if directories is None else directories
    # Not `replace`, which takes three times as long: a failover makes thousands of these.
    return PartitionState(
        replicas,
        isr,
        leader,
        state.leader_epoch + int(new_leadership or leader != state.leader),
        state.partition_epoch,
        state.adding if adding is None else adding,
        state.removing if removing is None else removing,
        _eligible(state, replicas, isr, directories, min_isr),
        directories,
    )


def numbered(before: PartitionState, after: PartitionState) -> PartitionState:
    """`after` with the partition epoch that follows; `before` itself where nothing is different."""
    if after == before:
        return before
    return PartitionState(
        after.replicas,
        after.isr,
        after.leader,
        after.leader_epoch,
        before.partition_epoch + 1,
        after.adding,
        after.removing,
        after.elr,
        after.directories,
    )


def _eligible(
    before: PartitionState,
    replicas: tuple[int, ...],
    isr: tuple[int, ...],
    directories: tuple[str, ...],
    min_isr: int,
) -> tuple[int, ...]:
    """Who of `replicas` has everything without being in the new `isr`.

    While it is smaller than `min_isr`, or there is such a replica, the leader commits nothing. So whoever was in the
    ISR, or eligible, when that began still has everything that was ever committed.
    """
    if len(isr) >= min(min_isr, len(replicas)):
        return ()
    known = (*before.isr, *before.elr)
    return tuple(
        replica
        for replica, directory in zip(replicas, directories or (UNASSIGNED_DIRECTORY,) * len(replicas), strict=True)
        if replica in known and replica not in isr and directory != LOST_DIRECTORY
    )


# --- replicas that come and go ----------------------------------------------------------------------------------------


class Attendance(NamedTuple):
    """What partitions are decided on by: the brokers as they are now, and what happened to some of them."""

    brokers: Mapping[int, BrokerImage]
    gone: Collection[int] = ()
    """Brokers that died, or came back as another incarnation, in this change."""
    returned: Mapping[int, tuple[BrokerImage, BrokerRegistered]] = {}
    """Of those that came back: how they were known, and what they say."""
    touched: Collection[int] = ()
    """Brokers whose partitions have to be looked at for another reason."""


def _next_states(image: ClusterImage, attendance: Attendance, rules_of: RulesOf) -> list[PartitionChanged]:
    changes = []
    touched = {*attendance.gone, *attendance.touched}
    choose = DirectoryChoice(image)
    for topic in image.topics.values():
        rules = rules_of(topic.name)
        for index, state in enumerate(topic.partitions):
            if state.leader != NO_BROKER and touched.isdisjoint(state.replicas):
                continue  # its replicas are as they were: nothing here can touch it
            after = numbered(state, _next_state_in(topic.name, state, attendance, rules, choose))
            if after is not state:
                changes.append(PartitionChanged(topic.topic_id, index, after))
    return changes


def _next_state_in(
    topic: str, state: PartitionState, attendance: Attendance, rules: TopicRules, choose: DirectoryChoice
) -> PartitionState:
    """One partition, from brokers and their directories to its leader, its ISR, and where its replicas lie."""
    placed = state if attendance.returned.keys().isdisjoint(state.replicas) else _placed(state, attendance, rules)
    there, full = [], []
    may_use_reserve = topic in STATE_TOPICS
    for replica, directory in located(placed):
        broker = attendance.brokers.get(replica)
        if broker is not None and not broker.fenced and broker.has_directory(directory):
            there.append(replica)
            if directory in broker.directories.full and not may_use_reserve:
                full.append(replica)
    after = next_state(placed, there, gone=attendance.gone, full=full, rules=rules)
    return _made_anew(after, attendance, choose)


def _placed(state: PartitionState, attendance: Attendance, rules: TopicRules) -> PartitionState:
    """With the directories as they are for brokers that have come back; one that was eligible may have lost that."""
    directories = directories_by_replica(state)
    for replica in state.replicas:
        if replica not in attendance.returned:
            continue
        known, registered = attendance.returned[replica]
        directory = directory_after_restart(directories.get(replica, UNASSIGNED_DIRECTORY), known, registered)
        if not rules.flushed and len(state.replicas) > 1 and _may_have_lost_memory(known, registered):
            # The machine lost what its kernel had not written yet. A replica that is alone is the best there is.
            directory = LOST_DIRECTORY
        directories[replica] = directory
    return _with_directories(state, tuple(directories.get(each, UNASSIGNED_DIRECTORY) for each in state.replicas))


def _with_directories(state: PartitionState, directories: tuple[str, ...]) -> PartitionState:
    if not state.directories and all(each == UNASSIGNED_DIRECTORY for each in directories):
        return state
    if directories == state.directories:
        return state
    lost = {each for each, directory in zip(state.replicas, directories, strict=True) if directory == LOST_DIRECTORY}
    return replace(state, directories=directories, elr=tuple(each for each in state.elr if each not in lost))


def _may_have_lost_memory(known: BrokerImage, registered: BrokerRegistered) -> bool:
    """Whether the machine was started again without the broker having put everything on disk."""
    is_another_boot = not registered.boot_id or registered.boot_id != known.boot_id
    return is_another_boot and registered.clean_epoch != known.broker_epoch


def _made_anew(state: PartitionState, attendance: Attendance, choose: DirectoryChoice) -> PartitionState:
    """Where somebody leads, a replica whose log is gone for good begins again in a directory that its broker has."""
    if state.leader == NO_BROKER or not state.directories:
        return state
    for replica, directory in located(state):
        broker = None if replica in state.isr else attendance.brokers.get(replica)
        if broker is None or broker.fenced or not broker.directories.online:
            continue
        if is_gone(broker, directory):
            state = replace(
                state,
                directories=with_directory(state, replica, choose(broker)),
                elr=tuple(each for each in state.elr if each != replica),
            )
    return state


def plan_brokers(
    image: ClusterImage,
    *,
    fence: Mapping[int, int] | None = None,
    unfence: Mapping[int, int] | None = None,
    register: Sequence[BrokerRegistered] = (),
    rules_of: RulesOf = default_rules,
) -> Plan[None]:
    """Brokers that die, count again, and come (as a new incarnation), all at once, with the elections that follow.

    `fence` and `unfence` map broker ids to the epoch that is meant: an order for another incarnation is void.
    """
    changes: list[Change] = []
    gone: set[int] = set()
    returned: dict[int, tuple[BrokerImage, BrokerRegistered]] = {}
    for change in register:
        known = image.brokers.get(change.broker_id)
        if known is None or known.broker_epoch < change.broker_epoch:
            changes.append(change)
            gone.add(change.broker_id)
            if known is not None:
                returned[change.broker_id] = (known, change)
    registered = {change.broker_id for change in changes if isinstance(change, BrokerRegistered)}
    for broker in _meant(image, fence or {}, registered):
        if not broker.fenced:
            changes.append(BrokerFenced(broker.broker_id, broker.broker_epoch, fenced=True))
            gone.add(broker.broker_id)
    touched: set[int] = set()
    for broker in _meant(image, unfence or {}, registered | gone):
        if broker.fenced:
            changes.append(BrokerFenced(broker.broker_id, broker.broker_epoch, fenced=False))
            touched.add(broker.broker_id)
    if changes:
        brokers = image.apply(tuple(changes)).brokers
        changes += _next_states(image, Attendance(brokers, gone, returned, touched), rules_of)
    return Plan(None, tuple(changes))


def plan_directories(
    image: ClusterImage, broker_id: int, directories: Directories, *, rules_of: RulesOf = default_rules
) -> Plan[None]:
    """A broker says which of its directories are there and which are full."""
    broker = image.brokers[broker_id]
    if broker.directories == directories:
        return Plan(None)
    change = DirectoriesChanged(broker_id, broker.broker_epoch, directories)
    attendance = Attendance(image.apply((change,)).brokers, touched={broker_id})
    return Plan(None, (change, *_next_states(image, attendance, rules_of)))


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a replica lies, as its broker says: in a directory, or in LOST_DIRECTORY or FAILED_DIRECTORY."""

    topic_id: uuid.UUID
    index: int
    directory: str


def plan_placements(
    image: ClusterImage, broker_id: int, placements: Sequence[Placement], *, rules_of: RulesOf = default_rules
) -> Plan[list[ErrorCode]]:
    """A broker says where its replicas lie; an error each, in order.

    What is lost stays lost: only a replica that begins anew, or an unclean election, makes up for it.
    """
    attendance = Attendance(image.brokers)
    choose = DirectoryChoice(image)
    errors: list[ErrorCode] = []
    moved: dict[tuple[uuid.UUID, int], PartitionState] = {}
    for placement in placements:
        key = (placement.topic_id, placement.index)
        topic = image.topics_by_id.get(placement.topic_id)
        state = moved.get(key) or image.partition(*key)
        error = _placement_error(image.brokers[broker_id], state, placement.directory)
        errors.append(error)
        if error is not ErrorCode.NONE or topic is None or state is None:
            continue
        placed = _with_directories(state, with_directory(state, broker_id, placement.directory))
        after = numbered(state, _next_state_in(topic.name, placed, attendance, rules_of(topic.name), choose))
        if after is not state:
            moved[key] = after
    changes = tuple(PartitionChanged(topic_id, index, state) for (topic_id, index), state in moved.items())
    return Plan(errors, changes)


def _placement_error(broker: BrokerImage, state: PartitionState | None, directory: str) -> ErrorCode:
    if state is None or broker.broker_id not in state.replicas:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if directory in {LOST_DIRECTORY, FAILED_DIRECTORY}:
        return ErrorCode.NONE
    if directory not in broker.directories.online:
        return ErrorCode.INVALID_REQUEST
    is_usable = state.directory_of(broker.broker_id) not in {LOST_DIRECTORY, FAILED_DIRECTORY}
    return ErrorCode.NONE if is_usable else ErrorCode.INVALID_REQUEST


def _meant(image: ClusterImage, epochs: Mapping[int, int], other: Collection[int]) -> list[BrokerImage]:
    return [
        broker
        for broker_id, epoch in epochs.items()
        if broker_id not in other
        and (broker := image.brokers.get(broker_id)) is not None
        and broker.broker_epoch == epoch
    ]


def plan_registrations(
    image: ClusterImage,
    members: Sequence[BrokerRegistered],
    *,
    dead: Mapping[int, int] | None = None,
    alive: Mapping[int, int] | None = None,
    rules_of: RulesOf = default_rules,
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
        rules_of=rules_of,
    )


# --- ISR proposals of leaders -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IsrProposal:
    """An ISR that a leader asks for, with the epochs it saw. Members are (broker id, broker epoch or -1 if unknown)."""

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
    rules_of: RulesOf = default_rules,
) -> Plan[list[IsrOutcome]]:
    """Proposals of the leader `broker_id`, each judged after those before it; one outcome each, in order.

    `complete` ends a reassignment that the new ISR makes complete; it sees the partition before the epochs are raised.
    """
    outcomes: list[IsrOutcome] = []
    altered: dict[tuple[uuid.UUID, int], PartitionState] = {}
    for proposal in proposals:
        key = (proposal.topic_id, proposal.index)
        state = altered.get(key) or image.partition(*key)
        topic = image.topics_by_id.get(proposal.topic_id)
        error = _isr_error(image, topic, state, broker_id, proposal)
        if error is not ErrorCode.NONE or state is None or topic is None:
            outcomes.append(IsrOutcome(error))
            continue
        min_isr = rules_of(topic.name).min_isr
        after = _with_isr(state, tuple(member for member, _ in proposal.isr), complete, min_isr)
        if after is state:
            # The ISR as it is: raising the epoch makes every earlier proposal void that may still be on its way.
            after = replace(state, partition_epoch=state.partition_epoch + 1)
        altered[key] = after
        moved = after.leader != broker_id
        outcomes.append(IsrOutcome(ErrorCode.NEW_LEADER_ELECTED if moved else ErrorCode.NONE, after))
    changes = tuple(PartitionChanged(topic_id, index, state) for (topic_id, index), state in altered.items())
    return Plan(outcomes, changes)


def _isr_error(
    image: ClusterImage,
    topic: TopicImage | None,
    state: PartitionState | None,
    broker_id: int,
    proposal: IsrProposal,
) -> ErrorCode:
    """The first thing that is wrong with a proposal, in the order in which Kafka's controller looks."""
    if topic is None:
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
    if not all(may_be_in_sync(image, topic.name, state, member, epoch) for member, epoch in proposal.isr):
        return ErrorCode.INELIGIBLE_REPLICA
    return ErrorCode.NONE


def may_be_in_sync(
    image: ClusterImage, topic: str, state: PartitionState, broker_id: int, broker_epoch: int = -1
) -> bool:
    """Whether a replica, in this incarnation of its broker (-1: any), may be in the ISR: it is there and has room.

    One that is in it already stays without room, until `next_state` decides who makes way for whom.
    """
    if not image.is_present(state, broker_id) or broker_epoch not in {-1, image.brokers[broker_id].broker_epoch}:
        return False
    return broker_id in state.isr or image.takes_records(topic, state, broker_id)


def _with_isr(
    state: PartitionState,
    isr: tuple[int, ...],
    complete: Callable[[PartitionState], PartitionState],
    min_isr: int,
) -> PartitionState:
    if set(isr) == set(state.isr):
        isr = state.isr
    target = complete(replace(state, isr=isr))
    leader = state.leader if state.leader in target.isr else _first(target.replicas, target.isr)
    after = changed(
        state,
        isr=target.isr,
        leader=leader,
        replicas=target.replicas,
        directories=target.directories,
        adding=target.adding,
        removing=target.removing,
        min_isr=min_isr,
        # A replica that is removed must not go on under the epoch in which it was one.
        new_leadership=not set(state.replicas) <= set(target.replicas),
    )
    return numbered(state, after)


# --- elections that somebody asks for ---------------------------------------------------------------------------------


class ElectionKind(IntEnum):
    """What a leader is wanted for; the numbers are the protocol's."""

    PREFERRED = 0
    UNCLEAN = 1


ElectionResult = tuple[TopicPartition, ApiError | None]

_TEXTS: Final = {
    ErrorCode.ELECTION_NOT_NEEDED: "the partition has the leader it should have",
    ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE: "the preferred leader is not alive and in sync",
    ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE: (
        "no replica of the partition is on a running broker with a log that can be read: start a broker that has one, "
        "or put its disk back"
    ),
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: "there is no such partition",
}


class LogEnd(NamedTuple):
    """How far a replica's log reaches; of two, the larger one has more."""

    epoch: int
    """The leader epoch of its last record."""
    offset: int


PartitionKey = tuple[uuid.UUID, int]
"""A partition by the id of its topic, which no other topic ever has."""
LogEnds = Mapping[PartitionKey, Mapping[int, LogEnd | None]]
"""What the replicas of partitions have, by broker, as far as they answered; None for a log that is of no use."""


def plan_elections(
    image: ClusterImage,
    kind: ElectionKind,
    partitions: Sequence[TopicPartition] | None,
    ends: LogEnds | None = None,
    *,
    rules_of: RulesOf = default_rules,
) -> Plan[list[ElectionResult]]:
    """Elect the preferred leader, or any leader at the price of records; None means every partition that needs it.

    With None, partitions that need no election are not in the results. An unclean leader is the one that has most of
    the log, by `ends`; who is not named there cannot lead.
    """
    choose = DirectoryChoice(image)
    everything = partitions is None
    wanted = (
        [TopicPartition(topic.name, index) for topic, index, _ in image.partitions()]
        if partitions is None
        else list(dict.fromkeys(partitions))
    )
    results: list[ElectionResult] = []
    changes: list[Change] = []
    for partition in wanted:
        topic, state = _find(image, partition)
        if topic is None or state is None:
            code, after = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, None
        elif kind is ElectionKind.PREFERRED:
            code, after = _elect_preferred(image, topic.name, state)
        else:
            known = (ends or {}).get((topic.topic_id, partition.partition), {})
            code, after = _elect_uncleanly(image, state, known, rules_of(topic.name), choose)
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


def _elect_preferred(image: ClusterImage, topic: str, state: PartitionState) -> tuple[ErrorCode, PartitionState | None]:
    preferred = state.replicas[0]
    if state.leader == preferred:
        return ErrorCode.ELECTION_NOT_NEEDED, None
    is_able = image.is_present(state, preferred) and image.takes_records(topic, state, preferred)
    if preferred not in state.isr or not is_able or state.leader == NO_BROKER:
        return ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, None
    # The ISR is as it was, and so is who else has everything.
    leader_epoch, partition_epoch = state.leader_epoch + 1, state.partition_epoch + 1
    return ErrorCode.NONE, replace(state, leader=preferred, leader_epoch=leader_epoch, partition_epoch=partition_epoch)


def _elect_uncleanly(
    image: ClusterImage,
    state: PartitionState,
    ends: Mapping[int, LogEnd | None],
    rules: TopicRules,
    choose: DirectoryChoice,
) -> tuple[ErrorCode, PartitionState | None]:
    """Whoever has most; one that has everything, where there is one."""
    if state.leader != NO_BROKER:
        return ErrorCode.ELECTION_NOT_NEEDED, None
    able = {each: end for each in state.replicas if image.is_live(each) and (end := ends.get(each)) is not None}
    if not able:
        return ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, None
    leader = max(able, key=lambda each: (has_everything(image, state, each), able[each]))
    return ErrorCode.NONE, led_from_nobody(image, state, leader, rules, choose)


def plan_rebalance(image: ClusterImage) -> Plan[int]:
    """Give leadership back to every preferred leader that can take it; the result is how many did."""
    changes = []
    for topic, index, state in image.partitions():
        if state.leader != NO_BROKER:
            _, after = _elect_preferred(image, topic.name, state)
            if after is not None:
                changes.append(PartitionChanged(topic.topic_id, index, after))
    return Plan(len(changes), tuple(changes))


def plan_by_settings(image: ClusterImage, rules_of: RulesOf) -> Plan[int]:
    """What follows when settings of topics have changed; the result is how many partitions it concerns.

    Where fewer replicas have to be in sync than before, the leader may commit again, and nobody outside of the ISR is
    eligible any more.
    """
    changes = []
    attendance = Attendance(image.brokers)
    choose = DirectoryChoice(image)
    for topic, index, state in image.partitions():
        if state.elr:
            after = numbered(state, _next_state_in(topic.name, state, attendance, rules_of(topic.name), choose))
            if after is not state:
                changes.append(PartitionChanged(topic.topic_id, index, after))
    return Plan(len(changes), tuple(changes))
