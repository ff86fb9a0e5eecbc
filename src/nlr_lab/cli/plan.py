"""`nlr plan RECIPE --gpus N --memory 80`: memory, communication and hours, with and without branches, before a GPU is
rented."""

from dataclasses import dataclass
from typing import Any

from tyro.conf import FlagCreatePairsOff, Positional

from nlr_lab.recipes import RECIPES, check_name, recipes_of
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
    """GiB of a GPU; default: the hardware's."""
    utilization: float = 0.4
    """Share of the data sheet's rate that matrix products reach."""
    arms: tuple[str, ...] = ()
    """Arms that are planned; default: the recipe's arms, of a size baseline, noble:rank=64 and noble:rank=256."""
    batch_size: int | None = None
    """Sequences of a step, over all GPUs; default: the recipe's or the size's."""
    steps: int | None = None
    """Default: the recipe's; of a size 20 tokens for each parameter of the plain model."""
    sequence_length: int | None = None
    """Tokens of a sequence; default: the recipe's or the size's."""
    bf16: bool | None = None
    """Under bfloat16 autocast; default: as the recipe trains, and sizes do."""
    gradient_checkpointing: FlagCreatePairsOff[bool] = False
    """Recompute activations in any case; default: only where nothing fits without."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON instead of the table."""


def run_plan(arguments: list[str]) -> None:
    """Print the table, or JSON."""
    options = parse(PlanOptions, arguments, command="plan")

    from nlr_lab.plan.estimate import PlanConfig, arm_cost, format_plan, plan_arm, plan_to_json
    from nlr_lab.plan.presets import PRESETS, find_hardware
    from nlr_lab.training.arms import Arm

    name = options.model.lower() if options.model.lower() in PRESETS else options.model
    if name not in PRESETS and name not in RECIPES:
        if name[:1].isdigit():
            raise UserError(f"unknown size {name!r}; there are {', '.join(PRESETS)}")
        check_name(name)
    if name in recipes_of("fit"):
        raise UserError(f"{name} fits a field, on one device in minutes to hours; plan takes models")
    hardware = find_hardware(options.hardware)
    subject = _of_size(name) if name in PRESETS else _of_recipe(name)
    arms = [Arm.parse(text) for text in options.arms] or subject.arms
    given = {"batch_size": options.batch_size, "steps": options.steps, "bf16": options.bf16}
    settings: dict[str, Any] = {key: getattr(subject, key) if value is None else value for key, value in given.items()}
    if options.steps is None and not subject.steps:
        raise UserError(f"how many steps the epochs of {name} are, only its data say; give --steps")
    length = subject.sequence_length if options.sequence_length is None else options.sequence_length
    config = PlanConfig(
        hardware=hardware,
        gpus=options.gpus,
        memory=options.memory,
        utilization=options.utilization,
        recompute=options.gradient_checkpointing or subject.recompute,
        **settings,
    )
    plans = []
    for arm in arms:
        muon = (arm.optimizer or subject.optimizer) == "muon"
        cost = arm_cost(subject.build(arm), arm.name, length, bf16=config.bf16, muon=muon)
        plans.append(plan_arm(cost, config))
    if options.json:
        print(plan_to_json(name, plans, config))
    else:
        print(format_plan(name, plans, config, width=table_width()))


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """A model and its training, from a recipe or a size."""

    build: Any
    """Arm -> model on meta."""
    arms: list[Any]
    batch_size: int
    steps: int
    sequence_length: int
    bf16: bool
    recompute: bool = False
    optimizer: str = "adamw"


def _of_recipe(name: str) -> _Subject:
    import torch

    from nlr_lab.recipes import get_recipe
    from nlr_lab.training.arms import Arm

    recipe = get_recipe(name)
    train = recipe.train
    kind = getattr(getattr(recipe.task, "model", None), "dtype", None)

    def build(arm: Arm) -> Any:
        model = recipe.task.build_on_meta()
        if isinstance(kind, str):
            model = model.to(getattr(torch, kind))
        return arm.apply(model, recipe.task.adapter_setup(model))

    return _Subject(
        build=build,
        arms=[Arm.parse(text) for text in recipe.arms],
        batch_size=train.batch_size,
        steps=train.steps,
        sequence_length=recipe.task.sequence_length,
        bf16=train.bf16,
        recompute=train.gradient_checkpointing,
        optimizer=train.optimizer,
    )


def _of_size(name: str) -> _Subject:
    from nlr_lab.plan.inspect import build_on_meta
    from nlr_lab.plan.presets import PRESET_ARMS, PRESETS
    from nlr_lab.training.arms import Arm
    from nonlinear_lowrank.analysis.cost import count_parameters

    preset = PRESETS[name]
    return _Subject(
        build=lambda arm: arm.apply(build_on_meta(preset.config())),
        arms=[Arm.parse(text) for text in PRESET_ARMS],
        batch_size=preset.batch_size,
        steps=preset.steps(count_parameters(build_on_meta(preset.config()))),
        sequence_length=preset.sequence_length,
        bf16=True,
    )
