"""The folder of one training run: may it be written to, its files (docs/training.md lists them), the same run again."""

import json
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from nlr_lab.recipes import RECIPES, get_recipe
from nlr_lab.runtime.environment import determinism, provenance
from nlr_lab.runtime.log import LOG
from nlr_lab.runtime.storage import (
    as_option,
    discard,
    disk_errors,
    flatten,
    holds_former,
    opened,
    read_json,
    step_folders,
    write_json,
)
from nlr_lab.tasks.task import changed_files, data_record
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.card import shown_name, table, write_card
from nonlinear_lowrank.hub.loading import BASE
from nonlinear_lowrank.hub.storage import hash_file, staged_folder, versions
from nonlinear_lowrank.validation import one_line

from .arms import is_adapted
from .recipe import Recipe, TrainConfig
from .result import TrainResult
from .trainer import RunTrainer

RECIPE, DATA, RESULT, MODEL = "recipe.json", "data.json", "result.json", "model"
# RECIPE goes last: while it is there, the folder can still be resumed or overwritten.
_OURS = (RESULT, LOG, MODEL, "checkpoints", "tensorboard", DATA, RECIPE)

FREE = frozenset(
    {
        *("train.save_every", "train.keep_checkpoints", "train.log_every", "train.tracker", "train.threads"),
        *("train.gradient_accumulation", "train.eval_batch_size", "train.dataloader_workers"),
        *("task.text.cache_dir", "task.tokens.cache_dir"),
    }
)
"""Settings of a recipe that change no number of a run, or only by rounding; log_every that of spikes too."""
# A resumed run may have other names too, and other settings of comparisons.
_FREE = FREE | {"name", "description", "arm.name", "arm.grid", "arms", "seeds", "tune_lr"}


