"""Which modules of a model are swapped, by rules; reports what was swapped and what was left."""

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from .budget import config_within
from .errors import UserError
from .layers import (
    METHODS,
    SAVED_METHODS,
    Method,
    config_from_dict,
    config_to_dict,
    method_of_config,
    method_of_layer,
)
from .layers.swapping import replace_modules

after_augment: list[Callable[[nn.Module, dict[str, Any]], None]] = []
"""Called with (model, entry) once a model was augmented. `hub` adds the one that makes it saveable."""

Patterns = str | Sequence[str] | None

# Where the model cannot tell which linear is its output head, these names do.
_HEAD_NAMES = re.compile(r"(.*\.)?(lm_head|embed_out|output_projection|unembed|head|classifier|score|qa_outputs)")


@dataclass
class AugmentReport:
    """What `augment` did. `print(report)` gives the readable form."""

    method: str
    config: Any
    swapped: list[str] = field(default_factory=list)
    """Names of the modules that were swapped, in the model's order."""
    left: dict[str, str] = field(default_factory=dict)
    """Modules the method could take but did not, and why."""
    parameters_before: int = 0
    parameters_added: int = 0
    flops_before: int = 0
    """Forward FLOPs per token of all linears; a multiply-add counts 2."""
    flops_added: int = 0

    def __str__(self) -> str:
        lines = [
            f"{self.method}: {len(self.swapped)} linears swapped, {len(self.left)} left{self._settings()}",
            f"  parameters {_change(self.parameters_before, self.parameters_added)}",
            f"  FLOPs per token in linears {_change(self.flops_before, self.flops_added)}",
        ]
        lines += [f"  swapped {name}{times}" for name, times in _grouped(self.swapped)]
        lines += [f"  left    {name}{times}: {why}" for name, times, why in _grouped_left(self.left)]
        return "\n".join(lines)

    def _settings(self) -> str:
        found = [f"init: {self.config.init}"] if hasattr(self.config, "init") else []
        if getattr(self.config, "share_down", "none") != "none":
            found.append(f"one down projection for each {self.config.share_down}")
        if getattr(self.config, "fuse_shared_inputs", False):
            found.append("layers of one input together")
        return f" ({', '.join(found)})" if found else ""


def augment(
    model: nn.Module,
    config: Any,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    select: Collection[str] | None = None,
    budget: str | None = None,
    fuse_shared_inputs: bool = False,
    verbose: bool = True,
) -> AugmentReport:
    """Swaps a model's linears, in place, for a method's layers.

    Every `nn.Linear` and transformers `Conv1D` is taken, except the output head (anything outside a
    transformers model's backbone, whatever is tied to an embedding, and what is named like a head) and, unless
    `include` names it, what another method has taken already or this one has no use for.
    Checks come first: when an error is raised, the model is as it was. A method that does away with trained
    weights (of a model that was loaded) warns of it.

    Args:
        model: any module; a transformers model also becomes saveable with its branches.
        config: a method's config, e.g. `NobleConfig(rank=64)`.
        include: regular expression(s) that a module's whole name must match; default: the method's own choice,
            mostly all.
        exclude: regular expression(s) of names to leave alone.
        select: whole names of the only linears to take, e.g. of `analysis.importance.select_layers`.
        budget: "5%" (of the model's parameters) or "5% flops" (of its linears, per token): the ranks are then as high
            as that allows, the same share of each layer's width (`rank_ratio`), in place of the config's.
        fuse_shared_inputs: NOBLE's query, key and value, and gate and up, projections are computed together, as with
            that field of its config.
        verbose: print the report.

    Returns:
        What was swapped and what was left, with parameters and FLOPs.

    Raises:
        UserError: a pattern or a name matches nothing, a budget cannot be met, nothing is left to swap, the rank
            does not fit, a target is frozen, quantized, hooked, parametrized, or augmented already.
    """
    method = method_of_config(config)
    if method is None:
        known = ", ".join(sorted(each.config_class.__name__ for each in METHODS.values()))
        raise UserError(f"{type(config).__name__} is not the config of a method; use one of {known}")
    if fuse_shared_inputs:
        if not hasattr(config, "fuse_shared_inputs"):
            raise UserError(f"{method.name} has no layers to compute together; leave fuse_shared_inputs out")
        config = replace(config, fuse_shared_inputs=True)
    if getattr(config, "init", None) == "auto":
        config = replace(config, init="pretrained" if _was_loaded(model) else "scratch")

    report = AugmentReport(method=method.name, config=config)
    names = _choose(model, method, config, include, exclude, report, select)
    report.parameters_before = sum(parameter.numel() for parameter in model.parameters())
    report.flops_before = sum(_linear_flops(module) for module in model.modules())
    if budget is not None:
        modules = {name: model.get_submodule(name) for name in names}
        within = config_within(budget, method, config, modules, report.parameters_before, report.flops_before)
        report.config = config = within
    if method.settle is not None:
        config = report.config = method.settle(model, config, names)
    for name in names:
        _check(name, model.get_submodule(name), model.get_submodule(name.rpartition(".")[0]), method, config)
    if method.plain is not None and not method.wraps and _was_loaded(model):
        warnings.warn(
            f"{method.name} puts new, random weights in the place of {len(names)} trained ones; train the model anew",
            stacklevel=2,
        )

    layers = _swap(model, method, config, names)
    for layer in layers:
        layer.reset_parameters()  # type: ignore[operator]
    report.swapped = names
    report.parameters_added = sum(p.numel() for p in model.parameters()) - report.parameters_before
    report.flops_added = sum(method.flops(layer) for layer in layers)

    entry = {"method": method.name, "config": config_to_dict(config), "modules": names}
    for hook in after_augment:
        hook(model, entry)
    if verbose:
        print(report)
    return report


