"""A copy of a log in another data directory, brought up to date until it can take the log's place.

    <target>/<topic>-<partition>.<uuid>-future/    the copy; a start removes it, because only the original counts
    <target>/<topic>-<partition>/moved             the copy has taken the place; gone when the original is put away

A log goes on while it is copied: files only grow, but for a truncation or a compaction, after which the copy is of no
use any more (`LogCopy.is_stale`). What changes in place (the active segment's indexes) and what is only in memory
(epochs) comes last, in `finish`.

Not here: when, how fast, and the change of places (`logdirs`). Owner: the event loop, except for `copy` and `sync`,
which run in a thread, one at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from millrace.errors import StorageError
from millrace.storage import checkpoint
from millrace.storage.files import Files
from millrace.storage.segment import CLEANED_SUFFIX, DELETED_SUFFIX, LOG_SUFFIX, SWAP_SUFFIX, file_name

if TYPE_CHECKING:
    from millrace.storage.log import Log

MARK: Final = "moved"
PIECE_BYTES: Final = 1024 * 1024
_OFFSET_DIGITS: Final = 20
_READ: Final = os.O_RDONLY | os.O_CLOEXEC
_WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_PASSING: Final = (".tmp", DELETED_SUFFIX, CLEANED_SUFFIX, SWAP_SUFFIX, LOG_SUFFIX)
"""Suffixes of files that come otherwise or not at all."""
_LEFT_OUT: Final = frozenset({MARK, checkpoint.LEADER_EPOCHS})


class Piece(NamedTuple):
    """Bytes of one file; a `whole` file replaces what the copy has of it."""

    name: str
    start: int
    size_bytes: int
    whole: bool = False


class LogCopy:
    """The copy of `log` at `path`, which is made here."""

    def __init__(self, log: Log, path: Path, files: Files) -> None:
        self.path = path
        self.size_bytes = 0
        """Of the records that were copied."""
        self._log = log
        self._files = files
        self._generation = log.layout().generation
        self._lengths: dict[str, int] = {}
        self._sides: dict[str, tuple[int, int]] = {}
        self._unsynced: dict[str, None] = {}
        files.make_directory(path)

    @property
    def is_stale(self) -> bool:
        """Whether the log was cut or compacted: what was copied may not be its records any more."""
        return self._log.layout().generation != self._generation

    @property
    def end_offset(self) -> int:
        """Below it everything was copied, and perhaps some of the segment that begins there."""
        for base, size_bytes in self._log.layout().segments:
            if self._lengths.get(file_name(base, LOG_SUFFIX), 0) < size_bytes:
                return base
        return self._log.end_offset

    def missing(self) -> list[Piece]:
        """What the copy lacks of what will not change any more."""
        return list(self._missing(final=False))

    def _missing(self, *, final: bool) -> Iterator[Piece]:
        segments = self._log.layout().segments
        active_base = segments[-1][0] if segments else 0
        names = set(self._files.names(self._log.directory))
        for base, size_bytes in segments:
            name = file_name(base, LOG_SUFFIX)
            start = self._lengths.get(name, 0)
            names.discard(name)
            if start < size_bytes or (final and name not in self._lengths):
                yield from _pieces(name, start, size_bytes)
        for name in sorted(names):
            number = name[:_OFFSET_DIGITS]
            is_closed = number.isdigit() and int(number) < active_base
            if name in _LEFT_OUT or name.endswith(_PASSING) or not (is_closed or final):
                continue
            state = self._state_of(name)
            if state is not None and state != self._sides.get(name):
                self._sides[name] = state
                yield Piece(name, 0, state[0], whole=True)

    def _state_of(self, name: str) -> tuple[int, int] | None:
        path = self._log.directory / name
        size_bytes = self._files.size_of(path)
        return None if size_bytes is None else (size_bytes, self._files.modified_ms(path))

    def copy(self, piece: Piece) -> None:
        """Copy one piece; any thread. A file that retention has removed meanwhile is passed over."""
        source, target = self._log.directory / piece.name, self.path / piece.name
        files = self._files
        try:
            try:
                source_fd = files.sys_open(source, _READ)
            except FileNotFoundError:
                self._sides.pop(piece.name, None)
                return
            try:
                target_fd = files.sys_open(target, _WRITE)
                try:
                    if piece.whole:
                        files.sys_truncate(target, target_fd, 0)
                    position, end = piece.start, piece.start + piece.size_bytes
                    while position < end:
                        data = files.sys_pread(source, source_fd, min(end - position, PIECE_BYTES), position)
                        if not data:  # cut meanwhile
                            break
                        position += files.sys_pwritev(target, target_fd, (data,), position)
                finally:
                    os.close(target_fd)
            finally:
                os.close(source_fd)
        except OSError as error:
            raise StorageError(f"cannot copy {source} to {target}: {error.strerror}") from error
        self._unsynced[piece.name] = None
        if piece.name.endswith(LOG_SUFFIX):
            self._lengths[piece.name] = position
            self.size_bytes += position - piece.start

    def sync(self) -> None:
        """Put what was copied on disk; any thread."""
        while self._unsynced:
            name = next(iter(self._unsynced))
            self._files.sync_path(self.path / name)
            del self._unsynced[name]

    def finish(self) -> bool:
        """Copy the rest in one step, and make all of it durable; False, and nothing done, where the copy is stale.

        When it returns, the copy is a log that was stopped cleanly.
        """
        if self.is_stale:
            return False
        self._log.prepare_close()
        for piece in self._missing(final=True):
            self.copy(piece)
        epochs = self.path / checkpoint.LEADER_EPOCHS
        self._files.write_bytes(epochs, checkpoint.render_epochs(self._log.layout().epochs))
        self._files.write_bytes(self.path / MARK, b"")
        self._unsynced.update({checkpoint.LEADER_EPOCHS: None, MARK: None})
        kept = {*self._files.names(self._log.directory), checkpoint.LEADER_EPOCHS, MARK}
        for name in self._files.names(self.path):
            if name not in kept:  # retention has removed the original
                self._files.remove(self.path / name)
                self._unsynced.pop(name, None)
        self.sync()
        self._files.sync_directory(self.path)
        return True


def _pieces(name: str, start: int, end: int) -> Iterator[Piece]:
    if start >= end:
        yield Piece(name, start, 0)
    for position in range(start, end, PIECE_BYTES):
        yield Piece(name, position, min(PIECE_BYTES, end - position))
