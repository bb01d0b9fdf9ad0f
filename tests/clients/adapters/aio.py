"""aiokafka: the asyncio client, on a loop of its own in a thread."""

from __future__ import annotations

import asyncio
import gc
import ssl
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.abc import AbstractTokenProvider
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import for_code

from clients.adapters import interface
from clients.adapters.interface import Headers, Login, Partition, Received, Sent

TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 70.0
T = TypeVar("T")


class LoopThread:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="aiokafka loop")
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return self.start(work).result(CALL_TIMEOUT_S)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        self.call(self._cancel_the_rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_the_rest(self) -> None:
        """What a failed test left running."""
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


class AioPending:
    def __init__(self, future: Future[Sent]) -> None:
        self._future = future

    def result(self, timeout_s: float) -> Sent:
        return self._future.result(timeout_s)


class AioSender:
    def __init__(self, loop: LoopThread, address: Mapping[str, Any], codec: str, idempotent: bool) -> None:
        self._loop = loop
        self._producer = loop.call(self._open(address, codec, idempotent))

    async def _open(self, address: Mapping[str, Any], codec: str, idempotent: bool) -> AIOKafkaProducer:
        producer = AIOKafkaProducer(
            **address,
            compression_type=None if codec == "none" else codec,
            enable_idempotence=idempotent,
            acks="all",
            linger_ms=2,
            retry_backoff_ms=interface.RETRY_BACKOFF_MS,
            request_timeout_ms=interface.DELIVERY_TIMEOUT_MS,
        )
        await producer.start()
        return producer

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        *,
        headers: Headers = (),
        timestamp_ms: int | None = None,
        partition: int | None = None,
    ) -> AioPending:
        async def put() -> Any:
            return await self._producer.send(
                topic, value, key, partition=partition, timestamp_ms=timestamp_ms, headers=list(headers)
            )

        async def acknowledged(future: Any) -> Sent:
            metadata = await future
            return Sent(metadata.partition, metadata.offset)

        return AioPending(self._loop.start(acknowledged(self._loop.call(put()))))

    def flush(self) -> None:
        self._loop.call(self._producer.flush())

    def close(self) -> None:
        self._loop.call(self._producer.stop())


class AioTransactions:
    def __init__(self, loop: LoopThread, address: Mapping[str, Any], transactional_id: str, timeout_ms: int) -> None:
        self._loop = loop
        self._producer = loop.call(self._open(address, transactional_id, timeout_ms))

    async def _open(self, address: Mapping[str, Any], transactional_id: str, timeout_ms: int) -> AIOKafkaProducer:
        producer = AIOKafkaProducer(
            **address,
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
            linger_ms=2,
            retry_backoff_ms=interface.RETRY_BACKOFF_MS,
            request_timeout_ms=interface.DELIVERY_TIMEOUT_MS,
        )
        try:
            await asyncio.wait_for(producer.start(), interface.END_TIMEOUT_S)
        except BaseException:
            await producer.stop()
            raise
        return producer

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.call(asyncio.wait_for(work, interface.END_TIMEOUT_S))

    def begin(self) -> None:
        self._call(self._producer.begin_transaction())

    def send(self, topic: str, value: bytes, partition: int = 0) -> None:
        self._call(self._producer.send(topic, value, partition=partition))

    def flush(self) -> None:
        self._call(self._producer.flush())

    def send_offsets(self, offsets: Mapping[Partition, int], membership: object) -> None:
        wanted = {TopicPartition(*one): offset for one, offset in offsets.items()}
        self._call(self._producer.send_offsets_to_transaction(wanted, membership))

    def commit(self) -> None:
        self._call(self._producer.commit_transaction())

    def abort(self) -> None:
        self._call(self._producer.abort_transaction())

    def abandon(self) -> None:
        self._call(self._producer.stop())

    def close(self) -> None:
        self.abandon()


