"""`millrace up --secure` as processes: who gets in with the files it writes, who does not, and that it stays so."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ConfigResource,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from clients.test_command_line import CommandLine
from millrace.client.cluster import ClusterClient
from millrace.client.settings import ClientSettings
from millrace.config.files import parse_properties
from millrace.errors import ApiError, ConfigError, ErrorCode, MillraceError
from support.certificates import Pki
from support.up import ENVIRONMENT, Up

TIMEOUT_S = 30
SOON_S = 10
"""Within which a command that is not let in has to say so."""


class Folder:
    """A secured folder, its `millrace up`, and the files for clients."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.security = directory / "data" / "security"
        self.up: Up | None = None

    def start(self, *options: str) -> str:
        """The line after `ready` and where the metrics are."""
        self.up = Up(self.directory, *options)
        self.up.ready()
        assert self.up.process.stdout is not None
        while (line := self.up.process.stdout.readline()).startswith("metrics="):
            pass
        return line

    def stop(self) -> None:
        assert self.up is not None
        self.up.stop()
        self.up.close()
        self.up = None

    def librdkafka(self, user: str = "app", **more: Any) -> dict[str, Any]:
        name = {"app": "librdkafka.json", "admin": "admin.json"}[user]
        found: dict[str, Any] = json.loads((self.security / name).read_text())
        return {**found, **more}

    def properties(self, user: str = "app") -> dict[str, str]:
        name = {"app": "client.properties", "admin": "admin.properties"}[user]
        return dict(parse_properties((self.security / name).read_text()))

    def close(self) -> None:
        if self.up is not None:
            self.up.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    folder.close()


@pytest.fixture(scope="module", params=[1, 3], ids=["single", "cluster"])
def secured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """One that is shared; tests leave its users and their rights as they are."""
    folder = Folder(tmp_path_factory.mktemp("secured"))
    try:
        told = folder.start("--secure", "--brokers", str(request.param))
        assert told == f"security={folder.security}\n"
        yield folder
    finally:
        folder.close()


def produce(settings: dict[str, Any], topic: str, *values: bytes) -> None:
    producer = Producer({**settings, "log_level": 0, "message.timeout.ms": TIMEOUT_S * 1000})
    failures: list[KafkaError] = []
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: failures.append(error) if error else None)
    assert producer.flush(TIMEOUT_S) == 0
    assert failures == []


def consume(settings: dict[str, Any], topic: str, count: int) -> list[bytes]:
    consumer = Consumer({**settings, "group.id": f"of-{topic}", "auto.offset.reset": "earliest", "log_level": 0})
    consumer.subscribe([topic])
    found: list[bytes] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < count and time.monotonic() < deadline:
        message = consumer.poll(1)
        if message is not None and message.error() is None:
            found.append(message.value() or b"")
    consumer.close()
    return found


def code_of(future: Any) -> int:
    with pytest.raises(KafkaException) as caught:
        future.result(TIMEOUT_S)
    return int(caught.value.args[0].code())


# --- who gets in ------------------------------------------------------------------------------------------------------


def test_the_application_writes_and_reads_with_the_file_as_it_is(secured: Folder, fresh: Callable[[str], str]) -> None:
    topic = fresh("orders")
    produce(secured.librdkafka(), topic, b"one", b"two")
    assert consume(secured.librdkafka(), topic, 2) == [b"one", b"two"]
    for user in ("app", "admin"):  # the project's own client, and so Spark's source and sink
        with ClusterClient(ClientSettings.from_properties(secured.properties(user))) as client:
            assert topic in client.topics()
    spark = json.loads((secured.security / "spark.json").read_text())
    assert {name.removeprefix("kafka."): value for name, value in spark.items()} == secured.properties()


def test_the_application_changes_nothing_of_the_cluster(secured: Folder, fresh: Callable[[str], str]) -> None:
    user = fresh("mallory")
    for who, is_refused in (("app", True), ("admin", False)):
        admin = AdminClient(secured.librdkafka(who, log_level=0))
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        rule = AclBinding(
            ResourceType.TOPIC, user, ResourcePatternType.LITERAL, f"User:{user}", "*", AclOperation.READ,
            AclPermissionType.ALLOW,
        )  # fmt: skip
        broker = ConfigResource(ConfigResource.Type.BROKER, "1")
        for future in (
            admin.alter_user_scram_credentials([UserScramCredentialUpsertion(user, info, b"secret")])[user],
            admin.create_acls([rule])[rule],
            admin.describe_configs([broker])[broker],
        ):
            if is_refused:
                assert code_of(future) == KafkaError.CLUSTER_AUTHORIZATION_FAILED
            else:
                future.result(TIMEOUT_S)


