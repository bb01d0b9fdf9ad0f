"""Users, rules and quotas in the console of a cluster with an authorizer, for somebody who may and one who may not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.console.settings import ConsoleSettings, Login
from millrace.testing import Cluster
from support.consoles import Visitor, visiting, words


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings = {
        "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
        "plain.sasl.jaas.config": 'PlainLoginModule required user_admin="a" user_bob="b";',
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:admin;User:ANONYMOUS",
    }
    with Cluster(settings=settings) as cluster:
        yield cluster


def logged_in(cluster: Cluster, user: str) -> Iterator[Visitor]:
    client = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
    with visiting(ConsoleSettings(cluster.bootstrap_servers, client=client, login=Login.BROKERS)) as visitor:
        answer = visitor.client.post("/login", data={"username": user, "password": user[0]})
        assert answer.status_code == 303, words(answer)
        yield visitor


@pytest.fixture
def visitor(cluster: Cluster) -> Iterator[Visitor]:
    yield from logged_in(cluster, "admin")


@pytest.fixture
def bob(cluster: Cluster) -> Iterator[Visitor]:
    yield from logged_in(cluster, "bob")


RULE = {"principal": "User:carol", "operation": "read", "resource": "topic", "name": "orders", "permission": "allow"}


class TestRules:
    def test_a_rule_is_added_found_asked_for_and_removed(self, visitor: Visitor) -> None:
        assert "Added" in visitor.done("/security/rules", **RULE)
        assert "User:carol * read topic orders allow" in words(visitor.get("/security?q=carol"))
        asked = {"who": "User:carol", "operation": "read", "resource": "topic", "name": "orders"}
        text = words(visitor.get("/security", params=asked))
        assert "yes User:carol may read topic orders" in text
        text = words(visitor.get("/security", params={**asked, "operation": "write"}))
        assert "no User:carol may not write topic orders" in text
        removal = {
            "resource": 2, "name": "orders", "pattern": 3, "principal": "User:carol", "host": "*", "operation": 3,
            "permission": 3,
        }  # fmt: skip
        assert "Removed" in visitor.done("/security/rules/remove", **removal)
        assert "There are none" in words(visitor.get("/security"))

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"principal": "carol"}, "TYPE:NAME"),
            ({"operation": "fly"}, "no operation"),
            ({"resource": "moon"}, "a resource is one of"),
            ({"name": ""}, "give the name"),
            ({"resource": "group", "operation": "write"}, "means nothing"),
        ],
        ids=str,
    )
    def test_bad_input_is_told(self, visitor: Visitor, change: dict[str, str], told: str) -> None:
        answer = visitor.post("/security/rules", **{**RULE, **change})
        assert (answer.status_code, told in words(answer)) == (400, True), words(answer)

    def test_the_brokers_decide(self, bob: Visitor) -> None:
        assert "You may not see this" in words(bob.get("/security"))
        answer = bob.post("/security/rules", **RULE)
        assert (answer.status_code, "do not allow" in words(answer)) == (403, True)
        assert "orders" not in words(bob.get("/topics"))


def test_users(visitor: Visitor) -> None:
    fields = {"name": "dave", "password": "secret-of-dave", "mechanism": "SCRAM-SHA-512"}
    told = visitor.done("/security/users", **fields)
    assert "dave can log in" in told
    assert "dave SCRAM-SHA-512" in told
    assert "secret-of-dave" not in told
    assert visitor.post("/security/users", name="dave", password="", mechanism="SCRAM-SHA-512").status_code == 400
    assert "cannot log in any more" in visitor.done("/security/users/remove", name="dave")


def test_quotas(visitor: Visitor) -> None:
    told = visitor.done("/security/quotas", **{"name-user": "alice", "key": "producer_byte_rate", "value": "1000"})
    assert "user alice producer_byte_rate=1,000" in told
    told = visitor.done("/security/quotas", **{"name-user": "alice", "key": "producer_byte_rate", "value": ""})
    assert "unlimited again" in told
    assert visitor.post("/security/quotas", key="producer_byte_rate", value="1").status_code == 400
    answer = visitor.post("/security/quotas", **{"name-user": "a", "key": "producer_byte_rate", "value": "many"})
    assert answer.status_code == 400