class AioReader:
    def __init__(self, loop: LoopThread, address: Mapping[str, Any], group: str | None, committed_only: bool) -> None:
        self._loop = loop
        self._group = group
        self._consumer = loop.call(self._open(address, group, committed_only))

    async def _open(self, address: Mapping[str, Any], group: str | None, committed_only: bool) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(
            **address,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            session_timeout_ms=interface.SESSION_TIMEOUT_MS,
            heartbeat_interval_ms=interface.HEARTBEAT_MS,
            fetch_max_wait_ms=200,
            isolation_level="read_committed" if committed_only else "read_uncommitted",
            retry_backoff_ms=interface.RETRY_BACKOFF_MS,
        )
        await consumer.start()
        return consumer

    def _plain(self, call: Any, *args: Any) -> Any:
        async def on_loop() -> Any:
            return call(*args)

        return self._loop.call(on_loop())

    def subscribe(self, topic: str) -> None:
        self._plain(self._consumer.subscribe, [topic])

    def assign(self, partitions: Sequence[Partition]) -> None:
        self._plain(self._consumer.assign, [TopicPartition(*one) for one in partitions])

    def seek(self, partition: Partition, offset: int) -> None:
        self._plain(self._consumer.seek, TopicPartition(*partition), offset)

    def poll(self, timeout_s: float) -> list[Received]:
        found = self._loop.call(self._consumer.getmany(timeout_ms=round(timeout_s * 1000), max_records=500))
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
            for records in found.values()
            for record in records
        ]

    def assignment(self) -> set[Partition]:
        return {(one.topic, one.partition) for one in self._plain(self._consumer.assignment)}

    def commit(self) -> None:
        self._loop.call(self._consumer.commit())

    def committed(self, partition: Partition) -> int | None:
        offset: int | None = self._loop.call(self._consumer.committed(TopicPartition(*partition)))
        return offset

    def offsets_for_time(self, partitions: Sequence[Partition], timestamp_ms: int) -> dict[Partition, int | None]:
        wanted = {TopicPartition(*one): timestamp_ms for one in partitions}
        found = self._loop.call(self._consumer.offsets_for_times(wanted))
        return {(one.topic, one.partition): None if at is None else at.offset for one, at in found.items()}

    def bounds(self, partition: Partition) -> tuple[int, int]:
        wanted = TopicPartition(*partition)
        first = self._loop.call(self._consumer.beginning_offsets([wanted]))[wanted]
        return first, self._loop.call(self._consumer.end_offsets([wanted]))[wanted]

    def membership(self) -> object:
        return self._group

    def close(self) -> None:
        self._loop.call(self._stop())

    async def _stop(self) -> None:
        """aiokafka 0.14.0 cancels its heartbeat and waits for it. While that looks for a coordinator that has moved,
        the cancellation comes out of `stop`, which then leaves the rest open."""
        consumer = self._consumer
        try:
            await consumer.stop()
        except asyncio.CancelledError:
            await consumer._fetcher.close()
            await consumer._client.close()


