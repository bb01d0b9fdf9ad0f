"""The notation in which every message is declared: a class per message, a line per field, version ranges on the line.

    class HeartbeatRequest(Request, key=ApiKey.HEARTBEAT, versions="0-4", flexible="4+"):
        group_id: str = string()
        group_instance_id: str | None = string("3+", nullable=True, default=None)

A declaration is plain data: bytes are the compiler's business (`compiler.py`), and nothing is compiled before it is
used. Structures inside a message are classes inside its class; where one of them refers to a sibling it does so by
name (`array("Partition")`), because a class body cannot see the names of the class around it.

Every field has a default, so every argument of `__init__` is optional and by keyword only. A field that a version does
not carry keeps its default when that version is decoded. Instances have slots, compare by value and are mutable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeVar, cast, dataclass_transform, overload
from uuid import UUID

from millrace.wire.keys import ApiKey

T = TypeVar("T")

ZERO_UUID: Final = UUID(int=0)
_LAST_VERSION: Final = 0x7FFF


class Versions(NamedTuple):
    """A closed range of versions; `low > high` is the empty one."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Versions:
        """Read "3", "3-5", "3+" or "none"."""
        if text == "none":
            return cls(0, -1)
        if text.endswith("+"):
            return cls(int(text[:-1]), _LAST_VERSION)
        low, _, high = text.partition("-")
        return cls(int(low), int(high or low))

    def include(self, version: int) -> bool:
        return self.low <= version <= self.high


ALL_VERSIONS: Final = Versions(0, _LAST_VERSION)
NO_VERSIONS: Final = Versions(0, -1)


class Fixed(NamedTuple):
    """A type whose every value has the same width; `code` is its letter in a `struct` format."""

    code: str
    size_bytes: int


class Text(NamedTuple):
    """A length and that many bytes of UTF-8."""


class Blob(NamedTuple):
    """A length and that many bytes; `view` decodes to a memoryview of the input instead of a copy."""

    view: bool


class Nested(NamedTuple):
    """A structure in place; a name until the message around it is complete."""

    struct: type[Struct] | str

    def resolved(self) -> type[Struct]:
        if isinstance(self.struct, str):
            raise TypeError(f"no structure named {self.struct} was declared")
        return self.struct


class Array(NamedTuple):
    """A count and that many elements."""

    element: Fixed | Text | Blob | Nested


FieldType = Fixed | Text | Blob | Nested | Array

INT8: Final = Fixed("b", 1)
INT16: Final = Fixed("h", 2)
INT32: Final = Fixed("i", 4)
INT64: Final = Fixed("q", 8)
UINT16: Final = Fixed("H", 2)
UINT32: Final = Fixed("I", 4)
FLOAT64: Final = Fixed("d", 8)
BOOL: Final = Fixed("?", 1)
UUID_BYTES: Final = Fixed("16s", 16)


@dataclass(slots=True)
class Field:
    """One line of a declaration."""

    type: FieldType
    versions: Versions
    nullable: Versions
    default: Any
    tag: int | None
    ignorable: bool
    name: str = ""

    def new_default(self) -> Any:
        """The default as a value of the caller's own: lists and structures are never shared."""
        if self.default is None:
            return None
        if isinstance(self.type, Array):
            return []
        if isinstance(self.type, Nested):
            return self.type.resolved()()
        return self.default

    def is_default(self, value: Any) -> bool:
        if value is None or self.default is None:
            return value is self.default
        if isinstance(self.type, Array):
            return not value
        if isinstance(self.type, Nested):
            return bool(value == self.type.resolved()())
        return bool(value == self.default)


_STRUCTURE: Final = object()


def _field(
    type_: FieldType, versions: str, default: object, *, nullable: bool | str = False, tag: int | None, ignorable: bool
) -> Any:
    if isinstance(nullable, bool):
        nullable_versions = ALL_VERSIONS if nullable else NO_VERSIONS
    else:
        nullable_versions = Versions.parse(nullable)
    return Field(type_, Versions.parse(versions), nullable_versions, default, tag, ignorable)


