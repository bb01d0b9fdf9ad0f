"""acks=1 on one broker whose disk is slow: the producer does not wait for it, and what was acknowledged is found."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from clients.adapters.confluent import Confluent
from clients.adapters.kafka_python import KafkaPython
from millrace.errors import ErrorCode
from millrace.handlers import flush_waits
from millrace.storage.files import Files
from millrace.testing import Cluster
from millrace.wire.keys import ApiKey
from millrace.wire.messages.offsets import ListOffsetsRequest, ListOffsetsResponse
from millrace.wire.messages.records import DeleteRecordsRequest
from support.raw import RawClient, batch

SYNC_S = 0.2


class SlowFiles(Files):
    """A disk whose syncs take their time, or as long as a test holds them."""

    held: threading.Event | None = None

    def __init__(self, max_open: int = 512, *, sync: bool = True) -> None:
        super().__init__(max_open, sync=True)  # whatever a test's broker wants

    def sys_datasync(self, path: Path, fd: int) -> None:
        if path.suffix == ".log":
            if self.held is None:
                time.sleep(SYNC_S)
            else:
                assert self.held.wait(60)
        super().sys_datasync(path, fd)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr("millrace.testing.cluster.Files", SlowFiles)
    with Cluster(settings={"flush.mode": "group"}) as cluster:
        cluster.create_topic("t")
        yield cluster


@pytest.fixture
def disk(slow: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No sync ends before this is set."""
    held = threading.Event()
    monkeypatch.setattr(SlowFiles, "held", held)
    yield held
    held.set()


def connect(cluster: Cluster) -> RawClient:
    host, _, port = cluster.bootstrap_servers.partition(":")
    return RawClient((host, int(port)))


def latest_request(timestamp: int) -> ListOffsetsRequest:
    wanted = ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=timestamp)
    topic = ListOffsetsRequest.ListOffsetsTopic(name="t", partitions=[wanted])
    return ListOffsetsRequest(replica_id=-1, topics=[topic])


def found_offset(answer: ListOffsetsResponse) -> tuple[int, int]:
    ((found,),) = [each.partitions for each in answer.topics]
    return found.error_code, found.offset


def delete_before(client: RawClient, offset: int, timeout_ms: int = 10_000) -> tuple[int, int]:
    item = DeleteRecordsRequest.DeleteRecordsPartition(partition_index=0, offset=offset)
    topic = DeleteRecordsRequest.DeleteRecordsTopic(name="t", partitions=[item])
    answer = client.call(DeleteRecordsRequest(topics=[topic], timeout_ms=timeout_ms), 2)
    ((found,),) = [each.partitions for each in answer.topics]
    return found.error_code, found.low_watermark


@pytest.mark.parametrize(("timestamp", "expected"), [(-1, 1), (-3, 0), (0, 0)], ids=["latest", "max", "by time"])
def test_the_producer_does_not_wait_and_the_question_does(
    slow: Cluster, disk: threading.Event, timestamp: int, expected: int
) -> None:
    with connect(slow) as client:
        assert client.produce("t", batch(), acks=1).base_offset == 0, "acks=1 does not wait for the disk"
        assert client.fetch("t", 0).records in (None, b""), "nobody sees what a power cut could take back"
        assert found_offset(client.call(latest_request(-2), 7)) == (0, 0), "where the log starts does not depend on it"
        client.request(latest_request(timestamp), 7)
        disk.set()
        assert found_offset(client.response(ApiKey.LIST_OFFSETS, 7)) == (0, expected)


@pytest.mark.parametrize("offset", [1, -1])
def test_what_was_acknowledged_can_be_deleted(slow: Cluster, disk: threading.Event, offset: int) -> None:
    with connect(slow) as client:
        assert client.produce("t", batch(), acks=1).base_offset == 0
        threading.Timer(SYNC_S, disk.set).start()
        assert delete_before(client, offset) == (0, 1)


def test_a_disk_that_takes_too_long_is_not_waited_for(
    slow: Cluster, disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flush_waits, "FLUSH_WAIT_S", 0.1)
    with connect(slow) as client:
        client.produce("t", batch(), acks=1)
        unknown = (ErrorCode.OFFSET_NOT_AVAILABLE, -1)
        assert found_offset(client.call(latest_request(-1), 7)) == unknown, "a client asks again"
        assert delete_before(client, 1)[0] == ErrorCode.OFFSET_OUT_OF_RANGE
        disk.set()


def test_librdkafka_finds_what_was_acknowledged(slow: Cluster) -> None:
    producer = Producer({"bootstrap.servers": slow.bootstrap_servers, "acks": 1, "linger.ms": 0, "log_level": 2})
    reader, admin = Confluent().reader(slow.bootstrap_servers), Confluent().admin(slow.bootstrap_servers)
    offsets: list[int] = []
    for number in range(3):
        producer.produce("t", b"v", on_delivery=lambda _, message: offsets.append(message.offset()))
        assert producer.flush(20) == 0
        assert offsets[-1] == number
        assert reader.bounds(("t", 0))[1] == number + 1
    producer.produce("t", b"v")
    assert producer.flush(20) == 0
    assert admin.delete_records(("t", 0), 4) == 4
    reader.close()
    admin.close()


def test_kafka_python_finds_what_was_acknowledged(slow: Cluster) -> None:
    producer = KafkaProducer(bootstrap_servers=slow.bootstrap_servers, acks=1)
    consumer = KafkaConsumer(bootstrap_servers=slow.bootstrap_servers)
    admin = KafkaPython().admin(slow.bootstrap_servers)
    place = TopicPartition("t", 0)
    consumer.assign([place])
    for number in range(3):
        assert producer.send("t", b"v", partition=0).get(20).offset == number
        consumer.seek_to_end(place)
        assert consumer.position(place) == number + 1
    assert producer.send("t", b"v", partition=0).get(20).offset == 3
    assert admin.delete_records(("t", 0), 4) == 4
    producer.close()
    consumer.close()
    admin.close()
