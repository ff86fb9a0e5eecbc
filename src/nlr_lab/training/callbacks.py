"""Callbacks that say when a run logs, evaluates, saves and stops, and that seed its dropout."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from nlr_lab.runtime.processes import on_rank_0
from nlr_lab.runtime.time_limit import OutOfTimeError

from .recipe import TrainConfig
from .state_files import seed_all


class Schedule(TrainerCallback):
    """Decide when to log, evaluate and save.

    Every evaluation and checkpoint also closes an entry of the training curve: a resumed run then has the same entries
    as one that was never killed.
    """

    def __init__(self, train: TrainConfig) -> None:
        self.config = train

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        step, last = state.global_step, state.global_step >= state.max_steps
        control.should_evaluate = last or step % self.config.eval_every == 0
        control.should_save = last or step % self.config.save_every == 0
        control.should_log = control.should_evaluate or control.should_save or step % self.config.log_every == 0
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        # The run's only epoch ends with its last step, which has done all this.
        control.should_evaluate = control.should_save = control.should_log = False
        return control


class Stop(TrainerCallback):
    """Ends a run, without a checkpoint, by OutOfTimeError where `stop` says so of a step; it can be resumed."""

    def __init__(self, stop: Callable[[int], bool]) -> None:
        self.stop = stop

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if step >= state.max_steps or not (args.world_size == 1 or control.should_log):
            return
        if on_rank_0(lambda: self.stop(step)):
            raise OutOfTimeError(f"stopped for time at step {step} of {state.max_steps}; go on with --resume")


class SeedDropout(TrainerCallback):
    """Dropout starts from the seed, not from what the arm's init left behind, and differs by process."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            seed_all(args.seed + 1_000_003 * args.process_index)
