"""Questions to an index by name: an image, a folder of images, or an embedding set."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plsc.embed.embedding_set import EmbeddingSet, require_contract
from plsc.errors import DataError, UsageError
from plsc.files import MANIFEST
from plsc.index.exact import Float32
from plsc.index.gather import searchable
from plsc.index.index import Index

if TYPE_CHECKING:
    from plsc.embed.embedder import Embedder

BATCH = 64
SEARCHED_AT_ONCE = 1024


@dataclass
class Queries:
    """Vectors (Q, D) with a name each, and {place: why it cannot be searched} for those without a
    direction."""

    names: list[str]
    vectors: Float32
    errors: dict[int, str] = field(default_factory=dict)


def open_queries(index: Index, source: str | Path, model: str | Path | None = None) -> Queries:
    """Make ready what ``source`` names: an embedding set, else one image or a data set of images to embed.

    Images are embedded by ``model``, or by the model that the index remembers. Raises :class:`UsageError` if
    there is no such source or model, or if the model or the set is of another contract than the index.
    """
    if (Path(source) / MANIFEST).is_file():
        return _from_set(index, EmbeddingSet(source, verify=True))
    if not Path(source).exists() and not str(source).startswith("avatars:"):
        raise UsageError(f"there is no {source} to search for; name an image, a folder of images or an embedding set")
    return _from_images(index, source, _embedder(index, model))


def answer(index: Index, queries: Queries, k: int) -> list[dict[str, Any]]:
    """``[{"query", "matches": [{"id", "key", "label", "class", "score"}]}]``; a query without a direction has
    an "error"."""
    answers: list[dict[str, Any]] = [{"query": name, "matches": []} for name in queries.names]
    for place, text in queries.errors.items():
        answers[place]["error"] = text
    good = [place for place in range(len(answers)) if place not in queries.errors]
    index.search(np.empty((0, index.dim), dtype=np.float32), k)  # refuses a k < 1 even if there is no query
    for start in range(0, len(good), SEARCHED_AT_ONCE):
        places = good[start : start + SEARCHED_AT_ONCE]
        found = index.search(queries.vectors[places], k)
        for place, scores, rows in zip(places, found.scores, found.rows, strict=True):
            answers[place]["matches"] = [_match(index, int(row), float(s)) for row, s in zip(rows, scores, strict=True)]
    return answers


def _match(index: Index, row: int, score: float) -> dict[str, Any]:
    label = int(index.labels[row])
    return {
        "id": int(index.ids[row]),
        "key": index.keys[row],
        "label": label,
        "class": index.class_name(label),
        "score": score,
    }


def _from_set(index: Index, source: EmbeddingSet) -> Queries:
    require_contract(source.contract_id, index.contract_id, str(source.folder), str(index.folder))
    vectors = source.rows(0, len(source))
    return Queries(list(source.keys), vectors, {**_without_direction(vectors), **source.errors})


def _without_direction(vectors: Float32) -> dict[int, str]:
    finite, usable = searchable(vectors)
    reasons = {int(row): "the embedding is the zero vector" for row in np.flatnonzero(~usable)}
    return {**reasons, **{int(row): "the embedding is not finite" for row in np.flatnonzero(~finite)}}


def _embedder(index: Index, model: str | Path | None) -> "Embedder":
    from plsc.embed.embedder import open_embedder

    remembered = index.manifest["model"]
    if model is None and remembered is None:
        raise UsageError(f"{index.folder} does not know its model; name it with --model")
    if model is None and not Path(remembered).exists():
        raise UsageError(f"the model of {index.folder}, {remembered}, is not there any more; name it with --model")
    return open_embedder(remembered if model is None else model)


def _from_images(index: Index, source: str | Path, embedder: "Embedder") -> Queries:
    from plsc.embed.extract import contract_of
    from plsc.embed.sources import open_images

    flip = index.contract_id == contract_of(embedder, True)
    require_contract(contract_of(embedder, flip), index.contract_id, f"a query by {embedder.source}", str(index.folder))
    images = open_images(source, embedder.image_size)
    names = [images.key(i) for i in range(len(images))]
    queries = Queries(names, np.zeros((len(names), index.dim), dtype=np.float32))
    for start in range(0, len(names), BATCH):
        _embed(embedder, images, range(start, min(start + BATCH, len(names))), flip, queries)
    queries.errors = {**_without_direction(queries.vectors), **queries.errors}
    if len(names) == 1 and queries.errors:
        raise DataError(queries.errors[0])
    return queries


def _embed(embedder: "Embedder", images: Any, places: Sequence[int], flip: bool, queries: Queries) -> None:
    import torch

    from plsc.embed.extract import embed_images

    decoded = {}
    for place in places:
        try:
            decoded[place] = images.image(place)
        except DataError as error:
            queries.errors[place] = str(error)
    if decoded:
        queries.vectors[list(decoded)] = embed_images(embedder, torch.stack(list(decoded.values())), flip).numpy()
