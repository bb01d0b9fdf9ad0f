"""DescribeUserScramCredentials and AlterUserScramCredentials: who may log in by SCRAM (KIP-554).

What may change is in `cluster.users`. Neither request nor answer has a password, and no answer a key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from millrace.cluster.image import ClusterImage
from millrace.cluster.users import CredentialRemoval, NewCredential, plan_users
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.context import RequestContext
from millrace.handlers.forwarding import on_controller
from millrace.handlers.needs import cluster
from millrace.handlers.registry import api
from millrace.security.acls import Operation
from millrace.security.scram import ScramMechanism, Users
from millrace.wire.keys import ApiKey
from millrace.wire.messages.scram import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
)

_Described = DescribeUserScramCredentialsResponse.DescribeUserScramCredentialsResult
_Altered = AlterUserScramCredentialsResponse.AlterUserScramCredentialsResult


@api(
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
    DescribeUserScramCredentialsRequest,
    "0",
    needs=cluster(Operation.DESCRIBE),
)
def describe_user_scram_credentials(
    context: RequestContext, request: DescribeUserScramCredentialsRequest
) -> DescribeUserScramCredentialsResponse:
    """Mechanisms and iterations of the named users, or of all who have a credential.

    RESOURCE_NOT_FOUND for a user without one, DUPLICATE_RESOURCE for one who is named twice.
    """
    users = context.broker.image.users
    if not request.users:
        names = Counter(sorted({name for name, _ in users}))
    else:
        names = Counter(user.name for user in request.users)
    return DescribeUserScramCredentialsResponse(
        error_message=None, results=[_described(users, name, times) for name, times in names.items()]
    )


def _described(users: Users, name: str, times: int) -> _Described:
    result = _Described(user=name, error_message=None)
    if times > 1:
        result.error_code = ErrorCode.DUPLICATE_RESOURCE
        text = "Cannot describe SCRAM credentials for the same user twice in a single request: "
        result.error_message = text + name
        return result
    result.credential_infos = [
        DescribeUserScramCredentialsResponse.CredentialInfo(mechanism=mechanism, iterations=credential.iterations)
        for mechanism in ScramMechanism
        if (credential := users.get((name, mechanism))) is not None
    ]
    if not result.credential_infos:
        result.error_code = ErrorCode.RESOURCE_NOT_FOUND
        result.error_message = f"Attempt to describe a user credential that does not exist: {name}"
    return result


def _alterations(request: AlterUserScramCredentialsRequest) -> list[CredentialRemoval | NewCredential]:
    return [
        *(CredentialRemoval(each.name, each.mechanism) for each in request.deletions),
        *(
            NewCredential(each.name, each.mechanism, each.iterations, bytes(each.salt), bytes(each.salted_password))
            for each in request.upsertions
        ),
    ]


def _refuse(
    _context: RequestContext, request: AlterUserScramCredentialsRequest, error: ApiError
) -> AlterUserScramCredentialsResponse:
    names = dict.fromkeys(each.user for each in _alterations(request))
    return AlterUserScramCredentialsResponse(
        results=[_Altered(user=name, error_code=error.code, error_message=error.message) for name in names]
    )


def _are_altered(
    request: AlterUserScramCredentialsRequest, response: AlterUserScramCredentialsResponse
) -> Callable[[ClusterImage], bool]:
    done = {result.user for result in response.results if not result.error_code}
    alterations = [each for each in _alterations(request) if each.user in done]

    def shows(image: ClusterImage, altered: CredentialRemoval | NewCredential) -> bool:
        credential = image.users.get((altered.user, ScramMechanism(altered.mechanism)))
        if isinstance(altered, CredentialRemoval):
            return credential is None
        return credential is not None and credential.salt == altered.salt

    return lambda image: all(shows(image, each) for each in alterations)


@api(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, AlterUserScramCredentialsRequest, "0", needs=cluster(Operation.ALTER))
@on_controller(_refuse, shown_when=_are_altered)
async def alter_user_scram_credentials(
    context: RequestContext, request: AlterUserScramCredentialsRequest
) -> AlterUserScramCredentialsResponse:
    """Set and remove credentials; each user by itself, at most one credential of a user.

    The client derives the salted password, with 4,096 to 16,384 iterations; what is kept cannot be used to log in. A
    connection that is logged in stays so: what changed counts at the next login.
    """
    alterations = _alterations(request)
    outcomes = await context.broker.controller.change(lambda image: plan_users(image, alterations))
    return AlterUserScramCredentialsResponse(
        results=[
            _Altered(user=name, error_code=ErrorCode.NONE, error_message=None)
            if error is None
            else _Altered(user=name, error_code=error.code, error_message=error.message)
            for name, error in outcomes.items()
        ]
    )
