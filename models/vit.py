"""Vision transformers for faces (Dosovitskiy et al., ICLR 2021) in arcface_torch's shapes.

Differences from the original: no class token; the outputs of all patches go into one linear layer, because faces are
aligned and positions have a meaning; ReLU6 in the MLP. Training may drop patches (``mask_ratio``: He et al., CVPR 2022)
and whole branches (``drop_path``: Huang et al., ECCV 2016). Modules have arcface_torch's names, so that its published
state_dicts load unchanged.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plsc.errors import UsageError
from plsc.models.backbone import Architecture, Backbone, count_blocks, in_full_precision, register_family
from plsc.models.preprocessing import ImageSize, height_and_width


class Shape(NamedTuple):
    """Width of a token, the number of blocks, and the default of ``mask_ratio``."""

    dim: int
    depth: int
    mask_ratio: float = 0.0


SHAPES = {
    "vit_tiny": Shape(256, 12),
    "vit_small": Shape(512, 12),
    "vit_base": Shape(512, 24, 0.05),
    "vit_large": Shape(768, 24, 0.05),
}
HEADS = 8
MLP_RATIO = 4
PUBLISHED_SIZE, PUBLISHED_PATCH = 112, 9  # 12 x 12 patches; the last 4 rows and columns are ignored
PATCH = 8  # at every other size; divides all of them


class PatchEmbed(nn.Module):
    """(B, 3, H, W) -> (B, N, dim), one token per whole patch."""

    def __init__(self, patch_size: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens in row order."""
        return cast(Tensor, self.proj(x)).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention, (B, N, dim) -> (B, N, dim).

    ``num_heads`` are the heads that ``qkv`` computes: all, unless tensor parallelism has left this rank a part of them.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Apply scaled dot-product attention."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return cast(Tensor, self.proj(y.transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    """Two linear layers with ReLU6 between them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, MLP_RATIO * dim)
        self.fc2 = nn.Linear(MLP_RATIO * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, dim) -> (B, N, dim)."""
        return cast(Tensor, self.fc2(F.relu6(self.fc1(x))))


class Block(nn.Module):
    """Attention and MLP, each after a layer norm and added to its input.

    Args:
        dim: width of a token.
        drop_path: probability of dropping a branch of a sample in training (stochastic depth).
    """

    def __init__(self, dim: int, drop_path: float) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.mlp = Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, dim) -> (B, N, dim)."""
        x = x + self._drop_path(self.attn(self.norm1(x)))
        return x + self._drop_path(self.mlp(self.norm2(x)))

    def _drop_path(self, branch: Tensor) -> Tensor:
        if not self.training or self.drop_path == 0.0:
            return branch
        keep = 1.0 - self.drop_path
        kept = torch.rand(len(branch), 1, 1, device=branch.device) < keep
        return branch * kept / keep


