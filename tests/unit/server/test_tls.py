"""TLS between a fake socket and a fake connection, with OpenSSL's own client at the other end."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import ssl
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from millrace.clock import ManualClock
from millrace.server.counting import ListenerCounts
from millrace.server.flow import ConnectionLimits
from millrace.server.refusals import LINES_PER_HOST, SPAN_S, Refusals
from millrace.server.tls import (
    DATA_PER_EMPTY_BYTES,
    HANDSHAKE_TIMEOUT_S,
    HANDSHAKES_PER_TURN,
    MAX_EMPTY_RECORDS,
    PIECE_BYTES,
    PIECES_PER_TURN,
    RECORD_HEADER_BYTES,
    RECORDS_AT_ONCE,
    HandshakeLine,
    RecordCounter,
    TlsTransport,
)
from support.certificates import Pki
from support.transports import FakeTransport

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


class Above(asyncio.BufferedProtocol):
    """Stands where a connection stands."""

    def __init__(self, room_bytes: int) -> None:
        self._room = memoryview(bytearray(room_bytes))
        self.transport: asyncio.Transport | None = None
        self.received = bytearray()
        self.events: list[str] = []
        self.answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.events.append("made")

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self._room[:nbytes]

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.events.append("lost")


class Rig:
    """One transport under test, its socket, and a client that speaks TLS through memory."""

    def __init__(self, pki: Pki, *, limit: int = 10, room_bytes: int = 8192) -> None:
        self.clock = ManualClock()
        self.limits = ConnectionLimits(lambda: limit, lambda: limit)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(pki.server)
        self.line = HandshakeLine()
        self.refusals = Refusals(self.clock)
        self.above = Above(room_bytes)
        self.handshakes_over: list[TlsTransport] = []
        self.transport = TlsTransport(
            context=lambda: self.context,
            connect=lambda: self.above,
            limits=self.limits,
            line=self.line,
            clock=self.clock,
            refusals=self.refusals,
            counts=ListenerCounts(),
            on_handshake_over=self.handshakes_over.append,
        )
        self.socket = FakeTransport()
        self.socket.protocol = self.transport
        self.transport.connection_made(cast(Any, self.socket))
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = pki.context().wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")

    def arrive(self, data: bytes) -> None:
        """Bytes on the socket, in pieces as large as the transport has room."""
        while data:
            buffer = self.transport.get_buffer(-1)
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            self.transport.buffer_updated(count)
            data = data[count:]

    def exchange(self) -> None:
        """What the client has to say to the broker, and the other way round."""
        self.arrive(self._outgoing.read())
        sent, self.socket.written = bytes(self.socket.written), bytearray()
        self._incoming.write(sent)

    async def shake_hands(self) -> None:
        for _ in range(4):
            try:
                self.client.do_handshake()
            except ssl.SSLWantReadError:
                pass
            self.exchange()
            await run_ready()

    def receive(self) -> bytes:
        """All that the broker has sent and the client can read."""
        self.exchange()
        data = bytearray()
        try:
            while chunk := self.client.read(MIB):
                data += chunk
        except ssl.SSLWantReadError:
            pass
        return bytes(data)

    def send(self, data: bytes) -> None:
        self.client.write(data)
        self.exchange()


async def run_ready() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.fixture
def rig(pki: Pki) -> Rig:
    return Rig(pki)


async def opened(rig: Rig) -> Rig:
    await rig.shake_hands()
    assert rig.above.events == ["made"]
    return rig


async def test_bytes_go_both_ways(rig: Rig) -> None:
    await opened(rig)
    assert rig.handshakes_over == [rig.transport]
    rig.send(b"question")
    assert rig.above.received == b"question"
    rig.transport.writelines([b"an", b"", memoryview(b"swer")])
    assert rig.receive() == b"answer"
    assert rig.transport.get_extra_info("ssl_object").version() == "TLSv1.3"
    assert rig.transport.get_extra_info("peername") == ("10.0.0.1", 4711)


@pytest.mark.parametrize("room_bytes", [1, 1000, 16_384, MIB])
async def test_any_amount_fits_any_room(pki: Pki, room_bytes: int) -> None:
    rig = await opened(Rig(pki, room_bytes=room_bytes))
    data = bytes(range(256)) * 700
    for cut in (data[:10], data[10:40_000], data[40_000:]):
        rig.send(cut)
    assert rig.above.received == data


async def test_byte_by_byte(rig: Rig) -> None:
    await opened(rig)
    rig.client.write(b"slowly")
    for byte in rig._outgoing.read():
        rig.arrive(bytes([byte]))
    assert rig.above.received == b"slowly"


async def test_what_came_with_the_last_handshake_message_is_not_lost(rig: Rig) -> None:
    for _ in range(2):
        try:
            rig.client.do_handshake()
        except ssl.SSLWantReadError:
            rig.exchange()
            await run_ready()
            rig.exchange()
    rig.client.write(b"at once")
    rig.exchange()
    await run_ready()
    assert rig.above.received == b"at once"


# --- handshakes -------------------------------------------------------------------------------------------------------


def test_who_fails_all_the_time_does_not_fill_the_log(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig(pki)
    rig.transport.connection_lost(None)
    for _ in range(1000):
        again = TlsTransport(
            context=lambda: rig.context,
            connect=lambda: rig.above,
            limits=rig.limits,
            line=rig.line,
            clock=rig.clock,
            refusals=rig.refusals,
            counts=ListenerCounts(),
            on_handshake_over=rig.handshakes_over.append,
        )
        again.connection_made(cast(Any, FakeTransport()))
        again.get_buffer(-1)[:1] = b"\0"
        again.buffer_updated(1)
        again.connection_lost(None)
    rig.clock.advance(SPAN_S)
    *lines, rest = [record.getMessage() for record in caplog.records]
    assert lines == ["TLS handshake with 10.0.0.1 failed: it does not speak TLS"] * LINES_PER_HOST
    assert rest.startswith(f"{1000 - LINES_PER_HOST} more")


@pytest.mark.parametrize("data", [b"\0\0\0\x1a\0\x12\0\0", b"GET / HTTP/1.1\r\n", b"\x80\x2e\x01"])
def test_who_does_not_speak_tls_is_closed_without_a_word(rig: Rig, data: bytes) -> None:
    rig.arrive(data)
    assert rig.socket.closed
    assert rig.socket.written == b""


async def test_a_failed_handshake_ends_with_an_alert(rig: Rig) -> None:
    rig.arrive(b"\x16\x03\x01\x00\x04nope")
    await run_ready()
    assert rig.socket.closed
    assert rig.socket.written[:1] == b"\x15"
    assert rig.above.events == []


async def test_a_handshake_has_a_time_limit(rig: Rig) -> None:
    rig.arrive(b"\x16\x03")
    await run_ready()
    rig.clock.advance(HANDSHAKE_TIMEOUT_S - 0.01)
    assert not rig.socket.closed
    rig.clock.advance(0.02)
    assert rig.socket.aborted


async def test_the_time_limit_ends_with_the_handshake(rig: Rig) -> None:
    await opened(rig)
    rig.clock.advance(10 * HANDSHAKE_TIMEOUT_S)
    assert not rig.socket.closed


async def test_a_handshake_counts_as_a_connection(pki: Pki) -> None:
    rig = Rig(pki, limit=1)
    assert rig.limits.count == 1
    other = FakeTransport()
    late = TlsTransport(
        context=lambda: rig.context,
        connect=lambda: rig.above,
        limits=rig.limits,
        line=rig.line,
        clock=rig.clock,
        refusals=rig.refusals,
        counts=ListenerCounts(),
        on_handshake_over=rig.handshakes_over.append,
    )
    late.connection_made(cast(Any, other))
    assert other.aborted
    late.connection_lost(None)
    assert rig.limits.count == 1
    rig.transport.connection_lost(None)
    assert rig.limits.count == 0
    assert rig.handshakes_over == [late, rig.transport]
    assert rig.above.events == []


async def test_handshakes_take_turns() -> None:
    line = HandshakeLine()
    done: list[int] = []
    for number in range(3 * HANDSHAKES_PER_TURN):
        line.join(lambda number=number: done.append(number))  # type: ignore[misc]
    turns = []
    while len(done) < 3 * HANDSHAKES_PER_TURN:
        await asyncio.sleep(0)
        turns.append(len(done))
    assert turns == [HANDSHAKES_PER_TURN, 2 * HANDSHAKES_PER_TURN, 3 * HANDSHAKES_PER_TURN]
    assert done == sorted(done)


async def test_a_connection_that_fails_ends_alone(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    """Neither those behind it in the line wait for ever, nor does it stay as it is."""
    rig, behind = Rig(pki), Rig(pki)

    def fail(transport: asyncio.BaseTransport) -> None:
        raise RuntimeError("something that nobody thought of")

    rig.above.connection_made = fail  # type: ignore[method-assign]
    await rig.shake_hands()
    assert rig.socket.aborted
    assert "nobody thought of" in caplog.text
    behind.transport._line = rig.line
    await opened(behind)


async def test_a_step_that_fails_does_not_stop_the_line() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    line = HandshakeLine()
    done: list[str] = []
    line.join(lambda: done[0])  # type: ignore[arg-type,return-value]
    for name in ("second", "third", "fourth"):
        line.join(partial(done.append, name))
    await run_ready()
    assert done == ["second", "third", "fourth"]
    assert isinstance(told[0]["exception"], IndexError)
    line.join(partial(done.append, "later"))
    await run_ready()
    assert done[-1] == "later"


async def test_nothing_is_read_from_whoever_waits_for_its_turn(rig: Rig) -> None:
    try:
        rig.client.do_handshake()
    except ssl.SSLWantReadError:
        pass
    rig.exchange()
    assert not rig.socket.reading
    await run_ready()
    assert rig.socket.reading


async def test_a_connection_that_is_lost_in_line(rig: Rig) -> None:
    rig.arrive(b"\x16\x03")
    rig.transport.connection_lost(None)
    await run_ready()
    assert rig.above.events == []


async def test_a_connection_begins_with_the_newest_context(pki: Pki, tmp_path: Path) -> None:
    rig = Rig(pki)
    pki.authority.issue("renewed", hosts=["localhost"]).write(tmp_path / "renewed.pem")
    rig.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    rig.context.load_cert_chain(tmp_path / "renewed.pem")
    await opened(rig)
    certificate = rig.client.getpeercert()
    assert certificate is not None
    assert certificate["subject"] == ((("commonName", "renewed"),),)


# --- back-pressure ----------------------------------------------------------------------------------------------------


async def test_an_answer_is_encrypted_as_the_peer_takes_it(rig: Rig) -> None:
    await opened(rig)
    answer = bytes(range(256)) * 4096
    rig.transport.set_write_buffer_limits(PIECE_BYTES, 0)
    rig.socket.peer_reads = False
    rig.transport.write(answer)
    assert len(rig.socket.written) < PIECE_BYTES + 1024
    assert rig.transport.get_write_buffer_size() >= len(answer)
    assert rig.above.events == ["made", "pause"]
    received = bytearray()
    for _ in range(len(answer) // PIECE_BYTES - 1):
        received += rig.receive()
        rig.socket.let_peer_read()
        rig.socket.peer_reads = False
        # `let_peer_read` wrote the next piece, which this peer took.
    rig.socket.let_peer_read()
    received += rig.receive()
    assert received == answer
    assert rig.transport.get_write_buffer_size() == 0
    assert rig.above.events == ["made", "pause", "resume"]


async def test_one_connection_does_not_keep_the_loop(rig: Rig) -> None:
    await opened(rig)
    answer = bytes(3 * PIECES_PER_TURN * PIECE_BYTES)
    rig.transport.write(answer)
    assert rig.transport.get_write_buffer_size() == len(answer) - PIECES_PER_TURN * PIECE_BYTES
    more = b"and more"
    rig.transport.write(more)
    await run_ready()
    assert rig.receive() == answer + more


async def test_small_buffers_leave_together(rig: Rig) -> None:
    await opened(rig)
    writes = rig.socket.writes
    rig.transport.writelines([b"x" * 100] * 50)
    assert rig.socket.writes == writes + 1
    rig.exchange()
    assert len(rig.client.read(MIB)) == 5000  # one record


async def test_limits_of_zero_pause_at_once(rig: Rig) -> None:
    """How a connection has the transport say when everything has left."""
    await opened(rig)
    rig.socket.peer_reads = False
    rig.transport.write(b"stuck")
    assert rig.above.events == ["made"]
    rig.transport.set_write_buffer_limits(0, 0)
    assert rig.above.events == ["made", "pause"]
    rig.socket.let_peer_read()
    assert rig.above.events == ["made", "pause", "resume"]


async def test_a_connection_that_does_not_want_to_read(rig: Rig) -> None:
    await opened(rig)
    rig.transport.pause_reading()
    assert not rig.socket.reading
    rig.send(b"held back")  # had been read from the socket already
    assert rig.above.received == b""
    rig.transport.resume_reading()
    assert rig.socket.reading
    assert rig.above.received == b""  # not inside the call
    await run_ready()
    assert rig.above.received == b"held back"


class Renegotiating:
    """A peer that speaks TLS 1.2 by hand, once OpenSSL has shaken hands for it: to send what OpenSSL would not."""

    def __init__(self, rig: Rig, pki: Pki, tmp_path: Path) -> None:
        self._rig = rig
        self._secrets = tmp_path / "secrets"
        rig.context.options |= ssl.OP_NO_RENEGOTIATION
        context = pki.context()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("ECDHE-ECDSA-AES256-GCM-SHA384")
        context.keylog_filename = str(self._secrets)
        rig.client = context.wrap_bio(rig._incoming, rig._outgoing, server_hostname="localhost")
        self._number = 1  # the last message of the handshake was the first that was encrypted

    async def shake_hands(self) -> None:
        with pytest.raises(ssl.SSLWantReadError):
            self._rig.client.do_handshake()
        self._rig.arrive(self._rig._outgoing.read())
        await run_ready()
        server_random = bytes(self._rig.socket.written[11:43])
        await opened(self._rig)
        (line,) = (each for each in self._secrets.read_text().splitlines() if each.startswith("CLIENT_RANDOM"))
        client_random, master = map(bytes.fromhex, line.split()[1:])
        keys = self._expanded(master, b"key expansion" + server_random + client_random)
        self._cipher, self._salt = AESGCM(keys[:32]), keys[64:68]

    @staticmethod
    def _expanded(secret: bytes, seed: bytes) -> bytes:
        """RFC 5246, section 5; enough for two keys of 32 bytes and two salts."""
        chained, keys = seed, b""
        for _ in range(2):
            chained = hmac.digest(secret, chained, "sha384")
            keys += hmac.digest(secret, chained + seed, "sha384")
        return keys

    def ask(self, count: int) -> None:
        """Begin a handshake so many times, each with as few bytes as have an answer."""
        self._rig.arrive(b"".join(self._sealed(b"\x16", b"\x01\0\0\0") for _ in range(count)))

    def send(self, data: bytes) -> None:
        size = 16 * 1024
        for start in range(0, len(data), size):
            self._rig.arrive(self._sealed(b"\x17", data[start : start + size]))

    def _sealed(self, kind: bytes, data: bytes) -> bytes:
        number = self._number.to_bytes(8)
        self._number += 1
        start = kind + b"\x03\x03"
        sealed = number + self._cipher.encrypt(self._salt + number, data, number + start + len(data).to_bytes(2))
        return start + len(sealed).to_bytes(2) + sealed


ANSWER_BYTES = 31


async def test_records_that_carry_nothing_are_few(rig: Rig, pki: Pki, tmp_path: Path) -> None:
    peer = Renegotiating(rig, pki, tmp_path)
    await peer.shake_hands()
    rig.socket.written.clear()
    for _ in range(MAX_EMPTY_RECORDS):
        peer.ask(1)
    assert len(rig.socket.written) == MAX_EMPTY_RECORDS * ANSWER_BYTES
    assert not rig.socket.closed
    peer.send(bytes(DATA_PER_EMPTY_BYTES))
    peer.ask(1)
    assert not rig.socket.closed
    assert rig.above.received == bytes(DATA_PER_EMPTY_BYTES)
    peer.ask(1)
    assert rig.socket.aborted


@pytest.mark.parametrize("held_back", [False, True])
async def test_a_flood_of_records_that_carry_nothing(rig: Rig, pki: Pki, tmp_path: Path, held_back: bool) -> None:
    """OpenSSL is not given all of it before anybody looks; nor when the connection did not want it at first."""
    peer = Renegotiating(rig, pki, tmp_path)
    await peer.shake_hands()
    rig.socket.written.clear()
    if held_back:
        rig.transport.pause_reading()
    peer.ask(1000)
    if held_back:
        assert rig.socket.written == b""
        rig.transport.resume_reading()
        await run_ready()
    assert rig.socket.aborted
    assert len(rig.socket.written) <= (MAX_EMPTY_RECORDS + RECORDS_AT_ONCE) * ANSWER_BYTES


@pytest.mark.parametrize("room_bytes", [1, 2, 8192])
async def test_small_records_are_not_empty(pki: Pki, room_bytes: int) -> None:
    """However many come at once, and however little of one is taken at a time."""
    rig = await opened(Rig(pki, room_bytes=room_bytes))
    data = b"abc" * 5 * RECORDS_AT_ONCE
    for size in (1, 3):
        for start in range(0, len(data), size):
            rig.client.write(data[start : start + size])
        rig.exchange()
    assert rig.above.received == 2 * data
    assert rig.transport._empty_records == -MAX_EMPTY_RECORDS


async def test_small_records_that_are_not_wanted_at_first(rig: Rig) -> None:
    await opened(rig)
    taken: list[int] = []

    def take(nbytes: int) -> None:
        rig.above.received += rig.above._room[:nbytes]
        taken.append(nbytes)
        rig.transport.pause_reading()

    rig.above.buffer_updated = take  # type: ignore[method-assign]
    data = bytes(range(256)) * 2
    for byte in data:
        rig.client.write(bytes([byte]))
    rig.exchange()
    assert taken == [RECORDS_AT_ONCE]
    while len(rig.above.received) < len(data):
        rig.transport.resume_reading()
        await run_ready()
    assert rig.above.received == data
    assert taken == [RECORDS_AT_ONCE] * (len(data) // RECORDS_AT_ONCE)


@given(st.lists(st.integers(0, 40), max_size=20), st.lists(st.integers(1, 60)), st.integers(1, 5))
def test_where_records_end(sizes: list[int], cuts: list[int], most: int) -> None:
    stream = b"".join(b"\x17\x03\x03" + size.to_bytes(2) + bytes(size) for size in sizes)
    ends = list(itertools.accumulate(RECORD_HEADER_BYTES + size for size in sizes))
    counter = RecordCounter()
    pos = found = 0
    for cut in [*cuts, len(stream)]:
        chunk = memoryview(stream)[pos : pos + cut]
        while chunk:
            taken, ended = counter.take(chunk, most)
            assert 0 < taken <= len(chunk)
            assert ended <= most
            pos, chunk, found = pos + taken, chunk[taken:], found + ended
            assert found == sum(end <= pos for end in ends)
            assert not chunk or ended == most
    assert pos == len(stream)


# --- ends -------------------------------------------------------------------------------------------------------------


async def test_a_close_sends_what_there_is_and_says_goodbye(rig: Rig) -> None:
    await opened(rig)
    rig.socket.peer_reads = False
    rig.transport.write(bytes(2 * PIECE_BYTES))
    rig.transport.close()
    rig.transport.write(b"too late")
    assert not rig.socket.closed
    rig.socket.let_peer_read()
    assert rig.socket.closed
    assert rig.receive() == bytes(2 * PIECE_BYTES)
    assert rig.client.read(1) == b""  # an end that is no cut


async def test_a_goodbye_closes(rig: Rig) -> None:
    await opened(rig)
    rig.client.write(b"last words")
    with pytest.raises(ssl.SSLWantReadError):
        rig.client.unwrap()
    rig.exchange()
    assert rig.above.received == b"last words"
    assert rig.socket.closed


@pytest.mark.parametrize("says_goodbye", [True, False])
async def test_who_has_no_more_to_say_still_gets_its_answer(rig: Rig, says_goodbye: bool) -> None:
    await opened(rig)
    rig.socket.peer_reads = False
    rig.transport.write(bytes(2 * PIECE_BYTES))
    if says_goodbye:
        with pytest.raises(ssl.SSLWantReadError):
            rig.client.unwrap()
        rig.exchange()
    else:
        assert rig.transport.eof_received(), "the socket would be closed"
    assert not rig.socket.closed
    rig.socket.let_peer_read()
    assert rig.socket.closed


async def test_garbage_after_the_handshake_closes(rig: Rig) -> None:
    await opened(rig)
    rig.arrive(b"\x17\x03\x03\x00\x20" + bytes(32))
    assert rig.socket.closed
    assert rig.above.received == b""


async def test_garbage_in_the_middle_of_an_answer(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The rest of it is not encrypted any more: OpenSSL would refuse to."""
    await opened(rig)
    rig.transport.write(bytes(2 * PIECES_PER_TURN * PIECE_BYTES))
    rig.arrive(b"\x17\x03\x03\x00\x20" + bytes(32))
    assert rig.socket.aborted
    await run_ready()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_lost_connection_is_told_once_and_forgotten(rig: Rig) -> None:
    await opened(rig)
    rig.transport.connection_lost(None)
    assert rig.above.events == ["made", "lost"]
    assert rig.limits.count == 0
    rig.transport.write(b"into the void")
    rig.transport.close()
    rig.transport.abort()
    rig.transport.resume_reading()
    await run_ready()
    assert rig.above.events == ["made", "lost"]


async def test_a_connection_that_refuses_its_peer(pki: Pki) -> None:
    rig = Rig(pki)

    def refuse(transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()

    rig.above.connection_made = refuse  # type: ignore[method-assign]
    await rig.shake_hands()
    assert rig.socket.aborted
