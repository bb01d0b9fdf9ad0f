"""The tail of growing files: complete lines as they are written, over rotation, and positions that survive a restart.

Not here: sending (`produce`). A file is known by its device, its inode and its first bytes, not by its name:

- renamed away and a new one under its name: what is still written to the old one is read for a moment longer, its last
  line counts even without a newline, then the new one is read from its start;
- truncated, or truncated and grown again: read from its start;
- moved while nobody followed: what was not read of it is read first, if it lies in the same folder;
- not there yet, or gone for a moment: waited for.

A line is handed out when its newline is there; the newline, and a carriage return before it, are not part of it. A line
longer than LONGEST_LINE_BYTES is cut, so that a file without newlines cannot fill the memory. A position is the offset
after the last line handed out; whoever sends the lines saves positions when everything up to them is acknowledged.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from millrace.clock import Clock, SystemClock
from millrace.errors import ConfigError

LONGEST_LINE_BYTES: Final = 900_000  # below the default limit of a record, 1 MB
OLD_FILE_GRACE_S: Final = 1.0
PATTERN_EVERY_S: Final = 1.0
_HEAD_BYTES: Final = 256
_READ_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Line:
    """One line and the name of the file it stood in."""

    path: str
    text: bytes


@dataclass(frozen=True, slots=True)
class Position:
    """How far a file was read, and which file that was: the first `head_bytes` of it have this digest."""

    device: int
    inode: int
    offset: int
    head_bytes: int
    head: str


class FollowedFile:
    """One name, the file that is open under it, and the beginning of a line that waits for its end."""

    def __init__(self, path: str, *, position: Position | None, from_end: bool, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        self._fd = -1
        self._identity = (0, 0)
        self._offset = 0  # of the next byte to read
        self._behind = 0  # bytes that were read and not handed out
        self._rest = b""  # those of them that are the beginning of a line
        self._head = b""
        self._replaced_at: float | None = None
        self._resume = position
        self._from_end = from_end

    def __repr__(self) -> str:
        return f"FollowedFile({self.path} at {self._offset - self._behind})"

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def position(self) -> Position | None:
        """What to save; None while no file is there."""
        if self._fd < 0:
            return self._resume
        device, inode = self._identity
        return Position(device, inode, self._offset - self._behind, len(self._head), _digest(self._head))

    def lines(self) -> Iterator[Line]:
        """The complete lines that were written since the last call."""
        if self._fd < 0 and not self._open():
            return
        yield from self._restart_if_truncated()
        yield from self._read()
        if self._has_been_replaced() and self._old_file_is_done():
            yield from self._read()
            yield from self._give_up_rest()
            self.close()
            if self._open():
                yield from self._read()

    def _open(self) -> bool:
        """Open the file under the name, or the one that was being read and has been moved while nobody looked."""
        resume = self._resume
        if resume is not None and any(self._open_again(path, resume) for path in (self.path, *self._neighbours())):
            self._resume = None
            return True
        try:
            self._use(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            self._from_end = False  # a file that appears later is all new
            return False
        # A file that was seen before and is another one now is all new, too.
        self._offset = os.fstat(self._fd).st_size if self._from_end and resume is None else 0
        self._from_end = False
        self._resume = None
        return True

    def _open_again(self, path: str, saved: Position) -> bool:
        """Open the file that a saved position belongs to, if it is this one."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        status = os.fstat(fd)
        same = (status.st_dev, status.st_ino) == (saved.device, saved.inode) and status.st_size >= saved.offset
        if not same or _digest(os.pread(fd, saved.head_bytes, 0)) != saved.head:
            os.close(fd)
            return False
        self._use(fd)
        self._offset = saved.offset
        return True

    def _neighbours(self) -> list[str]:
        """The files of the same folder that have the inode of the saved position."""
        assert self._resume is not None
        try:
            with os.scandir(Path(self.path).parent) as entries:
                return [entry.path for entry in entries if entry.inode() == self._resume.inode]
        except OSError:
            return []

    def _use(self, fd: int) -> None:
        status = os.fstat(fd)
        self._fd = fd
        self._identity = (status.st_dev, status.st_ino)
        self._head = os.pread(fd, _HEAD_BYTES, 0)
        self._rest = b""
        self._behind = 0
        self._replaced_at = None

    def _restart_if_truncated(self) -> Iterator[Line]:
        size = os.fstat(self._fd).st_size
        head = os.pread(self._fd, _HEAD_BYTES, 0)
        if size < self._offset or head[: len(self._head)] != self._head:
            yield from self._give_up_rest()
            self._offset = 0
        self._head = head

    def _read(self) -> Iterator[Line]:
        while chunk := os.pread(self._fd, _READ_BYTES, self._offset):
            self._offset += len(chunk)
            self._behind += len(chunk)
            *complete, rest = (self._rest + chunk).split(b"\n")
            for text in complete:
                self._behind -= len(text) + 1
                yield Line(self.path, text.removesuffix(b"\r"))
            self._rest = rest
            if len(rest) > LONGEST_LINE_BYTES:
                yield from self._give_up_rest()

    def _give_up_rest(self) -> Iterator[Line]:
        """The beginning of a line whose end will not come, as a line."""
        if self._rest:
            text, self._rest, self._behind = self._rest, b"", 0
            yield Line(self.path, text.removesuffix(b"\r"))

    def _has_been_replaced(self) -> bool:
        try:
            status = Path(self.path).stat()
        except FileNotFoundError:
            return False  # between two steps of a rotation: the old file is read until there is a new one
        return (status.st_dev, status.st_ino) != self._identity

    def _old_file_is_done(self) -> bool:
        """Whether the writer had time to notice that its file was moved."""
        now = self._clock.monotonic()
        if self._replaced_at is None:
            self._replaced_at = now
        return now - self._replaced_at >= OLD_FILE_GRACE_S


