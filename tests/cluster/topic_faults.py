"""What is done to a topic, killed half-way: its compaction, its reassignment, its end and its beginning anew."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from cluster.disk_faults import FULL_DISK, SHORT_DISK, rolling_round, two_disks
from cluster.faults import Row
from cluster.rounds import Stage, Traffic, create_topic, run_round
from cluster.workload import CLIENT, CONSUMER, PRODUCER
from millrace.errors import ErrorCode
from millrace.wire.messages.partitions import AlterPartitionReassignmentsRequest, AlterPartitionReassignmentsResponse
from support.cluster_processes import wait_for
from support.servers import ServerFailed

_WITHIN_S: Final = 60.0
_VERSION: Final = 1

# --- compaction -------------------------------------------------------------------------------------------------------


def cleaned_offsets(stage: Stage, broker_id: int) -> dict[str, int]:
    """Up to where a broker has compacted the partitions of the topic, as its checkpoints say."""
    found = {}
    for disk in stage.cluster.brokers[broker_id].disks:
        checkpoint = disk / "cleaner-offset-checkpoint"
        for line in checkpoint.read_text().splitlines()[2:] if checkpoint.exists() else []:
            topic, partition, offset = line.split()
            if topic == stage.topic:
                found[partition] = int(offset)
    return found


def half_compacted(stage: Stage, broker_id: int) -> list[Path]:
    """Files of a compaction under way."""
    return [path for disk in stage.cluster.brokers[broker_id].disks for path in disk.glob(f"{stage.topic}-*/*.cleaned")]


def killed_in_compaction(stage: Stage) -> None:
    """Brokers are killed while they compact; what they have compacted since is what the round is judged by."""
    for _ in range(stage.scale.bounces * 2):
        broker_id = stage.leader(stage.rng.randrange(stage.clients.partitions))
        before = cleaned_offsets(stage, broker_id)
        wait_compacting(stage, broker_id)
        stage.cluster.kill(broker_id)
        left = half_compacted(stage, broker_id)
        stage.mark(
            f"kill -9 of {broker_id} in a compaction, clean up to {before}; left: {[path.name for path in left]}"
        )
        stage.goes_on()
        stage.cluster.start_brokers([broker_id])
        stage.cluster.wait_whole(stage.topic, stage.scale.heals_within_s)
    for broker_id in stage.cluster.brokers:
        stage.mark(f"{broker_id} compacted up to {wait_compacted(stage, broker_id)}")


def wait_compacting(stage: Stage, broker_id: int) -> None:
    wait_for(lambda: half_compacted(stage, broker_id) or None, _WITHIN_S, f"{broker_id} compacts nothing", pause_s=0)


def wait_compacted(stage: Stage, broker_id: int) -> dict[str, int]:
    return wait_for(lambda: cleaned_offsets(stage, broker_id) or None, _WITHIN_S, f"{broker_id} compacted nothing")


COMPACTED: Final = Traffic(
    (
        ("cleanup.policy", "compact"),
        ("internal.segment.bytes", "20000"),
        ("min.cleanable.dirty.ratio", "0.01"),
        ("file.delete.delay.ms", "500"),
    ),
    ("lz4", "zstd"),
    batch_bytes=16384,
    keyed=True,
    fillers=True,
    compacted=True,
)

# --- reassignment -----------------------------------------------------------------------------------------------------


def reassign(stage: Stage, replicas: list[int]) -> None:
    """Ask for other replicas of every partition, until a broker has taken that."""
    cls = AlterPartitionReassignmentsRequest
    partitions = [
        cls.ReassignablePartition(partition_index=each, replicas=replicas) for each in range(stage.clients.partitions)
    ]
    request = cls(topics=[cls.ReassignableTopic(name=stage.topic, partitions=partitions)])

    def taken() -> bool | None:
        for broker_id in stage.cluster.brokers:
            try:
                answer: AlterPartitionReassignmentsResponse = stage.cluster.ask(broker_id, request, _VERSION, 10)
            except OSError:
                continue
            codes = {each.error_code for topic in answer.responses for each in topic.partitions} | {answer.error_code}
            if codes == {ErrorCode.NONE}:
                return True
        return None

    wait_for(taken, _WITHIN_S, f"nobody takes the reassignment to {replicas}", pause_s=0.1)


def assigned(stage: Stage, index: int) -> tuple[int, ...]:
    views = stage.cluster.views(stage.topic)
    newest = max(
        (view.partitions[index] for view in views if index in view.partitions), key=lambda each: each.leader_epoch
    )
    return newest.replicas


def killed_in_reassignment(stage: Stage) -> None:
    """Replicas move from two brokers to another two; who gets them, or who leads, is killed on the way."""
    ids = list(stage.cluster.brokers)
    reassign(stage, ids[:2])
    wait_assigned(stage, ids[:2])
    for bounce in range(stage.scale.bounces * 2):
        going, staying, coming = (ids[(bounce + place) % 3] for place in range(3))
        reassign(stage, [staying, coming])
        moving = [index for index in range(stage.clients.partitions) if len(assigned(stage, index)) > 2]
        victim = coming if bounce % 2 == 0 else staying
        stage.mark(f"from {going} to {coming}: kill -9 of {victim}, partitions {moving} are under way")
        stage.cluster.kill(victim)
        time.sleep(0.5)
        stage.cluster.start_brokers([victim])
        wait_assigned(stage, [staying, coming])
        stage.goes_on()
    reassign(stage, ids)
    wait_assigned(stage, ids)
    if not any("partitions [0" in mark or "partitions [1" in mark for mark in stage.marks):
        raise ServerFailed("no broker was killed while a partition moved")


def wait_assigned(stage: Stage, replicas: list[int]) -> None:
    def moved() -> bool | None:
        return all(set(assigned(stage, index)) == {*replicas} for index in range(stage.clients.partitions)) or None

    wait_for(moved, _WITHIN_S, f"the replicas are not {replicas}", pause_s=0.1)
    stage.cluster.wait_whole(stage.topic, _WITHIN_S)


# --- deleted and created again ----------------------------------------------------------------------------------------


def deleted_and_created_again(stage: Stage) -> None:
    """A topic goes and comes again under its name while brokers are killed: nothing of the old one is in the new one.

    Whoever is down when it goes comes back with a log of that name, of another topic.
    """
    cluster, name = stage.cluster, f"{stage.topic}-again"
    for life in range(stage.scale.bounces + 1):
        create_topic(cluster, name, 2, settings=dict(stage.traffic.settings))
        sent = [b"life %d record %d" % (life, number) for number in range(200 + 100 * (life % 2))]
        victim = stage.rng.choice(list(cluster.brokers))
        write(stage, name, sent, victim)
        cluster.start_brokers([victim])
        cluster.wait_whole(name, stage.scale.heals_within_s)
        found = read(cluster.client_settings, name, len(sent))
        stage.mark(f"life {life} of {name}, kill -9 of {victim}: {len(found)} of {len(sent)} records")
        if sorted(found) != sorted(sent):
            wrong = sorted({*found} ^ {*sent})[:3]
            raise ServerFailed(f"life {life} of {name} has {len(found)} of {len(sent)} records, such as {wrong}")
        victim = stage.rng.choice(list(cluster.brokers))
        stage.mark(f"{name} is deleted, and {victim} killed before it hears of it")
        cluster.kill(victim)
        # Asked for by a client that has not heard of an earlier controller: librdkafka would wait for that one.
        stage.controller()
        admin = AdminClient({**cluster.admin_settings, **CLIENT})
        admin.delete_topics([name], operation_timeout=20)[name].result(30)
        if cluster.brokers[victim].log_directory(name, 0) is None:
            raise ServerFailed(f"broker {victim} had no log of {name}")
        cluster.start_brokers([victim])
    stage.goes_on()


def write(stage: Stage, topic: str, values: list[bytes], victim: int) -> None:
    """Every value acknowledged by all in-sync replicas, with a broker killed among them."""
    failed: list[KafkaError] = []

    def note(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            failed.append(error)

    producer = Producer({**stage.cluster.client_settings, **PRODUCER, "compression.type": "zstd"})
    for number, value in enumerate(values):
        if number == len(values) // 2:
            stage.cluster.kill(victim)
        producer.produce(topic, value, partition=number % 2, on_delivery=note)
        producer.poll(0.001)
    if producer.flush(_WITHIN_S) or failed:
        raise ServerFailed(f"{len(failed)} records of {topic} failed, or were not decided: {failed[:3]}")


def read(client: Mapping[str, str], topic: str, count: int) -> list[bytes]:
    """All that can be read of a topic: at least `count` records, and what follows within a moment."""
    consumer = Consumer({**client, **CONSUMER})
    try:
        consumer.assign([TopicPartition(topic, index, 0) for index in range(2)])
        found: list[bytes] = []
        deadline = time.monotonic() + _WITHIN_S
        while time.monotonic() < deadline:
            messages = consumer.consume(500, 0.5)
            found += [message.value() or b"" for message in messages if message.error() is None]
            if not messages and len(found) >= count:
                break
        return found
    finally:
        consumer.close()


# --- the table --------------------------------------------------------------------------------------------------------

TOPIC_ROWS: Final = (
    Row(
        "compaction and reassignment killed half-way",
        (
            two_disks("killed in a compaction", killed_in_compaction),
            two_disks("killed in a reassignment", killed_in_reassignment),
        ),
        2,
        30_000,
        SHORT_DISK,
        FULL_DISK,
        partial(run_round, traffic=COMPACTED),
    ),
    Row(
        "a topic deleted and created again while brokers are killed",
        (two_disks("deleted and created again", deleted_and_created_again, short=False),),
        2,
        30_000,
        SHORT_DISK,
        FULL_DISK,
        rolling_round,
    ),
)
