"""One member of a queue in a fault test: `python -m cluster.queue_member ...`, history in a file.

It takes records, writes them down, and accepts them, now and then letting go of one first. With `--library` it reads
with librdkafka's share consumer, else with `millrace.client.queue`, of which it is known when it asked for what it is
given. It ends when its standard input does, at the latest with its parent, and prints how many records it was given a
few times a second.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from confluent_kafka import (
    AcknowledgeType,
    KafkaError,
    KafkaException,
    Message,
    ShareConsumer,
    TopicPartition,
)

from cluster.planted import die_with_parent
from cluster.workload import CLIENT, add_client_option, complain, key_of, report, watch_input
from millrace.client.cluster import ClusterClient
from millrace.client.queue import QueueConsumer, QueueRecord, Verdict
from millrace.client.settings import ClientSettings
from millrace.errors import ApiError, ErrorCode
from support.history import Action, HistoryWriter, Outcome, decode_record

BATCH: Final = 50
_POLL_S: Final = 0.2
_COMMIT_S: Final = 15.0
_WORK_S: Final = 0.005
"""Between taking and accepting: without it, faults would seldom find a record that is held."""
_RELEASES_EVERY: Final = 37
_IMPATIENT: Final = {"retry.backoff.ms": "20", "retry.backoff.max.ms": "100"}
"""As quick as librdkafka to come back after a fault, or what is given twice would be given to that alone."""


class Taken(NamedTuple):
    """A record as either client gives it."""

    partition: int
    offset: int
    value: int
    deliveries: int
    handle: Message | QueueRecord


class Reader(Protocol):
    """What a member needs of a client."""

    asks_when_told: bool
    """Whether what `take` returns was asked for in the same call."""

    def take(self) -> list[Taken]: ...

    def finish(self, accepted: list[Taken], released: list[Taken]) -> dict[int, Outcome]:
        """Tell the broker; the outcome by partition of what was accepted."""

    def close(self) -> None: ...


class LibraryReader:
    """librdkafka's share consumer, with explicit acknowledgement."""

    asks_when_told = False

    def __init__(self, options: argparse.Namespace) -> None:
        settings = {
            **CLIENT,
            **options.client,
            "group.id": options.group,
            "share.acknowledgement.mode": "explicit",
            "max.poll.records": BATCH,
        }
        self._consumer = ShareConsumer(settings)
        self._consumer.subscribe([options.topic])

    def take(self) -> list[Taken]:
        taken = []
        for message in self._consumer.poll(_POLL_S):
            error = message.error()
            if error is not None:
                complain(f"poll: {error}")
                continue
            value = decode_record(message.value())
            count = message.delivery_count() or 0
            taken.append(Taken(message.partition() or 0, message.offset() or 0, value, count, message))
        return taken

    def finish(self, accepted: list[Taken], released: list[Taken]) -> dict[int, Outcome]:
        for records, kind in ((accepted, AcknowledgeType.ACCEPT), (released, AcknowledgeType.RELEASE)):
            for each in records:
                assert isinstance(each.handle, Message)
                self._consumer.acknowledge(each.handle, kind)
        try:
            answers: dict[TopicPartition, KafkaException | None] = self._consumer.commit_sync(_COMMIT_S)
        except KafkaException as failure:
            complain(f"commit: {failure}")
            return {each.partition: Outcome.INFO for each in accepted}
        return {each.partition: _library_outcome(error) for each, error in answers.items()}

    def close(self) -> None:
        self._consumer.close()


class OwnReader:
    """The client of the command line."""

    asks_when_told = True

    def __init__(self, options: argparse.Namespace) -> None:
        properties = {**options.client, "request.timeout.ms": "5000", **_IMPATIENT}
        self._client = ClusterClient(ClientSettings.from_properties(properties))
        self._consumer = QueueConsumer(self._client, options.group, [options.topic])

    def take(self) -> list[Taken]:
        return [
            Taken(
                each.partition.partition,
                each.record.offset,
                decode_record(each.record.value),
                each.delivery_count,
                each,
            )
            for each in self._consumer.poll(max_records=BATCH, max_wait_ms=int(_POLL_S * 1000))
        ]

    def finish(self, accepted: list[Taken], released: list[Taken]) -> dict[int, Outcome]:
        outcomes = {each.partition: Outcome.OK for each in accepted}
        for records, verdict in ((accepted, Verdict.ACCEPT), (released, Verdict.RELEASE)):
            handles = [each.handle for each in records if isinstance(each.handle, QueueRecord)]
            for record, error in self._consumer.acknowledge(handles, verdict):
                if verdict is Verdict.ACCEPT:
                    refused = error.code is ErrorCode.INVALID_RECORD_STATE
                    outcomes[record.partition.partition] = Outcome.FAIL if refused else Outcome.INFO
        return outcomes

    def close(self) -> None:
        self._consumer.close()
        self._client.close()


def _library_outcome(error: KafkaException | None) -> Outcome:
    if error is None:
        return Outcome.OK
    return Outcome.FAIL if error.args[0].code() == KafkaError.INVALID_RECORD_STATE else Outcome.INFO


class QueueMember:
    """A reader and its history. Owner: one thread."""

    def __init__(self, reader: Reader, topic: str, history: HistoryWriter) -> None:
        self.given = 0
        self._reader = reader
        self._topic = topic
        self._history = history
        self._ops = itertools.count()
        self._turns = itertools.count(1)

    def read(self, wait: Callable[[float], object]) -> None:
        """Take what comes in a moment, work, and say what became of it."""
        op = next(self._ops)
        if self._reader.asks_when_told:
            self._history.write(Outcome.INVOKE, Action.TAKE, self._topic, op=op)
        taken = self._reader.take()
        self._note(Outcome.OK, Action.TAKE, op, taken)
        self.given += len(taken)
        if not taken:
            return
        wait(_WORK_S)
        released = [each for each in taken if each.deliveries == 1 and next(self._turns) % _RELEASES_EVERY == 0]
        accepted = [each for each in taken if each not in released]
        self._note(Outcome.INVOKE, Action.ACCEPT, op, accepted)
        outcomes = self._reader.finish(accepted, released)
        for outcome in set(outcomes.values()):
            told = [each for each in accepted if outcomes.get(each.partition) is outcome]
            self._note(outcome, Action.ACCEPT, op, told)

    def _note(self, outcome: Outcome, action: Action, op: int, records: Iterable[Taken]) -> None:
        for each in records:
            self._history.write(
                outcome,
                action,
                key_of(self._topic, each.partition),
                op=op,
                value=each.value,
                offset=each.offset,
                generation=each.deliveries,
            )
        self._history.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="cluster.queue_member")
    parser.add_argument("role")
    add_client_option(parser)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--partitions", type=int, required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--library", action="store_true")
    options = parser.parse_args()
    die_with_parent()
    stopping = threading.Event()
    threading.Thread(target=watch_input, args=(stopping,), daemon=True).start()
    with HistoryWriter(options.history, f"m{options.number}") as history:
        try:
            reader: Reader = LibraryReader(options) if options.library else OwnReader(options)
            member = QueueMember(reader, options.topic, history)
            reported = 0.0
            while not stopping.is_set():
                member.read(stopping.wait)
                reported = report(member.given, reported)
            reader.close()
        except (KafkaException, ApiError) as error:
            print(f"member {options.number}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
