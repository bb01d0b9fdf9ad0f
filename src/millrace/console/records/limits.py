"""What all decoders are held to: what somebody else wrote must not cost more than looking at it is worth."""

from __future__ import annotations

from typing import Final

MAX_DEPTH: Final = 32
"""Of things inside things."""
MAX_ITEMS: Final = 20_000
"""Of all kinds together, in one key or value."""
MAX_TEXT: Final = 256 * 1024
"""Characters that one key or value is shown as."""
MAX_HEX_BYTES: Final = 16 * 1024


class Undecodable(ValueError):
    """These bytes are not of that format."""


class Budget:
    """How many items may still be made of one input."""

    __slots__ = ("_left",)

    def __init__(self, items: int = MAX_ITEMS) -> None:
        self._left = items

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Undecodable("it has too many items")
