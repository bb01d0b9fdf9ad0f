from __future__ import annotations

import uuid

import pytest

from millrace.model import decode_uuid, encode_uuid, new_topic_id


def test_an_id_can_be_typed_on_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = [uuid.UUID(int=number) for number in (0, 1)]
    dashed = uuid.UUID(bytes=b"\xf8" + bytes(15))
    good = uuid.UUID(bytes=b"\xf4" + bytes(15))
    assert encode_uuid(dashed).startswith("-")
    made = iter([*reserved, dashed, good])
    monkeypatch.setattr(uuid, "uuid4", lambda: next(made))
    assert new_topic_id() == good
    assert decode_uuid(encode_uuid(good)) == good
