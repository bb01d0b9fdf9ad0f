"""What a broker costs, read from the operating system: CPU seconds and resident memory of its process tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil


@dataclass(slots=True)
class CpuUse:
    """CPU seconds, user and system together, spent while a `cpu_use` block ran."""

    seconds: float = 0.0


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _sum(pid: int, read: Callable[[psutil.Process], float]) -> float:
    return sum(read(process) for process in _tree(pid))


def cpu_seconds(pid: int) -> float:
    def read(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    return _sum(pid, read)


def resident_mb(pid: int) -> float:
    """Resident memory in MB (10^6 bytes)."""
    return _sum(pid, lambda process: float(process.memory_info().rss)) / 1e6


@contextmanager
def cpu_use(pid: int) -> Iterator[CpuUse]:
    used = CpuUse()
    before = cpu_seconds(pid)
    yield used
    used.seconds = cpu_seconds(pid) - before
