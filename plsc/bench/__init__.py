"""Measurements of this project beside its peers, taken in one run."""
