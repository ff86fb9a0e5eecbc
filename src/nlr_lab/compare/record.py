"""A comparison's record, `results.json`, and the folder that it and the runs are in.

    out/compare.json     the settings that every run in this folder shares, its arms, and the versions they ran under
    out/timing.json      seconds of the interleaved steps
    out/log.jsonl        runs that are left, and how long they take
    out/runs/<arm>/[steps-<n>/][<init>/][head-<lr>/]lr-<lr>/seed-<k>/      one run each, with its result.json
    out/results.json     the record      out/report.md and pictures   made from it

To resume, the marker and each finished run's result.json are enough.
"""

import contextlib
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nlr_lab.bench.timing import paired_ratio
from nlr_lab.runtime.environment import machine, versions
from nlr_lab.runtime.log import LOG
from nlr_lab.runtime.storage import disk_errors, holds_former, opened, read_json, write_json
from nlr_lab.tasks.task import LOSS, Measure
from nonlinear_lowrank.errors import UserError

from .grade import conditions_met
from .statistics import Estimate, compare_pair, curve_cautions, holm, paired_mean, speed_cautions
from .trial import Choice, Run, best_run

MARKER, RESULTS, REPORT, TIMING, RESULT = "compare.json", "results.json", "report.md", "timing.json", "result.json"
SHORTENED = "steps-"
"""Prefix of the folder, under an arm's, of runs that were shortened for time; the number of steps follows."""

Times = Mapping[str, Sequence[float]] | None


_MIXTURE = re.compile(r"[^,]+:[\d.e+-]+(,[^,]+:[\d.e+-]+)+")  # of sources, each perhaps a path


class Folder:
    """One comparison's folder; `settings` are of all runs."""

    def __init__(
        self, path: Path, settings: Mapping[str, Any], arms: Mapping[str, Any], pictures: Sequence[str]
    ) -> None:
        self.path, self.marker = path, path / MARKER
        self.now: dict[str, Any] = clean({"settings": settings, "arms": arms})
        # The marker goes last: while it is there, the folder can still be continued or overwritten.
        self._ours = (TIMING, LOG, RESULTS, REPORT, *pictures, "runs", MARKER)

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Raise UserError for a folder that cannot be resumed from or replaced; change nothing.

        The message names the first setting, or part of an arm, in which the runs differ. Where data lie (`...source`)
        does not matter: the fingerprint says what they are.
        """
        if not holds_former(self.path, MARKER, "comparison", resume=resume, overwrite=overwrite):
            return
        former = read_json(self.marker, settings=dict, arms=dict)
        pairs = [("", former["settings"], self.now["settings"])]
        pairs += [(f" of arm {name!r}", former["arms"].get(name, arm), arm) for name, arm in self.now["arms"].items()]
        for of, before, after in pairs:
            for name in sorted({*before, *after}):
                old, new = before.get(name, "(absent)"), after.get(name, "(absent)")
                # A setting that is newer than the runs does not matter while it is off.
                if old != new and not name.endswith("source") and (name in before or new):
                    was = f"{name}{of} was {old!r} in {self.path} and is {new!r} now"
                    raise UserError(f"{was}; use the former value, another folder, or --overwrite")

    def check_data(self, fingerprint: str) -> None:
        """Raise UserError for other data than the runs in the folder were made on."""
        if (marker := self._read_marker()) and marker.get("fingerprint") != fingerprint:
            raise UserError(f"the runs in {self.path} used other data; restore them, or use another folder")

    def _read_marker(self) -> dict[str, Any]:
        return read_json(self.marker) if self.marker.exists() else {}

    @contextlib.contextmanager
    def opened(self, fingerprint: str, *, overwrite: bool) -> Iterator[None]:
        """Hold the folder; with `overwrite` first delete what a former comparison wrote.

        Raises:
            UserError: it cannot be written, or another process compares in it.
        """
        with opened(self.path, *self._ours, overwrite=overwrite):
            arms = self._read_marker().get("arms", {}) | self.now["arms"]
            own = {"fingerprint": fingerprint, "arms": arms, "versions": self._sessions()}
            with disk_errors(str(self.path)):
                write_json(self.marker, self.now | own)
            yield

    def lengths(self) -> list[int]:
        """Return the numbers of steps that runs were shortened to, longest first."""
        found = {path.name.removeprefix(SHORTENED) for path in self.path.glob(f"runs/*/{SHORTENED}*")}
        return sorted((int(each) for each in found if each.isdecimal()), reverse=True)

    def _sessions(self) -> list[dict[str, str]]:
        """The versions and processors that the runs were made under, this session's last."""
        now = {**versions(), "processor": str(machine()["processor"])}
        return [session for session in self._read_marker().get("versions", []) if session != now] + [now]

    def version_notes(self) -> list[str]:
        """Return a sentence for each package whose version changed between sessions, and for the processor."""
        seen, notes = self._sessions(), []
        for name in sorted({name for session in seen for name in session}):
            found = list(dict.fromkeys(session.get(name, "absent") for session in seen))
            how = "by several processors" if name == "processor" else f"under several versions of {name}"
            if len(found) > 1:
                notes.append(f"Runs of this folder were made {how}: {', '.join(found)}.")
        return notes

    def left_out_notes(self, seeds: Collection[int]) -> list[str]:
        """Return a sentence for arms and seeds that have finished runs in this folder and are not named now."""
        runs = self.path / "runs"
        places = [file.relative_to(runs).parts for file in runs.glob(f"*/**/seed-*/{RESULT}")]
        done = {(parts[0], int(parts[-2].removeprefix("seed-"))) for parts in places}
        arms = sorted({arm for arm, _ in done} - self.now["arms"].keys())
        others = sorted({seed for arm, seed in done if arm not in arms} - set(seeds))
        found = [f"arm `{arm}`" for arm in arms] + [f"seed {seed}" for seed in others]
        why = "Not named in this call, and left out though the folder has their runs"
        return [f"{why}: {', '.join(found)}. p (Holm) does not count them."] if found else []

    def load_times(self, rounds: int, timed_on: Mapping[str, Any]) -> dict[str, list[float]] | None:
        """Return step times of an earlier session, if they are of these arms on this kind of machine."""
        if not (self.path / TIMING).exists() or rounds == 0:
            return None
        record = read_json(self.path / TIMING, "delete it: it is measured again")
        if record.get("arms") != self.now["arms"] or record.get("machine") != timed_on:
            return None
        return record["times"] if all(len(series) >= rounds for series in record["times"].values()) else None

    def save_times(self, times: dict[str, list[float]], timed_on: Mapping[str, Any]) -> None:
        """Keep step times for a later session, with what they are times of."""
        with disk_errors(str(self.path / TIMING)):
            write_json(self.path / TIMING, {"arms": self.now["arms"], "machine": timed_on, "times": times})


