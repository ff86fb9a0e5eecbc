"""The record of a comparison, `results.json`: the runs' numbers, their statistics, and where they came from.

The record holds everything that the report and the pictures need, and nothing of the machine but its kind:
no host name, no user, and of absolute paths only the last name.
"""

import math
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nlr_lab.bench.timing import paired_ratio
from nlr_lab.runtime.environment import machine, versions
from nlr_lab.runtime.storage import flatten as flat
from nlr_lab.tasks.task import LOSS, Measure

from .statistics import Estimate, PairSummary, compare_pair, curve_cautions, holm, paired_mean, speed_cautions
from .trial import Choice, Curve, Run

Times = Mapping[str, Sequence[float]] | None


@dataclass(frozen=True, kw_only=True)
class ArmRecord:
    """One arm with all that is known of it."""

    name: str
    settings: Mapping[str, Any]
    control: bool = False
    """It has no method: the baseline and its other inits, and other people's ways to tune."""
    choice: Choice | None
    """None: it diverged at every choice of its tuning; it has no runs then."""
    source: str
    """Origin of the choice."""
    parameters: int
    trainable: int | None = None
    """None: not counted."""
    flops: float | None = None
    """Per token, forward."""
    runs: Mapping[int, Run]
    tuning: Sequence[Run] = ()


def build_results(
    *,
    about: Mapping[str, Any],
    arms: Sequence[ArmRecord],
    pairs: Sequence[Sequence[tuple[str, str]]],
    reference: str,
    seeds: Sequence[int],
    tuning_seed: int,
    measure: Measure = LOSS,
    times: Times = None,
    notes: Sequence[str] = (),
    command: str = "",
    seconds: float = 0.0,
    threads: int | None = None,
) -> dict[str, Any]:
    """Build the whole record.

    `pairs` are (reference, arm) by name whose difference is tested, in families for Holm's correction; `reference` is
    the arm that costs are shown against. A seed counts when every arm that has a choice finished it. `times` are the
    seconds of each arm's interleaved steps, `seconds` those of this session, `threads` what the runs set.
    """
    running = {arm.name: arm for arm in arms if arm.choice is not None}
    whole = [seed for seed in seeds if running and all(seed in arm.runs for arm in running.values())]
    partial = [seed for seed in seeds if seed not in whole and any(seed in arm.runs for arm in running.values())]
    base = next(arm for arm in arms if arm.name == reference)
    found: dict[str, dict[str, Any]] = {}
    early = 0
    for family in pairs:
        known = [pair for pair in family if running.keys() >= set(pair)]
        summaries = _family([(running[one], running[other]) for one, other in known], whole, times, measure)
        for (other, name), pair in zip(known, summaries, strict=True):
            found.setdefault(other, {})[name] = pair.to_json()
            early = max(early, pair.early if other == reference else 0)
    notes = [*notes, *(note for arm in running.values() for note in _stability_notes(arm))]
    if early and _have_curves(running.values(), whole):
        notes.append(
            f"`{reference}` passed its own final loss well before its end in {early} of {len(whole)} seeds (its curve "
            "rose again), so step speedups against it are flattered."
        )
    if partial:
        listed = ", ".join(str(seed) for seed in partial)
        notes.append(f"Left out, because not every arm has finished it: seed {listed}.")
    results = {
        **about,
        "command": command,
        "versions": versions(),
        "machine": machine(threads),
        "metric": asdict(measure),
        "reference": reference,
        "n": len(whole),
        "seeds": whole,
        "incomplete_seeds": partial,
        "tuning_seed": tuning_seed,
        "arms": [_arm(arm, base, whole, times) for arm in arms],
        "against": found,
        "notes": notes,
        "seconds": round(seconds, 1),
    }
    return clean(results)  # type: ignore[no-any-return]


