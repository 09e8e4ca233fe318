"""The sharded class head."""

from plsc.head.sharded_head import ShardedHead as ShardedHead
