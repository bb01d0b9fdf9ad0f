"""Disks that come back empty, are not there, fail, are slow, rot or lose what was not synced, while records flow.

Segments roll every few kilobytes and records are compressed. Every fault shows by itself that it happened: by what the
broker logs of it, or what the planted disk says (`planted`); one that did not happen is a red round.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from cluster.faults import Row, Variant
from cluster.rounds import Fault, Scale, Stage, Traffic, run_round
from support.checker_replicas import EPOCHS_FILE
from support.cluster_processes import wait_for
from support.servers import ServerFailed

ROLLING: Final = Traffic((("internal.segment.bytes", "32768"),), ("lz4", "zstd"), batch_bytes=16384)
rolling_round: Final = partial(run_round, traffic=ROLLING)

SHORT_DISK: Final = Scale(acked=3_000, bounces=1, rate=1_500, session_timeout_ms=3000, outage_s=5)
FULL_DISK: Final = Scale(acked=30_000, bounces=4, rate=1_500, session_timeout_ms=6000, outage_s=30)
_NOTICED_S: Final = 30.0
_NEW_DISK: Final = r"is new: replicas that lay here before are not expected in it"

# --- empty disks ------------------------------------------------------------------------------------------------------


def empty_disks(stage: Stage, broker_id: int) -> None:
    """Put new disks in place of a stopped broker's."""
    stage.mark(f"new disks for {broker_id}")
    for disk in stage.cluster.brokers[broker_id].disks:
        shutil.rmtree(disk)
        disk.mkdir()


def start_empty(stage: Stage, broker_id: int) -> None:
    stage.cluster.start_brokers([broker_id])
    stage.cluster.brokers[broker_id].wait_logged(_NEW_DISK, _NOTICED_S)


def first_back_with_empty_disks(stage: Stage) -> None:
    """All stop, one after the other; the last one, who alone is in the ISR, is the first one back."""
    for bounce in range(stage.scale.bounces):
        order = _rotated(list(stage.cluster.brokers), bounce)
        for broker_id in order:
            stage.mark(f"SIGTERM of {broker_id}")
            stage.cluster.brokers[broker_id].terminate()
        last = order[-1]
        empty_disks(stage, last)
        start_empty(stage, last)
        stage.cluster.start_brokers(order[:-1])
        stage.goes_on()
        stage.cluster.wait_whole(stage.topic, stage.scale.heals_within_s)


def last_back_with_empty_disks(stage: Stage) -> None:
    """All crash; one comes back after the others, and empty."""
    for bounce in range(stage.scale.bounces):
        empty, *others = _rotated(list(stage.cluster.brokers), bounce)
        stage.mark("kill -9 of all")
        stage.cluster.kill(*stage.cluster.brokers)
        empty_disks(stage, empty)
        stage.cluster.start_brokers(others)
        stage.goes_on()
        start_empty(stage, empty)
        stage.cluster.wait_whole(stage.topic, stage.scale.heals_within_s)


def one_back_with_empty_disks(stage: Stage) -> None:
    """A leader comes back empty while the others live."""
    for bounce in range(stage.scale.bounces):
        leader = stage.leader(bounce % 2)
        stage.mark(f"kill -9 of leader {leader}")
        stage.cluster.kill(leader)
        empty_disks(stage, leader)
        start_empty(stage, leader)
        stage.goes_on()
        stage.cluster.wait_whole(stage.topic, stage.scale.heals_within_s)


def _rotated(items: list[int], by: int) -> list[int]:
    by %= len(items)
    return items[by:] + items[:by]


# --- directories that cannot be used at the start ---------------------------------------------------------------------


def unreadable_meta(disk: Path) -> Callable[[], None]:
    """A meta.properties that cannot be read; the call that mends it."""
    meta, kept = disk / "meta.properties", disk / "meta.properties.kept"
    meta.rename(kept)
    meta.mkdir()

    def mend() -> None:
        meta.rmdir()
        kept.rename(meta)

    return mend


def file_instead(disk: Path) -> Callable[[], None]:
    """A file where a directory should be; the call that mends it."""
    kept = disk.with_name(f"{disk.name}-kept")
    disk.rename(kept)
    disk.write_text("no directory")

    def mend() -> None:
        disk.unlink()
        kept.rename(disk)

    return mend


