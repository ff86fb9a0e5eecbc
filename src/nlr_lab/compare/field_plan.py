"""What is compared of fields, and in which folder: arms, the checked plan, and the rules for using a folder."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from nlr_lab.fields.folder import OF_PICTURES
from nlr_lab.fields.problem import FieldMethod, Init
from nlr_lab.fields.recipe import FieldRecipe
from nlr_lab.runtime.storage import FolderLock, clear_folder, read_json, write_json
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import describe_disk_error
from nonlinear_lowrank.validation import check_number

from .folder import ANOTHER, check_choices, check_same, is_new, sessions
from .rates import tidy, tidy_grid
from .record import flatten

MARKER = "fields.json"
PICTURES = ("rate.png", "omega.png", "strip.png")

# The marker goes last: while it is there, the folder can still be continued or overwritten.
_OURS = ("results.json", "report.md", *PICTURES, "runs", MARKER)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# What may differ between the runs of one folder: rate and seed are in each run's path, the others change no number,
# or only by rounding.
_FREE = {
    *("train.lr", "train.seed", "train.save_every", "train.keep_checkpoints", "train.threads", "train.device"),
    *(f"problem.{name}" for name in OF_PICTURES),
}


@dataclass(frozen=True, kw_only=True)
class FieldArm:
    """One method of a comparison, with what is tuned of it.

    Raises:
        UserError: see `FieldMethod`; or inits, a rate or a name that are none.
    """

    method: FieldMethod
    """With its first init."""
    inits: tuple[Init, ...] = get_args(Init)
    """Of which the arm takes its best."""
    lr: float | None = None
    """The arm's rate; None: tuned, or the recipe's."""
    name: str = ""
    """In tables, pictures and folders; empty: made from the method."""

    def __post_init__(self) -> None:
        if self.lr is not None:
            check_number("lr", self.lr, above=0)
        known = get_args(Init)
        if not self.inits or len(set(self.inits)) < len(self.inits) or not set(self.inits) <= set(known):
            raise UserError(f"inits must be one or more of {', '.join(known)}, got {self.inits!r}")
        if not self.name:
            words = (
                str(replace(self.method, init="kaiming_sqrt5"))
                .replace("rank=", "k")
                .replace("omega=", "w")
                .replace("e+", "e")
            )
            chosen = "" if len(self.inits) > 1 else f"-{self.inits[0]}"
            object.__setattr__(self, "name", re.sub(r"[^A-Za-z0-9._-]+", "-", words) + chosen)
        if not _NAME.fullmatch(self.name):
            raise UserError(f"the arm's name {self.name!r} must be made of letters, digits, '.', '_' and '-'")

    @classmethod
    def parse(cls, text: str) -> "FieldArm":
        """Reads `FieldMethod`'s short form with `lr=` and `name=` beside it; without `init=` both inits are tried."""
        kind, _, rest = text.strip().partition(":")
        own: dict[str, str] = {}
        left = []
        for option in filter(None, rest.split(",")):
            key, _, value = option.partition("=")
            if key.strip() in own:
                raise UserError(f"the arm {text!r} has {key.strip()} twice; leave one out")
            if key.strip() in ("lr", "name"):
                own[key.strip()] = value.strip()
            else:
                left.append(option)
        method = FieldMethod.parse(":".join(filter(None, (kind, ",".join(left)))))
        inits = (method.init,) if any(each.partition("=")[0].strip() == "init" for each in left) else get_args(Init)
        try:
            rate = float(own["lr"]) if "lr" in own else None
        except ValueError:
            raise UserError(f"lr must be a number, got {own['lr']!r}, in the arm {text!r}") from None
        return cls(method=replace(method, init=inits[0]), inits=inits, lr=rate, name=own.get("name", ""))


@dataclass(frozen=True, kw_only=True)
class FieldPlan:
    """The checked arguments of `compare_fields`."""

    arms: tuple[FieldArm, ...]
    seeds: tuple[int, ...]
    tuning_seed: int
    grid: tuple[float, ...]
    max_extensions: int
    settings: dict[str, Any]

    @classmethod
    def make(
        cls,
        recipe: FieldRecipe,
        arms: Sequence[FieldArm] | None,
        seeds: int | None,
        tune_lr: Sequence[float] | None,
        max_extensions: int,
    ) -> "FieldPlan":
        """Raises UserError for arms, rates or seeds that make no comparison."""
        chosen = tuple(arms) if arms is not None else tuple(FieldArm.parse(text) for text in recipe.arms)
        count = recipe.seeds if seeds is None else seeds
        grid = tidy_grid(recipe.tune_lr if tune_lr is None else tune_lr)
        check_choices(
            [arm.name for arm in chosen], count, grid, max_extensions, example="low-rank:rank=5 sine:rank=5,omega=50"
        )
        first = recipe.train.seed + 1
        return cls(
            arms=chosen,
            seeds=tuple(range(first, first + count)),
            tuning_seed=recipe.train.seed,
            grid=grid,
            max_extensions=max_extensions,
            settings=shared_settings(recipe),
        )

    def choices(self, arm: FieldArm, default: float) -> list[tuple[Init, float]]:
        """What an arm is tuned over: its inits, and the rates unless it has its own."""
        rates = (tidy(arm.lr),) if arm.lr is not None else self.grid or (tidy(default),)
        return [(init, rate) for init in arm.inits for rate in rates]


def shared_settings(recipe: FieldRecipe) -> dict[str, Any]:
    """The settings that all fits of a comparison share, flat."""
    flat = flatten({"problem": recipe.problem, "train": recipe.train})
    return {name: value for name, value in flat.items() if name not in _FREE}


def check_folder(out: Path, plan: FieldPlan, fingerprint: str, *, resume: bool, overwrite: bool) -> None:
    """Refuses a folder that is not ours to go on with or to replace; changes nothing."""
    if is_new(out, resume=resume, overwrite=overwrite):
        return
    if not (out / MARKER).is_file():
        raise UserError(f"{out} holds no comparison of fields (it has no {MARKER}); choose another folder")
    if overwrite:
        return
    former = read_json(out / MARKER, settings=dict, fingerprint=str, arms=dict)
    check_same(f"in {out}", former, plan.settings, arm_settings(plan.arms), ANOTHER)
    if former["fingerprint"] != fingerprint:
        raise UserError(f"the runs in {out} were fitted to other data; bring it back or use another folder")


def open_folder(out: Path, plan: FieldPlan, fingerprint: str, *, overwrite: bool) -> FolderLock:
    """Makes the folder and its marker; with `overwrite` first deletes what a comparison wrote to it.

    Raises:
        UserError: it cannot be written, or another process compares in it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(out)
        if overwrite:
            clear_folder(out, *_OURS)
        arms = arm_settings(plan.arms)
        if (out / MARKER).is_file():
            arms = read_json(out / MARKER, arms=dict)["arms"] | arms
        write_json(
            out / MARKER,
            {
                "settings": plan.settings,
                "fingerprint": fingerprint,
                "arms": arms,
                "versions": sessions(out / MARKER),
            },
        )
    except OSError as error:
        raise UserError(f"cannot write to {out}: {describe_disk_error(error)}") from error
    return lock


def arm_settings(arms: Iterable[FieldArm]) -> dict[str, str]:
    """What an arm is, without init and rate, which are in each run's path."""
    return {arm.name: str(replace(arm.method, init="kaiming_sqrt5")) for arm in arms}
