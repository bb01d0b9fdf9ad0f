"""`millrace pipeline`: list, show, copy and run Spark pipelines on topics.

Not here: what a pipeline does (`millrace.spark.pipelines`) and how a session is made (`millrace.spark.session`). Spark
is imported only by `run`. Results and reports for scripts go to stdout, everything for people to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final, ParamSpec

import typer

from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, name_values
from millrace.cli.output import CommandError, print_json, print_remark, print_table
from millrace.cli.profiles import profile_settings
from millrace.errors import ConfigError
from millrace.spark.pipelines.contract import CLIENT_PREFIX, built_in, find
from millrace.spark.pipelines.status import RUNS_VARIABLE, RunKeeper, default_runs, is_run_id, read_runs, state_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millrace.spark.pipelines.contract import LoadedPipeline, Pipeline

app = typer.Typer(no_args_is_help=True, add_completion=False, help="List, show, copy and run Spark pipelines.")

P = ParamSpec("P")

Name = Annotated[
    str, typer.Argument(metavar="NAME|FILE.py", show_default=False, help="A pipeline of `pipeline list`, or a file.")
]

# What our clients and librdkafka call by the same name; the rest of a `kafka.` setting is for our clients only.
_SHARED_SETTINGS: Final = (
    "security.protocol",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.username",
    "sasl.password",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.key.location",
)


@app.command("list", epilog="Example: millrace pipeline list --json")
def list_pipelines(*, as_json: Json = False) -> None:
    """List the pipelines that come with millrace."""
    pipelines = built_in()
    if as_json:
        print_json([_described(one) for one in pipelines])
        return
    print_table(["name", "what it does"], [(one.name, one.summary) for one in pipelines])
    print_remark("a file of your own works as well: millrace pipeline copy NAME FILE.py makes one to begin with")


@app.command(epilog="Example: millrace pipeline show metrics --options")
def show(
    name: Name,
    *,
    options: Annotated[bool, typer.Option("--options", help="What can be set, instead of the source.")] = False,
    as_json: Json = False,
) -> None:
    """Print the source of a pipeline, or its options."""
    pipeline = _found(name)
    if as_json:
        print_json(_described(pipeline))
    elif options:
        print_table(["option", "default", "meaning"], [(one.name, one.default, one.doc) for one in pipeline.options])
    else:
        sys.stdout.write(pipeline.path.read_text(encoding="utf-8"))


@app.command(epilog="Example: millrace pipeline copy metrics my_metrics.py")
def copy(
    name: Name,
    target: Annotated[Path, typer.Argument(metavar="FILE.py", show_default=False, help="Where the copy goes.")],
) -> None:
    """Copy a pipeline into a file of your own, to change it."""
    source = _found(name).path
    if target.is_dir():
        target = target / source.name
    if target.exists():
        raise CommandError(f"{target} exists already; choose another name")
    target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    print_remark(f"run it with: millrace pipeline run {target if target.parent != Path() else f'./{target}'}")


@app.command(
    epilog="Example: millrace pipeline run metrics --option window='10 seconds' --option table=sqlite:///metrics.db"
)
def run(
    name: Name,
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="NAME=VALUE",
            help="An option of the pipeline, or a client setting such as kafka.security.protocol; repeatable.",
        ),
    ] = None,
    option_file: Annotated[
        Path | None,
        typer.Option(
            "--option-file",
            metavar="FILE",
            help="Options from a file, JSON or NAME=VALUE lines (`-`: JSON from stdin): passwords do not belong on a "
            "command line.",
        ),
    ] = None,
    master: Annotated[
        str, typer.Option("--master", "-m", help="Where Spark runs: local[N], spark://HOST:PORT, yarn, k8s://...")
    ] = "local[*]",
    conf: Annotated[
        list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark, repeatable.")
    ] = None,
    py_files: Annotated[
        list[Path] | None,
        typer.Option("--py-file", metavar="FILE", help="A module or zip that executors need as well; repeatable."),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="DIR",
            help="Where the pipeline remembers what it has read [default: ~/.local/state/millrace/checkpoints/...].",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Work through what is there now, then end.")] = False,
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, help="How often a failed query is started again before giving up.")
    ] = 3,
    create_topics: Annotated[
        bool, typer.Option("--create-topics/--no-create-topics", help="Create topics that the pipeline needs.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Progress as JSON on stdout, a line per batch.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Say how it begins, fails and ends; no progress.")
    ] = False,
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs",
            metavar="DIR",
            envvar=RUNS_VARIABLE,
            help="Where the run notes how it is, for `millrace console` [default: ~/.local/state/millrace/pipelines].",
        ),
    ] = None,
    run_id: Annotated[
        str, typer.Option("--run-id", metavar="NAME", help="What the run is called there [default: a new name].")
    ] = "",
) -> None:
    """Run a pipeline until it is stopped; Ctrl-C lets the running batch finish."""
    if as_json and quiet:
        raise CommandError("--json is progress, and --quiet wants none: leave out one of them", exit_code=2)
    if run_id and not is_run_id(run_id):
        raise CommandError(f"--run-id: '{run_id}' cannot be the name of a file", exit_code=2)
    pipeline = _found(name)
    filed = {} if option_file is None else _read_options(option_file)
    given = {**profile_settings(CLIENT_PREFIX), **filed, **name_values(options, "--option")}
    try:
        values = pipeline.resolve({f"{CLIENT_PREFIX}bootstrap.servers": bootstrap, **given})
    except ConfigError as error:
        raise CommandError(str(error), exit_code=2) from None
    values["once"] = "true" if once else "false"
    values["checkpoint"] = checkpoint_folder(checkpoint, pipeline.name, bootstrap)
    settings = name_values(conf, "--conf")
    for file in py_files or ():
        if not file.is_file():
            raise CommandError(f"--py-file: there is no file {file}", exit_code=2)
    folder = runs or default_runs()
    _refuse_second(folder, values["checkpoint"])
    described = {key: value for key, value in values.items() if key not in ("checkpoint", "once")}
    with RunKeeper.of_this_process(
        folder,
        pipeline=pipeline.name,
        file=pipeline.path,
        bootstrap=described.pop(f"{CLIENT_PREFIX}bootstrap.servers"),
        options=described,
        checkpoint=values["checkpoint"],
        master=master,
        run_id=run_id,
    ) as keeper:
        if pipeline.names_topics and create_topics:
            _require_entry(values)  # before Spark takes its seconds to start
        print_remark(f"pipeline {pipeline.name} on {master}; checkpoints in {values['checkpoint']}")
        spark = _session(f"millrace-{pipeline.name}", master, settings)
        try:
            for file in py_files or ():
                spark.sparkContext.addPyFile(str(file.absolute()))
            loaded = _load(pipeline)
            if create_topics:
                _create_topics(values[f"{CLIENT_PREFIX}bootstrap.servers"], values, loaded)
            _run(spark, loaded, values, keeper, restarts=restarts, as_json=as_json, quiet=quiet)
        finally:
            spark.stop()


def _require_entry(values: Mapping[str, str]) -> None:
    from millrace.cli.entry import require_entry

    client = {key.removeprefix(CLIENT_PREFIX): value for key, value in values.items() if key.startswith(CLIENT_PREFIX)}
    require_entry(client["bootstrap.servers"], client)


def _read_options(path: Path) -> dict[str, str]:
    """The options in a file; names of client settings have their prefix there as on the command line."""
    if str(path) != "-":
        from millrace.cli.profile import read_settings

        return read_settings(path)
    try:
        found = json.loads(sys.stdin.read())
    except ValueError as error:
        raise CommandError(f"--option-file: what stdin gave is not JSON: {error}", exit_code=2) from None
    if not isinstance(found, dict):
        raise CommandError("--option-file: what stdin gave is not an object of names and values", exit_code=2)
    return {str(name): str(value) for name, value in found.items()}


def _refuse_second(folder: Path, checkpoint: str) -> None:
    """Two runs with one checkpoint would take each other's batches for their own."""
    for each in read_runs(folder):
        if not each.state.is_over and each.checkpoint == checkpoint:
            raise CommandError(
                f"pipeline {each.pipeline} runs already with this checkpoint (pid {each.pid}): stop that one, or give "
                "another --checkpoint"
            )


