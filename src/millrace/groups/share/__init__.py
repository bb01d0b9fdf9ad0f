"""Share groups (KIP-932): who is in one and which share-partitions it reads. What becomes of records is in `queues`."""
