"""Experts of classes of their own: a file for each package of transformers that has one, named after it."""

from . import dbrx, jetmoe, llama4, longcat_flash

__all__ = ["dbrx", "jetmoe", "llama4", "longcat_flash"]
