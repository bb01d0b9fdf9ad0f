"""Who uses the console: sessions in memory, and the clients of the cluster that belong to each.

A session is found by a cookie that holds nothing but a random number. It ends when nobody has used it for
`IDLE_S`, at the latest after `LONGEST_S`, or by leaving. What one person's clients learned nobody else sees: with a
login each session asks the cluster as the user that it is.

Called from worker threads and from the loop; a lock guards the tables, and is never held while something is asked.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from millrace.client.cluster import ClusterClient
from millrace.client.settings import ClientSettings
from millrace.clock import Clock, SystemClock
from millrace.console.roles import Role
from millrace.console.settings import ConsoleSettings, Login
from millrace.errors import ApiError, ErrorCode

IDLE_S: Final = 8 * 3600.0
LONGEST_S: Final = 24 * 3600.0
MAX_SESSIONS: Final = 1000
"""More are not kept: the one that was unused for the longest time ends."""
IDLE_CLIENTS: Final = 4
_CREDENTIAL_BYTES: Final = 32

T = TypeVar("T")


class Access:
    """One user's way to the cluster: clients that are lent to one thread at a time, and what is kept beside them."""

    def __init__(self, settings: ConsoleSettings, username: str = "", password: str = "") -> None:
        self.settings = settings
        self.username = username
        self._password = password
        self._lock = threading.Lock()
        self._idle: list[ClusterClient] = []
        self._companions: dict[type[Any], Any] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"Access({self.username or 'nobody in particular'} at {self.settings.bootstrap})"

    def librdkafka_settings(self) -> dict[str, Any]:
        """For clients of confluent-kafka, with what this user logs in with."""
        properties = self.settings.client_properties(self.username, self._password)
        own = {"request.timeout.ms", "default.api.timeout.ms"}  # it has other names for these
        return {name: value for name, value in properties.items() if name not in own}

    def given_properties(self) -> dict[str, str]:
        """How this user reaches the brokers, password and all, for a process that does so by itself."""
        return self.settings.given_properties(self.username, self._password)

    @property
    def client_settings(self) -> ClientSettings:
        """For the project's own clients, with what this user logs in with."""
        return self.settings.client_settings(self.username, self._password)

    def new_client(self) -> ClusterClient:
        """A client of the caller's own, for long work; whoever asked closes it."""
        return ClusterClient(self.client_settings)

    @contextmanager
    def client(self) -> Iterator[ClusterClient]:
        """A client for this thread, which goes back afterwards with its connections open."""
        with self._lock:
            client = self._idle.pop() if self._idle else None
        if client is None:
            client = self.new_client()
        try:
            yield client
        except BaseException:
            client.close()
            raise
        with self._lock:
            keep = not self._closed and len(self._idle) < IDLE_CLIENTS
            if keep:
                self._idle.append(client)
        if not keep:
            client.close()

    def companion(self, kind: type[T], make: Callable[[Access], T]) -> T:
        """The one object of this kind that lives as long as this access (a monitor, running scans).

        Its `close` is called at the end, if it has one.
        """
        with self._lock:
            if kind not in self._companions:
                self._companions[kind] = make(self)
            found: T = self._companions[kind]
            return found

    def close(self) -> None:
        with self._lock:
            self._closed = True
            clients, self._idle = self._idle, []
            companions, self._companions = self._companions, {}
        for each in (*companions.values(), *clients):
            if hasattr(each, "close"):
                each.close()


class Session:
    """Somebody who is there."""

    __slots__ = ("access", "began", "csrf_token", "role", "session_id", "used", "user")

    def __init__(self, user: str, role: Role, access: Access, now: float) -> None:
        self.session_id = secrets.token_urlsafe(_CREDENTIAL_BYTES)
        self.csrf_token = secrets.token_urlsafe(_CREDENTIAL_BYTES)
        self.user = user
        self.role = role
        self.access = access
        self.began = self.used = now

    def __repr__(self) -> str:
        return f"Session({self.user or 'anybody'}, {self.role.name.lower()})"


class Sessions:
    """All of them. Without a login of the brokers' there is one access, which everybody shares."""

    def __init__(self, settings: ConsoleSettings, clock: Clock | None = None) -> None:
        self.settings = settings
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._shared: Access | None = None

    def __repr__(self) -> str:
        return f"Sessions({len(self._sessions)} of {MAX_SESSIONS})"

    def find(self, session_id: str | None) -> Session | None:
        """The session of a cookie, if it is one that lives."""
        if not session_id:
            return None
        now = self._clock.monotonic()
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None:
                return None
            if now - session.used <= IDLE_S and now - session.began <= LONGEST_S:
                session.used = now
                return session
        self.end(session)
        return None

    def begin(self, username: str = "", password: str = "") -> Session:
        """A session for who asked; with a login of the brokers' only if they let that user in. ApiError otherwise."""
        if self.settings.login is Login.BROKERS:
            access = Access(self.settings, username, password)
            try:
                with access.client() as client:
                    client.broker_ids()
            except BaseException:
                access.close()
                raise
        else:
            access = self._shared_access()
        session = Session(username, self.settings.role_of(username), access, self._clock.monotonic())
        with self._lock:
            oldest = min(self._sessions.values(), key=lambda each: each.used) if self._is_full else None
            self._sessions[session.session_id] = session
        if oldest is not None:
            self.end(oldest)
        return session

    @property
    def _is_full(self) -> bool:
        return len(self._sessions) >= MAX_SESSIONS

    def end(self, session: Session) -> None:
        with self._lock:
            ended = self._sessions.pop(session.session_id, None) is not None
        if ended and session.access is not self._shared:
            session.access.close()

    def close(self) -> None:
        """Everybody's, when the console stops."""
        with self._lock:
            sessions, self._sessions = list(self._sessions.values()), {}
            shared, self._shared = self._shared, None
        for access in {session.access for session in sessions} | ({shared} if shared else set()):
            access.close()

    def _shared_access(self) -> Access:
        with self._lock:
            if self._shared is None:
                self._shared = Access(self.settings)
            return self._shared


def is_refused_login(error: ApiError) -> bool:
    """Whether the brokers did not accept name and password, as opposed to not being there."""
    return error.code in {ErrorCode.SASL_AUTHENTICATION_FAILED, ErrorCode.UNSUPPORTED_SASL_MECHANISM}
