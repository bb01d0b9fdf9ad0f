"""Whatever a test opens through `Files` is closed with it, also where it leaves a log as a crash would."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.storage.files import Files


@pytest.fixture(autouse=True)
def files_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Not left to the garbage collector: which test it would come in, and in which thread, nobody knows."""
    made: weakref.WeakSet[Files] = weakref.WeakSet()
    make = Files.__init__

    def remember(files: Files, *arguments: Any, **named: Any) -> None:
        make(files, *arguments, **named)
        made.add(files)

    monkeypatch.setattr(Files, "__init__", remember)
    yield
    for files in list(made):
        files.close_all()
