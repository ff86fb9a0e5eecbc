"""`nlr merge ADAPTER OUT`: a plain model, with the adapter in its weights."""

from dataclasses import dataclass
from typing import Literal

from tyro.conf import Positional

from .checkpoint import find_model
from .options import parse


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


def run(arguments: list[str]) -> None:
    """Merge and print how far the outputs of the written model are from the adapter's."""
    options = parse(MergeOptions, arguments, command="merge")
    folder = find_model(options.adapter, adapters=True)

    from transformers.utils import logging

    from nonlinear_lowrank.hub.merging import merge_adapter

    logging.disable_progress_bar()
    print(merge_adapter(folder, options.output, base=options.base, dtype=options.dtype))
