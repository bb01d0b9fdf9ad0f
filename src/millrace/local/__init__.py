"""Processes of a cluster on this machine: a Java, ZooKeeper, brokers. Not here: what they serve."""
