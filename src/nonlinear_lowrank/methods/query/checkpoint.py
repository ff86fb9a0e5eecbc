"""Models that the authors of nonlinear queries released (arXiv:2603.13381), as transformers models of ours.

Their files are nanoGPT's: a dict with "model", a state dict, and "model_args", pickled. No pickle is opened here; torch
reads them without running code:

    released = torch.load("ckpt_50000.pt", map_location="cpu", weights_only=True)
    model = released_model(released["model"], released["model_args"])

The model is an OPT: pre-norm blocks, learned positions and exact GELU, as theirs. It has LayerNorm biases, which are
zero, and two unused rows of positions. The half of `(x + f(x)) / 2` is in their attention's scale.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.surgery.augment import augment
from nonlinear_lowrank.validation import check_shapes

from .config import Kind, NonlinearQueryConfig

_KINDS: dict[str, Kind | None] = {
    "original": None,
    "identity": "identity",
    "residual": "full_rank",
    "residual_gelu": "nonlinear",
}
_OUTSIDE = {
    "transformer.wte.weight": "model.decoder.embed_tokens.weight",
    "transformer.wpe.weight": "model.decoder.embed_positions.weight",
    "transformer.ln_f.weight": "model.decoder.final_layer_norm.weight",
}
_BLOCK = {
    "attn.residual_rmsnorm_input.weight": "self_attn.q_proj.query_norm_weight",
    "attn.residual_in.weight": "self_attn.q_proj.query_down",
    "attn.residual_out.weight": "self_attn.q_proj.query_up",
    "attn.residual_layernorm_output.weight": "self_attn.q_proj.query_out_weight",
    "ln_1.weight": "self_attn_layer_norm.weight",
    "attn.c_proj.weight": "self_attn.out_proj.weight",
    "ln_2.weight": "final_layer_norm.weight",
    "mlp.c_fc.weight": "fc1.weight",
    "mlp.c_proj.weight": "fc2.weight",
}
_POSITIONS = 2  # rows that OPT leaves unused


@torch.no_grad()
def released_model(state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> OPTForCausalLM:
    """Return the model of a released checkpoint, in evaluation mode and of its tensors' type.

    Args:
        state: its "model"; a prefix `_orig_mod.` of torch.compile is dropped.
        settings: its "model_args".

    Raises:
        UserError: a setting is missing or one that no released model has, or a tensor is missing, unknown or of another
            shape.
    """
    try:
        width, heads, mode = (settings[name] for name in ("n_embd", "num_heads", "query_mode"))
        sizes: dict[str, Any] = {
            "vocab_size": settings["vocab_size"],
            "num_hidden_layers": settings["n_layer"],
            "max_position_embeddings": settings["block_size"],
            "ffn_dim": settings["mlp_hidden_size"],
            "dropout": settings["dropout"],
            "tie_word_embeddings": settings["tie_weights"],
        }
        scale = settings["scale"] * math.sqrt(width // heads)  # over that of a plain attention
        biased = settings["bias"]
    except KeyError as error:
        raise UserError(f"model_args has no {error}; pass the checkpoint's own") from error
    if mode not in _KINDS or biased:
        raise UserError(f"query_mode={mode!r} with bias={biased} is none of the released: {', '.join(_KINDS)}, no bias")

    config = OPTConfig(
        **sizes,
        hidden_size=width,
        word_embed_proj_dim=width,
        num_attention_heads=heads,
        activation_function="gelu",
        enable_bias=False,
        attention_dropout=settings["dropout"],
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = OPTForCausalLM(config)
    model = model.to(next((value.dtype for value in state.values()), None))
    kind = _KINDS[mode]
    if kind is not None:
        own: dict[str, Any] = {"rms_eps": 1e-5, "out_bias": False} if kind == "nonlinear" else {}
        own |= {} if kind == "identity" else {"scale": scale}
        augment(model, NonlinearQueryConfig(kind=kind, **own), verbose=False)
    ours = _translated(state, kind, scale)
    found = model.state_dict()
    ours |= {name: torch.zeros_like(value) for name, value in found.items() if name.endswith("norm.bias")}
    shapes = {name: each.shape for name, each in found.items()}
    check_shapes("the checkpoint does not match these model_args", shapes, ours)
    model.load_state_dict(ours)
    return model.eval()


def _translated(state: Mapping[str, Tensor], kind: Kind | None, scale: float) -> dict[str, Tensor]:
    """Return the tensors under OPT's names and ours; unknown ones keep theirs."""
    ours: dict[str, Tensor] = {}
    for full, value in state.items():
        name = full.removeprefix("_orig_mod.")
        block = re.fullmatch(r"transformer\.h\.(\d+)\.(.+)", name)
        if name == "transformer.wpe.weight":
            value = torch.cat([value.new_zeros(_POSITIONS, value.shape[1]), value])
        if block is None:
            ours[_OUTSIDE.get(name, name)] = value
            continue
        prefix, own = f"model.decoder.layers.{block[1]}.", block[2]
        if own == "attn.c_attn.weight":
            parts = dict(zip("vkq", reversed(value.split(value.shape[1])), strict=False))
            if kind in (None, "identity"):  # which have no scale of their own: it goes to the keys, q k being a product
                parts["k"] = parts["k"] * scale
            names = {"q": "query_weight" if kind == "full_rank" else "weight", "k": "weight", "v": "weight"}
            ours |= {f"{prefix}self_attn.{each}_proj.{names[each]}": part for each, part in parts.items()}
        else:
            ours[prefix + _BLOCK.get(own, own)] = value
    return ours
