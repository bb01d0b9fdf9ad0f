"""The door to a SparkSession: finds Java, sets what a local run wants, ships millrace to the executors of a cluster.

    spark = build_session("orders")                                   # this machine, every core
    spark = build_session("orders", master="spark://host:7077")       # a cluster; nothing to install there but wheels

Not here: the source and the sink, which Spark finds by themselves, and pipelines. What a caller passes in `options`
wins over every default chosen here. On a cluster the executors need the third-party packages that the source uses; they
are asked for them before the first query, because the failure of a task is a poor place to learn of a missing package.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import millrace
from millrace.errors import ConfigError, MillraceError
from millrace.installing import install_hint
from millrace.local.java import find_java, home_for_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["SessionError", "build_session"]

# What the code on the executors imports, by import name and by the name pip knows.
EXECUTOR_PACKAGES: Final = {
    "pyarrow": "pyarrow",
    "numpy": "numpy",
    "numba": "numba",
    "cramjam": "cramjam",
    "crc32c": "crc32c",
    "pandas": "pandas",
}
_LOG_SETTINGS: Final = Path(__file__).with_name("log4j2.properties")
_SOURCE_MODULE: Final = "pyspark_millrace"


class SessionError(MillraceError):
    """Spark could not be started, or its executors cannot run our code; the text says what to do."""


@dataclass(frozen=True, slots=True)
class ExecutorCheck:
    """What one executor answered: where it runs and which packages it cannot import."""

    host: str
    python: str
    missing: tuple[str, ...]


def build_session(
    app_name: str = "millrace",
    *,
    master: str | None = None,
    options: Mapping[str, str] | None = None,
    log_level: str = "error",
    check_executors: bool = True,
) -> SparkSession:
    """A SparkSession, started or already running. `options` are Spark settings by name."""
    prepare_environment()
    from pyspark.sql import SparkSession  # after the environment is as Spark's launcher wants it

    master = master or os.environ.get("MASTER") or "local[*]"
    if is_local(master):
        use_installed_pyspark()
    builder = SparkSession.builder.appName(app_name).master(master)
    for name, value in session_settings(master, options or {}, log_level=log_level).items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
    except Exception as error:
        raise SessionError(f"Spark did not start with master {master}: {first_line(error)}") from error
    if not is_local(master):
        try:
            ship_code(spark)
            if check_executors:
                require_packages(spark)
        except BaseException:
            spark.stop()
            raise
    return spark


def prepare_environment() -> None:
    """Point Spark's launcher at a Java and at this Python. What the user has set stays."""
    try:
        import pyspark  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"pipelines need PySpark: {install_hint('spark')}") from error
    java = find_java()
    os.environ["JAVA_HOME"] = str(home_for_spark(java))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # numpy starts a thread per core in every Python process of Spark's, which has a task per core already.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if hasattr(socket, "AF_UNIX"):
        # The JVM and its Python processes then talk without TCP: less work, and no waiting for acknowledgements.
        os.environ.setdefault("PYSPARK_UDS_MODE", "true")


