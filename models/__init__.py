"""Backbones by name, and their files: ``create``, ``names``, ``register``."""

if __name__ != "plsc.models":
    raise ImportError("this folder is the package plsc.models: import plsc.models")

from plsc.models import iresnet, mobilefacenet  # noqa: F401  (each registers its names)
from plsc.models.backbone import Backbone
from plsc.models.registry import create, names, register

__all__ = ["Backbone", "create", "names", "register"]
