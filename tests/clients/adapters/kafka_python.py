"""kafka-python: the pure Python client with threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from clients.adapters import interface
from clients.adapters.interface import Headers, Login, Partition, Received, Sent
from clients.deadlines import within

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it reads its schema files in a way that has been replaced
    from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
    from kafka.admin import ConfigResource, ConfigResourceType
    from kafka.net.sasl.oauth import AbstractTokenProvider
    from kafka.structs import OffsetAndMetadata

TIMEOUT_S = 20.0


class KafkaPythonPending:
    def __init__(self, future: Any) -> None:
        self._future = future

    def result(self, timeout_s: float) -> Sent:
        metadata = self._future.get(timeout=timeout_s)
        return Sent(metadata.partition, metadata.offset)


class KafkaPythonSender:
    def __init__(self, address: Mapping[str, Any], codec: str, idempotent: bool) -> None:
        self._producer = KafkaProducer(
            **address,
            compression_type=None if codec == "none" else codec,
            enable_idempotence=idempotent,
            acks="all",
            linger_ms=2,
            retry_backoff_ms=interface.RETRY_BACKOFF_MS,
            reconnect_backoff_max_ms=300,
            delivery_timeout_ms=interface.DELIVERY_TIMEOUT_MS,
        )

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        *,
        headers: Headers = (),
        timestamp_ms: int | None = None,
        partition: int | None = None,
    ) -> KafkaPythonPending:
        return KafkaPythonPending(
            self._producer.send(
                topic, value, key, headers=list(headers), partition=partition, timestamp_ms=timestamp_ms
            )
        )

    def flush(self) -> None:
        self._producer.flush(TIMEOUT_S)

    def close(self) -> None:
        self._producer.close(timeout=TIMEOUT_S)


class KafkaPythonTransactions:
    """Its calls wait for ever, so they are made on a thread that is waited for until the deadline only."""

    def __init__(self, address: Mapping[str, Any], transactional_id: str, timeout_ms: int) -> None:
        self._producer = KafkaProducer(
            **address,
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
            max_block_ms=round(interface.END_TIMEOUT_S * 1000),
            linger_ms=2,
            retry_backoff_ms=interface.RETRY_BACKOFF_MS,
            reconnect_backoff_max_ms=300,
            delivery_timeout_ms=interface.DELIVERY_TIMEOUT_MS,
        )
        try:
            self._producer.init_transactions()
        except BaseException:
            self.abandon()
            raise

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, topic: str, value: bytes, partition: int = 0) -> None:
        self._producer.send(topic, value, partition=partition)

    def flush(self) -> None:
        self._producer.flush(interface.END_TIMEOUT_S)

    def send_offsets(self, offsets: Mapping[Partition, int], membership: object) -> None:
        wanted = {TopicPartition(*one): OffsetAndMetadata(offset, "", -1) for one, offset in offsets.items()}
        within(interface.END_TIMEOUT_S, lambda: self._producer.send_offsets_to_transaction(wanted, membership))

    def commit(self) -> None:
        within(interface.END_TIMEOUT_S, self._producer.commit_transaction)

    def abort(self) -> None:
        within(interface.END_TIMEOUT_S, self._producer.abort_transaction)

    def abandon(self) -> None:
        self._producer.close(timeout=0)

    def close(self) -> None:
        self.abandon()


class KafkaPythonReader:
    def __init__(self, address: Mapping[str, Any], group: str | None, committed_only: bool) -> None:
        self._consumer = KafkaConsumer(
            **address,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            session_timeout_ms=interface.SESSION_TIMEOUT_MS,
            heartbeat_interval_ms=interface.HEARTBEAT_MS,
            fetch_max_wait_ms=200,
            isolation_level="read_committed" if committed_only else "read_uncommitted",
            retry_backoff_ms=interface.RETRY_BACKOFF_MS,
            reconnect_backoff_max_ms=300,
        )

    def subscribe(self, topic: str) -> None:
        """Subscribe, and know the topic's partitions before the first poll joins the group.

        Left alone it joins without them nearly always, is given nothing ("No partition metadata"), and joins again when
        it knows. If a poll ends in the middle of that second join 3.0.12 takes itself for a member that has nothing to
        do, drops the assignment when it comes, and sends no heartbeats any more.
        """
        self._consumer.subscribe([topic])
        self._consumer.partitions_for_topic(topic)

    def assign(self, partitions: Sequence[Partition]) -> None:
        self._consumer.assign([TopicPartition(*one) for one in partitions])

    def seek(self, partition: Partition, offset: int) -> None:
        self._consumer.seek(TopicPartition(*partition), offset)

    def poll(self, timeout_s: float) -> list[Received]:
        return [
            Received(
                record.topic,
                record.partition,
                record.offset,
                record.timestamp,
                record.key,
                record.value,
                tuple(record.headers),
            )
            for records in self._consumer.poll(timeout_ms=round(timeout_s * 1000)).values()
            for record in records
        ]

    def assignment(self) -> set[Partition]:
        return {(one.topic, one.partition) for one in self._consumer.assignment()}

    def commit(self) -> None:
        self._consumer.commit()

    def committed(self, partition: Partition) -> int | None:
        offset: int | None = self._consumer.committed(TopicPartition(*partition))
        return offset

    def offsets_for_time(self, partitions: Sequence[Partition], timestamp_ms: int) -> dict[Partition, int | None]:
        found = self._consumer.offsets_for_times({TopicPartition(*one): timestamp_ms for one in partitions})
        return {(one.topic, one.partition): None if at is None else at.offset for one, at in found.items()}

    def bounds(self, partition: Partition) -> tuple[int, int]:
        wanted = TopicPartition(*partition)
        return self._consumer.beginning_offsets([wanted])[wanted], self._consumer.end_offsets([wanted])[wanted]

    def membership(self) -> object:
        return self._consumer.group_metadata()

    def close(self) -> None:
        self._consumer.close(autocommit=False)


class KafkaPythonAdmin:
    def __init__(self, address: Mapping[str, Any]) -> None:
        self._admin = KafkaAdminClient(**address)

    def create_topic(self, topic: str, partitions: int, config: Mapping[str, str] | None = None) -> None:
        wanted = {"num_partitions": partitions, "replication_factor": 1, "configs": dict(config or {})}
        self._admin.create_topics({topic: wanted})

    def topics(self) -> dict[str, int]:
        return {one["name"]: len(one["partitions"]) for one in self._admin.describe_topics()}

    def delete_topic(self, topic: str) -> None:
        self._admin.delete_topics([topic])

    def create_partitions(self, topic: str, total: int) -> None:
        self._admin.create_partitions({topic: total})

    def topic_config(self, topic: str) -> dict[str, str]:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        found = self._admin.describe_configs([resource], config_filter="all")
        return {name: entry["value"] for name, entry in found["topic"][topic].items()}

    def set_topic_config(self, topic: str, name: str, value: str) -> None:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, configs={name: value})
        outcome = self._admin.alter_configs([resource])["topic"][topic]
        if outcome != "OK":
            raise RuntimeError(outcome)

    def delete_records(self, partition: Partition, before_offset: int) -> int:
        (found,) = self._admin.delete_records({TopicPartition(*partition): before_offset}).values()
        return int(found["low_watermark"])

    def groups(self) -> set[str]:
        return {one["group_id"] for one in self._admin.list_groups()}

    def group_state(self, group: str) -> tuple[str, int]:
        found = self._admin.describe_groups([group])[group]
        return found["group_state"].lower(), len(found["members"])

    def group_offsets(self, group: str) -> dict[Partition, int]:
        found = self._admin.list_group_offsets({group: None})[group]
        return {(one.topic, one.partition): at.offset for one, at in found.items()}

    def delete_group(self, group: str) -> None:
        outcome = self._admin.delete_groups([group])[group]
        if outcome != "OK":
            raise RuntimeError(outcome)

    def close(self) -> None:
        self._admin.close()


class TokenProvider(AbstractTokenProvider):  # type: ignore[misc]
    def __init__(self, make: Callable[[], tuple[str, float]]) -> None:
        super().__init__()
        self._make = make

    def token(self) -> str:
        return self._make()[0]


class KafkaPython:
    name = "kafka-python"
    deletes_groups = True
    fences_zombies = True

    def __init__(self, login: Login | None = None) -> None:
        self._login = login

    def _address(self, bootstrap: str) -> dict[str, Any]:
        address: dict[str, Any] = {"bootstrap_servers": bootstrap}
        if (login := self._login) is not None:
            address["security_protocol"] = login.protocol
            if login.mechanism:
                address["sasl_mechanism"] = login.mechanism
                address |= {"sasl_plain_username": login.user, "sasl_plain_password": login.password}
            if login.ca_file:
                address["ssl_cafile"] = login.ca_file
            if login.token is not None:
                address["sasl_oauth_token_provider"] = TokenProvider(login.token)
            if login.certificate:
                address |= {"ssl_certfile": login.certificate, "ssl_keyfile": login.certificate}
        return address

    def sender(self, bootstrap: str, *, codec: str = "none", idempotent: bool = True) -> KafkaPythonSender:
        return KafkaPythonSender(self._address(bootstrap), codec, idempotent)

    def transactions(
        self, bootstrap: str, transactional_id: str, *, timeout_ms: int = interface.TRANSACTION_TIMEOUT_MS
    ) -> KafkaPythonTransactions:
        return KafkaPythonTransactions(self._address(bootstrap), transactional_id, timeout_ms)

    def reader(self, bootstrap: str, *, group: str | None = None, committed_only: bool = False) -> KafkaPythonReader:
        return KafkaPythonReader(self._address(bootstrap), group, committed_only)

    def admin(self, bootstrap: str) -> KafkaPythonAdmin:
        return KafkaPythonAdmin(self._address(bootstrap))

    @contextmanager
    def running(self) -> Iterator[None]:
        yield
