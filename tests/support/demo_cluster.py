"""A cluster like that of a small shop, with something of everything that the console shows.

Topics with JSON, text, bytes, compressed records, tombstones and transactions; groups of each type that brokers have,
with members and without; a queue with dead letters; and ten thousand topics and groups of tenants besides, so that
every page meets them. Everything is the same on every run, but for times.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from confluent_kafka import Consumer, Producer

from millrace.admin import acls, queues, quotas, topics
from millrace.admin.users import ClusterUsers
from millrace.client import requests
from millrace.client.cluster import ClusterClient
from millrace.client.queue import QueueConsumer, Verdict
from millrace.client.settings import ClientSettings
from millrace.model import TopicPartition
from millrace.security.acls import Acl, Operation, PatternKind, Permission, ResourceKind
from millrace.spark.pipelines.status import State, read_run
from millrace.wire.messages.groups import FindCoordinatorRequest
from support.up import ENVIRONMENT, wait_for

SETTINGS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
}
"""Of the brokers: there are rules, which stop nobody here."""
TENANTS = 10_000
TOPICS = {"customers": 3, "email-jobs": 1, "invoices": 3, "orders": 6, "page-views": 6, "payments": 3, "sensors": 3}
COMPACTED = "customers"
LETTERS = "dlq.email-jobs"
QUEUE = "email-workers"
REJECTED = 4
CLASSIC_GROUP = "order-service"
CONSUMER_GROUP = "billing"
IDLE_GROUP = "monthly-report"
"""It has read some of the invoices, and nobody of it runs."""
INVOICES = 300
RUN = "page-view-counts-1"
"""The name of the pipeline's run."""

_AT_ONCE = 2000
_FIND_AT_ONCE = 1000
_COMMITS_UNDER_WAY = 200
_TRAFFIC_EVERY_S = 0.5
_COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
_NAMES = ("Ada", "Ben", "Chloe", "Dmitri", "Emma", "Farid", "Greta", "Hugo")
_PAGES = ("/", "/shoes", "/coats", "/cart", "/checkout", "/help")


def client_of(bootstrap: str) -> ClusterClient:
    settings = {"bootstrap.servers": bootstrap, "request.timeout.ms": "60000", "default.api.timeout.ms": "60000"}
    return ClusterClient(ClientSettings.from_properties(settings))


def tenant_topic(number: int) -> str:
    return f"tenant-{number:05}.events"


def tenant_group(number: int) -> str:
    return f"tenant-{number:05}.indexer"


def make_topics(bootstrap: str) -> None:
    """Those that have names of their own."""
    with client_of(bootstrap) as client:
        for name, partitions in TOPICS.items():
            settings = {"cleanup.policy": "compact"} if name == COMPACTED else {"retention.ms": "259200000"}
            _made(topics.create_topics(client, [name], partitions=partitions, settings=settings))
        letters = {"errors.deadletterqueue.group.enable": "true"}
        _made(topics.create_topics(client, [LETTERS], partitions=1, settings=letters))


def populate(bootstrap: str, tenants: int = TENANTS) -> None:
    """Make everything else that stays when nobody runs."""
    with client_of(bootstrap) as client:
        names = [tenant_topic(number) for number in range(tenants)]
        for begin in range(0, tenants, _AT_ONCE):
            _made(topics.create_topics(client, names[begin : begin + _AT_ONCE], partitions=1, replication_factor=1))
        fill(bootstrap)
        client.commit_offsets(IDLE_GROUP, {TopicPartition("invoices", 0): 40, TopicPartition("invoices", 1): 60})
        commit_many(client, {tenant_group(n): {TopicPartition(tenant_topic(n), 0): 0} for n in range(tenants)})
        _fill_queue(bootstrap, client)
        _set_rights(client)


def fill(bootstrap: str) -> None:
    chance = random.Random(7)
    with _producing(bootstrap) as producer:
        for number in range(400):
            producer.produce("orders", *_order(number, chance), headers={"source": b"shop", "trace": b"%08x" % number})
        for number, name in enumerate(_NAMES):
            customer = {"name": name, "since": 2015 + number, "newsletter": number % 2 == 0}
            producer.produce(COMPACTED, json.dumps(customer).encode(), f"customer-{number}")
        for number in (2, 5):
            producer.produce(COMPACTED, None, f"customer-{number}")
        for number in range(INVOICES):
            invoice = {"invoice": number, "total": round(chance.uniform(5, 500), 2)}
            producer.produce("invoices", json.dumps(invoice).encode(), str(number), partition=number % 3)
        for number in range(120):
            producer.produce("sensors", struct.pack(">qd", number, chance.gauss(21, 2)), b"sensor-%d" % (number % 5))
    for compression in _COMPRESSIONS:
        with _producing(bootstrap, {"compression.type": compression}) as producer:
            for number in range(100):
                producer.produce("page-views", *_page_view(number, chance))
    writer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "payments-writer"})
    writer.init_transactions(30)
    for transaction in range(6):
        writer.begin_transaction()
        for number in range(10):
            payment = {"payment": transaction * 10 + number, "amount": round(chance.uniform(5, 500), 2)}
            writer.produce("payments", json.dumps(payment).encode(), str(number))
        if transaction == 3:
            writer.abort_transaction(30)
        else:
            writer.commit_transaction(30)


