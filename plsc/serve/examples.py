"""Values that the description of the interface shows, each of them valid as it stands."""

from typing import Any

# A picture of 16 x 16 pixels in PNG.
IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAMUlEQVR4nGM8sWoaAymAiSTVw1RDQkkHHi4DAwPjMAhWFkyhc5OWwdlGeVFossPB"
    "0wD35QvwvOPdyQAAAABJRU5ErkJggg=="
)
VECTOR: tuple[float, ...] = (0.12, -0.31, 0.94)  # the service's own model tells how many numbers it takes: GET /v1/info
PERSON = {"name": "Ada", "metadata": {"city": "Bern", "age": 31}, "faces": [{"image": IMAGE}]}
FILTER = {"city": "Bern", "age": {"gte": 30}}
SEARCHES = {"queries": [{"image": IMAGE}, {"image": IMAGE}], "k": 5, "threshold": 0.4, "filter": FILTER}

# By operation: {what it shows: the body}. An inference's body is too long to be read: docs/serving.md makes one.
BODIES: dict[str, dict[str, Any]] = {
    "create_collection": {"a collection": {"name": "visitors"}},
    "add_persons": {
        "one person": PERSON,
        "several, all or none": {"persons": [PERSON, {"name": "Grace", "faces": [{"image": IMAGE}]}]},
    },
    "update_person": {"another name": {"name": "Ada L."}, "other metadata": {"metadata": {"city": "Rome"}}},
    "add_faces": {"a picture": {"faces": [{"image": IMAGE}]}},
    "search": {"one query": {"query": {"image": IMAGE}, "k": 5}, "several, with a threshold and a filter": SEARCHES},
    "compare": {"two pictures": {"a": {"image": IMAGE}, "b": {"image": IMAGE}}},
    "embeddings": {"a picture": {"inputs": [{"image": IMAGE}]}},
}
