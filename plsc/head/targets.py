"""The samples' own classes: their cosines from whatever shard, and their rows where they are of this one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.head.global_batch import SMALLEST_NORM
from plsc.losses.class_rows import ClassRows
from plsc.parallel.collectives import all_reduce_sum
from plsc.parallel.mesh import Mesh


@dataclass(frozen=True)
class OwnRows:
    """The nearest rows of the samples' own classes, where those are of this shard.

    ``samples`` (n,) are the samples' positions; ``weight`` (n, D) and ``inverse_norm`` (n,) their rows.
    """

    samples: Tensor
    weight: Tensor
    inverse_norm: Tensor

    def pull(self, target_pull: Tensor, dtype: torch.dtype) -> tuple[int, Tensor, Tensor]:
        """index_add_'s arguments that put the owned targets' share into the embeddings' gradient."""
        strength = target_pull[self.samples].to(dtype) * self.inverse_norm.to(dtype)
        return 0, self.samples, self.weight.to(dtype) * strength[:, None]


def target_cosines(rows: ClassRows, features: Tensor, position: Tensor, mesh: Mesh) -> tuple[Tensor, OwnRows]:
    """Cosines (b,) of the group's samples with their own classes, float64, from all shards; the rows owned here.

    Double precision costs nothing for one row per sample, and keeps margins exact where the cosine is near ±1.
    """
    owned = torch.where(position >= 0)[0]
    classes = position[owned] if rows.selected is None else rows.selected[position[owned]]
    picked = rows.picked(rows.rows_of(classes))
    weight = picked.weight.double().view(len(owned), rows.centers, features.shape[1])
    x = features[owned].double()
    norms = torch.linalg.vector_norm(weight, dim=2) * torch.linalg.vector_norm(x, dim=1, keepdim=True)
    each = torch.einsum("bkd,bd->bk", weight, x) / norms.clamp(min=SMALLEST_NORM)
    best, winner = each.max(dim=1) if rows.centers > 1 else (each[:, 0], torch.zeros_like(classes))
    cos = features.new_zeros(len(position), dtype=torch.float64)
    cos[owned] = best
    nearest = torch.arange(len(owned), device=winner.device) * rows.centers + winner
    own = OwnRows(owned, picked.weight[nearest], picked.inverse_norm[nearest])
    return all_reduce_sum(cos, mesh.head), own
