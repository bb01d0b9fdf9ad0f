"""Share groups (KIP-932): a topic read as a queue, each record held by one consumer at a time until it is done with.

`acquisition` decides who gets which records (pure), `state` is what the share coordinator keeps of that in
`__share_group_state`, `partition` is the owner on the leader that joins the two with the log.
"""
