"""Kafka's client settings, read."""

from __future__ import annotations

import logging
import pickle

import pytest

from millrace.client.settings import ClientSettings, Pem, parse_jaas, parse_servers
from millrace.errors import ConfigError

PLAIN_JAAS = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="me" password="a \\"b; c\\\\";'


def settings(**properties: str) -> ClientSettings:
    named = {name.replace("_", "."): value for name, value in properties.items()}
    return ClientSettings.from_properties({"bootstrap.servers": "h:1", **named})


def test_defaults_are_kafkas() -> None:
    found = ClientSettings.from_properties({"bootstrap.servers": "a:9092"})
    assert found == ClientSettings((("a", 9092),))
    assert (found.request_timeout_ms, found.retry_timeout_ms, found.retry_backoff_ms) == (30_000, 60_000, 100)
    assert not found.security.uses_tls and not found.security.uses_sasl


def test_every_plain_setting() -> None:
    found = settings(
        client_id="me", client_rack="r1", request_timeout_ms="5", retry_backoff_ms="7", retry_backoff_max_ms="8",
        default_api_timeout_ms="9", socket_connection_setup_timeout_ms="10",
    )  # fmt: skip
    assert (found.client_id, found.client_rack, found.request_timeout_ms) == ("me", "r1", 5)
    assert (found.retry_backoff_ms, found.retry_backoff_max_ms) == (7, 8)
    assert (found.retry_timeout_ms, found.connect_timeout_ms) == (9, 10)
    assert settings(delivery_timeout_ms="11").retry_timeout_ms == 11


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("a:1", (("a", 1),)),
        (" a:1 ,b:2,a:1,", (("a", 1), ("b", 2))),
        ("[::1]:9092", (("::1", 9092),)),
        ("SASL_SSL://a.b.c:65535", (("a.b.c", 65535),)),
    ],
)
def test_servers(text: str, servers: object) -> None:
    assert parse_servers(text) == servers


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:0", "a:65536", "a:x", "a:-1", ",", "a:1 b:2", "a:\u0661"])
def test_servers_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"bootstrap\.servers"):
        parse_servers(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request.timeout.ms", "0"),
        ("request.timeout.ms", "1s"),
        ("retry.backoff.ms", "-1"),
        ("default.api.timeout.ms", str(1 << 31)),
        ("security.protocol", "TLS"),
        ("ssl.truststore.type", "JKS"),
        ("ssl.keystore.type", "PKCS12"),
        ("enable.ssl.certificate.verification", "yes"),
        ("sasl.jaas.config", "nonsense"),
    ],
)
def test_malformed_values_name_the_setting(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClientSettings.from_properties({"bootstrap.servers": "a:1", name: value})
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_servers_are_required() -> None:
    with pytest.raises(ConfigError, match=r"bootstrap\.servers"):
        ClientSettings.from_properties({})


def test_sasl_by_jaas_and_by_name() -> None:
    found = settings(security_protocol="sasl_ssl", sasl_mechanism="scram-sha-512", sasl_jaas_config=PLAIN_JAAS).security
    assert (found.protocol, found.mechanism, found.username) == ("SASL_SSL", "SCRAM-SHA-512", "me")
    assert found.password == 'a "b; c\\'
    assert found.uses_tls and found.uses_sasl
    found = settings(security_protocol="SASL_PLAINTEXT", sasl_mechanisms="PLAIN", sasl_username="u").security
    assert (found.mechanism, found.username, found.password) == ("PLAIN", "u", "")
    with pytest.raises(ConfigError, match="needs a user"):
        settings(security_protocol="SASL_SSL", sasl_mechanism="PLAIN")
    with pytest.raises(ConfigError, match=r"needs sasl\.mechanism: one of PLAIN, SCRAM"):
        settings(security_protocol="SASL_SSL", sasl_username="u")
    with pytest.raises(ConfigError, match="GSSAPI"):
        settings(security_protocol="SASL_SSL", sasl_mechanism="GSSAPI", sasl_username="u")


def test_jaas_forms() -> None:
    assert parse_jaas("a.ScramLoginModule required\n username=x\n password='y'") == ("x", "y", False)
    by_token = 'a.ScramLoginModule required username="id" password="mac" tokenauth={};'
    assert parse_jaas(by_token.format("true")) == parse_jaas(by_token.format('"TRUE"')) == ("id", "mac", True)
    assert not parse_jaas(by_token.format("false")).by_token
    for text in (
        "",
        "Krb5LoginModule required;",
        "PlainLoginModule required username=x;",
        "PlainLoginModule username=x",
    ):
        with pytest.raises(ConfigError, match=r"sasl\.jaas\.config"):
            parse_jaas(text)


def test_pem_files_and_texts() -> None:
    found = settings(
        security_protocol="SSL", ssl_truststore_location="/ca", ssl_truststore_type="pem", ssl_key_password="p",
        ssl_keystore_certificate_chain="C\\nD", ssl_keystore_key="K",
    ).security  # fmt: skip
    assert found.authorities == Pem("ssl.truststore.location", path="/ca")
    assert found.certificate == Pem("ssl.keystore.certificate.chain", text="C\nD")
    assert found.key == Pem("ssl.keystore.key", text="K")
    assert found.key_password == "p"
    assert found.verify_host_name and found.verify_certificate


@pytest.mark.parametrize(("value", "verified"), [("", False), ("none", False), ("https", True)])
def test_the_host_name_check_can_be_switched_off(value: str, verified: bool) -> None:
    assert settings(ssl_endpoint_identification_algorithm=value).security.verify_host_name is verified


def test_pickles_and_keeps_secrets() -> None:
    found = settings(
        security_protocol="SASL_SSL", sasl_mechanism="PLAIN", sasl_username="u", sasl_password=" hidden ",
        ssl_key_password="hidden",
        ssl_keystore_key="hidden",
    )  # fmt: skip
    assert found.security.password == " hidden "
    assert pickle.loads(pickle.dumps(found)) == found
    assert "hidden" not in repr(found)


def test_names_without_effect_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        settings(test_only_unknown="1")
        settings(test_only_unknown="2")
    assert [record.getMessage() for record in caplog.records] == [
        "the client setting test.only.unknown has no effect here"
    ]
