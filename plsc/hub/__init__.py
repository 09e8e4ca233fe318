"""Trained backbones on the Hugging Face hub: the folder that is pushed, its model card, and the push."""

from plsc.hub.card import CardFacts, read_measurements
from plsc.hub.folder import check_folder, check_repository, embeddings_contract, write_folder, write_timm
from plsc.hub.push import Repository

__all__ = [
    "CardFacts",
    "Repository",
    "check_folder",
    "check_repository",
    "embeddings_contract",
    "read_measurements",
    "write_folder",
    "write_timm",
]
