"""Consoles that are open while the whole cluster is killed: each page says so, and comes back by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.local.ports import free_ports
from support.browsers import Tab
from support.console_process import console
from support.demo_cluster import client_of
from support.up import Up

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

BROKERS = 3
SILENT = "does not answer"
SOON_MS = 60_000


class Killable:
    """Three brokers and their ZooKeeper that can be killed all at once, and started again where they were."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        ports = free_ports("127.0.0.1", BROKERS)
        while ports != list(range(ports[0], ports[0] + BROKERS)):
            ports = free_ports("127.0.0.1", BROKERS)
        self._port = ports[0]
        self.bootstrap = ",".join(f"127.0.0.1:{port}" for port in ports)
        self._up = self._start()

    def _start(self) -> Up:
        up = Up(self._directory, "--port", str(self._port), "--brokers", str(BROKERS))
        try:
            up.ready()
        except BaseException:
            up.close()
            raise
        return up

    def kill(self) -> None:
        """SIGKILL to everything that was started here."""
        children = psutil.Process(self._up.process.pid).children(recursive=True)
        self._up.close()
        for child in children:
            child.kill()
        psutil.wait_procs(children)

    def start_again(self) -> None:
        self._up = self._start()

    def close(self) -> None:
        if self._up.process.poll() is None:
            self._up.stop()
        self._up.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Killable]:
    cluster = Killable(tmp_path)
    try:
        yield cluster
    finally:
        cluster.close()


def test_it_says_so_and_comes_back(open_tab: Any, cluster: Killable, tmp_path: Path) -> None:
    with client_of(cluster.bootstrap) as client:
        client.partition_count("orders", create=True)
    with console(tmp_path / "console", cluster.bootstrap) as served:
        paths = ("/", "/topics", "/topics/orders", "/brokers")
        tabs: dict[str, Tab] = {path: open_tab(served.url) for path in paths}
        for path, tab in tabs.items():
            tab.open(path)
            assert SILENT not in tab.text()
            tab.page.evaluate("window.openedBefore = true")
        cluster.kill()
        for tab in tabs.values():
            tab.page.get_by_text(SILENT).first.wait_for(timeout=SOON_MS)
        # Pages that are opened only now: from memory, or nothing at all, but they say so.
        late: dict[str, Tab] = {path: open_tab(served.url) for path in ("/topics", "/brokers", "/groups")}
        for path, tab in late.items():
            tab.page.goto(path)
            tab.page.get_by_text(SILENT).first.wait_for(timeout=SOON_MS)
        cluster.start_again()
        for path, tab in (*tabs.items(), *late.items()):
            tab.page.get_by_text(SILENT).first.wait_for(state="hidden", timeout=SOON_MS)
            tab.page.locator("h1", has_text={"/": "Overview", "/topics/orders": "orders"}.get(path, path[1:])).wait_for(
                timeout=SOON_MS
            )
            tab.complaints.expected(503)  # while nobody was there
        for path in paths:
            assert tabs[path].page.evaluate("window.openedBefore"), f"{path}: what was typed there would be gone"
        tabs["/"].page.locator("[data-live=brokers]", has_text=str(BROKERS)).wait_for(timeout=SOON_MS)


def test_a_console_that_is_gone_itself(open_tab: Any, tmp_path: Path) -> None:
    """Nobody answers then at all: the page says so by itself."""
    with console(tmp_path, f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}", "-X", "default.api.timeout.ms=300") as served:
        tab: Tab = open_tab(served.url)
        tab.open("/brokers", status=503)
        assert tab.complaints.expected(503)
    # Going on looking is complained of by the browser, and changes nothing.
    tab.page.wait_for_event("requestfailed", timeout=SOON_MS)
    assert tab.page.locator("h1").inner_text() == "Not available"
    tab.complaints.texts.clear()
