"""One asyncio connection to one broker, with any number of requests under way.

Which broker to ask, retries and pools are not here. Responses find their requests by correlation id. A connection that
was lost, or that sent bytes which are not the protocol, is finished: every request on it fails, and so does every
later one. Owner: the event loop it was opened on.

With SASL a connection logs in before its first request, and again on the way of a request when the login is about to
end; nothing else is sent meanwhile. A login that fails, or is cancelled half-way, ends the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from ssl import SSLContext
from typing import Any, Final, Self

from millrace.client import versions
from millrace.client.sasl import Ask, SaslClient, renew_after_s
from millrace.client.stream import Stream, Waiting
from millrace.clock import Clock, SystemClock
from millrace.errors import ApiError, ErrorCode
from millrace.tasks import awaited
from millrace.wire.frame import RequestHeader, decode_response, encode_request
from millrace.wire.messages import response_class
from millrace.wire.messages.api_versions import ApiVersionsRequest
from millrace.wire.schema import Request, Response

DEFAULT_TIMEOUT_MS: Final = 30_000
_MAX_CORRELATION_ID: Final = (1 << 31) - 1


class Connection:
    """Made by `open`; used by `request`; ended by `close`, which `async with` does."""

    def __init__(self, host: str, port: int, *, client_id: str | None, timeout_ms: int, clock: Clock) -> None:
        self.host = host
        self.port = port
        self.offered: versions.Offered = {}
        self._client_id = client_id
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._stream = Stream(f"{host}:{port}")
        self._correlation_id = 0
        self._sasl: SaslClient | None = None
        self._renew_s: float | None = None
        """When to log in again."""
        self._logging_in = asyncio.Lock()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{len(self._stream.waiting)} under way"
        return f"Connection({self.host}:{self.port}, {state})"

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        *,
        client_id: str | None = "millrace",
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        clock: Clock | None = None,
        ssl: SSLContext | None = None,
        sasl: SaslClient | None = None,
        negotiate: bool = True,
    ) -> Self:
        """Connect, learn what the broker serves, and log in; without `negotiate` every request must name its version.

        ApiError: NETWORK_EXCEPTION when there is no connection, REQUEST_TIMED_OUT when one step takes too long, and
        what the broker answers to a login that it refuses. Cancelled or failed, nothing stays open.
        """
        connection = cls(host, port, client_id=client_id, timeout_ms=timeout_ms, clock=clock or SystemClock())
        try:
            await connection._connect(ssl)
            if negotiate:
                await connection._negotiate()
            if sasl is not None:
                connection._sasl = sasl
                await connection._log_in(sasl)
        except BaseException:
            connection._stream.abort()
            raise
        return connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def is_closed(self) -> bool:
        return self._stream.failure is not None

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the connection is over, whoever ended it."""
        self._stream.ended.add_done_callback(lambda _: callback())

    async def request(self, message: Request, version: int | None = None, *, timeout_ms: int | None = None) -> Any:
        """Send `message` and wait for its response; None at once for a Produce with acks=0.

        ApiError: NETWORK_EXCEPTION when the connection is lost, REQUEST_TIMED_OUT when no response came in time,
        UNSUPPORTED_VERSION when the broker speaks no version of it. After a timeout or a cancellation the broker may
        still act on the request; its late response is dropped and the connection stays usable.
        """
        if self._renew_s is not None:
            await self._renew_login()
        if version is None:
            version = versions.version_for(type(message), self.offered)
        read = partial(_body, response_class(message.api_key), version)
        return await self._exchange(message, version, timeout_ms, read)

    async def send_raw(self, data: bytes) -> None:
        """Write bytes as they are, for tests of the other side."""
        await self._stream.drained()
        self._stream.send(data)

    async def read_raw(self, *, timeout_ms: int | None = None) -> bytes:
        """The next frame that answers no request made here, without its size; for tests of the other side."""
        return bytes(await self._within(self._stream.next_unclaimed(), timeout_ms))

    async def close(self) -> None:
        """End the connection; requests under way fail. Harmless when repeated or cancelled."""
        self._stream.close()
        try:
            await self._within(asyncio.shield(self._stream.ended), None)
        except ApiError:  # the peer does not read what is left to write
            self._stream.abort()

    def abort(self) -> None:
        """End the connection now, without waiting; requests under way fail with NETWORK_EXCEPTION."""
        self._stream.abort()

    async def _connect(self, ssl: SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        connecting = awaited(loop.create_connection(lambda: self._stream, self.host, self.port, ssl=ssl))
        try:
            await self._within(connecting, None)
        except OSError as error:
            raise ApiError(ErrorCode.NETWORK_EXCEPTION, f"{self.host}:{self.port}: {error}") from error

    async def _negotiate(self) -> None:
        version: int | None = ApiVersionsRequest.max_version
        while version is not None:
            asked = version
            response, offered = await self._exchange(
                versions.api_versions_request(),
                asked,
                None,
                lambda frame, asked=asked: versions.read_api_versions(frame, asked),  # type: ignore[misc]
            )
            version = versions.older_api_versions(response, offered, asked)
            self.offered = offered

    async def _renew_login(self) -> None:
        """Log in again if it is time; whoever comes meanwhile waits, for the broker takes nothing else then."""
        async with self._logging_in:
            assert self._sasl is not None
            if self._renew_s is None or self._clock.monotonic() < self._renew_s or self.is_closed:
                return
            try:
                await self._log_in(self._sasl)
            except BaseException:
                self._stream.abort()
                raise

    async def _log_in(self, sasl: SaslClient) -> None:
        login = sasl.login(self.offered or None)
        try:
            step = next(login)
            while True:
                if isinstance(step, Ask):
                    read = partial(_body, response_class(step.message.api_key), step.version)
                    step = login.send(await self._exchange(step.message, step.version, None, read))
                else:
                    done = asyncio.get_running_loop().run_in_executor(None, step.call)
                    step = login.send(await self._within(done, None))
        except StopIteration as end:
            lifetime_ms: int = end.value
            self._renew_s = self._clock.monotonic() + renew_after_s(lifetime_ms) if lifetime_ms else None

    async def _exchange(
        self, message: Request, version: int, timeout_ms: int | None, read: Callable[[memoryview], Any]
    ) -> Any:
        correlation_id = self._correlation_id = (self._correlation_id + 1) & _MAX_CORRELATION_ID
        header = RequestHeader(message.api_key, version, correlation_id, self._client_id)
        raw = encode_request(header, message)
        await self._stream.drained()
        self._stream.send(raw)
        if not versions.is_answered(message):
            return None
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._stream.waiting[correlation_id] = Waiting(read, result)
        return await self._within(result, timeout_ms)

    async def _within(self, result: asyncio.Future[Any], timeout_ms: int | None) -> Any:
        """The result, or REQUEST_TIMED_OUT; the future is cancelled when the wait ends without it."""
        limit_ms = self._timeout_ms if timeout_ms is None else timeout_ms
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = True
            result.cancel()

        timer = self._clock.call_later(limit_ms / 1000, expire)
        try:
            return await result
        except asyncio.CancelledError:
            if not expired:
                raise
            where = f"{self.host}:{self.port}"
            raise ApiError(ErrorCode.REQUEST_TIMED_OUT, f"nothing from {where} within {limit_ms} ms") from None
        finally:
            timer.cancel()
            result.cancel()


def _body(cls: type[Response], version: int, frame: memoryview) -> Response:
    return decode_response(cls, version, frame)[1]
