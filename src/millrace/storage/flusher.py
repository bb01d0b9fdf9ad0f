"""Group commit: one flusher per log directory syncs whatever is dirty, as often as the disk allows.

There is no timer in `group` mode: while one sync runs in a thread, more logs and more batches become dirty, and the
next one covers them all. Latency is about one sync at low load, and throughput hardly suffers at high load. In
`interval` mode a log waits for its interval first; in `group` mode one waits only for what its owner knows will come
(`Log.flush_patience_s`).

A failed sync is final. The kernel may have dropped the dirty pages, so a second sync that succeeds proves nothing: the
flusher stops, nothing counts as flushed any more, and `on_failure` takes the directory offline.

Owner: the event loop, in callbacks; only the sync itself runs in the thread.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from millrace.clock import Clock, Timer
from millrace.errors import StorageError
from millrace.metrics.histogram import Histogram
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.settings import FlushMode
from millrace.storage.ticket import FlushTicket

logger = logging.getLogger(__name__)

Done = Callable[[Exception | None], object]

MAX_SYNCS_IN_A_ROW: Final = 16
"""After so many the loop is asked again, and other logs get their turn."""


class _SyncThread:
    """One thread that runs one call after another for the loop.

    An executor does the same for twice the CPU time, and this is done thousands of times a second; its futures also
    bring the result a turn of the loop later, and whole requests are handled in such a turn.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], Done] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], object], done: Done) -> None:
        """Run `call` in the thread, then `done` on the loop."""
        self._calls.put((call, done))

    def stop(self) -> None:
        """Finish what was asked for and end."""
        self._calls.put(None)
        self._thread.join()

    def tell(self, news: Callable[[], object]) -> None:
        """In the thread: have `news` called on the loop before `done` is."""
        with suppress(RuntimeError):  # the loop is gone
            self._loop.call_soon_threadsafe(news)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, done = item
            error: Exception | None = None
            try:
                call()
            except Exception as raised:  # noqa: BLE001 - it goes to the loop
                error = raised
            try:
                self._loop.call_soon_threadsafe(done, error)
            except RuntimeError:
                return  # the loop is gone, and with it everybody who could want the result


