"""One broker's decisions on rights: the rules of its image, its settings, and what was decided lately.

Owner: the event loop. What it remembers is good for one table of rules and is forgotten with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from millrace.security.acls import AclTable, Decision, Operation, ResourceKind, decide, decide_for_any
from millrace.security.sessions import Session

if TYPE_CHECKING:
    from millrace.config import BrokerConfig

MAX_REMEMBERED: Final = 50_000
"""Answers, of all principals together."""
MAX_NAME: Final = 300
"""A name that is longer is judged each time: topics have none such, and clients may send 32 KiB of a group's."""
_Question = tuple[str, str, Operation, ResourceKind]


class _Answers(dict[str, bool]):
    """By the resource's name, whether somebody may; what was not asked before is decided."""

    __slots__ = ("_authorizer", "_question")

    def __init__(self, authorizer: Authorizer, question: _Question) -> None:
        self._authorizer = authorizer
        self._question = question

    def __missing__(self, name: str) -> bool:
        answer = self._authorizer.explain(*self._question, name).allowed
        if len(name) <= MAX_NAME:
            self[name] = answer
            self._authorizer.note_answer()
        return answer


class Authorizer:
    """Answers whether somebody may; without rules in force (`enabled` false) everybody may everything."""

    def __init__(
        self,
        *,
        enabled: bool,
        acls: Callable[[], AclTable],
        super_users: frozenset[str] = frozenset(),
        allow_if_no_acl: bool = False,
    ) -> None:
        self.enabled = enabled
        self.super_users = super_users
        self.allow_if_no_acl = allow_if_no_acl
        self._acls = acls
        self._table: AclTable | None = None
        self._remembered: dict[_Question, _Answers] = {}
        self._remembered_count = 0

    @classmethod
    def from_config(cls, config: BrokerConfig, acls: Callable[[], AclTable]) -> Authorizer:
        """Who decides what somebody may, by the settings."""
        return cls(
            enabled=bool(config.get("authorizer.class.name")),
            acls=acls,
            super_users=parse_super_users(str(config.get("super.users") or "")),
            allow_if_no_acl=config.get_bool("allow.everyone.if.no.acl.found"),
        )

    def __repr__(self) -> str:
        return f"Authorizer({'on' if self.enabled else 'off'}, {self._acls()!r})"

    def may(self, session: Session, host: str, operation: Operation, kind: ResourceKind, name: str) -> bool:
        return self.rights(session, host, operation, kind)(name) if self.enabled else True

    def rights(self, session: Session, host: str, operation: Operation, kind: ResourceKind) -> Callable[[str], bool]:
        """The same for any number of resources, for as long as one request takes; only while `enabled`."""
        if (table := self._acls()) is not self._table:
            self._table = table
            self._forget()
        question = (session.principal, host, operation, kind)
        answers = self._remembered.get(question)
        if answers is None:
            answers = self._remembered[question] = _Answers(self, question)
            self.note_answer()
        return answers.__getitem__

    def note_answer(self) -> None:
        """One more thing is remembered; when it is too much, all of it goes."""
        self._remembered_count += 1
        if self._remembered_count > MAX_REMEMBERED:
            self._forget()

    def _forget(self) -> None:
        self._remembered = {}
        self._remembered_count = 0

    def may_any(self, session: Session, host: str, operation: Operation, kind: ResourceKind) -> bool:
        """Whether there is a resource of this kind on which it may."""
        if not self.enabled:
            return True
        return decide_for_any(
            self._acls(),
            session.principal,
            host,
            operation,
            kind,
            super_users=self.super_users,
            allow_if_no_acl=self.allow_if_no_acl,
        ).allowed

    def explain(self, principal: str, host: str, operation: Operation, kind: ResourceKind, name: str) -> Decision:
        """The decision and what it rests on."""
        return decide(
            self._acls(),
            principal,
            host,
            operation,
            kind,
            name,
            super_users=self.super_users,
            allow_if_no_acl=self.allow_if_no_acl,
        )


def parse_super_users(text: str) -> frozenset[str]:
    """`User:alice;User:CN=b,O=c` as a set of principals."""
    return frozenset(filter(None, (part.strip() for part in text.split(";"))))


NO_AUTHORIZER: Final = Authorizer(enabled=False, acls=AclTable)