def _family(
    pairs: Sequence[tuple[ArmRecord, ArmRecord]], seeds: Sequence[int], times: Times, measure: Measure
) -> list[PairSummary]:
    """Compare (reference, arm) pairs, their p-values adjusted together."""

    def points(run: Run) -> Curve:
        return run.losses if measure.is_loss else run.metric_curve

    summaries = []
    for pair in pairs:
        reference, arm = ({seed: each.runs[seed] for seed in seeds} for each in pair)
        ratio = paired_ratio(times[pair[1].name], times[pair[0].name]) if times else None
        found = compare_pair(reference, arm, ratio, speed=measure.is_loss)
        cautions: tuple[str, ...] = ()
        if found.delta.value is not None:
            curves = {each.name: [points(each.runs[seed]) for seed in seeds] for each in pair}
            cautions = curve_cautions(found.delta.value, curves, higher_is_better=measure.higher_is_better)
            if found.seeds and _have_curves(pair, seeds):
                cautions += speed_cautions(curves, [each.bound for each in found.seeds.values()])
        summaries.append(replace(found, cautions=cautions))
    adjusted = holm([each.delta.p_value for each in summaries])
    return [replace(each, p_holm=p) for each, p in zip(summaries, adjusted, strict=True)]


def _have_curves(arms: Iterable[ArmRecord], seeds: Sequence[int]) -> bool:
    """Return whether there is more of any evaluation curve than its end."""
    return any(len(arm.runs[seed].losses) > 1 for arm in arms for seed in seeds)


def _stability_notes(arm: ArmRecord) -> list[str]:
    """Seeds and steps where the arm's runs diverged, or spiked."""
    notes = []
    for run in arm.runs.values():
        if run.diverged_at is not None:
            end = "the run ended there" if run.final_loss is None else f"it ended at {run.final_loss:.4f}"
            notes.append(f"`{arm.name}` diverged at step {run.diverged_at} on seed {run.seed}: {end}.")
    spiked = ", ".join(f"{run.spikes} on seed {run.seed}" for run in arm.runs.values() if run.spikes)
    return notes + ([f"The training loss of `{arm.name}` spiked and recovered: {spiked}."] if spiked else [])


def _arm(arm: ArmRecord, base: ArmRecord, seeds: Sequence[int], times: Times) -> dict[str, Any]:
    choice, runs = arm.choice, _of_seeds(arm, seeds)

    def summary(name: str) -> dict[str, Any]:
        return _summary(arm, [getattr(run, name) for run in runs])

    return {
        "name": arm.name,
        "settings": dict(arm.settings),
        "control": arm.control,
        "lr": None if choice is None else choice.lr,
        "init": None if choice is None else choice.init or None,
        "lr_source": arm.source,
        "parameters": arm.parameters,
        "trainable": arm.trainable,
        "parameters_percent": 100 * (arm.parameters / base.parameters - 1),
        "flops_per_token": arm.flops,
        "flops_percent": None if not arm.flops or not base.flops else 100 * (arm.flops / base.flops - 1),
        "step_seconds_median": sorted(times[arm.name])[len(times[arm.name]) // 2] if times else None,
        "step_time_ratio": paired_ratio(times[arm.name], times[base.name]).to_json() if times else None,
        "final_loss": summary("final_loss"),
        "score": summary("judged"),
        **{name: summary(name)["mean"] for name in ("best_score", "train_loss", "plain_loss")},
        "train_delta": _loss_delta("train_loss", arm, base, seeds),
        "plain_delta": _loss_delta("plain_loss", arm, base, seeds),
        "runs": [arm.runs[seed].to_json() for seed in sorted(arm.runs)],
        "tuning": [run.to_json() for run in sorted(arm.tuning, key=lambda run: run.lr)],
    }


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


def command_line() -> str:
    """Return the command of this process, as one starts it afresh, with no path of this machine in it."""
    program = Path(sys.argv[0]).name if sys.argv else ""
    if program in ("", "-c", "-m"):
        return "python"
    words = ["python", program] if program.endswith(".py") else [program]
    arguments = [word for word in sys.argv[1:] if word not in ("--resume", "--overwrite")]
    return shlex.join(clean(word) for word in [*words, *arguments])


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one flat mapping with dotted names, `clean`."""
    return {name: clean(each) for name, each in flat(value, prefix).items()}


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
        start, mark, path = text.rpartition("=")
        return start + mark + f".../{Path(path).name}" if Path(path).is_absolute() else text
    return value if value is None or isinstance(value, bool | int) else str(value)
