"""How tests are given to processes."""

from __future__ import annotations

import pytest

from support.distribution import SPARK_SESSION, ByPiece, piece_of


@pytest.mark.parametrize(
    ("nodeid", "piece"),
    [
        ("tests/unit/test_tasks.py::test_one[2]", "tests/unit/test_tasks.py"),
        ("tests/spark/test_source_batch.py::test_columns", SPARK_SESSION),
        ("tests/spark/test_sinks.py::test_columns", SPARK_SESSION),
        ("tests/spark/test_demo.py::test_demo", "tests/spark/test_demo.py"),
    ],
)
def test_files_that_share_a_session_stay_together(nodeid: str, piece: str) -> None:
    assert piece_of(nodeid) == piece
    assert ByPiece._split_scope(None, nodeid) == piece
