"""What `nlr inspect` shows: parameters, FLOPs and bytes kept for backward of every layer, without the memory.

The model is built on the meta device (or given, on any device: it is neither run nor changed), and one
training forward pass is traced on fake CPU tensors, which have shapes and storages but no contents. On fake
CPU tensors, unlike on meta ones, autocast casts and attention takes its fused kernel, as on a GPU; so what is
kept is what a GPU run in the same type keeps, apart from a few bytes of kernel state.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig, PreTrainedModel

from nlr_lab.runtime.tables import number_table, readable_bytes, render_table
from nonlinear_lowrank.analysis.cost import LayerCost, ModelCost, model_cost
from nonlinear_lowrank.analysis.saved import saved_storages
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.surgery.experts import unreached_experts
from nonlinear_lowrank.surgery.targets import dense_parts
from nonlinear_lowrank.validation import one_line


def inspect_model(
    model: nn.Module | PreTrainedConfig,
    sequence_length: int = 1024,
    batch_size: int = 1,
    *,
    bf16: bool = False,
    inputs: Mapping[str, Tensor] | None = None,
) -> ModelCost:
    """Parameters, FLOPs and kept bytes of every layer.

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
        The costs; without kept bytes, and with a note that says why, if the pass could not be traced.

    Raises:
        UserError: a size below 1, or a config that belongs to no model class.
    """
    if sequence_length < 1 or batch_size < 1:
        raise UserError(
            f"sequence_length and batch_size must be at least 1, got {sequence_length!r} and {batch_size!r}"
        )
    if isinstance(model, PreTrainedConfig):
        model = build_on_meta(model)
    notes: list[str] = []
    if inputs is None:
        inputs = _inputs(model, sequence_length, batch_size)
        if "pixel_values" in inputs:
            patches = _patches(model)
            sequence_length = patches or 1
            if patches is None:
                notes.append("FLOPs are those of one place in each layer; layers may have different resolutions")
    cost = model_cost(model, sequence_length)
    cost.notes.extend(notes)
    if not inputs:
        note = f"kept bytes unknown: give inputs= for the forward pass of a {type(model).__name__}"
        return replace(cost, notes=[*cost.notes, note])
    if isinstance(model, PreTrainedModel) and unreached_experts(model):
        note = "kept bytes unknown: a pass on fake tensors routes no token to an expert; measure a real step"
        return replace(cost, notes=[*cost.notes, note])
    try:
        kept = _kept_by_module(model, inputs, bf16)
    except Exception as error:  # any model's forward: a pass that needs contents cannot run on fake tensors
        reason = one_line(error, 200)
        return replace(cost, notes=[*cost.notes, f"kept bytes unknown: {type(error).__name__}: {reason}"])
    dtype = torch.bfloat16 if bf16 else next(iter(model.parameters())).dtype
    return replace(
        cost,
        rows=_with_kept(model, cost.rows, kept),
        batch_size=next(iter(inputs.values())).shape[0],
        kept_dtype=str(dtype).removeprefix("torch."),
    )


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config on the meta device: shapes and counts, no memory.

    Raises:
        UserError: no class is named by the config, and it is of no kind that the Auto classes know.
    """
    with torch.device("meta"):
        for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM, transformers.AutoModel):
            # What the config was saved from comes first; a bare config counts as a language model's.
            named = (getattr(config, "architectures", None) or [None])[0]
            known = auto._model_mapping.get(type(config), None)
            classes = known if isinstance(known, list | tuple) else [known]
            cls = getattr(transformers, named, None) if named else None
            if named is not None and cls is None:
                cls = next((each for each in classes if each is not None and each.__name__ == named), None)
            if cls is not None:
                return cls._from_config(config)
            if classes[0] is not None:
                return auto.from_config(config)
    raise UserError(f"no model class belongs to a {type(config).__name__}; build the model and inspect that")


