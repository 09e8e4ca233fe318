"""Benchmarks of the class head, the search and the service beside their baselines, measured in one run."""
