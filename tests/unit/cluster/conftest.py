"""The ZooKeeper that some of these tests need."""

from __future__ import annotations

from support.zookeeper import zookeeper, zookeeper_hosts

__all__ = ["zookeeper", "zookeeper_hosts"]
