"""`millrace up`: a broker or a cluster on this machine, in the foreground, with nothing to configure.

Everything is kept under one directory (`./millrace-data` unless told otherwise): for broker ID `broker-ID/pid` while it
runs and the log directory `broker-ID/data`. Starting again on the same directory goes on where it stopped.

One broker runs in this process and keeps its metadata itself. Several are processes of their own with
`broker-ID/server.properties` and `broker-ID/log`, and share a ZooKeeper: the user's, or one in `zookeeper/`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from millrace.cli.options import name_values
from millrace.cli.output import CommandError, print_remark
from millrace.clock import Clock, SystemClock

if TYPE_CHECKING:
    from millrace.local.brokers import BrokerProcess
    from millrace.local.cluster import LocalCluster

DEFAULT_DATA: Final = Path("millrace-data")
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
SETTLED_S: Final = 60.0
"""A broker that ran this long was no failed start."""
_LOOK_EVERY_S: Final = 0.1

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: millrace up --brokers 3 --data /var/tmp/millrace --set num.partitions=4")
def up(
    *,
    brokers: Annotated[
        int,
        typer.Option(
            "--brokers",
            "-n",
            min=1,
            help="How many. Several share a ZooKeeper; new topics then have min(3, N) replicas, and from three "
            "brokers on min.insync.replicas is 2, unless --set says otherwise.",
        ),
    ] = 1,
    port: Annotated[
        int,
        typer.Option(
            "--port", "-p", min=0, max=65535, help="Where the first listens, the others follow; 0: free ones."
        ),
    ] = 9092,
    host: Annotated[str, typer.Option("--host", help="The address to listen on and to tell clients.")] = "127.0.0.1",
    data: Annotated[Path, typer.Option("--data", "-d", help="Where everything is kept.")] = DEFAULT_DATA,
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
    restart: Annotated[bool, typer.Option("--restart", help="Start a broker of a cluster again when it dies.")] = False,
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
    """Start a broker or a cluster in the foreground; prints `ready bootstrap=HOST:PORT,...` once clients connect."""
    if zookeeper_nodes not in (1, 3):
        raise CommandError(f"--zookeeper-nodes is 1 or 3, not {zookeeper_nodes}", exit_code=2)
    given = name_values(settings, "--set")
    data = data.absolute()
    # A cluster that was made smaller, down to one broker, still has its metadata in ZooKeeper.
    if brokers > 1 or (zookeeper is None and (data / "zookeeper").is_dir()):
        _refuse_single_data(data)
        _run_cluster(
            data,
            brokers=brokers,
            host=host,
            port=port,
            zookeeper=zookeeper,
            zookeeper_nodes=zookeeper_nodes,
            settings=given,
            log_level=log_level or "info",
            restart=restart,
        )
    else:
        _run_single(data, host, port, zookeeper, given, log_level or "warning")


def _run_single(
    data: Path, host: str, port: int, zookeeper: str | None, settings: dict[str, str], log_level: str
) -> None:
    from millrace.cli.serve import configure_logging, serve
    from millrace.config import BrokerConfig

    configure_logging(log_level)
    home = data / "broker-1"
    config = BrokerConfig.load(
        None,
        {
            "node.id": "1",
            "listeners": f"PLAINTEXT://{host}:{port}",
            "log.dirs": str(home / "data"),
            # One person's machine: the first consumer of a group should not wait for others to join.
            "group.initial.rebalance.delay.ms": "0",
            **({} if zookeeper is None else {"zookeeper.connect": zookeeper}),
            **settings,
        },
    )
    serve(config, pid_file=home / "pid")


def _refuse_single_data(data: Path) -> None:
    """The topics of a broker that kept its metadata itself would not be there in a cluster."""
    single = data / "broker-1" / "data" / "metadata.db"
    if single.exists() and not (data / "zookeeper").exists():
        raise CommandError(
            f"{data} holds the data of a single broker, which a cluster cannot take over; use another --data"
        )


def _run_cluster(
    data: Path,
    *,
    brokers: int,
    host: str,
    port: int,
    zookeeper: str | None,
    zookeeper_nodes: int,
    settings: dict[str, str],
    log_level: str,
    restart: bool,
) -> None:
    from millrace.cli.serve import check_log_level
    from millrace.config import BrokerConfig
    from millrace.local.cluster import LocalCluster

    check_log_level(log_level)
    BrokerConfig(settings)  # a mistake is one line here instead of one in every broker's log
    cluster = LocalCluster(
        data,
        brokers=brokers,
        host=host,
        port=port,
        zookeeper=zookeeper,
        zookeeper_nodes=zookeeper_nodes,
        settings=settings,
        log_level=log_level,
    )
    with _interrupted_by_signals():
        try:
            print(f"ready bootstrap={cluster.start()}", flush=True)
            Supervision(cluster, restart=restart).run()
        except KeyboardInterrupt:
            if not cluster.bootstrap:
                raise  # it had not begun
        finally:
            _end(cluster)


def _end(cluster: LocalCluster) -> None:
    """Stop cleanly; whoever asks a second time does not want to wait."""
    try:
        cluster.stop()
    except KeyboardInterrupt:
        cluster.kill()
        raise


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
        again = now - self._launched.get(broker_id, now - SETTLED_S) < SETTLED_S
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
