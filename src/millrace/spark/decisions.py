"""What became of the batches of streaming queries: a log of claims and decisions in a topic of one partition.

A *series* is a set of transactional ids that the tasks of one run of a query use, batch after batch. A *claim* begins a
series and ends the one before it; a *decision* says that a batch counts, and which transactions it consists of. What a
record means follows from the records before it and from nothing else (`after`, a pure function), so everybody who reads
up to the same offset knows the same. Who ends or begins transactions is not here (`exactly_once`).

Invariants:
- A decision counts only if its series is the last that was claimed before it, and only for a batch later than the last
  that was decided. So a driver that was replaced may append what it likes, whenever it arrives.
- A series that was superseded is never the last again. A record that is appended twice, or late, changes nothing.
- Whoever claims reads what is there then and confirms the claim by a second record, which says what was decided before
  the series and which series it knows of. That is final: from the claim on only decisions of the new series count. So
  compaction, with keys per series, may take away everything before it, and the place of the claim itself.
- Records are appended by an idempotent producer: one that is sent again is not there twice, however late it comes.
- A decision has a key of its own, with the number of its batch. It takes away the last but one, not the last, which
  still counts where this one does not, because its series was superseded.
- The end of the log is asked for (ListOffsets) before it is read: a leader that was just elected answers that only when
  it knows everything that was acknowledged, while a fetch may end before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from millrace.client import requests
from millrace.client.cluster import EARLIEST, LATEST, ClusterClient
from millrace.client.fetching import FetchRange, read_range
from millrace.client.producing import BatchProducer
from millrace.client.transactions import Transaction
from millrace.clock import SystemClock
from millrace.errors import ApiError, ConfigError, ErrorCode
from millrace.model import TopicPartition
from millrace.records.batch import read_header, split
from millrace.records.compression import Codec
from millrace.records.decode import Record, decode_records
from millrace.records.encode import encode_batch

TOPIC_CONFIG: Final = {
    "cleanup.policy": "compact",
    # Whoever is new reads all of it, so it is kept short: small segments, cleaned soon.
    "segment.bytes": str(4 * 1024 * 1024),
    "min.cleanable.dirty.ratio": "0.1",
    "min.compaction.lag.ms": str(10 * 60 * 1000),
}
MAX_FORMER: Final = 16
"""So many superseded series are known by name; a process of an older one finds out by its transactions."""

_FETCH_WAIT_MS: Final = 100
_CLOCK: Final = SystemClock()


# --- what the log says: pure ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Series:
    """Which run of a query uses the ids, and since which of its batches."""

    run: str
    since: int

    def __str__(self) -> str:
        return f"{self.run}.{self.since}"

    @classmethod
    def parse(cls, text: str) -> Series:
        run, _, since = text.rpartition(".")
        return cls(run, int(since))


@dataclass(frozen=True, slots=True)
class Decision:
    """A batch that counts, and the transactions with its rows."""

    series: Series
    batch_id: int
    transactions: tuple[Transaction, ...]
    closes: bool = False
    """Whether the series ends with it: some task was attempted twice, and the other attempt may still have its id."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The begin of a series, with what its claimant knows of the past: everything, when it is confirmed."""

    series: Series
    former: tuple[Series, ...] = ()
    decided: Decision | None = None
    confirmed: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """What the records of one sink up to some offset say."""

    series: Series | None = None
    former: tuple[Series, ...] = ()
    decided: Decision | None = None

    def has_decided(self, batch_id: int) -> bool:
        return self.decided is not None and self.decided.batch_id >= batch_id

    def is_going_on(self, run: str) -> bool:
        """Whether the tasks of `run` use the ids of the series that is there."""
        if self.series is None or self.series.run != run:
            return False
        return not (self.decided is not None and self.decided.series == self.series and self.decided.closes)

    def has_passed(self, run: str) -> bool:
        """Whether `run` had its time: somebody else has claimed the sink since."""
        if self.series is None or self.series.run == run:
            return False
        return any(each.run == run for each in self.former)

    def claim(self, series: Series) -> Claim:
        """The claim that begins `series` after this, or confirms it where it has begun."""
        if self.series == series:
            return Claim(series, self.former, self.decided, confirmed=True)
        return Claim(series, _joined(self.former, self.series), self.decided)


