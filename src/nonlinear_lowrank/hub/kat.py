"""Kolmogorov-Arnold transformers (KAT), as Hugging Face models of their own type, and their released weights.

KAT (Yang and Wang, arXiv:2409.10594; github.com/Adamdad/kat) is a ViT whose MLP is

    fc2(R2(fc1(R1(x)))),  R(x) = P(x) / (1 + |b1| |x| + |b2| |x|^2 + |b3| |x|^3 + |b4| |x|^4),  P of degree 5,

in 8 groups of channels. No pickle is opened here; torch reads the files without running code:

    state = torch.load("kat_tiny_patch16_224.pth", map_location="cpu", weights_only=True)
    released_model(state).save_pretrained("kat-tiny")

The folder is a base for `nlr finetune --checkpoint`, and for NoRA's tables in the place of their plain ViT:
`nlr reproduce nora/table1 --scale paper --source facebook/deit-tiny-patch16-224=kat-tiny`. NoRA then shifts KAT's own
coefficients, those of both functions unless target_modules=activation_fn names the second alone.

Their names are timm's, d is the width:

| theirs                                             | ours                                             |
|----------------------------------------------------|--------------------------------------------------|
| patch_embed.proj, cls_token, pos_embed             | vit.embeddings: patch_embeddings.projection, ... |
| blocks.I.norm1, .norm2                             | vit.layers.I: layernorm_before, layernorm_after  |
| blocks.I.attn.qkv (3 d, d), .attn.proj             | .attention: q_proj, k_proj, v_proj, o_proj       |
| blocks.I.mlp.fc1, .fc2                             | .mlp: the same                                   |
| blocks.I.mlp.act1, .act2: weight_numerator (1, 6)  | .mlp.input_fn, .activation_fn: a row a group     |
| blocks.I.mlp.act1, .act2: weight_denominator (8, 4)| the same                                         |
| norm, head                                         | vit.layernorm, classifier                        |

Theirs is one numerator for all groups; here each group has its own, which training all weights may drive apart. A model
that is drawn, not loaded, starts with R1(x) = x and R2 fitted to silu, near KAT's.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification, ViTConfig, ViTForImageClassification
from transformers import initialization as init
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.rational import RationalActivation, RationalConfig
from nonlinear_lowrank.validation import check_shapes

_HEAD = 64  # width of every released model's attention heads
_OUTSIDE = {
    "cls_token": "vit.embeddings.cls_token",
    "pos_embed": "vit.embeddings.position_embeddings",
    "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
    "norm": "vit.layernorm",
    "head": "classifier",
}
_BLOCK = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.o_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "mlp.act1": "mlp.input_fn",
    "mlp.act2": "mlp.activation_fn",
}


@strict
class KatConfig(ViTConfig):
    """ViT's config, of a KAT; `hidden_act` is what the second rational function of a block starts from."""

    model_type = "nlr_kat"

    hidden_act: str = "silu"
    layer_norm_eps: float = 1e-6
    rational_groups: int = 8


class _Identity(RationalActivation):
    """A rational function that starts as R(x) = x."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if not self.rational_numerator.is_meta:
            init.zeros_(self.rational_denominator)
            init.copy_(self.rational_numerator, torch.eye(6)[1].expand_as(self.rational_numerator))


class KatMlp(nn.Module):
    """(..., hidden_size) -> the same; see the module's documentation."""

    def __init__(self, config: KatConfig) -> None:
        super().__init__()
        rational = RationalConfig(
            activation=config.hidden_act, groups=config.rational_groups, form="sum_of_abs", tails="rational"
        )
        self.input_fn = _Identity(rational)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation_fn = RationalActivation(rational)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(self.input_fn(hidden_states))))


class KatForImageClassification(ViTForImageClassification):
    """See the module's documentation."""

    config_class = KatConfig
    _keep_in_fp32_modules_strict = ("rational_numerator", "rational_denominator")  # type: ignore[assignment]

    def __init__(self, config: KatConfig) -> None:
        super().__init__(config)
        for layer in self.vit.layers:
            layer.mlp = KatMlp(config)
        self.post_init()

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save as PreTrainedModel does; where no image mean and deviation are saved, add the released models'."""
        super().save_pretrained(save_directory, *args, **kwargs)
        file = Path(save_directory) / "preprocessor_config.json"
        if self.config.num_channels == 3 and not file.exists():
            seen = {"image_mean": IMAGENET_DEFAULT_MEAN, "image_std": IMAGENET_DEFAULT_STD}
            text = json.dumps({"image_processor_type": "ViTImageProcessor", **seen})
            file.write_text(text + "\n", encoding="utf-8")


@torch.no_grad()
def released_model(state: Mapping[str, Tensor], *, heads: int | None = None) -> KatForImageClassification:
    """Return the model of a released KAT, in evaluation mode.

    Args:
        state: its state dict, which gives all sizes.
        heads: attention heads, which the state does not give; None: of 64 channels each, as in every released model.

    Raises:
        UserError: the heads do not divide the width, or a tensor is missing, unknown or of another shape.
    """
    try:
        positions, width = state["pos_embed"].shape[1:]
        patches, hidden, labels = (
            state[name] for name in ("patch_embed.proj.weight", "blocks.0.mlp.fc1.bias", "head.bias")
        )
        groups = len(state["blocks.0.mlp.act2.weight_denominator"])
    except KeyError as error:
        raise UserError(f"the state dict has no {error}: it is not a KAT's") from error
    heads = heads or width // _HEAD
    if not heads or width % heads:
        raise UserError(f"a width of {width} does not divide into {heads} heads; give their number as heads=")
    config: Any = KatConfig(
        hidden_size=width,
        intermediate_size=len(hidden),
        num_hidden_layers=len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
        num_attention_heads=heads,
        image_size=math.isqrt(positions - 1) * patches.shape[-1],
        patch_size=patches.shape[-1],
        num_channels=patches.shape[1],
        rational_groups=groups,
    )
    config.num_labels = len(labels)
    model = KatForImageClassification(config)
    ours = _translated(state, groups)
    check_shapes("the state dict is not a KAT's", {name: each.shape for name, each in model.state_dict().items()}, ours)
    model.load_state_dict(ours)
    return model.eval()


def _translated(state: Mapping[str, Tensor], groups: int) -> dict[str, Tensor]:
    """Return the tensors under our names; unknown ones keep theirs."""
    ours: dict[str, Tensor] = {}
    for full, value in state.items():
        module, _, kind = full.rpartition(".") if full not in _OUTSIDE else (full, "", "")
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
        if block is None:
            ours[f"{_OUTSIDE.get(module, module)}.{kind}".rstrip(".")] = value
        elif block[2] == "attn.qkv":
            parts = zip("qkv", value.chunk(3), strict=False)
            ours |= {f"vit.layers.{block[1]}.attention.{each}_proj.{kind}": part for each, part in parts}
        else:
            if kind.startswith("weight_"):
                kind = kind.replace("weight_", "rational_")
                value = value.expand(groups, -1) if kind == "rational_numerator" else value
            ours[f"vit.layers.{block[1]}.{_BLOCK.get(block[2], block[2])}.{kind}"] = value
    return ours


AutoConfig.register(KatConfig.model_type, KatConfig, exist_ok=True)
AutoModelForImageClassification.register(KatConfig, KatForImageClassification, exist_ok=True)
