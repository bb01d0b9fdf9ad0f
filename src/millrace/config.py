"""Every setting by its Kafka name: type, default, rule, scope and meaning, and how a value is found.

Not here: what a setting does (that is where it is read), where dynamic values are kept (they are deltas, see
`metadata.deltas`), and defaults of the command line. Names and defaults are Kafka 4.3's; the few that differ or are
new say so in their text. `docs/configuration.md` is made from this table by `configuration_markdown`.

Invariants: a `BrokerConfig` only ever holds values that passed their rule; a value is looked up in the order dynamic
(this broker), dynamic (cluster default), static (file and overrides), default. No value names code to load.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, Final, TypeAlias

from millrace.errors import ConfigError

Value: TypeAlias = "bool | int | float | str | tuple[str, ...] | None"
Check: TypeAlias = "Callable[[Any], str | None]"

INT_MAX: Final = 2**31 - 1
LONG_MAX: Final = 2**63 - 1
_SECOND_MS: Final = 1000
_MINUTE_MS: Final = 60 * _SECOND_MS
_HOUR_MS: Final = 60 * _MINUTE_MS
_DAY_MS: Final = 24 * _HOUR_MS
_MIB: Final = 1024 * 1024


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


@dataclass(frozen=True, slots=True)
class Listener:
    """A named door: an empty host means every interface, port 0 means a free one."""

    name: str
    security_protocol: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.name}://{host}:{self.port}"


# --- rules ------------------------------------------------------------------------------------------------------------


def _at_least(low: float) -> Check:
    return lambda value: None if value >= low else f"must be at least {low}"


def _between(low: float, high: float) -> Check:
    return lambda value: None if low <= value <= high else f"must be between {low} and {high}"


def _one_of(*allowed: str) -> Check:
    return lambda value: None if value in allowed else f"must be one of {', '.join(allowed)}"


def _gzip_level(value: int) -> str | None:
    return None if value == -1 or 1 <= value <= 9 else "must be -1 or between 1 and 9"


def _unlimited_or_positive(value: int) -> str | None:
    return None if value == -1 or value >= 1 else "must be -1 (no limit) or at least 1"


def _unique_items(*allowed: str, empty: bool = True) -> Check:
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


def _throttled_replicas(value: tuple[str, ...]) -> str | None:
    if value == ("*",) or all(re.fullmatch(r"[0-9]+:[0-9]+", item) for item in value):
        return None
    return "must be '*' or a list of partition:broker pairs such as 0:101,1:102"


def _offset_reset(value: str) -> str | None:
    if value in {"latest", "earliest"} or re.fullmatch(r"by_duration:P(?=[0-9T])[0-9A-Z.]+", value):
        return None
    return "must be latest, earliest or by_duration:<ISO-8601 duration>"


# --- the table --------------------------------------------------------------------------------------------------------

_NOT_USED = " Accepted so that existing files work; it has no effect here."
_RESERVED = " Reserved: security settings have no effect yet, and a listener that needs them is refused."

_CODECS: Final = ("producer", "uncompressed", "none", "gzip", "snappy", "lz4", "zstd")


def _topic(
    name: str,
    kind: Kind,
    default: Value,
    doc: str,
    check: Check | None = None,
    broker: str | tuple[Synonym, ...] = (),
    *,
    hidden: bool = False,
) -> Setting:
    synonyms = (Synonym(broker),) if isinstance(broker, str) else broker
    return Setting(name, kind, default, doc, Scope.TOPIC, check, Update.CLUSTER_WIDE, synonyms, hidden=hidden)


def _broker(
    name: str, kind: Kind, default: Value, doc: str, check: Check | None = None, update: Update = Update.READ_ONLY
) -> Setting:
    return Setting(name, kind, default, doc, Scope.BROKER, check, update)


def _group(
    name: str, kind: Kind, default: Value, doc: str, check: Check | None = None, *, bounded: bool = True
) -> Setting:
    family, _, rest = name.partition(".")
    synonyms = (Synonym(f"group.{name}"),) if bounded else ()
    bounds = (f"group.{family}.min.{rest}", f"group.{family}.max.{rest}") if bounded else None
    return Setting(name, kind, default, doc, Scope.GROUP, check, Update.CLUSTER_WIDE, synonyms, bounds)


_B, _S, _I, _H, _L, _D, _LIST, _PASSWORD = (
    Kind.BOOLEAN,
    Kind.STRING,
    Kind.INT,
    Kind.SHORT,
    Kind.LONG,
    Kind.DOUBLE,
    Kind.LIST,
    Kind.PASSWORD,
)

_RETENTION_SYNONYMS: Final = (
    Synonym("log.retention.ms"),
    Synonym("log.retention.minutes", _MINUTE_MS),
    Synonym("log.retention.hours", _HOUR_MS),
)

# fmt: off
_TOPIC_SETTINGS: Final = (
    _topic("cleanup.policy", _LIST, ("delete",),
        "What happens to old records: `delete` drops whole segments past retention, `compact` keeps the last "
        "record per key; both may be named. Empty keeps everything.",
        _unique_items("compact", "delete"), "log.cleanup.policy"),
    _topic("compression.gzip.level", _I, -1,
        "Level used when the broker recompresses to gzip (-1: the codec's own).",
        _gzip_level, "compression.gzip.level"),
    _topic("compression.lz4.level", _I, 9,
        "Level used when the broker recompresses to lz4.", _between(1, 17), "compression.lz4.level"),
    _topic("compression.type", _S, "producer",
        "Codec of stored batches; `producer` keeps what the producer chose, and then batches are stored untouched.",
        _one_of(*_CODECS), "compression.type"),
    _topic("compression.zstd.level", _I, 3,
        "Level used when the broker recompresses to zstd.", _between(-131072, 22), "compression.zstd.level"),
    _topic("delete.retention.ms", _L, _DAY_MS,
        "How long a tombstone survives in a compacted topic.", _at_least(0), "log.cleaner.delete.retention.ms"),
    _topic("file.delete.delay.ms", _L, _MINUTE_MS,
        "How long the files of a removed segment stay on disk.", _at_least(0), "log.segment.delete.delay.ms"),
    _topic("flush.messages", _L, LONG_MAX,
        "Force a disk flush after this many records; 1 means after every batch.",
        _at_least(1), "log.flush.interval.messages"),
    _topic("flush.mode", _S, "group",
        "When data reaches the disk, a setting of millrace: `group` answers acks=all after a flush shared by "
        "every waiting request; `os` leaves flushing to the operating system, as Kafka does by default; "
        "`interval` flushes by flush.ms and flush.messages only.", _one_of("group", "os", "interval"), "flush.mode"),
    _topic("flush.ms", _L, LONG_MAX,
        "Force a disk flush of data older than this.",
        _at_least(0), (Synonym("log.flush.interval.ms"), Synonym("log.flush.scheduler.interval.ms"))),
    _topic("follower.replication.throttled.replicas", _LIST, (),
        "Replicas whose following is throttled: partition:broker pairs, or * for all.", _throttled_replicas),
    _topic("index.interval.bytes", _I, 4096,
        "One entry in the offset index per this many bytes of log.", _at_least(0), "log.index.interval.bytes"),
    _topic("leader.replication.throttled.replicas", _LIST, (),
        "Replicas whose leader throttles what they read: partition:broker pairs, or * for all.", _throttled_replicas),
    _topic("local.retention.bytes", _L, -2,
        "Local size limit with tiered storage (-2: as retention.bytes)." + _NOT_USED,
        _at_least(-2), "log.local.retention.bytes"),
    _topic("local.retention.ms", _L, -2,
        "Local age limit with tiered storage (-2: as retention.ms)." + _NOT_USED,
        _at_least(-2), "log.local.retention.ms"),
    _topic("max.compaction.lag.ms", _L, LONG_MAX,
        "A record is compacted at the latest after this time.", _at_least(1), "log.cleaner.max.compaction.lag.ms"),
    _topic("max.message.bytes", _I, _MIB + 12,
        "Largest record batch accepted, after compression.", _at_least(0), "message.max.bytes"),
    _topic("message.timestamp.after.max.ms", _L, _HOUR_MS,
        "How far ahead of the broker's clock a record's timestamp may be (CreateTime only).",
        _at_least(0), "log.message.timestamp.after.max.ms"),
    _topic("message.timestamp.before.max.ms", _L, LONG_MAX,
        "How far behind the broker's clock a record's timestamp may be (CreateTime only).",
        _at_least(0), "log.message.timestamp.before.max.ms"),
    _topic("message.timestamp.type", _S, "CreateTime",
        "Whose clock stamps records: the producer's or the broker's.",
        _one_of("CreateTime", "LogAppendTime"), "log.message.timestamp.type"),
    _topic("min.cleanable.dirty.ratio", _D, 0.5,
        "Share of uncompacted bytes from which a log is compacted.",
        _between(0, 1), "log.cleaner.min.cleanable.ratio"),
    _topic("min.compaction.lag.ms", _L, 0,
        "A record stays uncompacted at least this long.", _at_least(0), "log.cleaner.min.compaction.lag.ms"),
    _topic("min.insync.replicas", _I, 1,
        "In-sync replicas that acks=all needs; with fewer the write is refused.",
        _at_least(1), "min.insync.replicas"),
    _topic("preallocate", _B, False, "Reserve a segment's disk space when it is made.", None, "log.preallocate"),
    _topic("remote.log.copy.disable", _B, False, "Stop copying to tiered storage." + _NOT_USED),
    _topic("remote.log.delete.on.disable", _B, False, "Delete tiered data when tiering is switched off." + _NOT_USED),
    _topic("remote.storage.enable", _B, False,
        "Tiered storage; only false is possible here.",
        lambda value: "tiered storage is not available, so it must be false" if value else None),
    _topic("retention.bytes", _L, -1,
        "Size per partition beyond which old segments go (-1: no limit).", None, "log.retention.bytes"),
    _topic("retention.ms", _L, 7 * _DAY_MS,
        "Age beyond which old segments go (-1: no limit).",
        _at_least(-1), _RETENTION_SYNONYMS),
    _topic("segment.bytes", _I, 1024 * _MIB,
        "Size at which a new segment file begins.", _at_least(_MIB), "log.segment.bytes"),
    _topic("segment.index.bytes", _I, 10 * _MIB,
        "Largest size of an index file.", _at_least(4), "log.index.size.max.bytes"),
    _topic("segment.jitter.ms", _L, 0,
        "Random part taken off segment.ms, so that segments do not all roll at once.",
        _at_least(0), (Synonym("log.roll.jitter.ms"), Synonym("log.roll.jitter.hours", _HOUR_MS))),
    _topic("segment.ms", _L, 7 * _DAY_MS,
        "Age at which a new segment begins even if the old one is not full.",
        _at_least(1), (Synonym("log.roll.ms"), Synonym("log.roll.hours", _HOUR_MS))),
    _topic("unclean.leader.election.enable", _B, False,
        "Let a replica that lost records become leader when no other is left; this loses acknowledged data.",
        None, "unclean.leader.election.enable"),
    _topic("internal.segment.bytes", _I, None, "A segment.bytes without its lower limit.", _at_least(1), hidden=True),
)
# fmt: on

# fmt: off
_GROUP_SETTINGS: Final = (
    _group("consumer.assignment.interval.ms", _I, 1000,
        "Shortest time between two assignments of a consumer group.", _at_least(0)),
    _group("consumer.heartbeat.interval.ms", _I, 5000, "How often members of a consumer group report.", _at_least(1)),
    _group("consumer.session.timeout.ms", _I, 45000,
        "Silence after which a member of a consumer group is removed.", _at_least(1)),
    _group("share.assignment.interval.ms", _I, 1000,
        "Shortest time between two assignments of a share group.", _at_least(0)),
    _group("share.auto.offset.reset", _S, "latest",
        "Where a share group begins on a partition it has not read.", _offset_reset, bounded=False),
    _group("share.delivery.count.limit", _I, 5,
        "Deliveries of a record before a share group gives it up.", _at_least(2)),
    _group("share.heartbeat.interval.ms", _I, 5000, "How often members of a share group report.", _at_least(1)),
    _group("share.isolation.level", _S, "read_uncommitted",
        "Whether a share group sees uncommitted records.",
        _one_of("read_committed", "read_uncommitted"), bounded=False),
    _group("share.partition.max.record.locks", _I, 2000,
        "Records of one partition a share group may hold at once.", _at_least(100)),
    _group("share.record.lock.duration.ms", _I, 30000,
        "How long a share group's member holds a record.", _at_least(1000)),
    _group("share.renew.acknowledge.enable", _B, True,
        "Whether a member may prolong its hold on a record.", bounded=False),
    _group("share.session.timeout.ms", _I, 45000,
        "Silence after which a member of a share group is removed.", _at_least(1)),
)
# fmt: on

# fmt: off
_CLIENT_METRICS_SETTINGS: Final = (
    Setting("interval.ms", _I, 5 * _MINUTE_MS,
        "How often matching clients push their metrics.",
        Scope.CLIENT_METRICS, _between(100, _HOUR_MS), Update.CLUSTER_WIDE),
    Setting("match", _LIST, (),
        "Which clients: name=regular expression pairs, such as client_id=web.*",
        Scope.CLIENT_METRICS, None, Update.CLUSTER_WIDE),
    Setting("metrics", _LIST, (),
        "Prefixes of the metric names wanted; empty means none, * means all.",
        Scope.CLIENT_METRICS, None, Update.CLUSTER_WIDE),
)
# fmt: on

_CW, _PB = Update.CLUSTER_WIDE, Update.PER_BROKER

# fmt: off
_BROKER_SETTINGS: Final = (
    # identity and network
    _broker("broker.id", _I, 1, "This broker's number; node.id is the same and wins.", _at_least(0)),
    _broker("node.id", _I, None, "This broker's number, by KRaft's name.", _at_least(0)),
    _broker("broker.rack", _S, None, "Where this broker stands; replicas of a partition are spread over racks."),
    _broker("listeners", _LIST, ("PLAINTEXT://:9092",),
        "Where to listen: NAME://host:port. An empty host is every interface, port 0 a free port.",
        _unique_items(empty=False)),
    _broker("advertised.listeners", _LIST, None,
        "What clients are told to connect to, where it differs.", _unique_items(empty=False)),
    _broker("listener.security.protocol.map", _S,
        "PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL",
        "Which protocol a listener's name stands for."),
    _broker("inter.broker.listener.name", _S, None, "The listener brokers use among themselves."),
    _broker("security.inter.broker.protocol", _S, "PLAINTEXT",
        "The protocol brokers use among themselves.", _one_of("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")),
    _broker("num.network.threads", _I, 3, "Threads for sockets." + _NOT_USED, _at_least(1), _CW),
    _broker("num.io.threads", _I, 8, "Threads for requests." + _NOT_USED, _at_least(1), _CW),
    _broker("background.threads", _I, 10, "Threads for housekeeping." + _NOT_USED, _at_least(1), _CW),
    _broker("queued.max.requests", _I, 500, "Requests in flight before the broker stops reading.", _at_least(1)),
    _broker("queued.max.request.bytes", _L, -1,
        "Bytes of requests in flight before the broker stops reading (-1: the broker's own budget)."),
    _broker("socket.request.max.bytes", _I, 100 * _MIB, "Largest request accepted.", _at_least(1)),
    _broker("socket.send.buffer.bytes", _I, 102400, "Send buffer of a socket (-1: the system's)."),
    _broker("socket.receive.buffer.bytes", _I, 102400, "Receive buffer of a socket (-1: the system's)."),
    _broker("socket.listen.backlog.size", _I, 50, "Connections that may wait to be accepted.", _at_least(1)),
    _broker("connections.max.idle.ms", _L, 10 * _MINUTE_MS, "A connection silent for this long is closed."),
    _broker("connection.failed.authentication.delay.ms", _I, 100,
        "Wait before a failed login is answered.", _at_least(0)),
    _broker("max.connections", _I, INT_MAX, "Connections in all.", _at_least(0), _CW),
    _broker("max.connections.per.ip", _I, INT_MAX, "Connections from one address.", _at_least(0), _CW),
    _broker("max.connections.per.ip.overrides", _S, "",
        "Other limits for some addresses: address:count,...", None, _CW),
    _broker("max.connection.creation.rate", _I, INT_MAX, "New connections per second.", _at_least(0), _CW),
    _broker("request.timeout.ms", _I, 30000, "How long the broker waits for an answer of another broker."),
    _broker("fetch.max.bytes", _I, 55 * _MIB, "Most bytes in one fetch answer.", _at_least(1024)),
    _broker("max.incremental.fetch.session.cache.slots", _I, 1000, "Fetch sessions kept.", _at_least(0)),
    _broker("max.request.partition.size.limit", _I, 2000,
        "Most partitions in one page of DescribeTopicPartitions.", _at_least(1)),
    # logs
    _broker("log.dir", _LIST, ("/tmp/millrace-logs",),  # noqa: S108 - as Kafka does
        "Where data is kept, if log.dirs is not set.", _unique_items(empty=False)),
    _broker("log.dirs", _LIST, None, "Directories where data is kept.", _unique_items(empty=False)),
    _broker("num.partitions", _I, 1, "Partitions of a topic whose maker did not say.", _at_least(1)),
    _broker("default.replication.factor", _I, 1, "Replicas of a topic whose maker did not say.", _at_least(1)),
    _broker("auto.create.topics.enable", _B, True, "Make a topic when a client first asks for it."),
    _broker("delete.topic.enable", _B, True, "Let clients delete topics."),
    _broker("log.retention.ms", _L, None, "Default of retention.ms.", _unlimited_or_positive, _CW),
    _broker("log.retention.minutes", _I, None,
        "Default of retention.ms, in minutes, if log.retention.ms is unset.", _unlimited_or_positive),
    _broker("log.retention.hours", _I, 168,
        "Default of retention.ms, in hours, if the finer ones are unset.", _unlimited_or_positive),
    _broker("log.roll.ms", _L, None, "Default of segment.ms.", None, _CW),
    _broker("log.roll.hours", _I, 168, "Default of segment.ms, in hours, if log.roll.ms is unset.", _at_least(1)),
    _broker("log.roll.jitter.ms", _L, None, "Default of segment.jitter.ms.", None, _CW),
    _broker("log.roll.jitter.hours", _I, 0, "Default of segment.jitter.ms, in hours.", _at_least(0)),
    _broker("log.flush.interval.ms", _L, None, "Default of flush.ms.", None, _CW),
    _broker("log.flush.scheduler.interval.ms", _L, LONG_MAX, "How often flush.ms is looked at; also its default."),
    _broker("log.flush.offset.checkpoint.interval.ms", _I, 60000,
        "How often recovery points are saved.", _at_least(0)),
    _broker("log.flush.start.offset.checkpoint.interval.ms", _I, 60000,
        "How often log start offsets are saved.", _at_least(0)),
    _broker("log.retention.check.interval.ms", _L, 5 * _MINUTE_MS, "How often retention is enforced.", _at_least(1)),
    _broker("log.initial.task.delay.ms", _L, 30000, "Wait after start before the first housekeeping.", _at_least(0)),
    _broker("log.dir.failure.timeout.ms", _L, 30000,
        "How long a broker with a failed directory stays up when it cannot report that.", _at_least(1)),
    _broker("num.recovery.threads.per.data.dir", _I, 2,
        "Threads that check logs after an unclean stop.", _at_least(1), _CW),
    _broker("log.cleaner.enable", _B, True, "Compaction on or off."),
    _broker("log.cleaner.threads", _I, 1, "Compactions at a time.", _at_least(0), _CW),
    _broker("log.cleaner.dedupe.buffer.size", _L, 128 * _MIB, "Memory for the key map of a compaction.", None, _CW),
    _broker("log.cleaner.io.buffer.size", _I, 512 * 1024,
        "Memory for reading and writing in a compaction.", _at_least(0), _CW),
    _broker("log.cleaner.dedupe.buffer.load.factor", _D, 0.9, "How full the key map may get.", None, _CW),
    _broker("log.cleaner.io.max.bytes.per.second", _D, 1.7976931348623157e+308,
        "Speed limit of compaction.", None, _CW),
    _broker("log.cleaner.backoff.ms", _L, 15000, "Wait when there is nothing to compact.", _at_least(0), _CW),
    _broker("producer.id.expiration.ms", _I, _DAY_MS,
        "A producer silent for this long is forgotten.", _at_least(1), _CW),
    # replication
    _broker("replica.lag.time.max.ms", _L, 30000, "A follower behind for this long leaves the in-sync set."),
    _broker("replica.socket.timeout.ms", _I, 30000, "Timeout of a follower's requests."),
    _broker("replica.socket.receive.buffer.bytes", _I, 65536, "Receive buffer of a follower's socket."),
    _broker("replica.fetch.max.bytes", _I, _MIB, "Bytes per partition a follower asks for.", _at_least(0)),
    _broker("replica.fetch.wait.max.ms", _I, 500, "How long a follower's fetch may wait for data."),
    _broker("replica.fetch.min.bytes", _I, 1, "Bytes a follower's fetch waits for."),
    _broker("replica.fetch.backoff.ms", _I, 1000, "Wait of a follower after an error.", _at_least(0)),
    _broker("replica.fetch.response.max.bytes", _I, 10 * _MIB, "Bytes a follower's fetch may bring.", _at_least(0)),
    _broker("num.replica.fetchers", _I, 1, "Connections to each leader for following.", _at_least(1), _CW),
    _broker("replica.high.watermark.checkpoint.interval.ms", _L, 5000, "How often high watermarks are saved."),
    _broker("replica.selector.class", _S, None,
        "Which replica a consumer is sent to: empty for the leader, or the name of Kafka's RackAwareReplicaSelector."),
    _broker("auto.leader.rebalance.enable", _B, True, "Give leadership back to preferred leaders."),
    _broker("leader.imbalance.check.interval.seconds", _L, 300, "How often leadership is looked at.", _at_least(1)),
    _broker("controlled.shutdown.enable", _B, True, "Hand leadership over before stopping."),
    _broker("broker.heartbeat.interval.ms", _I, 2000, "How often brokers report to the controller."),
    _broker("broker.session.timeout.ms", _I, 9000, "Silence after which the controller fences a broker."),
    _broker("leader.replication.throttled.rate", _L, LONG_MAX,
        "Bytes per second for throttled leaders.", _at_least(0), _CW),
    _broker("follower.replication.throttled.rate", _L, LONG_MAX,
        "Bytes per second for throttled followers.", _at_least(0), _CW),
    _broker("replica.alter.log.dirs.io.max.bytes.per.second", _L, LONG_MAX,
        "Speed of moves between directories.", _at_least(0), _CW),
    # groups and coordinators
    _broker("offsets.topic.num.partitions", _I, 50, "Partitions of __consumer_offsets.", _at_least(1)),
    _broker("offsets.topic.replication.factor", _H, 3,
        "Replicas of __consumer_offsets; on a cluster with fewer brokers, as many as there are.", _at_least(1)),
    _broker("offsets.topic.segment.bytes", _I, 100 * _MIB, "Segment size of __consumer_offsets.", _at_least(1)),
    _broker("offsets.topic.compression.codec", _I, 0, "Codec (by number) of batches in __consumer_offsets."),
    _broker("offsets.load.buffer.size", _I, 5 * _MIB, "Bytes read at a time when offsets are loaded.", _at_least(1)),
    _broker("offsets.commit.timeout.ms", _I, 5000, "How long a commit may wait for the offsets topic.", _at_least(1)),
    _broker("offsets.retention.minutes", _I, 10080, "How long offsets outlive their group.", _at_least(1)),
    _broker("offsets.retention.check.interval.ms", _L, 600000,
        "How often stale offsets are looked for.", _at_least(1)),
    _broker("offset.metadata.max.bytes", _I, 4096, "Largest note stored beside an offset."),
    _broker("group.min.session.timeout.ms", _I, 6000, "Shortest session a classic member may ask for."),
    _broker("group.max.session.timeout.ms", _I, 1800000, "Longest session a classic member may ask for."),
    _broker("group.initial.rebalance.delay.ms", _I, 3000, "How long a new group waits for more members."),
    _broker("group.max.size", _I, INT_MAX, "Members of one classic group.", _at_least(1)),
    _broker("group.coordinator.rebalance.protocols", _LIST, ("classic", "consumer", "streams"),
        "Group protocols offered.", _unique_items("classic", "consumer", "streams", "share", empty=False)),
    _broker("group.coordinator.append.linger.ms", _I, -1,
        "How long writes of the coordinator wait to be batched.", _at_least(-1)),
    _broker("group.coordinator.threads", _I, 4, "Threads of the coordinator." + _NOT_USED, _at_least(1)),
    _broker("group.consumer.assignors", _LIST, ("uniform", "range"),
        "Assignors a consumer group may use.", _unique_items(empty=False)),
    _broker("group.consumer.migration.policy", _S, "bidirectional",
        "Which changes between protocols a live group may make.",
        _one_of("bidirectional", "upgrade", "downgrade", "disabled")),
    _broker("group.consumer.max.size", _I, INT_MAX, "Members of one consumer group.", _at_least(1)),
    _broker("group.consumer.regex.refresh.interval.ms", _I, 600000,
        "How often topic patterns are matched again.", _at_least(10000)),
    _broker("group.consumer.session.timeout.ms", _I, 45000, "Default of consumer.session.timeout.ms.", _at_least(1)),
    _broker("group.consumer.min.session.timeout.ms", _I, 45000, "Lower limit of it.", _at_least(1)),
    _broker("group.consumer.max.session.timeout.ms", _I, 60000, "Upper limit of it.", _at_least(1)),
    _broker("group.consumer.heartbeat.interval.ms", _I, 5000,
        "Default of consumer.heartbeat.interval.ms.", _at_least(1)),
    _broker("group.consumer.min.heartbeat.interval.ms", _I, 5000, "Lower limit of it.", _at_least(1)),
    _broker("group.consumer.max.heartbeat.interval.ms", _I, 15000, "Upper limit of it.", _at_least(1)),
    _broker("group.consumer.assignment.interval.ms", _I, 1000,
        "Default of consumer.assignment.interval.ms.", _at_least(0), _CW),
    _broker("group.consumer.min.assignment.interval.ms", _I, 0, "Lower limit of it.", _at_least(0)),
    _broker("group.consumer.max.assignment.interval.ms", _I, 15000, "Upper limit of it.", _at_least(0)),
    # share groups
    _broker("group.share.max.size", _I, 200, "Members of one share group.", _between(1, 1000)),
    _broker("group.share.max.share.sessions", _I, 2000, "Share sessions kept.", _at_least(1)),
    _broker("group.share.assignors", _LIST, ("simple",),
        "Assignors a share group may use.", _unique_items(empty=False)),
    _broker("group.share.session.timeout.ms", _I, 45000, "Default of share.session.timeout.ms.", _at_least(1)),
    _broker("group.share.min.session.timeout.ms", _I, 45000, "Lower limit of it.", _at_least(1)),
    _broker("group.share.max.session.timeout.ms", _I, 60000, "Upper limit of it.", _at_least(1)),
    _broker("group.share.heartbeat.interval.ms", _I, 5000, "Default of share.heartbeat.interval.ms.", _at_least(1)),
    _broker("group.share.min.heartbeat.interval.ms", _I, 5000, "Lower limit of it.", _at_least(1)),
    _broker("group.share.max.heartbeat.interval.ms", _I, 15000, "Upper limit of it.", _at_least(1)),
    _broker("group.share.assignment.interval.ms", _I, 1000,
        "Default of share.assignment.interval.ms.", _at_least(0), _CW),
    _broker("group.share.min.assignment.interval.ms", _I, 0, "Lower limit of it.", _at_least(0)),
    _broker("group.share.max.assignment.interval.ms", _I, 15000, "Upper limit of it.", _at_least(0)),
    _broker("group.share.record.lock.duration.ms", _I, 30000,
        "Default of share.record.lock.duration.ms.", _between(1000, 3600000)),
    _broker("group.share.min.record.lock.duration.ms", _I, 15000, "Lower limit of it.", _between(1000, 30000)),
    _broker("group.share.max.record.lock.duration.ms", _I, 60000, "Upper limit of it.", _between(30000, 3600000)),
    _broker("group.share.delivery.count.limit", _I, 5, "Default of share.delivery.count.limit.", _between(2, 10)),
    _broker("group.share.min.delivery.count.limit", _I, 2, "Lower limit of it.", _between(2, 5)),
    _broker("group.share.max.delivery.count.limit", _I, 10, "Upper limit of it.", _between(5, 25)),
    _broker("group.share.partition.max.record.locks", _I, 2000,
        "Default of share.partition.max.record.locks.", _between(100, 10000)),
    _broker("group.share.min.partition.max.record.locks", _I, 100, "Lower limit of it.", _between(100, 2000)),
    _broker("group.share.max.partition.max.record.locks", _I, 4000, "Upper limit of it.", _between(2000, 10000)),
    _broker("share.coordinator.state.topic.num.partitions", _I, 50,
        "Partitions of __share_group_state.", _at_least(1)),
    _broker("share.coordinator.state.topic.replication.factor", _H, 3,
        "Replicas of __share_group_state; on a cluster with fewer brokers, as many as there are.", _at_least(1)),
    _broker("share.coordinator.state.topic.min.isr", _H, 2,
        "min.insync.replicas of __share_group_state; never more than its replicas.", _at_least(1)),
    _broker("share.coordinator.state.topic.segment.bytes", _I, 100 * _MIB, "Segment size of it.", _at_least(1)),
    # transactions
    _broker("transaction.state.log.num.partitions", _I, 50, "Partitions of __transaction_state.", _at_least(1)),
    _broker("transaction.state.log.replication.factor", _H, 3,
        "Replicas of __transaction_state; on a cluster with fewer brokers, as many as there are.", _at_least(1)),
    _broker("transaction.state.log.min.isr", _I, 2,
        "min.insync.replicas of __transaction_state; never more than its replicas.", _at_least(1)),
    _broker("transaction.state.log.segment.bytes", _I, 100 * _MIB, "Segment size of it.", _at_least(1)),
    _broker("transaction.max.timeout.ms", _I, 900000, "Longest transaction a producer may ask for.", _at_least(1)),
    _broker("transactional.id.expiration.ms", _I, 7 * _DAY_MS,
        "An unused transactional id is forgotten after this.", _at_least(1)),
    _broker("transaction.abort.timed.out.transaction.cleanup.interval.ms", _I, 10000,
        "How often transactions that ran out of time are looked for.", _at_least(1)),
    _broker("transaction.remove.expired.transaction.cleanup.interval.ms", _I, 3600000,
        "How often expired transactional ids are looked for.", _at_least(1)),
    _broker("transaction.partition.verification.enable", _B, True,
        "Check that a partition belongs to the transaction before appending to it.", None, _CW),
    # quotas
    _broker("quota.window.num", _I, 11, "Samples kept for client quotas.", _at_least(1)),
    _broker("quota.window.size.seconds", _I, 1, "Length of a sample.", _at_least(1)),
    _broker("controller.quota.window.num", _I, 11, "Samples kept for the controller's quota.", _at_least(1)),
    _broker("controller.quota.window.size.seconds", _I, 1, "Length of a sample.", _at_least(1)),
    _broker("replication.quota.window.num", _I, 11, "Samples kept for replication quotas.", _at_least(1)),
    _broker("replication.quota.window.size.seconds", _I, 1, "Length of a sample.", _at_least(1)),
    # coordination
    _broker("zookeeper.connect", _S, None,
        "The ZooKeeper ensemble, host:port,...[/path]; without it a single broker keeps its metadata in metadata.db."),
    _broker("zookeeper.session.timeout.ms", _I, 6000,
        "Silence after which ZooKeeper takes a broker for dead; shorter than Kafka's 18000.", _at_least(1)),
    _broker("zookeeper.connection.timeout.ms", _I, None,
        "How long a start waits for ZooKeeper (default: the session timeout).", _at_least(1)),
    _broker("zookeeper.max.in.flight.requests", _I, 10, "Requests to ZooKeeper at a time.", _at_least(1)),
    # security, declared so that secrets are known as such
    _broker("sasl.enabled.mechanisms", _LIST, ("GSSAPI",), "Ways to log in." + _RESERVED),
    _broker("sasl.jaas.config", _PASSWORD, None, "Login settings." + _RESERVED, None, _PB),
    _broker("sasl.mechanism.inter.broker.protocol", _S, "GSSAPI", "How brokers log in to each other." + _RESERVED),
    _broker("ssl.client.auth", _S, "none",
        "Whether clients must show a certificate." + _RESERVED, _one_of("required", "requested", "none"), _PB),
    _broker("ssl.key.password", _PASSWORD, None, "Password of the private key." + _RESERVED, None, _PB),
    _broker("ssl.keystore.certificate.chain", _PASSWORD, None, "Certificates in PEM form." + _RESERVED, None, _PB),
    _broker("ssl.keystore.key", _PASSWORD, None, "Private key in PEM form." + _RESERVED, None, _PB),
    _broker("ssl.keystore.location", _S, None, "File with certificate and key." + _RESERVED, None, _PB),
    _broker("ssl.keystore.password", _PASSWORD, None, "Password of that file." + _RESERVED, None, _PB),
    _broker("ssl.keystore.type", _S, "JKS", "Format of that file." + _RESERVED, None, _PB),
    _broker("ssl.truststore.certificates", _PASSWORD, None,
        "Trusted certificates in PEM form." + _RESERVED, None, _PB),
    _broker("ssl.truststore.location", _S, None, "File with trusted certificates." + _RESERVED, None, _PB),
    _broker("ssl.truststore.password", _PASSWORD, None, "Password of that file." + _RESERVED, None, _PB),
    _broker("ssl.truststore.type", _S, "JKS", "Format of that file." + _RESERVED, None, _PB),
    _broker("super.users", _S, "", "Principals that may do everything." + _RESERVED),
)
# fmt: on

_FOREIGN: Final = re.compile(
    r"(process\.roles|controller\.(quorum|listener)\..*|metadata\.log\..*|metadata\.max\..*|metric\.reporters"
    r"|metrics\.(num\.samples|recording\.level|sample\.window\.ms)|auto\.include\.jmx\.reporter"
    r"|remote\.log\.(?!copy|delete).*|eligible\.leader\.replicas\..*|initial\.broker\.registration\.timeout\.ms"
    r"|offsets\.topic\.cleanup\..*|group\.streams\..*|.*\.purgatory\.purge\.interval\.requests)\Z"
)
"""Names in a Kafka broker's own file that have no meaning here: reported by `BrokerConfig.ignored`, not refused."""


