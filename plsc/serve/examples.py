"""Values that the description of the interface shows, each of them valid as it stands."""

# A picture of 16 x 16 pixels in PNG.
IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAMUlEQVR4nGM8sWoaAymAiSTVw1RDQkkHHi4DAwPjMAhWFkyhc5OWwdlGeVFossPB"
    "0wD35QvwvOPdyQAAAABJRU5ErkJggg=="
)
VECTOR: tuple[float, ...] = (0.12, -0.31, 0.94)  # the service's own model tells how many numbers it takes: GET /v1/info
PERSON = {"name": "Ada", "metadata": {"city": "Bern", "age": 31}, "faces": [{"image": IMAGE}]}
FILTER = {"city": "Bern", "age": {"gte": 30}}
SEARCH = {"query": {"image": IMAGE}, "k": 5}
SEARCHES = {"queries": [{"image": IMAGE}, {"image": IMAGE}], "k": 5, "threshold": 0.4, "filter": FILTER}
