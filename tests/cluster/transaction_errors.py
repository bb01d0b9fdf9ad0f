"""What becomes of a transaction, to the program that makes it."""

from __future__ import annotations


class Gone(Exception):
    """The producer is of no use any more: its place was taken, or it is broken."""


class MustAbort(Exception):
    """The transaction cannot be committed."""
