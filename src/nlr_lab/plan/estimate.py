"""Cost of training a model on given GPUs: bytes, FLOPs, communication, hours. Only shapes are needed.

Parameters, gradients, the optimizer's state, activations and FLOPs are counted exactly, from the model's modules on the
meta device and traced passes (`inspect`); the rest is estimated, each assumption in `ASSUMPTIONS`. docs/plan.md says
how. Layouts are DDP, FSDP2 over all GPUs, and FSDP2 over groups of GPUs that hold copies of each other.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from nlr_lab.runtime.tables import number_table, render_table
from nonlinear_lowrank.analysis.cost import LayerCost, model_cost
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.optim import param_groups
from nonlinear_lowrank.validation import check_integer, check_number

from .inspect import inspect_model
from .presets import Hardware

GIB = 1 << 30
_RUNTIME = GIB  # CUDA's context, cuBLAS's and NCCL's buffers

ASSUMPTIONS = (
    "matrix products reach the stated share of the data sheet's rate, narrow ones too (nlr bench step measures that)",
    "communication overlaps with computation as far as it is shorter; rings at the link's or the network's full rate",
    "DDP keeps its buckets beside the gradients, and under bfloat16 autocast a 16-bit copy of every linear",
    "FSDP2 gathers one block at a time, and the next while that one computes; once forward, once backward",
    "1 GiB a GPU for the runtime, and the loss's share of the activations once more for their gradients",
    "sequences of full length; data and checkpoints cost no time; forming sine weights is not in the FLOPs",
    "while a checkpoint is written, a node's own memory holds a copy of it, beside what data and processes take there",
)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The GPUs, and how it is to be trained.

    Raises:
        UserError: a number is out of range, or the batch does not split over the GPUs.
    """

    hardware: Hardware
    gpus: int = 1
    memory: float | None = None
    """GiB of a GPU; None: the hardware's."""
    utilization: float = 0.4
    """Share of the peak rate of matrix products that is reached."""
    batch_size: int
    """Sequences of a step, over all GPUs."""
    steps: int
    bf16: bool = True
    """Autocast; else in the parameters' own type."""
    recompute: bool = False
    """Activation checkpointing in any case; else only where nothing fits without."""

    def __post_init__(self) -> None:
        for name in ("gpus", "batch_size", "steps"):
            check_integer(name, getattr(self, name), minimum=1)
        if not 0 < self.utilization <= 1:
            raise UserError(f"utilization must be above 0 and at most 1, got {self.utilization!r}")
        if self.memory is not None:
            check_number("memory", self.memory, above=0)
        if self.batch_size % self.gpus:
            raise UserError(
                f"a batch of {self.batch_size:,} sequences does not split over {self.gpus:,} GPUs; give --batch-size a "
                f"multiple of them, such as {self.gpus * math.ceil(self.batch_size / self.gpus):,}"
            )

    @property
    def room(self) -> float:
        """Bytes of a GPU."""
        return (self.hardware.memory if self.memory is None else self.memory) * GIB


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes saved for backward, a straight line in the number of sequences: (at none, for each)."""

    blocks: tuple[tuple[float, float], ...]
    outside: tuple[float, float]
    """Bytes of all else."""
    loss: tuple[float, float]
    """The part of `outside` that follows the last layer."""
    stream: float
    """Bytes of what a block is given, for each sequence."""

    def kept(self, sequences: int, *, recompute: bool = False) -> float:
        """Return the bytes of so many sequences; recomputed: of every block its input, and one block whole."""
        sizes = [fixed + each * sequences for fixed, each in self.blocks]
        outside = self.outside[0] + self.outside[1] * sequences
        if not recompute or not sizes:
            return sum(sizes) + outside
        return outside + len(sizes) * self.stream * sequences + max(sizes)


@dataclass(frozen=True, kw_only=True)
class ArmCost:
    """Cost of one arm wherever it runs."""

    name: str
    parameters: int
    branch_parameters: int
    """Parameters that methods added."""
    active_parameters: int | None
    """Parameters except those of experts that a token skips; None: not known."""
    trainable: int
    tokens: int
    """Tokens of a sequence."""
    forward_flops: int
    """Per token."""
    training_flops: int
    """Per token, forward and backward."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    copy_bytes: int
    """Bytes of the linears' weights in 16 bits, which autocast makes."""
    saved_bytes: int
    """Bytes of a checkpoint's weights and buffers: those of frozen weights are not in it."""
    block_parameters: int
    """Parameters of the largest block."""
    outside_parameters: int
    """Parameters outside of all blocks."""
    activations: Activations
    notes: tuple[str, ...] = ()
    """Parts that could not be counted."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to lay an arm's run over the GPUs."""

    cost: ArmCost
    sharding: int
    """GPUs that share one copy of the weights; 1: DDP."""
    micro_batch: int
    """Sequences that a GPU takes at once."""
    accumulation: int
    """Micro-batches of a step."""
    recompute: bool
    memory: dict[str, float]
    """Bytes on each GPU, by what they are."""
    host: float
    """Bytes in the memory of the first node, of the copies that its processes hold while a checkpoint is written."""
    fits: bool
    moved: float
    """Bytes that each GPU sends in a step."""
    compute_seconds: float
    """Seconds of a step."""
    communication_seconds: float
    optimizer_seconds: float
    hours: float
    """Hours of all steps."""

    @property
    def total(self) -> float:
        """Bytes on each GPU."""
        return sum(self.memory.values())

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: computing or communicating, whichever is longer, and the optimizer."""
        return max(self.compute_seconds, self.communication_seconds) + self.optimizer_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the arm's costs, and the layout."""
        layout = asdict(self)
        costs = layout.pop("cost")
        del costs["activations"]
        kept = self.memory["activations"]
        times = {"total": self.total, "step_seconds": self.step_seconds}
        return {**costs, "activation_bytes": kept, "layout": layout | times}


