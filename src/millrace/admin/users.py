"""Who can log in with a password (SCRAM), as a running cluster keeps it: read, added, changed and removed.

What goes to the broker is a salted hash of a password, which is still enough to log in: use TLS. Asked by the project's
own client: librdkafka (2.x) ends the process when it may not see users.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Final

from millrace.client.cluster import ClusterClient, raise_for
from millrace.errors import ErrorCode
from millrace.security.scram import SALT_BYTES, ScramMechanism, salted_password
from millrace.wire.messages.scram import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
)

MECHANISMS: Final = {each.label: each for each in ScramMechanism}
DEFAULT_MECHANISM: Final = ScramMechanism.SCRAM_SHA_512.label
MIN_ITERATIONS: Final = 4096
MAX_ITERATIONS: Final = 16384
"""Kafka's bounds."""
DEFAULT_ITERATIONS: Final = 8192
_GENERATED_BYTES: Final = 24


def generated_password() -> str:
    return secrets.token_urlsafe(_GENERATED_BYTES)


class ClusterUsers:
    """The users of a cluster that runs. Mechanisms are named by their labels, each with its iterations."""

    def __init__(self, cluster: ClusterClient) -> None:
        self._cluster = cluster

    def mechanisms(self, name: str) -> dict[str, int]:
        return self._described([name]).get(name, {})

    def everybody(self) -> dict[str, dict[str, int]]:
        return self._described(None)

    def set_password(self, name: str, credentials: Mapping[str, int], password: str) -> None:

        for label, iterations in credentials.items():
            salt = secrets.token_bytes(SALT_BYTES)
            salted = salted_password(MECHANISMS[label], password, salt, iterations)
            change = AlterUserScramCredentialsRequest.ScramCredentialUpsertion(
                name=name, mechanism=MECHANISMS[label], iterations=iterations, salt=salt, salted_password=salted
            )
            self._alter(AlterUserScramCredentialsRequest(upsertions=[change]))

    def remove(self, name: str, labels: Iterable[str]) -> None:

        for label in labels:
            self._alter(
                AlterUserScramCredentialsRequest(
                    deletions=[
                        AlterUserScramCredentialsRequest.ScramCredentialDeletion(name=name, mechanism=MECHANISMS[label])
                    ]
                )
            )

    def _described(self, names: list[str] | None) -> dict[str, dict[str, int]]:

        def read(answer: DescribeUserScramCredentialsResponse) -> dict[str, dict[str, int]]:
            raise_for(answer.error_code, answer.error_message)
            users: dict[str, dict[str, int]] = {}
            for each in answer.results:
                if each.error_code != ErrorCode.RESOURCE_NOT_FOUND:
                    raise_for(each.error_code, each.error_message)
                infos = sorted(each.credential_infos, key=lambda info: info.mechanism)
                users[each.user] = {ScramMechanism(info.mechanism).label: info.iterations for info in infos}
            return users

        asked = None if names is None else [DescribeUserScramCredentialsRequest.UserName(name=name) for name in names]
        return self._cluster.ask_any_broker("users", DescribeUserScramCredentialsRequest(users=asked), read)

    def _alter(self, message: AlterUserScramCredentialsRequest) -> None:
        """One by one: a request that changes a user twice is refused."""

        def read(answer: AlterUserScramCredentialsResponse) -> None:
            for each in answer.results:
                raise_for(each.error_code, each.error_message)

        self._cluster.ask_any_broker("users", message, read)
