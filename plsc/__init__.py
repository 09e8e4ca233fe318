"""plsc: train recognition models over tens of millions of classes, and put them to work."""

__version__ = "0.1.0"
