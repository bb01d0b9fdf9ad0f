"""The settings of topics, groups and client-metrics subscriptions: resolved against the broker's, and described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from millrace.config.broker import BrokerConfig
from millrace.config.client_metrics import metrics_subscription
from millrace.config.setting import (
    LONG_MAX,
    ConfigEntry,
    ConfigSource,
    ConfigSynonym,
    Scope,
    Setting,
    Update,
    Value,
    format_value,
    parse_value,
    whole_number,
)
from millrace.config.table import BROKER_SETTINGS, CLIENT_METRICS_SETTINGS, GROUP_SETTINGS, TOPIC_SETTINGS, find_setting
from millrace.errors import ConfigError


def validate_overrides(scope: Scope, configs: Mapping[str, str], broker: BrokerConfig) -> None:
    """Check the complete set of overrides of one topic, group or client-metrics subscription; ConfigError if wrong."""
    if scope is Scope.CLIENT_METRICS:
        metrics_subscription(configs)
        return
    for name, text in configs.items():
        setting = find_setting(scope, name)
        value = parse_value(setting, text)
        if setting.bounds is not None:
            low, high = (broker.get_int(bound) for bound in setting.bounds)
            if not low <= whole_number(value) <= high:
                raise ConfigError(f"{name}={text}: must be between {low} and {high} on this cluster")
    if scope is Scope.TOPIC:
        _check_lags(topic_config(configs, broker))


def _check_lags(topic: TopicConfig) -> None:
    """Together with what the broker says where the topic does not: one of the two alone can be wrong."""
    if topic.min_compaction_lag_ms > topic.max_compaction_lag_ms:
        raise ConfigError(
            f"min.compaction.lag.ms={topic.min_compaction_lag_ms}: must not exceed max.compaction.lag.ms, "
            f"which is {topic.max_compaction_lag_ms} for this topic"
        )


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The settings of one topic, resolved and typed; a field is the setting's name with dots as underscores."""

    cleanup_policy: tuple[str, ...]
    compression_gzip_level: int
    compression_lz4_level: int
    compression_type: str
    compression_zstd_level: int
    delete_retention_ms: int
    file_delete_delay_ms: int
    flush_messages: int
    flush_mode: str
    flush_ms: int
    follower_replication_throttled_replicas: tuple[str, ...]
    index_interval_bytes: int
    leader_replication_throttled_replicas: tuple[str, ...]
    local_retention_bytes: int
    local_retention_ms: int
    max_compaction_lag_ms: int
    max_message_bytes: int
    message_timestamp_after_max_ms: int
    message_timestamp_before_max_ms: int
    message_timestamp_type: str
    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int
    min_insync_replicas: int
    preallocate: bool
    remote_log_copy_disable: bool
    remote_log_delete_on_disable: bool
    remote_storage_enable: bool
    retention_bytes: int
    retention_ms: int
    segment_bytes: int
    segment_index_bytes: int
    segment_jitter_ms: int
    segment_ms: int
    unclean_leader_election_enable: bool
    validate_records: bool

    @property
    def compact(self) -> bool:
        return "compact" in self.cleanup_policy

    @property
    def delete(self) -> bool:
        return "delete" in self.cleanup_policy

    @property
    def compression_level(self) -> int | None:
        """The level for the codec that `compression.type` names; None where there is none for it."""
        levels = {
            "gzip": self.compression_gzip_level,
            "lz4": self.compression_lz4_level,
            "zstd": self.compression_zstd_level,
        }
        return levels.get(self.compression_type)

    @property
    def flushes_before_promise(self) -> bool:
        """Whether a replica promises only what it has put on disk."""
        return self.flush_mode == "group" or self.flush_messages < LONG_MAX


_ADVERTISED: Final = "advertised.listeners"
_TOPIC_FIELDS: Final = tuple((field.name, field.name.replace("_", ".")) for field in fields(TopicConfig))


def topic_value(name: str, overrides: Mapping[str, str], broker: BrokerConfig) -> Value:
    """The value of one topic setting; an override that no longer passes its rule falls back to the broker's."""
    setting = TOPIC_SETTINGS[name]
    if name in overrides:
        try:
            return parse_value(setting, overrides[name])
        except ConfigError:
            pass
    return broker.derived(setting)


def topic_config(overrides: Mapping[str, str], broker: BrokerConfig) -> TopicConfig:
    """All settings of a topic with these overrides on this broker."""
    values: dict[str, Any] = {field: topic_value(name, overrides, broker) for field, name in _TOPIC_FIELDS}
    small_segments = topic_value("internal.segment.bytes", overrides, broker)
    if small_segments is not None:
        values["segment_bytes"] = small_segments
    return TopicConfig(**values)


