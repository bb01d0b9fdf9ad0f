"""`millrace consume TOPIC --queue GROUP`: a topic read as a queue, by members that share its records out.

Each record goes to one member at a time. Without `--exec` it is printed, and accepted once it was; with `--exec` a
command decides by its exit code. Whatever ends this program, a record that was not done with goes to somebody else: at
once when it is asked to stop, after the lock has run out when it is killed.

Signals only set a flag, which is looked at between requests: one that came in the middle of a response would leave a
connection on which nothing can be released any more. The second signal does not wait.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final

import typer

from millrace.cli.connection import require_reachable
from millrace.cli.output import CommandError, count_text, print_remark
from millrace.cli.template import ReceivedRecord
from millrace.client.cluster import ClusterClient, raise_for
from millrace.client.queue import QueueConsumer, QueueRecord, Verdict
from millrace.client.settings import ClientSettings
from millrace.clock import SystemClock
from millrace.errors import ApiError, ErrorCode
from millrace.wire.messages.configs import IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse

REJECT_EXIT_CODE: Final = 65
"""EX_DATAERR of sysexits.h: the input is wrong, and will be wrong for everybody."""
_POLL_MS: Final = 500
_BATCH: Final = 500
_GRACE_S: Final = 5.0
_GROUP_RESOURCE: Final = 32
_SET: Final = 0


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """What the command line asked for."""

    topic: str
    group: str
    command: str | None
    from_beginning: bool
    max_records: int | None
    idle_timeout_s: float | None


class Stopping:
    """Whether somebody asked to stop; true after the first signal, an exception after the second."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def open_client(bootstrap: str, overrides: Mapping[str, str]) -> ClusterClient:
    """The project's own client, which knows share groups; it reads the same settings as the library's."""
    require_reachable(bootstrap)
    properties = {"bootstrap.servers": bootstrap, "client.id": "millrace-cli", **overrides}
    return ClusterClient(ClientSettings.from_properties(properties))


def require_topic(client: ClusterClient, topic: str) -> None:
    if topic in client.topics([topic]):
        return
    from difflib import get_close_matches

    near = get_close_matches(topic, client.topics(), n=1)
    raise CommandError(f"there is no topic '{topic}'" + (f"; did you mean '{near[0]}'?" if near else ""))


def consume_queue(
    client: ClusterClient, options: QueueOptions, render: Callable[[ReceivedRecord], bytes], ending: bytes
) -> None:
    """Read until a limit or a signal. `render` makes what is printed, or what the command gets on its stdin."""
    stopping = Stopping()
    with client, stopping.on_signals():
        require_topic(client, options.topic)
        if options.from_beginning:
            _start_new_queues_at_the_beginning(client, options.group)
        with QueueConsumer(client, options.group, [options.topic]) as consumer:
            if options.command is None:
                reader: _Reader = _Printer(consumer, options, stopping, lambda record: render(record) + ending)
            else:
                reader = _Executor(consumer, options, stopping, render)
            reader.run()
    if options.max_records is not None and reader.done < options.max_records and not stopping.asked:
        told = f"{reader.done} of {options.max_records} records"
        print_remark(f"stopped after {options.idle_timeout_s:g} s without a record: {told}")
        raise typer.Exit(1)


def _start_new_queues_at_the_beginning(client: ClusterClient, group: str) -> None:
    """A setting of the group, which matters only for partitions that it has not read yet."""
    request = IncrementalAlterConfigsRequest(
        resources=[
            IncrementalAlterConfigsRequest.AlterConfigsResource(
                resource_type=_GROUP_RESOURCE,
                resource_name=group,
                configs=[
                    IncrementalAlterConfigsRequest.AlterableConfig(
                        name="share.auto.offset.reset", config_operation=_SET, value="earliest"
                    )
                ],
            )
        ]
    )

    def read(response: IncrementalAlterConfigsResponse) -> None:
        for each in response.responses:
            raise_for(each.error_code, each.error_message)

    client.ask_any_broker(f"settings of queue '{group}'", request, read)


