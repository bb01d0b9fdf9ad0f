"""`millrace log dump` of everything that a broker writes, while it runs and after it has stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.cli.root import run

TIMEOUT_S = 40


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`millrace up` in a process of its own, which keeps its metadata in a file, and its address."""
    command = [sys.executable, "-m", "millrace", "up", "--port", "0", "--data", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line.startswith("ready bootstrap=")
        try:
            yield process, line.strip().removeprefix("ready bootstrap=")
        finally:
            process.terminate()
            process.communicate(timeout=TIMEOUT_S)


def test_every_file_of_a_data_directory_is_printed(
    broker: tuple[subprocess.Popen[bytes], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process, bootstrap = broker
    monkeypatch.setenv("MILLRACE_BOOTSTRAP", bootstrap)
    data = tmp_path / "broker-1" / "data"
    lines = tmp_path / "lines"
    lines.write_bytes(b"a:1\nb:2\n" * 50)
    assert run(["topics", "create", "users", "--config", "cleanup.policy=compact"]) == 0
    assert run(["produce", "users", str(lines), "--key-separator", ":"]) == 0
    assert run(["consume", "users", "--group", "readers", "--from-beginning", "--max", "3"]) == 0
    capsys.readouterr()

    def dumped(*words: str | Path) -> tuple[list[dict[str, Any]], str]:
        assert run(["log", "dump", "--json", *map(str, words)]) == 0
        captured = capsys.readouterr()
        return [json.loads(line) for line in captured.out.splitlines()], captured.err

    (lock,), _ = dumped(data / ".lock")
    assert lock == {"is": "lock", "held_by": [process.pid]}
    changes = [one for one in dumped(data / "metadata.db", "--records")[0] if one["is"] == "change"]
    created = [one["fields"]["name"] for one in changes if one["change"] == "topic_created"]
    assert "users" in created, "what a running broker has in its write-ahead log counts"
    assert dumped(data / "metadata.db-wal", "--records")[0] == dumped(data / "metadata.db", "--records")[0]
    (log,) = [one for one in dumped(data)[0] if one.get("name") == "users-0"]
    assert (log["is"], log["files"] > 1) == ("log", True)

    process.terminate()
    process.wait(TIMEOUT_S)
    for folder in [data, *(one for one in data.iterdir() if one.is_dir())]:
        assert run(["log", "dump", str(folder), "--records"]) == 0
        captured = capsys.readouterr()
        assert captured.err == "", "no file of a broker is unknown"
        shown = {line.removeprefix("# ") for line in captured.out.splitlines() if line.startswith("# ")}
        assert shown == {str(one) for one in folder.iterdir() if one.is_file()}
    assert not list(tmp_path.rglob("*-shm")), "looking leaves nothing behind"
    written = {one.name for one in data.iterdir()}
    assert {"meta.properties", "metadata.db", "logs-checkpoint", ".kafka_cleanshutdown"} <= written
