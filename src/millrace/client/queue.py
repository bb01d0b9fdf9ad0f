"""Reading topics as a queue: a member of a share group that takes records, and says of each what became of it.

One thread at a time, which must come by often enough: `poll` and `tend` send the heartbeats and renew the locks that
are due, and nothing happens between them. Not here: who runs next to whom, what is done with a
record (`cli.queue_consume`), the administration of groups (`admin.queues`).

Invariants:
- A record that `poll` returned is this member's until `acknowledge`; whether it still was then, that says.
- An acknowledgement that `acknowledge` does not name as refused is durable on the broker.
- Failures that pass (a leader or a coordinator that moves) are waited for in later calls; `poll` returns nothing then.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from millrace.client import versions
from millrace.client.cluster import ClusterClient, raise_for
from millrace.client.retrying import is_retriable
from millrace.clock import Clock, SystemClock
from millrace.errors import ApiError, ErrorCode
from millrace.model import NO_BROKER, TopicPartition
from millrace.records.batch import split
from millrace.records.decode import Record, iter_records
from millrace.wire.messages.share_groups import (
    ShareAcknowledgeRequest,
    ShareAcknowledgeResponse,
    ShareFetchRequest,
    ShareFetchResponse,
    ShareGroupHeartbeatRequest,
)

_JOIN_EPOCH: Final = 0
_LEAVE_EPOCH: Final = -1
_FIRST_EPOCH: Final = 0
_FINAL_EPOCH: Final = -1
_MAX_EPOCH: Final = (1 << 31) - 1
_RENEWS_FROM: Final = 2
"""The version of ShareAcknowledge from which a lock can be renewed (KIP-1222)."""
_RECORD_LIMIT: Final = 1
"""The acquire mode in which `max_records` is a limit and not a hint (KIP-1206); older brokers give whole batches."""
_IMPATIENT_S: Final = 0.5
"""How soon a member without partitions asks again: the group may only just be taking them up."""
_CLOSE_TIMEOUT_MS: Final = 3_000
DEFAULT_MAX_BYTES: Final = 8 << 20

_NEW_SESSION: Final = frozenset(
    {
        ErrorCode.SHARE_SESSION_NOT_FOUND,
        ErrorCode.INVALID_SHARE_SESSION_EPOCH,
        ErrorCode.SHARE_SESSION_LIMIT_REACHED,
    }
)
_JOIN_AGAIN: Final = frozenset({ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH})

PartitionId = tuple[uuid.UUID, int]
Refused = dict[PartitionId, ApiError]


class Verdict(IntEnum):
    """What a member says of a record it holds; the numbers are the protocol's."""

    ACCEPT = 1
    RELEASE = 2
    REJECT = 3


_GAP: Final = 0
_RENEW: Final = 4


class QueueRecord(NamedTuple):
    """A record that this member holds."""

    partition: TopicPartition
    record: Record
    delivery_count: int


@dataclass(slots=True)
class ShareSession:
    """What a broker knows of this member's partitions, so that each request tells only what changed."""

    epoch: int = _FIRST_EPOCH
    partitions: frozenset[PartitionId] = frozenset()

    def changes(self, wanted: frozenset[PartitionId]) -> tuple[frozenset[PartitionId], frozenset[PartitionId]]:
        """What a request adds and forgets."""
        return wanted - self.partitions, self.partitions - wanted

    def answered(self) -> None:
        self.epoch = 1 if self.epoch == _MAX_EPOCH else self.epoch + 1


@dataclass(slots=True)
class _Held:
    """What is held of a partition; `node` is who gave it, and who is told."""

    node: int
    offsets: set[int] = field(default_factory=set)


