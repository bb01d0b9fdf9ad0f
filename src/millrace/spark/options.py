"""The options of the source and the sink: text from Spark in, checked values out.

Names are those of Spark's own Kafka source and sink where they mean the same; `kafka.` before a name makes it a setting
of the client. Names are compared without case, as Spark does. Pure, and cheap to import: Spark loads this module in
every planning process, so pyspark, pyarrow and numba stay out.

Invariants: a value that parsed is valid; a name nobody knows is an error, because a misspelt `startingOffsets` that is
ignored reads the wrong data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from typing import Final, NoReturn, TypeVar

from millrace.client.settings import DEFAULT_FETCH_BYTES, ClientSettings
from millrace.errors import ConfigError
from millrace.model import TopicPartition, invalid_topic_name_reason
from millrace.records.compression import Codec, codec_named
from millrace.spark.offsets import (
    EARLIEST,
    LATEST,
    AtOffsets,
    AtTime,
    AtTimes,
    Edge,
    Position,
    parse_offsets,
    parse_partitions,
)

T = TypeVar("T")
S = TypeVar("S", bound=str)

DEFAULT_MAX_TRIGGER_DELAY_MS: Final = 15 * 60 * 1000
DEFAULT_MAX_BATCH_BYTES: Final = 512 * 1024
DEFAULT_DECISIONS_TOPIC: Final = "millrace-sink-decisions"
DEFAULT_TRANSACTION_TIMEOUT_MS: Final = 15 * 60 * 1000
"""What Kafka's brokers allow at most, unless they are told otherwise."""

CORRUPT: Final = "_corrupt"
"""The column with the text of a value that does not match value.schema."""

_KAFKA: Final = "kafka."

_SOURCE_NAMES: Final = (
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "includeHeaders",
    "kafkaConsumer.pollTimeoutMs",
    "groupIdForLag",
    "value.format",
    "value.schema",
    "value.mode",
    # Of Spark's Kafka source, accepted so that a query moves over unchanged; they have no effect here.
    "groupIdPrefix",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
)
_SINK_NAMES: Final = ("topic", "includeHeaders", "delivery", "sinkName", "decisionsTopic")
_OF_SPARK: Final = frozenset({"path", "checkpointlocation", "queryname", "outputmode", "name"})
"""Options of Spark itself, which it hands to every source or sink."""

_DECODE_YOURSELF: Final = "use DataFrame operations on the binary column, or option value.format"
_ENCODE_YOURSELF: Final = "give the sink string or binary columns"
_REFUSED_BY_SOURCE: Final = {
    "auto.offset.reset": "set option startingOffsets instead; the query itself keeps track of what it has read",
    "key.deserializer": f"keys are read as bytes; {_DECODE_YOURSELF}",
    "value.deserializer": f"values are read as bytes; {_DECODE_YOURSELF}",
    "enable.auto.commit": "the source commits nothing by itself; set option groupIdForLag to publish its progress",
    "interceptor.classes": "records reach the query as they are in the log",
}
_REFUSED_BY_SINK: Final = {
    "key.serializer": f"keys are written as they are; {_ENCODE_YOURSELF}",
    "value.serializer": f"values are written as they are; {_ENCODE_YOURSELF}",
    "interceptor.classes": "records reach the log as they are in the query",
    "partitioner.class": "add a partition column to choose the partition of each row",
    "transactional.id": "the sink names its transactions itself; see option delivery",
}

# Read here, not by the client.
_OF_SOURCE_CLIENT: Final = frozenset({"isolation.level", "max.partition.fetch.bytes", "check.crcs", "group.id"})
_OF_SINK_CLIENT: Final = frozenset(
    {"acks", "compression.type", "batch.size", "max.request.size", "transaction.timeout.ms"}
)


class ValueFormat(StrEnum):
    """What the values are; the first is the default."""

    BINARY = "binary"
    JSON = "json"


class ValueMode(StrEnum):
    """What happens to a value that does not match the schema."""

    PERMISSIVE = "permissive"
    FAILFAST = "failfast"


class TimestampStrategy(StrEnum):
    """What a starting time means for a partition that has no record at or after it."""

    ERROR = "error"
    LATEST = "latest"


class Delivery(StrEnum):
    """What a repeated piece of a query means for the topics it writes."""

    EXACTLY_ONCE = "exactly-once"
    AT_LEAST_ONCE = "at-least-once"


STREAM_DELIVERY: Final = Delivery.EXACTLY_ONCE
"""What a streaming query has that does not say; a batch query writes at least once."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """Which partitions a query reads; exactly one of the three is set."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: tuple[TopicPartition, ...] = ()


