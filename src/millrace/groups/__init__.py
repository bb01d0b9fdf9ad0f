"""Consumer and share groups: membership, rebalances and committed offsets.

`classic`, `modern` (KIP-848) and `share` are the kinds of groups: in each `protocol` decides (pure) and `groups` acts;
`offsets` are the committed offsets beside them; `shard` joins these for one led partition of `__consumer_offsets`;
`coordinator` is the owner of all shards and what other layers call.
"""
