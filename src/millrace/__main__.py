"""`python -m millrace`: the command line, when the console script is not on PATH."""

from __future__ import annotations

from millrace.cli import main

if __name__ == "__main__":
    main()
