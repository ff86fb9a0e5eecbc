"""Arms, data and settings that several recipes share."""

from typing import Any, TypeVar

from . import RECIPES

R = TypeVar("R")

BASELINES = ("baseline", "baseline:init=noble", "baseline:init=kaiming")
"""The model without branches, with transformers' init of std 0.02, with NOBLE's dense init, and with PyTorch's Kaiming
init. Without these controls a gain of the init would be read as a gain of the branch."""

NOBLE_ARMS = (*BASELINES, "noble:rank=64", "noble:rank=128", "noble:rank=256")
"""The ranks of noble.txt, beside the controls."""

OPENWEBTEXT: dict[str, Any] = {"source": "Skylion007/openwebtext", "streaming": True}
OPENWEBTEXT_GPT2: dict[str, Any] = {
    **OPENWEBTEXT,
    "tokenizer": "gpt2",
    "vocab_size": 50257,
    "sequence_length": 1024,
    "eval_sequences": 2048,
}
"""GPT-2's byte-level BPE of 50,257 tokens, sequences of 1,024 (noble.txt, appendix B)."""

IMAGENET: dict[str, Any] = {
    "source": "ILSVRC/imagenet-1k",
    "held_out": 0.0,  # papers score the validation images, and have no others
    "size": 224,
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
}

FAST: dict[str, Any] = {"bf16": True, "compile": True, "log_every": 50}
"""How models of the papers' sizes train."""

EVERY_2000: dict[str, Any] = {"eval_every": 2000, "save_every": 2000}
EACH_EPOCH: dict[str, Any] = {"eval_every": 0, "save_every": 0}
"""Steps between evaluations and between checkpoints; 0: after each epoch."""


def named(kind: type[R], name: str, **fields: Any) -> R:
    """Return the recipe of that name, with its line of the listing."""
    return kind(name=name, description=RECIPES[name].summary, **fields)  # type: ignore[call-arg]


def field_arms(*ranks: int) -> tuple[str, ...]:
    """Return arms of neural fields: dense, then low-rank and sine side by side."""
    return ("dense", *(f"{kind}:rank={rank}" for rank in ranks for kind in ("low-rank", "sine")))