def arm_cost(model: nn.Module, name: str, sequence_length: int, *, bf16: bool = True, muon: bool = False) -> ArmCost:
    """Count what a model costs, which is neither run nor changed.

    Raises:
        UserError: no pass could be traced, so that nothing is known of the activations.
    """
    one, two = (inspect_model(model, sequence_length, size, bf16=bf16) for size in (1, 2))
    if one.kept_bytes is None or two.kept_bytes is None:
        raise UserError(f"{name} cannot be planned: {'; '.join(one.notes)}")
    groups = param_groups(model, 1.0, 0.0, muon=muon, verbose=False)
    trained = {id(each): each for group in groups for _, each in group["params"]}
    parameters = list(model.named_parameters())
    held = model.state_dict(keep_vars=True).values()
    buffers = {id(each): each for each in held if isinstance(each, Tensor) and not isinstance(each, nn.Parameter)}
    blocks: Counter[str] = Counter()
    for path, each in parameters:
        blocks[_block(path)] += each.numel()
    outside = blocks.pop("", 0)
    wide = [each.weight for each in model.modules() if isinstance(each, nn.Linear) and each.weight.element_size() > 2]
    state = 0
    for group in groups:
        with_muon = group.get("optimizer") == "muon"
        state += sum(each.nbytes * (1 if with_muon else 2) + (0 if with_muon else 4) for _, each in group["params"])
    return ArmCost(
        name=name,
        parameters=one.parameters,
        branch_parameters=one.branch_parameters,
        active_parameters=one.active_parameters,
        trainable=sum(each.numel() for each in trained.values()),
        tokens=one.sequence_length,
        forward_flops=one.flops,
        training_flops=sum(_training_flops(model, row, trained) for row in one.rows),
        parameter_bytes=sum(each.nbytes for _, each in parameters),
        gradient_bytes=sum(each.nbytes for each in trained.values()),
        optimizer_bytes=state,
        copy_bytes=2 * sum(weight.numel() for weight in wide) if bf16 else 0,
        saved_bytes=sum(each.nbytes for each in (trained | buffers).values()),
        block_parameters=max(blocks.values(), default=0),
        outside_parameters=outside,
        activations=_activations(model, one.rows, two.rows, one.sequence_length),
        notes=tuple(one.notes),
    )


