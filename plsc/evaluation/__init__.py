"""Evaluation of embeddings: verification of pairs, identification in a gallery, IJB templates, reports."""

from plsc.evaluation.evaluator import evaluate, raw_pixels
from plsc.evaluation.pairs import verification
from plsc.evaluation.search import identification
from plsc.evaluation.templates import ijb

__all__ = ["evaluate", "identification", "ijb", "raw_pixels", "verification"]
