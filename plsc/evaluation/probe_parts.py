"""The labelled parts that a probe learns from and is tested on: embedding sets, or pictures that a model embeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plsc.data import open_dataset
from plsc.embedding.columns import Float32, Int64, Mask
from plsc.embedding.embedder import EmbeddingModel, contract_of
from plsc.embedding.embedding_set import EmbeddingSet, require_contract, same_contract
from plsc.embedding.embedding_set import is_embedding_set as is_embedding_set
from plsc.embedding.pipeline import Embed, embed_on_ranks
from plsc.errors import UsageError
from plsc.evaluation.evaluator import raw_pixels, set_names
from plsc.evaluation.pairs import unit_rows_float32
from plsc.evaluation.probe import LabelledRows
from plsc.models.preprocessing import ImageSize, Preprocessing
from plsc.parallel.mesh import Mesh


@dataclass(frozen=True)
class PartReader:
    """Reads parts of embedding sets, or of pictures.

    Args:
        model: embeds pictures; None embeds them by their pixels, of ``image_size``.
        mesh: the ranks that share the work; all must call.
        batch_size: images per call of the model.
        flip: average over each image and its mirror image.
        image_size: of pixels.
    """

    model: EmbeddingModel | None
    mesh: Mesh
    batch_size: int = 64
    flip: bool = False
    image_size: ImageSize = 112

    def read(self, sources: Sequence[str], *, compared: bool) -> list[LabelledRows]:
        """Read all ``sources``; rows without an embedding or a label are left out.

        Args:
            sources: embedding sets, and labelled pictures as :func:`plsc.data.open_dataset` takes them.
            compared: embeddings of one are compared with those of another.

        Raises:
            UsageError: a source does not exist, or other models made what is compared.
            DataError: a source is malformed, has too many unreadable images, or an embedding is not finite.
        """
        sets = {source: EmbeddingSet(source) for source in sources if is_embedding_set(source)}
        if sets and compared:
            self._require_one_model(sets, len(sets) < len(set(sources)))
        parts = zip(sources, set_names(sources), strict=True)
        return [
            _of_set(sets[source], name) if source in sets else self._of_pictures(source, name) for source, name in parts
        ]

    def _require_one_model(self, sets: Mapping[str, EmbeddingSet], with_pictures: bool) -> None:
        contract, first = same_contract(list(sets.values())), next(iter(sets))
        if self.model is not None:
            require_contract(contract, contract_of(self.model, self.flip), first, self.model.source)
        elif with_pictures:
            raise UsageError(f"{first} holds embeddings of a model, and pixels are none; name the model as MODEL")

    def _of_pictures(self, source: str, name: str) -> LabelledRows:
        embed: Embed = raw_pixels if self.model is None else self.model
        taken = Preprocessing(self.image_size) if self.model is None else self.model.preprocessing
        images = open_dataset(source, image_size=taken.image_size)
        embedded = embed_on_ranks(embed, images, name, taken, self.mesh, batch_size=self.batch_size, flip=self.flip)
        return _labelled(name, embedded.rows, np.asarray(images.labels), embedded.readable, images.class_names)


def _of_set(source: EmbeddingSet, name: str) -> LabelledRows:
    readable = np.ones(len(source), dtype=bool)
    readable[list(source.errors)] = False
    return _labelled(name, source.rows(0, len(source)), source.labels, readable, source.class_names)


def _labelled(name: str, rows: Float32, labels: Int64, readable: Mask, class_names: Sequence[str]) -> LabelledRows:
    kept, lost = (labels >= 0) & readable, labels[(labels >= 0) & ~readable]
    return LabelledRows(name, unit_rows_float32(rows[kept]), labels[kept], class_names, lost)
