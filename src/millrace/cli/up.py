"""`millrace up`: a broker on this machine, in the foreground, with nothing to configure.

Everything it keeps is under one directory (`./millrace-data` unless told otherwise): `broker-1/pid` while it runs and
the log directory `broker-1/data`. Starting it again on the same directory goes on where it stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from millrace.cli.options import name_values
from millrace.cli.output import CommandError

DEFAULT_DATA: Final = Path("millrace-data")

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: millrace up --port 9092 --data /var/tmp/millrace --set num.partitions=4")
def up(
    *,
    brokers: Annotated[int, typer.Option("--brokers", min=1, help="How many; this version runs one.")] = 1,
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="Where to listen; 0 takes a free port.")
    ] = 9092,
    host: Annotated[str, typer.Option("--host", help="The address to listen on and to tell clients.")] = "127.0.0.1",
    data: Annotated[Path, typer.Option("--data", "-d", help="Where everything is kept.")] = DEFAULT_DATA,
    zookeeper: Annotated[
        str | None, typer.Option("--zookeeper", metavar="HOSTS", help="An ensemble; not in this version.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A broker setting, repeatable.")
    ] = None,
    log_level: Annotated[
        str, typer.Option("--log-level", help="debug, info, warning or error, on stderr.")
    ] = "warning",
) -> None:
    """Start a broker in the foreground; prints `ready bootstrap=HOST:PORT` when clients can connect."""
    if brokers > 1:
        raise CommandError(
            f"--brokers {brokers}: clusters of several brokers are not in this version, use 1", exit_code=2
        )
    if zookeeper is not None:
        raise CommandError("--zookeeper: not in this version; a single broker keeps its metadata itself", exit_code=2)
    from millrace.cli.serve import configure_logging, serve
    from millrace.config import BrokerConfig

    configure_logging(log_level)
    home = data.absolute() / "broker-1"
    config = BrokerConfig.load(
        None,
        {
            "node.id": "1",
            "listeners": f"PLAINTEXT://{host}:{port}",
            "log.dirs": str(home / "data"),
            # One person's machine: the first consumer of a group should not wait for others to join.
            "group.initial.rebalance.delay.ms": "0",
            **name_values(settings, "--set"),
        },
    )
    serve(config, pid_file=home / "pid")
