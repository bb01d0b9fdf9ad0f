"""Apache Kafka's jars and its Java tools, for tests and benchmarks that need the original.

The jars are named in tests/jvm/pom.xml, fetched once by Maven and kept in `.cache/kafka` of the checkout. Where there
is no Java, no Maven or no way to fetch, `KafkaUnavailable` says which of them, so that a caller can skip with a reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import cache

from support.maven import ROOT, JarsUnavailable, jars_of

KAFKA_VERSION = "4.3.0"
POM = ROOT / "tests" / "jvm" / "pom.xml"

# A tool lives for a second or two: the cheapest compiler and collector start it fastest.
TOOL_FLAGS = ("-Xshare:auto", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m")
# What Kafka's own start script passes to a broker; its clients run with the same where their speed is measured.
SERVER_FLAGS = (
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-XX:MaxInlineLevel=15",
    "-Djava.awt.headless=true",
)

GET_OFFSETS = "org.apache.kafka.tools.GetOffsetShell"
CONSOLE_CONSUMER = "org.apache.kafka.tools.consumer.ConsoleConsumer"
CONSOLE_PRODUCER = "org.apache.kafka.tools.ConsoleProducer"
CONSUMER_GROUPS = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
CONFIGS = "kafka.admin.ConfigCommand"
TOPICS = "org.apache.kafka.tools.TopicCommand"
DELETE_RECORDS = "org.apache.kafka.tools.DeleteRecordsCommand"
DUMP_LOG = "org.apache.kafka.tools.DumpLogSegments"
PRODUCER_PERFORMANCE = "org.apache.kafka.tools.ProducerPerformance"
CONSUMER_PERFORMANCE = "org.apache.kafka.tools.ConsumerPerformance"
VERIFIABLE_PRODUCER = "org.apache.kafka.tools.VerifiableProducer"
VERIFIABLE_CONSUMER = "org.apache.kafka.tools.VerifiableConsumer"
LOG_DIRS = "org.apache.kafka.tools.LogDirsCommand"
API_VERSIONS = "org.apache.kafka.tools.BrokerApiVersionsCommand"
GROUPS = "org.apache.kafka.tools.GroupsCommand"
SHARE_GROUPS = "org.apache.kafka.tools.consumer.group.ShareGroupCommand"
CONSOLE_SHARE_CONSUMER = "org.apache.kafka.tools.consumer.ConsoleShareConsumer"
VERIFIABLE_SHARE_CONSUMER = "org.apache.kafka.tools.VerifiableShareConsumer"
SHARE_CONSUMER_PERFORMANCE = "org.apache.kafka.tools.ShareConsumerPerformance"
ACLS = "org.apache.kafka.tools.AclCommand"
DELEGATION_TOKENS = "org.apache.kafka.tools.DelegationTokenCommand"
CLIENT_METRICS = "org.apache.kafka.tools.ClientMetricsCommand"
TRANSACTIONS = "org.apache.kafka.tools.TransactionsCommand"
TRANSACTIONAL_COPIER = "org.apache.kafka.tools.TransactionalMessageCopier"


class KafkaUnavailable(Exception):
    """Apache Kafka cannot be run on this machine; the text says why."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a tool left behind."""

    status: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.stdout.splitlines() if line.strip()]


@dataclass(frozen=True, slots=True)
class KafkaJars:
    """A classpath with Kafka on it, and the command lines that use it."""

    java: str
    classpath: str
    version: str = KAFKA_VERSION
    properties: tuple[str, ...] = field(default=("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",))

    def command(self, main: str, *arguments: str, flags: tuple[str, ...] = TOOL_FLAGS) -> list[str]:
        """The argv that runs a main class."""
        return [self.java, *flags, *self.properties, "-cp", self.classpath, main, *arguments]

    def run(
        self, main: str, *arguments: str, stdin: str = "", timeout_s: float = 60, flags: tuple[str, ...] = TOOL_FLAGS
    ) -> Finished:
        """Run a main class to its end; a hanging tool raises `subprocess.TimeoutExpired`."""
        done = subprocess.run(
            self.command(main, *arguments, flags=flags),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr)


@cache
def kafka_jars() -> KafkaJars:
    """The jars, fetched on first use. Raises KafkaUnavailable."""
    java = shutil.which("java")
    if java is None:
        raise KafkaUnavailable("no java on PATH")
    try:
        jars = jars_of(POM, "kafka")
    except JarsUnavailable as unavailable:
        raise KafkaUnavailable(str(unavailable)) from None
    return KafkaJars(java, os.pathsep.join(map(str, jars)))
