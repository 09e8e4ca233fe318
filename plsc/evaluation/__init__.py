"""Judging embeddings: verification of pairs, identification in a gallery, IJB templates, their pictures."""

from plsc.evaluation.baselines import raw_pixels
from plsc.evaluation.evaluator import evaluate
from plsc.evaluation.gallery import identification
from plsc.evaluation.pairs import verification

__all__ = ["evaluate", "identification", "raw_pixels", "verification"]
