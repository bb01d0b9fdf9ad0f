"""The data plane: partitions, their watermarks, and the set of them that this broker holds."""
