"""What options take, and which of them exclude each other: an option is never ignored without a word."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any, Final

from millrace.cli.output import CommandError

COMPRESSIONS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
ISOLATIONS: Final = ("read-committed", "read-uncommitted")
TOP_SORTS: Final = ("rate", "bytes", "size", "lag", "name")
ACKS: Final = ("all", "1", "0")
_ACKS_NUMBER_OF_ALL: Final = "-1"

Given = tuple[str, object]
"""An option's name and its value; None and False stand for an option that was not given."""


def exclude(first: Given, second: Given, why: str) -> None:
    """Refuse two options that were both given."""
    if all(value is not None and value is not False for _, value in (first, second)):
        raise CommandError(f"{first[0]} and {second[0]} exclude each other: {why}", exit_code=2)


def at_most_one(options: Mapping[str, object], why: str) -> None:
    """Refuse more than one of these."""
    for first, second in combinations(options.items(), 2):
        exclude(first, second, why)


def reading_settings(isolation: str | None) -> dict[str, str]:
    """What a consumer sees of transactions; without a word the library's default, which is what was committed."""
    if isolation is None:
        return {}
    if isolation not in ISOLATIONS:
        raise CommandError(f"--isolation is {' or '.join(ISOLATIONS)}, not '{isolation}'", exit_code=2)
    return {"isolation.level": isolation.replace("-", "_")}


def sending_settings(acks: str, compression: str) -> dict[str, Any]:
    """How a producer sends: when a record counts as delivered, and in which codec."""
    if compression not in COMPRESSIONS:
        raise CommandError(f"--compression is none, gzip, snappy, lz4 or zstd, not '{compression}'", exit_code=2)
    if acks not in (*ACKS, _ACKS_NUMBER_OF_ALL):
        raise CommandError(f"--acks is all, 1 or 0, not '{acks}'", exit_code=2)
    return {"acks": acks, "compression.type": compression, "enable.idempotence": acks in {"all", _ACKS_NUMBER_OF_ALL}}
