"""What every module of the package does in the same way: its logger, its section comments, its `__repr__`.

Read from the source, so that a new module is held to it without a line here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import millrace

PACKAGE = Path(millrace.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
WIDTH = 120

_LOGGER = re.compile(r"^(\w+)(?:: [\w.]+)? = logging\.getLogger\(__name__\)", re.MULTILINE)
_RULED = re.compile(r"^\s*#\s*[-=#*]{3,}")
_SECTION = re.compile(r"^ *# --- \S.* -{3,}$")


def test_there_is_something_to_look_at() -> None:
    assert len(MODULES) > 100 and sum(len(_LOGGER.findall(path.read_text())) for path in MODULES) > 50
    assert sum(1 for _ in _representations()) > 50


def test_a_module_logs_by_its_own_name() -> None:
    odd = {str(path): name for path in MODULES for name in _LOGGER.findall(path.read_text()) if name != "logger"}
    assert odd == {}


def test_a_section_begins_with_one_kind_of_line() -> None:
    odd = [
        f"{path}:{number}: {line}"
        for path in MODULES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if _RULED.match(line) and not (_SECTION.match(line) and len(line) == WIDTH)
    ]
    assert odd == []


def test_a_representation_is_the_name_of_the_class_and_what_tells_one_from_another() -> None:
    odd = [f"{path}: {name}: {shown}" for path, name, shown in _representations() if not _is_call_of(name, shown)]
    assert odd == []


def _is_call_of(name: str, shown: str) -> bool:
    return shown.startswith((f"{name}(", "{type(self).__name__}(", "{type(self).__qualname__}(")) and shown.endswith(
        ")"
    )


def _representations() -> Iterator[tuple[Path, str, str]]:
    """What each `__repr__` of the package returns, as it is written, what stands in braces included."""
    for path in MODULES:
        for each in ast.walk(ast.parse(path.read_text())):
            if not isinstance(each, ast.ClassDef):
                continue
            for method in each.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__repr__":
                    for inner in ast.walk(method):
                        if isinstance(inner, ast.Return) and inner.value is not None:
                            yield path, each.name, _text(inner.value)


def _text(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(part) for part in value.values)
    if isinstance(value, ast.FormattedValue):
        return f"{{{ast.unparse(value.value)}}}"
    return ast.unparse(value)
