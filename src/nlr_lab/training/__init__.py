"""A recipe -> Trainer -> a folder with checkpoints, model and result.

Names are imported when they are first used, so that settings come without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nonlinear_lowrank.errors import DivergedError

    from .arms import Arm
    from .checkpoints import CheckpointedTrainer
    from .recipe import Recipe, TrainConfig
    from .result import TrainResult
    from .run import run_training

__all__ = ["Arm", "CheckpointedTrainer", "DivergedError", "Recipe", "TrainConfig", "TrainResult", "run_training"]

_FILES = {"Arm": "arms", "CheckpointedTrainer": "checkpoints", "DivergedError": "run", "Recipe": "recipe"}
_FILES |= {"TrainConfig": "recipe", "TrainResult": "result", "run_training": "run"}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_FILES[name]}", __name__), name)
