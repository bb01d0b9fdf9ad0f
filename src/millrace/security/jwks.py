"""The keys by which access tokens are verified: a JSON Web Key Set (RFC 7517), from a file or an https endpoint.

Invariants
- Only public keys for signatures are taken, each for the algorithms of its own kind: an RSA key never verifies an HMAC.
- A URL is used only if it is on the list of allowed ones, letter by letter; redirects are not followed, proxies are
  not asked, and plain http is refused (CVE-2025-27817).
- There are always keys: without any there is no start, and what cannot be read later leaves the old ones in use.
- Somebody who sends tokens with made-up key ids causes at most one look per `EARLY_LOOK_S`.

Owner: the event loop. Reading and fetching happen in a thread, within a time and a size. Not here: what a token must
say (`oauth`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import logging
import os
import socket
import ssl
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from joserfc.errors import JoseError
from joserfc.jwk import ECKey, JWKRegistry, Key, OKPKey, RSAKey

from millrace.clock import Clock
from millrace.errors import ConfigError, MillraceError
from millrace.tasks import Tasks

logger = logging.getLogger(__name__)

MAX_JWKS_BYTES: Final = 1024 * 1024
MAX_KEYS: Final = 200
MIN_RSA_BITS: Final = 2048
FETCH_S: Final = 10.0
"""How long an endpoint may take to answer, altogether."""
CONNECT_S: Final = 5.0
FILE_LOOK_S: Final = 5.0
"""How often a file is looked at for changes."""
EARLY_LOOK_S: Final = 10.0
"""How soon after a look an unknown key id may cause another."""

_RSA: Final = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_OF_CURVE: Final = {
    "P-256": frozenset({"ES256"}),
    "P-384": frozenset({"ES384"}),
    "P-521": frozenset({"ES512"}),
    "Ed25519": frozenset({"EdDSA", "Ed25519"}),
    "Ed448": frozenset({"EdDSA"}),
}
_PUBLIC: Final = ("kty", "n", "e", "crv", "x", "y")
ALGORITHMS: Final = _RSA.union(*_OF_CURVE.values())
"""By which tokens may be signed. Neither `none` nor anything with a shared secret is among them."""


class JwksError(MillraceError):
    """Keys could not be had; the text says from where and why."""


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """One public key, and what it may verify."""

    key_id: str | None
    algorithms: frozenset[str]
    key: Key = field(repr=False)


def parse_jwks(raw: bytes) -> tuple[VerificationKey, ...]:
    """The keys of a set that can verify tokens; others in it are passed over. JwksError where there is none."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        raise JwksError("it is not JSON") from None
    rows = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise JwksError("it has no list called keys")
    keys = tuple(filter(None, map(_read_key, rows[:MAX_KEYS])))
    if not keys:
        raise JwksError("it has no public key that can verify a signature")
    return keys


def _read_key(row: Any) -> VerificationKey | None:
    if not isinstance(row, dict) or row.get("kty") not in ("RSA", "EC", "OKP") or row.get("use", "sig") != "sig":
        return None
    key_id = row.get("kid")
    try:
        key = JWKRegistry.import_key({name: row[name] for name in _PUBLIC if name in row})
    except (JoseError, ValueError, TypeError, KeyError):
        logger.warning("a key of the key set cannot be read and is left out: kid %.100r", key_id)
        return None
    algorithms = _algorithms_of(key)
    named = row.get("alg")
    if named is not None:
        algorithms = frozenset(each for each in algorithms if each == named)
    if not algorithms or not (key_id is None or isinstance(key_id, str)):
        return None
    return VerificationKey(key_id, algorithms, key)


def _algorithms_of(key: Key) -> frozenset[str]:
    if isinstance(key, RSAKey):
        return _RSA if key.raw_value.key_size >= MIN_RSA_BITS else frozenset()
    if isinstance(key, ECKey | OKPKey):
        return _OF_CURVE.get(key.curve_name, frozenset())
    return frozenset()


def select_key(keys: Sequence[VerificationKey], key_id: str | None, algorithm: str) -> VerificationKey | None:
    """The key that a token names; one that names none is taken to mean the only one that fits."""
    fitting = [each for each in keys if algorithm in each.algorithms and key_id in (None, each.key_id)]
    return fitting[0] if len(fitting) == 1 or (fitting and key_id is not None) else None


# --- where they come from ---------------------------------------------------------------------------------------------


class JwksFile:
    """A key set in a file, read again when it has changed."""

    look_s: float = FILE_LOOK_S

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return f"JwksFile({self._path})"

    async def load(self) -> tuple[VerificationKey, ...] | None:
        """The keys, or None where the file is as it was. JwksError."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> tuple[VerificationKey, ...] | None:
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                seen = (status.st_ino, status.st_mtime_ns, status.st_size)
                if seen == self._seen:
                    return None
                raw = file.read(MAX_JWKS_BYTES + 1)
        except OSError as error:
            raise JwksError(f"{self._path}: {error.strerror or error}") from None
        try:
            keys = parse_jwks(_bounded(raw))
        except JwksError as error:
            raise JwksError(f"{self._path}: {error}") from None
        self._seen = seen
        return keys


class JwksEndpoint:
    """A key set behind an https URL."""

    def __init__(self, url: str, *, look_s: float, authorities: Path | None, clock: Clock) -> None:
        """`authorities` is a PEM file with the certificates to trust instead of the system's."""
        self.look_s = look_s
        self._url = url
        self._clock = clock
        try:
            self._tls = ssl.create_default_context(cafile=authorities)
        except OSError as error:  # an SSLError is one, too
            raise ConfigError(f"the authorities trusted for {url} cannot be read from {authorities}: {error}") from None
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_2

    def __repr__(self) -> str:
        return f"JwksEndpoint({self._url})"

    async def load(self) -> tuple[VerificationKey, ...]:
        """The keys as they are now. JwksError."""
        parts = urlsplit(self._url)
        connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=CONNECT_S, context=self._tls)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        # A time-out of a socket begins anew with every byte: whoever sends one at a time is cut off here.
        timer = self._clock.call_later(FETCH_S, functools.partial(_cut, connection))
        ends_at = self._clock.monotonic() + FETCH_S
        try:
            return await asyncio.to_thread(
                lambda: parse_jwks(_get(connection, path, lambda: self._clock.monotonic() < ends_at))
            )
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise JwksError(f"{self._url}: {str(error) or type(error).__name__}") from None
        except JwksError as error:
            raise JwksError(f"{self._url}: {error}") from None
        finally:
            timer.cancel()
            _cut(connection)


