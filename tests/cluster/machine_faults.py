"""A machine that gives a broker little, or the wrong time, while records flow.

256 descriptors are fewer than the segments that it has, and less than half of them are for connections.
"""

from __future__ import annotations

import re
import socket
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from cluster.disk_faults import FULL_DISK, ROLLING, SHORT_DISK, rolling_round, two_disks
from cluster.faults import Row, Variant
from cluster.planted import ADDRESS_SPACE_BYTES, DESCRIPTORS
from cluster.rounds import Stage, Traffic, run_round
from support.cluster_processes import wait_for
from support.servers import HOST, ServerFailed

_HOUR_MS: Final = 3_600_000
_ALMOST_MS: Final = 59 * 60_000
"""A broker an hour behind refuses what is written now: it lies more than message.timestamp.after.max.ms ahead."""
_IDLE_CONNECTIONS: Final = 150
_SEGMENTS_WITHIN_S: Final = 60.0


def limit_of(stage: Stage, broker_id: int, name: str) -> int:
    """What the system says of a limit of a broker's process."""
    text = Path(f"/proc/{stage.cluster.brokers[broker_id].pid}/limits").read_text()
    found = re.search(rf"^{name}\s+(\d+)", text, re.MULTILINE)
    return -1 if found is None else int(found[1])


def few_descriptors(stage: Stage) -> None:
    """More segments than descriptors, more clients than there is room for, and a leader that is killed."""
    for broker_id in stage.cluster.brokers:
        if limit_of(stage, broker_id, "Max open files") != DESCRIPTORS:
            raise ServerFailed(f"broker {broker_id} has other descriptors than {DESCRIPTORS}")
    leader = stage.leader()

    def many_segments() -> int | None:
        places = [stage.log_directory(leader, index) for index in range(stage.clients.partitions)]
        count = sum(1 for place in places for _ in place.glob("*.log"))
        return count if count > DESCRIPTORS else None

    count = wait_for(many_segments, _SEGMENTS_WITHIN_S, f"not more than {DESCRIPTORS} segments", pause_s=0.2)
    stage.mark(f"{count} segments on {leader}")
    for _ in range(stage.scale.bounces):
        with ExitStack() as idle:
            port = stage.cluster.brokers[stage.leader()].client_port
            for _ in range(_IDLE_CONNECTIONS):
                idle.enter_context(socket.create_connection((HOST, port), timeout=5))
            stage.mark(f"{_IDLE_CONNECTIONS} idle connections")
            stage.goes_on()
        leader = stage.leader()
        stage.mark(f"kill -9 of leader {leader}")
        stage.cluster.kill(leader)
        stage.goes_on()
        stage.cluster.start_brokers([leader])
        stage.cluster.wait_whole(stage.topic, stage.scale.heals_within_s)


def little_memory(stage: Stage) -> None:
    """The address space is limited, a leader is killed, and a broker copies everything anew."""
    for broker_id in stage.cluster.brokers:
        if limit_of(stage, broker_id, "Max address space") != ADDRESS_SPACE_BYTES:
            raise ServerFailed(f"broker {broker_id} has no limit of {ADDRESS_SPACE_BYTES} bytes")
    for bounce in range(stage.scale.bounces):
        leader = stage.leader(bounce % 2)
        stage.mark(f"kill -9 of leader {leader}")
        stage.cluster.kill(leader)
        stage.goes_on()
        stage.cluster.start_brokers([leader])
        stage.cluster.wait_whole(stage.topic, stage.scale.heals_within_s)


def clock_jumps(stage: Stage) -> None:
    """The clock of one broker jumps an hour ahead and back again, then back an hour and ahead again."""
    for bounce in range(stage.scale.bounces):
        broker_id = stage.leader(bounce % 2)
        broker = stage.cluster.brokers[broker_id]
        for shift_ms in (_HOUR_MS, 0, -_ALMOST_MS, 0):
            stage.mark(f"the clock of {broker_id} is {shift_ms} ms ahead")
            since = broker.log_size()
            broker.tell(f"clock {shift_ms}")
            broker.wait_logged(rf"planted: the broker was told a time that is {shift_ms} ms ahead", since=since)
            time.sleep(stage.scale.session_s / 2)
            stage.goes_on()


TINY_SEGMENTS: Final = Traffic((("internal.segment.bytes", "2048"),), ("lz4", "zstd"), batch_bytes=1500)

MACHINE_ROWS: Final = (
    Row(
        "256 descriptors: more segments than that, too many clients, the leader killed",
        (Variant("few descriptors", few_descriptors, planted="few-descriptors", short=False),),
        2,
        30_000,
        SHORT_DISK,
        FULL_DISK,
        partial(run_round, traffic=TINY_SEGMENTS),
    ),
    Row(
        "an address space of 640 MiB (an idle broker takes 420), the leader killed",
        (Variant("little memory", little_memory, planted="little-memory", log_dirs=2, short=False),),
        2,
        30_000,
        SHORT_DISK,
        FULL_DISK,
        rolling_round,
    ),
    Row(
        "the clock of one broker jumps an hour ahead and back",
        (two_disks("clock jumps", clock_jumps),),
        2,
        30_000,
        SHORT_DISK,
        FULL_DISK,
        partial(run_round, traffic=ROLLING),
    ),
)
