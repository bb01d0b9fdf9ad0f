"""The disk seam: descriptors are few, errors have one type, replacements are whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from millrace.errors import StorageError
from millrace.storage.files import DiskFile, Files
from support.disk import FaultyFiles


class ShortFiles(Files):
    """A disk that accepts and returns only a few bytes at a time."""

    def sys_pwritev(self, path, fd, buffers, position):  # type: ignore[no-untyped-def]
        return super().sys_pwritev(path, fd, (b"".join(buffers)[:3],), position)

    def sys_pread(self, path, fd, size_bytes, position):  # type: ignore[no-untyped-def]
        return super().sys_pread(path, fd, min(size_bytes, 2), position)


def test_short_writes_and_reads_go_on(tmp_path: Path) -> None:
    files = ShortFiles()
    file = DiskFile(tmp_path / "f")
    files.pwritev(file, (b"hello ", b"world"), 11, 0)
    assert files.pread(file, 11, 0) == b"hello world"
    assert files.pread(file, 100, 6) == b"world"
    assert files.size(file) == 11
    files.close_all()


def test_descriptors_are_bounded_and_reopened(tmp_path: Path) -> None:
    files = Files(max_open=3)
    handles = [DiskFile(tmp_path / str(i)) for i in range(10)]
    for turn in range(3):
        for index, handle in enumerate(handles):
            files.pwritev(handle, (b"%d%d" % (turn, index),), 2, 2 * turn)
            assert files.open_count <= 3
    for index, handle in enumerate(handles):
        assert files.pread(handle, 6, 0) == b"0%d1%d2%d" % (index, index, index)
    files.close_all()
    assert files.open_count == 0


def test_what_is_forgotten_is_closed(tmp_path: Path) -> None:
    files, file = Files(), DiskFile(tmp_path / "f")
    files.pwritev(file, (b"x",), 1, 0)
    os.fstat(file.fd)
    del files
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.fd)


def test_a_busy_handle_gets_a_second_chance(tmp_path: Path) -> None:
    files = Files(max_open=2)
    hot, *cold = (DiskFile(tmp_path / str(i)) for i in range(6))
    files.pwritev(hot, (b"x",), 1, 0)
    for handle in cold:
        files.pread(hot, 1, 0)
        files.pwritev(handle, (b"x",), 1, 0)
    assert files.open_count == 2
    files.close_all()


def test_a_pinned_descriptor_stays_until_unpinned(tmp_path: Path) -> None:
    files = Files(max_open=1)
    pinned, other = DiskFile(tmp_path / "a"), DiskFile(tmp_path / "b")
    files.pwritev(pinned, (b"x",), 1, 0)
    fd = files.pin(pinned)
    files.pwritev(other, (b"x",), 1, 0)
    assert pinned.fd == fd
    files.close(pinned)
    assert pinned.fd == fd
    files.sync_descriptor(pinned.path, fd)
    files.unpin(pinned)
    assert pinned.fd == -1
    files.close_all()


def test_errors_name_the_path(tmp_path: Path) -> None:
    files = FaultyFiles(tmp_path)
    file = DiskFile(tmp_path / "f")
    for call, use in {
        "pwritev": lambda: files.pwritev(file, (b"x",), 1, 0),
        "pread": lambda: files.pread(file, 1, 0),
        "datasync": lambda: files.datasync(file),
        "truncate": lambda: files.truncate(file, 0),
        "sync_directory": lambda: files.sync_directory(file.path),
        "read_file": lambda: files.read_bytes(file.path),
        "unlink": lambda: files.remove(file.path),
        "mkdir": lambda: files.make_directory(file.path),
        "rename": lambda: files.rename(file.path, file.path),
    }.items():
        files.fail(call, errno.EIO)
        with pytest.raises(StorageError, match=r"cannot \w+ .*/f: Input/output error"):
            use()
        files.heal()
    files.close(file)
    files.fail("open", errno.EACCES)
    with pytest.raises(StorageError, match="cannot open"):
        files.pread(file, 1, 0)
    files.close_all()


def test_running_out_of_descriptors_closes_one(tmp_path: Path) -> None:
    files = FaultyFiles(tmp_path)
    a, b = DiskFile(tmp_path / "a"), DiskFile(tmp_path / "b")
    files.pwritev(a, (b"x",), 1, 0)
    files.fail("open", errno.EMFILE)
    files.pwritev(b, (b"x",), 1, 0)
    assert a.fd == -1 and b.fd >= 0
    files.close_all()


@pytest.mark.parametrize("call", ["open", "pwritev", "datasync", "rename", "sync_directory"])
def test_a_replacement_that_fails_leaves_the_old_file(tmp_path: Path, call: str) -> None:
    files = FaultyFiles(tmp_path)
    path = tmp_path / "checkpoint"
    files.replace_bytes(path, b"old")
    files.fail(call, errno.ENOSPC, partial_bytes=1)
    with pytest.raises(StorageError):
        files.replace_bytes(path, b"new!")
    assert path.read_bytes() == (b"new!" if call == "sync_directory" else b"old")
    files.crash()
    assert path.read_bytes() == b"old"


def test_missing_files_are_not_errors(tmp_path: Path) -> None:
    files = Files()
    gone = tmp_path / "gone"
    assert files.read_bytes(gone) is None
    assert files.size_of(gone) is None
    assert files.names(gone) == []
    assert files.modified_ms(gone) == 0
    files.remove(gone)
    files.remove_directory(gone)
    files.sync_path(gone)


def test_no_sync_means_none(tmp_path: Path) -> None:
    files = FaultyFiles(tmp_path)
    files.sync = False
    files.replace_bytes(tmp_path / "f", b"x")
    files.sync_directory(tmp_path)
    assert "datasync" not in files.calls and "sync_directory" not in files.calls
