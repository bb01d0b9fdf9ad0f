"""`millrace quotas`: how much users, client ids and addresses may use, shown and changed.

The cluster decides what an entity may have (`cluster.quotas`), so all of this works against Apache Kafka, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final

import typer

from millrace.admin.quotas import KEYS, KINDS, Parts, alter_quotas, describe_quotas
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, Yes, confirm, name_values
from millrace.cli.output import CommandError, print_json, print_table, size_text
from millrace.cli.queue_consume import open_client
from millrace.security.quotas import (
    CLIENT_ID,
    CONNECTION_CREATION_RATE,
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    IP,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    USER,
)

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Show and change what users, clients and addresses may use."
)

_BYTES: Final = frozenset({PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE})
_DEFAULT: Final = "(default)"
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kKMGT]?)(i?)[bB])?(?:/s)?\s*\Z")
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

User = Annotated[str | None, typer.Option("--user", metavar="NAME", help="A user.")]
ClientId = Annotated[str | None, typer.Option("--client-id", metavar="ID", help="A client id.")]
Address = Annotated[str | None, typer.Option("--ip", metavar="ADDRESS", help="An address.")]
AnyUser = Annotated[bool, typer.Option("--default-user", help="Every user without a quota of its own.")]
AnyClientId = Annotated[bool, typer.Option("--default-client-id", help="Every client id without a quota of its own.")]
AnyAddress = Annotated[bool, typer.Option("--default-ip", help="Every address without a quota of its own.")]


@app.command("list", epilog="Examples: `millrace quotas list` or `millrace quotas list --user alice --json`")
def list_(
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    user: User = None,
    client_id: ClientId = None,
    ip: Address = None,
    default_user: AnyUser = False,
    default_client_id: AnyClientId = False,
    default_ip: AnyAddress = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """List quotas: all of them, or those that name a user, client id or address."""
    parts = _parts(user, client_id, ip, default_user, default_client_id, default_ip)
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        found = describe_quotas(cluster, parts, strict=False)
    if as_json:
        print_json([{"entity": entity, "quotas": values} for entity, values in found])
        return
    print_table(
        [name.replace("_", " ") for name in (*KINDS, *KEYS)],
        [
            [
                *(_DEFAULT if kind in entity and entity[kind] is None else entity.get(kind) for kind in KINDS),
                *(_shown(key, values.get(key)) for key in KEYS),
            ]
            for entity, values in found
        ],
    )


@app.command(
    "set",
    epilog="Examples: `millrace quotas set --user alice --producer-byte-rate 10MB` or "
    "`millrace quotas set --default-user --client-id importer --request-percentage 20`",
)
def set_(
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    user: User = None,
    client_id: ClientId = None,
    ip: Address = None,
    default_user: AnyUser = False,
    default_client_id: AnyClientId = False,
    default_ip: AnyAddress = False,
    producer_byte_rate: Annotated[
        str | None, typer.Option("--producer-byte-rate", metavar="SIZE", help="Produced per second, such as 10MB.")
    ] = None,
    consumer_byte_rate: Annotated[
        str | None, typer.Option("--consumer-byte-rate", metavar="SIZE", help="Fetched per second, such as 10MB.")
    ] = None,
    request_percentage: Annotated[
        float | None, typer.Option("--request-percentage", help="Share of a broker's time; 100 is all of one thread.")
    ] = None,
    controller_mutation_rate: Annotated[
        float | None, typer.Option("--controller-mutation-rate", help="Partitions created and deleted per second.")
    ] = None,
    connection_creation_rate: Annotated[
        float | None, typer.Option("--connection-creation-rate", help="New connections per second; for addresses.")
    ] = None,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Set quotas of one entity; those that are not named stay as they are. They hold on each broker by itself."""
    parts = _require_parts(_parts(user, client_id, ip, default_user, default_client_id, default_ip))
    values = {
        key: value
        for key, value in {
            PRODUCER_BYTE_RATE: None if producer_byte_rate is None else parse_size(producer_byte_rate),
            CONSUMER_BYTE_RATE: None if consumer_byte_rate is None else parse_size(consumer_byte_rate),
            REQUEST_PERCENTAGE: request_percentage,
            CONTROLLER_MUTATION_RATE: controller_mutation_rate,
            CONNECTION_CREATION_RATE: connection_creation_rate,
        }.items()
        if value is not None
    }
    if not values:
        raise CommandError("say what to set, such as --producer-byte-rate 10MB", exit_code=2)
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        alter_quotas(cluster, parts, values)
    _print_done("set", parts, values, as_json=as_json)


