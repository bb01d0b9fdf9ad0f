"""The only writer of cluster metadata, and the door through which a broker sees it.

Every broker has one: it follows the metadata log and folds it into `image`. The one that is elected also takes
requests for changes. Not here: what a request means (`planning`), how deltas are kept (`metadata.store`).

Invariants
- The image changes in one place only, `_apply`, fed by the log. A change that was answered is in the image.
- Changes are planned and written by one task, one after another, each against the image that has all before it. What
  queued up meanwhile is written as one delta, so a flood of requests costs one flush, not one each.
- Listeners run on the loop, in the order they were added, once per delta, before anything waiting for it goes on.
- A controller whose write is fenced stops being one at once and answers NOT_CONTROLLER.

Owner: the event loop. `load` comes first (the image as it was), then `start` (announce this broker, become controller).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from millrace.cluster import planning
from millrace.cluster.image import ClusterImage, TopicImage
from millrace.cluster.planning import ConfigAlteration, MorePartitions, NewTopic, Plan, TopicOutcome, TopicRef
from millrace.config import BrokerConfig
from millrace.errors import ApiError, ErrorCode, MillraceError, StorageError
from millrace.metadata.deltas import (
    BrokerFenced,
    BrokerRegistered,
    Change,
    ChangeSet,
    ClusterCreated,
    ControllerChanged,
    Endpoint,
    ResourceType,
    decode,
    encode,
)
from millrace.metadata.store import BrokerRegistration, Fenced, MetadataStore, Snapshot

logger = logging.getLogger(__name__)

T = TypeVar("T")
ImageListener = Callable[[ClusterImage, ClusterImage, ChangeSet], object]

MAX_QUEUED_CHANGES: Final = 1000
MAX_CHANGES_PER_DELTA: Final = 64
DELTAS_PER_SNAPSHOT: Final = 1000


@dataclass(slots=True)
class _Request:
    plan: Callable[[ClusterImage], Plan[Any]]
    answer: asyncio.Future[Any]


class Controller:
    """One broker's view of the metadata log, and its writer while elected."""

    def __init__(
        self, store: MetadataStore, config: BrokerConfig, *, deltas_per_snapshot: int = DELTAS_PER_SNAPSHOT
    ) -> None:
        self.image = ClusterImage()
        self.broker_id = config.broker_id
        self.broker_epoch = -1
        self._store = store
        self._config = config
        self._controller_epoch: int | None = None
        self._listeners: list[ImageListener] = []
        self._requests: asyncio.Queue[_Request] = asyncio.Queue(MAX_QUEUED_CHANGES)
        self._applied: dict[int, list[asyncio.Future[None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._deltas_per_snapshot = deltas_per_snapshot
        self._snapshot_index = 0
        self._failure: ApiError | None = None
        self._dynamic_settings: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})

    def __repr__(self) -> str:
        role = f"controller, epoch {self._controller_epoch}" if self.is_controller else "follower"
        return f"Controller(broker {self.broker_id}, {role}, {self.image!r})"

    @property
    def is_controller(self) -> bool:
        return self._controller_epoch is not None

    # --- life ---------------------------------------------------------------------------------------------------------

    async def load(self) -> ClusterImage:
        """Open the store and fold what is in it; listeners see only what comes later."""
        await self._store.open()
        snapshot = await self._store.read_snapshot()
        if snapshot is not None:
            self.image = ClusterImage().apply(decode(snapshot.data), snapshot.index)
            self._snapshot_index = snapshot.index
        end = await self._store.end()
        if self.image.index < end:
            async with contextlib.aclosing(self._store.follow(self.image.index)) as deltas:
                async for index, data in deltas:
                    self.image = self.image.apply(decode(data), index)
                    if index >= end:
                        break
        self._take_dynamic_settings()
        return self.image

    async def start(self, endpoints: Sequence[Endpoint]) -> None:
        """Announce this broker with the addresses it listens on, become controller, and be in the image.

        Cancelled half-way, call `stop`.
        """
        self._tasks.append(asyncio.create_task(self._follow(), name="metadata-follow"))
        registration = BrokerRegistration(self.broker_id, tuple(endpoints), self._config.rack)
        self.broker_epoch = await self._store.register(registration)
        self._controller_epoch = epoch = await self._store.elect(self.broker_id)
        if epoch is None:
            raise StorageError("another broker is controller of this metadata store, which serves one broker only")
        await self._wait_applied(await self._store.end())
        await self._write(await self._first_changes(registration, epoch))
        self._tasks.append(asyncio.create_task(self._own(), name="controller"))

    async def _first_changes(self, registration: BrokerRegistration, epoch: int) -> list[Change]:
        """Who writes from now on, and which of the known brokers are really there."""
        changes: list[Change] = [] if self.image.cluster_id else [ClusterCreated(_new_cluster_id())]
        changes.append(ControllerChanged(self.broker_id, epoch))
        changes.append(BrokerRegistered(self.broker_id, self.broker_epoch, registration.endpoints, registration.rack))
        async with contextlib.aclosing(self._store.membership()) as memberships:
            membership = await anext(memberships)
        there = {member.registration.broker_id for member in membership.members}
        changes.extend(
            BrokerFenced(broker.broker_id, broker.broker_epoch, fenced=True)
            for broker in self.image.live_brokers
            if broker.broker_id not in there
        )
        return changes

    async def stop(self) -> None:
        """End the tasks and the session; whoever still waits for a change gets NOT_CONTROLLER."""
        self._controller_epoch = None
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()
        while not self._requests.empty():
            _fail(self._requests.get_nowait(), _not_controller())
        self._fail_waiters(_not_controller())
        await self._store.close()

    # --- following ----------------------------------------------------------------------------------------------------

    def on_image(self, listener: ImageListener) -> Callable[[], None]:
        """Call `listener(old, new, changes)` for every delta from now on; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def _follow(self) -> None:
        try:
            async for index, data in self._store.follow(self.image.index):
                self._apply(index, decode(data))
        except Exception as error:  # the root of the task
            # A log that cannot be read or folded ends this broker's part in the cluster: it may not guess.
            logger.critical("the metadata log cannot be followed", exc_info=True)
            self._failure = ApiError(ErrorCode.KAFKA_STORAGE_ERROR, f"the metadata log cannot be followed: {error}")
            self._controller_epoch = None
            self._fail_waiters(self._failure)

    def _apply(self, index: int, changes: ChangeSet) -> None:
        old = self.image
        self.image = new = old.apply(changes, index)
        if old.configs is not new.configs:
            self._take_dynamic_settings()
        for listener in tuple(self._listeners):
            try:
                listener(old, new, changes)
            except Exception:  # a listener that fails must not stop the log for the others
                logger.exception("a listener failed on metadata delta %d", index)
        for waiter in self._applied.pop(index, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _take_dynamic_settings(self) -> None:
        kind = ResourceType.BROKER
        layers = (self.image.config(kind, ""), self.image.config(kind, str(self.broker_id)))
        if layers != self._dynamic_settings:
            self._dynamic_settings = layers
            self._config.apply_dynamic(*layers)

    async def _wait_applied(self, index: int) -> None:
        if self._failure is not None:
            raise self._failure
        if self.image.index < index:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._applied.setdefault(index, []).append(waiter)
            await waiter

    def _fail_waiters(self, error: MillraceError) -> None:
        for waiters in self._applied.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(error)
        self._applied.clear()

    # --- writing ------------------------------------------------------------------------------------------------------

    async def change(self, plan: Callable[[ClusterImage], Plan[T]]) -> T:
        """Plan against the newest image, write what comes out, and return the results once the image has it.

        Cancelled, the change may still happen. ApiError NOT_CONTROLLER where this broker may not write.
        """
        if not self.is_controller:
            raise _not_controller()
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        await self._requests.put(_Request(plan, answer))
        if not self.is_controller:  # stopped while the queue was full: nobody will look into it again
            raise _not_controller()
        return await answer

    async def _own(self) -> None:
        while True:
            batch = [await self._requests.get()]
            while len(batch) < MAX_CHANGES_PER_DELTA and not self._requests.empty():
                batch.append(self._requests.get_nowait())
            try:
                await self._change_together(batch)
            except BaseException:
                for request in batch:
                    _fail(request, _not_controller())
                raise

    async def _change_together(self, batch: list[_Request]) -> None:
        planned: list[tuple[_Request, Any]] = []
        changes: list[Change] = []
        image = self.image
        for request in batch:
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
        try:
            if changes:
                await self._write(changes)
        except MillraceError as error:
            for request, _ in planned:
                _fail(request, error if isinstance(error, ApiError) else _not_controller())
            return
        for request, results in planned:
            if not request.answer.done():
                request.answer.set_result(results)

    async def _write(self, changes: Sequence[Change]) -> None:
        epoch = self._controller_epoch
        if epoch is None:
            raise _not_controller()
        try:
            index = await self._store.append(encode(changes), epoch)
        except Fenced as error:
            logger.warning("no longer controller: %s", error)
            self._controller_epoch = None
            raise _not_controller() from error
        except StorageError as error:
            logger.error("a metadata change could not be written: %s", error)  # noqa: TRY400 - the text says it all
            raise ApiError(ErrorCode.KAFKA_STORAGE_ERROR, "the change could not be written") from error
        await self._wait_applied(index)
        await self._snapshot_if_due()

    async def _snapshot_if_due(self) -> None:
        image, epoch = self.image, self._controller_epoch
        if epoch is None or image.index - self._snapshot_index < self._deltas_per_snapshot:
            return
        try:
            await self._store.write_snapshot(Snapshot(image.index, encode(image.as_changes())), epoch)
            self._snapshot_index = image.index
        except (Fenced, StorageError) as error:
            # The deltas are still there; only the next start is slower.
            logger.warning("no metadata snapshot at delta %d: %s", image.index, error)
            self._snapshot_index = image.index

    # --- what can be asked --------------------------------------------------------------------------------------------

    async def create_topics(self, topics: Sequence[NewTopic], *, validate_only: bool = False) -> list[TopicOutcome]:
        """Create topics, or say what would happen; one outcome each, in order."""
        return await self._do(lambda image: planning.plan_create_topics(image, topics, self._config), validate_only)

    async def delete_topics(self, topics: Sequence[TopicRef]) -> list[TopicOutcome]:
        """Delete topics by name or id; one outcome each, in order."""
        return await self.change(lambda image: planning.plan_delete_topics(image, topics))

    async def create_partitions(
        self, topics: Sequence[MorePartitions], *, validate_only: bool = False
    ) -> list[TopicOutcome]:
        """Add partitions; one outcome each, in order."""
        return await self._do(lambda image: planning.plan_create_partitions(image, topics), validate_only)

    async def alter_configs(
        self, alterations: Sequence[ConfigAlteration], *, validate_only: bool = False
    ) -> list[ApiError | None]:
        """Change settings, step by step or all at once (`replace_all`); an error or None each, in order."""
        return await self._do(
            lambda image: planning.plan_alter_configs(image, alterations, self._config), validate_only
        )

    async def ensure_topics(self, names: Sequence[str]) -> list[TopicOutcome]:
        """Create those of `names` that are missing, as auto-creation does; one outcome each, in order."""
        if all(name in self.image.topics for name in names):
            return planning.plan_ensure_topics(self.image, names, self._config).results
        return await self.change(lambda image: planning.plan_ensure_topics(image, names, self._config))

    async def ensure_internal_topic(self, name: str) -> TopicImage:
        """The internal topic `name`, created now if it is missing; ApiError where it cannot be."""
        (outcome,) = await self.ensure_topics([name])
        topic = self.image.topic(name)
        if topic is None:
            raise outcome.error or ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{name} was deleted meanwhile")
        return topic

    async def next_producer_id_block(self) -> range:
        """A block of producer ids that nobody else ever gets."""
        return await self.change(lambda image: planning.plan_producer_ids(image, self.broker_id))

    async def _do(self, plan: Callable[[ClusterImage], Plan[T]], validate_only: bool) -> T:
        if validate_only:
            if not self.is_controller:
                raise _not_controller()
            return plan(self.image).results
        return await self.change(plan)


def _not_controller() -> ApiError:
    return ApiError(ErrorCode.NOT_CONTROLLER, "this broker is not the controller")


def _fail(request: _Request, error: MillraceError) -> None:
    if not request.answer.done():
        request.answer.set_exception(error)


def _new_cluster_id() -> str:
    """22 characters, as Kafka writes its ids: base64 of a random UUID that does not begin with a dash."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode("ascii")
        if not text.startswith("-"):
            return text
