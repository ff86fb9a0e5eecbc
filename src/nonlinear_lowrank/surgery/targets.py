"""Choice of the modules that a method replaces, by rules, patterns and names, with reasons for those skipped."""

import dis
import functools
import inspect
import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import Findings, Method, dense_part, method_of_layer
from nonlinear_lowrank.methods.experts import projections
from nonlinear_lowrank.methods.matrix import is_plain_linear

Patterns = str | Sequence[str] | None

# For models that do not say which linear is their output head; the second in models that are not transformers'.
_HEAD_NAMES = re.compile(r"(.*\.)?(lm_head|embed_out|output_projection|unembed|head|classifier|score|qa_outputs)")
_OUTER_HEADS = re.compile(r"fc|proj_out|classifier\.\d+|(heads?|head_dist)(\..*)?")
_POOLER = re.compile(r"(.*\.)?pooler(\..*)?")
_EACH_TOKEN = re.compile(
    r".*(For(MaskedLM|CausalLM|TokenClassification|QuestionAnswering)|LMHeadModel|EncoderDecoderModel)"
)


def outermost_models(model: nn.Module) -> dict[str, nn.Module]:
    """Return the transformers models in a model that are in no other, by name; the model itself if there is none."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # those around a module come before it
        if isinstance(module, PreTrainedModel) and not any(is_within(name, other) for other in found):
            found[name] = module
    return found or {"": model}


def is_within(name: str, other: str) -> bool:
    """Return whether a module is another or inside it, by their names."""
    return not other or f"{name}.".startswith(f"{other}.")


def outside_backbones(model: nn.Module) -> set[int]:
    """Return the ids of all modules of the transformers models in a model that are not in their backbones."""
    found: set[int] = set()
    for part in outermost_models(model).values():
        backbone = getattr(part, "base_model", part)
        if isinstance(backbone, nn.Module):
            found |= {id(module) for module in part.modules()} - {id(module) for module in backbone.modules()}
    return found


def output_head_names(model: nn.Module) -> dict[str, str]:
    """Return linears that produce a model's output, or that of one inside, with the reason: {name: why}."""
    outputs, headed = outside_backbones(model), set[int]()
    for module in model.modules():
        if callable(get_classifier := getattr(module, "get_classifier", None)):  # timm's; of some it is a pair
            found = get_classifier()
            parts = found if isinstance(found, tuple | list) else [found]
            outputs |= {id(each) for part in parts if isinstance(part, nn.Module) for each in part.modules()}
    for part in outermost_models(model).values():
        if callable(get_output := getattr(part, "get_output_embeddings", None)):
            outputs.add(id(get_output()))
        if id(part) in outputs:
            headed |= {id(module) for module in part.modules()}
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    heads, alone = {}, not any(isinstance(module, PreTrainedModel) for module in model.modules())
    for name, module in model.named_modules():
        # A weight is looked for without reading it: a property may compute it.
        weight = module._parameters.get("weight")
        if isinstance(module, nn.Embedding) or (weight is None and not hasattr(type(module), "weight")):
            continue
        if id(weight) in tied:
            heads[name] = "tied to an embedding"
        elif id(module) in outputs:
            heads[name] = "output head"
        elif id(module) not in headed and (_HEAD_NAMES.fullmatch(name) or (alone and _OUTER_HEADS.fullmatch(name))):
            heads[name] = "named like an output head"
    return heads


def _tied_linears(model: nn.Module) -> dict[str, str]:
    """Return modules that share a weight, which layers in their place would not: {name: why}."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and (other := first.setdefault(id(weight), name)) != name:
            found |= {name: f"shares its weight with {other}", other: f"shares its weight with {name}"}
    return found


def _tied_by_name(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return modules that a transformers model ties to others with all that is in them: {name: why}."""
    parts: list[str] = []
    for name, module in model.named_modules():
        if getattr(module, "get_expanded_tied_weights_keys", dict)():  # else the config ties nothing
            start, keys = re.escape(f"{name}.") if name else "", module._tied_weights_keys
            parts += [start + part.removeprefix("^") for pair in keys.items() for part in pair]
    why = "the model ties it to another, with what is added to it"
    return {name: why for name in names if any(re.match(part, f"{name}.added") for part in parts)}


