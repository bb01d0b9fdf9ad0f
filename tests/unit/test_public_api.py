"""The page of the public API says what the modules say, and what the package's own docstring says."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import millrace

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `(millrace[\w.]*)` \| (`.*`) \|$", re.MULTILINE)
PAGE = {module: re.findall(r"`(\w+)`", names) for module, names in ROW.findall((ROOT / "docs" / "api.md").read_text())}


def load(name: str) -> ModuleType:
    if name.startswith("millrace.spark"):
        pytest.importorskip("pyspark", reason="the extra `spark` is not installed")
    return importlib.import_module(name)


def test_the_page_has_the_modules_that_the_package_names() -> None:
    named = re.findall(r"`(millrace\.[\w.]+)`", (millrace.__doc__ or "").partition("Nothing is imported")[0])
    assert set(PAGE) == {"millrace", *named}
    assert len(PAGE) == 5


@pytest.mark.parametrize("name", PAGE)
def test_the_page_has_the_names_of_a_module(name: str) -> None:
    assert PAGE[name] == sorted(load(name).__all__)


@pytest.mark.parametrize("name", PAGE)
def test_what_is_public_is_there_and_explained(name: str) -> None:
    module = load(name)
    assert module.__doc__
    for each in module.__all__:
        value = getattr(module, each)
        explained = value.__doc__ or not (inspect.isroutine(value) or inspect.isclass(value))
        assert explained, f"{name}.{each} has no docstring"


def test_private_names_are_not_in_the_examples() -> None:
    """Who copies one must not build on what may change."""
    written = [*(ROOT / "examples").rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    pattern = re.compile(r"^(?:from (millrace[\w.]*) import (.+)|import (millrace[\w.]*))", re.MULTILINE)
    for path in written:
        for module, names, imported in pattern.findall(path.read_text()):
            for name in re.split(r",\s*", names) if names else [""]:
                found = imported or module
                assert found in PAGE or f"{found}.{name}" in PAGE, f"{path}: {found} is private"
                assert not names or name in PAGE.get(found, [name]), f"{path}: {found}.{name} is private"
