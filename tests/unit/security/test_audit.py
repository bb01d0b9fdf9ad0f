from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from millrace.clock import ManualClock
from millrace.security import audit as audit_module
from millrace.security.acls import Acl, AclTable, Decision, Operation, PatternKind, Permission, ResourceKind
from millrace.security.audit import MAX_NAMES, Allowed, Audit, Line, Outbox
from millrace.security.authorizer import Authorizer
from millrace.security.ocsf import MAX_TEXT, Call, Caller, Judgement, Resource
from millrace.wire.keys import ApiKey
from support.ocsf import problems

ALICE = Caller("User:alice", "10.0.0.1", "SASL_SSL", mechanism="PLAIN")
RULE = Acl(
    ResourceKind.TOPIC, "orders", PatternKind.LITERAL, "User:alice", "*", Operation.WRITE, Permission.DENY
)  # fmt: skip


class Log:
    """An audit log, and what it wrote."""

    def __init__(self, allowed: Allowed = Allowed.CHANGES) -> None:
        self.clock = ManualClock()
        authorizer = Authorizer(enabled=True, acls=lambda: AclTable([RULE]), super_users=frozenset({"User:root"}))
        self.audit = Audit(
            broker_id=1, cluster_id=lambda: "c", allowed=allowed, explain=authorizer.explain, clock=self.clock
        )
        self.outbox = self.audit.outbox("a test")

    def events(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [json.loads(line.data) for line in self.outbox.take(10**6, 10**9)]
        assert [wrong for event in found for wrong in problems(event)] == []
        return found

    def ask(
        self, key: ApiKey, *names: str, allowed: bool, caller: Caller = ALICE, operation: Operation = Operation.WRITE
    ) -> None:
        judgements = [Judgement(operation, ResourceKind.TOPIC, name, allowed) for name in names]
        self.audit.decided(Call(caller, key, 3, 1), judgements)

    def change(self, key: ApiKey, *names: str, caller: Caller = ALICE, errors: Sequence[int] = (0,)) -> None:
        judgements = [Judgement(Operation.DELETE, ResourceKind.TOPIC, name, allowed=True) for name in names]
        self.audit.changed(Call(caller, key, 3, 1), judgements, [Resource("TOPIC", name) for name in names], errors)


def test_every_denial_is_told_with_its_rule() -> None:
    log = Log(Allowed.NONE)
    log.ask(ApiKey.PRODUCE, "orders", "others", allowed=False)
    denied, unnamed = log.events()
    assert denied["status_detail"] == "DENY User:alice from *: WRITE on TOPIC orders"
    assert unnamed["status_detail"] == "no rule allows it"
    assert [event["action"] for event in (denied, unnamed)] == ["Denied", "Denied"]


@pytest.mark.parametrize(
    ("allowed", "told"),
    [(Allowed.NONE, []), (Allowed.CHANGES, ["CreateTopics"]), (Allowed.ALL, ["CreateTopics", "Produce"])],
)
def test_what_was_allowed_is_told_as_far_as_the_setting_says(allowed: Allowed, told: list[str]) -> None:
    log = Log(allowed)
    root = Caller("User:root", "10.0.0.1", "SASL_SSL")
    if allowed is not Allowed.NONE:
        log.change(ApiKey.CREATE_TOPICS, "a", "b", caller=root)
    log.ask(ApiKey.PRODUCE, "a", allowed=True, caller=root)
    events = log.events()
    assert [event["api"]["operation"] for event in events] == told
    if events:
        assert [each["name"] for each in events[0]["resources"]] == ["a", "b"]
        assert events[0]["actor"]["authorizations"][0]["policy"]["name"] == "a super user"


@pytest.mark.parametrize("allowed", Allowed)
def test_what_is_noted_of_a_request(allowed: Allowed) -> None:
    log, request = Log(allowed), object()
    change, fetch = log.audit.notes(ApiKey.CREATE_TOPICS, request), log.audit.notes(ApiKey.FETCH, request)
    assert (change.wants_allowed, change.changing) == ((False, None) if allowed is Allowed.NONE else (True, request))
    assert (fetch.wants_allowed, fetch.changing) == (allowed is Allowed.ALL, None)
    assert fetch.noted(lambda _: True, Operation.READ, ResourceKind.TOPIC, "t")
    assert not fetch.noted(lambda _: False, Operation.READ, ResourceKind.TOPIC, "t")
    assert [each.allowed for each in fetch.judgements] == ([True, False] if allowed is Allowed.ALL else [False])


def test_denials_and_what_was_allowed_in_one_request_are_apart() -> None:
    log = Log()
    judgements = [
        Judgement(Operation.DELETE, ResourceKind.TOPIC, "mine", allowed=True),
        Judgement(Operation.DELETE, ResourceKind.TOPIC, "yours", allowed=False),
    ]
    call = Call(ALICE, ApiKey.DELETE_TOPICS, 6, 1)
    log.audit.decided(call, judgements)
    log.audit.changed(call, judgements, [Resource("TOPIC", "mine"), Resource("TOPIC", "yours")], [0, 29])
    denied, done = log.events()
    assert (denied["action"], denied["resources"][0]["name"]) == ("Denied", "yours")
    assert (done["action"], done["status"]) == ("Allowed", "Success")


def test_the_same_denial_again_is_counted() -> None:
    log = Log()
    for _ in range(1000):
        log.ask(ApiKey.PRODUCE, "orders", allowed=False)
        log.clock.advance(0.001)
    assert len(log.events()) == 1
    log.audit.tell_counted()
    (counted,) = log.events()
    assert counted["count"] == 999
    assert counted["end_time"] - counted["start_time"] == counted["duration"] == 998
    log.audit.tell_counted()
    assert log.events() == []
    log.ask(ApiKey.PRODUCE, "orders", allowed=False)
    assert len(log.events()) == 1, "it was forgotten, so it is news again"


def test_a_flood_that_goes_on_has_one_event_in_each_span() -> None:
    log = Log()
    for _ in range(10):
        for _ in range(100):
            log.ask(ApiKey.PRODUCE, "orders", allowed=False)
        log.audit.tell_counted()
    counts = [event.get("count", 1) for event in log.events()]
    assert sum(counts) == 1000
    assert len(counts) == 11


def test_ever_new_names_are_counted_together() -> None:
    log = Log()
    for number in range(5000):
        log.ask(ApiKey.METADATA, f"guess-{number}", allowed=False)
    assert len(log.events()) == MAX_NAMES
    log.audit.tell_counted()
    (rest,) = log.events()
    assert rest["count"] == 5000 - MAX_NAMES
    assert rest["resources"] == [{"type": "TOPIC"}]
    other = Caller("User:bob", "10.0.0.1", "SASL_SSL")
    log.ask(ApiKey.METADATA, "guess-9999", allowed=False, caller=other)
    assert len(log.events()) == 1, "somebody else's denials are not hidden by them"


def test_changes_are_told_one_by_one() -> None:
    log = Log()
    for _ in range(5):
        log.change(ApiKey.DELETE_TOPICS, "a")
    assert len(log.events()) == 5


def test_what_cannot_even_be_counted_is_lost_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "MAX_COUNTED", 3)
    log = Log()
    for number in range(10):
        log.ask(ApiKey.PRODUCE, "orders", allowed=False, caller=Caller("User:alice", f"10.0.0.{number}", "X"))
    *denials, lost = log.events()
    assert len(denials) == 3
    assert lost["unmapped"] == {"lost_events": 7}


