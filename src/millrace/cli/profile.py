"""`millrace profile`: clusters under names, instead of `--bootstrap` and `--client` with every command.

Here are the commands; the file, and how other commands come by a profile, are in `profiles`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.cli.options import Client, Json, Yes, confirm, name_values
from millrace.cli.output import HIDDEN, CommandError, print_json, print_table
from millrace.cli.profiles import Profile, Profiles, profiles_path, read_profiles, write_profiles
from millrace.security.hiding import is_secret

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Keep addresses and logins of clusters under names.")

Name = Annotated[str, typer.Argument(show_default=False, help="The profile.")]


@app.command("list", epilog="Example: millrace profile list")
def list_profiles(*, as_json: Json = False) -> None:
    """List the profiles; the one in use has a star."""
    profiles = read_profiles()
    told = [
        {"profile": name, "in_use": name == profiles.current, "bootstrap": one.bootstrap, "settings": len(one.client)}
        for name, one in sorted(profiles.profiles.items())
    ]
    if as_json:
        print_json(told)
    elif told:
        rows = [["*" if one["in_use"] else "", one["profile"], one["bootstrap"], one["settings"]] for one in told]
        print_table(["", "profile", "bootstrap", "settings"], rows)
    else:
        print(f"there are no profiles in {profiles_path()}")


@app.command(epilog="Example: millrace profile show production")
def show(
    name: Annotated[str | None, typer.Argument(show_default="the one in use", help="The profile.")] = None,
    *,
    secrets: Annotated[bool, typer.Option("--secrets", help="Show passwords as they are.")] = False,
    as_json: Json = False,
) -> None:
    """Show a profile."""
    profiles = read_profiles()
    wanted = name or profiles.current
    if wanted is None:
        raise CommandError("no profile is in use; name one, or say which with: millrace profile use NAME")
    told = describe(profiles.named(wanted), secrets=secrets)
    if as_json:
        print_json(told)
        return
    print(f"{told['profile']}{'  (in use)' if wanted == profiles.current else ''}  {profiles_path()}")
    rows = [["bootstrap", told["bootstrap"]], *(list(pair) for pair in told["client"].items())]
    print_table(["setting", "value"], rows)


def describe(profile: Profile, *, secrets: bool) -> dict[str, Any]:
    """A profile as it is shown."""
    client = {key: value if secrets or not is_secret(key) else HIDDEN for key, value in sorted(profile.client.items())}
    return {"profile": profile.name, "bootstrap": profile.bootstrap, "client": client}


@app.command(
    "set",
    epilog="Examples: `millrace profile set production -b broker1:9092 -X security.protocol=SSL`, then "
    "`millrace profile use production`, or `millrace topics list --profile production`; "
    "`millrace profile set admin --from millrace-data/security/admin.json`",
)
def set_profile(
    name: Name,
    *,
    address: Annotated[
        str | None, typer.Option("--bootstrap", "-b", metavar="HOST:PORT,...", help="Where the cluster answers.")
    ] = None,
    client: Client = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Client settings from a file, JSON or NAME=VALUE lines: passwords do not belong on a command line.",
        ),
    ] = None,
) -> None:
    """Make a profile, or change what is named in one; the rest of it stays."""
    filed = {} if source is None else read_settings(source)
    address = address or filed.pop("bootstrap.servers", None)
    settings = {**filed, **name_values(client, "-X")}  # of this profile, and not of the one in use
    if address is None and not settings:
        raise CommandError(
            "nothing to set: give --bootstrap HOST:PORT, --client NAME=VALUE or --from FILE", exit_code=2
        )
    profiles = read_profiles()
    known = profiles.profiles.get(name, Profile(name))
    changed = replace(known, bootstrap=address or known.bootstrap, client={**known.client, **settings})
    write_profiles(replace(profiles, profiles={**profiles.profiles, name: changed}))
    print(f"{'changed' if name in profiles.profiles else 'created'} profile {name}")


def read_settings(path: Path) -> dict[str, str]:
    """Settings of a client, as librdkafka names them, from a file."""
    from millrace.config.files import parse_properties

    try:
        text = path.read_text()
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CommandError(f"{path}: not text in UTF-8") from None
    try:
        found = json.loads(text) if path.suffix == ".json" else parse_properties(text)
    except ValueError as error:
        raise CommandError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise CommandError(f"{path} is not an object of names and values")
    if "sasl.jaas.config" in found:
        raise CommandError(f"{path} is for Java (sasl.jaas.config): commands want sasl.username and sasl.password")
    return {str(name): str(value) for name, value in found.items()}


@app.command(epilog="Examples: `millrace profile use production`; `millrace profile use --none`")
def use(
    name: Annotated[str | None, typer.Argument(show_default=False, help="The profile.")] = None,
    *,
    none: Annotated[bool, typer.Option("--none", help="Use no profile.")] = False,
) -> None:
    """Say which profile commands use that name none."""
    if (name is None) != none:
        raise CommandError("name a profile, or say --none", exit_code=2)
    profiles = read_profiles()
    write_profiles(replace(profiles, current=None if name is None else profiles.named(name).name))
    print("no profile is in use" if name is None else f"profile {name} is in use")


@app.command(epilog="Examples: `millrace profile unset production sasl.password`; `millrace profile unset old --yes`")
def unset(
    name: Name,
    settings: Annotated[
        list[str] | None, typer.Argument(show_default=False, help="Settings of it; the whole profile unless given.")
    ] = None,
    *,
    yes: Yes = False,
) -> None:
    """Remove settings from a profile, or the whole profile."""
    profiles = read_profiles()
    known = profiles.named(name)
    if not settings:
        confirm(f"Remove profile {name}?", yes=yes)
        left = {each: one for each, one in profiles.profiles.items() if each != name}
        write_profiles(Profiles(left, None if profiles.current == name else profiles.current))
        print(f"removed profile {name}")
        return
    for setting in settings:
        if setting not in {*known.client, *(["bootstrap"] if known.bootstrap else [])}:
            raise CommandError(f"profile {name} has no setting '{setting}'")
    changed = Profile(
        name,
        None if "bootstrap" in settings else known.bootstrap,
        {key: value for key, value in known.client.items() if key not in settings},
    )
    write_profiles(replace(profiles, profiles={**profiles.profiles, name: changed}))
    print(f"removed {', '.join(settings)} from profile {name}")
