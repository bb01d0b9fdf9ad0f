"""Turns a declaration and a version into two flat Python functions, one that encodes and one that decodes.

What the functions do is all here; when they are made, and how their errors are told, is in `codec.py`. Structures are
expanded in place, so a message costs one call, and neighbouring fixed-width values (with the length prefix or the tag
count that follows them) are read and written by one `struct` call.

No length is trusted: a string must lie within the remaining bytes, a count times the smallest size of an element must
not exceed them, and all arrays of a request together have a budget of elements. A short read surfaces as
`struct.error` or `IndexError`; slices, which Python would cut short in silence, are checked before they are taken.
"""

from __future__ import annotations

import functools
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID

from millrace.errors import ProtocolError
from millrace.wire import primitives
from millrace.wire.schema import Array, Blob, Field, Fixed, Nested, Response, Struct, Text

_KEPT_ARRAY_FORMATS: Final = 64


def decoder(cls: type[Struct], version: int) -> Callable[..., Any]:
    """A function `(buffer, pos, end) -> (message, pos)`; it may raise ProtocolError, struct.error, IndexError and
    UnicodeDecodeError."""
    return _Decoder(cls, version).build()


def encoder(cls: type[Struct], version: int) -> Callable[..., Any]:
    """A function `(message, append)` that calls `append` with each part of the encoding."""
    valid = cls.declaration.valid
    if valid is None:
        raise TypeError(f"{cls.__qualname__} has no versions of its own")
    if not valid.include(version):
        raise ValueError(f"{cls.__qualname__} has no version {version}")
    return _Encoder(cls, version).build()


class _ArrayFormats(dict[int, Callable[..., Any]]):
    """The `struct` function for arrays of one type, by the number of elements; short ones are kept."""

    def __init__(self, method: str, code: str) -> None:
        super().__init__()
        self._method = method
        self._code = code

    def __missing__(self, count: int) -> Callable[..., Any]:
        made: Callable[..., Any] = getattr(struct.Struct(f">{count}{self._code}"), self._method)
        if count <= _KEPT_ARRAY_FORMATS:
            self[count] = made
        return made


_array_formats = functools.cache(_ArrayFormats)


