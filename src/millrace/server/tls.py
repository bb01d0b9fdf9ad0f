"""TLS between a socket and a connection: what the socket's transport sees as its protocol, and the connection as its
transport.

Why not the loop's own: that one takes its context once for all, encrypts a whole answer before the kernel has taken the
first byte of it, does not say what the peer has not read, counts nobody who is still shaking hands, and closes a failed
handshake without the alert that tells the peer why. Here a connection begins with the newest context; an answer is
encrypted in pieces, each when the kernel has taken the one before, so that what is held is what was handed over and one
piece more; and handshakes take turns, a few in one turn of the loop, because they are costly and anybody may begin one.

Bytes go through OpenSSL's memory buffers, which never shrink: `PIECE_BYTES` bounds what each connection keeps of them.

Not all that a peer sends is for the connection above: with records that carry nothing (new keys, another handshake)
it has OpenSSL compute and answer, for a few bytes each and before any login. So records are counted, and handed to
OpenSSL a few at a time (`RECORDS_AT_ONCE`); who sends more empty ones than its data explain is closed
(`MAX_EMPTY_RECORDS`). That bounds what TLS answers to a peer that does not read, too.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, cast

from millrace.clock import Clock, Timer
from millrace.server.counting import ListenerCounts
from millrace.server.flow import Admission
from millrace.server.refusals import Refusals

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 64 * 1024
PIECES_PER_TURN: Final = 16
"""What one connection may encrypt before the others get their turn."""
RECORDS_AT_ONCE: Final = 64
MAX_EMPTY_RECORDS: Final = 64
DATA_PER_EMPTY_BYTES: Final = 1024 * 1024
"""For each of these, either way, one more record may be empty: a client changes its keys after many gigabytes, or
millions of records."""
HANDSHAKE_TIMEOUT_S: Final = 10.0
HANDSHAKES_PER_TURN: Final = 2
RECORD_HEADER_BYTES: Final = 5
UNDELIVERED_BYTES: Final = "undelivered_bytes"
"""What `get_extra_info` calls that which has arrived and was not wanted yet."""
HANDSHAKE_RECORD: Final = 0x16
"""The first byte of whoever speaks TLS."""


class HandshakeLine:
    """Steps of handshakes that wait for their turn. Owner: the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = False

    def __repr__(self) -> str:
        return f"HandshakeLine({len(self._waiting)} waiting)"

    def join(self, step: Callable[[], None]) -> None:
        self._waiting.append(step)
        if not self._running:
            self._running = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        try:
            for _ in range(min(HANDSHAKES_PER_TURN, len(self._waiting))):
                self._waiting.popleft()()
        finally:  # whatever became of one, the others have their turn
            self._running = bool(self._waiting)
            if self._running:
                asyncio.get_running_loop().call_soon(self._run)


class RecordCounter:
    """Where the records of a TLS stream end; each begins with its kind, a version, and its size in two bytes."""

    __slots__ = ("_header", "_left_bytes")

    def __init__(self) -> None:
        self._header = b""
        """As much as has arrived of the header of the next record."""
        self._left_bytes = 0
        """Of the record whose header is known."""

    def __repr__(self) -> str:
        return f"RecordCounter({self._left_bytes} bytes left)"

    def take(self, data: memoryview, most: int) -> tuple[int, int]:
        """How many bytes of `data` to go on with, so that at most so many records end in them, and how many do."""
        pos, ended, size = 0, 0, len(data)
        while pos < size and ended < most:
            if not self._left_bytes:
                if not self._header and pos + RECORD_HEADER_BYTES < size:
                    self._left_bytes = data[pos + 3] << 8 | data[pos + 4]
                    pos += RECORD_HEADER_BYTES
                else:
                    part = data[pos : pos + RECORD_HEADER_BYTES - len(self._header)]
                    pos += len(part)
                    self._header += part
                    if len(self._header) < RECORD_HEADER_BYTES:
                        break
                    self._left_bytes = int.from_bytes(self._header[3:])
                    self._header = b""
            stop = pos + self._left_bytes
            if stop <= size:
                self._left_bytes = 0
                ended += 1
                pos = stop
            else:
                self._left_bytes = stop - size
                pos = size
        return pos, ended


