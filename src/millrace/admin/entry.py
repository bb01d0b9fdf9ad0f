"""Whether a cluster lets a client in, seen before it tries for a minute; if not, one line says what to do.

The project's own client asks. Where it gets no answer, the port is tried for what it wants instead: TLS, a login, both
or neither. A failure that may pass is none here: clients have their own patience. What only librdkafka can do
(Kerberos, PKCS#12 files, OAuth) is left to it.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from typing import Any, Final

from millrace.admin.errors import AdminError, Unreachable
from millrace.client.blocking import BlockingConnection
from millrace.client.requests import metadata
from millrace.client.sasl import SaslClient
from millrace.client.settings import Address, ClientSettings
from millrace.client.tls import context_for
from millrace.errors import ApiError, ConfigError, ErrorCode, MillraceError
from millrace.wire.messages.sasl import SaslHandshakeRequest

_CLIENT_ID: Final = "millrace-cli"
_TIMEOUT_MS: Final = 3000
_SECURITY: Final = ("security.", "sasl.", "ssl.", "enable.ssl.")
_NOT_OURS: Final = frozenset({"ssl.keystore.location", "ssl.engine.location"})
"""Settings by which the library reads keys that the project's own client does not."""
_REFUSALS: Final = frozenset(
    {ErrorCode.SASL_AUTHENTICATION_FAILED, ErrorCode.UNSUPPORTED_SASL_MECHANISM, ErrorCode.ILLEGAL_SASL_STATE}
)
_WANTED: Final = {
    "PLAINTEXT": "neither TLS nor a login",
    "SSL": "TLS",
    "SASL_PLAINTEXT": "a login without TLS",
    "SASL_SSL": "TLS and a login",
}


class WrongProtocol(AdminError):
    """The broker wants to be spoken to otherwise."""

    def __init__(self, address: Address, *, given: str, wanted: str) -> None:
        host, port = address
        super().__init__(f"the broker at {host}:{port} wants {_WANTED[wanted]}, not security.protocol={given}")
        self.wanted = wanted

    @property
    def settings(self) -> list[str]:
        """What has to be said besides the protocol."""
        own = ["ssl.ca.location"] if self.wanted.endswith("SSL") else []
        login = ["sasl.mechanism", "sasl.username", "sasl.password"] if self.wanted.startswith("SASL_") else []
        return [*own, *login]


class NoAddress(AdminError):
    """What was given is no HOST:PORT."""

    def __init__(self, text: str) -> None:
        super().__init__(f"an address is HOST:PORT, not '{text}'", mistake=True)
        self.text = text


def require_reachable(bootstrap: str) -> Address:
    """The first address that accepts a connection; fails now, with a reason, where none does."""
    reason = "no address given"
    for address in bootstrap.split(","):
        host, colon, port = address.strip().rpartition(":")
        if not colon or not port.isdigit():
            raise NoAddress(address)
        found = (host.strip("[]"), int(port))
        try:
            socket.create_connection(found, timeout=_TIMEOUT_MS / 1000).close()
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return found
    raise Unreachable(f"no broker answers at {bootstrap} ({reason})")


def require_entry(bootstrap: str, settings: Mapping[str, Any]) -> None:
    """Fail now, with a reason, where the broker does not let this client in, or the client does not trust it."""
    address = require_reachable(bootstrap)
    if settings.keys() & _NOT_OURS:
        return
    ours = {name: str(value) for name, value in settings.items() if name.startswith(_SECURITY)}
    try:
        known = ClientSettings.from_properties({**ours, "bootstrap.servers": bootstrap})
    except ConfigError:
        return
    try:
        _ask(address, known)
    except ApiError as error:
        if error.code in _REFUSALS:
            raise
        if error.code == ErrorCode.NETWORK_EXCEPTION:
            refuse_other_protocol(address, known.security.protocol)
    except ConfigError:  # of TLS: it is not trusted, or not spoken
        refuse_other_protocol(address, known.security.protocol)
        raise
    except MillraceError:  # what came was no answer
        refuse_other_protocol(address, known.security.protocol)


def _ask(address: Address, settings: ClientSettings) -> None:
    with BlockingConnection(
        *address,
        client_id=_CLIENT_ID,
        timeout_ms=_TIMEOUT_MS,
        ssl=context_for(settings.security),
        sasl=SaslClient.for_security(settings.security),
    ) as connection:
        connection.request(metadata([]))


def refuse_other_protocol(address: Address, given: str) -> None:
    """WrongProtocol where the broker wants to be spoken to otherwise; nothing where it does not say so."""
    wanted = protocol_at(address)
    if wanted is not None and wanted != given:
        raise WrongProtocol(address, given=given, wanted=wanted)


def protocol_at(address: Address) -> str | None:
    """The security protocol that is spoken there, if anybody says so."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is told to whoever it is
    for suffix, tls in (("SSL", context), ("PLAINTEXT", None)):
        asks_for_login = _asks_for_login(address, tls)
        if asks_for_login is not None:
            return f"SASL_{suffix}" if asks_for_login else suffix
    return None


def _asks_for_login(address: Address, context: ssl.SSLContext | None) -> bool | None:
    """Whether a login is what comes first; None where this is not the protocol that is spoken there."""
    with BlockingConnection(*address, client_id=_CLIENT_ID, timeout_ms=_TIMEOUT_MS, ssl=context) as connection:
        try:
            answer = connection.request(SaslHandshakeRequest(mechanism="none"))
        except ApiError as error:
            return None if error.code in {ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT} else False
        except MillraceError:
            return None
    return bool(answer.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM)