def _get(connection: http.client.HTTPSConnection, path: str, in_time: Callable[[], bool]) -> bytes:
    try:
        connection.connect()
        if not in_time():  # and there was nothing to cut yet
            raise JwksError("it took too long to connect")
        connection.request("GET", path, headers={"Accept": "application/json", "Connection": "close"})
        with connection.getresponse() as response:
            if response.status != http.client.OK:
                raise JwksError(f"it answered {response.status}")
            return _bounded(response.read(MAX_JWKS_BYTES + 1))
    finally:
        connection.close()


def _cut(connection: http.client.HTTPSConnection) -> None:
    """End what a thread waits for; harmless when it is over."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)


def _bounded(raw: bytes) -> bytes:
    if len(raw) > MAX_JWKS_BYTES:
        raise JwksError(f"it is larger than {MAX_JWKS_BYTES} bytes")
    return raw


def source_for(
    url: str, allowed: Collection[str], *, look_s: float, authorities: Path | None, clock: Clock
) -> JwksFile | JwksEndpoint:
    """Where a URL says that the keys are; ConfigError for one that may not be used."""
    if url not in allowed:
        raise ConfigError(f"sasl.oauthbearer.jwks.endpoint.url: {url} is not in sasl.oauthbearer.allowed.urls")
    parts = urlsplit(url)
    try:
        _ = parts.port
    except ValueError:
        raise ConfigError(f"sasl.oauthbearer.jwks.endpoint.url: {url} has no proper port") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError("sasl.oauthbearer.jwks.endpoint.url must hold no password")
    if parts.scheme == "https" and parts.hostname:
        return JwksEndpoint(url, look_s=look_s, authorities=authorities, clock=clock)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return JwksFile(Path(unquote(parts.path)))
    raise ConfigError(f"sasl.oauthbearer.jwks.endpoint.url: {url} is neither https://HOST/... nor file:///PATH")


# --- the keys in use --------------------------------------------------------------------------------------------------


class KeyRing:
    """The keys that are in use now, kept up to date."""

    def __init__(
        self,
        source: JwksFile | JwksEndpoint,
        *,
        clock: Clock,
        first_pause_s: float = 0.1,
        longest_pause_s: float = 10.0,
    ) -> None:
        """A failed look is repeated after `first_pause_s`, then after twice that, up to `longest_pause_s`."""
        self._source = source
        self._clock = clock
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._keys: tuple[VerificationKey, ...] = ()
        self._tasks = Tasks(clock)
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = -EARLY_LOOK_S

    def __repr__(self) -> str:
        return f"KeyRing({self._source!r}, {len(self._keys)} keys)"

    async def start(self) -> None:
        """Return with keys, or raise ConfigError: nobody may log in by tokens that nothing verifies."""
        deadline = self._clock.monotonic() + self._longest_pause_s
        pause_s = self._first_pause_s
        while True:
            try:
                await self._load()
                break
            except JwksError as error:
                if isinstance(self._source, JwksFile) or self._clock.monotonic() + pause_s >= deadline:
                    raise ConfigError(f"OAUTHBEARER has no keys to verify tokens with: {error}") from None
            await self._clock.sleep(pause_s)
            pause_s = self._longer(pause_s)
        self._tasks.keep("keys of OAUTHBEARER", self._keep_current)

    async def stop(self) -> None:
        await self._tasks.stop()

    def find(self, key_id: str | None, algorithm: str) -> VerificationKey | None:
        return select_key(self._keys, key_id, algorithm)

    async def look_early(self) -> None:
        """Return when the source has been looked at, unless that was a moment ago: then nothing is done."""
        if self._looking is None:
            if self._clock.monotonic() - self._looked_at < EARLY_LOOK_S:
                return
            self._looking = self._tasks.start("early look for keys of OAUTHBEARER", self._look())
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        try:
            await self._load()
        except JwksError as error:
            logger.warning("the keys of OAUTHBEARER stay as they are: %s", error)
        finally:
            self._looking = None

    async def _keep_current(self) -> None:
        pause_s = self._source.look_s
        while True:
            await self._clock.sleep(pause_s)
            try:
                await self._load()
                pause_s = self._source.look_s
            except JwksError as error:
                failed_before = pause_s < self._source.look_s
                pause_s = min(self._longer(pause_s) if failed_before else self._first_pause_s, self._source.look_s)
                logger.warning(
                    "the keys of OAUTHBEARER stay as they are, and are asked for again in %.1f s: %s", pause_s, error
                )

    async def _load(self) -> None:
        self._looked_at = self._clock.monotonic()
        keys = await self._source.load()
        if keys is not None:
            self._keys = keys
            logger.info("%d keys verify tokens of OAUTHBEARER", len(keys))

    def _longer(self, pause_s: float) -> float:
        return min(pause_s * 2, self._longest_pause_s)
