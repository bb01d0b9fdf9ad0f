"""What only the embedded store has: a file that can be locked, damaged, or from another version."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.errors import StorageError
from millrace.metadata.embedded import Database, EmbeddedStore


async def test_a_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    store = EmbeddedStore.at(path)
    await store.open()
    script = f"import sqlite3; sqlite3.connect({str(path)!r}, timeout=0).execute('SELECT * FROM deltas')"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "database is locked" in other.stderr
    with pytest.raises(StorageError, match="in use by another process"):
        await EmbeddedStore.at(path).open()
    await store.close()
    again = EmbeddedStore.at(path)
    await again.open()
    await again.close()


@pytest.mark.parametrize(
    "damage", [b"this is not a database, but it is long enough" * 200, b"SQLite format 3\x00" * 300]
)
async def test_a_damaged_file_is_a_clear_error(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metadata.db"
    path.write_bytes(damage)
    with pytest.raises(StorageError, match=r"metadata\.db.*damaged"):
        await EmbeddedStore.at(path).open()
    assert path.read_bytes() == damage


async def test_a_file_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    store = EmbeddedStore.at(path)
    await store.open()
    await store.close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE counters SET value = 99 WHERE name = 'format'")
    connection.commit()
    connection.close()
    with pytest.raises(StorageError, match="format 99"):
        await EmbeddedStore.at(path).open()


async def test_a_missing_directory_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="unable to open"):
        await EmbeddedStore.at(tmp_path / "nowhere" / "metadata.db").open()


async def test_a_committed_delta_is_in_the_write_ahead_log_at_once(tmp_path: Path) -> None:
    """A copy of the files made while the store is open (a crash) has every delta whose append returned."""
    path = tmp_path / "metadata.db"
    store = EmbeddedStore.at(path)
    await store.open()
    epoch = await store.elect(1)
    assert epoch is not None
    crashed = tmp_path / "crashed"
    for number in range(1, 4):
        await store.append(b"delta %d" % number, epoch)
        crashed.mkdir()
        for file in ("metadata.db", "metadata.db-wal"):
            (crashed / file).write_bytes((tmp_path / file).read_bytes())
        copy = EmbeddedStore.at(crashed / "metadata.db")
        await copy.open()
        assert await copy.end() == number
        await copy.close()
        for left in crashed.iterdir():
            left.unlink()
        crashed.rmdir()
    await store.close()


async def test_a_torn_write_ahead_log_keeps_whole_deltas(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    store = EmbeddedStore.at(path)
    await store.open()
    epoch = await store.elect(1)
    assert epoch is not None
    log = tmp_path / "metadata.db-wal"
    ends = []
    for number in range(1, 4):
        await store.append(b"delta %d" % number, epoch)
        ends.append(log.stat().st_size)
    database, whole = path.read_bytes(), log.read_bytes()
    await store.close()
    for cut in range(ends[0], ends[2] + 1, 97):
        path.write_bytes(database)
        log.write_bytes(whole[:cut])
        torn = EmbeddedStore.at(path)
        await torn.open()
        assert await torn.end() == sum(end <= cut for end in ends), cut
        await torn.close()


async def test_use_before_open_and_after_close_is_an_error(tmp_path: Path) -> None:
    store = EmbeddedStore(Database())
    with pytest.raises(StorageError, match="closed"):
        await store.append(b"", 1)
    assert "in memory" in repr(store)
