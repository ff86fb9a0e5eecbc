"""Cost of a model: parameters, FLOPs and bytes saved for backward; and scores of its linears.

    nlr.analysis.model_cost(model, sequence_length=1024)
    nlr.analysis.select_layers(nlr.analysis.layer_importance(model, batches))

Each file is imported when a name of it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cost import LayerCost, ModelCost, model_cost
    from .importance import layer_importance, part_of, recommended_layers, select_layers
    from .saved import saved_bytes

__all__ = [
    "LayerCost",
    "ModelCost",
    "layer_importance",
    "model_cost",
    "part_of",
    "recommended_layers",
    "saved_bytes",
    "select_layers",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    files = {"saved_bytes": "saved", **dict.fromkeys(("LayerCost", "ModelCost", "model_cost"), "cost")}
    file = files.get(name, "importance")
    value = globals()[name] = getattr(importlib.import_module(f".{file}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
