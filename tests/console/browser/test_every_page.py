"""Every page of the console, found by its route: it opens, in light and dark, on narrow screens, for everybody.

With MILLRACE_SCREENSHOTS=DIRECTORY (`make screenshots`) a picture of each page is kept in light and in dark.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from starlette.routing import Route

from millrace.console import pages
from support import demo_cluster, pictures
from support.browsers import DESKTOP, PHONE, ZOOMED, Tab
from support.console_process import Served, console

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

DOCS = Path(__file__).resolve().parents[3] / "docs"
PICTURES = os.environ.get("MILLRACE_SCREENSHOTS")
MOST_PICTURE_BYTES = 120_000
POINTS = "charts.get(document.getElementById('chart-records')).data[0].length"
LEAST_CONTRAST = 4.5
"""Of text and what is behind it: what the guidelines for accessible pages ask for (WCAG 2, level AA)."""

PARTS = {
    "topic": "orders",
    "group": demo_cluster.CLASSIC_GROUP,
    "queue": demo_cluster.QUEUE,
    "broker": "1",
    "partition": "0",
    "offset": "0",
    "run": demo_cluster.RUN,
}
"""What stands in addresses for their variable parts."""
QUERIES = {"/pipelines/start": "/pipelines/start?pipeline=metrics"}
"""Pages that are nothing without what is asked for."""
NOT_PAGES = ("/events", "/tail", "/download", "/cancel", "/{side}", "/login", "/reachable", "/{action}")
"""Endings of addresses that are asked for by pages: streams, files, what leads on at once."""


def is_page(route: Route) -> bool:
    known = set(re.findall(r"\{(\w+)", route.path)) <= PARTS.keys()
    return (
        "GET" in (route.methods or ())
        and known
        and not route.path.startswith("/events/")
        and not route.path.endswith(NOT_PAGES)
    )


PAGES = [route for route in pages.routes() if is_page(route)]


def address(route: Route) -> str:
    return QUERIES.get(route.path, "") or re.sub(r"\{(\w+)(:\w+)?\}", lambda found: PARTS[found[1]], route.path)


CONTROLS_WITHOUT_LABEL = """() =>
  [...document.querySelectorAll("input:not([type=hidden]), select, textarea, button, img, [role=img]")]
    .filter((each) => each.matches("img") ? !each.hasAttribute("alt")
      : each.matches("button") ? !each.textContent.trim() && !each.ariaLabel
      : !each.labels?.length && !each.ariaLabel && !each.hasAttribute("aria-labelledby"))
    .map((each) => each.outerHTML)"""

# What juts out of the page to the right, unless it lies in a box that scrolls by itself.
JUTTING_OUT = """() => document.documentElement.scrollWidth <= innerWidth ? [] :
  [...document.querySelectorAll("body *")]
    .filter((each) => each.getBoundingClientRect().right > innerWidth + 1 && !each.closest(".scroll, .hidden, .skip"))
    .map((each) => each.outerHTML.slice(0, 150))"""

# Every text that can be seen, with the contrast to what is behind it, if that is too small.
HARD_TO_READ = """(least) => {
  const channels = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([red, green, blue]) => {
    const linear = [red, green, blue].map((each) => each / 255)
      .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const found = channels(getComputedStyle(each).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const bad = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const isText = walker.currentNode.textContent.trim() && !element.closest("script, style, template, :disabled");
    if (!isText || !element.checkVisibility()) continue;
    const levels = [light(channels(getComputedStyle(element).color)), light(ground(element))];
    const contrast = (Math.max(...levels) + 0.05) / (Math.min(...levels) + 0.05);
    if (contrast < least) bad.add(`${contrast.toFixed(2)}: ${element.outerHTML.slice(0, 150)}`);
  }
  return [...bad];
}"""


def looked_at(page: Page) -> None:
    """What holds for every page."""
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("h1").count() == 1
    assert page.locator("h1").inner_text().strip()
    assert page.title().endswith(" · millrace")
    assert page.title() != " · millrace"
    assert page.evaluate(CONTROLS_WITHOUT_LABEL) == []
    assert page.locator(".failure").count() == 0
    ids: list[str] = page.evaluate("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids)), "an id twice"


def ground(page: Page) -> Any:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def photograph(page: Page, name: str) -> None:
    if PICTURES is None:
        return
    if page.locator("#chart-records").count():  # a chart is worth a picture once it has something to show
        page.wait_for_function(f"() => {POINTS} >= 8", timeout=200_000)
    path = Path(PICTURES) / f"{name}.png"
    pictures.take(page, path)
    assert path.stat().st_size <= MOST_PICTURE_BYTES, f"{path}: {path.stat().st_size:,} bytes"


def test_every_route_is_a_page_or_known_not_to_be() -> None:
    """A new page is looked at here, or it is said why not."""
    left_out = {route.path for route in pages.routes() if "GET" in (route.methods or ())}
    left_out -= {route.path for route in PAGES}
    assert all(path.startswith("/events/") or path.endswith(NOT_PAGES) for path in left_out), left_out
    assert {item.path for item in pages.MENU} <= {route.path for route in PAGES}


def test_the_documentation_shows_every_page() -> None:
    """`make screenshots` takes the pictures."""
    shown = set(re.findall(r"\(console/([\w-]+)\.png\)", (DOCS / "console.md").read_text()))
    names = {"login", *(route.name.replace("_", "-") for route in PAGES)}
    assert shown == {f"{name}-{theme}" for name in names for theme in ("light", "dark")}
    assert shown == {path.stem for path in (DOCS / "console").glob("*.png")}


@pytest.mark.parametrize("route", PAGES, ids=lambda route: route.name)
def test_it_opens(tab: Tab, route: Route) -> None:
    look_everywhere(tab, address(route), route.name.replace("_", "-"))


def test_the_login_opens(open_tab: Any, demo: Served, tmp_path: Path) -> None:
    with console(tmp_path, demo.bootstrap, "--login", "token") as served:
        look_everywhere(open_tab(served.url), "/login", "login")


def look_everywhere(tab: Tab, path: str, name: str) -> None:
    """In light and dark, on all sizes."""
    page = tab.open(path)
    looked_at(page)
    assert page.evaluate(HARD_TO_READ, LEAST_CONTRAST) == []
    photograph(page, f"{name}-light")
    light = ground(page)
    page.emulate_media(color_scheme="dark")
    assert ground(page) != light
    page.reload()  # charts take their colours when they are drawn
    assert page.evaluate(HARD_TO_READ, LEAST_CONTRAST) == []
    photograph(page, f"{name}-dark")
    for size in (PHONE, ZOOMED):
        tab.resize(size)
        assert page.evaluate(JUTTING_OUT) == [], size
    tab.resize(DESKTOP)


def test_every_way_in_the_menu_and_tabs_leads_to_a_page(tab: Tab) -> None:
    known = {address(route) for route in PAGES}
    for start in ("/", "/topics/orders", "/security"):
        tab.open(start)
        ways = tab.page.locator("#menu a, main nav.tabs a")
        assert {each.get_attribute("href") for each in ways.all()} <= known


def test_nothing_can_be_changed_in_a_read_only_console(open_tab: Any, read_only: Served) -> None:
    tab = open_tab(read_only.url)
    page = tab.open("/")
    assert page.get_by_text("read-only", exact=True).is_visible()
    forms = {address(route): page.evaluate(FORMS_THAT_CHANGE, address(route)) for route in PAGES}
    assert not any(forms.values()), forms


# Of the page at that address the forms that can be sent: by a button, or by Enter if there is none at all.
FORMS_THAT_CHANGE = """async (path) => {
  const answer = await fetch(path);
  if (!answer.ok) return [`${answer.status}`];
  const found = new DOMParser().parseFromString(await answer.text(), "text/html");
  return [...found.querySelectorAll("form[method=post]")]
    .filter((form) => !form.matches('[action^="/theme"], [action="/logout"]'))
    .filter((form) => {
      const buttons = [...form.querySelectorAll("button, [type=submit]")];
      return buttons.length === 0 || buttons.some((each) => !each.disabled);
    })
    .map((form) => form.getAttribute("action"));
}"""
