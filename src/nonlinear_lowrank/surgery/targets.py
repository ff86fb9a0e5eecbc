"""Choice of the modules that a method replaces, by rules, patterns and names, with reasons for those skipped."""

import re
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import Findings, Method, method_of_layer
from nonlinear_lowrank.methods.forward_code import bypassed_linears
from nonlinear_lowrank.methods.matrix import is_plain_linear

Patterns = str | Sequence[str] | None

# For models that do not say which linear is their output head.
_HEAD_NAMES = re.compile(r"(.*\.)?(lm_head|embed_out|output_projection|unembed|head|classifier|score|qa_outputs)")
_POOLER = re.compile(r"(.*\.)?pooler(\..*)?")
_EACH_TOKEN = re.compile(r".*(For(MaskedLM|CausalLM|TokenClassification|QuestionAnswering)|LMHeadModel)")
HELD_AS_TENSORS = "holds weights as 3-D parameters, which are no linears"


def output_head_names(model: nn.Module) -> dict[str, str]:
    """Return linears that produce the model's output, with the reason: {name: why}."""
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


class _Filter:
    """`include` and `exclude`; tracks which of their patterns matched something.

    Raises:
        UserError: a pattern is no regular expression.
    """

    def __init__(self, include: Patterns, exclude: Patterns) -> None:
        self._included, self._excluded = _compile(include, "include"), _compile(exclude, "exclude")
        self._used: set[re.Pattern[str]] = set()

    def why_skipped(self, name: str) -> str:
        """Return why the patterns skip a name; empty where they do not."""
        if self._included is not None and not self._hits(self._included, name):
            return "not in include"
        return "in exclude" if self._hits(self._excluded or [], name) else ""

    def unused(self) -> str | None:
        """Return the first pattern that matched nothing, or None."""
        patterns = [*(self._included or []), *(self._excluded or [])]
        return next((each.pattern for each in patterns if each not in self._used), None)

    def _hits(self, patterns: Iterable[re.Pattern[str]], name: str) -> bool:
        hits = [pattern for pattern in patterns if pattern.fullmatch(name)]
        self._used.update(hits)
        return bool(hits)


