"""`nlr compare RECIPE`: every arm on the same batches, and what a decision needs."""

import math
from dataclasses import dataclass
from typing import Any

from tyro.conf import FlagCreatePairsOff

from nlr_lab.recipes import recipes_of
from nlr_lab.runtime.processes import let_threads_sleep, rank
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .checkpoint import check_out
from .options import gives, parse_recipe


@dataclass(frozen=True, kw_only=True)
class _Options:
    out: str
    """Folder for the runs, results.json, the pictures and report.md; must be empty or new."""
    seeds: int
    """Seeds; on each, every arm gets the same batches."""
    tune_lr: tuple[float, ...]
    """Learning rates to try for each arm that names none (lr= or grid=), on a separate seed; then every arm runs
    at its best. For fields also over each init. Where an arm's best is at the edge, its grid is extended."""
    timing_rounds: int
    """Interleaved steps of each arm for the step times; 0 omits them."""
    max_minutes: float | None = None
    """End within this many minutes, the report included: no seed is begun that would exceed them, and where the first
    would, all runs are shortened to fewer steps, which the report says."""
    reference: str | None = None
    """Name of the arm that the table compares with; none: the first. For neural fields, where each sine is compared
    with the low rank of its size, of the step times alone; none: the first dense one."""
    workers: int | None = None
    """Runs side by side, on this machine's GPUs or cores, or on the Ray cluster that RAY_ADDRESS names (needs
    the extra "ray"); more runs than GPUs share them. None: one after another."""
    resume: FlagCreatePairsOff[bool] = False
    """Continue with the runs that are missing in --out."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Delete what is in --out first."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(_Options):
    """Options of `nlr compare`; the recipe's own settings are the nested ones."""

    arms: tuple[str, ...]
    """Arms; the first is the baseline. Each: baseline, baseline:init=noble, noble:rank=64,
    noble:rank=64,activation=gelu,depth=1, noble:budget=5%, nonlinear-query+noble:rank=64 (both in one model),
    wide-mlp:match=noble-r64 (a plain model with as many parameters as that arm; by=flops: as many FLOPs),
    moe:match=noble-r64,experts=8,active=2 (experts in place of the MLPs, as many FLOPs per token), any of them with
    optimizer=muon, or your own module:function (model in, model out). For a pretrained model: full, head, lora:r=4,
    dora:r=4, peanut:r=4, oft, sine-lora:r=4,omega=200,grid=1e-4/3e-4, sine-dora, nora:r=2, nora++,
    noble-adapter:r=16."""


@dataclass(frozen=True, kw_only=True)
class CompareFieldOptions(_Options):
    """Options of `nlr compare` for neural fields; the recipe's own settings are the nested ones."""

    arms: tuple[str, ...]
    """Arms: dense, low-rank:rank=5, sine:rank=5,omega=50 and the like. Each may add init= (otherwise both
    are tried), lr= (otherwise tuned), gain= and name=."""


def run_compare(arguments: list[str]) -> None:
    """Compare and print the table."""
    if not {"-h", "--help"} & set(arguments):
        let_threads_sleep()
    fields = arguments[:1] and arguments[0] in recipes_of("fit")
    recipe, options = parse_recipe(
        CompareFieldOptions if fields else CompareOptions,
        arguments,
        command="compare",
        defaults=lambda recipe: {
            "out": f"runs/compare-{recipe.name}",
            "timing_rounds": 20 if fields else 30,
            **{name: getattr(recipe, name) for name in ("arms", "seeds", "tune_lr")},
        },
    )
    check_integer("--seeds", options.seeds, minimum=1)
    check_integer("--timing-rounds", options.timing_rounds, minimum=0)
    check_out(options, "compare.json", "comparison")
    minutes = options.max_minutes
    if minutes is not None and not 0 < minutes < math.inf:
        raise UserError(f"--max-minutes must be above 0 and finite, got {minutes:g}; omit it for no limit")
    names = ("arms", "seeds", "tune_lr", "timing_rounds", "reference", "workers", "resume", "overwrite")

    if gives(arguments, "train.lr"):
        _check_rate(options, bool(fields))
    if not fields and gives(arguments, "train.head_lr"):
        _check_head_rate(options, recipe)

    from nlr_lab.compare import compare

    given = {name: getattr(options, name) for name in names}
    comparison = compare(recipe, options.out, max_seconds=None if minutes is None else 60 * minutes, **given)
    if rank() == 0:
        print(comparison)


def _check_rate(options: _Options, fields: bool) -> None:
    """Raise UserError where --lr would reach no arm."""
    if options.tune_lr:
        raise UserError("--lr does nothing where rates are tuned: give them to --tune-lr, or --tune-lr without any")
    from nlr_lab.fields.problem import FieldArm
    from nlr_lab.training.arms import Arm

    arms = [(FieldArm if fields else Arm).parse(text) for text in options.arms]  # type: ignore[attr-defined]
    if all(arm.lr is not None or getattr(arm, "grid", ()) for arm in arms):
        raise UserError("--lr does nothing: every arm has its own lr= or grid=; change these in --arms")


def _check_head_rate(options: _Options, recipe: Any) -> None:
    """Raise UserError where --head-lr would reach no arm."""
    from nlr_lab.training.arms import Arm, apply_arm

    apply_arm(recipe, Arm(), recipe.task.build_on_meta())  # refuses a model without a new head before data are read
    if all(arm.method == "head" or arm.head_lr for arm in map(Arm.parse, options.arms)):  # type: ignore[attr-defined]
        raise UserError("--head-lr does nothing: every arm is head or has its own head_lr=; change --arms, or omit it")
