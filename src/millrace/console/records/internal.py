"""The records of the internal topics as values that JSON can show, by the coordinators' own readers. Pure.

What a coordinator writes is one statement in a key and a value, so that the value's view needs the key. A kind that is
not known (the next Kafka may write it) is shown by its number.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, NamedTuple
from uuid import UUID

from millrace.console.records.limits import MAX_DEPTH, Budget, Undecodable
from millrace.errors import MillraceError
from millrace.groups.records import read_record as read_group_record
from millrace.model import CONSUMER_OFFSETS_TOPIC, SHARE_STATE_TOPIC, STATE_TOPICS, TRANSACTION_STATE_TOPIC, encode_uuid
from millrace.queues.records import read_record as read_share_record
from millrace.transactions.records import read_record as read_transaction_record

_KIND: Final = struct.Struct(">h")
_NAMES: Final = frozenset({"group_id", "member_id", "topic", "partition", "pattern"})
"""The fields of a group's record that are its key."""


class Statement(NamedTuple):
    """What a record says; `value` is None where it takes back what was said of the key."""

    key: dict[str, Any]
    value: Any


def is_internal(topic: str) -> bool:
    """Whether records of this topic are read here."""
    return topic in STATE_TOPICS


def describe(topic: str, key: bytes | None, value: bytes | None) -> Statement:
    """What a record of an internal topic says; Undecodable."""
    if key is None or len(key) < _KIND.size:
        raise Undecodable("the record has no key that says what it is")
    try:
        statement = _described(topic, key, value)
    except (MillraceError, ValueError, struct.error, IndexError, RecursionError) as error:
        raise Undecodable(f"not a record of {topic}: {error}") from None
    kind: int = _KIND.unpack_from(key)[0]
    return statement or Statement({"kind": kind}, None if value is None else {"hex": value.hex()})


def _described(topic: str, key: bytes, value: bytes | None) -> Statement | None:
    budget = Budget()
    if topic == CONSUMER_OFFSETS_TOPIC:
        group = read_group_record(key, value, -1)
        if group is None:
            return None
        fields = {each.name: getattr(group, each.name) for each in dataclasses.fields(group)}
        named = {name: _plain(each, MAX_DEPTH, budget) for name, each in fields.items() if name in _NAMES}
        said = _plain(fields["value"], MAX_DEPTH, budget)
        if isinstance(said, dict):
            said.pop("record_offset", None)  # where a coordinator read it, which is not part of the record
        return Statement({"kind": type(group).__name__.removesuffix("Record"), **named}, said)
    if topic == TRANSACTION_STATE_TOPIC:
        transaction = read_transaction_record(key, value)
        if transaction is None:
            return None
        return Statement({"transactional_id": transaction[0]}, _plain(transaction[1], MAX_DEPTH, budget))
    if topic == SHARE_STATE_TOPIC:
        share = read_share_record(key, value)
        if share is None:
            return None
        return Statement(_plain(share[0], MAX_DEPTH, budget), _kept(share[1], budget))
    raise Undecodable(f"{topic} is no internal topic that is known here")


def _kept(said: Any, budget: Budget) -> Any:
    return None if said is None else {"kind": type(said).__name__, **_plain(said, MAX_DEPTH, budget)}


def _plain(value: Any, depth: int, budget: Budget) -> Any:
    """As JSON has it."""
    budget.take()
    if depth < 0:
        raise Undecodable("it is nested too deeply")
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, int):
        return value
    if isinstance(value, UUID):
        return encode_uuid(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"hex": bytes(value).hex()}
    if dataclasses.is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name), depth - 1, budget) for each in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(each, depth - 1, budget) for name, each in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(_plain(name, depth - 1, budget)): _plain(each, depth - 1, budget) for name, each in value.items()}
    if isinstance(value, (tuple, list, set, frozenset)):
        items = [_plain(each, depth - 1, budget) for each in value]
        return sorted(items, key=repr) if isinstance(value, (set, frozenset)) else items
    return str(value)
