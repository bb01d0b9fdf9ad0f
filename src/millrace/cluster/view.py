"""One broker's view of the metadata log: the image, kept current delta by delta, and everybody who waits for it.

Not here: writing (`controller`), and what a change means (`image`).

Invariants
- The image changes in one place only, `_apply`, fed by the log in its order.
- Listeners run on the loop, in the order they were added, once per delta, before anything waiting for it goes on.
- A follower that fell behind a snapshot takes the snapshot and tells its listeners the difference as one delta.
- A log that cannot be read or folded ends the following: whoever waits is told, and nobody goes on with a guess.

Owner: the event loop; `follow` is the one task that moves the image after `load`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from millrace.clock import Clock
from millrace.cluster.image import ClusterImage, changes_between
from millrace.errors import ApiError, ErrorCode, MillraceError
from millrace.metadata.deltas import ChangeSet, decode
from millrace.metadata.store import MetadataStore, Trimmed

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.05

ImageListener = Callable[[ClusterImage, ClusterImage, ChangeSet], object]


class MetadataView:
    """The image and its followers."""

    def __init__(self, store: MetadataStore, clock: Clock) -> None:
        self.image = ClusterImage()
        self.snapshot_index = 0
        """Of the newest snapshot that is known here."""
        self.failure: ApiError | None = None
        self._store = store
        self._clock = clock
        self._listeners: list[ImageListener] = []
        self._waiting: dict[asyncio.Future[None], Callable[[ClusterImage], bool]] = {}

    def __repr__(self) -> str:
        return f"MetadataView({self.image!r}, {len(self._waiting)} waiting)"

    async def load(self) -> ClusterImage:
        """Fold what is in the log; listeners see only what comes later."""
        while True:
            try:
                return await self._load()
            except Trimmed:
                continue  # a controller took a snapshot in between: begin again from that

    async def _load(self) -> ClusterImage:
        snapshot = await self._store.read_snapshot()
        self.image = ClusterImage()
        if snapshot is not None:
            self.image = ClusterImage().apply(decode(snapshot.data), snapshot.index)
            self.snapshot_index = snapshot.index
        end = await self._store.end()
        if self.image.index < end:
            async with contextlib.aclosing(self._store.follow(self.image.index)) as deltas:
                async for index, data in deltas:
                    self.image = self.image.apply(decode(data), index)
                    if index >= end:
                        break
        return self.image

    def on_image(self, listener: ImageListener) -> Callable[[], None]:
        """Call `listener(old, new, changes)` for every delta from now on; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def follow(self) -> None:
        """Keep the image current until cancelled, or until the log cannot be followed; then `failure` says why."""
        try:
            while await self._follow_until_trimmed():
                await self._take_snapshot()
        except Exception as error:  # the root of the task
            logger.critical("the metadata log cannot be followed", exc_info=True)
            self.fail(ApiError(ErrorCode.KAFKA_STORAGE_ERROR, f"the metadata log cannot be followed: {error}"))

    async def _follow_until_trimmed(self) -> bool:
        """Whether there is more to come, but not delta by delta."""
        try:
            async for index, data in self._store.follow(self.image.index):
                changes = decode(data)
                self._apply(self.image.apply(changes, index), changes)
            return False
        except Trimmed:
            return True

    async def _take_snapshot(self) -> None:
        snapshot = await self._store.read_snapshot()
        if snapshot is None or snapshot.index <= self.image.index:
            await self._clock.sleep(RETRY_S)  # it is being replaced at this moment
            return
        logger.warning("delta %d is gone, going on from the snapshot at %d", self.image.index + 1, snapshot.index)
        new = ClusterImage().apply(decode(snapshot.data), snapshot.index)
        self.snapshot_index = snapshot.index
        self._apply(new, changes_between(self.image, new))

    def _apply(self, new: ClusterImage, changes: ChangeSet) -> None:
        old, self.image = self.image, new
        for listener in tuple(self._listeners):
            try:
                listener(old, new, changes)
            except Exception:  # a listener that fails must not stop the log for the others
                logger.exception("a listener failed on metadata delta %d", new.index)
        for waiter, predicate in tuple(self._waiting.items()):
            if waiter.done():
                continue
            try:
                if predicate(new):
                    waiter.set_result(None)
            except Exception as error:  # noqa: BLE001 - the bug is the waiter's, and so is the failure
                waiter.set_exception(error)

    # --- waiting ------------------------------------------------------------------------------------------------------

    async def wait_for(self, predicate: Callable[[ClusterImage], bool], timeout_s: float | None = None) -> None:
        """Return once `predicate(image)` holds; ApiError REQUEST_TIMED_OUT, or what ended the following."""
        if predicate(self.image):
            return
        if self.failure is not None:
            raise _again(self.failure)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = predicate
        timer = None
        if timeout_s is not None:
            timer = self._clock.call_later(timeout_s, lambda: _expire(waiter))
        try:
            await waiter
        finally:
            waiter.cancel()
            self._waiting.pop(waiter, None)
            if timer is not None:
                timer.cancel()

    async def wait_applied(self, index: int) -> None:
        """Return once delta `index` is in the image."""
        await self.wait_for(lambda image: image.index >= index)

    def fail(self, error: MillraceError) -> None:
        """Nothing more will come: tell everybody who waits."""
        if isinstance(error, ApiError):
            self.failure = self.failure or error
        for waiter in tuple(self._waiting):
            if not waiter.done():
                waiter.set_exception(_again(error))


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(ApiError(ErrorCode.REQUEST_TIMED_OUT, "the change did not reach this broker in time"))


def _again(error: MillraceError) -> MillraceError:
    """A fresh copy: one exception object must not be raised in many tasks."""
    return ApiError(error.code, error.message) if isinstance(error, ApiError) else error