def _derived_broker_settings() -> Iterator[Setting]:
    """The broker-wide default of each topic setting that has exactly one, with the topic setting's own rule."""
    for topic in _TOPIC_SETTINGS:
        if len(topic.synonyms) == 1:
            doc = f"Default of the topic setting {topic.name}."
            yield _broker(topic.synonyms[0].name, topic.kind, topic.default, doc, topic.check, Update.CLUSTER_WIDE)


def _table(settings: Iterable[Setting]) -> dict[str, Setting]:
    return {setting.name: setting for setting in sorted(settings, key=lambda setting: setting.name)}


BROKER_SETTINGS: Final[Mapping[str, Setting]] = _table([*_BROKER_SETTINGS, *_derived_broker_settings()])
TOPIC_SETTINGS: Final[Mapping[str, Setting]] = _table(_TOPIC_SETTINGS)
GROUP_SETTINGS: Final[Mapping[str, Setting]] = _table(_GROUP_SETTINGS)
CLIENT_METRICS_SETTINGS: Final[Mapping[str, Setting]] = _table(_CLIENT_METRICS_SETTINGS)
SETTINGS: Final[Mapping[Scope, Mapping[str, Setting]]] = {
    Scope.BROKER: BROKER_SETTINGS,
    Scope.TOPIC: TOPIC_SETTINGS,
    Scope.GROUP: GROUP_SETTINGS,
    Scope.CLIENT_METRICS: CLIENT_METRICS_SETTINGS,
}

