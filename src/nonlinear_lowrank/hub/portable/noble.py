"""NOBLE branches beside linears."""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.ops.plain import wide

from .core import METHODS, Layer, replace, width_of, with_state

NOBLE_ACTIVATIONS: dict[str, Any] = {
    "cosine": torch.cos,
    "tanh": torch.tanh,
    "leaky_relu": lambda z: F.leaky_relu(z, 0.01),
    "gelu": F.gelu,
    "silu": F.silu,
}


def draw_mix(mix: Tensor, scale: float | None) -> None:
    """Draw mixing matrices (..., r, r): N(0, (scale / sqrt(r))^2), or Xavier uniform."""
    r = mix.shape[-1]
    if scale is not None:
        init.normal_(mix, std=scale / r**0.5)
    elif mix.ndim == 2:
        init.xavier_uniform_(mix)
    else:
        init.uniform_(mix, -((3 / r) ** 0.5), (3 / r) ** 0.5)


def draw_bias(bias: Tensor, name: str) -> None:
    """Draw biases of the bottleneck (..., r): the first zero, others U(-1, 1) / sqrt(r)."""
    bound = 0.0 if name.endswith("1") else bias.shape[-1] ** -0.5
    init.uniform_(bias, -bound, bound)


class NobleBranch(Layer):
    """A linear with a permanent nonlinear low-rank branch (Smith, "NOBLE", arXiv:2603.06492, section 3).

        h = x Wdown^T                        (..., r)
        c1 = cos(w1 * h + p1)                (with biases w1 * (h + b1) + p1, and so on)
        c2 = cos(w2 * (c1 M^T) + p2)
        y = x W^T + b + c2 Wup^T

    Tensors: weight and bias are the plain linear's; noble_down (r, d_in), noble_up (d_out, r), noble_mix1 (r, r),
    noble_frequency1 and 2, noble_phase1 and 2 (r). `depth` counts activations, of which `activation` may be another.
    With fusion="gated" the sum is w * (x W^T + b) + (1 - w) * (c2 Wup^T + noble_up_bias), w = sigmoid(noble_fusion).
    Phases are formed in float32 or wider.
    """

    noble: dict[str, Any]
    shape: tuple[int, int]
    owner: tuple[Any, ...]

    def take(self, settings: dict[str, Any], rank: int, own_init: set[str], first: Any) -> Any:
        """Take the settings; `first` is the layer whose down projection this one shares, or None."""
        module: Any = self
        self.noble, self.rank, self.own_init = settings, rank, own_init
        self.shape, self.owner = width_of(self), () if first is None else (first,)  # in a tuple it is no child
        (d_in, d_out), depth = self.shape, settings["depth"]
        shapes = {"up": (d_out, rank)} | ({} if self.owner else {"down": (rank, d_in)})
        shapes |= {f"mix{k}": (rank, rank) for k in range(1, depth)}
        for k in range(1, depth + 1) if settings["activation"] == "cosine" else ():
            shapes |= {f"frequency{k}": (rank,), f"phase{k}": (rank,)}  # type: ignore[dict-item]
            shapes |= {f"bias{k}": (rank,)} if settings.get("bottleneck_bias") else {}  # type: ignore[dict-item]
        shapes |= {"up_bias": (d_out,)} if settings["up_bias"] else {}  # type: ignore[dict-item]
        shapes |= {"fusion": (1,)} if settings["fusion"] == "gated" else {}  # type: ignore[dict-item]
        for name, shape in shapes.items():
            module.register_parameter(f"noble_{name}", nn.Parameter(module.weight.new_empty(shape)))
        return module

    def reset_parameters(self) -> None:
        """Draw the branch; from scratch W ~ N(0, (0.5 / sqrt(d_in))^2) too, but for what keeps the model's init."""
        module: Any = self
        settings, d_in = self.noble, self.shape[0]
        scratch = settings["init"] != "pretrained"
        if scratch and "weight" not in self.own_init:
            init.normal_(module.weight, std=settings["dense_scale"] / d_in**0.5)
        if scratch and module.bias is not None and "bias" not in self.own_init:
            init.zeros_(module.bias)
        for name, tensor in module.named_parameters(recurse=False):
            kind = name.removeprefix("noble_").rstrip("0123456789")
            if kind == "down":
                init.normal_(tensor, std=d_in**-0.5)
            elif kind == "up":
                init.normal_(tensor, std=settings["up_scale"] / self.rank**0.5 if scratch else 0.0)
            elif kind == "mix":
                draw_mix(tensor, settings.get("mix_scale"))
            elif kind == "bias" and name != "bias":
                draw_bias(tensor, name)
            elif kind == "frequency":
                init.uniform_(tensor, *settings["frequency_range"])
            elif kind == "phase":
                init.normal_(tensor, std=settings["phase_std"])
            elif kind in ("up_bias", "fusion"):
                init.zeros_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        module: Any = self
        settings, dense = self.noble, super().forward(x)  # type: ignore[misc]
        u = F.linear(x, (self.owner[0] if self.owner else module).noble_down)
        dtype = u.dtype
        for k in range(1, settings["depth"] + 1):
            if k > 1:
                u = F.linear(u, getattr(module, f"noble_mix{k - 1}"))
            z = wide(u)
            if settings["activation"] == "cosine":
                z = z + wide(getattr(module, f"noble_bias{k}")) if settings.get("bottleneck_bias") else z
                z = wide(getattr(module, f"noble_phase{k}")) + z * wide(getattr(module, f"noble_frequency{k}"))
            u = NOBLE_ACTIVATIONS[settings["activation"]](z).to(dtype)
        branch = F.linear(F.dropout(u, settings["dropout"], module.training), module.noble_up)
        if settings["up_bias"]:
            branch = branch + module.noble_up_bias
        branch = branch.to(dense.dtype)
        if settings["fusion"] == "gated":
            gate = torch.sigmoid(module.noble_fusion).to(dense.dtype)
            y = gate * dense + (1 - gate) * branch
        else:
            y = dense + branch
        scale = noble_scale(settings)
        return y if scale == 1 else y * scale