def format_cost(cost: ModelCost, *, every_layer: bool = False, width: int = 120) -> str:
    """A table as text.

    Args:
        cost: of `inspect_model` or `model_cost`.
        every_layer: one row a module; else repeated layers are folded into one row that holds their sum.
        width: columns of the terminal.
    """
    rows = [(row, 1) for row in cost.rows] if every_layer else _folded(cost.rows)
    columns = ["parameters", "branch", "FLOPs/token", "branch"]
    if cost.kept_bytes is not None:
        columns.append("kept bytes")
    table = number_table("module", "n", *columns)

    def add(name: str, count: str, row: LayerCost | ModelCost, **style: Any) -> None:
        cells = [row.parameters, row.branch_parameters, row.flops, row.branch_flops, row.kept_bytes]
        table.add_row(name, count, *(f"{cell:,}" if cell else "-" for cell in cells[: len(columns)]), **style)

    for row, count in rows:
        add(row.name or "(the model itself)", str(count), row)
    table.add_section()
    add("total", "", cost, style="bold")
    lines = [render_table(table, width)]
    if cost.branch_parameters:
        lines.append(
            f"{'branches add' if cost.branch_parameters > 0 else 'the method changes'} "
            f"{100 * (cost.parameter_ratio - 1):.2f} % parameters and {100 * (cost.flop_ratio - 1):.2f} % FLOPs"
        )
    lines.append(f"FLOPs: forward, per token, at sequence length {cost.sequence_length:,}; a multiply-add is 2")
    if cost.kept_bytes is not None:
        lines.append(
            f"kept bytes: for backward, {cost.batch_size} x {cost.sequence_length:,} tokens, {cost.kept_dtype}; "
            f"{readable_bytes(cost.kept_bytes)} in all; parameters, gradients and optimizer not included"
        )
    return "\n".join(lines + [f"note: {note}" for note in cost.notes])


def _inputs(model: nn.Module, sequence_length: int, batch_size: int) -> dict[str, Tensor]:
    """Arguments of a training pass, on meta; empty where they cannot be known."""
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
    # The loss keeps as much as the logits do: a model of tokens is traced with it.
    head = model.get_output_embeddings()
    return {"input_ids": tokens} if head is None else {"input_ids": tokens, "labels": tokens}


def _patches(model: nn.Module) -> int | None:
    """Sequence length of an image model: its position embeddings; None where it has none, as a convolutional one."""
    for name, parameter in model.named_parameters():
        if name.endswith("position_embeddings") and parameter.ndim == 3:
            return parameter.shape[1]
    return None


def _kept_by_module(model: nn.Module, inputs: Mapping[str, Tensor], bf16: bool) -> dict[str, int]:
    """Bytes by the module that was running when they were first saved."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _training(model), _names_of_running(model) as running:
        state = {name: _fake(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        arguments = {name: _fake(tensor) for name, tensor in inputs.items()}
        assert all(tensor.fake_mode is mode for tensor in state.values())  # type: ignore[attr-defined]
        autocast = torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext()

        def forward() -> Any:
            with autocast:
                return torch.func.functional_call(model, state, kwargs=arguments)

        with torch.enable_grad():
            storages = saved_storages(forward, parameters=list(state.values()), label=lambda: running[-1])
    kept: dict[str, int] = {}
    for storage in storages:
        kept[storage.label] = kept.get(storage.label, 0) + storage.nbytes
    return kept


def _fake(tensor: Tensor) -> Tensor:
    """A fake CPU tensor of the same shape and type; to be called under a fake mode."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copy.requires_grad_(tensor.requires_grad)


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Training mode, whatever the model is in; undone afterwards."""
    before = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


@contextmanager
def _names_of_running(model: nn.Module) -> Iterator[list[str]]:
    """A list whose last entry is the name of the innermost module that is running."""
    running = [""]
    handles = []

    def leave(*_: Any) -> None:  # a hook that returned something would replace the module's output
        running.pop()

    inside = dense_parts(model)  # not called unless hooked
    for name, module in model.named_modules():
        if module in inside:
            continue
        handles += [
            module.register_forward_pre_hook(lambda *_, name=name: running.append(name)),
            module.register_forward_hook(leave, always_call=True),
        ]
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


def _with_kept(model: nn.Module, rows: list[LayerCost], kept: Mapping[str, int]) -> list[LayerCost]:
    """Rows with their kept bytes, and new ones, in the model's order, for modules that only keep."""
    known = {row.name: row for row in rows}
    result = []
    for name, module in model.named_modules():
        if name in known:
            result.append(replace(known[name], kept_bytes=kept.get(name, 0)))
        elif kept.get(name):
            result.append(
                LayerCost(name=name, kind=type(module).__name__, parameters=0, flops=0, kept_bytes=kept[name])
            )
    return result


def _folded(rows: list[LayerCost]) -> list[tuple[LayerCost, int]]:
    """Layer numbers folded to *: one row, the sum, for each name, with the number of modules."""
    groups: dict[str, list[LayerCost]] = {}
    for row in rows:
        groups.setdefault(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", row.name), []).append(row)

    return [(_sum(name, members), len(members)) for name, members in groups.items()]


def _sum(name: str, rows: list[LayerCost]) -> LayerCost:
    return LayerCost(
        name=name,
        kind=rows[0].kind,
        parameters=sum(row.parameters for row in rows),
        branch_parameters=sum(row.branch_parameters for row in rows),
        flops=sum(row.flops for row in rows),
        branch_flops=sum(row.branch_flops for row in rows),
        kept_bytes=sum(row.kept_bytes or 0 for row in rows),
    )
