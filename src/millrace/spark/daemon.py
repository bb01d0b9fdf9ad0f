"""The daemon that forks Spark's Python workers, `pyspark.daemon`, but a worker that is let go says nothing.

Spark keeps workers for later and closes the socket of one that was idle for a minute. PySpark's worker takes the end
of its input for a failure, tries to report it on that socket, and dies of the broken pipe with a traceback, on the
terminal of whoever runs Spark on their own machine. Here a worker that waits for its next task looks whether there is
one, and ends if there is none. Sessions on this machine use it (`spark.session`); a cluster keeps PySpark's own.
"""

from __future__ import annotations

import os
import socket

from pyspark import daemon

_work = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """One task of a worker process, called again and again."""
    try:
        wanted = sock.recv(1, socket.MSG_PEEK)
    except ConnectionResetError:
        wanted = b""
    if not wanted:
        os._exit(0)
    return _work(sock, authenticated)


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