@app.command(
    epilog="Examples: `millrace quotas remove --user alice` or "
    "`millrace quotas remove --default-client-id --key consumer_byte_rate --yes`"
)
def remove(
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    user: User = None,
    client_id: ClientId = None,
    ip: Address = None,
    default_user: AnyUser = False,
    default_client_id: AnyClientId = False,
    default_ip: AnyAddress = False,
    keys: Annotated[
        list[str] | None, typer.Option("--key", metavar="QUOTA", help="Only this quota, repeatable; all unless given.")
    ] = None,
    yes: Yes = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Remove quotas of one entity; what holds for it then is the next quota that fits."""
    parts = _require_parts(_parts(user, client_id, ip, default_user, default_client_id, default_ip))
    chosen = [key.replace("-", "_") for key in keys or ()]
    for key in chosen:
        if key not in KEYS:
            raise CommandError(f"--key is one of {', '.join(KEYS)}, not '{key}'", exit_code=2)
    with open_client(bootstrap, name_values(client, "--client")) as cluster:
        there = next((values for entity, values in describe_quotas(cluster, parts, strict=True)), {})
        missing = [key for key in chosen if key not in there]
        if missing or not there:
            what = missing[0] if missing else "quota"
            raise CommandError(f"{_named(parts)} has no {what}; see: millrace quotas list")
        gone: dict[str, float | None] = dict.fromkeys(chosen or there)
        confirm(f"Remove {', '.join(gone)} of {_named(parts)}?", yes=yes)
        alter_quotas(cluster, parts, gone)
    _print_done("removed", parts, gone, as_json=as_json)


def parse_size(text: str) -> float:
    """Bytes from `500000`, `10MB` or `1.5 MiB`."""
    found = _SIZE.match(text)
    if found is None:
        raise CommandError(f"'{text}' is no size: use 500000, 500kB, 10MB or 1GiB", exit_code=2)
    number, unit, binary = found.groups()
    base = 1024 if binary else 1000
    return float(round(float(number) * base ** _POWERS[(unit or "").lower()]))


def _parts(
    user: str | None, client_id: str | None, ip: str | None, any_user: bool, any_client_id: bool, any_address: bool
) -> Parts:
    """The entity that the options name; None stands for the default."""
    parts: Parts = {}
    for kind, name, default in ((USER, user, any_user), (CLIENT_ID, client_id, any_client_id), (IP, ip, any_address)):
        if name is not None and default:
            raise CommandError(f"give either --{kind} or --default-{kind}", exit_code=2)
        if name is not None or default:
            parts[kind] = name
    if IP in parts and len(parts) > 1:
        raise CommandError("an address cannot be combined with a user or a client id", exit_code=2)
    return parts


def _require_parts(parts: Parts) -> Parts:
    if not parts:
        raise CommandError("say for whom: --user, --client-id, --ip, or the --default-... of one", exit_code=2)
    return parts


def _named(parts: Parts) -> str:
    return ", ".join(f"default {kind}" if name is None else f"{kind} '{name}'" for kind, name in parts.items())


def _shown(key: str, value: float | None) -> str | None:
    if value is None:
        return None
    return f"{size_text(value)}/s" if key in _BYTES else f"{value:g}"


def _print_done(verb: str, parts: Parts, values: Mapping[str, float | None], *, as_json: bool) -> None:
    if as_json:
        print_json({"entity": parts, "result": verb, "quotas": dict(values)})
        return
    what = ", ".join(key if value is None else f"{key}={_shown(key, value)}" for key, value in values.items())
    print(f"{verb} {what} for {_named(parts)}")
