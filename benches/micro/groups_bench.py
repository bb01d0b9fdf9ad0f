"""One big KIP-848 group: `PYTHONPATH=tests python benches/micro/groups_bench.py [--members 1000] [--partitions 2000]`.

A broker in a process of its own; members are coroutines here that do what a client does: heartbeat as often as they are
told to, give up what they are told to, and say so at once. Prints how long after the last join every member had its
share, the CPU of the broker while they joined, and while they only send heartbeats afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import time
import uuid
from dataclasses import dataclass, field

import psutil
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.wire import frame
from millrace.wire.keys import ApiKey
from millrace.wire.messages.consumer_groups import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from millrace.wire.messages.groups import FindCoordinatorRequest, FindCoordinatorResponse
from millrace.wire.schema import Request, Response
from support.servers import MillraceServer

TOPIC = "big"
GROUP = "big"
LIMIT_S = 60.0

Owned = frozenset[tuple[uuid.UUID, int]]


@dataclass
class Peer:
    """A connection that asks one thing after the other; members share it in turns."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def ask(self, key: ApiKey, version: int, request: Request, answer: type[Response]) -> Response:
        async with self.lock:
            self.writer.write(frame.encode_request(frame.RequestHeader(int(key), version, 1, "bench"), request))
            (length,) = struct.unpack(">i", await self.reader.readexactly(4))
            return frame.decode_response(answer, version, await self.reader.readexactly(length))[1]


@dataclass
class Member:
    """A consumer without the consuming."""

    peer: Peer
    member_id: str
    epoch: int = 0
    owned: Owned = frozenset()
    changed_at: float = 0.0
    beats: int = 0

    async def run(self) -> None:
        interval_s = await self.beat(self.owned)
        while True:
            await asyncio.sleep(interval_s)
            interval_s = await self.beat(None)

    async def beat(self, owned: Owned | None) -> float:
        """One heartbeat, and another one at once where there was something to give up or to take."""
        request = ConsumerGroupHeartbeatRequest(group_id=GROUP, member_id=self.member_id, member_epoch=self.epoch)
        if self.epoch == 0:
            request.rebalance_timeout_ms = 60_000
            request.subscribed_topic_names = [TOPIC]
        if owned is not None:
            request.topic_partitions = [
                ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id=topic_id, partitions=[index])
                for topic_id, index in sorted(owned)
            ]
        answer = await self.peer.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request, ConsumerGroupHeartbeatResponse)
        assert isinstance(answer, ConsumerGroupHeartbeatResponse)
        if answer.error_code:
            raise RuntimeError(f"{self.member_id}: error {answer.error_code}, {answer.error_message}")
        self.beats += 1
        self.epoch = answer.member_epoch
        if answer.assignment is not None:
            now = frozenset(
                (each.topic_id, index) for each in answer.assignment.topic_partitions for index in each.partitions
            )
            if now != self.owned:
                self.owned = now
                self.changed_at = time.monotonic()
                return await self.beat(now)
        return answer.heartbeat_interval_ms / 1000


async def measure(bootstrap: str, broker: psutil.Process, count: int, partitions: int, seconds: float) -> None:
    host, _, port = bootstrap.partition(":")
    peers = [Peer(*await asyncio.open_connection(host, int(port))) for _ in range(min(count, 100))]
    await _wait_for_coordinator(peers[0])
    members = [Member(peers[number % len(peers)], str(uuid.uuid4())) for number in range(count)]
    cpu, began = _cpu_s(broker), time.monotonic()
    tasks = []
    for member in members:
        tasks.append(asyncio.create_task(member.run()))
        await asyncio.sleep(0.002)
    while not all(member.epoch for member in members):
        await asyncio.sleep(0.01)
    joined = time.monotonic()
    print(f"{count} members joined in {joined - began:.1f} s")
    share = {partitions // count, -(-partitions // count)}
    while not _is_settled(members, partitions, share):
        for task in tasks:
            if task.done():
                task.result()
        if time.monotonic() - joined > LIMIT_S:
            raise SystemExit(f"not settled after {LIMIT_S:.0f} s: {sum(len(each.owned) for each in members)} assigned")
        await asyncio.sleep(0.05)
    settled = max(member.changed_at for member in members)
    print(f"every member had its share {max(settled - joined, 0.0):.1f} s after the last join")
    used_s, lasted_s = _cpu_s(broker) - cpu, time.monotonic() - began
    print(f"the broker used {used_s:.1f} s of CPU meanwhile, {used_s / lasted_s:.0%} of one core")
    await asyncio.sleep(6.0)
    cpu, began, beats = _cpu_s(broker), time.monotonic(), sum(member.beats for member in members)
    await asyncio.sleep(seconds)
    used_s, lasted_s = _cpu_s(broker) - cpu, time.monotonic() - began
    beats = sum(member.beats for member in members) - beats
    print(f"at rest: {beats / lasted_s:.0f} heartbeats/s, {used_s / lasted_s:.1%} of one core,"
          f" {used_s / beats * 1e6:.0f} us each")  # fmt: skip
    answer = await peers[0].ask(
        ApiKey.CONSUMER_GROUP_DESCRIBE,
        1,
        ConsumerGroupDescribeRequest(group_ids=[GROUP]),
        ConsumerGroupDescribeResponse,
    )
    assert isinstance(answer, ConsumerGroupDescribeResponse)
    print(f"the group is {answer.groups[0].group_state}, epoch {answer.groups[0].group_epoch}")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for peer in peers:
        peer.writer.close()


async def _wait_for_coordinator(peer: Peer) -> None:
    while True:
        request = FindCoordinatorRequest(key_type=0, coordinator_keys=[GROUP])
        answer = await peer.ask(ApiKey.FIND_COORDINATOR, 4, request, FindCoordinatorResponse)
        assert isinstance(answer, FindCoordinatorResponse)
        if not answer.coordinators[0].error_code:
            return
        await asyncio.sleep(0.1)


def _is_settled(members: list[Member], partitions: int, share: set[int]) -> bool:
    owned = [each for member in members for each in member.owned]
    return len(owned) == len(set(owned)) == partitions and {len(member.owned) for member in members} <= share


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--partitions", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    with MillraceServer() as server:
        admin = AdminClient({"bootstrap.servers": server.bootstrap, "log_level": 3})
        admin.create_topics([NewTopic(TOPIC, arguments.partitions, 1)])[TOPIC].result(60)
        del admin  # it would complain when the broker stops
        broker = psutil.Process(server.pid)
        asyncio.run(measure(server.bootstrap, broker, arguments.members, arguments.partitions, arguments.seconds))


if __name__ == "__main__":
    main()
