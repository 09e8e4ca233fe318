"""Backbones by name, and their files; backbone.py says how to add one."""

if __name__ != "plsc.models":
    raise ImportError("this folder is the package plsc.models: import plsc.models")

from plsc.models import iresnet, mobilefacenet, small_resnet, vit, wrappers  # noqa: F401  (each registers its names)
from plsc.models.backbone import Backbone, ModuleBackbone, create, exists, names, register
from plsc.models.weights import load_model, load_weights, save_model

__all__ = [
    "Backbone",
    "ModuleBackbone",
    "create",
    "exists",
    "load_model",
    "load_weights",
    "names",
    "register",
    "save_model",
]
