"""Forward FLOPs per token of a module's products; a multiply-add counts 2."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.methods.base import method_of_layer

from .targets import expert_tensors

_ACTIVE = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "num_selected_experts"),
    *("top_k", "moe_top_k", "moe_topk", "moe_k"),
)


def own_flops(module: nn.Module, model: nn.Module) -> int:
    """Return the forward FLOPs per token of a module's products, without those of modules inside it."""
    method = method_of_layer(module)
    if method is not None:
        plain = method.plain(module)
        return method.flops(module) + (plain.flops if plain else 0)
    if expert_tensors(module):
        return _expert_flops(module, model)
    if isinstance(module, nn.Linear | Conv1D):
        return 2 * module.weight.numel()
    if isinstance(module, nn.MultiheadAttention):
        # It reads these tensors itself and never calls its out_proj, whose weight is counted there.
        own = [module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
        return 2 * sum(weight.numel() for weight in own if weight is not None)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.kernel_size == module.stride:
        return 2 * module.weight.numel()
    return 0


def _expert_flops(module: nn.Module, model: Any) -> int:
    """Return the FLOPs of the experts that a token goes through; 0 where nothing says how many.

    Args:
        module: one with `expert_tensors`.
        model: that it is part of, whose config is asked.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    sources = (module, getattr(module, "config", None), text, getattr(text, "ffn_config", None))
    if (active := first_integer(sources, _ACTIVE)) is None:
        return 0
    return sum(2 * min(active, each.shape[0]) * each[0].numel() for each in expert_tensors(module).values())


def first_integer(sources: Iterable[Any], names: Iterable[str]) -> int | None:
    """Return the first attribute of these names that is an integer, source by source; None where none is."""
    values = (getattr(source, name, None) for source in sources for name in names)
    return next((each for each in values if isinstance(each, int) and not isinstance(each, bool)), None)
