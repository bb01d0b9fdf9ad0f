"""A disk in memory: the twin of `millrace.storage.files.Files` for simulations that make thousands of logs.

It knows what is durable, as `support.disk.FaultyFiles` does: the content of each file at its last sync, under the names
that the last sync of each directory made durable. `cut_power` leaves just that, and what `survive` adds to it.
Directories are flat and are never renamed; a log needs no more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from millrace.errors import StorageError
from millrace.records.compression import Buffer
from millrace.storage.files import DiskFile, Files

Survive = Callable[[bytes, bytes], bytes]
"""From what was synced of a file and what was written to it, what a power cut leaves."""


_SOMEWHERE = 65
"""In the records of a batch."""


class _Content:
    """A file without its name."""

    __slots__ = ("data", "synced")

    def __init__(self) -> None:
        self.data = bytearray()
        self.synced = b""


class MemoryFiles(Files):
    """`Files` without an operating system. A descriptor is a number for a content, whatever its name is by now."""

    def __init__(self) -> None:
        super().__init__()
        self._directories: dict[str, dict[str, _Content]] = {}
        self._durable: dict[str, dict[str, _Content]] = {}
        self._descriptors: dict[int, _Content] = {}
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return f"MemoryFiles({sum(map(len, self._directories.values()))} files)"

    def cut_power(self, survive: Survive = lambda synced, _written: synced) -> None:
        """Leave only what was durable; what survives is durable from now on."""
        self._descriptors.clear()
        for directory in self._directories:
            kept = self._durable.get(directory, {})
            self._directories[directory] = dict(kept)
            for content in kept.values():
                content.synced = survive(content.synced, bytes(content.data))
                content.data = bytearray(content.synced)

    def damage(self, directory: Path, *, below: int) -> bool:
        """Turn a bit in the first batch of the newest segment that begins below an offset; whether there is one."""
        for name, content in sorted(self._directories[str(directory)].items(), reverse=True):
            if name.endswith(".log") and int(name.removesuffix(".log")) < below and len(content.data) > _SOMEWHERE:
                content.data[_SOMEWHERE] ^= 1
                content.synced = bytes(content.data)
                return True
        return False

    # --- files by handle ----------------------------------------------------------------------------------------------

    def _content(self, file: DiskFile, *, create: bool = False) -> _Content:
        if file.fd >= 0:
            return self._descriptors[file.fd]
        directory, name = self._place(file.path)
        content = directory.get(name)
        if content is None:
            if not create:
                raise StorageError(f"cannot open {file.path}: it is not there")
            content = directory[name] = _Content()
        file.fd = next(self._numbers)
        self._descriptors[file.fd] = content
        return content

    def pwritev(self, file: DiskFile, buffers: Sequence[Buffer], size_bytes: int, position: int) -> None:
        data = self._content(file, create=True).data
        if position > len(data):
            data.extend(bytes(position - len(data)))
        data[position : position + size_bytes] = b"".join(buffers)

    def pread(self, file: DiskFile, size_bytes: int, position: int) -> bytes:
        return bytes(self._content(file).data[position : position + size_bytes])

    def size(self, file: DiskFile) -> int:
        return len(self._content(file).data)

    def truncate(self, file: DiskFile, size_bytes: int) -> None:
        del self._content(file).data[size_bytes:]

    def datasync(self, file: DiskFile) -> None:
        content = self._content(file)
        content.synced = bytes(content.data)

    def pin(self, file: DiskFile) -> int:
        self._content(file)
        return file.fd

    def unpin(self, file: DiskFile) -> None:
        """Nothing: a descriptor outlives its handle."""

    def close(self, file: DiskFile) -> None:
        file.fd = -1

    def sync_descriptor(self, path: Path, fd: int) -> None:
        content = self._descriptors.get(fd)
        if content is not None:  # none: the power was cut while the sync was under way
            content.synced = bytes(content.data)

    # --- files and directories by path --------------------------------------------------------------------------------

    def _place(self, path: Path) -> tuple[dict[str, _Content], str]:
        directory, _, name = str(path).rpartition("/")
        names = self._directories.get(directory)
        if names is None:
            raise StorageError(f"cannot open {path}: there is no such directory")
        return names, name

    def sync_path(self, path: Path) -> None:
        directory, name = self._place(path)
        content = directory.get(name)
        if content is not None:
            content.synced = bytes(content.data)

    def sync_directory(self, path: Path) -> None:
        self._durable[str(path)] = dict(self._directories[str(path)])

    def write_bytes(self, path: Path, data: bytes) -> None:
        directory, name = self._place(path)
        directory.setdefault(name, _Content()).data = bytearray(data)

    def read_bytes(self, path: Path) -> bytes | None:
        directory, name = self._place(path)
        content = directory.get(name)
        return None if content is None else bytes(content.data)

    def rename(self, source: Path, target: Path) -> None:
        directory, name = self._place(source)
        there, new_name = self._place(target)
        there[new_name] = directory.pop(name)

    def remove(self, path: Path) -> None:
        directory, name = self._place(path)
        directory.pop(name, None)

    def make_directory(self, path: Path) -> None:
        self._directories.setdefault(str(path), {})

    def remove_directory(self, path: Path) -> None:
        """At once and for good: what a crash could bring back of it is not modelled."""
        self._directories.pop(str(path), None)
        self._durable.pop(str(path), None)

    def names(self, path: Path) -> list[str]:
        return list(self._directories.get(str(path), ()))

    def size_of(self, path: Path) -> int | None:
        if str(path) in self._directories:
            return 0
        directory, name = self._place(path)
        content = directory.get(name)
        return None if content is None else len(content.data)

    def modified_ms(self, path: Path) -> int:
        return 0