def apply_saved(model: nn.Module, entries: Sequence[Mapping[str, Any]]) -> None:
    """Puts the layers of saved entries back into a freshly built plain model, by exact names.

    New tensors are drawn by the layers' own init, except on the meta device.

    Args:
        model: the plain model, real or meta.
        entries: dicts of "method", "config" and "modules", as `augment` hands to `after_augment`.

    Raises:
        UserError: an unknown method or field, or a module that is not there.
    """
    planned = []
    for entry in entries:
        method = SAVED_METHODS.get(entry["method"])
        if method is None:
            raise UserError(
                f"unknown method {entry['method']!r} in the model's config; this version knows "
                f"{', '.join(SAVED_METHODS)}: update nonlinear-lowrank"
            )
        config = config_from_dict(method.config_class, entry["config"])
        for name in entry["modules"]:
            try:
                module = model.get_submodule(name)
            except AttributeError as error:
                raise UserError(f"the config names a module {name!r} that this model does not have") from error
            if not method.is_target(module):
                raise UserError(f"the config puts {method.name} at {name!r}, which is a {type(module).__name__}")
            method.check(name, module, config)
        planned.append((method, config, list(entry["modules"])))
    for method, config, names in planned:
        for layer in _swap(model, method, config, names):
            if not any(parameter.is_meta for parameter in layer.parameters()):
                layer.reset_parameters()  # type: ignore[operator]


@contextmanager
def branches_disabled(model: nn.Module) -> Iterator[nn.Module]:
    """Inside it every branch of the model is switched off: linears give their dense part alone.

    Raises:
        UserError: the model has no branches.
    """
    layers = [module for module in model.modules() if hasattr(module, "branch_enabled")]
    if not layers:
        raise UserError("the model has no branches to disable; augment it first")
    before = [layer.branch_enabled for layer in layers]
    try:
        for layer in layers:
            layer.branch_enabled = False  # type: ignore[assignment]
        yield model
    finally:
        for layer, enabled in zip(layers, before, strict=True):
            layer.branch_enabled = enabled


