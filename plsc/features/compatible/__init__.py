"""Embeddings that stay comparable with those of an old model (backward-compatible training)."""