class RunFolder:
    """One run's folder: new, empty, or an earlier run's, for a recipe that is to be run in it."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.path, self.recipe = path, recipe
        self._held = ExitStack()
        self._shared: int | None = None  # of a run that is made longer
        self._moved = False  # the data

    def check(self, *, resume: bool, overwrite: bool, prepared: Any = None) -> TrainResult | None:
        """Return the result of a finished run that is resumed, else None; UserError where it may not be written to.

        A resumed run may have more steps than it began with, if its learning rate has not yet decayed for fewer.
        Where data lie (`...source`) does not matter: their fingerprint is compared, here for a finished run (its data
        are `prepared`, or prepared for this), else in `open`.
        """
        if not holds_former(self.path, RECIPE, "training run of ours", resume=resume, overwrite=overwrite):
            return None
        hint = f"restore it, or delete {self.path} to retrain"
        former = Recipe.from_dict(read_json(self.path / RECIPE, hint, recipe=dict)["recipe"])
        before, now = flatten(former.to_dict()), flatten(self.recipe.to_dict())
        if 0 < former.train.steps < self.recipe.train.steps:
            self._shared = self._shared_steps(former.train)
            before["train.steps"] = now["train.steps"]
        for name in sorted((before.keys() | now.keys()) - _FREE):
            if name.endswith("source") and before.get(name) and now.get(name):
                self._moved |= before[name] != now[name]
            elif before.get(name) != now.get(name):
                raise UserError(
                    f"{name} was {before.get(name)!r} when the run in {self.path} started and is {now.get(name)!r} "
                    "now; resume with the former value, use another folder, or --overwrite"
                )
        result = self.path / RESULT
        if not result.is_file() or self._shared is not None:
            return None
        if self._moved:
            self._check_data((prepared or self.recipe.task.prepare(progress=False)).fingerprint)
        try:
            return _read_result(result)
        except UserError as error:
            print(f"{error}; it is rewritten", file=sys.stderr)
            return None

    def _check_data(self, fingerprint: str) -> None:
        if read_json(self.path / RECIPE, recipe=dict).get("fingerprint") != fingerprint:
            raise UserError(
                f"the text is no longer the one that the run in {self.path} was started on; "
                "restore the former one, or use another folder"
            )

    def _shared_steps(self, former: TrainConfig) -> int:
        """Return how many steps the longer run shares; UserError where no checkpoint is among them."""
        now, steps = self.recipe.train, former.steps
        if former.group_by_length:
            raise UserError(f"with group_by_length the order of the data depends on steps; keep {steps}")
        # A share of the steps is another number of them now.
        shared = 0 if former.warmup_share else min(former.warmup_steps, now.warmup_steps)
        if former.schedule in ("constant", "wsd") and not former.warmup_share:
            shared = steps - (former.decay_steps if former.schedule == "wsd" else 0)
        reached = list(step_folders(self.path / "checkpoints"))
        if reached and reached[0] > shared:
            raise UserError(
                f"the run in {self.path} is at step {reached[-1]} of a {former.schedule} schedule over {steps} steps, "
                f"which differs from one over {now.steps} from step {shared} on, and no checkpoint is older; "
                f"start a new run with --init-from {self.path}, or use constant or wsd where more steps may follow"
            )
        return shared

    def open(self, fingerprint: str, *, overwrite: bool) -> None:
        """Make the folder this run's; UserError where its run began with other data, or it cannot be written."""
        about = self.path / RECIPE
        if not overwrite and about.is_file():
            self._check_data(fingerprint)
        self._held.enter_context(opened(self.path, *_OURS, overwrite=overwrite))
        with disk_errors(str(self.path)):
            if self._shared is not None:
                for step, child in step_folders(self.path / "checkpoints").items():
                    if step > self._shared:
                        print(f"deleting {child}, which is not part of the longer run", file=sys.stderr)
                        discard(child)
                (self.path / RESULT).unlink(missing_ok=True)
            if self._shared is not None or self._moved:
                write_json(about, {**read_json(about, recipe=dict), "recipe": self.recipe.to_dict()})
            if not about.is_file():
                recipe = {"recipe": self.recipe.to_dict(), "fingerprint": fingerprint}
                made = {**provenance(self.recipe.train.threads), "deterministic": determinism()}
                write_json(about, {**recipe, **made})
            if self._moved or not (self.path / DATA).is_file():
                write_json(self.path / DATA, data_record(self.recipe.task, fingerprint))

    def close(self) -> None:
        """Let other processes in."""
        self._held.close()

    def export(self, trainer: RunTrainer, tokenizer: Any, result: TrainResult) -> None:
        """Write the final model, its tokenizer and its card. All processes call it."""
        if not trainer.is_world_process_zero():
            trainer.export(self.path)
            return
        place, about = self.path / MODEL, {"step": trainer.state.global_step}
        with disk_errors(f"the model to {place}"), staged_folder(place, about) as folder:
            trainer.export(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            model = trainer.plain_model()
            base: Any = model.get_base_model() if is_adapted(model) else None
            if hasattr(base, "write_base"):
                base.write_base(folder / BASE)
            data = read_json(self.path / DATA, "delete it: it is recreated", sources=dict, fingerprint=str)
            _write_card(folder, self.recipe, result, data, trainer.drawn)

    def write_result(self, trainer: RunTrainer, prepared: Any, result: TrainResult) -> None:
        """Write the last file of a run."""
        if trainer.is_world_process_zero():
            drawn = {"drawn": trainer.drawn} if trainer.drawn else {}
            about = {"data": prepared.describe() | drawn, "versions": versions()}
            with disk_errors(str(self.path / RESULT)):
                write_json(self.path / RESULT, {**result.to_dict(), **about})


def _read_result(file: Path) -> TrainResult:
    try:
        return TrainResult.from_json(file.read_text(encoding="utf-8"))
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is {one_line(error)}") from error


# --- the model's card -----------------------------------------------------------------------------------------


def _write_card(
    folder: Path, recipe: Recipe, result: TrainResult, data: dict[str, Any], drawn: list[dict[str, Any]]
) -> None:
    """Write the model card, with data, the recipe setting by setting, and final numbers."""
    tuned, arm = recipe.task.pretrained, recipe.arm
    rows: dict[str, Any] = {"fingerprint of the data as trained on": f"`{data['fingerprint']}`"}
    for setting, about in data["sources"].items():
        rows[setting] = shown_name(about["name"]) + (f", sha256 `{about['sha256']}`" if about.get("sha256") else "")
    for each in drawn:
        counted = f"{each['sequences']:,} sequences, {each['passes']:g} passes"
        rows[f"drawn from {shown_name(each['source'])}"] = counted
    given = {name: value for name, value in _settings(recipe).items() if value not in (None, [], "")}
    again = "`nlr train --from RUN`, or `nlr finetune --from RUN`, repeats it from its run folder."
    numbers: dict[str, Any] = {"runs": "n = 1", "seed": result.seed, "learning rate": result.lr, "steps": result.steps}
    numbers["evaluation loss"] = result.final_loss
    if result.bits_per_byte is not None:
        numbers["bits per byte"] = result.bits_per_byte
    numbers |= {f"{name} (scored examples)": value for name, value in result.scores.items()}
    if result.metric != "loss":
        numbers[f"{result.metric}, held out"] = result.selection
    numbers["parameters"] = f"{result.parameters:,}, {result.parameters_added:,} of them added by the method"
    numbers["trained parameters"] = f"{result.trainable:,}"
    if result.diverged_at is not None:
        numbers["diverged"] = f"the training loss rose at step {result.diverged_at} and did not recover"
    bases = [value for name, value in flatten(recipe.task).items() if name.endswith("checkpoint") and value]
    start = getattr(recipe.task, "init_from", "")
    begun = f"trained on from {shown_name(start)}" if start else "trained from scratch"
    how = f"tuned by {arm.name}" if tuned else f"{begun}, arm {arm.name}"
    write_card(
        folder,
        title=f"{recipe.name}, {arm.name}",
        summary=f"A model {how}, {result.steps:,} steps, by nonlinear-lowrank's recipe `{recipe.name}`.",
        command=command_of(recipe),
        base=bases[0] if tuned and bases else None,
        sections={
            "Data": table(rows),
            "Training": f"{again}\n\n```json\n{json.dumps(given, indent=1)}\n```",
            "Results": table(numbers),
        },
        limits=("The numbers are of one run (n = 1): they say nothing about how much a seed moves them.",),
    )


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return all settings of a run by their dotted names, paths by their last part."""
    paths, shown = ("source", "valid_source", "tokenizer", "checkpoint", "cache_dir", "init_from"), {}
    for name, value in flatten(recipe.to_dict()).items():
        path = name.rpartition(".")[2] in paths and isinstance(value, str) and PurePath(value).name != value
        if name.startswith(("task.", "train.", "arm.")):
            # In a mixture each source is a path.
            shown[name] = ",".join(map(shown_name, value.split(","))) if path else value
    return shown


def command_of(recipe: Recipe) -> str:
    """Return the command that makes a run: the recipe, the arm, and all that is not as the recipe has it, paths by
    their last part. A recipe that `nlr` lacks has only its Python call."""
    if recipe.name not in RECIPES:
        return f"run_training(recipe, out), a recipe {recipe.name!r} of its own"
    words = ["nlr", RECIPES[recipe.name].command, recipe.name, "--arm", str(recipe.arm)]
    own = _settings(get_recipe(recipe.name))
    left_out = ("arm.", "task.backbone.") if getattr(recipe.task, "init_from", "") else ("arm.",)
    for name, value in _settings(recipe).items():
        if name.startswith(left_out) or own.get(name, ...) == value:
            continue
        words += as_option(name, value)
    return shlex.join(words)


# --- the same run again ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FormerRun:
    """A run folder that is to be repeated: its recipe, the contents of its recipe.json, and its result if it ended."""

    path: Path
    recipe: Recipe
    about: dict[str, Any]
    result: TrainResult | None

    @classmethod
    def read(cls, path: Path, command: str = "train") -> "FormerRun":
        """Return the run of a folder, which `nlr train` or `nlr finetune` (`command`) is to repeat; else UserError."""
        if not (path / RECIPE).is_file():
            what = "is not a run folder" if path.is_dir() else "does not exist"
            hint = "; of a comparison name one of its runs" if (path / "compare.json").is_file() else ""
            raise UserError(f"{path} {what}: there is no {path / RECIPE}{hint}")
        about = read_json(path / RECIPE, recipe=dict)
        recipe = Recipe.from_dict(about["recipe"])
        own = "finetune" if recipe.task.pretrained else "train"
        if own != command:
            raise UserError(f"the run in {path} is one of nlr {own}: nlr {own} --from {path} --out NEW")
        try:
            result = _read_result(path / RESULT) if (path / RESULT).is_file() else None
        except UserError as error:
            hint = f"nlr {command} --config {path / RECIPE} --out {path} --resume rewrites it"
            raise UserError(f"{error}; {hint}") from error
        return cls(path=path, recipe=recipe, about=about, result=result)

    def changes(self) -> list[str]:
        """Return a line for each version, property of the machine, commit and data file that has changed."""
        now = provenance(self.recipe.train.threads)
        before, present = _conditions(self.about), _conditions(now)
        lines = []
        for name in sorted(before.keys() | present.keys()):
            if before.get(name) != present.get(name):
                lines.append(f"{name} was {before.get(name, 'absent')} and is {present.get(name, 'absent')} now")
        for git, had in ((self.about.get("git"), "had"), (now["git"], "has")):
            if git and git["dirty"]:
                lines.append(f"the working directory {had} changes beside its commit {git['commit'][:12]}")
        if (self.path / DATA).is_file():
            hint = "delete it: the files are then not compared"
            former = read_json(self.path / DATA, hint, sources=dict, fingerprint=str)
            lines += changed_files(former, data_record(self.recipe.task, former["fingerprint"]))
        return lines

    def verdict(self, result: TrainResult, out: Path) -> str:
        """Return one line on whether the repetition, with this result in this folder, gave the same bits."""
        if result.fingerprint != self.about.get("fingerprint"):
            return f"not the data of {self.path}: what was trained on has another fingerprint"
        if self.result is None:
            return f"{self.path} was not finished: there is no result to compare with"
        before = self.result.to_dict()
        for name, value in result.to_dict().items():
            old, new = json.dumps(before[name]), json.dumps(value)
            if old != new and name != "seconds":
                return f"not the bits of {self.path}: {name} was {old[:60]} and is {new[:60]}"
        files = [sorted((folder / MODEL).glob("*.safetensors")) for folder in (self.path, out)]
        weights = [{file.name: hash_file(file) for file in each} for each in files]
        if weights[0] != weights[1]:
            return f"not the bits of {self.path}: the losses are the same and the weights differ"
        return f"the same bits as {self.path}: every loss and score{', every weight' if weights[0] else ''}"


def _conditions(about: dict[str, Any]) -> dict[str, Any]:
    git = about.get("git") or {}
    return {**about.get("versions", {}), **about.get("machine", {}), "commit": git.get("commit")}
