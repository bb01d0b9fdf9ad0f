"""What people change through the console, click by click: topics, groups, dead letters, settings, records."""

from __future__ import annotations

import re

import pytest

from support import demo_cluster
from support.browsers import Tab
from support.console_process import Served

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


def test_a_topic_is_made_and_deleted(tab: Tab) -> None:
    page = tab.open("/topics")
    page.get_by_role("button", name="New topic").click()
    dialog = page.locator("#new-topic")
    dialog.get_by_label("Name", exact=True).fill("returns")
    dialog.get_by_label("Partitions").fill("2")
    dialog.get_by_label("Settings").fill("retention.ms=60000")
    dialog.get_by_role("button", name="Create").click()
    page.get_by_text("Topic returns was created").wait_for()
    assert len(tab.rows()) == 2

    page.get_by_label("Type returns to delete it").fill("return")
    page.get_by_role("button", name="Delete the topic").click()
    page.get_by_text("type the name of the topic, returns,").wait_for()
    assert tab.complaints.expected(400)
    page.go_back()
    page.get_by_label("Type returns to delete it").fill("returns")
    page.get_by_role("button", name="Delete the topic").click()
    page.get_by_text("Topic returns was deleted").wait_for()
    assert tab.dialogs == ["Delete returns and everything in it?"] * 2
    tab.open("/topics")
    assert page.get_by_text("was deleted").count() == 0, "it is said once"


def test_a_setting_of_a_topic(tab: Tab) -> None:
    page = tab.open("/topics/invoices/settings")
    page.get_by_label("Setting", exact=True).fill("max.message.bytes")
    page.get_by_label("Value").fill("2000000")
    page.get_by_role("button", name="Set", exact=True).click()
    page.get_by_text("max.message.bytes is 2000000 now").wait_for()
    row = page.locator("tr", has_text="max.message.bytes")
    row.get_by_role("button", name="back to default").click()
    page.get_by_text("max.message.bytes is what it is by default again").wait_for()
    assert page.locator("tr", has_text="max.message.bytes").count() == 0


def test_a_group_is_moved_after_a_preview(tab: Tab) -> None:
    page = tab.open(f"/groups/{demo_cluster.IDLE_GROUP}")
    assert tab.rows()[0].startswith("invoices 0 40 100 60")
    page.locator("[name=to]").last.select_option("the end")
    page.get_by_role("button", name="Show what would change").click()
    plan = page.locator(".panel", has=page.locator("#plan"))
    assert [" ".join(row.split()) for row in plan.locator("tbody tr").all_inner_texts()] == [
        "invoices 0 40 100 60",
        "invoices 1 60 100 40",
    ]
    plan.get_by_role("link", name="Leave it").click()
    page.locator("#plan").wait_for(state="detached")
    assert tab.rows()[0].startswith("invoices 0 40 100 60"), "nothing was moved"

    page.locator("[name=to]").last.select_option("an offset")
    page.locator("[name=offset]").last.fill("70")
    page.get_by_role("button", name="Show what would change").click()
    page.get_by_role("button", name="Move the group").click()
    page.get_by_text("2 partitions moved").wait_for()
    assert tab.rows()[0].startswith("invoices 0 70 100 30")


def test_a_group_with_members_cannot_be_moved(tab: Tab) -> None:
    page = tab.open(f"/groups/{demo_cluster.CLASSIC_GROUP}")
    page.get_by_role("button", name="Show what would change").click()
    page.get_by_text("The group has 2 running members: stop them first").wait_for()
    assert page.get_by_role("button", name="Move the group").count() == 0


def test_dead_letters_are_sent_again(tab: Tab) -> None:
    page = tab.open(f"/queues/{demo_cluster.QUEUE}")
    page.get_by_role("link", name=re.compile("^in dlq")).click()
    page.locator("h1", has_text="Dead letters of").wait_for()
    rows = tab.rows()
    assert len(rows) == demo_cluster.REJECTED
    assert all("rejected by its consumer" in row for row in rows)
    boxes = page.get_by_role("checkbox")
    boxes.nth(0).check()
    boxes.nth(2).check()
    page.get_by_role("button", name="Send the chosen records again").click()
    page.get_by_text("2 records sent again").wait_for()


def test_a_record_is_sent_and_found(tab: Tab) -> None:
    page = tab.open("/topics/sensors/produce")
    form = page.locator("form.writing").first
    form.get_by_label("Key").fill("sensor-9")
    form.get_by_label("Value").fill('{"celsius": 21.5}')
    form.get_by_label("Headers").fill("unit: celsius")
    form.get_by_role("button", name="Send").click()
    page.locator(".message.good").wait_for()
    tab.open("/topics/sensors/records")
    page.locator("[name=filter]").fill('key == "sensor-9"')
    page.get_by_role("button", name="Read").click()
    line = page.locator("#found .record")
    line.wait_for()
    assert "celsius" in line.inner_text()
    line.locator("summary").click()
    page.locator(".whole", has_text="unit").wait_for()


def test_a_filter_that_makes_no_sense_is_pointed_at(tab: Tab) -> None:
    page = tab.open("/topics/orders/records")
    page.locator("[name=filter]").fill("value.paid ==")
    page.keyboard.press("Enter")
    page.locator("#filter-error").wait_for()
    assert tab.complaints.expected(400)


def test_replicas_are_planned_before_they_move(tab: Tab) -> None:
    page = tab.open("/brokers")
    page.get_by_label("Only these topics").fill("payments")
    page.get_by_label("Replicas of each partition").fill("2")
    page.get_by_role("button", name="Show the plan").click()
    page.get_by_text("3 partitions would move").wait_for()
    page.get_by_role("link", name="Leave it").click()
    page.get_by_text("would move").wait_for(state="detached")


def test_the_overview_moves(tab: Tab, demo: Served) -> None:
    """Orders and page views come in all the time."""
    page = tab.open("/")
    page.wait_for_function("() => document.querySelectorAll('.chart canvas').length === 4")
    page.wait_for_function("() => /[1-9].*\\/s/.test(document.querySelector('[data-live=records-in]').textContent)")
    before = page.evaluate(
        """() => ({
          rate: document.querySelector("[data-live=records-in]").textContent,
          picture: document.querySelector("#chart-records canvas").toDataURL(),
        })"""
    )
    page.wait_for_function(
        """(before) => document.querySelector("[data-live=records-in]").textContent !== before.rate
           && document.querySelector("#chart-records canvas").toDataURL() !== before.picture""",
        arg=before,
        timeout=60_000,
    )


def test_a_tab_in_the_background_gives_its_stream_back(tab: Tab) -> None:
    """A browser has six connections for one address: the seventh tab would wait for ever."""
    page = tab.open("/")
    state = "() => document.querySelector('[data-events]').stream?.readyState ?? 'none'"
    page.wait_for_function(f"() => ({state})() === EventSource.OPEN")
    hide = """(hidden) => {
      Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    assert page.evaluate(state) == "none"
    page.evaluate(hide, False)
    page.wait_for_function(f"() => ({state})() === EventSource.OPEN")
