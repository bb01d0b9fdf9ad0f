"""What people may do in the console, whatever the brokers' rules would let them do besides."""

from __future__ import annotations

from enum import IntEnum


class Role(IntEnum):
    """Each may do what the ones before it may."""

    VIEWER = 1
    """See everything that the brokers show them."""
    OPERATOR = 2
    """Produce records, move and delete groups, replay dead letters, start and stop pipelines."""
    ADMIN = 3
    """Topics, settings, reassignments, users, rules, quotas."""

    @classmethod
    def named(cls, name: str) -> Role:
        """ValueError for a name that there is none of."""
        try:
            return cls[name.upper()]
        except KeyError:
            raise ValueError(f"a role is one of {', '.join(each.name.lower() for each in cls)}, not '{name}'") from None
