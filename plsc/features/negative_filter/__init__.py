"""Negatives that are left out of a softmax because their classes lie too close to the label's."""
