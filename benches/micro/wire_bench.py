"""What a message costs: microseconds to decode and to encode Metadata, Fetch and Produce through the declared codec.

    python benches/micro/wire_bench.py [--seconds 0.5]

The hot path of Produce and Fetch has readers and writers of its own (`wire.hot`), which are not measured here. Each
figure is the best of five runs.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable
from uuid import UUID

from millrace.wire.codec import decode, encode
from millrace.wire.frame import RequestHeader, encode_request, read_request_header
from millrace.wire.messages.cluster import MetadataRequest, MetadataResponse
from millrace.wire.messages.fetch import FetchRequest, FetchResponse
from millrace.wire.messages.produce import ProduceRequest, ProduceResponse
from millrace.wire.schema import Message

ROUNDS = 5
TOPIC_ID = UUID("6b1a3a0e-5f5b-4b58-9f0c-0c5f0e4e1a2b")
RECORDS = bytes(16 * 1024)


def metadata(topics: int, partitions: int) -> MetadataResponse:
    return MetadataResponse(
        brokers=[MetadataResponse.MetadataResponseBroker(node_id=n, host=f"broker-{n}", port=9092) for n in range(3)],
        cluster_id="cluster",
        controller_id=1,
        topics=[
            MetadataResponse.MetadataResponseTopic(
                name=f"topic-{topic}",
                topic_id=TOPIC_ID,
                partitions=[
                    MetadataResponse.MetadataResponsePartition(
                        partition_index=index, leader_id=1, leader_epoch=5, replica_nodes=[1, 2, 3], isr_nodes=[1, 2, 3]
                    )
                    for index in range(partitions)
                ],
            )
            for topic in range(topics)
        ],
    )


def fetch_request(partitions: int) -> FetchRequest:
    return FetchRequest(
        max_wait_ms=500,
        min_bytes=1,
        topics=[
            FetchRequest.FetchTopic(
                topic="topic",
                topic_id=TOPIC_ID,
                partitions=[
                    FetchRequest.FetchPartition(partition=index, fetch_offset=1000, partition_max_bytes=1 << 20)
                    for index in range(partitions)
                ],
            )
        ],
    )


def fetch_response(partitions: int) -> FetchResponse:
    return FetchResponse(
        responses=[
            FetchResponse.FetchableTopicResponse(
                topic="topic",
                topic_id=TOPIC_ID,
                partitions=[
                    FetchResponse.PartitionData(partition_index=index, high_watermark=1000, records=RECORDS)
                    for index in range(partitions)
                ],
            )
        ]
    )


def produce_request(partitions: int) -> ProduceRequest:
    return ProduceRequest(
        acks=-1,
        timeout_ms=30_000,
        topic_data=[
            ProduceRequest.TopicProduceData(
                name="topic",
                partition_data=[
                    ProduceRequest.PartitionProduceData(index=index, records=RECORDS) for index in range(partitions)
                ],
            )
        ],
    )


def produce_response(partitions: int) -> ProduceResponse:
    return ProduceResponse(
        responses=[
            ProduceResponse.TopicProduceResponse(
                name="topic",
                partition_responses=[
                    ProduceResponse.PartitionProduceResponse(index=index, base_offset=42) for index in range(partitions)
                ],
            )
        ]
    )


CASES: list[tuple[str, Message, int]] = [
    ("Metadata request, 1 topic", MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="topic")]), 12),
    ("Metadata response, 1 topic of 3", metadata(1, 3), 12),
    ("Metadata response, 100 topics of 10", metadata(100, 10), 12),
    ("Fetch request, 1 partition", fetch_request(1), 12),
    ("Fetch request, 1 partition", fetch_request(1), 17),
    ("Fetch request, 100 partitions", fetch_request(100), 17),
    ("Fetch response, 1 partition", fetch_response(1), 12),
    ("Fetch response, 1 partition", fetch_response(1), 17),
    ("Produce request, 1 partition", produce_request(1), 8),
    ("Produce request, 1 partition", produce_request(1), 12),
    ("Produce request, 10 partitions", produce_request(10), 12),
    ("Produce response, 1 partition", produce_response(1), 12),
]


def best_us(call: Callable[[], object], seconds: float) -> float:
    timer = timeit.Timer(call)
    once = timer.timeit(1) or 1e-7
    number = max(1, int(seconds / ROUNDS / once))
    return min(timer.repeat(ROUNDS, number)) / number * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="time per figure")
    seconds = parser.parse_args().seconds
    print(f"{'message':38} {'version':>7} {'bytes':>8} {'decode us':>10} {'encode us':>10}")
    for name, message, version in CASES:
        raw = encode(message, version)
        view = memoryview(raw)
        cls = type(message)
        read = best_us(lambda cls=cls, version=version, view=view: decode(cls, version, view), seconds)  # type: ignore[misc]
        write = best_us(lambda message=message, version=version: encode(message, version), seconds)  # type: ignore[misc]
        print(f"{name:38} {version:>7} {len(raw):>8} {read:>10.2f} {write:>10.2f}")
    request = memoryview(encode_request(RequestHeader(1, 17, 5, "client"), fetch_request(1)))[4:]
    print(f"{'request header':38} {2:>7} {'':>8} {best_us(lambda: read_request_header(request), seconds):>10.2f}")


if __name__ == "__main__":
    main()
