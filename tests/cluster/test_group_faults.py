"""Faults of a consumer group, once each, in a small size: all is read, no commit goes back, the group comes to rest.

`make faults` runs these and others in full size (`cluster.__main__`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.faults import Row, Variant
from cluster.group_faults import GROUP_ROWS, SHORT_VARIANTS
from cluster.rounds import Clusters

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

ROUNDS = [(row, variant) for row in GROUP_ROWS for variant in row.variants if variant.name in SHORT_VARIANTS]


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    with Clusters() as running:
        yield running


@pytest.mark.parametrize(("row", "variant"), ROUNDS, ids=[variant.name.replace(" ", "-") for _, variant in ROUNDS])
def test_a_group_reads_everything(clusters: Clusters, row: Row, variant: Variant) -> None:
    cluster = clusters.get(variant.layout(row.short))
    result = row.play(cluster, variant.fault, row.short, 0)
    if not result.green:
        logs = cluster.logs()
        clusters.discard()
        pytest.fail(f"{result.describe()}\n{logs}", pytrace=False)
    assert result.report.acked >= row.short.acked
    assert result.report.polled >= result.report.acked
