"""TLS of a listener, and of a broker that calls one: from Kafka's `ssl.` settings to an `SSLContext`, made anew
whenever a file or a setting changes.

A change counts as a whole or not at all: what cannot be used is logged, and what was in use stays. A new context is a
new object, so that an authority which was taken away is not trusted any more, nor a session it vouched for resumed;
connections keep the context they began with. Nothing is read on the event loop but settings.

What a key store is, its content says: PEM, or PKCS#12 (what `keytool` has written since Java 9, whatever its file is
called). Not here: sockets and handshakes (`server.tls`), who a client is (`principals`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from millrace.clock import Clock
from millrace.config import BrokerConfig, Listener
from millrace.config.table import LISTENER_PREFIX
from millrace.errors import ConfigError
from millrace.security.principals import PrincipalMapper, distinguished_name
from millrace.security.x509 import pem_certificates, read_certificate

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 1.0
SOON_MS: Final = 7 * 24 * 3600 * 1000
"""A certificate that ends within this time is worth a warning."""
MAX_STORE_BYTES: Final = 16 * 1024 * 1024

_VERSIONS: Final = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_SUITES_1_3: Final = frozenset({"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"})
_CLIENT_AUTH: Final = {"none": ssl.CERT_NONE, "requested": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_BLOCK: Final = re.compile(rb"-----BEGIN ((?:[A-Z]+ )?PRIVATE KEY|CERTIFICATE)-----(.+?)-----END \1-----", re.DOTALL)
_JKS: Final = (b"\xfe\xed\xfe\xed", b"\xce\xce\xce\xce")
_DER_SEQUENCE: Final = b"\x30"


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The `ssl.` settings of one listener, of which some are secrets."""

    listener: str
    key_store: str
    """A file; empty where `key` and `chain` have the texts themselves."""
    key_store_password: str = field(repr=False)
    key_password: str = field(repr=False)
    key: str = field(repr=False)
    chain: str = field(repr=False)
    trust_store: str
    trust_store_password: str = field(repr=False)
    trusted: str = field(repr=False)
    client_auth: str
    protocols: tuple[str, ...]
    suites: tuple[str, ...]

    @classmethod
    def of(cls, config: BrokerConfig, listener: str, *, needs_identity: bool = True) -> TlsSettings:
        """ConfigError where settings contradict each other."""

        def text(name: str) -> str:
            return str(config.listener_value(listener, name) or "")

        settings = cls(
            listener=listener,
            key_store=text("ssl.keystore.location"),
            key_store_password=text("ssl.keystore.password"),
            key_password=text("ssl.key.password"),
            key=text("ssl.keystore.key"),
            chain=text("ssl.keystore.certificate.chain"),
            trust_store=text("ssl.truststore.location"),
            trust_store_password=text("ssl.truststore.password"),
            trusted=text("ssl.truststore.certificates"),
            client_auth=_client_auth(config, listener),
            protocols=config.listener_value(listener, "ssl.enabled.protocols"),
            suites=config.listener_value(listener, "ssl.cipher.suites"),
        )
        settings._check(needs_identity)
        return settings

    def _check(self, needs_identity: bool) -> None:
        if self.key_store and (self.key or self.chain):
            raise self.wrong("ssl.keystore.location", "and ssl.keystore.key are two identities: set one of them")
        if bool(self.key) != bool(self.chain):
            missing = "ssl.keystore.certificate.chain" if self.key else "ssl.keystore.key"
            raise self.wrong(missing, "is not set: a key and its certificate belong together")
        if needs_identity and not self.has_identity:
            raise self.wrong("ssl.keystore.location", "is not set: name a PEM file with a private key and certificates")
        if self.trust_store and self.trusted:
            raise self.wrong("ssl.truststore.location", "and ssl.truststore.certificates contradict: set one of them")
        if self.client_auth != "none" and not (self.trust_store or self.trusted):
            raise self.wrong("ssl.truststore.location", f"is not set: ssl.client.auth={self.client_auth} needs it")

    @property
    def has_identity(self) -> bool:
        return bool(self.key_store or self.key)

    def wrong(self, setting: str, why: str) -> ConfigError:
        return ConfigError(f"listener {self.listener}: {setting} {why}")

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.key_store, self.trust_store)))


def _client_auth(config: BrokerConfig, listener: str) -> str:
    """On a listener where clients log in, only its own setting counts, not everybody's (KIP-684)."""
    name = "ssl.client.auth"
    logs_in = any(each.name == listener and each.security_protocol == "SASL_SSL" for each in config.listeners)
    if logs_in and not config.is_set(f"{LISTENER_PREFIX}{listener.lower()}.{name}"):
        return "none"
    return str(config.listener_value(listener, name))


