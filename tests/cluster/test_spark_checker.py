"""What the rounds of the Spark sink are judged by, and their plans."""

from __future__ import annotations

import random
from collections import Counter

from cluster.spark_rounds import FULL_SPARK, KINDS, check_rows, plan_kills
from support.checker import Anomaly, Report


def judged(*found: int) -> dict[Anomaly, int]:
    report = Report()
    check_rows(Counter(found), 4, report)
    return report.counts


def test_every_row_once() -> None:
    assert judged(3, 1, 0, 2) == {}
    assert judged(0, 1, 3) == {Anomaly.UNSEEN: 1}
    assert judged(0, 1, 1, 1, 2, 2, 3) == {Anomaly.DUPLICATE: 2}
    assert judged(0, 1, 2, 3, 4, -1) == {Anomaly.PHANTOM: 2}


def test_a_plan_follows_from_its_seed() -> None:
    plan = plan_kills(FULL_SPARK, random.Random(7))
    assert plan == plan_kills(FULL_SPARK, random.Random(7)) != plan_kills(FULL_SPARK, random.Random(8))
    assert [sum(kill.victim in kinds for kill in plan) for kinds in KINDS] == [7, 7, 6]
    assert {kill.victim for kill in plan} == {name for kinds in KINDS for name in kinds}
    assert len({kill.batch for kill in plan}) == 20
    assert max(kill.batch for kill in plan) < FULL_SPARK.acked // FULL_SPARK.batch_rows
