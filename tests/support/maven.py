"""Jars from Maven Central for tests and benchmarks: named in a pom.xml, fetched once, kept in `.cache` of the checkout.

Nothing of this is installed or shipped. Where there is no Maven or no way to fetch, `JarsUnavailable` says which of
them, so that a caller can skip with a reason. A fetch is whole or absent: the folder appears by a rename.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
FETCH_TIMEOUT_S = 480


class JarsUnavailable(Exception):
    """The jars cannot be had on this machine; the text says why."""


def jars_of(pom: Path, name: str) -> list[Path]:
    """The jars a pom.xml names, in `.cache/NAME/<digest of the pom>`. Raises JarsUnavailable."""
    folder = CACHE / name / hashlib.sha256(pom.read_bytes()).hexdigest()[:16]
    if not folder.is_dir():
        _fetch(pom, name, folder)
    return sorted(folder.glob("*.jar"))


def _fetch(pom: Path, name: str, folder: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise JarsUnavailable(f"no mvn on PATH, and the jars of {name} have not been fetched before")
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        _copy_dependencies(maven, pom, name, partial)
        if not folder.is_dir():  # another process may have been faster
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy_dependencies(maven: str, pom: Path, name: str, folder: Path) -> None:
    command = [maven, "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={folder}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise JarsUnavailable(
            f"mvn could not fetch the jars of {name} within {FETCH_TIMEOUT_S // 60} minutes"
        ) from None
    if done.returncode != 0:
        reason = next((line for line in done.stdout.splitlines() if "ERROR" in line), done.stderr.strip()[:300])
        raise JarsUnavailable(f"mvn could not fetch the jars of {name}: {reason}")
