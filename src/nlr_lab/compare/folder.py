"""What is compared, and the folder it is compared in: the checked plan, and the rules for using a folder.

Nothing here trains. A folder is refused before anything in it is touched; what may be continued, and what
must be equal for that, is decided here.
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from nlr_lab.runtime.environment import machine, versions
from nlr_lab.runtime.storage import FolderLock, is_free, read_json, write_json
from nlr_lab.training.recipe import Arm, Recipe
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import TEMPORARY, describe_disk_error
from nonlinear_lowrank.validation import check_integer

from .matching import Match, settle_matches
from .rates import tidy_grid
from .record import clean, flatten

MARKER = "compare.json"
SHORTENED = "steps-"
"""How the folder begins, under an arm's, of runs that were shortened for time; the number of steps follows."""
ANOTHER = "use the former value, another folder, or --overwrite"
"""The mend for a folder with other settings."""
# The marker goes last: while it is there, the folder can still be continued or overwritten.
_OURS = ("timing.json", "results.json", "report.md", "curves.png", "rates.png", MARKER)
# What may differ between the runs of one folder: rate and seed are in each run's path, the others change
# no number, or only by rounding (run_training has the same list).
_FREE = {
    *("train.lr", "train.seed", "train.save_every", "train.keep_checkpoints", "train.log_every", "train.tracker"),
    *("train.threads", "train.gradient_accumulation", "train.eval_batch_size", "train.dataloader_workers"),
    *("task.text.cache_dir", "task.tokens.cache_dir"),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The checked arguments of `compare`."""

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    tuning_seed: int
    grid: tuple[float, ...]
    reference: str
    max_extensions: int
    default_rate: float
    threads: int | None
    settings: dict[str, Any]
    defaults: dict[str, Any]
    """Of the settings, those that the fields have anyway: what a folder says that is older than a field."""
    choices: dict[str, Any]
    matches: tuple[Match, ...] = ()

    @staticmethod
    def make(
        recipe: Recipe,
        arms: Sequence[Arm] | None,
        seeds: int | None,
        tune_lr: Sequence[float] | None,
        reference: str | None,
        max_extensions: int,
    ) -> "Plan":
        chosen = tuple(arms) if arms is not None else tuple(Arm.parse(text) for text in recipe.arms)
        count = recipe.seeds if seeds is None else seeds
        grid = tidy_grid(recipe.tune_lr if tune_lr is None else tune_lr)
        names = [arm.name for arm in chosen]
        check_choices(names, count, grid, max_extensions, example="baseline noble:rank=64")
        if reference is not None and reference not in names:
            raise UserError(f"there is no arm {reference!r} to be the reference; there are {', '.join(names)}")
        chosen, matches = settle_matches(recipe, chosen)
        first = recipe.train.seed + 1
        return Plan(
            arms=chosen,
            matches=matches,
            seeds=tuple(range(first, first + count)),
            tuning_seed=recipe.train.seed,
            grid=grid,
            reference=reference or names[0],
            max_extensions=max_extensions,
            default_rate=recipe.train.lr,
            threads=recipe.train.threads,
            settings=shared_settings(recipe),
            defaults=_defaults(recipe.task, "task") | _defaults(recipe.train, "train"),
            choices={
                "train.lr": recipe.train.lr,
                "train.seed": recipe.train.seed,
                "tune_lr": list(grid),
                **{f"grid of {arm.name}": list(tidy_grid(arm.grid)) for arm in chosen if arm.grid},
                "seeds": count,
            },
        )

    def grid_of(self, arm: Arm) -> tuple[float, ...]:
        """The rates that an arm is tuned over; none where it names its rate, or none are given."""
        return () if arm.lr is not None else tidy_grid(arm.grid) or self.grid


def check_choices(
    names: Sequence[str], seeds: object, grid: Sequence[float], max_extensions: object, *, example: str
) -> None:
    """Raises UserError for arms, seeds or rates that make no comparison.

    Args:
        names: of the arms.
        seeds: how many.
        grid: rates to tune over; none: no tuning.
        max_extensions: how often it may grow.
        example: two arms, for the message.
    """
    if len(names) < 2:
        raise UserError(f"a comparison needs at least two arms, such as: {example}")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two arms are called {name!r}; give one of them another with ,name=...")
    for name, count, least in (("seeds", seeds, 1), ("max_extensions", max_extensions, 0)):
        check_integer(name, count, minimum=least)
    if any(not 0 < rate < float("inf") for rate in grid):
        raise UserError("every rate of tune_lr must be a finite number above 0")
    if len(grid) == 1 or len(set(grid)) < len(grid):
        raise UserError("tune_lr needs at least two different rates; to set one rate, set lr instead")


def shared_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings that all runs of a comparison share, flat."""
    flat = flatten(recipe.task, "task") | flatten(recipe.train, "train")
    return {name: value for name, value in flat.items() if name not in _FREE}


def _defaults(config: Any, prefix: str) -> dict[str, Any]:
    """The defaults of a config's fields, by their dotted names."""
    found: dict[str, Any] = {}
    for each in fields(config):
        name, value = f"{prefix}.{each.name}", getattr(config, each.name)
        if is_dataclass(value) and not isinstance(value, type):
            found |= _defaults(value, name)
        elif each.default is not MISSING:
            found |= flatten(each.default, name)
    return found


def arm_settings(arms: Iterable[Arm]) -> dict[str, dict[str, Any]]:
    """What an arm is, without its rate (which is in each run's path)."""

    def describe(arm: Arm) -> dict[str, Any]:
        always = {"method": arm.method, "settings": clean(dict(arm.settings)), "dense_init": arm.dense_init}
        # Only where they are asked for, so that folders from before there were such options go on.
        asked = {"qk_norm": arm.qk_norm, "optimizer": arm.optimizer}
        return always | {name: value for name, value in asked.items() if value}

    return {arm.name: describe(arm) for arm in arms}


def is_new(out: Path, *, resume: bool, overwrite: bool) -> bool:
    """Whether a comparison's folder is new or empty; a used one is refused unless it is to be used."""
    free = is_free(out, resume=resume, overwrite=overwrite)
    if not free and not resume and not overwrite:
        raise UserError(f"{out} is not empty; choose another folder, --resume to go on or --overwrite to replace")
    return free


def check_folder(out: Path, plan: Plan, *, resume: bool, overwrite: bool) -> None:
    """Refuses a folder that is not ours to continue or to replace; changes nothing."""
    if is_new(out, resume=resume, overwrite=overwrite):
        return
    ours = (out / MARKER).exists()
    if overwrite:
        if not ours and (out / "runs").exists():
            raise UserError(f"{out} holds runs that no comparison wrote; choose another folder")
        return
    if not ours:
        raise UserError(f"{out} holds no comparison to go on with; choose an empty folder")
    former = read_json(out / MARKER, settings=dict)
    check_same(f"in {out}", former, plan.settings, arm_settings(plan.arms), ANOTHER, plan.defaults)


def check_same(
    where: str,
    former: Mapping[str, Any],
    settings: Mapping[str, Any],
    arms: Mapping[str, Any],
    mend: str,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Refuses to go on with the runs of other settings, or with other arms of the same names.

    Args:
        where: the runs, for the message.
        former: what was written down of them: "settings", and "arms" by name.
        settings: now, flat.
        arms: now, what each is.
        mend: the end of the message.
        defaults: as for `first_difference`.

    Raises:
        UserError: names the first setting, or the first part of an arm, that differs, with both values.
    """
    found = first_difference(former["settings"], settings, defaults)
    for name, now in arms.items():
        old = former.get("arms", {}).get(name, now)
        parts = [(f"arm {name!r}", old, now)]
        if isinstance(now, dict) and isinstance(old, dict):
            parts = [(f"{key} of arm {name!r}", old.get(key), now.get(key)) for key in now | old]
        found = found or next((part for part in parts if part[1] != part[2]), None)
    if found is not None:
        name, old, new = found
        raise UserError(f"{name} was {old!r} {where} and is {new!r} now; {mend}")


def first_difference(
    before: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> tuple[str, Any, Any] | None:
    """The first setting that two runs do not share, with both values; None where they share all.

    Where data lie (`...source`) is no difference: what they are, the fingerprint says.

    Args:
        before: flat settings, as they were written down.
        now: flat settings.
        defaults: what `before` means where it is older than a setting.
    """
    for name in sorted({*before, *now}):
        old = before.get(name, (defaults or {}).get(name, "(absent)"))
        new = now.get(name, "(absent)")
        if old != new and not name.endswith("source"):
            return name, old, new
    return None


def check_text(out: Path, fingerprint: str) -> None:
    """Refuses to go on with another text than the runs in the folder were trained on."""
    if (out / MARKER).exists() and read_json(out / MARKER).get("fingerprint") != fingerprint:
        raise UserError(f"the runs in {out} were trained on other text or data; bring it back or use another folder")


def open_folder(out: Path, plan: Plan, fingerprint: str, *, overwrite: bool) -> FolderLock:
    """Makes the folder and its marker; with `overwrite` first deletes what a former comparison wrote.

    Raises:
        UserError: it cannot be written, or another process compares in it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(out)
        if overwrite and (out / MARKER).exists():
            shutil.rmtree(out / "runs", ignore_errors=True)
        for name in _OURS if overwrite else ():
            (out / name).unlink(missing_ok=True)
        arms = arm_settings(plan.arms)
        if (out / MARKER).exists():
            arms = read_json(out / MARKER).get("arms", {}) | arms
        marker = {
            "settings": plan.settings,
            "fingerprint": fingerprint,
            "arms": arms,
            "versions": sessions(out / MARKER),
        }
        write_json(out / MARKER, clean(marker))
    except OSError as error:
        raise UserError(f"cannot write to {out}: {describe_disk_error(error)}") from error
    return lock


def lengths(out: Path) -> list[int]:
    """To how many steps runs in this folder were shortened, longest first; those that were not are no part of it."""
    found = {path.name.removeprefix(SHORTENED) for path in out.glob(f"runs/*/{SHORTENED}*")}
    return sorted((int(each) for each in found if each.isdecimal()), reverse=True)


def sessions(marker: Path) -> list[dict[str, str]]:
    """The versions and processors that a folder's runs were made under, this session's last.

    Args:
        marker: the folder's file of shared settings, if it has one yet.
    """
    now = {**versions(), "processor": str(machine()["processor"])}
    before = listed_sessions(read_json(marker)) if marker.exists() else []
    return [session for session in before if session != now] + [now]


def listed_sessions(marker: Mapping[str, Any]) -> list[dict[str, str]]:
    """The sessions that a marker's content names."""
    found = marker.get("versions", [])
    return [found] if isinstance(found, dict) else found  # one, as fields had it at first


def version_notes(marker: Path) -> list[str]:
    """A sentence for each package whose version changed between a folder's sessions, and for the processor."""
    seen = sessions(marker)
    names = sorted({name for session in seen for name in session} - {"processor"})
    found = {name: list(dict.fromkeys(session.get(name, "absent") for session in seen)) for name in names}
    processors = list(dict.fromkeys(session["processor"] for session in seen if "processor" in session))
    notes = [
        f"Runs of this folder were made under several versions of {name}: {', '.join(values)}."
        for name, values in found.items()
        if len(values) > 1
    ]
    if len(processors) > 1:
        notes.append(f"Runs of this folder were made by several processors: {', '.join(processors)}.")
    return notes


def load_timing(out: Path, plan: Plan, rounds: int) -> dict[str, list[float]] | None:
    """Step times of an earlier session, if they are of these arms on this kind of machine."""
    path = out / "timing.json"
    if not path.exists() or rounds == 0:
        return None
    record = read_json(path)
    if record.get("arms") != arm_settings(plan.arms) or record.get("machine") != machine(plan.threads):
        return None
    times = record["times"]
    return times if all(len(series) >= rounds for series in times.values()) else None


def save_timing(out: Path, plan: Plan, times: dict[str, list[float]]) -> None:
    """Keeps step times for a later session, with what they are times of."""
    write_json(out / "timing.json", {"arms": arm_settings(plan.arms), "machine": machine(plan.threads), "times": times})


def write_text(path: Path, text: str) -> None:
    """Writes a text at once: readers see the old one or the new one."""
    staged = path.with_name(f"{TEMPORARY}{path.name}")
    staged.write_text(text, encoding="utf-8")
    staged.replace(path)


def copy_report(out: Path, pictures: Sequence[str], folder: Path, name: str) -> None:
    """Copies record, report and pictures as `name`.json, .md and -picture.png; a picture that is not there goes.

    Args:
        out: a comparison's folder.
        pictures: the names of its pictures.
        folder: an existing one.
        name: how the copies' names begin.
    """
    text = (out / "report.md").read_text(encoding="utf-8")
    for picture in pictures:
        text = text.replace(f"({picture})", f"({name}-{picture})")
        if (out / picture).exists():
            shutil.copyfile(out / picture, folder / f"{name}-{picture}")
        else:
            (folder / f"{name}-{picture}").unlink(missing_ok=True)
    shutil.copyfile(out / "results.json", folder / f"{name}.json")
    write_text(folder / f"{name}.md", text)


def begun(folder: Path) -> bool:
    """Whether there is something to resume; a torn result is removed, so that the run can write it anew."""
    (folder / "result.json").unlink(missing_ok=True)
    return folder.exists() and any(folder.iterdir())
