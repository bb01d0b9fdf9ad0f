"""Who a client is by its certificate: the distinguished name as Java writes it, and `ssl.principal.mapping.rules`.

Rules of access are written for Kafka, whose principal is what `X500Principal.getName()` returns: RFC 2253, the most
special part first, nine attribute types by name and every other by its number, with its value in hexadecimal.

Patterns are matched by RE2, never by `re`: a name is chosen by whoever asks for a certificate. What RE2 does not know
(looking ahead or behind, references back) is refused when the rules are read.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from millrace.errors import ConfigError, MillraceError
from millrace.security.sessions import ANONYMOUS, Session
from millrace.security.x509 import Attribute, read_certificate, read_name

SETTING: Final = "ssl.principal.mapping.rules"

_NAMES: Final = {
    "2.5.4.3": "CN",
    "2.5.4.6": "C",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.9": "STREET",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "0.9.2342.19200300.100.1.1": "UID",
    "0.9.2342.19200300.100.1.25": "DC",
}
_STRING_TAGS: Final = frozenset({0x0C, 0x13, 0x14, 0x16, 0x1B, 0x1E})
"""UTF8String, PrintableString, T61String, IA5String, GeneralString, BMPString: what Java writes as text."""
_ESCAPED: Final = re.compile(r'[,=+<>#;"\\]')


class NoPrincipal(MillraceError):
    """A certificate was shown that makes nobody: it is no longer good, or no rule fits its name."""


def distinguished_name(name_der: bytes) -> str:
    """A DER name in Java's RFC 2253 form."""
    return ",".join("+".join(map(_written, part)) for part in reversed(read_name(name_der)))


def _written(attribute: Attribute) -> str:
    name = _NAMES.get(attribute.oid)
    if name is None or attribute.tag not in _STRING_TAGS:
        return f"{name or attribute.oid}=#{attribute.encoded.hex()}"
    # Java takes the bytes of every kind of string for UTF-8.
    text = attribute.content.decode("utf-8", "replace")
    text = _ESCAPED.sub(r"\\\g<0>", text).replace("\0", "\\00")
    body = text.strip(" \r")
    lead = text[: len(text) - len(text.lstrip(" \r"))]
    trail = text[len(lead) + len(body) :]
    return f"{name}={_each_escaped(lead)}{body}{_each_escaped(trail)}"


def _each_escaped(blanks: str) -> str:
    return "".join("\\" + char for char in blanks)


# --- rules ------------------------------------------------------------------------------------------------------------

_RULE: Final = re.compile(r"RULE:((?:\\.|[^\\/])*)/((?:\\.|[^\\/])*)/([LU]?)")
_CASES: Final[dict[str, Callable[[str], str]]] = {"": str, "L": str.lower, "U": str.upper}


@dataclass(frozen=True, slots=True)
class _Rule:
    """What becomes of the names that `pattern` matches as a whole; without one, of every name: itself."""

    pattern: Any = None
    replacement: str = ""
    case: str = ""

    def apply(self, name: str) -> str | None:
        if self.pattern is None:
            return name
        if self.pattern.fullmatch(name) is None:
            return None
        # Like Java's replaceAll: every match inside the name is replaced, not the name once.
        parts, end = [], 0
        for match in self.pattern.finditer(name):
            parts += [name[end : match.start()], _expanded(self.replacement, match, self.pattern.groups)]
            end = match.end()
        return _CASES[self.case]("".join([*parts, name[end:]]))


class PrincipalMapper:
    """`ssl.principal.mapping.rules`, read once: the first rule that fits a name says who it is."""

    def __init__(self, rules: str = "DEFAULT") -> None:
        """ConfigError where they cannot be read."""
        self._text = rules
        self._rules = _parsed(rules)

    def __repr__(self) -> str:
        return f"PrincipalMapper({self._text!r})"

    def name_of(self, distinguished: str) -> str:
        """NoPrincipal where no rule fits."""
        for rule in self._rules:
            name = rule.apply(distinguished)
            if name is not None:
                return name
        raise NoPrincipal(f"no rule of {SETTING} fits {distinguished}")


def _parsed(text: str) -> tuple[_Rule, ...]:
    rules: list[_Rule] = []
    rest = text.strip()
    while rest:
        if match := re.match(r"DEFAULT", rest):
            rules.append(_Rule())
        elif match := _RULE.match(rest):
            pattern, replacement, case = match.groups()
            rules.append(_Rule(_compiled(pattern), replacement, case))
        else:
            raise ConfigError(f"{SETTING}: {rest[:100]!r} is neither DEFAULT nor RULE:pattern/replacement/[LU]")
        after = rest[match.end() :].lstrip()
        if after and not after.startswith(","):
            raise ConfigError(f"{SETTING}: {after[:100]!r} stands behind a rule")
        rest = after[1:].lstrip()
    return tuple(rules)


def _compiled(pattern: str) -> Any:
    import re2  # type: ignore[import-untyped]  # noqa: PLC0415 - only who has rules pays for loading it

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeError) as error:
        reason = error.args[0] if error.args else "it cannot be read"
        told = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise ConfigError(f"{SETTING}: {pattern!r} is no pattern that RE2 understands: {told}") from error


def _expanded(replacement: str, match: Any, groups: int) -> str:
    """`$1` is what the first group matched, as long as there is such a group; `\\` makes a character mean itself."""

    def text_of(found: re.Match[str]) -> str:
        if found.group(2) is not None:
            return found.group(2)
        digits = found.group(1)
        for length in range(len(digits), 0, -1):
            if int(digits[:length]) <= groups:
                return (match.group(int(digits[:length])) or "") + digits[length:]
        return found.group(0)

    return re.sub(r"\$([0-9]+)|\\(.)", text_of, replacement)


# --- sessions ---------------------------------------------------------------------------------------------------------


def session_of(transport: asyncio.BaseTransport, mapper: PrincipalMapper | None, wall_ms: int) -> Session:
    """Who is at the other end of a connection, whose handshake is done if it has TLS; NoPrincipal: nobody who may stay.

    Without a mapper a certificate says nothing about who it is, and still has to be good.
    """
    tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    shown = None if tls is None else tls.getpeercert(binary_form=True)
    if tls is None or shown is None:
        return ANONYMOUS
    try:
        certificate = read_certificate(shown)
        name = distinguished_name(certificate.name)
    except (ValueError, IndexError):  # OpenSSL has read it, and may be more forgiving
        raise NoPrincipal("its certificate has something that is not understood here") from None
    # OpenSSL looks at the dates in a full handshake only.
    if tls.session_reused and not certificate.starts_ms <= wall_ms <= certificate.ends_ms:
        raise NoPrincipal(f"the certificate of {name} is not good any more")
    return ANONYMOUS if mapper is None else Session(f"User:{mapper.name_of(name)}")
