"""Names and contents that would like to act: they are shown as they are, and nothing happens."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from confluent_kafka import Producer

from millrace.admin import topics
from millrace.model import TopicPartition
from support.browsers import Tab
from support.console_process import Served, console
from support.demo_cluster import client_of

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

SCRIPT = "<script>window.pwned = 1; alert(1)</script>"
IMAGE = '"><img src="http://evil.example/x" onerror="window.pwned = 1">'
TEMPLATE = "{{ 7 * 7 }}${7 * 7}"
GROUPS = (
    SCRIPT,
    IMAGE,
    TEMPLATE,
    "../../topics",
    "a/b?c=d#e&f=%2e%2e",
    "naïve \N{SLIGHTLY SMILING FACE} group",
    "' or 1=1",
)
TOPIC = "hostile.records"


@pytest.fixture(scope="module")
def hostile(demo: Served, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A console that has seen nothing yet, before a cluster with all of this in it."""
    with client_of(demo.bootstrap) as client:
        assert topics.create_topics(client, [TOPIC], partitions=1)[TOPIC] is None
        for group in GROUPS:
            client.commit_offsets(group, {TopicPartition(TOPIC, 0): 0})
    producer = Producer({"bootstrap.servers": demo.bootstrap, "client.id": IMAGE})
    for text in (SCRIPT, IMAGE, TEMPLATE):
        producer.produce(TOPIC, text.encode(), text.encode(), headers={text: text.encode()})
        producer.produce(TOPIC, f'{{"{TEMPLATE}": "</script>{SCRIPT}"}}'.encode(), b"\xff\x00<b>")
    assert producer.flush(30) == 0
    with console(tmp_path_factory.mktemp("hostile"), demo.bootstrap) as served:
        yield served


@pytest.fixture
def tab(open_tab: Any, hostile: Served) -> Any:
    """At its end nothing has happened."""
    tab = open_tab(hostile.url)
    yield tab
    assert tab.dialogs == []
    assert tab.page.evaluate("typeof window.pwned") == "undefined"
    assert {urlsplit(url).netloc for url in tab.requested} == {urlsplit(hostile.url).netloc}


@pytest.mark.parametrize("name", GROUPS)
def test_a_group(tab: Tab, name: str) -> None:
    page = tab.open("/groups")
    page.locator("[data-search]").fill(name)
    row = page.locator("#groups td.name a", has_text=name)
    page.wait_for_function("() => document.querySelectorAll('#groups tbody tr').length < 5")
    assert row.first.inner_text() == name
    row.first.click()
    page.locator("h1").wait_for()
    assert name in page.locator("h1").inner_text()
    assert page.title() == f"{name} · millrace"
    # The table of the page is searched here, too, whatever the address looks like.
    page.locator("[data-search]").fill("nothing")
    page.locator("#partitions .empty").wait_for()
    page.get_by_role("button", name="dark", exact=True).click()
    page.locator("html[data-theme=dark]").wait_for()
    assert name in page.locator("h1").inner_text()


def test_a_record(tab: Tab) -> None:
    page = tab.open(f"/topics/{TOPIC}/records?start=beginning")
    page.locator("#found .record").first.wait_for()
    shown = page.locator("#found").inner_text()
    assert SCRIPT in shown
    assert IMAGE in shown
    for line in page.locator("#found summary").all():
        line.click()
    page.wait_for_function("() => document.querySelectorAll('#found .whole #record').length === 6")
    assert (
        page.locator("#found .whole").first.inner_text().count(SCRIPT) >= 3
        or page.locator("#found .whole", has_text=SCRIPT).count() >= 3
    ), "key, value and header"
    for offset in range(6):
        tab.open(f"/topics/{TOPIC}/records/0/{offset}")


def test_addresses(tab: Tab) -> None:
    """What stands in an address comes back in the page: in the search field, in links, in what failed."""
    for path in (
        "/topics?q={}",
        "/groups?type={}&q={}",
        "/topics/orders/records?filter={}",
        "/security?who={}",
        "/nothing/{}",
    ):
        for text in (SCRIPT, IMAGE):
            tab.page.goto(path.replace("{}", quote(text, safe="")))
            assert tab.page.evaluate("typeof window.pwned") == "undefined"
    assert tab.complaints.expected(400, 404)


def test_the_topic_shows_its_readers(tab: Tab) -> None:
    tab.open(f"/topics/{TOPIC}/groups")
    assert {row.split(" classic")[0] for row in tab.rows()} == {" ".join(name.split()) for name in GROUPS}
