"""millrace: a publish-subscribe log that speaks Apache Kafka's wire protocol.

For programs to build on: `millrace.testing` and its pytest fixture, `millrace.spark.session`, `millrace.spark.sinks`,
and for pipelines `millrace.spark.pipelines.fields`; docs/api.md has the names. Everything else is private.

Nothing is imported here, so that `import millrace.testing` or a command pays only for what it uses. The map of the
package is in ARCHITECTURE.md.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