def begun(run: Path) -> bool:
    """Return whether there is something to resume; a torn result is removed, so that the run can rewrite it."""
    (run / RESULT).unlink(missing_ok=True)
    return run.exists() and any(run.iterdir())


# --- the record --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ArmRecord:
    """One arm with all that is known of it."""

    name: str
    settings: Mapping[str, Any]
    control: bool
    """It has no method: the baseline and its other inits, and other people's ways to tune."""
    choice: Choice | None
    """None: it diverged at every choice of its tuning; it has no runs then."""
    source: str
    """Origin of the choice."""
    parameters: int
    trainable: int | None = None
    """None: not counted."""
    active: int | None = None
    """Parameters that one token meets; None: not counted."""
    flops: float | None = None
    """Per token, forward."""
    runs: Mapping[int, Run]
    tuning: Sequence[Run] = ()


def build_results(
    about: Mapping[str, Any],
    arms: Sequence[ArmRecord],
    *,
    pairs: Sequence[Sequence[tuple[str, str]]],
    reference: str,
    seeds: Sequence[int],
    measure: Measure = LOSS,
    times: Times = None,
    notes: Sequence[str] = (),
    threads: int | None = None,
) -> dict[str, Any]:
    """Build the whole record. A seed counts when every arm that has a choice finished it.

    `about` has what is not made of the runs (recipe, data, command, tuning_seed, seconds); `pairs` are (reference, arm)
    by name whose difference is tested, in families for Holm's correction; costs are shown against `reference`. `times`
    are seconds of each arm's interleaved steps, `threads` what the runs set.
    """
    running = {arm.name: arm for arm in arms if arm.choice is not None}
    whole = [seed for seed in seeds if running and all(seed in arm.runs for arm in running.values())]
    partial = [seed for seed in seeds if seed not in whole and any(seed in arm.runs for arm in running.values())]
    base = next(arm for arm in arms if arm.name == reference)
    against: dict[str, dict[str, Any]] = {}
    for family in pairs:
        known = [pair for pair in family if running.keys() >= set(pair)]
        found = [_pair(running[one], running[other], whole, times, measure) for one, other in known]
        adjusted = holm([each["delta"]["p_value"] for each in found])
        for (one, other), each, p_holm in zip(known, found, adjusted, strict=True):
            against.setdefault(one, {})[other] = each | {"p_holm": p_holm}
    notes = [*notes, *(note for arm in running.values() for note in _stability_notes(arm))]
    if partial:
        notes.append(f"Left out, because not every arm has finished it: seed {', '.join(map(str, partial))}.")
    results = {
        **about,
        "versions": versions(),
        "machine": machine(threads),
        "metric": asdict(measure),
        "reference": reference,
        "n": len(whole),
        "seeds": whole,
        "incomplete_seeds": partial,
        "arms": [_arm(arm, base, whole, times) for arm in arms],
        "against": against,
        "notes": notes,
    }
    results = clean(results)
    for other, named in results["against"].items():
        for name, pair in named.items():
            pair["grade"] = list(conditions_met(results, name, other))
    return results


