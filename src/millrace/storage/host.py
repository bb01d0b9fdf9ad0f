"""What a log asks of the directory it lies in, and what becomes of that where it lies in none.

A log is given its host when it is made and never looks behind it: flushers, threads, checkpoints and the other logs are
the host's (`logdirs`). Owner: the event loop, as for the log.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from millrace.errors import StorageError
from millrace.storage.files import Files

if TYPE_CHECKING:
    from millrace.storage.log import Log


class Created(NamedTuple):
    """What was made for a log, to be synced with its first records."""

    files: list[Path]
    directories: list[Path]


class LogHost(Protocol):
    """What a log asks for."""

    def request_flush(self, log: Log, within_s: float, /) -> object:
        """Have the log synced within so many seconds: asked at every append by `flush_mode`, and at every roll."""

    def remove(self, paths: list[Path], after_ms: int = 0, /) -> object:
        """Remove files that are no longer part of the log, after so long or as soon as their place is needed."""

    def before_truncate(self) -> object:
        """Lower the checkpointed recovery point: records that may be below it are about to be cut.

        Where this raises, nothing is cut.
        """

    def create_directory(self) -> Created:
        """Make the directory of a log that has none yet, because one without records needs none."""

    def log_failed(self) -> object:
        """The log has gone offline."""


class Alone:
    """The host of a log that no data directory knows of: its owner flushes it, and nothing is checkpointed."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def request_flush(self, log: Log, within_s: float, /) -> None:
        """Whoever opened the log flushes it."""

    def remove(self, paths: list[Path], after_ms: int = 0, /) -> None:
        """At once: nobody is there who could do it later."""
        del after_ms
        for path in paths:
            self._files.remove(path)

    def before_truncate(self) -> None:
        """There is no checkpoint that could say more than the log has."""

    def create_directory(self) -> Created:
        raise StorageError("a log that is opened alone is opened in a directory that is there")

    def log_failed(self) -> None:
        """Whoever uses the log meets its failure."""