def output_head_names(model: nn.Module) -> dict[str, str]:
    """Names of linears that produce the model's output, with the reason: {name: why}."""
    heads = {}
    backbone = getattr(model, "base_model", None)
    inside = None
    if isinstance(backbone, nn.Module) and backbone is not model:
        inside = {id(module) for module in backbone.modules()}
    get_output = getattr(model, "get_output_embeddings", None)
    output = get_output() if callable(get_output) else None
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tied = {id(module.weight) for module in embeddings}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or not _has_weight(module):
            continue
        if id(module._parameters.get("weight")) in tied:
            heads[name] = "tied to an embedding"
        elif module is output or (inside is not None and id(module) not in inside):
            heads[name] = "output head"
        elif inside is None and _HEAD_NAMES.fullmatch(name):
            heads[name] = "named like an output head"
    return heads


def _choose(
    model: nn.Module,
    method: Method,
    config: Any,
    include: Patterns,
    exclude: Patterns,
    report: AugmentReport,
    select: Collection[str] | None = None,
) -> list[str]:
    """Names to swap. Fills `report.left`."""
    unnamed = include is None and select is None
    _check_selected(model, select)
    included, excluded = _compile(method.include if unnamed else include, "include"), _compile(exclude, "exclude")
    heads = output_head_names(model)
    used: set[re.Pattern[str]] = set()
    chosen, shared = [], _used_without_forward(model)
    wrapped = {name: found.name for name, module in model.named_modules() if (found := _wrapping(module)) is not None}
    for name, module in model.named_modules():
        if not name or not (_is_linear(module) or _linear_method(module)):
            continue
        if name.rpartition(".")[0] in wrapped:
            report.left[name] = f"is inside a layer of {wrapped[name.rpartition('.')[0]]}, which comes last"
            continue
        if included is not None:
            hits = [pattern for pattern in included if pattern.fullmatch(name)]
            used.update(hits)
            if not hits:
                report.left[name] = f"not named like a target of {method.name}" if unnamed else "not in include"
                continue
        if excluded is not None:
            hits = [pattern for pattern in excluded if pattern.fullmatch(name)]
            used.update(hits)
            if hits:
                report.left[name] = "in exclude"
                continue
        if select is not None and name not in select:
            report.left[name] = "not in select"
        elif name in heads:
            report.left[name] = heads[name]
        elif name in shared:
            report.left[name] = shared[name]
        elif unnamed and (why := _better_left(module, method, config)) is not None:
            report.left[name] = why
        else:
            chosen.append(name)
    for pattern in [*(included or []), *(excluded or [])]:
        if pattern not in used and not (unnamed and pattern in (included or [])):
            raise UserError(
                f"the pattern {pattern.pattern!r} matches no linear's whole name; "
                "print the names with: [n for n, m in model.named_modules()]"
            )
    if not chosen:
        why = "; ".join(sorted(set(report.left.values()))) or "it has no linears"
        if unnamed and method.include is not None:
            why += "; name the targets with include="
        raise UserError(f"nothing to swap in this {type(model).__name__}: {why}")
    return chosen


def _check_selected(model: nn.Module, select: Collection[str] | None) -> None:
    """A name that is no linear's is an error: a choice that is made by scores must not shrink unseen."""
    if isinstance(select, str):
        raise UserError(f"select is a list of whole names, not {select!r}; patterns go to include=")
    modules = dict(model.named_modules()) if select is not None else {}
    for name in select or ():
        if name not in modules or not (_is_linear(modules[name]) or _linear_method(modules[name])):
            raise UserError(f"select has {name!r}, which is no linear of this model")


def _better_left(module: nn.Module, method: Method, config: Any) -> str | None:
    """Why a module that the user did not name is not swapped."""
    before = method_of_layer(module)
    if before is not None:
        return f"is {before.name} already" if before is not method and not method.wraps else None
    return method.leave(module, config) if method.leave and method.is_target(module) else None


