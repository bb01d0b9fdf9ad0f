"""A browser, and what it looks at: a large cluster with a console, made once for all tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from millrace.spark.pipelines.status import RUNS_VARIABLE
from support import demo_cluster
from support.browsers import Tab, browsing, chromium
from support.console_process import Served, cluster_with_console, console

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Open = Callable[..., Tab]
"""A new tab in a session of its own: `open_tab(url)`."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """Its path is to be seen in pictures: nothing of this machine is in it."""
    path = Path(tempfile.mkdtemp(prefix="millrace-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def demo(folder: Path) -> Iterator[Served]:
    """Three brokers with ten thousand topics and groups and something of everything, at work; and a console."""
    chromium()  # without one all of it would be in vain
    settings = [word for name, value in demo_cluster.SETTINGS.items() for word in ("--set", f"{name}={value}")]
    with cluster_with_console(folder, "--brokers", "3", *settings, environment=runs(folder)) as served:
        demo_cluster.make_topics(served.bootstrap)
        with demo_cluster.pipeline(served.bootstrap, folder / "pipeline"):
            demo_cluster.populate(served.bootstrap)
            with demo_cluster.alive(served.bootstrap):
                demo_cluster.wait_for_pipeline(folder / "pipeline")
                yield served


def runs(folder: Path) -> dict[str, str]:
    """Consoles show the pipeline of these tests, and none of others on this machine."""
    return {RUNS_VARIABLE: str(folder / "pipeline" / "runs")}


@pytest.fixture(scope="session")
def read_only(demo: Served, folder: Path) -> Iterator[Served]:
    """A second console for the same cluster, in which nothing can be changed."""
    with console(folder / "read-only", demo.bootstrap, "--read-only", environment=runs(folder)) as served:
        yield served


@pytest.fixture
def open_tab(browser: Browser) -> Iterator[Open]:
    """Tabs; in none of them may anything be complained of, unless the test has taken it out itself."""
    tabs: list[Tab] = []

    def opened(url: str, **options: object) -> Tab:
        tabs.append(Tab(browser, url, **options))  # type: ignore[arg-type]
        return tabs[-1]

    yield opened
    complaints = [(tab.page.url, *tab.complaints.texts) for tab in tabs if tab.complaints.texts]
    for tab in tabs:
        tab.close()
    assert not complaints


@pytest.fixture
def tab(open_tab: Open, demo: Served) -> Tab:
    """A tab of the console beside the large cluster."""
    return open_tab(demo.url)