def int8(versions: str = "0+", *, default: int = 0, tag: int | None = None, ignorable: bool = False) -> int:
    return cast(int, _field(INT8, versions, default, tag=tag, ignorable=ignorable))


def int16(versions: str = "0+", *, default: int = 0, tag: int | None = None, ignorable: bool = False) -> int:
    return cast(int, _field(INT16, versions, default, tag=tag, ignorable=ignorable))


def int32(versions: str = "0+", *, default: int = 0, tag: int | None = None, ignorable: bool = False) -> int:
    return cast(int, _field(INT32, versions, default, tag=tag, ignorable=ignorable))


def int64(versions: str = "0+", *, default: int = 0, tag: int | None = None, ignorable: bool = False) -> int:
    return cast(int, _field(INT64, versions, default, tag=tag, ignorable=ignorable))


def uint16(versions: str = "0+", *, default: int = 0, tag: int | None = None, ignorable: bool = False) -> int:
    return cast(int, _field(UINT16, versions, default, tag=tag, ignorable=ignorable))


def uint32(versions: str = "0+", *, default: int = 0, tag: int | None = None, ignorable: bool = False) -> int:
    return cast(int, _field(UINT32, versions, default, tag=tag, ignorable=ignorable))


def float64(versions: str = "0+", *, default: float = 0.0, tag: int | None = None, ignorable: bool = False) -> float:
    return cast(float, _field(FLOAT64, versions, default, tag=tag, ignorable=ignorable))


def boolean(versions: str = "0+", *, default: bool = False, tag: int | None = None, ignorable: bool = False) -> bool:
    return cast(bool, _field(BOOL, versions, default, tag=tag, ignorable=ignorable))


def uuid(versions: str = "0+", *, default: UUID = ZERO_UUID, tag: int | None = None, ignorable: bool = False) -> UUID:
    return cast(UUID, _field(UUID_BYTES, versions, default, tag=tag, ignorable=ignorable))


@overload
def string(versions: str = "0+", *, default: str = "", tag: int | None = None, ignorable: bool = False) -> str: ...
@overload
def string(
    versions: str = "0+",
    *,
    nullable: Literal[True] | str,
    default: str | None = "",
    tag: int | None = None,
    ignorable: bool = False,
) -> str | None: ...
def string(
    versions: str = "0+",
    *,
    nullable: bool | str = False,
    default: str | None = "",
    tag: int | None = None,
    ignorable: bool = False,
) -> Any:
    return _field(Text(), versions, default, nullable=nullable, tag=tag, ignorable=ignorable)


@overload
def binary(versions: str = "0+", *, default: bytes = b"", tag: int | None = None, ignorable: bool = False) -> bytes: ...
@overload
def binary(
    versions: str = "0+",
    *,
    nullable: Literal[True] | str,
    default: bytes | None = b"",
    tag: int | None = None,
    ignorable: bool = False,
) -> bytes | None: ...
def binary(
    versions: str = "0+",
    *,
    nullable: bool | str = False,
    default: bytes | None = b"",
    tag: int | None = None,
    ignorable: bool = False,
) -> Any:
    return _field(Blob(view=False), versions, default, nullable=nullable, tag=tag, ignorable=ignorable)


@overload
def records(
    versions: str = "0+", *, nullable: Literal[True] | str = True, tag: int | None = None, ignorable: bool = False
) -> bytes | memoryview | None: ...
@overload
def records(
    versions: str = "0+", *, nullable: Literal[False], tag: int | None = None, ignorable: bool = False
) -> bytes | memoryview: ...
def records(
    versions: str = "0+", *, nullable: bool | str = True, tag: int | None = None, ignorable: bool = False
) -> Any:
    """Record batches; decoded as a view of the input, so it lives as long as the frame does."""
    initial = None if nullable else b""
    return _field(Blob(view=True), versions, initial, nullable=nullable, tag=tag, ignorable=ignorable)


