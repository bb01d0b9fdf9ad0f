"""What makes a Python file a pipeline, and finding one by name or by path.

A pipeline is a file with

- a docstring, whose first line is what `millrace pipeline list` shows;
- `OPTIONS`, a literal list of (name, default, doc), all text. A default of None means that the option must be given;
- `start(spark, options)`, which starts one or more streaming queries and returns them;
- if it wants, `topics(options)`: names of topics that are created before the start when they are missing.

`options` has every name of OPTIONS, and from the runner: `kafka.bootstrap.servers` (and every other `kafka.` setting
that was given), `checkpoint` (a folder of this pipeline's own) and `once` ("true" or "false").

Docstring and OPTIONS are read without running the file, so that listing and checking options costs no Spark and
runs no one's code. Nothing here starts anything.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millrace.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

BUILT_IN: Final = ("metrics", "logs", "streams")
CLIENT_PREFIX: Final = "kafka."
_GIVEN_BY_RUNNER: Final = ("checkpoint", "once")


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that can be set; a default of None means that it has to be."""

    name: str
    default: str | None
    doc: str


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A file that keeps the contract."""

    name: str
    path: Path
    summary: str
    doc: str
    options: tuple[Option, ...]
    names_topics: bool = False

    def resolve(self, given: Mapping[str, str]) -> dict[str, str]:
        """Every option with its value; ConfigError for a name nobody knows and for one that is missing."""
        known = {option.name: option for option in self.options}
        for name in given:
            if name not in known and not name.startswith(CLIENT_PREFIX):
                raise ConfigError(f"pipeline {self.name} has no option '{name}': {_hint(name, list(known))}")
        values = {option.name: given.get(option.name, option.default) for option in self.options}
        missing = [name for name, value in values.items() if value is None]
        if missing:
            first = known[missing[0]]
            raise ConfigError(f"pipeline {self.name} needs --option {first.name}=... ({first.doc})")
        client = {name: value for name, value in given.items() if name.startswith(CLIENT_PREFIX)}
        return {**{name: value for name, value in values.items() if value is not None}, **client}

    def load(self) -> LoadedPipeline:
        """Run the file and take what it defines. Its own folder is importable, as with any script.

        A Spark session has to be there already: decorators such as `udf` ask for it.
        """
        module_name = f"millrace_pipeline_{self.name}"
        spec = importlib.util.spec_from_file_location(module_name, self.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        folder = str(self.path.parent)
        if self.name not in BUILT_IN and folder not in sys.path:
            sys.path.insert(0, folder)
        # Functions of the file that executors run are pickled by value, because no executor can import this name.
        from pyspark import cloudpickle  # Spark only when something is to run

        sys.modules[module_name] = module
        spec.loader.exec_module(module)
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
        topics: Callable[[Mapping[str, str]], list[str]] | None = getattr(module, "topics", None)
        return LoadedPipeline(self, module.start, topics)


@dataclass(frozen=True, slots=True)
class LoadedPipeline:
    """A pipeline whose code has been run, ready to start."""

    pipeline: Pipeline
    start_queries: Callable[[SparkSession, Mapping[str, str]], Any]
    topics_wanted: Callable[[Mapping[str, str]], list[str]] | None

    def start(self, spark: SparkSession, options: Mapping[str, str]) -> list[StreamingQuery]:
        started = self.start_queries(spark, options)
        queries = list(started) if isinstance(started, list | tuple) else [started]
        if not queries or not all(hasattr(query, "lastProgress") for query in queries):
            raise ConfigError(f"start() of pipeline {self.pipeline.name} has to return its StreamingQuery, or a list")
        return queries

    def topics(self, options: Mapping[str, str]) -> list[str]:
        return list(dict.fromkeys(self.topics_wanted(options))) if self.topics_wanted is not None else []


def built_in() -> list[Pipeline]:
    """The pipelines that come with millrace."""
    return [find(name) for name in BUILT_IN]


def find(name: str) -> Pipeline:
    """A pipeline by the name of a built-in one, or by the path of its file."""
    if name in BUILT_IN:
        return read(Path(__file__).with_name(f"{name}.py"))
    path = Path(name)
    if path.suffix == ".py" or "/" in name:
        if not path.is_file():
            raise ConfigError(f"there is no file {name}")
        return read(path.resolve())
    raise ConfigError(f"there is no pipeline '{name}': {_hint(name, BUILT_IN)}, or give the path of a .py file")


def read(path: Path) -> Pipeline:
    """What a file says about itself; ConfigError when it does not keep the contract."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not Python: {error}") from None
    doc = ast.get_docstring(tree)
    if not doc:
        raise ConfigError(f"{path} has no docstring; its first line says what the pipeline does")
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "start" not in functions:
        raise ConfigError(f"{path} is no pipeline: it has no function start(spark, options)")
    return Pipeline(path.stem, path, doc.splitlines()[0], doc, _options(path, tree), "topics" in functions)


def _options(path: Path, tree: ast.Module) -> tuple[Option, ...]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == "OPTIONS" for to in node.targets):
            value = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "OPTIONS":
            value = node.value or ast.List([])
        else:
            continue
        return tuple(_option(path, entry) for entry in _literal(path, value))
    return ()


def _literal(path: Path, value: ast.expr) -> list[Any]:
    try:
        entries = ast.literal_eval(value)
    except ValueError:
        raise ConfigError(f"{path}: OPTIONS has to be a literal list of (name, default, doc)") from None
    return list(entries)


def _option(path: Path, entry: object) -> Option:
    match entry:
        case (str() as name, str() | None as default, str() as doc):
            if name in _GIVEN_BY_RUNNER or name.startswith(CLIENT_PREFIX):
                raise ConfigError(f"{path}: option '{name}' is set by the runner; choose another name")
            return Option(name, default, doc)
    raise ConfigError(f"{path}: an entry of OPTIONS is (name, default, doc), all text, not {entry!r}")


def _hint(name: str, known: list[str] | tuple[str, ...]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known) or 'none'}"