def commit_many(client: ClusterClient, commits: Mapping[str, Mapping[TopicPartition, int]]) -> None:
    """Have many groups commit, with requests on their way at the same time: each alone would wait for replicas."""
    client.broker_ids()
    by_broker: dict[int, list[str]] = {}
    for names in _cut(list(commits), _FIND_AT_ONCE):
        asked = FindCoordinatorRequest(key_type=0, coordinator_keys=names)
        for found in client.ask_any_broker("coordinators", asked, lambda response: response.coordinators):
            assert not found.error_code, found.error_message
            by_broker.setdefault(found.node_id, []).append(found.key)
    for broker, groups in by_broker.items():
        connection = client.connection(broker)
        for names in _cut(groups, _COMMITS_UNDER_WAY):
            sent = [client.send(connection, requests.offset_commit(name, commits[name])) for name in names]
            for pending in sent:
                for outcome in requests.read_offset_commit(connection.receive(pending)):
                    assert outcome.error is None, outcome


def reject(client: ClusterClient, queue: str, topic: str, count: int) -> None:
    """Have a member of a queue take so many records and want none of them."""
    with QueueConsumer(client, queue, [topic]) as consumer:
        done = 0
        while done < count:
            taken = consumer.poll(max_records=count - done, max_wait_ms=100, strict=True)
            assert not consumer.acknowledge(taken, Verdict.REJECT)
            done += len(taken)


class Members:
    """Consumers of two groups that read what comes, until the end. Use as a context manager."""

    def __init__(self, bootstrap: str) -> None:
        common = {"bootstrap.servers": bootstrap, "auto.offset.reset": "earliest", "auto.commit.interval.ms": 1000}
        wanted = (
            ("orders", {"group.id": CLASSIC_GROUP, "client.id": "order-service-1"}),
            ("orders", {"group.id": CLASSIC_GROUP, "client.id": "order-service-2"}),
            ("payments", {"group.id": CONSUMER_GROUP, "client.id": "billing-1", "group.protocol": "consumer"}),
        )
        self._ending = threading.Event()
        self._reading = [threading.Event() for _ in wanted]
        self._threads = [
            threading.Thread(target=self._read, args=(topic, {**common, **own}, reading), daemon=True)
            for (topic, own), reading in zip(wanted, self._reading, strict=True)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        for reading in self._reading:
            assert reading.wait(60), "a member got nothing to read"
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _read(self, topic: str, settings: Mapping[str, str | int], reading: threading.Event) -> None:
        consumer = Consumer(dict(settings))
        consumer.subscribe([topic])
        while not self._ending.is_set():
            if consumer.poll(0.2) is not None:
                reading.set()
        consumer.close()


class Traffic:
    """Orders and page views that come in, now more and now less. Use as a context manager."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _send(self) -> None:
        chance = random.Random(11)
        with _producing(self._bootstrap) as producer:
            for number in itertools.count(400):
                for _ in range(10 + 3 * (number % 12)):
                    producer.produce("page-views", *_page_view(number, chance))
                producer.produce("orders", *_order(number, chance), headers={"source": b"shop"})
                producer.poll(0)
                if self._ending.wait(_TRAFFIC_EVERY_S):
                    return


@contextmanager
def pipeline(bootstrap: str, folder: Path) -> Iterator[None]:
    """A pipeline of Spark's that counts page views, started now; it notes in `folder / "runs"` how it does."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "page_view_counts.py"
    file.write_text(_PIPELINE)
    command = [
        *(sys.executable, "-m", "millrace", "pipeline", "run", str(file), "--bootstrap", bootstrap, "--quiet"),
        *("--master", "local[1]", "--checkpoint", str(folder / "checkpoint"), "--conf", "spark.ui.enabled=false"),
        *("--runs", str(folder / "runs"), "--run-id", RUN),
    ]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=ENVIRONMENT) as process,
    ):
        try:
            yield
        finally:
            process.terminate()


