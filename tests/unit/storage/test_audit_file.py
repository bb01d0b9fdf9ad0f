from __future__ import annotations

import asyncio
import errno
import os
import stat
from pathlib import Path
from typing import Self

import pytest

from millrace.clock import SystemClock
from millrace.errors import ConfigError
from millrace.security.audit import Line, Outbox
from millrace.storage import audit_file
from millrace.storage.audit_file import AuditFile
from millrace.tasks import Tasks


def _outbox() -> Outbox:
    return Outbox("a test", lambda count: Line(0, b"lost %d" % count))


class Writing:
    """A file that is being written."""

    def __init__(self, path: Path) -> None:
        self.outbox = _outbox()
        self.file = AuditFile(path, self.outbox, clock=SystemClock())
        self.tasks = Tasks(SystemClock())

    async def __aenter__(self) -> Self:
        self.tasks.keep("audit file", self.file.run)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.tasks.stop()
        await self.file.stop()

    def write(self, *lines: bytes) -> None:
        for line in lines:
            self.outbox.offer(Line(0, line))


async def _until(path: Path, text: str) -> None:
    async with asyncio.timeout(10):
        while not path.exists() or path.read_text() != text:
            await asyncio.sleep(0.005)


async def test_lines_are_appended_to_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    os.umask(umask := os.umask(0))
    try:
        os.umask(0)
        async with Writing(path) as writing:
            writing.write(b"one", b"two")
            await _until(path, "one\ntwo\n")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with Writing(path) as writing:
        writing.write(b"three")
    assert path.read_text() == "one\ntwo\nthree\n", "what there is when it stops is written"


async def test_a_renamed_or_removed_file_is_made_anew(tmp_path: Path) -> None:
    path, old = tmp_path / "audit.log", tmp_path / "audit.log.1"
    async with Writing(path) as writing:
        writing.write(b"one")
        await _until(path, "one\n")
        path.rename(old)
        writing.write(b"two")
        await _until(path, "two\n")
        path.unlink()
        writing.write(b"three")
        await _until(path, "three\n")
    assert old.read_text() == "one\n"


async def test_a_write_that_fails_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_file, "RETRY_S", 0.01)
    real, refusals = os.write, 3

    def write(fd: int, data: bytes) -> int:
        nonlocal refusals
        if data.startswith(b"a"):
            return real(fd, data[:2])
        if refusals:
            refusals -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(audit_file.os, "write", write)
    path = tmp_path / "audit.log"
    async with Writing(path) as writing:
        writing.write(b"abcdef", b"second")
        await _until(path, "abcdef\nsecond\n")
    assert refusals == 0


async def test_a_file_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"audit\.log\.path: cannot write .*No such file"):
        AuditFile(tmp_path / "missing" / "audit.log", _outbox(), clock=SystemClock())
    elsewhere = tmp_path / "link"
    elsewhere.symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="cannot write"):
        AuditFile(elsewhere, _outbox(), clock=SystemClock())


async def test_half_a_line_of_before_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_bytes(b'whole\n{"cut')
    async with Writing(path) as writing:
        writing.write(b"next")
    assert path.read_bytes() == b'whole\n{"cut\nnext\n'
    async with Writing(path) as writing:
        writing.write(b"last")
    assert path.read_bytes().endswith(b"\nnext\nlast\n")


async def test_a_line_is_whole_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk took half of it, and the file was rotated away then."""
    monkeypatch.setattr(audit_file, "RETRY_S", 0.01)
    path, old = tmp_path / "audit.log", tmp_path / "audit.log.1"
    real = os.write

    def write(fd: int, data: bytes) -> int:
        if old.exists():
            return real(fd, data)
        if data.startswith(b"first"):
            return real(fd, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(audit_file.os, "write", write)
    async with Writing(path) as writing:
        writing.write(b"first", b"second", b"third")
        await _until(path, "first\nseco")
        path.rename(old)
        await _until(path, "second\nthird\n")
