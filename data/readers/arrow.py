"""Arrow's own files, as ``datasets`` saves and caches its sets; and sets of the hub, which it caches so."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.data.block_cache import BlockCache
from plsc.data.objects import ObjectFile, open_file
from plsc.data.readers.tables import Table, TableFiles, TableFormat
from plsc.errors import PlscError, UsageError, first_line
from plsc.files import pinned, read_json
from plsc.regular_files import open_regular

if TYPE_CHECKING:
    import pyarrow as pa

_DICTIONARY = "dataset_dict.json"
_FILE_FORMAT = b"ARROW1"
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SPLIT = re.compile(r"\w+(\.\w+)*")


class ArrowFormat(TableFiles):
    """Images of ``X.arrow``, of the stream or the file format, and of folders that ``save_to_disk`` has written."""

    suffixes = (".arrow",)
    kind = "Arrow"

    @classmethod
    def find(cls, source: str, given: Mapping[str, str], cache: BlockCache | None = None) -> list[Path] | None:
        """See :meth:`TableFiles.find`."""
        path = Path(source, _DICTIONARY)
        if path.is_file():
            content = read_json(path)
            splits = content.get("splits") if isinstance(content, dict) else None
            listed = ", ".join(f"{source}/{split}" for split in splits) if isinstance(splits, list) else "none"
            raise UsageError(f"{source} holds several splits; name one: {listed}")
        return super().find(source, given, cache)

    @contextmanager
    def open_table(self, shard: Path) -> Iterator[Table]:
        """See :meth:`TableFormat.open_table`."""
        with open_file(shard) as file:
            schema, _ = _opened(file)
            yield Table(schema, lambda _: _batches(shard))


def _opened(source: Any) -> "tuple[pa.Schema, Iterator[pa.RecordBatch]]":
    import pyarrow as pa

    is_file = source.read(len(_FILE_FORMAT)) == _FILE_FORMAT
    source.seek(0)
    if not is_file:
        stream = pa.ipc.open_stream(source)
        return stream.schema, iter(stream)
    stored = pa.ipc.open_file(source)
    return stored.schema, (stored.get_batch(number) for number in range(stored.num_record_batches))


def _batches(shard: Path) -> "Iterator[tuple[pa.RecordBatch, pa.Buffer]]":
    """The batches of a shard and the mapped file that they lie in: of an object, a copy for the time being."""
    import pyarrow as pa

    with shard.fetched(()) if isinstance(shard, ObjectFile) else nullcontext(shard) as path, open_regular(path) as file:
        memory = pa.memory_map(str(pinned(file))).read_buffer()
        for batch in _opened(pa.BufferReader(memory))[1]:
            yield batch, memory


class HubFormat(ArrowFormat):
    """A set of the hub by its id, which ``datasets`` fetches and keeps as Arrow files."""

    options = {  # noqa: RUF012 (a ClassVar of the base)
        **TableFormat.options,
        "split": "one of the set's splits",
        "config": "one of its configurations; default: its own",
    }

    @classmethod
    def find(cls, source: str, given: Mapping[str, str], cache: BlockCache | None = None) -> list[Path] | None:
        """Fetch a split, and return its files.

        Raises:
            UsageError: there is no such set, split or configuration, or no way to it.
        """
        import datasets

        split = given.get("split")
        if not _NAME.fullmatch(source) or (split is not None and not _SPLIT.fullmatch(split)):
            raise UsageError(f"hub:{source} is no set of the hub, or ?split={split} no whole split of one; name both")
        try:
            if split is None:
                names = ", ".join(map(str, datasets.get_dataset_split_names(source, given.get("config"))))
                raise UsageError(f"hub:{source} has splits; name one by ?split=: {names}")
            files = datasets.load_dataset(source, given.get("config"), split=split).cache_files
        except PlscError:
            raise
        except Exception as error:  # errors of the hub, its HTTP client and of builders share no base class
            raise UsageError(f"hub:{source} cannot be fetched: {first_line(error)}") from None
        return [Path(file["filename"]) for file in files]
