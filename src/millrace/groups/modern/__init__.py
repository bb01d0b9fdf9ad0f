"""The consumer group protocol of KIP-848, in which the broker assigns; its classic members; the way between the two."""
