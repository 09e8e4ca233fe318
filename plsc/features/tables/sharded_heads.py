"""ShardedHeads: several class tables over the embeddings of one backbone."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from plsc.errors import UsageError
from plsc.head.sharded_head import ShardedHead


class ShardedHeads(nn.Module):
    """Several :class:`plsc.ShardedHead` over one backbone, each with samples, classes and a margin of its own.

    The loss is Σ w·L over the tables, L being a table's mean loss over its own samples of the global batch. Each head
    keeps its storage, sampling and optimizer; :class:`plsc.optim.GradScaler` and :func:`plsc.optim.clip_grad_norm_`
    take a list of the optimizers.

    Args:
        heads: by the tables' names, of one width D and one mesh.
        loss_weights: w by the tables' names, positive; 1 of a table that is not given.

    Attributes:
        heads: as given, a ModuleDict.
        loss_weights: w of each table.

    Raises:
        UsageError: there is no head, widths differ, a name is one of torch's own, a weight is not positive, or is of
            no table.
    """

    def __init__(self, heads: Mapping[str, ShardedHead], loss_weights: Mapping[str, float] | None = None) -> None:
        super().__init__()
        if not heads:
            raise UsageError("ShardedHeads takes at least one head, by the table's name")
        if len(widths := {head.dim for head in heads.values()}) > 1:
            raise UsageError(f"heads over one backbone have one width, not {' and '.join(map(str, sorted(widths)))}")
        given = dict(loss_weights or {})
        if unknown := sorted(given.keys() - heads.keys()):
            raise UsageError(f"there is no table {unknown[0]!r}; the tables are {', '.join(heads)}")
        self.loss_weights = {name: float(given.get(name, 1.0)) for name in heads}
        for name, weight in self.loss_weights.items():
            if not weight > 0:
                raise UsageError(f"the loss weight of table {name!r} is {weight:g}; it has to be positive")
        try:
            self.heads = nn.ModuleDict(heads)
        except KeyError as error:  # torch's modules have methods of that name
            raise UsageError(f"a table cannot have this name: {error.args[0]}; give it another") from None

    def forward(
        self, batches: Mapping[str, tuple[Tensor, Tensor]], sizes: Mapping[str, Sequence[int]] | None = None
    ) -> Tensor:
        """The weighted sum of the tables' mean losses over the global batch.

        Args:
            batches: embeddings (b, D) and labels, (b,) or (b, K), of this rank by the table that they are for; b may be
                0. A table that is left out has no loss in this step; all ranks give the same tables.
            sizes: b of every rank, by table, as :meth:`ShardedHead.forward` takes it.

        Returns:
            A scalar, equal on every rank.

        Raises:
            UsageError: there is no such table; or as :meth:`ShardedHead.forward` does, with LabelError.
        """
        losses = self.losses(batches, sizes)
        return torch.stack([loss * self.loss_weights[name] for name, loss in losses.items()]).sum()

    def losses(
        self, batches: Mapping[str, tuple[Tensor, Tensor]], sizes: Mapping[str, Sequence[int]] | None = None
    ) -> dict[str, Tensor]:
        """The mean loss of each table, without its weight; arguments and errors as of :meth:`forward`.

        Heads are called in their own order on every rank, whatever that of ``batches`` is: they exchange in it.
        """
        if unknown := sorted(batches.keys() - self.loss_weights.keys()):
            raise UsageError(f"there is no table {unknown[0]!r}; the tables are {', '.join(self.loss_weights)}")
        if not batches:
            raise UsageError(f"no table has a batch; the tables are {', '.join(self.loss_weights)}")
        return losses_of(dict(self.heads.items()), batches, sizes)


def losses_of(
    heads: Mapping[str, nn.Module],
    batches: Mapping[str, tuple[Tensor, Tensor]],
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Tensor]:
    """The mean loss of each head that has a batch, in the heads' order; arguments as of :class:`ShardedHeads`."""
    return {
        name: head(*batches[name], None if sizes is None else sizes[name])
        for name, head in heads.items()
        if name in batches
    }
