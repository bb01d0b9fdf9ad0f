"""One client connection: frames in, requests handled in order, replies out in order.

A request's handler starts only after every earlier request of the connection has been answered, except behind handlers
that are declared to overlap (Produce, Fetch): those do their ordered part at once and may then wait while the next
request starts. Replies leave in the order of their requests whatever order they are ready in.

Back-pressure: nothing is read from a peer that does not read its replies, that has too many requests waiting, that has
used more than its quota (`throttling`), or while the broker's memory budget is used up. A peer that breaks the protocol
is closed at once; nobody else notices.

What replies weigh is counted (`answers`) from when they are ready until the kernel has the last byte: until then the
transport keeps all of them. Beyond that a connection has `WRITE_BUFFER_HIGH_BYTES` which nobody counts.

On a listener with SASL the connection begins narrow: only what a login needs is served, in small frames, until
`server.login` opens it; and again when the session has ended.

What is not here: the meaning of any request (`handlers`), accepting sockets (`listener`), how a login goes (`login`).
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import sys
import termios
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, cast

from millrace.errors import ApiError, ErrorCode, ProtocolError, StorageError, code_of, text_of
from millrace.handlers import api_versions, auditing
from millrace.handlers.context import RequestContext, Services
from millrace.handlers.counting import count_answered
from millrace.handlers.promise import Promise
from millrace.security.acls import LOCAL_HOST
from millrace.security.ocsf import Caller
from millrace.security.principals import NoPrincipal, PrincipalMapper, session_of
from millrace.security.sessions import ANONYMOUS, Session
from millrace.server.counting import CERTIFICATE
from millrace.server.login import Login, LoginRules
from millrace.server.throttling import Timed, asked_for, meter_of, told
from millrace.server.tls import UNDELIVERED_BYTES
from millrace.wire.frame import FrameReader, read_request_header
from millrace.wire.keys import ApiKey

if TYPE_CHECKING:
    from millrace.clock import Timer
    from millrace.handlers.counting import ApiCounts
    from millrace.handlers.registry import Api, Buffers
    from millrace.security.metering import Meter
    from millrace.server.answers import AnswerRoom
    from millrace.server.counting import ListenerCounts
    from millrace.server.flow import Admission, MemoryBudget
    from millrace.server.login import HeaderReader
    from millrace.server.refusals import Refusals

logger = logging.getLogger(__name__)

MAX_WAITING_REQUESTS: Final = 128
"""Whole requests that one connection may have received and not yet begun; more stay in the kernel."""
MAX_WAITING_BEFORE_LOGIN: Final = 2
LOGIN_BYTES: Final = 4096
"""What may have arrived of a message of a login while the memory budget is used up: most are smaller."""
MAX_OVERLAPPING_REPLIES: Final = 128
MAX_REQUESTS_PER_TURN: Final = 16
"""Requests that one connection may begin before the other connections get their turn."""
REFUSAL_GRACE_S: Final = 0.5
"""How long a peer that broke the protocol is kept for the answers to what it asked before."""
KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
"""A peer that vanished without a word is noticed within two minutes, even while a long poll waits for it."""
LOOK_S: Final = 15.0
"""How often it is looked whether a peer that is not read has gone."""
WRITE_BUFFER_HIGH_BYTES: Final = 64 * 1024
"""Small answers gather in the transport for one turn of the loop."""

_TCP_INFO: Final[int | None] = getattr(socket, "TCP_INFO", None)
_ESTABLISHED: Final = 1
"""The state of a connection that both sides have open, the first byte of what the kernel tells (Linux)."""
_GOODBYE_BYTES: Final = 31
"""Of TLS, at the most. No Produce request is as small, so nothing that was to be kept is in so little."""
_LATER: Final = (CoroutineType, Promise)
"""What a handler returns whose answer is not there yet."""


class _Reply:
    """The place in line of one request whose answer is not ready yet."""

    __slots__ = (
        "answer_bytes", "begun_at", "buffers", "came_at", "context", "counts", "parked_at", "ready_at", "size_bytes",
        "told_bytes",
    )  # fmt: skip

    def __init__(
        self,
        size_bytes: int,
        counts: ApiCounts,
        came_at: float,
        begun_at: float,
        parked_at: float,
        context: RequestContext | None = None,
    ) -> None:
        self.context = context
        self.size_bytes = size_bytes
        """Of the request."""
        self.counts = counts
        self.came_at = came_at
        self.begun_at = begun_at
        self.parked_at = self.ready_at = parked_at
        """When its handler was left, and when the answer was there: until it is, the same."""
        self.answer_bytes = 0
        """Of the answer, where it is held against the memory of answers: a small one that leaves at once is not."""
        self.told_bytes = 0
        """Of the answer."""
        self.buffers: Buffers | None = None


class Connection(asyncio.BufferedProtocol):
    """The protocol object of one accepted socket; its only owner is the event loop."""

    def __init__(
        self,
        *,
        apis: Mapping[int, Api],
        services: Services,
        listener: str,
        budget: MemoryBudget,
        answers: AnswerRoom,
        limits: Admission | None,
        refusals: Refusals,
        counts: ListenerCounts,
        max_frame_bytes: int,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        on_closed: Callable[[Connection], None],
        login_rules: LoginRules | None = None,
        mapper: PrincipalMapper | None = None,
    ) -> None:
        """`limits` is None for a connection that was admitted before; by `mapper` its certificate says who it is."""
        self._apis = self._all_apis = apis
        """What is served now: before a login, and after its session, not all."""
        self._services = services
        self._listener = listener
        self._budget = budget
        self._answers = answers
        self._limits = limits
        self._refusals = refusals
        self._listener_counts = counts
        self._counts = services.counts
        self._counts_by_key = services.counts.by_key
        self._monotonic = services.clock.monotonic
        self._max_frame_bytes = max_frame_bytes
        self._max_waiting = MAX_WAITING_REQUESTS
        self._quotas = services.quotas
        self._reader = FrameReader(max_frame_bytes)
        self._read_header: HeaderReader = read_request_header
        self._session = ANONYMOUS
        self._spawn = spawn
        self._on_closed = on_closed
        self._mapper = mapper
        self._transport: asyncio.Transport | None = None
        self._host, self.port = "", 0
        self.software: tuple[str, str] | None = None
        self._admitted = False
        self._requests: deque[tuple[memoryview | ProtocolError, float]] = deque()
        """Whole requests that have not begun, and since when they are here.

        An error in the place of one closes the connection when its turn comes.
        """
        self._waiting_bytes = 0
        self._reserved_bytes = 0
        """For answers that are being made."""
        self._ready_bytes = 0
        """Of answers that wait for their turn."""
        self._unsent_bytes = 0
        """Of answers that the transport has, in whole or in part."""
        self._taken_bytes = 0
        self._replies: deque[_Reply] = deque()
        self._work: set[asyncio.Task[Any] | Promise[Any]] = set()
        self._sending = False
        self._gated = False
        """A request that does not overlap is being handled: the next one waits."""
        self._turn_is_over = False
        self._quiet: Timer | None = None
        """Until it fires nothing is read, and nothing begins: the client has used more than its quota."""
        self._quiet_until = 0.0
        self._lost = False
        """The stream cannot be cut into frames any more."""
        self._write_paused = False
        self._reading_paused = False
        self._in_line = False
        self._partial_bytes = 0
        self._draining = False
        self.login = None if login_rules is None else Login(login_rules, self, services.clock, refusals)
        self.on_lost: dict[object, Callable[[], None]] = {}
        """What handlers bound to this connection; each is called once it is gone."""
        self.served = 0
        self.idle_since_mark = True
        """No request has arrived since the listener last looked; it closes what stays so for too long."""
        self.idle_marks = 0

    def __repr__(self) -> str:
        return f"Connection({self._host or 'unconnected'}, {self.served} served, {len(self._replies)} waiting)"

    @property
    def waiting(self) -> bool:
        """A request is being handled, a long poll perhaps, or none may be: that is not idleness."""
        return bool(self._replies) or self._quiet is not None

    @property
    def requests_waiting(self) -> int:
        """Requests that are here and have not begun."""
        return len(self._requests)

    @property
    def requests_in_flight(self) -> int:
        """Requests that have begun and are not answered."""
        return len(self._replies)

    # --- memory for answers -------------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        return self._ready_bytes + self._unsent_bytes

    @property
    def taken_bytes(self) -> int:
        taken_bytes = self._taken_bytes
        if self._unsent_bytes and self._transport is not None:
            taken_bytes += max(self._unsent_bytes - self._transport.get_write_buffer_size(), 0)
        return taken_bytes

    def answer_room(self, context: RequestContext) -> int:
        if (self._write_paused or self._ready_bytes) and not self._may_answer(context):
            return 0
        return self._answers.room()

    def when_room(self, context: RequestContext, wake: Callable[[], None]) -> None:
        self._answers.line_up(wake, lambda: self._may_answer(context))

    def _may_answer(self, context: RequestContext) -> bool:
        """Whether the peer has taken what there is; what waits for the very answer that is to be made is not there."""
        return not self._write_paused and (
            self._ready_bytes <= WRITE_BUFFER_HIGH_BYTES
            or (bool(self._replies) and self._replies[0].context is context)
        )

    def forget_room(self, wake: Callable[[], None]) -> None:
        self._answers.leave_line(wake)

    def reserve(self, size_bytes: int) -> None:
        if self._transport is not None:
            self._reserved_bytes += size_bytes
            self._answers.take(size_bytes)

    # --- transport callbacks ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self._host, self.port = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) and peer else (LOCAL_HOST, 0)
        refusal = None if self._limits is None else self._limits.admit(self._host)
        if refusal:
            self._listener_counts.refused_limit += 1
            self._turn_away(refusal)
            return
        self._admitted = True
        try:
            self._session = session_of(transport, self._mapper, self._services.clock.wall_ms())
        except NoPrincipal as error:
            self.login_failed("", CERTIFICATE, str(error))
            self._listener_counts.refused_certificate += 1
            self._turn_away(str(error))
            return
        self._listener_counts.accepted += 1
        if self._session is not ANONYMOUS:
            self._listener_counts.logged_in(CERTIFICATE)
            if self._services.audit is not None:
                self._services.audit.logged_in(self._caller(self._session))
        self._answers.holders.add(self)
        self._transport.set_write_buffer_limits(WRITE_BUFFER_HIGH_BYTES, 0)
        peer_socket = transport.get_extra_info("socket")
        if peer_socket is not None and peer_socket.family in (socket.AF_INET, socket.AF_INET6):
            peer_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE:
                peer_socket.setsockopt(socket.IPPROTO_TCP, option, value)
        if self.login is not None:
            self.login.begin(self._host)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._admitted and self._limits is not None:
            self._limits.release(self._host)
        if self.login is not None:
            self.login.end()
        if self._quiet is not None:
            self._quiet.cancel()
        if self._in_line:
            self._budget.leave_line(self._leave_line)
        for work in tuple(self._work):
            work.cancel()
        self._requests.clear()
        self._budget.give_back(self._waiting_bytes + self._partial_bytes)
        self._waiting_bytes = self._partial_bytes = 0
        for reply in self._replies:
            self._budget.end_serving(reply.size_bytes)
            if reply.context is not None and reply.context.notes is not None:
                auditing.tell(reply.context, ApiKey(reply.context.header.api_key), asyncio.CancelledError())
        self._replies.clear()
        self._transport = None
        held_bytes = self._reserved_bytes + self.held_bytes
        self._reserved_bytes = self._ready_bytes = self._unsent_bytes = 0
        self._answers.left(self)
        self._answers.give_back(held_bytes)
        for tell in tuple(self.on_lost.values()):
            tell()
        self._on_closed(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._reader.room()

    def buffer_updated(self, nbytes: int) -> None:
        reader = self._reader
        frames = reader.took(nbytes)
        # What the reader holds of an unfinished frame counts as much as whole requests do.
        held_bytes = reader.pending_bytes
        frame_bytes = 0
        now = self._monotonic()
        for frame in frames:
            frame_bytes += len(frame)
            self._requests.append((frame, now))
        self._budget.take(frame_bytes + held_bytes - self._partial_bytes)
        self._partial_bytes = held_bytes
        self._waiting_bytes += frame_bytes
        if reader.failure is not None and not self._lost:
            self._lost = True
            self._requests.append((reader.failure, now))
        if frames or self._lost:
            self.idle_since_mark = False
            self._advance(now)
        if self._budget.exhausted or len(self._requests) > self._max_waiting:
            # Who has not logged in is not waited for: strangers cannot use up what is there for the others.
            is_in_the_way = self._is_narrow and self._budget.exhausted and held_bytes > LOGIN_BYTES
            if is_in_the_way or (self._budget.overrun and held_bytes):
                self._refuse(ProtocolError(f"no room for a request that is being received, {self._budget!r}"))
                return
            self._hold_reading()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._write_paused = True
        self._hold_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._transport is not None:
            self._transport.set_write_buffer_limits(WRITE_BUFFER_HIGH_BYTES, 0)
        unsent_bytes, self._unsent_bytes = self._unsent_bytes, 0
        self._taken_bytes += unsent_bytes
        self._answers.give_back(unsent_bytes)
        self._advance()
        self._maybe_resume_reading()

    # --- flow control -------------------------------------------------------------------------------------------------

    def _hold_reading(self) -> None:
        if self._transport is None:
            return
        if not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()
        if self._budget.exhausted and not self._in_line:
            self._in_line = True
            self._budget.line_up(self._leave_line)

    def _leave_line(self) -> None:
        self._in_line = False
        self._maybe_resume_reading()

    def _maybe_resume_reading(self) -> None:
        if (
            self._reading_paused
            and not self._write_paused
            and not self._in_line
            and not self._draining
            and not self._turn_is_over
            and self._quiet is None
            and len(self._requests) <= self._max_waiting // 2
            and self._transport is not None
            and not self._transport.is_closing()
        ):
            self._reading_paused = False
            self._transport.resume_reading()

    # --- quotas -------------------------------------------------------------------------------------------------------

    def _be_quiet(self, seconds: float) -> None:
        """Read nothing and begin nothing for so long; what is being answered is."""
        clock = self._services.clock
        until = clock.monotonic() + seconds
        if self._transport is None or until <= self._quiet_until or seconds <= 0:
            return
        if self._quiet is not None:
            self._quiet.cancel()
        self._quiet_until = until
        self._quiet = clock.call_later(min(seconds, LOOK_S), self._speak_again)
        self._hold_reading()

    def _speak_again(self) -> None:
        clock = self._services.clock
        left_s = self._quiet_until - clock.monotonic()
        if left_s > 0 and self._transport is not None:
            # What is not read says nothing of its end, and a quota may want hours of quiet. Who has asked for no
            # acknowledgement may leave at once: what it sent before is served in its time.
            if not self._requests and _has_left(self._transport):
                self.abort()
            else:
                self._quiet = clock.call_later(min(left_s, LOOK_S), self._speak_again)
            return
        self._quiet = None
        self._advance()
        self._maybe_resume_reading()

    def _meter(self, api: Api, context: RequestContext, size_bytes: int) -> Meter | None:
        meter = meter_of(self._quotas, api, context)
        if meter is not None and api.key == ApiKey.PRODUCE:
            meter.received(size_bytes)
            if meter.throttle_ms:
                self._be_quiet(meter.throttle_ms / 1000)
        return meter

    def _charge_failure(self, context: RequestContext) -> int:
        """Whose request fails has taken time as well; for how many milliseconds it has to be quiet."""
        if context.meter is None:
            return 0
        throttle_ms = context.meter.charge()
        self._throttle(context.meter, throttle_ms)
        return throttle_ms

    def _charge_answer(self, meter: Meter, response: Any) -> Any:
        """Count what an answer has cost, and have the connection be quiet if that was too much."""
        if response is None:  # Kafka does not hold produce requests with acks=0 to the share of its time
            meter.finish()
            self._throttle(meter, meter.throttle_ms)
            return None
        throttle_ms = max(meter.charge(), asked_for(response))
        if throttle_ms:
            self._throttle(meter, throttle_ms)
            return told(response, throttle_ms)
        return response

    def _throttle(self, meter: Meter, throttle_ms: int) -> None:
        """Be quiet for as long as a request, and what it asked for, has made necessary; told once per request."""
        if throttle_ms:
            meter.tell(throttle_ms)
            self._be_quiet(throttle_ms / 1000)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _advance(self, now: float | None = None) -> None:
        """Begin as many waiting requests as the rules of order allow; `now` is the time, if it is known."""
        requests = self._requests
        begun = 0
        if now is None:
            now = self._monotonic()
        while requests and not (self._gated or self._write_paused or self._draining or self._turn_is_over):
            if len(self._replies) >= MAX_OVERLAPPING_REPLIES or self._transport is None or self._quiet is not None:
                break
            frame, came_at = requests.popleft()
            if isinstance(frame, ProtocolError):
                self._refuse(frame)
                return
            size_bytes = len(frame)
            self._waiting_bytes -= size_bytes
            self._budget.begin_serving(size_bytes)
            try:
                now = self._begin(frame, came_at, now)
            except ProtocolError as error:
                self._budget.end_serving(size_bytes)
                self._refuse(error)
                return
            begun += 1
            if requests and (begun >= MAX_REQUESTS_PER_TURN or self._has_much_to_send()):
                self._turn_is_over = True
                self._services.clock.call_later(0, self._next_turn)
                self._hold_reading()
                return
        if self._reading_paused:
            self._maybe_resume_reading()

    def _next_turn(self) -> None:
        self._turn_is_over = False
        self._advance()

    def _has_much_to_send(self) -> bool:
        """The transport says so itself only when the loop comes round, which may be many answers later."""
        return self._transport is not None and self._transport.get_write_buffer_size() > WRITE_BUFFER_HIGH_BYTES

    def _begin(self, frame: memoryview, came_at: float, now: float) -> float:
        """Begin a request that came at `came_at`; returns when that was done."""
        header, pos = self._read_header(frame)
        api = self._apis.get(header.api_key)
        if api is None:
            when = ": the client has to log in" if header.api_key in self._all_apis else ""
            raise ProtocolError(f"API key {header.api_key} is not served{when}")
        version = header.api_version
        size_bytes = len(frame)
        counts = self._counts_by_key[header.api_key]
        if not api.min_version <= version <= api.max_version:
            if header.api_key != ApiKey.API_VERSIONS:
                raise ProtocolError(f"{api.key.name} v{version} is not served")
            # KIP-511: an unknown ApiVersions version is answered in v0, so that the client can choose again.
            counts.failed(ErrorCode.UNSUPPORTED_VERSION)
            supported = api_versions.unsupported(header.correlation_id, self._services.config)
            return self._answer_now(supported, size_bytes, counts, came_at, now)
        context = RequestContext(
            self._services, header, version, self._host, self._listener, self, self._session, needs=api.needs
        )
        if self._quotas.active and not self._is_narrow:  # before a login nobody is known
            context.meter = self._meter(api, context, size_bytes)
        request = api.decode(version, frame, pos)
        if self._services.audit is not None:
            auditing.begin(context, api.key, request)
        try:
            if api.needs.whole is not None and (refusal := api.refused(context, request)) is not None:
                counts.failed(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
                if context.meter is not None:
                    self._throttle(context.meter, context.meter.throttle_ms)
                return self._answer_now(refusal, size_bytes, counts, came_at, now)
            result = api.handler(context, request)
            if not isinstance(result, _LATER):
                if context.notes is not None:
                    auditing.tell(context, api.key, result)
                return self._answer_now(self._encode(api, context, result), size_bytes, counts, came_at, now)
        except Exception as error:  # noqa: BLE001 - the dispatch boundary
            auditing.tell(context, api.key, error)
            return self._answer_now(self._failure(api, context, error), size_bytes, counts, came_at, now)
        if context.meter is not None:
            context.meter.pause()
            if isinstance(result, CoroutineType):
                result = Timed(result, context.meter)
        done_at = self._monotonic()
        reply = _Reply(size_bytes, counts, came_at, now, done_at, context)
        self._replies.append(reply)
        self._gated = not api.overlaps
        if isinstance(result, Promise):
            self._work.add(result)
            result.then(lambda answer: self._complete(result, reply, api, answer))
        else:
            task = self._spawn(result)
            self._work.add(task)
            task.add_done_callback(partial(self._finish, reply, api))
        return done_at

    def _finish(self, reply: _Reply, api: Api, task: asyncio.Task[Any]) -> None:
        """Take the result of an async handler; cancelled only when the connection is gone."""
        if not task.cancelled():
            error = task.exception()
            self._complete(task, reply, api, task.result() if error is None else error)

    def _complete(self, work: asyncio.Task[Any] | Promise[Any], reply: _Reply, api: Api, outcome: Any) -> None:
        """Put an answer, or what an exception is answered with, in its place."""
        self._work.discard(work)
        if self._transport is None:
            return
        reply.ready_at = self._monotonic()
        context = reply.context
        assert context is not None
        if context.notes is not None:
            auditing.tell(context, api.key, outcome)
        if context.meter is not None:
            context.meter.resume()
        try:
            try:
                if isinstance(outcome, BaseException):
                    raise outcome
                buffers = self._encode(api, context, outcome)
            except Exception as error:  # noqa: BLE001 - the dispatch boundary
                buffers = self._failure(api, context, error)
        except ProtocolError as refusal:
            self._refuse(refusal)
            return
        self._keep_ready(reply, buffers)
        if context.reserved_bytes:
            self._reserved_bytes -= context.reserved_bytes
            self._answers.give_back(context.reserved_bytes)
        if not api.overlaps:
            self._gated = False
        if not self._sending:
            # One flush of the disk makes many answers ready at once: they leave together.
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send_ready)

    def _encode(self, api: Api, context: RequestContext, response: Any) -> Buffers:
        self.served += 1
        meter = context.meter
        if not api.counts_errors:
            self._counts.note_errors(context.header.api_key, response)
        if meter is None:
            return api.answered(context, response)
        buffers = api.answered(context, self._charge_answer(meter, response))
        meter.finish()
        return buffers

    def _failure(self, api: Api, context: RequestContext, error: Exception) -> Buffers:
        """The answer to a request whose handler raised, or ProtocolError where the API has no place for one."""
        header = context.header
        throttle_ms = self._charge_failure(context)
        if isinstance(error, ProtocolError):
            raise error
        if isinstance(error, ApiError | StorageError):
            code, message = code_of(error), text_of(error) or ""
        else:
            logger.error("%s v%d failed", api.key.name, header.api_version, exc_info=error)
            code, message = ErrorCode.UNKNOWN_SERVER_ERROR, "the broker failed to handle the request; see its log"
        self._counts[header.api_key].failed(code)
        buffers = api.encode_error(header.correlation_id, header.api_version, code, message, throttle_ms=throttle_ms)
        if buffers is None:
            raise ProtocolError(f"{api.key.name} failed and its response has no place for {code.name}")
        return buffers

    # --- replies ------------------------------------------------------------------------------------------------------

    def _answer_now(
        self, buffers: Buffers, size_bytes: int, counts: ApiCounts, came_at: float, begun_at: float
    ) -> float:
        """Answer a request whose handler did not have to wait; returns when that was done."""
        if self._replies:
            done_at = self._monotonic()
            reply = _Reply(size_bytes, counts, came_at, begun_at, done_at)
            self._replies.append(reply)
            self._keep_ready(reply, buffers)
            return done_at
        answer_bytes = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
        self._write(buffers)
        if self._write_paused:
            self._unsent_bytes += answer_bytes
            self._answers.take(answer_bytes)
        self._budget.end_serving(size_bytes)
        done_at = self._monotonic()
        counts.answered_at_once(begun_at - came_at, done_at - begun_at, size_bytes, answer_bytes)
        return done_at

    def _keep_ready(self, reply: _Reply, buffers: Buffers) -> None:
        reply.buffers = buffers
        answer_bytes = reply.told_bytes = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
        if answer_bytes > WRITE_BUFFER_HIGH_BYTES or self._replies[0] is not reply:
            reply.answer_bytes = answer_bytes
            self._ready_bytes += answer_bytes
            self._answers.take(answer_bytes)

    def _send_ready(self) -> None:
        self._sending = False
        replies = self._replies
        together: list[bytes | bytearray | memoryview] = []
        sent: list[_Reply] = []
        answer_bytes = 0
        while replies and (buffers := replies[0].buffers) is not None:
            reply = replies.popleft()
            sent.append(reply)
            together += buffers
            answer_bytes += reply.answer_bytes
            self._budget.end_serving(reply.size_bytes)
        self._write(together)
        now = self._monotonic()
        if sent:
            count_answered(sent, now)
        if answer_bytes:
            self._ready_bytes -= answer_bytes
            if self._write_paused:
                self._unsent_bytes += answer_bytes
            else:
                self._taken_bytes += answer_bytes
                self._answers.give_back(answer_bytes)
        if self._draining and not replies:
            self.close()
        else:
            self._advance(now)

    def _write(self, buffers: Buffers) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or not buffers:
            return
        if len(buffers) == 1:
            transport.write(buffers[0])
        else:
            transport.writelines(buffers)
        if not self._write_paused and transport.get_write_buffer_size():
            # The kernel did not take all of it, and the transport keeps the whole until it has: have it pause now.
            transport.set_write_buffer_limits(0, 0)

    # --- login --------------------------------------------------------------------------------------------------------

    @property
    def _is_narrow(self) -> bool:
        """Nobody is logged in, or not any more."""
        return self._apis is not self._all_apis

    def narrow(self, apis: Mapping[int, Api], max_frame_bytes: int, read_header: HeaderReader) -> None:
        """Serve nothing but `apis`, which may be none of the registry's, in frames that `read_header` understands."""
        self._apis = apis
        self._read_header = read_header
        self._reader.max_bytes = max_frame_bytes
        self._max_waiting = MAX_WAITING_BEFORE_LOGIN

    def open(self, session: Session) -> None:
        """Serve everything, to whoever the session says."""
        self._listener_counts.logged_in(session.mechanism)
        if self._services.audit is not None:
            self._services.audit.logged_in(self._caller(session), again=bool(self._session.mechanism))
        self._session = session
        self._apis = self._all_apis
        self._read_header = read_request_header
        self._reader.max_bytes = self._max_frame_bytes
        self._max_waiting = MAX_WAITING_REQUESTS

    def login_failed(self, user: str, mechanism: str, reason: str) -> None:
        self._listener_counts.login_failed(mechanism)
        if self._services.audit is not None:
            said = "" if mechanism == CERTIFICATE else mechanism
            session = Session(f"User:{user}" if user else ANONYMOUS.principal, said)
            self._services.audit.login_failed(self._caller(session), reason, again=bool(self._session.mechanism))

    def _caller(self, session: Session) -> Caller:
        return Caller(session.principal, self._host, self._listener, self.port, session.mechanism, session.token_id)

    def served_apis(self, *keys: ApiKey) -> Mapping[int, Api]:
        return {key: self._all_apis[key] for key in keys}

    # --- ending -------------------------------------------------------------------------------------------------------

    def _turn_away(self, reason: str) -> None:
        """Close on a peer that may not even begin."""
        self._refusals.tell(
            self._host, "connection from %s refused: %s", self._host, printable(reason), level=logging.WARNING
        )
        self.abort()

    def _refuse(self, error: ProtocolError) -> None:
        """Close on a peer that does not speak the protocol; answers to what it asked before have a moment to leave."""
        self._listener_counts.protocol_errors += 1
        self._refusals.tell(self._host, "closing the connection from %s: %s", self._host, printable(str(error)))
        if self._replies:
            self._services.clock.call_later(REFUSAL_GRACE_S, self.close)
        self.drain()

    def close(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def drain(self) -> None:
        """Begin nothing new; close once what has begun is answered."""
        self._draining = True
        self._hold_reading()
        if not self._replies:
            self.close()


def _has_left(transport: asyncio.Transport) -> bool:
    """Whether the peer has closed its end, and nothing of what it sent is left; False where the kernel does not say."""
    peer_socket = transport.get_extra_info("socket")
    if peer_socket is None or peer_socket.family not in (socket.AF_INET, socket.AF_INET6) or _TCP_INFO is None:
        return False
    try:
        (state,) = peer_socket.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)
        unread = int.from_bytes(fcntl.ioctl(peer_socket.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:
        return False
    undelivered = transport.get_extra_info(UNDELIVERED_BYTES, 0)
    return bool(state != _ESTABLISHED and unread + undelivered <= _GOODBYE_BYTES)


def printable(text: str) -> str:
    """Text from a peer, safe for one line of a log."""
    return "".join(char if char.isprintable() else "?" for char in text[:300])
