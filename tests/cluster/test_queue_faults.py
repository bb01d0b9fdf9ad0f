"""A queue under faults, in a small size: every record is accepted, and none is given to anybody after that.

`make faults` runs more of them, in full size (`cluster.__main__`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.faults import Variant
from cluster.queue_faults import QUEUE_ROWS, SHORT_VARIANTS
from cluster.queue_rounds import SHORT_QUEUE, run_queue_round
from cluster.rounds import Clusters

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

VARIANTS = [variant for row in QUEUE_ROWS for variant in row.variants if variant.name in SHORT_VARIANTS]


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    with Clusters() as running:
        yield running


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name.replace(" ", "-"))
def test_every_record_is_accepted_once(clusters: Clusters, variant: Variant) -> None:
    cluster = clusters.get(variant.layout(SHORT_QUEUE))
    result = run_queue_round(cluster, variant.fault, SHORT_QUEUE)
    if not result.green:
        logs = cluster.logs()
        clusters.discard()
        pytest.fail(f"{result.describe()}\n{logs}", pytrace=False)
    assert result.report.acked >= SHORT_QUEUE.acked
