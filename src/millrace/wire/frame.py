"""What surrounds a message: the four-byte size, the request header and the response header.

What a request means, and which versions are served, is not here. Invariants: a frame's declared size never allocates
memory, only bytes that have arrived do; a frame handed out is never written to again.
"""

from __future__ import annotations

import struct
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


class FrameReader:
    """Cuts a stream of bytes into frames.

    A frame that lies within one chunk is a view of that chunk. A frame spread over chunks is gathered in a buffer that
    grows as bytes arrive, whatever size was declared.
    """

    __slots__ = ("_expected_bytes", "_gathered", "failure", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        # The frame under way, with its size prefix; empty between frames.
        self._gathered = bytearray()
        self._expected_bytes = 0
        self.failure: ProtocolError | None = None
        """Set once a size was negative or above the limit: the stream is lost from there on."""

    def __repr__(self) -> str:
        return f"FrameReader(pending={len(self._gathered)} of {self._expected_bytes or '?'} bytes)"

    @property
    def pending_bytes(self) -> int:
        """How much of an unfinished frame is held."""
        return len(self._gathered)

    def feed(self, data: bytes) -> list[memoryview]:
        """Take the next bytes of the stream and return the frames they complete, without their size prefixes.

        Look at `failure` afterwards: frames before a bad size are good, and after it there are none.
        """
        frames: list[memoryview] = []
        if self.failure is None:
            try:
                self._cut(data, frames)
            except ProtocolError as error:
                self.failure = error
                self._gathered = bytearray()
        return frames

    def _cut(self, data: bytes, frames: list[memoryview]) -> None:
        pos = 0
        if self._gathered:
            pos = self._gather(data)
            if not self._expected_bytes or len(self._gathered) < self._expected_bytes:
                return
            frames.append(memoryview(self._gathered).toreadonly()[4:])
            self._gathered = bytearray()
            self._expected_bytes = 0
        end = len(data)
        view = memoryview(data)
        while end - pos >= 4:
            stop = pos + self._frame_bytes(data, pos)
            if stop > end:
                self._expected_bytes = stop - pos
                break
            frames.append(view[pos + 4 : stop])
            pos = stop
        if pos < end:
            self._gathered += view[pos:]

    def _gather(self, data: bytes) -> int:
        """Add to the frame under way what belongs to it; how many bytes that was."""
        gathered = self._gathered
        pos = 0
        if not self._expected_bytes:
            pos = min(4 - len(gathered), len(data))
            gathered += data[:pos]
            if len(gathered) < 4:
                return pos
            self._expected_bytes = self._frame_bytes(gathered, 0)
        wanted = self._expected_bytes - len(gathered)
        if pos == 0 and wanted >= len(data):
            gathered += data
            return len(data)
        gathered += memoryview(data)[pos : pos + wanted]
        return min(pos + wanted, len(data))

    def _frame_bytes(self, data: Buffer, pos: int) -> int:
        size: int = _SIZE.unpack_from(data, pos)[0]
        if not 0 <= size <= self.max_frame_bytes:
            raise ProtocolError(f"a frame of {size} bytes, the limit is {self.max_frame_bytes}")
        return size + 4


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
