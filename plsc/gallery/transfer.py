"""Galleries to plain files and back, whatever store they live in: embedding sets, and copies of a server's store.

**Embedding sets.** :func:`export_set` writes a collection as an embedding set with a row for each face: its
id is the face's, its label the person, its key "person/ID/face/ID". What else is known of a person lies beside it in
persons.jsonl, a line {"id", "name", "metadata", "created", "external_id", "expires", "keys"} for each label ("keys" are
those of faces, by id), whose hash the set's manifest holds under "gallery"; other readers see the names as class names,
made unique. :func:`import_set` enrols such a set, or any other.

**Copies.** Stores on a server write their snapshots as a folder of plain files, which :func:`copy_into` enrols:

COPY/
  manifest.json              with its own digest: every collection with its figures, and {file: {"bytes", "sha256"}}
  00000.persons.jsonl        a line of plsc.gallery.values.Person's fields for each person, by id; "faces" are ids
  00000.vectors.npy          (faces, dim) float32 of unit length, in the order of the persons' faces

Either way enrolling gives new ids, times and revisions, and keeps external ids, expiry dates and the keys of faces.
Persons who expired are left out.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from plsc.embedding.columns import open_array, write_npy_header
from plsc.embedding.contracts import is_of
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.set_writer import SetWriter, ShardRows
from plsc.errors import ConflictError, DataError, IntegrityError, NotFoundError, UsageError
from plsc.files import (
    Manifest,
    atomic_private_folder,
    describe_files,
    make_folder,
    manifest_value,
    open_described,
    read_manifest,
    storage_errors,
    verify_files,
    write_manifest,
)
from plsc.gallery.store import Store
from plsc.gallery.validation import MAX_CHARACTERS, MAX_ENTRIES, MAX_ID, check_metadata, check_new
from plsc.gallery.values import Collection, Float32, NewPerson, Person, PersonSummary
from plsc.index.rows import Int64, Mask, searchable
from plsc.progress import Progress

PERSONS = "persons.jsonl"
COPY_FORMAT = "plsc gallery copy"
COPY_VERSION = 3
_OLDEST_COPY = 1  # its persons have neither external ids, revisions nor expiry dates; faces have keys since 3
_PAGE_PERSONS = 1000  # read from a store at once
_SHARD_ROWS = 32768
_SAME_VECTOR, _SAME_VECTORS = 1 - 1e-5, 10  # cosine of a vector and itself; persons who may have one
_LOOKED_FOR = 100  # persons, by whom it is told that a set was imported before
_IMPORT_BATCH_FACES = 2000  # of an import's transaction, at least
_COPY_BATCH_PERSONS = 500  # of a transaction of copy_into

_EXPORTED = ("id", "name", "metadata", "created", "external_id", "expires", "keys")

PersonRows = Iterable[tuple[Person, Float32]]


# --- export ---


def export_set(store: Store, collection: str, folder: str | Path, *, quiet: bool = False) -> EmbeddingSet:
    """Write a collection as the new embedding set ``folder``.

    Raises:
        ConflictError: ``folder`` exists, or the collection was cut over to another model meanwhile.
        NotFoundError: there is no such collection.
        DataError: the collection changed meanwhile.
        StorageError: there is no room. After any of them nothing is left of the set.
    """
    target, info = Path(folder), store.collection(collection)
    check_new(target)
    expired = store.expired(MAX_ID).get(collection, [])
    rows = info.faces - sum(len(person.faces) for person in expired)
    settings = {
        "contract_id": info.contract_id,
        "dim": info.dim,
        "dtype": "float32",
        "rows": rows,
        "shard_rows": _SHARD_ROWS,
    }
    writer = SetWriter(target, settings)
    try:
        with storage_errors(target):
            writer.begin()
            names: dict[str, None] = {}
            progress = Progress("export", rows, "faces", quiet=quiet)
            _write_shards(writer, _exported_rows(store, info, target / PERSONS, names, progress))
            progress.finish()
            origin = {"collection": collection, "persons": len(names)}
            writer.origin["gallery"] = {**origin, "files": describe_files(target, [PERSONS])}
            return writer.finish(list(names))
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _exported_rows(
    store: Store, info: Collection, path: Path, names: dict[str, None], progress: Progress
) -> Iterator[tuple[Float32, int, int, str]]:
    """Yield (vector, face, label, key) of each face; write persons.jsonl, and add the classes to ``names``."""
    collection = info.name
    with path.open("w", encoding="utf-8") as file:
        for person in all_persons(store, collection):
            line = {name: getattr(person, name) for name in _EXPORTED}
            file.write(json.dumps(line, allow_nan=False) + "\n")
            vectors, label = store.vectors(collection, person.id, info.contract_id), len(names)
            if len(vectors) != len(person.faces):
                raise DataError(f"person {person.id} changed while {collection} was exported; export it again")
            for face, vector in zip(person.faces, vectors, strict=True):
                yield vector, face, label, f"person/{person.id}/face/{face}"
            names[_class_name(person, names)] = None
            progress.advance(len(person.faces))


def _write_shards(writer: SetWriter, rows: Iterator[tuple[Float32, int, int, str]]) -> None:
    """Write all shards; :class:`DataError` if there are more or fewer faces than the collection counted."""
    first = 0
    for shard in range(writer.shard_count + 1):
        part = list(islice(rows, _SHARD_ROWS))
        if not part:
            break
        if shard == writer.shard_count:
            raise DataError(f"{writer.folder}: the collection grew while it was exported; export it again")
        vectors, ids, labels, keys = zip(*part, strict=True)
        columns = np.array(ids, dtype=np.int64), np.array(labels, dtype=np.int64)
        writer.publish(shard, ShardRows(first, np.array(vectors, dtype=np.float32), *columns, keys))
        first += len(part)
    if first != writer.settings["rows"]:
        raise DataError(f"{writer.folder}: the collection changed while it was exported; export it again")


def all_persons(store: Store, collection: str) -> Iterator[Person]:
    """Yield everybody of a collection who has not expired, by ascending id."""
    after = 0
    while page := store.persons(collection, after=after, limit=_PAGE_PERSONS):
        yield from page
        after = page[-1].id


def _class_name(person: Person, taken: dict[str, None]) -> str:
    """Return the person's name, with the id if there is none or another person has it."""
    name = person.name or f"#{person.id}"
    while name in taken:
        name = f"{name} #{person.id}"
    return name


