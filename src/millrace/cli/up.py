"""`millrace up`: a broker or a cluster on this machine, with nothing to configure; in the foreground, or detached.

Everything is kept under one directory (`./millrace-data` unless told otherwise; `local.folder` says what is where).
Starting again on the same directory goes on where it stopped: a cluster with as many brokers as it had, a single broker
alone, or as the first of a cluster if more are asked for.

One broker runs in this process and keeps its metadata itself. Several are processes of their own with
`broker-ID/server.properties` and `broker-ID/log`, and share a ZooKeeper: the user's, or one in `zookeeper/`.

Detached, the same command runs in a process of its own that outlives this one; this one waits for its `ready` line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from millrace.admin.times import parse_duration_ms
from millrace.cli.console import parse_listen
from millrace.cli.options import DEFAULT_DATA, Data, name_values
from millrace.cli.output import CommandError, count_text, print_remark
from millrace.clock import Clock, SystemClock

if TYPE_CHECKING:
    from millrace.cluster.image import ClusterImage
    from millrace.config import BrokerConfig
    from millrace.local.brokers import BrokerProcess
    from millrace.local.cluster import LocalCluster
    from millrace.local.folder import Folder, Use
    from millrace.local.secured import Secured

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
STEADY_S: Final = 60.0
"""A broker that ran this long was no failed start."""
_LOOK_EVERY_S: Final = 0.1
_METRICS: Final = "metrics="
_CONSOLE: Final = "console="
_NO_CONSOLE: Final = "millrace: the console has ended:"
_SETTINGS: Final = "MILLRACE_UP_SETTINGS"

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Examples: `millrace up --detach` in the background, until `millrace down`; `millrace up --secure`; "
    "`millrace up --brokers 3 --data /var/tmp/millrace --set num.partitions=4`"
)
def up(
    *,
    brokers: Annotated[
        int | None,
        typer.Option(
            "--brokers",
            "-n",
            min=1,
            show_default="as many as there are in --data, 1 in a new one",
            help="How many. Several share a ZooKeeper; new topics then have min(3, N) replicas, and from three "
            "brokers on min.insync.replicas is 2, unless --set says otherwise. A single broker's data becomes broker "
            "1's.",
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            "--port", "-p", min=0, max=65535, help="Where the first listens, the others follow; 0: free ones."
        ),
    ] = 9092,
    host: Annotated[str, typer.Option("--host", help="The address to listen on and to tell clients.")] = "127.0.0.1",
    data: Data = DEFAULT_DATA,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Return when it is ready and leave it running; `millrace down` ends it."),
    ] = False,
    zookeeper: Annotated[
        str | None,
        typer.Option(
            "--zookeeper",
            metavar="HOST:PORT,...",
            help="Your own ensemble, with /PATH if it is shared; otherwise several brokers get one from the jars in "
            "the pyspark package.",
        ),
    ] = None,
    zookeeper_nodes: Annotated[
        int, typer.Option("--zookeeper-nodes", help="1, or 3 for an ensemble that survives the loss of one.")
    ] = 1,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure",
            help="With TLS, logins and rights: makes certificates and users in DATA/security, and says on a line "
            "`security=DIR` after `ready` where the settings of clients are. A folder that was started so stays so.",
        ),
    ] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Start a broker of a cluster again when it dies.")] = False,
    for_so_long: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="Stop by itself after 90s, 15m, 2h; not before.")
    ] = None,
    console: Annotated[
        bool,
        typer.Option("--console", help="Also the web console; prints `console=URL` once a browser can open it."),
    ] = False,
    console_listen: Annotated[
        str,
        typer.Option("--console-listen", metavar="HOST:PORT", help="Where the console listens; port 0 for a free one."),
    ] = "127.0.0.1:9080",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A broker setting, repeatable.")
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            "--log-level",
            help="debug, info, warning or error: on stderr (default warning), of a cluster in DATA/broker-ID/log "
            "(default info).",
        ),
    ] = None,
) -> None:
    """Start a broker or a cluster; prints `ready bootstrap=HOST:PORT,...` once clients connect.

    After that, for each broker, `metrics=URL`: where it tells Prometheus of itself.
    """
    if zookeeper_nodes not in (1, 3):
        raise CommandError(f"--zookeeper-nodes is 1 or 3, not {zookeeper_nodes}", exit_code=2)
    from millrace.cli.serve import check_log_level
    from millrace.config import BrokerConfig
    from millrace.local.folder import Folder
    from millrace.security import exposure

    given = name_values(settings, "--set")
    lasting_ms = None if for_so_long is None else parse_duration_ms(for_so_long)
    console_address = None
    if console:
        parse_listen(console_listen)
        console_address = console_listen
    if log_level is not None:
        check_log_level(log_level)
    if remark := exposure.secrets_text(given):
        print_remark(f"millrace: {remark}")
    given |= _handed_over()
    address = f"[{host}]" if ":" in host else host
    # A mistake is one line here instead of one in every broker's log.
    config = BrokerConfig({"listeners": f"PLAINTEXT://{address}:{port}", **given})
    folder = Folder(data)
    if detach:
        optional = {
            "--brokers": brokers,
            "--zookeeper": zookeeper,
            "--log-level": log_level,
            "--console-listen": console_address,
            "--for": for_so_long,
        }
        words = [
            *("--port", str(port), "--host", host, "--data", folder.name),
            *("--zookeeper-nodes", str(zookeeper_nodes)),
            *(word for name, value in optional.items() if value is not None for word in (name, str(value))),
        ]
        flags = [
            flag for flag, given in (("--restart", restart), ("--secure", secure), ("--console", console)) if given
        ]
        _detach(folder, [*words, *flags], given, with_console=console)
        return
    with folder.use() as use, _ending_after(lasting_ms):
        start = what_to_start(folder, brokers, zookeeper)
        if start.remark:
            print_remark(f"millrace: {start.remark}")
        secured = _secured(folder, host, wanted=secure)
        if secured is None and (remark := exposure.open_listeners_text(config)):
            print_remark(f"millrace: {remark}")
        if secured is not None and start.zookeeper is not None:
            told = {"zookeeper.connect": start.zookeeper, "listeners": secured.listener(address, port)}
            if remark := exposure.open_metadata_text(BrokerConfig({**told, **secured.broker_settings(), **given})):
                print_remark(f"millrace: {remark}")
        if start.is_single:
            with _console(folder, console_address, secured) as start_console:
                _run_single(folder, use, host, port, given, log_level or "warning", secured, start_console)
        else:
            from millrace.local.cluster import LocalCluster

            cluster = LocalCluster(
                folder.path,
                brokers=start.brokers,
                host=host,
                port=port,
                zookeeper=start.zookeeper,
                zookeeper_nodes=zookeeper_nodes,
                settings=given,
                log_level=log_level or "info",
                secured=secured,
            )
            with _console(folder, console_address, secured) as start_console:
                _run_cluster(cluster, use, restart=restart, secured=secured, start_console=start_console)


@contextmanager
def _ending_after(lasting_ms: int | None) -> Iterator[None]:
    """Stop as by a signal when the time is over."""
    if lasting_ms is None:
        yield
        return
    timer = threading.Timer(lasting_ms / 1000, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(frozen=True, slots=True)
class Start:
    """What a start in a folder comes to."""

    brokers: int
    is_single: bool = False
    """One broker in this process, which keeps its metadata itself."""
    zookeeper: str | None = None
    """The user's own."""
    remark: str = ""


