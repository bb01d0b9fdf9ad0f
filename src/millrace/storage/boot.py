"""Which start of the machine this is: what a process left to the kernel is there until the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_LINUX: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """A text that is another one after every start of the machine; empty where the system does not tell."""
    try:
        return _LINUX.read_text().strip()
    except OSError:
        return ""
