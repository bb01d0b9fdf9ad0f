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
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from millrace.clock import Clock, Timer
from millrace.errors import StorageError
from millrace.storage.files import Files
from millrace.storage.log import FlushMode, FlushTicket, Log

logger = logging.getLogger(__name__)


class _SyncThread:
    """One thread that runs one call after another for the loop.

    An executor does the same for twice the CPU time, and this is done a thousand times a second: at low load it is a
    good part of the time between a produce request and its answer.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[asyncio.Future[None], Callable[[], object]] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], object]) -> asyncio.Future[None]:
        """Done once `call` is; cancelling the future does not stop the call."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._calls.put((done, call))
        return done

    def stop(self) -> None:
        """Finish what was asked for and end."""
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            done, call = item
            error: Exception | None = None
            try:
                call()
            except Exception as raised:  # noqa: BLE001 - whoever awaits the call gets it
                error = raised
            try:
                self._loop.call_soon_threadsafe(_finish, done, error)
            except RuntimeError:
                return  # the loop is gone, and with it everybody who could want the result


def _finish(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


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
        self._thread: _SyncThread | None = None

    def __repr__(self) -> str:
        state = "failed" if self.failure else "running" if self._task else "stopped"
        return f"Flusher({self.name}, {state}, {len(self._dirty)} dirty)"

    def start(self) -> None:
        """Begin to flush, on the running loop."""
        if self._task is None:
            self._stopping = False
            self._thread = _SyncThread(f"flush-{self.name}")
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
                self._thread.stop()
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
                await self._flush(list(logs))
            except StorageError as error:
                self._fail(error)
                return

    async def _flush(self, logs: list[Log]) -> None:
        assert self._thread is not None
        tickets: list[FlushTicket] = []
        synced = False
        try:
            for log in logs:
                ticket = log.begin_flush()
                if ticket is not None:
                    tickets.append(ticket)
            if tickets:
                await self._thread.run(lambda: self._sync(tickets))
                self.flushes += 1
            synced = True
        finally:
            for ticket in tickets:
                ticket.log.end_flush(ticket, synced=synced)
        if self._checkpoint is not None and any(ticket.rolled for ticket in tickets):
            await self._thread.run(self._checkpoint())

    def _sync(self, tickets: list[FlushTicket]) -> None:
        for ticket in tickets:
            ticket.run(self._files)

    def _fail(self, error: StorageError) -> None:
        self.failure = error
        logger.error("flusher %s stopped, nothing more counts as flushed: %s", self.name, error)
        if self._on_failure is not None:
            self._on_failure(error)
