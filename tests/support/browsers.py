"""A real browser for tests of the console: Chromium as Debian installs it, driven by Playwright.

Playwright's own download of a browser is not used: `MILLRACE_CHROMIUM` names another one than those on PATH.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Nothing is asked of the network but the console.
OPTIONS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
)


def chromium() -> str:
    """Where it is; the test is skipped, with the reason, if there is none."""
    found = os.environ.get("MILLRACE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no chromium on PATH: apt-get install chromium, or name one by MILLRACE_CHROMIUM")
    return found


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    # As root there is no sandbox that it could set up.
    options = [*OPTIONS, *(["--no-sandbox"] if os.getuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=options)
        try:
            yield browser
        finally:
            browser.close()


class Complaints:
    """What a page's script or the browser complains of: errors, and everything that the content policy refused."""

    def __init__(self, page: Page) -> None:
        self.texts: list[str] = []
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.texts.append(f"error: {error}"))

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.texts.append(f"{message.type}: {message.text}")
