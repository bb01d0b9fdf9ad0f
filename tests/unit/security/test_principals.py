"""Names as Java writes them, the rules that make principals of them, and the session of a certificate.

Beside each name stands what Java 17's `X500Principal.getName()` says of it.
"""

from __future__ import annotations

import ssl
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.x509.name import _ASN1Type

from millrace.clock import SystemClock
from millrace.errors import ConfigError
from millrace.security.certificates import make_authority
from millrace.security.principals import NoPrincipal, PrincipalMapper, distinguished_name, session_of
from millrace.security.x509 import pem_certificates, read_certificate
from support.certificates import LONG_AGO

CN, C, L, ST, STREET, ORG, OU = ("2.5.4." + last for last in ("3", "6", "7", "8", "9", "10", "11"))
UID, DC = "0.9.2342.19200300.100.1.1", "0.9.2342.19200300.100.1.25"
EMAIL = "1.2.840.113549.1.9.1"
NAMES: list[tuple[list[list[tuple[str, str, str]]], str]] = [
    ([], ""),
    ([[(C, "US", "UTF8")], [(ORG, "z", "UTF8")], [(OU, "y", "UTF8")], [(CN, "x", "UTF8")]], "CN=x,OU=y,O=z,C=US"),
    ([[(ORG, "o", "UTF8")], [(CN, "a", "UTF8"), (OU, "b", "UTF8"), (UID, "u1", "UTF8")]], "CN=a+OU=b+UID=u1,O=o"),
    ([[(CN, "a", "UTF8")], [(CN, "b", "UTF8")], [(CN, "c", "UTF8")]], "CN=c,CN=b,CN=a"),
    ([[(ST, "st", "UTF8")], [(L, "l", "UTF8")], [(STREET, "s 1", "UTF8")]], "STREET=s 1,L=l,ST=st"),
    ([[(DC, "com", "IA5")], [(DC, "example", "IA5")], [(UID, "u", "UTF8")]], "UID=u,DC=example,DC=com"),
    ([[(EMAIL, "a@b.c", "IA5")], [(CN, "x", "UTF8")]], "CN=x,1.2.840.113549.1.9.1=#16056140622e63"),
    ([[("2.5.4.5", "77", "Printable")], [("2.5.4.12", "Dr", "UTF8")]], "2.5.4.12=#0c024472,2.5.4.5=#13023737"),
    ([[("1.2.3.4.5", "x", "UTF8")], [("2.999.1", "y", "UTF8")]], "2.999.1=#0c0179,1.2.3.4.5=#0c0178"),
    ([[(CN, 'a,b=c+d<e>f#g;h"i\\j', "UTF8")]], r"""CN=a\,b\=c\+d\<e\>f\#g\;h\"i\\j"""),
    ([[(CN, "a/b:c?d*e'f(g)h_i@j&k%l$m~n", "UTF8")]], "CN=a/b:c?d*e'f(g)h_i@j&k%l$m~n"),
    ([[(CN, "  two spaces ", "UTF8")]], r"CN=\ \ two spaces" + "\\ "),
    ([[(CN, "   ", "UTF8")]], r"CN=\ \ " + "\\ "),
    ([[(CN, "#hash", "UTF8")]], r"CN=\#hash"),
    ([[(CN, " #", "UTF8")]], r"CN=\ \#"),
    ([[(CN, "\\ ", "UTF8")]], "CN=\\\\\\ "),
    ([[(CN, "\r x\r", "UTF8")]], "CN=\\\r\\ x\\\r"),
    ([[(CN, "x\n", "UTF8")]], "CN=x\n"),
    ([[(CN, "x\t", "UTF8")]], "CN=x\t"),
    ([[(CN, "\u00a0x\u00a0", "UTF8")]], "CN=\u00a0x\u00a0"),
    ([[(CN, "x\0y", "UTF8")]], r"CN=x\00y"),
    ([[(CN, "Jörg Müller 日本 😀", "UTF8")]], "CN=Jörg Müller 日本 😀"),
    ([[(CN, "Jörg", "BMP")]], "CN=\\00J\\00\ufffd\\00r\\00g"),
    ([[(CN, "T61", "T61")]], "CN=T61"),
    ([[(CN, "ab", "Universal")]], "CN=#1c080000006100000062"),
    ([[(CN, "vis", "Visible")]], "CN=#1a03766973"),
    ([[(CN, "123", "Numeric")]], "CN=#1203313233"),
]


def encoded(parts: list[list[tuple[str, str, str]]]) -> bytes:
    return x509.Name(
        x509.RelativeDistinguishedName(
            x509.NameAttribute(x509.ObjectIdentifier(oid), text, _ASN1Type[f"{kind}String"], _validate=False)
            for oid, text, kind in part
        )
        for part in parts
    ).public_bytes()


@pytest.mark.parametrize(("parts", "written"), NAMES)
def test_a_name_is_written_as_java_does(parts: list[list[tuple[str, str, str]]], written: str) -> None:
    assert distinguished_name(encoded(parts)) == written