def after(state: State, record: Claim | Decision) -> State:
    """The state with one record more."""
    if isinstance(record, Decision):
        if record.series != state.series or state.has_decided(record.batch_id):
            return state
        return replace(state, decided=record)
    if record.series in state.former:
        # What it knew of the past is true all the same, and may stand nowhere else any more.
        return replace(state, decided=_later(state.decided, record.decided)) if record.confirmed else state
    if record.confirmed:
        own = state.decided if state.decided is not None and state.decided.series == record.series else None
        return State(record.series, record.former, _later(record.decided, own))
    if record.series == state.series:
        return state
    former = _joined(tuple(dict.fromkeys([*record.former, *state.former])), state.series)
    return State(record.series, former, _later(state.decided, record.decided))


def _joined(former: tuple[Series, ...], last: Series | None) -> tuple[Series, ...]:
    return former[-MAX_FORMER:] if last is None else (*(each for each in former if each != last), last)[-MAX_FORMER:]


def _later(one: Decision | None, other: Decision | None) -> Decision | None:
    if one is None or other is None:
        return one or other
    return other if other.batch_id > one.batch_id else one


# --- its bytes --------------------------------------------------------------------------------------------------------

_CLAIM: Final = "claim"
_CONFIRMED: Final = "confirmed claim"
_DECISION: Final = "decision"


def key_of(sink: str, record: Claim | Decision) -> bytes:
    name = [sink, str(record.series), _kind(record)]
    return json.dumps([*name, record.batch_id] if isinstance(record, Decision) else name).encode()


def entries_of(sink: str, record: Claim | Decision, before: State) -> list[tuple[bytes, bytes | None]]:
    """What is appended for a record: itself, and the removal of what it makes superfluous, as far as it is known."""
    gone: list[Claim | Decision] = []
    last = before.decided
    if isinstance(record, Decision):
        if last is not None and last.series == record.series and last.batch_id < record.batch_id:
            gone.append(replace(last, batch_id=last.batch_id - 1))
    elif record.confirmed and record.former:
        former = record.former[-1]
        gone += [Claim(former), Claim(former, confirmed=True)]
        if last is not None and last.series == former:
            gone += [last, replace(last, batch_id=last.batch_id - 1)]
    return [(key_of(sink, record), value_of(record)), *((key_of(sink, each), None) for each in gone)]


def _kind(record: Claim | Decision) -> str:
    if isinstance(record, Decision):
        return _DECISION
    return _CONFIRMED if record.confirmed else _CLAIM


def value_of(record: Claim | Decision) -> bytes:
    if isinstance(record, Decision):
        return json.dumps({_DECISION: _decision_fields(record)}).encode()
    decided = None if record.decided is None else _decision_fields(record.decided)
    former = [str(each) for each in record.former]
    return json.dumps({_kind(record): {"series": str(record.series), "former": former, "decided": decided}}).encode()


def _decision_fields(decision: Decision) -> dict[str, Any]:
    return {
        "series": str(decision.series),
        "batch": decision.batch_id,
        "transactions": [list(each) for each in decision.transactions],
        "closes": decision.closes,
    }


def read_entry(key: bytes | None, value: bytes | None) -> tuple[str, Claim | Decision] | None:
    """The sink and the record; None for a tombstone. ValueError for what nobody of us has written."""
    if value is None:
        return None
    try:
        sink, _, kind, *_ = json.loads(key or b"")
        fields = json.loads(value)[kind]
        if kind == _DECISION:
            return str(sink), _read_decision(fields)
        decided = None if fields["decided"] is None else _read_decision(fields["decided"])
        former = tuple(Series.parse(each) for each in fields["former"])
        return str(sink), Claim(Series.parse(fields["series"]), former, decided, confirmed=kind == _CONFIRMED)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not a record of the sink: {type(error).__name__} {error}") from None


def _read_decision(fields: dict[str, Any]) -> Decision:
    transactions = tuple(
        Transaction(str(name), int(number), int(epoch)) for name, number, epoch in fields["transactions"]
    )
    return Decision(Series.parse(fields["series"]), int(fields["batch"]), transactions, bool(fields["closes"]))


