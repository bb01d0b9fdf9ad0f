"""How a page comes about: `@page` around a function that is given a `Page` and returns a response.

What all pages need is seen to here and nowhere else, so that no page can forget it: a session (or the login), the role,
read-only mode, the CSRF token of everything that changes something, and what is shown when the cluster does not answer.
The function runs in a worker thread and may block; it raises `ApiError` or `BadInput` for people to read.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, quote, unquote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from millrace import __version__
from millrace.admin.errors import AdminError
from millrace.console import wording
from millrace.console.roles import Role
from millrace.console.sessions import Access, Session, Sessions, is_refused_login
from millrace.console.settings import ConsoleSettings, Login
from millrace.errors import ApiError, ConfigError, MillraceError

MAX_FORM_BYTES: Final = 16 * 1024 * 1024
MAX_FORM_FIELDS: Final = 1000
THEMES: Final = ("auto", "light", "dark")
CSRF_HEADER: Final = "x-csrf-token"
_GET: Final = ("GET",)

logger = logging.getLogger(__name__)


class BadInput(MillraceError):
    """What somebody typed cannot be used; the text says what would be better."""


@dataclass(frozen=True, slots=True)
class Message:
    """A line at the top of the next page: what was done, or why it was not."""

    kind: str
    """`good` or `bad`."""
    text: str


class Page:
    """One request, as a page's function sees it."""

    def __init__(self, request: Request, session: Session, form: Mapping[str, list[str]]) -> None:
        self.request = request
        self.session = session
        self._form = form

    def __repr__(self) -> str:
        return f"Page({self.request.method} {self.request.url.path}, {self.session!r})"

    @property
    def access(self) -> Access:
        return self.session.access

    @property
    def settings(self) -> ConsoleSettings:
        found: ConsoleSettings = self.request.app.state.settings
        return found

    @property
    def path(self) -> Mapping[str, Any]:
        """The variable parts of the address."""
        return self.request.path_params

    def asked(self, name: str, default: str = "") -> str:
        """A value of the query."""
        return self.request.query_params.get(name, default)

    def asked_number(self, name: str, default: int, *, least: int = 0, most: int = 2**63 - 1) -> int:
        return _number(name, self.asked(name), default, least, most)

    def field(self, name: str, default: str = "") -> str:
        """A value of the form that was sent."""
        return self._form.get(name, [default])[-1]

    def fields(self, name: str) -> list[str]:
        """All values of a field that may occur several times."""
        return self._form.get(name, [])

    def field_number(self, name: str, default: int | None = None, *, least: int = 0, most: int = 2**63 - 1) -> int:
        return _number(name, self.field(name), default, least, most)

    def may(self, role: Role) -> bool:
        """Whether who asked may do something that needs this role, here."""
        return may(self.settings, self.session, role)

    # --- answers ------------------------------------------------------------------------------------------------------

    def render(self, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
        """The page. When htmx replaces a part of it, it asks for the whole and takes that part (`hx-select`)."""
        common = _common(self.request, self.session)
        assert not common.keys() & values.keys(), f"{template}: the layout has a name of its own for this"
        content = _templates.get_template(template).render({**common, **values})
        return HTMLResponse(content, status_code=status)

    def go(self, path: str, *, good: str = "", bad: str = "", **query: Any) -> Response:
        """Send the browser to another page, after something was done (`good`) or was not (`bad`)."""
        address = f"{path}?{urlencode(query)}" if query else path
        answer: Response
        if "hx-request" in self.request.headers:
            answer = Response(status_code=204, headers={"hx-redirect": address})
        else:
            answer = RedirectResponse(address, status_code=303)
        if good or bad:
            kind, text = ("good", good) if good else ("bad", bad)
            answer.set_cookie(
                _MESSAGE, quote(json.dumps([kind, text[:1000]])), httponly=True, samesite="strict", path="/", max_age=60
            )
        return answer


Handler = Callable[[Page], Response]
_MESSAGE: Final = "millrace-message"


def page(path: str, *, methods: Sequence[str] = _GET, role: Role = Role.VIEWER) -> Callable[[Handler], Route]:
    """Make a function of a `Page` the route of `path`.

    With any other method than GET it changes something: it then needs a CSRF token and, by default, an operator.
    """

    def decorate(handler: Handler) -> Route:
        needed = role if tuple(methods) == _GET else max(role, Role.OPERATOR)

        async def endpoint(request: Request) -> Response:
            return await _answer(request, handler, needed)

        return Route(path, endpoint, methods=list(methods), name=handler.__name__)

    return decorate


def events(path: str) -> Callable[[Callable[[Page], AsyncIterator[tuple[str, Any]]]], Route]:
    """Make an async generator of (event, value) the route of a stream of server-sent events; values go as JSON.

    It is closed when the browser goes away. It runs on the loop: what blocks belongs in `run_in_threadpool`.
    """

    def decorate(source: Callable[[Page], AsyncIterator[tuple[str, Any]]]) -> Route:
        async def endpoint(request: Request) -> Response:
            session = session_of(request)
            if session is None:
                return Response("log in first", status_code=401, media_type="text/plain")

            async def lines() -> AsyncIterator[str]:
                async for event, value in source(Page(request, session, {})):
                    yield f"event: {event}\ndata: {json.dumps(value)}\n\n"

            headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
            return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)

        return Route(path, endpoint, name=source.__name__)

    return decorate


