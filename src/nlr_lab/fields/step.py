"""One training step of a field, and the settings of it all."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .problem import Problem
from .recipe import FitConfig


class Stepper:
    """Take single steps; what a step sees follows from the seed and its number alone.

    Args:
        problem: what is fitted.
        model: on the device it is fitted on; changed in place.
        config: the optimization.
    """

    def __init__(self, problem: Problem, model: nn.Module, config: FitConfig) -> None:
        self.problem, self.config = problem, config
        self.device = next(model.parameters()).device
        # compiled for training only: evaluations come in other sizes
        self.model: Any = torch.compile(model, dynamic=False) if config.compile else model
        self.parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.optimizer = torch.optim.Adam(
            self.parameters.values(), lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    def take(self, step: int) -> Tensor:
        """Take a step (from 0); return its loss, detached, on the device."""
        config = self.config
        batch = self.problem.batch(step, torch.Generator().manual_seed((config.seed << 32) + step))
        if self.device.type != "cpu":
            batch = tree_map_only(Tensor, lambda each: each.to(self.device, non_blocking=True), batch)
        for group in self.optimizer.param_groups:
            group["lr"] = config.rate(step)
        self.optimizer.zero_grad()
        loss = self.problem.loss(self.model, batch)
        loss.backward()
        if config.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), config.max_grad_norm)
        self.optimizer.step()
        return loss.detach()

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors as "exp_avg/<parameter>"."""
        moments = self.optimizer.state
        return {
            f"{key}/{name}": value for name, each in self.parameters.items() for key, value in moments[each].items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        for path, value in state.items():
            key, _, name = path.partition("/")
            self.optimizer.state[self.parameters[name]][key] = value.to(self.device)