# --- import ---


def import_set(
    store: Store, collection: str, embedding_set: EmbeddingSet | str | Path, *, quiet: bool = False
) -> dict[str, int]:
    """Enrol an embedding set: a person for each class, and one for each row without a class, its key as metadata.

    Metadata of the set in which all pictures of a person agree become the person's, as far as a store takes them.
    The collection is created if there is none; a set by a model that is compatible with the collection's comes beside
    what it holds. Who is there already is not enrolled again, and gets what faces are new: somebody with the same name
    and a face with the same vector; an external id that is taken is refused. Rows with an error, NaN, infinity or
    length zero are left out. Persons are enrolled in batches, each whole or not at all. If one fails, a collection that
    was created here is removed, and one that existed keeps the batches before, from where the same call goes on. Every
    file is hashed first.

    Returns:
        {"persons", "faces", "there", "left_out"}: how many were enrolled, how many persons were there already (unless
        nobody was), and how many rows were left out.

    Raises:
        ConflictError: the vectors are of another model than the collection's.
        PlscError: whatever opening the set raises.
    """
    source = embedding_set if isinstance(embedding_set, EmbeddingSet) else EmbeddingSet(embedding_set)
    source.verify()
    is_new = collection not in {info.name for info in store.collections()}
    with _new_collection(store, collection, source.dim, source.contract_id) if is_new else nullcontext():
        return _import_rows(store, collection, source, quiet)


