"""Several labels a picture: each has a softmax of its own, from one pass over the classes."""
