"""`millrace users`: who can log in with a password (SCRAM); list, add and remove them, and change passwords.

A password is never an argument, where every process of the machine could read it: it is asked for, read from a file or
stdin, or generated. What goes to the broker is a salted hash of it, which is still enough to log in: use TLS.

Brokers that log in to each other need their own user before the first of them starts: with `--offline` a user is
written into the metadata that a broker's settings name, while no broker runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Protocol

import typer

from millrace.admin.users import (
    DEFAULT_ITERATIONS,
    DEFAULT_MECHANISM,
    MAX_ITERATIONS,
    MECHANISMS,
    MIN_ITERATIONS,
    ClusterUsers,
    generated_password,
)
from millrace.cli.choices import exclude
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, Yes, confirm, name_values
from millrace.cli.output import CommandError, print_json, print_remark, print_table

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Say who can log in with a password (SCRAM).")


def _in_utf8(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CommandError("the name of the user is not text in UTF-8", exit_code=2) from None
    return name


Name = Annotated[str, typer.Argument(metavar="USER", show_default=False, callback=_in_utf8, help="The user.")]
Mechanism = Annotated[
    list[str] | None,
    typer.Option("--mechanism", "-m", metavar="|".join(MECHANISMS), show_default=False, help="How it logs in."),
]
Iterations = Annotated[
    int | None,
    typer.Option("--iterations", min=MIN_ITERATIONS, max=MAX_ITERATIONS, help="What guessing a password costs."),
]
PasswordFile = Annotated[
    Path | None,
    typer.Option("--password-file", metavar="FILE", help="Read the password from the first line of a file."),
]
Generate = Annotated[bool, typer.Option("--generate", help="Make a password and print it.")]
Offline = Annotated[
    bool,
    typer.Option(
        "--offline", help="Without a broker, before the first one starts: in the metadata that --config names."
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="With --offline: a broker's properties file."),
]


@app.command("list", epilog="Examples: `millrace users list`, `millrace users list alice --json`")
def list_users(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="USER...", show_default=False, help="Only these; all unless given.")
    ] = None,
    *,
    offline: Offline = False,
    config: Config = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """List users and the mechanisms by which they can log in."""
    with _open(offline, config, bootstrap, client) as kept:
        users = {name: kept.mechanisms(name) for name in dict.fromkeys(names)} if names else kept.everybody()
    for name, found in users.items():
        if not found:
            raise CommandError(f"there is no user '{name}'")
    told = [
        {"user": name, "mechanism": label, "iterations": iterations}
        for name, found in sorted(users.items())
        for label, iterations in sorted(found.items())
    ]
    if as_json:
        print_json(told)
    elif told:
        print_table(["user", "mechanism", "iterations"], [tuple(one.values()) for one in told])
    else:
        print_remark("there are no users")


@app.command(
    epilog="Examples: `millrace users add alice`, `millrace users add app --generate`, "
    "`millrace users add app --mechanism SCRAM-SHA-256 --password-file /run/secrets/app`; "
    "`millrace users add broker --offline --config server.properties --password-file /run/secrets/broker`"
)
def add(
    name: Name,
    *,
    mechanism: Mechanism = None,
    iterations: Iterations = None,
    password_file: PasswordFile = None,
    generate: Generate = False,
    offline: Offline = False,
    config: Config = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Add a user, or another mechanism to one; SCRAM-SHA-512 unless said otherwise."""
    wanted = _chosen(mechanism) or [DEFAULT_MECHANISM]
    exclude(("--password-file", password_file), ("--generate", generate), "the password is known or made")
    with _open(offline, config, bootstrap, client) as kept:
        known = kept.mechanisms(name)
        for label in wanted:
            if label in known:
                text = f"user '{name}' has a password for {label}; change it with: millrace users passwd {name}"
                raise CommandError(text)
        credentials = dict.fromkeys(wanted, iterations or DEFAULT_ITERATIONS)
        _set_password(kept, name, credentials, password_file, generate, result="added", as_json=as_json)