@dataclass(frozen=True, slots=True)
class ValueOptions:
    """How values become columns: as bytes, or as JSON with a schema in Spark's DDL or JSON form."""

    format: ValueFormat = ValueFormat.BINARY
    schema: str = ""
    mode: ValueMode = ValueMode.PERMISSIVE


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Everything `spark.read` or `spark.readStream` was told; None where the default depends on which of the two."""

    client: ClientSettings
    subscription: Subscription
    starting: Position | None = None
    ending: Position | None = None
    timestamp_strategy: TimestampStrategy = TimestampStrategy.ERROR
    max_offsets_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_trigger_delay_ms: int = DEFAULT_MAX_TRIGGER_DELAY_MS
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    fail_on_data_loss: bool = True
    include_headers: bool = False
    poll_timeout_ms: int | None = None
    """How long a task waits for records; the setting default.api.timeout.ms of the client when it is not given."""
    fetch_max_bytes: int = DEFAULT_FETCH_BYTES
    check_crcs: bool = True
    read_committed: bool = False
    group_id_for_lag: str = ""
    value: ValueOptions = ValueOptions()

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Check everything that batch and streaming queries have in common; ConfigError in one line."""
        given = _Options(options, _SOURCE_NAMES, "source")
        properties = given.client_properties(_REFUSED_BY_SOURCE, "read")
        isolation = properties.get("isolation.level", "read_uncommitted").lower()
        if isolation not in ("read_uncommitted", "read_committed"):
            given.fail("kafka.isolation.level", isolation, "read_uncommitted or read_committed")
        least = given.number("minOffsetsPerTrigger")
        most = given.number("maxOffsetsPerTrigger")
        if least is not None and most is not None and least > most:
            raise ConfigError(f"option 'minOffsetsPerTrigger' ({least}) is higher than maxOffsetsPerTrigger ({most})")
        return cls(
            client=_client(properties, _OF_SOURCE_CLIENT),
            subscription=_subscription(given),
            starting=_position(given, "startingTimestamp", "startingOffsetsByTimestamp", "startingOffsets"),
            ending=_position(given, "endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets"),
            timestamp_strategy=given.choice("startingOffsetsByTimestampStrategy", tuple(TimestampStrategy)),
            max_offsets_per_trigger=most,
            min_offsets_per_trigger=least,
            max_trigger_delay_ms=given.read("maxTriggerDelay", _duration_ms, "a time such as 30s or 15m")
            or DEFAULT_MAX_TRIGGER_DELAY_MS,
            min_partitions=given.number("minPartitions"),
            max_records_per_partition=given.number("maxRecordsPerPartition"),
            fail_on_data_loss=given.boolean("failOnDataLoss", default=True),
            include_headers=given.boolean("includeHeaders", default=False),
            poll_timeout_ms=given.number("kafkaConsumer.pollTimeoutMs"),
            fetch_max_bytes=given.number("kafka.max.partition.fetch.bytes") or DEFAULT_FETCH_BYTES,
            check_crcs=given.boolean("kafka.check.crcs", default=True),
            read_committed=isolation == "read_committed",
            group_id_for_lag=given.text("groupIdForLag"),
            value=_value(given),
        )

    def for_batch(self) -> SourceOptions:
        """The options of a batch query, with its defaults: everything from the earliest to the latest offset."""
        if _names(self.starting, Edge.LATEST):
            raise ConfigError("option 'startingOffsets' cannot be latest in a batch query, which would read nothing")
        if _names(self.ending, Edge.EARLIEST):
            raise ConfigError("option 'endingOffsets' cannot be earliest in a batch query, which would read nothing")
        starting, ending = self.starting or Edge.EARLIEST, self.ending or Edge.LATEST
        _check_order(starting, ending)
        return replace(self, starting=starting, ending=ending)

    def for_stream(self) -> SourceOptions:
        """The options of a streaming query, with its defaults: from now on, without an end."""
        if self.ending is not None:
            raise ConfigError(
                "a streaming query has no end: leave out endingOffsets, endingTimestamp and endingOffsetsByTimestamp, "
                "or use trigger(availableNow=True) to stop at what exists now"
            )
        return replace(self, starting=self.starting or Edge.LATEST)


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Everything `df.write` or `df.writeStream` was told."""

    client: ClientSettings
    topic: str | None = None
    acks: int = -1
    codec: Codec = Codec.NONE
    max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES
    delivery: Delivery | None = None
    """None where it was not given: the default depends on the query."""
    sink_name: str = ""
    """Which of the writes of a micro-batch this is, where there are several."""
    decisions_topic: str = DEFAULT_DECISIONS_TOPIC
    transaction_timeout_ms: int = DEFAULT_TRANSACTION_TIMEOUT_MS

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Check everything that batch and streaming queries have in common; ConfigError in one line."""
        given = _Options(options, _SINK_NAMES, "sink")
        properties = given.client_properties(_REFUSED_BY_SINK, "write")
        given.boolean("includeHeaders", default=False)  # the sink writes a headers column whenever there is one
        topic = given.text("topic")
        if topic and (reason := invalid_topic_name_reason(topic)):
            raise ConfigError(f"option 'topic': {reason}, not {topic!r}")
        decisions_topic = given.text("decisionsTopic") or DEFAULT_DECISIONS_TOPIC
        if reason := invalid_topic_name_reason(decisions_topic):
            raise ConfigError(f"option 'decisionsTopic': {reason}, not {decisions_topic!r}")
        codecs = ("none", "uncompressed", "gzip", "snappy", "lz4", "zstd")
        return cls(
            client=_client(properties, _OF_SINK_CLIENT),
            topic=topic or None,
            acks={"all": -1, "-1": -1, "1": 1, "0": 0}[given.choice("kafka.acks", ("all", "-1", "1", "0"))],
            codec=codec_named(given.choice("kafka.compression.type", codecs)),
            max_batch_bytes=given.number("kafka.batch.size") or DEFAULT_MAX_BATCH_BYTES,
            delivery=given.choice("delivery", tuple(Delivery)) if given.has("delivery") else None,
            sink_name=given.text("sinkName"),
            decisions_topic=decisions_topic,
            transaction_timeout_ms=given.number("kafka.transaction.timeout.ms") or DEFAULT_TRANSACTION_TIMEOUT_MS,
        )

    def for_batch(self) -> SinkOptions:
        """The options of a batch query, with its defaults."""
        return self._with_delivery(self.delivery or Delivery.AT_LEAST_ONCE)

    def for_stream(self) -> SinkOptions:
        """The options of a streaming query, with its defaults."""
        return self._with_delivery(self.delivery or STREAM_DELIVERY)

    def _with_delivery(self, delivery: Delivery) -> SinkOptions:
        if delivery is Delivery.EXACTLY_ONCE and self.acks != -1:
            raise ConfigError(
                "option 'kafka.acks' must be all for delivery=exactly-once: leave it out, "
                "or set option delivery to at-least-once"
            )
        return replace(self, delivery=delivery)


