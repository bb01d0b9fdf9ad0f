"""What people ask of a running cluster, over the wire, as values: no printing, no options.

The command line and the console have the same knowledge from here. Every function takes a `ClusterClient`, which is for
one thread at a time: a thread of its own needs a client of its own. All of it works against Apache Kafka, too.
"""
