"""Hand-tuned readers and writers of Produce and Fetch, the two messages of the hot path.

They read and write what the declared messages in `wire.messages` do, at every served version; tests hold the two
against each other. Record sets stay what they are: a memoryview into the request frame on the way in, a buffer that is
handed to the socket on the way out. A topic is named by its name, or from Fetch v13 and Produce v13 on by the 16 bytes
of its id, so that no UUID object is made per request.

Bounds: every length and count is checked against the bytes that remain, and all arrays of a request together hold at
most `MAX_REQUEST_ELEMENTS`; anything else is a ProtocolError.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from millrace.errors import ProtocolError
from millrace.wire.primitives import MAX_REQUEST_ELEMENTS

TopicKey = str | bytes
"""A topic as a request names it: its name, or the 16 bytes of its id."""

Buffer = bytes | bytearray | memoryview

PRODUCE_FLEXIBLE_FROM: Final = 9
PRODUCE_TOPIC_ID_FROM: Final = 13
FETCH_FLEXIBLE_FROM: Final = 12
FETCH_TOPIC_ID_FROM: Final = 13
MAX_TAGGED_FIELDS: Final = 64
ID_BYTES: Final = 16

_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_INT64: Final = struct.Struct(">q")
_ACKS_TIMEOUT: Final = struct.Struct(">hi")


class ProducePartition(NamedTuple):
    partition: int
    records: memoryview | None


@dataclass(slots=True)
class ProduceCall:
    """A decoded Produce request."""

    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: list[tuple[TopicKey, list[ProducePartition]]]


class LeaderHint(NamedTuple):
    """Where the client of a partition should have gone (KIP-951)."""

    leader_id: int
    leader_epoch: int
    host: str
    port: int
    rack: str | None = None


class ProduceResult(NamedTuple):
    """The answer for one partition of a Produce request."""

    partition: int
    error_code: int
    base_offset: int = -1
    log_append_time_ms: int = -1
    log_start_offset: int = -1
    error_message: str | None = None
    leader: LeaderHint | None = None
    record_errors: Sequence[tuple[int, str | None]] = ()
    """The records that the batch was refused for, by their place in it, each with its own words (KIP-467)."""


class ThrottledProduce(NamedTuple):
    """A Produce answer to a client that has to be quiet for a while."""

    topics: list[tuple[TopicKey, list[ProduceResult]]]
    throttle_time_ms: int


class FetchPartition(NamedTuple):
    """One partition of a Fetch request, in the order its fields have from v12 on."""

    partition: int
    current_leader_epoch: int
    fetch_offset: int
    last_fetched_epoch: int
    log_start_offset: int
    max_bytes: int


@dataclass(slots=True)
class FetchCall:
    """A decoded Fetch request."""

    replica_id: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation_level: int
    session_id: int
    session_epoch: int
    topics: list[tuple[TopicKey, list[FetchPartition]]]
    forgotten: list[tuple[TopicKey, list[int]]]
    rack_id: str
    replica_epoch: int = -1


class FetchResult(NamedTuple):
    """The answer for one partition of a Fetch request."""

    partition: int
    error_code: int
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    records: Buffer = b""
    preferred_read_replica: int = -1
    diverging: tuple[int, int] | None = None
    """To a follower: the epoch up to which the logs agree, and where it ends here."""
    leader: LeaderHint | None = None
    aborted: Sequence[tuple[int, int]] | None = None
    """For who reads committed records: producer id and first offset of the aborted transactions among them."""


# --- reading ----------------------------------------------------------------------------------------------------------


def _varint(buf: memoryview, pos: int, end: int) -> tuple[int, int]:
    """An unsigned varint of at most five bytes."""
    value = shift = 0
    while True:
        if pos >= end or shift > 28:
            raise ProtocolError("a varint runs past its bounds")
        byte = buf[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos
        shift += 7


def _skip_tags(buf: memoryview, pos: int, end: int) -> int:
    """Pass over a tagged-field section; none of these messages' tags matters to a client-facing broker."""
    count, pos = _varint(buf, pos, end)
    if count > MAX_TAGGED_FIELDS:
        raise ProtocolError(f"{count} tagged fields in one place")
    previous = -1
    for _ in range(count):
        tag, pos = _varint(buf, pos, end)
        if tag <= previous:
            raise ProtocolError("tagged fields out of order")
        previous = tag
        size, pos = _varint(buf, pos, end)
        pos += size
        if pos > end:
            raise ProtocolError("a tagged field runs past the end")
    return pos


