"""The sharded class head, one whose classes come and go, and several over one backbone."""

from plsc.head.dynamic_head import DynamicHead as DynamicHead
from plsc.head.options import TableOptions as TableOptions
from plsc.head.sharded_head import ShardedHead as ShardedHead
