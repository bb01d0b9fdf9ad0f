"""`millrace broker`: one broker from a properties file, for production."""

from __future__ import annotations

import logging
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
        Path, typer.Option("--config", "-c", show_default=False, help="A properties file with Kafka's setting names.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting that wins over the file, repeatable."),
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
    """
    if not config.is_file():
        raise CommandError(f"there is no file '{config}'")
    from millrace.cli.serve import configure_logging, serve
    from millrace.config import BrokerConfig
    from millrace.security import exposure

    configure_logging(log_level)
    given = name_values(settings, "--set")
    loaded = BrokerConfig.load(config, given)
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
