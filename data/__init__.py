"""Data sets of labelled images, and the loader that feeds them to training."""

if __name__ != "plsc.data":
    raise ImportError("this folder is the package plsc.data: import plsc.data")

from plsc.data.dataset import EncodedDataset, ImageDataset, open_dataset

__all__ = ["EncodedDataset", "ImageDataset", "open_dataset"]
