"""What the settings of a broker lay open: pure looks at them, for one line each when it starts.

A listener is open where nobody has to say who they are (PLAINTEXT, or SSL without `ssl.client.auth=required`). On a
loopback address that is fine. On any other it lets whoever reaches the port do everything, as long as no authorizer is
named; with one, ANONYMOUS may what the rules say.

Rules and users are in ZooKeeper, where there is one: as long as its znodes are open, whoever reaches it can write there
what they like.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from millrace.config import BrokerConfig, Scope, find_setting
from millrace.config.files import Listener
from millrace.errors import ConfigError


def open_listeners(config: BrokerConfig) -> list[str]:
    """The listeners on which whoever reaches the port may do everything, as `NAME://host:port`."""
    if config.get("authorizer.class.name"):
        return []
    return [str(each) for each in config.listeners if not is_loopback(each.host) and not _asks_who(config, each)]


def open_listeners_text(config: BrokerConfig) -> str:
    """What to tell whoever starts such a broker; empty where there is nothing to tell."""
    found = ", ".join(open_listeners(config))
    return found and (
        f"everybody who reaches {found} may read, write and delete everything: listen on 127.0.0.1, or ask for a login"
        " (SASL_SSL, or SSL with ssl.client.auth=required) and set authorizer.class.name"
    )


def open_metadata_text(config: BrokerConfig) -> str:
    """What to tell whoever starts a broker that asks for logins or rights, and leaves what it keeps of them open."""
    asks = bool(config.get("authorizer.class.name")) or any(
        each.security_protocol.startswith("SASL_") for each in config.listeners
    )
    has_login = bool(config.get("zookeeper.digest.username")) or (
        config.get_bool("zookeeper.ssl.client.enable") and bool(config.get("zookeeper.ssl.keystore.location"))
    )
    if not asks or not config.get("zookeeper.connect") or (has_login and config.get("zookeeper.set.acl") is not False):
        return ""
    advice = "set zookeeper.set.acl=true" if has_login else "give the brokers a login there (zookeeper.digest.username)"
    return f"everybody who reaches ZooKeeper can change users and rules: {advice}"


def secrets_text(given: Iterable[str]) -> str:
    """What to tell whoever gave settings of these names on a command line."""
    found = ", ".join(name for name in given if is_secret(name))
    return found and (
        f"{found} on a command line is no secret: the list of processes has it, for everybody on this machine; put it"
        " in a properties file"
    )


def is_secret(name: str) -> bool:
    """Whether a broker setting of this name is one that is never shown."""
    try:
        return find_setting(Scope.BROKER, name).sensitive
    except ConfigError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address. A name is taken for what it says: nobody is asked."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _asks_who(config: BrokerConfig, listener: Listener) -> bool:
    if listener.security_protocol == "SSL":
        return bool(config.listener_value(listener.name, "ssl.client.auth") == "required")
    return listener.security_protocol != "PLAINTEXT"
