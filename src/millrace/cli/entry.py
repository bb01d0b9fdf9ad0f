"""The door to a cluster: whether it lets a command in (`admin.entry`), in the words of the command line.

A command that only asks and does not wait opens the project's own client by `open_cluster`, which needs no look before:
whoever does not answer is told of in the same words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from millrace.admin import entry
from millrace.admin.errors import Unreachable
from millrace.cli.output import CommandError
from millrace.cli.profiles import unreachable_text
from millrace.client.cluster import ClusterClient
from millrace.client.settings import ClientSettings
from millrace.errors import ApiError, ErrorCode

CLIENT_ID: Final = "millrace-cli"


def require_entry(bootstrap: str, settings: Mapping[str, Any]) -> None:
    """Fail now, with a reason, where the broker does not let this client in, or the client does not trust it."""
    with _in_our_words(bootstrap):
        entry.require_entry(bootstrap, settings)


@contextmanager
def open_cluster(bootstrap: str, client: Mapping[str, str]) -> Iterator[ClusterClient]:
    """The project's own client, for questions that are asked once (`admin.asking`)."""
    properties = {"socket.connection.setup.timeout.ms": "5000", "client.id": CLIENT_ID, **client}
    settings = ClientSettings.from_properties({**properties, "bootstrap.servers": bootstrap})
    with _in_our_words(bootstrap), ClusterClient(settings) as cluster:
        try:
            yield cluster
        except Unreachable as error:
            cause = error.__cause__
            if isinstance(cause, ApiError) and cause.code is ErrorCode.NETWORK_EXCEPTION:
                entry.refuse_other_protocol(settings.bootstrap_servers[0], settings.security.protocol)
            raise


@contextmanager
def _in_our_words(bootstrap: str) -> Iterator[None]:
    try:
        yield
    except entry.NoAddress as error:
        raise CommandError(f"--bootstrap wants HOST:PORT, not '{error.text}'", exit_code=2) from None
    except Unreachable as error:
        raise CommandError(f"{error.reason}{unreachable_text(bootstrap)}") from error
    except entry.WrongProtocol as error:
        advice = "leave out security.protocol"
        if error.wanted != "PLAINTEXT":
            advice = (
                "name a --profile that has them (millrace profile set NAME --from FILE), "
                f"or give -X security.protocol={error.wanted} and {', '.join(error.settings)}"
            )
        raise CommandError(f"{error.reason}: {advice}") from None
