"""A plan as text and as JSON."""

import json
from collections.abc import Sequence
from typing import Any

from nlr_lab.runtime.tables import number_table, render_table

from .estimate import ASSUMPTIONS, GIB, ArmPlan, PlanConfig


def format_plan(title: str, plans: Sequence[ArmPlan], config: PlanConfig, width: int = 120) -> str:
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


def plan_to_json(title: str, plans: Sequence[ArmPlan], config: PlanConfig) -> str:
    """Return everything as JSON: bytes, FLOPs and seconds as numbers."""
    about: dict[str, Any] = {name: getattr(config, name) for name in ("gpus", "utilization", "batch_size", "steps")}
    about |= {"hardware": vars(config.hardware), "memory_bytes": config.room, "bf16": config.bf16}
    content = {"plan": title, **about, "arms": [plan.to_dict() for plan in plans], "assumptions": ASSUMPTIONS}
    return json.dumps(content, indent=2)


def _cells(plan: ArmPlan, first: ArmPlan) -> dict[str, str]:
    cost, layout = plan.cost, plan.layout
    return {
        "parameters": f"{cost.parameters:,}",
        "of them trained": f"{cost.trainable:,}",
        "FLOPs a token, training": f"{cost.training_flops:,}",
        **{f"{part}, GiB a GPU": _gib(nbytes) for part, nbytes in layout.memory.items()},
        "in all, GiB a GPU": _gib(layout.total),
        "copies of the weights": "one a GPU" if layout.sharding == 1 else f"one in {layout.sharding:,} GPUs",
        "sequences at once": f"{layout.micro_batch} x {layout.accumulation}",
        "activations": "recomputed" if layout.recompute else "kept",
        "sent, GB a GPU and step": f"{layout.moved / 1e9:,.3g}",
        "computing, s a step": f"{layout.compute_seconds:,.4g}",
        "communicating, s a step": f"{layout.communication_seconds:,.4g}",
        "step, s": f"{layout.step_seconds:,.4g}",
        "step, over the first": f"{layout.step_seconds / first.layout.step_seconds:.3f}",
        "hours": f"{layout.hours:,.4g}",
    }


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
