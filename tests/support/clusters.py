"""Vectors gathered about directions, as embeddings of faces are, and embedding sets of them."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.set_writer import write_embedding_set

Vectors = npt.NDArray[np.float32]


def clustered(identities: int, images: int, dim: int, seed: int = 0, spread: float = 0.5) -> tuple[Vectors, Any]:
    """Rows about their identity's direction, which is the same under any seed, shuffled and of different lengths."""
    centres = np.random.default_rng(0).standard_normal((identities, dim))
    random = np.random.default_rng([seed, images])
    labels = random.permutation(np.repeat(np.arange(identities), images))
    rows = centres[labels] + spread * random.standard_normal((len(labels), dim))
    return (rows * random.uniform(1, 30, (len(labels), 1))).astype(np.float32), labels


def write_set(folder: Path, vectors: Vectors, labels: Any = None, **more: Any) -> EmbeddingSet:
    """An embedding set of ``vectors``, whose classes are called id0, id1, …"""
    names = [] if labels is None else [f"id{number}" for number in range(int(labels.max()) + 1)]
    return write_embedding_set(
        folder, vectors, contract_id=more.pop("contract", "m"), labels=labels, class_names=names, **more
    )
