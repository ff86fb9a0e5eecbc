"""One training step of a field, and the settings of it all."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .problem import Problem

Schedule = Literal["cosine", "linear", "exponential", "constant"]


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How a field is fitted: Adam, all parameters at one rate, no weight decay.

    Raises:
        UserError: a value is out of range; the message names it.
    """

    steps: int = 2000
    """Optimizer steps."""
    lr: float = 1e-3
    """Peak learning rate."""
    schedule: Schedule = "cosine"
    """From the peak to `end` times the peak."""
    end: float = 0.01
    """The last step's rate as a share of the peak."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Adam's."""
    eps: float = 1e-8
    """Adam's."""
    max_grad_norm: float = 0.0
    """Gradients are clipped to this norm; 0: not clipped."""
    seed: int = 0
    """Of the initial draw and of every batch."""
    eval_every: int = 0
    """Steps between evaluations; 0: a tenth of all. The last step is always evaluated."""
    save_every: int = 500
    """Steps between checkpoints; 0: none."""
    keep_checkpoints: int = 1
    """How many of the newest are kept."""
    compile: bool = False
    """Compile the model by torch.compile; takes half a minute first."""
    threads: int | None = None
    """CPU threads; None: torch's own choice."""
    device: str = ""
    """cpu, cuda or cuda:0; empty: the GPU where there is one."""

    def __post_init__(self) -> None:
        for name, least in (
            *(("steps", 1), ("warmup_steps", 0), ("seed", 0), ("eval_every", 0), ("save_every", 0)),
            *(("keep_checkpoints", 1), ("threads", 1)),
        ):
            value = getattr(self, name)
            if name == "threads" and value is None:
                continue
            check_integer(name, value, minimum=least)
        if self.seed >= 2**31:
            raise UserError(f"seed must be below 2^31, got {self.seed}")
        for name in ("lr", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be a finite number above 0, got {getattr(self, name)!r}")
        if not 0 <= self.end <= 1 or (self.schedule == "exponential" and self.end == 0):
            raise UserError(f"end must be a share of the peak, from 0 (exponential: above 0) to 1, got {self.end!r}")
        if not 0 <= self.max_grad_norm < math.inf:
            raise UserError(f"max_grad_norm must be a finite number of at least 0, got {self.max_grad_norm!r}")
        if self.schedule not in get_args(Schedule):
            raise UserError(f"unknown schedule {self.schedule!r}; choose one of {', '.join(get_args(Schedule))}")
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON turns tuples into lists
        if len(self.betas) != 2 or not all(isinstance(each, int | float) and 0 <= each < 1 for each in self.betas):
            raise UserError(f"betas must be two numbers of at least 0 and below 1, got {self.betas!r}")

    def rate(self, step: int) -> float:
        """Learning rate of a step (from 0)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = (step - self.warmup_steps) / max(self.steps - 1 - self.warmup_steps, 1)
        if self.schedule == "exponential":
            return self.lr * self.end**done
        left = (1 + math.cos(math.pi * done)) / 2 if self.schedule == "cosine" else 1 - done
        return self.lr * (self.end + (1 - self.end) * left)

    def evaluates(self, step: int) -> bool:
        """Whether there is an evaluation after so many steps."""
        return step == self.steps or step % (self.eval_every or max(self.steps // 10, 1)) == 0


class Stepper:
    """Takes single steps; what a step sees follows from the seed and its number alone.

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
        """Takes step `step` (from 0); its loss, detached, on the device."""
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
        """The optimizer's tensors as "exp_avg/<parameter>"."""
        moments = self.optimizer.state
        return {
            f"{key}/{name}": value for name, each in self.parameters.items() for key, value in moments[each].items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state` gave."""
        for path, value in state.items():
            key, _, name = path.partition("/")
            self.optimizer.state[self.parameters[name]][key] = value.to(self.device)
