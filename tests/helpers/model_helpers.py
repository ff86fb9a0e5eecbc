"""Tiny transformers models, one a family, for the test matrices."""

from functools import partial
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    PreTrainedModel,
)

from nonlinear_lowrank.hub.image_tokens import ImageTokensConfig, ImageTokensForCausalLM

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"vocab_size": 67, "pad_token_id": None, "eos_token_id": None, "bos_token_id": None}
_SEPARATE = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 4}
_GLM = {**_SEPARATE, "head_dim": 8, "attention_bias": False, "hidden_act": "gelu"}
_PICTURES = AutoModelForImageClassification


def build(model_type: str, auto: Any = AutoModelForCausalLM, **settings: Any) -> PreTrainedModel:
    return auto.from_config(AutoConfig.for_model(model_type, **settings))


def image_tokens() -> PreTrainedModel:
    sizes = {"vocab_size": 67, "num_classes": 5, "grid_rows": 3, "grid_columns": 4}
    return ImageTokensForCausalLM(ImageTokensConfig(**_GLM, **sizes))


llama = partial(build, "llama", **{**_SEPARATE, **TOKENS, "num_key_value_heads": 2})
glm = partial(build, "glm", **_GLM, **TOKENS)
gpt2 = partial(build, "gpt2", **TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=64)
opt = partial(build, "opt", **SIZES, **TOKENS, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64)
eurobert = partial(build, "eurobert", AutoModelForMaskedLM, **_SEPARATE, **TOKENS, mask_token_id=1)
vit = partial(build, "vit", _PICTURES, **SIZES, image_size=16, num_labels=5, intermediate_size=48, patch_size=4)
_STAGES = {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 2], "patch_size": 2, "drop_path_rate": 0.2}
convnext = partial(build, "convnext", _PICTURES, **_STAGES, image_size=16, num_labels=5)

FAMILIES = {"llama": llama, "glm": glm, "gpt2": gpt2, "opt": opt, "eurobert": eurobert, "vit": vit}
FAMILIES["image_tokens"] = image_tokens
"""Transformers: every method fits every one of them."""
ALL = {**FAMILIES, "convnext": convnext}
"""And a model without attention, whose linears work on the last of four dimensions."""


def auto_class(family: str) -> Any:
    others = {"eurobert": AutoModelForMaskedLM}
    others |= dict.fromkeys(("vit", "convnext"), AutoModelForImageClassification)
    return others.get(family, AutoModelForCausalLM)


class Attention(torch.nn.Module):
    """The part of an attention that a group needs: three linears on one input."""

    def __init__(self, width: int = 32, others: int | None = None, bias: bool = True) -> None:
        super().__init__()
        others = others or width
        self.q_proj = torch.nn.Linear(width, width)
        self.k_proj, self.v_proj = torch.nn.Linear(width, others), torch.nn.Linear(width, others, bias)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        read = x if memory is None else memory
        return torch.cat([self.q_proj(x), self.k_proj(read), self.v_proj(read)], dim=-1)


def randomised(model: torch.nn.Module, scale: float = 0.1) -> torch.nn.Module:
    """Add noise of this deviation to every tensor, so that none is at a default; return the model."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=scale)
    return model


def batch(model: PreTrainedModel, *, size: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    """A random input that fits the model."""
    if hasattr(model.config, "image_size"):
        return {"pixel_values": torch.randn(size, 3, model.config.image_size, model.config.image_size)}
    return {"input_ids": torch.randint(2, model.config.vocab_size, (size, length))}


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
