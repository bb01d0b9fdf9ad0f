"""Group commit: one flusher per log directory syncs whatever is dirty, as often as the disk allows.

There is no timer in `group` mode: while one sync runs in a thread, more logs and more batches become dirty, and the
next one covers them all. Latency is about one sync at low load, and throughput hardly suffers at high load. In
`interval` mode a log waits for its interval first.

A failed sync is final. The kernel may have dropped the dirty pages, so a second sync that succeeds proves nothing: the
flusher stops, nothing counts as flushed any more, and `on_failure` takes the directory offline.

Owner: the flusher's own task; `request` is called on the same loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from millrace.clock import Clock, Timer
from millrace.errors import StorageError
from millrace.storage.files import Files
from millrace.storage.log import FlushMode, FlushTicket, Log

logger = logging.getLogger(__name__)


class Flusher:
    """Syncs the logs of one directory."""

    def __init__(
        self,
        name: str,
        *,
        files: Files,
        clock: Clock,
        on_failure: Callable[[StorageError], object] | None = None,
        checkpoint: Callable[[], Callable[[], object]] | None = None,
    ) -> None:
        """`checkpoint` is called on the loop after a rolled segment was synced; what it returns runs in the thread."""
        self.name = name
        self.failure: StorageError | None = None
        self.flushes = 0
        self._files = files
        self._clock = clock
        self._on_failure = on_failure
        self._checkpoint = checkpoint
        self._dirty: dict[Log, None] = {}
        self._delayed: dict[Log, Timer] = {}
        self._wake: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._thread: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        state = "failed" if self.failure else "running" if self._task else "stopped"
        return f"Flusher({self.name}, {state}, {len(self._dirty)} dirty)"

    def start(self) -> None:
        """Begin to flush, on the running loop."""
        if self._task is None:
            self._stopping = False
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"flush-{self.name}")
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"flusher {self.name}")

    def request(self, log: Log) -> None:
        """Have the log synced: now, or within its interval. Cheap, and harmless when repeated."""
        if log in self._dirty:
            return
        config = log.config
        if config.flush_mode is FlushMode.INTERVAL:
            if log not in self._delayed and self._task is not None:
                self._delayed[log] = self._clock.call_later(
                    config.flush_interval_ms / 1000, lambda: self._interval_over(log)
                )
            return
        self._add(log)

    def _interval_over(self, log: Log) -> None:
        self._delayed.pop(log, None)
        self._add(log)

    def _add(self, log: Log) -> None:
        self._dirty[log] = None
        wake = self._wake
        if wake is not None and not wake.done():
            wake.set_result(None)

    def forget(self, log: Log) -> None:
        """The log is gone: do not touch its files any more. A sync under way ends harmlessly."""
        self._dirty.pop(log, None)
        timer = self._delayed.pop(log, None)
        if timer is not None:
            timer.cancel()

    async def stop(self) -> None:
        """Sync what is dirty, then end. When cancelled, the thread's last sync still runs to its end."""
        task, self._task = self._task, None
        if task is None:
            return
        for log, timer in list(self._delayed.items()):
            timer.cancel()
            self._dirty[log] = None
        self._delayed.clear()
        self._stopping = True
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        try:
            with suppress(StorageError):
                await task
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=True)
                self._thread = None

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._dirty:
                if self._stopping:
                    return
                self._wake = loop.create_future()
                await self._wake
                self._wake = None
                continue
            logs, self._dirty = self._dirty, {}
            try:
                await self._flush(loop, list(logs))
            except StorageError as error:
                self._fail(error)
                return

    async def _flush(self, loop: asyncio.AbstractEventLoop, logs: list[Log]) -> None:
        tickets: list[FlushTicket] = []
        synced = False
        try:
            for log in logs:
                ticket = log.begin_flush()
                if ticket is not None:
                    tickets.append(ticket)
            if tickets:
                await loop.run_in_executor(self._thread, self._sync, tickets)
                self.flushes += 1
            synced = True
        finally:
            for ticket in tickets:
                ticket.log.end_flush(ticket, synced=synced)
        if self._checkpoint is not None and any(ticket.rolled for ticket in tickets):
            await loop.run_in_executor(self._thread, self._checkpoint())

    def _sync(self, tickets: list[FlushTicket]) -> None:
        for ticket in tickets:
            ticket.run(self._files)

    def _fail(self, error: StorageError) -> None:
        self.failure = error
        logger.error("flusher %s stopped, nothing more counts as flushed: %s", self.name, error)
        if self._on_failure is not None:
            self._on_failure(error)
