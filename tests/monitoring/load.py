"""Everything at once, at a low rate: what makes every number of a broker move.

Producers, a classic group and one of the new protocol, a group that stays behind, a queue whose consumer accepts, lets
go and rejects (with dead letters), transactions that are committed and aborted, somebody with a wrong
password, and requests that are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Self

from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.client.cluster import ClusterClient
from millrace.client.queue import QueueConsumer, Verdict
from millrace.client.settings import ClientSettings
from support.cluster_processes import ClusterProcesses
from support.group_configs import set_group_configs

ORDERS: Final = "orders"
JOBS: Final = "jobs"
DEAD_JOBS: Final = "dlq.jobs"
CLASSIC, MODERN, SLEEPY, WORKERS = "billing", "shipping", "sleepy", "workers"
GROUPS: Final = {CLASSIC, MODERN, SLEEPY, WORKERS}

_PAUSE_S: Final = 0.1
_READY_S: Final = 30.0


class Load:
    """Runs in threads from the start of a `with` block to its end, where what a thread raised is raised."""

    def __init__(self, cluster: ClusterProcesses) -> None:
        self._login = cluster.client_settings
        self._admin_login = cluster.admin_settings
        # librdkafka tells of every lost connection, and a broker that is killed is a part of this.
        self._client = {**self._login, "socket.timeout.ms": "10000", "log_level": "0"}
        self._admin = {**self._admin_login, "log_level": "0"}
        self._bootstrap = cluster.bootstrap
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        work = (self._produce, self._read_classic, self._read_modern, self._work, self._transact, self._misbehave)
        self._threads = [threading.Thread(target=self._guarded, args=(each,), name=each.__name__) for each in work]

    def __enter__(self) -> Self:
        self._prepare()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as failure:  # noqa: BLE001 - told by whoever started it
            self._failures.append(failure)

    def _prepare(self) -> None:
        admin = AdminClient(self._admin)
        topics = [
            NewTopic(ORDERS, 3, 3),
            NewTopic(JOBS, 2, 3),
            NewTopic(DEAD_JOBS, 1, 3, config={"errors.deadletterqueue.group.enable": "true"}),
        ]
        for created in admin.create_topics(topics).values():
            created.result(_READY_S)
        settings = {"share.auto.offset.reset": "earliest", "errors.deadletterqueue.topic.name": DEAD_JOBS}
        set_group_configs(self._bootstrap, WORKERS, settings, self._admin_login)
        producer = Producer(self._client)
        producer.produce(ORDERS, b"the first", partition=0)
        assert producer.flush(_READY_S) == 0
        with_commit = {"group.id": SLEEPY, "auto.offset.reset": "earliest", "enable.auto.commit": False}
        consumer = Consumer({**self._client, **with_commit})
        try:
            consumer.subscribe([ORDERS])
            first = consumer.poll(_READY_S)
            assert first is not None and first.error() is None, "the group that will sleep has read nothing"
            consumer.commit(first, asynchronous=False)  # what comes from now on stays unread
        finally:
            consumer.close()

    # --- what goes on -------------------------------------------------------------------------------------------------

    def _produce(self) -> None:
        producer = Producer({**self._client, "linger.ms": 5})
        while not self._stop.wait(_PAUSE_S):
            for number in range(20):
                producer.produce(ORDERS, b"order %d" % number)
            producer.produce(JOBS, b"job")
            producer.poll(0)
        producer.flush(_READY_S)

    def _read_classic(self) -> None:
        self._read({"group.id": CLASSIC})

    def _read_modern(self) -> None:
        self._read({"group.id": MODERN, "group.protocol": "consumer"})

    def _read(self, settings: dict[str, str]) -> None:
        quickly = {"auto.offset.reset": "earliest", "auto.commit.interval.ms": 500, "fetch.wait.max.ms": 100}
        consumer = Consumer({**self._client, **quickly, **settings})
        try:
            consumer.subscribe([ORDERS])
            while not self._stop.is_set():
                consumer.poll(_PAUSE_S)
        finally:
            consumer.close()

    def _work(self) -> None:
        """The first of ten is let go of, the second rejected, the third kept; the others are accepted."""
        properties = {**self._login, "request.timeout.ms": "5000", "retry.backoff.ms": "50"}
        seen = 0
        with (
            ClusterClient(ClientSettings.from_properties(properties)) as client,
            QueueConsumer(client, WORKERS, [JOBS]) as consumer,
        ):
            while not self._stop.is_set():
                for record in consumer.poll(max_records=10, max_wait_ms=200):
                    seen += 1
                    verdict = {0: Verdict.RELEASE, 1: Verdict.REJECT}.get(seen % 10, Verdict.ACCEPT)
                    if seen % 10 != 2:
                        consumer.acknowledge([record], verdict)

    def _transact(self) -> None:
        producer = Producer({**self._client, "transactional.id": "ledger", "transaction.timeout.ms": 20_000})
        producer.init_transactions(_READY_S)
        count = 0
        while not self._stop.wait(_PAUSE_S):
            count += 1
            producer.begin_transaction()
            producer.produce(ORDERS, b"in a transaction")
            producer.flush(_READY_S)  # what has not left yet would not be aborted, but forgotten
            try:
                if count % 3:
                    producer.commit_transaction(_READY_S)
                else:
                    producer.abort_transaction(_READY_S)
            except KafkaException as failure:
                if not failure.args[0].txn_requires_abort():
                    raise
                producer.abort_transaction(_READY_S)

    def _misbehave(self) -> None:
        """A wrong password, and topics that are not there."""
        admin = AdminClient(self._admin)
        stranger = AdminClient({**self._client, "sasl.password": "guessed", "reconnect.backoff.ms": 500})
        while not self._stop.wait(1.0):
            stranger.poll(0)
            for deleted in admin.delete_topics(["no-such-topic"], request_timeout=5).values():
                try:
                    deleted.result(_READY_S)
                except KafkaException:
                    pass