def test_nobody_else_gets_anything(secured: Folder, tmp_path: Path) -> None:
    right = secured.properties()
    other = Pki(tmp_path)
    wrong_password = secured.librdkafka() | {"sasl.password": "guessed", "ssl.truststore.location": ""}
    cases: list[tuple[dict[str, Any], type[MillraceError], str]] = [
        ({"bootstrap.servers": right["bootstrap.servers"]}, ApiError, "closed the connection"),
        ({**right, "security.protocol": "SSL"}, ApiError, "closed the connection"),
        ({**right, "ssl.truststore.location": str(other.trusted)}, ConfigError, "is not trusted"),
        (wrong_password, ApiError, ErrorCode.SASL_AUTHENTICATION_FAILED.name),
    ]
    for properties, kind, text in cases:
        settings = ClientSettings.from_properties({**properties, "default.api.timeout.ms": "1"})
        with ClusterClient(settings) as client, pytest.raises(kind, match=text):
            client.broker_ids()


# --- commands ---------------------------------------------------------------------------------------------------------

COMMANDS = (
    "topics list", "groups list", "queues list", "transactions list", "users list", "acls list", "quotas list",
    "tokens list", "cluster health", "cluster describe", "configs get --broker 1", "produce letters",
    "consume letters --from-beginning", "perf produce --records 10",
)  # fmt: skip


@pytest.fixture
def run(
    secured: Folder, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CommandLine:
    monkeypatch.setenv("MILLRACE_CONFIG", str(tmp_path / "profiles.toml"))
    line = CommandLine(secured.librdkafka()["bootstrap.servers"], capsysbinary, tmp_path / "stdin")
    for name, file in (("admin", "admin.json"), ("app", "librdkafka.json")):
        line.text("profile", "set", name, "--from", secured.security / file)
    return line


def test_commands_of_the_administrator_and_of_the_application(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_PROFILE", "admin")
    run.text("topics", "create", "letters")
    run.text("tokens", "create")
    for command in COMMANDS:
        run.raw(*command.split(), stdin=b"hello\n")
    monkeypatch.setenv("MILLRACE_PROFILE", "app")
    assert "hello" in run.text("consume", "letters", "--from-beginning")
    for command in ("users list", "acls list", "quotas list", "cluster health", "configs get --broker 1"):
        assert "CLUSTER_AUTHORIZATION_FAILED" in run.error(*command.split())
    run.text("topics", "delete", "letters", "--yes")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ([], "wants TLS and a login, not security.protocol=PLAINTEXT: name a --profile"),
        (["security.protocol=SSL"], "wants TLS and a login, not security.protocol=SSL: name a --profile"),
        (["security.protocol=SASL_PLAINTEXT", "sasl.mechanism=SCRAM-SHA-512", "sasl.username=app", "sasl.password=x"],
         "wants TLS and a login, not security.protocol=SASL_PLAINTEXT: name a --profile"),
    ],
    ids=["plaintext", "tls", "login"],
)  # fmt: skip
def test_commands_that_are_not_let_in_say_at_once_what_is_asked_for(
    run: CommandLine, secured: Folder, settings: list[str], text: str
) -> None:
    trusted = f"ssl.ca.location={secured.security / 'ca.pem'}"
    words = [word for setting in (trusted, *settings) for word in ("-X", setting)]
    for command in COMMANDS:
        began = time.monotonic()
        assert text in run.error(*command.split(), *words, stdin=b"hello\n"), command
        assert time.monotonic() - began < SOON_S, command


