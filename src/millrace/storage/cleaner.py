"""Who compacts, and when: looks at every compacted log from time to time and has the dirtiest ones worked on first.

The work is a worker's (`compaction_worker`); what it has written takes the place of the old segments here, on the loop,
in one synchronous call of the log. A log that was cut, deleted, moved or closed meanwhile refuses, and the round was
for nothing. Not here: what is worth compacting (`compaction`).

Owner: one task, `run`; cancelling it ends workers and leaves logs as they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple

from millrace.clock import Clock
from millrace.config import BrokerConfig
from millrace.errors import ApiError, StorageError
from millrace.model import TopicPartition
from millrace.storage.compaction import Dirt, find_dirt, group_sources, wants_roll
from millrace.storage.compaction_job import KEY_BYTES, Cleaned, CompactionJob
from millrace.storage.compaction_worker import ProcessWorker, Worker
from millrace.storage.log import Log

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE_S: Final = 0.05
_PAUSE_AFTER_FAILURE_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class CleanerSettings:
    """The `log.cleaner.*` settings; those of a topic are in `LogConfig`."""

    enabled: bool = True
    threads: int = 1
    dedupe_buffer_bytes: int = 128 * 1024 * 1024
    load_factor: float = 0.9
    io_buffer_bytes: int = 512 * 1024
    max_bytes_per_s: float = 1e308
    backoff_ms: int = 15_000

    @classmethod
    def from_config(cls, config: BrokerConfig) -> CleanerSettings:
        return cls(
            enabled=config.get_bool("log.cleaner.enable"),
            threads=config.get_int("log.cleaner.threads"),
            dedupe_buffer_bytes=config.get_int("log.cleaner.dedupe.buffer.size"),
            load_factor=config.get_float("log.cleaner.io.buffer.load.factor"),
            io_buffer_bytes=config.get_int("log.cleaner.io.buffer.size"),
            max_bytes_per_s=config.get_float("log.cleaner.io.max.bytes.per.second"),
            backoff_ms=config.get_int("log.cleaner.backoff.ms"),
        )

    @property
    def max_keys(self) -> int:
        """How many keys one worker may remember."""
        return max(int(self.dedupe_buffer_bytes * self.load_factor) // max(self.threads, 1) // KEY_BYTES, 1)


class Compactable(NamedTuple):
    """A log, and the offset from which on it must not be touched now."""

    partition: TopicPartition
    log: Log
    below: Callable[[], int]


@dataclass(slots=True)
class CleanerCounts:
    """What compaction has done: plain numbers, read when somebody asks."""

    done: int = 0
    """Rounds on a log."""
    stale: int = 0
    """Rounds that were for nothing: the log was cut, deleted or moved meanwhile."""
    failed: int = 0
    seconds: float = 0.0
    reclaimed_bytes: int = 0
    max_dirty_ratio: float = 0.0
    """Of the dirtiest log, when they were last looked at."""


class _Stale(Exception):
    """The log is not what it was any more."""


class Cleaner:
    """Compacts the logs of a broker."""

    def __init__(
        self,
        *,
        settings: Callable[[], CleanerSettings],
        compactable: Callable[[], Iterable[Compactable]],
        written_down: Callable[[TopicPartition], Callable[[], None]],
        clock: Clock,
        make_worker: Callable[[], Worker] = ProcessWorker,
    ) -> None:
        self._settings = settings
        self._compactable = compactable
        """The logs there are now."""
        self._written_down = written_down
        """The call, for a thread, that keeps how far a partition's log is clean."""
        self._clock = clock
        self._make_worker = make_worker
        self.counts = CleanerCounts()
        self._not_before: dict[TopicPartition, float] = {}
        self._threads: ThreadPoolExecutor | None = None

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self._clock.sleep(max(self._settings().backoff_ms / 1000, _SHORTEST_PAUSE_S))
            await self.clean()

    async def clean(self) -> None:
        """Compact everything that is worth it now."""
        settings = self._settings()
        if not settings.enabled or settings.threads < 1:
            return
        found = await self._survey()
        if not found:
            return
        waiting = deque(item for _, item in sorted(found, key=lambda each: each[0].ratio, reverse=True))
        count = min(settings.threads, len(waiting))
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="compaction")
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(count):
                    workers.create_task(self._work(waiting, settings))
        finally:
            self._threads.shutdown(wait=False)

    async def _survey(self) -> list[tuple[Dirt, Compactable]]:
        found = []
        for item in self._compactable():
            dirt = self._look(item)
            if dirt is not None:
                found.append((dirt, item))
            await asyncio.sleep(0)
        self.counts.max_dirty_ratio = max((dirt.ratio for dirt, _ in found), default=0.0)
        return found

    @property
    def failing(self) -> int:
        """How many logs are not compacted for now because it failed."""
        now = self._clock.monotonic()
        return sum(until > now for until in self._not_before.values())

    def _look(self, item: Compactable) -> Dirt | None:
        """What a round on the log would find; None where it is not worth it. May seal the active segment."""
        log = item.log
        if not log.config.compact or log.failure is not None or log.cleaned_offset >= log.end_offset:
            return None
        if self._clock.monotonic() < self._not_before.get(item.partition, 0.0):
            return None
        now_ms = self._clock.wall_ms()
        try:
            facts = log.compaction_facts(item.below())
            if wants_roll(facts, log.config, now_ms):
                log.roll()
                facts = log.compaction_facts(item.below())
            dirt = find_dirt(facts, log.config, now_ms)
        except (StorageError, ApiError) as error:
            self._put_off(item.partition, error)
            return None
        except Exception as error:  # of one log: the others go on
            logger.exception("%s cannot be looked at", item.partition)
            self._put_off(item.partition, error)
            return None
        return dirt if dirt.is_due else None

    def _put_off(self, partition: TopicPartition, error: Exception) -> None:
        logger.error("%s is not compacted: %s", partition, error)
        self._not_before[partition] = self._clock.monotonic() + _PAUSE_AFTER_FAILURE_S

    # --- rounds -------------------------------------------------------------------------------------------------------

    async def _work(self, waiting: deque[Compactable], settings: CleanerSettings) -> None:
        while waiting:
            worker = self._make_worker()
            try:
                await self._work_until_failure(worker, waiting, settings)
            finally:
                # Not here: whoever waits for the disk takes its time to die.
                await asyncio.get_running_loop().run_in_executor(self._threads, worker.close)

    async def _work_until_failure(self, worker: Worker, waiting: deque[Compactable], settings: CleanerSettings) -> None:
        """Rounds, until there are no more or one has failed: whatever the worker was in the middle of, it is done."""
        while waiting:
            item = waiting.popleft()
            dirt = self._look(item)
            if dirt is None:
                continue
            begun_s = self._clock.monotonic()
            try:
                await self._round(worker, item, dirt, settings)
            except _Stale:
                self.counts.stale += 1
                logger.info("%s has changed while it was compacted", item.partition)
                return
            except StorageError as error:
                self.counts.failed += 1
                self._put_off(item.partition, error)
                return
            except Exception as error:  # the root of the task: the other logs go on
                self.counts.failed += 1
                logger.exception("a round of compaction failed")
                self._put_off(item.partition, error)
                return
            finally:
                self.counts.seconds += self._clock.monotonic() - begun_s
            self.counts.done += 1
            waiting.append(item)  # the map of keys may not have had room for all

    async def _round(self, worker: Worker, item: Compactable, dirt: Dirt, settings: CleanerSettings) -> None:
        loop = asyncio.get_running_loop()
        log = item.log
        truncations = log.truncations
        job = make_job(log, dirt, settings, self._clock.wall_ms())
        before_bytes = log.size_bytes

        def swap(cleaned: Cleaned) -> None:
            asyncio.run_coroutine_threadsafe(self._swap(log, cleaned, truncations), loop).result()

        round_ = loop.run_in_executor(self._threads, worker.run, job, swap)
        try:
            finished = await asyncio.shield(round_)
        except asyncio.CancelledError:
            worker.stop()
            await asyncio.wait([round_])
            round_.exception()
            raise
        except Exception:
            await loop.run_in_executor(self._threads, worker.close)  # it may still write
            await loop.run_in_executor(self._threads, log.drop_cleaned)
            raise
        if log.truncations != truncations or log.failure is not None:
            raise _Stale
        log.cleaned_offset = finished.cleaned_offset
        self.counts.reclaimed_bytes += max(before_bytes - log.size_bytes, 0)
        await loop.run_in_executor(self._threads, self._written_down(item.partition))
        logger.info(
            "%s is compacted up to offset %d: %d keys, from %d to %d bytes",
            item.partition, finished.cleaned_offset, finished.keys, before_bytes, log.size_bytes,
        )  # fmt: skip

    async def _swap(self, log: Log, cleaned: Cleaned, truncations: int) -> None:
        doomed = log.replace_segments(cleaned, truncations)
        if doomed is None:
            raise _Stale
        try:
            await asyncio.get_running_loop().run_in_executor(None, log.sync_names)
        except StorageError as error:
            log.fail(error)
            raise
        log.remove_files(doomed)


def make_job(log: Log, dirt: Dirt, settings: CleanerSettings, now_ms: int) -> CompactionJob:
    """A round on what `find_dirt` has found in the log."""
    config = log.config
    groups = group_sources(dirt.segments, config)
    # As they were where the round ends: what they wrote behind it may be cut off again, if it is not committed.
    producers = log.producers_at(dirt.segments[-1].end_offset)
    return CompactionJob(
        directory=log.directory,
        groups=tuple(groups),
        first_dirty_offset=dirt.first_dirty_offset,
        aborted=tuple(log.aborted_transactions(dirt.segments[0].base_offset, dirt.segments[-1].end_offset)),
        producer_ends={entry.producer_id: entry.last_offset for entry in producers if entry.batches},
        marker_epochs={entry.producer_id: entry.epoch for entry in producers if not entry.batches},
        now_ms=now_ms,
        delete_retention_ms=config.delete_retention_ms,
        max_keys=settings.max_keys,
        io_buffer_bytes=settings.io_buffer_bytes,
        max_bytes_per_s=settings.max_bytes_per_s / settings.threads,
        index_interval_bytes=config.index_interval_bytes,
        max_decompressed_bytes=config.max_decompressed_bytes,
        sync=log.syncs,
    )
