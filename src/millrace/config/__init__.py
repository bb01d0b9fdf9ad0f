"""Settings by their Kafka names: the table (`table`), one broker's values (`broker`), topics and groups (`resolve`).

Of Kafka's broker settings those that do nothing here are in the table, too, from `without_effect`.

A row has a reader, which names it in full, or its text says that it has no effect; a test looks for both.

Not here: what a setting does (that is where it is read), where dynamic values are kept (they are deltas, see
`metadata.deltas`), and defaults of the command line. `docs/configuration.md` is made from the table by `page`.

Invariants: a `BrokerConfig` only ever holds values that passed their rule; a value is looked up in the order dynamic
(this broker), dynamic (cluster default), static (file and overrides), default. No value names code to load.
"""

from __future__ import annotations

from millrace.config.broker import BrokerConfig, validate_dynamic_broker
from millrace.config.client_metrics import (
    ALL_METRICS,
    MATCH_KEYS,
    MetricsSubscription,
    RefusedSubscription,
    metrics_subscription,
)
from millrace.config.files import Listener, parse_listeners, parse_properties
from millrace.config.resolve import (
    TopicConfig,
    describe_broker,
    describe_broker_defaults,
    describe_client_metrics,
    describe_group,
    describe_topic,
    group_value,
    topic_config,
    topic_value,
    validate_overrides,
)
from millrace.config.setting import (
    LONG_MAX,
    ConfigEntry,
    ConfigSource,
    ConfigSynonym,
    Kind,
    Scope,
    Setting,
    Update,
    format_value,
    parse_value,
)
from millrace.config.table import (
    BROKER_SETTINGS,
    CLIENT_METRICS_SETTINGS,
    GROUP_SETTINGS,
    SETTINGS,
    TOPIC_SETTINGS,
    find_setting,
    is_setting,
)

__all__ = [
    "ALL_METRICS",
    "BROKER_SETTINGS",
    "CLIENT_METRICS_SETTINGS",
    "GROUP_SETTINGS",
    "LONG_MAX",
    "MATCH_KEYS",
    "SETTINGS",
    "TOPIC_SETTINGS",
    "BrokerConfig",
    "ConfigEntry",
    "ConfigSource",
    "ConfigSynonym",
    "Kind",
    "Listener",
    "MetricsSubscription",
    "RefusedSubscription",
    "Scope",
    "Setting",
    "TopicConfig",
    "Update",
    "describe_broker",
    "describe_broker_defaults",
    "describe_client_metrics",
    "describe_group",
    "describe_topic",
    "find_setting",
    "format_value",
    "group_value",
    "is_setting",
    "metrics_subscription",
    "parse_listeners",
    "parse_properties",
    "parse_value",
    "topic_config",
    "topic_value",
    "validate_dynamic_broker",
    "validate_overrides",
]
