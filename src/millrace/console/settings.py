"""What a console is told when it starts. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from millrace.client.settings import ClientSettings
from millrace.console.roles import Role
from millrace.errors import ConfigError

DEFAULT_PORT: Final = 9080
CLIENT_ID: Final = "millrace-console"
_PATIENCE: Final = {
    "client.id": CLIENT_ID,
    "request.timeout.ms": "15000",
    "socket.connection.setup.timeout.ms": "3000",
    "default.api.timeout.ms": "5000",
}
"""Of clients behind a page that a person waits for; what was given with `--client` wins."""


class Login(Enum):
    """How somebody who opens the console shows that they may."""

    NONE = "none"
    """Not at all: only those on this machine can reach it."""
    TOKEN = "token"  # noqa: S105  # a kind of login, not a secret
    """By a word that the console printed, or was given, when it started."""
    BROKERS = "brokers"
    """By a name and a password that the brokers know. They decide what each may do."""


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """Where the cluster is, where the console listens, and who may use it."""

    bootstrap: str
    client: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Client settings (security, timeouts), under Kafka's or librdkafka's names."""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    login: Login = Login.NONE
    token: str = field(default="", repr=False)
    read_only: bool = False
    roles: Mapping[str, Role] = field(default_factory=dict)
    """By user name; everybody else has `default_role`."""
    default_role: Role = Role.ADMIN
    """The brokers' rules hold in any case: a role can only take away."""
    pipelines: Path | None = None
    """A folder of pipelines that can be started, beside those that come with millrace. With a login by the brokers'
    users it is also what lets these see, start and stop pipelines at all."""
    pipeline_runs: Path | None = None
    """Where runs of pipelines note how they are, if not in the usual place."""
    public_url: str = ""
    """The address under which a proxy offers the console: scheme, host and port. Empty: people open it directly."""
    certificate: Path | None = None
    key: Path | None = None

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def uses_tls(self) -> bool:
        return self.certificate is not None

    @property
    def cookies_are_secure(self) -> bool:
        return self.uses_tls or self.public_url.startswith("https://")

    def client_properties(self, username: str = "", password: str = "") -> dict[str, str]:
        """For a client of the console, or of somebody who logged in here."""
        given = self.given_properties(username, password)
        return {**_PATIENCE, **given, "bootstrap.servers": self.bootstrap}

    def given_properties(self, username: str = "", password: str = "") -> dict[str, str]:
        """What the console was given for clients, with the login of somebody; for what is not a part of a page."""
        properties = dict(self.client)
        if username:
            properties |= {"sasl.username": username, "sasl.password": password}
            properties.pop("sasl.jaas.config", None)
        return properties

    def client_settings(self, username: str = "", password: str = "") -> ClientSettings:
        """The same for the project's own client. ConfigError where they cannot be used."""
        return ClientSettings.from_properties(self.client_properties(username, password))

    def role_of(self, user: str) -> Role:
        return self.roles.get(user, self.default_role)


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def choose_login(client: Mapping[str, str], host: str, wanted: Login | None) -> Login:
    """What is asked of people: what was said, or what the cluster and the address make necessary."""
    names = {name.lower() for name in client}
    logs_in = any(
        name.lower() == "security.protocol" and value.upper().startswith("SASL") for name, value in client.items()
    )
    if wanted is Login.BROKERS and not logs_in:
        raise ConfigError("login by the brokers' users needs security.protocol=SASL_SSL or SASL_PLAINTEXT in --client")
    if wanted is not None:
        return wanted
    if logs_in and not names & {"sasl.username", "sasl.jaas.config"}:
        return Login.BROKERS
    return Login.NONE if is_loopback(host) else Login.TOKEN
