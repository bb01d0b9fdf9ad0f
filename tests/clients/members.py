"""Members of a consumer group, each on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from clients.adapters.interface import Client, Partition, Received

DEADLINE_S = 40.0
# kafka-python 3.0.12 forgets its assignment, and stops its heartbeat, when a poll ends while a SyncGroup answer is on
# its way. A busy machine takes more than 100 ms for that; applications poll for longer, and so do we.
POLL_S = 1.0
REBALANCING = ("rebalance", "generation", "member", "commitfailed", "no_offset")
"""What a commit that meets a rebalance may say."""
COORDINATOR_AWAY = (
    *REBALANCING,
    "coord",
    "transport",
    "timed_out",
    "connection",
    "notreadyerror",
    "brokernotavailable",
)
"""What a commit may say while its coordinator is dead and the next one is not there yet."""

POLLED_TOO_SOON = "kafkaconnectionerror"
"""kafka-python 3.0.12 lets it out of `poll` when it looks for the next coordinator at the broker that has just gone."""


class Member:
    """A consumer on a thread of its own, as an application runs it: poll, work, commit."""

    def __init__(
        self, client: Client, bootstrap: str, topic: str, group: str, forgiven: tuple[str, ...] = REBALANCING
    ) -> None:
        """A refused commit whose error has one of the `forgiven` words is left: the records are read again."""
        self.received: list[Received] = []
        self.assigned: set[Partition] = set()
        self.error: BaseException | None = None
        self._reader = client.reader(bootstrap, group=group)
        self._forgiven = forgiven
        self._reader.subscribe(topic)
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="group member")
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._leaving.is_set():
                records = self._poll()
                self.received += records
                if records:
                    self._commit()
                self.assigned = self._reader.assignment()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.assigned = set()
            self._reader.close()

    def _poll(self) -> list[Received]:
        try:
            return self._reader.poll(POLL_S)
        except Exception as error:
            if "connection" in self._forgiven and POLLED_TOO_SOON in repr(error).lower():
                return []
            raise

    def _commit(self) -> None:
        """A commit that meets a rebalance is refused; the records are read again by their new owner."""
        try:
            self._reader.commit()
        except Exception as error:
            text = repr(error).lower()
            if not any(word in text for word in self._forgiven):
                raise

    def leave(self) -> None:
        self._leaving.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


def wait_for(condition: Callable[[], bool], describe: Callable[[], object]) -> None:
    ends_at = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < ends_at, describe()
        pause.wait(0.02)
