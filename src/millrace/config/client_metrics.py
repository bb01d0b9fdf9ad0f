"""A client-metrics subscription (KIP-714): which clients are to push which metrics, and how often.

The rules and the codes they are refused with are Kafka's. Patterns are RE2's (`regexes`), so that no pattern can keep
a broker busy. Not here: which client instance has which subscription (`telemetry`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from millrace.config.setting import parse_value, whole_number
from millrace.config.table import CLIENT_METRICS_SETTINGS
from millrace.errors import ConfigError
from millrace.regexes import NoRegex, compiled

ALL_METRICS: Final = "*"
MATCH_KEYS: Final = (
    "client_instance_id", "client_id", "client_software_name", "client_software_version", "client_source_address",
    "client_source_port",
)  # fmt: skip
_INTERVAL: Final = CLIENT_METRICS_SETTINGS["interval.ms"]


class RefusedSubscription(ConfigError):
    """What Kafka does not call a wrong value (INVALID_CONFIG) but a wrong request."""


@dataclass(frozen=True, slots=True)
class MetricsSubscription:
    """The settings of one subscription, typed."""

    metrics: tuple[str, ...]
    """Prefixes of names, or `ALL_METRICS`."""
    interval_ms: int
    match: tuple[tuple[str, str], ...]
    """What a client must be, all of it; nothing: any client."""

    def wants(self, client: Mapping[str, str]) -> bool:
        """Whether the client, by what it is called under `MATCH_KEYS`, should push."""
        return all(
            key in client and compiled(pattern).fullmatch(client[key]) is not None for key, pattern in self.match
        )


def metrics_subscription(configs: Mapping[str, str]) -> MetricsSubscription:
    """What was set for a subscription; ConfigError where it is wrong."""
    unknown = [name for name in configs if name not in CLIENT_METRICS_SETTINGS]
    if unknown:
        known = ", ".join(CLIENT_METRICS_SETTINGS)
        raise RefusedSubscription(f"unknown client metrics setting {unknown[0][:100]!r}: there are {known}")
    return MetricsSubscription(
        tuple(dict.fromkeys(_items("metrics", configs))), _interval_ms(configs), tuple(_match(configs).items())
    )


def _interval_ms(configs: Mapping[str, str]) -> int:
    text = configs.get(_INTERVAL.name)
    if text is None:
        return whole_number(_INTERVAL.default)
    try:
        return whole_number(parse_value(_INTERVAL, text))
    except ConfigError as error:
        if text.strip().lstrip("+-").isdecimal():
            raise RefusedSubscription(str(error)) from None
        raise


def _items(name: str, configs: Mapping[str, str]) -> list[str]:
    text = configs.get(name, "").strip()
    items = [item.strip() for item in text.split(",")] if text else []
    if "" in items:
        raise ConfigError(f"{name}={text[:100]}: one of its values is empty")
    return items


def _match(configs: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in _items("match", configs):
        key, _, pattern = (part.strip() for part in pair.partition("="))
        if key not in MATCH_KEYS or not pattern or "=" in pattern:
            names = ", ".join(MATCH_KEYS)
            raise ConfigError(f"match={pair[:100]}: expected name=pattern, with one = and a name of {names}")
        try:
            compiled(pattern)
        except NoRegex as error:
            raise ConfigError(f"match={pair[:100]}: {error}") from None
        found[key] = pattern
    return found
