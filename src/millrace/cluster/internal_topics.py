"""Internal topics grow with the cluster: pure decisions about replicas that they lack.

An internal topic is made when somebody first needs it, with as many replicas as fit the brokers that are there then.
What groups and queues have committed must not hang on the few brokers of that moment, so later brokers get replicas of
it too, until it has as many as its setting says. It never shrinks by itself. Not here: how a topic is made
(`planning`), how a replica is added (`reassignments`), when this is looked at (`controller`).
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from millrace.cluster.image import ClusterImage, TopicImage
from millrace.cluster.planning import Plan
from millrace.cluster.reassignments import Reassignment, plan_reassignments
from millrace.config import BrokerConfig
from millrace.metadata.deltas import Change, ConfigChanged, ResourceType
from millrace.model import (
    AUDIT_LOG_TOPIC,
    CONSUMER_OFFSETS_TOPIC,
    NO_BROKER,
    SHARE_STATE_TOPIC,
    TRANSACTION_STATE_TOPIC,
)

_MIN_ISR: Final = "min.insync.replicas"

_SETTINGS: Final = {
    CONSUMER_OFFSETS_TOPIC: ("offsets.topic.replication.factor", None),
    TRANSACTION_STATE_TOPIC: ("transaction.state.log.replication.factor", "transaction.state.log.min.isr"),
    AUDIT_LOG_TOPIC: ("audit.log.topic.replication.factor", None),
    SHARE_STATE_TOPIC: ("share.coordinator.state.topic.replication.factor", "share.coordinator.state.topic.min.isr"),
}
"""How many replicas each is to have, and how many of them must be in sync."""


def plan_growth(image: ClusterImage, config: BrokerConfig) -> Plan[int]:
    """Give internal topics the replicas they lack, and what goes with them; how many partitions get some."""
    grown = 0
    changes: list[Change] = []
    for name, (factor_setting, isr_setting) in _SETTINGS.items():
        topic = image.topic(name)
        if topic is None:
            continue
        lacking = _lacking(image, topic, min(config.get_int(factor_setting), len(image.live_brokers)))
        if lacking:
            changes += plan_reassignments(image, lacking).changes
            grown += len(lacking)
        elif isr_setting is not None:
            changes += _more_in_sync(image, topic, config.get_int(isr_setting))
    return Plan(grown, tuple(changes))


def _lacking(image: ClusterImage, topic: TopicImage, factor: int) -> list[Reassignment]:
    held = Counter(replica for state in topic.partitions for replica in state.replicas)
    racks = {broker.broker_id: broker.rack for broker in image.live_brokers}
    lacking = []
    for index, state in enumerate(topic.partitions):
        if state.is_reassigning or state.leader == NO_BROKER or len(state.replicas) >= factor:
            continue
        replicas = list(state.replicas)
        while len(replicas) < factor:
            used = {racks.get(replica) for replica in replicas}
            free = [broker_id for broker_id in racks if broker_id not in replicas]
            if not free:
                break
            # In a rack that has none yet, where there are racks; then on the broker that has the fewest.
            chosen = min(free, key=lambda each: (racks[each] in used - {None}, held[each], each))
            held[chosen] += 1
            replicas.append(chosen)
        if len(replicas) > len(state.replicas):
            lacking.append(Reassignment(topic.name, index, tuple(replicas)))
    return lacking


def _more_in_sync(image: ClusterImage, topic: TopicImage, wanted: int) -> list[Change]:
    """Ask for more replicas in sync, once there are."""
    in_sync = min(0 if state.is_reassigning else len(state.isr) for state in topic.partitions)
    wanted = min(wanted, in_sync)
    current = int(image.topic_overrides(topic.name).get(_MIN_ISR, wanted))
    if current >= wanted:
        return []
    return [ConfigChanged(ResourceType.TOPIC, topic.name, ((_MIN_ISR, str(wanted)),))]