def _unreadable(model: nn.Module) -> dict[str, str]:
    """Return linears that sentence-transformers writes in its own files, such as its Dense's: {name: why}."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        own = type(module).__module__.startswith("sentence_transformers.")
        if own and not any(isinstance(each, PreTrainedModel) for each in module.modules()):
            why = f"in a {type(module).__name__}, which sentence-transformers could not read back"
            found |= {path: why for path, each in module.named_modules(prefix=name) if is_linear(each)}
    return found


def _skipped_by_name(
    names: Collection[str], include: Patterns, exclude: Patterns, kind: str, hint: str
) -> dict[str, str]:
    """Return which of these names the patterns skip, and why; UserError for a pattern that matches none of them."""
    reasons: dict[str, str] = {} if include is None else dict.fromkeys(names, "not in include")
    for option, patterns in (("include", include), ("exclude", exclude)):
        for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
            try:
                hits = [name for name in names if re.fullmatch(pattern, name)]
            except re.error as error:
                raise UserError(f"{option}={patterns!r} is not a regular expression: {error}") from error
            if not hits:
                part = f"({pattern})" if "|" in pattern else pattern
                wider = [each for each in (f".*{part}", f".*{part}.*") if any(map(re.compile(each).fullmatch, names))]
                fix = f"{wider[0]!r} does" if wider else hint
                raise UserError(f"the pattern {pattern!r} matches no {kind}'s whole name; {fix}")
            for name in hits:
                if option == "exclude":
                    reasons.setdefault(name, "in exclude")
                else:
                    reasons.pop(name, None)
    return reasons


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
    heads, bypassed, inside = output_head_names(model), bypassed_linears(model), dense_parts(model)
    if method.replaces_weights:
        heads = _tied_linears(model) | heads
    modules = dict(model.named_modules())
    heads = _tied_by_name(model, modules) | _unreadable(model) | heads
    methods = {name: method_of_layer(module) for name, module in modules.items()}
    wrapped = {name: found.name for name, found in methods.items() if found and found.wraps}
    held = {name for name, module in modules.items() if expert_tensors(module)}
    taken = {name for name in held if methods[name] or method.is_target(modules[name])}
    skipped = dict.fromkeys(held - taken, "holds weights as 3-D parameters, which are no linears")
    linears = {}
    for name, module in modules.items():
        if name and module not in inside and (name in taken or is_linear(module) or linear_method(module)):
            if (outer := wrapped.get(name.rpartition(".")[0])) is not None:
                skipped[name] = f"is inside a layer of {outer}, which comes last"
            elif unnamed and method.include and not re.fullmatch(method.include, name):
                skipped[name] = f"not named like a target of {method.name}"
            else:
                linears[name] = module
    hint = "print the names with: [n for n, m in model.named_modules()]"
    given = _skipped_by_name(linears, include, exclude, "linear", hint)
    chosen: list[str] = []
    for name, module in linears.items():
        if name in given:
            skipped[name] = given[name]
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
    if not chosen:
        why = "; ".join(sorted(set(skipped.values()))) or (
            "it is a linear itself; put it into a module, as in nn.Sequential(model)"
            if is_linear(model)
            else "it has no linears"
        )
        if unnamed and method.include is not None:
            why += "; name the targets with include="
        if any(each.startswith("rank ") for each in skipped.values()):
            why += "; choose a smaller rank"
        raise UserError(f"nothing to swap in this {type(model).__name__}: {why}")
    return chosen, {name: skipped[name] for name in modules if name in skipped}


def choose_found(
    model: nn.Module, method: Method, found: Findings, include: Patterns, exclude: Patterns
) -> tuple[list[str], dict[str, str]]:
    """Return the same of what a method has found itself; a chosen module that cannot be swapped raises UserError."""
    places = [*found.targets, *found.skipped]
    folded = sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in places if name})
    those = f"they are {', '.join(folded[:8])}" if folded else "the model has none"
    given = _skipped_by_name(places, include, exclude, method.kind, those)
    skipped = _tied_by_name(model, found.targets)
    for name, target in found.targets.items():
        if why := given.get(name) or ((target.skipped or target.refused) if include is None else ""):
            skipped[name] = target.skipped or why
    chosen = [name for name in found.targets if name not in skipped]
    skipped |= {name or "the model": why for name, why in found.skipped.items()}
    if not chosen:
        reasons = [f"{name} ({why})" for name, why in list(skipped.items())[:5]]
        why = ", ".join(reasons) or f"it has no {method.kind} modules"
        raise UserError(f"nothing to swap in this {type(model).__name__}: {why}")
    for name in chosen:
        if found.targets[name].refused:
            raise UserError(found.targets[name].refused)
    return chosen, skipped


def _check_selected(model: nn.Module, select: Collection[str] | None) -> None:
    """Raise UserError for a name that is not a linear's: a choice by scores must not shrink unseen."""
    if isinstance(select, str):
        raise UserError(f"select must be a list of whole names, got {select!r}; pass patterns as include=")
    modules = dict(model.named_modules()) if select is not None else {}
    for name in select or ():
        if name not in modules or not (is_linear(modules[name]) or linear_method(modules[name])):
            raise UserError(f"select has {name!r}, which is not a linear of this model")


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


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a plain linear."""
    return isinstance(module, nn.Linear) or is_plain_linear(module)


def linear_method(module: nn.Module) -> Method | None:
    """Return the method that put this layer in a linear's place, or None."""
    method = method_of_layer(module)
    return method if method and method.kind == "linear" else None


