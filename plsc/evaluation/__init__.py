"""Evaluation of embeddings: verification of pairs, identification in a gallery, IJB templates, reports."""

from plsc.evaluation.evaluator import Evaluator, evaluate, raw_pixels, score
from plsc.evaluation.pairs import verification
from plsc.evaluation.search import identification
from plsc.evaluation.templates import ijb

__all__ = ["Evaluator", "evaluate", "identification", "ijb", "raw_pixels", "score", "verification"]