def what_to_start(folder: Folder, brokers: int | None, zookeeper: str | None) -> Start:
    """From what is in the folder and what was asked for. CommandError where the one cannot serve the other."""
    from millrace.local.folder import Kind

    if zookeeper is not None and folder.zookeeper.is_dir():
        raise CommandError(f"{folder.name} has a ZooKeeper of its own, {folder.zookeeper}: leave out --zookeeper")
    kind = folder.kind
    if kind is Kind.LOGS_ALONE and zookeeper is None:
        raise CommandError(
            f"{folder.data(1)} holds logs whose metadata is in a ZooKeeper: say in which with --zookeeper HOST:PORT"
        )
    if kind is Kind.SINGLE or kind is Kind.NOTHING:
        if zookeeper is None and brokers in {None, 1}:
            return Start(1, is_single=True)
        remark = "the topics of the single broker go on in the cluster: their metadata moves to ZooKeeper, once"
        return Start(brokers or 1, zookeeper=zookeeper, remark=remark if kind is Kind.SINGLE else "")
    known = max(len(folder.broker_ids), 1)
    wanted = brokers or known
    remark = ""
    if wanted < known:
        remark = f"{folder.name} is a cluster of {count_text(known, 'broker')}, and only {wanted} will run"
    elif brokers is None and known > 1:
        remark = f"{folder.name} is a cluster: starting all its {count_text(known, 'broker')}"
    return Start(wanted, zookeeper=zookeeper or folder.zookeeper_hosts, remark=remark)


