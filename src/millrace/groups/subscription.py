"""The one thing a broker reads inside a consumer's metadata: which topics it subscribes to.

Member metadata belongs to the clients. For protocol type `consumer` it is a ConsumerProtocolSubscription, of which
every version begins like version 0: an int16 version, then an array of topic names. Only that prefix is read.
"""

from __future__ import annotations

import struct
from typing import Final

CONSUMER_PROTOCOL_TYPE: Final = "consumer"
_LENGTH_BYTES: Final = 2


def subscribed_topics(metadata: bytes) -> list[str] | None:
    """The topics of one subscription, or None where the bytes are not one."""
    try:
        version, count = struct.unpack_from(">hi", metadata, 0)
        position = 6
        # A name takes two bytes at the least, so a count that cannot fit is refused before anything is read.
        if version < 0 or count < 0 or count * _LENGTH_BYTES > len(metadata) - position:
            return None
        topics = []
        for _ in range(count):
            (length,) = struct.unpack_from(">h", metadata, position)
            position += _LENGTH_BYTES
            if length < 0 or position + length > len(metadata):
                return None
            topics.append(metadata[position : position + length].decode())
            position += length
    except (struct.error, UnicodeDecodeError):
        return None
    return topics
