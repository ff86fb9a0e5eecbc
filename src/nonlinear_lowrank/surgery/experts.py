"""Experts that a module holds as 3-D parameters (E, a, b): most of a mixture-of-experts model, and no linear of it."""

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_ACTIVE = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "num_selected_experts"),
    *("top_k", "moe_top_k", "moe_topk", "moe_k"),
)
HELD_AS_TENSORS = "holds weights as 3-D parameters, which are no linears"


def expert_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own 3-D parameters (E, a, b), by name; those of torch's own layers, convolutions, are none.

    A leading 1 marks a token, a position table or the like; numbers along one dimension alone are a scale.
    """
    if type(module).__module__.startswith("torch.nn."):
        return {}
    own = module.named_parameters(recurse=False)
    return {name: each for name, each in own if each.ndim == 3 and each.shape[0] > 1 and max(each.shape[1:]) > 1}


def unreached_experts(model: nn.Module) -> str:
    """Return a clause with the modules that hold experts as tensors and their share of the parameters; empty: none."""
    held = {name: sum(each.numel() for each in own.values()) for name, own in _all(model) if own}
    if not held:
        return ""
    share = sum(held.values()) / sum(each.numel() for each in model.parameters())
    names = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in held))
    return f"the experts in {names}, {100 * share:.0f} % of the model's parameters, are 3-D parameters and not linears"


def _all(model: nn.Module) -> Iterator[tuple[str, dict[str, Tensor]]]:
    return ((name, expert_tensors(module)) for name, module in model.named_modules())


def expert_flops(module: nn.Module, model: Any) -> int | None:
    """Forward FLOPs per token of a module's experts, of those that a token goes through; None: nothing says how many.

    Args:
        module: with `expert_tensors`.
        model: it is part of, whose config is asked.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for source in (module, getattr(module, "config", None), text, getattr(text, "ffn_config", None)):
        for name in _ACTIVE:
            active = getattr(source, name, None)
            if isinstance(active, int) and not isinstance(active, bool):
                tensors = expert_tensors(module).values()
                return sum(2 * min(active, each.shape[0]) * each[0].numel() for each in tensors)
    return None