def may(settings: ConsoleSettings, session: Session, role: Role) -> bool:
    return session.role >= role and (role is Role.VIEWER or not settings.read_only)


def sessions_of(request: Request) -> Sessions:
    found: Sessions = request.app.state.sessions
    return found


def cookie_name(settings: ConsoleSettings) -> str:
    """`__Host-` has browsers refuse the cookie from anybody but this very host, over TLS. Ports share cookies, so the
    port is in the name: two consoles on one machine are two."""
    return "__Host-millrace" if settings.cookies_are_secure else f"millrace-{settings.port}"


def session_of(request: Request) -> Session | None:
    """The session of a request; where nobody has to log in, a new one if there is none."""
    state = request.app.state
    session = sessions_of(request).find(request.cookies.get(cookie_name(state.settings)))
    if session is None and state.settings.login is Login.NONE:
        session = request.state.new_session = sessions_of(request).begin()
    return session


def set_session_cookie(request: Request, answer: Response, session: Session) -> None:
    settings: ConsoleSettings = request.app.state.settings
    answer.set_cookie(
        cookie_name(settings),
        session.session_id,
        httponly=True,
        samesite="strict",
        secure=settings.cookies_are_secure,
        path="/",
    )


async def _answer(request: Request, handler: Handler, role: Role) -> Response:
    session = await run_in_threadpool(session_of, request)
    if session is None:
        return _to_login(request)
    form: dict[str, list[str]] = {}
    try:
        if request.method not in ("GET", "HEAD"):
            form = await read_form(request)
            require_csrf(request, form, session)
        require_role(request.app.state.settings, session, role)
        answer = await run_in_threadpool(handler, Page(request, session, form))
    except HTTPException as error:
        answer = failure(request, session, error.status_code, error.detail)
    except BadInput as error:
        answer = failure(request, session, 400, str(error))
    except AdminError as error:
        answer = failure(request, session, *wording.explain_admin(error))
    except ApiError as error:
        if is_refused_login(error) and request.app.state.settings.login is Login.BROKERS:
            # The password was changed, or the user removed, since.
            sessions_of(request).end(session)
            return _to_login(request)
        answer = failure(request, session, *wording.explain(error))
    except (ConfigError, OSError) as error:
        answer = failure(request, session, 503, str(error))
    if _MESSAGE in request.cookies and request.method == "GET" and "hx-request" not in request.headers:
        answer.delete_cookie(_MESSAGE, path="/")
    new_session: Session | None = getattr(request.state, "new_session", None)
    if new_session is not None:
        set_session_cookie(request, answer, new_session)
    return answer


