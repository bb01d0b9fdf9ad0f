"""Moving replicas to other brokers (KIP-455): pure decisions about when a move begins, ends and is taken back.

A move adds the new replicas first: `replicas` is then the target in its order, followed by the brokers that will leave,
and `adding` and `removing` say which is which. It ends in the very change that brings the last new replica into the
ISR: the old ones go, and the leadership with them where they had it. Not here: copying records (`replication`), which
moves are worth making (`balance`).

Invariants
- A move never shrinks the ISR below what it was for a target that is not caught up: it ends only when every added
  replica is in sync, and, where it leaves fewer replicas than before, when every replica that stays is.
- Cancelling gives back the replicas from before, in their order except that those which were to leave stand last.
- Whenever a replica leaves, the leader epoch is raised, so that it cannot go on as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.cluster.directories import DirectoryChoice
from millrace.cluster.elections import RulesOf, TopicRules, awaits_recovery, changed, default_rules, numbered
from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import Plan
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import Change, PartitionChanged, PartitionState
from millrace.model import NO_BROKER


@dataclass(frozen=True, slots=True)
class Reassignment:
    """Where the replicas of a partition should be, the preferred leader first; None takes a move back."""

    topic: str
    index: int
    replicas: tuple[int, ...] | None


def completed(state: PartitionState) -> PartitionState:
    """`state` without the replicas that were to leave, if its ISR allows it; the epochs are the caller's business."""
    if not state.is_reassigning:
        return state
    replicas = tuple(replica for replica in state.replicas if replica not in state.removing)
    isr = tuple(member for member in state.isr if member not in state.removing)
    if not isr or not set(state.adding) <= set(isr):
        return state
    if len(state.adding) < len(state.removing) and not set(replicas) <= set(isr):
        return state
    directories = tuple(state.directory_of(replica) for replica in replicas) if state.directories else ()
    return replace(state, replicas=replicas, isr=isr, directories=directories, adding=(), removing=())


def plan_reassignments(
    image: ClusterImage,
    items: Sequence[Reassignment],
    *,
    allow_replication_factor_change: bool = True,
    rules_of: RulesOf = default_rules,
) -> Plan[list[ApiError | None]]:
    """Begin or take back moves; an error or None each, in order."""
    asked = Counter((item.topic, item.index) for item in items)
    choose = DirectoryChoice(image)
    results: list[ApiError | None] = []
    changes: list[Change] = []
    for item in items:
        try:
            if asked[item.topic, item.index] > 1:
                raise ApiError(ErrorCode.INVALID_REQUEST, "the request names this partition more than once")
            topic = image.topic(item.topic)
            if topic is None or not 0 <= item.index < len(topic.partitions):
                raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no such partition")
            state = topic.partitions[item.index]
            rules = rules_of(item.topic)
            there = {replica for replica in state.replicas if image.is_present(state, replica)}
            if item.replicas is None:
                after = _cancelled(state, there, rules)
            else:
                _check_target(image, state, item.replicas, allow_replication_factor_change)
                after = _begun(state, item.replicas, there, rules, choose)
        except ApiError as error:
            results.append(error)
            continue
        results.append(None)
        if after is not state:
            changes.append(PartitionChanged(topic.topic_id, item.index, after))
    return Plan(results, tuple(changes))


def _check_target(
    image: ClusterImage, state: PartitionState, target: tuple[int, ...], allow_replication_factor_change: bool
) -> None:
    problem = None
    if not target:
        problem = "a partition needs at least one replica"
    elif len(set(target)) != len(target):
        problem = "a broker is named more than once"
    elif unknown := [broker_id for broker_id in target if broker_id not in image.brokers]:
        problem = f"broker {unknown[0]} is not registered"
    if problem is not None:
        raise ApiError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, problem)
    before = len(state.replicas) - len(state.adding)
    if not allow_replication_factor_change and len(target) != before:
        text = f"the partition has {before} replicas, and the request would make it {len(target)}"
        raise ApiError(ErrorCode.INVALID_REPLICATION_FACTOR, text)


def _begun(
    state: PartitionState, target: tuple[int, ...], there: set[int], rules: TopicRules, choose: DirectoryChoice
) -> PartitionState:
    """The partition with a move to `target` under way, or done where nothing has to be copied first.

    A move that replaces another one starts from all replicas there are: those the first one added, and the second does
    not want, are removed when the second ends.
    """
    leaving = tuple(sorted(set(state.replicas) - set(target)))
    joining = tuple(sorted(set(target) - set(state.replicas)))
    # What was being added and is still wanted has not caught up: it goes on being added.
    joining = tuple(sorted({*joining, *(set(state.adding) & set(target) - set(state.isr))}))
    replicas = (*target, *leaving)
    directories = choose.for_replicas(replicas, state)
    begun = replace(state, replicas=replicas, directories=directories, adding=joining, removing=leaving)
    return _with_assignment(state, completed(begun), there, rules)


def _cancelled(state: PartitionState, there: set[int], rules: TopicRules) -> PartitionState:
    if not state.is_reassigning:
        raise ApiError(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, "no reassignment of this partition is under way")
    replicas = tuple(replica for replica in state.replicas if replica not in state.adding)
    isr = tuple(member for member in state.isr if member not in state.adding)
    if not isr:
        survivors = tuple(replica for replica in replicas if replica in there)
        if not rules.unclean or not survivors:
            text = "only the added replicas are in sync: taking the move back would lose records"
            raise ApiError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, text)
        isr = survivors[:1]
    directories = tuple(state.directory_of(replica) for replica in replicas) if state.directories else ()
    after = replace(state, replicas=replicas, isr=isr, directories=directories, adding=(), removing=())
    return _with_assignment(state, after, there, rules)


def _with_assignment(
    state: PartitionState, after: PartitionState, there: set[int], rules: TopicRules
) -> PartitionState:
    """`after` with a leader from its ISR and its epochs."""
    leader = state.leader
    if leader not in after.isr:
        leader = next((replica for replica in after.replicas if replica in after.isr and replica in there), NO_BROKER)
    if awaits_recovery(after):
        leader = NO_BROKER
    moved = changed(
        state,
        isr=after.isr,
        leader=leader,
        replicas=after.replicas,
        directories=after.directories,
        adding=after.adding,
        removing=after.removing,
        min_isr=rules.min_isr,
        new_leadership=not set(state.replicas) <= set(after.replicas),
    )
    return numbered(state, moved)