def test_commands_with_a_wrong_password_or_authority(
    run: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_PROFILE", "app")
    other = Pki(tmp_path)
    for command in COMMANDS:
        assert "SASL_AUTHENTICATION_FAILED" in run.error(*command.split(), "-X", "sasl.password=guessed")
        refused = run.error(*command.split(), "-X", f"ssl.ca.location={other.trusted}")
        assert "is not trusted" in refused and "ssl.ca.location" in refused


def test_a_pipeline_that_is_not_let_in_says_so_before_spark_starts(run: CommandLine) -> None:
    assert "wants TLS and a login" in run.error("pipeline", "run", "metrics", "--once")


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_passwords_are_in_no_log_and_on_no_command_line(secured: Folder) -> None:
    assert secured.up is not None
    passwords = json.loads((secured.security / "users.json").read_text()).values()
    own = psutil.Process(secured.up.process.pid)
    shown = [" ".join(process.cmdline()) for process in (own, *own.children(recursive=True))]
    logs = [secured.up.errors, *(path for path in secured.up.data.rglob("log") if path.is_file())]
    shown += [path.read_text(errors="replace") for path in logs]
    assert not [text for text in shown for password in passwords if password in text]
    assert "client.properties" in secured.up.errors.read_text(), "but where they are is said"


def test_files_are_for_their_owner(secured: Folder) -> None:
    assert stat.S_IMODE(secured.security.stat().st_mode) == 0o700
    private = {path for path in secured.security.iterdir() if path.name not in ("ca.pem", "prepared")}
    private |= set((secured.directory / "data").glob("broker-*/server.properties"))
    assert len(private) >= 9
    assert {path.name for path in private if stat.S_IMODE(path.stat().st_mode) != 0o600} == set()


# --- it stays so ------------------------------------------------------------------------------------------------------


def test_it_stays_secured_and_grows(folder: Folder) -> None:
    """Plain, then secured, then started without asking for it, then with more brokers."""
    up = Up(folder.directory)
    (port,) = up.ready()
    produce({"bootstrap.servers": f"127.0.0.1:{port}"}, "orders", b"plain")
    up.stop()
    up.close()

    folder.start("--secure")
    produce(folder.librdkafka(), "orders", b"secured")
    authority, users = ((folder.security / name).read_bytes() for name in ("ca.pem", "users.json"))
    admin = AdminClient(folder.librdkafka("admin"))
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
    admin.alter_user_scram_credentials([UserScramCredentialUpsertion("app", info, b"another")])["app"].result(TIMEOUT_S)
    folder.stop()

    assert folder.start() == f"security={folder.security}\n"
    assert "app cannot log in as the files in" in folder.up.errors.read_text()  # type: ignore[union-attr]
    changed = {"sasl.password": "another"}
    assert consume(folder.librdkafka() | changed, "orders", 2) == [b"plain", b"secured"]
    folder.stop()

    folder.start("--brokers", "3")
    assert ((folder.security / "ca.pem").read_bytes(), (folder.security / "users.json").read_bytes()) == (
        authority,
        users,
    )
    assert len(folder.librdkafka()["bootstrap.servers"].split(",")) == 3
    settings = folder.librdkafka() | changed
    admin = AdminClient(settings)  # kept, for it ends what it was asked when it goes
    admin.create_topics([NewTopic("replicated", 1, 3)])["replicated"].result(TIMEOUT_S)
    produce(settings, "replicated", b"by all")
    assert consume(settings, "replicated", 1) == [b"by all"]
    produce(settings, "orders", b"cluster")
    assert consume(settings, "orders", 1) == [b"cluster"], "the group goes on where it was"
    with (
        ClusterClient(ClientSettings.from_properties(folder.properties())) as client,
        pytest.raises(ApiError, match="SASL_AUTHENTICATION_FAILED"),
    ):
        client.broker_ids()
    folder.stop()


def test_in_the_background(tmp_path: Path) -> None:
    data = tmp_path / "data"

    def millrace(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "millrace", *words, "--data", str(data)]
        return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=100)

    started = millrace("up", "--detach", "--secure", "--port", "0")
    try:
        ready, metrics, security = started.stdout.splitlines()
        assert metrics.startswith("metrics=http://127.0.0.1:")
        assert ready.startswith("ready bootstrap=127.0.0.1:")
        assert security == f"security={data / 'security'}"
        assert f"the settings of clients are in {data / 'security'}" in started.stderr
        shown = started.stdout + started.stderr + (data / "log").read_text()
        passwords = json.loads((data / "security" / "users.json").read_text()).values()
        assert not any(password in shown for password in passwords)
        assert f"clients need TLS and a login: {data / 'security'}" in millrace("status").stdout
        assert json.loads(millrace("status", "--json").stdout)["security"] == str(data / "security")
        settings = json.loads((data / "security" / "librdkafka.json").read_text())
        produce(settings, "orders", b"hello")
    finally:
        assert "stopped 1 broker" in millrace("down").stdout
