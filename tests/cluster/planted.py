"""Starts a broker of a fault test, with a bug planted in it: `python planted.py BUG -- broker --config FILE`.

Each bug is one that a broker of this kind has had somewhere; a fault test that stays green under it proves nothing. The
patch is made in the process before the broker starts. `nothing` plants nothing, `power-loss` only gives the broker a
disk that forgets what was not synced when its standard input says so.

In a network that can be cut the names of the other brokers lead to this broker's own links (`support.tcp_proxy`).

The process dies with its parent, whatever happens to that: brokers must not outlive a test that was killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final

from support.disk import FaultyFiles

POWER_CUT: Final = b"power cut\n"
LINKS: Final = "MILLRACE_TEST_LINKS"
_PR_SET_PDEATHSIG: Final = 1
_POWER_CUT_STATUS: Final = 137

BUGS: Final[dict[str, Callable[[], None]]] = {}


def bug(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def named(plant: Callable[[], None]) -> Callable[[], None]:
        BUGS[name] = plant
        return plant

    return named


@bug("nothing")
def nothing() -> None:
    """The broker as it is."""


# --- the disk ---------------------------------------------------------------------------------------------------------


class ForgetfulDisk(FaultyFiles):
    """`FaultyFiles` that loop and flush threads may use at once, and that can be cut off from another thread."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.lock = threading.RLock()
        for name in dir(FaultyFiles):
            if name.startswith("sys_"):
                setattr(self, name, self._one_at_a_time(getattr(self, name)))

    def _one_at_a_time(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def locked(*args: Any) -> Any:
            with self.lock:
                return call(*args)

        return locked

    def _knows(self, path: Path) -> bool:
        return path in self._names or path in self._durable_names

    def cut_power(self) -> None:
        """Never returns."""
        self.lock.acquire()
        # Files that other parts keep here in their own way (a metadata store) are none of this disk's business.
        foreign = {path: path.read_bytes() for path in self.root.iterdir() if path.is_file() and not self._knows(path)}
        self.crash()
        for path, data in foreign.items():
            path.write_bytes(data)
        os._exit(_POWER_CUT_STATUS)


class LyingDisk(ForgetfulDisk):
    """Says that log segments were synced, and does nothing."""

    def sys_datasync(self, path: Path, fd: int) -> None:
        if path.suffix != ".log":
            super().sys_datasync(path, fd)


@bug("power-loss")
def power_loss() -> None:
    """No bug: the broker as it is, on a disk that loses what was not synced."""
    _put_disk(ForgetfulDisk)


@bug("skipped-flush")
def skipped_flush() -> None:
    """Records count as flushed that never were; power loss shows it."""
    _put_disk(LyingDisk)


def _put_disk(kind: type[ForgetfulDisk]) -> None:
    import millrace.broker as composition

    class OnThisDisk(composition.Broker):
        def __init__(self, config: Any, **parts: Any) -> None:
            disk = kind(Path(config.log_dirs[0]))
            threading.Thread(target=_watch_input, args=(disk,), daemon=True).start()
            super().__init__(config, files=disk, **parts)

    composition.Broker = OnThisDisk  # type: ignore[misc]


def _watch_input(disk: ForgetfulDisk) -> None:
    for line in sys.stdin.buffer:
        if line == POWER_CUT:
            disk.cut_power()


# --- replication ------------------------------------------------------------------------------------------------------


@bug("ack-before-replication")
def ack_before_replication() -> None:
    """The high watermark is the leader's own end: what the followers have does not matter."""
    from millrace.replication import isr

    def own_end_alone(own_end: int, *_: Any) -> int:
        return own_end

    isr.high_watermark = own_end_alone  # type: ignore[assignment]


@bug("truncation-to-high-watermark")
def truncation_to_high_watermark() -> None:
    """A follower of a new leader cuts its log at the high watermark it knows, which is late (KIP-101)."""
    from millrace.replication.partition import Partition

    follow = Partition.follow

    def follow_and_cut(self: Partition, state: Any) -> None:
        before = self.leader_epoch
        follow(self, state)
        if self.leader_epoch != before and self.log.end_offset > self.high_watermark.offset:
            self.log.truncate_to(self.high_watermark.offset)

    Partition.follow = follow_and_cut  # type: ignore[method-assign]


@bug("ignored-epoch")
def ignored_epoch() -> None:
    """A leader does not look at the epochs in a fetch, so nobody is told that its log has diverged."""
    from millrace.replication.partition import Partition

    serve = Partition.serve_follower

    def serve_anybody(
        self: Partition, broker_id: int, broker_epoch: int, offset: int, last_epoch: int, max_bytes: int, **more: Any
    ) -> Any:
        return serve(self, broker_id, broker_epoch, offset, -1, max_bytes, **more)

    Partition.serve_follower = serve_anybody  # type: ignore[method-assign]
    Partition.check_leader_epoch = lambda self, epoch: None  # type: ignore[method-assign]


@bug("no-deduplication")
def no_deduplication() -> None:
    """Sequence numbers are not looked at: a retry is appended again."""
    from millrace.storage.producers import Producers

    Producers.check = lambda self, header: None  # type: ignore[method-assign]


# --- groups -----------------------------------------------------------------------------------------------------------


@bug("commits-of-anybody")
def commits_of_anybody() -> None:
    """A consumer group takes commits from members that it has removed, and of partitions that are another's."""
    from millrace.errors import ErrorCode
    from millrace.groups import modern

    modern.check_commit = lambda *_, **__: lambda _topic_id, _partition: ErrorCode.NONE


@bug("accepted-before-kept")
def accepted_before_kept() -> None:
    """A leader tells members that their acknowledgements are durable, and stores them a moment later."""
    import asyncio

    from millrace.queues.persister import Persister

    keep = Persister.write
    under_way: set[asyncio.Task[None]] = set()

    async def write_later(self: Persister, key: Any, write: Any) -> None:
        async def later() -> None:
            await asyncio.sleep(0.5)
            await keep(self, key, write)

        task = asyncio.create_task(later())
        under_way.add(task)
        task.add_done_callback(under_way.discard)

    Persister.write = write_later  # type: ignore[method-assign]


# --- start ------------------------------------------------------------------------------------------------------------


def die_with_parent() -> None:
    """Linux kills this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def call_by_links(links: dict[str, int]) -> None:
    """Calls to each of these names go to its port on this machine, whatever port the caller has in mind."""
    from millrace.client.connection import Connection

    connect = Connection._connect

    async def by_link(self: Connection, ssl: Any) -> None:
        if self.host in links:
            self.host, self.port = "127.0.0.1", links[self.host]
        await connect(self, ssl)

    Connection._connect = by_link  # type: ignore[method-assign]


def main(arguments: list[str]) -> None:
    name, separator, *command = arguments
    if separator != "--" or name not in BUGS:
        sys.exit(f"usage: planted.py {'|'.join(BUGS)} -- millrace arguments")
    die_with_parent()
    BUGS[name]()
    call_by_links(json.loads(os.environ.get(LINKS, "{}")))
    from millrace import cli

    sys.argv = ["millrace", *command]
    cli.main()


if __name__ == "__main__":
    main(sys.argv[1:])
