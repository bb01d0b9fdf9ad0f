"""Which tests stay together in one process of pytest-xdist, and which come first.

A file's tests stay together: they share fixtures. So do all files that use the one SparkSession of a process, because
its JVM takes seconds to start, and longer until it is quick. They are the longest piece of work and come first; the
folders with the shortest files come last (`testpaths`), or the end of a run would be one process waiting for another.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

from xdist.scheduler import LoadFileScheduling

ROOT: Final = Path(__file__).resolve().parents[2]
SPARK_SESSION: Final = "the SparkSession"


def piece_of(nodeid: str) -> str:
    """What a test belongs to: its file, or the session that its file shares with others."""
    file = nodeid.split("::", 1)[0]
    return SPARK_SESSION if _uses_the_session(file) else file


@functools.cache
def _uses_the_session(file: str) -> bool:
    return file.startswith("tests/spark/") and "spark: SparkSession" in (ROOT / file).read_text()


class ByPiece(LoadFileScheduling):  # type: ignore[misc]
    """`--dist loadfile` with larger pieces."""

    def _split_scope(self, nodeid: str) -> str:
        return piece_of(nodeid)
