"""The `millrace` command: one file per noun, joined by `root`.

This file stays free of heavy imports, because `millrace up` has to answer its first request soon after the interpreter
starts: typer is imported when `main` runs, a noun's module when that noun was typed, rich and librdkafka when a command
really needs them.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process and end it with its exit code."""
    try:
        from millrace.cli.process import end_at_ctrl_c

        end_at_ctrl_c()
    except KeyboardInterrupt:
        sys.exit(130)
    from millrace.cli.root import run

    sys.exit(run(sys.argv[1:]))
