"""Several class tables over one backbone, each with data, classes and a margin of its own."""
