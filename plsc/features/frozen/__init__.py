"""Weights of the backbone, and rows of the class table, that are not trained."""
