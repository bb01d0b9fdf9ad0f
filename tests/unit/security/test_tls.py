"""From settings to a context: what is refused and in which words, and how a listener takes what has changed."""

from __future__ import annotations

import errno
import logging
import re
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509 import load_pem_x509_certificate

from millrace.clock import ManualClock, SystemClock
from millrace.config import BrokerConfig
from millrace.errors import ConfigError
from millrace.security.certificates import make_authority
from millrace.security.tls import SOON_MS, ServerTls, TlsSettings
from support.certificates import Pki

PASSWORD = "not-to-be-seen"


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


def made(settings: dict[str, str], clock: SystemClock | ManualClock | None = None) -> ServerTls:
    config = BrokerConfig({"listeners": "SSL://:0", **settings})
    return ServerTls(config.listeners[0], config, clock or SystemClock())


def shown_name(tls: ServerTls, pki: Pki) -> str:
    """Whose certificate a client gets that connects now."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = tls.context.wrap_bio(to_server, to_client, server_side=True)
    client = pki.context().wrap_bio(to_client, to_server, server_hostname="localhost")
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    certificate = client.getpeercert()
    assert certificate is not None
    return str(dict(part[0] for part in certificate["subject"])["commonName"])  # type: ignore[misc]


def encrypted(key: bytes, password: str) -> bytes:
    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password.encode()),
    )


# --- stores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_", ["PEM", "JKS", None])
def test_a_pem_file_is_taken_whatever_its_type_is_said_to_be(pki: Pki, type_: str | None) -> None:
    settings = {"ssl.keystore.location": str(pki.server), **({"ssl.keystore.type": type_} if type_ else {})}
    assert shown_name(made(settings), pki) == "broker"


def test_texts_instead_of_files(pki: Pki) -> None:
    identity = pki.renew("by-text")
    settings = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.key": encrypted(identity.key, PASSWORD).decode(),
        "ssl.keystore.certificate.chain": identity.certificate.decode(),
        "ssl.key.password": PASSWORD,
        "ssl.truststore.certificates": pki.authority.certificate.decode(),
        "ssl.client.auth": "required",
    }
    tls = made(settings)
    assert shown_name(tls, pki) == "by-text"
    assert len(tls.context.get_ca_certs()) == 1


def test_text_in_one_line_as_properties_files_have_it(pki: Pki) -> None:
    """Kafka's documentation writes certificates with blanks where the lines end."""
    identity = pki.renew("in-a-line")

    def flat(pem: bytes) -> str:
        return pem.decode().strip().replace("\n", " ")

    settings = {
        "ssl.keystore.key": flat(identity.key),
        "ssl.keystore.certificate.chain": flat(identity.certificate),
        "ssl.truststore.certificates": flat(pki.authority.certificate) * 2,
        "ssl.client.auth": "requested",
    }
    assert shown_name(made(settings), pki) == "in-a-line"


def test_what_stands_around_the_blocks_does_not_matter(pki: Pki) -> None:
    pki.server.write_bytes("Bag Attributes: für uns\n".encode("latin-1") + pki.server.read_bytes() + b"\nthe end")
    assert shown_name(made(pki.settings()), pki) == "broker"


def test_a_pkcs12_store(pki: Pki, tmp_path: Path) -> None:
    identity = pki.renew("twelve")
    store = tmp_path / "store.p12"
    key = serialization.load_pem_private_key(identity.key, None)
    certificate = load_pem_x509_certificate(identity.certificate)
    locked = serialization.BestAvailableEncryption(PASSWORD.encode())
    store.write_bytes(pkcs12.serialize_key_and_certificates(b"me", key, certificate, None, locked))  # type: ignore[arg-type]
    settings = {"ssl.keystore.location": str(store), "ssl.keystore.password": PASSWORD}
    assert shown_name(made(settings), pki) == "twelve"
    refused(
        {**settings, "ssl.keystore.password": "wrong"},
        f"ssl.keystore.location {store} is no PEM, and no PKCS#12 store that ssl.keystore.password opens",
    )