@contextmanager
def _new_collection(store: Store, name: str, dim: int, contract_id: str) -> Iterator[None]:
    """Create a collection for the block, and delete it again if that fails."""
    store.create_collection(name, dim, contract_id)
    try:
        yield
    except BaseException:
        with suppress(NotFoundError):
            store.delete_collection(name)
        raise


def _import_rows(store: Store, collection: str, source: EmbeddingSet, quiet: bool) -> dict[str, int]:
    progress = Progress("import", len(source), "faces", quiet=quiet)
    usable = _usable_rows(source)
    done: Counter[str] = Counter(persons=0, faces=0, there=0, left_out=len(source) - int(usable.sum()))
    options: dict[str, Any] = {"contract_id": source.contract_id, "compatible_with": source.compatible_with}
    info = store.collection(collection)
    may_be_there = info.faces > 0 and is_of(source.contract_id, info.contract_id)
    for batch in _batches(_new_persons(source, usable)):
        if may_be_there:
            # Where none of the first are there, the set was not imported before: a search for each would take long.
            may_be_there = done["there"] > 0 or bool(_known(store, collection, batch[:_LOOKED_FOR]))
        known = _known(store, collection, batch) if may_be_there else {}
        new = [person for index, person in enumerate(batch) if index not in known]
        store.add_persons(collection, new, **options)
        for index, (id, rows) in known.items():
            vectors, keys = np.asarray(batch[index].vectors)[rows], batch[index].keys
            store.add_faces(collection, id, vectors, keys=[keys[row] for row in rows] if keys else [], **options)
            done["faces"] += len(rows)
        done.update(persons=len(new), there=len(known), faces=sum(len(np.asarray(one.vectors)) for one in new))
        progress.advance(sum(len(np.asarray(one.vectors)) for one in batch))
    progress.finish()
    return {name: done[name] for name in ("persons", "faces", "there", "left_out") if done[name] or name != "there"}


def _batches(persons: Iterable[NewPerson]) -> Iterator[list[NewPerson]]:
    """Yield persons as they are enrolled together; an empty list at the least, by which a wrong model is refused."""
    batch: list[NewPerson] = []
    size = 0
    for person in persons:
        batch.append(person)
        size += 1 + len(np.asarray(person.vectors))
        if size >= _IMPORT_BATCH_FACES:
            yield batch
            batch, size = [], 0
    yield batch


def _known(store: Store, collection: str, persons: Sequence[NewPerson]) -> dict[int, tuple[int, list[int]]]:
    """Return, of ``persons`` who are in a collection already, the id there and which of their rows are not, by index.

    That is somebody with the same name, without an external id, and with a face of the same vector.
    """
    counts = [len(np.asarray(person.vectors)) for person in persons]
    if not sum(counts):
        return {}
    vectors = np.concatenate([np.asarray(one.vectors) for one, count in zip(persons, counts, strict=True) if count])
    matches = store.search(collection, vectors, k=_SAME_VECTORS, threshold=_SAME_VECTOR)
    there = store.person_summaries(collection, [match.person for found in matches for match in found])
    rest, known = iter(matches), dict[int, tuple[int, list[int]]]()
    for index, (person, count) in enumerate(zip(persons, counts, strict=True)):
        found = [{one.person for one in own if _are_one(person, there.get(one.person))} for own in islice(rest, count)]
        ids = Counter(id for own in found for id in own)
        if ids:
            id = ids.most_common(1)[0][0]
            known[index] = id, [row for row, own in enumerate(found) if id not in own]
    return known


def _are_one(new: NewPerson, known: PersonSummary | None) -> bool:
    """True if these may be one; by an external id it is told when ``new`` is enrolled, which is then refused."""
    return known is not None and (new.name, new.external_id) == (known.name, None)


def _usable_rows(source: EmbeddingSet) -> Mask:
    """Return (N,) which rows have a direction."""
    usable = np.ones(len(source), dtype=np.bool_)
    usable[list(source.errors)] = False
    for start in range(0, len(source), _SHARD_ROWS):
        stop = min(start + _SHARD_ROWS, len(source))
        usable[start:stop] &= searchable(source.rows(start, stop))[1]
    return usable


