"""The name Spark looks for: a module `pyspark_*` with a `DefaultSource` is registered without any code of the user's.

Spark imports it in every session, so it imports next to nothing; the source itself is `millrace.spark.source`.
"""

from __future__ import annotations

from millrace.spark.source import MillraceSource as DefaultSource

__all__ = ["DefaultSource"]