class ServerTls:
    """The context of one listener. Owner: the event loop; the work of `look` is done in a thread."""

    def __init__(self, listener: Listener, config: BrokerConfig, clock: Clock) -> None:
        """Reads the files; ConfigError where they cannot be used."""
        self.listener = listener.name
        self._config = config
        self._clock = clock
        rules = str(config.listener_value(self.listener, "ssl.principal.mapping.rules"))
        self.mapper = PrincipalMapper(rules) if listener.security_protocol == "SSL" else None
        """Who a client is by its certificate; None where it logs in besides."""
        settings = TlsSettings.of(config, self.listener)
        self._seen = _Seen(settings, _stamps(settings.files))
        self._loaded = _load(settings)
        self._warned = ""
        self._greet(settings)

    def __repr__(self) -> str:
        return f"ServerTls({self.listener}, {self._loaded.name})"

    @property
    def context(self) -> ssl.SSLContext:
        """What the next connection begins with."""
        return self._loaded.context

    async def look(self) -> None:
        """Take what has changed, if it can be used; otherwise say so once and go on with what there is."""
        self._warn_of_end()
        try:
            settings = TlsSettings.of(self._config, self.listener)
            stamps = await asyncio.to_thread(_stamps, settings.files)
            seen = _Seen(settings, stamps)
            if seen == self._seen:
                self._warned = ""
                return
            # The stamps are older than what is read now: a write in between is seen the next time. What cannot be
            # read or used is tried again each time: the reason need not be in the file.
            self._loaded = await asyncio.to_thread(_load, settings)
            self._seen = seen
        except ConfigError as error:
            if str(error) != self._warned:
                self._warned = str(error)
                logger.error("%s; the certificate in use stays: %s", error, self._loaded.name)  # noqa: TRY400
            return
        self._warned = ""
        self._greet(settings)

    def _greet(self, settings: TlsSettings) -> None:
        logger.info("listener %s shows the certificate of %s", self.listener, self._loaded.name)
        if (some := _SUITES_1_3.intersection(settings.suites)) and some != _SUITES_1_3:
            logger.warning("listener %s: ssl.cipher.suites cannot choose among the suites of TLS 1.3", self.listener)
        self._warn_of_end()

    def _warn_of_end(self) -> None:
        loaded, now_ms = self._loaded, self._clock.wall_ms()
        if loaded.starts_ms <= now_ms < loaded.ends_ms - SOON_MS:
            return
        state = "expired" if now_ms >= loaded.ends_ms else "soon" if now_ms >= loaded.starts_ms else "early"
        if state == loaded.told:
            return
        loaded.told = state
        what = {"expired": "has expired", "soon": "expires soon", "early": "is not good yet"}[state]
        logger.warning("listener %s: the certificate of %s %s", self.listener, loaded.name, what)


class ClientTls:
    """The context with which this broker calls the listener of that name at others. Owner: the event loop."""

    def __init__(self, listener: str, config: BrokerConfig) -> None:
        self.listener = listener
        self._config = config
        self._seen: _Seen | None = None
        self._context: ssl.SSLContext | None = None
        self._warned = ""

    def __repr__(self) -> str:
        return f"ClientTls({self.listener})"

    def check(self) -> None:
        """ConfigError where there is no context to be had. Blocks; for the start."""
        _client_context(self._settings(), self._checks_names())

    async def context(self) -> ssl.SSLContext:
        """What the next call begins with; ConfigError where there never was anything usable."""
        try:
            settings = self._settings()
            checks_names = self._checks_names()
            seen = _Seen(settings, await asyncio.to_thread(_stamps, settings.files), checks_names)
            if self._context is None or seen != self._seen:
                context = await asyncio.to_thread(_client_context, settings, checks_names)
                if self._context is not None:
                    logger.info("calls to %s of other brokers use new certificates", self.listener)
                self._seen, self._context = seen, context
        except ConfigError as error:
            if self._context is None:
                raise
            if str(error) != self._warned:
                self._warned = str(error)
                logger.error("%s; calls go on with the certificates in use", error)  # noqa: TRY400
        else:
            self._warned = ""
        return self._context

    def _settings(self) -> TlsSettings:
        return TlsSettings.of(self._config, self.listener, needs_identity=False)

    def _checks_names(self) -> bool:
        return bool(self._config.listener_value(self.listener, "ssl.endpoint.identification.algorithm"))


def check_tls(config: BrokerConfig) -> None:
    """ConfigError where some listener could not be served, or other brokers not be called, with these settings. Blocks.

    What is in their files may change at any time; so this says whether they could be used now.
    """
    for listener in config.listeners:
        if listener.uses_tls:
            _load(TlsSettings.of(config, listener.name))
            if listener.name == config.inter_broker_listener:
                ClientTls(listener.name, config).check()


