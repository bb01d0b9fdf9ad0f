"""Time for models: a failing history is made shorter for up to five minutes, and only then shown."""

from __future__ import annotations

from pathlib import Path

import pytest

LIMIT_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The hook gets the tests of every directory.
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S))
