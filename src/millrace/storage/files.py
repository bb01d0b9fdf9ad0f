"""The disk seam: every byte that storage reads or writes passes through `Files`.

What is not here: any file's format. A test replaces `Files` by a twin that tears writes, fails or forgets what was not
synced, by overriding the `sys_*` methods, which are the only ones that call the operating system.

Invariants:
- Every `OSError` leaves as a `StorageError` that names the path.
- At most `max_open` descriptors are open through `DiskFile` handles; a handle opens itself again when it is used.
  A pinned handle (one that a flusher's thread is syncing) is never closed under that thread.
- `Files` belongs to the event loop's thread. Threads may call `sync_descriptor`, `sync_directory`, `replace_bytes` and
  `remove`, which touch no shared state.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from millrace.errors import DiskFullError, StorageError
from millrace.records.compression import Buffer
from millrace.storage.space import Space

DEFAULT_MAX_OPEN: Final = 512
_OPEN: Final = os.O_RDWR | os.O_CLOEXEC
_CREATE: Final = _OPEN | os.O_CREAT
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskFile:
    """A file that is read and written by position; open only while the cache has room for it."""

    __slots__ = ("doomed", "fd", "path", "pins", "used")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = -1
        self.pins = 0
        self.used = False
        self.doomed = False

    def __repr__(self) -> str:
        return f"DiskFile({self.path}, {'open' if self.fd >= 0 else 'closed'})"


class Files:
    """The disk. `sync=False` makes every sync a no-op: for brokers whose data may die with the machine (tests)."""

    def __init__(self, max_open: int = DEFAULT_MAX_OPEN, *, sync: bool = True) -> None:
        self.max_open = max_open
        self.sync = sync
        self._open: dict[DiskFile, None] = {}

    def __del__(self) -> None:
        """What is still open goes with it, as with Python's own files: a log need not be closed to be forgotten."""
        for file in self._open:
            os.close(file.fd)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._open)} of {self.max_open} descriptors open)"

    # --- files by handle: the data path -------------------------------------------------------------------------------

    def pwritev(self, file: DiskFile, buffers: Sequence[Buffer], size_bytes: int, position: int) -> None:
        """Write all the `buffers` (`size_bytes` together) at `position`, or raise; a failure may leave part of them."""
        fd = file.fd
        if fd < 0:
            fd = self._acquire(file, _CREATE)
        file.used = True
        try:
            written = self.sys_pwritev(file.path, fd, buffers, position)
            if written != size_bytes:
                self._write_rest(file, b"".join(buffers), written, position)
        except OSError as error:
            raise _failed("write", file.path, error) from error

    def pread(self, file: DiskFile, size_bytes: int, position: int) -> bytes:
        """Up to `size_bytes` from `position`; fewer only at the end of the file."""
        fd = file.fd
        if fd < 0:
            fd = self._acquire(file)
        file.used = True
        try:
            data = self.sys_pread(file.path, fd, size_bytes, position)
            if len(data) == size_bytes:
                return data
            return self._read_rest(file, data, size_bytes, position)
        except OSError as error:
            raise _failed("read", file.path, error) from error

    def size(self, file: DiskFile) -> int:
        """The file's size in bytes."""
        fd = file.fd if file.fd >= 0 else self._acquire(file)
        try:
            return os.fstat(fd).st_size
        except OSError as error:
            raise _failed("stat", file.path, error) from error

    def truncate(self, file: DiskFile, size_bytes: int) -> None:
        """Cut the file to `size_bytes`."""
        fd = file.fd if file.fd >= 0 else self._acquire(file)
        try:
            self.sys_truncate(file.path, fd, size_bytes)
        except OSError as error:
            raise _failed("truncate", file.path, error) from error

    def datasync(self, file: DiskFile) -> None:
        """Wait until the file's data is on disk."""
        self.sync_descriptor(file.path, file.fd if file.fd >= 0 else self._acquire(file))

    def pin(self, file: DiskFile) -> int:
        """A descriptor that stays open until `unpin`, for use in another thread."""
        fd = file.fd if file.fd >= 0 else self._acquire(file)
        file.pins += 1
        return fd

    def unpin(self, file: DiskFile) -> None:
        file.pins -= 1
        if file.doomed and not file.pins:
            self._release(file)

    def close(self, file: DiskFile) -> None:
        """Close the descriptor, if there is one; the handle stays usable."""
        if file.pins:
            file.doomed = True
        elif file.fd >= 0:
            self._release(file)

    def close_all(self) -> None:
        for file in list(self._open):
            self.close(file)

    @property
    def open_count(self) -> int:
        return len(self._open)

    # --- threads may use these ----------------------------------------------------------------------------------------

    def sync_descriptor(self, path: Path, fd: int) -> None:
        """fdatasync; a failure must never be retried, because the kernel may have dropped the dirty pages."""
        if not self.sync:
            return
        try:
            self.sys_datasync(path, fd)
        except OSError as error:
            raise _failed("sync", path, error) from error

    def sync_path(self, path: Path) -> None:
        """fdatasync of a small file that is not kept open; one that was removed meanwhile needs none."""
        if not self.sync:
            return
        try:
            fd = self.sys_open(path, _OPEN)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _failed("open", path, error) from error
        try:
            self.sync_descriptor(path, fd)
        finally:
            os.close(fd)

    def sync_directory(self, path: Path) -> None:
        """Make creations, renames and removals in a directory durable."""
        if not self.sync:
            return
        try:
            self.sys_sync_directory(path)
        except OSError as error:
            raise _failed("sync", path, error) from error

    def replace_bytes(self, path: Path, data: bytes) -> None:
        """Replace a file as a whole and durably: after a crash it is the old one or the new one, never a mixture."""
        temporary = path.with_name(path.name + ".tmp")
        self.write_bytes(temporary, data)
        self.sync_path(temporary)
        self.rename(temporary, path)
        self.sync_directory(path.parent)

    def write_bytes(self, path: Path, data: bytes) -> None:
        """Write a small file in place, without waiting for the disk: only for what can be rebuilt."""
        try:
            fd = self.sys_open(path, _CREATE)
            try:
                self.sys_truncate(path, fd, 0)
                written = 0
                while written < len(data):
                    written += self.sys_pwritev(path, fd, (memoryview(data)[written:],), written)
            finally:
                os.close(fd)
        except OSError as error:
            raise _failed("write", path, error) from error

    def remove(self, path: Path) -> None:
        """Remove a file; one that is not there is fine."""
        try:
            self.sys_unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _failed("remove", path, error) from error

    def remove_directory(self, path: Path) -> None:
        """Remove a flat directory and the files in it."""
        for name in self.names(path):
            self.remove(path / name)
        try:
            path.rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _failed("remove", path, error) from error

    # --- files and directories by path --------------------------------------------------------------------------------

    def read_bytes(self, path: Path) -> bytes | None:
        """A whole small file, or None where there is none."""
        try:
            return self.sys_read_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failed("read", path, error) from error

    def rename(self, source: Path, target: Path) -> None:
        try:
            self.sys_rename(source, target)
        except OSError as error:
            raise _failed("rename", source, error) from error

    def make_directory(self, path: Path) -> None:
        """Create a directory (and its parents); an existing one is fine."""
        try:
            self.sys_mkdir(path)
        except OSError as error:
            raise _failed("create", path, error) from error

    def names(self, path: Path) -> list[str]:
        """The names in a directory; empty where there is none."""
        try:
            return os.listdir(path)  # noqa: PTH208 - a name is all that is wanted, and there may be thousands
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _failed("list", path, error) from error

    def size_of(self, path: Path) -> int | None:
        """A file's size, or None where there is none."""
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failed("stat", path, error) from error

    def modified_ms(self, path: Path) -> int:
        """When a file was last written, in milliseconds since 1970; 0 where there is none."""
        try:
            return path.stat().st_mtime_ns // 1_000_000
        except OSError:
            return 0

    def space(self, path: Path) -> Space | None:
        """What is left on the disk of a directory; None where it does not tell."""
        try:
            stats = self.sys_statvfs(path)
        except OSError:
            return None
        return Space(
            stats.f_blocks * stats.f_frsize,
            stats.f_bavail * stats.f_frsize,
            stats.f_favail if stats.f_files else -1,
        )

    # --- the operating system: what a faulty twin overrides -----------------------------------------------------------

    def sys_statvfs(self, path: Path) -> os.statvfs_result:
        return os.statvfs(path)

    def sys_open(self, path: Path, flags: int) -> int:
        return os.open(path, flags, 0o644)

    def sys_pwritev(self, path: Path, fd: int, buffers: Sequence[Buffer], position: int) -> int:  # noqa: ARG002
        return os.pwritev(fd, buffers, position)

    def sys_pread(self, path: Path, fd: int, size_bytes: int, position: int) -> bytes:  # noqa: ARG002
        return os.pread(fd, size_bytes, position)

    def sys_datasync(self, path: Path, fd: int) -> None:  # noqa: ARG002
        os.fdatasync(fd)

    def sys_sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sys_truncate(self, path: Path, fd: int, size_bytes: int) -> None:  # noqa: ARG002
        os.ftruncate(fd, size_bytes)

    def sys_rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def sys_unlink(self, path: Path) -> None:
        path.unlink()

    def sys_mkdir(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def sys_read_file(self, path: Path) -> bytes:
        return path.read_bytes()

    # --- the descriptor cache -----------------------------------------------------------------------------------------

    def _acquire(self, file: DiskFile, flags: int = _OPEN) -> int:
        if len(self._open) >= self.max_open:
            self._evict()
        try:
            file.fd = self.sys_open(file.path, flags)
        except OSError as error:
            if error.errno not in {errno.EMFILE, errno.ENFILE} or not self._evict():
                raise _failed("open", file.path, error) from error
            try:
                file.fd = self.sys_open(file.path, flags)
            except OSError as again:
                raise _failed("open", file.path, again) from again
        self._open[file] = None
        return file.fd

    def _evict(self) -> bool:
        """Close the oldest handle that was not used since the last look; the others get a second chance."""
        fallback = None
        for file in list(self._open):
            if file.pins:
                continue
            if file.used:
                file.used = False
                # Behind the others, so that the next look starts with those it has not seen yet.
                del self._open[file]
                self._open[file] = None
                fallback = fallback or file
                continue
            self._release(file)
            return True
        if fallback is not None:
            self._release(fallback)
        return fallback is not None

    def _release(self, file: DiskFile) -> None:
        file.doomed = False
        fd, file.fd = file.fd, -1
        self._open.pop(file, None)
        if fd >= 0:
            os.close(fd)

    def _write_rest(self, file: DiskFile, data: bytes, written: int, position: int) -> None:
        view = memoryview(data)
        while written < len(data):
            count = self.sys_pwritev(file.path, file.fd, (view[written:],), position + written)
            if count <= 0:
                raise OSError(errno.EIO, "the disk accepts no more bytes")
            written += count

    def _read_rest(self, file: DiskFile, data: bytes, size_bytes: int, position: int) -> bytes:
        """Kernels cut very large reads short: go on until the end of the file says so."""
        while len(data) < size_bytes:
            more = self.sys_pread(file.path, file.fd, size_bytes - len(data), position + len(data))
            if not more:
                break
            data += more
        return data


def _failed(what: str, path: Path, error: OSError) -> StorageError:
    kind = DiskFullError if error.errno in _NO_SPACE else StorageError
    return kind(f"cannot {what} {path}: {error.strerror or error}")
