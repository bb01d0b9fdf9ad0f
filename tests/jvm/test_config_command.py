"""kafka-configs: topic overrides and broker settings."""

from __future__ import annotations

import html
import re

from millrace.config import BROKER_SETTINGS, format_value
from support.kafka_jars import API_VERSIONS, CONFIGS, KafkaJars
from support.kafka_tools import KafkaTools


def of_topic(topic: str, *rest: str) -> tuple[str, ...]:
    return ("--entity-type", "topics", "--entity-name", topic, *rest)


def test_topic_overrides_come_and_go(tools: KafkaTools, topic: str) -> None:
    tools.create_topic(topic)
    tools.run(
        CONFIGS, "--alter", *of_topic(topic, "--add-config", "retention.ms=1000000,cleanup.policy=[compact,delete]")
    )
    shown = tools.run(CONFIGS, "--describe", *of_topic(topic)).stdout
    assert "retention.ms=1000000 sensitive=false synonyms={DYNAMIC_TOPIC_CONFIG:retention.ms=1000000" in shown
    assert "cleanup.policy=compact,delete" in shown
    tools.run(CONFIGS, "--alter", *of_topic(topic, "--delete-config", "retention.ms"))
    shown = tools.run(CONFIGS, "--describe", *of_topic(topic)).stdout
    assert "retention.ms" not in shown
    assert "cleanup.policy=compact,delete" in shown


def test_defaults_are_kafkas(tools: KafkaTools, topic: str) -> None:
    tools.create_topic(topic)
    shown = tools.run(CONFIGS, "--describe", "--all", *of_topic(topic)).stdout
    for default in (
        "cleanup.policy=delete",
        "compression.type=producer",
        "index.interval.bytes=4096",
        "max.message.bytes=1048588",
        "message.timestamp.type=CreateTime",
        "min.insync.replicas=1",
        "retention.bytes=-1",
        "retention.ms=604800000",
        "segment.bytes=1073741824",
        "segment.ms=604800000",
    ):
        assert f"  {default} sensitive=false" in shown


def test_bad_values_are_refused(tools: KafkaTools, topic: str) -> None:
    tools.create_topic(topic)
    for change in ("retention.ms=soon", "min.insync.replicas=0", "no.such.setting=1"):
        refused = tools.attempt(CONFIGS, "--alter", *of_topic(topic, "--add-config", change))
        assert refused.status != 0, change
        assert "InvalidConfigurationException" in refused.stdout + refused.stderr, change


def test_broker_settings(tools: KafkaTools) -> None:
    broker = ("--entity-type", "brokers", "--entity-name", "1")
    everything = tools.run(CONFIGS, "--describe", "--all", *broker).stdout
    assert "num.partitions=1 sensitive=false" in everything
    tools.run(CONFIGS, "--alter", *broker, "--add-config", "log.retention.ms=123456789")
    assert "log.retention.ms=123456789" in tools.run(CONFIGS, "--describe", *broker).stdout
    tools.run(CONFIGS, "--alter", *broker, "--delete-config", "log.retention.ms")
    assert "log.retention.ms" not in tools.run(CONFIGS, "--describe", *broker).stdout
    fixed = tools.attempt(CONFIGS, "--alter", *broker, "--add-config", "log.dirs=/elsewhere")
    assert fixed.status != 0


def test_every_advertised_api_is_one_the_java_client_can_use(tools: KafkaTools) -> None:
    shown = tools.run(API_VERSIONS).stdout
    for api in ("Produce(0)", "Fetch(1)", "ListOffsets(2)", "Metadata(3)", "ApiVersions(18)", "CreateTopics(19)"):
        line = next(line for line in shown.splitlines() if f"\t{api}: " in line)
        assert "usable" in line, line


OWN_DEFAULTS = {
    "broker.id": "Kafka takes -1 for none",
    "broker.session.timeout.ms": "ZooKeeper's session is what ends here, and its setting has the default",
    "listener.security.protocol.map": "the same pairs in another order",
    "log.cleaner.io.max.bytes.per.second": "Java writes the largest double otherwise",
    "log.dir": "data in /tmp is nobody's wish",
    "socket.listen.backlog.size": "a rush of clients after a restart fits in",
    "socket.receive.buffer.bytes": "the system adapts its buffers, unless told",
    "socket.send.buffer.bytes": "the system adapts its buffers, unless told",
}
NEEDS_A_RESTART = {"listeners", "listener.security.protocol.map", "sasl.enabled.mechanisms"}


def test_every_broker_setting_of_kafka_is_known(jars: KafkaJars) -> None:
    documented = jars.run("kafka.server.KafkaConfig").stdout
    cells = "".join(rf".*?{title}:</th><td>(.*?)</td>" for title in ("Type", "Default", "Update Mode"))
    kafkas = re.findall(rf'<a id="brokerconfigs_([^"]+)"{cells}', documented, re.DOTALL)
    assert len(kafkas) > 300
    wrong = []
    for name, kind, default, update in kafkas:
        ours = BROKER_SETTINGS.get(name)
        if ours is None or ours.hidden:
            wrong.append((name, "is not known"))
            continue
        shown = default.partition(" (")[0].replace("null", "").strip('"')
        if name not in OWN_DEFAULTS and (format_value(ours.default) or "") != html.unescape(shown):
            wrong.append((name, f"{format_value(ours.default)} instead of {default}"))
        if ours.kind.name.lower() != kind or (ours.update.value != update and name not in NEEDS_A_RESTART):
            wrong.append((name, f"{ours.kind.name} {ours.update.value} instead of {kind} {update}"))
    assert wrong == []