def _pair(base: ArmRecord, arm: ArmRecord, seeds: Sequence[int], times: Times, measure: Measure) -> dict[str, Any]:
    """Compare an arm with another, and say what the curves do not support."""
    reference, own = ({seed: each.runs[seed] for seed in seeds} for each in (base, arm))
    ratio = paired_ratio(times[arm.name], times[base.name]) if times else None
    found = compare_pair(reference, own, ratio, speed=measure.is_loss)
    cautions: dict[str, str] = {}
    if (delta := found["delta"]["value"]) is not None:
        curves = {
            each.name: [run.losses if measure.is_loss else run.metric_curve for run in _of_seeds(each, seeds)]
            for each in (base, arm)
        }
        cautions |= curve_cautions(delta, curves, higher_is_better=measure.higher_is_better)
        if found["seeds"] and _have_curves((base, arm), seeds):
            cautions |= speed_cautions(curves, found["bounds"])
            if found["early"]:
                cautions["early"] = (
                    f"`{base.name}` passed its own final loss well before its end in {found['early']} of {len(seeds)} "
                    "seeds (its curve rose again or was flat), which flatters speeds against it"
                )
        cautions |= _tuning_caution(delta, base, arm, measure)
    return found | {"cautions": cautions}


def _tuning_caution(difference: float, base: ArmRecord, arm: ArmRecord, measure: Measure) -> dict[str, str]:
    """Say where the seed on which the learning rates were chosen has it the other way round ("tuning")."""
    best = [run.chosen_by or 0.0 for each in (base, arm) if (run := best_run(each.tuning, measure)) is not None]
    if len(best) < 2 or (there := best[1] - best[0]) * difference >= 0:
        return {}
    return {
        "tuning": f"it is the other way round on the seed that the learning rates were tuned on ({there:+.3g}), so one "
        "of them may be a lucky choice"
    }


def _have_curves(arms: Iterable[ArmRecord], seeds: Sequence[int]) -> bool:
    """Return whether there is more of any evaluation curve than its end."""
    return any(len(arm.runs[seed].losses) > 1 for arm in arms for seed in seeds)


def _stability_notes(arm: ArmRecord) -> list[str]:
    """Seeds and steps where the arm's runs diverged, or spiked."""
    notes = []
    for run in arm.runs.values():
        if run.diverged_at is not None:
            end = "the run ended there" if run.diverged_at == run.steps else "its loss rose and did not recover"
            notes.append(f"`{arm.name}` diverged at step {run.diverged_at} on seed {run.seed}: {end}.")
    spiked = ", ".join(f"{run.spikes} on seed {run.seed}" for run in arm.runs.values() if run.spikes)
    return notes + ([f"The training loss of `{arm.name}` spiked and recovered: {spiked}."] if spiked else [])


