"""`format("millrace")` on Apache Kafka: the tests of tests/spark once more, and every way to secure a connection.

The source and the sink are clients of Kafka's protocol and nothing else, so what they do on millrace they must do on
the original. The suites run in a pytest of their own, pointed at Kafka by MILLRACE_SPARK_TEST_BOOTSTRAP.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from confluent_kafka.admin import (
    AdminClient,
    NewTopic,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from pyspark.sql import SparkSession

from support.kafka_jars import KafkaJars
from support.maven import ROOT
from support.servers import HOST, KafkaServer
from support.spark_sessions import local_session

SUITES = (
    "test_source_batch.py",
    "test_source_stream.py",
    "test_sink.py",
    "test_sink_rows.py",
    "test_sink_exactly_once.py",
)
SUITE_TIMEOUT_S = 900  # some minutes where nothing else runs
RECORDS = 500
USER, PASSWORD = "alice", 'a "quoted" \\ secret'
LISTENERS = ("SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


def login_module(mechanism: str, username: str = USER, password: str = PASSWORD) -> str:
    """A JAAS line as Kafka's own clients have it."""
    package = "plain.Plain" if mechanism == "PLAIN" else "scram.Scram"
    quoted = password.replace("\\", "\\\\").replace('"', '\\"')
    module = f"org.apache.kafka.common.security.{package}LoginModule"
    return f'{module} required username="{username}" password="{quoted}";'


class Certificates:
    """An authority, a certificate of the server and one of a client, as PEM files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority = folder / "authority.pem"
        self._make("authority", "-x509", "-subj", "/CN=authority", "-addext", "basicConstraints=critical,CA:TRUE")
        self.server = self._signed("server", f"subjectAltName=IP:{HOST}")
        self.client = self._signed("client", "subjectAltName=DNS:client")
        self._make("stranger", "-x509", "-subj", "/CN=stranger")
        self.stranger = folder / "stranger.pem"

    def _signed(self, name: str, alternative: str) -> Path:
        """One PEM file with the key and the certificate."""
        signer = ("-CA", str(self.authority), "-CAkey", str(self._folder / "authority.key"))
        self._make(name, "-x509", "-subj", f"/CN={name}", "-addext", alternative, *signer)
        together = self._folder / f"{name}-both.pem"
        key, certificate = (self._folder / f"{name}{suffix}" for suffix in (".key", ".pem"))
        together.write_text(key.read_text() + certificate.read_text())
        return together

    def _make(self, name: str, *arguments: str) -> None:
        files = ("-keyout", str(self._folder / f"{name}.key"), "-out", str(self._folder / f"{name}.pem"))
        command = ["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-sha256", *files, *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=60)


class SecureKafka(KafkaServer):
    """Apache Kafka with a listener for every security protocol; PLAINTEXT stays for the tests' own clients."""

    def __init__(self, jars: KafkaJars, certificates: Certificates) -> None:
        forever = {"log.retention.ms": "-1"}  # the suites send records of years ago
        super().__init__(jars, forever, heap="512m", protocols=LISTENERS)
        self.certificates = certificates

    def _prepare(self) -> None:
        fresh = not self.port
        super()._prepare()
        if not fresh:
            return
        written = dict(line.split("=", 1) for line in self._properties.read_text().splitlines())
        secured = {
            "sasl.enabled.mechanisms": ",".join(MECHANISMS),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.certificates.server),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.certificates.authority),
            "listener.name.ssl.ssl.client.auth": "required",
        }
        quoted = PASSWORD.replace("\\", "\\\\").replace('"', '\\"')
        for listener in ("sasl_plaintext", "sasl_ssl"):
            known = f'{login_module("PLAIN").rstrip(";")} user_{USER}="{quoted}";'
            secured[f"listener.name.{listener}.plain.sasl.jaas.config"] = known
            for mechanism in ("scram-sha-256", "scram-sha-512"):
                module = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
                secured[f"listener.name.{listener}.{mechanism}.sasl.jaas.config"] = module
        lines = [f"{name}={_escaped(value)}" for name, value in {**written, **secured}.items()]
        self._properties.write_text("\n".join(lines) + "\n")


def _escaped(value: str) -> str:
    """A value of a Java properties file: a backslash stands for itself only when doubled."""
    return value.replace("\\", "\\\\")


