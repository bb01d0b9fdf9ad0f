from __future__ import annotations

import subprocess
import sys

import pytest

from millrace.wire.keys import ApiKey
from millrace.wire.messages import request_class, response_class


def test_lookup() -> None:
    assert request_class(3).__name__ == "MetadataRequest"
    assert response_class(ApiKey.METADATA).__name__ == "MetadataResponse"
    assert request_class(3) is request_class(ApiKey.METADATA)


@pytest.mark.parametrize("key", [ApiKey.VOTE, 4, -1, 999])
def test_what_is_not_declared(key: int) -> None:
    with pytest.raises(KeyError):
        request_class(key)
    with pytest.raises(KeyError):
        response_class(key)


def test_families_are_imported_when_they_are_asked_for() -> None:
    program = (
        "import sys, millrace.wire.frame, millrace.wire.messages as m; m.request_class(12);"
        "print(sorted(n for n in sys.modules if n.startswith('millrace.wire.messages.')))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "['millrace.wire.messages.groups']"
