"""Evaluation of embeddings: verification of pairs, identification in a gallery, IJB templates, reports."""

from plsc.evaluation.embedding import raw_pixels
from plsc.evaluation.evaluator import evaluate
from plsc.evaluation.gallery import identification
from plsc.evaluation.pairs import verification
from plsc.evaluation.templates import ijb

__all__ = ["evaluate", "identification", "ijb", "raw_pixels", "verification"]
