"""Filters of records: a small language, parsed into functions. Nothing is ever evaluated as code.

    "text"                                  the text is in the key, the value or a header
    key == "order-7"                        the key is exactly that; also != < <= > >=
    value contains "paid"                   the text is in the value; hex"00ff" looks for bytes
    value matches "^ERR[0-9]+"              a regular expression (RE2) finds something
    value.user.id == 42                     a field of a JSON value, or of the format that was chosen
    value.items[0].sku exists               there is such a field
    value.tags contains "new"               a list has the item, or a text has the part
    header.trace == "abc"                   a header of that name; headers contains "x": any name or value
    offset >= 1000   partition == 3         also size (bytes of key and value) and timestamp:
    timestamp > "2026-05-01T12:00"          or milliseconds, or "1h ago"
    value == null                           a tombstone; of a field: null, or no such field
    A and (B or not C)

Names with other characters are written `value["odd name"]`. Text stands in single or double quotes; `\\"`, `\\\\`,
`\\n` and `\\t` are escapes in it. A comparison of things of different types is false, `!=` true.

A `Filter` also knows bytes that every matching record must have (`needles`), with which a scan passes over most records
without looking at them.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from millrace.console.records.decoders import Format, Side
from millrace.console.records.internal import is_internal
from millrace.console.records.rows import Row
from millrace.console.records.times import parse_time_ms

MAX_FILTER_LENGTH: Final = 4_096
_MAX_DEPTH: Final = 64
_MAX_AUTOMATON_BYTES: Final = 1024 * 1024

Test = Callable[[Row], bool]
Search = Callable[[bytes], bool]
Needle = bytes | Search
Needles = tuple[tuple[Needle, ...], ...]
"""Each group has bytes, or searches for bytes, of which at least one finds something in a record that matches."""
NO_NEEDLES: Final[Needles] = ()

_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<hex>hex(?P<hexquote>["'])(?P<digits>[^"']*)(?P=hexquote))
      | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
      | (?P<word>[A-Za-z_][\w-]*)
      | (?P<sign>==|!=|<=|>=|=|<|>|\(|\)|\[|\]|\.)
    )""",
    re.VERBOSE | re.DOTALL,
)
_ASSERTION: Final = re.compile(r"[\^$]|\\[bBAzZ]")
_ESCAPED: Final = frozenset('"\\/')
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}
_COMPARISONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_NUMBERS: Final[dict[str, Callable[[Row], int]]] = {
    "offset": operator.attrgetter("offset"),
    "partition": operator.attrgetter("partition"),
    "size": operator.attrgetter("size_bytes"),
    "timestamp": operator.attrgetter("timestamp_ms"),
}
_FIELDS: Final = "key, value, header, headers, offset, partition, timestamp, size"
_OPERATORS: Final = "== != < <= > >= contains matches exists"
_LITERALS: Final = {"true": True, "false": False, "null": None}
_MISSING: Final = object()


