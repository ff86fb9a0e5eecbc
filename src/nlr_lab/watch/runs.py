"""State and curves of every run in a folder, read from files that are being written.

A run is a folder with a recipe.json (training) or fit.json (a neural field). While it runs its log.jsonl grows; when it
is over there is a result.json. A comparison's own log.jsonl says how many runs are left and how long they take.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from nlr_lab.runtime.log import LOG, read_entries
from nlr_lab.runtime.tables import duration
from nonlinear_lowrank.errors import UserError

_RUN, _COMPARISON, _RESULT = {"recipe.json", "fit.json"}, "compare.json", "result.json"
_NO_RUNS = {"checkpoints", "model", "pictures", "tensorboard", "predicted"}  # folders that hold none
_POINTS = 400  # of a curve that is sent
_RECENT = 6  # entries that a speed is taken of
_SILENT, _GAPS = 60.0, 5.0  # a run is silent after these seconds, and this multiple of the usual gap between entries
_LABELS = {"loss": "training loss", "eval_loss": "evaluation loss", "plain_loss": "training loss, not augmented"}
_OF_RESULTS = {"curve": "eval_loss", "train_curve": "loss", "plain_curve": "plain_loss"}
Curves = dict[str, list[tuple[int, float | None]]]
"""(step, value) by name; None: not a finite number."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """State and curves of a run."""

    group: str
    """Path of its comparison in the folder that is watched; empty: that folder."""
    arm: str
    details: str
    """Learning rate, init and seed, as its folder has them."""
    tuning: bool = False
    """It is on the seed that learning rates are chosen on."""
    state: str
    """"starting", "running", "silent", "done" or "diverged"."""
    step: int = 0
    steps: int = 0
    """0: not known."""
    steps_per_second: float | None = None
    tokens_per_second: float | None = None
    seconds_to_go: float | None = None
    silent: float = 0.0
    """Seconds since its last entry."""
    curves: Curves = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class View:
    """State of all runs in a folder."""

    name: str
    runs: list[RunView]
    planned: int
    """Runs in all, as far as they are known; those in the folder at least."""
    seconds_to_go: float | None
    """Seconds until all runs are over; None: not known."""

    def __str__(self) -> str:
        """One line: how far it is."""
        counts = {state: sum(run.state == state for run in self.runs) for state in ("done", "running", "silent")}
        over = sum(run.state in ("done", "diverged") for run in self.runs)
        words = f"{self.name}: {over} of {self.planned} runs over"
        words += f", {counts['running']} running" if counts["running"] else ""
        words += f", {counts['silent']} silent" if counts["silent"] else ""
        return words + (f"; about {duration(self.seconds_to_go)} left" if self.seconds_to_go else "")

    def to_json(self) -> str:
        """Return the view as JSON."""
        return json.dumps({**asdict(self), "line": str(self)}, allow_nan=False)


class Watched:
    """A folder that is looked at again and again; files that have not changed are not read again.

    Raises:
        UserError: there is no such folder, or no run in it.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder, self.clock = folder, clock
        self._read: dict[Path, tuple[tuple[int, int], Any]] = {}
        if not folder.is_dir():
            raise UserError(
                f"no such folder: {folder}" if not folder.exists() else f"{folder} is a file; name a folder"
            )
        if not any(self._folders()):
            hint = "name what nlr train, finetune, fit, compare, scale or reproduce writes to (--out)"
            raise UserError(f"{folder} holds no run; {hint}")

    def look(self) -> View:
        """Return the state of everything, now."""
        runs, logs = [], {}
        for path, names in self._folders():
            if _COMPARISON in names:
                entries = self._cached(path / LOG, read_entries)
                logs[path] = entries[-1] if entries else {}
            else:
                above = next((logs[each] for each in path.parents if each in logs), {})
                runs.append(self._run(path, above))
        waiting = sum(max(0, int(log.get("left", 0))) for log in logs.values())
        begun = sum(run.state in ("starting", "running", "silent") for run in runs)
        # A run that has begun is among those that its comparison has left.
        planned = len(runs) + max(0, waiting - begun) if logs else len(runs)
        name = self.folder.resolve().name
        return View(name=name, runs=runs, planned=planned, seconds_to_go=self._to_go(logs, runs))

    def _to_go(self, logs: Mapping[Path, Mapping[str, Any]], runs: list[RunView]) -> float | None:
        going = [log for log in logs.values() if log.get("left")]
        known = [log["to_go"] - (self.clock() - log["time"]) for log in going if log.get("to_go")]
        own = [run.seconds_to_go for run in runs if run.state == "running" and run.seconds_to_go is not None]
        # What is running is the least that is to go.
        return max([*known, *own, 0.0]) if known or (own and not going) else None

    def _folders(self) -> Iterator[tuple[Path, set[str]]]:
        """Yield comparisons before their runs, each with the names of its files."""
        for place, folders, files in os.walk(self.folder):
            folders[:] = sorted(each for each in folders if each not in _NO_RUNS and not each.startswith("."))
            names = set(files)
            if _RUN & names or _COMPARISON in names:
                yield Path(place), names

    def _cached(self, file: Path, read: Callable[[Path], Any]) -> Any:
        try:
            stat = file.stat()
        except OSError:
            return read(file)
        key = (stat.st_mtime_ns, stat.st_size)
        if self._read.get(file, ((), None))[0] != key:
            self._read[file] = (key, read(file))
        return self._read[file][1]

    def _run(self, path: Path, comparison: Mapping[str, Any]) -> RunView:
        parts = path.relative_to(self.folder).parts
        group, arm, details = "", path.resolve().name, ""
        at = max((place for place, part in enumerate(parts[:-1]) if part == "runs"), default=None)
        if at is not None:
            group, arm, details = "/".join(parts[:at]), parts[at + 1], " ".join(parts[at + 2 :])
        elif parts:
            arm = "/".join(parts)
        tuning = path.name == f"seed-{comparison.get('tuning_seed')}"
        known: dict[str, Any] = {"group": group, "arm": arm, "details": details, "tuning": tuning}
        entries = _without_undone(self._cached(path / LOG, read_entries))
        result = self._cached(path / _RESULT, _read_result)
        curves = _curves(entries) or _curves_of_result(result or {})
        steps = next((int(entry["of"]) for entry in reversed(entries) if "of" in entry), 0)
        if result is not None:
            diverged = "diverged" in (*result, result.get("status")) or result.get("diverged_at") is not None
            step = int(result.get("steps") or result.get("diverged") or 0)
            return RunView(
                **known, state="diverged" if diverged else "done", step=step, steps=steps or step, curves=curves
            )
        begun = [(path / name).stat().st_mtime for name in _RUN if (path / name).exists()]
        last = max([entry["time"] for entry in entries] or begun)
        step, silent = int(entries[-1]["step"]) if entries else 0, max(0.0, self.clock() - last)
        pace, gap = _pace(entries) if entries else (None, 0.0)
        state = "running" if pace else "starting"
        to_go = max(0.0, (steps - step) / pace - silent) if pace else None
        if silent > max(_SILENT, _GAPS * gap):
            state, to_go = "silent", None
        tokens = next((entry["tokens"] for entry in reversed(entries) if entry.get("tokens")), None)
        known |= {"steps_per_second": pace, "tokens_per_second": pace * tokens if pace and tokens else None}
        known |= {"step": step, "steps": steps, "seconds_to_go": to_go, "silent": silent, "curves": curves}
        return RunView(**known, state=state)


