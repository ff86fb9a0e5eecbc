"""`nlr bench op`: one operator, forward and backward, against its plain formula and against what it stands beside.

| operator | over               | arms                                                                             |
|----------|--------------------|----------------------------------------------------------------------------------|
| noble    | the dense linear   | NOBLE, its plain formula and the official layer (`rivals`), at each rank         |
| sine     | LoRA of the rank   | sine-LoRA and its plain formula, sine-DoRA, DoRA, PEANuT                         |
| rational | GELU               | rational, anchored rational, the plain formula, KAT's way (`kat_rational`)        |
| gated    | SwiGLU             | gated rational and its plain formula                                             |

A linear is width -> hidden; activations are of tokens x hidden. A step is one forward and one backward pass with a
given gradient of the output, for the gradients of the input and of everything that is trained; by the clock "cuda" it
is replayed as a CUDA graph, since launches take longer than a single operator. Saved bytes and the peak of a step do
not depend on the clock.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nonlinear_lowrank as nlr
from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.methods.noble import NobleConfig, NobleLinear
from nonlinear_lowrank.methods.noble.op import noble_linear_reference
from nonlinear_lowrank.methods.rational import RationalConfig
from nonlinear_lowrank.methods.rational.op import rational, rational_anchored, rational_gated
from nonlinear_lowrank.methods.rational.reference import Form, rational_reference
from nonlinear_lowrank.ops.kernels import kernels
from nonlinear_lowrank.ops.sine import SineFactors, sine_layer_reference

from .arms import adapted
from .result import BenchResult, Progress
from .rivals import official
from .settings import Mode, OpBenchConfig, Operator
from .timing import captured, in_mode
from .training import peak_bytes


@dataclass(frozen=True)
class OpArm:
    """A function and its inputs."""

    name: str
    over: str | None
    """None: a baseline."""
    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    """Tensors whose gradients are formed require them."""
    parameters: tuple[Tensor, ...] = ()
    """Weights and factors, also those among the inputs; not counted as saved."""


def bench_op(config: OpBenchConfig, *, progress: Progress = lambda line: None) -> BenchResult:
    """Measure every operator in every mode."""
    about = f"{config.tokens} tokens, {config.width} -> {config.hidden}, {config.groups} groups, {config.dtype}"
    result = BenchResult(config=config, about=about, axis="forward and backward, time ratio")
    with result.measuring():
        for operator in config.operators:
            arms = op_arms(operator, config)
            for mode in config.modes:
                torch._dynamo.reset()
                panel = f"{operator}, {mode}"
                forwards = {arm.name: _forward(arm, mode) for arm in arms}
                steps = {arm.name: forward_and_backward(arm, forwards[arm.name]) for arm in arms}
                replayed = config.clock == "cuda" and mode != "graphs"  # which are CUDA graphs already
                timed = {name: captured(step) for name, step in steps.items()} if replayed else steps
                result.time(panel, timed, progress, config.calls)
                saved = {arm.name: saved_bytes(forwards[arm.name], parameters=arm.parameters) for arm in arms}
                peak = {name: peak_bytes(step, config.device) for name, step in steps.items()}
                for name, over in ((arm.name, arm.over) for arm in arms if arm.over is not None):
                    figures = {
                        "saved_bytes": saved[name],
                        "saved_by_over_bytes": saved[over],
                        "peak_bytes": peak[name],
                        "peak_of_over_bytes": peak[over],
                    }
                    result.add(panel, name, over, figures)
    return result


def _forward(arm: OpArm, mode: Mode) -> Callable[[], Tensor]:
    # Without this, from the second call on torch.compile generalizes what the first one has seen.
    function = in_mode(arm.function, mode, dynamic=False)

    return lambda: function(*arm.inputs)


def forward_and_backward(arm: OpArm, forward: Callable[[], Tensor]) -> Callable[[], object]:
    """Return a function that calls `forward` and forms the gradients of the arm's leaves."""
    leaves = [each for each in (*arm.inputs, *arm.parameters) if each.requires_grad]
    unique = list({id(each): each for each in leaves}.values())
    with torch.no_grad():
        dy = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), unique, dy)


def op_arms(operator: Operator, config: OpBenchConfig) -> list[OpArm]:
    """Return the arms of an operator; those that others stand beside come first."""
    arms = {"noble": _noble, "sine": _sine, "rational": _rational, "gated": _gated}
    torch.manual_seed(0)
    with torch.device(config.device):
        return arms[operator](config)


def _input(config: OpBenchConfig, channels: int) -> Tensor:
    return torch.randn(config.tokens, channels).to(getattr(torch, config.dtype)).requires_grad_()


