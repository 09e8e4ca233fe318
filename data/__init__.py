"""Data sets of labelled images, and the loader that feeds them to training."""

if __name__ != "plsc.data":
    raise ImportError("this folder is the package plsc.data: import plsc.data")

from plsc.data.codec import decode_image, read_image
from plsc.data.dataset import EncodedDataset, ImageDataset, open_dataset
from plsc.data.loader import TrainLoader
from plsc.data.pairs import PairSet, read_pairs, write_pairs
from plsc.models.preprocessing import normalize

__all__ = [
    "EncodedDataset",
    "ImageDataset",
    "PairSet",
    "TrainLoader",
    "decode_image",
    "normalize",
    "open_dataset",
    "read_image",
    "read_pairs",
    "write_pairs",
]
