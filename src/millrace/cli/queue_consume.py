"""`millrace consume TOPIC --queue GROUP`: a topic read as a queue, by members that share its records out.

Each record goes to one member at a time. Without `--exec` it is printed, and accepted once it was; with `--exec` a
command decides by its exit code (`cli.queue_exec`). Whatever ends this program, a record that was not done with goes to
somebody else: at once when it is asked to stop, after the lock has run out when it is killed.

Signals only set a flag, which is looked at between requests: one that came in the middle of a response would leave a
connection on which nothing can be released any more. The second signal does not wait.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import ClassVar, Final

import typer

from millrace.admin import configs as config_values
from millrace.admin import groups as group_views
from millrace.admin.queues import DEAD_LETTERS, DELIVERY_LIMIT, positions_of
from millrace.admin.topics import require_topic
from millrace.cli.entry import require_entry
from millrace.cli.output import CommandError, count_text, print_remark
from millrace.cli.queue_exec import Ending, Tally, check_command, ending_of, exit_text, rest_s, run_command
from millrace.cli.template import ReceivedRecord
from millrace.client.cluster import ClusterClient
from millrace.client.queue import QueueConsumer, QueueRecord, Verdict
from millrace.client.settings import ClientSettings
from millrace.clock import SystemClock
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import ResourceType

_POLL_MS: Final = 500
_BATCH: Final = 500
_LOOK_S: Final = 0.2
_RESET: Final = "share.auto.offset.reset"
_OTHER_KIND: Final = frozenset({ErrorCode.GROUP_ID_NOT_FOUND, ErrorCode.INCONSISTENT_GROUP_PROTOCOL})
"""What a member of a queue is told whose group is one of another kind."""


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
    require_entry(bootstrap, overrides)
    properties = {"bootstrap.servers": bootstrap, "client.id": "millrace-cli", **overrides}
    return ClusterClient(ClientSettings.from_properties(properties))


def refuse_queue(bootstrap: str, overrides: Mapping[str, str], name: str) -> None:
    """CommandError where a group that is to be read as a consumer group is a queue: the broker only says it differs."""
    with open_client(bootstrap, overrides) as client:
        found = group_views.describe_group(client, name)
    if found is not None and found.type == group_views.SHARE:
        raise CommandError(f"group '{name}' is a queue: read it with --queue {name}, or choose another --group")


def consume_queue(
    client: ClusterClient, options: QueueOptions, render: Callable[[ReceivedRecord], bytes], ending: bytes
) -> None:
    """Read until a limit or a signal. `render` makes what is printed, or what the command gets on its stdin."""
    if options.command is not None:
        check_command(options.command)
    stopping = Stopping()
    with client, stopping.on_signals():
        require_topic(client, options.topic)
        if options.from_beginning:
            config_values.change(client, config_values.group(options.group), {_RESET: "earliest"})
        waiting = _waiting_remark(client, options)
        consumer = QueueConsumer(client, options.group, [options.topic])
        if options.command is None:
            reader: _Reader = _Printer(client, consumer, options, stopping, lambda record: render(record) + ending)
        else:
            reader = _Executor(client, consumer, options, stopping, render)
        try:
            with consumer:
                reader.run(waiting)
        except ApiError as error:
            kind = group_views.other_kind(client, options.group) if error.code in _OTHER_KIND else None
            if kind is None:
                raise
            raise CommandError(
                f"'{options.group}' is {kind}, and no queue: read it with --group, or choose another --queue"
            ) from None
        finally:
            reader.tell()
    if options.max_records is not None and reader.done < options.max_records and not stopping.asked:
        told = f"{reader.done} of {options.max_records} records"
        print_remark(f"stopped after {options.idle_timeout_s:g} s without a record: {told}")
        raise typer.Exit(1)
    if not reader.is_all_well:
        raise typer.Exit(1)


def _waiting_remark(client: ClusterClient, options: QueueOptions) -> str | None:
    """What is said when there is nothing to read: that a new queue begins at the end, to everybody; or that it waits.

    The second is for whoever looks at a terminal; the first changes which records a script gets.
    """
    where = f"of topic '{options.topic}' in queue '{options.group}'"
    if not options.from_beginning and _begins_at_the_end(client, options):
        return (
            f"waiting for new records {where}: it is new, and begins at the end; "
            "--from-beginning begins at the first record"
        )
    return f"waiting for records {where}; Ctrl-C ends" if sys.stderr.isatty() else None


def _begins_at_the_end(client: ClusterClient, options: QueueOptions) -> bool:
    try:
        positions = positions_of(client, options.group)
    except ApiError as error:
        if error.code is not ErrorCode.GROUP_ID_NOT_FOUND:
            return False  # an old broker, or one that does not answer: whoever reads will hear of it
        positions = {}
    if any(each.topic == options.topic and found.start is not None for each, found in positions.items()):
        return False
    return config_values.read_value(client, config_values.group(options.group), _RESET) == "latest"


@dataclass
class _Reader:
    """Takes records and has each handled, until a limit is reached or somebody asks to stop."""

    max_batch: ClassVar[int] = _BATCH

    client: ClusterClient
    consumer: QueueConsumer
    options: QueueOptions
    stopping: Stopping
    render: Callable[[ReceivedRecord], bytes]
    done: int = 0

    def run(self, waiting: str | None) -> None:
        """Read; `waiting` is said once, if there is nothing to read at first."""
        clock = SystemClock()
        last_seen = clock.monotonic()
        while not self.stopping.asked and (wanted := self._wanted()):
            # A record that is only waiting here would be done sooner by somebody else: take no more than is wanted.
            strict = wanted < _BATCH
            records = self.consumer.poll(max_records=wanted, max_wait_ms=_POLL_MS, strict=strict)
            if records:
                waiting = None
                self.handle(records[: self._left(len(records))])
                last_seen = clock.monotonic()
                continue
            if waiting is not None and self.consumer.is_reading:
                print_remark(waiting)
                waiting = None
            if self._idle_too_long(clock.monotonic() - last_seen):
                return

    def tell(self) -> None:
        """Say at the end what became of the records."""

    @property
    def is_all_well(self) -> bool:
        return True

    def handle(self, records: list[QueueRecord]) -> None:
        raise NotImplementedError

    def acknowledge(self, records: list[QueueRecord], verdict: Verdict) -> bool:
        """Whether the broker took it for all of them; if not, that is said."""
        refused = self.consumer.acknowledge(records, verdict)
        if refused:
            first, error = refused[0]
            print_remark(
                f"{count_text(len(refused), 'record')} could not be {_PAST[verdict]} and may come again, "
                f"{first.partition} at offset {first.record.offset} first: {_reason(error)}"
            )
        return not refused

    def _idle_too_long(self, idle_s: float) -> bool:
        return self.options.idle_timeout_s is not None and idle_s >= self.options.idle_timeout_s

    def _left(self, most: int) -> int:
        return most if self.options.max_records is None else self.options.max_records - self.done

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


@dataclass
class _Executor(_Reader):
    """Runs the command for one record after another, and does what its exit code says."""

    max_batch: ClassVar[int] = 1

    _tally: Tally = field(default_factory=Tally)
    _failures: int = 0
    """One after another, of whichever records."""
    _whereabouts: str | None = None

    def run(self, waiting: str | None) -> None:
        super().run(waiting)
        if self._tally.lost:  # asked here and not in `tell`, which also speaks when no broker answers any more
            self._whereabouts = _whereabouts(self.client, self.options.group)

    @property
    def is_all_well(self) -> bool:
        return self._tally.all_accepted

    def handle(self, records: list[QueueRecord]) -> None:
        for record in records:  # brokers older than Kafka 4.2 give whole batches
            if self.stopping.asked:
                return
            self._handle(record)

    def _handle(self, record: QueueRecord) -> None:
        assert self.options.command is not None
        name = f"{record.partition}@{record.record.offset}"
        content = self.render(received(record))
        exit_code = run_command(
            self.options.command, content, record, tend=self._tend, is_asked_to_stop=lambda: self.stopping.asked
        )
        self.done += 1
        ending = ending_of(exit_code)
        if ending in (Ending.ACCEPTED, Ending.REJECTED):
            self._failures = 0
            accepts = ending is Ending.ACCEPTED
            is_taken = self.acknowledge([record], Verdict.ACCEPT if accepts else Verdict.REJECT)
            note = self._tally.accept if accepts else self._tally.reject
            (note if is_taken else self._tally.give_back)(name)
        elif self.stopping.asked:
            self.acknowledge([record], Verdict.RELEASE)  # it did not end by itself
        elif ending is Ending.NOT_STARTED:
            self._let_go(record, name, _delivery_limit(self.client, self.options.group))
            raise CommandError(
                f"the command cannot be started ({exit_text(exit_code)}), so nothing more is taken from queue "
                f"'{self.options.group}': {self.options.command}"
            )
        else:
            self._failed(record, name, exit_code)

    def _failed(self, record: QueueRecord, name: str, exit_code: int) -> None:
        """Keep the record for a rest, so that nobody else fails with it meanwhile, then let it go.

        The rest grows with what failed here one after another, and with what the record has been through.
        """
        self._failures += 1
        limit = _delivery_limit(self.client, self.options.group)
        remark = f"{name}: {exit_text(exit_code)}, delivery {record.delivery_count}" + (f" of {limit}" if limit else "")
        is_last = limit is not None and record.delivery_count >= limit
        if is_last:
            self._let_go(record, name, limit)
        if self._left(1):
            seconds = rest_s(max(self._failures, record.delivery_count))
            print_remark(f"{remark}; the next {'record' if is_last else 'try'} in {seconds:g} s")
            self._rest(seconds)
        else:
            print_remark(remark)
        if not is_last:
            self._let_go(record, name, limit)

    def _let_go(self, record: QueueRecord, name: str, limit: int | None) -> None:
        """Release it; the broker gives up what was delivered as often as the group allows."""
        is_released = self.acknowledge([record], Verdict.RELEASE)
        if is_released and limit is not None and record.delivery_count >= limit:
            self._tally.give_up(name)
        else:
            self._tally.give_back(name)

    def _rest(self, seconds: float) -> None:
        clock = SystemClock()
        until = clock.monotonic() + seconds
        while not self.stopping.asked and (left := until - clock.monotonic()) > 0:
            self.client.pause(min(left, self._tend(), _LOOK_S))

    def _tend(self) -> float:
        self.consumer.tend()
        return self.consumer.tend_within_s

    def tell(self) -> None:
        for line in self._tally.lines():
            print_remark(line)
        if self._whereabouts is not None:
            print_remark(self._whereabouts)


def _delivery_limit(client: ClusterClient, group: str) -> int | None:
    """How often a record is delivered before it is given up; None where the broker does not say."""
    try:
        text = config_values.read_value(client, config_values.group(group), DELIVERY_LIMIT)
        if text is None:  # older brokers have one for all groups
            broker = config_values.Resource(ResourceType.BROKER, str(client.broker_ids()[0]))
            text = config_values.read_value(client, broker, f"group.{DELIVERY_LIMIT}")
    except ApiError:
        return None
    return int(text) if text is not None and text.isdigit() else None


def _whereabouts(client: ClusterClient, group: str) -> str:
    """Where to look for what was rejected and given up."""
    try:
        topic = config_values.read_value(client, config_values.group(group), DEAD_LETTERS)
    except ApiError as error:
        return f"whether queue '{group}' has a dead-letter topic is not known: {error}"
    if topic:
        return f"what was rejected or given up has a letter in topic '{topic}'"
    return (
        f"queue '{group}' has no dead-letter topic, so nobody hears of them again; "
        f"see: millrace queues alter {group} --dead-letters TOPIC"
    )


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
