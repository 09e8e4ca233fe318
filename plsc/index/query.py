"""Queries by name (an image, a folder of images, an embedding set), to an index or to a running service."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plsc.embedding.contracts import may_search
from plsc.embedding.embedding_set import EmbeddingSet, is_embedding_set, require_contract
from plsc.errors import DataError, UsageError
from plsc.files import MANIFEST
from plsc.index.index import Index
from plsc.index.rows import Float32, searchable
from plsc.progress import counted, note, printable

if TYPE_CHECKING:
    from plsc.client import Client, Input, Match
    from plsc.data import ImageDataset
    from plsc.embedding.embedder import EmbeddingModel

SEARCHED_AT_ONCE = 1024  # queries
REQUEST_QUERIES = 16  # small enough that pictures of a camera's size fit into a request's body
_SERVICE_FORMATS = (".jpg", ".png", ".webp")


@dataclass
class Queries:
    """Vectors to search for.

    Attributes:
        names: of each query.
        vectors: (Q, D).
        errors: {position: why it cannot be searched}.
        warnings: {position: why its picture may be no aligned crop}.
    """

    names: list[str]
    vectors: Float32
    errors: dict[int, str] = field(default_factory=dict)
    warnings: dict[int, str] = field(default_factory=dict)


def open_queries(
    index: Index,
    source: str | Path,
    model: str | Path | None = None,
    *,
    best: bool = False,
    detector: str | None = None,
) -> Queries:
    """Read an embedding set, or embed one image or a data set of images.

    Args:
        index: whose contract the queries have to share, or be compatible with.
        source: the set, image or images.
        model: embeds the images; None: the model that the index remembers.
        best: of a run directory given as ``model``, take the weights of the best evaluation.
        detector: finds the face in each image, and aligns it (:mod:`plsc.embedding.detector`).

    Raises:
        UsageError: there is no such source or model, or it is of another contract than the index, and not of a model
            that is compatible with it; or images come without a detector to an index of faces that were aligned.
    """
    if (Path(source) / MANIFEST).is_file() or is_embedding_set(source):
        if detector is not None:
            raise UsageError(f"{source} is an embedding set, and --detector finds faces in images; leave it out")
        return _from_set(index, EmbeddingSet(source, verify=True))
    _require_source(source)
    alignments = index.manifest.get("alignments")
    if alignments and detector is None:
        raise UsageError(
            f"{index.folder} is of faces that were aligned ({printable(str(alignments[0]))}): give --detector, as plsc "
            "embed takes it; or embed crops that are aligned already, and give that set as --query"
        )
    return _from_images(index, source, _open_model(index, model, best), detector)


def answer(index: Index, queries: Queries, k: int) -> list[dict[str, Any]]:
    """Search for the ``k`` nearest rows to each query.

    Returns:
        ``[{"query", "matches": [{"id", "key", "label", "class", "score"}]}]``, and "metadata" of rows that have some; a
        query that cannot be searched has no matches and an "error", and one whose picture may be no aligned crop a
        "warning".
    """
    answers: list[dict[str, Any]] = [{"query": name, "matches": []} for name in queries.names]
    for kind, texts in (("error", queries.errors), ("warning", queries.warnings)):
        for position, text in texts.items():
            answers[position][kind] = text
    good = [position for position in range(len(answers)) if position not in queries.errors]
    index.search(np.empty((0, index.dim), dtype=np.float32), k)  # refuses k < 1 even if there is no query
    for start in range(0, len(good), SEARCHED_AT_ONCE):
        positions = good[start : start + SEARCHED_AT_ONCE]
        found = index.search(queries.vectors[positions], k)
        for position, scores, rows in zip(positions, found.scores.tolist(), found.rows.tolist(), strict=True):
            for score, row in zip(scores, rows, strict=True):
                label = int(index.labels[row])
                match = {"id": int(index.ids[row]), "key": index.keys[row], "label": label}
                more = {"metadata": metadata} if (metadata := index.metadata(row)) else {}
                match |= {"class": index.class_name(label), "score": score, **more}
                answers[position]["matches"].append(match)
    return answers


def search_service(client: "Client", collection: str, source: str | Path, k: int) -> list[dict[str, Any]]:
    """Search a collection of a running service for an embedding set, one image or a data set of images.

    Returns:
        ``[{"query", "matches": [{"person", "name", "metadata", "face", "score", "same_person"}]}]``; a query that
        cannot be read, or is refused, has no matches and an "error".

    Raises:
        UsageError: there is no such source.
        ServerError: the service cannot be reached, or refuses more than single queries, as it does a set of another
            model than the collection's.
    """
    answers, queries = [], _service_queries(client, source)
    while batch := list(islice(queries, REQUEST_QUERIES)):
        readable = [query for _, query in batch if not isinstance(query, DataError)]
        results = iter(_request(client, collection, readable, k))
        for name, query in batch:
            found = {"matches": [], "error": str(query)} if isinstance(query, DataError) else next(results)
            answers.append({"query": name, **found})
    return answers


def _require_source(source: str | Path) -> None:
    from plsc.data import is_named

    if not is_named(source):
        raise UsageError(f"there is no {source} to search for; name an image, a folder of images or an embedding set")


def _from_set(index: Index, source: EmbeddingSet) -> Queries:
    between = source.contract_id, index.contract_id, str(source.path), str(index.folder)
    require_contract(*between, source.compatible_with)
    vectors = source.rows(0, len(source))
    return Queries(list(source.keys), vectors, {**_unsearchable(vectors), **source.errors})


def _unsearchable(vectors: Float32) -> dict[int, str]:
    finite, usable = searchable(vectors)
    reasons = {int(row): "the embedding is the zero vector" for row in np.flatnonzero(~usable)}
    return {**reasons, **{int(row): "the embedding is not finite" for row in np.flatnonzero(~finite)}}


def _open_model(index: Index, model: str | Path | None, best: bool) -> "EmbeddingModel":
    from plsc.embedding.embedder import is_named_model, open_embedder

    remembered = index.manifest["model"]
    if model is None and remembered is None:
        raise UsageError(f"{index.folder} does not know its model; name it with --model")
    if model is None and not (is_named_model(remembered) or Path(remembered).exists()):
        raise UsageError(f"the model of {index.folder}, {remembered}, is not there any more; name it with --model")
    return open_embedder(remembered if model is None else model, best=best)


def _from_images(index: Index, source: str | Path, embedder: "EmbeddingModel", detector: str | None) -> Queries:
    from plsc.embedding.embedder import compatible_contracts, contract_of
    from plsc.embedding.pipeline import embed_dataset
    from plsc.embedding.sources import open_images

    flip = may_search(contract_of(embedder, True), compatible_contracts(embedder, True), index.contract_id)
    between = contract_of(embedder, flip), index.contract_id, f"a query by {embedder.source}", str(index.folder)
    require_contract(*between, compatible_contracts(embedder, flip))
    images = open_images(source, embedder.image_size, detector=detector)
    names = [images.key(i) for i in range(len(images))]
    vectors, errors, warnings, several = embed_dataset(embedder, images, flip=flip)
    if several:
        note(f"{counted(several, 'picture')} showed several faces; the largest is searched for")
    queries = Queries(names, vectors, {**_unsearchable(vectors), **errors}, warnings)
    if len(names) == 1 and queries.errors:
        raise DataError(queries.errors[0])
    return queries


_ServiceQuery = tuple[str, "Input | DataError"]  # its name, and what is sent or why it cannot be read


def _service_queries(client: "Client", source: str | Path) -> Iterator[_ServiceQuery]:
    from plsc.client import Vector
    from plsc.embedding.sources import open_pictures

    if (Path(source) / MANIFEST).is_file() or is_embedding_set(source):
        embedded = EmbeddingSet(source, verify=True)
        for shard in embedded:
            yield from zip(shard.keys, (Vector(row, embedded.contract_id) for row in shard.embeddings), strict=True)
        return
    _require_source(source)
    images = open_pictures(source)  # in the size that they have: the service resizes
    for position in range(len(images)):
        yield images.key(position), _encoded(images, position)


def _encoded(images: "ImageDataset", position: int) -> "bytes | DataError":
    """An image's bytes in a format that the service takes; others are re-encoded as PNG."""
    from plsc.data.codec import encode_image
    from plsc.data.dataset import encoded_image
    from plsc.image_files import suffix_of

    try:
        data = encoded_image(images, position, "png")
        return data if suffix_of(data) in _SERVICE_FORMATS else encode_image(images.image(position), "png")
    except DataError as error:
        return error


def _request(client: "Client", collection: str, queries: Sequence["Input"], k: int) -> list[dict[str, Any]]:
    """The matches of each query; where one of several is refused, each is sent alone."""
    from plsc.client import ServerError

    if not queries:
        return []
    try:
        results = client.search_many(collection, queries, k=k)
    except ServerError as error:
        if error.status not in (413, 415, 422):
            raise
        if len(queries) == 1:
            return [{"matches": [], "error": str(error)}]
        return [answer for query in queries for answer in _request(client, collection, [query], k)]
    return [{"matches": [_service_match(match) for match in matches]} for matches in results]


def _service_match(match: "Match") -> dict[str, Any]:
    return {
        "person": match.person.id,
        "name": match.person.name,
        "metadata": dict(match.person.metadata),
        "face": match.face,
        "score": match.score,
        "same_person": match.same_person,
    }
