"""Who gets in, what a form needs to be believed, and what browsers are told: for every page, by its route."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from starlette.routing import Route

from millrace.console import pages
from millrace.console.roles import Role
from millrace.console.settings import ConsoleSettings, Login, choose_login
from millrace.errors import ConfigError
from millrace.local.ports import free_ports
from millrace.testing import Cluster
from support.consoles import Visitor, visiting, words

SASL = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "SCRAM-SHA-512"}
OPEN_TO_ALL = {"/login", "/logout", "/theme"}
CHANGING = [route for route in pages.routes() if "POST" in (route.methods or ()) and route.path not in OPEN_TO_ALL]
SHOWN = [route for route in pages.routes() if "GET" in (route.methods or ()) and route.path not in OPEN_TO_ALL]


def address(route: Route) -> str:
    """With something in the places of its variable parts."""
    return re.sub(r"\{(\w+)(:path)?\}", r"\1", re.sub(r"\{\w+:int\}", "1", route.path))


class TestWithoutLogin:
    def test_a_page_has_a_session_and_headers(self, visitor: Visitor) -> None:
        answer = visitor.get("/")
        assert answer.status_code == 200
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert "set-cookie" not in visitor.get("/").headers

    def test_another_name_of_this_machine_is_not_answered(self, visitor: Visitor) -> None:
        """A site whose name resolves to 127.0.0.1 could otherwise read the console in a visitor's browser."""
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""):
            assert visitor.get("/", headers={"host": host}).status_code == 421
        for host in ("localhost", "127.0.0.1:9080", "[::1]:9080"):
            assert visitor.get("/", headers={"host": host}).status_code == 200

    def test_static_files_are_kept_by_their_content(self, visitor: Visitor) -> None:
        page = visitor.get("/").text
        path = page.partition('<script src="')[2].partition('"')[0]
        answer = visitor.get(path)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert visitor.get("/static/../app.py").status_code == 404

    def test_an_unknown_page(self, visitor: Visitor) -> None:
        answer = visitor.get("/nothing/<script>alert(1)</script>")
        assert answer.status_code == 404
        assert "<script>alert" not in answer.text

    def test_light_and_dark(self, visitor: Visitor) -> None:
        answer = visitor.client.post("/theme?next=/", data={"theme": "dark"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert 'data-theme="dark"' in visitor.get("/").text
        visitor.client.post("/theme", data={"theme": '"><script>'})
        assert 'data-theme="auto"' in visitor.get("/").text


@pytest.mark.parametrize("route", CHANGING, ids=lambda route: route.path)
class TestEveryForm:
    def test_is_refused_without_the_token(self, visitor: Visitor, route: Route) -> None:
        visitor.get("/")
        for token in ({}, {"csrf": ""}, {"csrf": "x" * 43}):
            answer = visitor.client.post(address(route), data=token)
            assert answer.status_code == 403, words(answer)
            assert "load it again" in words(answer)

    def test_is_refused_from_another_site(self, visitor: Visitor, route: Route) -> None:
        visitor.get("/")
        headers = {"sec-fetch-site": "cross-site"}
        assert visitor.client.post(address(route), data={"csrf": visitor.csrf}, headers=headers).status_code == 403

    def test_is_refused_in_a_read_only_console(self, cluster: Cluster, route: Route) -> None:
        with visiting(ConsoleSettings(cluster.bootstrap_servers, read_only=True)) as visitor:
            answer = visitor.post(address(route))
            assert (answer.status_code, "read-only" in words(answer)) == (403, True)

    def test_is_refused_to_a_viewer(self, cluster: Cluster, route: Route) -> None:
        with visiting(ConsoleSettings(cluster.bootstrap_servers, default_role=Role.VIEWER)) as visitor:
            answer = visitor.post(address(route))
            assert (answer.status_code, "needs the role" in words(answer)) == (403, True)


class TestToken:
    @pytest.fixture
    def visitor(self, cluster: Cluster) -> Iterator[Visitor]:
        settings = ConsoleSettings(cluster.bootstrap_servers, login=Login.TOKEN, token="the right one")
        with visiting(settings) as visitor:
            yield visitor

    @pytest.mark.parametrize("route", SHOWN, ids=lambda route: route.path)
    def test_no_page_without_it(self, visitor: Visitor, route: Route) -> None:
        answer = visitor.get(address(route))
        assert answer.status_code in {303, 401}
        assert answer.status_code == 401 or answer.headers["location"].startswith("/login")

    @pytest.mark.parametrize("route", CHANGING, ids=lambda route: route.path)
    def test_no_form_without_it(self, visitor: Visitor, route: Route) -> None:
        answer = visitor.client.post(address(route), data={"csrf": "x"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/login")

    def test_a_wrong_one(self, visitor: Visitor) -> None:
        answer = visitor.client.post("/login", data={"token": "a wrong one"})
        assert answer.status_code == 403
        assert "not the token" in words(answer)
        assert "set-cookie" not in answer.headers

    def test_the_right_one_and_leaving(self, visitor: Visitor) -> None:
        answer = visitor.client.post("/login?next=/", data={"token": "the right one"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert visitor.get("/").status_code == 200
        assert visitor.client.post("/logout").status_code == 403
        assert visitor.post("/logout").headers["location"] == "/login"
        assert visitor.get("/").status_code == 303

    @pytest.mark.parametrize("elsewhere", ["//evil.example/", "https://evil.example/", "/\\evil.example", "x"])
    def test_a_login_leads_nowhere_else(self, visitor: Visitor, elsewhere: str) -> None:
        answer = visitor.client.post("/login", params={"next": elsewhere}, data={"token": "the right one"})
        assert answer.headers["location"] == "/"


@pytest.fixture(scope="module")
def closed_cluster() -> Iterator[Cluster]:
    """It knows alice and bob."""
    settings = {
        "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
        "sasl.enabled.mechanisms": "PLAIN",
        "plain.sasl.jaas.config": 'PlainLoginModule required user_alice="alice-secret" user_bob="bob-secret";',
    }
    with Cluster(settings=settings) as cluster:
        yield cluster


class TestBrokersUsers:
    @pytest.fixture
    def visitor(self, closed_cluster: Cluster) -> Iterator[Visitor]:
        settings = ConsoleSettings(
            closed_cluster.bootstrap_servers,
            client={"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"},
            login=Login.BROKERS,
            roles={"bob": Role.VIEWER},
        )
        with visiting(settings) as visitor:
            yield visitor

    def test_they_come_in_with_their_role(self, visitor: Visitor) -> None:
        answer = visitor.client.post("/login", data={"username": "alice", "password": "alice-secret"})
        assert answer.status_code == 303, words(answer)
        assert "alice (admin)" in visitor.get("/").text
        answer = visitor.client.post("/login", data={"username": "bob", "password": "bob-secret"})
        page = visitor.get("/").text
        assert "bob (viewer)" in page
        assert "secret" not in page

    @pytest.mark.parametrize(("username", "password"), [("alice", "wrong"), ("nobody", "x"), ("", "")])
    def test_others_do_not(self, visitor: Visitor, username: str, password: str) -> None:
        answer = visitor.client.post("/login", data={"username": username, "password": password})
        assert answer.status_code == 403, words(answer)
        assert "set-cookie" not in answer.headers


def test_what_is_asked_of_people() -> None:
    assert choose_login({}, "127.0.0.1", None) is Login.NONE
    assert choose_login({}, "localhost", None) is Login.NONE
    assert choose_login({}, "0.0.0.0", None) is Login.TOKEN
    assert choose_login(SASL, "127.0.0.1", None) is Login.BROKERS
    assert choose_login({**SASL, "sasl.username": "console"}, "127.0.0.1", None) is Login.NONE
    assert choose_login({**SASL, "sasl.username": "console"}, "10.0.0.1", None) is Login.TOKEN
    assert choose_login({}, "10.0.0.1", Login.NONE) is Login.NONE
    with pytest.raises(ConfigError, match="SASL"):
        choose_login({}, "127.0.0.1", Login.BROKERS)


def test_a_dead_cluster_is_told_and_looked_for() -> None:
    settings = ConsoleSettings(f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}", client={"default.api.timeout.ms": "300"})
    with visiting(settings) as visitor:
        answer = visitor.get("/")
        assert answer.status_code == 503
        assert "does not answer" in words(answer)
        assert "data-look-again" in answer.text


def test_a_form_that_is_too_large(visitor: Visitor) -> None:
    visitor.get("/")
    answer = visitor.client.post("/logout", content=b"csrf=" + b"x" * (17 * 1024 * 1024))
    assert answer.status_code == 413