class AioAdmin:
    def __init__(self, loop: LoopThread, address: Mapping[str, Any]) -> None:
        self._loop = loop
        self._admin = loop.call(self._open(address))

    async def _open(self, address: Mapping[str, Any]) -> AIOKafkaAdminClient:
        admin = AIOKafkaAdminClient(**address)
        await admin.start()
        return admin

    def _check(self, errors: Any) -> None:
        for name, code, *_ in errors:
            if code:
                raise for_code(code)(name)

    def create_topic(self, topic: str, partitions: int, config: Mapping[str, str] | None = None) -> None:
        wanted = NewTopic(topic, partitions, 1, topic_configs=dict(config or {}))
        self._check(self._loop.call(self._admin.create_topics([wanted])).topic_errors)

    def topics(self) -> dict[str, int]:
        return {one["topic"]: len(one["partitions"]) for one in self._loop.call(self._admin.describe_topics())}

    def delete_topic(self, topic: str) -> None:
        self._check(self._loop.call(self._admin.delete_topics([topic])).topic_error_codes)

    def create_partitions(self, topic: str, total: int) -> None:
        self._loop.call(self._admin.create_partitions({topic: NewPartitions(total)}))

    def topic_config(self, topic: str) -> dict[str, str]:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        (answer,) = self._loop.call(self._admin.describe_configs([resource]))
        ((code, message, _, _, entries),) = answer.resources
        if code:
            raise for_code(code)(message)
        return {entry[0]: entry[1] for entry in entries}

    def set_topic_config(self, topic: str, name: str, value: str) -> None:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, configs={name: value})
        (answer,) = self._loop.call(self._admin.alter_configs([resource]))
        for code, message, *_ in answer.resources:
            if code:
                raise for_code(code)(message)

    def delete_records(self, partition: Partition, before_offset: int) -> int:
        wanted = {TopicPartition(*partition): RecordsToDelete(before_offset)}
        (low_watermark,) = self._loop.call(self._admin.delete_records(wanted)).values()
        return int(low_watermark)

    def groups(self) -> set[str]:
        return {one[0] for one in self._loop.call(self._admin.list_consumer_groups())}

    def group_state(self, group: str) -> tuple[str, int]:
        (answer,) = self._loop.call(self._admin.describe_consumer_groups([group]))
        (found,) = answer.to_object()["groups"]
        return found["state"].lower(), len(found["members"])

    def group_offsets(self, group: str) -> dict[Partition, int]:
        found = self._loop.call(self._admin.list_consumer_group_offsets(group))
        return {(one.topic, one.partition): at.offset for one, at in found.items()}

    def delete_group(self, group: str) -> None:
        raise AssertionError(f"aiokafka cannot delete group {group}")

    def close(self) -> None:
        self._loop.call(self._admin.close())


class TokenProvider(AbstractTokenProvider):  # type: ignore[misc]
    def __init__(self, make: Callable[[], tuple[str, float]]) -> None:
        self._make = make

    async def token(self) -> str:
        return self._make()[0]


class Aiokafka:
    name = "aiokafka"
    deletes_groups = False
    fences_zombies = False

    def __init__(self, login: Login | None = None) -> None:
        self._login = login
        self._loop: LoopThread | None = None

    def _address(self, bootstrap: str) -> dict[str, Any]:
        address: dict[str, Any] = {"bootstrap_servers": bootstrap}
        if (login := self._login) is not None:
            address["security_protocol"] = login.protocol
            if login.mechanism:
                address["sasl_mechanism"] = login.mechanism
                address |= {"sasl_plain_username": login.user, "sasl_plain_password": login.password}
            if login.ca_file:
                address["ssl_context"] = ssl.create_default_context(cafile=login.ca_file)
            if login.token is not None:
                address["sasl_oauth_token_provider"] = TokenProvider(login.token)
            if login.certificate:
                address["ssl_context"].load_cert_chain(login.certificate)
        return address

    def sender(self, bootstrap: str, *, codec: str = "none", idempotent: bool = True) -> AioSender:
        assert self._loop is not None
        return AioSender(self._loop, self._address(bootstrap), codec, idempotent)

    def transactions(
        self, bootstrap: str, transactional_id: str, *, timeout_ms: int = interface.TRANSACTION_TIMEOUT_MS
    ) -> AioTransactions:
        assert self._loop is not None
        return AioTransactions(self._loop, self._address(bootstrap), transactional_id, timeout_ms)

    def reader(self, bootstrap: str, *, group: str | None = None, committed_only: bool = False) -> AioReader:
        assert self._loop is not None
        return AioReader(self._loop, self._address(bootstrap), group, committed_only)

    def admin(self, bootstrap: str) -> AioAdmin:
        assert self._loop is not None
        return AioAdmin(self._loop, self._address(bootstrap))

    @contextmanager
    def running(self) -> Iterator[None]:
        self._loop = LoopThread()
        try:
            yield
        finally:
            self._loop.close()
            self._loop = None
            # asyncio of Python 3.11 forgets the socket of a refused connection; it is let go of here, in silence.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()
