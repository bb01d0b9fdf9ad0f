"""`millrace broker`: one broker from a properties file or from environment variables, for production."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.cli.options import name_values
from millrace.cli.output import CommandError

if TYPE_CHECKING:
    from millrace.config import BrokerConfig

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: millrace broker --config server.properties --set log.retention.hours=24")
def broker(
    *,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="A properties file with Kafka's setting names.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting that wins over all others, repeatable."),
    ] = None,
    pid_file: Annotated[Path | None, typer.Option("--pid-file", help="Write the process id here.")] = None,
    migrate: Annotated[
        bool,
        typer.Option(
            "--migrate",
            help="Before the start, once: move the metadata of a broker that was alone to the ZooKeeper that the "
            "settings name; it becomes the first of a cluster.",
        ),
    ] = False,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error, on stderr.")] = "info",
) -> None:
    """Run one broker from a properties file; prints `ready bootstrap=HOST:PORT` when clients can connect.

    After that `metrics=URL`, where it tells Prometheus of itself.

    A setting may stand in the environment, too, where it wins over the file: log.dirs as MILLRACE_SETTING_LOG_DIRS,
    with _ for a dot, __ for a dash and ___ for an underscore.
    """
    if config is not None and not config.is_file():
        raise CommandError(f"there is no file '{config}'")
    from millrace.cli.serve import configure_logging, serve
    from millrace.config import BrokerConfig
    from millrace.config.environment import settings_in, variable_of
    from millrace.security import exposure

    configure_logging(log_level)
    given = name_values(settings, "--set")
    overrides = settings_in(os.environ) | given
    if config is None and not overrides:
        raise CommandError(
            f"no settings: give --config FILE, or in the environment {variable_of('log.dirs')}=FOLDER", exit_code=2
        )
    loaded = BrokerConfig.load(config, overrides)
    for warning in (
        exposure.open_listeners_text(loaded),
        exposure.open_metadata_text(loaded),
        exposure.secrets_text(given),
    ):
        if warning:
            logging.getLogger(__name__).warning("%s", warning)
    if migrate:
        _migrate(loaded)
    serve(loaded, pid_file=pid_file)


def _migrate(config: BrokerConfig) -> None:
    """Once: where there is nothing to move any more, there is nothing to do."""
    import asyncio

    from millrace.broker import store_for
    from millrace.clock import SystemClock
    from millrace.cluster.migration import is_single
    from millrace.cluster.migration import migrate as move

    if not config.get("zookeeper.connect"):
        raise CommandError("--migrate needs zookeeper.connect: that is where the metadata goes", exit_code=2)
    directory = Path(config.log_dirs[0])
    if not is_single(directory):
        return

    async def run() -> None:
        clock = SystemClock()
        await move(directory, config.broker_id, store_for(config, clock), clock)

    asyncio.run(run())
