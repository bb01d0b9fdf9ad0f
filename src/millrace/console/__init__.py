"""The web console: a client like any other, in a process of its own, for this broker or any Kafka."""