# Broker settings that are one thing in several units; a lookup of any of them shows them all.
_BROKER_FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    synonym.name: tuple(other.name for other in topic.synonyms)
    for topic in _TOPIC_SETTINGS
    for synonym in topic.synonyms
    if len(topic.synonyms) > 1
}

SUPPORTED_SECURITY_PROTOCOLS: Final = frozenset({"PLAINTEXT"})


# --- values -----------------------------------------------------------------------------------------------------------

_INTEGER_RANGE: Final = {Kind.SHORT: 2**15, Kind.INT: 2**31, Kind.LONG: 2**63}


def parse_value(setting: Setting, text: str) -> Value:
    """The typed value of `text`; a ConfigError says what is wrong with it (and never repeats a secret)."""
    value = _parse(setting, text.strip())
    problem = setting.check(value) if setting.check is not None else None
    if problem is not None:
        raise ConfigError(f"{setting.name}={_shown(setting, text)}: {problem}")
    return value


def _parse(setting: Setting, text: str) -> Value:
    kind = setting.kind
    if kind is Kind.BOOLEAN:
        lowered = text.lower()
        if lowered in {"true", "false"}:
            return lowered == "true"
        raise ConfigError(f"{setting.name}={_shown(setting, text)}: expected true or false")
    if kind in _INTEGER_RANGE:
        limit = _INTEGER_RANGE[kind]
        # int() would also take underscores and digits of other scripts, and convert megabytes of digits.
        if re.fullmatch(r"[+-]?[0-9]{1,20}", text, re.ASCII) and -limit <= (number := int(text)) < limit:
            return number
        raise ConfigError(f"{setting.name}={_shown(setting, text)}: expected a whole number ({kind.name.lower()})")
    if kind is Kind.DOUBLE:
        if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?", text, re.ASCII):
            return float(text)
        raise ConfigError(f"{setting.name}={_shown(setting, text)}: expected a number")
    if kind is Kind.LIST:
        return tuple(item.strip() for item in text.split(",")) if text else ()
    return text


