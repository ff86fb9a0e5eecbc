"""`nlr convert IN OUT`: put a method's layers into a trained plain checkpoint."""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional

from nonlinear_lowrank.errors import UserError

from .checkpoint import find_model
from .options import parse


@dataclass(frozen=True, kw_only=True)
class _Folders:
    input: Positional[str]
    """A plain model's folder."""
    output: Positional[str]
    """Folder of the augmented model; must be empty or new."""
    include: tuple[str, ...] = ()
    """Regular expressions that a whole name must match; default: all but output heads, poolers and heads."""
    exclude: tuple[str, ...] = ()
    """Regular expressions of names to skip."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Delete what is in the output folder first."""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(_Folders):
    """Add branches to a trained checkpoint, or make its activations rational functions; the dense weights stay as
    they are."""

    method: Literal["noble", "rational"] = "noble"
    """noble: branches beside the linears; rational: activations become rational functions. A method of another
    distribution has its config's fields for options: nlr convert --method NAME --help."""
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
    groups: int = 8
    """rational: groups of channels with coefficients of their own; must divide the widths."""
    anchor: Literal["none", "exact"] = "none"
    """rational: none: the outputs move by the error of the fit; exact: they stay bit-equal."""
    form: Literal["abs_of_sum", "sum_of_abs"] = "abs_of_sum"
    """rational: the denominator, as in docs/rational.md."""
    tails: Literal["linear", "rational"] = "linear"
    """rational: how it goes on beyond the range of the fit."""
    fit_range: float = 10.0
    """rational: the fit is good on [-L, L]."""


_FIELDS = {
    "noble": ("rank", "rank_ratio", "activation", "depth", "fusion", "share_down", "up_bias"),
    "rational": ("groups", "anchor", "form", "tails", "fit_range"),
}
"""Options that are fields of a method's config."""


def run(arguments: list[str]) -> None:
    """Convert and print by how much the logits moved."""
    name = _method_name(arguments)
    if name in _FIELDS:
        options: Any = parse(ConvertOptions, arguments, command="convert")
        _check_method(options)
    else:
        options = _parse_other(name, arguments)
    folder = find_model(options.input)

    from nonlinear_lowrank.hub import convert
    from nonlinear_lowrank.methods.base import all_methods

    config_class = all_methods()[name].config_class
    known = _FIELDS[name] if name in _FIELDS else [field.name for field in fields(config_class)]
    report = convert(
        folder,
        Path(options.output),
        config_class(**{each: getattr(options, each) for each in known}),
        up_init=options.up_init if name in _FIELDS else "zero",
        include=options.include or None,
        exclude=options.exclude or None,
        overwrite=options.overwrite,
    )
    print(report)


def _method_name(arguments: list[str]) -> str:
    """Return the value of --method, on which the other options depend."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--method", nargs="?")
    return parser.parse_known_args(arguments)[0].method or "noble"


def _parse_other(name: str, arguments: list[str]) -> Any:
    """Read the options of a method that is registered by an entry point: the fields of its config."""
    from nonlinear_lowrank.methods.base import all_methods

    able = [each for each, method in all_methods().items() if not (method.replaces_weights or method.wraps)]
    if name not in able:
        raise UserError(f"--method must be one of {', '.join(able)}, which keep the weights, got {name!r}")

    @dataclass(frozen=True, kw_only=True)
    class Options(_Folders, all_methods()[name].config_class):  # type: ignore[misc]
        method: str = name
        """The method that is added."""

    return parse(Options, arguments, command="convert", description=f"Add {name} to a trained checkpoint.")


def _check_method(options: ConvertOptions) -> None:
    """Refuse what is given for another method: it would do nothing."""
    defaults = {each.name: each.default for each in fields(ConvertOptions)}
    others = {"noble": (*_FIELDS["rational"],), "rational": (*_FIELDS["noble"], "up_init")}[options.method]
    if options.rank_ratio is not None and options.rank != defaults["rank"]:
        raise UserError("--rank-ratio takes the place of --rank; give one of them")
    for name in others:
        if getattr(options, name) != defaults[name]:
            raise UserError(f"--{name.replace('_', '-')} is not of --method {options.method}; omit it")
