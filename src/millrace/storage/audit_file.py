"""The audit log as a file: JSON lines, appended by a thread of its own.

The file is made with mode 0600; the mode of one that exists is left to whoever made it. It is opened again when its
name stands for another file, so that `logrotate` may rename it without telling the broker. A write that fails (a full
disk, a directory that is gone) is tried again with what was left of it; meanwhile events wait in their queue, and
beyond its bounds are lost (`security.audit`). What is written is left to the operating system to put on disk.

An event is a line of its own, also after half of one: what an earlier process could not finish is ended before the
first, and a line that the disk had room for half of is written as a whole where another file has taken its place.

Owner: the task that runs `run`; the file and what is left of a write belong to the thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from millrace.clock import Clock
from millrace.errors import ConfigError
from millrace.security.audit import Outbox

logger = logging.getLogger(__name__)

MODE: Final = 0o600
RETRY_S: Final = 1.0
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LINES: Final = 1000
_BYTES: Final = 1024 * 1024


class AuditFile:
    """Writes an outbox to a file."""

    def __init__(self, path: Path, outbox: Outbox, *, clock: Clock) -> None:
        """ConfigError where the file cannot be written: a broker that should leave a trail does not start without."""
        self.path = path
        self._outbox = outbox
        self._clock = clock
        self._fd = -1
        self._pending = b""
        """Whole lines, of a write that failed."""
        self._written = 0
        """How much of them is in the file."""
        self._failing = False
        try:
            self._open()
        except OSError as error:
            raise ConfigError(f"audit.log.path: cannot write {path}: {error.strerror or error}") from None
        if _ends_within_a_line(path):
            self._pending = b"\n"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audit-file")

    def __repr__(self) -> str:
        return f"AuditFile({self.path}, {'failing' if self._failing else 'writing'}, {self._outbox!r})"

    async def run(self) -> None:
        """Write what comes, for ever."""
        while True:
            if not self._failing:
                await self._outbox.filled()
            if not await self._write_some():
                await self._clock.sleep(RETRY_S)

    async def stop(self) -> None:
        """Write what there is, once `run` has ended, and close the file."""
        await self._write_some()
        while self._outbox and not self._failing:
            await self._write_some()
        self._thread.shutdown(wait=False)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def _write_some(self) -> bool:
        lines = [] if self._failing else self._outbox.take(_LINES, _BYTES)
        data = b"".join(line.data + b"\n" for line in lines)
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._write, data)
        except OSError as error:
            if not self._failing:
                logger.error("the audit log %s cannot be written: %s", self.path, error.strerror or error)  # noqa: TRY400
            self._failing = True
            return False
        if self._failing:
            logger.warning("the audit log %s is written again", self.path)
            self._failing = False
        return True

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        self._pending += data
        if self._is_another():
            self._open()
            self._written = self._pending.rfind(b"\n", 0, self._written) + 1
        while self._written < len(self._pending):
            self._written += os.write(self._fd, self._pending[self._written :])
        self._pending, self._written = b"", 0

    def _is_another(self) -> bool:
        try:
            named = os.stat(self.path)  # noqa: PTH116 - of the same form as fstat
        except FileNotFoundError:
            return True
        own = os.fstat(self._fd)
        return (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino)

    def _open(self) -> None:
        fd = os.open(self.path, _FLAGS, MODE)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd


def _ends_within_a_line(path: Path) -> bool:
    """Whether whoever wrote to the file before was stopped in the middle of an event."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # it may be written and not read
        return False
    try:
        found = os.fstat(fd)
        return stat.S_ISREG(found.st_mode) and found.st_size > 0 and os.pread(fd, 1, found.st_size - 1) != b"\n"
    finally:
        os.close(fd)