def _found(name: str) -> Pipeline:
    try:
        return find(name)
    except ConfigError as error:
        raise CommandError(str(error), exit_code=2) from None


def _load(pipeline: Pipeline) -> LoadedPipeline:
    """Run the file, after the session is there: decorators such as `udf` ask for it."""
    try:
        return pipeline.load()
    except Exception as error:
        if os.environ.get("MILLRACE_DEBUG"):
            raise
        raise CommandError(f"{pipeline.path}: {type(error).__name__}: {error}") from error


def checkpoint_folder(given: str | None, name: str, bootstrap: str) -> str:
    """Where checkpoints lie: what was asked for, or a folder for this pipeline on this cluster."""
    if given is not None:
        return given if "://" in given else str(Path(given).absolute())
    cluster = "".join(character if character.isalnum() or character in ".-" else "_" for character in bootstrap)
    return str(state_home() / "checkpoints" / cluster / name)


def _described(pipeline: Pipeline) -> dict[str, object]:
    return {
        "name": pipeline.name,
        "summary": pipeline.summary,
        "file": str(pipeline.path),
        "options": [{"name": one.name, "default": one.default, "doc": one.doc} for one in pipeline.options],
    }


def _session(app_name: str, master: str, settings: Mapping[str, str]) -> SparkSession:
    from millrace.spark.session import build_session

    # A failure is one line of ours; Spark's own account of it is for those who ask.
    level = "warn" if os.environ.get("MILLRACE_DEBUG") else "off"
    return build_session(app_name, master=master, options=settings, log_level=level)


