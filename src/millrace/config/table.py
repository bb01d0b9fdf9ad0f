"""Every setting by its Kafka name: type, default, rule, scope and meaning.

Names and defaults are Kafka 4.3's; the few that differ or are new say so in their text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from millrace.config.setting import (
    INT_MAX,
    LONG_MAX,
    Check,
    Kind,
    Scope,
    Setting,
    Synonym,
    Update,
    Value,
    at_least,
    between,
    dead_letter_topic,
    group_protocols,
    gzip_level,
    host_and_port,
    known_authorizer,
    limits_of_addresses,
    offset_reset,
    one_of,
    throttled_replicas,
    unique_items,
    unlimited_or_positive,
)
from millrace.config.without_effect import NO_EFFECT, ONLY_DEFAULT, has_no_effect, settings_without_effect
from millrace.errors import ConfigError

_SECOND_MS: Final = 1000
_MINUTE_MS: Final = 60 * _SECOND_MS
_HOUR_MS: Final = 60 * _MINUTE_MS
_DAY_MS: Final = 24 * _HOUR_MS
_MIB: Final = 1024 * 1024

_NOT_USED = NO_EFFECT
_OF_DELETED_LOGS: Final = (
    " The files of a deleted topic, and of a replica that was moved away, stay as long, in directories whose names end"
    " in `-delete`."
)

LISTENER_PREFIX: Final = "listener.name."
SASL_MECHANISMS: Final = ("plain", "scram-sha-256", "scram-sha-512", "oauthbearer")
_PER_MECHANISM: Final = ("sasl.", "connections.max.reauth.ms")
_PER_LISTENER: Final = ("ssl.", "sasl.", "connections.max.reauth.ms", "max.connection", "principal.builder.class")
"""How the names of settings begin that a listener may have for itself."""
_NOT_PER_LISTENER: Final = "max.connections.per.ip"

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
        unique_items("compact", "delete"), "log.cleanup.policy"),
    _topic("compression.gzip.level", _I, -1,
        "Level used when the broker recompresses to gzip (-1: the codec's own).",
        gzip_level, "compression.gzip.level"),
    _topic("compression.lz4.level", _I, 9,
        "Level used when the broker recompresses to lz4; 9 is the fast way, as in Kafka, any other a thorough one.",
        between(1, 17), "compression.lz4.level"),
    _topic("compression.type", _S, "producer",
        "Codec of stored batches; `producer` keeps what the producer chose, and then batches are stored untouched.",
        one_of(*_CODECS), "compression.type"),
    _topic("compression.zstd.level", _I, 3,
        "Level used when the broker recompresses to zstd.", between(-131072, 22), "compression.zstd.level"),
    _topic("delete.retention.ms", _L, _DAY_MS,
        "How long a tombstone survives in a compacted topic.", at_least(0), "log.cleaner.delete.retention.ms"),
    _topic("errors.deadletterqueue.group.enable", _B, False,
        "Let share groups send their dead letters to this topic (KIP-1191)."),
    _topic("file.delete.delay.ms", _L, _MINUTE_MS,
        "How long the files of a segment that retention or DeleteRecords has removed stay on disk, with names that end "
        "in `.deleted`; no longer than the disk has room and the broker runs.",
        at_least(0), "log.segment.delete.delay.ms"),
    _topic("flush.messages", _L, LONG_MAX,
        "Force a disk flush after this many records. Any number turns on what `flush.mode=group` does, which is more.",
        at_least(1), "log.flush.interval.messages"),
    _topic("flush.mode", _S, "group",
        "When data reaches the disk, a setting of millrace: `group` answers acks=all after a flush shared by "
        "every waiting request; `os` leaves flushing to the operating system, as Kafka does by default; "
        "`interval` flushes within flush.ms of a write, or within a second.",
        one_of("group", "os", "interval"), "flush.mode"),
    _topic("flush.ms", _L, LONG_MAX,
        "Force a disk flush of data older than this; in `flush.mode=os` it means `interval`.",
        at_least(0), (Synonym("log.flush.interval.ms"), Synonym("log.flush.scheduler.interval.ms"))),
    _topic("follower.replication.throttled.replicas", _LIST, (),
        "Replicas whose following is throttled: partition:broker pairs, or * for all.", throttled_replicas),
    _topic("index.interval.bytes", _I, 4096,
        "One entry in the offset index per this many bytes of log.", at_least(0), "log.index.interval.bytes"),
    _topic("leader.replication.throttled.replicas", _LIST, (),
        "Replicas whose leader throttles what they read: partition:broker pairs, or * for all.", throttled_replicas),
    _topic("local.retention.bytes", _L, -2,
        "Local size limit with tiered storage (-2: as retention.bytes)." + _NOT_USED,
        at_least(-2), "log.local.retention.bytes"),
    _topic("local.retention.ms", _L, -2,
        "Local age limit with tiered storage (-2: as retention.ms)." + _NOT_USED,
        at_least(-2), "log.local.retention.ms"),
    _topic("max.compaction.lag.ms", _L, LONG_MAX,
        "A record is compacted at the latest after this time.", at_least(1), "log.cleaner.max.compaction.lag.ms"),
    _topic("max.message.bytes", _I, _MIB + 12,
        "Largest record batch accepted, after compression.", at_least(0), "message.max.bytes"),
    _topic("message.timestamp.after.max.ms", _L, _HOUR_MS,
        "How far ahead of the broker's clock a record's timestamp may be (CreateTime only).",
        at_least(0), "log.message.timestamp.after.max.ms"),
    _topic("message.timestamp.before.max.ms", _L, LONG_MAX,
        "How far behind the broker's clock a record's timestamp may be (CreateTime only).",
        at_least(0), "log.message.timestamp.before.max.ms"),
    _topic("message.timestamp.type", _S, "CreateTime",
        "Whose clock stamps records: the producer's or the broker's.",
        one_of("CreateTime", "LogAppendTime"), "log.message.timestamp.type"),
    _topic("min.cleanable.dirty.ratio", _D, 0.5,
        "Share of uncompacted bytes from which a log is compacted.",
        between(0, 1), "log.cleaner.min.cleanable.ratio"),
    _topic("min.compaction.lag.ms", _L, 0,
        "A record stays uncompacted at least this long.", at_least(0), "log.cleaner.min.compaction.lag.ms"),
    _topic("min.insync.replicas", _I, 1,
        "In-sync replicas that acks=all needs; with fewer the write is refused.",
        at_least(1), "min.insync.replicas"),
    _topic("preallocate", _B, False,
        "Reserve a segment's disk space when it is made. Here a file has the size of what is in it." + _NOT_USED,
        None, "log.preallocate"),
    _topic("remote.log.copy.disable", _B, False, "Stop copying to tiered storage." + _NOT_USED),
    _topic("remote.log.delete.on.disable", _B, False, "Delete tiered data when tiering is switched off." + _NOT_USED),
    _topic("remote.storage.enable", _B, False,
        "Tiered storage." + ONLY_DEFAULT,
        lambda value: "tiered storage is not available, so it must be false" if value else None),
    _topic("retention.bytes", _L, -1,
        "Size per partition beyond which old segments go (-1: no limit).", None, "log.retention.bytes"),
    _topic("retention.ms", _L, 7 * _DAY_MS,
        "Age beyond which old segments go (-1: no limit).",
        at_least(-1), _RETENTION_SYNONYMS),
    _topic("segment.bytes", _I, 1024 * _MIB,
        "Size at which a new segment file begins.", at_least(_MIB), "log.segment.bytes"),
    _topic("segment.index.bytes", _I, 10 * _MIB,
        "Largest size of an index file.", at_least(4), "log.index.size.max.bytes"),
    _topic("segment.jitter.ms", _L, 0,
        "The most that is taken off segment.ms, another random time for each segment, so that they do not all roll at "
        "once.",
        at_least(0), (Synonym("log.roll.jitter.ms"), Synonym("log.roll.jitter.hours", _HOUR_MS))),
    _topic("segment.ms", _L, 7 * _DAY_MS,
        "Age at which a new segment begins even if the old one is not full.",
        at_least(1), (Synonym("log.roll.ms"), Synonym("log.roll.hours", _HOUR_MS))),
    _topic("unclean.leader.election.enable", _B, False,
        "Let a replica that lost records become leader when no other is left; this loses acknowledged data.",
        None, "unclean.leader.election.enable"),
    _topic("validate.records", _B, False,
        "Look at every record of a produced batch, not only at its header and checksum, a setting of millrace: a batch "
        "with broken records is then refused. Compacted topics always do.", None, "validate.records"),
    _topic("internal.segment.bytes", _I, None, "A segment.bytes without its lower limit.", at_least(1), hidden=True),
)
# fmt: on

# fmt: off
_GROUP_SETTINGS: Final = (
    _group("consumer.assignment.interval.ms", _I, 1000,
        "Shortest time between two assignments of a consumer group.", at_least(0)),
    _group("consumer.heartbeat.interval.ms", _I, 5000, "How often members of a consumer group report.", at_least(1)),
    _group("consumer.session.timeout.ms", _I, 45000,
        "Silence after which a member of a consumer group is removed.", at_least(1)),
    _group("errors.deadletterqueue.copy.record.enable", _B, False,
        "Whether a dead letter has the key, value and headers of its record, or says only which one it was.",
        bounded=False),
    _group("errors.deadletterqueue.topic.name", _S, "",
        "Where a share group sends the records it gives up (KIP-1191); empty: nowhere.", dead_letter_topic,
        bounded=False),
    _group("share.assignment.interval.ms", _I, 1000,
        "Shortest time between two assignments of a share group.", at_least(0)),
    _group("share.auto.offset.reset", _S, "latest",
        "Where a share group begins on a partition it has not read.", offset_reset, bounded=False),
    _group("share.delivery.count.limit", _I, 5,
        "Deliveries of a record before a share group gives it up.", at_least(2)),
    _group("share.heartbeat.interval.ms", _I, 5000, "How often members of a share group report.", at_least(1)),
    _group("share.isolation.level", _S, "read_uncommitted",
        "Whether a share group sees uncommitted records.",
        one_of("read_committed", "read_uncommitted"), bounded=False),
    _group("share.partition.max.record.locks", _I, 2000,
        "Records of one partition a share group may hold at once.", at_least(100)),
    _group("share.record.lock.duration.ms", _I, 30000,
        "How long a share group's member holds a record.", at_least(1000)),
    _group("share.redelivery.backoff.max.ms", _I, 60000,
        "Longest rest of a record between two deliveries, a setting of millrace.", at_least(0), bounded=False),
    _group("share.redelivery.backoff.ms", _I, 0,
        "How long a record rests after its first failed delivery, twice as long after each further one, a setting of "
        "millrace; 0: not at all.", at_least(0), bounded=False),
    _group("share.renew.acknowledge.enable", _B, True,
        "Whether a member may prolong its hold on a record.", bounded=False),
    _group("share.session.timeout.ms", _I, 45000,
        "Silence after which a member of a share group is removed.", at_least(1)),
)
# fmt: on

# fmt: off
_CLIENT_METRICS_SETTINGS: Final = (
    Setting("interval.ms", _I, 5 * _MINUTE_MS,
        "How often matching clients push their metrics.",
        Scope.CLIENT_METRICS, between(100, _HOUR_MS), Update.CLUSTER_WIDE),
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
    _broker("broker.id", _I, 1, "This broker's number; node.id is the same and wins.", at_least(0)),
    _broker("node.id", _I, None, "This broker's number, by KRaft's name.", at_least(0)),
    _broker("broker.rack", _S, None, "Where this broker stands; replicas of a partition are spread over racks."),
    _broker("listeners", _LIST, ("PLAINTEXT://:9092",),
        "Where to listen: NAME://host:port. An empty host is every interface, port 0 a free port.",
        unique_items(empty=False)),
    _broker("advertised.listeners", _LIST, None,
        "What clients are told to connect to, if it differs.", unique_items(empty=False)),
    _broker("listener.security.protocol.map", _S,
        "PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL",
        "Which protocol a listener's name stands for."),
    _broker("inter.broker.listener.name", _S, None,
        "The listener on which this broker takes calls of the other brokers, the first one unless told otherwise; "
        "they call it there, whatever their own is."),
    _broker("security.inter.broker.protocol", _S, "PLAINTEXT",
        "The same as inter.broker.listener.name, for a listener that is called by the name of its protocol; only one "
        "of the two may be given.", one_of("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")),
    _broker("num.network.threads", _I, 3, "Threads for sockets." + _NOT_USED, at_least(1), _CW),
    _broker("num.io.threads", _I, 8, "Threads for requests." + _NOT_USED, at_least(1), _CW),
    _broker("background.threads", _I, 10, "Threads for housekeeping." + _NOT_USED, at_least(1), _CW),
    _broker("queued.max.requests", _I, 500,
        "Requests that may wait for a thread. Here none does: each is begun when it has been read, and "
        "queued.max.request.bytes bounds how many are." + _NOT_USED, at_least(1)),
    _broker("queued.max.request.bytes", _L, -1,
        "Memory for requests in flight and answers that clients have not read; when it is used up the broker stops"
        " reading. Answers get three quarters of it at most (-1: 256 MiB)."),
    _broker("socket.request.max.bytes", _I, 100 * _MIB, "Largest request accepted.", at_least(1)),
    _broker("socket.send.buffer.bytes", _I, -1,
        "Send buffer of a socket (-1: the system's, which grows as it is needed). In Kafka the default is 102400.",
        at_least(-1)),
    _broker("socket.receive.buffer.bytes", _I, -1,
        "Receive buffer of a socket (-1: the system's, which grows as it is needed). In Kafka the default is 102400.",
        at_least(-1)),
    _broker("socket.listen.backlog.size", _I, 1024,
        "Connections that may wait to be accepted, as far as the system allows. In Kafka the default is 50.",
        at_least(1)),
    _broker("connections.max.idle.ms", _L, 10 * _MINUTE_MS,
        "A connection silent for this long is closed; one that has to log in and does not, after 30 seconds at most."),
    _broker("connection.failed.authentication.delay.ms", _I, 100,
        "Wait before a failed login is answered and its connection closed.", at_least(0)),
    _broker("max.connections", _I, INT_MAX,
        "Connections in all, and of one listener (listener.name.NAME.max.connections); more are closed at once. Brokers"
        " with a listener of their own are held to its own limit only. Never more than the process has descriptors for:"
        " all but 1,024 of them, or half where that is more.", at_least(0), _CW),
    _broker("max.connections.per.ip", _I, INT_MAX, "Connections from one address.", at_least(0), _CW),
    _broker("max.connections.per.ip.overrides", _S, "",
        "Other limits for some addresses: address:count,... Names of hosts, which Kafka would look up, are refused.",
        limits_of_addresses, _CW),
    _broker("max.connection.creation.rate", _I, INT_MAX,
        "New connections per second, in all, and of one listener (listener.name.NAME.max.connection.creation.rate)."
        " Those that come faster are served later, and closed if that would be in more than 30 seconds. Brokers with"
        " a listener of their own are held to its own rate only.", at_least(0), _CW),
    _broker("request.timeout.ms", _I, 30000,
        "How long a request to change something, which says nothing of that itself, may wait for the controller, and"
        " one to write the ends of transactions for the replicas."),
    _broker("fetch.max.bytes", _I, 55 * _MIB,
        "Most bytes in one fetch answer; fewer if memory for answers is short.", at_least(1024)),
    _broker("max.incremental.fetch.session.cache.slots", _I, 1000, "Fetch sessions kept.", at_least(0)),
    _broker("max.request.partition.size.limit", _I, 2000,
        "Most partitions in one page of DescribeTopicPartitions.", at_least(1)),
    # logs
    _broker("log.dir", _LIST, None, "Where data is kept, if log.dirs is not set.", unique_items(empty=False)),
    _broker("log.dirs", _LIST, None,
        "Directories where data is kept. There is no default: this or log.dir must be set.",
        unique_items(empty=False)),
    _broker("log.dirs.min.free.bytes", _L, 64 * 1024 * 1024,
        "A directory with less free space takes no more records of ordinary topics, and other replicas lead, until"
        " there is twice as much. At most a twentieth of the disk is kept free. 0: a disk is full when a write fails.",
        at_least(0), _CW),
    _broker("num.partitions", _I, 1, "Partitions of a topic whose maker did not say.", at_least(1)),
    _broker("default.replication.factor", _I, 1, "Replicas of a topic whose maker did not say.", at_least(1)),
    _broker("auto.create.topics.enable", _B, True, "Make a topic when a client first asks for it."),
    _broker("delete.topic.enable", _B, True, "Let clients delete topics."),
    _broker("log.retention.ms", _L, None, "Default of retention.ms.", unlimited_or_positive, _CW),
    _broker("log.retention.minutes", _I, None,
        "Default of retention.ms, in minutes, if log.retention.ms is unset.", unlimited_or_positive),
    _broker("log.retention.hours", _I, 168,
        "Default of retention.ms, in hours, if the finer ones are unset.", unlimited_or_positive),
    _broker("log.roll.ms", _L, None, "Default of segment.ms.", None, _CW),
    _broker("log.roll.hours", _I, 168, "Default of segment.ms, in hours, if log.roll.ms is unset.", at_least(1)),
    _broker("log.roll.jitter.ms", _L, None, "Default of segment.jitter.ms.", None, _CW),
    _broker("log.roll.jitter.hours", _I, 0, "Default of segment.jitter.ms, in hours.", at_least(0)),
    _broker("log.flush.interval.ms", _L, None, "Default of flush.ms.", None, _CW),
    _broker("log.flush.scheduler.interval.ms", _L, LONG_MAX,
        "Default of flush.ms, if log.flush.interval.ms is unset. flush.ms is kept without being looked at."),
    _broker("log.flush.offset.checkpoint.interval.ms", _I, 60000,
        "How often recovery points are saved.", at_least(0)),
    _broker("log.flush.start.offset.checkpoint.interval.ms", _I, 60000,
        "How often log start offsets are saved. Here they are with the recovery points, and when DeleteRecords moves "
        "one." + _NOT_USED, at_least(0)),
    _broker("log.retention.check.interval.ms", _L, 5 * _MINUTE_MS, "How often retention is enforced.", at_least(1)),
    _broker("log.initial.task.delay.ms", _L, 30000,
        "Wait after a start before retention is enforced and recovery points are saved for the first time; their "
        "interval where that is shorter.", at_least(0)),
    _broker("log.dir.failure.timeout.ms", _L, 30000,
        "How long a broker with a failed directory stays up when it cannot tell the controller.", at_least(1)),
    _broker("num.recovery.threads.per.data.dir", _I, 2,
        "Threads that check logs after an unclean stop. Here they are checked one after another." + _NOT_USED,
        at_least(1), _CW),
    _broker("log.cleaner.enable", _B, True, "Compaction on or off."),
    _broker("log.cleaner.threads", _I, 1, "Compactions at a time.", at_least(0), _CW),
    _broker("log.cleaner.dedupe.buffer.size", _L, 128 * _MIB, "Memory for the key map of a compaction.", None, _CW),
    _broker("log.cleaner.io.buffer.size", _I, 512 * 1024,
        "Memory for reading and writing in a compaction.", at_least(0), _CW),
    _broker("log.cleaner.io.buffer.load.factor", _D, 0.9, "How full the key map may get.", None, _CW),
    _broker("log.cleaner.io.max.bytes.per.second", _D, 1.7976931348623157e+308,
        "Speed limit of compaction.", None, _CW),
    _broker("log.cleaner.backoff.ms", _L, 15000, "Wait when there is nothing to compact.", at_least(0), _CW),
    _broker("producer.id.expiration.ms", _I, _DAY_MS,
        "A producer is forgotten when this broker has written nothing of it for this long.", at_least(1), _CW),
    # replication
    _broker("replica.lag.time.max.ms", _L, 30000, "A follower behind for this long leaves the in-sync set."),
    _broker("replica.socket.timeout.ms", _I, 30000, "Timeout of a follower's requests."),
    _broker("replica.socket.receive.buffer.bytes", _I, 65536,
        "Receive buffer of a follower's socket. Here it is the system's, which grows as it is needed." + _NOT_USED),
    _broker("replica.fetch.max.bytes", _I, _MIB, "Bytes per partition a follower asks for.", at_least(0)),
    _broker("replica.fetch.wait.max.ms", _I, 500, "How long a follower's fetch may wait for data."),
    _broker("replica.fetch.min.bytes", _I, 1, "Bytes a follower's fetch waits for."),
    _broker("replica.fetch.backoff.ms", _I, 1000, "Wait of a follower after an error.", at_least(0)),
    _broker("replica.fetch.response.max.bytes", _I, 10 * _MIB, "Bytes a follower's fetch may bring.", at_least(0)),
    _broker("num.replica.fetchers", _I, 1,
        "Connections to each leader for following. There is one, for all partitions." + _NOT_USED, at_least(1), _CW),
    _broker("replica.high.watermark.checkpoint.interval.ms", _L, 5000, "How often high watermarks are saved."),
    _broker("replica.selector.class", _S, None,
        "Which replica a consumer is sent to: empty for the leader, or the name of Kafka's RackAwareReplicaSelector."),
    _broker("auto.leader.rebalance.enable", _B, True, "Give leadership back to preferred leaders."),
    _broker("leader.imbalance.check.interval.seconds", _L, 300, "How often leadership is looked at.", at_least(1)),
    _broker("controlled.shutdown.enable", _B, True,
        "Hand leadership over before stopping. Without it the others elect leaders when they find this broker gone."),
    _broker("broker.heartbeat.interval.ms", _I, 2000,
        "How often brokers report to KRaft's controller. Here they have a session with ZooKeeper, and see each other."
        + _NOT_USED),
    _broker("broker.session.timeout.ms", _I, None,
        "Silence after which a broker is taken for dead, by KRaft's name; zookeeper.session.timeout.ms is the same and "
        "wins. In Kafka the default is 9000.", at_least(1)),
    _broker("leader.replication.throttled.rate", _L, LONG_MAX,
        "Bytes per second for throttled leaders.", at_least(0), _CW),
    _broker("follower.replication.throttled.rate", _L, LONG_MAX,
        "Bytes per second for throttled followers.", at_least(0), _CW),
    _broker("replica.alter.log.dirs.io.max.bytes.per.second", _L, LONG_MAX,
        "Speed of moves between directories.", at_least(0), _CW),
    # groups and coordinators
    _broker("offsets.topic.num.partitions", _I, 50, "Partitions of __consumer_offsets.", at_least(1)),
    _broker("offsets.topic.replication.factor", _H, 3,
        "Replicas of __consumer_offsets; with fewer brokers as many as there are, and more as they come.",
        at_least(1)),
    _broker("offsets.topic.segment.bytes", _I, 100 * _MIB, "Segment size of __consumer_offsets.", at_least(1)),
    _broker("offsets.topic.compression.codec", _I, 0,
        "Codec (by number) of batches in __consumer_offsets." + _NOT_USED),
    _broker("offsets.load.buffer.size", _I, 5 * _MIB,
        "Bytes read at a time when offsets are loaded." + _NOT_USED, at_least(1)),
    _broker("offsets.commit.timeout.ms", _I, 5000, "How long a commit may wait for the offsets topic.", at_least(1)),
    _broker("offsets.retention.minutes", _I, 10080, "How long offsets outlive their group.", at_least(1)),
    _broker("offsets.retention.check.interval.ms", _L, 600000,
        "How often stale offsets are looked for.", at_least(1)),
    _broker("offset.metadata.max.bytes", _I, 4096, "Largest note stored beside an offset."),
    _broker("group.min.session.timeout.ms", _I, 6000, "Shortest session a classic member may ask for."),
    _broker("group.max.session.timeout.ms", _I, 1800000, "Longest session a classic member may ask for."),
    _broker("group.initial.rebalance.delay.ms", _I, 3000, "How long a new group waits for more members."),
    _broker("group.max.size", _I, INT_MAX, "Members of one classic group.", at_least(1)),
    _broker("group.coordinator.rebalance.protocols", _LIST, ("classic", "consumer", "streams"),
        "Group protocols offered. Without `consumer` there are no KIP-848 groups; `classic` has to be there, share "
        "groups are served in any case, groups of `streams` are not.", group_protocols),
    _broker("group.coordinator.append.linger.ms", _I, -1,
        "How long writes of the coordinator wait to be batched. Here they never do." + _NOT_USED, at_least(-1)),
    _broker("group.coordinator.threads", _I, 4, "Threads of the coordinator." + _NOT_USED, at_least(1)),
    _broker("group.consumer.assignors", _LIST, ("uniform", "range"),
        "Assignors a consumer group may use, the first unless its members ask for another: `uniform` and `range`. The "
        "names of Java classes are passed over.", unique_items(empty=False)),
    _broker("group.consumer.migration.policy", _S, "bidirectional",
        "Which changes between protocols a live group may make.",
        one_of("bidirectional", "upgrade", "downgrade", "disabled")),
    _broker("group.consumer.max.size", _I, INT_MAX, "Members of one consumer group.", at_least(1)),
    _broker("group.consumer.regex.refresh.interval.ms", _I, 600000,
        "How often topic patterns are matched again." + _NOT_USED + " New topics are seen within a second.",
        at_least(10000)),
    _broker("group.consumer.session.timeout.ms", _I, 45000, "Default of consumer.session.timeout.ms.", at_least(1)),
    _broker("group.consumer.min.session.timeout.ms", _I, 45000, "Lower limit of it.", at_least(1)),
    _broker("group.consumer.max.session.timeout.ms", _I, 60000, "Upper limit of it.", at_least(1)),
    _broker("group.consumer.heartbeat.interval.ms", _I, 5000,
        "Default of consumer.heartbeat.interval.ms.", at_least(1)),
    _broker("group.consumer.min.heartbeat.interval.ms", _I, 5000, "Lower limit of it.", at_least(1)),
    _broker("group.consumer.max.heartbeat.interval.ms", _I, 15000, "Upper limit of it.", at_least(1)),
    _broker("group.consumer.assignment.interval.ms", _I, 1000,
        "Default of consumer.assignment.interval.ms.", at_least(0), _CW),
    _broker("group.consumer.min.assignment.interval.ms", _I, 0, "Lower limit of it.", at_least(0)),
    _broker("group.consumer.max.assignment.interval.ms", _I, 15000, "Upper limit of it.", at_least(0)),
    # share groups
    _broker("group.share.max.size", _I, 200, "Members of one share group.", between(1, 1000)),
    _broker("group.share.max.share.sessions", _I, 2000, "Share sessions kept.", at_least(1)),
    _broker("group.share.assignors", _LIST, ("simple",),
        "Assignors a share group may use. There is one, `simple`." + _NOT_USED, unique_items(empty=False)),
    _broker("group.share.session.timeout.ms", _I, 45000, "Default of share.session.timeout.ms.", at_least(1)),
    _broker("group.share.min.session.timeout.ms", _I, 45000, "Lower limit of it.", at_least(1)),
    _broker("group.share.max.session.timeout.ms", _I, 60000, "Upper limit of it.", at_least(1)),
    _broker("group.share.heartbeat.interval.ms", _I, 5000, "Default of share.heartbeat.interval.ms.", at_least(1)),
    _broker("group.share.min.heartbeat.interval.ms", _I, 5000, "Lower limit of it.", at_least(1)),
    _broker("group.share.max.heartbeat.interval.ms", _I, 15000, "Upper limit of it.", at_least(1)),
    _broker("group.share.assignment.interval.ms", _I, 1000,
        "Default of share.assignment.interval.ms.", at_least(0), _CW),
    _broker("group.share.min.assignment.interval.ms", _I, 0, "Lower limit of it.", at_least(0)),
    _broker("group.share.max.assignment.interval.ms", _I, 15000, "Upper limit of it.", at_least(0)),
    _broker("group.share.record.lock.duration.ms", _I, 30000,
        "Default of share.record.lock.duration.ms.", between(1000, 3600000)),
    _broker("group.share.min.record.lock.duration.ms", _I, 15000, "Lower limit of it.", between(1000, 30000)),
    _broker("group.share.max.record.lock.duration.ms", _I, 60000, "Upper limit of it.", between(30000, 3600000)),
    _broker("group.share.delivery.count.limit", _I, 5, "Default of share.delivery.count.limit.", between(2, 10)),
    _broker("group.share.min.delivery.count.limit", _I, 2, "Lower limit of it.", between(2, 5)),
    _broker("group.share.max.delivery.count.limit", _I, 10, "Upper limit of it.", between(5, 25)),
    _broker("group.share.partition.max.record.locks", _I, 2000,
        "Default of share.partition.max.record.locks.", between(100, 10000)),
    _broker("group.share.min.partition.max.record.locks", _I, 100, "Lower limit of it.", between(100, 2000)),
    _broker("group.share.max.partition.max.record.locks", _I, 4000, "Upper limit of it.", between(2000, 10000)),
    _broker("errors.deadletterqueue.auto.create.topics.enable", _B, False,
        "Make a share group's dead-letter topic when there is none."),
    _broker("errors.deadletterqueue.topic.name.prefix", _S, "dlq.",
        "How the name of a dead-letter topic must begin, so that records end up nowhere else."),
    _broker("share.coordinator.state.topic.num.partitions", _I, 50,
        "Partitions of __share_group_state.", at_least(1)),
    _broker("share.coordinator.state.topic.replication.factor", _H, 3,
        "Replicas of __share_group_state; with fewer brokers as many as there are, and more as they come.",
        at_least(1)),
    _broker("share.coordinator.state.topic.min.isr", _H, 2,
        "min.insync.replicas of __share_group_state; never more than its replicas.", at_least(1)),
    _broker("share.coordinator.state.topic.segment.bytes", _I, 100 * _MIB, "Segment size of it.", at_least(1)),
    _broker("share.coordinator.state.topic.compression.codec", _I, 0,
        "Codec (by number) of batches in it." + _NOT_USED),
    _broker("share.coordinator.state.topic.prune.interval.ms", _I, 5 * _MINUTE_MS,
        "How often the part of it that snapshots made superfluous is cut off.", at_least(1)),
    _broker("share.coordinator.snapshot.update.records.per.snapshot", _I, 500,
        "Updates of a share-partition's state between two snapshots of it.", between(0, 500)),
    _broker("share.coordinator.cold.partition.snapshot.interval.ms", _I, 5 * _MINUTE_MS,
        "A share-partition that was not written for so long gets a snapshot.", at_least(1)),
    _broker("share.coordinator.write.timeout.ms", _I, 5000,
        "How long a write may wait for __share_group_state.", at_least(1)),
    _broker("share.coordinator.append.linger.ms", _I, -1,
        "How long writes are collected before they are appended." + _NOT_USED, at_least(-1)),
    _broker("share.coordinator.load.buffer.size", _I, 5 * _MIB, "Bytes read at once while loading." + _NOT_USED,
        at_least(1)),
    _broker("share.coordinator.cached.buffer.max.bytes", _I, _MIB + 12, "Largest buffer kept." + _NOT_USED,
        at_least(512 * 1024), _CW),
    _broker("share.coordinator.threads", _I, 1, "Threads of the share coordinator." + _NOT_USED, at_least(1)),
    _broker("share.fetch.purgatory.purge.interval.requests", _I, 1000,
        "How often waiting share fetches are tidied up." + _NOT_USED),
    # transactions
    _broker("transaction.state.log.num.partitions", _I, 50, "Partitions of __transaction_state.", at_least(1)),
    _broker("transaction.state.log.replication.factor", _H, 3,
        "Replicas of __transaction_state; with fewer brokers as many as there are, and more as they come.",
        at_least(1)),
    _broker("transaction.state.log.min.isr", _I, 2,
        "min.insync.replicas of __transaction_state; never more than its replicas.", at_least(1)),
    _broker("transaction.state.log.segment.bytes", _I, 100 * _MIB, "Segment size of it.", at_least(1)),
    _broker("transaction.max.timeout.ms", _I, 900000, "Longest transaction a producer may ask for.", at_least(1)),
    _broker("transactional.id.expiration.ms", _I, 7 * _DAY_MS,
        "An unused transactional id is forgotten after this.", at_least(1)),
    _broker("transaction.abort.timed.out.transaction.cleanup.interval.ms", _I, 10000,
        "How often transactions that ran out of time are looked for.", at_least(1)),
    _broker("transaction.remove.expired.transaction.cleanup.interval.ms", _I, 3600000,
        "How often expired transactional ids are looked for.", at_least(1)),
    _broker("transaction.partition.verification.enable", _B, True,
        "Check that a partition belongs to the transaction before appending to it.", None, _CW),
    _broker("add.partitions.to.txn.retry.backoff.ms", _I, 20,
        "How soon a write is tried again that has to wait for the end of its producer's last transaction.",
        at_least(1)),
    _broker("add.partitions.to.txn.retry.backoff.max.ms", _I, 100,
        "How long it is tried again before the producer is told CONCURRENT_TRANSACTIONS.", at_least(0)),
    # quotas
    _broker("quota.window.num", _I, 11,
        "Samples over which the rates of client quotas and of new connections are taken.", at_least(1)),
    _broker("quota.window.size.seconds", _I, 1,
        "Length of such a sample, and the longest that a client has to be quiet because of request_percentage.",
        at_least(1)),
    _broker("controller.quota.window.num", _I, 11,
        "Samples of controller_mutation_rate: so many times the length of one is what may be changed at once.",
        at_least(1)),
    _broker("controller.quota.window.size.seconds", _I, 1, "Length of such a sample.", at_least(1)),
    _broker("replication.quota.window.num", _I, 11,
        "Samples kept for replication quotas. Here these hold within a tenth of a second." + _NOT_USED, at_least(1)),
    _broker("replication.quota.window.size.seconds", _I, 1, "Length of such a sample." + _NOT_USED, at_least(1)),
    # coordination
    _broker("zookeeper.connect", _S, None,
        "The ZooKeeper ensemble, host:port,...[/path]; without it a single broker keeps its metadata in metadata.db."),
    _broker("zookeeper.session.timeout.ms", _I, 6000,
        "Silence after which ZooKeeper takes a broker for dead; shorter than Kafka's 18000.", at_least(1)),
    _broker("zookeeper.connection.timeout.ms", _I, None,
        "How long a start waits for ZooKeeper (default: the session timeout).", at_least(1)),
    _broker("zookeeper.digest.username", _S, None,
        "The name under which this broker logs in to ZooKeeper (its scheme `digest`), the same for all brokers of a "
        "cluster. millrace's own; Kafka took it from a JAAS file."),
    _broker("zookeeper.digest.password", _PASSWORD, None,
        "The password of zookeeper.digest.username. millrace's own."),
    _broker("zookeeper.set.acl", _B, None,
        "Close the cluster's znodes to everybody but the brokers' login, those that are there at the start as well. "
        "Without a value they are closed if there is a login. In a running cluster first give every broker the login "
        "and say false here, then true. In Kafka the default is false."),
    _broker("zookeeper.ssl.client.enable", _B, False, "Speak TLS with ZooKeeper."),
    _broker("zookeeper.ssl.truststore.location", _S, None,
        "PEM file with the authorities that ZooKeeper's certificate must be signed by; without it the system's."),
    _broker("zookeeper.ssl.truststore.type", _S, "PEM", "Format of that file." + ONLY_DEFAULT, one_of("PEM")),
    _broker("zookeeper.ssl.keystore.location", _S, None,
        "PEM file with the certificate to show ZooKeeper, and its key. If it is the only login, the certificates "
        "of all brokers need the same subject: it is what the znodes are closed under."),
    _broker("zookeeper.ssl.keystore.type", _S, "PEM", "Format of that file." + ONLY_DEFAULT, one_of("PEM")),
    _broker("zookeeper.ssl.keystore.password", _PASSWORD, None, "Password of the key in that file."),
    _broker("zookeeper.ssl.endpoint.identification.algorithm", _S, "HTTPS",
        "Empty switches off that the name in ZooKeeper's certificate is compared with zookeeper.connect."),
    _broker("zookeeper.clientCnxnSocket", _S, None, "Which Java class speaks with ZooKeeper." + _NOT_USED),
    _broker("zookeeper.max.in.flight.requests", _I, 10,
        "Requests to ZooKeeper at a time. Here up to 128 are under way." + _NOT_USED, at_least(1)),
    # metrics
    _broker("metrics.listener", _S, "127.0.0.1:0",
        "Where the broker tells of itself over HTTP (`/metrics`, `/livez`, `/readyz`), a setting of millrace:"
        " HOST:PORT, where port 0 is a free one, which `millrace up` and `millrace broker` print. It asks nobody who"
        " they are: keep it on loopback, or in a network that you trust. Empty: nowhere.", host_and_port),
    _broker("metrics.detail", _LIST, (),
        "What /metrics always has on top, a setting of millrace: `topics`, `partitions`, `groups`,"
        " `group-partitions`. A scrape may ask for more with ?detail=.",
        unique_items("topics", "partitions", "groups", "group-partitions"), Update.CLUSTER_WIDE),
    # audit
    _broker("audit.log.path", _S, None,
        "File for the audit log, a setting of millrace: logins and decisions on rights, a JSON object (OCSF) a line. It"
        " is made with mode 0600, and opened again when it was renamed. Without it there is no such file."),
    _broker("audit.log.topic.enable", _B, False,
        "Whether the audit log goes to the internal topic __audit_log, too, a setting of millrace."),
    _broker("audit.log.allowed", _S, "changes",
        "Of what was allowed, what the audit log has, a setting of millrace: `none`; `changes` of topics, settings,"
        " rules, users, quotas, tokens, groups, replicas and deletions of records; or `all`, reads and writes of"
        " records included, where the same again within ten seconds is counted. Logins and denials are always there.",
        one_of("none", "changes", "all")),
    _broker("audit.log.topic.num.partitions", _I, 12, "Partitions of __audit_log.", at_least(1)),
    _broker("audit.log.topic.replication.factor", _H, 3,
        "Replicas of __audit_log; with fewer brokers as many as there are, and more as they come.", at_least(1)),
    _broker("audit.log.topic.retention.ms", _L, 90 * _DAY_MS,
        "retention.ms of __audit_log when it is made (-1: no limit).", at_least(-1)),
    # metrics of clients (KIP-714)
    _broker("telemetry.receiver", _S, "",
        "Where metrics go that clients push (KIP-714), a setting of millrace: the http:// or https:// URL of an OTLP"
        " endpoint, or file:PATH for JSON lines in OTLP's form. Empty: clients are told that there is no such thing."),
    _broker("telemetry.max.bytes", _I, _MIB,
        "Most bytes of metrics in one push, as they come, compressed or not.", at_least(1)),
    _broker("telemetry.max.decompressed.bytes", _I, 8 * _MIB,
        "Most bytes that the metrics of one push may expand to, with what this broker adds of whose they are, a setting"
        " of millrace.", at_least(1)),
    # security, declared so that secrets are known as such
    _broker("authorizer.class.name", _S, "",
        "Empty: everybody may do everything. The name of Kafka's StandardAuthorizer or AclAuthorizer: ACLs decide. Any"
        " other is refused, for whoever names one counts on it.", known_authorizer),
    _broker("allow.everyone.if.no.acl.found", _B, False,
        "Whether everybody may do everything with a resource that no ACL names."),
    _broker("sasl.enabled.mechanisms", _LIST, ("GSSAPI",),
        "Ways to log in on listeners with SASL, or on one: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER. Kafka's"
        " default is not available here: a listener with SASL needs this setting."),
    _broker("sasl.jaas.config", _PASSWORD, None,
        "A login module and its options, for one mechanism and perhaps one listener:"
        " `listener.name.LISTENER.plain.sasl.jaas.config`. For PLAIN, options `user_NAME=\"password\"` are users who"
        " may log in, beside those with a SCRAM credential.", None, _PB),
    _broker("sasl.server.max.receive.size", _I, 512 * 1024,
        "Largest request before a login, in bytes; afterwards it is socket.request.max.bytes.", at_least(0)),
    _broker("connections.max.reauth.ms", _L, 0,
        "How long a login lasts (0: for ever); then the client has to log in again on the same connection (KIP-368), or"
        " is closed at its next request. May be given for one listener and one mechanism."),
    _broker("sasl.mechanism.inter.broker.protocol", _S, "GSSAPI",
        "How this broker logs in to the others, on a listener with SASL: PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512. The "
        "user is in listener.name.LISTENER.MECHANISM.sasl.jaas.config.", None, _PB),
    # access tokens (OAUTHBEARER)
    _broker("sasl.oauthbearer.jwks.endpoint.url", _S, None,
        "Where the keys are that verify access tokens: https://..., or file:///... for a key set in a file. A listener "
        "that offers OAUTHBEARER needs it: without keys the broker does not start."),
    _broker("sasl.oauthbearer.allowed.urls", _LIST, (),
        "Which URLs may be asked for keys, a setting of millrace: sasl.oauthbearer.jwks.endpoint.url must be among "
        "them, letter by letter. Kafka has the system property org.apache.kafka.sasl.oauthbearer.allowed.urls."),
    _broker("sasl.oauthbearer.jwks.endpoint.truststore.location", _S, None,
        "PEM file with the certificates that vouch for the https endpoint of the keys, a setting of millrace. Without "
        "it the system's do; those of ssl.truststore.location, which vouch for clients, never do."),
    _broker("sasl.oauthbearer.jwks.endpoint.refresh.ms", _L, _HOUR_MS,
        "How often keys are fetched from an https endpoint. A token with an unknown key id has them fetched earlier, "
        "at most every ten seconds; a file is read again when it has changed.", at_least(1000)),
    _broker("sasl.oauthbearer.jwks.endpoint.retry.backoff.ms", _L, 100,
        "How soon a fetch that failed is tried again; the pause doubles each time. The old keys stay in use.",
        at_least(1)),
    _broker("sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms", _L, 10_000,
        "The longest of these pauses, and how long a start waits for the first keys.", at_least(1)),
    _broker("sasl.oauthbearer.expected.issuer", _S, None,
        "Who must have issued a token (its claim iss). A listener that offers OAUTHBEARER needs it."),
    _broker("sasl.oauthbearer.expected.audience", _LIST, (),
        "For whom a token must be (one of its claim aud). A listener that offers OAUTHBEARER needs it."),
    _broker("sasl.oauthbearer.allow.unverified.issuer", _B, False,
        "Go without sasl.oauthbearer.expected.issuer: tokens of every issuer whose key is in the set are taken."),
    _broker("sasl.oauthbearer.allow.unverified.audience", _B, False,
        "Go without sasl.oauthbearer.expected.audience: a token for any other service of the provider is taken."),
    _broker("sasl.oauthbearer.clock.skew.seconds", _I, 30,
        "How far the clocks of the provider and this broker may be apart.", between(0, 3600)),
    _broker("sasl.oauthbearer.sub.claim.name", _S, "sub",
        "The claim of a token that names the user.", lambda value: None if value else "must not be empty"),
    # delegation tokens
    _broker("delegation.token.secret.key", _PASSWORD, None,
        "From which the passwords of delegation tokens follow; the same on every broker. Without it there are none."),
    _broker("delegation.token.max.lifetime.ms", _L, 7 * _DAY_MS,
        "How long a delegation token can be renewed for.", at_least(1)),
    _broker("delegation.token.expiry.time.ms", _L, _DAY_MS,
        "How long a delegation token is good for until it has to be renewed.", at_least(1)),
    _broker("delegation.token.expiry.check.interval.ms", _L, _HOUR_MS,
        "How often expired delegation tokens are removed. Nobody can log in with one before that, either.",
        at_least(1)),
    # TLS
    _broker("ssl.allow.dn.changes", _B, False,
        "Whether a renewed certificate may name somebody else. It always may." + _NOT_USED),
    _broker("ssl.allow.san.changes", _B, False,
        "Whether a renewed certificate may name other hosts. It always may." + _NOT_USED),
    _broker("ssl.cipher.suites", _LIST, (),
        "Suites that clients may use, by their registered names such as TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384, best "
        "first; empty: Python's choice. Suites of TLS 1.3 cannot be chosen one by one: name one and all are offered, "
        "name none and TLS 1.3 is not.", None, _PB),
    _broker("ssl.client.auth", _S, "none",
        "Whether clients show a certificate: `required`, `requested` (one without is ANONYMOUS, one that shows a wrong "
        "certificate is refused) or `none`. A SASL_SSL listener asks only if "
        "listener.name.NAME.ssl.client.auth says so.", one_of("required", "requested", "none"), _PB),
    _broker("ssl.enabled.protocols", _LIST, ("TLSv1.2", "TLSv1.3"),
        "Versions of TLS that clients may speak; older ones than these two cannot be had.",
        unique_items("TLSv1.2", "TLSv1.3", empty=False), _PB),
    _broker("ssl.endpoint.identification.algorithm", _S, "https",
        "How a broker that connects to another one checks that the certificate names its host; empty: not at all. "
        "For clients that connect to a listener it means nothing.", one_of("https", "HTTPS", ""), _PB),
    _broker("ssl.key.password", _PASSWORD, None, "Password of an encrypted private key in PEM form.", None, _PB),
    _broker("ssl.keystore.certificate.chain", _PASSWORD, None,
        "The broker's certificate and those between it and the authority, as PEM text, instead of a file.", None, _PB),
    _broker("ssl.keystore.key", _PASSWORD, None,
        "The private key of ssl.keystore.certificate.chain, as PEM text.", None, _PB),
    _broker("ssl.keystore.location", _S, None,
        "File with the broker's private key and certificates, in PEM form or a PKCS#12 store. It is looked at every "
        "second; when it has changed, new connections get the new certificate.", None, _PB),
    _broker("ssl.keystore.password", _PASSWORD, None, "Password of a PKCS#12 store.", None, _PB),
    _broker("ssl.keystore.type", _S, "JKS",
        "Format of ssl.keystore.location. The file itself says whether it is PEM or PKCS#12, which is what keytool "
        "writes since Java 9; a store in the old JKS format is refused." + _NOT_USED,
        one_of("JKS", "PKCS12", "PEM"), _PB),
    _broker("ssl.principal.mapping.rules", _S, "DEFAULT",
        "Who a client with a certificate is: RULE:pattern/replacement/[LU] and DEFAULT, the first that fits. Patterns "
        "are RE2's."),
    _broker("ssl.truststore.certificates", _PASSWORD, None,
        "Authorities that the certificates of clients and other brokers must come from, as PEM text.", None, _PB),
    _broker("ssl.truststore.location", _S, None,
        "File with the certificates of those authorities, in PEM form or a PKCS#12 store; looked at every second like "
        "ssl.keystore.location.", None, _PB),
    _broker("ssl.truststore.password", _PASSWORD, None, "Password of a PKCS#12 store.", None, _PB),
    _broker("ssl.truststore.type", _S, "JKS",
        "Format of ssl.truststore.location, which the file itself says." + _NOT_USED,
        one_of("JKS", "PKCS12", "PEM"), _PB),
    # rights
    _broker("super.users", _S, "",
        "Principals that may do everything, whatever the ACLs say: User:NAME, separated by semicolons. Brokers belong"
        " there."),
)
# fmt: on

_FOREIGN_NAMES: Final = re.compile(
    r"(auto\.include\.jmx\.reporter|eligible\.leader\.replicas\..*|offsets\.topic\.cleanup\..*|(rlmm|rsm)\.config\..*)\Z"
)
"""Names in files of other Kafka versions, or of their plug-ins: reported by `BrokerConfig.ignored`, not refused."""


def _derived_broker_settings() -> Iterator[Setting]:
    """The broker-wide default of each topic setting that has exactly one, with the topic setting's own rule."""
    for topic in _TOPIC_SETTINGS:
        if len(topic.synonyms) == 1:
            doc = f"Default of the topic setting {topic.name}."
            if has_no_effect(topic):
                doc += NO_EFFECT
            doc += _OF_DELETED_LOGS if topic.name == "file.delete.delay.ms" else ""
            yield _broker(topic.synonyms[0].name, topic.kind, topic.default, doc, topic.check, Update.CLUSTER_WIDE)


