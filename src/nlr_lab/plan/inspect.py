"""`nlr inspect`: parameters, FLOPs and bytes saved for backward of every layer, without the memory.

The model is built on the meta device (or given, on any device: it is neither run nor changed), and one training forward
pass is traced on fake CPU tensors, which have shapes and storages but no contents. On fake CPU tensors, unlike on meta
ones, autocast casts and attention takes its fused kernel, as on a GPU; so what is saved is what a GPU run in the same
type saves, apart from a few bytes of kernel state. In a stack of equal blocks four are traced, see `_shortened`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from nlr_lab.runtime.tables import fold_numbers, number_table, readable_bytes, render_table
from nonlinear_lowrank.analysis.cost import NUMBERS, LayerCost, ModelCost, model_cost
from nonlinear_lowrank.analysis.saved import saved_storages
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.expert_layouts import COMMON, layout_of
from nonlinear_lowrank.methods.experts import projections
from nonlinear_lowrank.surgery.targets import expert_tensors, unreached_experts
from nonlinear_lowrank.validation import check_integer, one_line

_PLAIN = (bool, int, float, str, type(None))
_PLACES = ("layer_idx", "layer_id")


def inspect_model(
    model: nn.Module | PreTrainedConfig,
    sequence_length: int = 1024,
    batch_size: int = 1,
    *,
    bf16: bool = False,
    inputs: Mapping[str, Tensor] | None = None,
) -> ModelCost:
    """Return parameters, FLOPs and saved bytes of every layer.

    A storage that several layers save (the input of q, k and v) counts once, at the first of them. The loss
    and what follows the last layer are in the row of the model itself (name "").

    Args:
        model: a module on any device, or a transformers config (also of an augmented model).
        sequence_length: tokens of a sequence. Models of images take it from their config instead.
        batch_size: sequences of the traced pass.
        bf16: trace under bfloat16 autocast, as training with bf16 does; else in the parameters' own type.
        inputs: keyword arguments of the forward pass, for modules that are not transformers models; their
            contents do not matter and their first dimension is the batch.

    Returns:
        The costs; without saved bytes, and with a note that says why, if the pass could not be traced.

    Raises:
        UserError: a size below 1, or a config that belongs to no model class.
    """
    check_integer("sequence_length", sequence_length, minimum=1)
    check_integer("batch_size", batch_size, minimum=1)
    if isinstance(model, PreTrainedConfig):
        model = build_on_meta(model)
    note = None
    if inputs is None:
        inputs = _inputs(model, sequence_length, batch_size)
        if "pixel_values" in inputs:
            patches = _patches(model)
            sequence_length = patches or 1
            if patches is None:
                note = "FLOPs are those of one place in each layer; layers may have different resolutions"
    cost = model_cost(model, sequence_length)
    notes = cost.notes + ([note] if note else [])
    try:
        if not inputs:
            raise UserError(f"no inputs are known for a {type(model).__name__} (in Python: inputs=)")
        if isinstance(model, PreTrainedModel) and unreached_experts(model) and not _grouped(model):
            raise UserError("a pass on fake tensors routes no token to an expert; measure a real step")
        kept = _saved_by_module(model, inputs, bf16)
    except Exception as error:  # any model's forward: a pass that needs contents cannot run on fake tensors
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return replace(cost, notes=[*notes, f"saved bytes unknown: {kind}{one_line(error, 200)}"])
    dtype = torch.bfloat16 if bf16 else next(iter(model.parameters())).dtype
    return replace(
        cost,
        rows=_with_saved(model, cost.rows, kept),
        batch_size=next(iter(inputs.values())).shape[0],
        kept_dtype=str(dtype).removeprefix("torch."),
        notes=notes,
    )


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model of a config on the meta device: shapes and counts, no memory.

    Raises:
        UserError: no class is named by the config, and it is of no kind that the Auto classes know.
    """
    # What the config was saved from comes first; a bare config counts as a language model's.
    named = (getattr(config, "architectures", None) or [None])[0]
    with torch.device("meta"):
        if named is not None and hasattr(transformers, named):
            return getattr(transformers, named)._from_config(config)
        for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM, transformers.AutoModel):
            known = auto._model_mapping.get(type(config), None)
            classes = known if isinstance(known, list | tuple) else [known]
            cls = next((each for each in classes if each is not None and each.__name__ == named), None)
            if cls is not None:
                return cls._from_config(config)
            if classes[0] is not None:
                return auto.from_config(config)
    raise UserError(f"no model class belongs to a {type(config).__name__}; build the model and inspect that")


