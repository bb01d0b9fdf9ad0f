"""A console for tests: the application as a browser would use it, without one.

`Visitor` keeps cookies and finds the CSRF token in the pages it reads, as a browser does; it follows no redirect unless
asked to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
from starlette.testclient import TestClient

from millrace.console.app import create_app
from millrace.console.settings import ConsoleSettings

_CSRF = re.compile(r'x-csrf-token": "([^"]*)"')
_TAG = re.compile(r"<[^>]*>")


class Visitor:
    """Somebody who opens pages and sends forms."""

    def __init__(self, client: TestClient) -> None:
        self.client = client
        self.csrf = ""

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        answer = self.client.get(path, **arguments)
        if found := _CSRF.search(answer.text):
            self.csrf = found[1]
        return answer

    def part(self, path: str) -> httpx.Response:
        """What htmx asks for when it replaces a part of a page."""
        return self.client.get(path, headers={"hx-request": "true"})

    def post(self, path: str, /, **fields: Any) -> httpx.Response:
        """Send a form, with the token of the last page."""
        if not self.csrf:
            self.get("/")
        return self.client.post(path, data={"csrf": self.csrf, **fields})

    def done(self, path: str, /, **fields: Any) -> str:
        """Send a form, follow where it leads, and return the words of that page; a failure is an error."""
        answer = self.post(path, **fields)
        assert answer.status_code == 303, words(answer)
        after = self.get(answer.headers["location"])
        assert after.status_code == 200, words(after)
        return words(after)


def words(answer: httpx.Response) -> str:
    """What a person reads of a page, in one line."""
    import html

    body = answer.text.partition("<main")[2] or answer.text
    return " ".join(html.unescape(_TAG.sub(" ", body)).split())


@contextmanager
def visiting(settings: ConsoleSettings) -> Iterator[Visitor]:
    """A visitor of a console with these settings."""
    with TestClient(create_app(settings), base_url="http://localhost", follow_redirects=False) as client:
        yield Visitor(client)
