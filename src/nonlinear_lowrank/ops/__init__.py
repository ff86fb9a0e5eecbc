"""Functions on tensors, one operator a file: reference forward, lean autograd, dispatch."""

from .cosnet import ACTIVATIONS, bottleneck, noble_branch, noble_linear, noble_linear_reference
from .cosnet_group import noble_group, noble_group_reference
from .down_form import use_down_form
from .kernels import use_kernels
from .lowrank import WEIGHT_ACTIVATIONS, lowrank_linear, lowrank_linear_reference, lowrank_weight
from .rational import rational, rational_anchored, rational_reference
from .rational_gated import rational_gated, rational_gated_reference
from .sine import (
    effective_weight,
    sine_delta,
    sine_delta_linear,
    sine_dora_linear,
    sine_layer,
    sine_layer_reference,
    sine_linear,
)
from .sine_delta import SineFactors, dora_norm, sine_weight_reference
from .sine_embedding import embedding_delta, sine_embedding
from .up_form import use_up_form

__all__ = [
    "ACTIVATIONS",
    "WEIGHT_ACTIVATIONS",
    "SineFactors",
    "bottleneck",
    "dora_norm",
    "effective_weight",
    "embedding_delta",
    "lowrank_linear",
    "lowrank_linear_reference",
    "lowrank_weight",
    "noble_branch",
    "noble_group",
    "noble_group_reference",
    "noble_linear",
    "noble_linear_reference",
    "rational",
    "rational_anchored",
    "rational_gated",
    "rational_gated_reference",
    "rational_reference",
    "sine_delta",
    "sine_delta_linear",
    "sine_dora_linear",
    "sine_embedding",
    "sine_layer",
    "sine_layer_reference",
    "sine_linear",
    "sine_weight_reference",
    "use_down_form",
    "use_kernels",
    "use_up_form",
]
