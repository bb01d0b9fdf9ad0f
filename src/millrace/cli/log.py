"""`millrace log dump`: what lies in the files of a data directory, and whether it is sound.

It reads files, never a broker, and never writes; a running broker's files can be read too. Each line is one thing in
the file (a batch, a record, an index entry, a producer, a checkpoint entry); which file is read how is `log_files`.
Damage is reported on stderr and gives exit code 1, after everything that could be read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.cli.log_files import Damage, Entry, directory_entry, known_names, reader_of
from millrace.cli.output import CommandError, print_error, print_remark

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look into log directories.")


@app.callback()
def log() -> None:
    """Look into log directories."""


@app.command(
    epilog="Examples: `millrace log dump millrace-data/broker-1/data/orders-0/00000000000000000000.log --records` or, "
    "for all that a partition has, `millrace log dump millrace-data/broker-1/data/orders-0`"
)
def dump(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            show_default=False,
            help="Files of a data directory; a directory stands for the files in it.",
        ),
    ],
    *,
    records: Annotated[
        bool, typer.Option("--records", "-r", help="Also every record of a segment, every change of metadata.db.")
    ] = False,
    max_entries: Annotated[
        int | None, typer.Option("--max", "-n", min=1, help="Stop after so many lines per file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Print segments, indexes, snapshots, checkpoints and metadata, and check them."""
    files = [file for path in paths for file in _files_of(path)]
    several = len(files) > 1
    damaged = False
    for file in files:
        if several and not as_json and not file.is_dir():
            print(f"# {file}")
        try:
            for entry in islice(_entries(file, records=records), max_entries):
                _print_entry({"file": str(file), **entry} if several and as_json else entry, as_json=as_json)
        except Damage as error:
            sys.stdout.flush()
            print_error(f"{file}: {error}")
            damaged = True
    if damaged:
        raise typer.Exit(1)


def _files_of(path: Path) -> list[Path]:
    """The file itself, or what is in a directory: its files, then its directories, which are only named."""
    if path.is_dir():
        inside = sorted(path.iterdir(), key=lambda one: (one.is_dir(), one.name))
        if not inside:
            print_remark(f"{path} is empty")
        unknown = [one for one in inside if one.is_file() and reader_of(one) is None]
        if unknown:
            print_remark(f"{path}: no broker's file: {', '.join(one.name for one in unknown)}")
        return [one for one in inside if one not in unknown]
    if not path.exists():
        raise CommandError(f"there is no file '{path}'")
    if reader_of(path) is None:
        raise CommandError(
            f"'{path.name}' is no file of a log directory; known are {', '.join(known_names())}", exit_code=2
        )
    return [path]


def _entries(path: Path, *, records: bool) -> Iterator[Entry]:
    if path.is_dir():
        return iter([directory_entry(path)])
    reader = reader_of(path)
    assert reader is not None
    return reader(path, records)


def _print_entry(entry: Entry, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(entry, ensure_ascii=False))
        return
    kind = entry.pop("is")
    indent = "  " if kind in {"record", "marker", "change"} else ""
    print(indent + " ".join([kind, *(f"{name}={_text(value)}" for name, value in entry.items())]))


def _text(value: Any) -> str:
    if isinstance(value, str) and value and value.isprintable() and " " not in value:
        return value
    return json.dumps(value, ensure_ascii=False)