async def read_form(request: Request) -> dict[str, list[str]]:
    """What a form sent; 413 if that is too much of it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("", "application/x-www-form-urlencoded"):
        raise HTTPException(415, f"a form is sent as application/x-www-form-urlencoded, not as {kind[:100]}")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_FORM_BYTES:
            raise HTTPException(413, f"a form may have {MAX_FORM_BYTES:,} bytes")
        parts.append(part)
    try:
        return parse_qs(b"".join(parts).decode(), keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS)
    except ValueError as error:
        raise HTTPException(400, f"the form cannot be read: {error}") from None


def require_csrf(request: Request, form: Mapping[str, list[str]], session: Session) -> None:
    """403 unless the request comes from a page of this session: other sites can have a browser send forms."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise HTTPException(403, "this came from another site, and was not done")
    given = request.headers.get(CSRF_HEADER) or form.get("csrf", [""])[-1]
    if not hmac.compare_digest(given.encode(), session.csrf_token.encode()):
        raise HTTPException(403, "the page is older than your session, and nothing was done: load it again")


def require_role(settings: ConsoleSettings, session: Session, role: Role) -> None:
    if session.role < role:
        raise HTTPException(403, f"this needs the role {role.name.lower()}; you are {session.role.name.lower()}")
    if not may(settings, session, role):
        raise HTTPException(403, "the console was started read-only")


def failure(request: Request, session: Session | None, status: int, text: str) -> Response:
    """A page, or in its place a line for htmx, that says what is wrong; it looks again by itself if that may pass."""
    values = {**_common(request, session), "status": status, "text": text, "may_pass": status in (502, 503, 504)}
    template = "failure_part.html" if "hx-request" in request.headers else "failure.html"
    return HTMLResponse(_templates.get_template(template).render(values), status_code=status)


def address_of(request: Request) -> str:
    """Path and query as they were asked for: decoded, a `/` or `?` in the name of a group would mean something else."""
    path = request.scope.get("raw_path", b"").decode("ascii", "replace") or quote(request.url.path)
    return f"{path}?{request.url.query}" if request.url.query else path


def _to_login(request: Request) -> Response:
    here = address_of(request)
    address = "/login" if here == "/" or request.method != "GET" else f"/login?{urlencode({'next': here})}"
    if "hx-request" in request.headers:
        return Response(status_code=401, headers={"hx-redirect": "/login"})
    return RedirectResponse(address, status_code=303)


def _number(name: str, text: str, default: int | None, least: int, most: int) -> int:
    text = text.strip()
    if not text and default is not None:
        return default
    if not text.lstrip("-").isdigit() or not text.isascii() or len(text) > 20 or not least <= int(text) <= most:
        raise BadInput(f"{name.replace('_', ' ')} is a number from {least} to {most}, not '{text[:50]}'")
    return int(text)


# --- templates --------------------------------------------------------------------------------------------------------

_templates: Final = Environment(
    loader=PackageLoader("millrace.console"),
    autoescape=True,  # of everything, whatever a file is called
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters.update(wording.FILTERS)


def _common(request: Request, session: Session | None) -> dict[str, Any]:
    """What the layout, and so every template, may use."""
    settings: ConsoleSettings = request.app.state.settings
    theme = request.cookies.get("theme", "auto")
    return {
        "here": request.url.path,
        "address": address_of(request),
        "query": request.query_params,
        "settings": settings,
        "session": session,
        "csrf": session.csrf_token if session else "",
        "may": (lambda role: may(settings, session, Role.named(role))) if session else (lambda _: False),
        "theme": theme if theme in THEMES else "auto",
        "version": __version__,
        "message": _message(request),
        "asset": request.app.state.assets,
        "menu": request.app.state.menu,
    }


def _message(request: Request) -> Message | None:
    if _MESSAGE not in request.cookies or "hx-request" in request.headers:
        return None
    try:
        kind, text = json.loads(unquote(request.cookies[_MESSAGE]))
    except (ValueError, TypeError):
        return None
    return Message("good" if kind == "good" else "bad", str(text))


def render_alone(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """A page for somebody without a session: the login."""
    content = _templates.get_template(template).render({**_common(request, None), **values})
    return HTMLResponse(content, status_code=status)
