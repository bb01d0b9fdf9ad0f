"""Checkpoint files: Kafka's text, and damage that never reads as something else."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from millrace.model import TopicPartition, decode_uuid, encode_uuid
from millrace.storage import checkpoint
from millrace.storage.epochs import LeaderEpochs
from millrace.storage.files import Files

FILES = Files(sync=False)


def test_offsets(tmp_path: Path) -> None:
    path = tmp_path / "c"
    offsets = {TopicPartition("a.b-c_d", 0): 5, TopicPartition("x", 12): 2**62}
    data = checkpoint.render_offsets(offsets)
    assert data == b"0\n2\na.b-c_d 0 5\nx 12 4611686018427387904\n"
    path.write_bytes(data)
    assert checkpoint.read_offsets(FILES, path) == offsets
    assert checkpoint.read_offsets(FILES, tmp_path / "none") == {}
    path.write_bytes(checkpoint.render_offsets({}))
    assert checkpoint.read_offsets(FILES, path) == {}


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "c"
    data = checkpoint.render_offsets({TopicPartition("topic", 0): 12345})
    for size in range(1, len(data)):
        path.write_bytes(data[:size])
        assert checkpoint.read_offsets(FILES, path) is None, data[:size]


@pytest.mark.parametrize(
    "data",
    [
        b"1\n0\n",
        b"0\n1\n",
        b"0\n0\na 0 1\n",
        b"0\n-1\n",
        b"x\n",
        b"\n",
        b"0\n1\na 0\n",
        b"0\n1\na b c\n",
        b"\xff\n",
        bytes(50),
    ],
)
def test_damage(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "c"
    path.write_bytes(data)
    assert checkpoint.read_offsets(FILES, path) is None


def test_epochs_must_increase(tmp_path: Path) -> None:
    path = tmp_path / "e"
    path.write_bytes(checkpoint.render_epochs([(1, 0), (4, 10)]))
    assert checkpoint.read_epochs(FILES, path) == [(1, 0), (4, 10)]
    for entries in ([(4, 0), (1, 10)], [(1, 10), (4, 10)]):
        path.write_bytes(checkpoint.render_epochs(entries))
        assert checkpoint.read_epochs(FILES, path) is None
    assert checkpoint.read_epochs(FILES, tmp_path / "none") is None


def test_ids_are_in_kafkas_text_form() -> None:
    value = uuid.UUID("fbefbe00-0000-0000-0000-0000000000ff")

    assert decode_uuid(encode_uuid(value)) == value
    assert len(encode_uuid(value)) == 22 and "=" not in encode_uuid(value)
    for bad in ("", "a", "x" * 21, "!" * 22, "A" * 24):
        assert decode_uuid(bad) is None


class TestLeaderEpochs:
    def test_answers(self) -> None:
        epochs = LeaderEpochs([(2, 10), (5, 20), (9, 40)])
        answers = {0: (0, 10), 2: (2, 20), 4: (2, 20), 5: (5, 40), 8: (5, 40), 9: (9, 55), 10: (-1, -1)}
        assert {epoch: epochs.end_offset_for(epoch, 55) for epoch in answers} == answers
        assert [epochs.epoch_for(offset) for offset in (9, 10, 19, 20, 100)] == [-1, 2, 2, 5, 9]
        assert LeaderEpochs().end_offset_for(0, 5) == (-1, -1)

    def test_assign(self) -> None:
        epochs = LeaderEpochs()
        for epoch, offset in ((-1, 0), (0, 0), (0, 5), (3, 10), (2, 12), (4, 10), (6, 8)):
            epochs.assign(epoch, offset)
        assert epochs.entries() == [(0, 0), (6, 8)]
        assert epochs.dirty and epochs.latest == 6

    def test_truncation(self) -> None:
        epochs = LeaderEpochs([(0, 0), (1, 10), (2, 20)])
        epochs.truncate_start(0)
        assert not epochs.dirty
        epochs.truncate_start(15)
        assert epochs.entries() == [(1, 15), (2, 20)]
        epochs.truncate_end(20)
        assert epochs.entries() == [(1, 15)]
        epochs.truncate_end(15)
        assert epochs.entries() == [] and epochs.latest == -1
