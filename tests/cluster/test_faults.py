"""The faults of the table, once each and small: nothing acknowledged is lost, doubled, moved or different anywhere.

`make faults` runs the same faults in full size and prints the table (`cluster.__main__`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.disk_faults import DISK_ROWS
from cluster.faults import ROWS, Row, Variant
from cluster.link_faults import LINK_ROWS
from cluster.machine_faults import MACHINE_ROWS
from cluster.rounds import Clusters
from cluster.setting_faults import SETTING_ROWS
from cluster.topic_faults import TOPIC_ROWS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

# Equal layouts side by side: they share a running cluster.
VARIANTS = sorted(
    (
        (row, variant)
        for row in (*ROWS, *LINK_ROWS, *DISK_ROWS, *MACHINE_ROWS, *SETTING_ROWS, *TOPIC_ROWS)
        for variant in row.variants
        if variant.short
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
    if not result.green:
        logs = cluster.logs()
        clusters.discard()
        pytest.fail(f"{result.describe()}\n{logs}", pytrace=False)
    assert result.report.acked >= row.short.acked
    assert result.report.polled > 0
