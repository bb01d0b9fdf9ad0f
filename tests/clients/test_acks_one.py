"""acks=1 on one broker whose disk is slow: the producer does not wait for it, and what was acknowledged is found."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from clients.adapters.confluent import Confluent
from clients.adapters.kafka_python import KafkaPython
from millrace.errors import ErrorCode
from millrace.handlers import settling
from millrace.storage.files import Files
from millrace.testing import Cluster
from millrace.wire.messages.offsets import ListOffsetsRequest
from millrace.wire.messages.records import DeleteRecordsRequest
from support.raw import RawClient, batch

SYNC_S = 0.3


class SlowFiles(Files):
    """A disk that takes its time for a sync."""

    delay_s = SYNC_S

    def __init__(self, max_open: int = 512, *, sync: bool = True) -> None:
        super().__init__(max_open, sync=True)

    def sys_datasync(self, path, fd) -> None:  # type: ignore[no-untyped-def]
        if path.suffix == ".log":
            time.sleep(self.delay_s)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr("millrace.testing.cluster.Files", SlowFiles)
    with Cluster(settings={"flush.mode": "group"}) as cluster:
        cluster.create_topic("t")
        yield cluster


def connect(cluster: Cluster) -> RawClient:
    host, _, port = cluster.bootstrap_servers.partition(":")
    return RawClient((host, int(port)))


def list_offset(client: RawClient, timestamp: int) -> tuple[int, int]:
    wanted = ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=timestamp)
    topic = ListOffsetsRequest.ListOffsetsTopic(name="t", partitions=[wanted])
    ((found,),) = [each.partitions for each in client.call(ListOffsetsRequest(replica_id=-1, topics=[topic]), 7).topics]
    return found.error_code, found.offset


def delete_before(client: RawClient, offset: int, timeout_ms: int = 10_000) -> tuple[int, int]:
    item = DeleteRecordsRequest.DeleteRecordsPartition(partition_index=0, offset=offset)
    topic = DeleteRecordsRequest.DeleteRecordsTopic(name="t", partitions=[item])
    answer = client.call(DeleteRecordsRequest(topics=[topic], timeout_ms=timeout_ms), 2)
    ((found,),) = [each.partitions for each in answer.topics]
    return found.error_code, found.low_watermark


def test_the_producer_does_not_wait_and_the_question_does(slow: Cluster) -> None:
    with connect(slow) as client:
        client.topic("t")
        for number, (timestamp, expected) in enumerate(((-1, 1), (-3, 1), (0, 0), (-1, 4))):
            began = time.monotonic()
            assert client.produce("t", batch(), acks=1).base_offset == number
            assert time.monotonic() - began < SYNC_S, "acks=1 does not wait for the disk"
            assert client.fetch("t", number).records in (None, b""), "nobody sees what a power cut could take back"
            assert list_offset(client, timestamp) == (0, expected)
        client.produce("t", batch(), acks=1)
        assert delete_before(client, 5) == (0, 5)
        client.produce("t", batch(), acks=1)
        assert delete_before(client, -1) == (0, 6)


def test_the_start_of_the_log_is_known_without_the_disk(slow: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlowFiles, "delay_s", 2.0)
    with connect(slow) as client:
        client.produce("t", batch(), acks=1)
        began = time.monotonic()
        assert list_offset(client, -2) == (0, 0)
        assert time.monotonic() - began < 1.0


def test_a_disk_that_takes_too_long_is_not_waited_for(slow: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlowFiles, "delay_s", 2.0)
    monkeypatch.setattr(settling, "SETTLING_S", 0.1)
    with connect(slow) as client:
        client.produce("t", batch(), acks=1)
        assert list_offset(client, -1) == (ErrorCode.OFFSET_NOT_AVAILABLE, -1), "a client asks again"
        assert delete_before(client, 1)[0] == ErrorCode.OFFSET_OUT_OF_RANGE


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
