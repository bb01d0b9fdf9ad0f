"""`millrace broker`: one broker from a properties file, for production."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.options import name_values
from millrace.cli.output import CommandError

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: millrace broker --config server.properties --set log.retention.hours=24")
def broker(
    *,
    config: Annotated[
        Path, typer.Option("--config", "-c", show_default=False, help="A properties file with Kafka's setting names.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting that wins over the file, repeatable."),
    ] = None,
    pid_file: Annotated[Path | None, typer.Option("--pid-file", help="Write the process id here.")] = None,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error, on stderr.")] = "info",
) -> None:
    """Run one broker from a properties file; prints `ready bootstrap=HOST:PORT` when clients can connect."""
    if not config.is_file():
        raise CommandError(f"there is no file '{config}'")
    from millrace.cli.serve import configure_logging, serve
    from millrace.config import BrokerConfig

    configure_logging(log_level)
    serve(BrokerConfig.load(config, name_values(settings, "--set")), pid_file=pid_file)
