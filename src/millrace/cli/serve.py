"""Run one broker in this process until a signal, for `up` and `broker`.

The order at the start is: listening, pid file, ready line; so whoever reads the ready line can connect and can find the
pid. The first SIGINT or SIGTERM stops cleanly, also in the middle of the start; a second one ends the process as it
would any other.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millrace.cli.output import CommandError

if TYPE_CHECKING:
    import asyncio

    from millrace.broker import Broker
    from millrace.config import BrokerConfig

LOG_LEVELS: Final = ("debug", "info", "warning", "error")

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
MAPPED_FROM_BYTES: Final = 4 * 1024 * 1024
"""Buffers above this are the operating system's again once they are freed."""
KEPT_FREE_BYTES: Final = 16 * 1024 * 1024


def check_log_level(level: str) -> None:
    if level not in LOG_LEVELS:
        raise CommandError(f"--log-level is one of {', '.join(LOG_LEVELS)}, not '{level}'", exit_code=2)


def configure_logging(level: str) -> None:
    """Log lines on stderr: time, level, module, text."""
    check_log_level(level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class OneLine(logging.Formatter):
    """An entry is one line, and a traceback below it: names of clients may be in it, and could pass for others."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        text = super().formatMessage(record)
        return (
            text if text.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
        )


def serve(
    config: BrokerConfig,
    *,
    pid_file: Path | None,
    ready: Callable[[str], object] = lambda _: None,
    told: Callable[[str], object] = lambda _: None,
) -> None:
    """Start a broker, announce it, and return after it has been stopped by a signal.

    `ready` gets the address before the ready line is printed, `told` afterwards.

    CommandError when the broker itself cannot go on.
    """
    import uvloop

    keep_freed_memory()
    failure = uvloop.run(_serve(config, pid_file, ready, told))
    if failure is not None:
        raise CommandError(f"the broker has stopped: {failure}")


def keep_freed_memory() -> bool:
    """Have the C library keep what buffers leave free, up to `KEPT_FREE_BYTES`; False where it cannot be told so.

    Record batches come and go by the megabyte. At its defaults glibc gives the end of the heap back as soon as it is
    free and asks for it again with the next batch: a page fault for every 4 KiB received, which is a tenth of the CPU
    time of a broker that takes large batches.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    # Setting one stops glibc from adapting the other.
    return bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_FREE_BYTES))


async def _serve(
    config: BrokerConfig, pid_file: Path | None, ready: Callable[[str], object], told: Callable[[str], object]
) -> str | None:
    import asyncio

    from millrace.broker import Broker
    from millrace.tasks import awaited

    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop() -> None:
        stopping.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    broker = Broker(config)
    if not await _started(broker, stopping):
        return None
    try:
        _write_pid(pid_file)
        ready(broker.bootstrap)
        print_ready(broker.bootstrap, [broker.metrics_url])
        told(broker.bootstrap)
        waiting = [awaited(event.wait()) for event in (stopping, broker.failed)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
    finally:
        await broker.stop()
        _remove_pid(pid_file)
    return broker.failure


def print_ready(bootstrap: str, metrics_urls: Sequence[str | None]) -> None:
    """Say that clients can connect, and where; and for each broker that has metrics where those are.

    In one write: whoever has seen the first line need not wait for the others, which are there or will not be.
    """
    lines = [f"ready bootstrap={bootstrap}", *(f"metrics={url}" for url in metrics_urls if url is not None)]
    print("".join(f"{line}\n" for line in lines), end="", flush=True)


async def _started(broker: Broker, stopping: asyncio.Event) -> bool:
    """Start the broker, unless a signal comes first: a start may wait long for ZooKeeper or for other brokers."""
    import asyncio

    from millrace.tasks import awaited

    start: asyncio.Future[Any] = awaited(broker.start())
    stop: asyncio.Future[Any] = awaited(stopping.wait())
    await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not start.done():
        start.cancel()
        await asyncio.wait({start})
        if start.cancelled():
            return False
    await start
    return True


def _write_pid(pid_file: Path | None) -> None:
    if pid_file is not None:
        pid_file.parent.mkdir(parents=True, exist_ok=True)
        pid_file.write_text(f"{os.getpid()}\n")


def _remove_pid(pid_file: Path | None) -> None:
    if pid_file is not None:
        pid_file.unlink(missing_ok=True)