class _Reader:
    """Takes records and has each handled, until a limit is reached or somebody asks to stop."""

    max_batch = _BATCH

    def __init__(
        self,
        consumer: QueueConsumer,
        options: QueueOptions,
        stopping: Stopping,
        render: Callable[[ReceivedRecord], bytes],
    ) -> None:
        self.done = 0
        self.consumer = consumer
        self.stopping = stopping
        self.render = render
        self._options = options

    def run(self) -> None:
        clock = SystemClock()
        last_seen = clock.monotonic()
        while not self.stopping.asked and (wanted := self._wanted()):
            # A record that is only waiting here would be done sooner by somebody else: take no more than is wanted.
            strict = wanted < _BATCH
            records = self.consumer.poll(max_records=wanted, max_wait_ms=_POLL_MS, strict=strict)
            if records:
                self.handle(records[: self._left(len(records))])
                last_seen = clock.monotonic()
            elif self._idle_too_long(clock.monotonic() - last_seen):
                return

    def handle(self, records: list[QueueRecord]) -> None:
        raise NotImplementedError

    def acknowledge(self, records: list[QueueRecord], verdict: Verdict) -> None:
        refused = self.consumer.acknowledge(records, verdict)
        if refused:
            first, error = refused[0]
            print_remark(
                f"{count_text(len(refused), 'record')} could not be {_PAST[verdict]} and may come again, "
                f"{first.partition} at offset {first.record.offset} first: {_reason(error)}"
            )

    def _idle_too_long(self, idle_s: float) -> bool:
        return self._options.idle_timeout_s is not None and idle_s >= self._options.idle_timeout_s

    def _left(self, most: int) -> int:
        return most if self._options.max_records is None else self._options.max_records - self.done

    def _wanted(self) -> int:
        return min(self.max_batch, self._left(self.max_batch))


_PAST: Final = {Verdict.ACCEPT: "accepted", Verdict.RELEASE: "released", Verdict.REJECT: "rejected"}


def _reason(error: ApiError) -> str:
    if error.code is ErrorCode.INVALID_RECORD_STATE:
        return "the lock had run out"
    return str(error)


class _Printer(_Reader):
    """Prints, and accepts what has been written out."""

    def handle(self, records: list[QueueRecord]) -> None:
        out = sys.stdout.buffer
        for record in records:
            out.write(self.render(received(record)))
        out.flush()
        self.done += len(records)
        self.acknowledge(records, Verdict.ACCEPT)


class _Executor(_Reader):
    """Runs the command for one record after another, and does what its exit code says."""

    max_batch = 1

    def handle(self, records: list[QueueRecord]) -> None:
        for record in records:  # brokers older than Kafka 4.2 give whole batches
            if self.stopping.asked:
                return
            verdict = verdict_of(self._run(record))
            self.done += 1
            self.acknowledge([record], verdict)

    def _run(self, record: QueueRecord) -> int:
        """The exit code of the command; while it runs, the group hears that this member lives."""
        assert self._options.command is not None
        process = subprocess.Popen(  # noqa: S603 - the user's own words
            ["/bin/sh", "-c", self._options.command],
            stdin=subprocess.PIPE,
            env={**os.environb, **environment(record)},
            start_new_session=True,  # a Ctrl-C is for this program, which then asks the command to stop
        )
        content: bytes | None = self.render(received(record))
        killed_at: float | None = None
        clock = SystemClock()
        while True:
            try:
                process.communicate(content, timeout=min(self.consumer.tend_within_s, 0.2) or 0.01)
                return process.returncode
            except subprocess.TimeoutExpired:
                content = None  # what is left of it is being written
            except KeyboardInterrupt:
                _end(process, signal.SIGKILL)
                process.wait()
                raise
            if self.stopping.asked and killed_at is None:
                killed_at = clock.monotonic() + _GRACE_S
                _end(process, signal.SIGTERM)
            elif killed_at is not None and clock.monotonic() >= killed_at:
                _end(process, signal.SIGKILL)
            self.consumer.tend()


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the command and everything it started."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def verdict_of(exit_code: int) -> Verdict:
    """Zero is success, 65 a record that nobody will ever want; anything else, signals too, may go better next time."""
    if exit_code == 0:
        return Verdict.ACCEPT
    return Verdict.REJECT if exit_code == REJECT_EXIT_CODE else Verdict.RELEASE


def environment(record: QueueRecord) -> dict[bytes, bytes]:
    """What the command is told of a record. A value that an environment cannot hold (a zero byte) is left out."""
    known: dict[str, bytes | None] = {
        "RECORD_TOPIC": record.partition.topic.encode(),
        "RECORD_PARTITION": b"%d" % record.partition.partition,
        "RECORD_OFFSET": b"%d" % record.record.offset,
        "RECORD_TIMESTAMP_MS": b"%d" % record.record.timestamp_ms,
        "RECORD_DELIVERY_COUNT": b"%d" % record.delivery_count,
        "RECORD_KEY": record.record.key,
    }
    for header in record.record.headers:
        known.setdefault("RECORD_HEADER_" + re.sub(r"[^A-Z0-9]", "_", header.key.upper()), header.value)
    return {name.encode(): value for name, value in known.items() if value is not None and b"\0" not in value}


def received(record: QueueRecord) -> ReceivedRecord:
    content = record.record
    return ReceivedRecord(
        topic=record.partition.topic,
        partition=record.partition.partition,
        offset=content.offset,
        timestamp_ms=content.timestamp_ms if content.timestamp_ms >= 0 else None,
        key=content.key,
        value=content.value,
        headers=[(header.key, header.value) for header in content.headers],
    )
