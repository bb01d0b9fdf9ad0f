"""What an API needs of its caller: declared with it in the registry, asked for in one place.

A declaration has two parts. `whole` is asked by dispatch before the handler runs: without it the request as a whole is
refused. `judged` lists what the handler asks for item by item, with `RequestContext.rights`, `may` or `demand`: a right
that is not listed there cannot be asked for, and an answer whose handler asked for none of them does not leave. So a
handler cannot forget what it declares, and an API cannot be served that declares nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millrace.errors import ErrorCode
from millrace.security.acls import Operation, ResourceKind

Right = tuple[Operation, ResourceKind]

CODES: Final = {
    ResourceKind.TOPIC: ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ResourceKind.GROUP: ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ResourceKind.CLUSTER: ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ResourceKind.TRANSACTIONAL_ID: ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    ResourceKind.DELEGATION_TOKEN: ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
    ResourceKind.USER: ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
}
"""What somebody is answered who may not."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What one API needs."""

    whole: Operation | None = None
    """On the cluster, before anything else."""
    judged: frozenset[Right] = frozenset()

    def __str__(self) -> str:
        parts = [] if self.whole is None else [f"{self.whole.name} on {ResourceKind.CLUSTER.name}"]
        parts += sorted(f"{operation.name} on {kind.name}" for operation, kind in self.judged)
        return ", ".join(parts) or "nothing"


READ_TOPIC: Final[Right] = (Operation.READ, ResourceKind.TOPIC)
WRITE_TOPIC: Final[Right] = (Operation.WRITE, ResourceKind.TOPIC)
CREATE_TOPIC: Final[Right] = (Operation.CREATE, ResourceKind.TOPIC)
DELETE_TOPIC: Final[Right] = (Operation.DELETE, ResourceKind.TOPIC)
ALTER_TOPIC: Final[Right] = (Operation.ALTER, ResourceKind.TOPIC)
DESCRIBE_TOPIC: Final[Right] = (Operation.DESCRIBE, ResourceKind.TOPIC)
DESCRIBE_TOPIC_CONFIGS: Final[Right] = (Operation.DESCRIBE_CONFIGS, ResourceKind.TOPIC)
ALTER_TOPIC_CONFIGS: Final[Right] = (Operation.ALTER_CONFIGS, ResourceKind.TOPIC)
READ_GROUP: Final[Right] = (Operation.READ, ResourceKind.GROUP)
DELETE_GROUP: Final[Right] = (Operation.DELETE, ResourceKind.GROUP)
DESCRIBE_GROUP: Final[Right] = (Operation.DESCRIBE, ResourceKind.GROUP)
DESCRIBE_GROUP_CONFIGS: Final[Right] = (Operation.DESCRIBE_CONFIGS, ResourceKind.GROUP)
ALTER_GROUP_CONFIGS: Final[Right] = (Operation.ALTER_CONFIGS, ResourceKind.GROUP)
WRITE_TRANSACTIONAL_ID: Final[Right] = (Operation.WRITE, ResourceKind.TRANSACTIONAL_ID)
DESCRIBE_TRANSACTIONAL_ID: Final[Right] = (Operation.DESCRIBE, ResourceKind.TRANSACTIONAL_ID)
CREATE_CLUSTER: Final[Right] = (Operation.CREATE, ResourceKind.CLUSTER)
DELETE_CLUSTER: Final[Right] = (Operation.DELETE, ResourceKind.CLUSTER)
ALTER_CLUSTER: Final[Right] = (Operation.ALTER, ResourceKind.CLUSTER)
DESCRIBE_CLUSTER: Final[Right] = (Operation.DESCRIBE, ResourceKind.CLUSTER)
CLUSTER_ACTION: Final[Right] = (Operation.CLUSTER_ACTION, ResourceKind.CLUSTER)
IDEMPOTENT_WRITE: Final[Right] = (Operation.IDEMPOTENT_WRITE, ResourceKind.CLUSTER)
DESCRIBE_CLUSTER_CONFIGS: Final[Right] = (Operation.DESCRIBE_CONFIGS, ResourceKind.CLUSTER)
ALTER_CLUSTER_CONFIGS: Final[Right] = (Operation.ALTER_CONFIGS, ResourceKind.CLUSTER)
CREATE_USER_TOKENS: Final[Right] = (Operation.CREATE_TOKENS, ResourceKind.USER)
DESCRIBE_USER_TOKENS: Final[Right] = (Operation.DESCRIBE_TOKENS, ResourceKind.USER)
DESCRIBE_TOKEN: Final[Right] = (Operation.DESCRIBE, ResourceKind.DELEGATION_TOKEN)

NOTHING: Final = Needs()
"""Everybody may ask: to log in, or for what is one's own."""


def cluster(operation: Operation) -> Needs:
    """A right on the cluster, without which the whole request is refused."""
    return Needs(whole=operation)


def judged(*rights: Right) -> Needs:
    """Rights that the handler asks for, item by item."""
    return Needs(judged=frozenset(rights))


OF_BROKERS: Final = cluster(Operation.CLUSTER_ACTION)
"""What only brokers ask."""
