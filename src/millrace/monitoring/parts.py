"""What a scrape asks of each room of a broker.

Every part reads plain numbers on the loop and lets others go on between slices (`Pace.step`); what would wait for the
disk is asked for in a thread. Not here: lag of groups (`lag`).
"""

from __future__ import annotations

import asyncio
import os
import platform
import resource
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar
from weakref import WeakKeyDictionary

from millrace import __version__
from millrace.errors import ErrorCode, StorageError
from millrace.metadata.deltas import PartitionChanged
from millrace.metrics.catalog import Detail
from millrace.metrics.histogram import Histogram
from millrace.model import NO_BROKER, TopicPartition
from millrace.monitoring.collector import Part, Scrape
from millrace.monitoring.lag import Lags, collect_lags
from millrace.queues.acquisition import AcknowledgeType
from millrace.security.quotas import (
    CONNECTION_CREATION_RATE,
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
)
from millrace.storage.log import FilesOfLog, Log
from millrace.transactions.state import TransactionState
from millrace.wire.keys import ApiKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millrace.cluster.image import ClusterImage
    from millrace.groups.classic.group import ClassicGroup
    from millrace.groups.modern.group import ModernGroup
    from millrace.groups.share.group import ShareGroup
    from millrace.handlers.context import Services
    from millrace.metadata.deltas import ChangeSet
    from millrace.replication.partition import Partition
    from millrace.server.flow import MemoryBudget
    from millrace.server.listener import Listener
    from millrace.storage.cleaner import Cleaner
    from millrace.storage.directory import LogDirectory

T = TypeVar("T")

_STEP: Final = 16
"""So many partitions, or other things, between two looks at the clock."""
_QUOTAS: Final = (
    PRODUCER_BYTE_RATE,
    CONSUMER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    CONTROLLER_MUTATION_RATE,
    CONNECTION_CREATION_RATE,
)
_ACKNOWLEDGEMENTS: Final = (
    AcknowledgeType.ACCEPT,
    AcknowledgeType.RELEASE,
    AcknowledgeType.REJECT,
    AcknowledgeType.RENEW,
)
_PARTITION_FAMILIES: Final = tuple(
    f"millrace_partition_{name}"
    for name in (
        "leader", "log_start_offset", "log_end_offset", "high_watermark", "size_bytes", "replicas", "isr",
        "bytes_in_total", "records_in_total", "bytes_out_total", "records_out_total",
    )
)  # fmt: skip
_TOPIC_FAMILIES: Final = tuple(
    f"millrace_topic_{name}"
    for name in ("bytes_in_total", "records_in_total", "bytes_out_total", "records_out_total", "size_bytes", "leaders")
)


@dataclass(slots=True)
class Elections:
    """Elections of leaders that this broker has made as controller: `note` hears of every delta of the image."""

    is_controller: Callable[[], bool]
    clean: int = 0
    unclean: int = 0

    def note(self, old: ClusterImage, _new: ClusterImage, changes: ChangeSet) -> None:
        if not self.is_controller():
            return
        for change in changes:
            if not isinstance(change, PartitionChanged):
                continue
            before = old.partition(change.topic_id, change.index)
            leader = change.state.leader
            if before is None or leader in (NO_BROKER, before.leader):
                continue
            if leader in before.isr or leader in before.elr:
                self.clean += 1
            else:
                self.unclean += 1


@dataclass(slots=True)
class Observed:
    """The parts of a running broker that are looked at; joined in `millrace.broker`."""

    services: Services
    listeners: Sequence[Listener]
    budget: MemoryBudget
    cleaner: Cleaner
    loop_lag: Histogram = field(default_factory=Histogram)
    started_ms: int = 0
    """When it began to answer; 0 before."""