@pytest.fixture(scope="module")
def kafka(jars: KafkaJars, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on PATH")
    with SecureKafka(jars, Certificates(tmp_path_factory.mktemp("certificates"))) as running:
        admin = AdminClient({"bootstrap.servers": running.bootstrap})
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            credential = ScramCredentialInfo(mechanism, 4096)
            change = UserScramCredentialUpsertion(USER, credential, PASSWORD.encode())
            admin.alter_user_scram_credentials([change])[USER].result(timeout=30)
        yield running


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with local_session() as session:
        yield session


# the suites come first: they have a Spark session of their own, and no other one is running yet


@pytest.mark.timeout(SUITE_TIMEOUT_S + 60)
def test_the_suites_of_the_source_and_the_sink(kafka: SecureKafka, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    files = [str(ROOT / "tests" / "spark" / name) for name in SUITES]
    options = ["-q", "-p", "no:cacheprovider", f"--junit-xml={report}", f"--basetemp={tmp_path / 'suites'}"]
    environment = {**os.environ, "MILLRACE_SPARK_TEST_BOOTSTRAP": kafka.bootstrap}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SUITE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    passed = passed_by_module(report)
    assert all(passed.get(Path(name).stem) for name in SUITES), f"{passed}\n{done.stdout[-2000:]}"


def passed_by_module(report: Path) -> dict[str, int]:
    """How many tests of each module passed; a suite that skips everything proves nothing."""
    passed: dict[str, int] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if not [*case.iterfind("skipped"), *case.iterfind("failure"), *case.iterfind("error")]:
            module = case.attrib["classname"].rsplit(".", 1)[-1]
            passed[module] = passed.get(module, 0) + 1
    return passed


# every way to secure a connection


def settings(kafka: SecureKafka, protocol: str, mechanism: str = "") -> dict[str, str]:
    """The options of a source or sink, under the names that Kafka's clients know."""
    certificates = kafka.certificates
    found = {"bootstrap.servers": kafka.bootstrap_of(protocol), "security.protocol": protocol}
    if protocol.endswith("SSL"):
        found |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(certificates.authority)}
    if protocol == "SSL":
        found |= {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(certificates.client)}
    if mechanism:
        found |= {"sasl.mechanism": mechanism, "sasl.jaas.config": login_module(mechanism)}
    return {f"kafka.{name}": value for name, value in found.items()}


def there_and_back(spark: SparkSession, options: dict[str, str], topic: str) -> list[str]:
    numbers = spark.range(0, RECORDS, numPartitions=2).selectExpr("CAST(id AS STRING) AS value")
    numbers.write.format("millrace").mode("append").options(**options).option("topic", topic).save()
    frame = spark.read.format("millrace").options(**options).option("subscribe", topic).load()
    return sorted((row.value for row in frame.selectExpr("CAST(value AS STRING) AS value").collect()), key=int)


@pytest.mark.parametrize(
    ("protocol", "mechanism"),
    [
        ("SSL", ""),
        ("SASL_PLAINTEXT", "PLAIN"),
        ("SASL_PLAINTEXT", "SCRAM-SHA-256"),
        ("SASL_SSL", "PLAIN"),
        ("SASL_SSL", "SCRAM-SHA-512"),
    ],
)
def test_a_secured_listener(spark: SparkSession, kafka: SecureKafka, topic: str, protocol: str, mechanism: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([NewTopic(topic, 2, 1)])[topic].result(timeout=30)
    values = there_and_back(spark, settings(kafka, protocol, mechanism), topic)
    assert values == [str(number) for number in range(RECORDS)]


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_a_wrong_password_is_named(spark: SparkSession, kafka: SecureKafka, mechanism: str) -> None:
    options = settings(kafka, "SASL_PLAINTEXT", mechanism)
    options["kafka.sasl.jaas.config"] = login_module(mechanism, password="wrong")
    with pytest.raises(Exception, match=r"(?i)authentication failed"):
        spark.read.format("millrace").options(**options).option("subscribe", "any").load().collect()


def test_an_unknown_authority_is_named(spark: SparkSession, kafka: SecureKafka) -> None:
    options = settings(kafka, "SASL_SSL", "PLAIN")
    options["kafka.ssl.truststore.location"] = str(kafka.certificates.stranger)
    with pytest.raises(Exception, match=r"certificate of \S+ is not trusted"):
        spark.read.format("millrace").options(**options).option("subscribe", "any").load().collect()
