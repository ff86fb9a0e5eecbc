"""The model that benchmarks measure: the paper's backbone (GLM), or a Llama, in small.

Its vocabulary is so small that the linears inside the blocks are what is measured.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import nn
from transformers import GlmConfig, GlmForCausalLM, LlamaConfig, LlamaForCausalLM

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.noble import NobleConfig
from nonlinear_lowrank.methods.noble.config import Activation

from .machine import conditions
from .methods import BenchArm, bench_arms
from .settings import BenchConfig, check_low

_OF_NOBLE = ("activation", "depth", "fusion", "share_down", "fuse_shared_inputs")


@dataclass(frozen=True, kw_only=True)
class ModelBenchConfig(BenchConfig):
    """The model that a benchmark measures.

    Raises:
        UserError: a value is out of range.
    """

    width: int = 512
    """d, the model width."""
    layers: int = 2
    """Transformer blocks."""
    heads: int = 8
    """Attention heads."""
    kv_heads: int | None = None
    """Heads of keys and values; None: as many as of queries."""
    hidden: int = 1376
    """Width of the gated feed-forward."""
    vocab_size: int = 256
    """Small, so that the head hardly counts."""
    family: Literal["glm", "llama"] = "glm"
    """glm: gate and up projection in one linear, GELU. llama: two linears, SiLU."""
    methods: tuple[str, ...] = ("noble",)
    """Over the plain model, all of it trained: noble, sine-lowrank, nonlinear-query, qk-norm, rational, lora. Over
    LoRA: dora, sine-lora, sine-dora, peanut, noble-adapter, nora, nora++."""
    ranks: tuple[int, ...] = (32, 64)
    """r, each an arm of its own."""
    activation: Activation = "cosine"
    """NOBLE's bottleneck."""
    depth: int = 2
    """Activations in the bottleneck."""
    fusion: Literal["add", "gated"] = "add"
    """How the branch joins the linear."""
    share_down: Literal["none", "qkv"] = "none"
    """Whether query, key and value share one down projection."""
    fuse_shared_inputs: bool = False
    """Whether NOBLE layers that read one input are computed together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise UserError(f"kv_heads must divide the {self.heads} heads, got {self.kv_heads!r}")
        if self.width % (2 * self.heads):
            raise UserError(f"width {self.width} must be a multiple of 2 x heads ({2 * self.heads})")
        check_low(self.ranks, min(self.width, self.hidden))
        self.noble(self.ranks[0])
        bench_arms(self.methods, self.ranks)
        for each in fields(self):
            if "noble" not in self.methods and each.name in _OF_NOBLE and getattr(self, each.name) != each.default:
                raise UserError(f"{each.name} is NOBLE's; omit it, or add noble to the methods")

    def noble(self, rank: int) -> NobleConfig:
        """Return the settings of branches."""
        return NobleConfig(rank=rank, **{name: getattr(self, name) for name in _OF_NOBLE})

    def describe(self, what: str, machine: dict[str, Any], *, timed: bool = True) -> str:
        """Return what was measured, where and how."""
        name = {"glm": "GLM", "llama": "Llama"}[self.family]
        place = conditions(self, machine, timed=timed)
        return f"{name} blocks: d {self.width}, {self.layers} layers, {what}, {place}"


def make_model(
    config: ModelBenchConfig,
    arm: BenchArm,
    positions: int,
    *,
    cache: bool = False,
    frozen_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Return the model with an arm's method on it; the plain weights are the same numbers in all arms.

    Args:
        config: sizes and device.
        arm: one of `bench_arms`.
        positions: tokens of the longest sequence.
        cache: keep keys and values.
        frozen_dtype: type of the weights that an adapter does not train.
    """
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
