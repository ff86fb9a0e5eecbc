"""Settings of NOBLE branches."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .reference import ACTIVATIONS

_HIGHEST_POWER = 10  # of d / r in a learning rate, which stays finite up to it
Activation = Literal["cosine", "tanh", "leaky_relu", "gelu", "silu"]


@dataclass(frozen=True, kw_only=True)
class NobleConfig:
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
    init: Literal["auto", "scratch", "pretrained"] = "auto"
    """"scratch": the paper's init, which draws the dense weights anew, in place: what several modules hold stays
    shared, and is new in all of them. "pretrained": dense weights stay and noble_up is zero, so the model's outputs do
    not change. "auto": pretrained when the model was loaded by from_pretrained, else scratch."""
    dense_scale: float = 0.5
    """Dense weights have standard deviation dense_scale / sqrt(d_in)."""
    up_scale: float = 0.01
    """noble_up has standard deviation up_scale / sqrt(r)."""
    frequency_range: tuple[float, float] = (0.8, 1.2)
    """Frequencies are uniform in it."""
    phase_std: float = 0.1
    """Standard deviation of the phases."""
    up_lr_power: float = 0.6
    """Learning-rate multiplier of noble_up: (min(d_in, d_out) / r) ** up_lr_power."""
    mix_lr_power: float = 0.45
    """The same for the mixing matrices."""
    frequency_lr: float = 3.0
    """Learning-rate multiplier of the frequencies."""
    phase_lr: float = 5.0
    """Learning-rate multiplier of the phases."""
    fusion: Literal["add", "gated"] = "add"
    """"add": the paper's sum. "gated": the notes' mixture, with a learned gate that starts at one half."""
    up_bias: bool = False
    """A bias after the up projection."""
    dropout: float = 0.0
    """Share of the bottleneck's outputs that are zeroed in training. Above 0 the branch keeps some r-wide tensors
    more for backward."""
    share_down: Literal["none", "qkv"] = "none"
    """"qkv": query, key and value of an attention, which read the same input, share one noble_down (`noble_sharing`).
    With rank_ratio a group has the smallest of its ranks. (Not of the paper.)"""
    fuse_shared_inputs: bool = False
    """Query, key and value projections, and gate and up projections, are computed together (`noble_group`): x is read
    less often, and its gradients are added up in place. Needs fusion="add" and no dropout."""
    output_scale: float | None = None
    """Multiplies the layer's output. None: 1; and 2 with fusion="gated" on a pretrained model, which undoes the gate's
    one half exactly, so that the outputs do not change."""

    def __post_init__(self) -> None:
        if isinstance(self.frequency_range, list):  # JSON turns tuples into lists
            object.__setattr__(self, "frequency_range", tuple(self.frequency_range))
        check_integer("rank", self.rank, minimum=1)
        if self.activation not in ACTIVATIONS:
            raise UserError(f"unknown activation {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}")
        whole = isinstance(self.depth, int) and not isinstance(self.depth, bool)
        if not whole or self.depth not in (1, 2, 3) or (self.depth == 3 and self.activation != "cosine"):
            raise UserError(
                f"depth {self.depth!r} with activation {self.activation!r} is not defined; "
                "depth is 1 or 2, or 3 with the cosine"
            )
        if self.init not in ("auto", "scratch", "pretrained"):
            raise UserError(f"init must be 'auto', 'scratch' or 'pretrained', got {self.init!r}")
        limits = self.frequency_range
        pair = isinstance(limits, tuple) and len(limits) == 2 and all(map(_is_number, limits))
        if not pair or limits[0] > limits[1]:
            raise UserError(f"frequency_range must be two finite numbers, (low, high), got {limits!r}")
        if self.rank_ratio is not None and not (_is_number(self.rank_ratio) and 0 < self.rank_ratio < 1):
            raise UserError(f"rank_ratio must be a number above 0 and below 1, got {self.rank_ratio!r}")
        if not (_is_number(self.dropout) and 0 <= self.dropout < 1):
            raise UserError(f"dropout must be a number of at least 0 and below 1, got {self.dropout!r}")
        for name in ("up_bias", "fuse_shared_inputs"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.fusion not in ("add", "gated"):
            raise UserError(f"fusion must be 'add' or 'gated', got {self.fusion!r}")
        if self.share_down not in ("none", "qkv"):
            raise UserError(f"share_down must be 'none' or 'qkv', got {self.share_down!r}")
        if self.fuse_shared_inputs and (self.fusion != "add" or self.dropout):
            raise UserError("fuse_shared_inputs needs fusion='add' and dropout=0")
        for name in ("dense_scale", "up_scale", "phase_std"):
            value = getattr(self, name)
            if not (_is_number(value) and value >= 0):
                raise UserError(f"{name} must be a finite number of at least 0, got {value!r}")
        for name in ("frequency_lr", "phase_lr", "output_scale"):
            value = getattr(self, name)
            if not (_is_number(value) and value > 0) and not (name == "output_scale" and value is None):
                raise UserError(f"{name} must be a finite number above 0, got {value!r}")
        for name in ("up_lr_power", "mix_lr_power"):
            value = getattr(self, name)
            if not (_is_number(value) and abs(value) <= _HIGHEST_POWER):
                raise UserError(f"{name} must be a number from -{_HIGHEST_POWER} to {_HIGHEST_POWER}, got {value!r}")

    def rank_of(self, d_in: int, d_out: int) -> int:
        """r of a layer d_in -> d_out."""
        return self.rank if self.rank_ratio is None else max(1, int(min(d_in, d_out) * self.rank_ratio))

    def check_rank(self, d_in: int, d_out: int) -> str | None:
        """Return why a linear d_in -> d_out has no branch of this rank, or None."""
        rank = self.rank_of(d_in, d_out)
        return None if rank < min(d_in, d_out) else f"rank {rank} is not low for {d_in} -> {d_out}"

    @property
    def scale(self) -> float:
        """What the layer's output is multiplied by."""
        if self.output_scale is not None:
            return self.output_scale
        return 2.0 if self.fusion == "gated" and self.init == "pretrained" else 1.0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
