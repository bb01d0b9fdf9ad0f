"""Run one broker in this process until a signal, for `up` and `broker`.

The order at the start is: listening, pid file, ready line; so whoever reads the ready line can connect and can find the
pid. The first SIGINT or SIGTERM stops cleanly; a second one ends the process as it would any other.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millrace.cli.output import CommandError

if TYPE_CHECKING:
    from millrace.config import BrokerConfig

LOG_LEVELS: Final = ("debug", "info", "warning", "error")


def configure_logging(level: str) -> None:
    """Log lines on stderr: time, level, module, text."""
    if level not in LOG_LEVELS:
        raise CommandError(f"--log-level is one of {', '.join(LOG_LEVELS)}, not '{level}'", exit_code=2)
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    )


def serve(config: BrokerConfig, *, pid_file: Path | None) -> None:
    """Start a broker, announce it, and return after it has been stopped by a signal."""
    import uvloop

    uvloop.run(_serve(config, pid_file))


async def _serve(config: BrokerConfig, pid_file: Path | None) -> None:
    import asyncio

    from millrace.broker import Broker

    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop() -> None:
        stopping.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    broker = Broker(config)
    await broker.start()
    try:
        _write_pid(pid_file)
        print(f"ready bootstrap={broker.bootstrap}", flush=True)
        await stopping.wait()
    finally:
        await broker.stop()
        _remove_pid(pid_file)


def _write_pid(pid_file: Path | None) -> None:
    if pid_file is not None:
        pid_file.parent.mkdir(parents=True, exist_ok=True)
        pid_file.write_text(f"{os.getpid()}\n")


def _remove_pid(pid_file: Path | None) -> None:
    if pid_file is not None:
        pid_file.unlink(missing_ok=True)
