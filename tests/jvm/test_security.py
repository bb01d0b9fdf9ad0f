"""kafka-acls, kafka-configs for users and quotas, kafka-delegation-tokens, and the Java client's logins over TLS.

The broker has a plain listener, on which everybody is a super user and sets the scene, and secured ones, each with what
a test needs: `SASL_SSL` for logins, `MTLS` for certificates, and two with certificates that no client should accept.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

from support.kafka_jars import (
    ACLS,
    CONFIGS,
    CONSOLE_CONSUMER,
    CONSOLE_PRODUCER,
    DELEGATION_TOKENS,
    TOPICS,
    Finished,
    KafkaJars,
)
from support.kafka_tools import KafkaTools
from support.servers import KafkaServer, MillraceServer, Server

LOGIN = "org.apache.kafka.common.security"
PASSWORD = "correct horse"
LISTENERS = ("SASL_SSL", "MTLS:SSL", "EXPIRED:SSL", "ELSEWHERE:SSL")
SHORT_SESSION_MS = 2000


@dataclass(frozen=True)
class Secured:
    """A running broker, what is needed to log in to it, and Kafka's tools as its administrator."""

    server: Server
    jars: KafkaJars
    admin: KafkaTools
    home: Path
    key: RSAKey

    def settings(self, listener: str, name: str = "ca.pem", **settings: str) -> dict[str, str]:
        protocol = self.server.protocols[listener]
        return {
            "security.protocol": protocol,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.home / name),
            **{key.replace("_", "."): value for key, value in settings.items()},
        }

    def by_password(self, mechanism: str, user: str, password: str = PASSWORD, extra: str = "") -> dict[str, str]:
        module = "plain.PlainLoginModule" if mechanism == "PLAIN" else "scram.ScramLoginModule"
        jaas = f'{LOGIN}.{module} required username="{user}" password="{password}"{extra};'
        return self.settings("SASL_SSL", sasl_mechanism=mechanism, sasl_jaas_config=jaas)

    def by_token(self, user: str) -> dict[str, str]:
        """OAUTHBEARER with a JWT in a file."""
        now = int(datetime.datetime.now(datetime.UTC).timestamp())
        claims = {"sub": user, "iat": now, "exp": now + 600, "iss": "tests", "aud": "brokers"}
        (self.home / "token").write_text(jwt.encode({"alg": "RS256", "kid": self.key.kid}, claims, self.key))
        return self.settings(
            "SASL_SSL",
            sasl_mechanism="OAUTHBEARER",
            sasl_jaas_config=f"{LOGIN}.oauthbearer.OAuthBearerLoginModule required;",
            sasl_login_callback_handler_class=f"{LOGIN}.oauthbearer.OAuthBearerLoginCallbackHandler",
            sasl_oauthbearer_token_endpoint_url=(self.home / "token").as_uri(),
        )

    def tools(self, listener: str, settings: Mapping[str, str]) -> SecuredTools:
        path = self.home / "client.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        return SecuredTools(self.jars, self.server.bootstrap_of(listener), path)


@dataclass(frozen=True)
class SecuredTools:
    """Kafka's tools with a login."""

    jars: KafkaJars
    bootstrap: str
    config: Path

    def attempt(self, main: str, *arguments: str, stdin: str = "", timeout_s: float = 60) -> Finished:
        option = "--command-config"
        where = ("--bootstrap-server", self.bootstrap, option, str(self.config))
        return self.jars.run(main, *where, *arguments, stdin=stdin, timeout_s=timeout_s)

    def round_trip(self, topic: str) -> list[str]:
        sent = self.attempt(
            CONSOLE_PRODUCER, "--topic", topic, "--command-property", "max.block.ms=15000", stdin="one\ntwo\n"
        )
        assert "ERROR" not in sent.stderr, sent.stderr
        read = self.attempt(
            *(CONSOLE_CONSUMER, "--topic", topic, "--from-beginning", "--max-messages", "2", "--timeout-ms", "15000"),
            *("--group", f"{topic}-readers"),
        )
        return read.lines or [read.stderr]

    def refusal(self, topic: str) -> str:
        """What the producer says when it cannot get in."""
        sent = self.attempt(
            CONSOLE_PRODUCER, "--topic", topic, "--command-property", "max.block.ms=15000", stdin="one\n"
        )
        return sent.stderr + sent.stdout


