"""From words on the command line to the module of the noun, and from whatever it raised to an exit code.

Nothing here knows what a command does. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. An error is one
line on stderr that begins with `millrace: error:`; `MILLRACE_DEBUG=1` adds the traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from millrace import __version__
from millrace.admin.errors import AdminError
from millrace.cli.completion import offer_words
from millrace.cli.help import help_text
from millrace.cli.output import CommandError, print_error
from millrace.cli.process import flushed, interruptible, open_closed_streams, sigterm_as_ctrl_c
from millrace.cli.profiles import add_profile_option
from millrace.errors import MillraceError

NOUNS: Final = (
    "up",
    "down",
    "status",
    "broker",
    "cluster",
    "top",
    "topics",
    "produce",
    "consume",
    "records",
    "groups",
    "queues",
    "transactions",
    "configs",
    "users",
    "acls",
    "tokens",
    "quotas",
    "log",
    "perf",
    "pipeline",
    "console",
    "demo",
    "profile",
)

EPILOG: Final = (
    "A first minute: start `millrace up` in one terminal; in another, `echo hello | millrace produce greetings`, "
    "then `millrace consume greetings --from-beginning`."
)


class Command(TyperCommand):
    """What a person can call: with our help and completion, and Ctrl-C as an exception from the moment it begins."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for parameter in self.params:
            offer_words(parameter)

    def get_help(self, ctx: Any) -> str:
        return help_text(self, ctx)

    def invoke(self, ctx: Any) -> Any:
        with interruptible():
            return super().invoke(ctx)


class CommandGroup(TyperGroup):
    """Something with verbs. Alone it shows its help, which is no success."""

    def get_help(self, ctx: Any) -> str:
        return help_text(self, ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            typer.echo(self.get_help(ctx))
            raise typer.Exit(2)
        return super().parse_args(ctx, args)


class NounGroup(CommandGroup):
    """The root command. It imports a noun's module only when that noun was typed, or when help lists them all."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(NOUNS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in NOUNS:
            return None
        command = self.commands.get(cmd_name)
        if command is None:
            command = _command_of(importlib.import_module(f"millrace.cli.{cmd_name}").app)
            command.name = cmd_name
            add_profile_option(command)
            self.commands[cmd_name] = command
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in NOUNS and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = get_close_matches(args[0], NOUNS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"the commands are {', '.join(NOUNS)}"
            raise CommandError(f"no command '{args[0]}': {hint}", exit_code=2)
        return super().resolve_command(ctx, args)


def _command_of(noun: typer.Typer) -> Any:
    """The noun as a command; itself and its verbs are of the classes above, which their module need not know."""
    noun.info.cls = CommandGroup
    for verb in noun.registered_commands:
        verb.cls = Command
    return get_command(noun)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"millrace {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=NounGroup,
    no_args_is_help=True,
    epilog=EPILOG,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def millrace(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """A publish-subscribe log that speaks Apache Kafka's protocol."""


def run(argv: list[str]) -> int:
    """The exit code of one command line. Errors meant for people end here, as one line."""
    open_closed_streams()
    with sigterm_as_ctrl_c():
        return flushed(_run(argv))


def _run(argv: list[str]) -> int:
    try:
        outcome = get_command(app).main(args=argv, prog_name="millrace", standalone_mode=False)
    except typer.Abort:
        print_error("aborted")
        return 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except Exception as error:  # noqa: BLE001  # the boundary: what is not known here is raised again
        if _is_ctrl_c(error):
            return 130
        if os.environ.get("MILLRACE_DEBUG"):
            import traceback

            traceback.print_exc()
        return _report(error)
    return outcome if isinstance(outcome, int) else 0


def _is_ctrl_c(error: Exception) -> bool:
    """Whether this is a Ctrl-C that came while a librdkafka client was being freed.

    confluent-kafka leaves the KeyboardInterrupt behind without raising it, and the interpreter blames whatever built-in
    function is called next: "SystemError: <...> returned a result with an exception set".
    """
    return isinstance(error, SystemError) and isinstance(error.__cause__, KeyboardInterrupt)


def _report(error: Exception) -> int:
    """Print what went wrong in one line and return the exit code; anything unforeseen is raised again."""
    if isinstance(error, CommandError):
        print_error(str(error))
        return error.exit_code
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        text = " ".join(error.format_message().split())
        if text:  # a bare `millrace topics` has printed its help already
            hint = f" (try: {context.command_path} --help)" if context is not None else ""
            print_error(f"{text}{hint}")
        return error.exit_code
    if isinstance(error, MillraceError):
        print_error(str(error))
        return 2 if isinstance(error, AdminError) and error.mistake else 1
    if isinstance(error, OSError):
        print_error(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
        return 1
    if "confluent_kafka" in sys.modules:
        from millrace.cli.connection import explain_kafka_exception

        text = explain_kafka_exception(error) or ""
        if text:
            print_error(text)
            return 1
    raise error
