"""Fuzz targets: one for each reader of files, route of the service and kind of token; ``make fuzz`` runs them.

An input is made of a seed and a number alone, so that each can be made again, on any machine. The driver is our own:
hypothesis looks for the smallest of a few hundred examples, and is made neither for hours nor for damaged bytes of
valid files; a driver guided by coverage (atheris) needs a compiler and instruments no C++.
"""