def format_cost(cost: ModelCost, *, every_layer: bool = False, width: int = 120) -> str:
    """Return a table as text: one row a module, or repeated layers folded into one row that holds their sum."""
    rows = [(row, "1") for row in cost.rows] if every_layer else _folded(cost.rows)
    known = NUMBERS if cost.kept_bytes is not None else NUMBERS[:-1]
    heads = ("parameters", "branch", "FLOPs/token", "branch", "saved bytes")
    table = number_table("module", "n", *heads[: len(known)])

    def cells(of: LayerCost | ModelCost) -> list[str]:
        return [f"{value:,}" if (value := getattr(of, each)) else "-" for each in known]

    for row, count in rows:
        table.add_row(row.name or "(the model itself)", count, *cells(row))
    table.add_section()
    table.add_row("total", "", *cells(cost), style="bold")
    lines = [render_table(table, width)]
    if cost.branch_parameters:
        lines.append(
            f"{'branches add' if cost.branch_parameters > 0 else 'the method changes'} "
            f"{100 * (cost.parameter_ratio - 1):.2f} % parameters and {100 * (cost.flop_ratio - 1):.2f} % FLOPs"
        )
    if cost.active_parameters not in (None, cost.parameters):
        lines.append(f"{cost.active_parameters:,} parameters are active for a token: it goes through some experts only")
    lines.append(f"FLOPs: forward, per token, at sequence length {cost.sequence_length:,}; a multiply-add is 2")
    if cost.kept_bytes is not None:
        lines.append(
            f"saved bytes: for backward, {cost.batch_size} x {cost.sequence_length:,} tokens, {cost.kept_dtype}; "
            f"{readable_bytes(cost.kept_bytes)} in all; parameters, gradients and optimizer not included"
        )
    return "\n".join(lines + [f"note: {note}" for note in cost.notes])


def _grouped(model: PreTrainedModel) -> bool:
    """Return whether all experts compute by products that are grouped by expert, whichever tokens go where."""
    held = [module for module in model.modules() if expert_tensors(module)]
    return model.config._experts_implementation == "grouped_mm" and all(
        layout_of(each) is COMMON and projections(each) for each in held
    )


class _GroupedProducts(TorchDispatchMode):
    """Give grouped products on fake tensors, of which torch knows the shape in bfloat16 alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            return args[0].new_empty(args[0].shape[0], args[1].shape[2])
        return func(*args, **(kwargs or {}))


def check_length(model: nn.Module, given: int | None) -> None:
    """Raise UserError where a sequence length is given for a model whose tokens follow from the image."""
    if given is not None and getattr(model, "main_input_name", "") == "pixel_values":
        raise UserError("--sequence-length does nothing: the tokens follow from the size of the image; omit it")


def _inputs(model: nn.Module, sequence_length: int, batch_size: int) -> dict[str, Tensor]:
    """Return the arguments of a training pass, on meta; empty where they cannot be known."""
    if not isinstance(model, PreTrainedModel):
        return {}
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", None)
        if size is None:
            return {}
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(model.config, "num_channels", 3)
        return {"pixel_values": torch.empty(batch_size, channels, height, width, device="meta")}
    if model.main_input_name != "input_ids":
        return {}
    tokens = torch.empty(batch_size, sequence_length, dtype=torch.long, device="meta")
    # The loss saves as much as the logits do: a model of tokens is traced with it.
    head = model.get_output_embeddings()
    return {"input_ids": tokens} if head is None else {"input_ids": tokens, "labels": tokens}


def _patches(model: nn.Module) -> int | None:
    """Return the number of position embeddings of an image model; None where it has none, as a convolutional one."""
    for name, parameter in model.named_parameters():
        if name.endswith("position_embeddings") and parameter.ndim == 3:
            return parameter.shape[1]
    return None


def _saved_by_module(model: nn.Module, inputs: Mapping[str, Tensor], bf16: bool) -> Counter[str]:
    """Return bytes by the module that was running when they were first saved."""
    stacks = {name: list(module) for name, module in model.named_modules() if _is_uniform(model, module)}
    if stacks:
        with suppress(Exception), _shortened(model, stacks):  # a model may look its blocks up by number
            return _repeated(_traced(model, inputs, bf16), stacks)
    return _traced(model, inputs, bf16)


def _is_uniform(model: nn.Module, stack: nn.Module) -> bool:
    """Return whether a module is a list of more than four blocks, equal except for the first and the last."""
    if not isinstance(stack, nn.ModuleList) or len(stack) <= 4:
        return False
    if not all(isinstance(block, GradientCheckpointingLayer) for block in stack):
        return False
    kinds = getattr(getattr(model, "config", None), "layer_types", None) or ()
    facts = _facts(stack[1])
    return len(set(kinds)) <= 1 and all(_facts(block) == facts for block in list(stack)[2:-1])


def _facts(block: nn.Module) -> list[Any]:
    """Return classes, plain attributes and tensors of a block's modules, except its place."""
    return [
        (
            name,
            type(module),
            {key: each for key, each in vars(module).items() if isinstance(each, _PLAIN) and key not in _PLACES},
            "forward" in vars(module),
            [(key, each.shape, each.dtype, each.requires_grad) for key, each in module.named_parameters(recurse=False)],
        )
        for name, module in block.named_modules()
    ]


