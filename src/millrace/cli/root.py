"""From words on the command line to the module of the noun, and from whatever it raised to an exit code.

Nothing here knows what a command does. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. An error is one
line on stderr that begins with `millrace: error:`; `MILLRACE_DEBUG=1` adds the traceback.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

from millrace import __version__
from millrace.cli.output import CommandError, print_error
from millrace.errors import MillraceError

NOUNS: Final = (
    "up",
    "broker",
    "cluster",
    "topics",
    "produce",
    "consume",
    "records",
    "groups",
    "queues",
    "log",
    "perf",
    "pipeline",
    "demo",
)

EPILOG: Final = (
    "A first minute: start `millrace up` in one terminal; in another, `echo hello | millrace produce greetings`, "
    "then `millrace consume greetings --from-beginning`."
)


class NounGroup(TyperGroup):
    """The root command. It imports a noun's module only when that noun was typed, or when help lists them all."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(NOUNS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in NOUNS:
            return None
        command = self.commands.get(cmd_name)
        if command is None:
            command = get_command(importlib.import_module(f"millrace.cli.{cmd_name}").app)
            command.name = cmd_name
            self.commands[cmd_name] = command
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in NOUNS:
            from difflib import get_close_matches

            near = get_close_matches(args[0], NOUNS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"the commands are {', '.join(NOUNS)}"
            raise CommandError(f"no command '{args[0]}': {hint}", exit_code=2)
        return super().resolve_command(ctx, args)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"millrace {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=NounGroup, no_args_is_help=True, epilog=EPILOG, pretty_exceptions_enable=False, rich_markup_mode="rich"
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
    with _sigterm_as_ctrl_c():
        return _run(argv)


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Whoever stops a command politely wants what Ctrl-C gives: records delivered, groups left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run(argv: list[str]) -> int:
    try:
        outcome = get_command(app).main(args=argv, prog_name="millrace", standalone_mode=False)
    except typer.Abort:
        print_error("aborted")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _silence_stdout()
        return 1
    except Exception as error:  # noqa: BLE001  # the boundary: what is not known here is raised again
        if os.environ.get("MILLRACE_DEBUG"):
            import traceback

            traceback.print_exc()
        return _report(error)
    return outcome if isinstance(outcome, int) else 0


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
        return 1
    if isinstance(error, OSError):
        print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return 1
    if "confluent_kafka" in sys.modules:
        from millrace.cli.connection import explain_kafka_exception

        text = explain_kafka_exception(error) or ""
        if text:
            print_error(text)
            return 1
    raise error


def _silence_stdout() -> None:
    """The reader of our pipe has gone: keep the interpreter from complaining when it flushes stdout at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
