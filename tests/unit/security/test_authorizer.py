"""What a broker remembers of its decisions: as long as the rules are the same, and not without limit."""

from __future__ import annotations

from unittest import mock

import pytest

from millrace.security import authorizer
from millrace.security.acls import Acl, AclTable, Operation, PatternKind, Permission, ResourceKind
from millrace.security.authorizer import NO_AUTHORIZER, Authorizer
from millrace.security.sessions import ANONYMOUS, Session

HOST = "10.0.0.1"
ALICE = Session("User:alice")
READ = (Operation.READ, ResourceKind.TOPIC)


def allowed(name: str, principal: str = "User:alice", host: str = "*") -> Acl:
    return Acl(ResourceKind.TOPIC, name, PatternKind.LITERAL, principal, host, Operation.READ, Permission.ALLOW)


class Ruled:
    """An authorizer, its rules, and how often they were looked through."""

    def __init__(self, *acls: Acl) -> None:
        self.table = AclTable(acls)
        self.authorizer = Authorizer(enabled=True, acls=lambda: self.table)
        self.decisions = 0

    def may(self, name: str, session: Session = ALICE, host: str = HOST) -> bool:
        with mock.patch.object(authorizer, "decide", side_effect=authorizer.decide) as decide:
            answer = self.authorizer.may(session, host, *READ, name)
        self.decisions += decide.call_count
        return answer


def test_a_decision_is_made_once() -> None:
    ruled = Ruled(allowed("t"))
    assert [ruled.may("t"), ruled.may("t"), ruled.may("u"), ruled.may("u")] == [True, True, False, False]
    assert ruled.decisions == 2


def test_somebody_else_and_somewhere_else_is_another_question() -> None:
    ruled = Ruled(allowed("t", host=HOST))
    assert ruled.may("t")
    assert not ruled.may("t", ANONYMOUS)
    assert not ruled.may("t", host="10.0.0.2")
    assert ruled.authorizer.may(ALICE, HOST, Operation.DESCRIBE, ResourceKind.TOPIC, "t")
    assert not ruled.authorizer.may(ALICE, HOST, Operation.WRITE, ResourceKind.TOPIC, "t")
    assert not ruled.authorizer.may(ALICE, HOST, Operation.READ, ResourceKind.GROUP, "t")


def test_other_rules_count_at_once() -> None:
    ruled = Ruled()
    assert not ruled.may("t")
    ruled.table = ruled.table.edited(added=[allowed("t")])
    assert ruled.may("t")
    ruled.table = ruled.table.edited(removed=[allowed("t")])
    assert not ruled.may("t")


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where every question is of another principal."""
    monkeypatch.setattr(authorizer, "MAX_REMEMBERED", 10)
    ruled = Ruled(allowed("t"))
    for number in range(100):
        assert not ruled.may(f"u{number}")
        assert not ruled.may("t", Session(f"User:{number}"))
        remembered = ruled.authorizer._remembered
        assert len(remembered) + sum(map(len, remembered.values())) <= 10
    assert ruled.may("t")


def test_a_checker_outlives_what_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorizer, "MAX_REMEMBERED", 2)
    may_read = Ruled(allowed("t")).authorizer.rights(ALICE, HOST, *READ)
    assert [name for name in ("a", "b", "t", "c", "t") if may_read(name)] == ["t", "t"]


def test_without_rules_in_force_everybody_may() -> None:
    assert NO_AUTHORIZER.may(ANONYMOUS, HOST, *READ, "t")
    assert NO_AUTHORIZER.may_any(ANONYMOUS, HOST, *READ)


def test_long_names_are_judged_and_not_kept() -> None:
    """50,000 answers of 32 KiB each would be a gigabyte and a half."""
    long = "t" * 32_000
    ruled = Ruled(allowed(long))
    assert [ruled.may(long), ruled.may(long), ruled.may(f"{long}u")] == [True, True, False]
    assert not any(name.startswith("ttt") for answers in ruled.authorizer._remembered.values() for name in answers)
