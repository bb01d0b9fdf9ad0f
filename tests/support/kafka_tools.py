"""Apache Kafka's command-line tools pointed at one broker, run to their end or kept alive as children."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from support.kafka_jars import (
    CONSOLE_CONSUMER,
    CONSOLE_PRODUCER,
    GET_OFFSETS,
    TOPICS,
    Finished,
    KafkaJars,
)
from support.servers import Server

Event = dict[str, Any]


def table(text: str, first_column: str = "GROUP") -> list[dict[str, str]]:
    """What a tool says of groups, as rows by column name; what it says before its table is passed over."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    start = next(number for number, words in enumerate(lines) if words[0] == first_column)
    return [dict(zip(lines[start], words, strict=False)) for words in lines[start + 1 :]]


class LiveTool:
    """A running tool that prints JSON events, one per line; ends with the `with` block."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._stderr: list[str] = []
        self._readers = [threading.Thread(target=self._read_stdout), threading.Thread(target=self._read_stderr)]
        for reader in self._readers:
            reader.start()
        self.events: list[Event] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_for(self, wanted: Callable[[Event], bool], timeout_s: float = 30) -> Event:
        """Read events until one is wanted; everything read stays in `events`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                raise AssertionError(f"event did not come within {timeout_s} s; seen: {self._story()}") from None
            if line is None:
                raise AssertionError(f"the tool ended before the event came; seen: {self._story()}")
            event = json.loads(line)
            self.events.append(event)
            if wanted(event):
                return dict(event)

    def drain(self) -> list[Event]:
        """All events so far, without waiting for more."""
        while not self._lines.empty():
            line = self._lines.get()
            if line is not None:
                self.events.append(json.loads(line))
        return self.events

    def stop(self) -> None:
        """SIGTERM: the tools close their client (a consumer leaves its group) and end."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        self._close()

    def kill(self) -> None:
        """kill -9: the group only learns of it by the session timeout."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        for reader in self._readers:
            reader.join()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _read_stdout(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put(None)

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        self._stderr.extend(self._process.stderr)

    def _story(self) -> str:
        return f"{self.events[-10:]} {''.join(self._stderr)[-2000:]}"


class KafkaTools:
    """The tools, with `--bootstrap-server` filled in."""

    def __init__(self, jars: KafkaJars, server: Server) -> None:
        self._jars = jars
        self._bootstrap = ("--bootstrap-server", server.bootstrap)

    def attempt(self, main: str, *arguments: str, stdin: str = "", timeout_s: float = 60) -> Finished:
        """Run a tool; its exit status is for the caller to judge."""
        return self._jars.run(main, *self._bootstrap, *arguments, stdin=stdin, timeout_s=timeout_s)

    def run(self, main: str, *arguments: str, stdin: str = "", timeout_s: float = 60) -> Finished:
        """Run a tool that must succeed."""
        done = self.attempt(main, *arguments, stdin=stdin, timeout_s=timeout_s)
        assert done.status == 0, f"{main} {' '.join(arguments)}: exit {done.status}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, main: str, *arguments: str) -> LiveTool:
        return LiveTool(self._jars.command(main, *self._bootstrap, *arguments))

    # the four that most tests need to set a scene

    def create_topic(self, topic: str, partitions: int = 1, **configs: str) -> None:
        settings = [
            part for name, value in configs.items() for part in ("--config", f"{name.replace('_', '.')}={value}")
        ]
        self.run(TOPICS, "--create", "--topic", topic, "--partitions", str(partitions), *settings)

    def produce(self, topic: str, lines: list[str], *options: str) -> None:
        done = self.run(CONSOLE_PRODUCER, "--topic", topic, *options, stdin="".join(f"{line}\n" for line in lines))
        assert "ERROR" not in done.stderr, done.stderr  # the tool logs a failed send and still exits with 0

    def consume(self, topic: str, count: int, *options: str) -> list[str]:
        """Exactly `count` lines; fewer within 20 s is a failure."""
        done = self.run(
            CONSOLE_CONSUMER, "--topic", topic, "--max-messages", str(count), "--timeout-ms", "20000", *options
        )
        assert len(done.lines) == count, f"{len(done.lines)} of {count} records: {done}"
        return done.lines

    def offsets(self, topic: str, when: str = "latest") -> dict[int, int]:
        """Offset by partition; a partition without an answer is left out."""
        done = self.run(GET_OFFSETS, "--topic", topic, "--time", when)
        fields = [line.rsplit(":", 2) for line in done.lines]
        return {int(partition): int(offset) for name, partition, offset in fields if name == topic and offset}
