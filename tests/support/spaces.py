"""Embeddings of persons drawn at random, and maps between spaces that are known."""

import numpy as np


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def people(count, faces, dim, seed=0, noise=0.5):
    """Unit rows of ``count`` persons' faces, which scatter round a centre each, and whose they are."""
    rng = np.random.default_rng(seed)
    persons = np.repeat(np.arange(count), faces)
    centres = rng.standard_normal((count, dim))
    return unit(centres[persons] + noise * rng.standard_normal((len(persons), dim))), persons


def rotation(old, new, seed=5):
    """Random (old, new) whose rows or columns, whichever are fewer, are orthonormal."""
    wide = np.random.default_rng(seed).standard_normal((max(old, new), min(old, new)))
    basis = np.linalg.qr(wide)[0]
    return basis if old >= new else basis.T
