"""The only writer of cluster metadata while this broker is elected: plans in, deltas out, one after another.

Not here: who is elected (`membership`), what a request means (`planning`, `elections`, `reassignments`).

Invariants
- Changes are planned and written by one task, each against the image that has all before it. What queued up meanwhile
  is written as one delta, so a flood of requests costs one flush, not one each.
- A change that was answered is in this broker's image.
- Nothing is planned while the store is out of reach: an answer would rest on an image that may be old.
- A reign ends once, for whatever reason, and everybody who still waits is told NOT_CONTROLLER. A write of an earlier
  reign that fails late does not end a later one.

Owner: the event loop; `run` is the task that plans and writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import Plan
from millrace.cluster.view import MetadataView
from millrace.errors import ApiError, ErrorCode, MillraceError, StorageError
from millrace.metadata.deltas import Change, ChangeSet, encode
from millrace.metadata.store import Fenced, MetadataStore, Snapshot
from millrace.model import NO_BROKER

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_QUEUED_CHANGES: Final = 1000
MAX_REQUESTS_PER_DELTA: Final = 64
MAX_CHANGES_PER_DELTA: Final = 2000
"""A delta is one znode, and a znode has a megabyte at most; a single request may go beyond this by itself."""


@dataclass(slots=True)
class _Request:
    plan: Callable[[ClusterImage], Plan[Any]]
    answer: asyncio.Future[Any]


class MetadataWriter:
    """The reign of this broker, if it has one, and the changes that wait for it."""

    def __init__(self, store: MetadataStore, view: MetadataView, *, deltas_per_snapshot: int) -> None:
        self.epoch: int | None = None
        """The controller epoch this broker holds, from the election on."""
        self.is_open = False
        """Whether changes are taken: the image says that this is the reign."""
        self.reachable = asyncio.Event()
        """Set while the store can be reached."""
        self.reachable.set()
        self.on_lost: Callable[[], object] = lambda: None
        self._store = store
        self._view = view
        self._deltas_per_snapshot = deltas_per_snapshot
        self._requests: asyncio.Queue[_Request] = asyncio.Queue(MAX_QUEUED_CHANGES)
        view.on_image(self._image_changed)

    def __repr__(self) -> str:
        return f"MetadataWriter(epoch {self.epoch}, {'open' if self.is_open else 'closed'}, {self._requests.qsize()})"

    async def begin(self, epoch: int, first: Callable[[ClusterImage], Sequence[Change]]) -> None:
        """Begin a reign with the delta of `first`; ApiError NOT_CONTROLLER where it is over already."""
        self.end()
        self.epoch = epoch
        try:
            await self._view.wait_applied(await self._store.end())
            await self.write(first(self._view.image))
        except MillraceError:
            self.end("its first change could not be written")
            raise

    def _image_changed(self, _old: ClusterImage, new: ClusterImage, _changes: ChangeSet) -> None:
        if self.epoch is None or new.controller_epoch < self.epoch:
            return
        if new.controller_epoch > self.epoch:
            self.end(f"broker {new.controller_id} has epoch {new.controller_epoch}")
        elif new.controller_id == NO_BROKER:
            self.end()
        else:
            self.is_open = True

    def end(self, reason: str = "") -> None:
        """Be controller no longer; harmless where this broker is not."""
        if self.epoch is None:
            return
        if reason:
            logger.warning("no longer controller (epoch %d): %s", self.epoch, reason)
        self.epoch = None
        self.is_open = False
        while not self._requests.empty():
            _fail(self._requests.get_nowait(), not_controller())
        self.on_lost()

    async def change(self, plan: Callable[[ClusterImage], Plan[T]]) -> T:
        """Plan against the newest image, write what comes out, and return the results once the image has it.

        Cancelled, the change may still happen. ApiError NOT_CONTROLLER where this broker may not write.
        """
        self._check_open()
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        await self._requests.put(_Request(plan, answer))
        try:
            self._check_open()
        except ApiError:  # it ended while the queue was full: a later reign must not find this there
            answer.cancel()
            raise
        return await answer

    def _check_open(self) -> None:
        if not self.is_open:
            raise not_controller()

    async def run(self) -> None:
        """Plan and write what is asked for, until cancelled."""
        while True:
            batch = [await self._requests.get()]
            try:
                await self.reachable.wait()
                while len(batch) < MAX_REQUESTS_PER_DELTA and not self._requests.empty():
                    batch.append(self._requests.get_nowait())
                await self._change_together(batch)
            except BaseException:
                for request in batch:
                    _fail(request, not_controller())
                raise

    async def _change_together(self, batch: list[_Request]) -> None:
        while batch:
            planned: list[tuple[_Request, Any]] = []
            changes: list[Change] = []
            image = self._view.image
            while batch and len(changes) < MAX_CHANGES_PER_DELTA:
                request = batch[0]
                if request.answer.done():  # whoever asked has gone
                    batch.pop(0)
                    continue
                try:
                    plan = request.plan(image)
                    if plan.changes:
                        image = image.apply(plan.changes)
                        changes.extend(plan.changes)
                    planned.append((request, plan.results))
                except ApiError as error:
                    _fail(request, error)
                except Exception:  # a bug in one plan must not take the controller down
                    logger.exception("a change could not be planned")
                    _fail(request, ApiError(ErrorCode.UNKNOWN_SERVER_ERROR, "the change could not be planned"))
                batch.pop(0)
            await self._answer(planned, changes)

    async def _answer(self, planned: list[tuple[_Request, Any]], changes: list[Change]) -> None:
        try:
            if changes:
                await self.write(changes)
            elif self.epoch is None:
                raise not_controller()
        except MillraceError as error:
            for request, _ in planned:
                _fail(request, error if isinstance(error, ApiError) else not_controller())
            return
        except Exception:  # the writer must outlive whatever one change brings up
            logger.exception("a metadata change could not be written")
            for request, _ in planned:
                _fail(request, ApiError(ErrorCode.UNKNOWN_SERVER_ERROR, "the change could not be written"))
            return
        except BaseException:
            for request, _ in planned:
                _fail(request, not_controller())
            raise
        for request, results in planned:
            if not request.answer.done():
                request.answer.set_result(results)

    async def write(self, changes: Sequence[Change]) -> None:
        """Append one delta and return when the image has it."""
        epoch = self.epoch
        if epoch is None:
            raise not_controller()
        try:
            index = await self._store.append(encode(changes), epoch)
        except Fenced as error:
            if self.epoch == epoch:
                self.end(str(error))
            raise not_controller() from error
        except StorageError as error:
            logger.error("a metadata change could not be written: %s", error)  # noqa: TRY400 - the text says it all
            raise ApiError(ErrorCode.KAFKA_STORAGE_ERROR, "the change could not be written") from error
        await self._view.wait_applied(index)
        await self._snapshot_if_due()

    async def _snapshot_if_due(self) -> None:
        view, epoch = self._view, self.epoch
        image = view.image
        if epoch is None or image.index - view.snapshot_index < self._deltas_per_snapshot:
            return
        view.snapshot_index = image.index
        try:
            await self._store.write_snapshot(Snapshot(image.index, encode(image.as_changes())), epoch)
        except (Fenced, StorageError) as error:
            # The deltas are still there; only the next start is slower.
            logger.warning("no metadata snapshot at delta %d: %s", image.index, error)


def not_controller() -> ApiError:
    return ApiError(ErrorCode.NOT_CONTROLLER, "this broker is not the controller")


def _fail(request: _Request, error: MillraceError) -> None:
    if not request.answer.done():
        request.answer.set_exception(error)
