"""Texts that a configuration is read from: .properties files as Java reads them, and listeners."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from millrace.errors import ConfigError

SECURITY_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")


@dataclass(frozen=True, slots=True)
class Listener:
    """A named door: an empty host means every interface, port 0 means a free one."""

    name: str
    security_protocol: str
    host: str
    port: int

    @property
    def uses_tls(self) -> bool:
        return self.security_protocol in {"SSL", "SASL_SSL"}

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.name}://{host}:{self.port}"


_ESCAPES: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def parse_properties(text: str) -> dict[str, str]:
    """Java's .properties syntax: comments, `=`, `:` or blanks as separator, continued lines and escapes."""
    values: dict[str, str] = {}
    for number, line in _logical_lines(text):
        name, value = _split_property(line)
        if not name:
            raise ConfigError(f"line {number} has no name in front of its value")
        values[_unescape(name, number)] = _unescape(value, number)
    return values


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    pending: str | None = None
    first = 0
    for number, raw in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        line = raw.lstrip(" \t\f")
        if pending is None:
            if not line or line[0] in "#!":
                continue
            pending, first = "", number
        pending += line
        backslashes = len(pending) - len(pending.rstrip("\\"))
        if backslashes % 2:
            pending = pending[:-1]
            continue
        yield first, pending
        pending = None
    if pending:
        yield first, pending


def _split_property(line: str) -> tuple[str, str]:
    end = 0
    while end < len(line) and line[end] not in "=: \t\f":
        end += 2 if line[end] == "\\" else 1
    name, rest = line[:end], line[end:].lstrip(" \t\f")
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(" \t\f")
    return name, rest


def _unescape(text: str, number: int) -> str:
    def replace(match: re.Match[str]) -> str:
        escape = match.group(1)
        if escape[0] == "u":
            if len(escape) != 5:
                raise ConfigError(f"line {number}: \\u needs four hexadecimal digits")
            return chr(int(escape[1:], 16))
        return _ESCAPES.get(escape, escape)

    return re.sub(r"\\(u[0-9a-fA-F]{4}|.)", replace, text, flags=re.DOTALL)


def parse_listeners(entries: Iterable[str], protocol_map: str, setting: str) -> tuple[Listener, ...]:
    """Listeners from NAME://host:port texts; ConfigError for a bad one or a name twice."""
    protocols: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in protocol_map.split(","))):
        name, colon, protocol = pair.partition(":")
        if not colon or protocol not in SECURITY_PROTOCOLS:
            raise ConfigError(f"listener.security.protocol.map: {pair!r} is not NAME:PROTOCOL")
        protocols[name.strip().upper()] = protocol
    listeners: list[Listener] = []
    for entry in entries:
        listener = _parse_listener(entry, protocols, setting)
        if any(other.name == listener.name for other in listeners):
            raise ConfigError(f"{setting}: the name {listener.name} stands there twice")
        if listener.port and any((other.host, other.port) == (listener.host, listener.port) for other in listeners):
            raise ConfigError(f"{setting}: port {listener.port} stands there twice")
        listeners.append(listener)
    return tuple(listeners)


def _parse_listener(entry: str, protocols: Mapping[str, str], setting: str) -> Listener:
    match = re.fullmatch(r"([A-Za-z0-9_.-]+)://(\[[0-9A-Fa-f:.%]*\]|[^:/\[\]]*):([0-9]{1,5})", entry.strip(), re.ASCII)
    if match is None:
        raise ConfigError(f"{setting}: {entry[:100]!r} is not NAME://host:port")
    name, host, port = match.group(1).upper(), match.group(2).strip("[]"), int(match.group(3))
    if port > 65535:
        raise ConfigError(f"{setting}: port {port} does not exist")
    protocol = protocols.get(name)
    if protocol is None:
        raise ConfigError(f"{setting}: {name} is not in listener.security.protocol.map")
    return Listener(name, protocol, host, port)
