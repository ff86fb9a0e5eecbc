"""torch's `nn.MultiheadAttention` with linears that are called, so that layers in their place take effect.

torch's reads `in_proj_weight` and the weight of `out_proj` as tensors and calls no linear, and in inference
`nn.TransformerEncoderLayer` reads those of its whole layer. `augment` puts `UnfusedMultiheadAttention` in its place.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from nonlinear_lowrank.methods.base import method_of_layer
from nonlinear_lowrank.methods.matrix import is_hooked, replace_modules

from .targets import HOOKED, holds_numbers, names_read

_INPUTS = ("q", "k", "v")
_SETTINGS = ("embed_dim", "kdim", "vdim", "num_heads", "head_dim", "dropout", "batch_first", "add_zero_attn")


class UnfusedMultiheadAttention(nn.Module):
    """`nn.MultiheadAttention` whose projections are the linears q_proj, k_proj, v_proj and out_proj.

    Arguments and results of `forward` are torch's, up to rounding, except nested tensors. `state_dict()` has the names
    of the linears; tensors under torch's load as well.

    Args:
        attention: torch's; its `out_proj`, `bias_k` and `bias_v` are taken over, a packed input projection is copied.
    """

    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    bias_k: Tensor | None
    bias_v: Tensor | None
    _qkv_same_embed_dim = False  # or nn.TransformerEncoderLayer reads weights in inference and calls no linear

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        for name in _SETTINGS:
            setattr(self, name, getattr(attention, name))
        self.packed = attention._qkv_same_embed_dim
        separate = [getattr(attention, f"{name}_proj_weight") for name in _INPUTS]
        weights = _thirds(attention.in_proj_weight) if self.packed else separate
        for name, weight, bias in zip(_INPUTS, weights, _thirds(attention.in_proj_bias), strict=True):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
            linear.weight, linear.bias = weight, bias
            setattr(self, f"{name}_proj", linear)
        self.out_proj = attention.out_proj
        for name in ("bias_k", "bias_v"):
            self.register_parameter(name, getattr(attention, name))
        self.train(attention.training)

    @property
    def in_proj_weight(self) -> Tensor | None:
        """The dense input projection (3 E, E), a copy; None where key or value has a width of its own, or a layer of
        another method has no weight."""
        return self._joined("weight") if self.packed else None

    @property
    def in_proj_bias(self) -> Tensor | None:
        """The bias of the input projection (3 E), a copy, or None."""
        return self._joined("bias")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(L, N, E), (S, N, kdim), (S, N, vdim) -> (L, N, E) and the attention weights (N, L, S) or None.

        With `batch_first` N is in front; without a batch there is none. With `average_attn_weights` off the weights
        are (N, heads, L, S).

        Raises:
            ValueError: a nested tensor, a mask of the wrong shape, or `is_causal` without its mask.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError("attention with branches takes no nested tensors; pass padded ones and key_padding_mask")
        if is_causal and attn_mask is None:
            raise ValueError("is_causal needs the causal attn_mask too, as in nn.MultiheadAttention")
        # Each linear gets the tensor as it came: those of one input may share its product.
        given = [self._projection(each)(x) for each, x in zip(_INPUTS, (query, key, value), strict=True)]
        batched = query.ndim == 3
        if not batched:
            given = [each[None] for each in given]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            given = [each.transpose(0, 1) for each in given]
        q, k, v = given
        if is_causal and key_padding_mask is None and not need_weights:
            mask = None
        else:
            mask, is_causal = self._mask(attn_mask, key_padding_mask, q, k.shape[1]), False
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([each, bias.to(each.dtype).expand(len(each), 1, -1)], 1)
                for each, bias in ((k, self.bias_k), (v, self.bias_v))
            )
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (q, k, v))  # (N, heads, L, E/h)
        if self.add_zero_attn:
            k, v = (F.pad(each, (0, 0, 0, 1)) for each in (k, v))
        dropout, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = q * math.sqrt(1.0 / self.head_dim) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            y = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights[0]
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        y = (y.transpose(1, 2) if self.batch_first or not batched else y.permute(2, 0, 1, 3)).flatten(-2)
        return self.out_proj(y if batched else y[0]), weights

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, keys: int) -> Tensor | None:
        """Return what is added to the scores, (N or 1, heads or 1, L or 1, keys and what the attention adds)."""
        mask, (n, length) = None, q.shape[:2]
        if attn_mask is not None:
            if tuple(attn_mask.shape) not in ((length, keys), (n * self.num_heads, length, keys)):
                shapes = f"{(length, keys)} or {(n * self.num_heads, length, keys)}"
                raise ValueError(f"attn_mask must have the shape {shapes}, got {tuple(attn_mask.shape)}")
            mask = _added(attn_mask, q.dtype).view(-1, self.num_heads if attn_mask.ndim == 3 else 1, length, keys)
        if padding is not None:
            if tuple(padding.shape) != (n, keys):
                raise ValueError(f"key_padding_mask must have the shape {(n, keys)}, got {tuple(padding.shape)}")
            hidden = _added(padding, q.dtype)[:, None, None]
            mask = hidden if mask is None else mask + hidden
        return None if mask is None else F.pad(mask, (0, (self.bias_k is not None) + self.add_zero_attn))

    def _joined(self, tensor: str) -> Tensor | None:
        parts = [getattr(self._projection(each), tensor, None) for each in _INPUTS]
        return None if any(part is None for part in parts) else torch.cat(parts)  # type: ignore[arg-type]

    def _projection(self, name: str) -> Any:
        return getattr(self, f"{name}_proj")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take torch's tensors under torch's names too."""
        for tensor in ("weight", "bias"):
            if (joined := f"{prefix}in_proj_{tensor}") in state_dict:
                for name, part in zip(_INPUTS, state_dict.pop(joined).chunk(3), strict=True):
                    state_dict[f"{prefix}{name}_proj.{tensor}"] = part
        for name in _INPUTS:
            if (own := f"{prefix}{name}_proj_weight") in state_dict:
                state_dict[f"{prefix}{name}_proj.weight"] = state_dict.pop(own)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