class FilterError(ValueError):
    """What is wrong with a filter, and where: `position` counts from 0."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(f"{reason} (at character {position + 1})")
        self.reason = reason
        self.position = position


@dataclass(frozen=True, slots=True)
class Formats:
    """How the parts of a record are read where a filter walks into them."""

    topic: str = ""
    key: Format = Format.AUTO
    value: Format = Format.AUTO

    def is_json(self, side: Side) -> bool:
        """Whether names and texts of the structure lie in the bytes as they are written in a filter."""
        chosen = self.key if side is Side.KEY else self.value
        return chosen is Format.JSON or (chosen is Format.AUTO and not is_internal(self.topic))


@dataclass(frozen=True, slots=True)
class Filter:
    """`matches` tells of one record; `needles` what can be known without it."""

    text: str
    matches: Test
    needles: Needles = NO_NEEDLES

    def needle_in(self, data: bytes | bytearray) -> bytes | None:
        """The longest bytes that each match among `data` has for certain, none of them (b"") where nobody knows any.

        None: no match can be among these bytes.
        """
        best = b""
        for group in self.needles:
            there = [each for each in group if (each in data if isinstance(each, bytes) else each(bytes(data)))]
            if not there:
                return None
            certain = there[0]
            if len(there) == 1 and isinstance(certain, bytes) and len(certain) > len(best):
                best = certain
        return best


EVERYTHING: Final = Filter("", lambda _row: True)


def parse(text: str, formats: Formats | None = None, *, now_ms: int = 0) -> Filter:
    """The filter that `text` is; nothing lets everything through. FilterError says what is wrong and where.

    `now_ms` is what times such as "1h ago" count from.
    """
    if not text.strip():
        return EVERYTHING
    if len(text) > MAX_FILTER_LENGTH:
        raise FilterError(f"the filter is longer than {MAX_FILTER_LENGTH} characters", MAX_FILTER_LENGTH)
    parser = _Parser(_tokens(text), formats or Formats(), now_ms)
    found = parser.alternatives(_MAX_DEPTH)
    parser.expect_end()
    return Filter(text, found.test, found.needles)


# Words.


class _Token(NamedTuple):
    kind: str
    value: Any
    position: int


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    pos = 0
    while text[pos:].strip():
        match = _TOKEN.match(text, pos)
        if match is None:
            at = pos + len(text[pos:]) - len(text[pos:].lstrip())
            quote = text[at] in "\"'"
            raise FilterError("the text has no closing quote" if quote else f"'{text[at]}' means nothing here", at)
        kind = match.lastgroup or ""
        kind = "hex" if match["hex"] is not None else kind
        at = match.start(kind)
        tokens.append(_Token(kind, _token_value(kind, match, at), at))
        pos = match.end()
    tokens.append(_Token("end", None, len(text)))
    return tokens


def _token_value(kind: str, match: re.Match[str], at: int) -> Any:
    if kind == "hex":
        try:
            return bytes.fromhex(match["digits"])
        except ValueError:
            raise FilterError('bytes are written as pairs of hex digits: hex"00 ff"', at) from None
    if kind == "text":
        return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), match["text"][1:-1], flags=re.DOTALL)
    if kind == "number":
        try:
            return int(match["number"])
        except ValueError:
            return float(match["number"])
    return match[kind]


# Expressions.


class _Part(NamedTuple):
    test: Test
    needles: Needles


class _Parser:
    def __init__(self, tokens: Sequence[_Token], formats: Formats, now_ms: int) -> None:
        self._tokens = tokens
        self._pos = 0
        self._formats = formats
        self._now_ms = now_ms

    def alternatives(self, depth: int) -> _Part:
        parts = [self._conjunction(depth)]
        while self._word("or"):
            parts.append(self._conjunction(depth))
        if len(parts) == 1:
            return parts[0]
        tests = tuple(part.test for part in parts)
        return _Part(lambda row: any(test(row) for test in tests), _either(part.needles for part in parts))

    def expect_end(self) -> None:
        token = self._here
        if token.kind != "end":
            raise FilterError(f"expected 'and', 'or' or the end, not '{_shown(token)}'", token.position)

    def _conjunction(self, depth: int) -> _Part:
        parts = [self._factor(depth)]
        while self._word("and"):
            parts.append(self._factor(depth))
        if len(parts) == 1:
            return parts[0]
        tests = tuple(part.test for part in parts)
        return _Part(
            lambda row: all(test(row) for test in tests), tuple(group for part in parts for group in part.needles)
        )

    def _factor(self, depth: int) -> _Part:
        token = self._here
        if depth == 0:
            raise FilterError("the filter is nested too deeply", token.position)
        if self._word("not"):
            test = self._factor(depth - 1).test
            return _Part(lambda row: not test(row), NO_NEEDLES)
        if self._sign("("):
            part = self.alternatives(depth - 1)
            if not self._sign(")"):
                raise FilterError("a closing bracket is missing", self._here.position)
            return part
        if token.kind in {"text", "hex"}:
            self._pos += 1
            wanted = token.value.encode() if isinstance(token.value, str) else token.value
            return _Part(_anywhere(wanted), _certain(wanted))
        return self._comparison()

    def _comparison(self) -> _Part:
        token = self._here
        if token.kind != "word":
            raise FilterError(
                f"expected a field ({_FIELDS}) or a text in quotes, not '{_shown(token)}'"
                if token.kind != "end"
                else f"the filter ends where a field ({_FIELDS}) or a text is expected",
                token.position,
            )
        self._pos += 1
        name = token.value
        if name in ("key", "value"):
            return self._of_part(Side(name))
        if name == "headers":
            return self._of_any_header()
        if name == "header":
            return self._of_header()
        if name in _NUMBERS:
            return self._of_number(name)
        raise FilterError(
            f"'{name}' is no field; there are {_FIELDS}. To look for the text, write \"{name}\"", token.position
        )

    # Fields.

    def _of_part(self, side: Side) -> _Part:
        path = self._path()
        sign, literal = self._operation()
        if path or sign == "exists":
            return self._of_path(side, path, sign, literal)
        get: Callable[[Row], bytes | None] = operator.attrgetter(side.value)
        if sign == "matches":
            find = _expression(literal)
            return _Part(lambda row: find(get(row)), _found_anywhere(find, literal))
        if sign == "contains":
            wanted = _bytes_of(literal)
            return _Part(lambda row: wanted in (get(row) or b""), _certain(wanted))
        if literal.value is None:
            return _Part(_null_test(get, sign, literal), NO_NEEDLES)
        if isinstance(literal.value, (str, bytes)):
            wanted = _bytes_of(literal)
            compare = _COMPARISONS[sign]

            def test(row: Row) -> bool:
                found = get(row)
                return sign == "!=" if found is None else compare(found, wanted)

            return _Part(test, _certain(wanted) if sign == "==" else NO_NEEDLES)
        return self._of_path(side, (), sign, literal)

    def _of_path(self, side: Side, path: tuple[str | int, ...], sign: str, literal: _Token) -> _Part:
        test = _value_test(sign, literal)
        needles: list[tuple[Needle, ...]] = []
        if self._formats.is_json(side) and sign != "!=" and not (sign == "==" and literal.value is None):
            texts = [each for each in path if isinstance(each, str)]
            if sign in {"==", "contains"} and isinstance(literal.value, str):
                texts.append(literal.value)
            needles = [(each.encode(errors="replace"), _escape(each)) for each in texts if each]

        if not path and sign == "exists":
            get = operator.attrgetter(side.value)
            return _Part(lambda row: get(row) is not None, NO_NEEDLES)

        structure = Row.key_structure if side is Side.KEY else Row.value_structure
        return _Part(lambda row: test(_walk(structure(row), path)), tuple(needles))

    def _of_any_header(self) -> _Part:
        sign, literal = self._operation()
        if sign == "exists":
            return _Part(lambda row: bool(row.headers), NO_NEEDLES)
        if sign == "contains":
            wanted = _bytes_of(literal)
            return _Part(lambda row: _in_headers(row, lambda found: wanted in found), _certain(wanted))
        if sign == "matches":
            find = _expression(literal)
            return _Part(lambda row: _in_headers(row, find), _found_anywhere(find, literal))
        raise FilterError(
            "headers are asked with contains, matches or exists; header.NAME with any operator", literal.position
        )

    def _of_header(self) -> _Part:
        path = self._path()
        if len(path) != 1 or not isinstance(path[0], str):
            raise FilterError('which header? write header.NAME or header["NAME"]', self._here.position)
        name = path[0]
        sign, literal = self._operation()
        test = _header_test(sign, literal)

        def matches(row: Row) -> bool:
            found = [each.value for each in row.headers if each.name == name]
            if not found:
                return sign == "!=" or (sign == "==" and literal.value is None)
            return any(test(each) for each in found)

        absent_too = sign == "!=" or (sign == "==" and literal.value is None)
        needles = NO_NEEDLES if absent_too else _certain(name.encode())
        if sign in {"==", "contains"} and isinstance(literal.value, (str, bytes)):
            needles += _certain(_bytes_of(literal))
        return _Part(matches, needles)

    def _of_number(self, name: str) -> _Part:
        sign, literal = self._operation()
        if sign not in _COMPARISONS:
            raise FilterError(f"{name} is a number: compare it with {' '.join(_COMPARISONS)}", literal.position)
        wanted = literal.value
        if name == "timestamp" and isinstance(wanted, str):
            try:
                wanted = parse_time_ms(wanted, now_ms=self._now_ms)
            except ValueError as error:
                raise FilterError(str(error), literal.position) from None
        if isinstance(wanted, bool) or not isinstance(wanted, (int, float)):
            kind = "a number, or a time in quotes" if name == "timestamp" else "a number"
            raise FilterError(f"{name} is compared with {kind}, not '{_shown(literal)}'", literal.position)
        get, compare = _NUMBERS[name], _COMPARISONS[sign]
        return _Part(lambda row: compare(get(row), wanted), NO_NEEDLES)

    # Pieces.

    @property
    def _here(self) -> _Token:
        return self._tokens[self._pos]

    def _word(self, word: str) -> bool:
        return self._skip("word", word)

    def _sign(self, sign: str) -> bool:
        return self._skip("sign", sign)

    def _skip(self, kind: str, value: str) -> bool:
        token = self._here
        if token.kind != kind or token.value != value:
            return False
        self._pos += 1
        return True

    def _path(self) -> tuple[str | int, ...]:
        path: list[str | int] = []
        while True:
            if self._sign("."):
                token = self._here
                if token.kind != "word":
                    raise FilterError('after a dot comes a name; others are written ["name"]', token.position)
                path.append(token.value)
                self._pos += 1
            elif self._sign("["):
                token = self._here
                if token.kind != "text" and not (token.kind == "number" and isinstance(token.value, int)):
                    raise FilterError(
                        'in brackets stands a number or a name in quotes: [0] or ["name"]', token.position
                    )
                path.append(token.value)
                self._pos += 1
                if not self._sign("]"):
                    raise FilterError("a closing ] is missing", self._here.position)
            else:
                return tuple(path)

    def _operation(self) -> tuple[str, _Token]:
        """The operator, and what stands after it: the operator itself for `exists`."""
        token = self._here
        sign = "==" if token.value == "=" and token.kind == "sign" else token.value
        is_operator = (token.kind == "sign" and sign in _COMPARISONS) or (
            token.kind == "word" and sign in ("contains", "matches", "exists")
        )
        if not is_operator:
            raise FilterError(f"expected one of {_OPERATORS}, not '{_shown(token)}'", token.position)
        self._pos += 1
        if sign == "exists":
            return sign, token
        literal = self._here
        if literal.kind == "word" and literal.value in _LITERALS:
            literal = _Token("literal", _LITERALS[literal.value], literal.position)
        elif literal.kind not in {"text", "hex", "number"}:
            shown = _shown(literal)
            hint = f'; a text stands in quotes: "{shown}"' if literal.kind == "word" else ""
            raise FilterError(f"expected a text, a number, true, false or null, not '{shown}'{hint}", literal.position)
        self._pos += 1
        return sign, literal


def _shown(token: _Token) -> str:
    return "the end" if token.kind == "end" else str(token.value)


# Needles.


def _certain(wanted: bytes) -> Needles:
    return ((wanted,),) if wanted else NO_NEEDLES


def _found_anywhere(find: Search, literal: _Token) -> Needles:
    """An expression that does not ask what is before or after it is found among other bytes, too."""
    return NO_NEEDLES if _ASSERTION.search(literal.value) else ((find,),)


def _escape(text: str) -> bytes:
    """What is in the bytes of JSON that has this text, if the text itself is not in them."""
    # Any character may be written by its number, some also with a backslash of their own.
    return b"\\u" if text.isprintable() and not _ESCAPED.intersection(text) else b"\\"


def _either(parts: Iterable[Needles]) -> Needles:
    """Of alternatives: a group of each, together; nothing where one of them may be anything."""
    joined: list[Needle] = []
    for needles in parts:
        if not needles:
            return NO_NEEDLES
        rarest = min(needles, key=_likelihood)
        joined += rarest
    return (tuple(dict.fromkeys(joined)),)


def _likelihood(group: tuple[Needle, ...]) -> tuple[int, int]:
    """Fewer and longer bytes are found by chance less often."""
    first = group[0]
    return len(group), -len(first) if isinstance(first, bytes) else 0


# Tests.


def _bytes_of(literal: _Token) -> bytes:
    value = literal.value
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if value is None or isinstance(value, bool):
        raise FilterError("contains wants a text, a number or bytes", literal.position)
    return str(value).encode()


def _expression(literal: _Token) -> Callable[[bytes | str | None], bool]:
    """Whether a regular expression finds something; RE2, whose time is linear in the text whatever the pattern is."""
    import re2  # type: ignore[import-untyped]  # noqa: PLC0415 - only who has patterns pays for loading it

    if not isinstance(literal.value, str):
        raise FilterError('matches wants a regular expression in quotes: value matches "a+"', literal.position)
    options = re2.Options()
    options.max_mem = _MAX_AUTOMATON_BYTES
    options.log_errors = False
    try:
        search = re2.compile(literal.value, options).search
    except (re2.error, UnicodeError) as error:
        reason = error.args[0] if error.args else "it cannot be read"
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise FilterError(f"no regular expression that RE2 understands: {text}", literal.position) from None
    return lambda found: found is not None and search(found) is not None


def _anywhere(wanted: bytes) -> Test:
    def test(row: Row) -> bool:
        return (
            (row.value is not None and wanted in row.value)
            or (row.key is not None and wanted in row.key)
            or _in_headers(row, lambda found: wanted in found)
        )

    return test


def _in_headers(row: Row, test: Callable[[bytes], bool]) -> bool:
    return any(
        test(name.encode(errors="surrogateescape")) or (value is not None and test(value))
        for name, value in row.headers
    )


def _null_test(get: Callable[[Row], Any], sign: str, literal: _Token) -> Test:
    if sign == "==":
        return lambda row: get(row) is None
    if sign == "!=":
        return lambda row: get(row) is not None
    raise FilterError("null is compared with == or !=", literal.position)


def _header_test(sign: str, literal: _Token) -> Callable[[bytes | None], bool]:
    if sign == "exists":
        return lambda _found: True
    if sign == "matches":
        return _expression(literal)
    if literal.value is None:
        _null_test(lambda row: row, sign, literal)
        return (lambda found: found is None) if sign == "==" else (lambda found: found is not None)
    wanted = _bytes_of(literal)
    if sign == "contains":
        return lambda found: found is not None and wanted in found
    compare = _COMPARISONS[sign]
    return lambda found: sign == "!=" if found is None else compare(found, wanted)


def _walk(structure: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        if isinstance(structure, dict):
            structure = structure.get(str(step), _MISSING)
        elif isinstance(structure, list) and isinstance(step, int):
            if not -len(structure) <= step < len(structure):
                return _MISSING
            structure = structure[step]
        else:
            return _MISSING
    return structure


def _value_test(sign: str, literal: _Token) -> Callable[[Any], bool]:
    """A test of what a path leads to, which is `_MISSING` where it leads nowhere."""
    if sign == "exists":
        return lambda found: found is not _MISSING
    if sign == "matches":
        find = _expression(literal)
        return lambda found: isinstance(found, str) and find(found.encode(errors="replace"))
    wanted = literal.value
    if isinstance(wanted, bytes):
        raise FilterError(
            "fields have texts and numbers: bytes are looked for in the whole key or value", literal.position
        )
    if sign == "contains":
        return lambda found: _contains(found, wanted)
    if wanted is None:
        if sign not in {"==", "!="}:
            raise FilterError("null is compared with == or !=", literal.position)
        return (
            (lambda found: found is None or found is _MISSING)
            if sign == "=="
            else (lambda found: found is not None and found is not _MISSING)
        )
    compare = _COMPARISONS[sign]
    return lambda found: compare(found, wanted) if _kind(found) is _kind(wanted) else sign == "!="


def _contains(found: Any, wanted: Any) -> bool:
    if isinstance(found, str):
        return isinstance(wanted, str) and wanted in found
    if isinstance(found, list):
        return any(_kind(each) is _kind(wanted) and each == wanted for each in found)
    return isinstance(found, dict) and isinstance(wanted, str) and wanted in found


def _kind(value: Any) -> Any:
    """Of what kind a value is: numbers are one kind, and a boolean is none of them."""
    if isinstance(value, bool):
        return bool
    return float if isinstance(value, (int, float)) else type(value)
