"""No secret leaves the place where it has to be: a broker with secrets everywhere, and everything that it shows.

The broker is a process with its log at `debug`. Good and bad logins, changes of settings and users, errors and commands
are made first (`story`); then each test looks in one place for every secret that was planted, plain and in base64.

Settings of kind password that are set over the wire lie in the metadata log as they are, as in Kafka: the broker has to
use them. They are shown nowhere.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from millrace.cli import root
from millrace.config import BrokerConfig
from millrace.errors import ErrorCode
from millrace.local.brokers import BrokerProcess, write_properties
from millrace.local.ports import free_ports
from millrace.security.scram import ScramMechanism
from millrace.wire.frame import decode_response
from millrace.wire.keys import ApiKey
from millrace.wire.messages import response_class
from millrace.wire.messages.cluster import MetadataRequest
from millrace.wire.messages.configs import DescribeConfigsRequest, IncrementalAlterConfigsRequest
from millrace.wire.messages.delegation_tokens import (
    CreateDelegationTokenRequest,
    ExpireDelegationTokenRequest,
    RenewDelegationTokenRequest,
)
from millrace.wire.messages.scram import AlterUserScramCredentialsRequest
from support import identity_provider as provider
from support.ocsf import problems
from support.raw import PeerClosed, RawClient, framed
from support.sasl import SaslClient, upsertion
from support.servers import HOST

BROKER, TOPIC = 4, 2
BROKEN_PEM = "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n"


@dataclass
class Planted:
    """Every secret that there is; each is made here, and is like nothing else."""

    all: list[str] = field(default_factory=list)
    in_metadata: set[str] = field(default_factory=set)
    """Which the broker has to keep as they are."""

    def new(self, *, in_metadata: bool = False) -> str:
        secret = f"Secret{secrets.token_hex(8)}"
        self.all.append(secret)
        if in_metadata:
            self.in_metadata.add(secret)
        return secret

    def found_in(self, shown: bytes | str, *, but: set[str] | frozenset[str] = frozenset()) -> list[str]:
        data = shown if isinstance(shown, bytes) else shown.encode()
        return [
            secret
            for secret in self.all
            if secret not in but and (secret.encode() in data or base64.b64encode(secret.encode())[:-4] in data)
        ]


class Story:
    """A broker to which all of it has happened."""

    def __init__(self, home: Path) -> None:
        self.planted = Planted()
        self.home = home
        self.data = home / "data"
        self.audit_path = home / "audit.log"
        self.port, self.sasl_port = free_ports(HOST, 2)
        self.settings = self._settings()
        write_properties(home / "server.properties", self.settings)
        self.broker = BrokerProcess(1, home / "server.properties", log_level="debug")
        self.answers: list[bytes] = []
        """Frames that the broker sent."""
        self.command_lines: list[str] = []

    def _settings(self) -> Mapping[str, str]:
        new = self.planted.new
        self.plain_password = new()
        keys = self.home / "keys.json"
        keys.write_bytes(provider.key_set(provider.key()))
        return {
            "node.id": "1",
            "listeners": f"PLAINTEXT://{HOST}:{self.port},SASL_PLAINTEXT://{HOST}:{self.sasl_port}",
            "log.dirs": str(self.data),
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
            "sasl.oauthbearer.jwks.endpoint.url": keys.as_uri(),
            "sasl.oauthbearer.allowed.urls": keys.as_uri(),
            "sasl.oauthbearer.expected.issuer": provider.ISSUER,
            "sasl.oauthbearer.expected.audience": provider.AUDIENCE,
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
                f'PlainLoginModule required username="me" password="{new()}" user_carol="{self.plain_password}";'
            ),
            "sasl.jaas.config": f'ScramLoginModule required username="broker" password="{new()}";',
            "ssl.key.password": new(),
            "ssl.keystore.password": new(),
            "ssl.truststore.password": new(),
            "ssl.keystore.key": BROKEN_PEM.format(new()),
            "delegation.token.secret.key": new(),
            "zookeeper.digest.password": new(),
            "audit.log.path": str(self.audit_path),
            "audit.log.topic.enable": "true",
            "audit.log.allowed": "all",
        }

    def run(self) -> None:
        self.broker.start()
        self._manage()
        self._log_in()
        self._use_tokens()
        for process in (psutil.Process(self.broker.pid), *psutil.Process(self.broker.pid).children(recursive=True)):
            self.command_lines += process.cmdline()

    def client(self) -> RawClient:
        return RawClient((HOST, self.port))

    def _manage(self) -> None:
        """Users, settings and errors, over the wire."""
        self.scram_password = self.planted.new()
        with self.client() as client:
            for mechanism in ScramMechanism:
                made = upsertion("alice", mechanism, self.scram_password)
                self.planted.all += [made.salted_password.hex(), base64.b64encode(made.salted_password).decode()]
                (result,) = client.call(AlterUserScramCredentialsRequest(upsertions=[made]), 0).results
                assert result.error_code == ErrorCode.NONE
            client.create_topic("orders")
            for kind, name, setting, value in self._changes():
                config = IncrementalAlterConfigsRequest.AlterableConfig(name=setting, value=value)
                resource = IncrementalAlterConfigsRequest.AlterConfigsResource(
                    resource_type=kind, resource_name=name, configs=[config]
                )
                self.ask(client, IncrementalAlterConfigsRequest(resources=[resource]), 1)
            for kind, name in ((BROKER, "1"), (BROKER, ""), (TOPIC, "orders")):
                wanted = DescribeConfigsRequest.DescribeConfigsResource(
                    resource_type=kind, resource_name=name, configuration_keys=None
                )
                self.ask(
                    client,
                    DescribeConfigsRequest(resources=[wanted], include_synonyms=True, include_documentation=True),
                    4,
                )
        for garbage in (self.planted.new().encode(), BROKEN_PEM.format(self.planted.new()).encode()):
            with self.client() as client:
                client.try_send(framed(ApiKey.METADATA, 1, garbage))
                client.expect_close()

    def _changes(self) -> Iterator[tuple[int, str, str, str]]:
        new = self.planted.new
        jaas = f'PlainLoginModule required user_dave="{new(in_metadata=True)}";'
        yield BROKER, "1", "listener.name.sasl_plaintext.plain.sasl.jaas.config", self._with_carol(jaas)
        yield BROKER, "1", "listener.name.tls.ssl.key.password", new(in_metadata=True)
        yield BROKER, "1", "listener.name.tls.ssl.keystore.key", BROKEN_PEM.format(new(in_metadata=True))
        yield BROKER, "1", "listener.name.sasl_plaintext.scram-sha-256.sasl.jaas.config", new(in_metadata=True)
        yield BROKER, "", "ssl.keystore.password", new(in_metadata=True)  # not for all brokers: refused
        yield BROKER, "1", "delegation.token.secret.key", new()  # cannot change
        yield BROKER, "1", new(), "the value where the name should be"
        yield TOPIC, "orders", "ssl.key.password", new()

    def _with_carol(self, jaas: str) -> str:
        """The other user stays."""
        self.planted.in_metadata.add(self.plain_password)
        return f'{jaas[:-1]} user_carol="{self.plain_password}";'

    def ask(self, client: RawClient, request: object, version: int) -> None:
        client.request(request, version)  # type: ignore[arg-type]
        self.answers.append(client.read_frame(5))

    def _log_in(self) -> None:
        new = self.planted.new
        for mechanism, user, password in (
            ("PLAIN", "carol", self.plain_password),
            ("PLAIN", "alice", self.scram_password),
            ("SCRAM-SHA-256", "alice", self.scram_password),
            ("SCRAM-SHA-512", "alice", self.scram_password),
        ):
            with SaslClient((HOST, self.sasl_port)) as client:
                assert client.log_in(mechanism, user, password).error_code == ErrorCode.NONE
                assert client.call(MetadataRequest(topics=[]), 12).brokers
        for mechanism in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
            for user in ("carol", "alice", "nobody"):
                with SaslClient((HOST, self.sasl_port)) as client:
                    failed = client.log_in(mechanism, user, new())
                    assert failed.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
                    self.answers.append(str(failed.error_message).encode())
        for message in (f"\0\0\0{new()}", f"{new()}", f"someone\0carol\0{self.plain_password}", f"n,,{new()}"):
            for mechanism in ("PLAIN", "SCRAM-SHA-256"):
                with SaslClient((HOST, self.sasl_port)) as client, contextlib.suppress(PeerClosed):
                    client.handshake(mechanism)
                    self.answers.append(str(client.authenticate(message.encode()).error_message).encode())
        with SaslClient((HOST, self.sasl_port)) as client, contextlib.suppress(PeerClosed):
            self.answers.append(repr(client.handshake(new())).encode())

    def _use_tokens(self) -> None:
        """Access tokens that count and that do not, and a delegation token from its making to its end."""
        for changed, code in (({}, ErrorCode.NONE), ({"aud": "others"}, ErrorCode.SASL_AUTHENTICATION_FAILED)):
            token = provider.token(provider.claims(**changed))
            self.planted.all.append(token.rpartition(".")[2])  # the signature: the rest is what everybody may know
            with SaslClient((HOST, self.sasl_port)) as client:
                client.handshake("OAUTHBEARER")
                answer = client.authenticate(provider.first_message(token))
                if code:
                    answer = client.authenticate(b"\x01")
                assert answer.error_code == code
                self.answers.append(str(answer.error_message).encode())
        with SaslClient((HOST, self.sasl_port)) as client:
            client.log_in("SCRAM-SHA-256", "alice", self.scram_password)
            made = client.call(CreateDelegationTokenRequest(max_lifetime_ms=-1), 3)
            assert made.error_code == ErrorCode.NONE
            password = base64.b64encode(made.hmac).decode()
            self.planted.all += [password, made.hmac.hex()]
            with SaslClient((HOST, self.sasl_port)) as other:
                answer = other.log_in("SCRAM-SHA-512", made.token_id, password, by_token=True)
                assert answer.error_code == ErrorCode.NONE
            assert client.call(RenewDelegationTokenRequest(hmac=made.hmac, renew_period_ms=10_000), 2).error_code == 0
            assert (
                client.call(ExpireDelegationTokenRequest(hmac=made.hmac, expiry_time_period_ms=-1), 2).error_code == 0
            )


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    told = Story(tmp_path_factory.mktemp("secrets"))
    try:
        told.run()
        yield told
    finally:
        told.broker.kill()


def test_cve_2026_33558_secrets_are_not_in_the_log(story: Story) -> None:
    log = story.broker.log_path.read_bytes()
    assert b"DEBUG" in log
    assert story.planted.found_in(log) == []


def test_redpanda_cve_2023_24619_secrets_are_not_in_the_log_of_a_broker_that_cannot_start(tmp_path: Path) -> None:
    planted = Planted()
    log_dirs = f"log.dirs={tmp_path / 'data'}\n"
    port = "listeners=SASL_PLAINTEXT://127.0.0.1:0\nsasl.enabled.mechanisms=PLAIN\n"
    starts = {
        "a secret without a name": f"{log_dirs}={planted.new()}\n",
        "a key that goes on in the next line": f"{log_dirs}ssl.keystore.key=-----BEGIN\n{planted.new()}\n",
        "no JAAS line": f"{log_dirs}{port}sasl.jaas.config={planted.new()}\n",
        "a JAAS line without an end": f'{log_dirs}{port}sasl.jaas.config=X required password="{planted.new()}\n',
        "a key that is none": (
            f"{log_dirs}listeners=SSL://127.0.0.1:0\nssl.keystore.type=PEM\nssl.key.password={planted.new()}\n"
            f"ssl.keystore.key=-----BEGIN PRIVATE KEY----- {planted.new()} -----END PRIVATE KEY-----\n"
            f"ssl.keystore.certificate.chain={planted.new()}\n"
        ),
    }
    for name, text in starts.items():
        path = tmp_path / "server.properties"
        path.write_text(text)
        command = [sys.executable, "-m", "millrace", "broker", "--config", str(path), "--log-level", "debug"]
        ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
        assert ended.returncode == 1, (name, ended.stderr)
        assert b"millrace: error: " in ended.stderr, name
        assert planted.found_in(ended.stdout + ended.stderr) == [], (name, ended.stderr)


def test_secrets_are_not_in_answers(story: Story) -> None:
    assert len(story.answers) > 20
    assert story.planted.found_in(b"\n".join(story.answers)) == []


def test_a_described_secret_has_no_value_and_says_that_it_is_one(story: Story) -> None:
    wanted = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=BROKER, resource_name="1", configuration_keys=None
    )
    with story.client() as client:
        client.request(DescribeConfigsRequest(resources=[wanted], include_synonyms=True), 4)
        _, response = decode_response(response_class(ApiKey.DESCRIBE_CONFIGS), 4, client.read_frame(5))
    (result,) = response.results  # type: ignore[attr-defined]
    described = {entry.name: entry for entry in result.configs}
    for name in ("sasl.jaas.config", "ssl.key.password", "ssl.keystore.key", "delegation.token.secret.key"):
        entry = described[name]
        assert entry.is_sensitive
        assert entry.value is None
        assert all(synonym.value is None for synonym in entry.synonyms)


def test_secrets_are_not_in_the_list_of_processes(story: Story) -> None:
    assert any("server.properties" in word for word in story.command_lines)
    assert story.planted.found_in("\n".join(story.command_lines)) == []


def test_the_metadata_keeps_no_password_of_a_user(story: Story) -> None:
    files = [path for path in story.data.rglob("*") if path.is_file()]
    assert any(path.name == "metadata.db" for path in files)
    for path in files:
        assert story.planted.found_in(path.read_bytes(), but=story.planted.in_metadata) == [], path


def test_files_that_have_secrets_are_for_their_owner_alone(story: Story) -> None:
    files = [story.home / "server.properties", story.audit_path, *story.data.glob("metadata.db*")]
    assert len(files) >= 4
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {
        path.name: "0o600" for path in files
    }


def test_secrets_are_not_in_the_audit_log(story: Story) -> None:
    story.broker.terminate()
    try:
        lines = story.audit_path.read_bytes()
        assert story.planted.found_in(lines) == []
        (topic,) = {path.parent.name for path in story.data.glob("__audit_log-*/*.log") if path.stat().st_size}
        stored = b"".join(path.read_bytes() for path in story.data.glob(f"{topic}/*.log"))
        assert story.planted.found_in(stored) == []
        events = [json.loads(line) for line in lines.splitlines()]
        assert [wrong for event in events for wrong in problems(event)] == []
        assert all(line in stored for line in lines.splitlines()), "the topic has what the file has"
    finally:
        story.broker.start()
    logins = {
        (event["user"]["name"], event["auth_protocol"], event["status"])
        for event in events
        if event["class_uid"] == 3002
    }
    assert logins >= {
        ("carol", "SASL PLAIN", "Success"),
        ("carol", "SASL PLAIN", "Failure"),
        ("alice", "SASL SCRAM-SHA-256", "Success"),
        ("alice", "SASL SCRAM-SHA-256", "Failure"),
        ("nobody", "SASL SCRAM-SHA-512", "Failure"),
        ("alice", "SASL SCRAM-SHA-512", "Success"),
        ("alice", "OAUTH 2.0", "Success"),
        ("ANONYMOUS", "OAUTH 2.0", "Failure"),
    }


def test_commands_show_no_secrets(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_CONFIG", str(story.home / "profiles.toml"))
    profile = ["profile", "set", "p", "-b", f"{HOST}:{story.port}"]
    for setting in ("sasl.password", "ssl.key.pem", "ssl.keystore.key", "sasl.oauthbearer.client.secret"):
        profile += ["-X", f"{setting}={story.planted.new()}"]
    bootstrap = ["-b", f"{HOST}:{story.port}"]
    for words in (
        profile,
        ["profile", "show", "p"],
        ["profile", "show", "p", "--json"],
        ["configs", "get", "--broker", "1", "--all", *bootstrap],
        ["configs", "get", "--broker", "1", "--all", "--json", *bootstrap],
        ["log", "dump", str(story.data / "metadata.db"), "--records"],
        ["log", "dump", str(story.data / "metadata.db"), "--records", "--json"],
    ):
        told, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(errors):
            status = root.run(words)
        assert status == 0, (words, errors.getvalue())
        assert story.planted.found_in(told.getvalue() + errors.getvalue()) == [], words


def test_objects_show_no_secrets(story: Story) -> None:
    config = BrokerConfig(story.settings)
    config.apply_dynamic({}, {"listener.name.x.ssl.key.password": story.planted.new()})
    assert "ssl.key.password" in repr(config)
    assert story.planted.found_in(repr(config)) == []
