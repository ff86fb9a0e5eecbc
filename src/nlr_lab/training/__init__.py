"""A recipe -> Trainer -> a folder with checkpoints, model and result."""

from .checkpoints import CheckpointedTrainer, DivergedError
from .recipe import Arm, Recipe, TrainConfig
from .run import TrainResult, run_training

__all__ = ["Arm", "CheckpointedTrainer", "DivergedError", "Recipe", "TrainConfig", "TrainResult", "run_training"]
