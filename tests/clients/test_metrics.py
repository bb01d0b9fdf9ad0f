"""What a broker tells of itself, against what clients have done with it: exact numbers, read by another parser."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from prometheus_client.parser import text_string_to_metric_families

from millrace.broker import Broker
from millrace.client.cluster import ClusterClient
from millrace.client.queue import QueueConsumer, QueueRecord, Verdict
from millrace.client.settings import ClientSettings
from millrace.config import BrokerConfig
from millrace.errors import ConfigError
from millrace.handlers import registry
from millrace.metrics.catalog import CATALOG, Detail, Kind
from millrace.monitoring.parts import api_title
from millrace.testing import Cluster
from support.group_configs import set_group_configs
from support.up import wait_for

QUIET = {"log_level": 3}
METRICS = {"metrics.listener": "127.0.0.1:0"}
EVERYTHING = "&".join(f"detail={each.value}" for each in Detail)
NOT_HERE = {
    "millrace_zookeeper_connected",  # no ZooKeeper
    "millrace_authentications_total",  # no logins
    "millrace_audit_events_dropped_total",  # no audit log
}

Numbers = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


class Told:
    """One answer of /metrics."""

    def __init__(self, url: str, details: str = "") -> None:
        with urlopen(f"{url}?{details}" if details else url, timeout=30) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            self.text = answer.read().decode()
        self.families = {family.name: family for family in text_string_to_metric_families(self.text)}
        self._values = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """The value of one line, 0 where there is none."""
        return self._values.get((f"millrace_{name}", tuple(sorted(labels.items()))), 0.0)

    def sum(self, name: str) -> float:
        return sum(value for (each, _), value in self._values.items() if each == f"millrace_{name}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(settings=METRICS) as running:
        yield running


@pytest.fixture
def ask(cluster: Cluster) -> Callable[..., Told]:
    return lambda details="": Told(cluster.metrics_url_of(1), details)


def write(bootstrap: str, topic: str, values: Iterable[bytes], **settings: Any) -> list[KafkaError]:
    """Errors of what was refused."""
    producer = Producer({**QUIET, "bootstrap.servers": bootstrap, **settings})
    errors: list[KafkaError] = []
    for value in values:
        producer.produce(topic, value, partition=0, on_delivery=lambda error, _: error and errors.append(error))
    assert producer.flush(30) == 0
    return errors


def read(bootstrap: str, topic: str, count: int, *, group: str = "reader", commit: bool = False) -> None:
    settings = {**QUIET, "bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False}
    with closing(Consumer(settings)) as consumer:
        consumer.assign([TopicPartition(topic, 0, 0)])
        seen = 0
        while seen < count:
            messages = consumer.consume(count - seen, 20)
            assert messages
            assert all(message.error() is None for message in messages)
            seen += len(messages)
        if commit:
            consumer.commit(offsets=[TopicPartition(topic, 0, count)], asynchronous=False)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_what_was_written_and_read_is_told_exactly(cluster: Cluster, ask: Callable[..., Told]) -> None:
    cluster.create_topic("exact")
    before = ask("detail=topics&detail=partitions")
    write(cluster.bootstrap_servers, "exact", [bytes(100)] * 1000)
    read(cluster.bootstrap_servers, "exact", 1000)
    after = ask("detail=topics&detail=partitions")

    size = after("partition_size_bytes", topic="exact", partition="0")
    assert size > 100_000
    for name, amount in (("bytes_in", size), ("records_in", 1000), ("bytes_out", size), ("records_out", 1000)):
        assert after(f"{name}_total") - before(f"{name}_total") == amount
        assert after(f"topic_{name}_total", topic="exact") == amount
        assert after(f"partition_{name}_total", topic="exact", partition="0") == amount
    place = {"topic": "exact", "partition": "0"}
    assert after("partition_log_start_offset", **place) == 0
    assert after("partition_log_end_offset", **place) == after("partition_high_watermark", **place) == 1000
    assert after("partition_leader", **place) == after("partition_isr", **place) == 1
    assert after("topic_leaders", topic="exact") == 1
    batches = after("requests_total", api="Produce") - before("requests_total", api="Produce")
    assert 1 <= batches <= 1000
    asked_bytes = after("request_bytes_total", api="Produce") - before("request_bytes_total", api="Produce")
    assert size < asked_bytes < size + 200 * batches


def test_every_request_is_in_every_stage(cluster: Cluster, ask: Callable[..., Told]) -> None:
    cluster.create_topic("stages")
    write(cluster.bootstrap_servers, "stages", [b"x"] * 10)
    told = ask()
    for api in ("Produce", "Metadata", "CreateTopics", "ApiVersions"):
        for stage in ("queue", "local", "remote", "response"):
            labels = {"api": api, "stage": stage}
            assert told("request_stage_seconds_count", **labels) == told("requests_total", api=api) > 0
            assert told("request_stage_seconds_bucket", **labels, le="+Inf") == told("requests_total", api=api)
    assert told("request_stage_seconds_sum", api="CreateTopics", stage="remote") > 0, "the controller took its time"
    assert told("request_stage_seconds_sum", api="Produce", stage="local") > 0
    assert told("response_bytes_total", api="ApiVersions") > 100


def test_errors_are_told_by_their_names(cluster: Cluster, ask: Callable[..., Told]) -> None:
    cluster.create_topic("narrow", config={"max.message.bytes": "200"})
    before = ask()
    (error,) = write(cluster.bootstrap_servers, "narrow", [bytes(1000)])
    assert error.code() == KafkaError.MSG_SIZE_TOO_LARGE
    after = ask()
    labels = {"api": "Produce", "error": "MESSAGE_TOO_LARGE"}
    assert after("request_errors_total", **labels) - before("request_errors_total", **labels) == 1
    assert after("records_in_total") == before("records_in_total")

    with closing(Consumer({**QUIET, "bootstrap.servers": cluster.bootstrap_servers, "group.id": "e"})) as consumer:
        assert consumer.list_topics("no-such-topic", 10).topics["no-such-topic"].error is not None
    labels = {"api": "Metadata", "error": "UNKNOWN_TOPIC_OR_PARTITION"}
    assert ask()("request_errors_total", **labels) > after("request_errors_total", **labels)


def test_a_broken_frame_is_counted(cluster: Cluster, ask: Callable[..., Told]) -> None:
    before = ask()
    host, port = cluster.bootstrap_servers.split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert client.recv(100) == b""
    after = ask()
    assert after("protocol_errors_total") - before("protocol_errors_total") == 1
    accepted = {"listener": "PLAINTEXT"}
    assert after("connections_accepted_total", **accepted) - before("connections_accepted_total", **accepted) == 1


def test_what_was_counted_of_a_topic_stays_when_it_is_deleted(cluster: Cluster, ask: Callable[..., Told]) -> None:
    cluster.create_topic("short-lived")
    write(cluster.bootstrap_servers, "short-lived", [b"x"] * 5)
    before = ask("detail=topics")
    assert before("topic_records_in_total", topic="short-lived") == 5
    admin = AdminClient({**QUIET, "bootstrap.servers": cluster.bootstrap_servers})
    admin.delete_topics(["short-lived"])["short-lived"].result(30)
    wait_for(lambda: ask()("cluster_topics") == before("cluster_topics") - 1)
    after = ask("detail=topics")
    assert after("records_in_total") == before("records_in_total")
    assert 'topic="short-lived"' not in after.text


def test_lag_in_records_and_in_seconds(cluster: Cluster, ask: Callable[..., Told]) -> None:
    cluster.create_topic("lagging")
    write(cluster.bootstrap_servers, "lagging", [b"x"] * 10)
    read(cluster.bootstrap_servers, "lagging", 4, group="slow", commit=True)
    read(cluster.bootstrap_servers, "lagging", 10, group="quick", commit=True)
    details = "detail=groups&detail=group-partitions"
    told = ask(details)
    assert told("group_lag_records", group="slow") == 6
    assert told("group_lag_records", group="quick") == told("group_lag_seconds", group="quick") == 0
    assert told("group_lag_unknown_partitions", group="slow") == 0
    place = {"group": "slow", "topic": "lagging", "partition": "0"}
    assert told("group_partition_committed_offset", **place) == 4
    assert told("group_partition_lag_records", **place) == 6
    first = told("group_lag_seconds", group="slow")
    assert 0 < first == told("group_partition_lag_seconds", **place) < 60
    wait_for(lambda: ask(details)("group_lag_seconds", group="slow") > first)
    assert told("group_info", group="slow", type="classic", state="Empty") == 1
    assert "lagging" not in ask().text and "slow" not in ask().text


def test_a_queue_with_dead_letters(cluster: Cluster, ask: Callable[..., Told]) -> None:
    cluster.create_topic("work")
    cluster.create_topic("dlq.work", config={"errors.deadletterqueue.group.enable": "true"})
    group = "workers"
    configs = {
        "share.auto.offset.reset": "earliest",
        "errors.deadletterqueue.topic.name": "dlq.work",
    }
    set_group_configs(cluster.bootstrap_servers, group, configs)
    before = ask()
    write(cluster.bootstrap_servers, "work", [b"%d" % number for number in range(10)])
    settings = ClientSettings.from_properties({"bootstrap.servers": cluster.bootstrap_servers})
    with closing(ClusterClient(settings)) as client, QueueConsumer(client, group, ["work"]) as consumer:

        def take(count: int) -> list[QueueRecord]:
            taken: list[QueueRecord] = []
            while len(taken) < count:
                taken += consumer.poll(max_records=count - len(taken), max_wait_ms=500, strict=True)
            return taken

        first = take(10)
        told = ask("detail=groups")
        assert told("queue_records_in_flight") == 10 and told("queue_partitions") == 1
        assert told("queue_group_records_in_flight", group=group) == 10
        assert told("queue_group_backlog_records", group=group) == 10
        assert consumer.acknowledge(first[:6], Verdict.ACCEPT) == []
        assert consumer.acknowledge(first[6:8], Verdict.REJECT) == []
        assert consumer.acknowledge(first[8:], Verdict.RELEASE) == []
        assert consumer.acknowledge(take(2), Verdict.ACCEPT) == []
        wait_for(lambda: ask()("queue_dead_letters_total") - before("queue_dead_letters_total") == 2)
        told = ask("detail=groups")
        assert told("groups", type="share", state="Stable") == told("group_members", type="share") == 1
    assert told("queue_records_delivered_total") - before("queue_records_delivered_total") == 12
    assert told("queue_records_redelivered_total") - before("queue_records_redelivered_total") == 2
    assert told("queue_records_archived_total") - before("queue_records_archived_total") == 2
    for kind, count in (("accept", 8), ("reject", 2), ("release", 2)):
        name, labels = "queue_records_acknowledged_total", {"kind": kind}
        assert told(name, **labels) - before(name, **labels) == count
    assert told("records_out_total") - before("records_out_total") == 12
    assert told("group_rebalances_total", type="share") > before("group_rebalances_total", type="share")


def test_transactions(cluster: Cluster, ask: Callable[..., Told]) -> None:
    cluster.create_topic("ledger")
    producer = Producer({**QUIET, "bootstrap.servers": cluster.bootstrap_servers, "transactional.id": "teller"})
    producer.init_transactions(30)
    before = ask()
    for commits in (True, False, True):
        producer.begin_transaction()
        producer.produce("ledger", b"x")
        producer.flush(30)
        assert ask()("transactions_open") == 1
        producer.commit_transaction(30) if commits else producer.abort_transaction(30)

    def completed(outcome: str) -> float:
        name, labels = "transactions_completed_total", {"outcome": outcome}
        return ask()(name, **labels) - before(name, **labels)

    wait_for(lambda: completed("committed") == 2 and completed("aborted") == 1)
    after = ask()
    assert after("transactions_open") == after("transactions_hanging") == 0
    assert after("transactional_ids") == 1


# --- all of them ------------------------------------------------------------------------------------------------------


def test_every_metric_of_the_catalogue_is_told(cluster: Cluster, ask: Callable[..., Told]) -> None:
    """With a group that lags, a queue that is read, and an error; the rest is there from the start."""
    cluster.create_topic("all-of-it")
    cluster.create_topic("all-narrow", config={"max.message.bytes": "200"})
    write(cluster.bootstrap_servers, "all-of-it", [b"x"] * 3)
    read(cluster.bootstrap_servers, "all-of-it", 2, group="all", commit=True)
    settings = ClientSettings.from_properties({"bootstrap.servers": cluster.bootstrap_servers})
    set_group_configs(cluster.bootstrap_servers, "all-queue", {"share.auto.offset.reset": "earliest"})
    with closing(ClusterClient(settings)) as client, QueueConsumer(client, "all-queue", ["all-of-it"]) as consumer:
        wait_for(lambda: bool(consumer.poll(max_records=1, max_wait_ms=500)))
        write(cluster.bootstrap_servers, "all-narrow", [bytes(1000)])
        told = ask(EVERYTHING)
    found = {declared_name(name) for name in told.families}
    assert found == CATALOG.keys() - NOT_HERE
    for name, family in told.families.items():
        declared = CATALOG[declared_name(name)]
        assert (family.type, family.documentation) == (declared.kind.value, declared.help)
        extra = {"le"} if declared.kind is Kind.HISTOGRAM else set()
        assert all({*sample.labels} - extra == {*declared.labels} for sample in family.samples)
    assert told.sum("scrape_errors_total") == 0
    plain = ask()
    assert {declared_name(name) for name in plain.families} == {name for name in found if CATALOG[name].detail is None}


def declared_name(name: str) -> str:
    """As the catalogue has it: the parser takes `_total` off."""
    return name if name in CATALOG else f"{name}_total"


def test_every_api_has_a_name_of_its_own(ask: Callable[..., Told]) -> None:
    titles = {api_title(key) for key in registry.load()}
    assert len(titles) == len(registry.load())
    assert {"Produce", "ListOffsets", "OffsetForLeaderEpoch", "ShareGroupHeartbeat"} <= titles
    told = {dict(sample.labels)["api"] for sample in ask().families["millrace_requests"].samples}
    assert told <= titles


# --- the endpoint -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "text"), [("detail=nonsense", "no such detail: 'nonsense'"), ("details=groups", "the only parameter is")]
)
def test_a_mistake_in_the_address_is_told(cluster: Cluster, query: str, text: str) -> None:
    with pytest.raises(HTTPError) as refused:
        urlopen(f"{cluster.metrics_url_of(1)}?{query}")
    assert refused.value.code == 400 and text in refused.value.read().decode()


def test_many_who_do_not_read_their_answer_harm_nobody(cluster: Cluster, ask: Callable[..., Told]) -> None:
    host, port = cluster.metrics_url_of(1).removeprefix("http://").removesuffix("/metrics").split(":")
    cluster.create_topic("beside")
    lazy = []
    try:
        for _ in range(8):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect((host, int(port)))
            client.sendall(f"GET /metrics?{EVERYTHING} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            lazy.append(client)
        assert write(cluster.bootstrap_servers, "beside", [b"x"] * 100) == []
        read(cluster.bootstrap_servers, "beside", 100)
        assert ask()("scrape_seconds") < 5
    finally:
        for client in lazy:
            client.close()


def test_scrapes_beside_much_traffic(cluster: Cluster, ask: Callable[..., Told]) -> None:
    cluster.create_topic("busy")
    over = threading.Event()
    scrapes: list[float] = []

    def scrape() -> None:
        while not over.is_set():
            scrapes.append(ask(EVERYTHING)("topic_records_in_total", topic="busy"))

    asking = threading.Thread(target=scrape)
    asking.start()
    try:
        assert write(cluster.bootstrap_servers, "busy", [bytes(100)] * 20_000) == []
    finally:
        over.set()
        asking.join()
    assert scrapes == sorted(scrapes), "a counter never goes back"
    assert ask("detail=topics")("topic_records_in_total", topic="busy") == 20_000


def test_details_may_be_there_always_and_no_listener_is_no_metrics(cluster: Cluster) -> None:
    with Cluster(settings={**METRICS, "metrics.detail": "topics"}) as other:
        other.create_topic("t")
        assert 'millrace_topic_leaders{topic="t"} 1' in Told(other.metrics_url_of(1)).text
    with Cluster() as silent, pytest.raises(RuntimeError, match=r"metrics\.listener"):
        silent.metrics_url_of(1)


async def test_a_port_that_is_taken_ends_the_start(cluster: Cluster, tmp_path: Path) -> None:
    port = cluster.metrics_url_of(1).rpartition(":")[2].removesuffix("/metrics")
    values = {"node.id": "1", "listeners": "PLAINTEXT://127.0.0.1:0", "log.dirs": str(tmp_path)}
    broker = Broker(BrokerConfig({**values, "metrics.listener": f"127.0.0.1:{port}"}))
    with pytest.raises(ConfigError, match="already in use"):
        await broker.start()


@pytest.mark.parametrize("value", ["9090", "host:", "host:70000", "::1:9090", "a b:1", "http://h:1", "[::1]"])
def test_an_address_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.listener"):
        BrokerConfig({"metrics.listener": value})


@pytest.mark.parametrize(
    ("value", "address"),
    [("", None), ("[::1]:9090", ("::1", 9090)), ("localhost:0", ("localhost", 0)), (":9090", ("", 9090))],
)
def test_addresses(value: str, address: tuple[str, int] | None) -> None:
    assert BrokerConfig({"metrics.listener": value}).metrics_address == address


# --- several brokers --------------------------------------------------------------------------------------------------


def health(url: str, page: str) -> tuple[int, str]:
    try:
        with urlopen(url.replace("/metrics", page), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_three_brokers() -> None:
    settings = {**METRICS, "replica.lag.time.max.ms": "1000", "offsets.topic.num.partitions": "3"}
    with Cluster(brokers=3, settings=settings) as cluster:
        urls = {broker_id: cluster.metrics_url_of(broker_id) for broker_id in (1, 2, 3)}

        def every(name: str, **labels: str) -> list[float]:
            return [Told(url)(name, **labels) for url in urls.values()]

        cluster.create_topic("replicated", partitions=6)
        cluster.create_topic("alone", partitions=6, replication_factor=1)
        write(cluster.bootstrap_servers, "replicated", [b"x"] * 50, acks="all")
        assert sum(every("active_controller")) == 1
        assert every("brokers", state="live") == [3, 3, 3] and every("cluster_topics") == [2, 2, 2]
        assert sum(every("leaders")) == 12 and sum(every("partitions")) == 24
        assert sum(every("records_in_total")) == 50
        wait_for(lambda: sum(every("replication_bytes_in_total")) == 2 * sum(every("bytes_in_total")))
        assert sum(every("replication_bytes_out_total")) == sum(every("replication_bytes_in_total"))

        # A group whose partitions are led by others, of which the coordinator has no replica.
        producer = Producer({**QUIET, "bootstrap.servers": cluster.bootstrap_servers})
        for partition in range(6):
            for _ in range(10):
                producer.produce("alone", b"x", partition=partition)
        assert producer.flush(30) == 0
        login = {**QUIET, "bootstrap.servers": cluster.bootstrap_servers, "group.id": "far"}
        with closing(Consumer(login)) as consumer:
            places = [TopicPartition("alone", partition, 3) for partition in range(6)]
            consumer.commit(offsets=places, asynchronous=False)
        found = [Told(url, "detail=groups") for url in urls.values()]
        assert sum(told("group_lag_records", group="far") for told in found) == 6 * 7
        assert sum(told.sum("group_lag_unknown_partitions") for told in found) == 0

        # A follower that stops following leaves the ISR, and is not ready until it is back.
        wait_for(lambda: [health(url, "/readyz")[0] for url in urls.values()] == [200, 200, 200])
        partition, followed = _a_follower(cluster, 2)
        assigned = followed.assign
        followed.assign = lambda each: None if each is partition else assigned(each)
        cluster._loop.call_soon_threadsafe(followed.forget, partition)  # type: ignore[union-attr]
        write_to = {**QUIET, "bootstrap.servers": cluster.bootstrap_servers, "acks": "all"}
        producer = Producer(write_to)
        producer.produce("replicated", b"y", partition=partition.index)
        assert producer.flush(30) == 0
        wait_for(lambda: health(urls[2], "/readyz")[0] == 503)
        assert health(urls[2], "/readyz")[1] == (
            f"the broker is not in the ISR of 1 of its partitions: replicated-{partition.index}\n"
        )
        assert health(urls[2], "/livez") == (200, "ok\n")
        wait_for(lambda: sum(every("under_replicated_partitions")) == 1)
        assert sum(every("isr_shrinks_total")) == 1
        followed.assign = assigned
        cluster._loop.call_soon_threadsafe(assigned, partition)  # type: ignore[union-attr]
        wait_for(lambda: health(urls[2], "/readyz") == (200, "ready\n"))
        wait_for(lambda: sum(every("under_replicated_partitions")) == 0)
        assert sum(every("isr_expands_total")) == 1

        # One that goes: its leaderships are elected anew, cleanly.
        del urls[3]
        cluster.stop_broker(3)
        wait_for(lambda: every("brokers", state="live") == [2, 2])
        assert sum(every("leader_elections_total", kind="clean")) >= 2
        assert sum(every("leader_elections_total", kind="unclean")) == 0
        assert max(every("offline_partitions")) == 2, "of the topic without a second replica"
        assert sum(every("under_replicated_partitions")) >= 6


def _a_follower(cluster: Cluster, broker_id: int) -> tuple[Any, Any]:
    """A replica of the topic that a broker follows, and who fetches for it."""
    services = cluster._brokers[broker_id].services
    assert services is not None
    partition = next(each for each in services.replicas if each.topic == "replicated" and not each.is_leader)
    return partition, services.replicas.followed


def test_a_cluster_that_asks_for_logins_tells_how_they_went_and_no_secret() -> None:
    secret = "v3ry-s3cret"
    settings = {
        **METRICS,
        "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
            "org.apache.kafka.common.security.plain.PlainLoginModule required "
            f'username="admin" password="{secret}" user_admin="{secret}" user_app="{secret}-app";'
        ),
        "connection.failed.authentication.delay.ms": "1",
    }
    with Cluster(settings=settings) as cluster:

        def log_in(password: str) -> None:
            """Until the broker has answered."""
            client = AdminClient(
                {
                    "bootstrap.servers": cluster.bootstrap_servers,
                    "security.protocol": "SASL_PLAINTEXT",
                    "sasl.mechanism": "PLAIN",
                    "sasl.username": "app",
                    "sasl.password": password,
                    "log_level": 0,
                }
            )
            client.list_topics(timeout=2)

        log_in(f"{secret}-app")
        with pytest.raises(KafkaException):
            log_in("wr0ng-passw0rd")
        told = Told(cluster.metrics_url_of(1), EVERYTHING)
        where = {"listener": "SASL_PLAINTEXT", "mechanism": "PLAIN"}
        assert told("authentications_total", **where, outcome="success") >= 1
        assert told("authentications_total", **where, outcome="failure") >= 1
        assert secret not in told.text and "wr0ng" not in told.text
        assert json.dumps("app") not in told.text, "nor who has logged in"
