"""What a client is told: where the brokers are, how long to try, and how to prove who it is.

Names and defaults are those of Kafka's Java client, and of librdkafka where it has its own. Values only: sockets, TLS
contexts and SASL exchanges are made from them elsewhere. Invariants: a value here is valid, picklable, and shows no
password when printed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from millrace.errors import ConfigError
from millrace.security import jaas

Address = tuple[str, int]

PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")

logger = logging.getLogger(__name__)
_told: set[str] = set()


@dataclass(frozen=True, slots=True)
class Pem:
    """Certificates or keys in PEM: a file, or the text itself. `setting` is where it came from, for messages."""

    setting: str
    path: str = ""
    text: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Security:
    """How a connection is secured. With TLS and no `authorities`, the system's are trusted."""

    protocol: str = "PLAINTEXT"
    authorities: Pem | None = None
    certificate: Pem | None = None
    key: Pem | None = None
    key_password: str | None = field(default=None, repr=False)
    verify_certificate: bool = True
    verify_host_name: bool = True
    mechanism: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    by_token: bool = False
    """User and password are the id and the HMAC of a delegation token."""

    @property
    def uses_tls(self) -> bool:
        return self.protocol in ("SSL", "SASL_SSL")

    @property
    def uses_sasl(self) -> bool:
        return self.protocol in ("SASL_PLAINTEXT", "SASL_SSL")


PLAINTEXT: Final = Security()
DEFAULT_FETCH_BYTES: Final = 2 * 1024 * 1024
"""What is fetched is decoded and handed on while the processor's cache still has it; larger fetches were slower."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Everything that is needed to connect, here or in another process."""

    bootstrap_servers: tuple[Address, ...]
    client_id: str = "millrace"
    client_rack: str = ""
    request_timeout_ms: int = 30_000
    connect_timeout_ms: int = 10_000
    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 1_000
    retry_timeout_ms: int = 60_000
    """How long a failure that may pass (a restart, a leader that moves) is retried before it is raised."""
    security: Security = PLAINTEXT

    @classmethod
    def from_properties(cls, properties: Mapping[str, str]) -> ClientSettings:
        """Read Kafka's client settings; ConfigError for a value that cannot be used.

        Names that mean nothing here (there are many, of consumers and producers) are logged once and ignored.
        """
        reader = _Reader(properties)
        servers = reader.text("bootstrap.servers")
        if not servers:
            raise ConfigError("bootstrap.servers is missing: give one or more brokers as host:port[,host:port...]")
        settings = cls(
            bootstrap_servers=parse_servers(servers),
            client_id=reader.text("client.id") or "millrace",
            client_rack=reader.text("client.rack"),
            request_timeout_ms=reader.positive("request.timeout.ms", 30_000),
            connect_timeout_ms=reader.positive("socket.connection.setup.timeout.ms", 10_000),
            retry_backoff_ms=reader.positive("retry.backoff.ms", 100),
            retry_backoff_max_ms=reader.positive("retry.backoff.max.ms", 1_000),
            retry_timeout_ms=reader.positive("default.api.timeout.ms", reader.positive("delivery.timeout.ms", 60_000)),
            security=_security(reader),
        )
        reader.tell_unused()
        return settings


def parse_servers(text: str) -> tuple[Address, ...]:
    """`host:port,host:port` as pairs; IPv6 addresses stand in brackets, and `PROTOCOL://` before a host is allowed."""
    servers = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        host, _, port = part.rpartition("://")[2].rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        good_host = host and not any(character.isspace() for character in host)
        if not good_host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"bootstrap.servers: '{part}' is not host:port")
        servers.append((host, int(port)))
    if not servers:
        raise ConfigError("bootstrap.servers is empty: give one or more brokers as host:port[,host:port...]")
    return tuple(dict.fromkeys(servers))