def _new_persons(source: EmbeddingSet, usable: Mask) -> Iterator[NewPerson]:
    """Yield the persons of a set, class by class, then the rows without one."""
    labels: Int64 = np.where(usable, source.labels, -2)
    if len(labels) and int(labels.max()) >= len(source.class_names):
        raise DataError(f"{source.path} holds labels outside its {len(source.class_names)} classes; embed it again")
    order = np.argsort(labels, kind="stable")
    ends = np.searchsorted(labels[order], np.arange(-1, len(source.class_names) + 1))
    known = _exported_persons(source)
    for label, name in enumerate(source.class_names):
        rows = order[ends[label + 1] : ends[label + 2]]
        if known is not None:
            line = next(known)
            about = (line["name"], line["metadata"], line.get("external_id"), line.get("expires"))
            keys = _face_keys(source.ids[rows].tolist(), line.get("keys", {}))
            yield NewPerson(_read_rows(source, rows), *about, keys=keys)
        elif len(rows):
            yield NewPerson(_read_rows(source, rows), name, _shared_metadata(source, rows.tolist()))
    for row in order[ends[0] : ends[1]].tolist():
        key = {"key": source.keys[row][:MAX_CHARACTERS]}
        yield NewPerson(source.rows(row, row + 1), None, {**_shared_metadata(source, [row]), **key})


def _shared_metadata(source: EmbeddingSet, rows: Sequence[int]) -> dict[str, Any]:
    """Return the metadata in which all of a person's pictures agree, as far as a store takes it."""
    first, *others = [source.metadata(row) for row in rows] if source.has_metadata else [{}]
    for other in others:
        first = {name: value for name, value in first.items() if name in other and other[name] == value}
    fitting: dict[str, Any] = {}
    for name, value in first.items():
        with suppress(UsageError):
            fitting |= check_metadata({name: value})
    return dict(islice(fitting.items(), MAX_ENTRIES - 1))  # one is the key


def _exported_persons(source: EmbeddingSet) -> Iterator[dict[str, Any]] | None:
    """Yield the line of persons.jsonl of each class in turn; None if the set was not exported from a gallery."""
    origin = source.manifest.get("gallery")
    if origin is None:
        return None
    file = open_described(source.folder, PERSONS, origin["files"].get(PERSONS))
    if origin["persons"] != len(source.class_names):
        file.close()
        raise IntegrityError(f"{source.folder / PERSONS} does not go with the set; use another copy")
    return _read_lines(file)


def _read_lines(file: BinaryIO) -> Iterator[dict[str, Any]]:
    with file:
        for line in file:
            yield json.loads(line)


def _read_rows(source: EmbeddingSet, rows: Int64) -> Float32:
    """Return rows (n, dim), read in runs of neighbours."""
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if len(rows) else []
    parts = [source.rows(int(run[0]), int(run[-1]) + 1) for run in runs]
    return np.concatenate([np.empty((0, source.dim), dtype=np.float32), *parts])


# --- copies ---


def write_copy(target: Path, collections: Sequence[tuple[Collection, PersonRows]]) -> None:
    """Write ``collections``, each with its persons by id and their vectors (n, dim), to the new folder ``target``.

    :class:`ConflictError` if ``target`` exists; if writing fails, nothing is left of it.
    """
    check_new(target)
    make_folder(target.parent)
    with storage_errors(target), atomic_private_folder(target) as tmp_path:
        infos = [_write_collection(tmp_path, index, *item) for index, item in enumerate(collections)]
        names = sorted(path.name for path in tmp_path.iterdir())
        content: Manifest = {"format": COPY_FORMAT, "version": COPY_VERSION, "collections": infos}
        write_manifest(tmp_path, {**content, "files": describe_files(tmp_path, names)})


