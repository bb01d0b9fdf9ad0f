"""Write the generated pages of docs/ (`make docs`), or with --check fail when one of them is out of date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from millrace.config.page import configuration_markdown
from millrace.handlers.compatibility import compatibility_markdown

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"compatibility.md": compatibility_markdown, "configuration.md": configuration_markdown}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a page would change")
    check = parser.parse_args().check
    stale = []
    for name, render in PAGES.items():
        page, text = DOCS / name, render()
        if page.exists() and page.read_text() == text:
            continue
        stale.append(name)
        if not check:
            page.write_text(text)
    if stale:
        print(f"{'out of date, run make docs' if check else 'written'}: {', '.join(stale)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
