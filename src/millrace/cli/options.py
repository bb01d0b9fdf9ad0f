"""Options that several commands share, declared once so that they read the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import typer

from millrace.cli.output import CommandError
from millrace.cli.profiles import note_address, profile_settings
from millrace.local import DEFAULT_FOLDER

Bootstrap = Annotated[
    str,
    typer.Option(
        "--bootstrap",
        "-b",
        envvar="MILLRACE_BOOTSTRAP",
        metavar="HOST:PORT,...",
        callback=note_address,
        help="Where the cluster answers.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Client = Annotated[
    list[str] | None,
    typer.Option("--client", "-X", metavar="NAME=VALUE", help="A librdkafka setting, repeatable (security, timeouts)."),
]
Data = Annotated[Path, typer.Option("--data", "-d", help="The folder in which `millrace up` keeps everything.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

DEFAULT_BOOTSTRAP = "localhost:9092"
DEFAULT_DATA: Final = Path(DEFAULT_FOLDER)


CLIENT_OPTION: Final = "--client"


def name_values(pairs: Iterable[str] | None, option: str) -> dict[str, str]:
    """`["a=1", "b=x=y"]` as `{"a": "1", "b": "x=y"}`; what the profile in use has for `--client` comes first."""
    settings = profile_settings() if option == CLIENT_OPTION else {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise CommandError(f"{option} wants name=value, not '{pair}'", exit_code=2)
        settings[name.strip()] = value.strip()
    return settings


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is lost. A script (no terminal on stdin) has to say --yes."""
    if yes:
        return
    import sys

    if not sys.stdin.isatty():
        raise CommandError(f"{question.rstrip('?')}: say --yes to go ahead without being asked")
    typer.confirm(question, abort=True, err=True)