class NobleLinear(NobleBranch, nn.Linear):
    """`NobleBranch` beside nn.Linear."""


class NobleConv1D(NobleBranch, Conv1D):
    """`NobleBranch` beside transformers' Conv1D, whose weight is (d_in, d_out)."""


def noble_rank(settings: dict[str, Any], d_in: int, d_out: int) -> int:
    """Return r of a branch beside d_in -> d_out."""
    ratio = settings["rank_ratio"]
    return int(settings["rank"] if ratio is None else max(1, int(min(d_in, d_out) * ratio)))


def noble_scale(settings: dict[str, Any]) -> float:
    """Return the factor of the output: a gate that starts at one half is undone beside trained weights."""
    if settings["output_scale"] is not None:
        return float(settings["output_scale"])
    return 2.0 if settings["fusion"] == "gated" and settings["init"] == "pretrained" else 1.0


def put_noble(model: nn.Module, names: list[str], settings: dict[str, Any]) -> None:
    """Put branches beside linears."""
    ranks = {name: noble_rank(settings, *width_of(model.get_submodule(name))) for name in names}
    firsts: dict[str, str] = {}  # of each layer that shares a down projection, the layer that has it
    for group in _groups_of_qkv(names) if settings["share_down"] == "qkv" else []:
        ranks |= dict.fromkeys(group, min(ranks[name] for name in group))
        firsts |= dict.fromkeys(group[1:], group[0])
    built: dict[str, Any] = {}

    def build(name: str, module: Any) -> nn.Module:
        kind: Any = NobleConv1D if isinstance(module, Conv1D) else NobleLinear
        folded = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        kept = {end for end in ("weight", "bias") if _is_listed(f"{folded}.{end}", settings["own_init"] or ())}
        layer: Any = with_state(kind.__new__(kind), module)
        built[name] = layer.take(settings, ranks[name], kept, built.get(firsts.get(name, "")))
        return layer

    replace(model, sorted(names, key=lambda name: name in firsts), build)


def _is_listed(tensor: str, listed: Any) -> bool:
    """Return whether a tensor is among names with * for numbers of layers; a head's prefix may be there or not."""
    return any(f".{tensor}".endswith(f".{each}") or f".{each}".endswith(f".{tensor}") for each in listed)


def _groups_of_qkv(names: list[str]) -> list[list[str]]:
    """Return names of query, key and value projections, in this order, of each attention that has at least two."""
    queries = ("q_proj", "query", "query_proj", "q_lin", "q_linear", "linear_q", "to_q", "wq", "q", "q_attn")
    groups = []
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in names):
        for query in queries:
            word, *others = ("query", "key", "value") if "query" in query else ("q", "k", "v")
            ends = (query, *(query.replace(word, other) for other in others))
            found = [name for end in ends if (name := f"{parent}.{end}".lstrip(".")) in names]
            groups += [found] if len(found) > 1 else []
    return groups


METHODS["noble"] = put_noble
