"""Arms of `nlr bench`: every registered method, its adapters, and peft's that they compare with, on a small model.

A method that swaps modules trains everything, and its ratios are over the plain model; one that replaces weights goes
on the feed-forwards, others where they go by default. Adapters train alone, on every linear but the head, and their
ratios are over peft's LoRA of the same rank, which itself is over the plain model.
"""

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import AdapterArm, Method, all_methods
from nonlinear_lowrank.methods.noble import NobleConfig
from nonlinear_lowrank.surgery.augment import augment

from .settings import ModelBenchConfig

BASELINE, LORA = "baseline", "lora"

METHODS: dict[str, Method | AdapterArm] = {
    **all_methods(),
    LORA: AdapterArm(config=("peft", "LoraConfig")),
    "dora": AdapterArm(config=("peft", "LoraConfig"), fixed={"use_dora": True}),
    "peanut": AdapterArm(config=("peft", "PeanutConfig")),
    **{name: arm for method in all_methods().values() for name, arm in method.adapter_arms.items()},
}


@dataclass(frozen=True, kw_only=True)
class BenchArm:
    """A method at a rank, or the plain model."""

    method: str = BASELINE
    rank: int | None = None

    @property
    def name(self) -> str:
        """`noble r=64`."""
        return self.method if self.rank is None else f"{self.method} r={self.rank}"

    @property
    def over(self) -> str | None:
        """The arm that its ratios are over; None for the plain model."""
        if self.method == BASELINE:
            return None
        return f"{LORA} r={self.rank}" if _over_lora(self.method) else BASELINE

    @property
    def adapter(self) -> bool:
        """Return whether the model's own weights are frozen."""
        return isinstance(METHODS.get(self.method), AdapterArm)

    def apply(self, model: nn.Module, noble: Callable[[int], NobleConfig]) -> nn.Module:
        """Return the model with the method on it.

        Args:
            model: plain.
            noble: NOBLE's settings by rank.
        """
        method = METHODS.get(self.method)
        if isinstance(method, AdapterArm):
            return adapted(model, self.method, self.rank or 0)
        if method is not None:
            ranked = {} if self.rank is None else {"rank": self.rank}
            config = noble(self.rank or 0) if method.config_class is NobleConfig else method.config_class(**ranked)
            everywhere = method.include is not None or not method.replaces_weights
            augment(model, config, include=None if everywhere else r".*\.mlp\..*", verbose=False)
        return model


def bench_arms(methods: Sequence[str], ranks: Sequence[int]) -> list[BenchArm]:
    """Return every arm that is measured, those that others are over first: the plain model, LoRA of each rank.

    Raises:
        UserError: an unknown method.
    """
    for name in methods:
        if name not in METHODS:
            raise UserError(f"unknown method {name!r}; choose of {', '.join(METHODS)}")
    arms = [] if all(map(_over_lora, methods)) else [BenchArm()]
    first = [LORA] if any(name == LORA or _over_lora(name) for name in methods) else []
    for name in [*first, *(name for name in methods if name != LORA)]:
        arms += [BenchArm(method=name, rank=rank) for rank in (ranks if _has_rank(name) else (None,))]
    return arms


def adapted(model: nn.Module, name: str, rank: int, targets: Any = "all-linear") -> nn.Module:
    """Return the model with an adapter on it.

    Args:
        model: plain.
        name: an adapter of `METHODS`.
        rank: r.
        targets: as peft's target_modules.
    """
    from peft import get_peft_model

    arm = METHODS[name]
    assert isinstance(arm, AdapterArm)
    module, kind = arm.config
    places = {arm.targets: targets} if arm.targets else {}
    config = getattr(importlib.import_module(module), kind)(**{**arm.default, **places, arm.rank: rank, **arm.fixed})
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():  # NoRA says what it found
        # Of transformers, about a name that peft uses.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
        return get_peft_model(model, config)  # type: ignore[arg-type]


def _over_lora(name: str) -> bool:
    return name != LORA and isinstance(METHODS[name], AdapterArm)


def _has_rank(name: str) -> bool:
    """Return whether a method needs a rank: nonlinear queries choose their own."""
    method = METHODS[name]
    return isinstance(method, AdapterArm) or getattr(method.config_class, "rank", None) is not None


def make_model(
    config: ModelBenchConfig,
    arm: BenchArm,
    positions: int,
    *,
    cache: bool = False,
    frozen_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Return GLM, the paper's backbone, or a Llama with an arm's method on it; all arms have the same plain weights.

    The vocabulary is so small that the linears inside the blocks are what is measured.

    Args:
        config: sizes and device.
        arm: one of `bench_arms`.
        positions: tokens of the longest sequence.
        cache: keep keys and values.
        frozen_dtype: type of the weights that an adapter does not train.
    """
    from transformers import GlmConfig, GlmForCausalLM, LlamaConfig, LlamaForCausalLM

    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.width // config.heads,
        "attention_bias": False,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 0,  # GLM's own three lie far outside this vocabulary
        "use_cache": cache,
    }
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    torch.manual_seed(0)
    with torch.device(config.device):
        model: Any
        if config.family == "llama":
            model = LlamaForCausalLM(LlamaConfig(hidden_act="silu", rope_parameters=rope, **common))
        else:
            rope |= {"partial_rotary_factor": 1.0}
            model = GlmForCausalLM(GlmConfig(hidden_act="gelu", rope_parameters=rope, **common))
    return arm.apply(model.to(frozen_dtype) if arm.adapter else model, config.noble)
