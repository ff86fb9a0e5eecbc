"""Our operators beside their plain formulas, a row each; tests that hold for every operator run over these rows."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from nonlinear_lowrank.methods.noble.op import Branch, noble_linears, noble_linears_reference
from nonlinear_lowrank.methods.rational import op as rational_op
from nonlinear_lowrank.methods.rational.op import FORMS, LinearTails, denominator_size
from nonlinear_lowrank.methods.rational.reference import rational_anchored_reference, rational_reference
from nonlinear_lowrank.methods.sine.op import WEIGHT_ACTIVATIONS, lowrank_linear, sine_embedding
from nonlinear_lowrank.methods.sine.reference import lowrank_linear_reference, sine_embedding_reference
from nonlinear_lowrank.ops.sine import SineFactors, sine_layer, sine_layer_reference
from rounding_helpers import assert_as_good_as_plain, cast, jittered

TAILS = LinearTails(-1.2, 0.9, 0.1, 0.8)


@dataclass(frozen=True)
class Case:
    """A call of an operator, and of its plain formula, with the same arguments."""

    fast: Callable[..., Any]
    plain: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Nested; the first is the input. Tensors that require gradients are the leaves."""
    inputs: tuple[Tensor, ...]
    """Those of them that are activations, and saved for backward; the rest are parameters."""
    saved: int
    """Bytes that are saved for backward."""
    slack: int = 0
    """Bytes of small copies of parameters that may be saved as well."""

    def leaves(self) -> list[Tensor]:
        return [each for each in tree_flatten(self.arguments)[0] if _is_leaf(each)]

    def run(self, function: Callable[..., Any], leaves: list[Tensor] | None = None) -> list[Tensor]:
        """Return the outputs of a function of the arguments, or of these with other leaves."""
        flat, spec = tree_flatten(self.arguments)
        if leaves is not None:
            others = iter(leaves)
            flat = [next(others) if _is_leaf(each) else each for each in flat]
        found = function(*tree_unflatten(flat, spec))
        return [found] if isinstance(found, Tensor) else list(found)

    def gradients(self, function: Callable[..., Any], dys: list[Tensor], leaves: list[Tensor] | None = None) -> Any:
        """Return outputs and the gradients of the leaves that require some."""
        ys = self.run(function, leaves)
        wanted = [each for each in (self.leaves() if leaves is None else leaves) if each.requires_grad]
        return [*ys, *torch.autograd.grad(ys, wanted, [dy.to(y.dtype) for dy, y in zip(dys, ys, strict=True)])]

    def dys(self) -> list[Tensor]:
        with torch.no_grad():
            ys = self.run(self.plain)
        return [torch.randn(y.shape, dtype=y.dtype, device=y.device) for y in ys]


def _is_leaf(each: Any) -> bool:
    return isinstance(each, Tensor) and each.requires_grad


