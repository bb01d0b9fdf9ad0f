"""The composition root: the only place where the parts of a broker are joined.

Start: open the log directories, take the addresses, read the metadata log, join the cluster, make the partitions, load
the groups, then answer. Stop is the same in reverse, after leadership was handed over; when it returns, everything
acknowledged is on disk and the directories carry the marker of a clean shutdown.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import uuid
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final

from millrace.clock import Clock, SystemClock
from millrace.cluster.controller import Controller
from millrace.cluster.migration import is_single
from millrace.cluster.peers import Peers
from millrace.cluster.presence import Presence
from millrace.cluster.survey import Surveyor
from millrace.config import BrokerConfig, group_value, topic_value
from millrace.errors import ConfigError, MillraceError, StorageError
from millrace.groups.coordinator import GroupCoordinator
from millrace.groups.modern.groups import Surroundings
from millrace.groups.settings import GroupSettings, GroupTimes
from millrace.groups.share.groups import ShareSurroundings
from millrace.handlers import registry
from millrace.handlers.context import Services
from millrace.handlers.fetch_sessions import FetchSessions
from millrace.metadata.deltas import Directories, Endpoint, ResourceType
from millrace.metadata.embedded import FILE_NAME, Database, EmbeddedStore
from millrace.metadata.store import MetadataStore
from millrace.model import CONSUMER_OFFSETS_TOPIC, SHARE_STATE_TOPIC, TopicPartition
from millrace.queues.coordinator import ShareCoordinator
from millrace.queues.dead_letter_office import DeadLetterOffice
from millrace.queues.dead_letters import TAKES_DEAD_LETTERS
from millrace.queues.partitions import SharePartitions
from millrace.queues.persister import Persister
from millrace.queues.records import ShareKey
from millrace.queues.settings import CoordinatorSettings, DeadLetterSettings, KnownSettings, QueueSettings
from millrace.replication.follower import Fetchers, FetchSettings
from millrace.replication.partition import Partition
from millrace.replication.proposals import IsrProposals
from millrace.replication.replicas import Replicas
from millrace.replication.reports import DiskReports
from millrace.replication.state_topic import StateTopic
from millrace.server.answers import AnswerRoom
from millrace.server.flow import DEFAULT_BUDGET_BYTES, ConnectionLimits, MemoryBudget
from millrace.server.listener import Listener
from millrace.storage.boot import boot_id
from millrace.storage.cleaner import Cleaner, CleanerSettings, Compactable
from millrace.storage.directory import LogDirectory
from millrace.storage.files import DEFAULT_MAX_OPEN, Files
from millrace.storage.logdirs import LogDirs
from millrace.tasks import Tasks
from millrace.transactions.producer_ids import ProducerIds

logger = logging.getLogger(__name__)

RESERVED_DESCRIPTORS: Final = 1024
"""Descriptors kept back from connections for segment files, pipes and the metadata store; half where that is less."""
DRAIN_S: Final = 2.0
SPACE_INTERVAL_S: Final = 0.2
"""How often the free space of the disks is looked at; a call of microseconds."""
HAND_OVER_S: Final = 0.25
"""How long a broker that gave its leaderships away goes on answering: long enough for a client at work to come by."""
ANY_HOST: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - recognised, not bound


class Broker:
    """One broker on the caller's event loop. Owner of every part it makes; `start` and `stop` are called once each."""

    def __init__(
        self,
        config: BrokerConfig,
        *,
        store: MetadataStore | None = None,
        clock: Clock | None = None,
        files: Files | None = None,
    ) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self._files = files or Files(min(DEFAULT_MAX_OPEN, _descriptors() // 4))  # sockets and others want theirs
        self._store = store
        self._listeners: list[Listener] = []
        self._tasks = Tasks(self.clock)
        self._stops: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """What has been started, in order; `stop` runs it backwards."""
        self._lingers = True
        self.services: Services | None = None
        self.failure: str | None = None
        """Why the broker cannot go on: another process runs under its id, or the metadata log cannot be read."""
        self.failed = asyncio.Event()
        """Set with `failure`; whoever runs the broker stops it."""

    def _fail(self, reason: str) -> None:
        logger.critical("broker %d cannot go on: %s", self.config.broker_id, reason)
        self.failure = self.failure or reason
        self.failed.set()

    def __repr__(self) -> str:
        return f"Broker({self.config.broker_id}, {self.bootstrap if self._listeners else 'not started'})"

    @property
    def bootstrap(self) -> str:
        """The address of the first listener, as a client is told it."""
        host, port = self._advertised(self._listeners[0].name)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def port(self) -> int:
        """The port of the first listener, as it was bound."""
        return self._listeners[0].port

    async def start(self) -> None:
        """Return once clients are answered. On failure everything that was started is stopped again."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config = self.config
        for name in config.ignored:
            logger.warning("the setting %s has no meaning here and is ignored", name)
        descriptors = _descriptors()
        most = max(descriptors - RESERVED_DESCRIPTORS, descriptors // 2)
        limits = ConnectionLimits(
            lambda: min(config.get_int("max.connections"), most), lambda: config.get_int("max.connections.per.ip")
        )

        if self._store is None and config.get("zookeeper.connect") and is_single(Path(config.log_dirs[0])):
            raise ConfigError(
                f"{Path(config.log_dirs[0]) / FILE_NAME} is the metadata of a broker without ZooKeeper, and would not "
                "count any more: move it to ZooKeeper with `millrace broker --migrate`, or put the file away"
            )
        log_dirs = LogDirs.open(
            [Path(path) for path in config.log_dirs], node_id=config.broker_id, clock=self.clock, files=self._files
        )
        controller = Controller(self._store or store_for(config, self.clock), config, clock=self.clock)
        self._stops.append(lambda: self._close_logs(log_dirs, controller))
        log_dirs.start()

        replicas = Replicas(broker_id=config.broker_id, config=config, log_dirs=log_dirs, clock=self.clock)
        reports = self._disk_reports(controller, replicas, log_dirs)

        def directory_failed(directory: LogDirectory) -> None:
            replicas.directory_failed(directory)
            reports.look()
            if not log_dirs.online:
                self._fail(f"no usable data directory is left: {directory.failure}")

        def space_changed(directory: LogDirectory) -> None:
            replicas.directory_space_changed(directory)
            reports.look()

        log_dirs.on_failure = directory_failed
        log_dirs.on_space = space_changed
        log_dirs.on_log_failure = replicas.on_misplaced = reports.look
        controller.on_fatal = self._fail
        presence = Presence(self.clock)
        fetchers, proposals = self._replicate(controller, replicas, presence)
        offsets_topic = StateTopic(
            CONSUMER_OFFSETS_TOPIC,
            lambda index: replicas.led(CONSUMER_OFFSETS_TOPIC, index),
            lambda: _partitions(controller, config, CONSUMER_OFFSETS_TOPIC, "offsets.topic.num.partitions"),
        )
        peers = Peers(
            broker_id=config.broker_id,
            listener=config.inter_broker_listener,
            image=lambda: controller.image,
            clock=self.clock,
        )
        self._stops.append(peers.stop)
        share_state = self._share_coordinator(controller, replicas)
        persister = self._persister(controller, share_state, peers)
        queues = self._share_partitions(controller, replicas, persister, peers)
        groups = GroupCoordinator(
            clock=self.clock,
            settings=GroupSettings.from_config(config),
            state_topic=offsets_topic,
            surroundings=Surroundings(
                image=lambda: controller.image,
                times=lambda group_id: GroupTimes.from_config(
                    controller.image.config(ResourceType.GROUP, group_id), config
                ),
            ),
            share=ShareSurroundings(
                image=lambda: controller.image,
                times=lambda group_id: GroupTimes.from_config(
                    controller.image.config(ResourceType.GROUP, group_id), config, kind="share"
                ),
                coordinators=_ShareCoordinators(persister),
                left=queues.end_session,
            ),
        )
        self.services = Services(
            config=config,
            clock=self.clock,
            broker_id=config.broker_id,
            controller=controller,
            replicas=replicas,
            groups=groups,
            share_state=share_state,
            queues=queues,
            persister=persister,
            peers=peers,
            log_dirs=log_dirs,
            fetch_sessions=FetchSessions(config.get_int("max.incremental.fetch.session.cache.slots")),
            producer_ids=ProducerIds(controller.next_producer_id_block),
            presence=presence,
            advertised=self._advertised,
        )
        self._make_listeners(limits)
        for listener in self._listeners:
            listener.bind()

        self._stops.append(controller.stop)
        await controller.load()
        await controller.start(
            self._endpoints(),
            directories=lambda: _directories(log_dirs),
            boot_id=boot_id(),
            clean_epoch=log_dirs.clean_epoch,
        )
        _follow_partitions(replicas, groups, share_state)
        replicas.on_unled.append(lambda _, gone: _close_queues(queues, gone))
        replicas.load(controller.image)
        controller.on_image(replicas.apply)
        controller.on_image(presence.follow)
        controller.recover_with(
            Surveyor(
                broker_id=config.broker_id,
                broker_epoch=lambda: controller.broker_epoch,
                own=replicas.log_end,
                peers=peers,
                clock=self.clock,
            )
        )
        self._stops.append(fetchers.stop)
        proposals.start()
        self._stops.append(proposals.stop)
        self._stops.append(groups.stop)
        self._stops.append(share_state.stop)
        self._stops.append(queues.stop)
        for listener in self._listeners:
            await listener.serve()
        self._stops.append(self._stop_listening)
        self._stops.append(lambda: self._hand_over(controller))
        self._tasks.keep("disk reports", reports.run)
        self._tasks.keep("disk space", lambda: self._watch_space(log_dirs))
        self._tasks.keep("retention", lambda: self._keep_retention(replicas))
        self._tasks.keep("compaction", self._cleaner(log_dirs, replicas).run)
        self._tasks.keep("checkpoints", lambda: self._keep_checkpoints(log_dirs))
        self._tasks.keep("high watermarks", lambda: self._keep_high_watermarks(log_dirs, replicas))
        logger.info(
            "broker %d of cluster %s answers at %s", config.broker_id, controller.image.cluster_id, self.bootstrap
        )

    async def _close_logs(self, log_dirs: LogDirs, controller: Controller) -> None:
        # Without services the start had not come far enough to know what is committed: the old checkpoint stays.
        marks = None if self.services is None else self.services.replicas.high_watermarks()
        await log_dirs.stop(marks, broker_epoch=controller.broker_epoch)

    async def stop(self, *, linger: bool = True) -> None:
        """Answer what has begun, then put everything on disk. Harmless when nothing was started.

        Clients are given a moment to learn who leads now; without `linger` they are not: the whole cluster stops.
        """
        self._lingers = linger
        await self._tasks.stop()
        while self._stops:
            stop = self._stops.pop()
            try:
                await stop()
            except MillraceError as error:
                logger.error("stopping: %s", error)  # noqa: TRY400 - the text says it all
        for listener in self._listeners:
            listener.stop_accepting()

    def _replicate(
        self, controller: Controller, replicas: Replicas, presence: Presence
    ) -> tuple[Fetchers, IsrProposals]:
        """Join the replicas with those who fetch for them and those who ask for their ISRs."""
        config = self.config

        def lost(broker_id: int) -> None:
            presence.lost(broker_id)
            controller.suspect(broker_id)

        fetchers = Fetchers(
            broker_id=config.broker_id,
            broker_epoch=lambda: controller.broker_epoch,
            listener=config.inter_broker_listener,
            settings=FetchSettings.from_config(config),
            clock=self.clock,
            lost=lost,
            reached=presence.reached,
        )
        proposals = IsrProposals(
            ask=controller.propose_isr,
            partitions=lambda: replicas,
            clock=self.clock,
            check_interval_s=config.get_int("replica.lag.time.max.ms") / 2000,
        )
        replicas.followed = fetchers
        replicas.wants_isr = proposals.consider
        return fetchers, proposals

    def _disk_reports(self, controller: Controller, replicas: Replicas, log_dirs: LogDirs) -> DiskReports:
        def known() -> Directories | None:
            broker = controller.image.brokers.get(self.config.broker_id)
            return None if broker is None else broker.directories

        return DiskReports(
            known=known,
            actual=lambda: _directories(log_dirs),
            misplaced=replicas.misplaced,
            tell_directories=controller.report_directories,
            tell_placements=controller.report_placements,
            clock=self.clock,
        )

    def _share_coordinator(self, controller: Controller, replicas: Replicas) -> ShareCoordinator:
        config = self.config

        def partitions_of(topic_id: uuid.UUID) -> int:
            topic = controller.image.topics_by_id.get(topic_id)
            return 0 if topic is None else len(topic.partitions)

        def prune(index: int, offset: int) -> None:
            partition = replicas.led(SHARE_STATE_TOPIC, index)
            if partition is not None:
                partition.delete_records_before(offset)

        return ShareCoordinator(
            clock=self.clock,
            settings=CoordinatorSettings.from_config(config),
            state_topic=StateTopic(
                SHARE_STATE_TOPIC,
                lambda index: replicas.led(SHARE_STATE_TOPIC, index),
                lambda: _partitions(
                    controller, config, SHARE_STATE_TOPIC, "share.coordinator.state.topic.num.partitions"
                ),
            ),
            partitions_of=partitions_of,
            prune=prune,
        )

    def _persister(self, controller: Controller, share_state: ShareCoordinator, peers: Peers) -> Persister:
        return Persister(
            broker_id=self.config.broker_id,
            local=share_state,
            peers=peers,
            image=lambda: controller.image,
            ensure_topic=controller.ensure_internal_topic,
            clock=self.clock,
        )

    def _share_partitions(
        self, controller: Controller, replicas: Replicas, persister: Persister, peers: Peers
    ) -> SharePartitions:
        config = self.config

        def settings_of(group_id: str) -> QueueSettings:
            overrides = controller.image.config(ResourceType.GROUP, group_id)
            return QueueSettings.of_group(lambda name: group_value(name, overrides, config))

        def find(topic_id: uuid.UUID, index: int) -> Partition:
            return replicas.find(topic_id.bytes, index)

        return SharePartitions(
            find=find,
            persister=persister,
            office=self._dead_letter_office(controller, find, peers),
            settings_of=KnownSettings(lambda: controller.image, settings_of),
            holds_lease=lambda: controller.holds_lease,
            max_sessions=config.get_int("group.share.max.share.sessions"),
            clock=self.clock,
        )

    def _dead_letter_office(
        self, controller: Controller, find: Callable[[uuid.UUID, int], Partition], peers: Peers
    ) -> DeadLetterOffice:
        config = self.config

        async def make_topic(name: str) -> None:
            (outcome,) = await controller.ensure_topics([name], configs=((TAKES_DEAD_LETTERS, "true"),))
            if outcome.error is not None:
                raise outcome.error

        return DeadLetterOffice(
            broker_id=config.broker_id,
            settings=DeadLetterSettings.from_config(config),
            image=lambda: controller.image,
            topic_setting=lambda topic, name: topic_value(name, controller.image.topic_overrides(topic), config),
            find=find,
            make_topic=make_topic,
            peers=peers,
            clock=self.clock,
        )

    # ------------------------------------------------------------------------------------------------------- listeners

    def _make_listeners(self, limits: ConnectionLimits) -> None:
        assert self.services is not None
        config = self.config
        budget_bytes = config.get_int("queued.max.request.bytes")
        # The largest request must always find room when it is the only one.
        budget = MemoryBudget(
            max(budget_bytes if budget_bytes > 0 else DEFAULT_BUDGET_BYTES, config.get_int("socket.request.max.bytes"))
        )
        answers = AnswerRoom(budget, self.clock)
        apis = registry.load()
        for configured in config.listeners:
            self._listeners.append(
                Listener(
                    name=configured.name,
                    host=configured.host,
                    port=configured.port,
                    apis=apis,
                    services=self.services,
                    budget=budget,
                    answers=answers,
                    limits=limits,
                    max_frame_bytes=config.get_int("socket.request.max.bytes"),
                    max_idle_ms=config.get_int("connections.max.idle.ms"),
                    clock=self.clock,
                )
            )

    async def _hand_over(self, controller: Controller) -> None:
        """Give leadership away, and tell clients where it went while they can still ask here.

        A client whose connection ends before it was refused comes back to the same address. It is turned away, once or
        twice, and then waits longer before it tries that address again: it would wait just when this broker is back
        and the next one of a rolling restart hands over to it.
        """
        if await controller.leave() and self._lingers:
            await self.clock.sleep(HAND_OVER_S)

    async def _stop_listening(self) -> None:
        assert self.services is not None
        for listener in self._listeners:
            listener.stop_accepting()
        # Parked requests are answered first, so that connections have nothing left to wait for.
        self.services.replicas.begin_closing()
        self.services.groups.begin_closing()
        self.services.queues.begin_closing()
        self.services.share_state.begin_closing()
        await asyncio.gather(*(listener.stop(DRAIN_S) for listener in self._listeners))

    def _advertised(self, listener: str) -> tuple[str, int]:
        bound = next(item for item in self._listeners if item.name == listener)
        told = next(item for item in self.config.advertised_listeners if item.name == listener)
        return (socket.gethostname() if told.host in ANY_HOST else told.host), told.port or bound.port

    def _endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(listener.name, *self._advertised(listener.name), listener.security_protocol)
            for listener in self.config.listeners
        ]

    # ------------------------------------------------------------------------------------------------------ background

    async def _keep_retention(self, replicas: Replicas) -> None:
        """Let go of what retention no longer wants, a partition at a time so that the loop stays free."""
        while True:
            await self.clock.sleep(self.config.get_int("log.retention.check.interval.ms") / 1000)
            for partition in replicas:
                if replicas.held(partition.topic, partition.index) is partition:  # not deleted since the sweep began
                    try:
                        partition.enforce_retention()
                    except MillraceError as error:
                        logger.error("retention of %r: %s", partition, error)  # noqa: TRY400
                    except Exception:  # of one log: the others go on
                        logger.exception("retention of %r", partition)
                await asyncio.sleep(0)

    async def _watch_space(self, log_dirs: LogDirs) -> None:
        """See in time that a disk is nearly full."""
        while True:
            log_dirs.look_at_space(self.config.get_int("log.dirs.min.free.bytes"))
            await self.clock.sleep(SPACE_INTERVAL_S)

    def _cleaner(self, log_dirs: LogDirs, replicas: Replicas) -> Cleaner:
        def compactable() -> Iterator[Compactable]:
            for partition in replicas:
                try:
                    log = partition.compactable_log()
                except MillraceError as error:
                    logger.error("compaction of %r: %s", partition, error)  # noqa: TRY400
                    continue
                except Exception:  # of one log: the others go on
                    logger.exception("compaction of %r", partition)
                    continue
                if log is not None:
                    key = TopicPartition(partition.topic, partition.index)
                    yield Compactable(key, log, lambda partition=partition: partition.committed.offset)  # type: ignore[misc]

        return Cleaner(
            settings=lambda: CleanerSettings.from_config(self.config),
            compactable=compactable,
            written_down=log_dirs.cleaned_offsets_later,
            clock=self.clock,
        )

    async def _keep_checkpoints(self, log_dirs: LogDirs) -> None:
        """Write down how far each log is on disk, so that a crash has little to scan."""
        while True:
            await self.clock.sleep(self.config.get_int("log.flush.offset.checkpoint.interval.ms") / 1000)
            try:
                log_dirs.checkpoint()
            except StorageError as error:
                logger.error("checkpoints: %s", error)  # noqa: TRY400

    async def _keep_high_watermarks(self, log_dirs: LogDirs, replicas: Replicas) -> None:
        """Write down what is committed: a leader that starts again begins from there rather than from nothing."""
        while True:
            await self.clock.sleep(self.config.get_int("replica.high.watermark.checkpoint.interval.ms") / 1000)
            try:
                log_dirs.checkpoint_high_watermarks(replicas.high_watermarks())
            except StorageError as error:
                logger.error("high watermarks: %s", error)  # noqa: TRY400


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


def store_for(config: BrokerConfig, clock: Clock) -> MetadataStore:
    """ZooKeeper where the settings name one, otherwise a file beside the logs."""
    hosts = config.get("zookeeper.connect")
    if not hosts:
        return EmbeddedStore(Database(Path(config.log_dirs[0]) / FILE_NAME))
    from millrace.metadata.zookeeper import ZooKeeperStore  # noqa: PLC0415 - kazoo is not loaded where it is not needed

    return ZooKeeperStore(
        str(hosts),
        session_timeout_ms=config.get_int("zookeeper.session.timeout.ms"),
        connection_timeout_ms=config.get("zookeeper.connection.timeout.ms"),
        clock=clock,
    )


def _directories(log_dirs: LogDirs) -> Directories:
    """This broker's directories, as the cluster has to know them."""
    return Directories(log_dirs.online, log_dirs.full, len(log_dirs.online) < len(log_dirs.directories))


def _follow_partitions(replicas: Replicas, groups: GroupCoordinator, share_state: ShareCoordinator) -> None:
    """Tell the coordinators which partitions of their topics they answer for."""
    coordinators: dict[str, GroupCoordinator | ShareCoordinator] = {
        CONSUMER_OFFSETS_TOPIC: groups,
        SHARE_STATE_TOPIC: share_state,
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

    def deleted(topic: str, topic_id: uuid.UUID) -> None:
        if topic not in coordinators:
            groups.topics_deleted({topic: topic_id})
            share_state.topic_deleted(topic_id)

    replicas.on_led.append(led)
    replicas.on_unled.append(unled)
    replicas.on_deleted.append(deleted)


def _close_queues(queues: SharePartitions, gone: list[Partition]) -> None:
    for partition in gone:
        queues.unled(partition.topic_id, (partition.index,))


def _partitions(controller: Controller, config: BrokerConfig, topic: str, setting: str) -> int:
    """How many partitions an internal topic has, or will have once it is created."""
    found = controller.image.topic(topic)
    return len(found.partitions) if found else config.get_int(setting)


def _descriptors() -> int:
    """How many descriptors this process may have open; as many as the operating system lets it ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(soft, hard)  # a hard limit of -1 is none