def _secured(folder: Folder, host: str, *, wanted: bool) -> Secured | None:
    if not wanted and not folder.security.is_dir():
        return None
    from millrace.local.secured import secure

    return secure(folder.path, host)


def _tell_clients(directory: Path) -> None:
    """Where the settings of clients are, and those of the application to copy."""
    from millrace.local.secured import CLIENT_FILES

    print(f"security={directory}", flush=True)
    print_remark(f"millrace: TLS, logins by SCRAM-SHA-512, rights by ACLs; for clients, in {directory}:")
    for name, what in CLIENT_FILES.items():
        print_remark(f"  {name:<18} {what}")
    _show_client_settings(directory)


def _show_client_settings(directory: Path) -> None:
    """The application's settings, to copy: there is a password in them, so for a person's eyes and not for a log."""
    if sys.stderr.isatty():
        path = directory / "client.properties"
        print_remark(f"millrace: the application's {path.name}:\n{path.read_text()}")


def _warn_of_stale(secured: Secured, users: Sequence[str]) -> None:
    if users:
        print_remark(
            f"millrace: {', '.join(users)} cannot log in as the files in {secured.directory} say: the password was "
            f"changed, or the user removed; write the right one into {secured.directory / 'users.json'}"
        )


def _run_single(
    folder: Folder,
    use: Use,
    host: str,
    port: int,
    settings: dict[str, str],
    log_level: str,
    secured: Secured | None,
    start_console: Callable[[str], None],
) -> None:
    from millrace.cli.serve import configure_logging, serve
    from millrace.config import BrokerConfig

    configure_logging(log_level)
    address = f"[{host}]" if ":" in host else host
    config = BrokerConfig.load(
        None,
        {
            "node.id": "1",
            "listeners": f"PLAINTEXT://{address}:{port}" if secured is None else secured.listener(address, port),
            **({} if secured is None else secured.broker_settings()),
            "log.dirs": str(folder.data(1)),
            # One person's machine: the first consumer of a group should not wait for others to join.
            "group.initial.rebalance.delay.ms": "0",
            **settings,
        },
    )
    if secured is None:
        serve(
            config,
            pid_file=folder.home(1) / "pid",
            ready=lambda bootstrap: use.ready({1: bootstrap}),
            told=start_console,
        )
        return
    secured.close_to_others(folder.home(1))
    _warn_of_stale(secured, _prepare_single(secured, config))

    def ready(bootstrap: str) -> None:
        secured.write_client_files(bootstrap)
        use.ready({1: bootstrap})

    def told(bootstrap: str) -> None:
        _tell_clients(secured.directory)
        start_console(bootstrap)

    with secured.kept_valid():
        serve(
            config,
            pid_file=folder.home(1) / "pid",
            ready=ready,
            told=told,
        )


def _prepare_single(secured: Secured, config: BrokerConfig) -> list[str]:
    import asyncio

    from millrace.broker import store_for

    async def prepare() -> list[str]:
        clock = SystemClock()
        return await secured.prepare(store_for(config, clock), clock)

    return asyncio.run(prepare())


