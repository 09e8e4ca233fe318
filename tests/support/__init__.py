"""Helpers that several tests share: pools of ranks, live services, stores, tiny training runs."""
