#!/usr/bin/env bash
# zvec 0.8.0: group_by_query on a FLAT index gives no group at all once optimize() has merged rows. An HNSW index gives all.
#
# Guess before running: optimize() changes speed, not answers, and of all indexes least those of the exact one. If groups
# were not possible there, group_by_query would raise, as it does on an optimized IVF index.
# Seen: 1,000 unit vectors of 20 persons, cosine, the 3 nearest rows of each person. 990 rows and optimize() give the 20
# exact groups. With 10 rows more they are still right. After the next optimize() FLAT gives an empty list without an
# error, and after a new opening, too. Removing 400 rows of 1,000 and optimize() does the same. Searches without groups,
# with and without a filter, are exact all along, and so is the number of rows. HNSW gives the exact groups at each step.
# Why: plain search reads the blocks of vectors in order. The scan for groups finds each row by its key, and leaves out
# rows whose key it does not find. The rows of a merged index are added by position, and their keys are not entered
# in that table, so all are left out. This is how the source reads; it was not traced.
# Consequence: "the nearest persons" becomes "no person known" with the second optimize(), which a test of one build does
# not reach. Drop the index and create it anew, as is shown here, or use HNSW. Once dropped, groups are right even
# without it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet zvec==0.8.0 numpy==2.4.6
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys

import numpy as np
import zvec

ROWS, LATER, SIZE, PERSONS, EACH = 1000, 10, 32, 20, 3
rng = np.random.default_rng(0)
vectors = rng.normal(size=(ROWS, SIZE))
vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
persons = np.arange(ROWS) % PERSONS
query = zvec.Query("vector", vector=vectors[0].tolist())
order = np.argsort(-(vectors.astype(np.float64) @ vectors[0].astype(np.float64)), kind="stable")
INDEXES = {"FLAT": zvec.FlatIndexParam, "HNSW": zvec.HnswIndexParam}
zvec.init(log_level=zvec.LogLevel.WARN)


def opened(name, kind):
    field = zvec.FieldSchema("person", zvec.DataType.INT64)
    vector = zvec.VectorSchema("vector", zvec.DataType.VECTOR_FP32, SIZE, index_param=index(kind))
    return zvec.create_and_open(f"{sys.argv[1]}/{name}", zvec.CollectionSchema(name, fields=[field], vectors=[vector]))


def index(kind):
    return INDEXES[kind](metric_type=zvec.MetricType.COSINE)


def put(collection, rows):
    for start in range(0, len(rows), 500):
        docs = [
            zvec.Doc(id=str(row), vectors={"vector": vectors[row].tolist()}, fields={"person": int(persons[row])})
            for row in rows[start : start + 500]
        ]
        assert all(status.ok() for status in collection.upsert(docs))


def grouped(collection):
    """The nearest rows of each person."""
    groups = collection.group_by_query(query, "person", group_count=PERSONS, topk_per_group=EACH)
    return {int(group.group_by_value): [int(doc.id) for doc in group.docs] for group in groups}


def nearest(collection, rows=None):
    condition = None if rows is None else "person = 3"
    return [int(doc.id) for doc in collection.query(query, topk=10, filter=condition)]


def state(collection, kept):
    """How many groups there are, how many are exact, and whether searches without groups are exact."""
    kept = order[np.isin(order, kept)]
    found = grouped(collection)
    exact = sum(found.get(one) == kept[persons[kept] == one][:EACH].tolist() for one in range(PERSONS))
    plain = nearest(collection) == kept[:10].tolist()
    filtered = nearest(collection, kept) == kept[persons[kept] == 3][:10].tolist()
    return len(found), exact, plain and filtered and collection.stats.doc_count == len(kept)


every = np.arange(ROWS)
early = every[:-LATER]
for kind in INDEXES:
    seen = {}
    collection = opened(f"added_{kind}", kind)
    put(collection, early)
    collection.optimize()
    seen["first rows, optimized"] = state(collection, early)
    put(collection, every[-LATER:])
    seen[f"{LATER} added"] = state(collection, every)
    collection.optimize()
    seen["optimized again"] = state(collection, every)
    collection.close()
    collection = zvec.open(f"{sys.argv[1]}/added_{kind}")
    seen["opened again"] = state(collection, every)
    collection.drop_index("vector")
    seen["index dropped"] = state(collection, every)
    collection.create_index("vector", index(kind))
    seen["index created anew"] = state(collection, every)
    collection.optimize()
    seen["and optimized"] = state(collection, every)
    collection.close()
    collection = opened(f"removed_{kind}", kind)
    put(collection, every)
    collection.delete([str(row) for row in range(500, 900)])
    kept = np.r_[0:500, 900:ROWS]
    seen["400 of 1,000 removed"] = state(collection, kept)
    collection.optimize()
    seen["and optimized after removal"] = state(collection, kept)
    collection.close()
    for step, (groups, exact, searches) in seen.items():
        print(f"{kind}, {step}: {groups} groups, {exact} of {PERSONS} exact; searches without groups exact: {searches}")
        empty = kind == "FLAT" and step in ("optimized again", "opened again", "and optimized after removal")
        assert searches, f"changed: {step}"
        assert (groups, exact) == ((0, 0) if empty else (PERSONS, PERSONS)), f"changed: {step}"
print("as described")
PY