class VisionTransformer(Backbone):
    """Patches, ``SHAPES[name].depth`` blocks, and a linear layer over all tokens.

    Args:
        name: of its shape.
        embedding_dim: D.
        image_size: side in pixels, or (height, width).
        drop_path: probability of dropping the last block's branches in training, from 0 at the first one's up.
        mask_ratio: share of the patches that training drops; None: that of the shape.
        patch_size: in pixels; None: :func:`default_patch`.
    """

    # by their use, so that the ranks of a pipeline hold what they need
    embedding = ("pos_embed", "patch_embed")
    projection = ("mask_token", "norm", "feature")

    def __init__(
        self,
        name: str,
        embedding_dim: int,
        image_size: ImageSize,
        *,
        drop_path: float = 0.05,
        mask_ratio: float | None = None,
        patch_size: int | None = None,
    ) -> None:
        super().__init__(name, embedding_dim, image_size)
        dim, depth, default_ratio = SHAPES[name]
        mask_ratio = default_ratio if mask_ratio is None else mask_ratio
        for option, rate in (("drop_path", drop_path), ("mask_ratio", mask_ratio)):
            if not 0.0 <= rate < 1.0:
                raise UsageError(f"{option} is {rate}; it has to be at least 0 and less than 1")
        patch = default_patch(image_size) if patch_size is None else patch_size
        height, width = height_and_width(image_size)
        if not 1 <= patch <= min(height, width):
            raise UsageError(f"patch_size is {patch}; it has to lie between 1 and image_size ({min(height, width)})")
        tokens = (height // patch) * (width // patch)
        self.dim, self.tokens = dim, tokens
        self.mask_ratio = mask_ratio
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, dim))
        # Replaces a dropped patch; without gradient if none is ever dropped, so that DDP does not wait for it.
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim), requires_grad=mask_ratio > 0.0)
        self.patch_embed = PatchEmbed(patch, dim)
        self.blocks = nn.ModuleList(Block(dim, drop_path * i / (depth - 1)) for i in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.feature = nn.Sequential(
            nn.Linear(dim * tokens, dim, bias=False),
            nn.BatchNorm1d(dim, eps=2e-5),
            nn.Linear(dim, embedding_dim, bias=False),
            nn.BatchNorm1d(embedding_dim, eps=2e-5),
        )
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.mask_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, D); the last norm and ``feature`` run in fp32 even under autocast."""
        x, kept = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.project(x, kept)

    def embed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return tokens (B, n, dim) of images (B, 3, H, W), and the positions (B, n) of those kept, None for all."""
        x = self.patch_embed(x) + self.pos_embed
        if not self.drops_patches:
            return x, None
        kept = torch.rand(x.shape[:2], device=x.device).argsort(dim=1)[:, : self.tokens_seen]
        return x.gather(1, kept.unsqueeze(-1).expand(-1, -1, x.shape[-1])), kept

    def project(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """Return embeddings (B, D) of the last block's tokens (B, n, dim); ``kept`` as :meth:`embed` returned it."""
        x = in_full_precision(x, self.norm.weight.dtype, self.norm)
        if kept is not None:
            x = self._with_mask_tokens(x, kept)
        return in_full_precision(x.flatten(1), self.norm.weight.dtype, self.feature)

    @property
    def drops_patches(self) -> bool:
        """Whether :meth:`embed` drops patches now."""
        return self.training and self.mask_ratio > 0.0

    @property
    def tokens_seen(self) -> int:
        """The number of tokens per sample that go through the blocks now."""
        return self.tokens_in_training if self.drops_patches else self.tokens

    @property
    def tokens_in_training(self) -> int:
        """The number of tokens per sample that go through the blocks in training."""
        return int(self.tokens * (1.0 - self.mask_ratio))

    def _with_mask_tokens(self, x: Tensor, kept: Tensor) -> Tensor:
        """Put the kept tokens back at their positions and the mask token everywhere else."""
        missing = self.mask_token.expand(len(x), self.tokens, -1)
        return missing.scatter(1, kept.unsqueeze(-1).expand_as(x), x)


def default_patch(image_size: ImageSize) -> int:
    """Return the default patch size at ``image_size``."""
    return PUBLISHED_PATCH if image_size == PUBLISHED_SIZE else PATCH


def _infer(state: Mapping[str, Tensor]) -> Architecture:
    dim, _, patch, _ = state["patch_embed.proj.weight"].shape
    shape = dim, count_blocks(state, r"blocks\.(\d+)\.")
    name = next(name for name, known in SHAPES.items() if known[:2] == shape)
    side = math.isqrt(state["pos_embed"].shape[1])
    # The sizes whose whole patches number side x side; only multiples of 16 are valid sizes.
    image_size = next(size for size in range(side * patch, (side + 1) * patch) if size % 16 == 0)
    options = {} if patch == default_patch(image_size) else {"patch_size": patch}
    return Architecture(name, state["feature.2.weight"].shape[0], image_size, options)


register_family(VisionTransformer, SHAPES, _infer, ("patch_embed.proj.weight", "feature.0.weight"))
