"""Whoever asks for what was just acknowledged waits until it may be shown.

acks=1 does not wait for the disk, and nothing is shown that is not on it (`flush.mode=group`). Where there is one
replica, a client expects to find a record once it is acknowledged: to seek behind it, to delete up to it. So the
question waits for the flush that is under way, not the producer (docs/decisions/0003-group-commit.md).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from millrace.cluster.channel import within
from millrace.errors import ApiError
from millrace.replication.partition import Partition

if TYPE_CHECKING:
    from millrace.clock import Clock

FLUSH_WAIT_S: Final = 5.0
"""As long as anybody waits: many times what a flush takes, and no client has given up yet."""

Ends = dict[Partition, int]
"""Up to where partitions had been written when somebody asked."""


def unflushed(partitions: Iterable[Partition | None]) -> Ends:
    """Where there is something to wait for."""
    return {
        partition: end
        for partition in partitions
        if partition is not None and (end := partition.unflushed_end) is not None
    }


async def wait_for_flush(ends: Ends, clock: Clock, seconds: float = math.inf) -> None:
    """Return when all have come so far, will never, or time is up; what became of each is for the caller to see."""
    waits = [partition.wait_committed(end - 1) for partition, end in ends.items()]
    with suppress(ApiError):
        await within(clock, asyncio.gather(*waits, return_exceptions=True), min(seconds, FLUSH_WAIT_S))
