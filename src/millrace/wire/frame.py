"""What surrounds a message: the four-byte size, the request header and the response header.

What a request means, and which versions are served, is not here. Invariants: a frame gets memory for
what has arrived, a few times over at most, and on a declared size alone only a little (`FrameReader`); a frame handed
out is never written to again.
"""

from __future__ import annotations

import struct
import threading
from typing import Final, NamedTuple, TypeVar

from millrace.errors import ProtocolError
from millrace.wire.codec import decode, encode_to
from millrace.wire.keys import FLEXIBLE_FROM, ApiKey
from millrace.wire.primitives import Buffer, skip_tags
from millrace.wire.schema import Request, Response

R = TypeVar("R", bound=Response)

_SIZE: Final = struct.Struct(">i")
_SIZE_AND_CORRELATION: Final = struct.Struct(">ii")
_REQUEST_START: Final = struct.Struct(">hhih")
_FRAMED_REQUEST_START: Final = struct.Struct(">ihhih")
_NEVER: Final = 0x8000

SHARED_BYTES: Final = 256 * 1024
"""As much as one read may bring."""
FIRST_ROOM_BYTES: Final = 4096
"""For the beginning of a frame that may be large."""
TRUSTED_BYTES: Final = 1024 * 1024
"""At most so much memory is given on a peer's word."""


class FrameReader:
    """Cuts a stream of bytes into frames: whoever has a socket reads into `room()` and says `took()` how much.

    Frames that arrive whole are copied out of memory that all readers of a thread share. One that arrives in part gets
    memory of its own, and the rest of it is read to its place: large frames are hardly copied. That memory grows with
    what has arrived, whatever size was declared; only a peer that has sent a large frame is believed about the next.
    """

    __slots__ = ("_expected_bytes", "_filled_bytes", "_frame", "_shared", "_trusted_bytes", "failure", "max_bytes")

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_bytes = max_frame_bytes
        self._shared = _of_thread.memory
        self._frame: bytearray | None = None
        """The frame under way, with its size prefix; None between frames."""
        self._filled_bytes = 0
        self._expected_bytes = 0
        self._trusted_bytes = FIRST_ROOM_BYTES
        self.failure: ProtocolError | None = None
        """Set once a size was negative or above the limit: the stream is lost from there on."""

    def __repr__(self) -> str:
        return f"FrameReader(pending={self._filled_bytes} of {self._expected_bytes or '?'} bytes)"

    @property
    def pending_bytes(self) -> int:
        """How much of an unfinished frame is held."""
        return self._filled_bytes

    def room(self) -> memoryview:
        """Where the next bytes of the stream belong, until they are taken; nobody else may read meanwhile."""
        if self._frame is not None:
            return memoryview(self._frame)[self._filled_bytes :]
        # After a large frame the next may be one, too: only its beginning has to be copied.
        return self._shared if self._trusted_bytes <= len(self._shared) else self._shared[:FIRST_ROOM_BYTES]

    def took(self, count: int) -> list[memoryview]:
        """So many bytes were read into `room`; the frames that they complete, without their size prefixes.

        Look at `failure` afterwards: frames before a bad size are good, and after it there are none.
        """
        frames: list[memoryview] = []
        if self.failure is None:
            try:
                if self._frame is None:
                    self._cut(count, frames)
                else:
                    self._fill(self._frame, count, frames)
            except ProtocolError as error:
                self.failure = error
                self._end_frame()
        return frames

    def _cut(self, count: int, frames: list[memoryview]) -> None:
        shared = self._shared
        pos = 0
        ends: list[int] = []
        try:
            while count - pos >= 4:
                stop = pos + self._frame_bytes(shared, pos)
                if stop > count:
                    self._expected_bytes = stop - pos
                    break
                ends.append(stop)
                pos = stop
        finally:
            if ends:
                whole = memoryview(bytes(shared[:pos]))
                start = 0
                for end in ends:
                    frames.append(whole[start + 4 : end])
                    start = end
        if pos < count:
            part = shared[pos:count]
            self._frame = bytearray(self._room_for(len(part)))
            self._frame[: len(part)] = part
            self._filled_bytes = len(part)

    def _fill(self, frame: bytearray, count: int, frames: list[memoryview]) -> None:
        self._filled_bytes = filled = self._filled_bytes + count
        if not self._expected_bytes:
            if filled < 4:
                return
            self._expected_bytes = self._frame_bytes(frame, 0)
        if filled == self._expected_bytes:
            frames.append(memoryview(frame).toreadonly()[4:])
            self._trusted_bytes = min(filled, TRUSTED_BYTES)
            self._end_frame()
        elif filled == len(frame):
            self._frame = bytearray(self._room_for(filled))
            self._frame[:filled] = frame

    def _room_for(self, arrived_bytes: int) -> int:
        """How much memory a frame gets of which so much has arrived."""
        if not self._expected_bytes:
            return 4  # its size first
        size_bytes = max(4 * arrived_bytes, self._trusted_bytes)
        # Not a little too small: the rest would move everything once more.
        return self._expected_bytes if self._expected_bytes <= size_bytes * 5 // 4 else size_bytes

    def _end_frame(self) -> None:
        self._frame = None
        self._filled_bytes = self._expected_bytes = 0

    def _frame_bytes(self, data: Buffer, pos: int) -> int:
        size: int = _SIZE.unpack_from(data, pos)[0]
        if not 0 <= size <= self.max_bytes:
            raise ProtocolError(f"a frame of {size} bytes, the limit is {self.max_bytes}")
        return size + 4


