"""Write the generated pages of docs/ (`make docs`), or with --check fail when one of them is out of date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from millrace.config.page import configuration_markdown
from millrace.handlers.compatibility import compatibility_markdown
from millrace.metrics.page import with_tables

DOCS = Path(__file__).parents[1] / "docs"
PAGES: dict[str, Callable[[str], str]] = {
    "compatibility.md": lambda _: compatibility_markdown(),
    "configuration.md": lambda _: configuration_markdown(),
    "metrics.md": with_tables,
}
"""How each page is made from what it was: of some only a part is generated."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a page would change")
    check = parser.parse_args().check
    stale = []
    for name, render in PAGES.items():
        page = DOCS / name
        before = page.read_text() if page.exists() else ""
        text = render(before)
        if before == text:
            continue
        stale.append(name)
        if not check:
            page.write_text(text)
    if stale:
        print(f"{'out of date, run make docs' if check else 'written'}: {', '.join(stale)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
