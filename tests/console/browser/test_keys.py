"""The console without a mouse, and in the colours that somebody chose."""

from __future__ import annotations

import re
from typing import Any

import pytest

from millrace.console import pages
from support.browsers import Tab

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

FOCUSED = """() => {
  const each = document.activeElement, style = getComputedStyle(each), box = each.getBoundingClientRect();
  return {text: (each.textContent || each.name || "").trim(), outline: style.outlineStyle, shown: box.left >= 0};
}"""


@pytest.mark.parametrize("item", pages.MENU, ids=lambda item: item.title)
def test_g_and_a_letter_lead_to_a_page(tab: Tab, item: pages.MenuItem) -> None:
    page = tab.open("/queues" if item.path != "/queues" else "/topics")
    page.keyboard.press("g")
    page.keyboard.press(item.key)
    page.locator(f'#menu a[href="{item.path}"][aria-current=page]').wait_for()


def test_n_and_p_turn_pages(tab: Tab) -> None:
    page = tab.open("/topics")
    page.keyboard.press("n")
    page.locator("#topics", has_text=re.compile("51.100 of")).wait_for()
    page.keyboard.press("p")
    page.locator("#topics", has_text=re.compile(r"\b1.50 of")).wait_for()


def test_keys_are_letters_where_one_types(tab: Tab) -> None:
    page = tab.open("/topics")
    page.keyboard.press("/")
    page.keyboard.type("pagen?")
    assert page.locator("[data-search]").input_value() == "pagen?"
    assert not page.locator("#keys-help").is_visible()


def test_help_opens_and_closes(tab: Tab) -> None:
    page = tab.open("/")
    page.keyboard.press("?")
    page.locator("#keys-help").wait_for()
    for item in pages.MENU:
        assert item.title in page.locator("#keys-help").inner_text()
    page.keyboard.press("Escape")
    page.locator("#keys-help").wait_for(state="hidden")


def test_the_first_tab_skips_the_menu(tab: Tab) -> None:
    page = tab.open("/topics")
    page.keyboard.press("Tab")
    assert page.evaluate(FOCUSED) == {"text": "Skip to the page", "outline": "solid", "shown": True}
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.activeElement.id === 'main'")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.matches('[data-search]')")


def test_tab_goes_everywhere_and_shows_where(tab: Tab) -> None:
    page = tab.open("/topics")
    reached = []
    while len(reached) < 60 and "customers" not in reached:
        page.keyboard.press("Tab")
        focused = page.evaluate(FOCUSED)
        assert focused["outline"] != "none", focused
        assert focused["shown"], focused
        reached.append(focused["text"])
    wanted = [*(item.title for item in pages.MENU), "dark", "q", "problems", "New topic", "Partitions", "customers"]
    places = [reached.index(each) for each in wanted]
    assert places == sorted(places), reached


def test_a_dialog_is_used_without_a_mouse(tab: Tab) -> None:
    page = tab.open("/topics")
    page.get_by_role("button", name="New topic").press("Enter")
    page.locator("#new-topic").wait_for()
    assert page.evaluate("document.activeElement.name") == "name"
    page.keyboard.press("Escape")
    page.locator("#new-topic").wait_for(state="hidden")


def test_colours_are_chosen_and_kept(tab: Tab) -> None:
    page = tab.open("/topics?q=orders")
    grounds = {}
    for theme in ("dark", "light"):
        page.get_by_role("button", name=theme, exact=True).click()
        page.locator(f"html[data-theme={theme}]").wait_for()
        assert page.url.endswith("/topics?q=orders"), "one stays where one was"
        grounds[theme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        tab.open("/brokers")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == grounds[theme]
        tab.open("/topics?q=orders")
    assert grounds["dark"] != grounds["light"]


def test_the_menu_of_a_narrow_screen(open_tab: Any, demo: Any) -> None:
    from support.browsers import PHONE

    tab = open_tab(demo.url, size=PHONE)
    page = tab.open("/")
    button = page.get_by_role("button", name="Menu")
    assert button.get_attribute("aria-expanded") == "false"
    assert not page.locator("#menu").is_visible()
    button.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    page.locator("#menu").get_by_role("link", name="Groups").click()
    page.locator("h1", has_text="Groups").wait_for()
