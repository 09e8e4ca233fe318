"""Replicas of the class table, one in each head group, that step by themselves for a while."""
