"""Coming in and leaving: the login, the logout, and light or dark."""

from __future__ import annotations

import hmac
import threading
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from millrace.console import wording
from millrace.console.sessions import Session, is_refused_login
from millrace.console.settings import ConsoleSettings, Login
from millrace.console.web import (
    THEMES,
    read_form,
    render_alone,
    require_csrf,
    session_of,
    sessions_of,
    set_session_cookie,
)
from millrace.errors import ApiError, ConfigError

MOST_AT_ONCE: Final = 4
"""Logins that are tried at the same time: each costs the brokers a key derivation, and asks of nobody who they are."""
_trying = threading.BoundedSemaphore(MOST_AT_ONCE)


async def _show_login(request: Request) -> Response:
    settings: ConsoleSettings = request.app.state.settings
    if settings.login is Login.NONE:
        return RedirectResponse("/", status_code=303)
    return render_alone(request, "login.html", kind=settings.login.value, next=_inside(request), reason="")


async def _log_in(request: Request) -> Response:
    settings: ConsoleSettings = request.app.state.settings
    form = {name: values[-1] for name, values in (await read_form(request)).items()}
    # There is no session whose token could be asked for. A form of another site would log its victim in as somebody
    # else, so it has to come from here.
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return Response("this came from another site, and was not done", status_code=403, media_type="text/plain")
    session, reason, status = await run_in_threadpool(_try, request, settings, form)
    if session is None:
        kind = settings.login.value
        return render_alone(request, "login.html", status=status, kind=kind, next=_inside(request), reason=reason)
    answer = RedirectResponse(_inside(request), status_code=303)
    set_session_cookie(request, answer, session)
    return answer


def _try(request: Request, settings: ConsoleSettings, form: dict[str, str]) -> tuple[Session | None, str, int]:
    """A session, or why there is none, with the status of the answer."""
    if settings.login is Login.TOKEN:
        if not hmac.compare_digest(form.get("token", "").strip().encode(), settings.token.encode()):
            return None, "That is not the token that the console printed when it started.", 403
        return sessions_of(request).begin(), "", 200
    username, password = form.get("username", ""), form.get("password", "")
    if not username:
        return None, "Give the name of a user of the brokers.", 403
    if not _trying.acquire(timeout=10):
        return None, "Too many people log in at this moment; try again.", 503
    try:
        return sessions_of(request).begin(username, password), "", 200
    except ApiError as error:
        if is_refused_login(error):
            return None, "The brokers do not know this user with this password.", 403
        status, reason = wording.explain(error)
        return None, reason, status
    except ConfigError as error:
        return None, str(error), 503
    finally:
        _trying.release()


async def _log_out(request: Request) -> Response:
    session = session_of(request)
    if session is not None:
        require_csrf(request, await read_form(request), session)
        await run_in_threadpool(sessions_of(request).end, session)
    return RedirectResponse("/login", status_code=303)


async def _choose_theme(request: Request) -> Response:
    form = await read_form(request)
    wanted = form.get("theme", ["auto"])[-1]
    answer = RedirectResponse(_inside(request), status_code=303)
    answer.set_cookie("theme", wanted if wanted in THEMES else "auto", samesite="strict", path="/", max_age=31536000)
    return answer


def _inside(request: Request) -> str:
    """Where to go on afterwards: a page of ours, whatever the address says."""
    wanted = request.query_params.get("next", "/")
    is_ours = wanted.startswith("/") and not wanted.startswith(("//", "/\\")) and wanted.isprintable()
    return wanted if is_ours else "/"


login_page = Route("/login", _show_login)
login = Route("/login", _log_in, methods=["POST"])
logout = Route("/logout", _log_out, methods=["POST"])
theme = Route("/theme", _choose_theme, methods=["POST"])
