"""The sharded class head."""

from plsc.head.row_shard import RowShard as RowShard
from plsc.head.sharded_head import ShardedHead as ShardedHead
