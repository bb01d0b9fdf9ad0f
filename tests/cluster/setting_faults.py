"""Settings that are changed while records flow: every dynamic one of topics and brokers, there and back.

The names come from `millrace.config.table`, so that a new one cannot be forgotten: `test_setting_faults.py` asks for
its values here, or for the reason why it has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigResource, ResourceType

from cluster.disk_faults import FULL_DISK, SHORT_DISK, two_disks
from cluster.faults import Row
from cluster.rounds import Fault, Stage, Traffic, run_round
from cluster.workload import CLIENT
from millrace.config.setting import ConfigSource, Scope, Setting, Update
from millrace.config.table import SETTINGS, is_foreign
from millrace.wire.messages.configs import IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse
from support.cluster_processes import wait_for
from support.servers import ServerFailed

_ALTERED_S: Final = 30.0
_VERSION: Final = 1

TOPIC_VALUES: Final[Mapping[str, tuple[str, ...]]] = {
    "cleanup.policy": ("compact", "compact,delete", ""),
    "compression.gzip.level": ("1", "9"),
    "compression.lz4.level": ("1", "17"),
    "compression.type": ("uncompressed", "gzip", "snappy", "lz4", "zstd"),
    "compression.zstd.level": ("1", "19"),
    "delete.retention.ms": ("0", "1000"),
    "errors.deadletterqueue.group.enable": ("true",),
    "file.delete.delay.ms": ("0", "1000"),
    "flush.messages": ("1", "100"),
    "flush.mode": ("os", "interval", "group", "os"),
    "flush.ms": ("50", "1000"),
    "follower.replication.throttled.replicas": ("*",),
    "index.interval.bytes": ("0", "64"),
    "internal.segment.bytes": ("20480", "65536"),
    "leader.replication.throttled.replicas": ("*",),
    "local.retention.bytes": ("1000000",),
    "local.retention.ms": ("1000",),
    "max.compaction.lag.ms": ("1", "1000"),
    "max.message.bytes": ("20000", "2000000"),
    "message.timestamp.after.max.ms": ("60000",),
    "message.timestamp.before.max.ms": ("3600000",),
    "message.timestamp.type": ("LogAppendTime",),
    "min.cleanable.dirty.ratio": ("0.01", "0.99"),
    "min.compaction.lag.ms": ("1000", "1"),
    "min.insync.replicas": ("1", "3"),
    "preallocate": ("true",),
    "remote.log.copy.disable": ("true",),
    "remote.log.delete.on.disable": ("true",),
    "retention.bytes": ("1000000000",),
    "retention.ms": ("3600000", "-1"),
    "segment.bytes": ("1048576",),
    "segment.index.bytes": ("4096", "12"),
    "segment.jitter.ms": ("100",),
    "segment.ms": ("200", "1000"),
    "unclean.leader.election.enable": ("true",),
    "validate.records": ("true",),
}

BROKER_VALUES: Final[Mapping[str, tuple[str, ...]]] = {
    "background.threads": ("5",),
    "follower.replication.throttled.rate": ("1000000",),
    "group.consumer.assignment.interval.ms": ("0",),
    "group.share.assignment.interval.ms": ("0",),
    "leader.replication.throttled.rate": ("1000000",),
    "log.cleaner.backoff.ms": ("100", "1000"),
    "metrics.detail": ("partitions,groups", "topics"),
    "log.cleaner.io.buffer.load.factor": ("0.5",),
    "log.cleaner.dedupe.buffer.size": ("1000000",),
    "log.cleaner.io.buffer.size": ("65536",),
    "log.cleaner.io.max.bytes.per.second": ("100000.0",),
    "log.cleaner.threads": ("0", "2"),
    "log.dirs.min.free.bytes": ("0", "1000000"),
    "log.flush.interval.ms": ("50",),
    "log.retention.ms": ("3600000",),
    "log.roll.jitter.ms": ("100",),
    "log.roll.ms": ("200",),
    "max.connection.creation.rate": ("1000",),
    "max.connections": ("1000",),
    "max.connections.per.ip": ("1000",),
    "max.connections.per.ip.overrides": ("127.0.0.1:1000",),
    "num.io.threads": ("4",),
    "num.network.threads": ("2",),
    "num.recovery.threads.per.data.dir": ("1",),
    "num.replica.fetchers": ("2",),
    "producer.id.expiration.ms": ("3600000",),
    "replica.alter.log.dirs.io.max.bytes.per.second": ("1000000",),
    "transaction.partition.verification.enable": ("false",),
}
"""Those that are the default of a topic's setting take that one's values."""

LEFT_OUT: Final[Mapping[str, str]] = {
    "remote.storage.enable": "only false is possible",
    "share.coordinator.cached.buffer.max.bytes": "has no effect",
    **{
        name: "has no effect"
        for name, setting in SETTINGS[Scope.BROKER].items()
        if setting.update is not Update.READ_ONLY and (name.startswith(("sasl.", "ssl.")) or is_foreign(name))
    },
}


def dynamic_settings(scope: Scope) -> Iterator[Setting]:
    return (each for each in SETTINGS[scope].values() if each.update is not Update.READ_ONLY)


def values_of(setting: Setting) -> tuple[str, ...]:
    """What a setting is set to, one after the other, before it is removed again; empty where it is left out."""
    if setting.name in LEFT_OUT:
        return ()
    if setting.scope is Scope.TOPIC:
        return TOPIC_VALUES[setting.name]
    if setting.name in BROKER_VALUES:
        return BROKER_VALUES[setting.name]
    return next(
        TOPIC_VALUES[topic.name]
        for topic in SETTINGS[Scope.TOPIC].values()
        if any(synonym.name == setting.name for synonym in topic.synonyms)
    )


class Dials:
    """Changes settings, and looks whether a broker goes by them."""

    def __init__(self, stage: Stage, scope: Scope) -> None:
        self._cluster = stage.cluster
        self._admin = AdminClient({**stage.cluster.admin_settings, **CLIENT})
        self._kind = ResourceType.TOPIC if scope is Scope.TOPIC else ResourceType.BROKER
        # What is set for no broker in particular holds for all of them.
        self._altered = stage.topic if scope is Scope.TOPIC else ""
        self._described = stage.topic if scope is Scope.TOPIC else "1"

    def turn(self, setting: Setting, value: str | None) -> None:
        """Set, or remove where there is no value; returns when a broker says that it is so."""
        operation = AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET
        cls = IncrementalAlterConfigsRequest
        change = cls.AlterableConfig(name=setting.name, config_operation=operation.value, value=value)
        resource = cls.AlterConfigsResource(
            resource_type=self._kind.value, resource_name=self._altered, configs=[change]
        )
        request = cls(resources=[resource])
        answer: IncrementalAlterConfigsResponse = self._cluster.ask(1, request, _VERSION, _ALTERED_S)
        if (refused := answer.responses[0]).error_code:
            raise ServerFailed(f"{setting.name} cannot be {value}: {refused.error_message}")
        if not setting.hidden:
            wait_for(lambda: self._is(setting, value), _ALTERED_S, f"{setting.name} is not {value}")

    def _is(self, setting: Setting, value: str | None) -> bool | None:
        asked = ConfigResource(self._kind, self._described)
        found = self._admin.describe_configs([asked])[asked].result(_ALTERED_S)[setting.name]
        is_set = found.source in _DYNAMIC
        return True if (not is_set if value is None else is_set and (found.value or "") == value) else None


_DYNAMIC: Final = frozenset(
    {
        ConfigSource.DYNAMIC_TOPIC_CONFIG.value,
        ConfigSource.DYNAMIC_BROKER_CONFIG.value,
        ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG.value,
    }
)


def settings_changed(scope: Scope) -> Fault:
    """Every setting of a topic, or of all brokers, there and back."""

    def fault(stage: Stage) -> None:
        dials = Dials(stage, scope)
        created = dict(stage.traffic.settings) if scope is Scope.TOPIC else {}
        changes = 0
        for setting in dynamic_settings(scope):
            values = values_of(setting)
            for value in (*values, created.get(setting.name)) if values else ():
                dials.turn(setting, value)
                changes += 1
            stage.mark(f"{setting.name}: {', '.join(values) if values else LEFT_OUT[setting.name]}")
            stage.goes_on(1)
        stage.mark(f"{changes} changes of {scope.value} settings")
        stage.goes_on()

    return fault


KEYED: Final = Traffic(
    (("internal.segment.bytes", "32768"),), ("lz4", "zstd"), batch_bytes=16384, keyed=True, compacted=True
)
"""With keys, or cleanup.policy=compact would refuse the records; each has one of its own, so that none may go."""

SETTING_ROWS: Final = (
    Row(
        "every dynamic setting of topics and of brokers changed, there and back",
        (
            two_disks("topic settings changed", settings_changed(Scope.TOPIC)),
            two_disks("broker settings changed", settings_changed(Scope.BROKER)),
        ),
        2,
        30_000,
        SHORT_DISK,
        FULL_DISK,
        partial(run_round, traffic=KEYED),
    ),
)
