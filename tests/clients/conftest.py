"""Real clients against real brokers: every test runs once per client library, against one broker and against three."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator

import pytest

from clients.adapters.aio import Aiokafka
from clients.adapters.confluent import Confluent
from clients.adapters.interface import Client
from clients.adapters.kafka_python import KafkaPython
from clients.opened import Opened
from millrace.testing import Cluster

CLIENTS = (Confluent, KafkaPython, Aiokafka)

# A member of the new protocol hears of its share in its next heartbeat, and tests wait for that.
SWIFT = {"group.consumer.heartbeat.interval.ms": "500", "group.consumer.min.heartbeat.interval.ms": "500"}

_numbers = itertools.count(1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A test that expects clients to leave sockets behind has them collected while its filter of warnings holds.

    Otherwise whichever test comes next is blamed, or, after the last one, the whole run. Not before the end of the
    teardown: until then the log of the test keeps what was logged.
    """
    yield
    if item.get_closest_marker("filterwarnings") is not None:
        gc.collect()


@pytest.fixture(scope="session", params=[1, 3], ids=["1-broker", "3-brokers"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(brokers=request.param, settings=SWIFT) as running:
        yield running


@pytest.fixture(params=CLIENTS, ids=lambda kind: kind.name)
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    chosen: Client = request.param()
    with chosen.running():
        yield chosen


@pytest.fixture
def every_client() -> Iterator[list[Client]]:
    chosen: list[Client] = [kind() for kind in CLIENTS]
    with chosen[0].running(), chosen[1].running(), chosen[2].running():
        yield chosen


@pytest.fixture
def fresh() -> Callable[[str], str]:
    """A name no other test has used."""
    return lambda what: f"{what}-{next(_numbers)}"


@pytest.fixture
def opened(client: Client, cluster: Cluster) -> Iterator[Opened]:
    things = Opened(client, cluster.bootstrap_servers)
    yield things
    things.close()
