"""Sockets: listeners, connections, flow control. Knows frames and handlers, not what they mean."""
