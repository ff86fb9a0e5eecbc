"""A run as a recipe: a task, an arm, its training settings, and what it is compared with.

All are frozen dataclasses of plain fields: any field can be given on the command line, and a recipe survives JSON.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_choice, check_integer, check_number, check_share, one_line

if TYPE_CHECKING:
    from .arms import Arm

Optimizer = Literal["adamw", "muon"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Schedule = Literal["linear", "cosine", "constant", "wsd"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training. Nothing here depends on the number of processes."""

    steps: int = 0
    """Optimizer steps; 0: as many as `epochs` gives."""
    epochs: float | None = None
    """Passes over the training data, where steps is 0."""
    batch_size: int
    """Sequences per optimizer step, over all processes and micro-batches."""
    gradient_accumulation: int = 1
    """Micro-batches that a process splits its share of the batch into; memory and rounding change, and a router's
    balance, which each has of its own."""
    lr: float
    """Peak learning rate of multiplier 1."""
    head_lr: float | None = None
    """Learning rate of a new head beside other weights, the same where arms have others of their own; None: lr."""
    weight_decay: float = 0.01
    """Weight decay of the roles that decay."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    warmup_share: float = 0.0
    """The same as a share of all steps, where warmup_steps is 0."""
    schedule: Schedule = "linear"
    """After the warm-up. "wsd" (warm-up, stable, decay) is constant, then linear; all but constant end at the floor."""
    min_lr_share: float = 0.0
    """The floor, as a share of the peak learning rate. The warm-up of "wsd" starts there, the others' at 0."""
    decay_share: float = 0.0
    """Share of all steps over which "wsd" decays, at the end."""
    group_by_length: bool = False
    """Batches of similar lengths, where examples differ: less padding, so fewer hours; the same for every arm."""
    optimizer: Optimizer = "adamw"
    """"muon": dense matrices by Muon, the rest by AdamW. An arm may name its own."""
    init_optimizer: bool = False
    """Begin with the optimizer's state (moments and their count) of the run's checkpoint that task.init_from names, of
    the same optimizer; learning rates start over."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; 0: not clipped."""
    label_smoothing: float = 0.0
    """Share of each label, or of Mixup's mixture, that training spreads evenly over all classes; not in evaluation."""
    embedding_noise: float = 0.0
    """NEFTune's alpha: training adds noise to the token embeddings (B, T, d), uniform within alpha / sqrt(T d)
    (arXiv 2310.05914, algorithm 1, with T the length of the batch)."""
    bf16: bool = False
    """Autocast to bfloat16; weights and optimizer stay as they are (float32, unless a checkpoint's dtype says so)."""
    fp8: bool = False
    """Dense linears multiply in float8 (torchao's, with scales of whole tensors), branches in bfloat16; needs bf16."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass, a block at a time: less memory, a third more time."""
    compile: bool = False
    """torch.compile the model."""
    compile_mode: CompileMode = "default"
    """torch.compile's mode: "reduce-overhead" replays CUDA graphs, "max-autotune" times kernels first too."""
    compile_fullgraph: bool = False
    """Compile to one graph, or end the run with what breaks it."""
    deterministic: bool = False
    """Only kernels that repeat their bits (cuDNN's and cuBLAS's too), or an error that names the operation without
    one: on a GPU runs then repeat bit by bit, more slowly. A CPU's do anyway, at the same number of threads."""
    stop_diverged: bool = False
    """Stop a run whose training loss rose and did not recover (`training.result` has the rule); one whose loss is no
    longer a number always stops."""
    eval_every: int = 100
    """Steps between evaluations; the last step is always evaluated. 0 with epochs: after each epoch."""
    save_every: int = 1000
    """Steps between checkpoints; the last step is always saved. 0 with epochs: after each epoch."""
    keep_checkpoints: int = 2
    """Number of the newest complete checkpoints that are kept."""
    log_every: int = 10
    """Steps between entries of the training curve (also written at every evaluation and checkpoint)."""
    seed: int = 0
    """Seed of the init, the order of the data, and dropout."""
    tracker: str = "tensorboard"
    """"tensorboard", "none", or any tracker that transformers knows ("wandb", "mlflow", ...)."""
    threads: int | None = None
    """CPU threads of torch; None: torch's own choice."""
    eval_batch_size: int | None = None
    """Sequences per process in evaluation; None: as in training."""
    dataloader_workers: int = 0
    """Processes that read data ahead, for each training process."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON turns tuples into lists
        least = dict.fromkeys(("batch_size", "gradient_accumulation", "keep_checkpoints", "log_every"), 1)
        least |= {name: 1 for name in ("threads", "eval_batch_size") if getattr(self, name) is not None}
        least |= dict.fromkeys(("warmup_steps", "seed", "dataloader_workers"), 0)
        for name, minimum in least.items():
            check_integer(name, getattr(self, name), minimum=minimum)
        for name in ("steps", "eval_every", "save_every"):
            value = getattr(self, name)
            if type(value) is not int or value < int(self.epochs is None):
                raise UserError(f"{name} must be a positive integer, or 0 with epochs, got {value!r}")
        for name in ("lr", "epochs", "head_lr"):
            if name == "lr" or getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)
        for name in ("weight_decay", "max_grad_norm", "warmup_share", "min_lr_share", "decay_share", "embedding_noise"):
            check_number(name, getattr(self, name), minimum=0)
        check_share("label_smoothing", self.label_smoothing)
        if self.fp8 and not self.bf16:
            raise UserError("fp8 is for the dense linears of a run in bfloat16; set bf16 too")
        check_choice("compile_mode", self.compile_mode, get_args(CompileMode))
        if (self.compile_fullgraph or self.compile_mode != "default") and not self.compile:
            raise UserError("compile_mode and compile_fullgraph need a compiled run; set compile too")
        if self.gradient_accumulation > 1 and self.compile_mode in ("reduce-overhead", "max-autotune"):
            # A replayed graph writes where the gradients of the micro-batch before are (pytorch issue 169545).
            raise UserError(
                f"compile_mode {self.compile_mode!r} replays CUDA graphs, which lose accumulated gradients; set "
                "gradient_accumulation to 1, or compile_mode to 'max-autotune-no-cudagraphs'"
            )
        if self.seed >= 2**31:
            raise UserError(f"seed must be below 2**31, got {self.seed}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"betas must be two numbers of at least 0 and below 1, got {self.betas!r}")
        if self.warmup_share >= 1 or (self.warmup_share and self.warmup_steps):
            raise UserError("warmup_share must be below 1, and not be given beside warmup_steps")
        if self.steps and self.warmup_steps > self.steps:
            raise UserError(f"warmup_steps ({self.warmup_steps}) must not exceed steps ({self.steps})")
        self._check_schedule()
        if self.batch_size % self.gradient_accumulation:
            raise UserError(
                f"batch_size {self.batch_size} does not split into gradient_accumulation {self.gradient_accumulation} "
                "equal micro-batches"
            )
        check_choice("optimizer", self.optimizer, get_args(Optimizer))

    def _check_schedule(self) -> None:
        check_choice("schedule", self.schedule, get_args(Schedule))
        if self.min_lr_share >= 1 or (self.min_lr_share and self.schedule == "constant"):
            raise UserError("min_lr_share must be below 1, and does nothing with schedule='constant'; omit it")
        if self.decay_share > 1 or (self.decay_share > 0) != (self.schedule == "wsd"):
            raise UserError("decay_share must be above 0 and at most 1 with schedule='wsd', and omitted with any other")
        if self.steps and self.schedule == "wsd" and self.warmup_steps + self.decay_steps > self.steps:
            raise UserError(
                f"warmup_steps ({self.warmup_steps}) and decay_share ({self.decay_steps} steps) must not exceed steps "
                f"({self.steps}) together"
            )
        if self.min_lr_share and self.steps and self.warmup_steps == self.steps:
            raise UserError("min_lr_share needs steps after the warm-up; lower warmup_steps or omit it")

    @property
    def decay_steps(self) -> int:
        """The last steps, over which "wsd" decays; only with `steps`."""
        return max(1, round(self.decay_share * self.steps))

    def resolved(self, examples: int) -> "TrainConfig":
        """Return the same with all lengths in steps, for so many training examples.

        An epoch is the number of steps that see as many examples as there are, rounded up.
        """
        per_epoch = math.ceil(examples / self.batch_size)
        steps = self.steps or max(1, round(per_epoch * (self.epochs or 0)))
        warmup = self.warmup_steps or round(self.warmup_share * steps)
        if warmup > steps:
            raise UserError(f"warmup_steps ({warmup}) must not exceed the {steps} steps of {self.epochs:g} epochs")
        every: dict[str, Any] = {"eval_every": self.eval_every or per_epoch, "save_every": self.save_every or per_epoch}
        return replace(self, steps=steps, epochs=None, warmup_steps=warmup, warmup_share=0.0, **every)

    @property
    def length(self) -> str:
        """The length in words, e.g. "300 steps" or "3 epochs"."""
        return f"{self.steps} steps" if self.steps else f"{self.epochs:g} epochs"


class _ArmField:
    """A recipe's arm: an `Arm`, or its short form, which is read when it is asked for: methods import torch."""

    def __get__(self, recipe: Any, owner: type) -> "Arm":
        if recipe is None:
            return "baseline"  # type: ignore[return-value]  # the default
        if isinstance(recipe.__dict__["arm"], str):
            from .arms import Arm

            recipe.__dict__["arm"] = Arm.parse(recipe.__dict__["arm"])
        found: Arm = recipe.__dict__["arm"]
        return found

    def __set__(self, recipe: Any, arm: "Arm | str") -> None:
        recipe.__dict__["arm"] = arm


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A task, an arm, how it trains, and what it is compared with."""

    name: str = ""
    """Name of the recipe."""
    description: str = ""
    """One line."""
    task: Any
    """The data and the model: see `tasks.task`."""
    arm: _ArmField = _ArmField()
    """The change to the model, as in "noble:rank=64", "baseline:init=kaiming" or "module:function"."""
    train: TrainConfig
    """The optimization."""
    arms: tuple[str, ...] = ("baseline",)
    """The arms of a comparison; the first is the baseline of all deltas."""
    seeds: int = 3
    """Seeds of a comparison."""
    tune_lr: tuple[float, ...] = ()
    """Learning rates of which each arm of a comparison takes its own best; empty: the recipe's."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "arms", tuple(self.arms))
        object.__setattr__(self, "tune_lr", tuple(self.tune_lr))
        check_integer("seeds", self.seeds, minimum=1)
        for lr in self.tune_lr:
            check_number("tune_lr", lr, above=0)

    @property
    def arm_text(self) -> str:
        """The arm's short form, read or not."""
        return str(self.__dict__["arm"])

    @property
    def lr(self) -> float:
        """The learning rate that the arm trains at."""
        return self.train.lr if self.arm.lr is None else self.arm.lr

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Recipe":
        """Reverse `to_dict`; raise UserError where a field is missing, unknown, or of the wrong kind."""
        from nlr_lab.tasks.finetune.classification import GlueTask, ImageTask
        from nlr_lab.tasks.finetune.instructions import InstructionTask
        from nlr_lab.tasks.images.pretraining import ImagePretrainingTask
        from nlr_lab.tasks.images.tokens import ImageTokenTask
        from nlr_lab.tasks.text.language_model import LanguageModelTask, MaskedLanguageModelTask, OptLanguageModelTask

        from .arms import Arm

        tasks = (OptLanguageModelTask, LanguageModelTask, GlueTask, InstructionTask, ImageTask)
        tasks = (*tasks, MaskedLanguageModelTask, ImagePretrainingTask, ImageTokenTask)  # type: ignore[assignment]
        return _from_plain(cls, data, "recipe", {"task": typing.Union[tasks], "arm": Arm})  # noqa: UP007


def _from_plain(kind: Any, value: Any, where: str, kinds: Mapping[str, Any] | None = None) -> Any:
    """Build a value of the annotated kind from JSON's; `kinds` has those of fields that no annotation tells."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (typing.Union, types.UnionType):
        choices = [each for each in get_args(kind) if dataclasses.is_dataclass(each)]
        if isinstance(value, Mapping) and choices:  # the one whose fields fit best
            kind = min(choices, key=lambda each: len({field.name for field in dataclasses.fields(each)} ^ set(value)))
        elif len(choices) == len(get_args(kind)):
            kind = choices[0]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise UserError(f"{where} must be a JSON object, got {value!r}")
        hints = {**typing.get_type_hints(kind, include_extras=True), **(kinds or {})}
        if unknown := sorted(value.keys() - hints.keys()):
            raise UserError(f"{where} has an unknown field {unknown[0]!r}; it was written by another version")
        try:
            return kind(**{name: _from_plain(hints[name], item, f"{where}.{name}") for name, item in value.items()})
        except TypeError as error:
            raise UserError(f"{where} is incomplete: {one_line(error)}") from error
    return tuple(value) if get_origin(kind) is tuple and isinstance(value, list) else value
