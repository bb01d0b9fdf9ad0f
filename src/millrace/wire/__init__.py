"""Kafka's wire protocol as pure bytes: no sockets, no files, no clock.

`schema` is the notation, `messages` the declarations, `compiler` turns them into functions, `codec` and `frame` are
what others call. Importing this package imports none of them.
"""
