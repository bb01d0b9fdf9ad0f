"""Messages to bytes and back: the two functions everybody calls.

Frames and headers are not here (`frame.py`). `decode` raises `ProtocolError` and nothing else, whatever the bytes are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeVar

from millrace.errors import ProtocolError
from millrace.wire import compiler
from millrace.wire.primitives import Buffer
from millrace.wire.schema import Struct

S = TypeVar("S", bound=Struct)


def encode(message: Struct, version: int) -> bytes:
    """The bytes of `message` at `version`.

    ValueError: a value does not fit its type, or a request sets a field that this version can neither carry nor drop.
    """
    parts: list[Buffer] = []
    encode_to(parts.append, message, version)
    return b"".join(parts)


def encode_to(append: Callable[[Buffer], object], message: Struct, version: int) -> None:
    """Like `encode`, but hands out the parts as they come; record sets are passed on as they are, not copied."""
    declaration = message.declaration
    encoder = declaration.encoders.get(version)
    if encoder is None:
        encoder = compiler.encoder(type(message), version)
        declaration.encoders[version] = encoder
    try:
        encoder(message, append)
    except (struct.error, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{type(message).__name__} v{version} cannot be encoded: {error}") from error


def decode(cls: type[S], version: int, buffer: Buffer, pos: int = 0) -> tuple[S, int]:
    """The message that starts at `pos`, and the position after it; whether bytes may follow is the caller's to say."""
    declaration = cls.declaration
    decoder = declaration.decoders.get(version)
    try:
        if decoder is None:
            decoder = decoder_of(cls, version)
        return decoder(buffer, pos, len(buffer))  # type: ignore[no-any-return]
    except ProtocolError as error:
        raise ProtocolError(f"{cls.__name__} v{version}: {error}") from None
    except (struct.error, IndexError):
        raise ProtocolError(f"{cls.__name__} v{version}: the bytes end too early") from None
    except UnicodeDecodeError:
        raise ProtocolError(f"{cls.__name__} v{version}: a string is not UTF-8") from None


def decoder_of(cls: type[Struct], version: int) -> Callable[..., Any]:
    """The compiled decoder of one version; ProtocolError where the version does not exist."""
    declaration = cls.declaration
    if declaration.valid is None:
        raise TypeError(f"{cls.__qualname__} has no versions of its own")
    if not declaration.valid.include(version):
        raise ProtocolError("no such version")
    decoder = declaration.decoders[version] = compiler.decoder(cls, version)
    return decoder
