"""A run again: the recipe of a run folder as it was, what has changed around it, and whether the bits are the same."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nlr_lab.runtime.environment import provenance
from nlr_lab.runtime.storage import read_json
from nlr_lab.tasks.task import changed_files, data_record
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import hash_file

from .recipe import Recipe
from .result import TrainResult
from .run_folder import DATA, MODEL, RECIPE, RESULT


@dataclass(frozen=True, kw_only=True)
class FormerRun:
    """A run folder that is to be repeated."""

    path: Path
    recipe: Recipe
    about: dict[str, Any]
    """Contents of its recipe.json."""

    @classmethod
    def read(cls, path: Path, command: str = "train") -> "FormerRun":
        """Return the run of a folder, which `nlr train` or `nlr finetune` (`command`) is to repeat.

        Raises:
            UserError: it is no run folder, its recipe cannot be read, or it is the other command's.
        """
        if not (path / RECIPE).is_file():
            what = "is no run folder" if path.is_dir() else "does not exist"
            hint = "; of a comparison name one of its runs" if (path / "compare.json").is_file() else ""
            raise UserError(f"{path} {what}: there is no {path / RECIPE}{hint}")
        about = read_json(path / RECIPE, recipe=dict)
        recipe = Recipe.from_dict(about["recipe"])
        own = "finetune" if recipe.task.pretrained else "train"
        if own != command:
            raise UserError(f"the run in {path} is one of nlr {own}: nlr {own} --from {path} --out NEW")
        return cls(path=path, recipe=recipe, about=about)

    def changes(self) -> list[str]:
        """Return a line for each version, property of the machine, commit and data file that is not as it was.

        Raises:
            UserError: data.json is damaged, or a file of the data cannot be read.
        """
        now = provenance(self.recipe.train.threads)
        lines = []
        for part in ("versions", "machine"):
            before = self.about.get(part) or {}
            for name in sorted(before.keys() | now[part].keys()) if before else ():
                if before.get(name) != now[part].get(name):
                    lines.append(f"{name} was {before.get(name, 'absent')} and is {now[part].get(name, 'absent')} now")
        lines += _git_changes(self.about.get("git"), now["git"])
        if (self.path / DATA).is_file():
            former = read_json(self.path / DATA, sources=dict, fingerprint=str)
            lines += changed_files(former, data_record(self.recipe.task, former["fingerprint"]))
        return lines

    def verdict(self, result: TrainResult, out: Path) -> str:
        """Return one line on whether the repetition, with this result in this folder, gave the same bits."""
        if result.fingerprint != self.about.get("fingerprint"):
            return f"not the data of {self.path}: what was trained on has another fingerprint"
        if not (self.path / RESULT).is_file():
            return f"{self.path} was not finished: there is no result to compare with"
        before = _bits(TrainResult.from_json((self.path / RESULT).read_text(encoding="utf-8")))
        now = _bits(result)
        for name in before:
            if before[name] != now[name]:
                return f"not the bits of {self.path}: {name} was {_short(before[name])} and is {_short(now[name])}"
        weights = [_weights(folder / MODEL) for folder in (self.path, out)]
        if weights[0] != weights[1]:
            return f"not the bits of {self.path}: the losses are the same and the weights differ"
        return f"the same bits as {self.path}: every loss and score{', every weight' if weights[0] else ''}"


def _git_changes(before: Any, now: Any) -> list[str]:
    if not before:
        return []
    lines = []
    if before["dirty"]:
        lines.append(f"the working directory had changes beside its commit {before['commit'][:12]}")
    if now is None or now["commit"] != before["commit"]:
        present = "has none" if now is None else f"is at {now['commit'][:12]}"
        lines.append(f"the working directory was at commit {before['commit'][:12]} and {present} now")
    elif now["dirty"]:
        lines.append(f"the working directory has changes beside its commit {now['commit'][:12]}")
    return lines


def _bits(result: TrainResult) -> dict[str, str]:
    """All numbers but the clock's, as JSON writes them: exactly."""
    numbers = result.to_dict()
    return {name: json.dumps(numbers[name]) for name in numbers if name not in ("seconds", "fingerprint")}


def _weights(folder: Path) -> dict[str, str]:
    return {file.name: hash_file(file) for file in sorted(folder.glob("*.safetensors"))}


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
