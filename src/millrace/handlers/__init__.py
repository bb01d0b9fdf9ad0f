"""The meaning of each API: one file per family, one decorated function per API key."""
