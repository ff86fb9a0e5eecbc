"""Helpers of the tests of NoRA."""

import torch


def trained(model):
    """The trained tensors by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs).logits


def drawn(model):
    """The model, every trained tensor a little away from where it was."""
    with torch.no_grad():
        for value in trained(model).values():
            value.add_(0.05 * torch.randn_like(value))
    return model
