"""`nlr compare RECIPE`: every arm on the same batches, and what a decision needs."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tyro.conf import FlagCreatePairsOff

from nlr_lab.recipes import RECIPES
from nlr_lab.runtime.processes import let_threads_sleep, rank

from .options import comparison_defaults, parse_recipe, seconds_of, take_recipe

Task = TypeVar("Task")
Train = TypeVar("Train")
Problem = TypeVar("Problem")


@dataclass(frozen=True, kw_only=True)
class _Options:
    out: str
    """Folder for the runs, results.json, the pictures and report.md; must be empty or new."""
    seeds: int
    """Seeds; on each, every arm gets the same batches."""
    max_minutes: float | None = None
    """End within so many minutes, the report included: no seed is begun that would not, and where not even one would,
    all runs are shortened to fewer steps, which the report says."""
    resume: FlagCreatePairsOff[bool] = False
    """Go on with the runs that are missing in --out."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Delete what is in --out first."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(_Options, Generic[Task, Train]):
    """Options of `nlr compare`; the recipe's own settings are the nested ones."""

    arms: tuple[str, ...]
    """Arms; the first is the baseline. Each: baseline, baseline:init=noble, noble:rank=64,
    noble:rank=64,activation=gelu,depth=1, noble:budget=5%, nonlinear-query+noble:rank=64 (both in one model),
    wide-mlp:match=noble-r64 (a plain model with as many parameters as that arm; by=flops: as many FLOPs), any of them
    with optimizer=muon, or your own module:function (model in, model out). Of a pretrained model: full, head,
    lora:r=4, dora:r=4, peanut:r=4, sine-lora:r=4,omega=200,grid=1e-4/3e-4, sine-dora, nora:r=2, nora++,
    noble-adapter:r=16."""
    tune_lr: tuple[float, ...]
    """Learning rates to try for each arm that names none (lr= or grid=), on a seed of their own; then every arm
    runs at its best."""
    reference: str | None = None
    """Name of the arm that the table compares with; default: the first."""
    timing_rounds: int = 30
    """Interleaved steps of each arm for the step times; 0 omits them."""
    workers: int | None = None
    """So many runs side by side, on this machine's GPUs or cores, or on the Ray cluster that RAY_ADDRESS names (needs
    the extra "ray"); default: one after another."""
    task: Task
    """The data and the model."""
    train: Train
    """The optimization, shared by all arms."""


@dataclass(frozen=True, kw_only=True)
class CompareFieldOptions(_Options, Generic[Problem, Train]):
    """Options of `nlr compare` for neural fields; the recipe's own settings are the nested ones."""

    arms: tuple[str, ...]
    """Arms: dense, low-rank:rank=5, sine:rank=5,omega=50 and the like. Each may add init= (otherwise both
    are tried), lr= (otherwise tuned), gain= and name=."""
    tune_lr: tuple[float, ...]
    """Learning rates to try for each arm and init, on a seed of their own; where an arm's best is at the edge, more of
    them. Then every arm runs at its best."""
    timing_rounds: int = 20
    """Interleaved steps of each arm for the step times; 0 omits them."""
    problem: Problem
    """The signal that is fitted, and the network."""
    train: Train
    """The optimization, shared by all arms."""


def run_compare(arguments: list[str]) -> None:
    """Compare and print the table."""
    name, rest = take_recipe(arguments, "compare")
    if not {"-h", "--help"} & set(rest):
        let_threads_sleep()
    fields = RECIPES[name].command == "fit"
    recipe, options = parse_recipe(
        CompareFieldOptions if fields else CompareOptions,
        arguments,
        command="compare",
        defaults=comparison_defaults,
        nested=("problem", "train") if fields else ("task", "train"),
    )
    max_seconds = seconds_of(options.max_minutes)
    own: dict[str, Any] = {} if fields else {"reference": options.reference, "workers": options.workers}

    from nlr_lab.compare import compare

    comparison = compare(
        recipe,
        options.out,
        arms=options.arms,
        seeds=options.seeds,
        tune_lr=options.tune_lr,
        resume=options.resume,
        overwrite=options.overwrite,
        timing_rounds=options.timing_rounds,
        max_seconds=max_seconds,
        **own,
    )
    if rank() == 0:
        print(comparison)
