"""Faults of transactions in a small size: all of a transaction or nothing, once, in order, and nothing that hangs.

`make faults` runs these and others in full size (`cluster.__main__`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.faults import Row, Variant
from cluster.rounds import Clusters
from cluster.transaction_faults import SHORT_VARIANTS, TRANSACTION_ROWS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

ROUNDS = [(row, variant) for row in TRANSACTION_ROWS for variant in row.variants if variant.name in SHORT_VARIANTS]


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    with Clusters() as running:
        yield running


@pytest.mark.parametrize(
    ("number", "row", "variant"),
    [(number, *each) for number, each in enumerate(ROUNDS)],
    ids=[variant.name.replace(" ", "-") for _, variant in ROUNDS],
)
def test_transactions_are_whole(clusters: Clusters, number: int, row: Row, variant: Variant) -> None:
    cluster = clusters.get(variant.layout(row.short))
    result = row.play(cluster, variant.fault, row.short, number)
    if not result.green:
        logs = cluster.logs()
        clusters.discard()
        pytest.fail(f"{result.describe()}\n{logs}", pytrace=False)
    assert result.report.acked >= row.short.acked
