"""Who somebody is and what they may do: logins, certificates, rights, quotas. Values and decisions.

Not here: sockets (`server`, `client`), where users and rules are kept (`metadata.deltas`, `cluster.image`), and which
right a request needs (`handlers.needs`).
"""
