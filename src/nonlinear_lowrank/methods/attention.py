"""Names and shapes of attention projections, by which methods find queries, keys and values."""

from typing import Any

from torch import nn

from .experts import first_integer
from .matrix import linear_shape
from .names import BY_HEAD, FUSED

QUERY_BESIDE = "holds keys and values only, and the query is beside it; leave it out with exclude="
_BY_HEAD_IN = ("GPTNeoX", "Bloom", "Persimmon", "MiniMaxLightning")
_GATED = ("Qwen3Next", "Qwen3_5", "Qwen4Exp")
"""Attentions whose q_proj has, head by head, a query and a gate of the output."""
_DEVICES = 4  # of CodeGen, in transformers' code a constant


def row_groups(name: str, parent: Any) -> int | None:
    """Return the number of groups of rows in a projection, each of which has its q, k and v; None where nothing says.

    1 is a block of each; the number of heads is head by head. Falcon has a group for each key, CodeGen for each device.
    A query beside a gate is in such groups too.
    """
    own, kind = name.rpartition(".")[2], type(parent).__name__
    heads, _ = attention_heads(parent)
    if own == "q_proj" and kind.startswith(_GATED):
        return heads
    if own not in (*FUSED, BY_HEAD):
        return 1
    # timm's MaxViT says so; its TinyViT and EfficientFormer cut each head at their width of values.
    if kind.startswith(_BY_HEAD_IN) or getattr(parent, "head_first", False) or hasattr(parent, "val_dim"):
        return heads
    if kind.startswith("CodeGen"):
        return _DEVICES
    if kind.startswith("Falcon") and parent.new_decoder_architecture:
        return int(parent.num_kv_heads)
    if kind.startswith(("Falcon", "GPTBigCode")):
        return 1 if parent.multi_query or getattr(parent, "is_cross_attention", False) else heads
    return None if own == BY_HEAD else 1


def attention_heads(parent: Any, config: Any = None) -> tuple[int | None, int | None]:
    """Return the number of an attention's query heads and their width; None where neither it nor a config says.

    Its own config is asked before the given one, the model's.
    """
    sources = (parent, getattr(parent, "config", None), config)
    heads = first_integer(sources, ("num_heads", "num_attention_heads", "n_heads", "n_head"))
    # Latent attention's `head_dim` is the width of the rotated part alone.
    head = first_integer(sources, ("qk_head_dim", "head_dim", "attention_head_size", "head_size"))
    width = first_integer(sources, ("embed_dim", "hidden_size", "d_model"))
    if head is None and heads is not None and width is not None:
        head = width // heads
    return heads, head


def _key_heads(parent: Any) -> int | None:
    names = ("num_key_value_heads", "num_kv_heads", "kv_heads")
    return first_integer((parent, getattr(parent, "config", None)), names)


def query_is_beside(name: str, module: Any, parent: nn.Module) -> bool:
    """Return whether a fused projection holds keys and values alone, as in cross-attention and in windows of GCViT."""
    d_in, d_out = linear_shape(module)
    only_two = d_out == 2 * d_in and _key_heads(parent) is None
    return name.rpartition(".")[2] in FUSED and (only_two or getattr(parent, "is_cross_attention", False))


def fused_widths(name: str, module: Any, parent: nn.Module) -> tuple[tuple[str, ...], tuple[int, ...], int] | str:
    """Return names and widths of the parts of a fused projection, and the number of groups in which they take turns.

    If name, width and attention leave them open, return the reason, as the end of a sentence.
    """
    d_in, d_out = linear_shape(module)
    if holds_keys_and_values(module):
        return ("k_proj", "v_proj"), (d_out // 2, d_out // 2), 1
    (heads, head), groups, kind = attention_heads(parent), row_groups(name, parent), type(parent).__name__
    if groups is None or getattr(parent, "is_cross_attention", False):
        return f"{kind} does not say how its rows of q, k and v take turns"
    q = k = d_in
    if heads is not None and head is not None:
        # Without a number of their own there are as many keys and values.
        q = heads * head
        k = head * (_key_heads(parent) or heads)
    if d_out != q + 2 * k or q % groups or k % groups:
        return f"its {d_in} -> {d_out} are not the {q} queries and twice {k} keys and values of {kind}"
    others = ("v_proj", "k_proj") if kind.startswith("CodeGen") else ("k_proj", "v_proj")
    return ("q_proj", *others), (q, k, k), groups


def holds_keys_and_values(module: Any) -> bool:
    """Return whether this is the projection of GPT-2's cross-attention, whose queries are in a module beside it."""
    return hasattr(module, "nf") and module.nf == 2 * module.nx  # a Conv1D, or NOBLE's of one
