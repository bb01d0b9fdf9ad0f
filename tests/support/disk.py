"""A disk that misbehaves on demand: the twin of `millrace.storage.files.Files`.

`fail` makes a system call raise (EIO, ENOSPC), once or for good, and a failing write may leave part of its bytes
behind. `crash` turns the directory into what a power cut would leave: the content of each file at its last sync, under
the names that the last sync of each directory made durable. Optionally part of what was not synced survives (torn
writes).
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from millrace.records.compression import Buffer
from millrace.storage.files import Files

_MEMORY = Path("/dev/shm")


@contextmanager
def fast_directory() -> Iterator[Path]:
    """A temporary directory in memory where there is such a place: for tests that write thousands of small files."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as path:
        yield Path(path)


@dataclass
class Fault:
    """One planned failure: of a call named like the `sys_` method, on paths that contain `match`."""

    call: str
    number: int = errno.EIO
    match: str = ""
    after: int = 0
    """How many matching calls still succeed."""
    times: int = 1
    """How many calls fail; -1 for all that follow."""
    partial_bytes: int = 0
    """How many bytes a failing write leaves in the file."""


class FaultyFiles(Files):
    """`Files` under `root`, with faults and with a memory of what is durable."""

    def __init__(self, root: Path, *, max_open: int = 512) -> None:
        super().__init__(max_open)
        self.root = root
        self.faults: list[Fault] = []
        self.calls: dict[str, int] = {}
        self._ids = itertools.count()
        self._names: dict[Path, int] = {}
        self._durable_names: dict[Path, int] = {}
        self._content: dict[int, bytes] = {}
        self._directories: set[Path] = set()
        self._durable_directories: set[Path] = {root}
        self._renamed: dict[Path, Path] = {}
        """Directories that a sync of their parent will give another name: new by old."""

    def fail(self, call: str, number: int = errno.EIO, **rule: object) -> Fault:
        fault = Fault(call, number, **rule)  # type: ignore[arg-type]
        self.faults.append(fault)
        return fault

    def heal(self) -> None:
        self.faults.clear()

    def _due(self, call: str, path: Path) -> Fault | None:
        self.calls[call] = self.calls.get(call, 0) + 1
        for fault in self.faults:
            if fault.call != call or fault.match not in str(path) or fault.times == 0:
                continue
            if fault.after > 0:
                fault.after -= 1
                continue
            fault.times -= fault.times > 0
            return fault
        return None

    def _check(self, call: str, path: Path) -> None:
        fault = self._due(call, path)
        if fault is not None:
            raise OSError(fault.number, os.strerror(fault.number))

    # --- the system calls ---------------------------------------------------------------------------------------------

    def sys_open(self, path: Path, flags: int) -> int:
        self._check("open", path)
        known = path.exists()
        fd = super().sys_open(path, flags)
        if path not in self._names:
            self._names[path] = next(self._ids)
            if known:
                # It was there before this disk was watched: as durable as anything.
                self._durable_names[path] = self._names[path]
                self._content[self._names[path]] = path.read_bytes()
        return fd

    def sys_pwritev(self, path: Path, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        fault = self._due("pwritev", path)
        if fault is not None:
            data = b"".join(buffers)[: fault.partial_bytes]
            if data:
                os.pwrite(fd, data, position)
            raise OSError(fault.number, os.strerror(fault.number))
        return super().sys_pwritev(path, fd, buffers, position)

    def sys_pread(self, path: Path, fd: int, size_bytes: int, position: int) -> bytes:
        self._check("pread", path)
        return super().sys_pread(path, fd, size_bytes, position)

    def sys_datasync(self, path: Path, fd: int) -> None:
        self._check("datasync", path)
        if path in self._names:
            self._content[self._names[path]] = os.pread(fd, os.fstat(fd).st_size, 0)

    def sys_sync_directory(self, path: Path) -> None:
        self._check("sync_directory", path)
        for name in [name for name in self._durable_names if name.parent == path]:
            del self._durable_names[name]
        self._durable_names.update({name: i for name, i in self._names.items() if name.parent == path})
        for directory in [d for d in self._durable_directories if d.parent == path]:
            self._durable_directories.discard(directory)
        self._durable_directories |= {d for d in self._directories if d.parent == path}
        for source, target in [item for item in self._renamed.items() if item[0].parent == path]:
            # What is durable in a directory stays so under its new name.
            del self._renamed[source]
            for name in [name for name in self._durable_names if name.parent == source]:
                self._durable_names[target / name.name] = self._durable_names.pop(name)

    def sys_truncate(self, path: Path, fd: int, size_bytes: int) -> None:
        self._check("truncate", path)
        super().sys_truncate(path, fd, size_bytes)

    def sys_rename(self, source: Path, target: Path) -> None:
        self._check("rename", source)
        super().sys_rename(source, target)
        if target.is_dir():
            self._directories.discard(source)
            self._directories.add(target)
            self._renamed[source] = target
            for name in [name for name in self._names if name.parent == source]:
                self._names[target / name.name] = self._names.pop(name)
        elif source in self._names:
            self._names[target] = self._names.pop(source)

    def sys_unlink(self, path: Path) -> None:
        self._check("unlink", path)
        super().sys_unlink(path)
        self._names.pop(path, None)

    def sys_mkdir(self, path: Path) -> None:
        self._check("mkdir", path)
        super().sys_mkdir(path)
        if path != self.root:
            self._directories.add(path)

    def sys_read_file(self, path: Path) -> bytes:
        self._check("read_file", path)
        return super().sys_read_file(path)

    # --- the power cut ------------------------------------------------------------------------------------------------

    def crash(self, survive: Callable[[Path, bytes, bytes], bytes] | None = None) -> None:
        """Leave only what was durable; `survive(path, durable, current)` may keep part of what was not."""
        self.close_all()
        kept: dict[Path, bytes] = {}
        for path, file_id in self._durable_names.items():
            if path.parent not in self._durable_directories:
                continue
            durable = self._content.get(file_id, b"")
            current = path.read_bytes() if self._names.get(path) == file_id and path.exists() else durable
            kept[path] = durable if survive is None else survive(path, durable, current)
        for path in self.root.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        for directory in self._durable_directories:
            directory.mkdir(parents=True, exist_ok=True)
        for path, data in kept.items():
            path.write_bytes(data)
        self.faults.clear()
        self._names = dict(self._durable_names)
        self._directories = set(self._durable_directories)
        self._renamed = {}
