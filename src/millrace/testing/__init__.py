"""A real broker for tests: `Cluster` in Python, and the `millrace` fixture for pytest (see `plugin`).

Nothing heavy is imported until `Cluster` is asked for: pytest loads the plugin at every start, also where no test
uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.testing.cluster import Cluster as Cluster  # said twice to be a re-export

__all__ = ["Cluster"]


def __getattr__(name: str) -> Any:
    if name == "Cluster":
        from millrace.testing.cluster import Cluster  # noqa: PLC0415

        return Cluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
