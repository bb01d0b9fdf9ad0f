"""Profiles: where a cluster answers and how to log in there, kept in a file under a name. Which one is in use now.

The file is `$MILLRACE_CONFIG`, or `~/.config/millrace/profiles.toml`. It may hold passwords, so only its owner can read
it:

    current = "production"

    [profiles.production]
    bootstrap = "broker1:9092,broker2:9092"

    [profiles.production.client]
    "security.protocol" = "SASL_SSL"

What counts is, in this order: an option, an environment variable, the profile, the default. A profile is named by
`--profile`, by `MILLRACE_PROFILE`, or it is the one in use (`current`). An address that was given by itself sends no
login of the profile in use there: that goes along only with its own address, or if the profile was named.

Every command that has `--bootstrap` gets `--profile` from here (`add_profile_option`), without knowing of it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.main import get_command

from millrace.cli.output import CommandError

CONFIG_VARIABLE: Final = "MILLRACE_CONFIG"
PROFILE_VARIABLE: Final = "MILLRACE_PROFILE"
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_GIVEN: Final = frozenset({"COMMANDLINE", "ENVIRONMENT"})


@dataclass(frozen=True, slots=True)
class Profile:
    """How to reach one cluster."""

    name: str
    bootstrap: str | None = None
    client: Mapping[str, str] = field(default_factory=dict)
    """librdkafka's settings."""


@dataclass(frozen=True, slots=True)
class Profiles:
    """What is in the file."""

    profiles: Mapping[str, Profile] = field(default_factory=dict)
    current: str | None = None

    def named(self, name: str) -> Profile:
        if name not in self.profiles:
            known = f"the profiles are {', '.join(sorted(self.profiles))}" if self.profiles else "there are none"
            raise CommandError(f"there is no profile '{name}' in {profiles_path()}; {known}", exit_code=2)
        return self.profiles[name]


@dataclass(frozen=True, slots=True)
class _InUse:
    profile: Profile
    was_named: bool


_in_use: ContextVar[_InUse | None] = ContextVar("profile in use", default=None)


def profile_in_use() -> Profile | None:
    """The profile that the running command takes what it was not told from."""
    found = _in_use.get()
    return None if found is None else found.profile


def profile_settings(prefix: str = "") -> dict[str, str]:
    """The client settings of the profile in use, each under a name that begins with `prefix`."""
    profile = profile_in_use()
    return {} if profile is None else {f"{prefix}{name}": value for name, value in profile.client.items()}


def unreachable_text(bootstrap: str) -> str:
    """What to say and do about an address where nobody answers: completes "no broker answers ..."."""
    profile = profile_in_use()
    if profile is not None and profile.bootstrap == bootstrap:
        return f"; the address is that of profile '{profile.name}' (see: millrace profile show {profile.name})"
    return "; start one with: millrace up"


# --- the options ------------------------------------------------------------------------------------------------------


def _choose(ctx: typer.Context, name: str | None) -> None:
    """Before the other options are looked at: what they are if nobody says."""
    _in_use.set(None)
    if ctx.resilient_parsing:
        return
    profiles = read_profiles()
    wanted = name or profiles.current
    if wanted is None:
        return
    profile = profiles.named(wanted)
    _in_use.set(_InUse(profile, name is not None))
    if profile.bootstrap is not None:
        ctx.default_map = {**(ctx.default_map or {}), "bootstrap": profile.bootstrap}


def note_address(ctx: typer.Context, bootstrap: str) -> str:
    """When the address is known: one that was given has nothing to do with the profile in use."""
    found, source = _in_use.get(), ctx.get_parameter_source("bootstrap")
    if found is not None and not found.was_named and source is not None and source.name in _GIVEN:
        _in_use.set(None)
    return bootstrap


_option_app: Final = typer.Typer(add_completion=False)


@_option_app.command()
def _carrier(
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            envvar=PROFILE_VARIABLE,
            metavar="NAME",
            is_eager=True,
            expose_value=False,
            callback=_choose,
            help="Where to connect and how to log in: see `millrace profile`.",
        ),
    ] = None,
) -> None:
    """Carries the option that commands are given; never run."""


_option: Final[Any] = get_command(_option_app).params[0]


def add_profile_option(command: Any) -> None:
    """Give `--profile` to a command, or to those below it, where there is an address to be had from it."""
    for each in getattr(command, "commands", {}).values():
        add_profile_option(each)
    if any(param.name == "bootstrap" for param in command.params) and _option not in command.params:
        command.params.append(_option)


# --- the file ---------------------------------------------------------------------------------------------------------


def profiles_path() -> Path:
    given = os.environ.get(CONFIG_VARIABLE)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "millrace" / "profiles.toml"


def read_profiles() -> Profiles:
    """What is in the file; nothing where there is none. CommandError where it cannot be read."""
    import tomllib

    path = profiles_path()
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        return _parse(content)
    except FileNotFoundError:
        return Profiles()
    except (OSError, ValueError, TypeError) as error:
        raise CommandError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _parse(content: Mapping[str, Any]) -> Profiles:
    _refuse_unknown("the file", content, {"current", "profiles"})
    profiles = {}
    for name, table in _table("profiles", content.get("profiles", {})).items():
        _refuse_unknown(f"profile '{name}'", table, {"bootstrap", "client"})
        client = {key: _text(value, key) for key, value in _table("client", table.get("client", {})).items()}
        bootstrap = table.get("bootstrap")
        profiles[name] = Profile(name, None if bootstrap is None else _text(bootstrap, "bootstrap"), client)
    current = content.get("current")
    return Profiles(profiles, None if current is None else _text(current, "current"))


def _table(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{what} is not a table")
    return value


def _refuse_unknown(what: str, table: Any, known: set[str]) -> None:
    if unknown := sorted(_table(what, table).keys() - known):
        raise ValueError(f"{what} has '{unknown[0]}', which means nothing; there are {', '.join(sorted(known))}")


def _text(value: Any, name: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise TypeError(f"{name} is not a text")
    return str(value)


def write_profiles(profiles: Profiles) -> None:
    """Replace the file; nobody but its owner can read it at any moment."""
    from millrace.security.certificates import write_private

    path = profiles_path().resolve()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(path, render(profiles).encode())


def render(profiles: Profiles) -> str:
    """As TOML, whose strings and quoted keys may be written as JSON's."""
    lines = [] if profiles.current is None else [f"current = {_quoted(profiles.current)}", ""]
    for name in sorted(profiles.profiles):
        profile = profiles.profiles[name]
        lines.append(f"[profiles.{_key(name)}]")
        if profile.bootstrap is not None:
            lines.append(f"bootstrap = {_quoted(profile.bootstrap)}")
        lines += ["", f"[profiles.{_key(name)}.client]"] if profile.client else []
        lines += [f"{_key(key)} = {_quoted(value)}" for key, value in sorted(profile.client.items())]
        lines.append("")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(text: str) -> str:
    return text if _BARE.fullmatch(text) else _quoted(text)