def _arm(arm: ArmRecord, base: ArmRecord, seeds: Sequence[int], times: Times) -> dict[str, Any]:
    runs = _of_seeds(arm, seeds)
    mean = {name: _summary(arm, [getattr(run, name) for run in runs]) for name in _AVERAGED}
    return {
        "name": arm.name,
        "settings": dict(arm.settings),
        "control": arm.control,
        "lr": arm.choice and arm.choice.lr,
        "init": (arm.choice and arm.choice.init) or None,
        "head_lr": arm.choice and arm.choice.head_lr,
        "lr_source": arm.source,
        "parameters": arm.parameters,
        "trainable": arm.trainable,
        "active_parameters": arm.active,
        "parameters_percent": 100 * (arm.parameters / base.parameters - 1),
        "flops_per_token": arm.flops,
        "flops_percent": None if not arm.flops or not base.flops else 100 * (arm.flops / base.flops - 1),
        "step_seconds_median": sorted(times[arm.name])[len(times[arm.name]) // 2] if times else None,
        "step_time_ratio": asdict(paired_ratio(times[arm.name], times[base.name])) if times else None,
        "final_loss": mean["final_loss"],
        "score": mean["judged"],
        **{name: mean[name]["mean"] for name in ("best_score", "train_loss", "plain_loss")},
        "train_delta": _loss_delta("train_loss", arm, base, seeds),
        "plain_delta": _loss_delta("plain_loss", arm, base, seeds),
        "runs": [arm.runs[seed].to_json() for seed in sorted(arm.runs)],
        "tuning": [run.to_json() for run in sorted(arm.tuning, key=lambda run: run.lr)],
    }


_AVERAGED = ("final_loss", "judged", "best_score", "train_loss", "plain_loss")


def _of_seeds(arm: ArmRecord, seeds: Sequence[int]) -> list[Run]:
    return [] if arm.choice is None else [arm.runs[seed] for seed in seeds]


def _loss_delta(name: str, arm: ArmRecord, base: ArmRecord, seeds: Sequence[int]) -> dict[str, Any] | None:
    """Difference of one of the runs' losses from the reference's, paired by seed."""
    own, other = ([getattr(run, name) for run in _of_seeds(each, seeds)] for each in (arm, base))
    finite = [[value for value in each if value is not None and math.isfinite(value)] for each in (own, other)]
    if arm is base or not any(finite):
        return None  # the reference, or no such loss
    for values, who in ((finite[1], "the reference"), (finite[0], "it")):
        if len(values) < len(seeds):
            return Estimate(value=None, n=len(seeds), note=f"{who} diverged").to_json()
    return paired_mean([one - two for one, two in zip(*finite, strict=True)]).to_json()


def _summary(arm: ArmRecord, values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and standard deviation over seeds; no mean where a run has no number, for it diverged."""
    finite = [value for value in values if value is not None]
    lost = len(values) - len(finite)
    if arm.choice is None or lost or not values:
        note = f"diverged in {lost} of {len(values)} seeds" if lost else "no finished seed"
        note = "diverged at every choice" if arm.choice is None else note
        return {"mean": None, "sd": None, "n": len(values), "note": note}
    mean = sum(finite) / len(finite)
    square = sum((value - mean) ** 2 for value in finite)
    sd = math.sqrt(square / (len(finite) - 1)) if len(finite) > 1 else None
    return {"mean": mean, "sd": sd, "n": len(finite), "note": ""}


def record_text(results: Mapping[str, Any]) -> str:
    """Return a record as JSON, with each pair of a curve on one line."""
    return re.sub(r"\[\s+([^\s\[\]]+),\s+([^\s\[\]]+)\s+\]", r"[\1, \2]", json.dumps(results, indent=1)) + "\n"


def command_line() -> str:
    """Return the command of this process, as one starts it afresh, with no path of this machine in it."""
    program = Path(sys.argv[0]).name if sys.argv else ""
    if program in ("", "-c", "-m"):
        return "python"
    words = ["python", program] if program.endswith(".py") else [program]
    arguments = [word for word in sys.argv[1:] if word not in ("--resume", "--overwrite")]
    return shlex.join(clean(word) for word in [*words, *arguments])


def clean(value: Any) -> Any:
    """Return what may be written as JSON: absolute paths cut to their last name, NaN and infinity as None."""
    if isinstance(value, Mapping):
        return {str(key): clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [clean(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        if _MIXTURE.fullmatch(text):
            return ",".join(clean(part) for part in text.split(","))
        start, mark, path = text.rpartition("=")
        return start + mark + f".../{Path(path).name}" if Path(path).is_absolute() else text
    return value if value is None or isinstance(value, bool | int) else str(value)
