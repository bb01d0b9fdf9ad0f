"""What a setting is: its kind, where it may change, the rule its values pass, and how a text becomes a value."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import lru_cache
from typing import Any, Final, TypeAlias

from millrace.errors import ConfigError
from millrace.model import invalid_topic_name_reason

Value: TypeAlias = "bool | int | float | str | tuple[str, ...] | None"
Check: TypeAlias = "Callable[[Any], str | None]"

INT_MAX: Final = 2**31 - 1
LONG_MAX: Final = 2**63 - 1


class Kind(IntEnum):
    """The type of a value; the number is the one DescribeConfigs sends."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7
    CLASS = 8
    PASSWORD = 9


class Scope(Enum):
    """What a setting belongs to."""

    BROKER = "broker"
    TOPIC = "topic"
    GROUP = "group"
    CLIENT_METRICS = "client metrics"


class Update(Enum):
    """Whether, and for whom, a setting may change while the broker runs."""

    READ_ONLY = "read-only"
    CLUSTER_WIDE = "cluster-wide"
    PER_BROKER = "per-broker"


class ConfigSource(IntEnum):
    """Where a value comes from; the number is the one DescribeConfigs sends."""

    UNKNOWN = 0
    DYNAMIC_TOPIC_CONFIG = 1
    DYNAMIC_BROKER_CONFIG = 2
    DYNAMIC_DEFAULT_BROKER_CONFIG = 3
    STATIC_BROKER_CONFIG = 4
    DEFAULT_CONFIG = 5
    DYNAMIC_BROKER_LOGGER_CONFIG = 6
    CLIENT_METRICS_CONFIG = 7
    GROUP_CONFIG = 8


@dataclass(frozen=True, slots=True)
class Synonym:
    """A broker setting that gives a topic or group setting its default, times `factor` (hours to milliseconds)."""

    name: str
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    kind: Kind
    default: Value
    doc: str
    scope: Scope
    check: Check | None = None
    update: Update = Update.READ_ONLY
    synonyms: tuple[Synonym, ...] = ()
    bounds: tuple[str, str] | None = None
    """Names of the broker settings between which a group's value must lie."""
    hidden: bool = False
    """Settable, but neither described nor documented: for tests."""

    @property
    def sensitive(self) -> bool:
        return self.kind is Kind.PASSWORD


@dataclass(frozen=True, slots=True)
class ConfigSynonym:
    """One place where a value was looked for and found."""

    name: str
    value: str | None
    source: ConfigSource


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """A setting as DescribeConfigs answers it; `value` is None where there is none or where it is a secret."""

    name: str
    value: str | None
    source: ConfigSource
    kind: Kind
    read_only: bool
    sensitive: bool
    synonyms: tuple[ConfigSynonym, ...]
    documentation: str


# --- rules ------------------------------------------------------------------------------------------------------------


def at_least(low: float) -> Check:
    return lambda value: None if value >= low else f"must be at least {low}"


def between(low: float, high: float) -> Check:
    return lambda value: None if low <= value <= high else f"must be between {low} and {high}"


def one_of(*allowed: str) -> Check:
    return lambda value: None if value in allowed else f"must be one of {', '.join(allowed)}"


def gzip_level(value: int) -> str | None:
    return None if value == -1 or 1 <= value <= 9 else "must be -1 or between 1 and 9"


def host_and_port(value: str) -> str | None:
    if not value:
        return None
    host, colon, port = value.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port, re.ASCII) or int(port) > 65535:
        return "must be HOST:PORT, or empty"
    if not re.fullmatch(r"\[[0-9A-Fa-f:.%]+\]|[^:/\[\]\s]*", host):
        return "must be HOST:PORT, an IPv6 address in brackets"
    return None


def known_authorizer(value: str) -> str | None:
    if not value or value.rpartition(".")[2] in ("StandardAuthorizer", "AclAuthorizer"):
        return None
    return "must be empty, or name Kafka's StandardAuthorizer or AclAuthorizer"


def unlimited_or_positive(value: int) -> str | None:
    return None if value == -1 or value >= 1 else "must be -1 (no limit) or at least 1"


