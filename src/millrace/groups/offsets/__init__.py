"""Committed offsets of one shard: kept beside the groups, whatever their kind is, and asked by group id."""