@pytest.mark.parametrize(
    ("rules", "name", "expected"),
    [
        ("DEFAULT", "CN=a,O=b", "CN=a,O=b"),
        (" DEFAULT ", "CN=a", "CN=a"),
        ("RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/,DEFAULT", "CN=x,OU=ServiceUsers,O=o", "x"),
        ("RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/,DEFAULT", "CN=x,OU=Others", "CN=x,OU=Others"),
        ("RULE:^CN=(.*?),OU=(.*?),O=(.*?)$/$1@$2/L, DEFAULT", "CN=Duke,OU=JavaSoft,O=Sun", "duke@javasoft"),
        ("RULE:^.*[Cc][Nn]=([a-zA-Z0-9.]*).*$/$1/U", "OU=x,CN=Adm.in,O=y", "ADM.IN"),
        ("RULE:CN=(.)(.)/$2$1/", "CN=ab", "ba"),
        ("RULE:CN=(.)/$12/", "CN=a", "a2"),
        ("RULE:CN=(.)/$2/", "CN=a", "$2"),
        ("RULE:CN=(.)(x)?/<$2>/", "CN=a", "<>"),
        (r"RULE:CN=(.)/\$1/", "CN=a", "$1"),
        (r"RULE:CN=a\/b/slash\/ed/", "CN=a/b", "slash/ed"),
        ("RULE:CN=(.*)/$1/,RULE:O=(.*)/$1/", "O=b", "b"),
        # Java replaces the empty rest, too.
        ("RULE:.*/x/", "CN=a", "xx"),
    ],
)
def test_rules(rules: str, name: str, expected: str) -> None:
    assert PrincipalMapper(rules).name_of(name) == expected


def test_no_rule_fits() -> None:
    mapper = PrincipalMapper("RULE:CN=(.*),O=acme/$1/")
    with pytest.raises(NoPrincipal, match=r"no rule of ssl\.principal\.mapping\.rules fits CN=a,O=acme2"):
        mapper.name_of("CN=a,O=acme2")


@pytest.mark.parametrize(
    "rules",
    [
        "default",
        "RULE:a/b",
        "RULE:a/b/X",
        "RULE:a/b/LU",
        "RULE:(/b/",
        "RULE:a(?=b)/b/",
        r"RULE:(a)\1/b/",
        "DEFAULT RULE:a/b/",
        "DEFAULTS",
        "nonsense",
    ],
)
def test_rules_that_cannot_be_read(rules: str) -> None:
    with pytest.raises(ConfigError, match=r"^ssl\.principal\.mapping\.rules: "):
        PrincipalMapper(rules)


def test_a_pattern_takes_no_longer_for_a_hostile_name() -> None:
    """CVE-like: the time of `re` would double with every character."""
    started = SystemClock().monotonic()
    with pytest.raises(NoPrincipal):
        PrincipalMapper("RULE:CN=(a+)+b/$1/").name_of("CN=" + "a" * 20_000)
    assert SystemClock().monotonic() - started < 1


class Shown:
    """A transport whose peer has shown a certificate."""

    def __init__(self, certificate: bytes | None, *, reused: bool = False) -> None:
        self._tls = SimpleNamespace(getpeercert=lambda binary_form: certificate, session_reused=reused)

    def get_extra_info(self, name: str) -> Any:
        assert name == "ssl_object"
        return cast(ssl.SSLObject, self._tls)


def session(certificate: bytes | None, mapper: PrincipalMapper | None, wall_ms: int, *, reused: bool = False) -> str:
    return session_of(cast(Any, Shown(certificate, reused=reused)), mapper, wall_ms).principal


def test_session_of_a_certificate() -> None:
    identity = make_authority("a").issue("alice", organization="acme", clock=LONG_AGO, days=10)
    (der,) = pem_certificates(identity.certificate)
    now_ms = LONG_AGO.wall_ms()
    assert session(der, PrincipalMapper(), now_ms) == "User:CN=alice,O=acme"
    assert session(der, PrincipalMapper("RULE:CN=(.*?),.*/$1/"), now_ms) == "User:alice"
    assert session(None, PrincipalMapper("RULE:x/y/"), now_ms) == "User:ANONYMOUS"


def test_a_resumed_session_does_not_outlive_its_certificate() -> None:
    identity = make_authority("a").issue("alice", clock=LONG_AGO, days=10)
    (der,) = pem_certificates(identity.certificate)
    read = read_certificate(der)
    assert session(der, PrincipalMapper(), read.ends_ms, reused=True) == "User:CN=alice"
    for mapper in (PrincipalMapper(), None):
        with pytest.raises(NoPrincipal, match="CN=alice is not good any more"):
            session(der, mapper, read.ends_ms + 1, reused=True)


def test_who_logs_in_is_not_whom_the_certificate_names() -> None:
    identity = make_authority("a").issue("alice", clock=LONG_AGO, days=10)
    (der,) = pem_certificates(identity.certificate)
    assert session(der, None, LONG_AGO.wall_ms()) == "User:ANONYMOUS"


def test_a_certificate_that_cannot_be_read_makes_nobody() -> None:
    identity = make_authority("a").issue("alice", clock=LONG_AGO, days=10)
    (der,) = pem_certificates(identity.certificate)
    assert der.count(b"\x17\x0d17") == 2
    no_month = der.replace(b"\x17\x0d17", b"\x17\x0d\xff7", 1)
    for unreadable in (b"", b"\x30", der[:200], no_month):
        with pytest.raises(NoPrincipal, match="not understood"):
            session(unreadable, PrincipalMapper(), LONG_AGO.wall_ms())