def unique_items(*allowed: str, empty: bool = True) -> Check:
    def check(value: tuple[str, ...]) -> str | None:
        if not value and not empty:
            return "must not be empty"
        if len(set(value)) != len(value):
            return "must not name an entry twice"
        if any(not item for item in value):
            return "must not hold an empty entry"
        wrong = [item for item in value if allowed and item not in allowed]
        return f"must hold only {', '.join(allowed)}" if wrong else None

    return check


def throttled_replicas(value: tuple[str, ...]) -> str | None:
    if value == ("*",) or all(re.fullmatch(r"[0-9]+:[0-9]+", item) for item in value):
        return None
    return "must be '*' or a list of partition:broker pairs such as 0:101,1:102"


def group_protocols(value: tuple[str, ...]) -> str | None:
    problem = unique_items("classic", "consumer", "streams", "share", empty=False)(value)
    if problem is None and "classic" not in value:
        return "classic cannot be switched off"
    return problem


@lru_cache(maxsize=16)
def counts_by_address(text: str) -> Mapping[str, int]:
    """`address:count,...` as a mapping by the address as it is compared; ConfigError where it is something else."""
    counts = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        address, _, count = item.rpartition(":")
        try:
            known = ipaddress.ip_address(address.strip("[]"))
        except ValueError:
            raise ConfigError(f"{item[:100]} is not address:count; names of hosts are not looked up") from None
        if not re.fullmatch(r"[0-9]{1,10}", count, re.ASCII):
            raise ConfigError(f"{item[:100]} does not end in a whole number")
        mapped = known.ipv4_mapped if isinstance(known, ipaddress.IPv6Address) else None
        counts[str(mapped or known)] = int(count)
    return counts


def limits_of_addresses(value: str) -> str | None:
    try:
        counts_by_address(value)
    except ConfigError as error:
        return str(error)
    return None


def offset_reset(value: str) -> str | None:
    if value in {"latest", "earliest"} or re.fullmatch(r"by_duration:P(?=[0-9T])[0-9A-Z.]+", value):
        return None
    return "must be latest, earliest or by_duration:<ISO-8601 duration>"


def dead_letter_topic(value: str) -> str | None:
    if not value:
        return None
    if value.startswith("__"):
        return "an internal topic takes no dead letters"
    return invalid_topic_name_reason(value)


# --- values -----------------------------------------------------------------------------------------------------------

_INTEGER_RANGE: Final = {Kind.SHORT: 2**15, Kind.INT: 2**31, Kind.LONG: 2**63}


def parse_value(setting: Setting, text: str) -> Value:
    """The typed value of `text`; a ConfigError says what is wrong with it (and never repeats a secret)."""
    value = _parse(setting, text.strip())
    problem = setting.check(value) if setting.check is not None else None
    if problem is not None:
        raise ConfigError(f"{setting.name}={shown(setting, text)}: {problem}")
    return value


def _parse(setting: Setting, text: str) -> Value:
    kind = setting.kind
    if kind is Kind.BOOLEAN:
        lowered = text.lower()
        if lowered in {"true", "false"}:
            return lowered == "true"
        raise ConfigError(f"{setting.name}={shown(setting, text)}: expected true or false")
    if kind in _INTEGER_RANGE:
        limit = _INTEGER_RANGE[kind]
        # int() would also take underscores and digits of other scripts, and convert megabytes of digits.
        if re.fullmatch(r"[+-]?[0-9]{1,20}", text, re.ASCII) and -limit <= (number := int(text)) < limit:
            return number
        raise ConfigError(f"{setting.name}={shown(setting, text)}: expected a whole number ({kind.name.lower()})")
    if kind is Kind.DOUBLE:
        if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?", text, re.ASCII):
            return float(text)
        raise ConfigError(f"{setting.name}={shown(setting, text)}: expected a number")
    if kind is Kind.LIST:
        return tuple(item.strip() for item in text.split(",")) if text else ()
    return text


def shown(setting: Setting, text: str) -> str:
    if setting.sensitive:
        return "[hidden]"
    return text if len(text) <= 100 else text[:100] + "..."


def format_value(value: Value) -> str | None:
    """`value` as Kafka writes it in answers and files."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)


def whole_number(value: Value) -> int:
    """`value`, which the table says is a whole number."""
    if not isinstance(value, int):
        raise TypeError(f"not a whole number: {value!r}")
    return value