@contextmanager
def _shortened(model: nn.Module, stacks: Mapping[str, list[nn.Module]]) -> Iterator[None]:
    """Leave of each stack its first three blocks and the last; undone afterwards."""
    before = {name: model.get_submodule(name)._modules for name in stacks}
    try:
        for name, modules in before.items():
            model.get_submodule(name)._modules = {key: modules[key] for key in [*list(modules)[:3], list(modules)[-1]]}
        yield
    finally:
        for name, modules in before.items():
            model.get_submodule(name)._modules = modules


def _repeated(kept: Counter[str], stacks: Mapping[str, list[nn.Module]]) -> Counter[str]:
    """Return the bytes of all blocks out of those of a shortened stack.

    Raises:
        ValueError: the second block does not save what the third does.
    """
    found = Counter(kept)
    for stack, blocks in stacks.items():
        second, third = (
            {name.removeprefix(f"{stack}.{place}"): each for name, each in kept.items() if _within(name, stack, place)}
            for place in (1, 2)
        )
        if second != third:
            raise ValueError(f"the blocks of {stack} differ")
        for place in range(3, len(blocks) - 1):
            found.update({f"{stack}.{place}{name}": each for name, each in second.items()})
    return found


def _within(name: str, stack: str, place: int) -> bool:
    return f"{name}.".startswith(f"{stack}.{place}.")


def _traced(model: nn.Module, inputs: Mapping[str, Tensor], bf16: bool) -> Counter[str]:
    """Return the bytes of a pass through every block that is there."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _training(model),
        _names_of_running(model) as running,
        _GroupedProducts(),
    ):
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **inputs}
        fake = {
            name: torch.empty(each.shape, dtype=each.dtype, device="cpu").requires_grad_(each.requires_grad)
            for name, each in tensors.items()
        }
        arguments = {name: fake.pop(name) for name in inputs}

        def forward() -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16), torch.enable_grad():
                return torch.func.functional_call(model, fake, kwargs=arguments)

        storages = saved_storages(forward, parameters=list(fake.values()), label=lambda: running[-1])
    kept: Counter[str] = Counter()
    for storage in storages:
        kept[storage.label] += storage.nbytes
    return kept


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Put the model into training mode, whatever the model is in; undone afterwards."""
    before = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


@contextmanager
def _names_of_running(model: nn.Module) -> Iterator[list[str]]:
    """Give a list whose last entry is the name of the innermost module that is running."""
    running, names = [""], {module: name for name, module in model.named_modules()}

    def leave(*_: Any) -> None:  # a hook that returned something would replace the module's output
        running.pop()

    # For all modules there are: hooks of their own would change the way of some.
    entering = register_module_forward_pre_hook(lambda module, _: running.append(names.get(module, running[-1])))
    leaving = register_module_forward_hook(leave, always_call=True)
    try:
        yield running
    finally:
        entering.remove()
        leaving.remove()


def _with_saved(model: nn.Module, rows: list[LayerCost], kept: Counter[str]) -> list[LayerCost]:
    """Return rows with their saved bytes, and new ones, in the model's order, for modules that only save."""
    known = {row.name: row for row in rows}
    for name, module in model.named_modules():
        if name not in known and kept[name]:
            known[name] = LayerCost(name=name, kind=type(module).__name__, parameters=0, flops=0)
    return [replace(known[name], kept_bytes=kept[name]) for name, _ in model.named_modules() if name in known]


def _folded(rows: list[LayerCost]) -> list[tuple[LayerCost, str]]:
    """Fold layer numbers to *: one row, the sum, for each name, with the number of modules."""
    groups: dict[str, list[LayerCost]] = {}
    for row in rows:
        groups.setdefault(fold_numbers(row.name), []).append(row)
    folded = []
    for name, members in groups.items():
        sums: dict[str, Any] = {each: sum(getattr(row, each) or 0 for row in members) for each in NUMBERS}
        folded.append((replace(members[0], name=name, **sums), str(len(members))))
    return folded
