"""Requests of this broker to the controller, wherever it is.

One connection is kept to the broker that the image names as controller, and opened again when it breaks or when another
broker is named. Not here: what is asked, and whether it may be asked twice (`controller`).

Owner: the event loop. Several requests may be under way on the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from millrace.client.connection import Connection
from millrace.clock import Clock
from millrace.cluster.dialer import Dialer, inter_broker_endpoint
from millrace.cluster.image import ClusterImage
from millrace.cluster.view import MetadataView
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import Endpoint
from millrace.tasks import awaited
from millrace.wire.schema import Request

T = TypeVar("T")

DEFAULT_TIMEOUT_S: Final = 10.0
CONNECT_TIMEOUT_MS: Final = 2000
PAUSE_S: Final = 0.05

RETRIABLE: Final = frozenset({
    ErrorCode.NOT_CONTROLLER,
    ErrorCode.NETWORK_EXCEPTION,
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.BROKER_NOT_AVAILABLE,
})  # fmt: skip


async def within(clock: Clock, work: Awaitable[T], seconds: float) -> T:
    """What `work` returns, or ApiError REQUEST_TIMED_OUT; it is cancelled when the wait ends without it."""
    task = awaited(work)
    expired = False

    def expire() -> None:
        nonlocal expired
        expired = True
        task.cancel()

    timer = clock.call_later(max(seconds, 0.0), expire)
    try:
        return await task
    except asyncio.CancelledError:
        if not expired:
            raise
        raise ApiError(ErrorCode.REQUEST_TIMED_OUT, f"no answer within {round(seconds * 1000)} ms") from None
    finally:
        timer.cancel()
        task.cancel()


class ControllerChannel:
    """The way to the controller."""

    def __init__(self, view: MetadataView, dialer: Dialer, clock: Clock) -> None:
        self._view = view
        self._dialer = dialer
        self._clock = clock
        self._connection: Connection | None = None
        self._target: Endpoint | None = None
        self._opening = asyncio.Lock()

    def __repr__(self) -> str:
        return f"ControllerChannel({self._connection or 'closed'})"

    async def request(self, message: Request, version: int, timeout_s: float) -> Any:
        """Send `message` once and return the response.

        ApiError: NOT_CONTROLLER when nobody (or this broker) is named controller, and NETWORK_EXCEPTION before the
        request could be sent, both as `Unsent`; any other error leaves open whether it was acted upon. When the image
        names another controller meanwhile, nothing is expected of the old one any more: NETWORK_EXCEPTION.
        """
        deadline_s = self._clock.monotonic() + timeout_s
        connection = await self._connected(timeout_s)
        left_ms = max(1, round((deadline_s - self._clock.monotonic()) * 1000))
        asked_of = _office(self._view.image)
        answer = awaited(connection.request(message, version, timeout_ms=left_ms))
        change = awaited(self._view.wait_for(lambda image: _office(image) != asked_of))
        try:
            await asyncio.wait([answer, change], return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise ApiError(ErrorCode.NETWORK_EXCEPTION, "there is a new controller, and the old one has not answered")
        finally:
            await _cancelled(answer, change)

    async def _connected(self, timeout_s: float) -> Connection:
        async with self._opening:
            broker_id, target = self._controller_endpoint()
            if self._connection is not None and (self._target != target or self._connection.is_closed):
                await self._drop()
            if self._connection is None:
                limit_ms = max(1, min(CONNECT_TIMEOUT_MS, round(timeout_s * 1000)))
                try:
                    self._connection = await self._dialer.open(target, broker_id, timeout_ms=limit_ms)
                except ApiError as error:
                    raise Unsent(error.code, error.message) from error
                self._target = target
            return self._connection

    def _controller_endpoint(self) -> tuple[int, Endpoint]:
        image = self._view.image
        target = None
        if image.controller_id != self._dialer.broker_id:
            target = inter_broker_endpoint(image, image.controller_id)
        if target is None:
            raise Unsent(ErrorCode.NOT_CONTROLLER, "there is no controller at the moment")
        return image.controller_id, target

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def close(self) -> None:
        """End the connection; requests under way fail."""
        await self._drop()


def _office(image: ClusterImage) -> tuple[int, int]:
    return image.controller_id, image.controller_epoch


async def _cancelled(*futures: asyncio.Future[Any]) -> None:
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


class Unsent(ApiError):
    """The controller could not be reached: nothing was asked, so asking again is harmless."""


async def persist(
    attempt: Callable[[float], Awaitable[T]],
    *,
    clock: Clock,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    may_repeat: Callable[[ApiError], bool] = lambda error: error.code in RETRIABLE,
) -> T:
    """Call `attempt(seconds left)` until it returns, it fails for good, or the time is up; then its error comes out."""
    deadline_s = clock.monotonic() + timeout_s
    while True:
        try:
            return await attempt(max(deadline_s - clock.monotonic(), 0.001))
        except ApiError as error:
            if not may_repeat(error) or clock.monotonic() + PAUSE_S >= deadline_s:
                raise
        await clock.sleep(PAUSE_S)
