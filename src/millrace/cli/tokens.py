"""`millrace tokens`: passwords for a while, that somebody makes who has logged in (KIP-48).

Whoever has a token logs in by SCRAM as its owner until it expires, and needs no password of the owner's: good for jobs
that run on many machines. The HMAC of a token is its password. It is shown when the token is made and never again; the
other commands name a token by its id and have the broker tell them the HMAC, so that it is in no list of processes.

The project's own client, because librdkafka does not speak these APIs; any Kafka does.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final

import typer

from millrace.admin.tokens import (
    AT_ONCE,
    BY_SERVER,
    TokenView,
    create_token,
    describe_tokens,
    expire_token,
    renew_token,
    require_token,
)
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, Yes, confirm, name_values
from millrace.cli.output import print_json, print_remark, print_table
from millrace.cli.queue_consume import open_client
from millrace.cli.times import duration_text, iso_utc, parse_duration_ms
from millrace.clock import SystemClock

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Make, list, renew and end delegation tokens: passwords for a while, for jobs that should have none.",
)

_USER: Final = "User:"
_DEFAULT_MECHANISM: Final = "SCRAM-SHA-512"
_REMARK: Final = (
    "The HMAC is shown only now. The Java client, franz-go and millrace's own client (Spark, queues) log in by token; "
    "librdkafka, and with it confluent-kafka, cannot, nor can kafka-python and aiokafka."
)
TokenId = Annotated[str, typer.Argument(metavar="TOKEN_ID", show_default=False, help="The token (see list).")]


@app.command(
    epilog="Examples: `millrace tokens create --max-lifetime 2d` or "
    "`millrace tokens create --owner etl --renewer scheduler --json`"
)
def create(
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    owner: Annotated[
        str | None, typer.Option("--owner", metavar="USER", help="Whom it logs in; without it, you.")
    ] = None,
    renewers: Annotated[
        list[str] | None,
        typer.Option("--renewer", metavar="USER", help="Who else may renew and end it, repeatable."),
    ] = None,
    max_lifetime: Annotated[
        str | None,
        typer.Option("--max-lifetime", metavar="DURATION", help="Until when it can be renewed, such as 2d."),
    ] = None,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Make a token, and print its password and the settings of a client that uses it.

    For somebody else it needs the right CREATE_TOKENS on that user. The password cannot be had again.
    """
    settings = name_values(client, "--client")
    lifetime_ms = BY_SERVER if max_lifetime is None else parse_duration_ms(max_lifetime)
    with open_client(bootstrap, settings) as cluster:
        made = create_token(cluster, owner and _principal(owner), list(map(_principal, renewers or ())), lifetime_ms)
    login = client_properties(made, settings)
    if as_json:
        print_json({**_fields(made), "hmac": _password(made), "client_properties": login})
        return
    _print_tokens([made])
    print()
    print(f"hmac: {_password(made)}")
    print()
    for name, value in login.items():
        print(f"{name}={value}")
    print_remark(_REMARK)


@app.command("list", epilog="Examples: `millrace tokens list` or `millrace tokens list --owner etl --json`")
def list_(
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    owners: Annotated[
        list[str] | None,
        typer.Option("--owner", metavar="USER", help="Only those that this user has or may renew, repeatable."),
    ] = None,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """List the tokens that you have, may renew or may see."""
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        found = describe_tokens(cluster, list(map(_principal, owners)) if owners else None)
    if as_json:
        print_json([_fields(each) for each in found])
    else:
        _print_tokens(found)


@app.command(epilog="Example: millrace tokens renew 3mYtoAPPQ1Kk1yp4w0Fapw --for 12h")
def renew(
    token_id: TokenId,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    period: Annotated[
        str | None,
        typer.Option("--for", metavar="DURATION", help="How long from now on; without it, as long as allowed."),
    ] = None,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Have a token expire later, at most when it was made to end."""
    period_ms = BY_SERVER if period is None else parse_duration_ms(period)
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        expires_ms = renew_token(cluster, require_token(cluster, token_id), period_ms)
    _print_outcome(token_id, "renewed", expires_ms, as_json=as_json)


@app.command(
    epilog="Examples: `millrace tokens expire 3mYtoAPPQ1Kk1yp4w0Fapw --yes` or "
    "`millrace tokens expire 3mYtoAPPQ1Kk1yp4w0Fapw --in 1h`"
)
def expire(
    token_id: TokenId,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    period: Annotated[
        str | None, typer.Option("--in", metavar="DURATION", help="When it ends; without it, at once.")
    ] = None,
    yes: Yes = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """End a token, at once or in a while.

    Nobody logs in with it after that. Connections that have logged in before stay until it would have expired.
    """
    period_ms = AT_ONCE if period is None else parse_duration_ms(period)
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        token = require_token(cluster, token_id)
        if period is None:
            confirm(f"End token {token_id} of {token.owner} now?", yes=yes)
        expires_ms = expire_token(cluster, token, period_ms)
    _print_outcome(token_id, "ended" if period is None else "changed", expires_ms, as_json=as_json)


# --- showing ----------------------------------------------------------------------------------------------------------


def client_properties(token: TokenView, used: Mapping[str, str]) -> dict[str, str]:
    """The settings of a Java client that logs in by the token, where `used` are those of who made it."""
    mechanism = used.get("sasl.mechanism") or used.get("sasl.mechanisms") or ""
    return {
        "security.protocol": used.get("security.protocol", "SASL_SSL").upper(),
        "sasl.mechanism": mechanism if mechanism.startswith("SCRAM-") else _DEFAULT_MECHANISM,
        "sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required "
        f'username="{token.token_id}" password="{_password(token)}" tokenauth="true";',
    }


def _password(token: TokenView) -> str:
    return base64.b64encode(token.hmac).decode()


def _fields(token: TokenView) -> dict[str, Any]:
    return {
        "token_id": token.token_id,
        "owner": token.owner,
        "requester": token.requester,
        "renewers": list(token.renewers),
        "issued": iso_utc(token.issued_ms),
        "expires": iso_utc(token.expires_ms),
        "ends": iso_utc(token.max_ms),
    }


def _print_tokens(found: Collection[TokenView]) -> None:
    now_ms = SystemClock().wall_ms()
    rows = [
        (
            each.token_id,
            each.owner,
            None if each.requester == each.owner else each.requester,
            " ".join(each.renewers) or None,
            _left(each.expires_ms, now_ms),
            _left(each.max_ms, now_ms),
        )
        for each in found
    ]
    print_table(["token id", "owner", "requester", "renewers", "expires in", "ends in"], rows)


def _left(moment_ms: int, now_ms: int) -> str:
    return duration_text(moment_ms - now_ms) if moment_ms > now_ms else "over"


def _print_outcome(token_id: str, result: str, expires_ms: int, *, as_json: bool) -> None:
    if as_json:
        print_json({"token_id": token_id, "result": result, "expires": iso_utc(expires_ms)})
    elif result == "ended":
        print(f"ended token {token_id}")
    else:
        print(f"token {token_id} expires at {iso_utc(expires_ms)}")


def _principal(text: str) -> str:
    """`alice` and `User:alice` are the same."""
    return text if text.startswith(_USER) else _USER + text
