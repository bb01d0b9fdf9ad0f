"""Everything secured, with TLS, logins and rules for clients, brokers and ZooKeeper: faults are overcome all the same.

Besides: certificates and their authority change, and a plain cluster becomes a secured one, and no record fails.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
from kazoo.exceptions import NoAuthError

from cluster.faults import ROWS, Row, Variant
from cluster.group_faults import GROUP_ROWS
from cluster.rounds import Clusters
from cluster.security_faults import SECURITY_ROWS, SHORT_SECURITY, complaints, run_security_round, secure
from cluster.transaction_faults import TRANSACTION_ROWS
from support.cluster_processes import ClusterProcesses, Layout
from support.zookeeper import looking_at

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

BY_CERTIFICATE = (("listener.security.protocol.map", "CLIENT:SASL_SSL,REPLICATION:SSL"),)
"""Brokers are known to each other by their certificates alone."""
FAULTS = {
    "leader killed": (),
    "controller and leader killed": (),
    "only ZooKeeper killed": (),
    "certificates rotated": (),
    "leader cut from the rest": BY_CERTIFICATE,
    "group coordinator killed": (),
    "copy coordinator killed": (),
}
VARIANTS = sorted(
    (
        (row, replace(variant, secured=True, client_links=False, settings=variant.settings + FAULTS[variant.name]))
        for row in (*ROWS, *SECURITY_ROWS, *GROUP_ROWS, *TRANSACTION_ROWS)
        for variant in row.variants
        if variant.name in FAULTS
    ),
    key=lambda each: repr(each[1].layout(each[0].short)),
)


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    with Clusters() as running:
        yield running


@pytest.mark.parametrize(("row", "variant"), VARIANTS, ids=[variant.name.replace(" ", "-") for _, variant in VARIANTS])
def test_nothing_acknowledged_is_lost(clusters: Clusters, row: Row, variant: Variant) -> None:
    cluster = clusters.get(variant.layout(row.short))
    result = row.play(cluster, variant.fault, row.short, 0)
    if not result.green or complaints(cluster):
        logs = cluster.logs()
        clusters.discard()
        pytest.fail(f"{result.describe()}\n{logs}", pytrace=False)
    assert result.report.acked >= row.short.acked


def test_every_fault_is_among_the_rows() -> None:
    assert {variant.name for _, variant in VARIANTS} == {*FAULTS}


def test_a_plain_cluster_becomes_a_secured_one_while_it_works() -> None:
    with ClusterProcesses(Layout(open_zookeeper=True)) as cluster:
        plain = cluster.client_settings
        result = run_security_round(cluster, secure, SHORT_SECURITY)
        if not result.green:
            pytest.fail(f"{result.describe()}\n{cluster.logs()}", pytrace=False)
        assert result.report.longest_pause_s < 5
        for address in plain["bootstrap.servers"].split(","):
            host, port = address.split(":")
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, int(port)))
        assert cluster.zookeeper is not None
        with looking_at(cluster.zookeeper.hosts) as stranger, pytest.raises(NoAuthError):
            stranger.get_children("/metadata")
