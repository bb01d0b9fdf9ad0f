"""`millrace down`: end what `millrace up` runs in a folder, cleanly, and return when it has ended."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Final

import typer

from millrace.cli.options import DEFAULT_DATA, Data
from millrace.cli.output import CommandError, count_text
from millrace.clock import SystemClock

DEFAULT_TIMEOUT_S: Final = 60.0
_LOOK_EVERY_S: Final = 0.05

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: millrace down --data /var/tmp/millrace")
def down(
    *,
    data: Data = DEFAULT_DATA,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, metavar="SECONDS", help="How long to wait for the end.")
    ] = DEFAULT_TIMEOUT_S,
) -> None:
    """End what runs in a folder, and wait until it has ended; nothing running is no error."""
    from millrace.local.folder import Folder
    from millrace.local.processes import is_alive

    folder = Folder(data)
    clock = SystemClock()
    deadline_s = clock.monotonic() + timeout
    brokers = [broker for broker in folder.brokers() if broker.pid is not None]
    holder = folder.holder()
    own = set() if holder is None else {holder.pid, *_children_of(holder.pid)}
    # Brokers that somebody started by hand go first: they need the cluster's ZooKeeper to hand over what they lead.
    others = [broker.pid for broker in brokers if broker.pid is not None and broker.pid not in own]
    for pid in others:
        _ask_to_stop(pid)
    _wait(lambda: not any(map(is_alive, others)), deadline_s, clock, f"the brokers with pid {_listed(others)}")
    if holder is not None:
        _ask_to_stop(holder.pid)
        _wait(lambda: not holder.lives, deadline_s, clock, f"millrace up (pid {holder.pid})")
    if holder is not None or others:
        print(f"stopped {count_text(len(brokers), 'broker')} in {data}")
    elif (killed := folder.last_holder()) is not None:
        print(
            f"nothing runs in {data}: what ran there (pid {killed.pid}) was killed, and `millrace up` goes on from it"
        )
    else:
        print(f"nothing runs in {data}")


def _children_of(pid: int) -> set[int]:
    """The processes that another one started; none where the system does not say."""
    from pathlib import Path

    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return set()
    children: set[int] = set()
    for task in tasks:
        with suppress(OSError):
            children.update(map(int, (task / "children").read_text().split()))
    return children


def _ask_to_stop(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _wait(is_over: Callable[[], bool], deadline_s: float, clock: SystemClock, what: str) -> None:
    pause = threading.Event()  # never set: a wait on it is a pause
    while not is_over():
        if clock.monotonic() > deadline_s:
            raise CommandError(f"{what} has been told to stop and still runs; wait, or end it with: kill -9")
        pause.wait(_LOOK_EVERY_S)


def _listed(pids: list[int]) -> str:
    return ", ".join(map(str, pids))
