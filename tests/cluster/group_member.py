"""One member of a consumer group in a fault test: `python -m cluster.group_member ...`, history in a file.

It reads with the protocol of KIP-848, writes down every record before it commits, and every commit before it sends it,
so that whatever happens to the process, nothing was committed that is not in its history. It ends when its standard
input does, at the latest with its parent, and prints how many records it was given a few times a second.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from pathlib import Path
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from cluster.planted import die_with_parent
from cluster.workload import CLIENT, Settings, add_client_option, complain, key_of, report, watch_input
from support.history import Action, HistoryWriter, Outcome, decode_record

_REFUSED: Final = {
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError._NO_OFFSET,
}
"""Errors after which a commit has certainly not happened: the partition may be another's by now."""
_BATCH: Final = 200
_BATCH_S: Final = 0.1
_COMMITS_EVERY_S: Final = 0.5
"""So that a member has always read something that it has not committed, whenever it is killed or stopped."""

MEMBER: Final[Settings] = {
    **CLIENT,
    "group.protocol": "consumer",
    "enable.auto.commit": False,
    "auto.offset.reset": "earliest",
    "fetch.wait.max.ms": 100,
    "fetch.error.backoff.ms": 50,
    "retry.backoff.ms": 50,
}


class GroupMember:
    """A consumer and its history. Owner: one thread, in which librdkafka's callbacks run too."""

    def __init__(self, options: argparse.Namespace, history: HistoryWriter) -> None:
        self.given = 0
        self._history = history
        self._topic: str = options.topic
        self._generations: dict[int, int] = {}
        self._uncommitted: dict[int, int] = {}
        self._ops = itertools.count()
        self._committed_at = time.monotonic()
        self._consumer = Consumer({**options.client, "group.id": options.group, **MEMBER})
        self._consumer.subscribe([self._topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)

    def read(self) -> None:
        """Take what comes in a moment, and commit now and then."""
        ends_at = time.monotonic() + _BATCH_S
        for _ in range(_BATCH):
            # One by one: in a whole batch it would not be known which records came before a rebalance.
            message = self._consumer.poll(max(0.0, ends_at - time.monotonic()))
            if message is not None:
                self._take(message)
            elif time.monotonic() >= ends_at:
                break
        if time.monotonic() - self._committed_at >= _COMMITS_EVERY_S:
            self._commit(dict(self._uncommitted))
            self._committed_at = time.monotonic()

    def close(self) -> None:
        """Commit the rest and leave the group."""
        self._commit(dict(self._uncommitted))
        self._consumer.close()
        self._history.flush()

    def _take(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            if error.fatal():
                raise KafkaException(error)
            complain(f"poll: {error}")
            return
        index, offset = message.partition() or 0, message.offset() or 0
        self._history.write(
            Outcome.OK,
            Action.POLL,
            key_of(self._topic, index),
            op=next(self._ops),
            value=decode_record(message.value()),
            offset=offset,
            generation=self._generations[index],
        )
        self._uncommitted[index] = offset + 1
        self.given += 1

    def _commit(self, offsets: dict[int, int]) -> None:
        if not offsets:
            return
        op = next(self._ops)
        self._note_commit(Outcome.INVOKE, op, offsets)
        wanted = [TopicPartition(self._topic, index, offset) for index, offset in offsets.items()]
        try:
            answers = self._consumer.commit(offsets=wanted, asynchronous=False) or []
        except KafkaException as failure:
            error = failure.args[0]
            if error.fatal():
                raise
            outcomes = {index: _outcome(error) for index in offsets}
        else:
            outcomes = {each.partition: _outcome(each.error) for each in answers}
        for index, outcome in outcomes.items():
            self._note_commit(outcome, op, {index: offsets[index]})
            if outcome is Outcome.OK and self._uncommitted.get(index) == offsets[index]:
                del self._uncommitted[index]

    def _note_commit(self, outcome: Outcome, op: int, offsets: dict[int, int]) -> None:
        for index, offset in offsets.items():
            self._history.write(outcome, Action.COMMIT, key_of(self._topic, index), op=op, offset=offset)
        self._history.flush()

    def _assigned(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for each in partitions:
            generation = self._generations[each.partition] = self._generations.get(each.partition, 0) + 1
            key = key_of(self._topic, each.partition)
            self._history.write(Outcome.OK, Action.ASSIGN, key, op=next(self._ops), generation=generation)
        self._history.flush()

    def _revoked(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        leaving = [each.partition for each in partitions if each.partition in self._uncommitted]
        self._commit({index: self._uncommitted[index] for index in leaving})
        self._lost(_consumer, partitions)

    def _lost(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for each in partitions:
            self._uncommitted.pop(each.partition, None)


def _outcome(error: KafkaError | None) -> Outcome:
    if error is None:
        return Outcome.OK
    return Outcome.FAIL if error.code() in _REFUSED else Outcome.INFO


def main() -> int:
    parser = argparse.ArgumentParser(prog="cluster.group_member")
    parser.add_argument("role")
    add_client_option(parser)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--partitions", type=int, required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--group", required=True)
    options = parser.parse_args()
    die_with_parent()
    stopping = threading.Event()
    threading.Thread(target=watch_input, args=(stopping,), daemon=True).start()
    with HistoryWriter(options.history, f"m{options.number}") as history:
        try:
            member = GroupMember(options, history)
            reported = 0.0
            while not stopping.is_set():
                member.read()
                reported = report(member.given, reported)
            member.close()
        except KafkaException as error:
            print(f"member {options.number}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