def use_installed_pyspark() -> None:
    """Let the Python processes that a local Spark starts import PySpark from where it is installed.

    Spark puts an archive of PySpark's sources first on their path, and Python compiles what it imports from an archive
    anew in every process: half a second for every streaming query, and for each of the first few of any kind. With a
    home that has everything but that archive they find the installed package, compiled. Left alone when the user has
    chosen a Spark or a Python of their own.
    """
    if "SPARK_HOME" in os.environ or os.environ.get("PYSPARK_PYTHON") != sys.executable:
        return
    import pyspark

    package = Path(pyspark.__file__).parent
    if not (package / "python" / "lib" / "pyspark.zip").exists() or not (package / "jars").is_dir():
        return
    home = Path(tempfile.mkdtemp(prefix="millrace-spark-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    for name in ("bin", "sbin", "jars", "data"):
        if (package / name).exists():
            (home / name).symlink_to(package / name)
    os.environ["SPARK_HOME"] = str(home)


def is_local(master: str) -> bool:
    """Whether the executors are threads of the driver: `local`, `local[4]`, but not `local-cluster[...]`."""
    return master == "local" or master.startswith("local[")


def session_settings(master: str, options: Mapping[str, str], *, log_level: str = "error") -> dict[str, str]:
    """Every Spark setting of a session: the defaults chosen here, under what the caller asks for."""
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.ui.showConsoleProgress": "false",
    }
    if is_local(master):
        settings |= {
            # A laptop's host name often does not resolve, and nobody else has to reach this driver.
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": str(_local_cores(master)),
        }
        if os.environ.get("PYSPARK_PYTHON") == sys.executable:  # another one need not have this package
            settings["spark.python.daemon.module"] = "millrace.spark.daemon"
    settings |= options
    # When a stream is stopped within a batch, Spark looks for the reason in the text of the error, with a regular
    # expression that recurses for every character. On a default stack its thread dies of it, and the stop never ends.
    stack = "-Xss32m"
    logging = f"-Dlog4j2.configurationFile={_LOG_SETTINGS.as_uri()} -Dmillrace.log.level={log_level}"
    asked = options.get("spark.driver.extraJavaOptions", "")
    settings["spark.driver.extraJavaOptions"] = asked if "log4j" in asked else f"{stack} {logging} {asked}".strip()
    return settings


def _local_cores(master: str) -> int:
    inside = master.partition("[")[2].rstrip("]").partition(",")[0]
    if inside.isdigit():
        return int(inside)
    return (os.cpu_count() or 1) if inside == "*" else 1


def ship_code(spark: SparkSession) -> None:
    """Give every executor the package as it is installed here, so that nothing of ours need be installed there."""
    folder = Path(tempfile.mkdtemp(prefix="millrace-ship-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # executors that come later ask for it, too
    archive = folder / f"millrace-{millrace.__version__}.zip"
    pack_code(archive)
    spark.sparkContext.addPyFile(str(archive))


def pack_code(archive: Path) -> None:
    """Write the installed package, and the module by which Spark finds the source, into a zip file."""
    package = Path(millrace.__file__).parent
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in _code_files(package):
            packed.write(path, Path(package.name) / path.relative_to(package))
        source = importlib.import_module(_SOURCE_MODULE).__file__
        assert source is not None
        packed.write(source, f"{_SOURCE_MODULE}.py")


def _code_files(package: Path) -> Iterator[Path]:
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def require_packages(spark: SparkSession, packages: Mapping[str, str] | None = None) -> None:
    """Ask the executors whether they can import what our code needs; SessionError says what is missing where."""
    wanted = dict(EXECUTOR_PACKAGES if packages is None else packages)
    tasks = max(2, 2 * spark.sparkContext.defaultParallelism)

    def ask(_: Iterable[int]) -> Iterator[ExecutorCheck]:
        yield check_packages(wanted)

    try:
        answers = spark.sparkContext.parallelize(range(tasks), tasks).mapPartitions(ask).collect()
    except Exception as error:
        raise SessionError(
            f"the executors cannot run Python code with PYSPARK_PYTHON={os.environ.get('PYSPARK_PYTHON')}: "
            f"{root_cause(error)}; set PYSPARK_PYTHON to a Python {sys.version_info.major}.{sys.version_info.minor} "
            "that exists on every worker"
        ) from error
    complaint = missing_packages(answers)
    if complaint:
        raise SessionError(complaint)


def check_packages(wanted: Mapping[str, str]) -> ExecutorCheck:
    """On an executor: which of the packages cannot be imported, by the names pip knows."""
    import platform  # only where it runs

    # Looked for, not imported: numba alone takes a second.
    missing = tuple(name for module, name in wanted.items() if importlib.util.find_spec(module) is None)
    return ExecutorCheck(platform.node(), sys.executable, missing)


def missing_packages(answers: Iterable[ExecutorCheck]) -> str:
    """One line naming what is missing where, or an empty text."""
    lacking = sorted({(one.host, one.python, one.missing) for one in answers if one.missing})
    if not lacking:
        return ""
    places = "; ".join(f"{', '.join(missing)} on {host} ({python})" for host, python, missing in lacking)
    names = sorted({name for _, _, missing in lacking for name in missing})
    return f"the executors lack packages: {places}. Install them there: pip install {' '.join(names)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def root_cause(error: BaseException) -> str:
    """The innermost cause of an error that came through the JVM and a Python worker, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    raised = [line for line in lines if _is_raised(line)]
    chosen = raised[-1] if raised else causes[-1] if causes else first_line(error)
    return chosen.partition(": ")[2] if chosen.startswith(("java.", "org.apache.spark.")) else chosen


def _is_raised(line: str) -> bool:
    """Whether a line is the last one of a Python traceback: `package.module.NameError: text`."""
    name, colon, text = line.partition(": ")
    return (
        bool(colon and text)
        and name.replace(".", "").isidentifier()
        and name.endswith(("Error", "Exception"))
        and (not name.startswith(("java.", "org.", "py4j.")))
    )
