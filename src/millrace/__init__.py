"""millrace: a publish-subscribe log that speaks Apache Kafka's wire protocol.

Nothing is imported here, so that `import millrace.testing` or a command pays only for what it uses. The map of the
package is in ARCHITECTURE.md.
"""

from __future__ import annotations

__version__ = "0.1.0"