def _check(name: str, module: nn.Module, parent: nn.Module, method: Method, config: Any) -> None:
    before = method_of_layer(module)
    if before is not None and (before is method or not method.wraps):
        raise UserError(
            f"{name} is augmented with {before.name} already; start from the plain model, or leave it out with exclude="
        )
    # A layer of another method, which this one goes around, was looked at when it was put there.
    weight = getattr(module, "weight", None) if before is None else torch.empty(0, requires_grad=True)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or _is_wrapped(weight):
        if type(getattr(weight, "data", None)).__name__ == "DTensor":
            raise UserError(f"{name} is split over devices; augment the model first, and split it then")
        raise UserError(f"{name} is quantized; augment the unquantized model, or use an adapter instead")
    if not method.is_target(module):
        raise UserError(
            f"{name} is a {type(module).__module__}.{type(module).__name__}, which {method.name} cannot replace; "
            "leave it out with exclude="
        )
    if not weight.requires_grad:
        raise UserError(f"{name} is frozen; unfreeze it (requires_grad_(True)), or use an adapter instead")
    if is_parametrized(module) or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise UserError(f"{name} has hooks or parametrizations, which a swap would lose; augment the model first")
    if method.check_parent is not None:
        method.check_parent(name, module, parent)
    method.check(name, module, config)


def _swap(model: nn.Module, method: Method, config: Any, names: Sequence[str]) -> list[nn.Module]:
    """Builds every layer, then puts them in place, wherever a module is reachable by several names."""
    if not names:
        return []
    modules = {name: model.get_submodule(name) for name in names}
    if method.build_all is not None:
        layers = method.build_all(modules, config)
    else:
        layers = {name: method.build(name, module, config) for name, module in modules.items()}
    built = {module: layers[name] for name, module in modules.items()}
    replace_modules(model, built)
    return list(built.values())


def _compile(patterns: Patterns, option: str) -> list[re.Pattern[str]] | None:
    if patterns is None:
        return None
    try:
        return [re.compile(pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns)]
    except re.error as error:
        raise UserError(f"{option}={patterns!r} is not a regular expression: {error}") from error


def _was_loaded(model: nn.Module) -> bool:
    """transformers notes where a loaded model came from."""
    return bool(getattr(getattr(model, "config", None), "_name_or_path", ""))


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or any(
        method.is_target(module) for method in METHODS.values() if not list(module.children())
    )


def _linear_method(module: nn.Module) -> Method | None:
    """The method that put this layer in a linear's place."""
    method = method_of_layer(module)
    return method if method and method.name in METHODS else None


def _wrapping(module: nn.Module) -> Method | None:
    """The method of a layer that goes around another one."""
    method = method_of_layer(module)
    return method if method is not None and method.wraps else None


def _is_wrapped(weight: torch.Tensor) -> bool:
    """Tensor subclasses hold quantized or sharded data (torchao, DTensor)."""
    return type(weight.data) is not torch.Tensor


def _used_without_forward(model: nn.Module) -> dict[str, str]:
    """torch's attention reads its out_proj's tensors and never calls it."""
    return {
        f"{name}.out_proj" if name else "out_proj": "nn.MultiheadAttention bypasses its forward"
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    }


def _linear_flops(module: nn.Module) -> int:
    method = _linear_method(module)
    if not _is_linear(module) and method is None:
        return 0
    if method is not None and method.plain is not None:
        return method.plain(module).flops + method.flops(module)
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return 2 * weight.numel() + (method.flops(module) if method else 0)


def _has_weight(module: nn.Module) -> bool:
    """Without reading it: a property may compute it."""
    return module._parameters.get("weight") is not None or hasattr(type(module), "weight")


def _change(before: int, added: int) -> str:
    share = f"{100 * added / before:+.2f} %" if before else "n/a"
    return f"{before:,} {'-' if added < 0 else '+'} {abs(added):,} ({share})"


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _grouped(names: Sequence[str]) -> list[tuple[str, str]]:
    """Layer numbers folded to *: [(pattern, " x 12")]."""
    counts: dict[str, int] = {}
    for name in names:
        counts[_pattern(name)] = counts.get(_pattern(name), 0) + 1
    return [(pattern, f" x {count}" if count > 1 else "") for pattern, count in counts.items()]


def _grouped_left(left: Mapping[str, str]) -> list[tuple[str, str, str]]:
    counts: dict[tuple[str, str], int] = {}
    for name, why in left.items():
        key = (_pattern(name), why)
        counts[key] = counts.get(key, 0) + 1
    return [(name, f" x {count}" if count > 1 else "", why) for (name, why), count in counts.items()]
