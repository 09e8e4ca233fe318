"""The sharded class head, and several over one backbone."""

from plsc.head.options import TableOptions as TableOptions
from plsc.head.sharded_head import ShardedHead as ShardedHead