def dense_parts(model: nn.Module) -> set[nn.Module]:
    """Return the plain linears inside layers of methods, which are parts of these and not linears of the model."""
    return set(filter(None, map(dense_part, model.modules())))


HOOKED = "has hooks, parametrizations or a patched forward, which a swap would lose; augment the model first"


def holds_numbers(weight: Any) -> bool:
    """Return whether a weight is plain floats: tensor subclasses hold quantized or sharded data (torchao, DTensor)."""
    return isinstance(weight, Tensor) and weight.is_floating_point() and type(weight.data) is Tensor


def expert_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own 3-D parameters (E, a, b), by name; none for torch's own layers, such as convolutions.

    A leading 1 marks a token, a position table or the like; numbers along one dimension alone are a scale. DBRX's
    experts have theirs as (E x a, b), in a child.
    """
    if type(module).__module__.startswith("torch.nn."):
        return {}
    method = method_of_layer(module)
    added = method.roles(module) if method else ()
    own = ((name, each) for name, each in module.named_parameters(recurse=False) if name not in added)
    held = {name: each for name, each in own if each.ndim == 3 and each.shape[0] > 1 and max(each.shape[1:]) > 1}
    inside = {name for each in projections(module) for name in each.parameters if "." in name}
    return {**held, **{name: each for name, each in module.named_parameters() if name in inside}}


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
    if not _POOLER.fullmatch(name):
        return False
    around = (part for start, part in outermost_models(model).items() if is_within(name, start))
    return any(_EACH_TOKEN.fullmatch(type(part).__name__) for part in around)


# What forwards use is read from their compiled code, which exists even without source: linears whose tensors they take
# without calling them, and activations that they call.
_ACTIVATIONS = {"gelu", "relu", "silu", "tanh", "sigmoid", "quick_gelu", "leaky_relu", "elu", "mish", "softplus"} | {
    *("ReLU", "GELU", "SiLU", "Tanh", "Sigmoid")
}
_TABLES = {"ACT2FN", "get_activation"}
_FUNCTIONS: Any = {
    F.relu: "relu",
    F.gelu: "gelu",
    F.silu: "silu",
    torch.tanh: "tanh",
    torch.relu: "relu",
    F.tanh: "tanh",
}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_BASES = ("transformers.modeling_utils", "transformers.generation")

# Code as `_text` writes it: " LOAD_FAST:self.wo.weight.dtype COMPARE_OP:...".
_SILENT = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME", "COPY_FREE_VARS"}
_IN_ISINSTANCE = re.compile(r":isinstance \S+")
_LOOK = (
    r"\.(?:dtype|device|shape|size|ndim|dim|numel|is_meta|is_cuda|requires_grad|is_floating_point|element_size|layout"
    r"|get_device)\b| POP_JUMP| LOAD_CONST:None (?:IS|COMPARE)_OP"
)
_TAKEN = re.compile(rf"(?:\.(\w+))?\.(\w+)\.(weight|bias)\b(?!{_LOOK})")
_TAKEN_OF_ARGUMENT = re.compile(rf":(\w+)\.(weight|bias)\b(?!{_LOOK})")
_CALLED = re.compile(r"\.(\w+)\b(?!\.(?:weight|bias)\b)")


class Bypass(NamedTuple):
    """Reason a layer in a module's place would have no effect."""

    why: str
    refused: bool
    """True: refused even on request, since it would never act, or not in inference. False: it would on some paths."""


