"""The log on disk: segments, indexes, producer state, checkpoints, recovery, retention, group commit."""