def _text(buf: memoryview, pos: int, size: int, end: int) -> tuple[str, int]:
    stop = pos + size
    if stop > end:
        raise ProtocolError("a string runs past the end")
    try:
        return str(buf[pos:stop], "utf-8"), stop
    except UnicodeDecodeError:
        raise ProtocolError("a string is not UTF-8") from None


def _string(buf: memoryview, pos: int, end: int, *, flexible: bool) -> tuple[str | None, int]:
    if flexible:
        size, pos = _varint(buf, pos, end)
        size -= 1
    else:
        size = _INT16.unpack_from(buf, pos)[0]
        pos += 2
    if size < 0:
        if size != -1:
            raise ProtocolError(f"a string of length {size}")
        return None, pos
    return _text(buf, pos, size, end)


def _topic_key(buf: memoryview, pos: int, end: int, *, by_id: bool, flexible: bool) -> tuple[TopicKey, int]:
    if by_id:
        stop = pos + ID_BYTES
        if stop > end:
            raise ProtocolError("a topic id runs past the end")
        return bytes(buf[pos:stop]), stop
    name, pos = _string(buf, pos, end, flexible=flexible)
    if name is None:
        raise ProtocolError("a topic name is null")
    return name, pos


def _count(buf: memoryview, pos: int, end: int, *, flexible: bool, min_element_bytes: int) -> tuple[int, int]:
    if flexible:
        count, pos = _varint(buf, pos, end)
        count -= 1
    else:
        count = _INT32.unpack_from(buf, pos)[0]
        pos += 4
    if count < 0 or count * min_element_bytes > end - pos:
        raise ProtocolError(f"an array of {count} elements does not fit the {end - pos} bytes that remain")
    if count > MAX_REQUEST_ELEMENTS:
        raise _too_many()
    return count, pos


def _too_many() -> ProtocolError:
    return ProtocolError(f"a request of more than {MAX_REQUEST_ELEMENTS} elements")


def read_produce(version: int, buf: memoryview, pos: int) -> ProduceCall:
    """Decode a Produce request body, v3 to v13, that begins at `pos`; bytes behind it are ignored, as in Kafka."""
    try:
        return _read_produce(version, buf, pos)
    except (struct.error, IndexError):
        raise ProtocolError("a Produce request ends too early") from None


def _read_produce(version: int, buf: memoryview, pos: int) -> ProduceCall:
    end = len(buf)
    flexible = version >= PRODUCE_FLEXIBLE_FROM
    by_id = version >= PRODUCE_TOPIC_ID_FROM
    transactional_id, pos = _string(buf, pos, end, flexible=flexible)
    acks, timeout_ms = _ACKS_TIMEOUT.unpack_from(buf, pos)
    pos += 6
    topic_count, pos = _count(buf, pos, end, flexible=flexible, min_element_bytes=3)
    elements = topic_count
    topics: list[tuple[TopicKey, list[ProducePartition]]] = []
    for _ in range(topic_count):
        key, pos = _topic_key(buf, pos, end, by_id=by_id, flexible=flexible)
        partition_count, pos = _count(buf, pos, end, flexible=flexible, min_element_bytes=5)
        elements += partition_count
        if elements > MAX_REQUEST_ELEMENTS:
            raise _too_many()
        partitions: list[ProducePartition] = []
        for _ in range(partition_count):
            index = _INT32.unpack_from(buf, pos)[0]
            pos += 4
            if flexible:
                size, pos = _varint(buf, pos, end)
                size -= 1
            else:
                size = _INT32.unpack_from(buf, pos)[0]
                pos += 4
            if size >= 0:
                stop = pos + size
                if stop > end:
                    raise ProtocolError("a record set runs past the end of the request")
                partitions.append(ProducePartition(index, buf[pos:stop]))
                pos = stop
            elif size == -1:
                partitions.append(ProducePartition(index, None))
            else:
                raise ProtocolError(f"a record set of length {size}")
            if flexible:
                # An empty tag section, one zero byte, is all that clients send here.
                pos = pos + 1 if buf[pos] == 0 else _skip_tags(buf, pos, end)
        topics.append((key, partitions))
        if flexible:
            pos = _skip_tags(buf, pos, end)
    if flexible:
        pos = _skip_tags(buf, pos, end)
    return ProduceCall(transactional_id, acks, timeout_ms, topics)


