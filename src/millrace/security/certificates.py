"""Making certificates: an authority of one's own, and what it signs for brokers and clients.

For `--secure` clusters and tests; who has an authority already needs none of this. Keys are P-256: small, quick to sign
with, and known to every client. The library is loaded when the first certificate is made, not before.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millrace.clock import Clock, SystemClock

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY_DAYS: Final = 3650
CERTIFICATE_DAYS: Final = 825
"""More is refused by some clients."""
_BACKDATED: Final = timedelta(hours=1)
"""Clocks differ."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes = field(repr=False)

    def write(self, path: Path) -> None:
        """Both in one file that only this user can read, as `ssl.keystore.location` wants it; whole or not at all."""
        write_private(path, self.key + self.certificate)


@dataclass(frozen=True, slots=True)
class Authority:
    """What vouches for certificates; its own certificate is what others trust."""

    certificate: bytes
    key: bytes = field(repr=False)

    def issue(
        self,
        common_name: str,
        *,
        hosts: Sequence[str] = (),
        client: bool = False,
        organization: str = "",
        days: int = CERTIFICATE_DAYS,
        clock: Clock | None = None,
    ) -> Identity:
        """A certificate for a server that is reached by `hosts` (names and addresses), for a client, or for both.

        ValueError where the key is none, is not this authority's, or a host cannot be in a certificate.
        """
        from cryptography import x509  # noqa: PLC0415
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID  # noqa: PLC0415

        own_key = _loaded_key(self.key)
        authority = _of_key(self.certificate, own_key)
        key = _new_key()
        parts = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if organization:
            parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
        uses = [ExtendedKeyUsageOID.SERVER_AUTH] if hosts else []
        if client or not hosts:
            uses.append(ExtendedKeyUsageOID.CLIENT_AUTH)
        builder = (
            _builder(key, x509.Name(parts), authority.subject, days, clock)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
                    authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
                ),
                critical=False,
            )
        )
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        return _signed(builder, key, own_key)

    def write(self, certificate_path: Path, key_path: Path) -> None:
        """The key first: who stops in between can make the certificate from it, and nobody has been given another."""
        write_private(key_path, self.key)
        write_public(certificate_path, self.certificate)


def make_authority(
    name: str, *, key: bytes | None = None, days: int = AUTHORITY_DAYS, clock: Clock | None = None
) -> Authority:
    """A new authority, with a key that is there already (PEM; ValueError where it is none) or one of its own."""
    from cryptography import x509  # noqa: PLC0415
    from cryptography.x509.oid import NameOID  # noqa: PLC0415

    own_key = _new_key() if key is None else _loaded_key(key)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        _builder(own_key, subject, subject, days, clock)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    made = _signed(builder, own_key, own_key)
    return Authority(made.certificate, made.key)


def is_good_for(pem: bytes, hosts: Sequence[str], *, days: int, clock: Clock | None = None) -> bool:
    """Whether the first certificate in `pem` is for all of `hosts`, and will be for so many days."""
    from cryptography import x509  # noqa: PLC0415

    certificate = x509.load_pem_x509_certificates(pem)[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    now = datetime.fromtimestamp((clock or SystemClock()).wall_ms() // 1000, UTC)
    return certificate.not_valid_after_utc > now + timedelta(days=days) and all(_host(host) in names for host in hosts)


def is_issued_by(pem: bytes, authorities: bytes) -> bool:
    """Whether one of `authorities` has signed the first certificate in `pem`."""
    from cryptography import x509  # noqa: PLC0415
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415

    certificate = x509.load_pem_x509_certificates(pem)[0]
    for authority in x509.load_pem_x509_certificates(authorities):
        with contextlib.suppress(InvalidSignature, ValueError, TypeError):  # another name, or another kind of key
            certificate.verify_directly_issued_by(authority)
            return True
    return False


def write_public(path: Path, data: bytes) -> None:
    """Whole or not at all: a broker may be reading."""
    _write(path, data, 0o644)


def write_private(path: Path, data: bytes) -> None:
    """Like `write_public`, for this user alone at every moment."""
    _write(path, data, 0o600)


def remove_drafts(directory: Path, names: Iterable[str]) -> None:
    """Remove what a process that was killed while it wrote these files has left. Nobody may be writing them."""
    for name in names:
        for draft in directory.glob(f"{_draft_prefix(name)}*"):
            draft.unlink(missing_ok=True)


def _draft_prefix(name: str) -> str:
    return f".{name}.draft-"


def _write(path: Path, data: bytes, mode: int) -> None:
    number, name = tempfile.mkstemp(dir=path.parent, prefix=_draft_prefix(path.name))  # only this user can read it
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(parent)  # a password that is in use must not be gone after a power cut
    finally:
        os.close(parent)


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    return ec.generate_private_key(ec.SECP256R1())


def _loaded_key(pem: bytes) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415

    try:
        key = load_pem_private_key(pem, None)
    except TypeError:
        raise ValueError("the key is encrypted") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is not one of an elliptic curve")  # noqa: TRY004 - it is what is in a file
    return key


def _of_key(pem: bytes, key: EllipticCurvePrivateKey) -> x509.Certificate:
    """The certificate of this key; there may be others beside it, while an authority is being replaced."""
    from cryptography import x509  # noqa: PLC0415

    for certificate in x509.load_pem_x509_certificates(pem):
        if certificate.public_key() == key.public_key():
            return certificate
    raise ValueError("the key is not that of the certificate")


def _builder(
    key: EllipticCurvePrivateKey, subject: x509.Name, issuer: x509.Name, days: int, clock: Clock | None
) -> x509.CertificateBuilder:
    from cryptography import x509  # noqa: PLC0415

    now = datetime.fromtimestamp((clock or SystemClock()).wall_ms() // 1000, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509  # noqa: PLC0415

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    from cryptography import x509  # noqa: PLC0415

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _signed(builder: x509.CertificateBuilder, key: EllipticCurvePrivateKey, by: EllipticCurvePrivateKey) -> Identity:
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415

    return Identity(
        builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