def _thirds(tensor: Any) -> list[Any]:
    """Return the parameters of q, k and v out of a packed one, with storages of their own; three times None of None."""
    if tensor is None:
        return [None] * 3
    return [nn.Parameter(part.clone(), tensor.requires_grad) for part in tensor.detach().chunk(3)]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a mask adds to scores: -inf where a boolean one is True."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask.to(dtype)


@contextmanager
def unfused(model: nn.Module, wanted: bool) -> Iterator[dict[str, str]]:
    """Unfuse every `nn.MultiheadAttention` of a model inside a `with` block; yield those that cannot be, and why.

    Nothing is done where it is not wanted. On leaving, torch's modules are back wherever no layer was put in, neither
    there nor beside the attention in its `nn.TransformerEncoderLayer`.
    """
    modules = dict(model.named_modules()) if wanted else {}
    attentions = {name: each for name, each in modules.items() if name and type(each) is nn.MultiheadAttention}
    reasons = {name: why for name, each in attentions.items() if (why := _refused(name, each, model))}
    new: dict[nn.Module, nn.Module] = {
        each: UnfusedMultiheadAttention(each) for name, each in attentions.items() if name not in reasons
    }
    before = set(model.modules())
    replace_modules(model, new)
    encoders: dict[Any, bool] = {  # with nested tensors for the fused path, which layers with branches do not have
        each: each.use_nested_tensor
        for each in model.modules()
        if isinstance(each, nn.TransformerEncoder) and not set(new.values()).isdisjoint(each.modules())
    }
    for encoder in encoders:
        encoder.use_nested_tensor = False
    try:
        yield reasons
    finally:
        scopes: dict[Any, list[nn.Module]] = {each: [each] for each in new.values()}
        for layer in model.modules():
            if isinstance(layer, nn.TransformerEncoderLayer) and layer.self_attn in scopes:
                scopes[layer.self_attn].append(layer)
        swapped = {each for each in model.modules() if each not in before and method_of_layer(each)}
        kept = {each for each, around in scopes.items() if any(not swapped.isdisjoint(it.modules()) for it in around)}
        replace_modules(model, {each: old for old, each in new.items() if each not in kept})
        for encoder, nested in encoders.items():
            encoder.use_nested_tensor = nested and kept.isdisjoint(encoder.modules())


def _refused(name: str, attention: nn.MultiheadAttention, model: nn.Module) -> str:
    """Return why an attention stays as it is, or an empty string."""
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts))]
    if any(isinstance(each, PreTrainedModel) for each in around):
        return "is torch's attention in a model of transformers, whose files have one tensor of its q, k and v"
    if why := kept_back(attention, model):
        return why
    for reader in around:
        if not type(reader).__module__.startswith("torch.nn.") and "in_proj_weight" in names_read(reader):
            return f"the forward of {type(reader).__name__} takes its in_proj_weight without calling it"
    return ""


def kept_back(module: nn.Module, model: nn.Module) -> str:
    """Return why the tensors of a module of a model cannot be handed to new modules, or an empty string."""
    own = list(module.parameters())
    if any(map(is_hooked, module.modules())):
        return HOOKED
    if not all(map(holds_numbers, own)):
        return "is quantized or split over devices; augment the model first"
    holders = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    return "shares tensors with another module" if any(holders[id(each)] > 1 for each in own) else ""