# Partition layouts of a Fetch request; a version's missing fields are filled in with their defaults.
_FETCH_PARTITION_V4: Final = struct.Struct(">iqi")
_FETCH_PARTITION_V5: Final = struct.Struct(">iqqi")
_FETCH_PARTITION_V9: Final = struct.Struct(">iiqqi")
_FETCH_PARTITION_V12: Final = struct.Struct(">iiqiqi")
_FETCH_HEAD: Final = struct.Struct(">iiib")
_SESSION: Final = struct.Struct(">ii")


def read_fetch(version: int, buf: memoryview, pos: int) -> FetchCall:
    """Decode a Fetch request body, v4 to v18, that begins at `pos`; bytes behind it are ignored, as in Kafka."""
    try:
        return _read_fetch(version, buf, pos)
    except (struct.error, IndexError):
        raise ProtocolError("a Fetch request ends too early") from None


def _read_fetch(version: int, buf: memoryview, pos: int) -> FetchCall:
    end = len(buf)
    flexible = version >= FETCH_FLEXIBLE_FROM
    by_id = version >= FETCH_TOPIC_ID_FROM
    replica_id = -1
    if version <= 14:
        replica_id = _INT32.unpack_from(buf, pos)[0]
        pos += 4
    max_wait_ms, min_bytes, max_bytes, isolation_level = _FETCH_HEAD.unpack_from(buf, pos)
    pos += 13
    session_id, session_epoch = 0, -1
    if version >= 7:
        session_id, session_epoch = _SESSION.unpack_from(buf, pos)
        pos += 8
    topic_count, pos = _count(buf, pos, end, flexible=flexible, min_element_bytes=3)
    elements = topic_count
    topics: list[tuple[TopicKey, list[FetchPartition]]] = []
    for _ in range(topic_count):
        key, pos = _topic_key(buf, pos, end, by_id=by_id, flexible=flexible)
        partitions, pos = _read_fetch_partitions(version, buf, pos, end)
        topics.append((key, partitions))
        elements += len(partitions)
        if elements > MAX_REQUEST_ELEMENTS:
            raise _too_many()
        if flexible:
            pos = _skip_tags(buf, pos, end)
    forgotten: list[tuple[TopicKey, list[int]]] = []
    if version >= 7:
        forgotten_count, pos = _count(buf, pos, end, flexible=flexible, min_element_bytes=3)
        for _ in range(forgotten_count):
            key, pos = _topic_key(buf, pos, end, by_id=by_id, flexible=flexible)
            count, pos = _count(buf, pos, end, flexible=flexible, min_element_bytes=4)
            elements += 1 + count
            if elements > MAX_REQUEST_ELEMENTS:
                raise _too_many()
            indexes = list(struct.unpack_from(f">{count}i", buf, pos))
            pos += 4 * count
            forgotten.append((key, indexes))
            if flexible:
                pos = _skip_tags(buf, pos, end)
    rack_id: str | None = ""
    if version >= 11:
        rack_id, pos = _string(buf, pos, end, flexible=flexible)
        if rack_id is None:
            raise ProtocolError("the rack id is null")
    replica_epoch = -1
    if flexible:
        replica_id, replica_epoch, pos = _read_fetch_tags(version, buf, pos, end, replica_id)
    return FetchCall(
        replica_id, max_wait_ms, min_bytes, max_bytes, isolation_level, session_id, session_epoch, topics, forgotten,
        rack_id or "", replica_epoch,
    )  # fmt: skip


def _read_fetch_partitions(version: int, buf: memoryview, pos: int, end: int) -> tuple[list[FetchPartition], int]:
    flexible = version >= FETCH_FLEXIBLE_FROM
    partitions: list[FetchPartition] = []
    if flexible:
        size = _FETCH_PARTITION_V12.size
        count, pos = _count(buf, pos, end, flexible=True, min_element_bytes=size + 1)
        for _ in range(count):
            partitions.append(FetchPartition._make(_FETCH_PARTITION_V12.unpack_from(buf, pos)))
            pos += size
            pos = pos + 1 if buf[pos] == 0 else _skip_tags(buf, pos, end)
        return partitions, pos
    layout = _FETCH_PARTITION_V9 if version >= 9 else _FETCH_PARTITION_V5 if version >= 5 else _FETCH_PARTITION_V4
    count, pos = _count(buf, pos, end, flexible=False, min_element_bytes=layout.size)
    for _ in range(count):
        values = layout.unpack_from(buf, pos)
        pos += layout.size
        if version >= 9:
            index, leader_epoch, offset, start, max_bytes = values
        elif version >= 5:
            (index, offset, start, max_bytes), leader_epoch = values, -1
        else:
            (index, offset, max_bytes), start, leader_epoch = values, -1, -1
        partitions.append(FetchPartition(index, leader_epoch, offset, -1, start, max_bytes))
    return partitions, pos


