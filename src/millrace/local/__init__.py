"""Processes of a cluster on this machine: a Java, ZooKeeper, brokers. Not here: what they serve."""

from __future__ import annotations

from typing import Final

DEFAULT_FOLDER: Final = "millrace-data"
"""Where `millrace up` keeps everything unless it is told another place."""
