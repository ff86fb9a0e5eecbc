"""The report of `augment`, in numbers and words, and the forward FLOPs of modules: a multiply-add counts 2."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.methods.base import method_of_layer
from nonlinear_lowrank.methods.experts import active_experts, expert_count, projections

from .targets import expert_tensors, is_linear, linear_method, output_head_names


@dataclass
class AugmentReport:
    """Result of `augment`, or of an adapter of NoRA; `print(report)` gives the readable form."""

    method: str
    config: Any
    kind: str = "linear"
    """Word for the method's modules."""
    settings: list[str] = field(default_factory=list)
    """Settings beside the method's name."""
    swapped: list[str] = field(default_factory=list)
    """Names of the modules that were swapped, in the model's order."""
    details: dict[str, str] = field(default_factory=dict)
    """Replacement of each module, by name, where it is not the same everywhere."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Modules that the method could replace but did not, with the reason."""
    parameters_before: int = 0
    parameters_added: int = 0
    flops_before: int = 0
    """Forward FLOPs per token of linears, routers and the experts that a token meets; a multiply-add counts 2."""
    flops_added: int = 0
    body_parameters: int = 0
    """Parameters of the plain model without embeddings and output heads; 0: not counted."""
    reached_parameters: int = 0
    """Body parameters in the plain modules that were swapped."""

    def __str__(self) -> str:
        settings = f" ({', '.join(self.settings)})" if self.settings else ""
        lines = [
            f"{self.method}: {len(self.swapped)} {self.kind}s swapped, {len(self.skipped)} skipped{settings}",
            f"  parameters {_change(self.parameters_before, self.parameters_added)}",
        ]
        if self.kind == "linear":  # by this count others cost nothing, but they are not free
            lines.append(f"  FLOPs per token in linears {_change(self.flops_before, self.flops_added)}")
        elif self.flops_added:
            lines.append(f"  FLOPs per token + {self.flops_added:,}")
        if self.body_parameters:
            share = 100 * self.reached_parameters / self.body_parameters
            lines.append(f"  reaches {share:.2f} % of the body's {self.body_parameters:,} parameters")
        lines += [f"  swapped {row}" for row in folded({name: self.details.get(name, "") for name in self.swapped})]
        lines += [f"  skipped {row}" for row in folded(self.skipped)]
        return "\n".join(lines)


def measure_plain(report: AugmentReport, model: nn.Module, names: Iterable[str]) -> None:
    """Count parameters, FLOPs of linears and experts, and the share of the body in `names`, of the plain model.

    The body is all but embeddings and output heads.
    """
    kinds = (linear_method, is_linear, expert_tensors, is_router)
    counted = (each for each in model.modules() if any(kind(each) for kind in kinds))
    report.parameters_before = sum(parameter.numel() for parameter in model.parameters())
    report.flops_before = sum(own_flops(each, model) for each in counted)
    if report.kind == "linear":
        heads = output_head_names(model)
        ends = (each for name, each in model.named_modules() if isinstance(each, nn.Embedding) or name in heads)
        outside = {id(parameter) for module in ends for parameter in module.parameters(recurse=False)}
        reached = {id(each): each.numel() for name in names for each in model.get_submodule(name).parameters()}
        report.body_parameters = sum(each.numel() for each in model.parameters() if id(each) not in outside)
        report.reached_parameters = sum(reached.values())


def _change(before: int, added: int) -> str:
    share = f"{100 * added / before:+.2f} %" if before else "n/a"
    return f"{before:,} {'-' if added < 0 else '+'} {abs(added):,} ({share})"


def folded(rows: Mapping[str, str]) -> list[str]:
    """Return "name x 12: why" for each, the layers' numbers folded to ranges."""
    number = re.compile(r"\.(\d+)(?=\.|$)")
    groups: dict[tuple[str, str], list[list[int]]] = {}
    for name, why in rows.items():
        groups.setdefault((number.sub(".{}", name), why), []).append([int(each) for each in number.findall(name)])
    return [
        name.format(*(_ranges(sorted(set(numbers))) for numbers in zip(*found, strict=True)))
        + (f" x {len(found)}" if len(found) > 1 else "")
        + (f": {why}" if why else "")
        for (name, why), found in groups.items()
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """Return "0-3,7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def own_flops(module: nn.Module, model: nn.Module) -> int:
    """Return the forward FLOPs per token of a module's products, without those of modules inside it."""
    if (method := method_of_layer(module)) is not None:
        plain = method.plain(module)
        experts = _expert_flops(module, model) if projections(module) else 0
        return method.flops(module) + (plain.flops if plain else 0) + experts
    if expert_tensors(module):
        return _expert_flops(module, model)
    if isinstance(module, nn.MultiheadAttention):
        # It reads these tensors itself and never calls its out_proj, whose weight is counted there.
        own = [module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
        return 2 * sum(weight.numel() for weight in own if weight is not None)
    patches = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.kernel_size == module.stride
    matrix = patches or is_router(module) or isinstance(module, nn.Linear | Conv1D)
    return 2 * module.weight.numel() if matrix else 0  # type: ignore[operator]


def is_router(module: nn.Module) -> bool:
    """Return whether a module of transformers' is a router of experts with a weight (experts, d) of its own."""
    weight = module._parameters.get("weight")
    return "Router" in type(module).__name__ and weight is not None and weight.ndim == 2


def _expert_flops(module: nn.Module, model: Any) -> int:
    """Return the FLOPs of the experts that a token goes through; 0 where nothing says how many."""
    if (active := active_experts(module, model)) is None:
        return 0
    flops = 0.0
    for each in expert_tensors(module).values():  # LongCat-Flash has rows for experts that are the identity too
        held = each.shape[0] if each.ndim == 3 else expert_count(module)
        count = expert_count(module) if projections(module) else held
        flops += 2 * min(active, count) * (each.numel() // held)
    return round(flops)
