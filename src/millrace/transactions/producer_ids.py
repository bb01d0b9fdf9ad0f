"""Producer ids for idempotent producers, handed out from blocks that the controller grants.

A block is a delta of the metadata log, so an id is never given twice, not even after a crash: what was left of a block
is simply lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class ProducerIds:
    """The current block and what is left of it; one caller at a time asks for the next block."""

    def __init__(self, next_block: Callable[[], Awaitable[range]]) -> None:
        self._next_block = next_block
        self._left = iter(range(0))
        self._refill = asyncio.Lock()

    async def next(self) -> int:
        """An id that nobody has had. Cancellation may waste a block, never repeat one."""
        producer_id = next(self._left, None)
        while producer_id is None:
            async with self._refill:
                producer_id = next(self._left, None)
                if producer_id is None:
                    self._left = iter(await self._next_block())
                    producer_id = next(self._left, None)
        return producer_id
