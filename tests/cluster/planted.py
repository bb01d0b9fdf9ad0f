"""Starts a broker of a fault test, with a bug planted in it: `python planted.py BUG -- broker --config FILE`.

Each bug is one that a broker of this kind has had somewhere; a fault test that stays green under it proves nothing. The
patch is made in the process before the broker starts. `nothing` plants nothing. These are no bugs, but a place where
faults happen: `power-loss` is a disk that forgets what was not synced, `obedient` has disks that fail or are slow and a
clock that jumps, each when a line on standard input says so; `few-descriptors` and `little-memory` are limits of the
process.

In a network that can be cut the names of the other brokers lead to this broker's own links (`support.tcp_proxy`).

The process dies with its parent, whatever happens to that: brokers must not outlive a test that was killed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Final

from millrace.clock import SystemClock
from millrace.records.compression import Buffer
from millrace.storage.files import Files
from support.disk import FaultyFiles

Command = Callable[[str], None]
"""What a line on standard input does; it gets what follows the command's name."""
LINKS: Final = "MILLRACE_TEST_LINKS"
_PR_SET_PDEATHSIG: Final = 1
_POWER_CUT_STATUS: Final = 137
DESCRIPTORS: Final = 256
ADDRESS_SPACE_BYTES: Final = 640 * 1024**2

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
        self._adopt()
        self.lock = threading.RLock()
        for name in dir(FaultyFiles):
            if name.startswith("sys_"):
                setattr(self, name, self._one_at_a_time(getattr(self, name)))

    def _adopt(self) -> None:
        """What an earlier process left in the logs is as durable as anything: it was there when this one began."""
        for directory in [path for path in self.root.glob("*") if path.is_dir()]:
            self._directories.add(directory)
            self._durable_directories.add(directory)
            for path in directory.iterdir():
                self._names[path] = self._durable_names[path] = next(self._ids)
                self._content[self._names[path]] = path.read_bytes()

    def _one_at_a_time(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def locked(*args: Any) -> Any:
            with self.lock:
                return call(*args)

        return locked

    def _size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def _knows(self, path: Path) -> bool:
        return path in self._names or path in self._durable_names

    def cut_power(self, _: str) -> None:
        """Never returns."""
        self.lock.acquire()
        # Files that other parts keep here in their own way (a metadata store) are none of this disk's business.
        foreign = {path: path.read_bytes() for path in self.root.iterdir() if path.is_file() and not self._knows(path)}
        before = self._size_bytes()
        self.crash()
        for path, data in foreign.items():
            path.write_bytes(data)
        _say(f"power cut: {before - self._size_bytes()} bytes are forgotten")
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
    def parts(config: Any) -> dict[str, Any]:
        disk = kind(Path(config.log_dirs[0]))
        _obey({"power cut": disk.cut_power})
        return {"files": disk}

    _put_parts(parts)


def _put_parts(make: Callable[[Any], dict[str, Any]]) -> None:
    """Give the broker these parts instead of its own; `make` gets its settings."""
    import millrace.broker as composition

    class OfTheseParts(composition.Broker):
        def __init__(self, config: Any, **parts: Any) -> None:
            super().__init__(config, **{**parts, **make(config)})

    composition.Broker = OfTheseParts  # type: ignore[misc]


def _obey(commands: Mapping[str, Command]) -> None:
    """From now on do what standard input says: one command per line, by the words that it begins with."""

    def watch() -> None:
        for line in sys.stdin:
            for name, command in commands.items():
                if line.startswith(name):
                    command(line.removeprefix(name).strip())

    threading.Thread(target=watch, name="planted commands", daemon=True).start()


class ObedientDisk(Files):
    """The disks of the broker, of which one may fail for good or a call once, and all may be slow."""

    def __init__(self) -> None:
        super().__init__()
        self._failing: list[tuple[str, str]] = []
        self._once: list[tuple[int, str, str]] = []
        self._delay_s: tuple[float, float] = (0.0, 0.0)
        self._delays = 0
        self._delayed_s = 0.0

    def fail(self, what: str) -> None:
        """`CALL DIRECTORY`: from now on this call raises EIO for every file below the directory."""
        call, directory = what.split(" ", 1)
        self._failing.append((call, f"{directory}/"))
        _say(f"{call} fails in {directory}")

    def fail_once(self, what: str) -> None:
        """`ERRNO CALL TEXT`: the next such call for a file with this text in its path raises that error."""
        name, call, text = what.split(" ", 2)
        self._once.append((getattr(errno, name), call, text))
        _say(f"{call} will fail once for {text}")

    def slow(self, what: str) -> None:
        """`LEAST MOST`: every sync takes a random time between these seconds."""
        least, most = map(float, what.split())
        self._delays, self._delayed_s, self._delay_s = 0, 0.0, (least, most)
        _say(f"a sync takes {least} to {most} s")

    def fast(self, _: str) -> None:
        self._delay_s = (0.0, 0.0)
        _say(f"{self._delays} syncs were delayed by {self._delayed_s:.3f} s in all")

    def sys_pwritev(self, path: Path, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        self._check("pwritev", path)
        return super().sys_pwritev(path, fd, buffers, position)

    def sys_pread(self, path: Path, fd: int, size_bytes: int, position: int) -> bytes:
        self._check("pread", path)
        return super().sys_pread(path, fd, size_bytes, position)

    def sys_datasync(self, path: Path, fd: int) -> None:
        least, most = self._delay_s
        if most:
            delay_s = random.uniform(least, most)
            time.sleep(delay_s)
            self._delays += 1
            self._delayed_s += delay_s
        self._check("fdatasync", path)
        super().sys_datasync(path, fd)

    def _check(self, call: str, path: Path) -> None:
        if self._failing and any(call == each and str(path).startswith(root) for each, root in self._failing):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        for each in self._once:
            number, failing, text = each
            if call == failing and text in str(path):
                self._once.remove(each)
                _say(f"{call} has failed once for {path.name}")
                raise OSError(number, os.strerror(number))


class JumpingClock(SystemClock):
    """The machine's clock, but for its wall time, which may be set."""

    def __init__(self) -> None:
        self._shift_ms = 0
        self._said = True

    def jump(self, what: str) -> None:
        """`MILLISECONDS`: how far from now on wall time is ahead of the machine's (negative: behind it)."""
        self._shift_ms = int(what)
        self._said = False

    def wall_ms(self) -> int:
        if not self._said:
            self._said = True
            _say(f"the broker was told a time that is {self._shift_ms} ms ahead")
        return super().wall_ms() + self._shift_ms


@bug("obedient")
def obedient() -> None:
    """No bug: the broker as it is, with disks and a clock that do as they are told."""

    def parts(_: Any) -> dict[str, Any]:
        disk, clock = ObedientDisk(), JumpingClock()
        _obey(
            {
                "once ": disk.fail_once,
                "fail ": disk.fail,
                "slow ": disk.slow,
                "fast": disk.fast,
                "clock ": clock.jump,
            }
        )
        return {"files": disk, "clock": clock}

    _put_parts(parts)


def _say(text: str) -> None:
    """A line in the broker's log, by which a test knows that the fault happened."""
    print(f"planted: {text}", flush=True)


# --- limits of the process --------------------------------------------------------------------------------------------


@bug("few-descriptors")
def few_descriptors() -> None:
    """No bug: the broker as it is, with room for few open files and sockets."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


@bug("little-memory")
def little_memory() -> None:
    """No bug: the broker as it is, in a small address space."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))


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


@bug("ignored-directories")
def ignored_directories() -> None:
    """Whatever lay in whichever directory is taken to be there, by the controller and by the broker itself."""
    from millrace.cluster.image import BrokerImage
    from millrace.replication.replicas import Replicas

    BrokerImage.has_directory = lambda self, directory: True  # type: ignore[method-assign]
    Replicas._is_here = lambda self, state: True  # type: ignore[method-assign]


@bug("no-deduplication")
def no_deduplication() -> None:
    """Sequence numbers are not looked at: a retry is appended again."""
    from millrace.storage.producers import Producers

    Producers.check = lambda self, header, verification=None: None  # type: ignore[method-assign]


# --- groups -----------------------------------------------------------------------------------------------------------


@bug("commits-of-anybody")
def commits_of_anybody() -> None:
    """A consumer group takes commits from members that it has removed, and of partitions that are another's."""
    from millrace.errors import ErrorCode
    from millrace.groups.modern import protocol

    protocol.check_commit = lambda *_, **__: lambda _topic_id, _partition: ErrorCode.NONE


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


# --- transactions -----------------------------------------------------------------------------------------------------


@bug("forgotten-markers")
def forgotten_markers() -> None:
    """A new coordinator takes what its predecessor decided for done, whatever the partitions know."""
    from millrace.transactions.shard import TransactionShard
    from millrace.transactions.state import complete

    begin = TransactionShard._begin

    def forget_and_begin(self: TransactionShard) -> None:
        for transactional_id, found in self.transactions.items():
            if found.state.is_prepared:
                self.transactions[transactional_id] = complete(found, found.updated_ms)
        begin(self)

    TransactionShard._begin = forget_and_begin  # type: ignore[method-assign]


@bug("epoch-not-bumped")
def epoch_not_bumped() -> None:
    """A producer keeps its epoch when its transaction ends, or is aborted by the coordinator."""
    from dataclasses import replace

    from millrace.transactions import state

    plan = state._plan_bumping_end

    def plan_without_a_bump(current: state.Transaction, **more: Any) -> state.Decision:
        after = plan(current, **more).after
        assert after is not None
        after = replace(after, producer_epoch=current.producer_epoch)
        return state.Decision(after, after.next_producer)

    state._plan_bumping_end = plan_without_a_bump


@bug("no-verification")
def no_verification() -> None:
    """A leader believes that a transaction is under way when a producer before KIP-890 says so."""
    from millrace.config import BrokerConfig
    from millrace.handlers.transactional import VERIFICATION_SETTING

    get_bool = BrokerConfig.get_bool
    BrokerConfig.get_bool = lambda self, name: name != VERIFICATION_SETTING and get_bool(self, name)  # type: ignore[method-assign]


@bug("forgotten-aborts")
def forgotten_aborts() -> None:
    """Recovery makes the index of aborted transactions anew, and leaves it empty."""
    from millrace.storage import recovery

    replay = recovery.replay

    def replay_without_index(state: Any, segments: Any, from_offset: int, now_ms: int, **_: Any) -> None:
        replay(state, segments, from_offset, now_ms, rebuild_from=None)

    recovery.replay = replay_without_index


@bug("offsets-before-marker")
def offsets_before_marker() -> None:
    """The offsets of a transaction are visible as soon as they are durable, whatever becomes of it."""
    from millrace.groups.offsets.group_offsets import GroupOffsets

    GroupOffsets._put_pending = (  # type: ignore[method-assign]
        lambda self, producer_id, place, committed: self._put(*place, committed)
    )


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
