"""The composition root: where the parts of a broker are joined, its coordinators by `coordinators`.

Start: open the log directories, take the addresses, read the metadata log, join the cluster, make the partitions, load
the groups, then answer. Stop is the same in reverse, after leadership was handed over; when it returns, everything
acknowledged is on disk and the directories carry the marker of a clean shutdown.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millrace.clock import Clock, SystemClock
from millrace.cluster.controller import Controller
from millrace.cluster.dialer import Dialer
from millrace.cluster.migration import is_single
from millrace.cluster.peers import Peers
from millrace.cluster.presence import Presence
from millrace.cluster.survey import Surveyor
from millrace.config import BrokerConfig
from millrace.config.setting import counts_by_address
from millrace.coordinators import Coordinators
from millrace.errors import ConfigError, MillraceError, StorageError
from millrace.handlers import registry
from millrace.handlers.context import Services
from millrace.handlers.fetch_sessions import FetchSessions
from millrace.metadata.deltas import Directories, Endpoint
from millrace.metadata.embedded import FILE_NAME, Database, EmbeddedStore
from millrace.metadata.store import MetadataStore
from millrace.model import TopicPartition
from millrace.replication.follower import Fetchers, FetchSettings
from millrace.replication.proposals import IsrProposals
from millrace.replication.replicas import Replicas
from millrace.replication.reports import DiskReports
from millrace.security import exposure
from millrace.security.authorizer import Authorizer
from millrace.security.derivation import KeyDerivation
from millrace.security.metering import ClientQuotas
from millrace.security.tls import LOOK_INTERVAL_S, ServerTls
from millrace.security.tokens import TokenPasswords
from millrace.server.answers import AnswerRoom
from millrace.server.audit_log import AuditLog
from millrace.server.flow import DEFAULT_BUDGET_BYTES, ConnectionLimits, ListenerLimits, MemoryBudget
from millrace.server.listener import Listener, SocketSettings
from millrace.server.mechanisms import Mechanisms
from millrace.server.throttling import Arrivals
from millrace.storage.boot import boot_id
from millrace.storage.cleaner import Cleaner, CleanerSettings, Compactable
from millrace.storage.directory import LogDirectory
from millrace.storage.files import DEFAULT_MAX_OPEN, Files
from millrace.storage.logdirs import LogDirs
from millrace.tasks import Tasks
from millrace.telemetry.manager import ClientTelemetry

if TYPE_CHECKING:
    from millrace.monitoring.endpoint import MetricsEndpoint

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
        self._metrics: MetricsEndpoint | None = None
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
    def listeners(self) -> Sequence[Listener]:
        return self._listeners

    @property
    def port(self) -> int:
        """The port of the first listener, as it was bound."""
        return self._listeners[0].port

    @property
    def metrics_url(self) -> str | None:
        """Where the broker tells of itself; None where it does not."""
        return None if self._metrics is None else self._metrics.url

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
            lambda: config.get_int("max.connections"),
            lambda: config.get_int("max.connections.per.ip"),
            lambda: counts_by_address(config.get_str("max.connections.per.ip.overrides")),
            possible=most,
        )

        if self._store is None and config.get("zookeeper.connect") and is_single(Path(config.log_dirs[0])):
            raise ConfigError(
                f"{Path(config.log_dirs[0]) / FILE_NAME} is the metadata of a broker without ZooKeeper, and would not "
                "count any more: move it to ZooKeeper with `millrace broker --migrate`, or put the file away"
            )
        log_dirs = LogDirs.open(
            [Path(path) for path in config.log_dirs], node_id=config.broker_id, clock=self.clock, files=self._files
        )
        dialer = Dialer(config, self.clock)
        if config.get("zookeeper.connect"):
            dialer.check()  # a broker that is alone calls nobody
        controller = Controller(self._store or store_for(config, self.clock), config, clock=self.clock, dialer=dialer)
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
        quotas = ClientQuotas.from_config(config, self.clock)
        fetchers, proposals = self._replicate(controller, replicas, presence, dialer)
        peers = Peers(dialer=dialer, image=lambda: controller.image)
        self._stops.append(peers.stop)
        coordinators = Coordinators(
            config=config,
            controller=controller,
            replicas=replicas,
            peers=peers,
            services=lambda: self.services,
            clock=self.clock,
        )
        derivation = KeyDerivation()
        self._stops.append(derivation.stop)
        self.services = Services(
            config=config,
            clock=self.clock,
            broker_id=config.broker_id,
            controller=controller,
            replicas=replicas,
            groups=coordinators.groups,
            share_state=coordinators.share_state,
            transactions=coordinators.transactions,
            transaction_gate=coordinators.gate,
            queues=coordinators.queues,
            persister=coordinators.persister,
            peers=peers,
            log_dirs=log_dirs,
            fetch_sessions=FetchSessions(config.get_int("max.incremental.fetch.session.cache.slots")),
            producer_ids=coordinators.producer_ids,
            presence=presence,
            advertised=self._advertised,
            authorizer=Authorizer.from_config(config, lambda: controller.image.acls),
            tokens=TokenPasswords(
                config.get("delegation.token.secret.key"), lambda: controller.image.tokens, derivation, self.clock
            ),
            quotas=quotas,
        )
        self.services.telemetry = self._client_telemetry(controller)
        audit_log = AuditLog(self.services)
        self.services.audit = audit_log.audit
        budget = await self._make_listeners(self.services, limits, derivation)
        cleaner = self._cleaner(log_dirs, replicas)
        for listener in self._listeners:
            listener.bind()
        await self._tell_metrics(self.services, budget, cleaner)

        self._stops.append(controller.stop)
        await controller.load()
        await controller.start(
            self._endpoints(),
            directories=lambda: _directories(log_dirs),
            boot_id=boot_id(),
            clean_epoch=log_dirs.clean_epoch,
        )
        coordinators.follow_partitions()
        replicas.load(controller.image)
        controller.on_image(replicas.apply)
        controller.on_image(presence.follow)
        quotas.take(controller.image.quotas)
        controller.on_image(lambda _old, new, _changes: quotas.take(new.quotas))
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
        self._stops += coordinators.stops
        audit_log.start()
        self._stops.append(audit_log.stop)
        for listener in self._listeners:
            await listener.serve()
        self._stops.append(lambda: self._stop_listening(replicas, coordinators))
        self._stops.append(lambda: self._hand_over(controller))
        self._keep_up(log_dirs, replicas, reports, cleaner)
        if self._metrics is not None:
            self._metrics.started()
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
        if self._metrics is not None:
            self._metrics.stopping()
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
        self, controller: Controller, replicas: Replicas, presence: Presence, dialer: Dialer
    ) -> tuple[Fetchers, IsrProposals]:
        """Join the replicas with those who fetch for them and those who ask for their ISRs."""
        config = self.config

        def lost(broker_id: int) -> None:
            presence.lost(broker_id)
            controller.suspect(broker_id)

        fetchers = Fetchers(
            dialer=dialer,
            broker_epoch=lambda: controller.broker_epoch,
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
            untold_timeout_s=self.config.get_int("log.dir.failure.timeout.ms") / 1000,
            give_up=self._fail,
            clock=self.clock,
        )

    def _client_telemetry(self, controller: Controller) -> ClientTelemetry | None:
        if not self.config.get("telemetry.receiver"):
            return None
        telemetry = ClientTelemetry(self.config, lambda: controller.image.configs, self.clock)
        self._stops.append(telemetry.stop)
        telemetry.start()
        return telemetry

    # --- listeners ----------------------------------------------------------------------------------------------------

    async def _tell_metrics(self, services: Services, budget: MemoryBudget, cleaner: Cleaner) -> None:
        """Tell of the broker over HTTP from now on, as one that starts."""
        address = self.config.metrics_address
        if address is None:
            return
        # Not loaded where nobody is to ask.
        from millrace.monitoring.endpoint import MetricsEndpoint  # noqa: PLC0415
        from millrace.monitoring.parts import Observed  # noqa: PLC0415

        observed = Observed(services=services, listeners=self._listeners, budget=budget, cleaner=cleaner)
        endpoint = MetricsEndpoint(*address, observed)
        endpoint.bind()
        self._metrics = endpoint
        self._stops.append(endpoint.stop)
        await endpoint.serve(services.controller)
        if not exposure.is_loopback(address[0]):
            logger.warning("everybody who reaches %s can read the metrics of this broker", endpoint.url)

    async def _make_listeners(
        self, services: Services, limits: ConnectionLimits, derivation: KeyDerivation
    ) -> MemoryBudget:
        """Make them, and the memory that they share."""
        config = self.config
        mechanisms = Mechanisms(
            config,
            users=lambda: services.controller.image.users,
            tokens=services.tokens,
            derivation=derivation,
            clock=self.clock,
        )
        self._stops.append(mechanisms.stop)
        logins = await mechanisms.rules()
        budget_bytes = config.get_int("queued.max.request.bytes")
        # The largest request must always find room when it is the only one.
        budget = MemoryBudget(
            max(budget_bytes if budget_bytes > 0 else DEFAULT_BUDGET_BYTES, config.get_int("socket.request.max.bytes"))
        )
        answers = AnswerRoom(budget, self.clock)
        arrivals = Arrivals(config, services.quotas)
        registry.load()
        apis = registry.served(registry.settings_given(config))
        for configured in config.listeners:
            self._listeners.append(
                Listener(
                    name=configured.name,
                    host=configured.host,
                    port=configured.port,
                    apis=apis,
                    services=services,
                    budget=budget,
                    answers=answers,
                    limits=ListenerLimits(
                        limits,
                        configured.name,
                        partial(config.listener_value, configured.name, "max.connections"),
                        for_brokers=len(config.listeners) > 1 and configured.name == config.inter_broker_listener,
                    ),
                    arrivals=arrivals,
                    max_frame_bytes=config.get_int("socket.request.max.bytes"),
                    max_idle_ms=config.get_int("connections.max.idle.ms"),
                    sockets=SocketSettings.from_config(config),
                    clock=self.clock,
                    login_rules=logins.get(configured.name),
                    tls=ServerTls(configured, config, self.clock) if configured.uses_tls else None,
                )
            )
        return budget

    async def _hand_over(self, controller: Controller) -> None:
        """Give leadership away, and tell clients where it went while they can still ask here.

        Without controlled.shutdown.enable the others find out by themselves that this broker is gone.

        A client whose connection ends before it was refused comes back to the same address. It is turned away, once or
        twice, and then waits longer before it tries that address again: it would wait just when this broker is back
        and the next one of a rolling restart hands over to it.
        """
        if not self.config.get_bool("controlled.shutdown.enable"):
            return
        if await controller.leave() and self._lingers:
            await self.clock.sleep(HAND_OVER_S)

    async def _stop_listening(self, replicas: Replicas, coordinators: Coordinators) -> None:
        for listener in self._listeners:
            listener.stop_accepting()
        # Parked requests are answered first, so that connections have nothing left to wait for.
        replicas.begin_closing()
        coordinators.begin_closing()
        await asyncio.gather(*(listener.stop(DRAIN_S) for listener in self._listeners))

    def _advertised(self, listener: str) -> tuple[str, int]:
        bound = next(item for item in self._listeners if item.name == listener)
        told = next(item for item in self.config.advertised_listeners if item.name == listener)
        return (socket.gethostname() if told.host in ANY_HOST else told.host), told.port or bound.port

    def _endpoints(self) -> list[Endpoint]:
        """As they are registered: the one on which this broker takes the others first (`cluster.dialer`)."""
        own = self.config.inter_broker_listener
        return [
            Endpoint(listener.name, *self._advertised(listener.name), listener.security_protocol)
            for listener in sorted(self.config.listeners, key=lambda listener: listener.name != own)
        ]

    # --- background ---------------------------------------------------------------------------------------------------

    def _keep_up(self, log_dirs: LogDirs, replicas: Replicas, reports: DiskReports, cleaner: Cleaner) -> None:
        """Begin everything that goes on for as long as the broker runs."""
        self._tasks.keep("disk reports", reports.run)
        if any(listener.tls is not None for listener in self._listeners):
            self._tasks.keep("certificates", self._renew_certificates)
        self._tasks.keep("disk space", lambda: self._watch_space(log_dirs))
        self._tasks.keep("retention", lambda: self._keep_retention(replicas))
        self._tasks.keep("compaction", cleaner.run)
        self._tasks.keep("checkpoints", lambda: self._keep_checkpoints(log_dirs))
        self._tasks.keep("high watermarks", lambda: self._keep_high_watermarks(log_dirs, replicas))

    async def _keep_retention(self, replicas: Replicas) -> None:
        """Let go of what retention no longer wants, a partition at a time so that the loop stays free."""
        interval_s = self.config.get_int("log.retention.check.interval.ms") / 1000
        await self._wait_at_start(interval_s)
        while True:
            for partition in replicas:
                if replicas.held(partition.topic, partition.index) is partition:  # not deleted since the sweep began
                    try:
                        partition.enforce_retention()
                    except MillraceError as error:
                        logger.error("retention of %r: %s", partition, error)  # noqa: TRY400
                    except Exception:  # of one log: the others go on
                        logger.exception("retention of %r", partition)
                await asyncio.sleep(0)
            await self.clock.sleep(interval_s)

    async def _wait_at_start(self, interval_s: float) -> None:
        """Before housekeeping is done for the first time: a broker that starts has other things to do."""
        await self.clock.sleep(min(self.config.get_int("log.initial.task.delay.ms") / 1000, interval_s))

    async def _renew_certificates(self) -> None:
        """Take new certificates and authorities as soon as they are there."""
        while True:
            await self.clock.sleep(LOOK_INTERVAL_S)
            for listener in self._listeners:
                if listener.tls is not None:
                    await listener.tls.look()

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
        interval_s = self.config.get_int("log.flush.offset.checkpoint.interval.ms") / 1000
        await self._wait_at_start(interval_s)
        while True:
            try:
                log_dirs.checkpoint()
            except StorageError as error:
                logger.error("checkpoints: %s", error)  # noqa: TRY400
            await self.clock.sleep(interval_s)

    async def _keep_high_watermarks(self, log_dirs: LogDirs, replicas: Replicas) -> None:
        """Write down what is committed: a leader that starts again begins from there rather than from nothing."""
        while True:
            await self.clock.sleep(self.config.get_int("replica.high.watermark.checkpoint.interval.ms") / 1000)
            try:
                log_dirs.checkpoint_high_watermarks(replicas.high_watermarks())
            except StorageError as error:
                logger.error("high watermarks: %s", error)  # noqa: TRY400


def store_for(config: BrokerConfig, clock: Clock) -> MetadataStore:
    """ZooKeeper where the settings name one, otherwise a file beside the logs."""
    if not config.get("zookeeper.connect"):
        return EmbeddedStore(Database(Path(config.log_dirs[0]) / FILE_NAME))
    from millrace.metadata.zookeeper import ZooKeeperStore  # noqa: PLC0415 - kazoo is not loaded where it is not needed

    return ZooKeeperStore.from_config(config, clock)


def _directories(log_dirs: LogDirs) -> Directories:
    """This broker's directories, as the cluster has to know them."""
    return Directories(log_dirs.online, log_dirs.full, len(log_dirs.online) < len(log_dirs.directories))


def _descriptors() -> int:
    """How many descriptors this process may have open; as many as the operating system lets it ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(soft, hard)  # a hard limit of -1 is none