def _table(settings: Iterable[Setting]) -> dict[str, Setting]:
    return {setting.name: setting for setting in sorted(settings, key=lambda setting: setting.name)}


_EFFECTIVE: Final = _table([*_BROKER_SETTINGS, *_derived_broker_settings()])
_WITHOUT_EFFECT: Final = _table(each for each in settings_without_effect() if each.name not in _EFFECTIVE)

BROKER_SETTINGS: Final[Mapping[str, Setting]] = _table([*_EFFECTIVE.values(), *_WITHOUT_EFFECT.values()])
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
BROKER_FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    synonym.name: tuple(other.name for other in topic.synonyms)
    for topic in _TOPIC_SETTINGS
    for synonym in topic.synonyms
    if len(topic.synonyms) > 1
}


def is_foreign(name: str) -> bool:
    """Whether a name in a broker's file is Kafka's and means nothing here: worth a warning, not an error."""
    setting = BROKER_SETTINGS.get(name)
    return has_no_effect(setting) if setting is not None else _FOREIGN_NAMES.match(name) is not None


def find_setting(scope: Scope, name: str) -> Setting:
    """The row called `name`; a ConfigError suggests the nearest names where there is none."""
    setting = SETTINGS[scope].get(name) or (_of_listener(name) if scope is Scope.BROKER else None)
    if setting is None:
        near = _nearest(scope, name[:100])
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        # A line of a key that was pasted into a file looks like a name, too; one like those that exist has a dot.
        shown = repr(name[:100]) if near or "." in name else f"of {len(name)} characters"
        raise ConfigError(f"unknown {scope.value} setting {shown}{hint}")
    return setting


