"""Metrics that clients push (KIP-714): who is to push what, how large it may be, and where it goes.

Nothing here is there without a receiver (`telemetry.receiver`).
"""