class _OfThread(threading.local):
    """What all readers of a thread share: between `room` and `took` none other gets its turn."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(SHARED_BYTES))


_of_thread = _OfThread()


class RequestHeader(NamedTuple):
    """What stands before every request; `api_key` may be a number that is no ApiKey."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None


def is_flexible(api_key: int, api_version: int) -> bool:
    """Whether bodies of this version use the compact encoding, and requests the header with tagged fields."""
    return api_version >= FLEXIBLE_FROM.get(api_key, _NEVER)


def read_request_header(frame: Buffer) -> tuple[RequestHeader, int]:
    """The header of a request frame and the position of the body.

    A version that is not known is read like the newest one, so that ApiVersions can be answered to clients newer than
    this broker. ProtocolError: the bytes are no header.
    """
    try:
        key, version, correlation_id, length = _REQUEST_START.unpack_from(frame)
        pos = 10
        client_id = None
        if length >= 0:
            stop = 10 + length
            if stop > len(frame):
                raise ProtocolError(f"a client id of {length} bytes where {len(frame) - 10} remain")
            client_id = str(frame[10:stop], "utf-8")
            pos = stop
        elif length != -1:
            raise ProtocolError(f"a client id of {length} bytes")
        if version >= FLEXIBLE_FROM.get(key, _NEVER):
            if frame[pos]:
                pos = skip_tags(frame, pos, len(frame))
            else:
                pos += 1
    except (struct.error, IndexError):
        raise ProtocolError("a request header ends too early") from None
    except UnicodeDecodeError:
        raise ProtocolError("a client id is not UTF-8") from None
    return RequestHeader(key, version, correlation_id, client_id), pos


def encode_request(header: RequestHeader, message: Request) -> bytes:
    """A whole request frame, size first."""
    client_id = None if header.client_id is None else header.client_id.encode()
    parts: list[Buffer] = [b"", client_id or b""]
    if is_flexible(header.api_key, header.api_version):
        parts.append(b"\0")
    encode_to(parts.append, message, header.api_version)
    parts[0] = _FRAMED_REQUEST_START.pack(
        10 + sum(map(len, parts)),
        header.api_key,
        header.api_version,
        header.correlation_id,
        -1 if client_id is None else len(client_id),
    )
    return b"".join(parts)


def response_header_version(api_key: int, api_version: int) -> int:
    """0 or 1. ApiVersions always has 0: its client does not know yet what the broker understands (KIP-511)."""
    return int(api_key != ApiKey.API_VERSIONS and is_flexible(api_key, api_version))


def encode_response(correlation_id: int, api_version: int, message: Response) -> bytes:
    """A whole response frame, size first."""
    return b"".join(encode_response_parts(correlation_id, api_version, message))


def encode_response_parts(correlation_id: int, api_version: int, message: Response) -> list[Buffer]:
    """A response frame as a list of buffers, record sets uncopied, for writers that can gather."""
    parts: list[Buffer] = [b""]
    if response_header_version(message.api_key, api_version):
        parts.append(b"\0")
    encode_to(parts.append, message, api_version)
    parts[0] = _SIZE_AND_CORRELATION.pack(4 + sum(map(len, parts)), correlation_id)
    return parts


def read_response_header(frame: Buffer, api_key: int, api_version: int) -> tuple[int, int]:
    """A response's correlation id and the position of its body."""
    try:
        correlation_id: int = _SIZE.unpack_from(frame)[0]
        pos = 4
        if response_header_version(api_key, api_version):
            pos = skip_tags(frame, pos, len(frame))
    except (struct.error, IndexError):
        raise ProtocolError("a response header ends too early") from None
    return correlation_id, pos


def decode_response(cls: type[R], api_version: int, frame: Buffer) -> tuple[int, R]:
    """The correlation id and the body of a response frame; ProtocolError also when bytes are left over."""
    correlation_id, pos = read_response_header(frame, cls.api_key, api_version)
    message, end = decode(cls, api_version, frame, pos)
    if end != len(frame):
        raise ProtocolError(f"{cls.__name__} v{api_version}: {len(frame) - end} bytes are left over")
    return correlation_id, message