def is_setting(name: str) -> bool:
    """Whether there is a setting of this name, of anything; cheap also where there is none."""
    return any(name in rows for rows in SETTINGS.values()) or _of_listener(name) is not None


def _of_listener(name: str) -> Setting | None:
    """The row for `[listener.name.LISTENER.][MECHANISM.]NAME`: that of NAME, where listeners may have their own."""
    rest = name
    if name.startswith(LISTENER_PREFIX):
        _listener, _, rest = name.removeprefix(LISTENER_PREFIX).partition(".")
    mechanism, _, of_mechanism = rest.partition(".")
    if mechanism in SASL_MECHANISMS and of_mechanism.startswith(_PER_MECHANISM):
        rest = of_mechanism
    setting = BROKER_SETTINGS.get(rest)
    if setting is None or not rest.startswith(_PER_LISTENER) or rest.startswith(_NOT_PER_LISTENER):
        return None
    return replace(setting, name=name)


def _nearest(scope: Scope, name: str) -> list[str]:
    # Comparing with every name takes milliseconds, and a request may hold thousands of unknown names.
    words = set(name.split("."))
    by_words = sorted(SETTINGS[scope], key=lambda other: len(words.intersection(other.split("."))), reverse=True)
    return difflib.get_close_matches(name, by_words[:10], n=2)
