"""When a directory is full: pure, from what the file system says.

A full disk is not a broken one. Below a reserve it takes no more records of ordinary topics, so that checkpoints and
internal topics can still be written, and whoever leads from it hands over. It takes records again by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HELD_S: Final = 5.0
"""A disk that refused a write stays full for so long, whatever it says: a quota does not show in what is free."""
_LARGEST_SHARE: Final = 20
"""The reserve is at most this part of the disk: a small one would be full from the start."""
_FEW_FILES: Final = 100


@dataclass(frozen=True, slots=True)
class Space:
    """What a file system has left. `free_files` is -1 where it has no limit on files."""

    total_bytes: int
    free_bytes: int
    free_files: int = -1


def is_full(space: Space, reserve_bytes: int, *, was_full: bool) -> bool:
    """Whether no more records should be taken. A disk that was full has to have twice the reserve to count as empty.

    Otherwise those that come back to it would fill it at once, and leave again.
    """
    if 0 <= space.free_files < (2 * _FEW_FILES if was_full else _FEW_FILES):
        return True
    reserve_bytes = min(reserve_bytes, space.total_bytes // _LARGEST_SHARE)
    return space.free_bytes < (2 * reserve_bytes if was_full else reserve_bytes)