def bypassed_linears(model: nn.Module) -> dict[str, Bypass]:
    """Return the modules whose weight or bias the code around them takes as a tensor, by whole name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    by_class: dict[Any, Any] = {}  # adapters bring many modules of few classes
    taken = {}
    for name, module in modules.items():
        key = type(module), vars(module).get("forward")
        if key not in by_class:
            by_class[key] = _tensors_taken(module)
        taken[name] = by_class[key]
    found = {}
    for name, module in modules.items():
        if not name or next(module.children(), None) is not None:
            continue
        parts = name.split(".")
        readers = [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]
        called = any(parts[-1] in taken[reader][1] for reader in readers[:2])
        for place, reader in enumerate(readers):
            # From further away a name alone may mean another module.
            own = ".".join(parts[-1:] if place < 2 else parts[-2:])
            tensors = taken[reader][0].get(own)
            if tensors and not _is_switched_off(modules[reader]):
                found[name] = _bypass(modules[reader], tensors, called)
                break
    return found


def _bypass(reader: nn.Module, tensors: set[str], called: bool) -> Bypass:
    why = f"the forward of {type(reader).__name__} takes its {' and '.join(sorted(tensors))} without calling it"
    if isinstance(reader, nn.TransformerEncoderLayer):
        return Bypass(f"{why} in inference (set activation_relu_or_gelu = 0 on that layer to have it called)", True)
    return Bypass(why + " on one of its paths" * called, not called)


def _is_switched_off(reader: nn.Module) -> bool:
    """Return whether this module's settings never enter the path that takes a child's tensors."""
    if isinstance(reader, nn.TransformerEncoder):
        return True  # it looks at their devices
    if isinstance(reader, nn.TransformerEncoderLayer):
        return not (reader.activation_relu_or_gelu and getattr(reader.self_attn, "_qkv_same_embed_dim", True))
    return getattr(reader, "pretraining_tp", None) == 1  # Bloom's, of checkpoints made by several devices


def _tensors_taken(module: nn.Module) -> tuple[dict[str, set[str]], set[str]]:
    """Return "weight" and "bias" by the child whose tensor is taken, alone and after the name before it
    ("attention.output"), and the names used in any other way. A look at a tensor's type or presence takes nothing.
    """
    taken, called = defaultdict[str, set[str]](set), set[str]()
    texts = {} if isinstance(module, _CONTAINERS) else {code: _text(code) for code in _codes(module)}
    takers = {
        code.co_name: tensor
        for code, text in texts.items()
        for name, tensor in _TAKEN_OF_ARGUMENT.findall(text)
        if name in code.co_varnames[1 : code.co_argcount]
    }
    for text in texts.values():
        text = _arguments_written_out(_IN_ISINSTANCE.sub("", text), takers)
        called.update(_CALLED.findall(text))
        for around, child, tensor in _TAKEN.findall(text):
            taken[child].add(tensor)
            taken[f"{around}.{child}"].add(tensor)
    return taken, called


def _arguments_written_out(text: str, takers: dict[str, str]) -> str:
    """Write LayoutLMv3's `self.look_up(x, self.table)` with `self.table.weight`, which is what the method takes."""
    for taker, tensor in takers.items():
        for arguments in re.findall(rf"\.{taker} (.*?) CALL:", text):
            text = text.replace(arguments, re.sub(r"self\.\w+(?= |$)", rf"\g<0>.{tensor}", arguments))
    return text