_REPLICA_STATE_TAG: Final = 1
_REPLICA_STATE: Final = struct.Struct(">iq")


def _read_fetch_tags(version: int, buf: memoryview, pos: int, end: int, replica_id: int) -> tuple[int, int, int]:
    """The request's own tags: from v15 on the replica's id and epoch travel there (KIP-903)."""
    if buf[pos] == 0:
        return replica_id, -1, pos + 1
    start = pos
    replica_epoch = -1
    count, pos = _varint(buf, pos, end)
    for _ in range(min(count, MAX_TAGGED_FIELDS)):
        tag, pos = _varint(buf, pos, end)
        size, pos = _varint(buf, pos, end)
        if tag == _REPLICA_STATE_TAG and version >= 15:
            if size < _REPLICA_STATE.size or pos + size > end:
                raise ProtocolError("a replica state runs past its bounds")
            replica_id, replica_epoch = _REPLICA_STATE.unpack_from(buf, pos)
        pos += size
    return replica_id, replica_epoch, _skip_tags(buf, start, end)


# --- writing ----------------------------------------------------------------------------------------------------------


def _put_varint(out: bytearray, value: int) -> None:
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _put_count(out: bytearray, count: int, *, flexible: bool) -> None:
    if flexible:
        _put_varint(out, count + 1)
    else:
        out += _INT32.pack(count)


def _put_topic(out: bytearray, key: TopicKey, *, flexible: bool) -> None:
    if isinstance(key, bytes):
        out += key
        return
    raw = key.encode()
    if flexible:
        _put_varint(out, len(raw) + 1)
    else:
        out += _INT16.pack(len(raw))
    out += raw


LEADER_HINTS_FROM_PRODUCE: Final = 10
ENDPOINTS_FROM_FETCH: Final = 16
_DIVERGING: Final = struct.Struct(">BBiqx")
_CURRENT_LEADER: Final = struct.Struct(">BBiix")


def _diverging_tag(diverging: tuple[int, int]) -> bytes:
    return _DIVERGING.pack(0, _DIVERGING.size - 2, *diverging)


def _leader_tag(tag: int, hint: LeaderHint) -> bytes:
    return _CURRENT_LEADER.pack(tag, _CURRENT_LEADER.size - 2, hint.leader_id, hint.leader_epoch)


def _endpoints_tag(hints: list[LeaderHint]) -> bytes:
    """Tag 0 of a whole response: where the leaders are that its partitions name."""
    brokers = {hint.leader_id: hint for hint in hints}
    body = bytearray()
    _put_varint(body, len(brokers) + 1)
    for hint in brokers.values():
        body += _INT32.pack(hint.leader_id)
        _put_nullable_text(body, hint.host, flexible=True)
        body += _INT32.pack(hint.port)
        _put_nullable_text(body, hint.rack, flexible=True)
        body.append(0)
    tag = bytearray(b"\x01\x00")
    _put_varint(tag, len(body))
    return bytes(tag + body)


_FRAME: Final = struct.Struct(">ii")
_PRODUCE_PARTITION: Final = struct.Struct(">ihqqq")
_PRODUCE_PARTITION_V3: Final = struct.Struct(">ihqq")


def write_produce(
    correlation_id: int, version: int, topics: list[tuple[TopicKey, list[ProduceResult]]] | ThrottledProduce
) -> tuple[bytearray]:
    """A whole Produce response frame, v3 to v13."""
    throttle_time_ms = 0
    if isinstance(topics, ThrottledProduce):
        topics, throttle_time_ms = topics
    flexible = version >= PRODUCE_FLEXIBLE_FROM
    out = bytearray(8)
    if flexible:
        out.append(0)
    hints: list[LeaderHint] = []
    _put_count(out, len(topics), flexible=flexible)
    for key, partitions in topics:
        _put_topic(out, key, flexible=flexible)
        _put_count(out, len(partitions), flexible=flexible)
        for result in partitions:
            index, error_code, base_offset, append_time_ms, start_offset, message, hint, record_errors = result
            if version >= 5:
                out += _PRODUCE_PARTITION.pack(index, error_code, base_offset, append_time_ms, start_offset)
            else:
                out += _PRODUCE_PARTITION_V3.pack(index, error_code, base_offset, append_time_ms)
            if version >= 8:
                _put_count(out, len(record_errors), flexible=flexible)
                for record_error in record_errors:
                    _put_record_error(out, *record_error, flexible=flexible)
                _put_nullable_text(out, message, flexible=flexible)
            if flexible:
                if hint is not None and version >= LEADER_HINTS_FROM_PRODUCE:
                    hints.append(hint)
                    out.append(1)
                    out += _leader_tag(0, hint)
                else:
                    out.append(0)
        if flexible:
            out.append(0)
    out += _INT32.pack(throttle_time_ms)
    if flexible:
        out += _endpoints_tag(hints) if hints else b"\0"
    _FRAME.pack_into(out, 0, len(out) - 4, correlation_id)
    return (out,)


