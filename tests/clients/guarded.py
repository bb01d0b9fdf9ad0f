"""A cluster in which rules of access are in force, and whoever connects is a super user, who makes them."""

from __future__ import annotations

from millrace.testing import Cluster

SUPER_USERS = "User:ANONYMOUS;User:admin"


def guarded_cluster(brokers: int, **settings: str) -> Cluster:
    """`settings` by their Kafka names, with `_` for `.`."""
    return Cluster(
        brokers=brokers,
        settings={
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": SUPER_USERS,
            **{name.replace("_", "."): value for name, value in settings.items()},
        },
    )
