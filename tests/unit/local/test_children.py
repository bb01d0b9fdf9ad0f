"""Child processes end with their parent, whichever thread started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from millrace.local.children import last_line, spawn

PARENT = """
import sys, threading
from pathlib import Path
from millrace.local.children import spawn

def start():
    with Path(sys.argv[1]).open("wb") as log:
        print(spawn([sys.executable, "-c", "import time; time.sleep(600)"], log=log).pid, flush=True)

starting = threading.Thread(target=start)
starting.start()
starting.join()
print("started", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["killed", "exits"])
def test_children_end_with_their_parent(tmp_path: Path, end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert parent.stdout.readline() == "started\n"
        assert child.is_running(), "it does not end with the thread that started it"
        if end == "killed":
            parent.kill()
        else:
            parent.communicate()
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone, "the child outlived its parent"


def test_a_child_writes_to_its_log_and_is_alone_in_its_session(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as log:
        child = spawn([sys.executable, "-c", "import os; print('first'); print('last', os.getsid(0))"], log=log)
    assert child.wait(30) == 0
    assert last_line(path) == f"last {child.pid}"
    assert last_line(tmp_path / "none") == ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_ignores_no_signal_because_python_does(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as log:
        assert spawn(["grep", "SigIgn", "/proc/self/status"], log=log).wait(30) == 0
    ignored = int(last_line(path).split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1))


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, pytest.raises(FileNotFoundError):
        spawn([str(tmp_path / "nothing")], log=log)


def test_nothing_of_the_parent_is_finalized_in_a_child(tmp_path: Path) -> None:
    """What a thread of the parent holds may be a connection, and the child shares its socket (py4j)."""
    finalized = tmp_path / "finalized"

    class Connection:
        def __del__(self) -> None:
            finalized.write_text(f"in process {os.getpid()}")

    belongings = threading.local()
    has_it, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        belongings.connection = Connection()
        has_it.set()
        may_end.wait()

    holding = threading.Thread(target=hold)
    holding.start()
    has_it.wait()
    try:
        with (tmp_path / "log").open("wb") as log:
            assert spawn(["true"], log=log).wait(30) == 0
        assert not finalized.exists(), finalized.read_text()
    finally:
        may_end.set()
        holding.join()


def test_a_stopped_child_is_told_by_its_status(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        child = spawn([sys.executable, "-c", "import time; time.sleep(600)"], log=log)
    child.terminate()
    assert child.wait(30) == -signal.SIGTERM