def _put_record_error(out: bytearray, place: int, text: str | None, *, flexible: bool) -> None:
    out += _INT32.pack(place)
    _put_nullable_text(out, text, flexible=flexible)
    if flexible:
        out.append(0)


def _put_nullable_text(out: bytearray, text: str | None, *, flexible: bool) -> None:
    if text is None:
        out += b"\0" if flexible else b"\xff\xff"
        return
    raw = text.encode()
    if flexible:
        _put_varint(out, len(raw) + 1)
    else:
        out += _INT16.pack(len(raw))
    out += raw


_FETCH_RESULT: Final = struct.Struct(">ihqqq")
_FETCH_RESULT_V4: Final = struct.Struct(">ihqq")
_ABORTED: Final = struct.Struct(">qq")


@dataclass(slots=True)
class FetchReply:
    """A Fetch response before it is bytes."""

    error_code: int
    session_id: int
    topics: list[tuple[TopicKey, list[FetchResult]]]
    throttle_time_ms: int = 0


def _put_aborted(out: bytearray, aborted: Sequence[tuple[int, int]] | None, *, flexible: bool) -> None:
    if aborted is None:
        out += b"\0" if flexible else b"\xff\xff\xff\xff"
        return
    _put_count(out, len(aborted), flexible=flexible)
    for transaction in aborted:
        out += _ABORTED.pack(*transaction)
        if flexible:
            out.append(0)


def write_fetch(correlation_id: int, version: int, reply: FetchReply) -> list[Buffer]:
    """A whole Fetch response frame, v4 to v18, as buffers for one gathering write; record sets are not copied."""
    flexible = version >= FETCH_FLEXIBLE_FROM
    out = head = bytearray(8)
    buffers: list[Buffer] = [out]
    records_bytes = 0
    if flexible:
        out.append(0)
    out += _INT32.pack(reply.throttle_time_ms)
    if version >= 7:
        out += struct.pack(">hi", reply.error_code, reply.session_id)
    hints: list[LeaderHint] = []
    _put_count(out, len(reply.topics), flexible=flexible)
    for key, partitions in reply.topics:
        _put_topic(out, key, flexible=flexible)
        _put_count(out, len(partitions), flexible=flexible)
        for result in partitions:
            (index, error_code, high_watermark, stable_offset, start_offset, records, replica, diverging, hint,
             aborted) = result  # fmt: skip
            if version >= 5:
                out += _FETCH_RESULT.pack(index, error_code, high_watermark, stable_offset, start_offset)
            else:
                out += _FETCH_RESULT_V4.pack(index, error_code, high_watermark, stable_offset)
            _put_aborted(out, aborted, flexible=flexible)
            if version >= 11:
                out += b"\xff\xff\xff\xff" if replica < 0 else _INT32.pack(replica)
            size = len(records)
            if flexible:
                _put_varint(out, size + 1)
            else:
                out += _INT32.pack(size)
            if size:
                buffers.append(records)
                records_bytes += size
                out = bytearray()
                buffers.append(out)
            if not flexible:
                continue
            if diverging is None and hint is None:
                out.append(0)
                continue
            out.append((diverging is not None) + (hint is not None))
            if diverging is not None:
                out += _diverging_tag(diverging)
            if hint is not None:
                out += _leader_tag(1, hint)
                hints.append(hint)
        if flexible:
            out.append(0)
    if flexible:
        out += _endpoints_tag(hints) if hints and version >= ENDPOINTS_FROM_FETCH else b"\0"
    own_bytes = sum(len(buffer) for buffer in buffers[::2])
    _FRAME.pack_into(head, 0, own_bytes + records_bytes - 4, correlation_id)
    return buffers