class Parts:
    """The parts of a scrape of one broker."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._services = observed.services
        self._lags = Lags(observed.services)
        self._measured: WeakKeyDictionary[Log, tuple[int, int, FilesOfLog]] = WeakKeyDictionary()
        """Of logs that are not in memory: start, end, and what their files were then."""
        self._offline: tuple[object, int, int] = (None, 0, 0)
        """Of the topics that were looked at last: how many partitions they have, and how many of them no leader."""
        self.elections = Elections(lambda: self._services.controller.is_controller)

    def __repr__(self) -> str:
        return f"Parts(broker {self._services.broker_id}, {len(self._measured)} logs measured)"

    @property
    def by_name(self) -> Mapping[str, Part]:
        return {
            "process": self._process,
            "requests": self._requests,
            "connections": self._connections,
            "cluster": self._cluster,
            "logs": self._logs,
            "replicas": self._replicas,
            "groups": self._groups,
            "lag": lambda scrape: collect_lags(self._lags, scrape),
            "queues": self._queues,
            "transactions": self._transactions,
        }

    # --- the process --------------------------------------------------------------------------------------------------

    async def _process(self, scrape: Scrape) -> None:
        services, sheet = self._services, scrape.sheet
        sheet.add("millrace_build_info", 1, __version__, platform.python_version())
        sheet.add("millrace_broker_info", 1, str(services.broker_id), services.cluster_id, services.config.rack or "")
        sheet.add("millrace_start_time_seconds", self._observed.started_ms / 1000)
        used = resource.getrusage(resource.RUSAGE_SELF)
        sheet.add("millrace_process_cpu_seconds_total", used.ru_utime, "user")
        sheet.add("millrace_process_cpu_seconds_total", used.ru_stime, "system")
        sheet.add("millrace_process_max_fds", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        sheet.add("millrace_loop_lag_seconds", self._observed.loop_lag.value())
        facts = await scrape.pace.elsewhere(_in_thread(_process_facts))
        if facts is not None:
            sheet.add("millrace_process_resident_memory_bytes", facts[0])
            sheet.add("millrace_process_open_fds", facts[1])

    async def _requests(self, scrape: Scrape) -> None:
        sheet, observed = scrape.sheet, self._observed
        for key, counts in sorted(self._services.counts.by_key.items()):
            api = api_title(key)
            if counts.requests:
                sheet.add("millrace_requests_total", counts.requests, api)
                sheet.add("millrace_request_bytes_total", counts.request_bytes, api)
                sheet.add("millrace_response_bytes_total", counts.response_bytes, api)
                for stage, value in counts.stages():
                    sheet.add("millrace_request_stage_seconds", value, api, stage)
            for code, count in sorted(counts.errors.items()):
                sheet.add("millrace_request_errors_total", count, api, _error_name(code))
            await scrape.pace.step()
        sheet.add("millrace_request_memory_bytes", observed.budget.used_bytes)
        sheet.add("millrace_request_memory_limit_bytes", observed.budget.limit_bytes)
        sheet.add("millrace_fetch_sessions", len(self._services.fetch_sessions))

    async def _connections(self, scrape: Scrape) -> None:
        sheet, services = scrape.sheet, self._services
        waiting = in_flight = protocol_errors = 0
        for listener in self._observed.listeners:
            counts = listener.counts
            sheet.add("millrace_connections", len(listener.connections), listener.name)
            sheet.add("millrace_connections_accepted_total", counts.accepted, listener.name)
            for reason, count in counts.refused.items():
                sheet.add("millrace_connections_refused_total", count, listener.name, reason)
            for outcome, logins in (("success", counts.successes), ("failure", counts.failures)):
                for mechanism, count in logins.items():
                    sheet.add("millrace_authentications_total", count, listener.name, mechanism, outcome)
            protocol_errors += counts.protocol_errors
            for number, connection in enumerate(tuple(listener.connections)):
                waiting += connection.requests_waiting
                in_flight += connection.requests_in_flight
                if number % _STEP == 0:
                    await scrape.pace.step()
        sheet.add("millrace_requests_waiting", waiting)
        sheet.add("millrace_requests_in_flight", in_flight)
        sheet.add("millrace_protocol_errors_total", protocol_errors)
        for quota in _QUOTAS:
            times, seconds = services.quotas.throttled.get(quota, (0, 0.0))
            sheet.add("millrace_throttled_total", times, quota)
            sheet.add("millrace_throttle_seconds_total", seconds, quota)
        if services.audit is not None:
            for name, lost in services.audit.lost.items():
                sheet.add("millrace_audit_events_dropped_total", lost, name)

    # --- the cluster --------------------------------------------------------------------------------------------------

    async def _cluster(self, scrape: Scrape) -> None:
        sheet, controller = scrape.sheet, self._services.controller
        image = controller.image
        sheet.add("millrace_active_controller", int(controller.is_controller))
        sheet.add("millrace_controller_epoch", image.controller_epoch)
        sheet.add("millrace_metadata_version", image.index)
        sheet.add("millrace_leader_elections_total", self.elections.clean, "clean")
        sheet.add("millrace_leader_elections_total", self.elections.unclean, "unclean")
        fenced = sum(broker.fenced for broker in image.brokers.values())
        sheet.add("millrace_brokers", len(image.brokers) - fenced, "live")
        sheet.add("millrace_brokers", fenced, "fenced")
        if self._services.config.get("zookeeper.connect"):
            sheet.add("millrace_zookeeper_connected", int(controller.is_connected))
        if self._offline[0] is not image.topics:
            partitions = offline = 0
            for topic in tuple(image.topics.values()):
                partitions += len(topic.partitions)
                offline += sum(state.leader == NO_BROKER for state in topic.partitions)
                await scrape.pace.step()
            self._offline = (image.topics, partitions, offline)
        sheet.add("millrace_cluster_topics", len(image.topics))
        sheet.add("millrace_cluster_partitions", self._offline[1])
        sheet.add("millrace_offline_partitions", self._offline[2])

    # --- logs and replicas --------------------------------------------------------------------------------------------

    async def _logs(self, scrape: Scrape) -> None:
        sheet, log_dirs = scrape.sheet, self._services.log_dirs
        for directory in log_dirs.directories:
            path = str(directory.path)
            sheet.add("millrace_log_dir_online", int(directory.failure is None), path)
            sheet.add("millrace_log_dir_full", int(directory.is_full), path)
            sheet.add("millrace_log_flush_seconds", directory.flusher.sync_times.value(), path)
            if directory.failure is not None:
                continue
            space = await scrape.pace.elsewhere(_in_thread(lambda: log_dirs.files.space(directory.path)))  # noqa: B023
            if space is not None:
                sheet.add("millrace_log_dir_free_bytes", space.free_bytes, path)
                sheet.add("millrace_log_dir_total_bytes", space.total_bytes, path)
            sizes = await self._sizes(directory, scrape)
            sheet.add("millrace_logs", len(sizes), path)
            sheet.add("millrace_log_size_bytes", sum(each.size_bytes for each in sizes), path)
            sheet.add("millrace_log_segments", sum(each.segments for each in sizes), path)
        cleaner = self._observed.cleaner
        for outcome, count in (
            ("done", cleaner.counts.done),
            ("stale", cleaner.counts.stale),
            ("failed", cleaner.counts.failed),
        ):
            sheet.add("millrace_compaction_rounds_total", count, outcome)
        sheet.add("millrace_compaction_seconds_total", cleaner.counts.seconds)
        sheet.add("millrace_compaction_reclaimed_bytes_total", cleaner.counts.reclaimed_bytes)
        sheet.add("millrace_compaction_max_dirty_ratio", cleaner.counts.max_dirty_ratio)
        sheet.add("millrace_compaction_failing_logs", cleaner.failing)

    async def _sizes(self, directory: LogDirectory, scrape: Scrape) -> list[FilesOfLog]:
        """Of every log in a directory. One that is not in memory does not change: it is looked at once, in a thread."""
        sizes: list[FilesOfLog] = []
        unknown: list[Log] = []
        for number, log in enumerate(tuple(directory.logs.values())):
            size = self._known_size(log)
            if size is not None:
                sizes.append(size)
            else:
                unknown.append(log)
            if number % _STEP == 0:
                await scrape.pace.step()
        if unknown:
            marks = [(log.start_offset, log.end_offset) for log in unknown]
            measured = await scrape.pace.elsewhere(_in_thread(lambda: [_measured(log) for log in unknown]))
            for log, (start, end), size in zip(unknown, marks, measured, strict=True):
                self._measured[log] = (start, end, size)
            sizes += measured
        return sizes

    def _known_size(self, log: Log) -> FilesOfLog | None:
        """Without a look at the disk."""
        size = log.known_size
        if size is not None:
            return size
        found = self._measured.get(log)
        return found[2] if found is not None and found[:2] == (log.start_offset, log.end_offset) else None

    async def _replicas(self, scrape: Scrape) -> None:
        services, sheet, pace = self._services, scrape.sheet, scrape.pace
        counts, log_dirs = services.replicas.counts, services.log_dirs
        hanging_before_ms = services.clock.wall_ms() - services.config.get_int("transaction.max.timeout.ms")
        # Those that are gone are read together with which there are: none counts twice.
        bytes_in, records_in = counts.retired_bytes_in, counts.retired_records_in
        bytes_out, records_out = counts.retired_bytes_out, counts.retired_records_out
        held = tuple(services.replicas)
        found = _Found()
        by_partition = Detail.PARTITIONS in scrape.details
        by_topic = Detail.TOPICS in scrape.details
        rows: list[tuple[tuple[str, ...], Sequence[int]]] = []
        topics: dict[str, list[int]] = {}
        for number, partition in enumerate(held):
            if number % _STEP == 0:
                await pace.step()
            bytes_in += partition.bytes_in
            records_in += partition.records_in
            bytes_out += partition.bytes_out
            records_out += partition.records_out
            log = partition.open_log
            if partition.leadership is not None:
                found.look_at_leader(partition, log, hanging_before_ms)
            if log is None and (by_partition or by_topic or log_dirs.directories):
                log = log_dirs.get(TopicPartition(partition.topic, partition.index))
            if log is not None and log.failure is not None:
                found.offline += 1
            if by_partition or by_topic:
                traffic = partition.bytes_in, partition.records_in, partition.bytes_out, partition.records_out
                size = None if log is None else self._known_size(log)
                size_bytes = 0 if size is None else size.size_bytes
                if by_partition:
                    rows.append(((partition.topic, str(partition.index)), _row(partition, log, size_bytes, traffic)))
                if by_topic:
                    sums = topics.setdefault(partition.topic, [0] * len(_TOPIC_FAMILIES))
                    for column, value in enumerate((*traffic, size_bytes, int(partition.is_leader))):
                        sums[column] += value
        sheet.add("millrace_bytes_in_total", bytes_in)
        sheet.add("millrace_records_in_total", records_in)
        sheet.add("millrace_bytes_out_total", bytes_out)
        sheet.add("millrace_records_out_total", records_out)
        sheet.add("millrace_replication_bytes_in_total", counts.bytes_in)
        sheet.add("millrace_replication_bytes_out_total", counts.bytes_out)
        sheet.add("millrace_isr_shrinks_total", counts.isr_shrinks)
        sheet.add("millrace_isr_expands_total", counts.isr_expands)
        sheet.add("millrace_partitions", len(held))
        sheet.add("millrace_leaders", found.leaders)
        sheet.add("millrace_under_replicated_partitions", found.under_replicated)
        sheet.add("millrace_under_min_isr_partitions", found.under_min_isr)
        sheet.add("millrace_at_min_isr_partitions", found.at_min_isr)
        sheet.add("millrace_reassigning_partitions", found.reassigning)
        sheet.add("millrace_offline_replicas", found.offline)
        sheet.add("millrace_follower_max_lag_records", found.max_lag)
        sheet.add("millrace_transactions_hanging", found.hanging)
        if rows:
            sheet.add_table(_PARTITION_FAMILIES, rows)
        if topics:
            sheet.add_table(_TOPIC_FAMILIES, [((topic,), values) for topic, values in topics.items()])

    # --- coordinators -------------------------------------------------------------------------------------------------

    async def _groups(self, scrape: Scrape) -> None:
        sheet, groups = scrape.sheet, self._services.groups
        states: Counter[tuple[str, str]] = Counter()
        members = dict.fromkeys(("classic", "consumer", "share"), 0)
        by_group = Detail.GROUPS in scrape.details
        infos: list[tuple[tuple[str, ...], Sequence[int]]] = []
        sizes: list[tuple[tuple[str, ...], Sequence[int]]] = []
        for shard in groups.shards:
            found: Iterator[tuple[str, ClassicGroup | ModernGroup | ShareGroup]] = chain(
                zip(repeat("classic"), tuple(shard.classic.groups.values())),
                zip(repeat("consumer"), tuple(shard.modern.groups.values())),
                zip(repeat("share"), tuple(shard.share.groups.values())),
            )
            for number, (kind, group) in enumerate(found):
                state, count = group.state.value, len(group.members)
                states[kind, state] += 1
                members[kind] += count
                if by_group:
                    infos.append(((group.group_id, kind, state), (1,)))
                    sizes.append(((group.group_id,), (count,)))
                if number % _STEP == 0:
                    await scrape.pace.step()
        for (kind, state), count in sorted(states.items()):
            sheet.add("millrace_groups", count, kind, state)
        counts = groups.counts
        rebalances = {
            "classic": counts.classic_rebalances,
            "consumer": counts.consumer_rebalances,
            "share": counts.share_rebalances,
        }
        for kind in members:
            sheet.add("millrace_group_members", members[kind], kind)
            sheet.add("millrace_group_rebalances_total", rebalances[kind], kind)
        sheet.add("millrace_group_offset_commits_total", counts.offset_commits)
        if infos:
            sheet.add_table(("millrace_group_info",), infos)
            sheet.add_table(("millrace_group_member_count",), sizes)

    async def _queues(self, scrape: Scrape) -> None:
        sheet, queues = scrape.sheet, self._services.queues
        counts = queues.counts
        partitions = in_flight = 0
        groups: dict[str, list[int]] = {}
        for number, each in enumerate(queues):
            partitions += 1
            in_flight += each.in_flight
            sums = groups.setdefault(each.key.group_id, [0, 0])
            sums[0] += max(each.partition.high_watermark.offset - each.start_offset, 0)
            sums[1] += each.in_flight
            if number % _STEP == 0:
                await scrape.pace.step()
        sheet.add("millrace_queue_partitions", partitions)
        sheet.add("millrace_queue_records_in_flight", in_flight)
        sheet.add("millrace_queue_records_delivered_total", counts.delivered)
        sheet.add("millrace_queue_records_redelivered_total", counts.redelivered)
        for kind in _ACKNOWLEDGEMENTS:
            count = counts.acknowledged.get(kind, 0)
            sheet.add("millrace_queue_records_acknowledged_total", count, kind.name.lower())
        sheet.add("millrace_queue_lock_timeouts_total", counts.lock_timeouts)
        sheet.add("millrace_queue_records_archived_total", counts.archived)
        sheet.add("millrace_queue_dead_letters_total", counts.dead_letters)
        sheet.add("millrace_queue_dead_letter_failures_total", counts.dead_letter_failures)
        if Detail.GROUPS in scrape.details and groups:
            families = ("millrace_queue_group_backlog_records", "millrace_queue_group_records_in_flight")
            sheet.add_table(families, [((group,), values) for group, values in groups.items()])

    async def _transactions(self, scrape: Scrape) -> None:
        sheet, coordinator = scrape.sheet, self._services.transactions
        ids = is_open = 0
        for shard in coordinator.shards:
            for number, transaction in enumerate(tuple(shard.transactions.values())):
                ids += 1
                is_open += transaction.state is TransactionState.ONGOING or transaction.state.is_prepared
                if number % _STEP == 0:
                    await scrape.pace.step()
        sheet.add("millrace_transactional_ids", ids)
        sheet.add("millrace_transactions_open", is_open)
        sheet.add("millrace_transactions_completed_total", coordinator.counts.committed, "committed")
        sheet.add("millrace_transactions_completed_total", coordinator.counts.aborted, "aborted")


@dataclass(slots=True)
class _Found:
    """Of the partitions led here."""

    leaders: int = 0
    under_replicated: int = 0
    under_min_isr: int = 0
    at_min_isr: int = 0
    reassigning: int = 0
    offline: int = 0
    max_lag: int = 0
    hanging: int = 0

    def look_at_leader(self, partition: Partition, log: Log | None, hanging_before_ms: int) -> None:
        state, leadership = partition.state, partition.leadership
        assert leadership is not None
        self.leaders += 1
        replicas, in_sync = len(state.replicas), len(state.isr)
        # A replica that is being added has never been in sync: it lacks only when the move is to be over.
        if in_sync < replicas - len(state.adding):
            self.under_replicated += 1
        if leadership.under_min_isr:
            self.under_min_isr += 1
        elif replicas > 1 and in_sync == partition.min_insync_replicas:
            self.at_min_isr += 1
        if state.adding or state.removing:
            self.reassigning += 1
        if log is not None and log.failure is None:
            if not leadership.is_alone:
                self.max_lag = max(self.max_lag, leadership.max_lag(log.end_offset))
            self.hanging += log.open_transactions(hanging_before_ms)


def _row(partition: Partition, log: Log | None, size_bytes: int, traffic: tuple[int, int, int, int]) -> Sequence[int]:
    """In the order of `_PARTITION_FAMILIES`."""
    start, end = (0, 0) if log is None else (log.start_offset, log.end_offset)
    mark = partition.high_watermark.offset if partition.is_open else min(partition.known_high_watermark, end)
    state = partition.state
    return (int(partition.is_leader), start, end, mark, size_bytes, len(state.replicas), len(state.isr), *traffic)


def _measured(log: Log) -> FilesOfLog:
    """In a thread."""
    try:
        return log.measure_files()
    except StorageError:
        return FilesOfLog(0, 0)


def _process_facts() -> tuple[int, int] | None:
    """Memory in RAM and open descriptors, in a thread; None where the operating system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only their number
    except OSError:
        return None


def api_title(key: int) -> str:
    """An API as Kafka writes it: `ListOffsets`."""
    return ApiKey(key).name.title().replace("_", "")


def _error_name(code: int) -> str:
    try:
        return ErrorCode(code).name
    except ValueError:
        return str(code)


def _in_thread(work: Callable[[], T]) -> Awaitable[T]:
    return asyncio.get_running_loop().run_in_executor(None, work)