class _Options:
    """Reads options by name, without case; refuses the ones nobody knows."""

    def __init__(self, options: Mapping[str, str], names: tuple[str, ...], what: str) -> None:
        self._given = {name.lower(): value for name, value in options.items()}
        known = {name.lower(): name for name in names}
        for name in self._given:
            if name in known or name in _OF_SPARK or name.startswith((_KAFKA, "spark.", "_")):
                continue
            near = get_close_matches(name, known, n=2)
            hint = f": did you mean {' or '.join(known[each] for each in near)}?" if near else ""
            kafka = " (a setting of the client starts with kafka.)" if "." in name and not near else ""
            raise ConfigError(f"unknown option {name!r} of the millrace {what}{hint}{kafka}")

    def client_properties(self, refused: Mapping[str, str], verb: str) -> dict[str, str]:
        """What goes to the client, without the prefix; required to name a broker."""
        properties = {
            name.removeprefix(_KAFKA): value for name, value in self._given.items() if name.startswith(_KAFKA)
        }
        for name, reason in refused.items():
            if name in properties:
                raise ConfigError(f"option 'kafka.{name}' is not supported: {reason}")
        if not properties.get("bootstrap.servers", "").strip():
            raise ConfigError(f"option 'kafka.bootstrap.servers' is missing: give the brokers to {verb}, as host:port")
        return properties

    def has(self, name: str) -> bool:
        return name.lower() in self._given

    def text(self, name: str) -> str:
        return self._given.get(name.lower(), "").strip()

    def read(self, name: str, parse: Callable[[str], T], wanted: str) -> T | None:
        """The value, or None when the option is absent."""
        if not self.has(name):
            return None
        try:
            return parse(self.text(name))
        except ValueError:
            self.fail(name, self.text(name), wanted)

    def number(self, name: str) -> int | None:
        return self.read(name, _positive, "a whole number above 0")

    def boolean(self, name: str, *, default: bool) -> bool:
        found = self.read(name, lambda text: {"true": True, "false": False}.get(text.lower()), "true or false")
        if found is None and self.has(name):
            self.fail(name, self.text(name), "true or false")
        return default if found is None else found

    def choice(self, name: str, choices: tuple[S, ...]) -> S:
        """One of `choices`, the first by default."""
        text = self.text(name).lower() if self.has(name) else choices[0]
        if text not in choices:
            self.fail(name, text, f"one of {', '.join(choices)}")
        return choices[choices.index(text)]

    def fail(self, name: str, value: str, wanted: str) -> NoReturn:
        raise ConfigError(f"option {name!r} is {wanted}, not {value!r}")


