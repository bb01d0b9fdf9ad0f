"""A broker and a console in front of it, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.console.settings import ConsoleSettings
from millrace.testing import Cluster
from support.consoles import Visitor, visiting


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def visitor(cluster: Cluster) -> Iterator[Visitor]:
    """Of a console without a login, who may do everything."""
    with visiting(ConsoleSettings(cluster.bootstrap_servers)) as visitor:
        yield visitor
