"""Measurements. `system` compares whole brokers from outside, `micro` times single pieces."""