def _client(properties: Mapping[str, str], ours: frozenset[str]) -> ClientSettings:
    try:
        return ClientSettings.from_properties({name: text for name, text in properties.items() if name not in ours})
    except ConfigError as error:
        raise ConfigError(f"option 'kafka.*': {error}") from None


def _subscription(given: _Options) -> Subscription:
    ways = [name for name in ("subscribe", "subscribePattern", "assign") if given.has(name)]
    if len(ways) != 1:
        problem = "is missing" if not ways else "is set more than once"
        raise ConfigError(f"what to read {problem}: set exactly one of the options subscribe, subscribePattern, assign")
    text = given.text(ways[0])
    if ways[0] == "assign":
        return Subscription(assigned=parse_partitions(text, "assign"))
    if ways[0] == "subscribe":
        topics = tuple(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))
        if not topics:
            raise ConfigError("option 'subscribe' names no topic: give one or more, separated by commas")
        for topic in topics:
            if reason := invalid_topic_name_reason(topic):
                raise ConfigError(f"option 'subscribe': {reason}, not {topic!r}; for a pattern use subscribePattern")
        return Subscription(topics=topics)
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError(f"option 'subscribePattern' is not a regular expression: {error}") from None
    if not text:
        raise ConfigError("option 'subscribePattern' is empty: give a regular expression for topic names")
    return Subscription(pattern=text)


def _position(given: _Options, time: str, times: str, offsets: str) -> Position | None:
    """The same precedence as in Spark's Kafka source: one time, then a time per partition, then offsets."""
    if given.has(time):
        return AtTime(given.read(time, _natural, "a time in milliseconds since 1970") or 0)
    if given.has(times):
        found = parse_offsets(given.text(times), times)
        if any(timestamp < 0 for timestamp in found.values()):
            raise ConfigError(f"option {times!r} has a negative time: give milliseconds since 1970")
        return AtTimes(found)
    if not given.has(offsets):
        return None
    text = given.text(offsets)
    if not text.startswith("{"):
        edges = {"earliest": Edge.EARLIEST, "latest": Edge.LATEST}
        if text.lower() not in edges:
            given.fail(offsets, text, 'earliest, latest or JSON like {"topic": {"0": 42}}')
        return edges[text.lower()]
    found = parse_offsets(text, offsets)
    if any(offset < EARLIEST for offset in found.values()):
        raise ConfigError(f"option {offsets!r} has an offset below -2: -2 is the earliest, -1 the latest")
    return AtOffsets(found)


def _names(position: Position | None, edge: Edge) -> bool:
    return position is edge or (isinstance(position, AtOffsets) and edge.value in position.offsets.values())


def _check_order(starting: Position, ending: Position) -> None:
    if not isinstance(starting, AtOffsets) or not isinstance(ending, AtOffsets):
        return
    for partition, start in starting.offsets.items():
        end = ending.offsets.get(partition, LATEST)
        if 0 <= end < start:
            raise ConfigError(f"startingOffsets has {start} for {partition}, which is after endingOffsets {end}")


def _value(given: _Options) -> ValueOptions:
    form = given.choice("value.format", tuple(ValueFormat))
    schema = given.text("value.schema")
    if form is ValueFormat.JSON and not schema:
        raise ConfigError("option 'value.schema' is missing: give the fields, such as 'id BIGINT, name STRING'")
    if form is ValueFormat.BINARY and (schema or given.has("value.mode")):
        raise ConfigError("options value.schema and value.mode need value.format=json")
    return ValueOptions(form, schema, given.choice("value.mode", tuple(ValueMode)))


_DURATION: Final = re.compile(r"(?P<count>\d+)\s*(?P<unit>[a-z]*)")
_UNIT_MS: Final = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


def _duration_ms(text: str) -> int:
    found = _DURATION.fullmatch(text.lower())
    if found is None or found["unit"] not in _UNIT_MS:
        raise ValueError(text)
    return _positive(str(int(found["count"]) * _UNIT_MS[found["unit"]]))


def _positive(text: str) -> int:
    number = _natural(text)
    if number == 0:
        raise ValueError(text)
    return number


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 63:
        raise ValueError(text)
    return int(text)