@pytest.fixture(scope="module")
def secured(target: str, jars: KafkaJars, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    home = tmp_path_factory.mktemp("security")
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(home / "ca.pem")
    stranger.cert_pem.write_to_path(home / "stranger.pem")
    long_ago = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    for name, certificate in {
        "broker": authority.issue_cert("127.0.0.1", "localhost"),
        "expired": authority.issue_cert("127.0.0.1", not_before=long_ago, not_after=long_ago.replace(month=2)),
        "elsewhere": authority.issue_cert("elsewhere.example"),
        "client": authority.issue_cert("carol@example.org", common_name="carol"),
        "strange-client": stranger.issue_cert("carol@example.org", common_name="carol"),
    }.items():
        (home / f"{name}.pem").write_bytes(as_java_reads_it(certificate))
    key = RSAKey.generate_key(2048, {"use": "sig", "alg": "RS256", "kid": "k1"})
    (home / "jwks.json").write_text(json.dumps(KeySet([key]).as_dict(private=False)))
    jwks, token = (home / "jwks.json").as_uri(), (home / "token").as_uri()
    jars = dataclasses.replace(
        jars,
        properties=(*jars.properties, f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={jwks},{token}"),
    )
    listener = "listener.name.sasl_ssl"
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        f"{listener}.plain.sasl.jaas.config": f'{LOGIN}.plain.PlainLoginModule required user_paul="{PASSWORD}";',
        f"{listener}.scram-sha-256.sasl.jaas.config": f"{LOGIN}.scram.ScramLoginModule required;",
        f"{listener}.scram-sha-512.sasl.jaas.config": f"{LOGIN}.scram.ScramLoginModule required;",
        f"{listener}.oauthbearer.sasl.jaas.config": f"{LOGIN}.oauthbearer.OAuthBearerLoginModule required;",
        f"{listener}.oauthbearer.sasl.server.callback.handler.class": (
            f"{LOGIN}.oauthbearer.OAuthBearerValidatorCallbackHandler"
        ),
        "sasl.oauthbearer.jwks.endpoint.url": jwks,
        "sasl.oauthbearer.expected.audience": "brokers",
        "sasl.oauthbearer.expected.issuer": "tests",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(home / "broker.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(home / "ca.pem"),
        "listener.name.mtls.ssl.client.auth": "required",
        "listener.name.mtls.ssl.keystore.location": str(home / "broker.pem"),
        "listener.name.mtls.ssl.keystore.type": "PEM",
        "listener.name.expired.ssl.keystore.location": str(home / "expired.pem"),
        "listener.name.expired.ssl.keystore.type": "PEM",
        "listener.name.elsewhere.ssl.keystore.location": str(home / "elsewhere.pem"),
        "listener.name.elsewhere.ssl.keystore.type": "PEM",
        "ssl.principal.mapping.rules": "RULE:^CN=([^,]+),.*$/$1/,DEFAULT",
        "delegation.token.secret.key": "a secret that only brokers know",
        "connections.max.reauth.ms": str(SHORT_SESSION_MS),
        "group.initial.rebalance.delay.ms": "0",
    }
    server: Server
    if target == "kafka":
        server = KafkaServer(jars, settings, heap="512m", protocols=LISTENERS)
    else:
        settings["sasl.oauthbearer.allowed.urls"] = jwks
        server = MillraceServer(settings, protocols=LISTENERS)
    with server:
        tools = KafkaTools(jars, server)
        yield Secured(server, jars, tools, home, key)


def as_java_reads_it(issued: trustme.LeafCert) -> bytes:
    """Key and certificates in PEM; the key in PKCS 8, the only form that Java reads."""
    key = load_pem_private_key(issued.private_key_pem.bytes(), None)
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return text + b"".join(blob.bytes() for blob in issued.cert_chain_pems)


def add_user(secured: Secured, user: str, mechanism: str = "SCRAM-SHA-512", iterations: int = 4096) -> None:
    credential = f"{mechanism}=[iterations={iterations},password={PASSWORD}]"
    entity = ("--entity-type", "users", "--entity-name", user)
    secured.admin.run(CONFIGS, "--alter", *entity, "--add-config", credential)


def allow(secured: Secured, user: str, topic: str) -> None:
    whom = ("--add", "--allow-principal", f"User:{user}")
    secured.admin.run(ACLS, *whom, "--producer", "--consumer", "--topic", topic, "--group", "*")


# --- kafka-configs ----------------------------------------------------------------------------------------------------


def test_users_come_and_go(secured: Secured) -> None:
    add_user(secured, "ursula", "SCRAM-SHA-256", 8192)
    add_user(secured, "ursula", "SCRAM-SHA-512")
    entity = ("--entity-type", "users", "--entity-name", "ursula")
    shown = secured.admin.run(CONFIGS, "--describe", *entity).stdout
    assert "SCRAM-SHA-256=iterations=8192" in shown
    assert "SCRAM-SHA-512=iterations=4096" in shown
    assert PASSWORD not in shown
    secured.admin.run(CONFIGS, "--alter", *entity, "--delete-config", "SCRAM-SHA-256")
    shown = secured.admin.run(CONFIGS, "--describe", *entity).stdout
    assert "SCRAM-SHA-256" not in shown
    assert "SCRAM-SHA-512" in shown
    few = ("--add-config", f"SCRAM-SHA-256=[iterations=100,password={PASSWORD}]")
    refused = secured.admin.attempt(CONFIGS, "--alter", *entity, *few)
    assert refused.status != 0
    assert "iterations" in (refused.stdout + refused.stderr).lower()


def test_quotas_come_and_go(secured: Secured) -> None:
    quotas = "producer_byte_rate=1024,consumer_byte_rate=2048,request_percentage=50,controller_mutation_rate=10"
    for entity in (
        ("--entity-type", "users", "--entity-name", "quentin"),
        ("--entity-type", "clients", "--entity-name", "some-client"),
        ("--entity-type", "users", "--entity-default"),
        ("--entity-type", "users", "--entity-name", "quentin", "--entity-type", "clients", "--entity-default"),
    ):
        secured.admin.run(CONFIGS, "--alter", *entity, "--add-config", quotas)
        shown = secured.admin.run(CONFIGS, "--describe", *entity).stdout
        for quota in quotas.split(","):
            name, value = quota.split("=")
            assert re.search(rf"{name}={value}(\.0)?\b", shown), (entity, quota, shown)
        secured.admin.run(CONFIGS, "--alter", *entity, "--delete-config", re.sub(r"=\d+", "", quotas))
        assert "byte_rate" not in secured.admin.run(CONFIGS, "--describe", *entity).stdout
    address = ("--entity-type", "ips", "--entity-name", "127.0.0.9")
    secured.admin.run(CONFIGS, "--alter", *address, "--add-config", "connection_creation_rate=5")
    assert "connection_creation_rate=5" in secured.admin.run(CONFIGS, "--describe", *address).stdout
    wrong = secured.admin.attempt(
        CONFIGS, "--alter", "--entity-type", "users", "--entity-name", "quentin", "--add-config", "no_such_rate=1"
    )
    assert wrong.status != 0


# --- kafka-acls -------------------------------------------------------------------------------------------------------


def test_rules_come_and_go(secured: Secured) -> None:
    topic = ("--topic", "ledger-", "--resource-pattern-type", "prefixed")
    added = secured.admin.run(ACLS, "--add", "--allow-principal", "User:ann", "--operation", "Read", *topic).stdout
    assert "principal=User:ann, host=*, operation=READ, permissionType=ALLOW" in added
    denied = ("--deny-principal", "User:ann", "--deny-host", "10.0.0.9", "--operation", "All", "--topic", "ledger-old")
    secured.admin.run(ACLS, "--add", *denied)
    listed = secured.admin.run(ACLS, "--list", "--topic", "ledger-old", "--resource-pattern-type", "match").stdout
    assert "operation=READ, permissionType=ALLOW" in listed
    assert "host=10.0.0.9, operation=ALL, permissionType=DENY" in listed
    of_ann = secured.admin.run(ACLS, "--list", "--principal", "User:ann").stdout
    assert of_ann.count("principal=User:ann") == 2
    secured.admin.run(ACLS, "--remove", "--force", "--topic", "ledger-old")
    left = secured.admin.run(ACLS, "--list", "--principal", "User:ann").stdout
    assert "DENY" not in left
    assert "READ" in left
    secured.admin.run(ACLS, "--remove", "--force", *topic)
    assert "User:ann" not in secured.admin.run(ACLS, "--list").stdout


def test_rules_let_in_and_keep_out(secured: Secured, topic: str) -> None:
    add_user(secured, "alfred")
    secured.admin.create_topic(topic)
    alfred = secured.tools("SASL_SSL", secured.by_password("SCRAM-SHA-512", "alfred"))
    assert "TopicAuthorizationException" in alfred.refusal(topic)
    assert topic not in alfred.attempt(TOPICS, "--list").stdout
    allow(secured, "alfred", topic)
    assert alfred.round_trip(topic) == ["one", "two"]
    listed = alfred.attempt(TOPICS, "--list").stdout
    assert topic in listed
    not_allowed = alfred.attempt(TOPICS, "--delete", "--topic", topic)
    assert "TopicAuthorizationException" in not_allowed.stdout + not_allowed.stderr
    rules = alfred.attempt(ACLS, "--list")
    assert "ClusterAuthorizationException" in rules.stdout + rules.stderr


# --- logins -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_logins_by_password(secured: Secured, topic: str, mechanism: str) -> None:
    user = "paul" if mechanism == "PLAIN" else "lena"
    if mechanism != "PLAIN":
        add_user(secured, "lena", mechanism)
    secured.admin.create_topic(topic)
    allow(secured, user, topic)
    assert secured.tools("SASL_SSL", secured.by_password(mechanism, user)).round_trip(topic) == ["one", "two"]
    wrong = secured.tools("SASL_SSL", secured.by_password(mechanism, user, "wrong")).refusal(topic)
    unknown = secured.tools("SASL_SSL", secured.by_password(mechanism, "nobody")).refusal(topic)
    for refusal in (wrong, unknown):
        assert "SaslAuthenticationException" in refusal
    said = [re.search(r"SaslAuthenticationException: (.*)", refusal) for refusal in (wrong, unknown)]
    assert said[0] and said[1] and said[0][1] == said[1][1], "nobody learns which users there are"


def test_logins_by_token(secured: Secured, topic: str) -> None:
    secured.admin.create_topic(topic)
    allow(secured, "olga", topic)
    assert secured.tools("SASL_SSL", secured.by_token("olga")).round_trip(topic) == ["one", "two"]
    forged = dataclasses.replace(secured, key=RSAKey.generate_key(2048, {"use": "sig", "alg": "RS256", "kid": "k1"}))
    refusal = forged.tools("SASL_SSL", forged.by_token("olga")).refusal(topic)
    assert "SaslAuthenticationException" in refusal or "invalid_token" in refusal


def test_logins_by_certificate(secured: Secured, topic: str) -> None:
    secured.admin.create_topic(topic)
    allow(secured, "carol", topic)
    own = {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(secured.home / "client.pem")}
    assert secured.tools("MTLS", {**secured.settings("MTLS"), **own}).round_trip(topic) == ["one", "two"]
    strange = {**own, "ssl.keystore.location": str(secured.home / "strange-client.pem")}
    for settings in (secured.settings("MTLS"), {**secured.settings("MTLS"), **strange}):
        refusal = secured.tools("MTLS", settings).refusal(topic)
        assert re.search(r"SslAuthenticationException|TimeoutException|SSL handshake failed|disconnected", refusal)


@pytest.mark.parametrize(
    ("listener", "trusted"), [("EXPIRED", "ca.pem"), ("ELSEWHERE", "ca.pem"), ("SASL_SSL", "stranger.pem")]
)
def test_brokers_that_are_not_believed(secured: Secured, topic: str, listener: str, trusted: str) -> None:
    settings = secured.settings(listener, trusted)
    if listener == "SASL_SSL":
        settings = {**secured.by_password("PLAIN", "paul"), "ssl.truststore.location": str(secured.home / trusted)}
    refusal = secured.tools(listener, settings).refusal(topic)
    assert "SslAuthenticationException" in refusal or "SSL handshake failed" in refusal


def test_a_session_is_renewed_on_its_connection(secured: Secured, topic: str) -> None:
    """The consumer stays for several sessions; a broker that let one end would have closed the connection."""
    add_user(secured, "rita")
    secured.admin.create_topic(topic)
    allow(secured, "rita", topic)
    rita = secured.tools("SASL_SSL", secured.by_password("SCRAM-SHA-512", "rita"))
    waited = rita.attempt(
        *(CONSOLE_CONSUMER, "--topic", topic, "--timeout-ms", str(SHORT_SESSION_MS * 3), "--group", topic)
    )
    assert "Processed a total of 0 messages" in waited.stderr + waited.stdout
    assert "SaslAuthenticationException" not in waited.stderr + waited.stdout


# --- kafka-delegation-tokens ------------------------------------------------------------------------------------------


def test_delegation_tokens(secured: Secured, topic: str) -> None:
    add_user(secured, "dora")
    secured.admin.create_topic(topic)
    allow(secured, "dora", topic)
    dora = secured.tools("SASL_SSL", secured.by_password("SCRAM-SHA-512", "dora"))
    made = dora.attempt(
        DELEGATION_TOKENS, "--create", "--max-life-time-period", "-1", "--renewer-principal", "User:ruth"
    )
    assert made.status == 0, made.stderr
    token_id, mac = re.findall(r"^(\S+)\s+(\S+)\s+User:dora", made.stdout, re.MULTILINE)[0]
    described = dora.attempt(DELEGATION_TOKENS, "--describe", "--owner-principal", "User:dora")
    assert token_id in described.stdout
    login = secured.by_password("SCRAM-SHA-256", token_id, mac, " tokenauth=true")
    by_token = secured.tools("SASL_SSL", login)
    assert by_token.round_trip(topic) == ["one", "two"]
    another = by_token.attempt(DELEGATION_TOKENS, "--create", "--max-life-time-period", "-1")
    assert "DelegationToken" in another.stdout + another.stderr
    assert another.status != 0
    dora = secured.tools("SASL_SSL", secured.by_password("SCRAM-SHA-512", "dora"))
    renewed = dora.attempt(DELEGATION_TOKENS, "--renew", "--renew-time-period", "-1", "--hmac", mac)
    assert renewed.status == 0, renewed.stderr
    ended = dora.attempt(DELEGATION_TOKENS, "--expire", "--expiry-time-period", "-1", "--hmac", mac)
    assert ended.status == 0, ended.stderr
    refused = secured.tools("SASL_SSL", login).refusal(topic)
    assert "SaslAuthenticationException" in refused
