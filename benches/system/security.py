"""What security costs: `make bench-security`.

Three comparisons, each with its bar:

- `tls`: producing and consuming over TLS 1.3 with TLS_AES_256_GCM_SHA384 and the same certificate, millrace beside
  Apache Kafka 4.3.0, round by round in turn; at least 1.0.
- `acls`: producing at client defaults on a broker with 1,000 rules and, at the same time, on one without an
  authorizer; at least 0.97, as the median of several such pairs.
- `logins`: 500 logins a second by SCRAM-SHA-512 while another client produces a record at a time; the p99 of its
  acknowledgements is at most twice what it is without the logins.

The clients are Kafka's ProducerPerformance and librdkafka, as in `make bench`; the logins are made by a process of
their own, which knows the salted password: deriving it costs a client milliseconds of its own time, and none of the
broker's.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import hmac
import json
import secrets
import socket
import ssl
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from rich.console import Console

from benches.system import workloads
from benches.system.process import cpu_use
from benches.system.report import Comparison, describe_machine
from benches.system.workloads import QUIET
from millrace.security.certificates import make_authority
from support.kafka_jars import KafkaJars, KafkaUnavailable, kafka_jars
from support.servers import HOST, KafkaServer, MillraceServer, Server

RECORD_BYTES = 1000
CIPHER = "TLS_AES_256_GCM_SHA384"
CONSUME_PASSES = 3
RULES = 1000
RULED = {
    "without": {"flush.mode": "os"},
    "with": {
        "flush.mode": "os",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    },
}
LOGINS_PER_S = 500
PACE_PER_S = 525
"""A little faster: some of a round is spent before the first and after the last login."""
LOGIN_THREADS = 8
ITERATIONS = 4096
USER, PASSWORD = "alice", "correct horse battery staple"
WORK = ("tls", "acls", "logins")
RESULTS = Path(__file__).parents[1] / "results"
_console = Console(stderr=True, width=120, log_path=False)


# --- TLS --------------------------------------------------------------------------------------------------------------


def tls(options: argparse.Namespace, stack: ExitStack) -> bool:
    jars = kafka_jars()
    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millrace-bench-")))
    authority = make_authority("bench")
    authority.write(home / "ca.pem", home / "ca.key")
    authority.issue("broker", hosts=("127.0.0.1", "localhost")).write(home / "broker.pem")
    server_side = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(home / "broker.pem"),
        "ssl.enabled.protocols": "TLSv1.3",
        "ssl.cipher.suites": CIPHER,
    }
    client_side = {"security.protocol": "SSL", "ssl.truststore.type": "PEM"}
    java = {**client_side, "ssl.truststore.location": str(home / "ca.pem"), "ssl.cipher.suites": CIPHER}
    librdkafka = {"security.protocol": "SSL", "ssl.ca.location": str(home / "ca.pem")}
    makers: dict[str, Callable[[], Server]] = {
        "kafka": lambda: KafkaServer(jars, server_side, protocols=["SSL"]),
        "millrace": lambda: MillraceServer({"flush.mode": "os", **server_side}, protocols=["SSL"]),
    }
    servers = {side: stack.enter_context(make()) for side, make in makers.items()}
    for side, server in servers.items():
        version, cipher = negotiated(server.ports["SSL"], home / "ca.pem")
        _console.log(f"{side}: {version}, {cipher}")
        if (version, cipher) != ("TLSv1.3", CIPHER):
            raise RuntimeError(f"{side} does not use {CIPHER}: the comparison would not be one")
    result = Comparison("make bench-security ARGS='--only tls'", describe_machine(), options.rounds)
    _alternate(servers, options, lambda *turn: _over_tls(jars, servers, java, librdkafka, options, result, *turn))
    return _told(result, "security-tls", lambda row: row.quantity != "throughput" or (row.ratio or 0) >= 1.0)


def negotiated(port: int, authorities: Path) -> tuple[str, str]:
    """What a client of OpenSSL's defaults comes to use."""
    context = ssl.create_default_context(cafile=str(authorities))
    with socket.create_connection((HOST, port)) as plain, context.wrap_socket(plain, server_hostname=HOST) as peer:
        return peer.version() or "", (peer.cipher() or ("",))[0]


