"""`millrace up --console`: the console beside the brokers, as somebody who types it meets it."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

from millrace.local.ports import free_ports

TIMEOUT_S = 60


def up(*words: str) -> list[str]:
    return [sys.executable, "-m", "millrace", "up", "--port", "0", "--console", *words]


def opened(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode())


def detached(data: str, listen: str) -> subprocess.CompletedProcess[str]:
    command = up("--detach", "--data", data, "--console-listen", listen)
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_in_the_foreground(tmp_path: Path) -> None:
    command = up("--data", str(tmp_path / "data"), "--console-listen", "127.0.0.1:0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = []
            while not lines or not lines[-1].startswith("console="):
                lines.append(process.stdout.readline().strip())
                assert lines[-1], process.communicate()
            assert lines[0].startswith("ready bootstrap=")
            url = lines[-1].removeprefix("console=")
            assert "<h1>Overview</h1>" in opened(url)
        finally:
            process.terminate()
        assert (process.wait(TIMEOUT_S), process.stderr and process.stderr.read()) == (0, "")
    try:
        opened(url)
    except OSError:
        return
    raise AssertionError("the console is still there")


def test_in_the_background_beside_another_that_has_its_port(tmp_path: Path) -> None:
    """The brokers run in any case; that the console does not is said, with what to do."""
    data, listen = str(tmp_path / "data"), f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    first = detached(data, listen)
    second_data = str(tmp_path / "second")
    try:
        assert f"console=http://{listen}\n" in first.stdout, first.stderr
        assert "<h1>Overview</h1>" in opened(f"http://{listen}")
        second = detached(second_data, listen)
        assert "ready bootstrap=" in second.stdout
        assert "console=" not in second.stdout
        assert "cannot listen on" in second.stderr
        assert "--console-listen" in second.stderr or "--listen" in second.stderr
    finally:
        for folder in (data, second_data):
            subprocess.run([sys.executable, "-m", "millrace", "down", "--data", folder], timeout=TIMEOUT_S, check=False)
