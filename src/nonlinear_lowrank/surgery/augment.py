"""Swap a model's modules for a method's layers, in place; report what was swapped and skipped."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import (
    Method,
    all_methods,
    config_from_dict,
    method_named,
    method_of_config,
    method_of_layer,
)
from nonlinear_lowrank.methods.experts import note_active_experts, tell_rows
from nonlinear_lowrank.methods.matrix import is_hooked, replace_modules

from .attention import unfused
from .report import AugmentReport, measure_plain
from .split import apply_splits, check_split, saved_splits, split_linears
from .targets import HOOKED, Patterns, choose_found, choose_linears, expert_tensors, holds_numbers

# By name, so that FSDP1 and dynamo need not be imported.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
_COMPILED = "OptimizedModule"

_NORMS = ("layernorm", "rmsnorm", "groupnorm", "instancenorm", "batchnorm", "affine")  # the last: ResMLP's

after_augment: list[Callable[[nn.Module, dict[str, Any]], None]] = []
"""Hooks, called with (model, entry) once a model was augmented; `hub` adds the one that makes it saveable."""


def augment(
    model: nn.Module,
    config: Any,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    select: Collection[str] | None = None,
    budget: str | None = None,
    fuse_shared_inputs: bool = False,
    split_fused: bool = False,
    verbose: bool = True,
) -> AugmentReport:
    """Swap a model's linears, or activations, in place, for a method's layers.

    With a `RationalConfig` these are the activation modules, except those of poolers and heads unless `include` names
    them, and each starts as its own function. With any other config they are every `nn.Linear` and transformers
    `Conv1D` but the output head (anything outside a transformers model's backbone or in timm's `get_classifier()`,
    tied to an embedding, or named like a head) and, unless `include` names it, what another method has replaced or this
    one has no use for. An `nn.MultiheadAttention` counts as its linears q_proj, k_proj, v_proj and out_proj
    (`surgery.attention`). Checks come first: when an error is raised, the model is as it was. A method that discards
    loaded weights warns of it.

    Args:
        model: any module; a transformers model, or one inside it, also becomes saveable with its branches.
        config: a method's config, e.g. `NobleConfig(rank=64)`.
        include: regular expression(s) that a module's whole name must match; default: the method's own choice,
            mostly all.
        exclude: regular expression(s) of names to skip.
        select: whole names of the only linears to swap, e.g. of `analysis.importance.select_layers`.
        budget: "5%" (of the model's parameters) or "5% flops" (of its linears, per token): the ranks are then as high
            as that allows, the same share of each layer's width (`rank_ratio`), in place of the config's.
        fuse_shared_inputs: NOBLE's query, key and value, and gate and up, projections are computed together, as with
            that field of its config.
        split_fused: fused projections whose parts can be told (`qkv_proj`, `c_attn`, `gate_up_proj`) become a linear a
            part, `qkv_proj.q_proj` and so on, which are the names for the other options (`surgery.split`). Files of
            the model then have these names as well.
        verbose: print the report.

    Returns:
        What was swapped and what was skipped, with parameters and FLOPs.

    Raises:
        UserError: a pattern or a name matches nothing, a budget cannot be met, there is nothing to swap or to split,
            the rank does not fit or groups do not divide the width, a target is frozen, quantized, hooked (also by
            accelerate), not called by the model's code, or augmented already, its shape is not known yet, or the model
            is wrapped by DDP or FSDP1.
    """
    method = known_method(config)
    if not isinstance(model, nn.Module):
        raise UserError(f"augment takes a module, got {type(model).__name__}")
    if torch.is_inference_mode_enabled():
        raise UserError("tensors made inside torch.inference_mode() cannot be trained; augment outside it")
    if any(map(is_lazy, model.parameters())):
        raise UserError("the model has lazy layers, whose shapes are not known yet; run one batch through it first")
    if wrapper := next((kind for each in model.modules() if (kind := type(each).__name__) in _WRAPPERS), None):
        raise UserError(f"the model is inside {wrapper}, which would not see new tensors; augment it, then wrap it")
    if fuse_shared_inputs:
        try:
            config = replace(config, fuse_shared_inputs=True)
        except TypeError as error:
            raise UserError(f"{method.name} has no layers to compute together; omit fuse_shared_inputs") from error
    config = method.initial(config, pretrained=(trained := _was_trained(model)))

    note_active_experts(model)
    report = AugmentReport(method=method.name, config=config, kind=method.kind)
    found = method.find(model, config)
    with unfused(model, found is None) as fused, split_linears(model, found is None and split_fused) as whole:
        if found is None:
            # With a budget there is a rank for every linear but those of width 1.
            lowest = config if budget is None or not method.budgeted else replace(config, rank_ratio=1e-9)
            names, report.skipped = choose_linears(model, method, lowest, include, exclude, select)
            report.skipped |= fused
            if split_fused:
                check_split(names, model, whole)
        else:
            for option, given in (("select", select), ("budget", budget), ("split_fused", split_fused or None)):
                if given is not None:
                    raise UserError(f"{method.name} replaces {method.kind}s, and {option}= is for linears; omit it")
            names, report.skipped = choose_found(model, method, found, include, exclude)
        measure_plain(report, model, names)
        if budget is not None:
            from .budget import config_within

            modules = {name: model.get_submodule(name) for name in names}
            config = config_within(budget, method, config, modules, report.parameters_before, report.flops_before)
        config = report.config = method.complete(model, config, names)
        configs = {name: config if found is None else found.targets[name].config for name in names}
        for name in names:
            _check(name, model, method, configs[name])
        if trained and method.discards(config):
            places = f"in the place of {len(names)} trained ones"
            warnings.warn(f"{method.name} puts new, random weights {places}; train the model again", stacklevel=2)

        layers = _swap(model, method, configs)
    for name, layer in layers.items():
        parent: Any = model.get_submodule(name.rpartition(".")[0])
        if hasattr(parent, "fuse_projections"):  # diffusers', of weights
            parent.fuse_projections = _refuse_to_fuse
        if found is not None and (device := found.targets[name].device) is not None:
            layer.to(device)
        layer.reset_parameters()  # type: ignore[operator]
    configs = {name: method.saved_config(layers[name], each) for name, each in configs.items()}
    report.settings = method.settings(config, layers.values())
    report.swapped = names
    report.details = {name: f"stays whole: {why}" for name, why in whole.items() if name in layers}
    if found is not None:
        report.details = {name: found.targets[name].details for name in names}
    report.parameters_added = sum(p.numel() for p in model.parameters()) - report.parameters_before
    report.flops_added = sum(method.flops(layer) for layer in layers.values())

    for entry in layer_entries(configs):
        if splits := saved_splits(model, entry["modules"]):
            entry["split"] = splits
        for hook in after_augment:
            hook(model, entry)
    if verbose:
        print(report)
    return report


def _refuse_to_fuse(*_args: Any, **_options: Any) -> None:
    raise UserError("fuse_qkv_projections would drop the branches; fuse before augment, or run the model unfused")


def known_method(config: Any) -> Method:
    """Return the method of a config; raise UserError where it has none."""
    if (method := method_of_config(config)) is None:
        known = ", ".join(sorted(each.config_class.__name__ for each in all_methods().values()))
        if isinstance(config, type):
            raise UserError(f"a config itself is needed, not its class: {config.__name__}(...)")
        fix = "give it to peft.get_peft_model" if hasattr(config, "peft_type") else f"use one of {known}"
        raise UserError(f"{type(config).__name__} is not the config of a method; {fix}")
    return method


def layer_entries(configs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an entry of "method", "config" and "modules" for each distinct config among those of layers by name."""
    entries: list[dict[str, Any]] = []
    for name, config in configs.items():
        kind = {"method": config.method, "config": asdict(config)}
        entry = next((each for each in entries if {**each, **kind} == each), None)
        if entry is None:
            entries.append(entry := {**kind, "modules": []})
        entry["modules"].append(name)
    return entries


def read_entry(entry: Mapping[str, Any]) -> tuple[Method, Any]:
    """Return the method of a saved entry and its config; raise UserError where this version does not know them."""
    method = method_named(entry["method"])
    if method is None:
        raise UserError(
            f"unknown method {entry['method']!r} in the model's config; this version knows "
            f"{', '.join(all_methods())}: update nonlinear-lowrank"
        )
    return method, config_from_dict(method.config_class, entry["config"])


def apply_saved(model: nn.Module, entries: Sequence[Mapping[str, Any]]) -> list[nn.Module]:
    """Put the layers of saved entries (see `after_augment`) back into a plain model, real or meta; return them.

    The caller draws what no file holds (`reset_parameters()`). An unknown method or field raises UserError.
    """
    note_active_experts(model)
    planned = []
    for entry in entries:
        method, config = read_entry(entry)
        apply_splits(model, entry.get("split", ()))
        for name in entry["modules"]:
            module = model.get_submodule(name)
            if not method.is_target(module):
                raise UserError(f"the config puts {method.name} at {name!r}, which is a {type(module).__name__}")
            method.check(name, module, config)
        planned.append((method, dict.fromkeys(entry["modules"], config)))
    return [layer for method, configs in planned for layer in _swap(model, method, configs).values()]


@contextmanager
def branches_disabled(model: nn.Module) -> Iterator[nn.Module]:
    """Disable every branch of the model inside a `with` block: layers compute their dense part alone.

    Layers that replace a plain module (sine low-rank weights, nonlinear queries, rational activations) have no branch
    and do not change.

    Raises:
        UserError: the model has no branches.
    """
    layers: list[Any] = [
        module for module in model.modules() if method_of_layer(module) and hasattr(module, "branch_enabled")
    ]
    if not layers:
        raise UserError("the model has no branches to disable: augment it with a method that adds some, such as noble")
    before = [layer.branch_enabled for layer in layers]
    try:
        for layer in layers:
            layer.branch_enabled = False
        yield model
    finally:
        for layer, enabled in zip(layers, before, strict=True):
            layer.branch_enabled = enabled


def _check(name: str, model: nn.Module, method: Method, config: Any) -> None:
    module, parent = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
    if method.kind == "linear":
        _check_linear(name, module, method)
    if is_hooked(module, plain=method_of_layer(module) is None):
        raise UserError(f"{name} {HOOKED}")
    if type(parent).__name__ == _COMPILED:
        raise UserError(f"{name} was compiled on its own; augment the model first, and call torch.compile then")
    if any(each.is_inference() for each in module.parameters()):
        raise UserError(f"{name} was made inside torch.inference_mode() and cannot be trained; make the model outside")
    method.check_parent(name, module, parent)
    method.check(name, module, config)


def _check_linear(name: str, module: nn.Module, method: Method) -> None:
    if (before := method_of_layer(module)) is not None:
        if before is method or not method.wraps:
            fix = "start from the plain model, or leave it out with exclude="
            raise UserError(f"{name} is augmented with {before.name} already; {fix}")
        return  # this method wraps the layer, which was checked when it was put there
    weights: list[Any] = [*expert_tensors(module).values()] or [getattr(module, "weight", None)]
    if any(type(getattr(weight, "data", None)).__name__ == "DTensor" for weight in weights):
        raise UserError(f"{name} is split over devices; augment the model first, and split it then")
    if not all(map(holds_numbers, weights)):
        raise UserError(f"{name} is quantized; augment the unquantized model, or use an adapter instead")
    if not method.is_target(module):
        kind = f"{type(module).__module__}.{type(module).__name__}"
        raise UserError(f"{name} is a {kind}, which {method.name} cannot replace; leave it out with exclude=")
    if not all(weight.requires_grad for weight in weights):
        raise UserError(f"{name} is frozen; unfreeze it (requires_grad_(True)), or use an adapter instead")


def _swap(model: nn.Module, method: Method, configs: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Build every layer, then put them in place; return {name: layer}.

    A linear that is reachable by several names is one layer in all of these places. A method that finds its places
    itself has a layer for each.
    """
    if not configs:
        return {}
    modules = {name: model.get_submodule(name) for name in configs}
    layers: dict[str, nn.Module]
    if method.kind == "linear":
        layers = dict(method.build_all(modules, next(iter(configs.values()))))
        replace_modules(model, {module: layers[name] for name, module in modules.items()})
        return layers
    layers = {name: method.build(name, module, configs[name]) for name, module in modules.items()}
    for name, layer in layers.items():
        path, _, child = name.rpartition(".")
        setattr(parent := model.get_submodule(path), child, layer)
        if getattr(layer, "num_experts", None) is not None:
            tell_rows(model, parent)
    return layers


def _was_trained(model: nn.Module) -> bool:
    """Return whether a part of the model has weights to keep: from_pretrained made it, or training changed a norm.

    A new norm's weights are all one number, but for a BatchNorm's, which MobileViT draws; it counts its batches. What
    else loads a checkpoint (load_state_dict, timm) leaves no mark.
    """
    return any(map(_was_loaded, model.modules())) or any(
        any(kind in type(module).__name__.lower() for kind in _NORMS)
        and type(weight := _scale_of(module)) is nn.Parameter  # a fake one, or a shard, has no values
        and weight.numel() == max(weight.shape, default=0) > 1  # a vector
        and not weight.is_meta
        and ((batches := getattr(module, "num_batches_tracked", None)) is None or bool(batches > 0))
        and bool(weight.float().amin() < weight.float().amax())  # float8 has neither
        for module in model.modules()
    )


def _scale_of(norm: nn.Module) -> Any:
    return next((each for name in ("weight", "alpha") if (each := getattr(norm, name, None)) is not None), None)


def _was_loaded(module: nn.Module) -> bool:
    """Return whether from_pretrained made the module.

    diffusers notes in a config where its weights came from. transformers notes where the config came from, and a model
    newly drawn from it has it too. What was loaded is also marked: each tensor, and, since copies of a model lose those
    marks, the model itself.
    """
    config = getattr(module, "config", None)
    if not getattr(config, "_name_or_path", ""):
        return False
    return (
        isinstance(config, dict)
        or any(getattr(parameter, "_is_hf_initialized", False) for parameter in module.parameters())
        or any("_weight_conversions" in vars(each) for each in module.modules())
    )