def leaf(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (scale * torch.randn(*shape, dtype=torch.float64)).to(dtype).requires_grad_()


def strided(tensor: Tensor) -> Tensor:
    """Return the same numbers as a leaf, its dimensions in the reverse order in memory."""
    reverse = tuple(reversed(range(tensor.ndim)))
    return tensor.detach().permute(reverse).contiguous().permute(reverse).requires_grad_(tensor.requires_grad)


def assert_all_close(found: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def compare(case: Case, dys: list[Tensor], *, strided_input: bool = False) -> list[Tensor]:
    """The operator twice: within the bound of rounding, and two runs equal to the bit; return what it gives."""
    leaves = case.leaves()
    if strided_input and leaves[0].is_contiguous():
        leaves[0] = strided(leaves[0])
    first, again = (case.gradients(case.fast, dys, leaves) for _ in range(2))
    exact = case.gradients(case.plain, dys, cast(leaves, torch.float64))
    moved = case.gradients(case.plain, jittered(dys), jittered(leaves))
    assert_as_good_as_plain(first, case.gradients(case.plain, dys, leaves), exact, moved)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    return first


BOTTLENECKS = [
    *((activation, depth) for activation in ("cosine", "tanh", "leaky_relu", "gelu", "silu") for depth in (1, 2)),
    ("cosine", 3),
]


def make_branch(activation="cosine", depth=2, *, d_in=12, d_out=10, r=4, dtype=torch.float64, down=True):
    """Return a branch of fresh tensors; without `down` where h is given, or another branch has it."""
    cosines = depth if activation == "cosine" else 0
    return Branch(
        leaf(r, d_in, scale=d_in**-0.5, dtype=dtype) if down else None,
        leaf(d_out, r, scale=r**-0.5, dtype=dtype),
        [leaf(r, r, scale=r**-0.5, dtype=dtype) for _ in range(depth - 1)],
        [leaf(r, dtype=dtype) for _ in range(cosines)],
        [leaf(r, dtype=dtype) for _ in range(cosines)],
        activation,
    )


def noble(activation="cosine", depth=2, form="", *, batch=(3, 5), d_in=12, d_out=10, r=4, dtype=torch.float64):
    """A linear with a branch. Forms: "no-bias", "branch" alone, "h" given, a "group" of three, "shared" down in it."""
    n = 3 if form in ("group", "shared") else 1
    widths = [d_out + 2 * place for place in range(n)]
    branches = [
        make_branch(activation, depth, d_in=d_in, d_out=width, r=r, dtype=dtype, down=form != "h" and not shared)
        for width, shared in zip(widths, (False, *[form == "shared"] * (n - 1)), strict=True)
    ]
    x = leaf(*batch, d_in, dtype=dtype)
    weights = [None if form == "branch" else leaf(width, d_in, scale=d_in**-0.5, dtype=dtype) for width in widths]
    biases = [None if form in ("branch", "no-bias") else leaf(width, dtype=dtype) for width in widths]
    h = leaf(*batch, r, dtype=dtype) if form == "h" else None
    saved = (x.numel() + x.numel() // d_in * r * (n if form == "group" else 1)) * x.itemsize
    inputs = (x,) if h is None else (x, h)
    return Case(noble_linears, noble_linears_reference, (x, weights, biases, branches, h), inputs, saved)


DELTAS = {"sine": (False,), "dora": (True,), "sine+dora+sine": (False, True, False)}
"""For each delta, whether it is sine-DoRA's."""


def make_factors(dora, *, d_in=12, d_out=10, r=3, rms=2.0, dtype=torch.float64, scale=1.5):
    """Return fresh deltas whose phases have the given root mean square (radians)."""
    return [
        SineFactors(
            up=leaf(d_out, r, dtype=dtype),
            down=leaf(r, d_in, dtype=dtype),
            omega=rms / r**0.5,
            gain=d_in**0.5,
            scale=scale,
            magnitude=(0.5 + torch.rand(d_out, dtype=torch.float64)).to(dtype).requires_grad_() if each else None,
        )
        for each in dora
    ]


def sine(
    dora=(False,), kind="merged", *, batch=(3, 5), d_in=12, d_out=10, r=3, rms=2.0, dtype=torch.float64, factors=None
):
    """A linear map, 1x1 convolution or embedding with deltas; the type of the factors is `factors`, else `dtype`."""
    deltas = make_factors(dora, d_in=d_in, d_out=d_out, r=r, rms=rms, dtype=factors or dtype)
    one_by_one = (d_out, d_in, 1, 1)
    shapes = {"conv1d": (d_in, d_out), "delta-conv1d": (d_in, d_out), "conv2d": one_by_one, "strided": one_by_one}
    weight = leaf(*shapes.get(kind, (d_out, d_in)), dtype=dtype)
    if kind.startswith("embedding"):
        indices, base = torch.randint(0, d_out, (4, 9)), kind == "embedding"
        fast, plain = (partial(each, base=base) for each in (sine_embedding, sine_embedding_reference))
        return Case(fast, plain, (indices, weight if base else weight.detach(), deltas), (), indices.nbytes)
    stride = {"conv2d": (1, 1), "strided": (2, 3)}.get(kind)
    x = leaf(2, d_in, 7, 8, dtype=dtype) if stride else leaf(*batch, d_in, dtype=dtype)
    how = {"base": not kind.startswith("delta"), "transposed": kind.endswith("conv1d"), "stride": stride}
    if not how["base"] and not any(dora):
        weight = None
    bias = None if kind.endswith("no-bias") else leaf(d_out, dtype=dtype)
    return Case(
        partial(sine_layer, **how), partial(sine_layer_reference, **how), (x, weight, bias, deltas), (x,), x.nbytes
    )


def lowrank(activation, bias=True, *, batch=(3, 5), d_in=12, d_out=10, r=3, dtype=torch.float64):
    x, up, down = leaf(*batch, d_in, dtype=dtype), leaf(d_out, r, dtype=dtype), leaf(r, d_in, dtype=dtype)
    arguments = (x, up, down, leaf(d_out, dtype=dtype) if bias else None, activation, 3.0, 1.7)
    narrow = x.numel() // d_in * r if activation == "identity" else 0
    # Casts of the factors are not told from activations there.
    slack = (up.nbytes + down.nbytes) // 2 if activation == "identity" else 0
    return Case(lowrank_linear, lowrank_linear_reference, arguments, (x,), (x.numel() + narrow) * x.itemsize, slack)


def rational(
    kind="rational", form="abs_of_sum", tails=None, formula="gelu", degrees=(5, 4), *, batch=(3, 5), channels=12,
    groups=4, dtype=torch.float64, scale=1.0,
):  # fmt: skip
    """R(x), gated or anchored; coefficients are float32 where x is of a 16-bit type."""
    n = 1 + (kind == "rational_gated")  # gate and up are halves of one projection: their rows lie apart
    x = [half.detach().requires_grad_() for half in leaf(*batch, n * channels, dtype=dtype).chunk(n, -1)]
    own = torch.float32 if dtype.itemsize == 2 else dtype
    coefficients = [
        leaf(groups, degrees[0] + 1, scale=scale, dtype=own),
        leaf(groups, denominator_size(degrees[1], form), scale=0.7 * scale, dtype=own),
    ]
    rest = (form, tails)
    if kind == "rational_anchored":  # base coefficients near the shifted ones, one row for all groups
        rest = (*((each[:1] + 0.1 * torch.randn_like(each[:1])).detach() for each in coefficients), formula, *rest)
    plain = {"rational_anchored": rational_anchored_reference, "rational_gated": _gated_formula}
    saved, copies = sum(each.nbytes for each in x), sum(each.nbytes for each in coefficients)
    # Base coefficients, and under compile |b|, a copy of the coefficients, are saved as well.
    arguments = (*x, *coefficients, *rest)
    return Case(getattr(rational_op, kind), plain.get(kind, rational_reference), arguments, tuple(x), saved, 2 * copies)


def _gated_formula(gate, up, *rest):
    return rational_reference(gate, *rest) * up


KINDS = ("rational", "rational_anchored", "rational_gated")
_TAILS = {"": None, "tails": TAILS}

# The rows that every test runs over, and more for the comparison with the formula alone.
ROWS = {f"noble-{name}{depth}": partial(noble, name, depth) for name, depth in BOTTLENECKS}
ROWS |= {
    f"noble-{name}{depth}-{form}": partial(noble, name, depth, form)
    for name, depth in (("cosine", 2), ("gelu", 1))
    for form in ("no-bias", "branch", "h", "group", "shared")
}
ROWS |= {
    f"{name}-{kind}": partial(sine, dora, kind)
    for name, dora in DELTAS.items()
    for kind in ("merged", "delta", "conv1d", "conv2d", "embedding")
}
ROWS |= {f"lowrank-{name}": partial(lowrank, name) for name in WEIGHT_ACTIVATIONS}
ROWS |= {
    f"{kind}-{form}-{name}": partial(rational, kind, form, tails)
    for kind in KINDS
    for form in FORMS
    for name, tails in _TAILS.items()
}
_SIBLINGS = re.compile(
    r"noble-(tanh|leaky_relu|silu)\d|noble-gelu1-.+|sine\+dora\+sine-(?!merged).+|lowrank-(sigmoid|relu)|rational.+-tails"
)
COMPILED_ROWS = [pytest.param(row, marks=[pytest.mark.slow] * bool(_SIBLINGS.fullmatch(row))) for row in ROWS]
"""For tests that compile: a row that differs from another by an elementwise function or by the layer alone is slow."""
MORE_ROWS = {
    f"noble-{name}{depth}-{form}": partial(noble, name, depth, form)
    for name, depth in BOTTLENECKS
    for form in ("no-bias", "branch", "h", "group", "shared")
}
MORE_ROWS |= {
    f"{name}-{kind}": partial(sine, dora, kind)
    for name, dora in DELTAS.items()
    for kind in ("strided", "merged-no-bias", "delta-no-bias", "embedding-delta")
}
MORE_ROWS |= {f"lowrank-{name}-no-bias": partial(lowrank, name, bias=False) for name in WEIGHT_ACTIVATIONS}
MORE_ROWS |= {
    f"{kind}-{form}-{name}-{degrees}-{formula}": partial(rational, kind, form, tails, formula, degrees)
    for kind in KINDS
    for form in FORMS
    for name, tails in _TAILS.items()
    for degrees in ((5, 4), (1, 1), (3, 6), (0, 2))
    for formula in (("gelu", "relu", "tanh") if kind == "rational_anchored" else ("",))
}
