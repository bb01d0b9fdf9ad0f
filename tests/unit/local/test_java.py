"""The `java` that Spark's launcher is given: the real one, without the flags that it would only complain about."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from millrace.local.java import Java, home_for_spark

VECTOR = "--add-modules=jdk.incubator.vector"
PACKAGE = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
OTHER = "--add-opens=java.base/java.lang=ALL-UNNAMED"


@pytest.mark.parametrize(("version", "kept"), [(17, [PACKAGE]), (24, [PACKAGE]), (25, [])])
def test_flags_that_a_runtime_would_warn_of_are_left_out(tmp_path: Path, version: int, kept: list[str]) -> None:
    home = tmp_path / "a java's home"
    (home / "bin").mkdir(parents=True)
    real = home / "bin" / "java"
    real.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    real.chmod(0o755)
    program = home_for_spark(Java(home, version, "the test")) / "bin" / "java"
    given = ["-Xmx1g", VECTOR, PACKAGE, OTHER, "Main", "two words", ""]
    done = subprocess.run([program, *given], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == ["-Xmx1g", *kept, OTHER, "Main", "two words", ""]


def test_a_stand_in_is_not_given_another(tmp_path: Path) -> None:
    first = home_for_spark(Java(tmp_path, 17, "the test"))
    assert home_for_spark(Java(first, 17, "JAVA_HOME")) == first
