"""`nlr convert`, `nlr merge` and `nlr verify`: from one checkpoint to another, and whether it is whole."""

import sys
from dataclasses import dataclass, fields
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional

from nonlinear_lowrank.errors import UserError

from .checkpoint import find_base, find_model
from .options import parse, take_option


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of every method; the others are the fields of its config."""

    input: Positional[str]
    """A plain model's folder."""
    output: Positional[str]
    """Folder of the augmented model; must be empty or new, unless --overwrite."""
    include: tuple[str, ...] = ()
    """Regular expressions that a whole name must match; none: all but output heads and poolers."""
    exclude: tuple[str, ...] = ()
    """Regular expressions of names to skip."""
    split_fused: FlagCreatePairsOff[bool] = False
    """Split fused projections (qkv_proj, c_attn, gate_up_proj) into a linear per part, each with its own layer."""
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
    """Folder of the merged model; must be empty or new, unless --overwrite."""
    base: str | None = None
    """Folder or name of the base model, if not the one that the adapter names."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the merged weights; auto: the base's own. They are formed in float32 and rounded once."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Delete what is in the output folder first."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Check a checkpoint: every hash of its manifest, headers of safetensors, NaN and infinite values, JSON files.
    Reads everything and changes nothing."""

    checkpoint: Positional[str]
    """A checkpoint, a run or comparison folder, a model or adapter, or one .safetensors or .json file."""


def run_convert(arguments: list[str]) -> None:
    """Convert and print by how much the logits moved."""
    name = take_option("--method", arguments)[0] or "noble"  # the other options depend on it
    config_class = _find_settings(name)

    @dataclass(frozen=True, kw_only=True)
    class Options(ConvertOptions, config_class):  # type: ignore[misc, valid-type]
        method: str = name
        """The method that is added, one that keeps the weights; the options below are its own."""

    description = f"Put {name} into a trained checkpoint, which starts at its weights, or factors fitted to them."
    options: Any = parse(Options, arguments, command="convert", description=description)
    if getattr(options, "rank_ratio", None) is not None and options.rank != config_class.rank:
        raise UserError("--rank-ratio replaces --rank; give one of them")
    folder = find_model(options.input)

    from nonlinear_lowrank.hub import convert

    config_class = _keeping_method(name).config_class
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


def _find_settings(name: str) -> Any:
    """Return the class with a method's settings, from its folder's config.py where it has one: that avoids the
    seconds of importing torch, as every method's package does."""
    methods = Path(find_spec("nonlinear_lowrank.methods").origin).parent  # type: ignore[union-attr, arg-type]
    for place in sorted(methods.glob("*/config.py")):
        spec: Any = spec_from_file_location(f"nlr_settings_of_{place.parent.name}", place)
        module = sys.modules[spec.name] = module_from_spec(spec)  # where a class's documentation is looked for
        spec.loader.exec_module(module)
        for each in vars(module).values():
            if getattr(each, "method", None) == name:
                return each
    return _keeping_method(name).config_class


def _keeping_method(name: str) -> Any:
    """Return a method; raise UserError for one that does not keep a checkpoint's weights."""
    from nonlinear_lowrank.methods.base import all_methods

    loses = {each for each, method in all_methods().items() if method.replaces_weights and not method.keeps_weights_by}
    able = [each for each, method in all_methods().items() if not (method.wraps or each in loses)]
    if name not in able:
        raise UserError(f"--method must be one of {', '.join(able)}, which keep the weights, got {name!r}")
    return all_methods()[name]


def run_merge(arguments: list[str]) -> None:
    """Merge and print how far the outputs of the written model are from the adapter's."""
    options = parse(MergeOptions, arguments, command="merge")
    folder = find_model(options.adapter, adapters=True)

    from transformers.utils import logging

    from nonlinear_lowrank.hub.merging import merge_adapter

    logging.disable_progress_bar()
    base = find_base(folder, options.base)
    given: dict[str, Any] = {"dtype": options.dtype, "overwrite": options.overwrite}
    print(merge_adapter(folder, options.output, base=base, **given))


def run_verify(arguments: list[str]) -> None:
    """Print a line for each fault and one of totals; faults end it with exit code 2."""
    options = parse(VerifyOptions, arguments, command="verify")
    if not Path(options.checkpoint).expanduser().exists():
        raise UserError(f"no such file or folder: {options.checkpoint}")

    from nonlinear_lowrank.hub.verify import verify

    found = verify(options.checkpoint)
    print(found)
    if found.faults:
        raise UserError(f"{options.checkpoint} is not whole: {len(found.faults):,} at fault; restore it from a copy")
