"""The help of every command, in one look: plain text that keeps to the terminal's width and never breaks a word.

What typer would print instead takes its columns from the widest of each, which leaves help texts a few words wide in 80
columns, names Python's types, and takes square brackets in texts for markup. Not here: who gets this help (`cli.root`).
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, get_args

import typer
from typer.core import TyperArgument, TyperGroup, TyperOption

MAX_WIDTH: Final = 120
_LABEL_WIDTH: Final = 30
_INDENT: Final = "  "
_GAP: Final = "  "
_VALUE_NAMES: Final[dict[Any, str]] = {int: "N", float: "N", Path: "PATH"}


def help_text(command: Any, ctx: Any) -> str:
    """Usage, what it does, arguments, options, verbs, examples."""
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    parameters = [each for each in command.get_params(ctx) if not getattr(each, "hidden", False)]
    arguments = [each for each in parameters if isinstance(each, TyperArgument)]
    options = [each for each in parameters if isinstance(each, TyperOption)]
    is_group = isinstance(command, TyperGroup)
    pieces = [ctx.command_path, "[OPTIONS]", *(_usage(each) for each in arguments), *["COMMAND ..."] * is_group]
    sections = [
        _filled(f"Usage: {' '.join(pieces)}", width, later=_INDENT * 2),
        *_paragraphs(command.help, width),
        _section("Arguments", [(_plain_name(each), _explained(each, ctx)) for each in arguments], width),
        _section("Commands", _verbs(command, ctx) if is_group else [], width),
        _section("Options", [(_option_names(each), _explained(each, ctx)) for each in options], width),
        *_paragraphs(command.epilog, width),
    ]
    return "\n\n".join(section for section in sections if section)


def _verbs(group: TyperGroup, ctx: Any) -> list[tuple[str, str]]:
    commands = ((name, group.get_command(ctx, name)) for name in group.list_commands(ctx))
    return [
        (name, inspect.cleandoc(command.help or "").partition("\n\n")[0])
        for name, command in commands
        if command is not None and not command.hidden
    ]


def _section(title: str, rows: list[tuple[str, str]], width: int) -> str:
    if not rows:
        return ""
    label_width = min(max(len(label) for label, _ in rows), _LABEL_WIDTH)
    indent = _INDENT + " " * label_width + _GAP
    lines = [typer.style(f"{title}:", bold=True)]
    for label, text in rows:
        if len(label) > label_width:
            lines += [_INDENT + label, _filled(text, width, first=indent, later=indent)]
        else:
            lines.append(_filled(text, width, first=_INDENT + label.ljust(label_width) + _GAP, later=indent))
    return "\n".join(line.rstrip() for line in lines)


def _paragraphs(text: str | None, width: int) -> Iterable[str]:
    return (_filled(paragraph, width) for paragraph in inspect.cleandoc(text or "").split("\n\n"))


def _filled(text: str, width: int, *, first: str = "", later: str = "") -> str:
    """Wrapped between words; one that is too long for a line stays whole."""
    return (
        textwrap.fill(
            " ".join(text.split()),
            width,
            initial_indent=first,
            subsequent_indent=later,
            break_long_words=False,
            break_on_hyphens=False,
        )
        or first.rstrip()
    )


def _usage(argument: TyperArgument) -> str:
    name = _plain_name(argument)
    return name if argument.required else f"[{name}]"


def _plain_name(argument: TyperArgument) -> str:
    """`TOPIC`, or `TOPIC...` where there may be several, however it was declared."""
    name = (argument.metavar or argument.name or "").strip("[]").removesuffix("...")
    name = name if argument.metavar else name.upper()
    return name if argument.nargs == 1 else f"{name}..."


def _option_names(option: TyperOption) -> str:
    shorts = [name for name in option.opts if not name.startswith("--")]
    longs = [name for name in option.opts if name.startswith("--")]
    names = ("" if shorts else " " * len("-x, ")) + ", ".join([*shorts, *longs])
    if option.secondary_opts:
        names += f" / {', '.join(option.secondary_opts)}"
    return names if option.is_flag or option.count else f"{names} {_value_name(option)}"


def _value_name(option: TyperOption) -> str:
    if option.metavar is not None:
        return option.metavar
    described = option.type_descriptor
    if described.choices is not None:
        return "|".join(str(getattr(choice, "value", choice)) for choice in described.choices)
    (kind,) = get_args(described.annotation) if described.is_list else (described.annotation,)
    return _VALUE_NAMES.get(kind, "TEXT")


def _explained(parameter: Any, ctx: Any) -> str:
    """The help, and in brackets what else is known: limits, the variable, the default."""
    known = []
    if parameter.max is not None or parameter.min:  # that a count is not negative goes without saying
        known.append(_limits(parameter.min, parameter.max))
    if parameter.envvar and parameter.show_envvar:
        known.append(f"env: {parameter.envvar}")
    default = parameter.get_default(ctx, call=False)
    if parameter.show_default and isinstance(default, (str, int, float, Path)) and not isinstance(default, bool):
        known.append(f"default: {default}")
    if parameter.secondary_opts and default is not None:
        known.append(f"default: {(parameter.opts if default else parameter.secondary_opts)[0]}")
    if isinstance(parameter, TyperOption) and parameter.required:
        known.append("required")
    return " ".join([parameter.help or "", f"[{'; '.join(known)}]" if known else ""]).strip()


def _limits(low: float | None, high: float | None) -> str:
    if high is None:
        return f"at least {low:g}"
    return f"at most {high:g}" if low is None else f"{low:g} to {high:g}"
