"""What people are told to install exists under that name, wherever they are told."""

from __future__ import annotations

import json
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

from millrace import __version__, installing
from millrace.installing import DISTRIBUTION, install_hint

ROOT = Path(__file__).resolve().parents[2]
A_STRANGERS = re.compile(r"""pip\s+install\b[^`\n&;|#]*?[\s'"]millrace(?![\w.-])|\bmillrace\[\w""")


class Installed(Distribution):
    """A distribution with one file."""

    def __init__(self, direct_url: object = None) -> None:
        self._direct_url = direct_url

    def read_text(self, filename: str) -> str | None:
        return json.dumps(self._direct_url) if filename == "direct_url.json" and self._direct_url else None

    def locate_file(self, path: object) -> Path:
        raise NotImplementedError


def installed_as(monkeypatch: pytest.MonkeyPatch, direct_url: object = None) -> None:
    monkeypatch.setattr(installing, "distribution", lambda name: {DISTRIBUTION: Installed(direct_url)}[name])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "a checkout"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    return folder


def test_from_an_index_it_is_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    installed_as(monkeypatch)
    assert install_hint("spark") == "pip install 'millrace-broker[spark]'"


def test_a_wheel_from_a_file_is_installed_already_and_needs_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    installed_as(monkeypatch, {"url": "file:///gone/millrace_broker-0.1.0-py3-none-any.whl", "archive_info": {}})
    assert install_hint("spark") == "pip install 'millrace-broker[spark]'"


@pytest.mark.parametrize("how", [{}, {"editable": True}])
def test_from_a_checkout_it_is_the_checkout(
    monkeypatch: pytest.MonkeyPatch, checkout: Path, how: dict[str, bool]
) -> None:
    installed_as(monkeypatch, {"url": checkout.as_uri(), "dir_info": how})
    monkeypatch.chdir(checkout)
    assert install_hint("postgres") == "pip install '.[postgres]'"
    monkeypatch.chdir(checkout.parent)
    assert install_hint("postgres") == f"pip install '{checkout}[postgres]'"


def test_from_a_checkout_that_is_gone_it_is_the_distribution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed_as(monkeypatch, {"url": (tmp_path / "gone").as_uri(), "dir_info": {"editable": True}})
    assert install_hint("spark") == "pip install 'millrace-broker[spark]'"


def test_from_sources_on_the_path_it_is_their_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Distribution:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installing, "distribution", missing)
    monkeypatch.chdir(ROOT)
    assert install_hint("spark") == "pip install '.[spark]'"


def test_what_is_installed_has_these_names() -> None:
    installed = distribution(DISTRIBUTION)
    assert installed.version == __version__
    assert {(point.group, point.name) for point in installed.entry_points} == {
        ("console_scripts", "millrace"),
        ("pytest11", "millrace"),
    }


def tracked_files() -> list[Path]:
    folders = [ROOT / name for name in ("src", "docs", "examples", "benches", "scripts", "tests", ".ci")]
    below = [path for folder in folders for path in folder.rglob("*")]
    texts = [path for path in (*ROOT.iterdir(), *below) if path.is_file() and "__pycache__" not in path.parts]
    return [path for path in texts if path != Path(__file__)]


def test_no_page_message_or_comment_names_a_strangers_package() -> None:
    found = []
    for path in tracked_files():
        text = path.read_text(errors="replace")
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in A_STRANGERS.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    "line", ["pip install millrace", "pip install 'millrace[spark]'", "pip install -U pytest millrace", "a millrace[x]"]
)
def test_the_search_finds_them(line: str) -> None:
    assert A_STRANGERS.search(line)


@pytest.mark.parametrize(
    "line", ["pip install 'millrace-broker[spark]'", "pip install '.[spark]'", "pip install .  # of millrace"]
)
def test_and_nothing_else(line: str) -> None:
    assert not A_STRANGERS.search(line)


def test_messages_of_the_package_come_from_one_place() -> None:
    naming = [path for path in (ROOT / "src").rglob("*.py") if DISTRIBUTION in path.read_text()]
    assert naming == [ROOT / "src" / "millrace" / "installing.py"]
