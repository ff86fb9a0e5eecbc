"""`nlr plan RECIPE --gpus N --memory 80`: memory, communication and hours, with and without branches, before a GPU is
rented."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tyro.conf import FlagCreatePairsOff, Positional

from nlr_lab.recipes import RECIPES, check_name, get_recipe, recipes_of
from nonlinear_lowrank.errors import UserError

from .options import parse, table_width


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Cost of training: parameters, FLOPs, bytes, traffic and hours of every arm, from shapes alone.

    The smallest sharding that fits is found, and how many sequences a GPU then takes at once. Assumptions are printed.
    """

    model: Positional[str]
    """A recipe's name, or a size: 124m, 350m, 1.3b, 7b, 13b, 70b."""
    gpus: int = 1
    """Number of GPUs."""
    hardware: str = "h100"
    """a100, h100, h200, b200 or rtx4090."""
    memory: float | None = None
    """GiB of a GPU; none: the hardware's."""
    utilization: float = 0.4
    """Share of the data sheet's rate that matrix products reach."""
    arms: tuple[str, ...] = ()
    """Arms that are planned; none: the recipe's arms; for a size baseline, noble:rank=64 and noble:rank=256."""
    batch_size: int | None = None
    """Sequences of a step, over all GPUs; none: the recipe's or the size's."""
    steps: int | None = None
    """Steps of training; none: the recipe's; for a size 20 tokens per parameter of the plain model."""
    sequence_length: int | None = None
    """Tokens of a sequence; none: the recipe's or the size's."""
    bf16: bool | None = None
    """Under bfloat16 autocast; none: as the recipe trains, and sizes do."""
    gradient_checkpointing: FlagCreatePairsOff[bool] = False
    """Recompute activations in any case, not only where nothing fits without."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON instead of the table."""


def run_plan(arguments: list[str]) -> None:
    """Print the table, or JSON."""
    options = parse(PlanOptions, arguments, command="plan")

    from nlr_lab.plan.presets import PRESETS, find_hardware

    name = options.model.lower() if options.model.lower() in PRESETS else options.model
    if name not in PRESETS and name not in RECIPES:
        if name[:1].isdigit():
            raise UserError(f"unknown size {name!r}; choose from {', '.join(PRESETS)}")
        check_name(name)
    if name in recipes_of("fit"):
        raise UserError(f"{name} fits a field, on one device in minutes to hours; plan takes models")
    hardware = find_hardware(options.hardware)

    import torch

    from nlr_lab.plan.estimate import PlanConfig, arm_cost, format_plan, plan_arm, plan_to_json
    from nlr_lab.plan.inspect import check_length
    from nlr_lab.training.arms import Arm

    recipe = _of_size(name, options) if name in PRESETS else get_recipe(name)
    task, train = recipe.task, recipe.train
    given = {
        each: getattr(train if getattr(options, each) is None else options, each)
        for each in ("batch_size", "steps", "bf16")
    }
    if options.steps is None and not given["steps"]:
        raise UserError(f"only the data of {name} say how many steps its epochs are; give --steps")
    config = PlanConfig(
        hardware=hardware,
        gpus=options.gpus,
        memory=options.memory,
        utilization=options.utilization,
        recompute=options.gradient_checkpointing or train.gradient_checkpointing,
        **given,
    )
    length = task.sequence_length if options.sequence_length is None else options.sequence_length
    kind = getattr(getattr(task, "model", None), "dtype", None)  # of a pretrained model
    plans, texts = [], options.arms or recipe.arms
    arms = [Arm.parse(text) for text in texts]
    if any("match=" in text for text in texts):
        from nlr_lab.compare.model_trials import resolve_matches  # brings the trainer, a second of imports

        arms = resolve_matches(recipe, arms)
    names = [arm.name for arm in arms]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two arms are called {double!r}; omit one, or rename one with ,name=...")
    for arm in arms:
        model = task.build_on_meta()
        check_length(model, options.sequence_length)
        if isinstance(kind, str):
            model = model.to(getattr(torch, kind))
        model = arm.apply(model, task.adapter_setup(model))
        muon = (arm.optimizer or train.optimizer) == "muon"
        plans.append(plan_arm(arm_cost(model, arm.name, length, bf16=config.bf16, muon=muon), config))
    if options.json:
        print(plan_to_json(name, plans, config))
    else:
        print(format_plan(name, plans, config, width=table_width()))


def _of_size(name: str, options: PlanOptions) -> Any:
    """Return what a plan reads of a recipe, for a model of known size."""
    from nlr_lab.plan.inspect import build_on_meta
    from nlr_lab.plan.presets import PRESET_ARMS, PRESETS
    from nonlinear_lowrank.analysis.cost import count_parameters

    preset = PRESETS[name]
    tokens = (options.batch_size or preset.batch_size) * (options.sequence_length or preset.sequence_length)
    # 20 tokens for each parameter: Hoffmann et al. 2022, arXiv:2203.15556.
    steps = max(1, round(20 * count_parameters(build_on_meta(preset.config())) / tokens))
    task = SimpleNamespace(
        build_on_meta=lambda: build_on_meta(preset.config()),
        adapter_setup=lambda model: None,
        sequence_length=preset.sequence_length,
    )
    plain = {"bf16": True, "gradient_checkpointing": False, "optimizer": "adamw", "head_lr": None, "seed": 0}
    train = SimpleNamespace(batch_size=preset.batch_size, steps=steps, **plain)
    return SimpleNamespace(task=task, train=train, arms=PRESET_ARMS)