def test_logins() -> None:
    log = Log()
    log.audit.logged_in(ALICE)
    log.audit.logged_in(ALICE, again=True)
    log.audit.login_failed(ALICE, "wrong password")
    log.audit.login_failed(ALICE, "wrong password")
    events = log.events()
    assert [(event["status"], event["is_new_logon"]) for event in events] == [
        ("Success", True), ("Success", False), ("Failure", True),
    ]  # fmt: skip
    log.audit.tell_counted()
    assert [event["count"] for event in log.events()] == [1]


def test_failed_logins_by_ever_new_names_are_counted_together() -> None:
    log = Log()
    for number in range(1000):
        log.audit.login_failed(Caller(f"User:guess{number}", "10.0.0.9", "X", mechanism="PLAIN"), "unknown user")
    log.audit.tell_counted()
    events = log.events()
    assert len(events) == MAX_NAMES + 1
    assert sum(event.get("count", 1) for event in events) == 1000


def test_little_is_kept_of_a_name_that_nobody_has() -> None:
    log = Log()
    for number in range(3):
        log.audit.login_failed(Caller("User:" + "x" * 500_000 + str(number), "10.0.0.9", "X"), "unknown user")
    ((_, name),) = log.audit._counts
    assert len(name) == MAX_TEXT
    log.audit.tell_counted()
    assert [event.get("count", 1) for event in log.events()] == [1, 2]


