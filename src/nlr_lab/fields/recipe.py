"""A neural field (coordinate network) as a recipe: the problem, its methods, and the optimization."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, check_number

from .settings import check_integers

Schedule = Literal["cosine", "linear", "exponential", "constant"]


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """The optimization of a fit: Adam, all parameters at one learning rate, no weight decay."""

    steps: int = 2000
    """Optimizer steps."""
    lr: float = 1e-3
    """Peak learning rate."""
    schedule: Schedule = "cosine"
    """From the peak to `end` times the peak."""
    end: float = 0.01
    """The last step's learning rate as a share of the peak."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Adam's."""
    eps: float = 1e-8
    """Adam's."""
    max_grad_norm: float = 0.0
    """Gradients are clipped to this norm; 0: not clipped."""
    seed: int = 0
    """Seed of the initial draw and of every batch."""
    eval_every: int = 0
    """Steps between evaluations; 0: a tenth of all. The last step is always evaluated."""
    save_every: int = 500
    """Steps between checkpoints; 0: none."""
    keep_checkpoints: int = 1
    """Number of the newest that are kept."""
    compile: bool = False
    """Compile the model by torch.compile; takes half a minute first."""
    threads: int | None = None
    """CPU threads; None: torch's own choice."""
    device: str = ""
    """cpu, cuda or cuda:0; empty: the GPU where there is one."""

    def __post_init__(self) -> None:
        check_integers(self, 1, "steps", "keep_checkpoints", *(["threads"] if self.threads is not None else []))
        check_integers(self, 0, "warmup_steps", "seed", "eval_every", "save_every")
        if self.seed >= 2**31:
            raise UserError(f"seed must be below 2^31, got {self.seed}")
        for name in ("lr", "eps"):
            check_number(name, getattr(self, name), above=0)
        check_number("max_grad_norm", self.max_grad_norm, minimum=0)
        check_choice("schedule", self.schedule, get_args(Schedule))
        if not 0 <= self.end <= 1 or (self.schedule == "exponential" and self.end == 0):
            raise UserError(f"end must be a share of the peak, from 0 (exponential: above 0) to 1, got {self.end!r}")
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON turns tuples into lists
        if len(self.betas) != 2 or not all(isinstance(each, int | float) and 0 <= each < 1 for each in self.betas):
            raise UserError(f"betas must be two numbers of at least 0 and below 1, got {self.betas!r}")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step (from 0)."""
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
        """Return whether there is an evaluation after so many steps."""
        return step == self.steps or step % (self.eval_every or max(self.steps // 10, 1)) == 0


@dataclass(frozen=True, kw_only=True)
class FieldRecipe:
    """A problem, and the methods that `nlr compare` compares on it."""

    name: str = ""
    description: str = ""
    problem: Any
    """One of `settings`, or another dataclass whose `prepare()` gives a `problem.Problem`."""
    method: str
    """Short form of the method that `nlr fit` fits by default (`problem.FieldMethod`)."""
    train: FitConfig
    arms: tuple[str, ...] = ()
    """Short forms of the methods that are compared (`problem.FieldArm`)."""
    seeds: int = 3
    tune_lr: tuple[float, ...] = ()
    """Learning rates that every arm is tuned over; empty: the recipe's."""
