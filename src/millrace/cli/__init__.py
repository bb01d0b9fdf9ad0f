"""The `millrace` command: one file per noun, joined by `root`.

This file stays free of heavy imports, because `millrace up` has to answer its first request soon after the interpreter
starts: typer is imported when `main` runs, a noun's module when that noun was typed, rich and librdkafka when a command
really needs them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command line and end the process with its exit code."""
    from millrace.cli.root import run

    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))
