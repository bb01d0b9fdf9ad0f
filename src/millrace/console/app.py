"""All pages as one application, with what browsers are told to obey.

Whatever a record holds, it cannot act: templates escape everything, and the content security policy lets a browser run
only the scripts that lie in `static`, with no inline code and no `eval`.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from millrace.console import pages
from millrace.console.sessions import Sessions
from millrace.console.settings import ConsoleSettings, Login
from millrace.console.web import failure, session_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATIC: Final = Path(__file__).parent / "static"
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


def create_app(settings: ConsoleSettings) -> Starlette:
    """The console for these settings. Nothing is asked of the cluster before somebody opens a page."""
    sessions = Sessions(settings)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        sessions.close()

    app = Starlette(
        routes=[*pages.routes(), Mount("/static", StaticFiles(directory=STATIC), name="static")],
        middleware=[Middleware(Guard, settings=settings)],
        exception_handlers={HTTPException: _http_failure, Exception: _unforeseen},
        lifespan=lifespan,
    )
    app.state.settings = settings
    app.state.sessions = sessions
    app.state.assets = asset_addresses()
    app.state.menu = pages.MENU
    return app


def asset_addresses() -> Callable[[str], str]:
    """Addresses of static files that change when the files do, so that browsers may keep them for ever."""
    digests: dict[str, str] = {}

    def address(name: str) -> str:
        if name not in digests:
            digests[name] = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
        return f"/static/{name}?v={digests[name]}"

    return address


def _http_failure(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = "There is no such page" if error.status_code == 404 else error.detail
    return failure(request, session_of(request), error.status_code, text)


def _unforeseen(request: Request, error: Exception) -> Response:
    """A bug. The server logs it with its traceback; who asked learns what kind it is, and no more."""
    return failure(
        request, session_of(request), 500, f"The console failed ({type(error).__name__}); its log says where"
    )


class Guard:
    """Around everything: headers for browsers, and only hosts that are ours where nobody has to log in.

    Without that check another site could have its name resolve to this machine and let a visitor's browser read the
    console as if it were a part of that site.
    """

    def __init__(self, app: ASGIApp, settings: ConsoleSettings) -> None:
        self._app = app
        self._settings = settings
        self._hosts = _own_hosts(settings) if settings.login is Login.NONE else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if self._hosts is not None and _host_of(request) not in self._hosts:
            refusal = PlainTextResponse("this console does not answer under that name; open it by its own address", 421)
            await refusal(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if scope["path"].startswith("/static/") and b"v=" in scope["query_string"]:
                    headers.setdefault("cache-control", "public, max-age=31536000, immutable")
                else:
                    headers.setdefault("cache-control", "no-store")
                if self._settings.cookies_are_secure:
                    headers.setdefault("strict-transport-security", "max-age=31536000")
            await send(message)

        await self._app(scope, receive, send_guarded)


def _host_of(request: Request) -> str:
    """The name by which we were addressed, without a port."""
    host = request.headers.get("host", "").lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _own_hosts(settings: ConsoleSettings) -> set[str]:
    host = settings.host.lower()
    own = {"localhost", "127.0.0.1", "[::1]", f"[{host.strip('[]')}]" if ":" in host else host}
    public = settings.public_url.partition("://")[2].partition("/")[0].lower()
    return own | ({public.rpartition(":")[0] or public, public.partition(":")[0]} if public else set())
