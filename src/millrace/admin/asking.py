"""One attempt at a question that any broker can answer, or that only one can: for people who wait for the answer.

`ClusterClient` has patience for what passes by itself; here whoever does not answer is left out, and told.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from millrace.admin.errors import AdminError, Unreachable
from millrace.client.cluster import ClusterClient
from millrace.client.versions import known_code
from millrace.errors import ApiError, ErrorCode
from millrace.wire.schema import Request

_NOBODY_THERE: Final = frozenset({ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT})


def ask(cluster: ClusterClient, message: Request) -> Any:
    """The answer of the first broker that gives one; Unreachable where none does.

    Any broker will do: each knows the metadata, and passes changes on to the controller.
    """
    with _telling():
        return cluster.ask_first(message)


def newest_version(cluster: ClusterClient, wanted: type[Request]) -> int:
    """The newest version of a request that both sides know; Unreachable where nobody answers."""
    with _telling():
        return cluster.newest_version(wanted)


@contextmanager
def _telling() -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        if error.code not in _NOBODY_THERE:
            raise
        raise Unreachable(f"no broker answers ({error.message})") from error


def ask_broker(cluster: ClusterClient, node: int, message: Request, version: int | None = None) -> Any:
    """The answer of one broker, for what only it can tell; ApiError where it does not answer.

    `version` is for what brokers do not name in ApiVersions.
    """
    connection = cluster.connection(node)
    return cluster.ask(connection, message) if version is None else connection.request(message, version)


def check(code: int, what: str, text: str | None = None) -> None:
    """Raise what an error code in an answer means; 0 means nothing."""
    if code:
        name = known_code(code).name
        raise AdminError(f"{what}: {text} ({name})" if text else f"{what}: {name}")
