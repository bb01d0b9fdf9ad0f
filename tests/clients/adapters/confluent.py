"""confluent-kafka: librdkafka, the C client."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    RESOURCE_TOPIC,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
)

from clients.adapters import interface
from clients.adapters.interface import Headers, Login, Partition, Received, Sent

TIMEOUT_S = 20.0


class ConfluentPending:
    def __init__(self) -> None:
        self._done = threading.Event()
        self._sent: Sent | None = None
        self._error: KafkaException | None = None

    def on_delivery(self, error: Any, message: Any) -> None:
        if error is not None:
            self._error = KafkaException(error)
        else:
            self._sent = Sent(message.partition(), message.offset())
        self._done.set()

    def result(self, timeout_s: float) -> Sent:
        if not self._done.wait(timeout_s):
            raise TimeoutError("no delivery report")
        if self._error is not None:
            raise self._error
        assert self._sent is not None
        return self._sent


class ConfluentSender:
    def __init__(self, address: Mapping[str, Any], codec: str, idempotent: bool) -> None:
        self._producer = Producer(
            {
                **address,
                "compression.type": codec,
                "enable.idempotence": idempotent,
                "acks": "all",
                "linger.ms": 2,
                "retry.backoff.ms": interface.RETRY_BACKOFF_MS,
                "reconnect.backoff.max.ms": 300,
                "message.timeout.ms": interface.DELIVERY_TIMEOUT_MS,
                "log_level": 2,
            }
        )
        self._closing = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="confluent delivery reports")
        self._poller.start()

    def _poll(self) -> None:
        while not self._closing.is_set():
            self._producer.poll(0.05)

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        *,
        headers: Headers = (),
        timestamp_ms: int | None = None,
        partition: int | None = None,
    ) -> ConfluentPending:
        pending = ConfluentPending()
        optional: dict[str, Any] = {}
        if timestamp_ms is not None:
            optional["timestamp"] = timestamp_ms
        if partition is not None:
            optional["partition"] = partition
        self._producer.produce(topic, value, key, headers=list(headers), on_delivery=pending.on_delivery, **optional)
        return pending

    def flush(self) -> None:
        left = self._producer.flush(TIMEOUT_S)
        assert left == 0, f"{left} records were not delivered"

    def close(self) -> None:
        self._producer.flush(TIMEOUT_S)
        self._closing.set()
        self._poller.join()


class ConfluentTransactions:
    def __init__(self, address: Mapping[str, Any], transactional_id: str, timeout_ms: int) -> None:
        self._producer = Producer(
            {
                **address,
                "transactional.id": transactional_id,
                "transaction.timeout.ms": timeout_ms,
                "linger.ms": 2,
                "retry.backoff.ms": interface.RETRY_BACKOFF_MS,
                "reconnect.backoff.max.ms": 300,
                "log_level": 2,
            }
        )
        self._producer.init_transactions(interface.END_TIMEOUT_S)

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, topic: str, value: bytes, partition: int = 0) -> None:
        self._producer.produce(topic, value, partition=partition)

    def flush(self) -> None:
        left = self._producer.flush(interface.END_TIMEOUT_S)
        assert left == 0, f"{left} records were not delivered"

    def send_offsets(self, offsets: Mapping[Partition, int], membership: object) -> None:
        wanted = [TopicPartition(*one, offset) for one, offset in offsets.items()]
        self._producer.send_offsets_to_transaction(wanted, membership, interface.END_TIMEOUT_S)

    def commit(self) -> None:
        self._producer.commit_transaction(interface.END_TIMEOUT_S)

    def abort(self) -> None:
        self._producer.abort_transaction(interface.END_TIMEOUT_S)

    def abandon(self) -> None:
        """It goes with its last reference, and ends no transaction then."""

    def close(self) -> None:
        self.abandon()


class ConfluentReader:
    def __init__(self, address: Mapping[str, Any], group: str | None, committed_only: bool) -> None:
        self._consumer = Consumer(
            {
                **address,
                "group.id": group or "no-group",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "session.timeout.ms": interface.SESSION_TIMEOUT_MS,
                "heartbeat.interval.ms": interface.HEARTBEAT_MS,
                "fetch.wait.max.ms": 200,
                "isolation.level": "read_committed" if committed_only else "read_uncommitted",
                "retry.backoff.ms": interface.RETRY_BACKOFF_MS,
                "reconnect.backoff.max.ms": 300,
                "log_level": 2,
            }
        )

    def subscribe(self, topic: str) -> None:
        self._consumer.subscribe([topic])

    def assign(self, partitions: Sequence[Partition]) -> None:
        self._consumer.assign([TopicPartition(topic, index, 0) for topic, index in partitions])

    def seek(self, partition: Partition, offset: int) -> None:
        self._consumer.seek(TopicPartition(*partition, offset))

    def poll(self, timeout_s: float) -> list[Received]:
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        received = []
        for message in [first, *self._consumer.consume(500, 0)]:
            error = message.error()
            if error is not None:
                if not error.retriable():
                    raise KafkaException(error)
                continue
            received.append(
                Received(
                    message.topic(),
                    message.partition(),
                    message.offset(),
                    message.timestamp()[1],
                    message.key(),
                    message.value(),
                    tuple(message.headers() or ()),
                )
            )
        return received

    def assignment(self) -> set[Partition]:
        return {(one.topic, one.partition) for one in self._consumer.assignment()}

    def commit(self) -> None:
        self._consumer.commit(asynchronous=False)

    def committed(self, partition: Partition) -> int | None:
        (found,) = self._consumer.committed([TopicPartition(*partition)], timeout=TIMEOUT_S)
        return found.offset if found.offset >= 0 else None

    def offsets_for_time(self, partitions: Sequence[Partition], timestamp_ms: int) -> dict[Partition, int | None]:
        wanted = [TopicPartition(topic, index, timestamp_ms) for topic, index in partitions]
        found = self._consumer.offsets_for_times(wanted, timeout=TIMEOUT_S)
        return {(one.topic, one.partition): one.offset if one.offset >= 0 else None for one in found}

    def bounds(self, partition: Partition) -> tuple[int, int]:
        low, high = self._consumer.get_watermark_offsets(TopicPartition(*partition), timeout=TIMEOUT_S)
        return low, high

    def membership(self) -> object:
        return self._consumer.consumer_group_metadata()

    def close(self) -> None:
        self._consumer.close()


class ConfluentAdmin:
    def __init__(self, address: Mapping[str, Any]) -> None:
        self._admin = AdminClient({**address, "log_level": 2})

    def create_topic(self, topic: str, partitions: int, config: Mapping[str, str] | None = None) -> None:
        self._admin.create_topics([NewTopic(topic, partitions, 1, config=dict(config or {}))])[topic].result(TIMEOUT_S)

    def topics(self) -> dict[str, int]:
        found = self._admin.list_topics(timeout=TIMEOUT_S).topics
        return {name: len(one.partitions) for name, one in found.items()}

    def delete_topic(self, topic: str) -> None:
        self._admin.delete_topics([topic])[topic].result(TIMEOUT_S)

    def create_partitions(self, topic: str, total: int) -> None:
        self._admin.create_partitions([NewPartitions(topic, total)])[topic].result(TIMEOUT_S)

    def topic_config(self, topic: str) -> dict[str, str]:
        (future,) = self._admin.describe_configs([ConfigResource(RESOURCE_TOPIC, topic)]).values()
        return {name: entry.value for name, entry in future.result(TIMEOUT_S).items()}

    def set_topic_config(self, topic: str, name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(RESOURCE_TOPIC, topic, incremental_configs=[entry])
        (future,) = self._admin.incremental_alter_configs([resource]).values()
        future.result(TIMEOUT_S)

    def delete_records(self, partition: Partition, before_offset: int) -> int:
        (future,) = self._admin.delete_records([TopicPartition(*partition, before_offset)]).values()
        return int(future.result(TIMEOUT_S).low_watermark)

    def groups(self) -> set[str]:
        return {one.group_id for one in self._admin.list_consumer_groups().result(TIMEOUT_S).valid}

    def group_state(self, group: str) -> tuple[str, int]:
        found = self._admin.describe_consumer_groups([group])[group].result(TIMEOUT_S)
        return found.state.name.lower().replace("_", ""), len(found.members)

    def group_offsets(self, group: str) -> dict[Partition, int]:
        request = [ConsumerGroupTopicPartitions(group)]
        found = self._admin.list_consumer_group_offsets(request)[group].result(TIMEOUT_S)
        return {(one.topic, one.partition): one.offset for one in found.topic_partitions}

    def delete_group(self, group: str) -> None:
        self._admin.delete_consumer_groups([group])[group].result(TIMEOUT_S)

    def close(self) -> None:
        """Closed with the last reference."""


class Confluent:
    name = "confluent-kafka"
    deletes_groups = True
    fences_zombies = True

    def __init__(self, login: Login | None = None) -> None:
        self._login = login

    def _address(self, bootstrap: str) -> dict[str, Any]:
        address: dict[str, Any] = {"bootstrap.servers": bootstrap}
        if (login := self._login) is not None:
            address["security.protocol"] = login.protocol
            if login.mechanism:
                address["sasl.mechanism"] = login.mechanism
                address |= {"sasl.username": login.user, "sasl.password": login.password}
            if login.ca_file:
                address["ssl.ca.location"] = login.ca_file
            if login.token is not None:
                token = login.token
                address["oauth_cb"] = lambda _config: token()
            if login.certificate:
                address |= {"ssl.certificate.location": login.certificate, "ssl.key.location": login.certificate}
        return address

    def sender(self, bootstrap: str, *, codec: str = "none", idempotent: bool = True) -> ConfluentSender:
        return ConfluentSender(self._address(bootstrap), codec, idempotent)

    def transactions(
        self, bootstrap: str, transactional_id: str, *, timeout_ms: int = interface.TRANSACTION_TIMEOUT_MS
    ) -> ConfluentTransactions:
        return ConfluentTransactions(self._address(bootstrap), transactional_id, timeout_ms)

    def reader(self, bootstrap: str, *, group: str | None = None, committed_only: bool = False) -> ConfluentReader:
        return ConfluentReader(self._address(bootstrap), group, committed_only)

    def admin(self, bootstrap: str) -> ConfluentAdmin:
        return ConfluentAdmin(self._address(bootstrap))

    @contextmanager
    def running(self) -> Iterator[None]:
        yield