@overload
def nested(struct: Callable[..., T], versions: str = "0+", *, tag: int | None = None, ignorable: bool = False) -> T: ...
@overload
def nested(
    struct: Callable[..., T],
    versions: str = "0+",
    *,
    nullable: Literal[True] | str,
    tag: int | None = None,
    ignorable: bool = False,
) -> T | None: ...
@overload
def nested(
    struct: str,
    versions: str = "0+",
    *,
    nullable: bool | str = False,
    tag: int | None = None,
    ignorable: bool = False,
) -> Any: ...
def nested(
    struct: Any,
    versions: str = "0+",
    *,
    nullable: bool | str = False,
    tag: int | None = None,
    ignorable: bool = False,
) -> Any:
    """A structure in place. A nullable one is null by default, the others have the structure's own defaults."""
    initial = None if nullable else _STRUCTURE
    return _field(Nested(struct), versions, initial, nullable=nullable, tag=tag, ignorable=ignorable)


_EMPTY: Final = object()


@overload
def array(
    element: Callable[..., T],
    versions: str = "0+",
    *,
    tag: int | None = None,
    ignorable: bool = False,
) -> list[T]: ...
@overload
def array(
    element: Callable[..., T],
    versions: str = "0+",
    *,
    nullable: Literal[True] | str,
    default: object = ...,
    tag: int | None = None,
    ignorable: bool = False,
) -> list[T] | None: ...
@overload
def array(
    element: str,
    versions: str = "0+",
    *,
    nullable: bool | str = False,
    default: object = ...,
    tag: int | None = None,
    ignorable: bool = False,
) -> Any: ...
def array(
    element: Any,
    versions: str = "0+",
    *,
    nullable: bool | str = False,
    default: object = _EMPTY,
    tag: int | None = None,
    ignorable: bool = False,
) -> Any:
    """A list of structures (by class or name) or of plain values (by their specifier, as in `array(int32)`)."""
    plain = _ELEMENT_TYPES.get(element)
    return _field(
        Array(plain if plain is not None else Nested(element)),
        versions,
        default,
        nullable=nullable,
        tag=tag,
        ignorable=ignorable,
    )


_ELEMENT_TYPES: Final[dict[object, Fixed | Text | Blob]] = {
    int8: INT8,
    int16: INT16,
    int32: INT32,
    int64: INT64,
    uint16: UINT16,
    uint32: UINT32,
    float64: FLOAT64,
    boolean: BOOL,
    uuid: UUID_BYTES,
    string: Text(),
    binary: Blob(view=False),
}


@dataclass(slots=True)
class Declaration:
    """What the compiler needs to know about a class."""

    fields: tuple[Field, ...]
    valid: Versions | None
    flexible_from: int | None
    is_request: bool = False
    decoders: dict[int, Callable[..., Any]] = dataclass_field(default_factory=dict)
    encoders: dict[int, Callable[..., Any]] = dataclass_field(default_factory=dict)


@dataclass_transform(kw_only_default=True)
class StructMeta(type):
    """Turns field lines into slots; resolves names when the outermost class of a message is complete."""

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        key: int | None = None,
        versions: str | None = None,
        flexible: str = "none",
    ) -> StructMeta:
        fields = []
        for attribute, value in list(namespace.items()):
            if isinstance(value, Field):
                value.name = attribute
                fields.append(value)
                del namespace[attribute]
        namespace["__slots__"] = tuple(field.name for field in fields)
        cls = super().__new__(mcs, name, bases, namespace)
        flexible_versions = Versions.parse(flexible)
        flexible_from = flexible_versions.low if flexible != "none" else None
        valid = Versions.parse(versions) if versions is not None else None
        made = cast(Any, cls)
        made.declaration = Declaration(tuple(fields), valid, flexible_from, is_request=name.endswith("Request"))
        if valid is not None:
            made.min_version, made.max_version = valid
            made.flexible_from = flexible_from
            if key is not None:
                made.api_key = ApiKey(key)
            _resolve(made, (made,))
        return cls


