"""JAAS lines: how Kafka's settings name a login module and its options, on servers and on clients.

    org.apache.kafka.common.security.plain.PlainLoginModule required username="me" password='secret';

Read as Java reads them: words, or texts in double or single quotes with backslash escapes. More forgiving in two ways:
the last semicolon may be missing, and a slash is part of a word, not the start of a comment. What the options mean is
not here. No message repeats what it could not read: it may be a password.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from millrace.errors import ConfigError

USER_OPTION_PREFIX: Final = "user_"
"""`user_NAME="password"`: a user whom a server with PlainLoginModule knows."""

_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<sign>[=;])|"(?P<double>(?:[^"\\]|\\.)*)"|'(?P<single>(?:[^'\\]|\\.)*)'|(?P<word>[^\s=;"']+))\s*""",
    re.DOTALL,
)
_FLAGS: Final = frozenset({"required", "requisite", "sufficient", "optional"})
_ESCAPES: Final = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


@dataclass(frozen=True, slots=True)
class LoginModule:
    """A login module by the last part of its name, and its options."""

    name: str
    options: Mapping[str, str] = field(repr=False)


def parse(text: str) -> LoginModule:
    """The one module of a JAAS line; ConfigError where it is none."""
    tokens = list(_tokens(text))
    if tokens and tokens[-1] == (True, ";"):
        tokens.pop()
    if len(tokens) < 2 or any(is_sign for is_sign, _ in tokens[:2]) or tokens[1][1].lower() not in _FLAGS:
        raise _not_understood("expected a login module, the word `required`, and options")
    rest = tokens[2:]
    options: dict[str, str] = {}
    for number in range(0, len(rest), 3):
        match rest[number : number + 3]:
            case [(False, name), (True, "="), (False, value)]:
                options[name] = value
            case _:
                raise _not_understood('after the module, options are written name="value"')
    return LoginModule(tokens[0][1].rpartition(".")[2], options)


def _tokens(text: str) -> Iterator[tuple[bool, str]]:
    """Words and quoted texts, and the signs between them (marked by True)."""
    position = 0
    text = text.strip()
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise _not_understood("a quotation mark has no partner")
        position = token.end()
        if token["sign"]:
            yield True, token["sign"]
        elif token["word"]:
            yield False, token["word"]
        else:
            quoted = token["double"] if token["double"] is not None else token["single"]
            yield False, re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), quoted, flags=re.DOTALL)


def _not_understood(reason: str) -> ConfigError:
    return ConfigError(
        f"sasl.jaas.config is not understood: {reason}, as in "
        '\'org.apache.kafka.common.security.plain.PlainLoginModule required username="..." password="...";\''
    )
