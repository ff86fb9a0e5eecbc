"""`nlr convert`, `nlr merge` and `nlr verify`: from one checkpoint to another, and whether it is whole."""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional

from nonlinear_lowrank.errors import UserError

from .checkpoint import find_base, find_model
from .options import parse


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of every method; the others are the fields of its config."""

    input: Positional[str]
    """A plain model's folder."""
    output: Positional[str]
    """Folder of the augmented model; must be empty or new."""
    include: tuple[str, ...] = ()
    """Regular expressions that a whole name must match; default: all but output heads, poolers and heads."""
    exclude: tuple[str, ...] = ()
    """Regular expressions of names to skip."""
    split_fused: FlagCreatePairsOff[bool] = False
    """Make fused projections (qkv_proj, c_attn, gate_up_proj) a linear a part, each with a layer of its own."""
    up_init: Literal["zero", "paper"] = "zero"
    """NOBLE: zero: the outputs stay bit-equal; paper: the paper's small random up projection, which shifts them."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Delete what is in the output folder first."""


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """Put an adapter into the weights of its base model."""

    adapter: Positional[str]
    """An adapter's folder, or the run folder that `nlr finetune` wrote."""
    output: Positional[str]
    """Folder of the merged model; must be empty or new."""
    base: str | None = None
    """Folder or name of the base model, where it is not what the adapter names."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the merged weights; auto: the base's own. They are formed in float32 and rounded once."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Check a checkpoint: every hash of its manifest, headers of safetensors, NaN and infinite values, JSON files.
    Reads everything and changes nothing."""

    checkpoint: Positional[str]
    """A checkpoint, a run or comparison folder, a model or adapter, or one .safetensors or .json file."""


def run_convert(arguments: list[str]) -> None:
    """Convert and print by how much the logits moved."""
    from nonlinear_lowrank.methods.base import all_methods

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--method", nargs="?")
    name = parser.parse_known_args(arguments)[0].method or "noble"  # the other options depend on it
    loses = {each for each, method in all_methods().items() if method.replaces_weights and not method.keeps_weights_by}
    able = [each for each, method in all_methods().items() if not (method.wraps or each in loses)]
    if name not in able:
        raise UserError(f"--method must be one of {', '.join(able)}, which keep the weights, got {name!r}")
    config_class: Any = all_methods()[name].config_class

    @dataclass(frozen=True, kw_only=True)
    class Options(ConvertOptions, config_class):  # type: ignore[misc]
        method: str = name
        """The method that is added; the options below are its own."""

    description = f"Put {name} into a trained checkpoint, whose weights stay. --method is one of {', '.join(able)}."
    options: Any = parse(Options, arguments, command="convert", description=description)
    if getattr(options, "rank_ratio", None) is not None and options.rank != config_class.rank:
        raise UserError("--rank-ratio takes the place of --rank; give one of them")
    if getattr(options, "init", None) == "scratch":
        raise UserError("--init scratch draws the weights anew, which convert keeps; omit it")
    folder = find_model(options.input)

    from nonlinear_lowrank.hub import convert

    report = convert(
        folder,
        Path(options.output),
        config_class(**{field.name: getattr(options, field.name) for field in fields(config_class)}),
        up_init=options.up_init,
        include=options.include or None,
        exclude=options.exclude or None,
        split_fused=options.split_fused,
        overwrite=options.overwrite,
    )
    print(report)


def run_merge(arguments: list[str]) -> None:
    """Merge and print how far the outputs of the written model are from the adapter's."""
    options = parse(MergeOptions, arguments, command="merge")
    folder = find_model(options.adapter, adapters=True)

    from transformers.utils import logging

    from nonlinear_lowrank.hub.merging import merge_adapter

    logging.disable_progress_bar()
    base = find_base(folder, options.base)
    print(merge_adapter(folder, options.output, base=base, dtype=options.dtype))


def run_verify(arguments: list[str]) -> None:
    """Print a line for each fault and one of totals; faults end it with exit code 2."""
    options = parse(VerifyOptions, arguments, command="verify")

    from nonlinear_lowrank.hub.verify import verify

    found = verify(options.checkpoint)
    print(found)
    if found.faults:
        raise UserError(f"{options.checkpoint} is not whole: {len(found.faults):,} at fault; restore it from a copy")
