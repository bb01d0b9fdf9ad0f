"""For every test here."""

from __future__ import annotations

from support.closing import files_are_closed

__all__ = ["files_are_closed"]