class _Reader:
    """Reads properties by name and remembers which were asked for."""

    def __init__(self, properties: Mapping[str, str]) -> None:
        self._properties = {name.lower(): value for name, value in properties.items()}
        self._asked: set[str] = set()

    def has(self, name: str) -> bool:
        self._asked.add(name)
        return name in self._properties

    def text(self, *names: str) -> str:
        """The first of `names` that is set; they are one setting under the names of several clients."""
        self._asked.update(names)
        return next((self._properties[name].strip() for name in names if self._properties.get(name)), "")

    def secret(self, *names: str) -> str:
        """Like `text`, but spaces at the ends are part of it."""
        self._asked.update(names)
        return next((self._properties[name] for name in names if self._properties.get(name)), "")

    def positive(self, name: str, default: int) -> int:
        text = self.text(name)
        if not text:
            return default
        if not text.isascii() or not text.isdigit() or not 0 < int(text) < 1 << 31:
            raise ConfigError(f"{name} is a number of milliseconds above 0, not '{text}'")
        return int(text)

    def choice(self, name: str, text: str, choices: tuple[str, ...]) -> str:
        if text.upper() not in choices:
            raise ConfigError(f"{name} is one of {', '.join(choices)}, not '{text}'")
        return text.upper()

    def boolean(self, name: str, default: bool) -> bool:
        text = self.text(name)
        if not text:
            return default
        return self.choice(name, text, ("TRUE", "FALSE")) == "TRUE"

    def pem(self, location: tuple[str, ...], text: tuple[str, ...]) -> Pem | None:
        for name in location:
            if path := self.text(name):
                return Pem(name, path=path)
        for name in text:
            if value := self.text(name):
                # A properties file holds a PEM text in one line, its line ends written as \n.
                return Pem(name, text=value.replace("\\n", "\n"))
        return None

    def tell_unused(self) -> None:
        for name in sorted(self._properties.keys() - self._asked - _told):
            _told.add(name)
            logger.info("the client setting %s has no effect here", name)


def _security(reader: _Reader) -> Security:
    protocol = reader.choice("security.protocol", reader.text("security.protocol") or "PLAINTEXT", PROTOCOLS)
    for store in ("ssl.truststore", "ssl.keystore"):
        kind = reader.text(f"{store}.type")
        if kind and kind.upper() != "PEM":
            raise ConfigError(f"{store}.type: {kind} stores cannot be read; convert the store to PEM and say PEM here")
        reader.secret(f"{store}.password")
    # Kafka switches the check of the name off by an empty value, librdkafka by `none`.
    named = reader.text("ssl.endpoint.identification.algorithm").lower()
    verify_host_name = named not in ("", "none") if reader.has("ssl.endpoint.identification.algorithm") else True
    certificate = reader.pem(
        ("ssl.keystore.location", "ssl.certificate.location"), ("ssl.keystore.certificate.chain", "ssl.certificate.pem")
    )
    mechanism, login = _credentials(reader)
    if protocol.startswith("SASL_"):
        # Nothing is assumed: Kafka's default is GSSAPI, and PLAIN would hand the password to whoever asks.
        if not mechanism:
            raise ConfigError(f"{protocol} needs sasl.mechanism: one of {', '.join(MECHANISMS)}")
        mechanism = reader.choice("sasl.mechanism", mechanism, MECHANISMS)
        if not login.username:
            raise ConfigError(
                f"{protocol} needs a user: set sasl.jaas.config to a login module with username and password, "
                "or sasl.username and sasl.password"
            )
    return Security(
        protocol=protocol,
        authorities=reader.pem(
            ("ssl.truststore.location", "ssl.ca.location"), ("ssl.truststore.certificates", "ssl.ca.pem")
        ),
        certificate=certificate,
        key=reader.pem(("ssl.key.location",), ("ssl.keystore.key", "ssl.key.pem")),
        key_password=reader.secret("ssl.key.password") or None,
        verify_certificate=reader.boolean("enable.ssl.certificate.verification", default=True),
        verify_host_name=verify_host_name,
        mechanism=mechanism,
        username=login.username,
        password=login.password,
        by_token=login.by_token,
    )


class JaasLogin(NamedTuple):
    """What a client logs in with."""

    username: str
    password: str
    by_token: bool = False


def _credentials(reader: _Reader) -> tuple[str, JaasLogin]:
    """Mechanism, user and password."""
    mechanism = reader.text("sasl.mechanism", "sasl.mechanisms")
    login = JaasLogin(reader.text("sasl.username"), reader.secret("sasl.password"))
    line = reader.text("sasl.jaas.config")
    return mechanism, parse_jaas(line) if line and not login.username else login


def parse_jaas(text: str) -> JaasLogin:
    """User and password from a JAAS line such as `...PlainLoginModule required username="me" password="x";`."""
    module = jaas.parse(text)
    if module.name not in ("PlainLoginModule", "ScramLoginModule"):
        raise ConfigError(f"sasl.jaas.config: {module.name} is neither PlainLoginModule nor ScramLoginModule")
    if "username" not in module.options or "password" not in module.options:
        raise ConfigError('sasl.jaas.config needs username="..." and password="..."')
    by_token = module.name == "ScramLoginModule" and module.options.get("tokenauth", "").lower() == "true"
    return JaasLogin(module.options["username"], module.options["password"], by_token)
