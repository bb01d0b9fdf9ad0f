"""`millrace acls` against running brokers: rules made, listed and removed, and what they decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.guarded import guarded_cluster
from clients.test_command_line import CommandLine
from millrace.local.ports import free_ports
from millrace.testing import Cluster


@pytest.fixture(scope="module")
def guarded() -> Iterator[Cluster]:
    with guarded_cluster(brokers=3) as running:
        yield running


@pytest.fixture
def run(guarded: Cluster, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> CommandLine:
    return CommandLine(guarded.bootstrap_servers, capsysbinary, tmp_path / "stdin")


def short(rules: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(each["resource"], each["name"], each["operation"]) for each in rules}


def test_rules_come_and_go(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic, alice = fresh("orders"), f"User:{fresh('alice')}"
    of_alice = ("--principal", alice)
    assert run.raw("acls", "list", *of_alice) == (b"", "there is no such rule\n")
    made = run.text("acls", "add", *of_alice, "-o", "read", "-o", "Describe", "--topic", topic)
    assert made == (
        f"added ALLOW {alice} from *: READ on TOPIC {topic}\nadded ALLOW {alice} from *: DESCRIBE on TOPIC {topic}\n"
    )
    again = run.json("acls", "add", *of_alice, "-o", "READ", "-o", "write", "--topic", topic)
    assert [(each["operation"], each["result"]) for each in again] == [("READ", "exists"), ("WRITE", "added")]
    run.text("acls", "add", *of_alice, "-o", "all", "--topic", topic[:-1], "--prefixed", "--deny", "--host", "10.0.0.1")
    assert run.text("acls", "list", *of_alice, "--deny").splitlines() == [
        f"{'PRINCIPAL':{len(alice)}}  HOST      PERMISSION  OPERATION  RESOURCE  {'NAME':{len(topic) - 1}}  PATTERN",
        f"{alice}  10.0.0.1  deny        all        topic     {topic[:-1]}  prefixed",
    ]
    assert len(run.json("acls", "list", "--topic", topic)) == 4, "with what holds by a prefix"
    assert len(run.json("acls", "list", "--topic", topic, "--exact")) == 3
    (prefixed,) = run.json("acls", "list", "--topic", topic[:-1], "--prefixed")
    assert prefixed == {
        "principal": alice,
        "host": "10.0.0.1",
        "permission": "DENY",
        "operation": "ALL",
        "resource": "TOPIC",
        "name": topic[:-1],
        "pattern": "PREFIXED",
    }
    out, err = run.raw("acls", "remove", *of_alice, "-o", "read", exit_code=1)
    assert b"read" in out
    assert "Remove 1 rule: say --yes" in err
    assert len(run.json("acls", "list", *of_alice)) == 4, "nothing was removed without a word"
    assert [each["result"] for each in run.json("acls", "remove", "--topic", topic, "--yes")] == ["removed"] * 3
    assert run.json("acls", "list", *of_alice) == [prefixed], "a name means the rules that have this very name"
    assert run.text("acls", "remove", *of_alice, "--yes").startswith("removed DENY")
    assert run.raw("acls", "remove", *of_alice, "--yes") == (b"", "there is no such rule\n")


def test_producers_and_consumers(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic, group, bob = fresh("orders"), fresh("billing"), f"User:{fresh('bob')}"
    run.text("acls", "add", "--principal", bob, "--producer", "--topic", topic, "--transactional-id", "tx")
    written = run.json("acls", "list", "--principal", bob)
    assert short(written) == {
        ("TOPIC", topic, "WRITE"),
        ("TOPIC", topic, "DESCRIBE"),
        ("TOPIC", topic, "CREATE"),
        ("TRANSACTIONAL_ID", "tx", "WRITE"),
        ("TRANSACTIONAL_ID", "tx", "DESCRIBE"),
    }
    run.text("acls", "remove", "--principal", bob, "--yes")
    run.text("acls", "add", "--principal", bob, "--consumer", "-t", topic, "-g", group, "--prefixed")
    read = run.json("acls", "list", "--principal", bob)
    assert short(read) == {("TOPIC", topic, "READ"), ("TOPIC", topic, "DESCRIBE"), ("GROUP", group, "READ")}
    assert {each["pattern"] for each in read} == {"PREFIXED"}
    for operation, resource in (("read", ["--topic", f"{topic}.x"]), ("read", ["--group", f"{group}-2"])):
        assert run.text("acls", "check", "--as", bob, "-o", operation, *resource).startswith("yes: ALLOW")


def test_every_kind_of_resource(run: CommandLine, fresh: Callable[[str], str]) -> None:
    """Also those that librdkafka does not know."""
    carol = f"User:{fresh('carol')}"
    kinds = {
        "describe-configs": ["--cluster"],
        "two-phase-commit": ["--transactional-id", "tx"],
        "create-tokens": ["--user", "User:dave"],
        "describe": ["--delegation-token", "abc"],
        "delete": ["--group", "*"],
    }
    for operation, resource in kinds.items():
        run.text("acls", "add", "--principal", carol, "-o", operation, *resource)
        assert run.text("acls", "check", "--as", carol, "-o", operation, *resource).startswith("yes: ALLOW")
    assert short(run.json("acls", "list", "--principal", carol)) == {
        ("CLUSTER", "kafka-cluster", "DESCRIBE_CONFIGS"),
        ("TRANSACTIONAL_ID", "tx", "TWO_PHASE_COMMIT"),
        ("USER", "User:dave", "CREATE_TOKENS"),
        ("DELEGATION_TOKEN", "abc", "DESCRIBE"),
        ("GROUP", "*", "DELETE"),
    }


def test_what_somebody_may(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic, eve = fresh("orders"), f"User:{fresh('eve')}"

    def may(operation: str, *options: str, yes: bool) -> str:
        words = ["acls", "check", "--as", eve, "--operation", operation, "--topic", topic, *options]
        return run.raw(*words, exit_code=0 if yes else 1)[0].decode().strip()

    assert may("read", yes=False) == "no: no rule allows it"
    run.text("acls", "add", "--principal", eve, "-o", "read", "--topic", topic)
    allowed = f"yes: ALLOW {eve} from *: READ on TOPIC {topic}"
    assert may("read", yes=True) == allowed
    assert may("describe", yes=True) == allowed, "reading implies it"
    assert may("write", yes=False) == "no: no rule allows it"
    run.text("acls", "add", "--deny", "--principal", "User:*", "--host", "10.0.0.1", "-o", "all", "--topic", topic)
    _, remark = run.raw("acls", "check", "--as", eve, "-o", "read", "-t", topic)
    assert "rules for single hosts, which were left out" in remark
    assert may("read", "--host", "10.0.0.2", yes=True) == allowed
    assert may("read", "--host", "10.0.0.1", yes=False) == f"no: DENY User:* from 10.0.0.1: ALL on TOPIC {topic}"
    run.text("acls", "add", "--deny", "--principal", eve, "-o", "all", "-t", topic[:-1], "--prefixed")
    assert "(prefixed)" in may("read", yes=False)
    assert may("create", yes=False).startswith("no: DENY")
    run.text("acls", "add", "--principal", eve, "-o", "create", "--cluster")
    assert may("create", yes=True) == f"yes: ALLOW {eve} from *: CREATE on CLUSTER kafka-cluster"

    out, _ = run.raw(
        "acls", "check", "--as", eve, "-o", "read", "-t", topic, "--host", "10.0.0.1", "--json", exit_code=1
    )
    assert b'"allowed": false' in out
    assert b'"rule": {"principal": ' in out
    admin = ("acls", "check", "--as", "User:admin", "-o", "delete", "-t", topic)
    assert run.text(*admin) == "yes: a super user\n"
    told = run.json(*admin)
    assert (told["allowed"], told["rule"], told["reason"]) == (True, None, "a super user")


def test_rules_are_for_those_who_may_and_say_who_may_what(run: CommandLine) -> None:
    """What `check` says is what happens, to a user who logs in and is nobody special."""
    host = "127.0.0.1"
    open_port, login_port = free_ports(host, 2)
    listeners = f"PLAINTEXT://{host}:{open_port},SASL_PLAINTEXT://{host}:{login_port}"
    with guarded_cluster(brokers=1, listeners=listeners, sasl_enabled_mechanisms="SCRAM-SHA-512") as cluster:
        run.bootstrap = cluster.bootstrap_servers
        run.text("users", "add", "alice", stdin=b"secret")
        run.text("topics", "create", "orders")
        login = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "SCRAM-SHA-512"}
        login |= {"sasl.username": "alice", "sasl.password": "secret"}
        as_alice = ["-b", f"{host}:{login_port}"]
        as_alice += [word for name, value in login.items() for word in ("-X", f"{name}={value}")]
        of_bob = ("--principal", "User:bob", "-o", "read", "-t", "orders")

        def grant(*words: str) -> None:
            run.text("acls", "add", "--principal", "User:alice", *words)

        def may(operation: str, *resource: str, yes: bool) -> None:
            run.raw("acls", "check", "--as", "User:alice", "-o", operation, *resource, exit_code=0 if yes else 1)

        refused = "CLUSTER_AUTHORIZATION_FAILED"
        may("describe", "--cluster", yes=False)
        assert refused in run.error("acls", "list", *as_alice)
        grant("-o", "describe", "--cluster")
        may("describe", "--cluster", yes=True)
        assert len(run.json("acls", "list", *as_alice)) == 1
        may("alter", "--cluster", yes=False)
        assert refused in run.error("acls", "add", *of_bob, *as_alice)
        assert refused in run.error("acls", "remove", "--all", "--yes", *as_alice)
        grant("-o", "alter", "--cluster")
        assert run.text("acls", "add", *of_bob, *as_alice).startswith("added ALLOW User:bob")
        _, remark = run.raw("acls", "check", "--as", "User:eve", "-o", "read", "-t", "orders", *as_alice, exit_code=1)
        assert "does not tell its super.users" in remark, "alice may not see settings"

        may("write", "--topic", "orders", yes=False)
        run.error("produce", "orders", *as_alice, stdin=b"hello\n")
        grant("--producer", "--topic", "orders")
        may("write", "--topic", "orders", yes=True)
        run.text("produce", "orders", *as_alice, stdin=b"hello\n")
        may("read", "--topic", "orders", yes=False)
        run.error("consume", "orders", "--group", "g", "--max", "1", *as_alice)
        grant("--consumer", "--topic", "orders", "--group", "g")
        may("read", "--topic", "orders", yes=True)
        consumed = run.text("consume", "orders", "--group", "g", "--from-beginning", "--max", "1", *as_alice)
        assert consumed == "hello\n"


def test_everyone_where_no_rule_names_the_resource(run: CommandLine) -> None:
    with guarded_cluster(brokers=1, allow_everyone_if_no_acl_found="true") as lenient:
        run.bootstrap = lenient.bootstrap_servers
        asked = ("acls", "check", "--as", "User:bob", "-o", "read", "-t", "orders")
        assert "allow.everyone.if.no.acl.found is on" in run.text(*asked)
        run.text("acls", "add", "--principal", "User:alice", "-o", "read", "-t", "ord", "--prefixed")
        out, _ = run.raw(*asked, exit_code=1)
        assert out == b"no: no rule allows it\n"


def test_what_makes_no_sense(run: CommandLine) -> None:
    def refused(*words: str) -> str:
        return run.error("acls", *words, exit_code=2)

    alice = ("--principal", "User:alice")
    assert "such as User:alice" in refused("add", "--principal", "alice", "-o", "read", "-t", "t")
    assert "did you mean 'describe'?" in refused("add", *alice, "-o", "descibe", "-t", "t")
    assert "write means nothing for a group" in refused("add", *alice, "-o", "write", "-g", "g")
    assert "for whom?" in refused("add", "-o", "read", "-t", "t")
    assert "on what?" in refused("add", *alice, "-o", "read")
    assert "which operation?" in refused("add", *alice, "-t", "t")
    assert "exclude each other" in refused("add", *alice, "-t", "t", "--producer", "-o", "read")
    assert "need a --topic" in refused("add", *alice, "--producer", "--transactional-id", "x")
    assert "needs a --group" in refused("add", *alice, "--consumer", "-t", "t")
    assert "says nothing about a group" in refused("add", *alice, "--producer", "-t", "t", "-g", "g")
    assert "begin with a star" in refused("add", *alice, "-o", "read", "-t", "*", "--prefixed")
    assert "a name is empty" in refused("add", *alice, "-o", "read", "-t", "")
    assert "which rules?" in refused("remove", "--yes")
    assert "which rules?" in refused("remove", *alice, "--all", "--yes")
    assert "how a name is meant" in refused("remove", "--prefixed", "--yes")
    assert "give one of" in refused("check", "--as", "User:a", "-o", "read", "-t", "t", "-g", "g")
    assert "networks are not supported" in run.error(
        "acls", "add", *alice, "-o", "read", "-t", "t", "--host", "10.0.0.0/8"
    )


def test_without_an_authorizer(run: CommandLine, cluster: Cluster) -> None:
    run.bootstrap = cluster.bootstrap_servers
    assert "SECURITY_DISABLED: rules of access: no authorizer is on" in run.error("acls", "list")
    assert run.text("acls", "check", "--as", "User:a", "-o", "read", "-t", "t").startswith(
        "yes: the cluster has no auth"
    )