def _run(
    spark: SparkSession,
    loaded: LoadedPipeline,
    values: Mapping[str, str],
    keeper: RunKeeper,
    *,
    restarts: int,
    as_json: bool,
    quiet: bool,
) -> None:
    from millrace.cli.pipeline_view import open_view
    from millrace.spark.pipelines.runner import PipelineFailed, Runner

    name = loaded.pipeline.name
    with _stopping() as stopping, open_view(name, as_json=as_json, quiet=quiet) as view:
        runner = Runner(
            spark,
            loaded,
            values,
            restarts=restarts,
            on_progress=_both(keeper.progress, view.progress),
            on_restart=_both(keeper.restarting, view.restarting),
            on_stopping=_both(keeper.stopping, view.stopping),
        )
        try:
            runner.run(stopping)
        except PipelineFailed as error:
            raise CommandError(f"pipeline {name} failed: {error}") from error
        except CommandError:
            raise
        except Exception as error:
            from millrace.spark.session import root_cause

            if os.environ.get("MILLRACE_DEBUG"):
                raise
            raise CommandError(f"pipeline {name} did not start: {root_cause(error)}") from error
        view.done(stopped=stopping.is_set())
        keeper.done(stopped=stopping.is_set())


def _both(first: Callable[P, None], second: Callable[P, None]) -> Callable[P, None]:
    def tell(*args: P.args, **kwargs: P.kwargs) -> None:
        first(*args, **kwargs)
        second(*args, **kwargs)

    return tell


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets (or SIGTERM, which arrives as one); a second one interrupts."""
    event = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)


def _create_topics(bootstrap: str, values: Mapping[str, str], loaded: LoadedPipeline) -> None:
    wanted = loaded.topics(values)
    if not wanted:
        return
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import NewTopic

    from millrace.cli.connection import REQUEST_TIMEOUT_S, error_of, explain, open_admin, result

    client = {name: values[CLIENT_PREFIX + name] for name in _SHARED_SETTINGS if CLIENT_PREFIX + name in values}
    admin = open_admin(bootstrap, client)
    there = admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics
    missing = [NewTopic(topic, num_partitions=-1, replication_factor=-1) for topic in wanted if topic not in there]
    if not missing:
        return
    created = admin.create_topics(missing, request_timeout=REQUEST_TIMEOUT_S)
    for topic, answer in created.items():
        try:
            result(answer)
        except KafkaException as error:
            reason = error_of(error)
            if reason is None or reason.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                told = explain(reason) if reason is not None else str(error)
                raise CommandError(f"topic '{topic}' could not be created: {told}") from error
    print_remark(f"created topics: {', '.join(sorted(created))}")