def _shown(setting: Setting, text: str) -> str:
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


def find_setting(scope: Scope, name: str) -> Setting:
    """The row called `name`; a ConfigError suggests the nearest names where there is none."""
    setting = SETTINGS[scope].get(name)
    if setting is None:
        near = _nearest(scope, name[:100])
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ConfigError(f"unknown {scope.value} setting {name[:100]!r}{hint}")
    return setting


def _nearest(scope: Scope, name: str) -> list[str]:
    # Comparing with every name takes milliseconds, and a request may hold thousands of unknown names.
    words = set(name.split("."))
    by_words = sorted(SETTINGS[scope], key=lambda other: len(words.intersection(other.split("."))), reverse=True)
    return difflib.get_close_matches(name, by_words[:10], n=2)


def validate_overrides(scope: Scope, configs: Mapping[str, str], broker: BrokerConfig) -> None:
    """Check the complete set of overrides of one topic, group or client-metrics subscription; ConfigError if wrong."""
    for name, text in configs.items():
        setting = find_setting(scope, name)
        value = parse_value(setting, text)
        if setting.bounds is not None:
            low, high = (broker.get_int(bound) for bound in setting.bounds)
            if not low <= _whole_number(value) <= high:
                raise ConfigError(f"{name}={text}: must be between {low} and {high} on this cluster")
    if scope is Scope.CLIENT_METRICS and "match" in configs:
        _check_match(configs["match"])


