"""Arms of `nlr bench`: every registered method, its adapters, and peft's that they compare with, on a small model.

A method that swaps modules trains everything, and its ratios are over the plain model; one that replaces weights goes
on the feed-forwards, others where they go by default. Adapters train alone, on every linear but the head, and their
ratios are over peft's LoRA of the same rank, which itself is over the plain model. `rivals` are NOBLE
computed otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nlr_lab.tasks.task import AdapterSetup
from nlr_lab.training.methods import TUNINGS
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import all_methods
from nonlinear_lowrank.methods.noble import NobleConfig
from nonlinear_lowrank.surgery.augment import augment

from .rivals import put_rival
from .settings import RIVALS, ModelBenchConfig

BASELINE, LORA = "baseline", "lora"
ADAPTERS = {tuning.name: tuning for tuning in TUNINGS if tuning.adapter is not None}
METHODS = (*all_methods(), *ADAPTERS)


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

    def apply(self, model: nn.Module, config: ModelBenchConfig) -> nn.Module:
        """Return the plain model with the method on it."""
        if self.method in ADAPTERS:
            return adapted(model, self.method, self.rank)
        if self.method in RIVALS:
            return put_rival(replace(self, method=NobleConfig.method).apply(model, config), self.method)
        if self.method != BASELINE:
            method = all_methods()[self.method]
            ranked = {} if self.rank is None else {"rank": self.rank}
            own = config.noble if method.config_class is NobleConfig else {}
            everywhere = method.include is not None or not method.replaces_weights
            settings = method.config_class(**ranked, **own)
            augment(model, settings, include=None if everywhere else r".*\.mlp\..*", verbose=False)
        return model


def bench_arms(methods: Sequence[str], ranks: Sequence[int]) -> list[BenchArm]:
    """Return every arm that is measured, those that others are over first: the plain model, LoRA of each rank."""
    for name in methods:
        if name not in (*METHODS, *RIVALS):
            raise UserError(f"unknown method {name!r}; choose from {', '.join((*METHODS, *RIVALS))}")
    arms = [] if all(map(_over_lora, methods)) else [BenchArm()]
    first = [LORA] if any(name == LORA or _over_lora(name) for name in methods) else []
    for name in [*first, *(name for name in methods if name != LORA)]:
        # Nonlinear queries choose their own rank.
        ranked = name in (*ADAPTERS, *RIVALS) or getattr(all_methods()[name].config_class, "rank", None) is not None
        arms += [BenchArm(method=name, rank=rank) for rank in (ranks if ranked else (None,))]
    return arms


def _over_lora(name: str) -> bool:
    return name in ADAPTERS and name != LORA


def adapted(model: nn.Module, name: str, rank: int | None, targets: Any = "all-linear") -> nn.Module:
    """Return the model with an adapter of `ADAPTERS` on it; `targets` is as peft's target_modules."""
    adapter = ADAPTERS[name].adapter
    assert adapter is not None
    settings = {adapter.rank: rank} | ({adapter.targets: targets} if adapter.targets else {})
    return ADAPTERS[name].apply(model, settings, AdapterSetup(), "stock", verbose=False)


def make_model(
    config: ModelBenchConfig, arm: BenchArm, positions: int, *, cache: bool = False, frozen_dtype: str = "float32"
) -> nn.Module:
    """Return GLM, the paper's backbone, or a Llama with an arm's method on it; all arms have the same plain weights.

    `positions` are the tokens of the longest sequence, `cache` keeps keys and values, and `frozen_dtype` is the type of
    the weights that an adapter does not train.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    own = {"hidden_act": "silu", "rope_parameters": rope}
    if config.family == "glm":
        own = {"hidden_act": "gelu", "rope_parameters": rope | {"partial_rotary_factor": 1.0}}
    settings = AutoConfig.for_model(
        config.family,
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads or config.heads,
        head_dim=config.width // config.heads,
        attention_bias=False,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=0,  # GLM's own three lie far outside this vocabulary
        use_cache=cache,
        **own,
    )
    torch.manual_seed(0)
    with torch.device(config.device):
        model = AutoModelForCausalLM.from_config(settings)
    if arm.method in ADAPTERS:
        model = model.to(getattr(torch, frozen_dtype))
    return arm.apply(model, config)