@contextmanager
def _console(folder: Folder, listen: str | None, secured: Secured | None) -> Iterator[Callable[[str], None]]:
    """What starts the console, given where the brokers answer; it ends with them."""
    if listen is None:
        yield lambda _: None
        return
    from millrace.local.console import ConsoleProcess

    running: list[ConsoleProcess] = []

    def start(bootstrap: str) -> None:
        process = ConsoleProcess(
            bootstrap, listen, {} if secured is None else secured.console_settings(), folder.path / "console-log"
        )
        running.append(process)
        process.start(
            lambda url: print(f"{_CONSOLE}{url}", flush=True),
            lambda why: print_remark(f"{_NO_CONSOLE} {why.removeprefix('millrace: error: ')}"),
        )

    try:
        yield start
    finally:
        for process in running:
            process.stop()


def _run_cluster(
    cluster: LocalCluster,
    use: Use,
    *,
    restart: bool,
    secured: Secured | None,
    start_console: Callable[[str], None],
) -> None:
    from millrace.cli.serve import print_ready

    with _interrupted_by_signals(), nullcontext() if secured is None else secured.kept_valid():
        try:
            bootstrap = cluster.start()
            if secured is not None:
                secured.write_client_files(bootstrap)
                _warn_of_stale(secured, cluster.stale_users)
            use.ready({broker_id: broker.bootstrap or "" for broker_id, broker in cluster.brokers.items()})
            if cluster.migrated is not None and (remark := _migrated_text(cluster.migrated)):
                print_remark(f"millrace: {remark}")
            metrics_urls = [broker.metrics_url for broker in cluster.brokers.values()]
            print_ready(bootstrap, metrics_urls)
            if secured is not None:
                _tell_clients(secured.directory)
            start_console(bootstrap)
            Supervision(cluster, restart=restart).run()
        except KeyboardInterrupt:
            if not cluster.bootstrap:
                raise  # it had not begun
        finally:
            _end(cluster)


def _migrated_text(image: ClusterImage) -> str:
    topics = sum(not topic.internal for topic in image.topics.values())
    if not topics:
        return ""
    more = "for more: millrace cluster reassign --replication-factor N"
    return f"{count_text(topics, 'topic')} came along, on broker 1 with one replica as before; {more}"


def _end(cluster: LocalCluster) -> None:
    """Stop cleanly; whoever asks a second time does not want to wait."""
    try:
        cluster.stop()
    except KeyboardInterrupt:
        cluster.kill()
        raise


# --- in the background ------------------------------------------------------------------------------------------------


def _detach(folder: Folder, options: list[str], settings: dict[str, str], *, with_console: bool) -> None:
    """Run `up` with these options in a process that outlives this one, and return when it is ready.

    Settings go in its environment, which others cannot read: a command line stands in the list of processes.
    """
    if (holder := folder.holder()) is not None:
        raise CommandError(folder.in_use_text(holder))
    is_new = not folder.path.exists()
    folder.path.mkdir(parents=True, exist_ok=True)
    with folder.log_path.open("ab") as log:
        begin = log.tell()
        process = subprocess.Popen(  # noqa: S603  # our own command line
            [sys.executable, "-m", "millrace", "up", *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
                _SETTINGS: json.dumps(settings),
            },
        )
    try:
        ready = _wait_until_ready(process, lambda: _lines(folder.log_path, begin), with_console=with_console)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    said = _lines(folder.log_path, begin)
    if ready is None:
        if is_new:
            folder.remove_if_empty()
        for line in said[:-1]:
            print_remark(line)
        last = said[-1] if said else "no output"
        raise CommandError(last.removeprefix("millrace: error: "), exit_code=process.returncode or 1)
    for line in said[: said.index(ready)]:  # what comes after it may not be there yet
        if line.startswith("millrace: "):
            print_remark(line)
    print(ready, flush=True)
    for line in said[said.index(ready) + 1 :]:  # those of metrics are written together with it
        if line.startswith((_METRICS, _CONSOLE)):
            print(line, flush=True)
        elif line.startswith(_NO_CONSOLE):
            print_remark(line)
    if folder.security.is_dir():
        print(f"security={folder.security}", flush=True)
        print_remark(f"TLS, logins and rights are in force; the settings of clients are in {folder.security}")
        _show_client_settings(folder.security)
    print_remark(
        f"it runs in the background, pid {process.pid}; log: {folder.name}/log; to end it: millrace down{folder.option}"
    )