def offline_at_start(spoil: Callable[[Path], Callable[[], None]]) -> Fault:
    """One of two directories cannot be used at the start: the broker serves what is in the other one."""

    def fault(stage: Stage) -> None:
        for bounce in range(stage.scale.bounces):
            broker_id = stage.leader(bounce % 2)
            broker = stage.cluster.brokers[broker_id]
            disk = stage.log_directory(broker_id).parent
            away, there = replicas_by_disk(stage, broker_id, disk)
            stage.mark(f"{disk.name} of {broker_id} cannot be used at its start")
            broker.terminate()
            mend = spoil(disk)
            stage.cluster.start_brokers([broker_id])
            broker.wait_logged(rf"data directory {disk} is offline", _NOTICED_S)
            stage.goes_on()
            wait_in_sync(stage, broker_id, there=there, away=away)
            broker.terminate()
            mend()
            stage.cluster.start_brokers([broker_id])
            stage.cluster.wait_whole(stage.topic, stage.scale.heals_within_s)

    return fault


def replicas_by_disk(stage: Stage, broker_id: int, disk: Path) -> tuple[list[int], list[int]]:
    """The partitions of a broker that lie on a disk, and the others."""
    places = {index: stage.log_directory(broker_id, index).parent for index in range(stage.clients.partitions)}
    here = [index for index, place in places.items() if place == disk]
    elsewhere = [index for index in places if index not in here]
    if not here or not elsewhere:
        raise ServerFailed(f"all partitions of broker {broker_id} lie on one disk: {places}")
    return here, elsewhere


def wait_in_sync(stage: Stage, broker_id: int, *, there: Sequence[int], away: Sequence[int]) -> None:
    """Wait until a broker is in the ISR of some partitions and not in that of others, as all brokers see it."""

    def as_expected() -> bool | None:
        views = stage.cluster.views(stage.topic)
        isrs = [{index: each.isr for index, each in view.partitions.items()} for view in views]
        if len(isrs) < 2 or any(len(isr) < stage.clients.partitions for isr in isrs):
            return None
        here = all(broker_id in isr[index] for isr in isrs for index in there)
        return (here and not any(broker_id in isr[index] for isr in isrs for index in away)) or None

    wait_for(as_expected, _NOTICED_S, f"broker {broker_id} is not in sync in {there} and away in {away}", pause_s=0.1)
    stage.mark(f"{broker_id} is in sync in partitions {there}, away in {away}")


# --- failing disks ----------------------------------------------------------------------------------------------------


def failing(who: Callable[[Stage, int], int], call: str) -> Fault:
    """A disk fails for good; where it is the only one, the broker ends."""

    def fault(stage: Stage) -> None:
        for bounce in range(stage.scale.bounces):
            broker_id = who(stage, bounce % 2)
            broker = stage.cluster.brokers[broker_id]
            disk = stage.log_directory(broker_id, bounce % 2).parent
            stage.mark(f"{call} fails on {disk.name} of {broker_id}")
            only = len(broker.disks) == 1
            away, there = ([], []) if only else replicas_by_disk(stage, broker_id, disk)
            broker.tell(f"fail {call} {disk}")
            broker.wait_logged(rf"data directory {disk} is offline: .*Input/output error", _NOTICED_S)
            if only:
                expect_end(stage, broker_id)
                stage.goes_on()
            else:
                stage.goes_on()
                wait_in_sync(stage, broker_id, there=there, away=away)
                stage.cluster.kill(broker_id)  # with the process the fault is gone
            stage.cluster.start_brokers([broker_id])
            stage.cluster.wait_whole(stage.topic, stage.scale.heals_within_s)

    return fault


def expect_end(stage: Stage, broker_id: int) -> None:
    """The broker ends by itself, with one line and an exit code."""
    broker = stage.cluster.brokers[broker_id]
    status = broker.wait_ended(_NOTICED_S)
    lines = [line for line in broker.log_tail(200).splitlines() if "no usable data directory is left" in line]
    stage.mark(f"{broker_id} ended with {status}: {lines[-1] if lines else 'nothing said'}")
    if status <= 0 or not lines:
        raise ServerFailed(f"broker {broker_id} ended with {status} and said {lines}")


# --- slow disks -------------------------------------------------------------------------------------------------------

LEAST_S: Final = 0.05
MOST_S: Final = 0.5