def _whole_number(value: Value) -> int:
    """`value`, which the table says is a whole number."""
    if not isinstance(value, int):
        raise TypeError(f"not a whole number: {value!r}")
    return value


_MATCH_KEYS: Final = (
    "client_instance_id", "client_id", "client_software_name", "client_software_version", "client_source_address",
    "client_source_port",
)  # fmt: skip


def _check_match(text: str) -> None:
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, pattern = pair.partition("=")
        if not equals or key.strip() not in _MATCH_KEYS:
            raise ConfigError(f"match={pair[:100]}: expected name=pattern with a name of {', '.join(_MATCH_KEYS)}")
        try:
            re.compile(pattern.strip())
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(f"match={pair[:100]}: not a regular expression ({error})") from None


def validate_dynamic_broker(configs: Mapping[str, str], *, per_broker: bool) -> None:
    """Check the complete dynamic settings of one broker, or of all (`per_broker` false); ConfigError if wrong."""
    for name, text in configs.items():
        setting = find_setting(Scope.BROKER, name)
        if setting.update is Update.READ_ONLY:
            raise ConfigError(f"{name} cannot change while brokers run")
        if setting.update is Update.PER_BROKER and not per_broker:
            raise ConfigError(f"{name} can be set only for one broker, not for all")
        parse_value(setting, text)


