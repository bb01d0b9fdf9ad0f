"""The faults of the table, once each and small: nothing acknowledged is lost, doubled, moved or different anywhere.

`make faults` runs the same faults in full size and prints the table (`cluster.__main__`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.faults import ROWS, Variant
from cluster.link_faults import LINK_ROWS
from cluster.rounds import SHORT, Clusters, run_round

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

# Equal layouts side by side: they share a running cluster.
VARIANTS = sorted(
    (variant for row in (*ROWS, *LINK_ROWS) for variant in row.variants if variant.short),
    key=lambda variant: (variant.proxied, variant.zookeeper_nodes),
)


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    with Clusters() as running:
        yield running


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name.replace(" ", "-"))
def test_nothing_acknowledged_is_lost(clusters: Clusters, variant: Variant) -> None:
    cluster = clusters.get(variant.layout(SHORT))
    result = run_round(cluster, variant.fault, SHORT)
    if not result.green:
        logs = cluster.logs()
        clusters.discard()
        pytest.fail(f"{result.describe()}\n{logs}", pytrace=False)
    assert result.report.acked >= SHORT.acked
    assert result.report.polled > 0
