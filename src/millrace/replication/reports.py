"""Telling the controller how this broker's disks are: which directories it has, and where its replicas lie.

What is there is compared with what the image says, and the difference is sent until the image has it. So it does not
matter when a directory fails or what was lost on the way to the controller: it is found again by the next look.

While the controller does not know that a directory has failed, it takes this broker for the leader of what lay there.
That lasts for `log.dir.failure.timeout.ms` at most: then the broker gives up, and others lead.

Owner: one task, which looks when it is woken. Not here: what follows for leaders and ISRs (`cluster.elections`), what a
failed log means for its partition (`replicas`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from millrace.clock import Clock
from millrace.cluster.elections import Placement
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import Directories
from millrace.model import LOST_DIRECTORY

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.5
MAX_AT_A_TIME: Final = 1000

TellDirectories = Callable[[Directories, Sequence[str]], Awaitable[None]]
TellPlacements = Callable[[Sequence[Placement]], Awaitable[list[ErrorCode]]]


class DiskReports:
    """Keeps the image in line with this broker's disks."""

    def __init__(
        self,
        *,
        known: Callable[[], Directories | None],
        actual: Callable[[], Directories],
        misplaced: Callable[[], list[Placement]],
        tell_directories: TellDirectories,
        tell_placements: TellPlacements,
        untold_timeout_s: float,
        give_up: Callable[[str], object],
        clock: Clock,
    ) -> None:
        """`known` are the directories that the image has of this broker, None while it does not have the broker.

        `give_up` is told why, when the controller could not be told of a failed directory for so long.
        """
        self._known = known
        self._actual = actual
        self._misplaced = misplaced
        self._tell_directories = tell_directories
        self._tell_placements = tell_placements
        self._untold_timeout_s = untold_timeout_s
        self._give_up = give_up
        self._untold_since_s: float | None = None
        self._clock = clock
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"DiskReports({'something to look at' if self._wake.is_set() else 'nothing new'})"

    def look(self) -> None:
        """Something may have changed."""
        self._wake.set()

    async def run(self) -> None:
        """Look whenever something may have changed, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._report()
            except ApiError as error:
                logger.info("the controller cannot be told of the disks now: %s", error)
                self._note_untold()
                await self._clock.sleep(RETRY_S)
                self._wake.set()
            else:
                self._untold_since_s = None

    def _note_untold(self) -> None:
        """A failed directory of which the controller does not know cannot stay so."""
        known, now_s = self._known(), self._clock.monotonic()
        if known is None or set(known.online) <= set(self._actual().online):
            self._untold_since_s = None
        elif self._untold_since_s is None:
            self._untold_since_s = now_s
        elif now_s - self._untold_since_s >= self._untold_timeout_s:
            waited_ms = round((now_s - self._untold_since_s) * 1000)
            self._give_up(f"the controller could not be told for {waited_ms} ms that a data directory has failed")

    async def _report(self) -> None:
        known, actual = self._known(), self._actual()
        if known is not None and known != actual:
            await self._tell_directories(actual, known.online)
        misplaced = self._misplaced()
        for placement in misplaced[:MAX_AT_A_TIME]:
            if placement.directory == LOST_DIRECTORY:
                logger.error("partition %d of topic %s is lost here", placement.index, placement.topic_id)
        if misplaced:
            codes = await self._tell_placements(misplaced[:MAX_AT_A_TIME])
            refused = [code for code in codes if code is not ErrorCode.NONE]
            if refused:
                logger.info("%d replicas may not lie where they do: %s", len(refused), refused[0].name)
        if len(misplaced) > MAX_AT_A_TIME:
            self._wake.set()