class _Delay(NamedTuple):
    """A log that may wait before it is synced, and for how long."""

    within_s: float
    timer: Timer


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
        self.sync_times = Histogram()
        """How long each sync took; written in the thread."""
        self._files = files
        self._clock = clock
        self._on_failure = on_failure
        self._checkpoint = checkpoint
        self._dirty: dict[Log, None] = {}
        self._delayed: dict[Log, _Delay] = {}
        self._busy = False
        """A sync is under way or about to begin."""
        self._idle: asyncio.Future[None] | None = None
        self._thread: _SyncThread | None = None

    def __repr__(self) -> str:
        state = "failed" if self.failure else "running" if self._thread else "stopped"
        return f"Flusher({self.name}, {state}, {len(self._dirty)} dirty)"

    def start(self) -> None:
        """Begin to flush, on the running loop."""
        if self._thread is None:
            self._thread = _SyncThread(f"flush-{self.name}")
            if self._dirty:
                self._wake()

    def request(self, log: Log, within_s: float = 0.0) -> None:
        """Have the log synced: now, or within `within_s` or its interval. Cheap, and harmless when repeated."""
        if log in self._dirty:
            return
        config = log.config
        if config.flush_mode is FlushMode.INTERVAL:
            within_s = config.flush_interval_ms / 1000
        delay = self._delayed.get(log)
        if within_s and self._thread is not None:
            if delay is None or within_s < delay.within_s:  # sooner, where its settings have changed
                self._end_delay(log)
                timer = self._clock.call_later(within_s, lambda: self._wait_is_over(log))
                self._delayed[log] = _Delay(within_s, timer)
            return
        if delay is not None:
            self._end_delay(log)
        self._add(log)

    def _end_delay(self, log: Log) -> None:
        delay = self._delayed.pop(log, None)
        if delay is not None:
            delay.timer.cancel()

    def _wait_is_over(self, log: Log) -> None:
        self._delayed.pop(log, None)
        self._add(log)

    def _add(self, log: Log) -> None:
        self._dirty[log] = None
        if not self._busy:
            self._wake()

    def _wake(self) -> None:
        """Begin in the next turn of the loop, so that everything that arrived in this one takes part."""
        if self._thread is not None and self.failure is None:
            self._busy = True
            asyncio.get_running_loop().call_soon(self._begin)

    def forget(self, log: Log) -> None:
        """The log is gone: do not touch its files any more. A sync under way ends harmlessly."""
        self._dirty.pop(log, None)
        self._end_delay(log)

    async def stop(self) -> None:
        """Sync what is dirty, then end. When cancelled, the thread's last sync still runs to its end."""
        thread = self._thread
        if thread is None:
            return
        for log in list(self._delayed):
            self._end_delay(log)
            self._dirty[log] = None
        if self._dirty and not self._busy:
            self._wake()
        try:
            if self._busy:
                self._idle = asyncio.get_running_loop().create_future()
                await self._idle
        finally:
            self._thread = None
            thread.stop()

    def _begin(self) -> None:
        if self._thread is None:
            # Stopped in a hurry. The logs stay as dirty as they are: a ticket would say that somebody syncs them.
            self._rest()
            return
        logs, self._dirty = self._dirty, {}
        tickets: list[FlushTicket] = []
        try:
            for log in logs:
                ticket = log.begin_flush()
                if ticket is not None:
                    tickets.append(ticket)
        except StorageError as error:
            self._end(tickets, error)
            return
        if tickets:
            self._thread.run(lambda: self._sync(tickets), lambda error: self._end(tickets, error))
        else:
            self._rest()

    def _end(self, tickets: list[FlushTicket], error: Exception | None) -> None:
        for ticket in tickets:
            ticket.log.end_flush(ticket, synced=error is None)
        if error is not None:
            self._fail(error if isinstance(error, StorageError) else StorageError(f"a sync failed: {error!r}"))
            self._rest()
            return
        self.flushes += 1
        if self._checkpoint is not None and self._thread is not None and any(ticket.rolled for ticket in tickets):
            self._thread.run(self._checkpoint(), self._checkpointed)
        else:
            self._go_on()

    def _checkpointed(self, error: Exception | None) -> None:
        if error is not None:
            self._fail(error if isinstance(error, StorageError) else StorageError(f"a checkpoint failed: {error!r}"))
            self._rest()
        else:
            self._go_on()

    def _go_on(self) -> None:
        if self._dirty:
            self._begin()
        else:
            self._rest()

    def _rest(self) -> None:
        self._busy = False
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _sync(self, tickets: list[FlushTicket]) -> None:
        """In the thread: sync, and a log that is alone and was written to meanwhile is synced again at once.

        The loop may be busy with the very requests that wrote: asking it first would let the disk rest.
        """
        begun_s = self._clock.monotonic()
        for ticket in tickets:
            ticket.run(self._files)
        self.sync_times.record(self._clock.monotonic() - begun_s)
        thread = self._thread
        if len(tickets) > 1 or thread is None:
            return
        (ticket,) = tickets
        for _ in range(MAX_SYNCS_IN_A_ROW):
            end = ticket.grown()
            if end is None or len(self._dirty) > 1:
                return
            thread.tell(partial(ticket.log.note_synced, ticket.end, ticket.generation))
            begun_s = self._clock.monotonic()
            ticket.sync_again(self._files, end)
            self.sync_times.record(self._clock.monotonic() - begun_s)

    def _fail(self, error: StorageError) -> None:
        self.failure = error
        logger.error("flusher %s stopped, nothing more counts as flushed: %s", self.name, error)
        if self._on_failure is not None:
            self._on_failure(error)