class _OfThread(threading.local):
    """Where encrypted bytes arrive: between `get_buffer` and `buffer_updated` no other connection gets its turn."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(PIECE_BYTES))


_of_thread = _OfThread()


class TlsTransport(asyncio.BufferedProtocol, asyncio.Transport):
    """One accepted socket that speaks TLS. `connect` makes the protocol above it once the handshake is done."""

    def __init__(
        self,
        *,
        context: Callable[[], ssl.SSLContext],
        connect: Callable[[], asyncio.BufferedProtocol],
        limits: Admission,
        line: HandshakeLine,
        clock: Clock,
        refusals: Refusals,
        counts: ListenerCounts,
        on_handshake_over: Callable[[TlsTransport], None],
        on_refused: Callable[[str, str], object] = lambda _host, _reason: None,
    ) -> None:
        """`on_handshake_over` is told once when the handshake is over, well or not; `on_refused` who failed and why."""
        super().__init__()
        self._context = context
        self._connect = connect
        self._limits = limits
        self._line = line
        self._clock = clock
        self._refusals = refusals
        self._counts = counts
        self._on_handshake_over = on_handshake_over
        self._on_refused = on_refused
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._records = RecordCounter()
        self._unfed = b""
        """Has arrived, and waits for its turn or for the protocol above to want it."""
        self._empty_records = -MAX_EMPTY_RECORDS
        """Without data; above 0 there were too many."""
        self._data_bytes = 0
        """Since the last that was granted."""
        self._tls: ssl.SSLObject | None = None
        self._socket: asyncio.Transport | None = None
        self._above: asyncio.BufferedProtocol | None = None
        self._host = ""
        self._admitted = False
        self._timer: Timer | None = None
        self._in_line = False
        self._reading = True
        """Whether the protocol above wants bytes."""
        self._closing = False
        self._backlog: deque[memoryview | bytes | bytearray] = deque()
        """Not encrypted yet."""
        self._backlog_bytes = 0
        self._stuck = False
        """The kernel has not taken the last piece."""
        self._yielded = False
        self._above_paused = False
        self._high_bytes = PIECE_BYTES
        self._low_bytes = 0

    def __repr__(self) -> str:
        state = "closing" if self._closing else "open" if self._above is not None else "handshake"
        return f"TlsTransport({self._host}, {state}, {self._backlog_bytes} bytes to send)"

    # --- as the socket's protocol -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self._host = str(peer[0]) if isinstance(peer, tuple) and peer else "local"
        refusal = self._limits.admit(self._host)
        if refusal:
            self._counts.refused_limit += 1
            self._refusals.tell(
                self._host, "connection from %s refused: %s", self._host, refusal, level=logging.WARNING
            )
            self._socket.abort()
            return
        self._admitted = True
        self._socket.set_write_buffer_limits(PIECE_BYTES, 0)
        self._timer = self._clock.call_later(HANDSHAKE_TIMEOUT_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._end_handshake()
        self._socket = None
        self._backlog.clear()
        self._backlog_bytes = 0
        self._unfed = b""
        if self._admitted:
            self._limits.release(self._host)
        if self._above is not None:
            self._above.connection_lost(exc)
            self._above = None

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return _of_thread.memory

    def buffer_updated(self, nbytes: int) -> None:
        if self._closing:
            return
        received = _of_thread.memory[:nbytes]
        if self._tls is None:
            if received[0] != HANDSHAKE_RECORD:
                # Not even an alert: who speaks Kafka's protocol would take it for the size of an answer.
                self._fail("it does not speak TLS")
                return
            self._tls = self._context().wrap_bio(self._incoming, self._outgoing, server_side=True)
        if self._above is not None and not self._unfed:
            self._take_in(received)
            return
        self._unfed += received
        if self._above is None:
            self._join_line()

    def eof_received(self) -> bool:
        """Frames say how long they are: an end without TLS's own goodbye cuts nothing off unnoticed."""
        self.close()
        return bool(self._backlog)

    def pause_writing(self) -> None:
        self._stuck = True

    def resume_writing(self) -> None:
        self._stuck = False
        if self._socket is not None and not self._socket.is_closing():
            self._socket.set_write_buffer_limits(PIECE_BYTES, 0)
        self._send()

    def _on_turn(self, step: Callable[[], None]) -> None:
        """What is called by the loop and not by the socket, which would end a connection that fails."""
        try:
            step()
        except Exception:
            logger.exception("the connection from %s failed", self._host)
            self.abort()

    # --- handshake ----------------------------------------------------------------------------------------------------

    def _join_line(self) -> None:
        if not self._in_line:
            self._in_line = True
            self._line.join(partial(self._on_turn, self._shake_hands))
            assert self._socket is not None
            self._socket.pause_reading()

    def _shake_hands(self) -> None:
        self._in_line = False
        if self._closing or self._socket is None or self._socket.is_closing():
            return
        assert self._tls is not None
        taken, _ = self._records.take(memoryview(self._unfed), RECORDS_AT_ONCE)
        self._incoming.write(self._unfed[:taken])
        self._unfed = self._unfed[taken:]
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            if self._unfed:
                self._join_line()
            else:
                self._socket.resume_reading()
            return
        except ssl.SSLError as error:
            self._flush()  # the alert
            self._on_refused(self._host, _reason(error))
            self._fail(_reason(error))
            return
        self._flush()
        self._end_handshake()
        self._above = self._connect()
        self._above.connection_made(self)
        if not self._closing:
            if self._reading:
                self._socket.resume_reading()
            self._receive_rest()

    def _end_handshake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_handshake_over(self)

    def _give_up(self) -> None:
        self._timer = None
        self._tell_failure("handshake", f"it took longer than {HANDSHAKE_TIMEOUT_S:.0f} s")
        self.abort()

    def _fail(self, reason: str) -> None:
        """End a connection that cannot go on; what is to be said has been handed to the socket."""
        self._tell_failure("handshake" if self._above is None else "connection", reason)
        self._closing = True
        if self._socket is not None:
            self._socket.close() if self._above is None else self._socket.abort()

    def _tell_failure(self, what: str, reason: str) -> None:
        if self._above is None:
            self._counts.refused_tls += 1
        self._refusals.tell(self._host, "TLS %s with %s failed: %s", what, self._host, reason)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _take_in(self, arrived: memoryview) -> None:
        """Decrypt what has arrived, a few records at a time, and keep the rest where it is not wanted."""
        while arrived and self._reading and not self._closing:
            taken, records = self._records.take(arrived, RECORDS_AT_ONCE)
            self._incoming.write(arrived[:taken])
            arrived = arrived[taken:]
            self._empty_records += records
            self._receive()
            if self._empty_records > 0:
                self._check_records()
        self._unfed = b"" if self._closing else bytes(arrived)

    def _check_records(self) -> None:
        """Those that are not wanted yet may carry something."""
        if self._reading and not self._closing:
            self._fail("its records carry nothing")

    def _receive(self) -> None:
        """Hand up what OpenSSL has been given, for as long as it is wanted."""
        tls, incoming = self._tls, self._incoming
        assert tls is not None
        while self._reading and not self._closing and self._above is not None:
            room = cast(memoryview, self._above.get_buffer(-1))
            size, filled = len(room), 0
            ended = False
            pending = tls.pending()
            try:
                while filled < size:
                    if not pending and not incoming.pending:
                        break  # cheaper than to be told by an exception
                    count = tls.read(size - filled, room[filled:] if filled else room)
                    if not count:
                        ended = True
                        break
                    filled += cast(int, count)
                    pending = tls.pending()
                    if not pending:
                        self._empty_records -= 1  # that one was not
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                self._flush()
                self._fail(_reason(error))
                return
            if filled:
                self._count_data(filled)
                self._above.buffer_updated(filled)
            if ended:
                self.close()
                return
            if filled < size:
                break
        if self._outgoing.pending and not self._closing:
            self._flush()

    def _count_data(self, size_bytes: int) -> None:
        self._data_bytes += size_bytes
        if self._data_bytes >= DATA_PER_EMPTY_BYTES:
            granted, self._data_bytes = divmod(self._data_bytes, DATA_PER_EMPTY_BYTES)
            self._empty_records = max(self._empty_records - granted, -MAX_EMPTY_RECORDS)

    def _receive_rest(self) -> None:
        if self._socket is not None:
            self._receive()
            self._take_in(memoryview(self._unfed))

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Encrypt and hand over until the kernel is full or the turn is over."""
        tls, socket = self._tls, self._socket
        if socket is None or tls is None or socket.is_closing():
            return
        pieces = 0
        while self._backlog and not (self._stuck or self._yielded):
            self._count_data(tls.write(self._piece()))
            self._flush()
            if socket.is_closing():
                return
            if socket.get_write_buffer_size():
                # Have it say when the kernel has taken all of it, which it does only where it has paused.
                socket.set_write_buffer_limits(0, 0)
            pieces += 1
            if pieces == PIECES_PER_TURN and self._backlog:
                self._yielded = True
                asyncio.get_running_loop().call_soon(self._on_turn, self._go_on)
        self._tell_above()
        if self._closing and not self._backlog:
            self._say_goodbye()

    def _go_on(self) -> None:
        self._yielded = False
        self._send()

    def _piece(self) -> memoryview | bytes | bytearray:
        """The next bytes to encrypt, as one record or several full ones: small buffers are joined, large ones cut."""
        backlog = self._backlog
        first = backlog.popleft()
        if len(first) > PIECE_BYTES:
            view = memoryview(first)
            backlog.appendleft(view[PIECE_BYTES:])
            first = view[:PIECE_BYTES]
        elif backlog and len(first) + len(backlog[0]) <= PIECE_BYTES:
            together, size = [first], len(first)
            while backlog and size + len(backlog[0]) <= PIECE_BYTES:
                size += len(backlog[0])
                together.append(backlog.popleft())
            first = b"".join(together)
        self._backlog_bytes -= len(first)
        return first

    def _flush(self) -> None:
        if self._outgoing.pending and self._socket is not None and not self._socket.is_closing():
            self._socket.write(self._outgoing.read())

    def _tell_above(self) -> None:
        if self._above is None:
            return
        size = self.get_write_buffer_size()
        if not self._above_paused and size > self._high_bytes:
            self._above_paused = True
            self._above.pause_writing()
        elif self._above_paused and size <= self._low_bytes:
            self._above_paused = False
            self._above.resume_writing()

    def _say_goodbye(self) -> None:
        self._closing = True
        socket = self._socket
        if socket is None or socket.is_closing():
            return
        if self._tls is not None and self._above is not None:
            try:
                self._tls.unwrap()
            except ssl.SSLError:
                pass  # the peer has not said goodbye yet; nobody waits for it
            self._flush()
        socket.close()

    # --- as the connection's transport --------------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._tls
        if name == UNDELIVERED_BYTES:
            return len(self._unfed) + self._incoming.pending + (0 if self._tls is None else self._tls.pending())
        return default if self._socket is None else self._socket.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._closing or self._socket is None or self._socket.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        self._closing = True
        assert self._socket is not None
        self._socket.pause_reading()
        if not self._backlog:
            self._say_goodbye()

    def abort(self) -> None:
        self._closing = True
        if self._socket is not None:
            self._socket.abort()

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False
        if self._socket is not None:
            self._socket.pause_reading()

    def resume_reading(self) -> None:
        if self._reading or self.is_closing():
            return
        self._reading = True
        assert self._socket is not None
        self._socket.resume_reading()
        if self._unfed or self._incoming.pending or (self._tls is not None and self._tls.pending()):
            asyncio.get_running_loop().call_soon(self._on_turn, self._receive_rest)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = PIECE_BYTES if high is None else high
        self._low_bytes = self._high_bytes // 4 if low is None else low
        if self._above is not None and not self._above_paused and self.get_write_buffer_size() > self._high_bytes:
            self._above_paused = True
            self._above.pause_writing()

    def get_write_buffer_size(self) -> int:
        """What was handed over and the kernel has not taken; of the piece that it is at, encrypted bytes."""
        return self._backlog_bytes + (0 if self._socket is None else self._socket.get_write_buffer_size())

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_bytes, self._high_bytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        if self.is_closing():
            return
        for data in list_of_data:
            if data:
                self._backlog.append(data)
                self._backlog_bytes += len(data)
        self._send()

    def can_write_eof(self) -> bool:
        return False


def _reason(error: ssl.SSLError) -> str:
    """OpenSSL's reason in words."""
    verify = getattr(error, "verify_message", "")
    return str(verify or (error.reason or "no reason given").lower().replace("_", " "))
