"""A real browser for tests of the console: Chromium as Debian installs it, driven by Playwright.

Playwright's own download of a browser is not used: `MILLRACE_CHROMIUM` names another one than those on PATH.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page

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

    def expected(self, *statuses: int) -> bool:
        """Whether there were answers of these statuses, which a browser complains of; they are forgotten then."""
        told = [text for text in self.texts if any(f"status of {status} " in text for status in statuses)]
        self.texts = [text for text in self.texts if text not in told]
        return bool(told)


Size = tuple[int, int]
DESKTOP: Size = (1280, 800)
PHONE: Size = (390, 844)
ZOOMED: Size = (640, 400)
"""What is left of a desktop's page when everything is twice as large."""


class Tab:
    """A page of a browser in a session of its own, which keeps what its scripts and the browser complain of."""

    def __init__(self, browser: Browser, url: str, size: Size = DESKTOP, scheme: Literal["light", "dark"] = "light"):
        self.url = url
        self._context = browser.new_context(
            base_url=url,
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,
            locale="en-GB",
            timezone_id="UTC",
            reduced_motion="reduce",
        )
        self.page = self._context.new_page()
        self.complaints = Complaints(self.page)
        self.dialogs: list[str] = []
        """The questions that the page asked; all were answered with yes."""
        self.requested: list[str] = []
        self.page.on("dialog", self._asked)
        self.page.on("request", lambda request: self.requested.append(request.url))

    def __repr__(self) -> str:
        return f"Tab({self.page.url})"

    def open(self, path: str, status: int = 200) -> Page:
        """Go there, as somebody who types the address."""
        answer = self.page.goto(path, wait_until="load")
        assert answer is not None
        assert answer.status == status, f"{path}: {answer.status} {self.text()[:500]}"
        return self.page

    def text(self) -> str:
        """What is to be read in the page, without the menu."""
        return " ".join(self.page.locator("main").inner_text().split())

    def rows(self) -> list[str]:
        """The rows of the page's first table, as text."""
        found = self.page.locator("main table").first.locator("tbody tr")
        return [" ".join(text.split()) for text in found.all_inner_texts()]

    def resize(self, size: Size) -> None:
        self.page.set_viewport_size({"width": size[0], "height": size[1]})

    def close(self) -> None:
        self._context.close()

    def _asked(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.accept()
