"""The audit log: which decisions and logins become events, how often, and what is on its way to where.

Written down are every login, every denial, and what was allowed as far as `audit.log.allowed` says: nothing, what
changes something (`ocsf.CHANGES`; the default), or everything.

Nobody can fill a disk with it. A change has an event of its own. Everything else has one when it first happens; what
is the same (who, from where, which API, operation and resource) within `REPEAT_S` is counted, and told of in one event
with OCSF's `count`. Somebody who asks for ever new names has `MAX_NAMES` of them told, the others counted together. Of
a name no more is kept than is told.

Nobody waits for it. Events go to bounded queues (`Outbox`), one for the file and one for the topic. What finds its
queue full is lost there, and counted: the next event that is written after it says how many, and so does the broker's
log. Every event has a number (`metadata.sequence`), so that a gap shows.

Owner: the event loop. Not here: what an event looks like (`ocsf`), files (`storage.audit_file`) and the internal topic
(`replication.audit_topic`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from millrace.clock import Clock
from millrace.errors import ErrorCode
from millrace.security import ocsf
from millrace.security.acls import Decision, Operation, ResourceKind
from millrace.security.ocsf import Call, Caller, Event, Judgement, Repeated, Resource, Source
from millrace.wire.keys import ApiKey

logger = logging.getLogger(__name__)

REPEAT_S: Final = 10.0
MAX_NAMES: Final = 100
"""Resources, or names of users, that one caller has told one by one in a span of `REPEAT_S`."""
MAX_COUNTED: Final = 10_000
"""Different things that are counted in such a span; more are lost."""
MAX_WAITING: Final = 20_000
MAX_WAITING_BYTES: Final = 16 * 1024 * 1024
"""What may wait for a slow disk or a topic without a leader."""

_DENIED: Final = frozenset(code for code in ErrorCode if code.name.endswith("_AUTHORIZATION_FAILED"))
"""Denials have events of their own."""

Explain = Callable[[str, str, Operation, ResourceKind, str], Decision]


class Allowed(Enum):
    """Of what was allowed, what is written down: the values of `audit.log.allowed`."""

    NONE = "none"
    CHANGES = "changes"
    ALL = "all"


@dataclass(slots=True)
class Notes:
    """What is noted of one request, until it is answered."""

    wants_allowed: bool
    """Or only what is denied."""
    changing: Any = None
    """The request, where it is there to change something."""
    passed_on: bool = False
    """Whether another broker carries it out, and tells of that."""
    judgements: list[Judgement] = field(default_factory=list)
    tells_changes: bool = False
    """Whether what is changed is told of at all."""
    created: dict[str, int | None] = field(default_factory=dict)
    """Topics that the request, which is there for something else, has made: with error codes, None while not known."""
    created_by: list[Judgement] = field(default_factory=list)
    """The rights by which."""

    def note(self, operation: Operation, kind: ResourceKind, name: str, *, allowed: bool) -> None:
        if self.wants_allowed or not allowed:
            self.judgements.append(Judgement(operation, kind, name, allowed))

    def noted(self, may: Callable[[str], bool], operation: Operation, kind: ResourceKind, name: str) -> bool:
        """What `may` says."""
        allowed = may(name)
        self.note(operation, kind, name, allowed=allowed)
        return allowed


class Line(NamedTuple):
    """One event as it is written."""

    time_ms: int
    data: bytes


class Outbox:
    """Events on their way to one place. One task empties it."""

    def __init__(self, name: str, lost: Callable[[int], Line]) -> None:
        self.name = name
        self.lost = 0
        """Since the last event that said so."""
        self.lost_ever = 0
        self._make_lost = lost
        self._lines: deque[Line] = deque()
        self._size_bytes = 0
        self._filled = asyncio.Event()

    def __repr__(self) -> str:
        return f"Outbox({self.name}, {len(self._lines)} waiting, {self.lost_ever} lost)"

    def __bool__(self) -> bool:
        return self._filled.is_set()

    def offer(self, line: Line) -> None:
        """Take the event, or count it as lost."""
        if len(self._lines) >= MAX_WAITING or self._size_bytes + len(line.data) > MAX_WAITING_BYTES:
            self.lose(1)
            return
        self._lines.append(line)
        self._size_bytes += len(line.data)
        self._filled.set()

    def lose(self, count: int) -> None:
        if not self.lost:
            logger.warning("audit events for %s are lost: they come faster than they are written", self.name)
        self.lost += count
        self.lost_ever += count
        self._filled.set()

    async def filled(self) -> None:
        """Return when there is something to take."""
        await self._filled.wait()

    def take(self, max_lines: int, max_bytes: int) -> list[Line]:
        """The oldest events, at least one of them; behind the last that was not lost the word that some were."""
        taken: list[Line] = []
        while self._lines and len(taken) < max_lines and (not taken or max_bytes >= len(self._lines[0].data)):
            line = self._lines.popleft()
            taken.append(line)
            max_bytes -= len(line.data)
            self._size_bytes -= len(line.data)
        if self.lost and not self._lines:
            logger.warning("%d audit events for %s were lost", self.lost, self.name)
            taken.append(self._make_lost(self.lost))
            self.lost = 0
        if not self._lines:
            self._filled.clear()
        return taken


@dataclass(slots=True)
class _Count:
    """What has happened since it was last told of."""

    make: Callable[[Repeated], Event]
    count: int = 0
    start_ms: int = 0
    end_ms: int = 0


class Audit:
    """One broker's audit log."""

    def __init__(
        self, *, broker_id: int, cluster_id: Callable[[], str], allowed: Allowed, explain: Explain, clock: Clock
    ) -> None:
        self._broker_id = broker_id
        self._cluster_id = cluster_id
        self._allowed = allowed
        self._explain = explain
        self._clock = clock
        self._outboxes: list[Outbox] = []
        self._sequence = 0
        self._began_ms = clock.wall_ms()
        self._counts: dict[tuple[Hashable, str], _Count] = {}
        self._names: dict[Hashable, int] = {}

    def __repr__(self) -> str:
        return f"Audit({self._allowed.value}, {self._sequence} events, {self._outboxes})"

    def outbox(self, name: str) -> Outbox:
        """A further queue to which all events go from now on."""
        made = Outbox(name, lambda count: self._line(ocsf.lost(self._source, count, self._clock.wall_ms())))
        self._outboxes.append(made)
        return made

    @property
    def lost(self) -> Mapping[str, int]:
        """How many events each place has not got, because they came faster than they were written."""
        return {outbox.name: outbox.lost_ever for outbox in self._outboxes}

    @property
    def _source(self) -> Source:
        return Source(self._broker_id, self._cluster_id())

    # --- logins -------------------------------------------------------------------------------------------------------

    def logged_in(self, caller: Caller, *, again: bool = False) -> None:
        """By SASL or by a certificate; `again`: on a connection that was logged in before."""
        self._login(caller, None, again=again)

    def login_failed(self, caller: Caller, reason: str, *, again: bool = False) -> None:
        """`caller` is who it said it was; the reason is one of a few fixed texts, by which is counted."""
        self._login(caller, reason, again=again)

    def _login(self, caller: Caller, refusal: str | None, *, again: bool) -> None:
        source = self._source
        if len(caller.principal) > ocsf.MAX_TEXT or len(caller.token_id) > ocsf.MAX_TEXT:
            caller = caller._replace(
                principal=caller.principal[: ocsf.MAX_TEXT], token_id=caller.token_id[: ocsf.MAX_TEXT]
            )

        def make(caller: Caller) -> Callable[[Repeated | None], Event]:
            return lambda repeated: ocsf.authentication(
                source, caller, self._clock.wall_ms(), refusal=refusal, again=again, repeated=repeated
            )

        group = ("login", caller.host, caller.listener, caller.mechanism, refusal, again)
        if not self._is_counted(group, caller.principal):
            self._tell(group, caller.principal, make(caller), lambda: make(caller._replace(principal="", token_id="")))

    # --- decisions ----------------------------------------------------------------------------------------------------

    def notes(self, key: ApiKey, request: Any) -> Notes:
        """What a request that begins is noted in."""
        tells_changes = self._allowed is not Allowed.NONE
        changes = tells_changes and key in ocsf.CHANGES
        return Notes(changes or self._allowed is Allowed.ALL, request if changes else None, tells_changes=tells_changes)

    def decided(self, call: Call, judgements: Iterable[Judgement]) -> None:
        """What was denied, and what was allowed where that is wanted and changes nothing."""
        for each in dict.fromkeys(judgements):
            if not each.allowed or self._allowed is Allowed.ALL:
                self._tell_judgement(call, each)

    def changed(
        self, call: Call, judgements: Iterable[Judgement], resources: Sequence[Resource], errors: Iterable[int] | None
    ) -> None:
        """A request was carried out that is there to change something.

        `errors` are the codes of its answer; None where nobody was there any more to be answered.
        """
        allowed = list(dict.fromkeys(each for each in judgements if each.allowed))
        codes = None
        if errors is not None:
            codes = [code for code in map(_code, dict.fromkeys(errors)) if code not in _DENIED]
        operations = list(dict.fromkeys(each.operation for each in allowed))
        rules = self._rules(call, allowed[: ocsf.MAX_RESOURCES])
        now_ms = self._clock.wall_ms()
        self._send(
            ocsf.api_activity(
                self._source, call, operations, resources, now_ms, allowed=True, rules=rules, errors=codes
            )
        )

    def _tell_judgement(self, call: Call, judgement: Judgement) -> None:
        caller, name = call.caller, judgement.name[: ocsf.MAX_TEXT]
        group = (caller.principal, caller.host, call.key, judgement.operation, judgement.kind, judgement.allowed)
        if self._is_counted(group, name):
            return  # most of what is allowed, where that is told of
        source = self._source
        if call.client_id is not None and len(call.client_id) > ocsf.MAX_TEXT:
            call = call._replace(client_id=call.client_id[: ocsf.MAX_TEXT])
        is_whole = len(judgement.name) <= ocsf.MAX_TEXT
        if not is_whole:
            judgement = judgement._replace(name=name)

        def make(judgement: Judgement) -> Callable[[Repeated | None], Event]:
            return lambda repeated: ocsf.api_activity(
                source,
                call,
                [judgement.operation],
                [Resource(judgement.kind.name, judgement.name)],
                self._clock.wall_ms(),
                allowed=judgement.allowed,
                rules=self._rules(call, [judgement]) if judgement.name and is_whole else (),
                repeated=repeated,
            )

        self._tell(group, name, make(judgement), lambda: make(judgement._replace(name="")))

    def _rules(self, call: Call, judgements: Sequence[Judgement]) -> list[str]:
        """What each decision rests on."""
        rules = []
        for each in judgements:
            decision = self._explain(call.caller.principal, call.caller.host, each.operation, each.kind, each.name)
            # The rules may have changed since: then they say nothing about this.
            if decision.allowed == each.allowed:
                rules.append(decision.reason if decision.rule is None else str(decision.rule))
        return list(dict.fromkeys(rules))

    # --- counting -----------------------------------------------------------------------------------------------------

    def _tell(
        self,
        group: Hashable,
        name: str,
        make: Callable[[Repeated | None], Event],
        of_many: Callable[[], Callable[[Repeated | None], Event]],
    ) -> None:
        """Send an event of which none has been told yet, or count it with others where there are too many."""
        has_many = bool(name) and self._names.get(group, 0) >= MAX_NAMES
        if has_many and self._is_counted(group, ""):
            return
        if len(self._counts) >= MAX_COUNTED:
            for outbox in self._outboxes:
                outbox.lose(1)
        elif has_many:
            self._counts[group, ""] = _Count(of_many())
            self._is_counted(group, "")
        else:
            self._counts[group, name] = _Count(make)
            self._names[group] = self._names.get(group, 0) + 1
            self._send(make(None))

    def _is_counted(self, group: Hashable, name: str) -> bool:
        """Whether such an event has been told lately; then this one is counted."""
        counted = self._counts.get((group, name))
        if counted is None:
            return False
        counted.end_ms = now_ms = self._clock.wall_ms()
        counted.start_ms = counted.start_ms or now_ms
        counted.count += 1
        return True

    def tell_counted(self) -> None:
        """Send what was counted since the last call, and forget what has not happened again."""
        counts, self._counts, self._names = self._counts, {}, {}
        for (group, name), counted in counts.items():
            if counted.count:
                self._send(counted.make(Repeated(counted.count, counted.start_ms, counted.end_ms)))
                self._counts[group, name] = _Count(counted.make)
                self._names[group] = self._names.get(group, 0) + 1

    async def run(self) -> None:
        """Tell of what was counted, for ever."""
        while True:
            await self._clock.sleep(REPEAT_S)
            self.tell_counted()

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send(self, event: Event) -> None:
        line = self._line(event)
        for outbox in self._outboxes:
            outbox.offer(line)

    def _line(self, event: Event) -> Line:
        self._sequence += 1
        event["metadata"] |= {
            "sequence": self._sequence,
            "uid": f"{self._broker_id}-{self._began_ms}-{self._sequence}",
        }
        return Line(event["time"], json.dumps(event, separators=(",", ":")).encode())


def _code(number: int) -> ErrorCode:
    try:
        return ErrorCode(number)
    except ValueError:
        return ErrorCode.UNKNOWN_SERVER_ERROR
