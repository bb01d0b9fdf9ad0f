"""TLS for clients: an `SSLContext` from the settings. Sockets are not here.

A key that was given as text is on disk only while it is loaded, in a file that only this user can read, because
OpenSSL's interface in Python reads keys from files alone.
"""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from millrace.client.settings import Pem, Security
from millrace.errors import ConfigError


def context_for(security: Security) -> ssl.SSLContext | None:
    """The context of a connection; None where the protocol has no TLS. ConfigError names the setting that is wrong."""
    if not security.uses_tls:
        return None
    context = _trusting(security.authorities)
    context.check_hostname = security.verify_host_name and security.verify_certificate
    if not security.verify_certificate:
        context.verify_mode = ssl.CERT_NONE
    if security.certificate is not None:
        _load_identity(context, security.certificate, security.key, security.key_password)
    return context


def _trusting(authorities: Pem | None) -> ssl.SSLContext:
    if authorities is None:
        return ssl.create_default_context()
    try:
        if authorities.path:
            return ssl.create_default_context(cafile=authorities.path)
        return ssl.create_default_context(cadata=authorities.text)
    except (OSError, ValueError) as error:
        raise _unusable(authorities, error) from error


def _load_identity(context: ssl.SSLContext, certificate: Pem, key: Pem | None, password: str | None) -> None:
    with ExitStack() as files:
        certificate_path = files.enter_context(_on_disk(certificate))
        key_path = None if key is None else files.enter_context(_on_disk(key))
        try:
            # Without an own file the key stands beside the certificate, as in a PEM key store of Kafka. A password
            # that is never asked for must still be given: otherwise OpenSSL asks at the terminal.
            context.load_cert_chain(certificate_path, key_path, password or "")
        except (OSError, ValueError) as error:
            raise _unusable(certificate if key is None else key, error) from error


@contextmanager
def _on_disk(pem: Pem) -> Iterator[str]:
    if pem.path:
        yield pem.path
        return
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(pem.text)
        file.flush()
        yield file.name


def _unusable(pem: Pem, error: Exception) -> ConfigError:
    what = f"{pem.path}: " if pem.path else ""
    reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)
    return ConfigError(f"{pem.setting}: {what}not usable as PEM ({reason})")
