"""The report of `augment`, in numbers and words."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .flops import own_flops
from .targets import expert_tensors, is_linear, linear_method, output_head_names


@dataclass
class AugmentReport:
    """Result of `augment`; `print(report)` gives the readable form."""

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
    """Forward FLOPs per token of all linears and of the experts that a token goes through; a multiply-add counts 2."""
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
        if self.kind == "linear":  # others cost none by this count, which is not to say that they are free
            lines.append(f"  FLOPs per token in linears {_change(self.flops_before, self.flops_added)}")
        if self.body_parameters:
            share = 100 * self.reached_parameters / self.body_parameters
            lines.append(f"  reaches {share:.2f} % of the body's {self.body_parameters:,} parameters")
        lines += [f"  swapped {row}" for row in _grouped({name: self.details.get(name, "") for name in self.swapped})]
        lines += [f"  skipped {row}" for row in _grouped(self.skipped)]
        return "\n".join(lines)


def measure_plain(report: AugmentReport, model: nn.Module, names: Iterable[str]) -> None:
    """Count parameters, FLOPs of linears and experts, and the share of the body in `names`, of the plain model."""
    report.parameters_before = sum(parameter.numel() for parameter in model.parameters())
    report.flops_before = sum(
        own_flops(each, model)
        for each in model.modules()
        if linear_method(each) or is_linear(each) or expert_tensors(each)
    )
    if report.kind == "linear":
        report.body_parameters, report.reached_parameters = _reach(model, names)


def _reach(model: nn.Module, names: Iterable[str]) -> tuple[int, int]:
    """Return the parameters of the body, which is all but embeddings and output heads, and those in these modules."""
    heads = output_head_names(model)
    ends = (each for name, each in model.named_modules() if isinstance(each, nn.Embedding) or name in heads)
    outside = {id(parameter) for module in ends for parameter in module.parameters(recurse=False)}
    reached = {id(each): each.numel() for name in names for each in model.get_submodule(name).parameters()}
    body = sum(each.numel() for each in model.parameters() if id(each) not in outside)
    return body, sum(reached.values())


def _change(before: int, added: int) -> str:
    share = f"{100 * added / before:+.2f} %" if before else "n/a"
    return f"{before:,} {'-' if added < 0 else '+'} {abs(added):,} ({share})"


def _grouped(rows: Mapping[str, str]) -> list[str]:
    """Return rows "name x 12: why", layer numbers folded to *."""
    counts: dict[tuple[str, str], int] = {}
    for name, why in rows.items():
        key = (re.sub(r"\.\d+\.", ".*.", name), why)
        counts[key] = counts.get(key, 0) + 1
    return [
        f"{name}{f' x {count}' if count > 1 else ''}{f': {why}' if why else ''}"
        for (name, why), count in counts.items()
    ]