class Follower:
    """Every file that is followed. A name with * or ? stands for files, also for those that appear later."""

    def __init__(
        self,
        names: Iterable[str],
        *,
        from_beginning: bool = False,
        positions: Mapping[str, Position] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._saved = dict(positions or {})
        self._files: dict[str, FollowedFile] = {}
        self._patterns: list[str] = []
        for name in names:
            if glob.has_magic(name) and not Path(name).exists():
                self._patterns.append(name)
            else:
                self._add(name, from_end=not from_beginning)
        self._look_for_files(from_end=not from_beginning)

    def __repr__(self) -> str:
        return f"Follower({len(self._files)} files)"

    @property
    def paths(self) -> list[str]:
        return list(self._files)

    def missing(self) -> list[str]:
        """Names under which there is no file yet, and patterns that match none."""
        unmatched = [pattern for pattern in self._patterns if not glob.glob(pattern, recursive=True)]  # noqa: PTH207
        return [path for path in self._files if not Path(path).exists()] + unmatched

    def lines(self) -> Iterator[Line]:
        """What is new in every file."""
        if self._patterns and self._clock.monotonic() - self._looked_at >= PATTERN_EVERY_S:
            self._look_for_files(from_end=False)
        for file in self._files.values():
            yield from file.lines()

    def positions(self) -> dict[str, Position]:
        """Where each file stands; names that were saved and are not followed now are kept."""
        now = {path: position for path, file in self._files.items() if (position := file.position()) is not None}
        return {**self._saved, **now}

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _look_for_files(self, *, from_end: bool) -> None:
        self._looked_at = self._clock.monotonic()
        for pattern in self._patterns:
            for name in sorted(glob.glob(pattern, recursive=True)):  # noqa: PTH207  # a pattern may be absolute
                if str(Path(name).absolute()) not in self._files and Path(name).is_file():
                    self._add(name, from_end=from_end)

    def _add(self, name: str, *, from_end: bool) -> None:
        if Path(name).is_dir():
            raise ConfigError(f"{name} is a folder; follow the files in it with a pattern: '{name.rstrip('/')}/*'")
        path = str(Path(name).absolute())
        from_end = from_end and Path(path).exists()  # one that appears after this is all new
        self._files[path] = FollowedFile(path, position=self._saved.get(path), from_end=from_end, clock=self._clock)


def load_positions(path: Path) -> dict[str, Position]:
    """What `save_positions` wrote; nothing when there is no such file yet."""
    try:
        saved = json.loads(path.read_bytes())
        return {name: Position(**fields) for name, fields in saved.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(f"{path} is not a state file of produce --follow; remove it or name another one") from None


def save_positions(path: Path, positions: Mapping[str, Position]) -> None:
    """Replace the state file: after a crash it holds the old positions or the new ones, never a mixture."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump({name: asdict(position) for name, position in positions.items()}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _digest(head: bytes) -> str:
    return hashlib.blake2b(head, digest_size=8).hexdigest()
