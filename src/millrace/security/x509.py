"""What this broker reads from a certificate: whose it is, and from when until when it is good.

Pure. The bytes are DER; whoever trusts a certificate has had it verified by OpenSSL before. Not here: making
certificates (`certificates`), and what a subject means (`principals`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

_EXPLICIT_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_PEM_CERTIFICATE: Final = re.compile(
    rb"-----BEGIN CERTIFICATE-----[ \t\r]*\n([A-Za-z0-9+/=\s]+?)-----END CERTIFICATE-----"
)


@dataclass(frozen=True, slots=True)
class Attribute:
    """One type and value of a name; `encoded` is the whole value as it stands in the certificate, tag and length."""

    oid: str
    tag: int
    content: bytes
    encoded: bytes


@dataclass(frozen=True, slots=True)
class Certificate:
    """Times are milliseconds since 1970."""

    name: bytes
    """The subject, in DER: see `read_name`."""
    starts_ms: int
    ends_ms: int


def pem_certificates(pem: bytes) -> list[bytes]:
    """The DER of every certificate in a PEM text, in its order; ValueError where one is no base64."""
    return [base64.b64decode(match.group(1)) for match in _PEM_CERTIFICATE.finditer(pem)]


def read_certificate(der: bytes) -> Certificate:
    """ValueError: these bytes are no certificate."""
    try:
        (certificate,) = _items(der)
        to_be_signed = next(_items(certificate.content))
        fields = list(_items(to_be_signed.content))
        if fields[0].tag == _EXPLICIT_VERSION:
            del fields[0]
        _serial, _signature, _issuer, validity, subject = fields[:5]
        starts, ends = _items(validity.content)
        return Certificate(subject.encoded, _time_ms(starts), _time_ms(ends))
    except (IndexError, StopIteration) as error:
        raise ValueError("not a certificate") from error


def read_name(der: bytes) -> tuple[tuple[Attribute, ...], ...]:
    """The parts of a DER name in its order, the most general first; one may have several values."""
    (name,) = _items(der)
    return tuple(tuple(_attribute(pair) for pair in _items(part.content)) for part in _items(name.content))


@dataclass(frozen=True, slots=True)
class _Item:
    tag: int
    content: bytes
    encoded: bytes


def _items(data: bytes) -> Iterator[_Item]:
    start = 0
    while start < len(data):
        tag, length, pos = data[start], data[start + 1], start + 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(data[pos : pos + size])
            pos += size
        end = pos + length
        if end > len(data):
            raise ValueError("ends too early")
        yield _Item(tag, data[pos:end], data[start:end])
        start = end


def _attribute(pair: _Item) -> Attribute:
    oid, value = _items(pair.content)
    return Attribute(_dotted(oid.content), value.tag, value.content, value.encoded)


def _dotted(content: bytes) -> str:
    numbers: list[int] = []
    number = 0
    for byte in content:
        number = number << 7 | byte & 0x7F
        if not byte & 0x80:
            numbers.append(number)
            number = 0
    first = min(numbers[0] // 40, 2)
    return ".".join(map(str, [first, numbers[0] - 40 * first, *numbers[1:]]))


def _time_ms(item: _Item) -> int:
    text = item.content.decode("ascii")
    if item.tag == _UTC_TIME:
        text = ("19" if int(text[:2]) >= 50 else "20") + text  # RFC 5280
    return int(datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp() * 1000)