@functools.cache
def _text(code: CodeType) -> str:
    """Write a function's code as one line, in which chains of attributes stand as in its source."""
    return "".join(
        f".{step.argval}"
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD")
        else f" {step.opname}:" + re.sub(r"\W", "_", str(step.argval))
        for step in dis.get_instructions(code)
        if step.opname not in _SILENT
    )


def why_bypassed(name: str, attribute: str, parent: nn.Module, grandparent: nn.Module | None) -> str:
    """Return why swapping an activation would do nothing, with the fix; empty: a module around it calls it."""
    if isinstance(parent, nn.TransformerEncoderLayer) and parent.activation_relu_or_gelu:
        why = "is bypassed in inference by nn.TransformerEncoderLayer's fused path"
        return f"{name} {why}; set activation_relu_or_gelu = 0 on the layer"
    readers = [each for each in (parent, grandparent) if each is not None]
    if isinstance(parent, _CONTAINERS) or any(attribute in names_read(reader) for reader in readers):
        return ""
    why = f"is bypassed: the forward of {type(parent).__name__} does not call it (a fused MLP?)"
    return f"{name} {why}; use the unfused model"


def functions_called(module: nn.Module) -> str:
    """Return the activations that a module's forward calls as functions, as the end of a sentence; empty: none."""
    if type(module).__module__.startswith("nonlinear_lowrank."):
        return ""  # the functions of other methods' layers are theirs
    own = [(key, value) for key, value in vars(module).items() if inspect.isroutine(value) and value in _FUNCTIONS]
    holds = [f"holds the function {_FUNCTIONS[value]} as .{key}" for key, value in own]
    if type(module).__module__.startswith("torch.nn."):
        return ", ".join(holds)
    read = names_read(module) - set(module._modules)
    called = sorted(read & _ACTIVATIONS)
    words = [f"calls {', '.join(called)}"] if called else []
    words += ["looks its activation up in its forward"] if read & _TABLES else []
    return " and ".join(words + holds)


def _codes(module: nn.Module) -> Iterator[CodeType]:
    """Yield the code of a module's forward, of the methods it calls on itself, and of functions in and around both."""
    pending: list[Any] = [module.__dict__.get("forward", type(module).forward)]
    seen: set[int] = set()
    while pending:
        match each := pending.pop():
            case CodeType() if id(each) not in seen:
                yield each
                pending += each.co_consts
                for name in each.co_names:
                    methods = _own_methods(type(module), name)
                    pending += methods if "super" in each.co_names else methods[:1]
            case FunctionType() if id(each) not in seen:
                # Decorators: what they wrap is an attribute or in the closure.
                cells = [cell.cell_contents for cell in each.__closure__ or () if cell != CellType()]
                wrapped = [cell for cell in cells if isinstance(cell, FunctionType | MethodType)]
                pending += [each.__code__, getattr(each, "__wrapped__", None), *wrapped]
            case MethodType():
                pending.append(each.__func__)
            case partial():
                pending.append(each.func)
        seen.add(id(each))


def _own_methods(cls: type, name: str) -> list[Any]:
    """Return the methods that a model's code defines, the one in use first, without those of all modules' bases."""
    # torch.nn's own layers count: TransformerDecoderLayer calls its activation in _ff_block.
    own = [each for each in cls.__mro__ if each is not nn.Module and not each.__module__.startswith(_BASES)]
    return [value for each in own if callable(value := each.__dict__.get(name))]


def names_read(module: nn.Module) -> set[str]:
    """Return every global and attribute name in a module's code."""
    return {name for code in _codes(module) for name in code.co_names}