# --- the topic --------------------------------------------------------------------------------------------------------


class DecisionLog:
    """The log of all sinks that use a topic, read once and from then on only what is new. Owner: one thread."""

    def __init__(self, client: ClusterClient, topic: str) -> None:
        self.client = client
        self._partition = TopicPartition(topic, 0)
        self._next_offset: int | None = None
        self._states: dict[str, State] = {}
        self._producer: BatchProducer | None = None

    def state(self, sink: str) -> State:
        """What is known of a sink; everything is read that was acknowledged before this was called."""
        self._ensure_topic()
        end = self.client.list_offsets({self._partition: LATEST})[self._partition] or 0
        self._read_to(end)
        return self._states.get(sink, State())

    def claim(self, sink: str, series: Series) -> State:
        """Begin a series and return what is known then; it may be another one already."""
        state = self.state(sink)
        if series == state.series or series in state.former:
            return state
        self._append(entries_of(sink, state.claim(series), state))
        state = self.state(sink)
        if state.series == series:
            self._append(entries_of(sink, state.claim(series), state))
        return state

    def decide(self, sink: str, decision: Decision) -> bool:
        """Append a decision; whether it counts."""
        self._ensure_topic()
        offset = self._append(entries_of(sink, decision, self._states.get(sink, State())))
        self._read_to(offset + 1)
        # What was read may go further than the record, but nothing undoes a decision of this batch.
        return self._states.get(sink, State()).decided == decision

    def _append(self, entries: Sequence[tuple[bytes, bytes | None]]) -> int:
        """The offset of the last entry."""
        producer = self._producer or BatchProducer(self.client)
        self._producer = None  # after an error it is done for
        now_ms = _CLOCK.wall_ms()
        batch = encode_batch(
            [Record(index, now_ms, key, value) for index, (key, value) in enumerate(entries)],
            base_offset=0,
            compression=Codec.GZIP,
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            base_sequence=producer.next_sequence(self._partition),
        )
        producer.add(self._partition, batch, len(entries))
        producer.flush()
        self._producer = producer
        return producer.take_written()[self._partition].next_offset - 1

    def _ensure_topic(self) -> None:
        topic = self._partition.topic
        if self._next_offset is not None or self.client.topics([topic]):
            return
        message = requests.create_topic(topic, TOPIC_CONFIG, timeout_ms=self.client.settings.request_timeout_ms)
        self.client.ask_any_broker(f"topic '{topic}'", message, requests.read_create_topic)
        self.client.partition_count(topic)  # waits until it is there

    def _read_to(self, end: int) -> None:
        if self._next_offset is None or end < self._next_offset:  # new here, or the topic was made anew
            self._start_over()
        assert self._next_offset is not None
        try:
            self._take_to(end)
        except ApiError as error:
            if error.code is not ErrorCode.OFFSET_OUT_OF_RANGE:
                raise
            self._start_over()
            self._take_to(end)

    def _start_over(self) -> None:
        self._states = {}
        self._next_offset = self.client.list_offsets({self._partition: EARLIEST})[self._partition] or 0

    def _take_to(self, end: int) -> None:
        assert self._next_offset is not None
        wanted = FetchRange(self._partition, self._next_offset, end, max_wait_ms=_FETCH_WAIT_MS)
        for record in self._records(wanted):
            try:
                entry = read_entry(record.key, record.value)
            except ValueError as error:
                raise ConfigError(
                    f"topic '{self._partition.topic}' has something else at offset {record.offset} ({error}): "
                    "give the sink a topic of its own with option decisionsTopic"
                ) from None
            if entry is not None:
                sink, said = entry
                self._states[sink] = after(self._states.get(sink, State()), said)
            self._next_offset = record.offset + 1
        self._next_offset = max(self._next_offset, end)

    def _records(self, wanted: FetchRange) -> Iterator[Record]:
        for fetched in read_range(self.client, wanted):
            for batch in split(fetched.records, partial_end=True):
                if read_header(batch.data).is_control:
                    continue
                for record in decode_records(batch.data):
                    if wanted.start_offset <= record.offset < wanted.end_offset:
                        yield record
