"""The demo as a whole: who is started when, how it comes to its end, and whether what came out is what went in.

Not here: anything that is shown. Owner: the command's thread; the threads it starts own only themselves.
The end goes against the stream: producers first, then whoever carries records, then the pipelines, which first process
all that is there, then the readers of their results. Only after that is anything counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.clock import SystemClock
from millrace.demo import pipelines, processes, results, traffic
from millrace.demo.brokers import BrokerCluster, Brokers, OneBroker, replication_factor
from millrace.demo.failover import BROKERS_NEEDED, FailoverThread, Outage
from millrace.demo.group import Archive, Member
from millrace.demo.traffic import BAD, ERROR, GOOD, LOG_SHARE, SOURCES, Account, LogWriter, SourceThread

RESULT_PARTITIONS: Final = 2
CATCH_UP_TIMEOUT_S: Final = 30.0
LOG_FILES: Final = ("checkout", "accounts", "mail")
_MEMBERS: Final = 2


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must have come out. `late` of it may be missing, where Spark reports that it dropped so many."""

    what: str
    expected: int
    found: int
    late: int = 0

    @property
    def ok(self) -> bool:
        return self.expected - self.late <= self.found <= self.expected


class Scenario:
    """Leaving the `with` block ends whatever runs; `finish` before it ends everything in order and counts."""

    def __init__(self, home: Path, rate_per_s: int, brokers: int = 1) -> None:
        self.home = home
        self.results = home / "results"
        self.account = Account()
        self.archive = Archive()
        self.members: list[Member] = []
        self.brokers: Brokers = OneBroker(home) if brokers == 1 else BrokerCluster(home, brokers)
        self._failover: FailoverThread | None = None
        self._rate_per_s = rate_per_s
        self._clock = SystemClock()
        self._stack = ExitStack()
        self._sources: list[SourceThread] = []
        self._log_writers: list[LogWriter] = []
        self._problems: list[str] = []

    def __enter__(self) -> Self:
        for folder in (self.home, self.results, self.home / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # --- the beginning ------------------------------------------------------------------------------------------------

    def start_brokers(self) -> None:
        self._stack.enter_context(self.brokers)
        self.bootstrap = self.brokers.bootstrap
        self._settings: dict[str, Any] = {"bootstrap.servers": self.bootstrap, "log_level": 2}

    def start_spark(self) -> None:
        """Takes some seconds: a JVM starts."""
        self.pipelines = pipelines.Pipelines(self.bootstrap, self.home / "checkpoints", self.results)
        self._stack.callback(self.pipelines.stop)
        self.pipelines.open_session()

    def start_work(self) -> None:
        """Producers, the follower of log files, the consumer group, the pipelines, and a reader of their results."""
        outputs = [topic for topic in self.pipelines.topics() if topic not in traffic.PARTITIONS]
        self._create_topics({**traffic.PARTITIONS, **dict.fromkeys(outputs, RESULT_PARTITIONS)})
        self._sources = [
            SourceThread(source, source.share * self._rate_per_s, self.account, self._settings, seed)
            for seed, source in enumerate(SOURCES)
        ]
        users = next(one for one in self._sources if one.name == "users table")
        users.send_first(traffic.USER_COUNT)
        self._log_writers = [
            LogWriter(self.home / "logs" / f"{name}.log", LOG_SHARE * self._rate_per_s / len(LOG_FILES), seed)
            for seed, name in enumerate(LOG_FILES)
        ]
        self._follower = self._stack.enter_context(
            processes.follower(
                self.bootstrap, traffic.LOGS, str(self.home / "logs" / "*.log"), self.home / "follower.log"
            )
        )
        self.members = [Member(number, self.archive, self._settings) for number in range(_MEMBERS)]
        self.reader = results.ResultReader(dict.fromkeys(outputs, RESULT_PARTITIONS), self._settings)
        self._stack.callback(self._end_threads)
        for reader in (*self.members, self.reader):
            reader.start()
        self.pipelines.start()
        for producer in (*self._sources, *self._log_writers):  # last: what they write is counted from here on
            producer.start()

    def _create_topics(self, topics: dict[str, int]) -> None:
        admin = AdminClient(self._settings)
        copies = replication_factor(self.brokers.count)
        wanted = [NewTopic(topic, num_partitions=count, replication_factor=copies) for topic, count in topics.items()]
        for future in admin.create_topics(wanted).values():
            future.result(timeout=30)

    # --- while it runs ------------------------------------------------------------------------------------------------

    def change_members(self) -> None:
        """A member joins the group and the first one leaves: the group rebalances while records flow."""
        newcomer = Member(len(self.members), self.archive, self._settings)
        self.members.append(newcomer)
        newcomer.start()
        self.members[0].leave()

    @property
    def can_fail_over(self) -> bool:
        """Whether there are enough brokers to lose one and go on."""
        return self.brokers.count >= BROKERS_NEEDED

    @property
    def outage(self) -> Outage | None:
        """What has become of the failover, once a broker is killed."""
        return None if self._failover is None else self._failover.failover.outage

    def start_failover(self, at_s: float) -> None:
        """Kill the leader of a busy partition now, which is `at_s` in the demo's time, and start it again later."""
        assert isinstance(self.brokers, BrokerCluster)
        self._failover = FailoverThread(self.brokers, at_s)
        self._stack.callback(self._failover.leave)
        self._failover.start()

    def failure(self) -> str | None:
        """What makes it senseless to go on."""
        ended = self.brokers.failure()
        if ended is not None:
            return ended
        if self._follower.poll() is not None:
            return f"the follower of log files ended: {processes.last_line(self.home / 'follower.log')}"
        return self.pipelines.failure()

    def lines_written(self) -> Counter[str]:
        return sum((writer.lines for writer in self._log_writers), Counter())

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End everything in order; what could not be waited for is among `problems`. May take minutes."""
        self._end_producers()
        if self._failover is not None:
            self._failover.join()  # its own time limits end it
        lines = self.lines_written().total()
        self._wait_for(lambda: sum(self._ends([traffic.LOGS]).values()) >= lines, f"{lines:,} log lines in their topic")
        self.pipelines.catch_up()
        self._sources[0].send_now(traffic.closing_records(self._clock))
        self.pipelines.catch_up()
        failure = self.pipelines.failure()
        if failure is not None:
            self._problems.append(failure)
        ends = self._ends(self._outputs())
        self._wait_for(lambda: self.reader.has_read(ends), "every result being read")
        self._wait_for(lambda: self.archive.count >= self.account.acked(traffic.CHAT), "the chat being archived")
        self._end_threads()

    def problems(self) -> list[str]:
        threads: list[SourceThread | Member | results.ResultReader] = [*self._sources, *self.members, self.reader]
        found = [*self._problems, *(thread.error for thread in threads if thread.error)]
        if self._failover is not None and self._failover.failover.problem is not None:
            found.append(self._failover.failover.problem)
        if self.account.failed:
            found.append(f"{self.account.failed:,} records were refused")
        if self.archive.gaps:
            found.append(f"the group skipped records {self.archive.gaps:,} times")
        return found

    def checks(self) -> list[Check]:
        """Everything that went in, and what must have come of it."""
        acked, read, late = self.account.acked, self.reader.counts, self.pipelines.late_rows
        lines = self.lines_written()
        dead = {name: read[topic] for name, topic in pipelines.DEAD.items()}
        enriched = sum(count for topic, count in read.items() if topic.startswith(pipelines.ENRICHED))
        in_table = results.events_in_table(self.results / "metrics.db", pipelines.TABLE)
        stored = results.rows_in_warehouse(self.results / "logs")
        return [
            Check("chat messages archived by the group", acked(traffic.CHAT), self.archive.count),
            Check("metrics counted in the table", acked(traffic.METRICS, GOOD), in_table, late("metrics")),
            Check("metrics that are no JSON, as dead letters", acked(traffic.METRICS, BAD), dead["metrics"]),
            Check("log lines stored in the warehouse", lines[GOOD] + lines[ERROR], stored),
            Check("errors in their topic", lines[ERROR], read[pipelines.ERRORS]),
            Check("log lines without a format, as dead letters", lines[BAD], dead["logs"]),
            Check("clicks enriched, each once", acked(traffic.CLICKS, GOOD), enriched, late("streams")),
            Check(
                "purchases joined with their click", acked(traffic.PURCHASES, GOOD), self.reader.joined, late("streams")
            ),
            Check("clicks that are no JSON, as dead letters", acked(traffic.CLICKS, BAD), dead["streams"]),
        ]

    def _outputs(self) -> list[str]:
        return [topic for topic in dict.fromkeys(self.pipelines.topics()) if topic not in traffic.PARTITIONS]

    def _end_producers(self) -> None:
        producers: list[SourceThread | LogWriter] = [*self._sources, *self._log_writers]
        for producer in producers:
            producer.stop()
        for producer in producers:
            if producer.ident is not None:
                producer.join()

    def _end_threads(self) -> None:
        self._end_producers()
        readers: list[Member | results.ResultReader] = [*self.members, self.reader]
        for reader in readers:
            reader.leave()
        for reader in readers:
            if reader.ident is not None:
                reader.join()

    def _ends(self, topics: list[str]) -> dict[tuple[str, int], int]:
        """The end offsets of topics, asked from the broker."""
        consumer = Consumer({**self._settings, "group.id": "none"})
        try:
            known = consumer.list_topics(timeout=10).topics
            return {
                (topic, number): consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=10)[1]
                for topic in topics
                for number in known[topic].partitions
            }
        finally:
            consumer.close()

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = self._clock.monotonic() + CATCH_UP_TIMEOUT_S
        pause = threading.Event()
        while not condition():
            if self._clock.monotonic() > deadline or self.brokers.failure() is not None:
                self._problems.append(f"waited in vain for {what}")
                return
            pause.wait(0.05)