def test_events_are_numbered() -> None:
    log = Log()
    for name in "abc":
        log.ask(ApiKey.PRODUCE, name, allowed=False)
    numbers = [event["metadata"]["sequence"] for event in log.events()]
    assert numbers == [1, 2, 3]


def _outbox() -> Outbox:
    return Outbox("a test", lambda count: Line(0, b"lost %d" % count))


def test_a_full_queue_loses_the_newest_and_says_so_behind_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "MAX_WAITING", 2)
    outbox = _outbox()
    for data in (b"1", b"2", b"3", b"4"):
        outbox.offer(Line(0, data))
    assert outbox.lost_ever == 2
    assert [line.data for line in outbox.take(1, 100)] == [b"1"]
    assert [line.data for line in outbox.take(1, 100)] == [b"2", b"lost 2"]
    assert not outbox
    outbox.offer(Line(0, b"5"))
    assert [line.data for line in outbox.take(10, 100)] == [b"5"]


def test_a_queue_is_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "MAX_WAITING_BYTES", 10)
    outbox = _outbox()
    outbox.offer(Line(0, b"x" * 10))
    outbox.offer(Line(0, b"y"))
    assert outbox.lost == 1
    assert [line.data for line in outbox.take(10, 1)] == [b"x" * 10, b"lost 1"]
    outbox.offer(Line(0, b"z" * 10))
    assert [line.data for line in outbox.take(10, 100)] == [b"z" * 10]


def test_no_more_is_kept_of_a_name_than_is_told() -> None:
    """Names of users and groups, and client ids, may be as long as a frame: 100 of them for each caller are kept."""
    log = Log()
    huge = 500_000
    tracemalloc.start()
    try:
        for number in range(20):
            log.audit.login_failed(Caller(f"User:{number}{'x' * huge}", "10.0.0.1", "SASL_SSL"), "a wrong password")
            judgement = Judgement(Operation.READ, ResourceKind.GROUP, f"{number}{'g' * huge}", allowed=False)
            call = Call(ALICE, ApiKey.HEARTBEAT, 3, 1, client_id="c" * huge)
            log.audit.decided(call, [judgement])
        del judgement, call
        assert tracemalloc.get_traced_memory()[0] < huge
    finally:
        tracemalloc.stop()
    events = log.events()
    assert len(events) == 40
    assert max(len(json.dumps(event)) for event in events) < 10_000
    again = Judgement(Operation.READ, ResourceKind.GROUP, "7" + "g" * huge, allowed=False)
    log.audit.decided(Call(ALICE, ApiKey.HEARTBEAT, 3, 1), [again])
    log.audit.tell_counted()
    assert [event["count"] for event in log.events()] == [1]


def test_rules_are_told_in_one_line_each() -> None:
    log = Log()
    rule = f"ALLOW User:a\nb from *: {'x' * 100_000}"
    log.audit._explain = lambda *_: Decision(True, reason=rule)  # type: ignore[assignment]
    log.change(ApiKey.DELETE_TOPICS, "t")
    (event,) = log.events()
    (policy,) = [each["policy"]["name"] for each in event["actor"]["authorizations"]]
    assert policy.startswith("ALLOW User:a?b") and len(policy) == 300
