"""Keys from passwords (PBKDF2), in threads: a derivation takes milliseconds, and the event loop has none to give.

At most half of the processors derive at once, so that a flood of logins does not take the machine from those who are
in. The others wait; who is gone meanwhile is passed over.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from millrace.security.scram import ScramMechanism, salted_password


class Recipe(NamedTuple):
    """How a password becomes a key."""

    mechanism: ScramMechanism
    salt: bytes
    iterations: int


class KeyDerivation:
    """The threads. Owner: the broker, which stops it."""

    def __init__(self) -> None:
        self._threads = max(1, (os.cpu_count() or 1) // 2)
        self._pool: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"KeyDerivation({self._threads} threads)"

    async def salted_passwords(self, password: str, recipes: Sequence[Recipe]) -> list[bytes]:
        """What the password gives by each recipe."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="derive-keys")
        return await asyncio.get_running_loop().run_in_executor(self._pool, _derive, password, recipes)

    async def stop(self) -> None:
        """Harmless when nothing was derived."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _derive(password: str, recipes: Sequence[Recipe]) -> list[bytes]:
    return [salted_password(recipe.mechanism, password, recipe.salt, recipe.iterations) for recipe in recipes]
