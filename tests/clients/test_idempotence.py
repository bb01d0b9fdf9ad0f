"""An idempotent producer whose acknowledgements get lost writes nothing twice and nothing out of order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from clients.adapters.interface import Client
from clients.lossy_proxy import LossyProxy
from clients.reading import read_all
from millrace.testing import Cluster

RECORDS = 400


@pytest.fixture
def proxy() -> Iterator[LossyProxy]:
    lossy = LossyProxy(lambda number: number % 4 == 2 and number < 20)
    yield lossy
    lossy.close()


@pytest.fixture
def behind_proxy(proxy: LossyProxy) -> Iterator[Cluster]:
    """A broker that tells its clients to come through the proxy."""
    with Cluster(settings={"advertised.listeners": f"PLAINTEXT://{proxy.address}"}) as cluster:
        proxy.forward_to(cluster.bootstrap_servers)
        yield cluster


def test_lost_acknowledgements_make_no_duplicates(
    client: Client, proxy: LossyProxy, behind_proxy: Cluster, fresh: Callable[[str], str]
) -> None:
    topic = fresh("idempotent")
    behind_proxy.create_topic(topic, 2)
    sender = client.sender(proxy.address, idempotent=True)
    pending = []
    for number in range(RECORDS):
        pending.append(sender.send(topic, b"%d" % number, partition=number % 2))
        if number % 10 == 9:
            sender.flush()  # so that there are many requests, and many responses to lose
    sent = [one.result(60) for one in pending]
    sender.close()
    assert proxy.lost >= 3

    reader = client.reader(proxy.address)
    received = read_all(reader, [(topic, 0), (topic, 1)])
    reader.close()
    for partition in range(2):
        values = [one.value for one in received if one.partition == partition]
        assert values == [b"%d" % number for number in range(partition, RECORDS, 2)]
    by_place = {(one.partition, one.offset): one.value for one in received}
    assert [by_place[one] for one in sent] == [b"%d" % number for number in range(RECORDS)]
