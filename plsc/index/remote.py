"""Questions to a running service: the same sources as for an index, searched in one of its collections."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from plsc.client import Client, Input, Match, ServerError
from plsc.data.decode import suffix_of
from plsc.data.encode import encode_image, encoded_image
from plsc.embed.embedding_set import EmbeddingSet, require_contract
from plsc.embed.sources import open_pictures
from plsc.errors import DataError, UsageError
from plsc.files import MANIFEST

BATCH = 16  # queries a request: small enough that pictures of a camera's size fit into its body
_TAKEN = (".jpg", ".png", ".webp")

Named = tuple[str, Input | DataError]


def search_service(client: Client, collection: str, source: str | Path, k: int) -> list[dict[str, Any]]:
    """Search ``collection`` for what ``source`` names: an embedding set, else one image or a data set of images.

    Returns ``[{"query", "matches": [{"person", "name", "metadata", "face", "score", "same_person"}]}]``; a query that
    cannot be read, or is refused, has an "error". Raises :class:`UsageError` if there is no such source or the set is
    of another contract, and :class:`ServerError` if the service cannot be asked.
    """
    answers = []
    for batch in _batches(_queries(client, source)):
        answers += _answered(client, collection, batch, k)
    return answers


def _queries(client: Client, source: str | Path) -> Iterator[Named]:
    if (Path(source) / MANIFEST).is_file():
        embedded = EmbeddingSet(source, verify=True)
        served = client.info()["model"]
        require_contract(embedded.contract_id, served["contract_id"], str(source), f"the service's {served['source']}")
        for shard in embedded:
            yield from zip(shard.keys, shard.embeddings, strict=True)
        return
    if not Path(source).exists() and not str(source).startswith("avatars:"):
        raise UsageError(f"there is no {source} to search for; name an image, a folder of images or an embedding set")
    images = open_pictures(source)  # the service resizes
    for place in range(len(images)):
        yield images.key(place), _picture(images, place)


def _picture(images: Any, place: int) -> bytes | DataError:
    """An image as the service takes it; those in other formats are encoded anew."""
    try:
        data = encoded_image(images, place, "png")
        return data if suffix_of(data) in _TAKEN else encode_image(images.image(place), "png")
    except DataError as error:
        return error


def _batches(queries: Iterator[Named]) -> Iterator[list[Named]]:
    batch: list[Named] = []
    for query in queries:
        batch.append(query)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _answered(client: Client, collection: str, batch: Sequence[Named], k: int) -> list[dict[str, Any]]:
    good = [(name, query) for name, query in batch if not isinstance(query, DataError)]
    found = iter(_found(client, collection, [query for _, query in good], k))
    return [
        {"query": name, "matches": [], "error": str(query)}
        if isinstance(query, DataError)
        else {"query": name, **next(found)}
        for name, query in batch
    ]


def _found(client: Client, collection: str, queries: Sequence[Any], k: int) -> list[dict[str, Any]]:
    """The matches of each query; where one of several is refused, each is asked for alone."""
    if not queries:
        return []
    try:
        results = client.search_many(collection, queries, k=k)
    except ServerError as error:
        if error.status not in (413, 415, 422):
            raise
        if len(queries) == 1:
            return [{"matches": [], "error": str(error)}]
        return [answer for query in queries for answer in _found(client, collection, [query], k)]
    return [{"matches": [_shown(match) for match in matches]} for matches in results]


def _shown(match: Match) -> dict[str, Any]:
    return {
        "person": match.person.id,
        "name": match.person.name,
        "metadata": dict(match.person.metadata),
        "face": match.face,
        "score": match.score,
        "same_person": match.same_person,
    }
