from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.errors import ErrorCode
from millrace.security import ocsf
from millrace.security.acls import Operation
from millrace.security.ocsf import Call, Caller, Repeated, Resource, Source
from millrace.wire.keys import ApiKey
from support.ocsf import problems

SOURCE = Source(7, "cluster-id")
ALICE = Caller("User:alice", "10.0.0.1", "SASL_SSL", 4711, "SCRAM-SHA-256", "token-1")
NOW = 1_700_000_000_000


EVENTS = {
    "login": ocsf.authentication(SOURCE, ALICE, NOW),
    "certificate": ocsf.authentication(SOURCE, Caller("User:CN=a", "::1", "SSL"), NOW),
    "oauth": ocsf.authentication(SOURCE, Caller("User:a", "::1", "X", mechanism="OAUTHBEARER"), NOW, again=True),
    "failed": ocsf.authentication(SOURCE, ALICE, NOW, refusal="wrong password", repeated=Repeated(3, NOW, NOW + 5)),
    "denied": ocsf.api_activity(
        SOURCE,
        Call(ALICE, ApiKey.PRODUCE, 11, 5, "app"),
        [Operation.WRITE],
        [Resource("TOPIC", "orders")],
        NOW,
        allowed=False,
        rules=["none"],
    ),
    "changed": ocsf.api_activity(
        SOURCE,
        Call(ALICE, ApiKey.ALTER_CONFIGS, 2, 5),
        [Operation.ALTER_CONFIGS],
        [Resource("TOPIC", "orders", ("retention.ms",))],
        NOW,
        allowed=True,
        errors=[ErrorCode.NONE],
    ),
    "nothing asked": ocsf.api_activity(
        SOURCE, Call(ALICE, ApiKey.RENEW_DELEGATION_TOKEN, 2, 5), [], [], NOW, allowed=True
    ),
    "lost": ocsf.lost(SOURCE, 3, NOW),
}


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_an_event_has_the_attributes_that_ocsf_requires(event: dict[str, Any]) -> None:
    assert problems(event) == []


def test_a_login_says_who_from_where_to_which_listener_and_how() -> None:
    event = EVENTS["login"]
    assert event["user"] == {"name": "alice", "type": "User", "type_id": 1, "credential_uid": "token-1"}
    assert event["src_endpoint"] == {"ip": "10.0.0.1", "port": 4711}
    assert event["dst_endpoint"] == {"name": "broker-7", "svc_name": "SASL_SSL"}
    assert (event["auth_protocol"], event["status"], event["is_new_logon"]) == ("SASL SCRAM-SHA-256", "Success", True)


def test_a_failed_login_says_why_and_how_often() -> None:
    event = EVENTS["failed"]
    assert (event["status"], event["status_detail"]) == ("Failure", "wrong password")
    assert (event["count"], event["start_time"], event["end_time"], event["duration"]) == (3, NOW, NOW + 5, 5)


def test_a_denial_says_what_was_asked_for_and_which_rule_decided() -> None:
    event = EVENTS["denied"]
    assert event["api"]["operation"] == "Produce"
    assert event["api"]["version"] == "11"
    assert event["resources"] == [{"type": "TOPIC", "name": "orders"}]
    assert event["unmapped"] == {"operations": ["WRITE"], "client_id": "app"}
    assert event["actor"]["authorizations"] == [{"decision": "denied", "policy": {"name": "none", "type": "ACL"}}]
    assert (event["action"], event["status"], event["activity_name"]) == ("Denied", "Failure", "Update")
    assert event["message"] == "User:alice may not WRITE topic orders (Produce)"


@pytest.mark.parametrize(
    ("errors", "status"),
    [
        ([ErrorCode.NONE], "Success"),
        ([ErrorCode.TOPIC_ALREADY_EXISTS], "Failure"),
        ([ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS], "Partial"),
    ],
)
def test_what_was_allowed_may_fail_all_the_same(errors: list[ErrorCode], status: str) -> None:
    call = Call(ALICE, ApiKey.CREATE_TOPICS, 7, 5)
    event = ocsf.api_activity(SOURCE, call, [], [Resource("TOPIC", "a")], NOW, allowed=True, errors=errors)
    assert (event["action"], event["status"]) == ("Allowed", status)
    assert event.get("status_detail") == (None if status == "Success" else "TOPIC_ALREADY_EXISTS")


def test_a_change_says_which_settings_and_never_to_what() -> None:
    event = EVENTS["changed"]
    assert event["resources"] == [{"type": "TOPIC", "name": "orders", "data": {"settings": ["retention.ms"]}}]
    assert event["message"] == "User:alice asked for AlterConfigs of topic orders"


def test_an_event_names_so_many_resources_and_counts_the_rest() -> None:
    named = [Resource("TOPIC", f"t{i}") for i in range(250)]
    event = ocsf.api_activity(SOURCE, Call(ALICE, ApiKey.DELETE_TOPICS, 6, 5), [], named, NOW, allowed=True)
    assert len(event["resources"]) == ocsf.MAX_RESOURCES
    assert event["unmapped"]["resource_count"] == 250


def test_names_from_outside_cannot_break_the_line_or_steer_a_terminal() -> None:
    caller = Caller("User:eve\nroot logged in\x1b[2J", "10.0.0.1", "SASL_SSL")
    call, named = Call(caller, ApiKey.PRODUCE, 3, 1, "c\0d"), [Resource("TOPIC", "a\r\nb" + "x" * 10_000)]
    event = ocsf.api_activity(SOURCE, call, [Operation.WRITE], named, NOW, allowed=False)
    line = json.dumps(event)
    assert "\\n" not in line
    assert "\\u001b" not in line
    assert len(line) < 3000


def test_every_change_is_what_ocsf_calls_create_update_or_delete() -> None:
    assert set(ocsf.CHANGES.values()) == {ocsf.CREATE, ocsf.UPDATE, ocsf.DELETE}
    assert {ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.OFFSET_COMMIT}.isdisjoint(ocsf.CHANGES)
