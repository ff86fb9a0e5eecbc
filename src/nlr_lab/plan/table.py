"""A plan as text and as JSON."""

import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from nlr_lab.runtime.tables import render_table

from .estimate import ASSUMPTIONS, GIB, ArmPlan, PlanConfig


def format_plan(title: str, plans: Sequence[ArmPlan], config: PlanConfig, width: int = 120) -> str:
    """A column for each arm, a verdict for each, and the assumptions.

    Args:
        title: what is planned.
        plans: of the arms; the first is what the others are held against.
        config: they were made for.
        width: columns of the terminal.
    """
    hardware = config.hardware
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", overflow="fold")
    for plan in plans:
        table.add_column(plan.cost.name, justify="right", overflow="fold")
    for name, cells in _rows(plans):
        table.add_row(name, *cells)
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


def plan_to_json(title: str, plans: Sequence[ArmPlan], config: PlanConfig) -> str:
    """Everything, as JSON: bytes, FLOPs and seconds as numbers."""
    about: dict[str, Any] = {name: getattr(config, name) for name in ("gpus", "utilization", "batch_size", "steps")}
    about |= {"hardware": vars(config.hardware), "memory_bytes": config.room, "bf16": config.bf16}
    content = {"plan": title, **about, "arms": [plan.to_dict() for plan in plans], "assumptions": ASSUMPTIONS}
    return json.dumps(content, indent=2)


def _rows(plans: Sequence[ArmPlan]) -> list[tuple[str, list[str]]]:
    base = plans[0].layout.step_seconds
    rows: list[tuple[str, list[str]]] = [
        ("parameters", [f"{plan.cost.parameters:,}" for plan in plans]),
        ("of them trained", [f"{plan.cost.trainable:,}" for plan in plans]),
        ("FLOPs a token, training", [f"{plan.cost.training_flops:,}" for plan in plans]),
        *(
            (f"{part}, GiB a GPU", [_gib(plan.layout.memory[part]) for plan in plans])
            for part in plans[0].layout.memory
        ),
        ("in all, GiB a GPU", [_gib(plan.layout.total) for plan in plans]),
        ("copies of the weights", [_copies(plan) for plan in plans]),
        ("sequences at once", [f"{plan.layout.micro_batch} x {plan.layout.accumulation}" for plan in plans]),
        ("activations", ["recomputed" if plan.layout.recompute else "kept" for plan in plans]),
        ("sent, GB a GPU and step", [f"{plan.layout.moved / 1e9:,.3g}" for plan in plans]),
        ("computing, s a step", [f"{plan.layout.compute_seconds:,.4g}" for plan in plans]),
        ("communicating, s a step", [f"{plan.layout.communication_seconds:,.4g}" for plan in plans]),
        ("step, s", [f"{plan.layout.step_seconds:,.4g}" for plan in plans]),
        ("step, over the first", [f"{plan.layout.step_seconds / base:.3f}" for plan in plans]),
        ("hours", [f"{plan.layout.hours:,.4g}" for plan in plans]),
    ]
    return rows


def _copies(plan: ArmPlan) -> str:
    return "one a GPU" if plan.layout.sharding == 1 else f"one in {plan.layout.sharding:,} GPUs"


def _verdict(plan: ArmPlan, config: PlanConfig) -> str:
    layout = plan.layout
    if not layout.fits:
        return (
            f"{plan.cost.name} does not fit: {_gib(layout.total)} GiB a GPU of {config.room / GIB:,.0f}, sharded over "
            "all GPUs with one sequence at once and activations recomputed; take more or larger GPUs"
        )
    how = "DDP" if layout.sharding == 1 else f"FSDP2 over {layout.sharding:,} GPUs"
    how = "one GPU" if config.gpus == 1 else how
    more = f"--gradient-accumulation {layout.accumulation}"
    more += " --gradient-checkpointing" if layout.recompute else ""
    return f"{plan.cost.name} fits: {how}, {layout.micro_batch} at once ({more})"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.3g}"