def wait_for_pipeline(folder: Path) -> None:
    """Until it has counted something."""

    def counts() -> bool:
        run = read_run(folder / "runs", RUN)
        assert run is None or not run.state.is_over, (folder / "log").read_text(errors="replace")
        return run is not None and run.state is State.RUNNING and bool(run.queries)

    wait_for(counts, timeout_s=120)


_PIPELINE = '''"""Counts page views."""
OPTIONS = [("topic", "page-views", "what to count"), ("trigger", "5 seconds", "how often")]


def topics(options):
    return [options["topic"]]


def start(spark, options):
    client = {name: value for name, value in options.items() if name.startswith("kafka.")}
    records = spark.readStream.format("millrace").options(**client).option("startingOffsets", "earliest")
    return (
        records.option("subscribe", options["topic"]).load()
        .writeStream.queryName("page-view-counts").format("noop")
        .option("checkpointLocation", options["checkpoint"])
        .trigger(processingTime=options["trigger"]).start()
    )
'''


@contextmanager
def alive(bootstrap: str) -> Iterator[None]:
    """Members and traffic, for as long as this lasts."""
    with ExitStack() as stack:
        stack.enter_context(Members(bootstrap))
        stack.enter_context(Traffic(bootstrap))
        yield


@contextmanager
def _producing(bootstrap: str, settings: Mapping[str, str] | None = None) -> Iterator[Producer]:
    producer = Producer({"bootstrap.servers": bootstrap, **(settings or {})})
    yield producer
    assert producer.flush(60) == 0, "records were not taken"


def _fill_queue(bootstrap: str, client: ClusterClient) -> None:
    settings = {"share.auto.offset.reset": "earliest", queues.DEAD_LETTERS: LETTERS}
    queues.change_settings(client, QUEUE, settings)
    with _producing(bootstrap) as producer:
        for number in range(20):
            mail = {"to": f"{_NAMES[number % len(_NAMES)].lower()}@example.com", "template": "order-shipped"}
            producer.produce("email-jobs", json.dumps(mail).encode(), f"mail-{number}", headers={"attempt": b"1"})
    reject(client, QUEUE, "email-jobs", REJECTED)


def _set_rights(client: ClusterClient) -> None:
    allowed = (
        ("User:order-service", ResourceKind.TOPIC, "orders", PatternKind.LITERAL, Operation.READ),
        ("User:order-service", ResourceKind.GROUP, CLASSIC_GROUP, PatternKind.LITERAL, Operation.READ),
        ("User:shop", ResourceKind.TOPIC, "orders", PatternKind.LITERAL, Operation.WRITE),
        ("User:shop", ResourceKind.TOPIC, "page-views", PatternKind.LITERAL, Operation.WRITE),
        ("User:analytics", ResourceKind.TOPIC, "page-", PatternKind.PREFIXED, Operation.READ),
        ("User:indexer", ResourceKind.TOPIC, "tenant-", PatternKind.PREFIXED, Operation.READ),
    )
    rules = [
        Acl(kind, name, pattern, who, "*", operation, Permission.ALLOW)
        for who, kind, name, pattern, operation in allowed
    ]
    denied = Acl(
        ResourceKind.TOPIC, "payments", PatternKind.LITERAL, "User:analytics", "*", Operation.READ, Permission.DENY
    )
    assert not any(acls.create_rules(client, [*rules, denied]))
    for user in ("analytics", "indexer", "order-service", "shop"):
        ClusterUsers(client).set_password(user, {"SCRAM-SHA-512": 4096}, f"secret of {user}")
    quotas.alter_quotas(client, {"user": "analytics"}, {"consumer_byte_rate": 10_000_000.0})
    quotas.alter_quotas(client, {"client-id": None}, {"producer_byte_rate": 50_000_000.0, "request_percentage": 200.0})


def _order(number: int, chance: random.Random) -> tuple[bytes, str]:
    lines = [{"sku": f"S-{chance.randrange(1000, 9999)}", "quantity": chance.randrange(1, 4)} for _ in range(2)]
    customer = number % len(_NAMES)
    order = {"order": number, "customer": _NAMES[customer], "lines": lines, "paid": number % 3 != 0}
    return json.dumps(order).encode(), f"customer-{customer}"


def _page_view(number: int, chance: random.Random) -> tuple[bytes, str]:
    view = {"page": chance.choice(_PAGES), "visitor": chance.randrange(5000), "ms": chance.randrange(5, 900)}
    return json.dumps(view).encode(), f"visitor-{number % 50}"


def _made(answers: Mapping[str, Exception | None]) -> None:
    failed = {name: error for name, error in answers.items() if error is not None}
    assert not failed, dict(itertools.islice(failed.items(), 3))


def _cut(names: Collection[str], size: int) -> Iterable[list[str]]:
    whole = list(names)
    return (whole[begin : begin + size] for begin in range(0, len(whole), size))
