from __future__ import annotations

import pytest

from millrace.config import BrokerConfig
from millrace.security.exposure import (
    is_loopback,
    open_listeners,
    open_listeners_text,
    open_metadata_text,
    secrets_text,
)


@pytest.mark.parametrize(
    ("listeners", "found"),
    [
        ("PLAINTEXT://:9092", ["PLAINTEXT://:9092"]),
        ("PLAINTEXT://0.0.0.0:9092", ["PLAINTEXT://0.0.0.0:9092"]),
        ("PLAINTEXT://[::]:9092", ["PLAINTEXT://[::]:9092"]),
        ("PLAINTEXT://broker.example:9092", ["PLAINTEXT://broker.example:9092"]),
        ("PLAINTEXT://10.0.0.1:9092", ["PLAINTEXT://10.0.0.1:9092"]),
        ("PLAINTEXT://127.0.0.1:9092", []),
        ("PLAINTEXT://127.3.2.1:9092", []),
        ("PLAINTEXT://[::1]:9092", []),
        ("PLAINTEXT://localhost:9092", []),
    ],
)
def test_a_listener_without_login_that_others_reach_is_open(listeners: str, found: list[str]) -> None:
    config = BrokerConfig({"listeners": listeners})
    assert open_listeners(config) == found
    assert bool(open_listeners_text(config)) is bool(found)


def test_the_text_says_what_is_open_and_what_to_do() -> None:
    text = open_listeners_text(BrokerConfig({"listeners": "PLAINTEXT://:9092"}))
    assert "PLAINTEXT://:9092" in text
    assert "authorizer.class.name" in text
    assert "127.0.0.1" in text


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "localhost.example.com", "128.0.0.1", "nonsense"])
def test_what_is_not_known_to_be_loopback_is_not(host: str) -> None:
    assert not is_loopback(host)


def test_a_secret_on_a_command_line_is_none() -> None:
    given = {"num.partitions": "3", "ssl.key.password": "hunter2", "listener.name.x.plain.sasl.jaas.config": "hunter2"}
    text = secrets_text(given)
    assert "ssl.key.password, listener.name.x.plain.sasl.jaas.config on a command line" in text
    assert "hunter2" not in text
    assert secrets_text({"num.partitions": "3", "no.such.setting": "x"}) == ""


AUTHORIZER = {"authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer"}
LOGINS = {"listeners": "SASL_PLAINTEXT://127.0.0.1:0", "inter.broker.listener.name": "SASL_PLAINTEXT"}
SHARED = {"zookeeper.connect": "127.0.0.1:2181"}
PASSWORD = {"zookeeper.digest.username": "millrace", "zookeeper.digest.password": "secret"}
CERTIFICATE = {"zookeeper.ssl.client.enable": "true", "zookeeper.ssl.keystore.location": "/k.pem"}


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({**SHARED}, ""),
        ({**AUTHORIZER}, ""),
        ({**SHARED, **AUTHORIZER}, "zookeeper.digest.username"),
        ({**SHARED, **LOGINS}, "zookeeper.digest.username"),
        ({**SHARED, **LOGINS, "zookeeper.ssl.client.enable": "true"}, "zookeeper.digest.username"),
        ({**SHARED, **AUTHORIZER, **PASSWORD}, ""),
        ({**SHARED, **AUTHORIZER, **CERTIFICATE}, ""),
        ({**SHARED, **AUTHORIZER, **PASSWORD, "zookeeper.set.acl": "false"}, "zookeeper.set.acl=true"),
    ],
)
def test_rules_in_an_open_zookeeper_are_told(settings: dict[str, str], advice: str) -> None:
    text = open_metadata_text(BrokerConfig(settings))
    assert bool(text) is bool(advice)
    assert advice in text