@app.command(epilog="Examples: `millrace users passwd alice`, `millrace users passwd app --generate`")
def passwd(
    name: Name,
    *,
    mechanism: Mechanism = None,
    iterations: Iterations = None,
    password_file: PasswordFile = None,
    generate: Generate = False,
    offline: Offline = False,
    config: Config = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Change a user's password, for every mechanism it has unless one is named. Open connections stay."""
    exclude(("--password-file", password_file), ("--generate", generate), "the password is known or made")
    with _open(offline, config, bootstrap, client) as kept:
        known = _known_mechanisms(kept, name, mechanism)
        credentials = {label: iterations or before for label, before in known.items()}
        _set_password(kept, name, credentials, password_file, generate, result="changed", as_json=as_json)


@app.command(epilog="Examples: `millrace users remove alice`, `millrace users remove app -m SCRAM-SHA-256 --yes`")
def remove(
    name: Name,
    *,
    mechanism: Mechanism = None,
    yes: Yes = False,
    offline: Offline = False,
    config: Config = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Take a user's password away, for every mechanism unless one is named; its rules of access stay."""
    with _open(offline, config, bootstrap, client) as kept:
        known = _known_mechanisms(kept, name, mechanism)
        confirm(f"Remove {name} ({', '.join(known)})?", yes=yes)
        kept.remove(name, list(known))
        _report(name, known, result="removed", as_json=as_json)


@contextmanager
def _open(offline: bool, config: Path | None, bootstrap: str, client: list[str] | None) -> Iterator[UsersOf]:
    """Where the users are kept, as the options say."""
    if not offline and config is None:
        from millrace.cli.queue_consume import open_client

        with open_client(bootstrap, name_values(client, "--client")) as cluster:
            yield ClusterUsers(cluster)
        return
    if config is None or not offline:
        raise CommandError("--offline and --config FILE belong together", exit_code=2)
    from millrace.cli.offline_users import OfflineUsers

    yield OfflineUsers(config)


def _set_password(
    kept: UsersOf,
    name: str,
    credentials: Mapping[str, int],
    password_file: Path | None,
    generate: bool,
    *,
    result: str,
    as_json: bool,
) -> None:
    password = generated_password() if generate else _read_password(name, password_file)
    kept.set_password(name, credentials, password)
    _report(name, credentials, result=result, as_json=as_json, password=password if generate else None)


def _report(
    name: str, credentials: Mapping[str, int], *, result: str, as_json: bool, password: str | None = None
) -> None:
    if as_json:
        made = {} if password is None else {"password": password}
        print_json([{"user": name, "mechanism": label, "result": result, **made} for label in credentials])
        return
    print(f"{result} {name} ({', '.join(credentials)})")
    if password is not None:
        print(f"password: {password}")


def _read_password(name: str, path: Path | None) -> str:
    """From the file, from a pipe, or, asked for twice and not shown, from the person at the terminal."""
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise CommandError(f"{path}: not text in UTF-8") from None
    elif sys.stdin.isatty():
        text = typer.prompt(f"Password of {name}", hide_input=True, confirmation_prompt=True, err=True)
    else:
        text = sys.stdin.readline()
    password: str = text.partition("\n")[0].rstrip("\r")
    if not password:
        raise CommandError("the password is empty")
    return password


def _chosen(mechanisms: Iterable[str] | None) -> list[str]:
    labels = [each.upper().replace("_", "-") for each in mechanisms or ()]
    for label in labels:
        if label not in MECHANISMS:
            raise CommandError(f"--mechanism is {' or '.join(MECHANISMS)}, not '{label}'", exit_code=2)
    return list(dict.fromkeys(labels))


def _known_mechanisms(kept: UsersOf, name: str, mechanisms: Iterable[str] | None) -> dict[str, int]:
    """Those of a user that were chosen, or all, and the iterations of each; CommandError where it has none."""
    chosen = _chosen(mechanisms)
    known = kept.mechanisms(name)
    if not known:
        raise CommandError(f"there is no user '{name}'; add it with: millrace users add {name}")
    for label in chosen:
        if label not in known:
            raise CommandError(f"user '{name}' has no password for {label}, only for {', '.join(known)}")
    return {label: known[label] for label in chosen or known}


# --- where users are kept ---------------------------------------------------------------------------------------------


class UsersOf(Protocol):
    """The users of a cluster. Mechanisms are named by their labels, each with its iterations."""

    def mechanisms(self, name: str) -> dict[str, int]:
        """Of one user; nothing where there is no such user."""

    def everybody(self) -> dict[str, dict[str, int]]: ...

    def set_password(self, name: str, credentials: Mapping[str, int], password: str) -> None: ...

    def remove(self, name: str, labels: Iterable[str]) -> None: ...
