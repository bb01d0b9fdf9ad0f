"""Logging in, what each role sees, users and rules, and two people at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.testing import Cluster
from support.browsers import Tab
from support.console_process import Served, console

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

BROKER = {
    "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
    "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
    "plain.sasl.jaas.config": 'PlainLoginModule required user_alice="alice-secret" user_bob="bob-secret";',
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:alice;User:bob;User:ANONYMOUS",
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A console that asks for a user of the brokers; bob may only look."""
    login = ("-X", "security.protocol=SASL_PLAINTEXT", "-X", "sasl.mechanism=PLAIN", "--role", "bob=viewer")
    with (
        Cluster(settings=BROKER) as cluster,
        console(tmp_path_factory.mktemp("guarded"), cluster.bootstrap_servers, *login) as served,
    ):
        yield served


def log_in(tab: Tab, user: str, password: str = "") -> None:
    tab.page.get_by_label("User").fill(user)
    tab.page.get_by_label("Password").fill(password or f"{user}-secret")
    tab.page.keyboard.press("Enter")


def test_a_wrong_password_and_the_right_one(open_tab: Any, guarded: Served) -> None:
    tab: Tab = open_tab(guarded.url)
    page = tab.open("/topics?q=x")
    assert page.evaluate("document.activeElement.name") == "username"
    assert page.locator("#menu").count() == 0
    log_in(tab, "alice", "a guess")
    page.get_by_role("alert").wait_for()
    assert "do not know this user with this password" in tab.text()
    assert tab.complaints.expected(403)
    log_in(tab, "alice")
    page.locator("h1", has_text="Topics").wait_for()
    assert page.url.endswith("/topics?q=x"), "one gets where one wanted to go"
    assert page.get_by_text("alice (admin)").is_visible()
    page.get_by_role("button", name="Log out").click()
    page.get_by_role("button", name="Log in").wait_for()
    tab.open("/brokers")
    page.get_by_role("button", name="Log in").wait_for()


def test_users_and_rules(open_tab: Any, guarded: Served) -> None:
    tab: Tab = open_tab(guarded.url)
    page = tab.open("/security/users")
    log_in(tab, "alice")
    page.get_by_label("User", exact=True).fill("carol")
    page.get_by_label("Password").fill("carols-secret")
    page.get_by_role("button", name="Set", exact=True).click()
    page.get_by_text("carol can log in").wait_for()
    assert "carol SCRAM-SHA-512" in tab.rows()[0]

    tab.open("/security")
    adding = page.locator('form[action="/security/rules"]')
    adding.get_by_label("Who").fill("User:carol")
    adding.get_by_label("Operation").select_option("read")
    adding.get_by_label("Name, * for all").fill("orders")
    adding.get_by_role("button", name="Add").click()
    page.get_by_text("Added:").wait_for()
    asking = page.locator("section", has=page.locator("#ask"))
    asking.get_by_label("Who").fill("User:carol")
    asking.get_by_label("Name").fill("orders")
    asking.get_by_role("button", name="Ask").click()
    page.get_by_role("status").get_by_text("yes", exact=True).wait_for()
    page.locator("tr", has_text="User:carol").get_by_role("button", name="remove").click()
    page.get_by_text("Removed:").wait_for()
    assert len(tab.dialogs) == 1


def test_a_viewer_sees_nothing_to_press(open_tab: Any, guarded: Served) -> None:
    tab: Tab = open_tab(guarded.url)
    page = tab.open("/security/users")
    log_in(tab, "bob")
    page.locator("h1", has_text="Security").wait_for()
    assert page.get_by_text("bob (viewer)").is_visible()
    for path in ("/security/users", "/security", "/security/quotas", "/topics", "/brokers", "/brokers/1"):
        tab.open(path)
        assert page.locator('form[method=post]:not([action^="/theme"], [action="/logout"])').count() == 0, path
        assert page.locator("main button:visible").all_inner_texts() in ([], ["Ask"]), path


def test_two_people_do_not_disturb_each_other(open_tab: Any, guarded: Served) -> None:
    alice, bob = open_tab(guarded.url), open_tab(guarded.url)
    for tab, name in ((alice, "alice"), (bob, "bob")):
        tab.open("/topics")
        log_in(tab, name)
        tab.page.locator("h1", has_text="Topics").wait_for()
    alice.page.get_by_role("button", name="dark", exact=True).click()
    alice.page.locator("html[data-theme=dark]").wait_for()
    alice.page.get_by_role("button", name="New topic").click()
    alice.page.locator("#new-topic").get_by_label("Name", exact=True).fill("letters")
    alice.page.get_by_role("button", name="Create").click()
    alice.page.get_by_text("Topic letters was created").wait_for()
    bob.open("/topics")
    assert bob.page.locator("html").get_attribute("data-theme") == "auto"
    assert "was created" not in bob.text(), "the message is for who did it"
    alice.page.get_by_role("button", name="Log out").click()
    alice.page.get_by_role("button", name="Log in").wait_for()
    bob.open("/brokers")
    assert bob.page.get_by_text("bob (viewer)").is_visible()


def test_somebody_whose_session_has_ended_is_told(open_tab: Any, guarded: Served) -> None:
    """In another tab of the same session."""
    tab: Tab = open_tab(guarded.url)
    page = tab.open("/brokers")
    log_in(tab, "alice")
    page.locator("h1", has_text="Brokers").wait_for()
    other = page.context.new_page()
    other.goto("/topics")
    other.get_by_role("button", name="Log out").click()
    other.get_by_role("button", name="Log in").wait_for()
    page.get_by_text("You are not logged in any more").wait_for()


def test_a_token(open_tab: Any, demo: Served, tmp_path: Path) -> None:
    with console(tmp_path, demo.bootstrap, "--login", "token") as served:
        tab: Tab = open_tab(served.url)
        page = tab.open("/")
        token = served.errors().partition("token=")[2].split()[0]
        page.get_by_label("Token").fill("not it")
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("alert").wait_for()
        assert tab.complaints.expected(403)
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Log in").click()
        page.locator("h1", has_text="Overview").wait_for()
