"""Three brokers of millrace, beside three of Apache Kafka 4.3.0: `make bench-cluster`, ARGS="[MEASUREMENT] OPTIONS".

    throughput    producing with RF 3 and acks=all, the default; also consuming, memory and the time to start
    failover      the longest gap between acknowledgements: kill -9 of a leader, rolling restart
    partitions    2,000 partitions: creation, failover, return of a broker

Exits with 1 when a bar is missed. An interrupt ends every process that was started, and so does the end of this one.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from benches.cluster import failover, partitions, throughput
from support.kafka_jars import KafkaUnavailable
from support.servers import ServerFailed

MEASUREMENTS = {"throughput": throughput.main, "failover": failover.main, "partitions": partitions.main}


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Once: what ends the processes must not be interrupted itself."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    name, arguments = "throughput", sys.argv[1:]
    if arguments and arguments[0] in MEASUREMENTS:
        name, *arguments = arguments
    try:
        return MEASUREMENTS[name](arguments)
    except KafkaUnavailable as unavailable:
        print(f"the comparison needs Apache Kafka's jars: {unavailable}", file=sys.stderr)
    except ServerFailed as failed:
        print(failed, file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted; every process has been ended", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