def group_value(name: str, overrides: Mapping[str, str], broker: BrokerConfig) -> Value:
    """The value of one group setting, kept inside the cluster's limits even where an old override is not."""
    setting = GROUP_SETTINGS[name]
    value = broker.derived(setting)
    if name in overrides:
        try:
            value = parse_value(setting, overrides[name])
        except ConfigError:
            return value
        if setting.bounds is not None:
            low, high = (broker.get_int(bound) for bound in setting.bounds)
            value = min(max(whole_number(value), low), high)
    return value


def describe_topic(overrides: Mapping[str, str], broker: BrokerConfig) -> list[ConfigEntry]:
    """Every setting of a topic with value, source and synonyms."""
    source = ConfigSource.DYNAMIC_TOPIC_CONFIG
    return [
        _describe(setting, overrides, source, topic_value(setting.name, overrides, broker), broker)
        for setting in TOPIC_SETTINGS.values()
        if not setting.hidden
    ]


def describe_group(overrides: Mapping[str, str], broker: BrokerConfig) -> list[ConfigEntry]:
    """Every setting of a group with value, source and synonyms."""
    return [
        _describe(setting, overrides, ConfigSource.GROUP_CONFIG, group_value(setting.name, overrides, broker), broker)
        for setting in GROUP_SETTINGS.values()
    ]


def describe_client_metrics(overrides: Mapping[str, str], broker: BrokerConfig) -> list[ConfigEntry]:
    """Every setting of a client-metrics subscription."""
    entries = []
    for setting in CLIENT_METRICS_SETTINGS.values():
        value = parse_value(setting, overrides[setting.name]) if setting.name in overrides else setting.default
        entries.append(_describe(setting, overrides, ConfigSource.CLIENT_METRICS_CONFIG, value, broker))
    return entries


def _describe(
    setting: Setting, overrides: Mapping[str, str], source: ConfigSource, value: Value, broker: BrokerConfig
) -> ConfigEntry:
    synonyms: list[ConfigSynonym] = []
    if setting.name in overrides:
        synonyms.append(ConfigSynonym(setting.name, format_value(value), source))
    if setting.synonyms:
        synonyms.extend(broker.found(setting.synonyms[0].name))
    elif setting.default is not None and setting.scope is not Scope.CLIENT_METRICS:
        synonyms.append(ConfigSynonym(setting.name, format_value(setting.default), ConfigSource.DEFAULT_CONFIG))
    return ConfigEntry(
        name=setting.name,
        value=format_value(value),
        source=synonyms[0].source if synonyms else ConfigSource.DEFAULT_CONFIG,
        kind=setting.kind,
        read_only=False,
        sensitive=setting.sensitive,
        synonyms=tuple(synonyms),
        documentation=setting.doc,
    )


def describe_broker(broker: BrokerConfig, advertised: str | None = None) -> list[ConfigEntry]:
    """Every setting of this broker.

    Where nobody set advertised.listeners, it is what clients are told (`advertised`), and comes from the broker's own
    file like the listeners that it was derived from: it is no default that another broker would have, too.
    """
    derived = advertised is not None and not broker.is_set(_ADVERTISED)
    own = (ConfigSynonym(_ADVERTISED, advertised, ConfigSource.STATIC_BROKER_CONFIG),)
    return [
        _describe_broker(setting, own, broker, advertised)
        if derived and setting.name == _ADVERTISED
        else _describe_broker(setting, tuple(broker.found(setting.name)), broker)
        for setting in BROKER_SETTINGS.values()
        if not setting.hidden
    ]


def describe_broker_defaults(broker: BrokerConfig) -> list[ConfigEntry]:
    """The settings that were given dynamically to all brokers, and only those, as Kafka answers for the name ''."""
    entries = []
    for setting in BROKER_SETTINGS.values():
        shared = tuple(
            synonym
            for synonym in broker.found(setting.name)
            if synonym.source is ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG and synonym.name == setting.name
        )
        if shared:
            entries.append(_describe_broker(setting, shared, broker, shared[0].value))
    return entries


def _describe_broker(
    setting: Setting, synonyms: tuple[ConfigSynonym, ...], broker: BrokerConfig, value: str | None = None
) -> ConfigEntry:
    if value is None and not setting.sensitive:
        value = format_value(broker.get(setting.name))
    return ConfigEntry(
        name=setting.name,
        value=value,
        source=synonyms[0].source if synonyms else ConfigSource.DEFAULT_CONFIG,
        kind=setting.kind,
        read_only=setting.update is Update.READ_ONLY,
        sensitive=setting.sensitive,
        synonyms=synonyms,
        documentation=setting.doc,
    )