def _over_tls(
    jars: KafkaJars,
    servers: Mapping[str, Server],
    java: Mapping[str, str],
    librdkafka: Mapping[str, str],
    options: argparse.Namespace,
    result: Comparison,
    side: str,
    topic: str,
    keep: bool,
) -> str:
    server, records = servers[side], options.records
    config = {} if side == "kafka" else {"flush.mode": "os"}
    workloads.create_topic(server.bootstrap, topic, config)
    address = server.bootstrap_of("SSL")
    with cpu_use(server.pid) as producing:
        seen = workloads.produce(jars, address, topic, records, RECORD_BYTES, java)
    with cpu_use(server.pid) as consuming:
        seconds = sum(workloads.consume(address, topic, records, librdkafka) for _ in range(CONSUME_PASSES))
    workloads.delete_topic(server.bootstrap, topic)
    gigabytes = records * RECORD_BYTES / 1e9
    consumed_mb_s = CONSUME_PASSES * gigabytes * 1000 / seconds
    if keep:
        for work, rate, unit, cpu_s, size_gb in (
            ("produce 1,000 B, acks=all, TLS", seen.records_per_s, "records/s", producing.seconds, gigabytes),
            ("consume 1,000 B, TLS", consumed_mb_s, "MB/s", consuming.seconds, CONSUME_PASSES * gigabytes),
        ):
            result.add(side, work, "throughput", unit, "higher", rate)
            result.add(side, work, "broker CPU", "s per GB", "lower", cpu_s / size_gb)
    return f"produced {seen.records_per_s:,.0f} records/s, consumed {consumed_mb_s:,.0f} MB/s"


# --- rules ------------------------------------------------------------------------------------------------------------


def acls(options: argparse.Namespace, stack: ExitStack) -> bool:
    """Both sides at the same time, each with a producer of its own: what else the machine does slows both.

    Two processes of the same code differ, too: there are several pairs, each side first in turn.
    """
    jars = kafka_jars()
    ratios: dict[str, list[float]] = {"throughput": [], "CPU": []}
    for pair in range(1, options.pairs + 1):
        processes = stack.enter_context(ExitStack())
        order = ("without", "with") if pair % 2 else ("with", "without")
        servers = {side: processes.enter_context(MillraceServer(RULED[side])) for side in order}
        _add_rules(servers["with"].bootstrap)
        pool = processes.enter_context(ThreadPoolExecutor(len(servers)))
        seen: dict[str, list[tuple[float, float]]] = {side: [] for side in servers}
        for number in range(options.rounds + 1):  # the first warms both
            work = {side: pool.submit(_produce, jars, servers[side], f"bench-{number}", options) for side in order}
            for side, done in work.items():
                seen[side].append(done.result())
        processes.close()
        for place, what in enumerate(ratios):
            medians = {side: statistics.median(each[place] for each in seen[side][1:]) for side in seen}
            ratios[what].append(medians["with"] / medians["without"])
        _console.log(f"pair {pair}: throughput {ratios['throughput'][-1]:.3f}, broker CPU {ratios['CPU'][-1]:.3f}")
    result = {
        "command": f"make bench-security ARGS='--only acls --pairs {options.pairs}'",
        "machine": describe_machine(),
        "records": options.records,
        "rounds": options.rounds,
        "ratios": ratios,
    }
    (RESULTS / "security-acls.json").write_text(json.dumps(result, indent=1) + "\n")
    for what, values in ratios.items():
        print(
            f"produce 1,000 B at client defaults, {RULES:,} rules beside no authorizer, {what}: "
            f"{statistics.median(values):.3f} (median of {len(values)} pairs, {min(values):.3f}-{max(values):.3f})"
        )
    return statistics.median(ratios["throughput"]) >= 0.97


def _produce(jars: KafkaJars, server: Server, topic: str, options: argparse.Namespace) -> tuple[float, float]:
    """Records a second, and seconds of the broker's CPU."""
    workloads.create_topic(server.bootstrap, topic, {"flush.mode": "os"})
    with cpu_use(server.pid) as cpu:
        produced = workloads.produce(jars, server.bootstrap, topic, options.records, RECORD_BYTES)
    workloads.delete_topic(server.bootstrap, topic)
    return produced.records_per_s, cpu.seconds


