"""The package as a new user has it: built, installed into an empty environment in another folder, and used there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace import __version__

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.pages, pytest.mark.timeout(600)]  # an installation asks a package index


def environment() -> dict[str, str]:
    """Nothing of this checkout, which a new user does not have."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "MILLRACE"))}


def output_of(*command: str | Path, cwd: Path, stdin: str = "", **variables: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**environment(), **variables}, input=stdin, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    output_of(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (made,) = folder.iterdir()
    assert made.name == f"millrace_broker-{__version__}.tar.gz"
    return made


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, which is built from here: what one of them lacks is missing in the end."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / source.name.removesuffix(".tar.gz")
    output_of(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=unpacked)
    return folder / f"millrace_broker-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module", params=["wheel", "source"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment with the wheel, or what pip makes of the sources, and what it needs."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=True)
    package: Path = request.getfixturevalue(request.param)
    output_of(home / "bin" / "python", "-m", "pip", "--no-input", "install", "--quiet", package, cwd=home)
    return home / "bin"


@contextmanager
def broker(installed: Path, folder: Path) -> Iterator[str]:
    """`millrace up`; where it answers."""
    command = [installed / "millrace", "up", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            ready = running.stdout.readline()
            assert ready.startswith("ready bootstrap=127.0.0.1:"), ready
            yield ready.split("=")[1].strip()
        finally:
            running.send_signal(signal.SIGINT)
            assert running.wait(60) == 0


def test_the_wheel_has_every_module_and_nothing_else(wheel: Path) -> None:
    sources = ROOT / "src"
    written = (path for path in sources.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    expected = {str(path.relative_to(sources)) for path in written}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == expected


def test_the_wheel_has_its_licence_its_data_and_what_it_says_of_itself(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        said = f"millrace_broker-{__version__}.dist-info"
        metadata = archive.read(f"{said}/METADATA").decode()
        assert archive.read(f"{said}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert "millrace = millrace.testing.plugin" in archive.read(f"{said}/entry_points.txt").decode()
    assert {"millrace/py.typed", "millrace/spark/log4j2.properties", "pyspark_millrace.py"} <= set(names)
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nDescription-Content-Type: text/markdown\n" in metadata


def test_the_sources_have_what_a_reader_needs_and_no_tests(source: Path) -> None:
    with tarfile.open(source) as archive:
        inside = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    assert {path.partition("/")[0] for path in inside} == {
        *("src", "docs", "deploy", "pyproject.toml", "PKG-INFO", "LICENSE", ".dockerignore", ".gitignore"),
        *("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    }
    assert not [path for path in inside if "tests" in Path(path).parts or path.endswith(".pyc")]
    for folder in ("src", "docs", "deploy"):
        here = {path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts}
        assert {str(path.relative_to(ROOT)) for path in here} <= set(inside)


def test_the_version_and_the_names(installed: Path, tmp_path: Path) -> None:
    assert output_of(installed / "millrace", "--version", cwd=tmp_path) == f"millrace {__version__}\n"
    program = "import importlib.metadata as m; print(m.version('millrace-broker'))"
    assert output_of(installed / "python", "-c", program, cwd=tmp_path) == f"{__version__}\n"


def test_a_record_goes_in_and_comes_out(installed: Path, tmp_path: Path) -> None:
    with broker(installed, tmp_path) as bootstrap:
        millrace = installed / "millrace"
        output_of(millrace, "produce", "greetings", cwd=tmp_path, stdin="hello\n", MILLRACE_BOOTSTRAP=bootstrap)
        read = output_of(
            millrace, "consume", "greetings", "--from-beginning", cwd=tmp_path, MILLRACE_BOOTSTRAP=bootstrap
        )
    assert read == "hello\n"
    assert (tmp_path / "millrace-data").is_dir()


def test_what_is_missing_is_told_by_the_name_of_the_package(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed / "millrace", "demo"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("millrace: error: the demo needs pyspark")
    assert done.stderr.endswith(": pip install 'millrace-broker[spark]'\n")
