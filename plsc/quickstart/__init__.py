"""Quickstart on built-in identities: train, evaluate on unseen ones, embed, index, search, export, report."""
