"""The classic protocol, in which a member leads the group and assigns: JoinGroup, SyncGroup, Heartbeat, LeaveGroup."""