# --- the broker's configuration ---------------------------------------------------------------------------------------


class BrokerConfig:
    """What one broker was told: file, overrides and, on top, the dynamic settings of the cluster.

    Static values never change. Dynamic ones are replaced as a whole by `apply_dynamic`, called on the loop by the
    owner of the cluster image, so a holder of this object always reads current values.
    """

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._static: dict[str, str] = {}
        self.ignored: tuple[str, ...] = ()
        """Names that were given but mean nothing here (KRaft's, JMX's): worth a warning, not an error."""
        self._dynamic_default: Mapping[str, str] = {}
        self._dynamic: Mapping[str, str] = {}
        self._parsed: dict[str, Value] = {}
        ignored = []
        for name, text in (values or {}).items():
            if name not in BROKER_SETTINGS and _FOREIGN.match(name):
                ignored.append(name)
                continue
            parse_value(find_setting(Scope.BROKER, name), text)
            self._static[name] = text.strip()
        self.ignored = tuple(ignored)
        self.listeners: tuple[Listener, ...] = parse_listeners(
            self.get_list("listeners"), self.get_str("listener.security.protocol.map"), "listeners"
        )
        self.advertised_listeners: tuple[Listener, ...] = self._advertised()

    @classmethod
    def load(
        cls, properties_path: str | Path | None = None, overrides: Mapping[str, str] | None = None
    ) -> BrokerConfig:
        """Read a .properties file (if any) and put `overrides` on top; any mistake is a ConfigError."""
        values: dict[str, str] = {}
        if properties_path is not None:
            try:
                raw = Path(properties_path).read_bytes()
            except OSError as error:
                raise ConfigError(f"cannot read {properties_path}: {error.strerror or error}") from None
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError:
                text = raw.decode("latin-1")  # what Java assumes
            values.update(parse_properties(text))
        values.update(overrides or {})
        return cls(values)

    def _advertised(self) -> tuple[Listener, ...]:
        entries = self.get("advertised.listeners")
        if entries is None:
            return self.listeners
        advertised = parse_listeners(entries, self.get_str("listener.security.protocol.map"), "advertised.listeners")
        names = {listener.name for listener in self.listeners}
        for listener in advertised:
            if listener.name not in names:
                raise ConfigError(f"advertised.listeners: {listener.name} is not a name in listeners")
            if listener.host in {"0.0.0.0", "::", ""}:  # noqa: S104 - refused, not bound
                raise ConfigError(f"advertised.listeners: {listener} is not an address a client can connect to")
        told = {listener.name: listener for listener in advertised}
        return tuple(told.get(listener.name, listener) for listener in self.listeners)

    # Lookups. `get` is the general one; the others say the type for the reader and for mypy.

    def get(self, name: str) -> Any:
        """The current value of the broker setting `name`; KeyError for a name that is not in the table."""
        try:
            return self._parsed[name]
        except KeyError:
            value = self._parsed[name] = self._lookup(name)
            return value

    __getitem__ = get

    def get_int(self, name: str) -> int:
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is not a whole number")
        return value

    def get_float(self, name: str) -> float:
        return float(self.get(name))

    def get_bool(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise TypeError(f"{name} is not a boolean")
        return value

    def get_str(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise TypeError(f"{name} is not a string")
        return value

    def get_list(self, name: str) -> tuple[str, ...]:
        value = self.get(name)
        if not isinstance(value, tuple):
            raise TypeError(f"{name} is not a list")
        return value

    def is_set(self, name: str) -> bool:
        """Whether anybody gave `name` a value, statically or dynamically."""
        return name in self._static or name in self._dynamic or name in self._dynamic_default

    @property
    def broker_id(self) -> int:
        node_id = self.get("node.id")
        return self.get_int("broker.id") if node_id is None else _whole_number(node_id)

    @property
    def rack(self) -> str | None:
        rack = self.get("broker.rack")
        return str(rack) if rack else None

    @property
    def log_dirs(self) -> tuple[str, ...]:
        return self.get("log.dirs") or self.get_list("log.dir")

    def apply_dynamic(self, cluster_default: Mapping[str, str], own: Mapping[str, str]) -> None:
        """Replace the dynamic layers; a value that no longer passes its rule is left out, not obeyed."""
        self._dynamic_default = _obeyable(cluster_default)
        self._dynamic = _obeyable(own)
        self._parsed = {}

    def _lookup(self, name: str) -> Value:
        setting = BROKER_SETTINGS[name]
        for layer in (self._dynamic, self._dynamic_default, self._static):
            if name in layer:
                return parse_value(setting, layer[name])
        return setting.default

    def found(self, name: str) -> Iterator[ConfigSynonym]:
        """Every layer that has a value for the broker setting `name` or its siblings in other units, best first."""
        family = _BROKER_FAMILIES.get(name, (name,))
        layers = (
            (self._dynamic, ConfigSource.DYNAMIC_BROKER_CONFIG),
            (self._dynamic_default, ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG),
            (self._static, ConfigSource.STATIC_BROKER_CONFIG),
        )
        for layer, source in layers:
            for member in family:
                if member in layer:
                    hidden = BROKER_SETTINGS[member].sensitive
                    yield ConfigSynonym(member, None if hidden else layer[member], source)
        for member in family:
            setting = BROKER_SETTINGS[member]
            if setting.default is not None:
                text = None if setting.sensitive else format_value(setting.default)
                yield ConfigSynonym(member, text, ConfigSource.DEFAULT_CONFIG)

    def derived(self, setting: Setting) -> Value:
        """What this broker's settings say about a topic or group setting that has no override."""
        for synonym in setting.synonyms:  # the finest unit comes first, and only the coarsest has a default
            value = self.get(synonym.name)
            if value is not None:
                return _scaled(value, synonym.factor)
        return setting.default

    def __repr__(self) -> str:
        shown = {name: _shown(BROKER_SETTINGS[name], text) for name, text in sorted(self._static.items())}
        return f"BrokerConfig({shown}, dynamic={sorted({*self._dynamic, *self._dynamic_default})})"


def _obeyable(configs: Mapping[str, str]) -> dict[str, str]:
    kept = {}
    for name, text in configs.items():
        try:
            parse_value(find_setting(Scope.BROKER, name), text)
        except ConfigError:
            continue
        kept[name] = text
    return kept


def _scaled(value: Value, factor: int) -> Value:
    if factor == 1 or not isinstance(value, int):
        return value
    return -1 if value < 0 else value * factor


# --- topics, groups ---------------------------------------------------------------------------------------------------


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

    @property
    def compact(self) -> bool:
        return "compact" in self.cleanup_policy

    @property
    def delete(self) -> bool:
        return "delete" in self.cleanup_policy


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
            value = min(max(_whole_number(value), low), high)
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


def describe_broker(broker: BrokerConfig) -> list[ConfigEntry]:
    """Every setting of this broker."""
    table = BROKER_SETTINGS.values()
    return [_describe_broker(setting, tuple(broker.found(setting.name)), broker) for setting in table]


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


# --- files and listeners ----------------------------------------------------------------------------------------------

_ESCAPES: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def parse_properties(text: str) -> dict[str, str]:
    """Java's .properties syntax: comments, `=`, `:` or blanks as separator, continued lines and escapes."""
    values: dict[str, str] = {}
    for number, line in _logical_lines(text):
        name, value = _split_property(line)
        if not name:
            raise ConfigError(f"line {number} has no name: {line[:60]!r}")
        values[_unescape(name, number)] = _unescape(value, number)
    return values


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    pending: str | None = None
    first = 0
    for number, raw in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        line = raw.lstrip(" \t\f")
        if pending is None:
            if not line or line[0] in "#!":
                continue
            pending, first = "", number
        pending += line
        backslashes = len(pending) - len(pending.rstrip("\\"))
        if backslashes % 2:
            pending = pending[:-1]
            continue
        yield first, pending
        pending = None
    if pending:
        yield first, pending


def _split_property(line: str) -> tuple[str, str]:
    end = 0
    while end < len(line) and line[end] not in "=: \t\f":
        end += 2 if line[end] == "\\" else 1
    name, rest = line[:end], line[end:].lstrip(" \t\f")
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(" \t\f")
    return name, rest


def _unescape(text: str, number: int) -> str:
    def replace(match: re.Match[str]) -> str:
        escape = match.group(1)
        if escape[0] == "u":
            if len(escape) != 5:
                raise ConfigError(f"line {number}: \\u needs four hexadecimal digits")
            return chr(int(escape[1:], 16))
        return _ESCAPES.get(escape, escape)

    return re.sub(r"\\(u[0-9a-fA-F]{4}|.)", replace, text, flags=re.DOTALL)


def parse_listeners(entries: Iterable[str], protocol_map: str, setting: str) -> tuple[Listener, ...]:
    """Listeners from NAME://host:port texts; ConfigError for a bad one, a name twice, or a protocol we cannot speak."""
    protocols: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in protocol_map.split(","))):
        name, colon, protocol = pair.partition(":")
        if not colon or protocol not in {"PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"}:
            raise ConfigError(f"listener.security.protocol.map: {pair!r} is not NAME:PROTOCOL")
        protocols[name.strip().upper()] = protocol
    listeners: list[Listener] = []
    for entry in entries:
        listener = _parse_listener(entry, protocols, setting)
        if any(other.name == listener.name for other in listeners):
            raise ConfigError(f"{setting}: the name {listener.name} stands there twice")
        if listener.port and any((other.host, other.port) == (listener.host, listener.port) for other in listeners):
            raise ConfigError(f"{setting}: port {listener.port} stands there twice")
        listeners.append(listener)
    return tuple(listeners)


