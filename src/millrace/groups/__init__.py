"""Consumer groups: membership, rebalances and committed offsets.

`classic` (with `rebalance` and `group`) is the pure state machine of one group; `offsets` the committed offsets and
their expiry; `records` the bytes of `__consumer_offsets`; `shard` one led partition of that topic; `coordinator` the
owner of all shards and the only module here that other layers call.
"""
