"""`nlr convert IN OUT`: a trained plain checkpoint, with branches added."""

from dataclasses import dataclass
from typing import Literal

from tyro.conf import FlagCreatePairsOff, Positional

from .checkpoint import find_model
from .options import parse


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `nlr convert`."""

    input: Positional[str]
    """A plain model's folder."""
    output: Positional[str]
    """Where the augmented model goes; must be empty or new."""
    method: Literal["noble"] = "noble"
    """Which branches."""
    rank: int = 64
    """Width of the bottleneck; must stay below min(d_in, d_out) of every linear."""
    rank_ratio: float | None = None
    """The bottleneck as a share of min(d_in, d_out), in place of --rank."""
    activation: Literal["cosine", "tanh", "leaky_relu", "gelu", "silu"] = "cosine"
    """The bottleneck's nonlinearity."""
    depth: int = 2
    """Number of activations: 1, 2, or 3 (cosine only)."""
    fusion: Literal["add", "gated"] = "add"
    """gated: a learned mixture of linear and branch, in place of their sum."""
    share_down: Literal["none", "qkv"] = "none"
    """qkv: query, key and value of an attention share one down projection."""
    up_bias: FlagCreatePairsOff[bool] = False
    """A bias after the up projection."""
    up_init: Literal["zero", "paper"] = "zero"
    """zero: the outputs stay bit-equal; paper: the paper's small random up projection, which shifts them."""
    include: tuple[str, ...] = ()
    """Regular expressions that a linear's whole name must match; default: all but the output head."""
    exclude: tuple[str, ...] = ()
    """Regular expressions of names to leave alone."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Delete what is in the output folder first."""


def run(arguments: list[str]) -> None:
    """Converts and prints by how much the logits moved."""
    options = parse(
        ConvertOptions,
        arguments,
        command="convert",
        description="Add branches to a trained checkpoint; the dense weights stay as they are.",
    )
    folder = find_model(options.input)

    from pathlib import Path

    from ..hub import convert
    from ..layers import NobleConfig

    config = NobleConfig(
        rank=options.rank,
        rank_ratio=options.rank_ratio,
        activation=options.activation,
        depth=options.depth,
        fusion=options.fusion,
        share_down=options.share_down,
        up_bias=options.up_bias,
    )
    report = convert(
        folder,
        Path(options.output),
        config,
        up_init=options.up_init,
        include=options.include or None,
        exclude=options.exclude or None,
        overwrite=options.overwrite,
    )
    print(report)
