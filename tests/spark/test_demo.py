"""`millrace demo` as somebody runs it who stops it with Ctrl-C once there are results."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 240


@pytest.mark.timeout(TIMEOUT_S)
def test_ctrl_c_ends_it_with_an_account_in_which_everything_agrees(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    command = [sys.executable, "-m", "millrace", "demo", "--forever", "--rate", "1000", "--data", str(home)]
    with (
        (tmp_path / "errors").open("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            seen = ""
            for line in process.stdout:
                seen += line
                if "results" in line and "results 0" not in line and "first results" not in line:
                    break
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    complaint = f"{seen}{rest}{(tmp_path / 'errors').read_text()}"
    assert process.returncode == 0, complaint
    assert "OK: everything that went in came out, once" in rest, complaint
    assert "WRONG" not in rest
    # The warehouse is a real Delta table, and what the summary counted is in it.
    log = sorted((home / "results" / "logs" / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for entry in log for line in entry.read_text().splitlines()]
    rows = sum(json.loads(one["add"]["stats"])["numRecords"] for one in actions if "add" in one)
    counted = next(line for line in rest.splitlines() if line.startswith("log lines stored in the warehouse"))
    assert f"{rows:,}" in counted.split()
