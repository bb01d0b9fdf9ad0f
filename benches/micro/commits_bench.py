"""Ten million offset commits of 1,000 groups, then a restart: how long until every group gets its offsets back.

    PYTHONPATH=tests python benches/micro/commits_bench.py [--commits 10000000] [--groups 1000] [--partitions 100]

A broker of its own, with settings as they come, gets OffsetCommit requests over sockets: each is one group's commit for
all partitions of a topic. It compacts __consumer_offsets meanwhile. Right after the last answer it is killed (-9), or
stopped with `--clean`, and started again; from the start of the process on all groups ask for their offsets, and the
clock stops when the last one has got the right ones. Exits with 1 when that takes longer than the bar.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import sys
import time
from pathlib import Path
from typing import Final

import psutil
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.errors import ErrorCode
from millrace.wire.frame import RequestHeader, decode_response, encode_request
from millrace.wire.keys import ApiKey
from millrace.wire.messages.group_offsets import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from millrace.wire.messages.groups import FindCoordinatorRequest
from support.raw import error_codes
from support.servers import HOST, MillraceServer

MAX_RESTART_S: Final = 5.0
CONNECTIONS: Final = 40
TOPIC: Final = "committed"
COMMIT_VERSION: Final = 8
FETCH_VERSION: Final = 8
FIND_VERSION: Final = 2
MARK: Final = 0x7E57_0FF5_E7A1_B2C3
"""Stands for the offset in a request that is encoded once and sent with many."""
LOADING: Final = {
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
}


def group_name(number: int) -> str:
    return f"group-{number:04d}"


def commit_frame(group: str, partitions: int) -> bytes:
    wanted = [
        OffsetCommitRequest.OffsetCommitRequestPartition(
            partition_index=index, committed_offset=MARK, committed_metadata=""
        )
        for index in range(partitions)
    ]
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name=TOPIC, partitions=wanted)
    request = OffsetCommitRequest(group_id=group, generation_id_or_member_epoch=-1, member_id="", topics=[topic])
    return encode_request(RequestHeader(ApiKey.OFFSET_COMMIT, COMMIT_VERSION, 1, "bench"), request)


def find_frame() -> bytes:
    request = FindCoordinatorRequest(key=group_name(0), key_type=0)
    return encode_request(RequestHeader(ApiKey.FIND_COORDINATOR, FIND_VERSION, 1, "bench"), request)


def fetch_frame(group: str) -> bytes:
    wanted = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group, topics=None)
    request = OffsetFetchRequest(groups=[wanted], require_stable=False)
    return encode_request(RequestHeader(ApiKey.OFFSET_FETCH, FETCH_VERSION, 1, "bench"), request)


class Client:
    """A connection with one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection(HOST, port))

    async def ask(self, frame: bytes) -> bytes:
        self._writer.write(frame)
        (size,) = struct.unpack(">i", await self._reader.readexactly(4))
        return await self._reader.readexactly(size)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


# --- commits ----------------------------------------------------------------------------------------------------------


async def commit(port: int, groups: int, partitions: int, rounds: int) -> None:
    """Every group commits `rounds` times; the offsets of the last time are `rounds`."""
    client = await Client.connect(port)
    await client.ask(find_frame())  # makes __consumer_offsets
    await client.close()
    async with asyncio.TaskGroup() as tasks:
        for first in range(CONNECTIONS):
            names = [group_name(number) for number in range(first, groups, CONNECTIONS)]
            if names:
                tasks.create_task(_commit_on_one(port, names, partitions, rounds))


async def _commit_on_one(port: int, groups: list[str], partitions: int, rounds: int) -> None:
    client = await Client.connect(port)
    frames = [commit_frame(group, partitions) for group in groups]
    mark = struct.pack(">q", MARK)
    for frame in frames:
        await _first_commit(client, frame.replace(mark, struct.pack(">q", 1)))
    good = await client.ask(frames[0].replace(mark, struct.pack(">q", 1)))
    for number in range(2, rounds + 1):
        offset = struct.pack(">q", number)
        for frame in frames:
            if await client.ask(frame.replace(mark, offset)) != good:
                raise SystemExit("a commit was refused")
    await client.close()


async def _first_commit(client: Client, frame: bytes) -> None:
    """While the coordinator is being made ready it says so."""
    while True:
        codes = error_codes(decode_response(OffsetCommitResponse, COMMIT_VERSION, await client.ask(frame))[1])
        if codes == {ErrorCode.NONE}:
            return
        if not codes & LOADING:
            raise SystemExit(f"a commit was refused: {codes}")
        await asyncio.sleep(0.05)


# --- the restart ------------------------------------------------------------------------------------------------------


async def fetch_all(port: int, groups: int, partitions: int, offset: int) -> float:
    """Until every group has got its offsets; the moment when the first one had."""
    client = await Client.connect(port)
    first_at = 0.0
    for number in range(groups):
        frame = fetch_frame(group_name(number))
        while not _is_right(await client.ask(frame), partitions, offset):
            await asyncio.sleep(0.005)
        first_at = first_at or time.monotonic()
    await client.close()
    return first_at


def _is_right(answer: bytes, partitions: int, offset: int) -> bool:
    """False while the coordinator loads."""
    _, response = decode_response(OffsetFetchResponse, FETCH_VERSION, answer)
    (group,) = response.groups
    if group.error_code in LOADING:
        return False
    found = [each.committed_offset for topic in group.topics for each in topic.partitions]
    if group.error_code or found != [offset] * partitions:
        raise SystemExit(f"{group.group_id} lacks commits: {ErrorCode(group.error_code).name}, {found[:5]}")
    return True


def create_topic(bootstrap: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 3})
    for created in admin.create_topics([NewTopic(TOPIC, partitions, 1)]).values():
        created.result()


def sizes(home: Path) -> tuple[int, float]:
    """How many segments __consumer_offsets has, and their megabytes."""
    found = [path.stat().st_size for path in home.rglob("__consumer_offsets-*/*.log")]
    return len(found), sum(found) / 2**20


def cpu_s(pid: int) -> float:
    """What the broker has taken of a processor, without its children."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--commits", type=int, default=10_000_000)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--partitions", type=int, default=100)
    parser.add_argument("--clean", action="store_true", help="stop the broker instead of killing it")
    options = parser.parse_args()
    rounds = max(options.commits // (options.groups * options.partitions), 2)
    with MillraceServer() as server:
        create_topic(server.bootstrap, options.partitions)
        began_at = time.monotonic()
        asyncio.run(commit(server.port, options.groups, options.partitions, rounds))
        took_s = time.monotonic() - began_at
        commits = options.groups * options.partitions * rounds
        print(f"{commits} commits of {options.groups} groups in {took_s:.0f} s, "
              f"{cpu_s(server.pid):.0f} s of a processor")  # fmt: skip
        segments, size_mb = sizes(server.home)
        print(f"__consumer_offsets then: {segments} segments, {size_mb:.1f} MB")
        if options.clean:
            server.stop()
        else:
            server.kill()
        started_at = time.monotonic()
        server.start()
        up_s = server.start_s
        first_at = asyncio.run(fetch_all(server.port, options.groups, options.partitions, rounds))
        restart_s = time.monotonic() - started_at
        print(f"after the restart the port answers in {up_s:.2f} s, and the first group has its offsets in "
              f"{first_at - started_at:.2f} s, the last in {restart_s:.2f} s, bar {MAX_RESTART_S:.0f} s")  # fmt: skip
        return 0 if restart_s < MAX_RESTART_S else 1


if __name__ == "__main__":
    sys.exit(main())