def ranges(offsets: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Offsets as ranges of neighbours, both ends included."""
    first = last = None
    for offset in sorted(offsets):
        if first is None or last is None:
            first = last = offset
        elif offset == last + 1:
            last = offset
        else:
            yield first, last
            first = last = offset
    if first is not None and last is not None:
        yield first, last


def read_acquired(data: ShareFetchResponse.PartitionData) -> tuple[list[tuple[Record, int]], set[int]]:
    """The records that were acquired, with their delivery counts, and the offsets among them that have none.

    A batch comes whole, whichever of its records were acquired; compaction and control batches leave offsets empty.
    """
    counts: dict[int, int] = {}
    for each in data.acquired_records:
        counts.update(dict.fromkeys(range(each.first_offset, each.last_offset + 1), each.delivery_count))
    found = []
    for batch in split(data.records, partial_end=True):
        if batch.header.is_control:
            continue
        for record in iter_records(batch.data):
            count = counts.pop(record.offset, None)
            if count is not None:
                found.append((record, count))
    return found, set(counts)


class QueueConsumer:
    """A member of a share group. `close`, or the end of a `with` block, releases what is held and leaves."""

    def __init__(
        self, client: ClusterClient, group_id: str, topics: Collection[str], *, clock: Clock | None = None
    ) -> None:
        self._client = client
        self._group_id = group_id
        self._topics = sorted(topics)
        self._clock = clock or SystemClock()
        self._member_id = str(uuid.uuid4())
        self._member_epoch = _JOIN_EPOCH
        self._assigned: frozenset[PartitionId] = frozenset()
        self._names: dict[uuid.UUID, str] = {}
        self._heartbeat_at = self._clock.monotonic()
        self._sessions: dict[int, ShareSession] = {}
        self._held: dict[PartitionId, _Held] = {}
        self._lock_ms = 0
        self._renew_at = float("inf")
        self._turn = 0
        self._attempts = client.attempts(f"queue '{group_id}'")
        self._stale = False

    def __repr__(self) -> str:
        held = sum(len(each.offsets) for each in self._held.values())
        return f"QueueConsumer({self._group_id}, {len(self._assigned)} partitions, {held} records held)"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What a reader calls.

    def poll(self, *, max_records: int, max_wait_ms: int, strict: bool = False) -> list[QueueRecord]:
        """Records that nobody else holds, of one broker; none when none came within `max_wait_ms`.

        With `strict` not more than `max_records`, where the broker can do that.
        """
        self.tend()
        nodes = self._leaders()
        if not nodes:
            wait_s = max(0.0, min(max_wait_ms / 1000, self._heartbeat_at - self._clock.monotonic()))
            self._client.pause(wait_s)
            return []
        self._turn += 1
        first = self._turn % len(nodes)
        turns = list(nodes.items())[first:] + list(nodes.items())[:first]
        # Everybody is asked before anybody is waited for: records of one broker must not wait for another's silence.
        waits = [0, max_wait_ms // len(nodes)] if len(nodes) > 1 else [max_wait_ms]
        for wait_ms in waits:
            for node, partitions in turns:
                found = self._fetch(node, partitions, max_records, wait_ms, strict)
                if found:
                    return found
        return []

    def acknowledge(self, records: Collection[QueueRecord], verdict: Verdict) -> list[tuple[QueueRecord, ApiError]]:
        """Say what became of records; those that the broker would not hear of, and why.

        They are no longer held by this member, whatever is answered, and may be delivered again if it was refused.
        """
        ids = {name: topic_id for topic_id, name in self._names.items()}
        refused: list[tuple[QueueRecord, ApiError]] = []
        by_node: dict[int, dict[PartitionId, list[QueueRecord]]] = {}
        for each in records:
            partition = (ids[each.partition.topic], each.partition.partition)
            held = self._held.get(partition)
            if held is None or each.record.offset not in held.offsets:
                error = ApiError(ErrorCode.INVALID_RECORD_STATE, "this member no longer holds the record")
                refused.append((each, error))
                continue
            held.offsets.remove(each.record.offset)
            by_node.setdefault(held.node, {}).setdefault(partition, []).append(each)
        for node, parts in by_node.items():
            offsets = {partition: [each.record.offset for each in told] for partition, told in parts.items()}
            errors = self._tell(node, offsets, verdict)
            for partition, error in errors.items():
                refused += [(each, error) for each in parts[partition]]
        return refused

    def tend(self) -> None:
        """Send the heartbeat and renew the locks, where it is time; to be called while a record takes long."""
        now = self._clock.monotonic()
        if now >= self._heartbeat_at:
            self._heartbeat(now)
        if now >= self._renew_at:
            self._renew(now)

    @property
    def is_reading(self) -> bool:
        """Whether this member has partitions, and has asked for the records of all of them."""
        asked = {each for session in self._sessions.values() for each in session.partitions}
        return bool(self._assigned) and self._assigned <= asked

    @property
    def tend_within_s(self) -> float:
        """How long `tend` can wait at most."""
        return max(0.0, min(self._heartbeat_at, self._renew_at) - self._clock.monotonic())

    def close(self) -> None:
        """Release what is held, and leave; brokers that do not answer learn it by time."""
        for node in list(self._sessions):
            self._end_session(node)
        if self._member_epoch > _JOIN_EPOCH:
            message = ShareGroupHeartbeatRequest(
                group_id=self._group_id, member_id=self._member_id, member_epoch=_LEAVE_EPOCH
            )
            try:
                self._client.ask(self._client.coordinator(self._group_id), message, timeout_ms=_CLOSE_TIMEOUT_MS)
            except ApiError:
                pass
        self._member_epoch = _JOIN_EPOCH

    # The group.

    def _heartbeat(self, now: float) -> None:
        joins = self._member_epoch == _JOIN_EPOCH
        message = ShareGroupHeartbeatRequest(
            group_id=self._group_id,
            member_id=self._member_id,
            member_epoch=self._member_epoch,
            rack_id=(self._client.settings.client_rack or None) if joins else None,
            subscribed_topic_names=self._topics if joins else None,
        )
        try:
            response = self._client.ask(self._client.coordinator(self._group_id), message)
            raise_for(response.error_code, response.error_message)
        except ApiError as error:
            if error.code in _JOIN_AGAIN and not joins:
                self._forget_everything()
                self._member_epoch = _JOIN_EPOCH
                return
            self._client.forget_coordinator(self._group_id)
            self._attempts.failed(error)
            self._heartbeat_at = now + self._attempts.backoff_ms() / 1000
            return
        self._attempts.succeeded()
        self._member_epoch = response.member_epoch
        if response.assignment is not None:
            self._assigned = frozenset(
                (topic.topic_id, index) for topic in response.assignment.topic_partitions for index in topic.partitions
            )
        interval_s = response.heartbeat_interval_ms / 1000
        self._heartbeat_at = now + (interval_s if self._assigned else min(interval_s, _IMPATIENT_S))

    def _forget_everything(self) -> None:
        self._sessions.clear()
        self._held.clear()
        self._assigned = frozenset()

    # Leaders.

    def _leaders(self) -> dict[int, frozenset[PartitionId]]:
        """Whom to ask for what. Partitions without a leader are asked for later; brokers without any are left."""
        if self._assigned and (self._stale or any(topic_id not in self._names for topic_id, _ in self._assigned)):
            self._client.refresh(self._topics, self._attempts)
            self._stale = False
        topics = self._client.known_topics(self._topics)
        self._names.update({topic.topic_id: topic.name for topic in topics.values()})
        nodes: dict[int, set[PartitionId]] = {}
        for topic_id, index in sorted(self._assigned):
            topic = topics.get(self._names.get(topic_id, ""))
            leader: int = NO_BROKER
            if topic is not None and topic.topic_id == topic_id and index in topic.partitions:
                leader = topic.partitions[index].leader
            if leader == NO_BROKER:
                self._stale = True
            else:
                nodes.setdefault(leader, set()).add((topic_id, index))
        for node in self._sessions.keys() - nodes.keys():
            if not any(held.node == node and held.offsets for held in self._held.values()):
                self._end_session(node)
        return {node: frozenset(partitions) for node, partitions in nodes.items()}

    # Records.

    def _fetch(
        self, node: int, wanted: frozenset[PartitionId], max_records: int, max_wait_ms: int, strict: bool
    ) -> list[QueueRecord]:
        session = self._sessions.setdefault(node, ShareSession())
        added, forgotten = session.changes(wanted)
        message = ShareFetchRequest(
            group_id=self._group_id,
            member_id=self._member_id,
            share_session_epoch=session.epoch,
            max_wait_ms=max_wait_ms,
            min_bytes=1,
            max_bytes=DEFAULT_MAX_BYTES,
            max_records=max_records,
            batch_size=max_records,
            share_acquire_mode=_RECORD_LIMIT if strict else 0,
            topics=[
                ShareFetchRequest.FetchTopic(
                    topic_id=topic_id,
                    partitions=[ShareFetchRequest.FetchPartition(partition_index=index) for index in indexes],
                )
                for topic_id, indexes in _by_topic(added)
            ],
            forgotten_topics_data=[
                ShareFetchRequest.ForgottenTopic(topic_id=topic_id, partitions=indexes)
                for topic_id, indexes in _by_topic(forgotten)
            ],
        )
        timeout_ms = self._client.settings.request_timeout_ms + max_wait_ms
        try:
            connection = self._client.connection(node)
            response: ShareFetchResponse = self._client.ask(connection, message, timeout_ms=timeout_ms)
            raise_for(response.error_code, response.error_message)
        except ApiError as error:
            self._session_failed(node, error)
            return []
        session.answered()
        session.partitions = wanted
        self._lock_ms = response.acquisition_lock_timeout_ms
        found = self._taken(node, response)
        if not self._stale:
            self._attempts.succeeded()
        return found

    def _taken(self, node: int, response: ShareFetchResponse) -> list[QueueRecord]:
        found: list[QueueRecord] = []
        gaps: dict[PartitionId, Collection[int]] = {}
        errors: Refused = {}
        for topic in response.responses:
            for data in topic.partitions:
                partition = (topic.topic_id, data.partition_index)
                if data.error_code:
                    errors[partition] = ApiError(versions.known_code(data.error_code), data.error_message or "")
                    continue
                name = TopicPartition(self._names[topic.topic_id], data.partition_index)
                records, empty = read_acquired(data)
                if empty:
                    gaps[partition] = empty
                if records:
                    self._hold(partition, node, [record.offset for record, _ in records])
                    found += [QueueRecord(name, record, count) for record, count in records]
        if gaps:
            self._tell(node, gaps, _GAP)
        self._stale = self._stale or bool(errors)
        for error in errors.values():
            self._attempts.count(error)
        if errors and not found:
            self._client.pause(self._attempts.backoff_ms() / 1000)
        if found:
            self._renew_at = min(self._renew_at, self._next_renewal())
        return found

    def _hold(self, partition: PartitionId, node: int, offsets: Collection[int]) -> None:
        held = self._held.get(partition)
        if held is None or held.node != node:  # a new leader knows nothing of what the old one gave
            held = self._held[partition] = _Held(node)
        held.offsets.update(offsets)

    def _tell(
        self, node: int, offsets: Mapping[PartitionId, Collection[int]], kind: int
    ) -> dict[PartitionId, ApiError]:
        """Acknowledge; the partitions whose part was refused."""
        session = self._sessions.get(node)
        if session is None or session.epoch == _FIRST_EPOCH:
            return dict.fromkeys(offsets, ApiError(ErrorCode.SHARE_SESSION_NOT_FOUND, "the share session is gone"))
        message = self._acknowledgement(session.epoch, offsets, kind)
        try:
            connection = self._client.connection(node)
            response: ShareAcknowledgeResponse = self._client.ask(connection, message)
            raise_for(response.error_code, response.error_message)
        except ApiError as error:
            self._session_failed(node, error)
            return dict.fromkeys(offsets, error)
        session.answered()
        errors = {
            (topic.topic_id, data.partition_index): ApiError(
                versions.known_code(data.error_code), data.error_message or ""
            )
            for topic in response.responses
            for data in topic.partitions
            if data.error_code
        }
        self._stale = self._stale or any(is_retriable(error.code) for error in errors.values())
        return errors

    def _acknowledgement(
        self, epoch: int, offsets: Mapping[PartitionId, Collection[int]], kind: int
    ) -> ShareAcknowledgeRequest:
        return ShareAcknowledgeRequest(
            group_id=self._group_id,
            member_id=self._member_id,
            share_session_epoch=epoch,
            is_renew_ack=kind == _RENEW,
            topics=[
                ShareAcknowledgeRequest.AcknowledgeTopic(
                    topic_id=topic_id,
                    partitions=[
                        ShareAcknowledgeRequest.AcknowledgePartition(
                            partition_index=index,
                            acknowledgement_batches=[
                                ShareAcknowledgeRequest.AcknowledgementBatch(
                                    first_offset=first, last_offset=last, acknowledge_types=[kind]
                                )
                                for first, last in ranges(offsets[topic_id, index])
                            ],
                        )
                        for index in indexes
                    ],
                )
                for topic_id, indexes in _by_topic(offsets)
            ],
        )

    def _renew(self, now: float) -> None:
        """Keep what is held, where the broker can: the locks of the others run out, and `acknowledge` tells."""
        self._renew_at = float("inf")
        by_node: dict[int, dict[PartitionId, set[int]]] = {}
        for partition, held in self._held.items():
            if held.offsets:
                by_node.setdefault(held.node, {})[partition] = held.offsets
        for node, offsets in by_node.items():
            if self._can_renew(node):
                for partition in self._tell(node, offsets, _RENEW):
                    self._held.pop(partition, None)
                self._renew_at = now + self._lock_ms / 2000

    def _can_renew(self, node: int) -> bool:
        try:
            offered = self._client.connection(node).offered
            return versions.version_for(ShareAcknowledgeRequest, offered) >= _RENEWS_FROM
        except ApiError:
            return False

    def _next_renewal(self) -> float:
        return self._clock.monotonic() + self._lock_ms / 2000

    # Failures.

    def _session_failed(self, node: int, error: ApiError) -> None:
        """The broker lets go of everything when it, the session or the connection goes: so does this side."""
        if error.code in _JOIN_AGAIN:
            self._forget_everything()
            self._member_epoch = _JOIN_EPOCH
            self._heartbeat_at = self._clock.monotonic()
            return
        self._sessions.pop(node, None)
        self._let_go(node)
        if error.code in _NEW_SESSION:
            return
        self._stale = True
        self._attempts.failed(error)

    def _let_go(self, node: int) -> None:
        self._held = {partition: held for partition, held in self._held.items() if held.node != node}

    def _end_session(self, node: int) -> None:
        """The final epoch: the broker releases what is still held."""
        session = self._sessions.pop(node)
        self._let_go(node)
        if session.epoch == _FIRST_EPOCH:
            return
        message = self._acknowledgement(_FINAL_EPOCH, {}, Verdict.RELEASE)
        try:
            self._client.ask(self._client.connection(node), message, timeout_ms=_CLOSE_TIMEOUT_MS)
        except ApiError:
            pass


def _by_topic(partitions: Iterable[PartitionId]) -> list[tuple[Any, list[int]]]:
    topics: dict[uuid.UUID, list[int]] = {}
    for topic_id, index in sorted(partitions):
        topics.setdefault(topic_id, []).append(index)
    return list(topics.items())