def choose_linears(
    model: nn.Module,
    method: Method,
    config: Any,
    include: Patterns,
    exclude: Patterns,
    select: Collection[str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the names of the linears to swap, and those that are skipped, with the reason.

    Raises:
        UserError: a pattern or a name matches nothing, one names a linear whose forward is never called, or
            there is nothing to swap.
    """
    unnamed = include is None and select is None
    _check_selected(model, select)
    given, own = _Filter(include, exclude), _Filter(method.include if unnamed else None, None)
    heads, bypassed = output_head_names(model), bypassed_linears(model)
    chosen: list[str] = []
    skipped: dict[str, str] = {}
    wrapped = {name: found.name for name, module in model.named_modules() if (found := _wrapping(module)) is not None}
    inside = dense_parts(model)
    for name, module in model.named_modules():
        if expert_tensors(module) and method_of_layer(module) is None:
            skipped[name] = HELD_AS_TENSORS
        if not name or module in inside or not (is_linear(module) or linear_method(module)):
            continue
        if name.rpartition(".")[0] in wrapped:
            skipped[name] = f"is inside a layer of {wrapped[name.rpartition('.')[0]]}, which comes last"
        elif own.why_skipped(name):
            skipped[name] = f"not named like a target of {method.name}"
        elif why := given.why_skipped(name):
            skipped[name] = why
        elif select is not None and name not in select:
            skipped[name] = "not in select"
        elif name in heads:
            skipped[name] = heads[name]
        elif unnamed and is_unread_pooler(model, name):
            skipped[name] = "a pooler that the head does not read"
        elif name in bypassed and unnamed:
            skipped[name] = bypassed[name].why
        elif name in bypassed and bypassed[name].refused:
            raise UserError(f"{name} would have no effect: {bypassed[name].why}; leave it out with exclude=")
        elif unnamed and (better := _better_skipped(module, method, config)) is not None:
            skipped[name] = better
        else:
            if name in bypassed:
                warnings.warn(f"{name}: {bypassed[name].why}, and {method.name} does not act there", stacklevel=3)
            chosen.append(name)
    if (unused := given.unused()) is not None:
        raise UserError(
            f"the pattern {unused!r} matches no linear's whole name; "
            "print the names with: [n for n, m in model.named_modules()]"
        )
    if not chosen:
        why = "; ".join(sorted(set(skipped.values()))) or "it has no linears"
        if unnamed and method.include is not None:
            why += "; name the targets with include="
        if any(each.startswith("rank ") for each in skipped.values()):
            why += "; choose a smaller rank"
        raise UserError(f"nothing to swap in this {type(model).__name__}: {why}")
    return chosen, skipped


def choose_found(
    model: nn.Module, method: Method, found: Findings, include: Patterns, exclude: Patterns
) -> tuple[list[str], dict[str, str]]:
    """Return the names to swap among what a method has found itself, and those that are skipped, with the reason.

    Raises:
        UserError: a pattern matches nothing, there is nothing to swap, or a chosen module cannot be swapped.
    """
    given = _Filter(include, exclude)
    chosen: list[str] = []
    skipped: dict[str, str] = {}
    for name, target in found.targets.items():
        why = given.why_skipped(name) or ((target.skipped or target.refused) if include is None else "")
        if why:
            skipped[name] = target.skipped or why
        else:
            chosen.append(name)
    for name in found.skipped:
        given.why_skipped(name)  # marks patterns that match it as used
    skipped |= {name or "the model": why for name, why in found.skipped.items()}
    if (unused := given.unused()) is not None:
        names = sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in (*found.targets, *found.skipped) if name})
        those = f"they are {', '.join(names[:8])}" if names else "the model has none"
        raise UserError(f"the pattern {unused!r} matches no {method.kind}'s whole name; {those}")
    if not chosen:
        reasons = [f"{name} ({why})" for name, why in list(skipped.items())[:5]]
        why = ", ".join(reasons) or f"it has no {method.kind} modules"
        raise UserError(f"nothing to swap in this {type(model).__name__}: {why}")
    for name in chosen:
        if found.targets[name].refused:
            raise UserError(found.targets[name].refused)
    return chosen, skipped


def _check_selected(model: nn.Module, select: Collection[str] | None) -> None:
    """Raise UserError for a name that is no linear's: a choice that is made by scores must not shrink unseen."""
    if isinstance(select, str):
        raise UserError(f"select must be a list of whole names, got {select!r}; pass patterns as include=")
    modules = dict(model.named_modules()) if select is not None else {}
    for name in select or ():
        if name not in modules or not (is_linear(modules[name]) or linear_method(modules[name])):
            raise UserError(f"select has {name!r}, which is no linear of this model")


def _better_skipped(module: nn.Module, method: Method, config: Any) -> str | None:
    """Return why a module that the user did not name is not swapped, or None."""
    before = method_of_layer(module)
    if before is not None:
        return f"is {before.name} already" if before is not method and not method.wraps else None
    if method.is_target(module):
        return method.skip_reason(module, config)
    if holds_numbers(getattr(module, "weight", None)):
        return f"is a {type(module).__name__}, a linear with a forward of its own"
    return None


def _compile(patterns: Patterns, option: str) -> list[re.Pattern[str]] | None:
    if patterns is None:
        return None
    try:
        return [re.compile(pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns)]
    except re.error as error:
        raise UserError(f"{option}={patterns!r} is not a regular expression: {error}") from error


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a plain linear."""
    return isinstance(module, nn.Linear) or is_plain_linear(module)


def linear_method(module: nn.Module) -> Method | None:
    """Return the method that put this layer in a linear's place, or None."""
    method = method_of_layer(module)
    return method if method and method.kind == "linear" else None


def _wrapping(module: nn.Module) -> Method | None:
    """The method of a layer that goes around another one."""
    method = method_of_layer(module)
    return method if method is not None and method.wraps else None


def dense_parts(model: nn.Module) -> set[nn.Module]:
    """Return the plain linears inside layers of methods, which are parts of these and not linears of the model."""
    methods = [(module, method_of_layer(module)) for module in model.modules()]
    return {module.get_submodule(method.dense) for module, method in methods if method and method.dense}


def holds_numbers(weight: Any) -> bool:
    """Return whether a weight is plain floats: tensor subclasses hold quantized or sharded data (torchao, DTensor)."""
    return isinstance(weight, Tensor) and weight.is_floating_point() and type(weight.data) is Tensor


def expert_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own 3-D parameters (E, a, b), by name; none for torch's own layers, such as convolutions.

    A leading 1 marks a token, a position table or the like; numbers along one dimension alone are a scale.
    """
    if type(module).__module__.startswith("torch.nn."):
        return {}
    own = module.named_parameters(recurse=False)
    return {name: each for name, each in own if each.ndim == 3 and each.shape[0] > 1 and max(each.shape[1:]) > 1}


def unreached_experts(model: nn.Module) -> str:
    """Return a clause with the modules that hold experts as tensors and their share of the parameters; empty: none."""
    held = {name: own for name, module in model.named_modules() if (own := expert_tensors(module))}
    if not held:
        return ""
    in_experts = sum(each.numel() for own in held.values() for each in own.values())
    share = in_experts / sum(each.numel() for each in model.parameters())
    names = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in held))
    return f"the experts in {names}, {100 * share:.0f} % of the model's parameters, are 3-D parameters and not linears"


def is_unread_pooler(model: nn.Module, name: str) -> bool:
    """Return whether a module is of a pooler that the head, one for every token, never reads."""
    return bool(_POOLER.fullmatch(name) and _EACH_TOKEN.fullmatch(type(model).__name__))


def _has_weight(module: nn.Module) -> bool:
    """Return whether a module has a weight, without reading it: a property may compute it."""
    return module._parameters.get("weight") is not None or hasattr(type(module), "weight")
