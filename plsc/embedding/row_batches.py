"""Embedding batches of rows, as engines of data hand them to a function: Ray Data, Spark, Hugging Face datasets.

None of them is imported here: a batch is a dictionary of columns, or an Arrow record batch.
"""

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from plsc.arguments import as_integer
from plsc.data import ImageDataset
from plsc.data.alignment import AlignedImages
from plsc.data.codec import to_rgb_tensor
from plsc.embedding.arrow_tables import load_pyarrow
from plsc.embedding.detector import DetectedLandmarks
from plsc.embedding.embedder import (
    EmbeddingModel,
    embed_whole,
    is_named_model,
    model_file,
    open_embedder,
    stated_contracts,
)
from plsc.embedding.embedding_set import FORMAT, VERSION
from plsc.embedding.pipeline import StallTimes, decoded_ahead, default_batch_size, embedded_batches, fill_rows
from plsc.embedding.set_writer import DTYPES
from plsc.embedding.table_formats import ABOUT
from plsc.errors import UsageError
from plsc.parallel.mesh import to_device

if TYPE_CHECKING:
    import pyarrow as pa

IMAGE, PATH, KEY = "image", "path", "key"
_PICTURES = (str, Path, bytes, dict, np.ndarray, torch.Tensor, type(None))


@dataclass(frozen=True)
class Embedder:
    """What ``plsc embed`` makes of pictures, as a function of batches of rows. It pickles, as its options.

    A process opens the model at its first batch, once for all embedders of the same options. On CPUs the embeddings are
    those of ``plsc embed`` bit for bit, however rows are cut into batches; on a GPU with the same ``batch_size``.

    Args:
        model: as :func:`plsc.load_model` takes it; a path that all machines see.
        detector: ``mtcnn``, ``yunet`` or ``onnx:FILE``, which finds each picture's largest face; None: pictures are
            aligned crops.
        device: where to run; a GPU if the process sees one, by default.
        precision: as :func:`plsc.load_model` takes it; likewise the next two.
        best: of a run directory, take the weights of the best evaluation.
        provider: of onnxruntime, for an .onnx file.
        flip: average over each picture and its mirror image.
        dtype: "float32" or "float16", of the embeddings.
        batch_size: pictures per step of the model; None: 256 on a GPU, 64 on a CPU.

    Raises:
        UsageError: there is no such file, or an option is none.
    """

    model: str | Path
    _: KW_ONLY
    detector: str | None = None
    device: str | torch.device | None = None
    precision: str = "auto"
    best: bool = False
    provider: str = "auto"
    flip: bool = False
    dtype: str = "float32"
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"no dtype {self.dtype!r} for embeddings; it is one of {', '.join(DTYPES)}")
        if self.batch_size is not None:
            as_integer(self.batch_size, "batch_size", 1)
        if not is_named_model(self.model):
            model_file(self.model, best=self.best)
            object.__setattr__(self, "model", str(Path(self.model).absolute()))  # workers have folders of their own

    def __call__(self, batch: "Mapping[str, Any] | pa.Table") -> Any:
        """Embed a batch of n rows.

        Args:
            batch: an Arrow table, or columns by name, each an array or a list. ``image`` has encoded pictures (bytes,
                or the ``{"bytes", "path"}`` of Hugging Face), or in a dictionary pictures as :func:`plsc.embed` takes
                them. Without it, ``path`` has the paths of their files. ``key`` names the rows, else their paths do.

        Returns:
            A table or a dictionary, as it was given: all columns but ``image`` and ``path``; ``key``, where the rows
            have names; ``embedding``, an array (n, D), not normalised; and ``error``, texts: why a row's embedding is
            zero, None where it is not.

        Raises:
            UsageError: the batch has neither ``image`` nor ``path``, or no pictures in it.
        """
        if not isinstance(batch, Mapping):
            pa = load_pyarrow()
            batches = batch.to_batches() or [pa.RecordBatch.from_pylist([], batch.schema)]
            return pa.Table.from_batches(self.arrow(batches))
        return self._embedded(batch)

    def arrow(self, batches: "Iterable[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        """Embed Arrow record batches, as Spark's ``mapInArrow`` hands them over: the columns of a call.

        The schema's metadata states the contract, by which a Parquet file of such batches is an embedding set.
        """
        pa, about = load_pyarrow(), self.metadata
        for batch in batches:
            given = [name for name in (IMAGE, PATH, KEY) if name in batch.schema.names]
            found = self._embedded({name: batch.column(name).to_pylist() for name in given})
            columns = {name: batch.column(name) for name in batch.schema.names if name not in (IMAGE, PATH)}
            embeddings = found["embedding"]
            offsets = pa.array(np.arange(len(embeddings) + 1, dtype=np.int32) * embeddings.shape[1])
            columns |= {KEY: pa.array(found[KEY], pa.string())} if KEY in found else {}
            columns["embedding"] = pa.ListArray.from_arrays(offsets, pa.array(embeddings.reshape(-1)))
            columns["error"] = pa.array(found["error"], pa.string())
            schema = pa.schema([(name, column.type) for name, column in columns.items()], about)
            yield pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)

    def _embedded(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A call of its own would wait for itself in Ray Data, which runs calls in one thread."""
        names, pictures = _pictures(batch)
        shown = [f"row {row} of the batch" for row in range(len(pictures))] if names is None else names
        embeddings, errors = _opened(self).embed(self, _Rows(pictures, [str(name) for name in shown]))
        kept = {name: column for name, column in batch.items() if name not in (IMAGE, PATH)}
        found = [errors.get(row) for row in range(len(pictures))]
        named = {} if names is None else {KEY: names}
        return {**kept, **named, "embedding": embeddings, "error": np.array(found, dtype=object)}

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """What the schema of a Parquet file states of these embeddings; opens the model."""
        opened = _opened(self)
        stated = stated_contracts(opened.model, self.flip, opened.alignment)
        more = {"precision": opened.model.precision, "model": str(self.model)}
        about = {"format": FORMAT, "version": VERSION, "normalized": False, **stated, **more}
        return {ABOUT: json.dumps(about).encode()}


@dataclass
class _Opened:
    """The model of a process, and the locator of faces, if they are to be looked for."""

    model: EmbeddingModel
    device: torch.device
    locate: DetectedLandmarks | None
    process: int

    @property
    def alignment(self) -> str:
        return "" if self.locate is None else self.locate.fingerprint

    def embed(self, options: Embedder, rows: "_Rows") -> tuple[np.ndarray[Any, Any], dict[int, str]]:
        """Embeddings (n, D), and errors of those that are zero."""
        model, size = self.model, options.batch_size or default_batch_size(self.device)
        images = rows if self.locate is None else AlignedImages(rows, self.locate, model.image_size)
        ranges = [range(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
        decoded = decoded_ahead(images, ranges, model.preprocessing)
        embed = partial(embed_whole, model, flip=options.flip, batch_size=size)
        embeddings = np.zeros((len(rows), model.embedding_dim), dtype=options.dtype)
        errors, *_ = fill_rows(embeddings, embedded_batches(embed, decoded, StallTimes()))
        return embeddings, errors


_models: dict[Embedder, _Opened] = {}
_opening = threading.Lock()


def _opened(options: Embedder) -> _Opened:
    """What this process has opened for such options, at the first call."""
    with _opening:
        if options not in _models:
            device = to_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
            chosen: dict[str, Any] = {name: getattr(options, name) for name in ("precision", "best", "provider")}
            model = open_embedder(options.model, device=device, **chosen)
            locate = None if options.detector is None else DetectedLandmarks(options.detector)
            _models[options] = _Opened(model, device, locate, os.getpid())
        opened = _models[options]
    if opened.process != os.getpid():
        raise UsageError(
            "this process was forked from one that has embedded, where the model would hang: start processes by "
            "spawn, or embed in them alone"
        )
    return opened


class _Rows(ImageDataset):
    """The pictures of a batch, each in its own size."""

    def __init__(self, pictures: Sequence[Any], keys: Sequence[str]) -> None:
        super().__init__("the batch", np.full(len(pictures), -1, dtype=np.int64), [], None)
        self._pictures, self._keys = pictures, keys

    def picture(self, index: int) -> torch.Tensor:
        """Picture ``index``."""
        return to_rgb_tensor(self._pictures[index], self._keys[index])

    def key(self, index: int) -> str:
        """Its name."""
        return self._keys[index]


def _pictures(batch: Mapping[str, Any]) -> tuple[Sequence[Any] | None, list[Any]]:
    """The names of the rows, None where they have none, and their pictures."""
    column = next((name for name in (IMAGE, PATH) if name in batch), None)
    if column is None:
        raise UsageError(
            f"the batch has the columns {', '.join(batch) or 'none'}: rename the one of encoded pictures to {IMAGE!r}, "
            f"or that of their files to {PATH!r}"
        )
    pictures = list(batch[column])
    for picture in pictures:
        if not isinstance(picture, _PICTURES) and not hasattr(picture, "getbands"):  # Pillow's
            raise UsageError(
                f"the column {column!r} holds {type(picture).__name__}, and no pictures: give their files' bytes, or a "
                f"column {PATH!r} of their paths"
            )
    files = [picture.get(PATH) if isinstance(picture, dict) else None for picture in pictures]
    names = batch.get(KEY, batch.get(PATH, files if any(files) else None))
    contents = [_content(picture) if isinstance(picture, dict) else picture for picture in pictures]
    return names, contents


def _content(picture: Mapping[str, Any]) -> Any:
    """What Hugging Face's ``Image(decode=False)`` holds: the file's bytes, or else its path."""
    return picture.get(PATH) if (content := picture.get("bytes")) is None else content