def _add_rules(bootstrap: str) -> None:
    """The rule that lets the producer in is the last of a thousand; most are about other prefixes and principals."""

    def rule(name: str, pattern: ResourcePatternType, principal: str, operation: AclOperation) -> AclBinding:
        return AclBinding(ResourceType.TOPIC, name, pattern, principal, "*", operation, AclPermissionType.ALLOW)

    rules = [
        rule(f"team-{number}-", ResourcePatternType.PREFIXED, f"User:member-{number % 50}", AclOperation.WRITE)
        for number in range(RULES // 2)
    ]
    rules += [
        rule("*", ResourcePatternType.LITERAL, f"User:reader-{number}", AclOperation.READ)
        for number in range(RULES - len(rules) - 1)
    ]
    rules.append(rule("bench-", ResourcePatternType.PREFIXED, "User:ANONYMOUS", AclOperation.ALL))
    admin = AdminClient({**QUIET, "bootstrap.servers": bootstrap})
    for made in admin.create_acls(rules).values():
        made.result(timeout=60)


# --- logins -----------------------------------------------------------------------------------------------------------


def logins(options: argparse.Namespace, stack: ExitStack) -> bool:
    settings = {"flush.mode": "os", "sasl.enabled.mechanisms": "SCRAM-SHA-512"}
    server = stack.enter_context(MillraceServer(settings, protocols=["SASL_PLAINTEXT"]))
    admin = AdminClient({**QUIET, "bootstrap.servers": server.bootstrap})
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, ITERATIONS)
    upsertion = UserScramCredentialUpsertion(USER, info, PASSWORD.encode())
    admin.alter_user_scram_credentials([upsertion])[USER].result(timeout=30)
    workloads.create_topic(server.bootstrap, "logins", {"flush.mode": "os"})
    idle, busy, rates = [], [], []
    acknowledgements(server.bootstrap, 3)
    for number in range(1, options.rounds + 1):
        idle.append(acknowledgements(server.bootstrap, options.seconds))
        busy_p99, rate = _while_logging_in(server, options.seconds)
        busy.append(busy_p99)
        rates.append(rate)
        _console.log(f"round {number}: p99 {idle[-1]:.2f} ms idle, {busy_p99:.2f} ms with {rate:.0f} logins/s")
    ratio = statistics.median(busy) / statistics.median(idle)
    print(
        f"{statistics.median(rates):.0f} logins/s by SCRAM-SHA-512: p99 of acknowledgements "
        f"{statistics.median(idle):.2f} ms without, {statistics.median(busy):.2f} ms with them: {ratio:.2f} times"
    )
    return ratio < 2 and statistics.median(rates) >= LOGINS_PER_S