def read_copy(folder: Path) -> list[tuple[Collection, Iterator[tuple[Person, Float32]]]]:
    """Return what :func:`write_copy` wrote, after hashing every file.

    Raises:
        DataError: ``folder`` holds no copy.
        IntegrityError: the copy is damaged; names the file.
    """
    manifest = read_manifest(folder, COPY_FORMAT, COPY_VERSION, oldest=_OLDEST_COPY)
    verify_files(folder, manifest_value(folder, manifest, "files", dict))
    try:
        infos = [Collection(**info) for info in manifest_value(folder, manifest, "collections", list)]
    except TypeError as error:
        raise IntegrityError(f"{folder} lists its collections wrongly ({error}); use another copy") from None
    return [(info, _read_collection(folder, index, info)) for index, info in enumerate(infos)]


def copy_into(store: Store, folder: Path) -> list[Collection]:
    """Enrol everything that a copy holds into ``store``; returns the collections created.

    Raises what :func:`read_copy` raises, and :class:`ConflictError` if ``store`` already has a collection of a name. A
    collection whose enrolment fails is removed again.
    """
    copied = read_copy(folder)
    taken = {info.name for info in store.collections()} & {info.name for info, _ in copied}
    if taken:
        raise ConflictError(f"the store has a collection {min(taken)} already; copy into another store")
    return [_enrol_collection(store, info, rows) for info, rows in copied]


def _enrol_collection(store: Store, info: Collection, rows: Iterator[tuple[Person, Float32]]) -> Collection:
    with _new_collection(store, info.name, info.dim, info.contract_id):
        while batch := list(islice(rows, _COPY_BATCH_PERSONS)):
            new = [
                NewPerson(vectors, *about, keys=_face_keys(one.faces, one.keys))
                for one, vectors in batch
                for about in [(one.name, one.metadata, one.external_id, one.expires)]
            ]
            store.add_persons(info.name, new, info.contract_id)
    return store.collection(info.name)


def _face_keys(faces: Sequence[int], keys: Mapping[Any, str]) -> list[str | None]:
    """Return the keys of ``faces``; those of a line of JSON are by their ids as texts."""
    return [keys.get(face, keys.get(str(face))) for face in faces]


def _copy_files(folder: Path, index: int) -> tuple[Path, Path]:
    return folder / f"{index:05}.persons.jsonl", folder / f"{index:05}.vectors.npy"


def _write_collection(folder: Path, index: int, info: Collection, rows: PersonRows) -> dict[str, object]:
    """Write one collection. How many faces it has is known at the end, and the header of the vectors is replaced."""
    lines, vectors_path = _copy_files(folder, index)
    persons = faces = 0
    with lines.open("w", encoding="utf-8") as text, vectors_path.open("wb") as numbers:
        write_npy_header(numbers, (0, info.dim))
        for person, vectors in rows:
            text.write(json.dumps(asdict(person), allow_nan=False) + "\n")
            numbers.write(np.ascontiguousarray(vectors, dtype="<f4").tobytes())
            persons, faces = persons + 1, faces + len(vectors)
        numbers.seek(0)
        write_npy_header(numbers, (faces, info.dim))
    return {**asdict(info), "persons": persons, "faces": faces}


def _read_collection(folder: Path, index: int, info: Collection) -> Iterator[tuple[Person, Float32]]:
    lines, path = _copy_files(folder, index)
    vectors: Float32 = open_array(path, (info.faces, info.dim), "float32")
    row = 0
    with lines.open(encoding="utf-8") as text:
        for line in text:
            try:
                read = json.loads(line)
                keys = {int(face): key for face, key in read.get("keys", {}).items()}
                person = Person(**{**read, "faces": tuple(read["faces"]), "keys": keys})
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{lines} is not readable: {error}") from None
            yield person, np.array(vectors[row : row + len(person.faces)])
            row += len(person.faces)
    if row != info.faces:
        raise IntegrityError(f"{lines} names {row} faces and {path.name} holds {info.faces}; use another copy")
