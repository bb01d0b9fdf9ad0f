"""Which batches of a fetch a reader of committed records must not show.

Pure bytes, over the batches of one fetch in their order. Not here: fetching, and the broker's index of aborted
transactions (`storage.txnindex`), from which it answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.records.batch import CONTROL_BIT, TRANSACTIONAL_BIT
from millrace.records.control import MarkerType, decode_end_marker


class AbortedTransactions:
    """Which batches belong to aborted transactions: Kafka's rule.

    A transaction is aborted from its first offset to the abort marker of its producer.
    """

    def __init__(self, aborted: Sequence[tuple[int, int]]) -> None:
        """`aborted`: producer id and first offset of each, as a fetch tells them."""
        self._coming = sorted(aborted, key=lambda entry: entry[1], reverse=True)
        self._producers: set[int] = set()

    def hides(self, batch: memoryview, attributes: int, producer_id: int, last_offset: int) -> bool:
        """Whether the records of this batch are not to be shown; markers change what holds for later ones."""
        if producer_id < 0:
            return False
        while self._coming and self._coming[-1][1] <= last_offset:
            self._producers.add(self._coming.pop()[0])
        if attributes & CONTROL_BIT:
            marker = decode_end_marker(batch)
            if marker is not None and marker.type is MarkerType.ABORT:
                self._producers.discard(producer_id)
            return True
        return attributes & TRANSACTIONAL_BIT != 0 and producer_id in self._producers