@pytest.mark.skipif(shutil.which("keytool") is None, reason="keytool of a JDK is not there")
def test_stores_of_keytool(pki: Pki, tmp_path: Path) -> None:
    """A key store as most Kafka brokers have it, of type JKS by its settings and PKCS#12 by its content."""
    store, trust, old = (tmp_path / name for name in ("store.jks", "trust.jks", "old.jks"))

    def keytool(*arguments: str) -> None:
        subprocess.run(["keytool", "-noprompt", "-storepass", PASSWORD, *arguments], check=True, capture_output=True)

    names = ("-genkeypair", "-alias", "me", "-keyalg", "EC", "-dname", "CN=by-keytool")
    keytool(*names, "-keystore", str(store), "-storetype", "PKCS12")
    keytool("-importcert", "-alias", "ca", "-file", str(pki.trusted), "-keystore", str(trust), "-storetype", "PKCS12")
    keytool(*names, "-keystore", str(old), "-storetype", "JKS", "-keypass", PASSWORD)
    settings = {
        "ssl.keystore.location": str(store),
        "ssl.keystore.password": PASSWORD,
        "ssl.key.password": PASSWORD,
        "ssl.truststore.location": str(trust),
        "ssl.truststore.password": PASSWORD,
        "ssl.client.auth": "required",
    }
    tls = made(settings)
    assert repr(tls) == "ServerTls(SSL, CN=by-keytool)"
    (trusted,) = tls.context.get_ca_certs()
    assert trusted["subject"] == ((("commonName", "the authority"),),)
    refused({**settings, "ssl.keystore.location": str(old)}, "is a JKS store: convert it with `keytool")


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(settings: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^listener SSL: .*{re.escape(text)}") as caught:
        made(settings)
    assert "\n" not in str(caught.value)
    assert PASSWORD not in str(caught.value)
    assert "PRIVATE KEY" not in str(caught.value)


def test_contradictions(pki: Pki) -> None:
    key = pki.renew().key.decode()
    good = pki.settings()
    refused({}, "ssl.keystore.location is not set: name a PEM file")
    refused({"ssl.keystore.key": key}, "ssl.keystore.certificate.chain is not set")
    refused({"ssl.keystore.certificate.chain": "x"}, "ssl.keystore.key is not set")
    refused({**good, "ssl.keystore.key": key, "ssl.keystore.certificate.chain": "x"}, "are two identities")
    refused({**good, "ssl.truststore.certificates": "x"}, "ssl.truststore.location and ssl.truststore.certificates")
    refused({**good, "ssl.client.auth": "required", "ssl.truststore.location": ""}, "ssl.client.auth=required needs it")
    refused({**good, "ssl.keystore.password": PASSWORD}, "ssl.keystore.password means nothing for a PEM file")


Spoil = Callable[[Pki], object]


def without_a_date(pki: Pki) -> None:
    """A certificate that OpenSSL takes, until somebody asks it for the date."""
    identity = pki.renew()
    der = ssl.PEM_cert_to_DER_cert(identity.certificate.decode())
    start = der.index(b"\x17\x0d") + 2
    spoilt = ssl.DER_cert_to_PEM_cert(der[:start] + b"????" + der[start + 4 :])
    pki.server.write_bytes(identity.key + spoilt.encode())


SPOILT: dict[str, tuple[Spoil, str]] = {
    "missing": (lambda pki: pki.server.unlink(), "cannot be read: No such file or directory"),
    "directory": (lambda pki: (pki.server.unlink(), pki.server.mkdir()), "cannot be read: Is a directory"),
    "empty": (lambda pki: pki.server.write_bytes(b""), "has no private key"),
    "no key": (lambda pki: pki.server.write_bytes(pki.renew().certificate), "has no private key"),
    "no certificate": (lambda pki: pki.server.write_bytes(pki.renew().key), "has no certificate"),
    "half a key": (lambda pki: pki.server.write_bytes(pki.server.read_bytes()[:100]), "has no private key"),
    "another's key": (
        lambda pki: pki.server.write_bytes(pki.renew().key + pki.renew().certificate),
        "has a private key that does not belong to its first certificate",
    ),
    "garbled": (
        lambda pki: pki.server.write_bytes(pki.server.read_bytes().replace(b"M", b"?")),
        "cannot be used",
    ),
    "encrypted": (
        lambda pki: pki.server.write_bytes(encrypted((new := pki.renew()).key, PASSWORD) + new.certificate),
        "has an encrypted private key: set ssl.key.password",
    ),
    "jks": (lambda pki: pki.server.write_bytes(b"\xfe\xed\xfe\xed" + bytes(100)), "is a JKS store"),
    "no date": (without_a_date, "has a certificate that is not understood here"),
    "der": (lambda pki: pki.server.write_bytes(b"\x30\x82" + bytes(100)), "no PKCS#12 store"),
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_key_stores_that_cannot_be_used(pki: Pki, spoil: str) -> None:
    work, text = SPOILT[spoil]
    work(pki)
    refused(pki.settings(), text)
    refused(pki.settings(), f"ssl.keystore.location {pki.server} ")


def test_a_wrong_password_of_a_key(pki: Pki) -> None:
    identity = pki.renew()
    pki.server.write_bytes(encrypted(identity.key, "another") + identity.certificate)
    refused({**pki.settings(), "ssl.key.password": PASSWORD}, "has a private key that ssl.key.password does not open")


def test_trust_stores_that_cannot_be_used(pki: Pki) -> None:
    settings = pki.settings("required")
    for content, text in (
        (b"", "has no certificate"),
        (b"-----BEGIN CERTIFICATE-----\nQUJD\n-----END CERTIFICATE-----", "cannot be used"),
    ):
        pki.trusted.write_bytes(content)
        refused(settings, f"ssl.truststore.location {pki.trusted} {text}")
    pki.trusted.unlink()
    refused(settings, "cannot be read")


# --- versions and suites ----------------------------------------------------------------------------------------------


def suites(settings: dict[str, str]) -> set[str]:
    return {suite["name"] for suite in made(settings).context.get_ciphers() if suite["protocol"] != "TLSv1.3"}


def test_versions(pki: Pki) -> None:
    both = made(pki.settings()).context
    assert (both.minimum_version, both.maximum_version) == (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
    newest = made({**pki.settings(), "ssl.enabled.protocols": "TLSv1.3"}).context
    assert newest.minimum_version is ssl.TLSVersion.TLSv1_3
    with pytest.raises(ConfigError, match=r"ssl\.enabled\.protocols=TLSv1\.1: must hold only TLSv1\.2, TLSv1\.3"):
        made({**pki.settings(), "ssl.enabled.protocols": "TLSv1.1"})


@pytest.mark.parametrize(
    ("registered", "openssl"),
    [
        ("TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384", "ECDHE-RSA-AES256-GCM-SHA384"),
        ("TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", "ECDHE-ECDSA-AES128-GCM-SHA256"),
        ("TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256", "ECDHE-ECDSA-CHACHA20-POLY1305"),
        ("TLS_DHE_RSA_WITH_AES_128_GCM_SHA256", "DHE-RSA-AES128-GCM-SHA256"),
        ("TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256", "ECDHE-ECDSA-AES128-SHA256"),
        ("TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA", "ECDHE-RSA-AES256-SHA"),
        ("TLS_RSA_WITH_AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("TLS_ECDHE_ECDSA_WITH_AES_256_CCM", "ECDHE-ECDSA-AES256-CCM"),
        ("TLS_ECDHE_ECDSA_WITH_AES_128_CCM_8", "ECDHE-ECDSA-AES128-CCM8"),
    ],
)
def test_suites_by_their_registered_names(pki: Pki, registered: str, openssl: str) -> None:
    assert suites({**pki.settings(), "ssl.cipher.suites": registered}) == {openssl}


def test_suites_decide_on_versions(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    old, new = "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", "TLS_AES_128_GCM_SHA256"
    only_old = made({**pki.settings(), "ssl.cipher.suites": old}).context
    assert only_old.maximum_version is ssl.TLSVersion.TLSv1_2
    assert not caplog.records
    only_new = made({**pki.settings(), "ssl.cipher.suites": new}).context
    assert only_new.minimum_version is ssl.TLSVersion.TLSv1_3
    assert "ssl.cipher.suites cannot choose among the suites of TLS 1.3" in caplog.text
    refused({**pki.settings(), "ssl.cipher.suites": old, "ssl.enabled.protocols": "TLSv1.3"}, "has no suite for")
    refused({**pki.settings(), "ssl.cipher.suites": "RC4-MD5"}, "'RC4-MD5' is no suite that OpenSSL has")
    refused({**pki.settings(), "ssl.cipher.suites": "TLS_RSA_WITH_AES_512_GCM_SHA384"}, "OpenSSL has none of them")


def test_a_listener_has_its_own_settings(pki: Pki) -> None:
    other = pki.home / "other.pem"
    pki.authority.issue("other", hosts=["localhost"]).write(other)
    config = BrokerConfig(
        {
            "listeners": "SSL://:0,INSIDE://:1",
            "listener.security.protocol.map": "SSL:SSL,INSIDE:SSL",
            **pki.settings(),
            "listener.name.inside.ssl.keystore.location": str(other),
            "listener.name.inside.ssl.principal.mapping.rules": "RULE:CN=(.*)/$1/",
        }
    )
    outside, inside = (ServerTls(listener, config, SystemClock()) for listener in config.listeners)
    assert (shown_name(outside, pki), shown_name(inside, pki)) == ("broker", "other")
    assert inside.mapper is not None
    assert inside.mapper.name_of("CN=x") == "x"


def test_who_logs_in_need_not_show_a_certificate_too_unless_the_listener_says_so(pki: Pki) -> None:
    """KIP-684: what is required of everybody is not required here."""
    common = {"listeners": "SASL_SSL://:0", **pki.settings("required")}
    for own, expected in (
        ({}, ssl.CERT_NONE),
        ({"listener.name.sasl_ssl.ssl.client.auth": "required"}, ssl.CERT_REQUIRED),
    ):
        config = BrokerConfig({**common, **own})
        assert ServerTls(config.listeners[0], config, SystemClock()).context.verify_mode is expected


def test_secrets_are_not_shown(pki: Pki) -> None:
    settings = {**pki.settings(), "ssl.key.password": PASSWORD, "ssl.truststore.password": PASSWORD}
    config = BrokerConfig({"listeners": "SSL://:0", **settings})
    assert PASSWORD not in repr(TlsSettings.of(config, "SSL")) + repr(config)


# --- changes ----------------------------------------------------------------------------------------------------------


async def test_nothing_changes_while_files_do_not(pki: Pki) -> None:
    tls = made(pki.settings())
    before = tls.context
    await tls.look()
    assert tls.context is before


async def test_a_new_file_is_taken(pki: Pki) -> None:
    tls = made(pki.settings())
    before = tls.context
    pki.renew("second")
    await tls.look()
    assert tls.context is not before
    assert shown_name(tls, pki) == "second"


async def test_a_file_that_is_linked_is_taken(pki: Pki, tmp_path: Path) -> None:
    """As Kubernetes brings secrets: the file stays, a link above it changes."""
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        pki.authority.issue(version, hosts=["localhost"]).write(tmp_path / version / "tls.pem")
    (tmp_path / "data").symlink_to("one")
    tls = made({"ssl.keystore.location": str(tmp_path / "data" / "tls.pem")})
    (tmp_path / "new").symlink_to("two")
    (tmp_path / "new").replace(tmp_path / "data")
    await tls.look()
    assert shown_name(tls, pki) == "two"


@pytest.mark.parametrize("spoil", SPOILT)
async def test_what_cannot_be_used_changes_nothing(pki: Pki, spoil: str, caplog: pytest.LogCaptureFixture) -> None:
    tls = made(pki.settings())
    SPOILT[spoil][0](pki)
    for _ in range(3):
        await tls.look()
    assert shown_name(tls, pki) == "broker"
    (said,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert str(pki.server) in said.getMessage()
    assert "the certificate in use stays: CN=broker" in said.getMessage()
    if pki.server.is_dir():
        pki.server.rmdir()
    pki.renew("repaired")
    await tls.look()
    assert shown_name(tls, pki) == "repaired"


async def test_what_could_not_be_read_is_read_as_soon_as_it_can_be(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file was right at once: there was no descriptor left to open it with."""
    tls = made(pki.settings())
    pki.renew("renewed")
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Path, "open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        await tls.look()
    assert shown_name(tls, pki) == "broker"
    await tls.look()
    assert shown_name(tls, pki) == "renewed"


async def test_an_authority_that_is_taken_away_is_not_trusted_any_more(pki: Pki) -> None:
    tls = made(pki.settings("required"))
    other = make_authority("the next")
    pki.trusted.write_bytes(pki.authority.certificate + other.certificate)
    await tls.look()
    assert len(tls.context.get_ca_certs()) == 2
    pki.trusted.write_bytes(other.certificate)
    await tls.look()
    (trusted,) = tls.context.get_ca_certs()
    assert trusted["subject"] == ((("commonName", "the next"),),)


async def test_dynamic_settings_are_taken(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    config = BrokerConfig({"listeners": "SSL://:0", **pki.settings()})
    tls = ServerTls(config.listeners[0], config, SystemClock())
    other = pki.home / "other.pem"
    pki.authority.issue("other", hosts=["localhost"]).write(other)
    config.apply_dynamic({}, {"listener.name.ssl.ssl.keystore.location": str(other)})
    await tls.look()
    assert shown_name(tls, pki) == "other"
    config.apply_dynamic({}, {"ssl.keystore.key": "x"})
    for _ in range(3):
        await tls.look()
    assert caplog.text.count("are two identities") == 1
    config.apply_dynamic({}, {})
    await tls.look()
    assert shown_name(tls, pki) == "broker"


async def test_the_end_of_a_certificate_is_told(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    pki.authority.issue("broker", hosts=["h"], days=30, clock=clock).write(pki.server)
    tls = made(pki.settings(), clock)
    assert not caplog.records
    clock.advance(30 * 86_400 - SOON_MS / 1000)
    for _ in range(3):
        await tls.look()
    clock.advance(SOON_MS / 1000)
    for _ in range(3):
        await tls.look()
    assert [record.getMessage() for record in caplog.records] == [
        "listener SSL: the certificate of CN=broker expires soon",
        "listener SSL: the certificate of CN=broker has expired",
    ]


def test_an_expired_certificate_is_used_and_told(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    pki.renew(expired=True)
    made(pki.settings())
    assert "listener SSL: the certificate of CN=broker has expired" in caplog.text
