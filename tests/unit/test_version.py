"""The version stands in one place, and everything that names it says the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import millrace
from millrace.client.versions import api_versions_request

ROOT = Path(__file__).resolve().parents[2]
HERE = millrace.__version__


def test_it_is_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", HERE)


def test_the_package_takes_it_from_the_module() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in declared["project"]["dynamic"] and "version" not in declared["project"]
    assert declared["tool"]["hatch"]["version"] == {"path": "src/millrace/__init__.py"}


def test_it_is_written_nowhere_else_in_the_package() -> None:
    written = re.compile(rf"[\"' ]{re.escape(HERE)}[\"' ]")
    found = [str(path) for path in (ROOT / "src").rglob("*.py") if written.search(path.read_text())]
    assert found == [str(ROOT / "src" / "millrace" / "__init__.py")]


def test_brokers_are_told_it() -> None:
    request = api_versions_request()
    assert (request.client_software_name, request.client_software_version) == ("millrace", HERE)


def test_images_and_the_changelog_name_it() -> None:
    """Of the files of deploy/ and their page: what is run is checked in tests/unit/deploy; here also what is said."""
    named = re.compile(r"\bmillrace:(\d+\.[\w.]*)|newTag: (\S+)")
    files = [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    found = {
        (first or second).rstrip(".")
        for path in (*files, ROOT / "docs" / "deployment.md")
        for first, second in named.findall(path.read_text())
    }
    assert found == {HERE}
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == HERE
