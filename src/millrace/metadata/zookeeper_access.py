"""How a broker proves to ZooKeeper who it is, and whether its znodes are for brokers alone. Values; kazoo is not here.

ZooKeeper knows two ways that a broker can use, and takes both at once:

- **digest**: a name and a password. ZooKeeper has no list of users: any pair is accepted, and what it opens are the
  znodes that were closed under it. So a wrong password shows when a znode is asked for, not at the login.
- **a certificate**, where the connection is TLS. The name is the certificate's subject: brokers that log in by nothing
  else need certificates of one subject, or each finds the znodes of the others closed.

Znodes are made, and existing ones closed, for whoever made them, by every name the session has (ZooKeeper's `auth`).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Final

from millrace.config import BrokerConfig
from millrace.errors import ConfigError

_USERNAME: Final = "zookeeper.digest.username"
_PASSWORD: Final = "zookeeper.digest.password"  # noqa: S105 - the name of a setting
_SET_ACL: Final = "zookeeper.set.acl"
_TLS: Final = "zookeeper.ssl.client.enable"


@dataclass(frozen=True, slots=True)
class ZooKeeperTls:
    """Files in PEM. Without `authorities` the system's are trusted; without `identity` no certificate is shown."""

    authorities: str = ""
    identity: str = ""
    """Certificate and key."""
    password: str = field(default="", repr=False)
    """Of the key."""
    verify_host_name: bool = True

    def context(self) -> ssl.SSLContext:
        """Made anew for every connection, so that new files are used; ConfigError names the file that is no good."""
        path, setting = self.authorities, "zookeeper.ssl.truststore.location"
        try:
            context = ssl.create_default_context(cafile=self.authorities or None)
            context.check_hostname = self.verify_host_name
            path, setting = self.identity, "zookeeper.ssl.keystore.location"
            if self.identity:
                context.load_cert_chain(self.identity, password=self.password or "")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{setting}: {path} is not usable as PEM ({_reason(error)})") from error
        return context


@dataclass(frozen=True, slots=True)
class ZooKeeperAccess:
    """See the module's text. The default is nobody in particular, and znodes that are open to everybody."""

    username: str = ""
    password: str = field(default="", repr=False)
    tls: ZooKeeperTls | None = None
    set_acl: bool | None = None
    """Whether znodes are closed to everybody else; None: if there is a login, and no broker without one."""

    def __post_init__(self) -> None:
        if bool(self.username) != bool(self.password) or ":" in self.username:
            raise ConfigError(f"{_USERNAME} and {_PASSWORD} belong together, and the name has no colon")
        if self.set_acl and not self.has_login:
            raise ConfigError(
                f"{_SET_ACL}=true needs a login: {_USERNAME} and {_PASSWORD}, or a certificate in "
                "zookeeper.ssl.keystore.location"
            )

    @property
    def has_login(self) -> bool:
        return bool(self.username) or (self.tls is not None and bool(self.tls.identity))

    @property
    def closes(self) -> bool:
        return self.has_login if self.set_acl is None else self.set_acl

    @property
    def advice(self) -> str:
        """What to look at when ZooKeeper does not let this broker in."""
        if not self.has_login:
            return f"it asks for a login, {_USERNAME} and {_PASSWORD}"
        return f"check {_USERNAME} and {_PASSWORD}" if self.username else "check zookeeper.ssl.keystore.location"

    def as_settings(self) -> dict[str, str]:
        """The settings of a broker that logs in so, by name and password."""
        if not self.username:
            return {}
        return {_USERNAME: self.username, _PASSWORD: self.password, _SET_ACL: str(self.closes).lower()}

    @classmethod
    def from_config(cls, config: BrokerConfig) -> ZooKeeperAccess:
        def text(name: str) -> str:
            return str(config.get(name) or "")

        tls = None
        if config.get_bool(_TLS):
            tls = ZooKeeperTls(
                authorities=text("zookeeper.ssl.truststore.location"),
                identity=text("zookeeper.ssl.keystore.location"),
                password=text("zookeeper.ssl.keystore.password"),
                verify_host_name=text("zookeeper.ssl.endpoint.identification.algorithm").lower() not in ("", "none"),
            )
        return cls(text(_USERNAME), text(_PASSWORD), tls, config.get(_SET_ACL))


OPEN: Final = ZooKeeperAccess()


def _reason(error: Exception) -> str:
    return error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)
