"""`millrace status`: what runs in a folder of `millrace up`, by its files and locks; `cluster health` asks the brokers.

The exit code is 0 where everything runs that has run there, 1 where a part of it does, 3 where nothing does.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import typer

from millrace.cli.options import DEFAULT_DATA, Data, Json
from millrace.cli.output import print_json, print_table, size_text
from millrace.clock import SystemClock

if TYPE_CHECKING:
    from millrace.local.folder import BrokerState, Folder, Holder

SOME_RUN: Final = 1
NOTHING_RUNS: Final = 3

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: millrace status --json")
def status(*, data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Show what runs in a folder: processes, addresses, since when, data; exits with 0 (all), 1 (some) or 3 (none)."""
    from millrace.local.folder import Folder

    folder = Folder(data)
    holder, brokers = folder.holder(), folder.brokers()
    if as_json:
        print_json(describe(folder, holder, brokers))
    else:
        _print(folder, holder, brokers)
    running = sum(broker.pid is not None for broker in brokers)
    if holder is None and not running:
        raise typer.Exit(NOTHING_RUNS)
    if not running or running < len(brokers):
        raise typer.Exit(SOME_RUN)


def describe(folder: Folder, holder: Holder | None, brokers: list[BrokerState]) -> dict[str, Any]:
    """Everything there is to tell."""
    addresses = {} if holder is None else holder.brokers
    return {
        "data": str(folder.path),
        "holds": folder.kind.value,
        "pid": None if holder is None else holder.pid,
        "since_ms": None if holder is None else holder.since_ms,
        "bootstrap": None if holder is None else holder.bootstrap or None,
        "security": str(folder.security) if folder.security.is_dir() else None,
        "brokers": [
            {
                "broker": broker.broker_id,
                "pid": broker.pid,
                "address": addresses.get(str(broker.broker_id)) if broker.pid is not None else None,
                "since_ms": broker.since_ms,
                "data_bytes": broker.data_bytes,
            }
            for broker in brokers
        ],
    }


def _print(folder: Folder, holder: Holder | None, brokers: list[BrokerState]) -> None:
    if holder is None:
        killed = folder.last_holder()
        end = f": what ran there (pid {killed.pid}) was killed" if killed is not None else ""
        print(f"millrace up does not run in {folder.path}{end}")
    elif not holder.brokers:
        print(f"starting in {folder.path} (pid {holder.pid})")
    else:
        print(f"running in {folder.path} for {_ago(holder.since_ms)} (pid {holder.pid})")
    if folder.security.is_dir():
        print(f"clients need TLS and a login: {folder.security}")
    if brokers:
        rows = [
            [
                one["broker"],
                "running" if one["pid"] is not None else "not running",
                one["pid"],
                one["address"],
                None if one["since_ms"] is None else _local_time(one["since_ms"]),
                size_text(one["data_bytes"]),
            ]
            for one in describe(folder, holder, brokers)["brokers"]
        ]
        print_table(["broker", "state", "pid", "address", "since", "data"], rows)


def _local_time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _ago(since_ms: int) -> str:
    seconds = max((SystemClock().wall_ms() - since_ms) // 1000, 0)
    for unit, size in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = seconds // size
            return f"{count} {unit}{'s' if count != 1 else ''}"
    return f"{seconds} s"
