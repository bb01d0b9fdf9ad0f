"""The coordinators of a broker: groups, queues and transactions, joined with each other and with what they need of it.

Each keeps its state in an internal topic, and answers for the partitions of it that this broker leads. Not here: the
broker's other parts (`broker`), and everything that a coordinator does.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from millrace.clock import Clock
from millrace.cluster.controller import Controller
from millrace.cluster.peers import Peers
from millrace.config import BrokerConfig, group_value, topic_value
from millrace.errors import ApiError, ErrorCode
from millrace.groups.coordinator import GroupCoordinator
from millrace.groups.modern.groups import GroupDependencies
from millrace.groups.settings import GroupSettings, GroupTimes
from millrace.groups.share.groups import ShareGroupDependencies
from millrace.handlers.context import Services
from millrace.handlers.markers import write_markers
from millrace.metadata.deltas import ResourceType
from millrace.model import CONSUMER_OFFSETS_TOPIC, SHARE_STATE_TOPIC, TRANSACTION_STATE_TOPIC, TopicPartition
from millrace.queues.coordinator import ShareCoordinator
from millrace.queues.counting import QueueCounts
from millrace.queues.dead_letter_office import DeadLetterOffice
from millrace.queues.dead_letters import TAKES_DEAD_LETTERS
from millrace.queues.partitions import SharePartitions
from millrace.queues.persister import Persister
from millrace.queues.records import ShareKey
from millrace.queues.settings import CoordinatorSettings, DeadLetterSettings, KnownSettings, QueueSettings
from millrace.replication.partition import Partition
from millrace.replication.replicas import Replicas
from millrace.replication.state_topic import StateTopic
from millrace.transactions.coordinator import TransactionCoordinator
from millrace.transactions.gate import Gate
from millrace.transactions.markers import MarkerSender, Outcome, TransactionMarker, marker_outcomes, markers_request
from millrace.transactions.producer_ids import ProducerIds
from millrace.transactions.settings import GateSettings, TransactionSettings


class Coordinators:
    """Makes them; they have tasks of their own from `follow_partitions` on, until each of `stops` was called."""

    def __init__(
        self,
        *,
        config: BrokerConfig,
        controller: Controller,
        replicas: Replicas,
        peers: Peers,
        services: Callable[[], Services | None],
        clock: Clock,
    ) -> None:
        self._config = config
        self._controller = controller
        self._replicas = replicas
        self._peers = peers
        self._clock = clock
        self.share_state = self._share_coordinator()
        self.persister = Persister(
            broker_id=config.broker_id,
            local=self.share_state,
            peers=peers,
            image=lambda: controller.image,
            ensure_topic=controller.ensure_internal_topic,
            clock=clock,
        )
        self._queue_counts = QueueCounts()
        self.queues = self._share_partitions()
        self.groups = self._group_coordinator()
        self.producer_ids = ProducerIds(controller.next_producer_id_block)
        self._markers = MarkerSender(
            broker_id=config.broker_id,
            local=_LocalMarkers(services),
            peers=peers,
            image=lambda: controller.image,
            clock=clock,
        )
        self.transactions = TransactionCoordinator(
            clock=clock,
            settings=TransactionSettings.from_config(config),
            state_topic=self._state_topic(TRANSACTION_STATE_TOPIC, "transaction.state.log.num.partitions"),
            markers=self._markers,
            new_producer_id=self.producer_ids.next,
        )
        self.gate = Gate(
            broker_id=config.broker_id,
            local=self.transactions,
            peers=peers,
            image=lambda: controller.image,
            settings=GateSettings.from_config(config),
            clock=clock,
        )

    def follow_partitions(self) -> None:
        """From now on each learns which partitions of its topic it answers for."""
        coordinators: dict[str, GroupCoordinator | ShareCoordinator | TransactionCoordinator] = {
            CONSUMER_OFFSETS_TOPIC: self.groups,
            SHARE_STATE_TOPIC: self.share_state,
            TRANSACTION_STATE_TOPIC: self.transactions,
        }

        def led(topic: str, partitions: list[Partition]) -> None:
            coordinator = coordinators.get(topic)
            if coordinator is not None:
                for partition in partitions:
                    coordinator.partition_became_leader(partition.index)

        def unled(topic: str, partitions: list[Partition]) -> None:
            coordinator = coordinators.get(topic)
            if coordinator is not None:
                for partition in partitions:
                    coordinator.partition_lost(partition.index)
            for partition in partitions:
                self.queues.unled(partition.topic_id, (partition.index,))

        def deleted(topic: str, topic_id: uuid.UUID) -> None:
            if topic not in coordinators:
                self.groups.topics_deleted({topic: topic_id})
                self.share_state.topic_deleted(topic_id)

        self._replicas.on_led.append(led)
        self._replicas.on_unled.append(unled)
        self._replicas.on_deleted.append(deleted)

    def begin_closing(self) -> None:
        """Answer whoever waits, and take nothing more."""
        for each in (self.groups, self.queues, self.share_state, self.transactions):
            each.begin_closing()

    @property
    def stops(self) -> Sequence[Callable[[], Coroutine[Any, Any, None]]]:
        """What ends each of them, to be called from the last to the first."""
        return (
            self.groups.stop,
            self.share_state.stop,
            self._markers.stop,
            self.transactions.stop,
            self.gate.stop,
            self.queues.stop,
        )

    # --- the parts ----------------------------------------------------------------------------------------------------

    def _state_topic(self, name: str, partitions_setting: str) -> StateTopic:
        def partition_count() -> int:
            """As many as it has, or will have once it is created."""
            found = self._controller.image.topic(name)
            return len(found.partitions) if found else self._config.get_int(partitions_setting)

        return StateTopic(name, lambda index: self._replicas.led(name, index), partition_count)

    def _group_coordinator(self) -> GroupCoordinator:
        config, controller = self._config, self._controller

        def own(group_id: str) -> Mapping[str, str]:
            return controller.image.config(ResourceType.GROUP, group_id)

        return GroupCoordinator(
            clock=self._clock,
            settings=GroupSettings.from_config(config),
            state_topic=self._state_topic(CONSUMER_OFFSETS_TOPIC, "offsets.topic.num.partitions"),
            dependencies=GroupDependencies(
                image=lambda: controller.image,
                times=lambda group_id: GroupTimes.of_consumers(own(group_id), config),
            ),
            share=ShareGroupDependencies(
                image=lambda: controller.image,
                times=lambda group_id: GroupTimes.of_share_group(own(group_id), config),
                coordinators=_ShareCoordinators(self.persister),
                left=self.queues.end_session,
            ),
        )

    def _share_coordinator(self) -> ShareCoordinator:
        def partitions_of(topic_id: uuid.UUID) -> int:
            topic = self._controller.image.topics_by_id.get(topic_id)
            return 0 if topic is None else len(topic.partitions)

        def prune(index: int, offset: int) -> None:
            partition = self._replicas.led(SHARE_STATE_TOPIC, index)
            if partition is not None:
                partition.delete_records_before(offset)

        return ShareCoordinator(
            clock=self._clock,
            settings=CoordinatorSettings.from_config(self._config),
            state_topic=self._state_topic(SHARE_STATE_TOPIC, "share.coordinator.state.topic.num.partitions"),
            partitions_of=partitions_of,
            prune=prune,
        )

    def _share_partitions(self) -> SharePartitions:
        config, controller = self._config, self._controller

        def settings_of(group_id: str) -> QueueSettings:
            overrides = controller.image.config(ResourceType.GROUP, group_id)
            return QueueSettings.of_group(lambda name: group_value(name, overrides, config))

        return SharePartitions(
            find=self._find,
            persister=self.persister,
            office=self._dead_letter_office(),
            settings_of=KnownSettings(lambda: controller.image, settings_of),
            holds_lease=lambda: controller.holds_lease,
            max_sessions=config.get_int("group.share.max.share.sessions"),
            clock=self._clock,
            counts=self._queue_counts,
        )

    def _dead_letter_office(self) -> DeadLetterOffice:
        config, controller = self._config, self._controller

        async def make_topic(name: str) -> None:
            (outcome,) = await controller.ensure_topics([name], configs=((TAKES_DEAD_LETTERS, "true"),))
            if outcome.error is not None:
                raise outcome.error

        return DeadLetterOffice(
            broker_id=config.broker_id,
            settings=DeadLetterSettings.from_config(config),
            image=lambda: controller.image,
            topic_setting=lambda topic, name: topic_value(name, controller.image.topic_overrides(topic), config),
            find=self._find,
            make_topic=make_topic,
            peers=self._peers,
            clock=self._clock,
            counts=self._queue_counts,
        )

    def _find(self, topic_id: uuid.UUID, index: int) -> Partition:
        return self._replicas.find(topic_id.bytes, index)


class _LocalMarkers:
    """Markers for partitions that are led here: what other brokers reach by WriteTxnMarkers, without a socket."""

    def __init__(self, services: Callable[[], Services | None]) -> None:
        self._services = services

    async def write(self, marker: TransactionMarker, partitions: Collection[TopicPartition]) -> Outcome:
        services = self._services()
        if services is None:
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "the broker is starting")
        response = await write_markers(services, markers_request([(marker, partitions)]))
        return marker_outcomes(response).get(marker.producer_id, {})


class _ShareCoordinators:
    """The share coordinators, as the group coordinator sees them."""

    def __init__(self, persister: Persister) -> None:
        self._persister = persister

    async def initialize(
        self, group_id: str, topic_id: uuid.UUID, partition: int, epoch: int, start_offset: int
    ) -> None:
        await self._persister.initialize(ShareKey(group_id, topic_id, partition), epoch, start_offset)

    async def delete(self, group_id: str, topic_id: uuid.UUID, partition: int) -> None:
        await self._persister.delete(ShareKey(group_id, topic_id, partition))