def plan_arm(cost: ArmCost, config: PlanConfig) -> Layout:
    """Return the layout with the least sharding that fits, with as many sequences at once as fit in it.

    Recomputing activations costs a third more time, sharding hardly any: it is tried where no sharding helps. Where
    nothing fits, it is the layout that comes nearest.
    """
    for recompute in (True,) if config.recompute else (False, True):
        for sharding in _divisors(config.gpus):
            for micro in reversed(_divisors(config.batch_size // config.gpus)):
                found = lay_out(cost, config, sharding=sharding, micro_batch=micro, recompute=recompute)
                if found.fits:
                    return found
    return lay_out(cost, config, sharding=config.gpus, micro_batch=1, recompute=True)


def lay_out(cost: ArmCost, config: PlanConfig, *, sharding: int, micro_batch: int, recompute: bool) -> Layout:
    """Return memory, traffic and time of one layout; sharding and micro-batch divide the GPUs and their batch."""
    own = config.batch_size // config.gpus
    accumulation = own // micro_batch
    width = 2 if config.bf16 else cost.parameter_bytes / max(1, cost.parameters)
    loss = cost.activations.loss
    if sharding > 1:  # two gathered blocks, and one's gradients
        buffers = width * (cost.outside_parameters + 3 * cost.block_parameters)
    else:
        buffers = cost.copy_bytes + (cost.gradient_bytes if config.gpus > 1 else 0)
    memory = {
        "parameters": cost.parameter_bytes / sharding,
        "gradients": cost.gradient_bytes / sharding,
        "optimizer": cost.optimizer_bytes / sharding,
        "activations": cost.activations.kept(micro_batch, recompute=recompute),
        "copies and buffers": buffers,
        "runtime and loss": _RUNTIME + loss[0] + loss[1] * micro_batch,
    }
    # As `training.checkpoints` copies: of weights that are not sharded rank 0 alone, of the optimizer each a share.
    beside = min(config.gpus, config.hardware.node)
    weights = cost.saved_bytes * (beside / config.gpus if sharding > 1 else 1)
    moved, communication = _traffic(cost, config, sharding, accumulation, width)
    flops = cost.training_flops + (cost.forward_flops if recompute else 0)
    compute = flops * cost.tokens * own / (config.hardware.rate(config.bf16) * config.utilization)
    # Parameters and the optimizer's state are read and written, gradients read.
    touched = 3 * cost.gradient_bytes + 2 * cost.optimizer_bytes
    optimizer = touched / sharding / config.hardware.bandwidth
    return Layout(
        cost=cost,
        sharding=sharding,
        micro_batch=micro_batch,
        accumulation=accumulation,
        recompute=recompute,
        memory=memory,
        host=weights + cost.optimizer_bytes * beside / (sharding if sharding > 1 else config.gpus),
        fits=sum(memory.values()) <= config.room,
        moved=moved,
        compute_seconds=compute,
        communication_seconds=communication,
        optimizer_seconds=optimizer,
        hours=(max(compute, communication) + optimizer) * config.steps / 3600,
    )


def _traffic(cost: ArmCost, config: PlanConfig, sharding: int, accumulation: int, width: float) -> tuple[float, float]:
    """Return the bytes that a GPU sends in a step, and the seconds that takes."""
    hardware, copies = config.hardware, config.gpus // sharding
    moved = seconds = 0.0
    if sharding > 1:  # gather forward and backward, scatter the gradients' sums: in every micro-batch
        ring = (sharding - 1) / sharding * width
        shared = accumulation * ring * (2 * cost.parameters + cost.trainable)
        # A ring through whole nodes leaves and enters each by all of its adapters.
        rate = hardware.link if sharding <= hardware.node else min(hardware.link, hardware.network * hardware.node)
        moved, seconds = shared, shared / rate
    if copies > 1:  # sum the gradients over the copies, once a step
        summed = 2 * (copies - 1) / copies * cost.gradient_bytes / sharding
        inside = config.gpus <= hardware.node
        beside = max(1.0, hardware.node / sharding)  # GPUs of a node that one copy's ring has to itself
        rate = hardware.link if inside else min(hardware.link, hardware.network * beside)
        moved, seconds = moved + summed, seconds + summed / rate
    return moved, seconds


def training_flops(model: nn.Module, sequence_length: int) -> int | None:
    """Return the training FLOPs per token of a model on any device; None where a part of them is not counted."""
    cost, trained = model_cost(model, sequence_length), {id(each) for each in model.parameters() if each.requires_grad}
    return None if cost.notes else sum(_training_flops(model, row, trained) for row in cost.rows)


def _training_flops(model: nn.Module, row: LayerCost, trained: Collection[int]) -> int:
    """Return the training FLOPs per token of a module: what is frozen needs no gradient of its weight."""
    own = list(model.get_submodule(row.name).parameters(recurse=False)) if row.name else []
    if not own or all(id(each) in trained for each in own if each.ndim >= 2):
        return 3 * row.flops
    # In a layer with a frozen weight and a trained branch, the branch's share is trained.
    branch = row.branch_flops if any(id(each) in trained for each in own) else 0
    return 2 * row.flops + branch


def _activations(model: nn.Module, one: Sequence[LayerCost], two: Sequence[LayerCost], tokens: int) -> Activations:
    """Return the lines through the bytes of one and of two sequences."""
    sums: dict[str, list[float]] = {}
    for place, rows in enumerate((one, two)):
        for row in rows:
            for key in (_block(row.name), *(["loss"] if not row.name else [])):
                sums.setdefault(key, [0.0, 0.0])[place] += row.kept_bytes or 0
    lines = {key: (2 * first - second, second - first) for key, (first, second) in sums.items()}
    loss, outside = lines.pop("loss", (0.0, 0.0)), lines.pop("", (0.0, 0.0))
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    width = width or max((each.shape[-1] for each in model.parameters()), default=0)
    stream = float(tokens * next(iter(model.parameters())).element_size() * width)
    return Activations(blocks=tuple(lines.values()), outside=outside, loss=loss, stream=stream)


def _block(name: str) -> str:
    """Return the block of a stack that a module or parameter is in, by its name up to its first number; "": in none."""
    match = re.match(r"((?:[^.]+\.)*?\d+)(\.|$)", name)
    return match[1] if match else ""


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def format_plan(title: str, plans: Sequence[Layout], config: PlanConfig, width: int = 120) -> str:
    """Return a column for each arm (the first is what others are compared with), verdicts and assumptions as text."""
    hardware = config.hardware
    table = number_table("", *(plan.cost.name for plan in plans))
    rows = [_cells(plan, plans[0]) for plan in plans]
    for name in rows[0]:
        table.add_row(name, *(cells[name] for cells in rows))
    steps = f"{config.batch_size:,} sequences x {plans[0].cost.tokens:,} tokens a step, {config.steps:,} steps"
    room = f"{config.room / GIB:,.0f} GiB each"
    lines = [
        f"{title}: {steps}; {config.gpus:,} x {hardware.name}, {room}",
        render_table(table, width),
        *(_verdict(plan, config) for plan in plans),
        f"assumed: {config.utilization:.0%} of {hardware.rate(config.bf16) / 1e12:,.0f} TFLOP/s "
        f"({'bfloat16' if config.bf16 else 'float32'}), {hardware.bandwidth / 1e12:.2f} TB/s of memory, "
        f"{hardware.link / 1e9:,.0f} GB/s in a node of {hardware.node}, {hardware.network / 1e9:,.0f} GB/s to others",
        *(f"assumed: {each}" for each in ASSUMPTIONS),
    ]
    return "\n".join([*lines, *(f"note: {each}" for each in dict.fromkeys(n for p in plans for n in p.cost.notes))])


def plan_to_json(title: str, plans: Sequence[Layout], config: PlanConfig) -> str:
    """Return everything as JSON: bytes, FLOPs and seconds as numbers."""
    about: dict[str, Any] = {name: getattr(config, name) for name in ("gpus", "utilization", "batch_size", "steps")}
    about |= {"hardware": vars(config.hardware), "memory_bytes": config.room, "bf16": config.bf16}
    content = {"plan": title, **about, "arms": [plan.to_dict() for plan in plans], "assumptions": ASSUMPTIONS}
    return json.dumps(content, indent=2)


def _cells(plan: Layout, first: Layout) -> dict[str, str]:
    return {
        "parameters": f"{plan.cost.parameters:,}",
        "of them active for a token": f"{active:,}" if (active := plan.cost.active_parameters) else "-",
        "of them trained": f"{plan.cost.trainable:,}",
        "FLOPs a token, training": f"{plan.cost.training_flops:,}",
        **{f"{part}, GiB a GPU": _gib(nbytes) for part, nbytes in plan.memory.items()},
        "in all, GiB a GPU": _gib(plan.total),
        "copy for a checkpoint, GiB of a node's memory": _gib(plan.host),
        "copies of the weights": "one a GPU" if plan.sharding == 1 else f"one in {plan.sharding:,} GPUs",
        "sequences at once": f"{plan.micro_batch} x {plan.accumulation}",
        "activations": "recomputed" if plan.recompute else "kept",
        "sent, GB a GPU and step": f"{plan.moved / 1e9:,.3g}",
        "computing, s a step": f"{plan.compute_seconds:,.4g}",
        "communicating, s a step": f"{plan.communication_seconds:,.4g}",
        "step, s": f"{plan.step_seconds:,.4g}",
        "step, over the first": f"{plan.step_seconds / first.step_seconds:.3f}",
        "hours": f"{plan.hours:,.4g}",
    }


def _verdict(plan: Layout, config: PlanConfig) -> str:
    if not plan.fits:
        return (
            f"{plan.cost.name} does not fit: {_gib(plan.total)} GiB a GPU of {config.room / GIB:,.0f}, sharded over "
            "all GPUs with one sequence at once and activations recomputed; take more or larger GPUs"
        )
    how = "DDP" if plan.sharding == 1 else f"FSDP2 over {plan.sharding:,} GPUs"
    how = "one GPU" if config.gpus == 1 else how
    more = f"--gradient-accumulation {plan.accumulation}"
    more += " --gradient-checkpointing" if plan.recompute else ""
    return f"{plan.cost.name} fits: {how}, {plan.micro_batch} at once ({more})"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.3g}"