def _noble(config: OpBenchConfig) -> list[OpArm]:
    dtype = getattr(torch, config.dtype)
    x = _input(config, config.width)
    linear = nn.Linear(config.width, config.hidden, bias=False, dtype=dtype)
    arms = [OpArm("linear", None, linear, (x,), tuple(linear.parameters()))]
    for rank in config.ranks:
        layer = NobleLinear(config.width, config.hidden, False, config=NobleConfig(rank=rank), dtype=dtype)
        own = tuple(layer.parameters())
        plain = partial(noble_linear_reference, weight=layer.weight, bias=None, branch=layer.branch())
        arms += [
            OpArm(f"NOBLE r={rank}", "linear", layer, (x,), own),
            OpArm(f"plain formula r={rank}", "linear", plain, (x,), own),
            OpArm(f"official layer r={rank}", "linear", partial(official, layer), (x,), own),
        ]
    return arms


def _sine(config: OpBenchConfig) -> list[OpArm]:
    names = {"lora": "LoRA", "sine-lora": "sine-LoRA", "sine-dora": "sine-DoRA", "dora": "DoRA", "peanut": "PEANuT"}
    x = _input(config, config.width)
    arms = []
    for rank in config.ranks:
        for name, shown in names.items():
            torch.manual_seed(0)
            holder = nn.Sequential(nn.Linear(config.width, config.hidden, bias=False).to(x.dtype))
            layer = adapted(holder, name, rank, ["0"]).get_submodule("base_model.model.0")
            own = tuple(layer.parameters())
            arms.append(OpArm(f"{shown} r={rank}", None if name == "lora" else f"LoRA r={rank}", layer, (x,), own))
        weight = torch.randn(config.hidden, config.width).to(x.dtype)
        up = torch.zeros(config.hidden, rank).requires_grad_()
        down = torch.randn(rank, config.width).mul_(config.width**-0.5).requires_grad_()
        factors = SineFactors(up, down, nlr.SineLoraConfig().omega, config.width**0.5)
        plain = partial(sine_layer_reference, weight=weight, bias=None, factors=[factors])
        arms.append(OpArm(f"plain formula r={rank}", f"LoRA r={rank}", plain, (x,), (weight, up, down)))
    return arms


def _gelu_fit(config: OpBenchConfig, form: Form) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return coefficients of GELU's fit, one row a group, and the keywords of the functions that take them."""
    settings = RationalConfig(activation="gelu", groups=config.groups, form=form)
    fit = settings.fit()
    a, b = (
        torch.tensor(values, dtype=torch.float32).repeat(config.groups, 1).requires_grad_()
        for values in (fit.numerator, fit.denominator)
    )
    return a, b, {"form": form, "tails": settings.straight_tails()}


def _rational(config: OpBenchConfig) -> list[OpArm]:
    x = _input(config, config.hidden)
    a, b, form = _gelu_fit(config, "abs_of_sum")
    base = (a.detach()[:1].clone(), b.detach()[:1].clone())
    kat_a, kat_b, _ = _gelu_fit(config, "sum_of_abs")

    def anchored(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return rational_anchored(x, a, b, *base, "gelu", **form)

    return [
        OpArm("GELU", None, F.gelu, (x,)),
        OpArm("rational", "GELU", partial(rational, **form), (x, a, b), (a, b)),
        OpArm("anchored", "GELU", anchored, (x, a, b), (a, b, *base)),
        OpArm("plain formula", "GELU", partial(rational_reference, **form), (x, a, b), (a, b)),
        OpArm("KAT's way", "GELU", kat_rational, (x, kat_a, kat_b), (kat_a, kat_b)),
    ]


def _gated(config: OpBenchConfig) -> list[OpArm]:
    gate, up = _input(config, config.hidden), _input(config, config.hidden)
    a, b, form = _gelu_fit(config, "abs_of_sum")
    given = (gate, up, a, b)

    def plain(gate: Tensor, up: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return rational_reference(gate, a, b, **form) * up

    return [
        OpArm("SwiGLU", None, lambda gate, up: F.silu(gate) * up, (gate, up)),
        OpArm("gated rational", "SwiGLU", partial(rational_gated, **form), given, (a, b)),
        OpArm("plain formula", "SwiGLU", plain, given, (a, b)),
    ]


def kat_rational(x: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return a rational activation as KAT's code computes it: what ours is measured against, and nothing else.

    R(x) = (a0 + a1 x + ... + a5 x^5) / (1 + |b1| |x| + ... + |b4| |x|^4) by groups of channels. On an NVIDIA GPU every
    element adds its share to its group's gradients by an atomic operation, so that sums of one run differ from the
    next. Elsewhere it is that code's other way: all powers of x are stacked, in autograd's sight. x and the result are
    (..., C) of one type, numerators (G, 6), denominators (G, 4) with b1 first.
    """
    if not torch.compiler.is_compiling() and kernels("rational", x, numerator, denominator) is not None:
        from .kat_kernel import KatRational  # imports triton

        return KatRational.apply(x, numerator, denominator)
    groups = numerator.shape[0]
    z = x.float().unflatten(-1, (groups, -1))
    powers = torch.stack([z**k for k in range(numerator.shape[1])], -1)
    above = (powers * numerator[:, None]).sum(-1)
    below = 1 + (powers[..., 1:5].abs() * denominator.abs()[:, None]).sum(-1)
    return (above / below).flatten(-2).to(x.dtype)
