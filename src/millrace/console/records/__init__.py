"""The engine behind the console's pages of records: scans, live tails, decoders, filters, downloads, producing.

Nothing here knows of the web. `decoders` and `filters` are pure; `scan` and `tail` read in a thread of their own
through `millrace.client`, and whoever looks at them takes snapshots that the thread has put down; `producing` writes.
"""
