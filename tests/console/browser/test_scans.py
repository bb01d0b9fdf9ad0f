"""The pages of records in a real browser: contents do nothing, scans tell how far they are, live is live."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from millrace.client.cluster import ClusterClient
from millrace.client.producing import BatchProducer
from millrace.client.settings import ClientSettings
from millrace.clock import SystemClock
from millrace.console.records.producing import Outgoing, produce
from millrace.console.records.work import MAX_RUNNING
from millrace.model import TopicPartition
from millrace.records.decode import Record
from millrace.records.encode import encode_batch
from millrace.testing import Cluster
from support.browsers import Complaints

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

HOSTILE = "<script>document.title='acted'</script><img src=x onerror=\"document.title='acted'\">"


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> ClientSettings:
    return ClientSettings.from_properties({"bootstrap.servers": cluster.bootstrap_servers})


@pytest.fixture(scope="module")
def address(cluster: Cluster) -> Iterator[str]:
    """A console as a process: a scan must not share the interpreter with the broker that it reads from."""
    command = [sys.executable, "-m", "millrace", "console", "--bootstrap", cluster.bootstrap_servers]
    with subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"http://\S+", line):
                    yield found[0].rstrip("/")
                    break
        finally:
            process.terminate()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Page]:
    """A page; what the browser complains of at its end fails the test."""
    page = browser.new_page()
    complaints = Complaints(page)
    yield page
    page.close()
    assert complaints.texts == []


def test_what_a_record_holds_does_nothing(opened: Page, address: str, cluster: Cluster, client: ClientSettings) -> None:
    cluster.create_topic("hostile", 1)
    text = HOSTILE.encode()
    produce(client, "hostile", [Outgoing(text, text, ((HOSTILE, text),))])
    opened.goto(f"{address}/topics/hostile/records")
    opened.locator("summary.line").press("Enter")  # by keyboard
    opened.locator(".whole h3", has_text="Headers").wait_for()
    assert HOSTILE in opened.locator(".whole").inner_text()
    assert opened.locator(".whole time").get_attribute("title"), "times are in the reader's zone"
    opened.goto(f"{address}/topics/hostile/records?start=live")
    opened.locator("[data-live=standing]", has_text="live").wait_for()
    produce(client, "hostile", [Outgoing(text, text, ((HOSTILE, text),))])
    opened.locator("[data-tail-lines] .record").wait_for()
    assert HOSTILE in opened.locator("[data-tail-lines] .value").inner_text()
    assert "hostile" in opened.title()


def test_a_live_view_pauses(opened: Page, address: str, cluster: Cluster, client: ClientSettings) -> None:
    cluster.create_topic("live", 1)
    opened.goto(f"{address}/topics/live/records?start=live")
    opened.locator("[data-live=standing]", has_text="live").wait_for()
    opened.get_by_role("button", name="Pause").click()
    opened.locator("[data-live=standing]", has_text="paused").wait_for()
    produce(client, "live", [Outgoing(None, b"later")])
    opened.get_by_role("button", name="Go on").click()
    opened.locator("[data-tail-lines] .value", has_text="later").wait_for()


def test_a_live_view_that_is_left_ends(opened: Page, address: str, cluster: Cluster) -> None:
    cluster.create_topic("left", 1)
    for _ in range(MAX_RUNNING + 2):  # more than may run at a time
        opened.goto(f"{address}/topics/left/records?start=live")
        opened.locator("[data-live=standing]", has_text="live").wait_for()


def test_a_long_scan_tells_how_far_it_is_and_is_cancelled(
    opened: Page, address: str, cluster: Cluster, client: ClientSettings
) -> None:
    cluster.create_topic("long", 1)
    now_ms = SystemClock().wall_ms()  # with times of long ago they would be removed while they are read
    batch = encode_batch([Record(number, now_ms, None, b'{"n": %d}' % number) for number in range(1_000)])
    with ClusterClient(client) as writing:
        producer = BatchProducer(writing, idempotent=False)
        for _ in range(2_000):
            producer.add(TopicPartition("long", 0), batch, 1_000)
        producer.flush()
    opened.goto(f"{address}/topics/long/records?start=beginning&filter=value.n+%3E+5000")
    opened.locator("[data-live=records]", has_not_text=re.compile(r"^0$")).wait_for()
    opened.locator("[data-live=percent]", has_not_text=re.compile(r"^0%$")).wait_for()
    opened.get_by_role("link", name="Cancel").click()
    opened.get_by_text("Cancelled:").wait_for()
    opened.get_by_role("link", name="Go on").wait_for()
    # One that is let go on shows what it found by itself.
    opened.goto(f"{address}/topics/long/records?start=beginning&filter=value.n+%3D%3D+999+and+offset+%3E+1999000")
    opened.get_by_text("Read to the end:").wait_for(timeout=90_000)
    opened.locator("#found .record").first.wait_for()
    assert opened.locator("#found .record").count() == 1
    assert "0:1999999" in opened.locator("#found").inner_text()
