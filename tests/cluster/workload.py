"""One client process of a fault test: `python -m cluster.workload producer|consumer ...`, history in a file.

A producer writes numbered records at a steady rate, idempotently and with acks=all; a consumer is assigned every
partition from the beginning and writes down what it is given. Both end when their standard input does, at the latest
with their parent, and print their count (acknowledged, or read) a few times a second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from cluster.planted import die_with_parent
from support.history import Action, HistoryWriter, Outcome, decode_record, encode_record, value_of

# Errors after which the record is certainly in no log: the broker looked at it, or the client never sent it.
_REFUSED: Final = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_RECORD,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}
_TICK_S: Final = 0.01
_REPORT_S: Final = 0.1
_FLUSH_S: Final = 60
_POLL_RECORDS: Final = 500
_COMPLAINTS: Final = 10
FILLER: Final = b"filler"
"""The key of records that compaction may remove: readers pass over them."""

Settings = dict[str, str | int | float]

CLIENT: Final[Settings] = {
    # A paused broker keeps its connections: without a bound the client would wait for it for half a minute.
    "socket.timeout.ms": 10000,
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 500,
    # When no broker answers, librdkafka 2.16 begins anew from its bootstrap list. Consumers have been seen that never
    # polled again after the last line of that in their debug log, with the cluster long healthy.
    "metadata.recovery.strategy": "none",
    "log_level": 0,
}
PRODUCER: Final[Settings] = {
    **CLIENT,
    "acks": "all",
    "enable.idempotence": True,
    "linger.ms": 5,
    "message.timeout.ms": 120000,
    "request.timeout.ms": 8000,
    "retry.backoff.ms": 50,
}
DEFAULTS: Final[Settings] = {"acks": "all", "enable.idempotence": True, "log_level": 0}
"""What a user would write who knows nothing of faults."""
CONSUMER: Final[Settings] = {
    **CLIENT,
    "group.id": "not used: partitions are assigned",
    "enable.auto.commit": False,
    "auto.offset.reset": "earliest",
    "check.crcs": True,
    "fetch.wait.max.ms": 100,
    "fetch.error.backoff.ms": 50,
}


_complaints = itertools.count()


def complain(text: str) -> None:
    """A line on standard error; after the first few, the rest would say the same."""
    if next(_complaints) < _COMPLAINTS:
        print(text, file=sys.stderr, flush=True)


def key_of(topic: str, partition: int) -> str:
    return f"{topic}-{partition}"


class Load:
    """A producer and its history. Owner: one thread, in which librdkafka's callbacks run too."""

    def __init__(self, options: argparse.Namespace, history: HistoryWriter) -> None:
        self.acked = 0
        settings = DEFAULTS if options.client_defaults else PRODUCER
        self._producer = Producer(
            {
                **options.client,
                **settings,
                "compression.type": options.compression,
                # What has waited for a while must still fit a small segment.
                **({} if options.batch_bytes is None else {"batch.size": options.batch_bytes}),
            }
        )
        self._history = history
        self._keyed: bool = options.keyed
        self._fillers: bool = options.fillers
        self._topic: str = options.topic
        self._partitions: int = options.partitions
        self._number: int = options.number
        self._payload = bytes(range(256)) * (options.size // 256) + bytes(options.size % 256)
        self._ops = itertools.count()

    def send(self, count: int) -> None:
        """Hand over `count` records, after their invocations are in the file."""
        ops = [next(self._ops) for _ in range(count)]
        for op in ops:
            key = key_of(self._topic, op % self._partitions)
            self._history.write(Outcome.INVOKE, Action.SEND, key, op=op, value=value_of(self._number, op))
        self._history.flush()
        for op in ops:
            if self._fillers:
                self._produce(op, FILLER, b"%d" % op)
            value = value_of(self._number, op)
            self._produce(
                op,
                b"%d" % value if self._keyed else None,
                encode_record(value, self._payload),
                partial(self._ended, op),
            )

    def _produce(
        self,
        op: int,
        key: bytes | None,
        data: bytes,
        on_delivery: Callable[[KafkaError | None, Message], None] | None = None,
    ) -> None:
        while True:
            try:
                self._producer.produce(self._topic, data, key, partition=op % self._partitions, on_delivery=on_delivery)
            except BufferError:
                self.wait(_TICK_S)
            else:
                return

    def wait(self, seconds: float) -> None:
        self._producer.poll(seconds)
        self._history.flush()

    def finish(self) -> int:
        """Wait for what is under way; how many records are still undecided."""
        left = self._producer.flush(_FLUSH_S)
        self._history.flush()
        return left

    def _ended(self, op: int, error: KafkaError | None, message: Message) -> None:
        key = key_of(self._topic, op % self._partitions)
        value = value_of(self._number, op)
        if error is None:
            self.acked += 1
            offset = message.offset()
            known = offset if offset is not None and offset >= 0 else -1
            self._history.write(Outcome.OK, Action.SEND, key, op=op, value=value, offset=known)
        else:
            outcome = Outcome.FAIL if error.code() in _REFUSED else Outcome.INFO
            self._history.write(outcome, Action.SEND, key, op=op, value=value)
            complain(f"send {op}: {error}")


def produce(options: argparse.Namespace, stopping: threading.Event) -> int:
    with HistoryWriter(options.history, f"p{options.number}") as history:
        load = Load(options, history)
        started, sent, reported = time.monotonic(), 0, 0.0
        while not stopping.is_set():
            now = time.monotonic()
            due = int((now - started) * options.rate) - sent
            # A producer that was held up does not catch up all at once, or the first batch would hide the rest.
            if due > options.rate:
                started += (due - options.rate) / options.rate
                due = options.rate
            load.send(due)
            sent += due
            load.wait(_TICK_S)
            reported = report(load.acked, reported)
        left = load.finish()
        report(load.acked, 0.0)
        return 1 if left else 0


def consume(options: argparse.Namespace, stopping: threading.Event) -> int:
    with HistoryWriter(options.history, f"c{options.number}") as history:
        consumer = Consumer({**options.client, **CONSUMER})
        keys = {index: key_of(options.topic, index) for index in range(options.partitions)}
        for key in keys.values():
            history.write(Outcome.OK, Action.ASSIGN, key, op=0)
        consumer.assign([TopicPartition(options.topic, index, 0) for index in keys])
        total, reported = 0, 0.0
        try:
            for op in itertools.count(1):
                if stopping.is_set():
                    return 0
                for message in consumer.consume(_POLL_RECORDS, 0.1):
                    if message.error() is not None:
                        complain(f"poll: {message.error()}")
                        continue
                    if message.key() == FILLER:
                        continue
                    key, value = keys[message.partition() or 0], decode_record(message.value())
                    history.write(Outcome.OK, Action.POLL, key, op=op, value=value, offset=message.offset() or 0)
                    total += 1
                history.flush()
                reported = report(total, reported)
        finally:
            consumer.close()
    return 0


def read_everything(
    client: Mapping[str, str], topic: str, ends: dict[int, int], history_path: Path, *, timeout_s: float
) -> dict[int, int]:
    """A fresh client reads each partition from the beginning up to its end; where it got to."""
    positions = dict.fromkeys(ends, 0)
    with HistoryWriter(history_path, "final") as history:
        consumer = Consumer({**client, **CONSUMER})
        consumer.assign([TopicPartition(topic, index, 0) for index in ends])
        deadline = time.monotonic() + timeout_s
        try:
            while any(positions[index] < end for index, end in ends.items()) and time.monotonic() < deadline:
                for message in consumer.consume(_POLL_RECORDS, 0.1):
                    if message.error() is not None:
                        continue
                    index, offset = message.partition() or 0, message.offset() or 0
                    positions[index] = max(positions[index], offset + 1)
                    if message.key() != FILLER:
                        value = decode_record(message.value())
                        history.write(Outcome.OK, Action.FINAL, key_of(topic, index), op=0, value=value, offset=offset)
        finally:
            consumer.close()
    return positions


def add_client_option(parser: argparse.ArgumentParser) -> None:
    """Where the brokers are and how to log in: a file, because everybody can read a command line."""
    parser.add_argument("--client", type=lambda path: json.loads(Path(path).read_text()), required=True)


def report(count: int, last: float) -> float:
    """Tell the parent a count, now and then; when that was."""
    now = time.monotonic()
    if now - last >= _REPORT_S:
        print(count, flush=True)
        return now
    return last


def watch_input(stopping: threading.Event) -> None:
    sys.stdin.read()
    stopping.set()


def main() -> int:
    parser = argparse.ArgumentParser(prog="cluster.workload")
    parser.add_argument("role", choices=("producer", "consumer"))
    add_client_option(parser)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--partitions", type=int, required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--rate", type=int, default=500, help="records per second")
    parser.add_argument("--size", type=int, default=100, help="bytes of payload")
    parser.add_argument("--compression", default="none", help="compression.type of the producer")
    parser.add_argument("--batch-bytes", type=int, help="batch.size of the producer")
    parser.add_argument("--keyed", action="store_true", help="every record has a key of its own")
    parser.add_argument("--fillers", action="store_true", help="before each record one that compaction may remove")
    parser.add_argument("--client-defaults", action="store_true", help="librdkafka's own timeouts and pauses")
    options = parser.parse_args()
    die_with_parent()
    stopping = threading.Event()
    threading.Thread(target=watch_input, args=(stopping,), daemon=True).start()
    try:
        return produce(options, stopping) if options.role == "producer" else consume(options, stopping)
    except KafkaException as error:
        print(f"{options.role} {options.number}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
