"""Settings of NOBLE branches."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.settings import BranchSettings
from nonlinear_lowrank.validation import check_choice, check_integer, check_number, check_share

_HIGHEST_POWER = 10  # of d / r in a learning rate, which stays finite up to it
Activation = Literal["cosine", "tanh", "leaky_relu", "gelu", "silu"]
Init = Literal["auto", "scratch", "pretrained"]
Fusion = Literal["add", "gated"]
ShareDown = Literal["none", "qkv"]
ExpertDown = Literal["own", "shared"]


@dataclass(frozen=True, kw_only=True)
class NobleConfig(BranchSettings):
    """Settings of NOBLE branches.

    Raises:
        UserError: a value is out of range; the message names the field and what it may be.
    """

    method: ClassVar[str] = "noble"

    rank: int = 64
    """r, the width of the bottleneck; must stay below min(d_in, d_out) of every target."""
    rank_ratio: float | None = None
    """r is this share of min(d_in, d_out), rounded down, in place of `rank`. (The notes take a share of d_out, by
    which 0.25 gives the widening linear of a feed-forward a full rank.)"""
    activation: Activation = "cosine"
    """The bottleneck's nonlinearity; "cosine" at depth 2 is CosNet."""
    depth: int = 2
    """Number of activations: 1 (no mixing matrix), 2, or 3 (cosine only)."""
    init: Init = "auto"
    """"scratch": the paper's init, which redraws the dense weights in place: tensors that modules share stay
    shared. "pretrained": dense weights stay and noble_up is zero, so the model's outputs do not change. "auto":
    pretrained where from_pretrained made the model or a part of it, or the weights of a norm differ, which before any
    training are all one number; else scratch."""
    dense_scale: float = 0.5
    """Dense weights have standard deviation dense_scale / sqrt(d_in)."""
    own_init: tuple[str, ...] | None = None
    """From scratch, weights and biases that keep the model's own init, by name with * for layer numbers, such as
    "transformer.h.*.attn.c_proj.weight". None: those that a model of transformers draws unlike its other linears
    (T5's queries, projections scaled by the depth); (): none."""
    up_scale: float = 0.01
    """noble_up has standard deviation up_scale / sqrt(r)."""
    frequency_range: tuple[float, float] = (0.8, 1.2)
    """Range of the uniform initial frequencies."""
    phase_std: float = 0.1
    """Standard deviation of the phases."""
    mix_scale: float | None = None
    """Mixing matrices have standard deviation mix_scale / sqrt(r). None: Xavier uniform."""
    bottleneck_bias: bool = False
    """A bias before each cosine, as the authors' release has: cos(frequency * (z + bias) + phase)."""
    up_lr_power: float = 0.6
    """Learning-rate multiplier of noble_up: (min(d_in, d_out) / r) ** up_lr_power."""
    mix_lr_power: float = 0.45
    """The same for the mixing matrices."""
    frequency_lr: float = 3.0
    """Learning-rate multiplier of the frequencies."""
    phase_lr: float = 5.0
    """Learning-rate multiplier of the phases."""
    fusion: Fusion = "add"
    """"add": the paper's sum. "gated": the notes' mixture, with a learned gate that starts at one half."""
    up_bias: bool = False
    """A bias after the up projection."""
    dropout: float = 0.0
    """Share of the bottleneck's outputs that are zeroed in training. Above 0 the branch saves some r-wide tensors
    more for backward."""
    share_down: ShareDown = "none"
    """"qkv": query, key and value of an attention, which read the same input, share one noble_down.
    With rank_ratio a group has the smallest of its ranks. (Not of the paper.)"""
    expert_down: ExpertDown = "own"
    """Beside experts that a module holds as 3-D parameters: a noble_down for each, or one for all of a module."""
    fuse_shared_inputs: bool = False
    """Query, key and value projections, and gate and up projections, are computed together: x is read
    less often, and its gradients are added up in place. Needs fusion="add" and no dropout."""
    output_scale: float | None = None
    """Multiplies the layer's output. None: 1; and 2 with fusion="gated" on a pretrained model, which undoes the gate's
    one half exactly, so that the outputs do not change."""

    def __post_init__(self) -> None:
        if isinstance(self.frequency_range, list):  # JSON turns tuples into lists
            object.__setattr__(self, "frequency_range", tuple(self.frequency_range))
        if isinstance(self.own_init, list):
            object.__setattr__(self, "own_init", tuple(self.own_init))
        if self.own_init is not None and not (
            isinstance(self.own_init, tuple) and all(isinstance(each, str) for each in self.own_init)
        ):
            raise UserError(f"own_init must be a tuple of names, got {self.own_init!r}")
        check_integer("rank", self.rank, minimum=1)
        if self.rank_ratio is not None:
            check_number("rank_ratio", self.rank_ratio, above=0)
            check_share("rank_ratio", self.rank_ratio)
        choices: dict[str, Any] = {"activation": Activation, "init": Init, "fusion": Fusion, "share_down": ShareDown}
        choices["expert_down"] = ExpertDown
        for name, literal in choices.items():
            check_choice(name, getattr(self, name), get_args(literal))
        check_integer("depth", self.depth, minimum=1)
        if self.depth > (3 if self.activation == "cosine" else 2):
            raise UserError(
                f"depth {self.depth!r} with activation {self.activation!r} is not defined; "
                "depth is 1 or 2, or 3 with the cosine"
            )
        check_share("dropout", self.dropout)
        for name in ("up_bias", "fuse_shared_inputs", "bottleneck_bias"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.bottleneck_bias and self.activation != "cosine":
            raise UserError(f"bottleneck_bias needs activation='cosine', got {self.activation!r}; omit it")
        if self.fuse_shared_inputs and (self.fusion != "add" or self.dropout):
            raise UserError("fuse_shared_inputs needs fusion='add' and dropout=0")
        limits = self.frequency_range
        pair = isinstance(limits, tuple) and len(limits) == 2 and all(isinstance(each, int | float) for each in limits)
        if not (pair and -math.inf < limits[0] <= limits[1] < math.inf):
            raise UserError(f"frequency_range must be two finite numbers, (low, high), got {limits!r}")
        for name in ("dense_scale", "up_scale", "phase_std", *(("mix_scale",) if self.mix_scale is not None else ())):
            check_number(name, getattr(self, name), minimum=0)
        for name in ("frequency_lr", "phase_lr", *(("output_scale",) if self.output_scale is not None else ())):
            check_number(name, getattr(self, name), above=0)
        for name in ("up_lr_power", "mix_lr_power"):
            check_number(name, getattr(self, name), minimum=-_HIGHEST_POWER)
            if getattr(self, name) > _HIGHEST_POWER:
                raise UserError(f"{name} must be at most {_HIGHEST_POWER}, got {getattr(self, name)!r}")

    @classmethod
    def official(cls, **changes: Any) -> "NobleConfig":
        """Return the settings of the authors' release (github.com/canva-research/noble), which are not the paper's.

        Rank 32, biases in the bottleneck, mixing matrices N(0, (0.5 / sqrt(r))^2), and learning rates times 2
        (frequencies), 4 (phases) and s^0.4 (noble_up), s = min(d_in, d_out) / r. That of the mixing matrices is 1: the
        release sets s^0.5 where no optimizer reads it. From the second on, biases start as torch's linears do.
        `load_released` reads the release's state dicts.

        Args:
            **changes: fields to set otherwise.
        """
        rates = {"up_lr_power": 0.4, "mix_lr_power": 0.0, "frequency_lr": 2.0, "phase_lr": 4.0}
        return cls(**{"rank": 32, "bottleneck_bias": True, "mix_scale": 0.5, **rates, **changes})

    def check_rank(self, d_in: int, d_out: int) -> str | None:
        """Return why a linear d_in -> d_out has no branch of this rank, or None."""
        rank = self.rank_of(d_in, d_out)
        return None if rank < min(d_in, d_out) else f"rank {rank} is too high for {d_in} -> {d_out}"
