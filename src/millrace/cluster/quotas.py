"""Quotas as they are asked for and changed: which are meant, and what a request would change.

Pure. What quotas are for and which one counts is `security.quotas`. An address is a number: a host name, which Kafka
takes, is refused, for what it resolves to depends on who asks and when.

Invariants: those of `planning`.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import Plan
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import Change, QuotaChanged
from millrace.security.quotas import (
    CLIENT_ID,
    CLIENT_KEYS,
    CONNECTION_CREATION_RATE,
    CONSUMER_BYTE_RATE,
    IP,
    PRODUCER_BYTE_RATE,
    USER,
    QuotaEntity,
    quota_entity,
)

_KINDS: Final = frozenset({USER, CLIENT_ID, IP})
_WHOLE: Final = {
    PRODUCER_BYTE_RATE: 2.0**63,
    CONSUMER_BYTE_RATE: 2.0**63,
    CONNECTION_CREATION_RATE: 2.0**31,
}
"""Quotas that Kafka keeps as whole numbers, and what they are less than."""
_FRACTION: Final = 1e-6


@dataclass(frozen=True, slots=True)
class QuotaAlteration:
    """What should change for one entity: its parts as they were given, and a value or None (removed) for each key."""

    parts: tuple[tuple[str, str | None], ...]
    operations: tuple[tuple[str, float | None], ...]

    @property
    def entity(self) -> QuotaEntity:
        return quota_entity(dict(self.parts))


def plan_alter_quotas(image: ClusterImage, alterations: Sequence[QuotaAlteration]) -> Plan[list[ApiError | None]]:
    """Set and remove quotas; one error or None each, in order."""
    asked = Counter(alteration.entity for alteration in alterations)
    results: list[ApiError | None] = []
    changes: list[Change] = []
    for alteration in alterations:
        try:
            if asked[alteration.entity] > 1:
                raise _invalid("the request names this entity more than once")
            values = _changed(image, alteration)
        except ApiError as error:
            results.append(error)
            continue
        results.append(None)
        if values:
            changes.append(QuotaChanged(alteration.entity, values))
    return Plan(results, tuple(changes))


def _changed(image: ClusterImage, alteration: QuotaAlteration) -> tuple[tuple[str, float | None], ...]:
    keys = _keys_of(alteration.parts)
    current = image.quotas.get(alteration.entity) or {}
    seen: set[str] = set()
    values: list[tuple[str, float | None]] = []
    for key, value in alteration.operations:
        if key in seen:
            raise _invalid(f"{key[:100]} is given more than once")
        seen.add(key)
        if value is not None:
            _check_value(keys, key, value)
        if current.get(key) != value:
            values.append((key, value))
    return tuple(values)


def _keys_of(parts: tuple[tuple[str, str | None], ...]) -> tuple[str, ...]:
    """The quotas that an entity may have; raises for one that may not be."""
    kinds = [kind for kind, _ in parts]
    if not kinds:
        raise _invalid("the entity is empty")
    for kind, name in parts:
        if kind not in _KINDS:
            raise _invalid(f"there are no quotas of a {kind[:100]!r}")
        if name == "":
            raise _invalid(f"an empty {kind} is not supported")
    if len(set(kinds)) < len(kinds):
        raise _invalid("the entity has two parts of one kind")
    if IP not in kinds:
        return CLIENT_KEYS
    if len(kinds) > 1:
        raise _invalid("an address cannot be combined with a user or a client id")
    name = parts[0][1]
    if name is not None:
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise _invalid(f"{name[:100]!r} is not an IP address") from None
    return (CONNECTION_CREATION_RATE,)


def _check_value(keys: tuple[str, ...], key: str, value: float) -> None:
    if key not in keys:
        raise _invalid(f"{key[:100]!r} is not one of {', '.join(keys)}")
    if not (value > 0 and math.isfinite(value)):
        raise _invalid(f"{key} must be greater than 0")
    if key in _WHOLE:
        if value >= _WHOLE[key]:
            raise _invalid(f"{key} is too large")
        if value % 1 > _FRACTION:
            raise _invalid(f"{key} must be a whole number")


def _invalid(reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, reason)


class MatchType(IntEnum):
    """How a part of a filter matches; the numbers are the protocol's."""

    EXACT = 0
    DEFAULT = 1
    ANY = 2


@dataclass(frozen=True, slots=True)
class QuotaFilter:
    """Which entities are meant: (kind, match type, name) each. Strict: those that have no other parts."""

    components: tuple[tuple[str, int, str | None], ...] = ()
    strict: bool = False


def matching(
    quotas: Mapping[QuotaEntity, Mapping[str, float]], wanted: QuotaFilter
) -> Iterator[tuple[QuotaEntity, Mapping[str, float]]]:
    """The quotas that a filter means; ApiError for a filter that means nothing."""
    named, kinds = _understood(wanted)
    for entity, values in quotas.items():
        parts = dict(entity)
        if wanted.strict and len(parts) != len(named) + len(kinds):
            continue
        if kinds <= parts.keys() and all(kind in parts and parts[kind] == name for kind, name in named.items()):
            yield entity, values


def _understood(wanted: QuotaFilter) -> tuple[dict[str, str | None], set[str]]:
    """The kinds that must have a certain name, and those that may have any."""
    named: dict[str, str | None] = {}
    kinds: set[str] = set()
    for kind, match_type, name in wanted.components:
        if not kind:
            raise _invalid("a part of the filter has no kind")
        if kind in named or kind in kinds:
            raise _invalid(f"{kind[:100]!r} appears more than once in the filter")
        if kind not in _KINDS:
            raise ApiError(ErrorCode.UNSUPPORTED_VERSION, f"there are no quotas of a {kind[:100]!r}")
        if match_type not in tuple(MatchType):
            raise _invalid(f"there is no match type {match_type}")
        if (name is None) == (match_type == MatchType.EXACT):
            raise _invalid("a name belongs to the exact match, and to no other")
        if match_type == MatchType.ANY:
            kinds.add(kind)
        else:
            named[kind] = name
    given = named.keys() | kinds
    if IP in given and len(given) > 1:
        raise _invalid("an address cannot be combined with a user or a client id")
    return named, kinds
