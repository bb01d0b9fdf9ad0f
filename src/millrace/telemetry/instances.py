"""Client instances: which subscriptions each of them has, and whether its push is in order (KIP-714).

The rules are those of Kafka's ClientMetricsManager. All of it is soft state of one broker: an instance that was
forgotten, or has come from another broker, is made anew from the subscriptions, with the same subscription id.

Invariants: at most `MAX_INSTANCES` are kept, the least recently heard of go first; one that is silent for a minute, or
three push intervals if that is longer, has expired; one goes with the connection it came by. Of a client nothing is
kept that it could make large.

Owner: the event loop, in synchronous calls. Not here: the metrics themselves (`payload`), and what becomes of them.
"""

from __future__ import annotations

import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from millrace.clock import Clock
from millrace.config import ALL_METRICS, CLIENT_METRICS_SETTINGS, MetricsSubscription, metrics_subscription
from millrace.errors import ApiError, ConfigError, ErrorCode
from millrace.metadata.deltas import ResourceType
from millrace.model import ZERO_UUID, encode_uuid
from millrace.records.compression import Codec

logger = logging.getLogger(__name__)

Configs = Mapping[tuple[ResourceType, str], Mapping[str, str]]

MAX_INSTANCES: Final = 16_384
EXPIRY_S: Final = 60.0
INTERVALS_TO_EXPIRY: Final = 3
DEFAULT_INTERVAL_MS: Final = 300_000
"""Of a client without a subscription: it asks again then. No subscription makes it longer."""
ACCEPTED: Final = (Codec.ZSTD, Codec.LZ4, Codec.GZIP, Codec.SNAPPY)
"""The best first. What is not compressed is taken, too, and not named, as in Kafka."""
_CODECS: Final = frozenset(map(int, Codec))
RESERVED: Final = frozenset({ZERO_UUID, uuid.UUID(int=1)})
_FORGIVEN: Final = frozenset({ErrorCode.UNKNOWN_SUBSCRIPTION_ID, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE})
"""After these a client asks for its subscription at once, and is answered."""
_NEVER: Final = float("-inf")
assert CLIENT_METRICS_SETTINGS["interval.ms"].default == DEFAULT_INTERVAL_MS


@dataclass(frozen=True, slots=True)
class Client:
    """Who pushes, as far as the broker knows."""

    client_id: str | None
    software_name: str
    software_version: str
    address: str
    port: int
    principal: str

    def attributes(self, instance_id: uuid.UUID) -> dict[str, str]:
        """By the names that subscriptions match by; who has no client id matches none."""
        named = {} if self.client_id is None else {"client_id": self.client_id}
        return {
            "client_instance_id": encode_uuid(instance_id),
            **named,
            "client_software_name": self.software_name,
            "client_software_version": self.software_version,
            "client_source_address": self.address,
            "client_source_port": str(self.port),
        }


@dataclass(frozen=True, slots=True)
class Push:
    """What a client sends of its metrics."""

    subscription_id: int
    codec: int
    metrics: bytes
    is_terminating: bool = False
    """It is the last one."""


@dataclass(slots=True)
class Instance:
    """What is kept of one client instance."""

    subscription_id: int
    metrics: tuple[str, ...]
    interval_ms: int
    version: int
    """Of the subscriptions, of which the above was made."""
    expires_at: float = 0.0
    asked_at: float = _NEVER
    pushed_at: float = _NEVER
    has_asked: bool = False
    """Since it pushed."""
    is_terminating: bool = False
    last_error: ErrorCode = ErrorCode.NONE

    def may_ask(self, now: float) -> bool:
        is_time = (now - max(self.asked_at, self.pushed_at)) * 1000 >= self.interval_ms
        if not is_time and self.last_error not in _FORGIVEN:
            return False
        # Kafka does not note this for whoever is forgiven, so that half of their next pushes come too early.
        self.asked_at = now
        self.has_asked = True
        return True

    def may_push(self, now: float) -> bool:
        """The first push after asking may come at any time: clients spread it over half to one and a half intervals."""
        if self.has_asked or (now - self.pushed_at) * 1000 >= self.interval_ms:
            self.pushed_at = now
            self.has_asked = False
            return True
        return False