def acknowledgements(bootstrap: str, seconds: float) -> float:
    """p99 in ms of a record's way to its acknowledgement, 200 a second."""
    delays_ms: list[float] = []
    producer = Producer({**QUIET, "bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0})
    producer.produce("logins", b"first")
    producer.flush(30)
    begin = time.monotonic()
    for number in range(int(200 * seconds)):
        time.sleep(max(begin + number / 200 - time.monotonic(), 0))
        sent = time.monotonic()
        producer.produce(
            "logins", b"x", on_delivery=lambda *_, sent=sent: delays_ms.append((time.monotonic() - sent) * 1000)
        )
        producer.flush(30)
    return statistics.quantiles(delays_ms, n=100)[98]


def _while_logging_in(server: Server, seconds: float) -> tuple[float, float]:
    context = get_context("spawn")
    count, ready = context.Value("i", 0), context.Event()
    process = context.Process(target=log_in, args=(server.ports["SASL_PLAINTEXT"], seconds + 1, count, ready))
    process.start()
    try:
        if not ready.wait(60):
            raise RuntimeError("the process that logs in did not get ready")
        begin, before = time.monotonic(), count.value
        p99 = acknowledgements(server.bootstrap, seconds)
        rate = (count.value - before) / (time.monotonic() - begin)
    finally:
        process.join(60)
        process.kill()
    if process.exitcode:
        raise RuntimeError(f"the process that logs in ended with {process.exitcode}")
    return p99, rate


def log_in(port: int, seconds: float, count: object, ready: threading.Event) -> None:
    """500 logins a second, each on a connection of its own, from a few threads."""
    salted: dict[bytes, bytes] = {}
    pace = threading.Lock()
    begin = time.monotonic() + 0.5
    done = 0

    def run() -> None:
        nonlocal done
        while True:
            with pace:
                due = begin + done / PACE_PER_S
                if due > begin + seconds:
                    return
                done += 1
            time.sleep(max(due - time.monotonic(), 0))
            one_login(port, salted)
            with count.get_lock():  # type: ignore[attr-defined]
                count.value += 1  # type: ignore[attr-defined]

    one_login(port, salted)
    begin = time.monotonic() + 0.1
    ready.set()
    with ThreadPoolExecutor(LOGIN_THREADS) as pool:
        for each in [pool.submit(run) for _ in range(LOGIN_THREADS)]:
            each.result()


def one_login(port: int, salted: dict[bytes, bytes]) -> None:
    """Handshake and the two steps of SCRAM, in bytes; raises where the broker does not let it in."""
    with socket.create_connection((HOST, port)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _ask(peer, 17, 1, _text(b"SCRAM-SHA-512"))
        nonce = secrets.token_urlsafe(18).encode()
        first = b"n=" + USER.encode() + b",r=" + nonce
        server_first = _authenticate(peer, b"n,," + first)
        fields = dict(part.split(b"=", 1) for part in server_first.split(b","))
        salt = base64.b64decode(fields[b"s"])
        if salt not in salted:
            salted[salt] = hashlib.pbkdf2_hmac("sha512", PASSWORD.encode(), salt, int(fields[b"i"]))
        client_key = hmac.digest(salted[salt], b"Client Key", "sha512")
        final = b"c=biws,r=" + fields[b"r"]
        signed = first + b"," + server_first + b"," + final
        signature = hmac.digest(hashlib.sha512(client_key).digest(), signed, "sha512")
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        _authenticate(peer, final + b",p=" + base64.b64encode(proof))


def _text(text: bytes) -> bytes:
    return struct.pack(">h", len(text)) + text


def _authenticate(peer: socket.socket, token: bytes) -> bytes:
    reply = _ask(peer, 36, 1, struct.pack(">i", len(token)) + token)
    (error,) = struct.unpack_from(">h", reply)
    (message_length,) = struct.unpack_from(">h", reply, 2)
    position = 4 + max(message_length, 0)
    (length,) = struct.unpack_from(">i", reply, position)
    if error:
        raise RuntimeError(f"the login failed with error {error}")
    return reply[position + 4 : position + 4 + length]


def _ask(peer: socket.socket, key: int, version: int, body: bytes) -> bytes:
    request = struct.pack(">hhi", key, version, 1) + _text(b"bench") + body
    peer.sendall(struct.pack(">i", len(request)) + request)
    with peer.makefile("rb") as stream:
        (size,) = struct.unpack(">i", stream.read(4))
        return stream.read(size)[4:]


# --- all --------------------------------------------------------------------------------------------------------------


def _alternate(
    servers: Mapping[str, Server], options: argparse.Namespace, run: Callable[[str, str, bool], str]
) -> None:
    """Rounds that are not kept come first: they warm both sides."""
    for number in range(1 - options.warmup_rounds, options.rounds + 1):
        for side in servers if number % 2 else reversed(list(servers)):
            keep = number > 0
            said = run(side, f"bench-{'round' if keep else 'warm-up'}-{abs(number)}", keep)
            _console.log(f"{f'round {number}' if keep else 'warm-up':8} {side:9} {said}")


def _told(result: Comparison, name: str, is_good: Callable[..., bool]) -> bool:
    Console(width=120).print(result.table())
    for drift in result.drifting():
        print(f"still drifting: {drift}")
    result.save(RESULTS / f"{name}.json")
    return all(map(is_good, result.rows))


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-security", description="What security costs, with bars.")
    parser.add_argument("--only", action="append", choices=WORK, help="may be repeated; all by default")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each work on each side")
    parser.add_argument("--pairs", type=int, default=6, help="how many pairs of brokers the work with rules starts")
    parser.add_argument("--warmup-rounds", type=int, default=3, help="rounds before: a JVM is slow at first")
    parser.add_argument("--records", type=int, default=1_000_000, help="records of 1,000 B in a round")
    parser.add_argument("--seconds", type=float, default=10, help="how long a round of logins takes")
    options = parser.parse_args()
    good = True
    for work in options.only or WORK:
        try:
            with ExitStack() as stack:
                good &= {"tls": tls, "acls": acls, "logins": logins}[work](options, stack)
        except KafkaUnavailable as unavailable:
            print(f"the comparison needs Apache Kafka's jars: {unavailable}", file=sys.stderr)
            return 1
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
