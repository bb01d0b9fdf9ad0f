"""Groups: members, rebalances and committed offsets, of consumers (two protocols) and of queues.

Three kinds, a folder each: `classic`, `modern` (KIP-848) and `share` (KIP-932, the members of a queue). In each
`protocol` decides, purely, `groups` acts for one shard, and `records` says what is kept in the log. `modern.migration`
turns groups of the first two kinds into each other. `offsets` keeps what groups of these two have committed; what
became of the records of a queue is kept elsewhere (`millrace.queues`).

`shard` joins all four for one led partition of `__consumer_offsets`; `coordinator` owns the shards and is what other
layers call. What the kinds share lies beside them: `step_log` appends what a step decided, `timers`, `subscription`,
`patterns`, `assignors`, `epochs`, `settings`.
"""
