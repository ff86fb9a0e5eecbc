"""A recipe -> Trainer -> a folder with checkpoints, model and result.

Names are imported when they are first used, so that settings come without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arms import Arm
    from .recipe import Recipe, TrainConfig
    from .result import DivergedError, TrainResult
    from .run import run_training

__all__ = ["Arm", "DivergedError", "Recipe", "TrainConfig", "TrainResult", "run_training"]

_FILES = {
    "Arm": "arms",
    "Recipe": "recipe",
    "TrainConfig": "recipe",
    "TrainResult": "result",
    "DivergedError": "result",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_FILES.get(name, 'run')}", __name__), name)
