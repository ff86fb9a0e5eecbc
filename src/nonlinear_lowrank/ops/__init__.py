"""Functions on tensors, one operator a file: reference forward, lean autograd, dispatch."""

from .cosnet import ACTIVATIONS, bottleneck, noble_linear, noble_linear_reference

__all__ = ["ACTIVATIONS", "bottleneck", "noble_linear", "noble_linear_reference"]
