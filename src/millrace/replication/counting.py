"""What is counted of a broker's replicas as a whole: plain numbers, read when somebody asks.

What clients have written and read is counted by each partition. When a replica goes its counts stay here: sums over all
of them never go back.
"""

from __future__ import annotations


class ReplicaCounts:
    """The counts of one broker. Owner: the event loop."""

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "isr_expands",
        "isr_shrinks",
        "retired_bytes_in",
        "retired_bytes_out",
        "retired_records_in",
        "retired_records_out",
    )

    def __init__(self) -> None:
        self.bytes_in = 0
        """What this broker has fetched as a follower."""
        self.bytes_out = 0
        """What followers have fetched here."""
        self.isr_shrinks = 0
        self.isr_expands = 0
        self.retired_bytes_in = 0
        """Of replicas that are gone: what clients have produced to them; and so on."""
        self.retired_records_in = 0
        self.retired_bytes_out = 0
        self.retired_records_out = 0

    def __repr__(self) -> str:
        return f"ReplicaCounts({self.isr_shrinks} shrinks, {self.isr_expands} expands)"

    def isr_changed(self, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        """The ISR of a partition that is led here is another one."""
        self.isr_shrinks += len({*before} - {*after})
        self.isr_expands += len({*after} - {*before})

    def retire(self, bytes_in: int, records_in: int, bytes_out: int, records_out: int) -> None:
        """A replica goes."""
        self.retired_bytes_in += bytes_in
        self.retired_records_in += records_in
        self.retired_bytes_out += bytes_out
        self.retired_records_out += records_out