@dataclass(frozen=True, slots=True)
class _Seen:
    settings: TlsSettings
    stamps: tuple[tuple[int, ...] | None, ...]
    checks_names: bool = False


@dataclass(slots=True)
class _Loaded:
    context: ssl.SSLContext
    name: str
    starts_ms: int
    ends_ms: int
    told: str = ""
    """What was last said of its dates."""


def _stamps(paths: Sequence[str]) -> tuple[tuple[int, ...] | None, ...]:
    """What differs when a file is another one or has another content."""
    stamps: list[tuple[int, ...] | None] = []
    for path in paths:
        try:
            status = Path(path).stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size))
    return tuple(stamps)


# --- from settings to a context ---------------------------------------------------------------------------------------


def _load(settings: TlsSettings) -> _Loaded:
    """Everything that touches files; ConfigError says which setting and file it was."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE | ssl.OP_NO_RENEGOTIATION
    _choose_versions(context, settings)
    identity = _identity(settings)
    _load_identity(context, identity, settings)
    context.verify_mode = _CLIENT_AUTH[settings.client_auth]
    if settings.client_auth != "none":
        # As in Java, whatever is in the trust store is trusted, be it no root.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        _load_trust(context, settings)
    try:
        own = read_certificate(pem_certificates(identity.certificates)[0])
        name = distinguished_name(own.name)
    except (ValueError, IndexError):  # OpenSSL has taken it, and may be more forgiving
        raise settings.wrong(identity.setting, "has a certificate that is not understood here") from None
    return _Loaded(context, name or "nobody", own.starts_ms, own.ends_ms)


def _client_context(settings: TlsSettings, checks_names: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.check_hostname = checks_names
    _choose_versions(context, settings)
    if settings.has_identity:
        _load_identity(context, _identity(settings), settings)
    if settings.trust_store or settings.trusted:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        _load_trust(context, settings)
    else:
        context.load_default_certs()
    return context


def _choose_versions(context: ssl.SSLContext, settings: TlsSettings) -> None:
    versions = {_VERSIONS[name] for name in settings.protocols}
    if settings.suites:
        older = [suite for suite in settings.suites if suite not in _SUITES_1_3]
        if not older:
            versions.discard(ssl.TLSVersion.TLSv1_2)  # none of its suites is left
        elif len(older) == len(settings.suites):
            versions.discard(ssl.TLSVersion.TLSv1_3)
        if not versions:
            raise settings.wrong("ssl.cipher.suites", "has no suite for ssl.enabled.protocols")
        if older:
            try:
                context.set_ciphers(":".join(_openssl_name(suite, settings) for suite in older))
            except ssl.SSLError:
                raise settings.wrong("ssl.cipher.suites", f"{','.join(older)}: OpenSSL has none of them") from None
    context.minimum_version, context.maximum_version = min(versions), max(versions)


_SUITE: Final = re.compile(r"TLS_(?:(?P<exchange>(?:ECDHE|DHE)_(?:RSA|ECDSA)|RSA)_WITH_)(?P<cipher>[A-Z0-9_]+)")
_CIPHER_NAMES: Final[Sequence[tuple[str, str]]] = (
    (r"CHACHA20_POLY1305_SHA256", r"CHACHA20-POLY1305"),
    (r"(AES|CAMELLIA|ARIA)_(\d+)_GCM_(SHA\d+)", r"\1\2-GCM-\3"),
    (r"AES_(\d+)_CCM(?:_(8))?", r"AES\1-CCM\2"),
    (r"AES_(\d+)_CBC_(SHA\d*)", r"AES\1-\2"),
)


def _openssl_name(suite: str, settings: TlsSettings) -> str:
    """OpenSSL's name for a suite that Java calls by its registered one."""
    if match := _SUITE.fullmatch(suite):
        for pattern, name in _CIPHER_NAMES:
            if cipher := re.fullmatch(pattern, match["cipher"]):
                exchange = "" if match["exchange"] == "RSA" else match["exchange"].replace("_", "-") + "-"
                return exchange + cipher.expand(name)
    raise settings.wrong("ssl.cipher.suites", f"{suite[:100]!r} is no suite that OpenSSL has")


@dataclass(frozen=True, slots=True)
class _Store:
    """What a store holds, in PEM."""

    setting: str
    keys: bytes = field(repr=False)
    certificates: bytes


def _identity(settings: TlsSettings) -> _Store:
    if settings.key_store:
        setting = f"ssl.keystore.location {settings.key_store}"
        return _read_store(settings, setting, settings.key_store, "ssl.keystore.password", settings.key_store_password)
    return _store("ssl.keystore.key", settings.key.encode(), settings.chain.encode())