def _read_result(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _without_undone(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out entries of steps that a run took again, since it resumed from a checkpoint before them."""
    kept: list[dict[str, Any]] = []
    for entry in entries:
        if "step" not in entry:
            continue
        while kept and kept[-1]["step"] > entry["step"]:
            kept.pop()
        kept.append(entry)
    return kept


def _pace(entries: list[dict[str, Any]]) -> tuple[float | None, float]:
    """Return steps per second, evaluations included, of the latest entries since the run began or resumed; and the
    longest time between two of them."""
    begun = max((index for index, entry in enumerate(entries) if "of" in entry), default=0)
    by_step = {entry["step"]: entry["time"] for entry in entries[begun:]}
    latest = list(by_step.items())[-_RECENT:]
    gap = max((after[1] - before[1] for before, after in pairwise(latest)), default=0.0)
    steps, seconds = latest[-1][0] - latest[0][0], latest[-1][1] - latest[0][1]
    return (steps / seconds if steps > 0 and seconds > 0 else None), gap


def _curves(entries: list[dict[str, Any]]) -> Curves:
    curves: dict[str, dict[int, float | None]] = {}
    for entry in entries:
        for name, value in entry.items():
            if name not in ("time", "step", "of", "tokens") and isinstance(value, int | float):
                curves.setdefault(_label(name), {})[int(entry["step"])] = value if math.isfinite(value) else None
    return {name: _thinned(list(curve.items())) for name, curve in curves.items()}


def _curves_of_result(result: Mapping[str, Any]) -> Curves:
    """Return the curves of a run whose log did not come along: docs/compare.md carries results alone."""
    curve = result.get("curve") or []
    if curve and isinstance(curve[0], dict):  # of a field: entries as in a log
        return _curves([{**entry, "time": 0.0} for entry in curve])
    found = {_OF_RESULTS[name]: result.get(name) or [] for name in _OF_RESULTS}
    return {_label(name): _thinned([tuple(each) for each in points]) for name, points in found.items() if points}  # type: ignore[misc]


def _label(name: str) -> str:
    return _LABELS.get(name, name.removeprefix("eval_").replace("_", " "))


def _thinned(curve: list[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    stride = math.ceil(len(curve) / _POINTS)
    return curve[-1::-stride][::-1] if stride > 1 else curve
