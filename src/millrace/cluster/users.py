"""Users and their SCRAM credentials: pure decisions about what a request would change.

As in Kafka, one request changes at most one credential of a user, and a user who is named twice fails as a whole.
Passwords never come here: clients send what they have derived from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import Plan
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import Change, ScramChanged
from millrace.security.scram import MAX_ITERATIONS, MIN_ITERATIONS, ScramMechanism, credential_of

MAX_NAME_BYTES: Final = 1024
MAX_SECRET_BYTES: Final = 1024
"""Of a salt and of a salted password: what is in the metadata log, and sent to whoever knows a name, stays small."""


@dataclass(frozen=True, slots=True)
class CredentialRemoval:
    """A credential that is to go; `mechanism` may be a number that is none."""

    user: str
    mechanism: int


@dataclass(frozen=True, slots=True)
class NewCredential:
    """A credential as a client derived it; `mechanism` may be a number that is none."""

    user: str
    mechanism: int
    iterations: int
    salt: bytes = field(repr=False)
    salted_password: bytes = field(repr=False)


UserOutcomes = dict[str, ApiError | None]
"""By user: what is wrong with what was asked for them."""


def plan_users(image: ClusterImage, alterations: Sequence[CredentialRemoval | NewCredential]) -> Plan[UserOutcomes]:
    """Set and remove credentials; an error or None per user, in the order in which they are named first."""
    named = Counter(each.user for each in alterations)
    outcomes: UserOutcomes = {}
    changes: list[Change] = []
    for each in alterations:
        try:
            if named[each.user] > 1:
                text = "A user credential cannot be altered twice in the same request"
                raise ApiError(ErrorCode.DUPLICATE_RESOURCE, text)
            changes.append(_change(image, each))
            outcomes[each.user] = None
        except ApiError as error:
            outcomes[each.user] = error
    return Plan(outcomes, tuple(changes))


def _change(image: ClusterImage, asked: CredentialRemoval | NewCredential) -> ScramChanged:
    if not asked.user:
        raise _unacceptable("Username must not be empty")
    if asked.mechanism not in ScramMechanism.__members__.values():
        raise ApiError(ErrorCode.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism")
    mechanism = ScramMechanism(asked.mechanism)
    if isinstance(asked, CredentialRemoval):
        if (asked.user, mechanism) not in image.users:
            text = "Attempt to delete a user credential that does not exist"
            raise ApiError(ErrorCode.RESOURCE_NOT_FOUND, text)
        return ScramChanged(asked.user, mechanism, None)
    if len(asked.user.encode()) > MAX_NAME_BYTES:
        raise _unacceptable(f"a user name has at most {MAX_NAME_BYTES} bytes")
    if asked.iterations < MIN_ITERATIONS:
        raise _unacceptable("Too few iterations")
    if asked.iterations > MAX_ITERATIONS:
        raise _unacceptable("Too many iterations")
    for secret in (asked.salt, asked.salted_password):
        if not 0 < len(secret) <= MAX_SECRET_BYTES:
            raise _unacceptable(f"salt and salted password have between 1 and {MAX_SECRET_BYTES} bytes")
    credential = credential_of(mechanism, asked.salted_password, asked.salt, asked.iterations)
    return ScramChanged(asked.user, mechanism, credential)


def _unacceptable(text: str) -> ApiError:
    return ApiError(ErrorCode.UNACCEPTABLE_CREDENTIAL, text)
