"""An embedder that is a fixed linear map: what it makes of pictures is known exactly."""

from types import SimpleNamespace
from typing import Any

import torch

from plsc.models.preprocessing import Preprocessing

SIZE = 16  # of its pictures


def stand_in(seed: int = 0, scale: float = 1.0) -> Any:
    """An embedder of 8 dimensions: a fixed linear map, of grey to 0, so that a black image has an embedding too."""
    weight = torch.randn(3 * SIZE * SIZE, 8, generator=torch.Generator().manual_seed(seed)) * scale

    def embed(images: torch.Tensor) -> torch.Tensor:
        return (images.flatten(1).float() - 128) @ weight / 255

    contract = Preprocessing(SIZE)
    embedder = SimpleNamespace(
        embedding_dim=8,
        image_size=SIZE,
        preprocessing=contract,
        contract_id=f"linear-{seed}",
        source="stand-in",
        compatible_with=(),
        former_ids=(),
        at_once=None,
    )
    return type("EmbeddingModel", (), {"__call__": lambda _, images: embed(images), **vars(embedder)})()