class ClientInstances:
    """The client instances that this broker has heard of."""

    def __init__(self, configs: Callable[[], Configs], clock: Clock) -> None:
        """`configs` are all settings of the cluster as they are now; the same object as long as none changes."""
        self._configs = configs
        self._clock = clock
        self._seen: Configs | None = None
        self._subscriptions: dict[str, MetricsSubscription] = {}
        self._version = 0
        self._instances: OrderedDict[uuid.UUID, Instance] = OrderedDict()
        self._swept_at = clock.monotonic()
        self.throttled_total = 0
        self.unknown_subscriptions_total = 0

    def __repr__(self) -> str:
        return f"ClientInstances({len(self._instances)} instances, {len(self._subscriptions)} subscriptions)"

    def __len__(self) -> int:
        return len(self._instances)

    def ask(self, instance_id: uuid.UUID, client: Client) -> tuple[uuid.UUID, Instance]:
        """Which metrics a client should push, under which id; one that has none yet is given one. ApiError."""
        if instance_id == ZERO_UUID:
            instance_id = self._new_id()
        instance = self.instance(instance_id, client)
        if not instance.may_ask(self._clock.monotonic()):
            self.throttled_total += 1
            raise ApiError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, "asked before the push interval was over")
        instance.last_error = ErrorCode.NONE
        return instance_id, instance

    def check_push(self, instance: Instance, push: Push, max_bytes: int) -> None:
        """Take note of a push; ApiError where it is not in order, or too early."""
        try:
            self._check_push(instance, push, max_bytes)
        except ApiError as error:
            instance.last_error = error.code
            raise
        finally:
            instance.is_terminating = push.is_terminating

    def _check_push(self, instance: Instance, push: Push, max_bytes: int) -> None:
        if instance.is_terminating:
            raise ApiError(ErrorCode.INVALID_REQUEST, "the last push said that it was the last one")
        if not instance.may_push(self._clock.monotonic()) and not push.is_terminating:
            self.throttled_total += 1
            raise ApiError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, "pushed before the push interval was over")
        if push.subscription_id != instance.subscription_id:
            self.unknown_subscriptions_total += 1
            raise ApiError(ErrorCode.UNKNOWN_SUBSCRIPTION_ID, "the subscriptions have changed")
        if push.codec not in _CODECS:
            raise ApiError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"there is no compression {push.codec}")
        if len(push.metrics) > max_bytes:
            raise ApiError(ErrorCode.TELEMETRY_TOO_LARGE, f"more than telemetry.max.bytes={max_bytes}")

    def instance(self, instance_id: uuid.UUID, client: Client) -> Instance:
        """What is known of an instance, by the subscriptions of now."""
        self._read_subscriptions()
        now = self._clock.monotonic()
        instance = self._instances.get(instance_id)
        is_new = instance is None or instance.version < self._version or instance.expires_at <= now
        if instance is None or is_new:
            instance = self._instances[instance_id] = self._made(instance_id, client)
        self._instances.move_to_end(instance_id)
        instance.expires_at = now + max(EXPIRY_S, INTERVALS_TO_EXPIRY * instance.interval_ms / 1000)
        if is_new:
            self._make_room(now)
        return instance

    def forget(self, instance_id: uuid.UUID, instance: Instance) -> None:
        """The connection is gone by which it came; nothing, if it has been made anew since."""
        if self._instances.get(instance_id) is instance:
            del self._instances[instance_id]

    def _new_id(self) -> uuid.UUID:
        while True:
            made = uuid.uuid4()
            # One that begins with a dash would be taken for an option on a command line.
            if made not in self._instances and not encode_uuid(made).startswith("-"):
                return made

    def _made(self, instance_id: uuid.UUID, client: Client) -> Instance:
        attributes = client.attributes(instance_id)
        interval_ms = DEFAULT_INTERVAL_MS
        wanted: set[str] = set()
        for subscription in self._subscriptions.values():
            if subscription.wants(attributes):
                wanted.update(subscription.metrics)
                interval_ms = min(interval_ms, subscription.interval_ms)
        metrics = (ALL_METRICS,) if ALL_METRICS in wanted else tuple(sorted(wanted))
        return Instance(subscription_id(metrics, interval_ms, instance_id), metrics, interval_ms, self._version)

    def _make_room(self, now: float) -> None:
        if now - self._swept_at >= EXPIRY_S:
            self._swept_at = now
            for expired in [each for each, kept in self._instances.items() if kept.expires_at <= now]:
                del self._instances[expired]
        while len(self._instances) > MAX_INSTANCES:
            self._instances.popitem(last=False)

    def _read_subscriptions(self) -> None:
        configs = self._configs()
        if configs is self._seen:
            return
        self._seen = configs
        found: dict[str, MetricsSubscription] = {}
        for (kind, name), values in configs.items():
            if kind is ResourceType.CLIENT_METRICS:
                try:
                    found[name] = metrics_subscription(values)
                except ConfigError as error:  # written by another version
                    logger.warning("the client metrics subscription %.100r concerns nobody: %s", name, error)
        if found != self._subscriptions:
            self._subscriptions = found
            self._version += 1


def subscription_id(metrics: tuple[str, ...], interval_ms: int, instance_id: uuid.UUID) -> int:
    """By Kafka's formula, of metrics in order: every broker comes to the same, and a change to another."""
    checksum = crc32c(f"[{', '.join(metrics)}]{interval_ms}".encode())
    halves = (instance_id.int >> 64) ^ (instance_id.int & (1 << 64) - 1)
    mixed = checksum ^ (halves >> 32) ^ (halves & 0xFFFFFFFF)
    return mixed - (1 << 32) if mixed >= 1 << 31 else mixed