def _resolve(cls: type[Struct], scopes: tuple[type[Struct], ...]) -> None:
    """Replace the names in `Nested` types by classes, looked up from the inside out; a name unknown is an error."""
    for field in cls.declaration.fields:
        type_ = field.type
        if isinstance(type_, Array) and isinstance(type_.element, Nested):
            field.type = Array(Nested(_lookup(type_.element, scopes)))
        elif isinstance(type_, Nested):
            field.type = Nested(_lookup(type_, scopes))
    for inner in vars(cls).values():
        if isinstance(inner, StructMeta):
            structure = cast("type[Struct]", inner)
            _resolve(structure, (structure, *scopes))


def _lookup(reference: Nested, scopes: tuple[type[Struct], ...]) -> type[Struct]:
    if not isinstance(reference.struct, str):
        return reference.struct
    for scope in scopes:
        found = vars(scope).get(reference.struct)
        if isinstance(found, StructMeta):
            return cast("type[Struct]", found)
    raise TypeError(f"{scopes[0].__qualname__} refers to {reference.struct}, which is not declared")


class Struct(metaclass=StructMeta):
    """A structure of the protocol, inside a message or, with `versions=`, on its own (a record of a state topic)."""

    declaration: ClassVar[Declaration]

    def __init__(self, **values: object) -> None:
        # The real initialiser is made at the first construction: most classes are declared and never built.
        cls = type(self)
        cls.__init__ = _make_init(cls)  # type: ignore[method-assign]
        cls.__init__(self, **values)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.field_names())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """The fields that differ from their defaults; bytes are counted, not shown, for they may be secrets."""
        shown = []
        for field in self.declaration.fields:
            value = getattr(self, field.name)
            if not field.is_default(value):
                shown.append(f"{field.name}={_shown(value)}")
        return f"{type(self).__qualname__}({', '.join(shown)})"

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The names of all fields, of every version, in the order of the declaration."""
        return tuple(field.name for field in cls.declaration.fields)


class Data(Struct):
    """A structure with versions of its own that is no API message: it travels or rests inside other bytes."""

    min_version: ClassVar[int]
    max_version: ClassVar[int]
    flexible_from: ClassVar[int | None]


class Message(Data):
    """A request or a response: the body that follows the header in a frame."""

    api_key: ClassVar[ApiKey]


class Request(Message):
    """What a client sends."""


class Response(Message):
    """What a broker answers."""


def _shown(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, list) and len(value) > 20:
        return f"[{', '.join(map(_shown, value[:20]))}, ... {len(value)} in all]"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)


def _make_init(cls: type[Struct]) -> Callable[..., None]:
    namespace: dict[str, Any] = {"_unset": _EMPTY}
    arguments = ["self"]
    body = []
    fields = cls.declaration.fields
    if fields:
        arguments.append("*")
    for index, field in enumerate(fields):
        name = field.name
        if field.default is None or not isinstance(field.type, Array | Nested):
            namespace[f"_d{index}"] = field.default
            arguments.append(f"{name}=_d{index}")
            body.append(f" self.{name} = {name}")
            continue
        fresh = "[]"
        if isinstance(field.type, Nested):
            namespace[f"_s{index}"] = field.type.resolved()
            fresh = f"_s{index}()"
        arguments.append(f"{name}=_unset")
        body.append(f" self.{name} = {fresh} if {name} is _unset else {name}")
    source = "\n".join([f"def __init__({', '.join(arguments)}):", *(body or [" pass"])])
    exec(source, namespace)  # noqa: S102 - the source is made of our own declarations
    made: Callable[..., None] = namespace["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    return made