class _Source(ABC):
    """Lines of a function under construction, and the run of fixed-width values not yet emitted."""

    def __init__(self, cls: type[Struct], version: int) -> None:
        declaration = cls.declaration
        self.cls = cls
        self.version = version
        self.flexible = declaration.flexible_from is not None and version >= declaration.flexible_from
        self.lines: list[str] = []
        self.depth = 1
        self.names: dict[str, Any] = {"ProtocolError": ProtocolError}
        self.run: list[tuple[str, str]] = []
        self._counter = 0

    def fresh(self, prefix: str) -> str:
        self._counter += 1
        return f"{prefix}{self._counter}"

    def constant(self, prefix: str, value: object) -> str:
        for name, known in self.names.items():
            if known is value:
                return name
        name = self.fresh(prefix)
        self.names[name] = value
        return name

    def emit(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    @contextmanager
    def block(self, opening: str) -> Iterator[None]:
        """An indented block. What is pending belongs before it, and what becomes pending inside belongs inside."""
        self.flush()
        self.emit(opening)
        self.depth += 1
        before = len(self.lines)
        yield
        self.flush()
        if len(self.lines) == before:
            self.emit("pass")
        self.depth -= 1

    @abstractmethod
    def flush(self) -> None:
        """Emit the pending run as one call."""

    def packer(self, method: str, codes: str) -> str:
        name = f"{method}_{codes}".replace("?", "B_").replace(">", "")
        if name not in self.names:
            self.names[name] = getattr(struct.Struct(">" + codes), method)
        return name

    def finish(self, name: str, opening: str) -> Callable[..., Any]:
        self.flush()
        source = "\n".join([opening, *self.lines])
        filename = f"<{self.cls.__qualname__} v{self.version} {name}>"
        exec(compile(source, filename, "exec"), self.names)  # noqa: S102 - made of our own declarations
        made: Callable[..., Any] = self.names[name]
        return made

    def present(self, cls: type[Struct]) -> list[Field]:
        """The fields in line at this version."""
        return [
            field
            for field in cls.declaration.fields
            if field.versions.include(self.version) and not self.is_tagged(field)
        ]

    def tagged(self, cls: type[Struct]) -> list[Field]:
        found = [
            field for field in cls.declaration.fields if field.versions.include(self.version) and self.is_tagged(field)
        ]
        return sorted(found, key=lambda field: field.tag or 0)

    def is_tagged(self, field: Field) -> bool:
        return self.flexible and field.tag is not None

    def absent(self, cls: type[Struct]) -> list[Field]:
        return [field for field in cls.declaration.fields if not field.versions.include(self.version)]

    def smallest(self, field_type: object, *, nullable: bool) -> int:
        """The least number of bytes a value can take."""
        if isinstance(field_type, Fixed):
            return field_type.size_bytes
        if isinstance(field_type, Text):
            return 1 if self.flexible else 2
        if isinstance(field_type, Nested) and not nullable:
            total = 1 if self.flexible else 0
            for field in self.present(field_type.resolved()):
                total += self.smallest(field.type, nullable=field.nullable.include(self.version))
            return total
        if isinstance(field_type, Nested):
            return 1
        return 1 if self.flexible else 4


class _Decoder(_Source):
    def __init__(self, cls: type[Struct], version: int) -> None:
        super().__init__(cls, version)
        self.after: list[str] = []
        self.budget = cls.declaration.is_request
        self.names |= {
            "new": object.__new__,
            "uuid_of": primitives.uuid_of,
            "uvarint": primitives.read_uvarint,
            "read_tag_count": primitives.read_tag_count,
            "read_tag": primitives.read_tag,
            "skip_tags": primitives.skip_tags,
        }

    def build(self) -> Callable[..., Any]:
        if self.budget:
            self.emit(f"budget = {primitives.MAX_REQUEST_ELEMENTS}")
        target = self.structure(self.cls)
        self.flush()
        self.emit(f"return {target}, pos")
        return self.finish("decode", "def decode(buf, pos, end):")

    def read(self, code: str, target: str) -> None:
        self.run.append((code, target))

    def flush(self) -> None:
        if self.run:
            codes = "".join(code for code, _ in self.run)
            if codes == "B":
                self.emit(f"{self.run[0][1]} = buf[pos]")
            else:
                targets = ", ".join(target for _, target in self.run)
                comma = "," if len(self.run) == 1 else ""
                self.emit(f"{targets}{comma} = {self.packer('unpack_from', codes)}(buf, pos)")
            self.emit(f"pos += {struct.calcsize('>' + codes)}")
            self.run = []
        for line in self.after:
            self.emit(line)
        self.after = []

    def structure(self, cls: type[Struct]) -> str:
        target = self.fresh("o")
        self.emit(f"{target} = new({self.constant('C', cls)})")
        for field in [*self.absent(cls), *self.tagged(cls)]:
            self.emit(f"{target}.{field.name} = {self.default(field)}")
        for field in self.present(cls):
            self.field(field, f"{target}.{field.name}")
        if self.flexible:
            self.tags(cls, target)
        return target

    def default(self, field: Field) -> str:
        if field.default is None:
            return "None"
        if isinstance(field.type, Array):
            return "[]"
        if isinstance(field.type, Nested):
            return f"{self.constant('C', field.type.resolved())}()"
        if isinstance(field.default, UUID):
            return self.constant("D", field.default)
        return repr(field.default)

    def field(self, field: Field, target: str) -> None:
        nullable = field.nullable.include(self.version)
        if isinstance(field.type, Array):
            self.array(field.type, target, field.name, nullable=nullable)
        elif isinstance(field.type, Nested):
            self.nested(field.type, target, nullable=nullable)
        else:
            self.scalar(field.type, target, field.name, nullable=nullable)

    def scalar(self, kind: Fixed | Text | Blob, target: str, name: str, *, nullable: bool) -> None:
        if isinstance(kind, Fixed):
            if kind.code == "16s":
                raw = self.fresh("u")
                self.read(kind.code, raw)
                self.after.append(f"{target} = uuid_of({raw})")
            else:
                self.read(kind.code, target)
            return
        text = isinstance(kind, Text)
        length = self.length("h" if text else "i")
        if self.flexible and text:
            with self.block(f"if {length} > {primitives.MAX_STRING_BYTES + 1}:"):
                self.emit(f'raise ProtocolError(f"{name}: a string of {{{length} - 1}} bytes is too long")')
        self.emit(f"stop = pos + {length}{' - 1' if self.flexible else ''}")
        with self.block("if pos <= stop <= end:"):
            if text:
                self.emit(f'{target} = str(buf[pos:stop], "utf-8")')
            elif isinstance(kind, Blob) and kind.view:
                self.names["memoryview"] = memoryview
                self.emit(f"{target} = memoryview(buf)[pos:stop]")
            else:
                self.emit(f"{target} = bytes(buf[pos:stop])")
            self.emit("pos = stop")
        self.null_or_refuse(length, target, name, nullable=nullable, null="0" if self.flexible else "-1")

    def length(self, code: str) -> str:
        """A length or count prefix, read together with what stands before it. Compact ones are one too many."""
        length = self.fresh("n")
        self.read("B" if self.flexible else code, length)
        self.flush()
        if self.flexible:
            with self.block(f"if {length} > 127:"):
                self.emit(f"{length}, pos = uvarint(buf, pos - 1)")
        return length

    def null_or_refuse(self, length: str, target: str, name: str, *, nullable: bool, null: str) -> None:
        if nullable:
            with self.block(f"elif {length} == {null}:"):
                self.emit(f"{target} = None")
        with self.block("else:"):
            self.emit(f'raise ProtocolError(f"{name}: length {{{length}}} where {{end - pos}} bytes remain")')

    def nested(self, kind: Nested, target: str, *, nullable: bool) -> None:
        if not nullable:
            self.emit_after(f"{target} = {self.structure(kind.resolved())}")
            return
        marker = self.fresh("n")
        self.read("b", marker)
        with self.block(f"if {marker} < 0:"):
            self.emit(f"{target} = None")
        with self.block("else:"):
            self.emit_after(f"{target} = {self.structure(kind.resolved())}")

    def emit_after(self, line: str) -> None:
        self.flush()
        self.emit(line)

    def array(self, kind: Array, target: str, name: str, *, nullable: bool) -> None:
        count = self.length("i")
        if self.flexible:
            self.emit(f"{count} -= 1")
        element = kind.element
        smallest = max(1, self.smallest(element, nullable=False))
        with self.block(f"if {count} > 0:"):
            with self.block(f"if {count}{f' * {smallest}' if smallest > 1 else ''} > end - pos:"):
                self.emit(f'raise ProtocolError(f"{name}: {{{count}}} elements where {{end - pos}} bytes remain")')
            if self.budget:
                self.emit(f"budget -= {count}")
                with self.block("if budget < 0:"):
                    self.emit(f'raise ProtocolError("{name}: too many elements in one request")')
            if isinstance(element, Fixed):
                self.fixed_elements(element, target, count)
            else:
                self.elements(element, target, count, name)
        with self.block(f"elif {count} == 0:"):
            self.emit(f"{target} = []")
        self.null_or_refuse(count, target, name, nullable=nullable, null="-1")

    def fixed_elements(self, element: Fixed, target: str, count: str) -> None:
        if element.code == "16s":
            self.emit(f"stop = pos + 16 * {count}")
            self.emit(f"{target} = [uuid_of(bytes(buf[at:at + 16])) for at in range(pos, stop, 16)]")
            self.emit("pos = stop")
            return
        name = f"unpack_array_{element.code}".replace("?", "bool")
        self.names[name] = _array_formats("unpack_from", element.code)
        self.emit(f"{target} = list({name}[{count}](buf, pos))")
        self.emit(f"pos += {element.size_bytes} * {count}")

    def elements(self, element: Text | Blob | Nested, target: str, count: str, name: str) -> None:
        items = self.fresh("a")
        self.emit(f"{items} = []")
        with self.block(f"for _ in range({count}):"):
            if isinstance(element, Nested):
                item = self.structure(element.resolved())
            else:
                item = self.fresh("v")
                self.scalar(element, item, name, nullable=False)
            self.emit_after(f"{items}.append({item})")
        self.emit(f"{target} = {items}")

    def tags(self, cls: type[Struct], target: str) -> None:
        count = self.fresh("t")
        self.read("B", count)
        known = self.tagged(cls)
        with self.block(f"if {count}:"):
            if not known:
                self.emit("pos = skip_tags(buf, pos - 1, end)")
                return
            tag, last, stop = self.fresh("g"), self.fresh("g"), self.fresh("e")
            self.emit(f"{count}, pos = read_tag_count(buf, pos - 1)")
            self.emit(f"{last} = -1")
            with self.block(f"for _ in range({count}):"):
                self.emit(f"{tag}, pos, {stop} = read_tag(buf, pos, end, {last})")
                self.emit(f"{last} = {tag}")
                for index, field in enumerate(known):
                    with self.block(f"{'elif' if index else 'if'} {tag} == {field.tag}:"):
                        self.field(field, f"{target}.{field.name}")
                with self.block("else:"):
                    self.emit(f"pos = {stop}")
                with self.block(f"if pos != {stop}:"):
                    self.emit('raise ProtocolError(f"a tagged field does not fill its size")')


class _Encoder(_Source):
    def __init__(self, cls: type[Struct], version: int) -> None:
        super().__init__(cls, version)
        self.append = "append"
        # An answer is made once and written in the version of whoever asked: what that version lacks, it cannot miss.
        # A request that loses a field means something else.
        self.may_drop = issubclass(cls, Response)
        self.names |= {
            "compact": primitives.COMPACT_LENGTHS,
            "compact_length": primitives.compact_length,
            "compact_string_length": primitives.compact_string_length,
            "tagged_section": primitives.tagged_section,
        }

    def build(self) -> Callable[..., Any]:
        self.structure(self.cls, "message")
        if not self.run and not self.lines:
            self.emit("pass")
        return self.finish("encode", "def encode(message, append):")

    def write(self, code: str, value: str = "") -> None:
        self.run.append((code, value))

    def flush(self) -> None:
        if not self.run:
            return
        codes = "".join(code for code, _ in self.run)
        values = ", ".join(value for _, value in self.run if value)
        if values:
            self.emit(f"{self.append}({self.packer('pack', codes)}({values}))")
        else:
            self.emit(f"{self.append}({struct.pack('>' + codes)!r})")
        self.run = []

    def structure(self, cls: type[Struct], source: str) -> None:
        for field in self.absent(cls):
            if not (field.ignorable or self.may_drop):
                with self.block(f"if {self.is_set(field, source)}:"):
                    message = f"{field.name} is set, which version {self.version} does not carry"
                    self.emit(f"raise ValueError({message!r})")
        for field in self.present(cls):
            self.field(field, f"{source}.{field.name}")
        if not self.flexible:
            return
        known = self.tagged(cls)
        if known:
            self.tags(known, source)
        else:
            self.write("x")

    def is_set(self, field: Field, source: str) -> str:
        value = f"{source}.{field.name}"
        if field.default is None:
            return f"{value} is not None"
        if isinstance(field.type, Array):
            return value
        if isinstance(field.type, Nested):
            inner = field.type.resolved()
            if all(isinstance(part.type, Fixed) for part in inner.declaration.fields):
                # Several of these stand in every partition of a Fetch response, nearly always at their defaults.
                return " or ".join(self.is_set(part, value) for part in inner.declaration.fields)
            return f"{value} != {self.constant('D', inner())}"
        if isinstance(field.default, UUID):
            return f"{value} != {self.constant('D', field.default)}"
        return f"{value} != {field.default!r}"

    def field(self, field: Field, value: str) -> None:
        nullable = field.nullable.include(self.version)
        if isinstance(field.type, Fixed):
            self.write(field.type.code, f"{value}.bytes" if field.type.code == "16s" else value)
            return
        if not nullable:
            self.not_null(field.type, value)
            return
        local = self.fresh("v")
        self.flush()
        self.emit(f"{local} = {value}")
        with self.block(f"if {local} is None:"):
            self.emit(f"{self.append}({self.null(field.type)!r})")
        with self.block("else:"):
            if isinstance(field.type, Nested):
                self.write("b", "1")
            self.not_null(field.type, local)

    def null(self, kind: object) -> bytes:
        if isinstance(kind, Nested):
            return b"\xff"
        if self.flexible:
            return b"\0"
        return b"\xff\xff" if isinstance(kind, Text) else b"\xff\xff\xff\xff"

    def not_null(self, kind: object, value: str) -> None:
        if isinstance(kind, Nested):
            local = self.fresh("o")
            self.emit(f"{local} = {value}")
            self.structure(kind.resolved(), local)
        elif isinstance(kind, Array):
            self.array(kind, value)
        elif isinstance(kind, Text):
            local = self.fresh("b")
            self.emit(f"{local} = {value}.encode()")
            self.length(local, "h", "compact_string_length")
            self.emit(f"{self.append}({local})")
        else:
            local = self.fresh("b")
            self.emit(f"{local} = {value}")
            self.length(local, "i", "compact_length")
            self.emit(f"{self.append}({local})")

    def length(self, local: str, code: str, slow: str) -> None:
        """A length prefix, written together with what stands before it where its width is fixed."""
        if not self.flexible:
            self.write(code, f"len({local})")
            self.flush()
            return
        self.flush()
        size = self.fresh("n")
        self.emit(f"{size} = len({local})")
        self.emit(f"{self.append}(compact[{size}] if {size} < 256 else {slow}({size}))")

    def array(self, kind: Array, value: str) -> None:
        local = self.fresh("a")
        self.emit(f"{local} = {value}")
        self.length(local, "i", "compact_length")
        element = kind.element
        if isinstance(element, Fixed) and element.code != "16s":
            name = f"pack_array_{element.code}".replace("?", "bool")
            self.names[name] = _array_formats("pack", element.code)
            self.emit(f"{self.append}({name}[len({local})](*{local}))")
            return
        item = self.fresh("o")
        with self.block(f"for {item} in {local}:"):
            if isinstance(element, Nested):
                self.structure(element.resolved(), item)
            elif isinstance(element, Fixed):
                self.emit(f"{self.append}({item}.bytes)")
            else:
                self.not_null(element, item)

    def tags(self, known: list[Field], source: str) -> None:
        """Tagged fields are written where they differ from their defaults, lowest tag first."""
        self.flush()
        section, outer = self.fresh("t"), self.append
        self.emit(f"{section} = []")
        for field in known:
            with self.block(f"if {self.is_set(field, source)}:"):
                parts = self.fresh("p")
                self.emit(f"{parts} = []")
                self.append = f"{parts}.append"
                self.field(field, f"{source}.{field.name}")
                self.flush()
                self.append = outer
                self.emit(f"{section}.append(({field.tag}, b''.join({parts})))")
        self.emit(f"{outer}(tagged_section({section}) if {section} else b'\\0')")