def _handed_over() -> dict[str, str]:
    """The settings of a process that `_detach` started; they are not for its children."""
    settings: dict[str, str] = json.loads(os.environ.pop(_SETTINGS, "{}"))
    return settings


def _lines(path: Path, begin: int) -> list[str]:
    """The whole lines of a log from a position on."""
    with path.open("rb") as log:
        log.seek(begin)
        return [line.rstrip("\n") for line in log.read().decode(errors="replace").splitlines(True) if line[-1] == "\n"]


def _wait_until_ready(
    process: subprocess.Popen[bytes], lines: Callable[[], list[str]], *, with_console: bool
) -> str | None:
    """Its `ready` line; None where it ended instead. How long it may take is its own business.

    With a console, what becomes of that is waited for, too.
    """
    pause = threading.Event()  # never set: a wait on it is a pause
    while True:
        ended = process.poll() is not None  # asked before the log is read: what it said last is in there
        said = lines()
        ready = next((line for line in said if line.startswith("ready bootstrap=")), None)
        if ended:
            return None
        if ready is not None and (not with_console or any(line.startswith((_CONSOLE, _NO_CONSOLE)) for line in said)):
            return ready
        pause.wait(_LOOK_EVERY_S / 2)


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does, also where a shell in the background has Ctrl-C ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


class Supervision:
    """Looks after the processes of a cluster: says when one ends, and starts it again if asked to."""

    def __init__(self, cluster: LocalCluster, *, restart: bool, clock: Clock | None = None) -> None:
        self._cluster = cluster
        self._restart = restart
        self._clock = clock or SystemClock()
        self._pause = threading.Event()  # never set: a wait on it is a pause
        self._reported: set[int] = set()
        self._zookeeper_reported: set[int] = set()
        self._due: dict[int, float] = {}
        self._pauses_s: dict[int, float] = {}
        self._launched: dict[int, float] = {}

    def run(self) -> None:
        """For ever; a signal ends it."""
        while True:
            self._pause.wait(_LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """One round: report who has ended, start who is due."""
        now = self._clock.monotonic()
        for broker in self._cluster.brokers.values():
            if broker.exit_status is not None and broker.broker_id not in self._reported:
                self._report(broker, now)
        for broker_id in [broker_id for broker_id, due in self._due.items() if due <= now]:
            del self._due[broker_id]
            self._reported.discard(broker_id)
            self._launched[broker_id] = now
            self._cluster.brokers[broker_id].launch()
        self._look_at_zookeeper()

    def _report(self, broker: BrokerProcess, now: float) -> None:
        from millrace.local.children import last_line

        self._reported.add(broker.broker_id)
        text = f"broker {broker.broker_id} {_ended(broker.exit_status or 0)}; see {broker.log_path}"
        if self._restart:
            pause_s = self._next_pause_s(broker.broker_id, now)
            self._due[broker.broker_id] = now + pause_s
            print_remark(f"millrace: {text}; starting it again in {pause_s:g} s")
        else:
            print_remark(f"millrace: {text} (last line: {last_line(broker.log_path)[:200] or 'none'})")

    def _next_pause_s(self, broker_id: int, now: float) -> float:
        """Longer each time for a broker that keeps dying; short again for one that has run for a while."""
        again = now - self._launched.get(broker_id, now - STEADY_S) < STEADY_S
        pause_s = min(self._pauses_s[broker_id] * 2, LONGEST_PAUSE_S) if again else FIRST_PAUSE_S
        self._pauses_s[broker_id] = pause_s
        return pause_s

    def _look_at_zookeeper(self) -> None:
        servers = self._cluster.zookeeper
        if servers is None:
            return
        for node, status in servers.exited().items():
            if node in self._zookeeper_reported:
                continue
            print_remark(f"millrace: ZooKeeper server {node} {_ended(status)}; see {servers.log_path(node)}")
            if self._restart:
                servers.launch(node)
            else:
                self._zookeeper_reported.add(node)


def _ended(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