def _parse_listener(entry: str, protocols: Mapping[str, str], setting: str) -> Listener:
    match = re.fullmatch(r"([A-Za-z0-9_.-]+)://(\[[0-9A-Fa-f:.%]*\]|[^:/\[\]]*):([0-9]{1,5})", entry.strip(), re.ASCII)
    if match is None:
        raise ConfigError(f"{setting}: {entry[:100]!r} is not NAME://host:port")
    name, host, port = match.group(1).upper(), match.group(2).strip("[]"), int(match.group(3))
    if port > 65535:
        raise ConfigError(f"{setting}: port {port} does not exist")
    protocol = protocols.get(name)
    if protocol is None:
        raise ConfigError(f"{setting}: {name} is not in listener.security.protocol.map")
    if protocol not in SUPPORTED_SECURITY_PROTOCOLS:
        raise ConfigError(f"{setting}: {name} needs {protocol}, which is not available yet; use PLAINTEXT")
    return Listener(name, protocol, host, port)


# --- documentation ----------------------------------------------------------------------------------------------------


def configuration_markdown() -> str:
    """The text of docs/configuration.md."""
    parts = [
        "# Configuration\n",
        (
            "Generated from the table in `src/millrace/config.py`; a test keeps the two equal. Names and defaults are"
            " Kafka's unless the text says otherwise. A value is looked up in this order: the topic's (or group's) own,"
            " dynamic for this broker, dynamic for all brokers, the broker's file and `--set`, the default.\n"
        ),
    ]
    titles = {
        Scope.TOPIC: "Topic settings",
        Scope.BROKER: "Broker settings",
        Scope.GROUP: "Group settings",
        Scope.CLIENT_METRICS: "Client metrics subscriptions",
    }
    for scope, title in titles.items():
        last = "broker default" if scope in {Scope.TOPIC, Scope.GROUP} else "changes"
        parts.append(f"## {title}\n")
        parts.append(f"| name | type | default | {last} | meaning |\n|---|---|---|---|---|")
        for setting in SETTINGS[scope].values():
            if setting.hidden:
                continue
            if last == "changes":
                note = setting.update.value
            else:
                note = ", ".join(f"`{synonym.name}`" for synonym in setting.synonyms) or "-"
            default = format_value(setting.default)
            shown = "none" if default is None else f"`{default}`" if default else "empty"
            parts.append(f"| `{setting.name}` | {setting.kind.name.lower()} | {shown} | {note} | {setting.doc} |")
        parts.append("")
    return "\n".join(parts)
