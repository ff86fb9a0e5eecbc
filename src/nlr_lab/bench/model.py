"""The model that benchmarks measure: the paper's backbone (GLM), or a Llama, in small.

Its vocabulary is so small that the linears inside the blocks are what is measured.
"""

from typing import Any

import torch
from torch import nn
from transformers import GlmConfig, GlmForCausalLM, LlamaConfig, LlamaForCausalLM

from .methods import BenchArm
from .settings import ModelBenchConfig


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
