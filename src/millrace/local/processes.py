"""Processes of this machine by their id: whether one lives, which of several that had the same id it is, signals to it.

The kernel gives an id again once its process is gone. When a process began, and in which run of the machine, tells two
of one id apart: `process_key` is both. A signal goes to that very process or to none (`send_signal`).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from millrace.storage.boot import boot_id


def is_alive(pid: int) -> bool:
    """Whether there is a process of this id that has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return (_stat(pid) or ["?"])[0] != "Z"  # ended, and nobody has asked how


def start_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did; None where the system does not say."""
    stat = _stat(pid)
    return None if stat is None else int(stat[19])


def process_key(pid: int) -> str:
    """What no other process has that ever has this id; empty if there is none, or the system does not say."""
    ticks = start_ticks(pid)
    return "" if ticks is None else f"{boot_id()}:{ticks}"


def is_same(pid: int, key: str) -> bool:
    """Whether the process of this id and key has not ended."""
    return bool(key) and is_alive(pid) and process_key(pid) == key


def send_signal(pid: int, key: str, number: signal.Signals) -> bool:
    """Send a signal to the process of this id and key, and to no other that has the id by now; False if it is gone."""
    try:
        process = os.pidfd_open(pid)  # from here on the id is not given to another
    except ProcessLookupError:
        return False
    try:
        if not is_same(pid, key):
            return False
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(process)
    return True


def _stat(pid: int) -> list[str] | None:
    """What the system says of a process, from its state on; None where it does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