def _load_identity(context: ssl.SSLContext, identity: _Store, settings: TlsSettings) -> None:
    if not identity.keys:
        raise settings.wrong(identity.setting, "has no private key")
    if not identity.certificates:
        raise settings.wrong(identity.setting, "has no certificate")
    encrypted = b"ENCRYPTED" in identity.keys
    if encrypted and not settings.key_password:
        raise settings.wrong(identity.setting, "has an encrypted private key: set ssl.key.password")
    try:
        with _as_file(identity.keys + identity.certificates) as path:
            # A password that is never asked for must still be given: otherwise OpenSSL asks at the terminal.
            context.load_cert_chain(path, password=settings.key_password)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None)
        if reason == "KEY_VALUES_MISMATCH":
            why = "has a private key that does not belong to its first certificate"
        elif encrypted:
            why = "has a private key that ssl.key.password does not open"
        else:
            why = f"cannot be used ({_plain(reason)})"
        raise settings.wrong(identity.setting, why) from None


def _load_trust(context: ssl.SSLContext, settings: TlsSettings) -> None:
    if settings.trust_store:
        setting = f"ssl.truststore.location {settings.trust_store}"
        password = settings.trust_store_password
        store = _read_store(settings, setting, settings.trust_store, "ssl.truststore.password", password)
    else:
        store = _store("ssl.truststore.certificates", b"", settings.trusted.encode())
    if not store.certificates:
        raise settings.wrong(store.setting, "has no certificate")
    try:
        context.load_verify_locations(cadata=store.certificates.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise settings.wrong(store.setting, f"cannot be used ({_plain(getattr(error, 'reason', None))})") from None


def _plain(reason: str | None) -> str:
    return (reason or "it is no PEM").lower().replace("_", " ")


# --- stores -----------------------------------------------------------------------------------------------------------


def _read_store(settings: TlsSettings, setting: str, path: str, password_setting: str, password: str) -> _Store:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_STORE_BYTES)
    except OSError as error:
        raise settings.wrong(setting, f"cannot be read: {error.strerror or error}") from None
    if data.startswith(_JKS):
        raise settings.wrong(
            setting,
            "is a JKS store: convert it with `keytool -importkeystore -srckeystore FILE -destkeystore FILE.p12 "
            "-deststoretype PKCS12`",
        )
    if data.startswith(_DER_SEQUENCE):
        return _opened(settings, setting, data, password_setting, password)
    store = _store(setting, data, data)
    if password and (store.keys or store.certificates):
        raise settings.wrong(password_setting, "means nothing for a PEM file: a key's password is ssl.key.password")
    return store


def _store(setting: str, keys: bytes, certificates: bytes) -> _Store:
    """Of PEM texts, without what stands between their blocks."""
    key = next((_lines(*block) for block in _BLOCK.findall(keys) if block[0] != b"CERTIFICATE"), b"")
    chain = [_lines(*block) for block in _BLOCK.findall(certificates) if block[0] == b"CERTIFICATE"]
    return _Store(setting, key, b"".join(chain))


def _lines(label: bytes, body: bytes) -> bytes:
    """A PEM block as OpenSSL reads it. As the value of a setting it may be a single line, with blanks between parts."""
    if not re.search(rb"[^A-Za-z0-9+/=\s]", body):  # otherwise it has headers, in lines
        body = b"\n" + b"\n".join(re.findall(rb".{1,64}", b"".join(body.split()))) + b"\n"
    return b"-----BEGIN %b-----%b-----END %b-----\n" % (label, body, label)


def _opened(settings: TlsSettings, setting: str, data: bytes, password_setting: str, password: str) -> _Store:
    """A PKCS#12 store."""
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - slow to load, and seldom needed
    from cryptography.hazmat.primitives.serialization import pkcs12  # noqa: PLC0415

    try:
        content = pkcs12.load_pkcs12(data, password.encode() or None)
    except ValueError:
        raise settings.wrong(setting, f"is no PEM, and no PKCS#12 store that {password_setting} opens") from None
    certificates = [content.cert, *content.additional_certs] if content.cert else content.additional_certs
    key = b""
    if content.key is not None:
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        key = content.key.private_bytes(encoding, form, serialization.NoEncryption())
    pem = b"\n".join(each.certificate.public_bytes(serialization.Encoding.PEM) for each in certificates)
    return _store(setting, key, pem)


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """A name by which OpenSSL can read `data`, which is in memory only."""
    number = os.memfd_create("pem", os.MFD_CLOEXEC)
    with os.fdopen(number, "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{number}"
