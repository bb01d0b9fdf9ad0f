"""A topic read as a queue, by consumers that do nothing else: `python benches/micro/queue_bench.py [--consumers 5]`.

The broker is a process of its own. The consumers are connections of this one that fetch, and accept with the next
fetch, as Kafka's share consumer does; they look at offsets only. Prints records per second and the broker's CPU per
million records, which is what the hot path costs; with --singly every record is accepted by a type of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from millrace.client.connection import Connection
from millrace.queues.records import ShareKey
from millrace.records.decode import Record
from millrace.records.encode import encode_batch
from millrace.wire.messages.cluster import MetadataRequest
from millrace.wire.messages.groups import FindCoordinatorRequest
from millrace.wire.messages.produce import ProduceRequest
from millrace.wire.messages.share_groups import ShareFetchRequest
from millrace.wire.messages.share_state import InitializeShareGroupStateRequest

TOPIC = "t"
GROUP = "g"
FILL_BYTES = 1 << 20

SERVE = """
import json, resource, sys
from millrace.testing import Cluster
partitions, mode = int(sys.argv[1]), sys.argv[2]
with Cluster(settings={"share.coordinator.state.topic.num.partitions": "3", "flush.mode": mode}) as cluster:
    cluster.create_topic("t", partitions)
    print(cluster.bootstrap_servers, flush=True)
    for _ in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps(used.ru_utime + used.ru_stime), flush=True)
"""


@dataclass
class Options:
    records: int
    consumers: int
    partitions: int
    per_batch: int
    size: int
    max_records: int
    flush_mode: str
    singly: bool


class Queue:
    """The topic, and how much of it is still to be accepted."""

    def __init__(self, options: Options, host: str, port: int, topic_id: UUID) -> None:
        self.options = options
        self.host, self.port, self.topic_id = host, port, topic_id
        self.accepted = self.fetches = self.empty = 0

    @property
    def is_over(self) -> bool:
        return self.accepted >= self.options.records

    async def consume(self, name: str) -> None:
        async with await Connection.open(self.host, self.port) as connection:
            held: dict[int, list[tuple[int, int]]] = {}
            epoch = 0
            while not self.is_over:
                response = await connection.request(self._request(name, epoch, held), 2)
                assert response.error_code == 0, response.error_message
                self.accepted += sum(last - first + 1 for ranges in held.values() for first, last in ranges)
                held = _held(response)
                self.fetches += 1
                self.empty += not held
                epoch += 1

    def _request(self, name: str, epoch: int, held: dict[int, list[tuple[int, int]]]) -> ShareFetchRequest:
        named = range(self.options.partitions) if epoch == 0 else held
        items = [
            ShareFetchRequest.FetchPartition(
                partition_index=index,
                acknowledgement_batches=[
                    ShareFetchRequest.AcknowledgementBatch(
                        first_offset=first,
                        last_offset=last,
                        acknowledge_types=[1] * (last - first + 1) if self.options.singly else [1],
                    )
                    for first, last in held.get(index, ())
                ],
            )
            for index in named
        ]
        return ShareFetchRequest(
            group_id=GROUP,
            member_id=name,
            share_session_epoch=epoch,
            max_wait_ms=500,
            min_bytes=1,
            max_bytes=50 << 20,
            max_records=self.options.max_records,
            batch_size=self.options.max_records,
            topics=[ShareFetchRequest.FetchTopic(topic_id=self.topic_id, partitions=items)] if items else [],
        )


def _held(response: Any) -> dict[int, list[tuple[int, int]]]:
    held: dict[int, list[tuple[int, int]]] = {}
    for topic in response.responses:
        for item in topic.partitions:
            assert not item.error_code, item.error_message
            assert not item.acknowledge_error_code, item.acknowledge_error_message
            if item.acquired_records:
                held[item.partition_index] = [(each.first_offset, each.last_offset) for each in item.acquired_records]
    return held


async def _fill(connection: Connection, options: Options, topic_id: UUID) -> None:
    now_ms = int(time.time() * 1000)
    rows = [Record(offset, now_ms, None, bytes(options.size)) for offset in range(options.per_batch)]
    batch = encode_batch(rows)
    at_once = max(1, FILL_BYTES // len(batch))
    left = [options.records // options.partitions // options.per_batch] * options.partitions
    for index in range(options.partitions):
        while left[index] > 0:
            count = min(left[index], at_once)
            left[index] -= count
            for _ in range(count):
                item = ProduceRequest.PartitionProduceData(index=index, records=batch)
                data = ProduceRequest.TopicProduceData(topic_id=topic_id, partition_data=[item])
                answer = await connection.request(ProduceRequest(acks=1, timeout_ms=9000, topic_data=[data]), 13)
                assert not answer.responses[0].partition_responses[0].error_code
    options.records = (
        options.records // options.partitions // options.per_batch * options.per_batch * options.partitions
    )


async def _begin(connection: Connection, options: Options, topic_id: UUID) -> None:
    for index in range(options.partitions):
        key = str(ShareKey(GROUP, topic_id, index))
        for _ in range(100):
            found = (
                await connection.request(FindCoordinatorRequest(coordinator_keys=[key], key_type=2), 6)
            ).coordinators
            item = InitializeShareGroupStateRequest.PartitionData(partition=index, state_epoch=0, start_offset=0)
            topic = InitializeShareGroupStateRequest.InitializeStateData(topic_id=topic_id, partitions=[item])
            answer = await connection.request(InitializeShareGroupStateRequest(group_id=GROUP, topics=[topic]), 0)
            if not found[0].error_code and not answer.results[0].partitions[0].error_code:
                break
            await asyncio.sleep(0.05)
        else:
            raise RuntimeError("the share coordinator does not answer")


async def run(options: Options, address: str, cpu_s: Any) -> None:
    host, _, port = address.rpartition(":")
    async with await Connection.open(host, int(port)) as connection:
        asked = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=TOPIC)])
        topic_id = (await connection.request(asked, 12)).topics[0].topic_id
        await _fill(connection, options, topic_id)
        await _begin(connection, options, topic_id)
    queue = Queue(options, host, int(port), topic_id)
    before_s, began_s = cpu_s(), time.perf_counter()
    await asyncio.gather(*(queue.consume(f"m{number}") for number in range(options.consumers)))
    took_s, used_s = time.perf_counter() - began_s, cpu_s() - before_s
    print(
        f"{queue.accepted / took_s:10,.0f} records/s, broker {used_s / queue.accepted * 1e6:5.2f} s CPU per million, "
        f"{queue.fetches:,} fetches ({queue.empty} empty), {queue.accepted / queue.fetches:.0f} records each"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=500_000)
    parser.add_argument("--consumers", type=int, default=5)
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--per-batch", type=int, default=140)
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--max-records", type=int, default=500)
    parser.add_argument("--flush-mode", default="group")
    parser.add_argument("--singly", action="store_true")
    options = Options(**vars(parser.parse_args()))
    command = [sys.executable, "-c", SERVE, str(options.partitions), options.flush_mode]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        stdin, stdout = server.stdin, server.stdout

        def cpu_s() -> float:
            stdin.write("cpu\n")
            stdin.flush()
            return float(json.loads(stdout.readline()))

        try:
            asyncio.run(run(options, stdout.readline().strip(), cpu_s))
        finally:
            stdin.close()


if __name__ == "__main__":
    main()