def slow(who: Callable[[Stage, int], int]) -> Fault:
    """Every sync of one broker takes 50 to 500 ms."""

    def fault(stage: Stage) -> None:
        broker_id = who(stage, 0)
        broker = stage.cluster.brokers[broker_id]
        stage.mark(f"slow disks of {broker_id}")
        since = broker.log_size()
        broker.tell(f"slow {LEAST_S} {MOST_S}")
        for _ in range(stage.scale.bounces):
            time.sleep(stage.scale.session_s)
            stage.goes_on()
        broker.tell("fast")
        said = broker.wait_logged(r"planted: (\d+) syncs were delayed by ([\d.]+) s", since=since)
        count, delayed_s = int(said[1]), float(said[2])
        stage.mark(f"{count} syncs took {delayed_s:.1f} s")
        if not count or delayed_s < count * LEAST_S:
            raise ServerFailed(f"the disks of broker {broker_id} were not slow: {said[0]}")

    return fault


# --- bit rot ----------------------------------------------------------------------------------------------------------


_IN_THE_FIRST_BATCH: Final = 65
"""A byte of its first record."""
_ONE_BATCH: Final = 150
"""More records than a batch has here."""


def flip(path: Path, place: int | None = None) -> None:
    """Another byte at a place, or in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 0xFF
    path.write_bytes(data)


def recovery_point(directory: Path) -> int:
    """Up to where a log is known to be on disk, as the checkpoint beside it says."""
    checkpoint = directory.parent / "recovery-point-offset-checkpoint"
    lines = checkpoint.read_text().splitlines()[2:] if checkpoint.exists() else []
    points = {f"{topic}-{index}": int(offset) for topic, index, offset in map(str.split, lines)}
    return points.get(directory.name, 0)


def rotten_log(stage: Stage) -> None:
    """A follower crashes, and flushed records of it have changed: it must not be trusted, nor spoil anybody.

    In the segment in which its recovery point lies: those before it are not looked at until somebody reads them.
    """
    for bounce in range(stage.scale.bounces):
        index = bounce % 2
        broker_id = stage.follower(index)
        broker = stage.cluster.brokers[broker_id]
        directory = stage.log_directory(broker_id, index)
        segment = wait_rot_place(directory)
        stage.cluster.kill(broker_id)
        stage.mark(f"a bit of the first batch in {segment.name} of {directory.name} of {broker_id} is another")
        flip(segment, _IN_THE_FIRST_BATCH)
        stage.cluster.start_brokers([broker_id])
        broker.wait_logged(rf"{stage.topic}-{index}.* is damaged", _NOTICED_S)
        stage.goes_on()
        stage.cluster.wait_whole(stage.topic, stage.scale.heals_within_s)


def wait_rot_place(directory: Path) -> Path:
    return wait_for(lambda: rot_place(directory), _NOTICED_S, f"{directory} has nothing below a recovery point")


def rot_place(directory: Path) -> Path | None:
    """The segment in which the recovery point of a log lies, if not at its beginning."""
    point = recovery_point(directory)
    below = [path for path in sorted(directory.glob("*.log")) if int(path.stem) < point]
    return below[-1] if below and point - int(below[-1].stem) > _ONE_BATCH else None


def rotten_files_beside_the_log(stage: Stage) -> None:
    """A leader stops cleanly, and every index, epoch and snapshot file of it has changed: they are made anew."""
    for bounce in range(stage.scale.bounces):
        index = bounce % 2
        broker_id = stage.leader(index)
        broker = stage.cluster.brokers[broker_id]
        directory = stage.log_directory(broker_id, index)
        broker.terminate()
        rotten = [path for suffix in ("index", "timeindex", "snapshot") for path in directory.glob(f"*.{suffix}")]
        rotten = [path for path in [*rotten, directory / EPOCHS_FILE] if path.stat().st_size]
        kinds = sorted({path.suffix or path.name for path in rotten})
        stage.mark(f"{len(rotten)} files ({', '.join(kinds)}) of {directory.name} of {broker_id} are others")
        if len(kinds) < 4:
            raise ServerFailed(f"there were only {kinds} in {directory}")
        for path in rotten:
            flip(path)
        stage.cluster.start_brokers([broker_id])
        stage.goes_on()
        stage.cluster.wait_whole(stage.topic, stage.scale.heals_within_s)
        # The one with the rotten files leads, and what they say is needed.
        others = [each for each in stage.cluster.brokers if each != broker_id]
        stage.cluster.kill(*others)
        stage.cluster.start_brokers(others)
        stage.goes_on()
        stage.cluster.wait_whole(stage.topic, stage.scale.heals_within_s)


# --- power loss -------------------------------------------------------------------------------------------------------


def power_loss(count: int) -> Fault:
    """So many brokers end at once and find, when they are back, only what was synced; the leader is among them."""

    def fault(stage: Stage) -> None:
        for bounce in range(stage.scale.bounces):
            leader = stage.leader(bounce % stage.clients.partitions)
            others = [each for each in stage.cluster.brokers if each != leader]
            victims = [leader, *stage.rng.sample(others, count - 1)]
            stage.mark(f"power cut of {victims}")
            for broker_id in victims:
                broker = stage.cluster.brokers[broker_id]
                broker.cut_power()
                stage.mark(broker.wait_logged(r"planted: power cut: -?\d+ bytes are forgotten", _NOTICED_S)[0])
            stage.cluster.start_brokers(victims)
            stage.goes_on()
            stage.cluster.wait_whole(stage.topic, stage.scale.heals_within_s)

    return fault


# --- the table --------------------------------------------------------------------------------------------------------


def leader(stage: Stage, index: int) -> int:
    return stage.leader(index)


def follower(stage: Stage, index: int) -> int:
    return stage.follower(index)


def two_disks(name: str, fault: Fault, *, disks: int = 2, short: bool = True) -> Variant:
    """On brokers whose disks and clocks do as they are told; all such variants share a running cluster."""
    settings = (
        ("log.flush.offset.checkpoint.interval.ms", "1000"),
        ("log.cleaner.backoff.ms", "100"),
        ("log.cleaner.io.max.bytes.per.second", "100000"),
    )
    return Variant(name, fault, planted="obedient", log_dirs=disks, settings=settings, short=short)


DISK_ROWS: Final = (
    Row(
        "a broker comes back with empty disks: first, last, while the others live",
        (
            two_disks("first back with empty disks", first_back_with_empty_disks),
            two_disks("last back with empty disks", last_back_with_empty_disks, short=False),
            two_disks("one back with empty disks", one_back_with_empty_disks),
        ),
        3,
        30_000,
        SHORT_DISK,
        FULL_DISK,
        rolling_round,
    ),
    Row(
        "one of two directories offline at the start: meta.properties unreadable, a file in its place",
        (
            two_disks("meta.properties unreadable", offline_at_start(unreadable_meta)),
            two_disks("file instead of a directory", offline_at_start(file_instead), short=False),
        ),
        2,
        30_000,
        SHORT_DISK,
        FULL_DISK,
        rolling_round,
    ),
    Row(
        "a disk fails (EIO on pwritev, on fdatasync) of a leader, of a follower, one of two and the only one",
        (
            two_disks("leader's disk fails on write", failing(leader, "pwritev")),
            two_disks("leader's disk fails on sync", failing(leader, "fdatasync"), short=False),
            two_disks("follower's disk fails on write", failing(follower, "pwritev"), short=False),
            two_disks("follower's disk fails on sync", failing(follower, "fdatasync")),
            two_disks("leader's only disk fails on write", failing(leader, "pwritev"), disks=1, short=False),
            two_disks("leader's only disk fails on sync", failing(leader, "fdatasync"), disks=1),
            two_disks("follower's only disk fails on write", failing(follower, "pwritev"), disks=1),
            two_disks("follower's only disk fails on sync", failing(follower, "fdatasync"), disks=1, short=False),
        ),
        8,
        20_000,
        SHORT_DISK,
        FULL_DISK,
        rolling_round,
    ),
    Row(
        "slow disks (50 to 500 ms per fdatasync) of a leader, of a follower",
        (
            two_disks("leader's disks slow", slow(leader)),
            two_disks("follower's disks slow", slow(follower)),
        ),
        2,
        20_000,
        SHORT_DISK,
        FULL_DISK,
        rolling_round,
    ),
    Row(
        "bit rot on one broker: in its log, in its index, epoch and snapshot files",
        (
            two_disks("log rotten", rotten_log),
            two_disks("files beside the log rotten", rotten_files_beside_the_log),
        ),
        2,
        30_000,
        SHORT_DISK,
        FULL_DISK,
        rolling_round,
    ),
    Row(
        "power loss of one, two and three brokers",
        (
            Variant("power loss of one", power_loss(1), planted="power-loss", short=False),
            Variant("power loss of two", power_loss(2), planted="power-loss"),
            Variant("power loss of three", power_loss(3), planted="power-loss"),
        ),
        6,
        250_000,
        SHORT_DISK,
        Scale(acked=250_000, bounces=10, rate=4_000, session_timeout_ms=6000, outage_s=30),
        rolling_round,
    ),
)
