"""The record of a comparison, `results.json`: the runs' numbers, their statistics, and where they came from.

The record holds everything that the report and the pictures need, and nothing of the machine but its kind:
no host name, no user, and of absolute paths only the last name.
"""

import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nlr_lab.runtime.environment import machine, versions
from nlr_lab.runtime.settings import flatten as flat
from nlr_lab.tasks.task import LOSS, Measure

from .statistics import (
    Estimate,
    PairSummary,
    RatioSummary,
    RunCurve,
    claim_cautions,
    compare_pair,
    holm,
    paired_mean,
    summarise_ratios,
)

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one arm as the comparison needs it. `final_loss` is None where the run diverged.

    A run that is judged by its loss may leave out the rest: `score` (what it is judged by), `selection` (the
    same on what choices are made on), `best_score` (the score where the selection was best).
    """

    seed: int
    lr: float
    final_loss: float | None
    steps: int
    seconds: float
    tokens_per_step: int
    fingerprint: str
    curve: tuple[tuple[int, float], ...]
    score: float | None = None
    selection: float | None = None
    best_score: float | None = None
    metric_curve: tuple[tuple[int, float], ...] = ()
    train_loss: float | None = None
    """On the training examples as they were augmented, averaged over the last tenth of the steps."""
    plain_loss: float | None = None
    """On training examples without their augmentation, after the last step."""
    diverged_at: int | None = None
    """The step from which the training loss was up and did not come back, or was no number."""
    spikes: int = 0
    """How often it rose and came back."""

    @property
    def judged(self) -> float | None:
        """What the run is compared by."""
        return self.final_loss if self.score is None or self.final_loss is None else self.score

    @property
    def chosen_by(self) -> float | None:
        """What a learning rate is chosen by."""
        return self.final_loss if self.selection is None or self.final_loss is None else self.selection

    @property
    def status(self) -> str:
        return "diverged" if self.final_loss is None else "done"

    def as_curve(self) -> RunCurve:
        """For the statistics; the final loss closes the curve when the last evaluation lies before the end."""
        points = list(self.curve)
        if self.final_loss is not None and (not points or points[-1][0] < self.steps):
            points.append((self.steps, self.final_loss))
        return RunCurve(
            steps=tuple(float(step) for step, _ in points),
            losses=tuple(loss for _, loss in points),
            total_steps=self.steps,
            final_loss=self.final_loss,
            score=self.judged,
        )


@dataclass(frozen=True, kw_only=True)
class ArmRecord:
    """One arm with all that was found out about it.

    `lr` is None for an arm that diverged at every rate of its tuning; it has no runs then. `control` marks
    arms without a method (the baseline and its other inits, and other people's ways to tune). `flops` is per
    token, forward; `trainable` is None where it was not counted.
    """

    name: str
    description: Mapping[str, Any]
    control: bool
    lr: float | None
    lr_source: str
    parameters: int
    flops: float | None
    runs: Mapping[int, Run]
    tuning: Sequence[Run] = ()
    trainable: int | None = None


def build_results(
    *,
    name: str,
    summary: str,
    settings: Mapping[str, Any],
    data: Mapping[str, Any],
    arms: Sequence[ArmRecord],
    reference: str,
    seeds: Sequence[int],
    tuning_seed: int,
    times: Mapping[str, Sequence[float]] | None,
    notes: Sequence[str],
    command: str,
    seconds: float,
    threads: int | None = None,
    measure: Measure = LOSS,
) -> dict[str, Any]:
    """The whole record, with the statistics of every arm against the reference and against each control.

    Args:
        name: the recipe's.
        summary: one sentence on what was trained.
        settings: every setting, flat.
        data: what the data say of themselves.
        arms: in the order of the tables.
        reference: name of the arm that the main tables compare with.
        seeds: those asked for; a seed counts when every arm that has a learning rate finished it.
        tuning_seed: the seed of the learning-rate runs.
        times: arm -> seconds of its interleaved steps, or None when they were not measured.
        notes: sentences on what the reader must know.
        command: how to repeat.
        seconds: of this session.
        threads: CPU threads that the runs set, if they did.
        measure: what the runs are judged by.
    """
    running = [arm for arm in arms if arm.lr is not None]
    whole = [seed for seed in seeds if running and all(seed in arm.runs for arm in running)]
    partial = [seed for seed in seeds if seed not in whole and any(seed in arm.runs for arm in running)]
    curves = {arm.name: {seed: arm.runs[seed].as_curve() for seed in whole} for arm in running}
    base = next(arm for arm in arms if arm.name == reference)
    references = [reference] + [arm.name for arm in arms if arm.control and arm.name != reference]
    scores = {arm.name: [_score_curve(arm.runs[seed], measure) for seed in whole] for arm in running}
    against = {other: _against(other, curves, scores, times, measure) for other in references if other in curves}
    notes = list(notes)
    if any(len(curve.steps) > 1 for of_seeds in curves.values() for curve in of_seeds.values()):
        notes += _pair_notes(reference, against.get(reference, {}), len(whole))
    notes += [note for arm in running for note in _stability_notes(arm)]
    if partial:
        listed = ", ".join(str(seed) for seed in partial)
        notes.append(f"Left out, because not every arm has finished it: seed {listed}.")
    ratios = {arm.name: _ratio(times, arm.name, reference) for arm in arms}
    return clean(
        {
            "format": FORMAT,
            "recipe": {"name": name, "summary": summary, "settings": dict(settings)},
            "command": command,
            "data": dict(data),
            "versions": versions(),
            "machine": machine(threads),
            "loss_unit": measure.unit if measure.is_loss else "nats",
            "metric": asdict(measure),
            "reference": reference,
            "n": len(whole),
            "seeds": whole,
            "incomplete_seeds": partial,
            "tuning_seed": tuning_seed,
            "arms": [_arm_json(arm, base, whole, ratios[arm.name], times) for arm in arms],
            "against": {
                other: {arm: pair.to_json() for arm, pair in pairs.items()} for other, pairs in against.items()
            },
            "notes": notes,
            "seconds": round(seconds, 1),
        }
    )


def _ratio(times: Mapping[str, Sequence[float]] | None, arm: str, reference: str) -> RatioSummary | None:
    if not times or arm not in times or reference not in times:
        return None
    return summarise_ratios([a / b for a, b in zip(times[arm], times[reference], strict=True)])


def _against(
    reference: str,
    curves: Mapping[str, Mapping[int, RunCurve]],
    scores: Mapping[str, Sequence[Sequence[tuple[float, float]]]],
    times: Mapping[str, Sequence[float]] | None,
    measure: Measure,
) -> dict[str, PairSummary]:
    pairs = {
        name: compare_pair(curves[reference], runs, _ratio(times, name, reference), speed=measure.is_loss)
        for name, runs in curves.items()
        if name != reference
    }
    corrected = holm([pair.delta.p_value for pair in pairs.values()])

    has_speed = any(len(curve.steps) > 1 for of_seeds in curves.values() for curve in of_seeds.values())

    def cautions(name: str, pair: PairSummary) -> tuple[str, ...]:
        if pair.delta.value is None:
            return ()
        return claim_cautions(
            pair.delta.value,
            {each: scores[each] for each in (reference, name)},
            higher_is_better=measure.higher_is_better,
            speeds=tuple(pair.seeds.values()) if has_speed else (),
        )

    return {
        name: replace(pair, p_holm=p, cautions=cautions(name, pair))
        for (name, pair), p in zip(pairs.items(), corrected, strict=True)
    }


def _score_curve(run: Run, measure: Measure) -> list[tuple[float, float]]:
    """The score that a run is compared by, over its steps."""
    if measure.is_loss:
        curve = run.as_curve()
        return list(zip(curve.steps, curve.losses, strict=True))
    return [(float(step), value) for step, value in run.metric_curve]


def _stability_notes(arm: ArmRecord) -> list[str]:
    """Where the arm's runs diverged, or spiked."""
    notes = []
    for run in arm.runs.values():
        if run.diverged_at is not None:
            end = "the run ended there" if run.final_loss is None else f"it ended at {run.final_loss:.4f}"
            notes.append(f"`{arm.name}` diverged at step {run.diverged_at} on seed {run.seed}: {end}.")
    spiked = {run.seed: run.spikes for run in arm.runs.values() if run.spikes}
    if spiked:
        listed = ", ".join(f"{count} on seed {seed}" for seed, count in spiked.items())
        notes.append(f"The training loss of `{arm.name}` spiked and came back: {listed}.")
    return notes


def _pair_notes(reference: str, pairs: Mapping[str, PairSummary], n: int) -> list[str]:
    notes = []
    early = max((pair.early for pair in pairs.values()), default=0)
    if early:
        notes.append(
            f"`{reference}` passed its own final loss well before its end in {early} of {n} seeds (its curve "
            "rose again), so step speedups against it are flattered."
        )
    return notes


def _arm_json(
    arm: ArmRecord,
    base: ArmRecord,
    seeds: Sequence[int],
    ratio: RatioSummary | None,
    times: Mapping[str, Sequence[float]] | None,
) -> dict[str, Any]:
    flops = None if not arm.flops or not base.flops else 100 * (arm.flops / base.flops - 1)
    seconds = sorted(times[arm.name]) if times and arm.name in times else None
    return {
        "name": arm.name,
        "settings": dict(arm.description),
        "control": arm.control,
        "lr": arm.lr,
        "lr_source": arm.lr_source,
        "parameters": arm.parameters,
        "trainable": arm.trainable,
        "parameters_percent": 100 * (arm.parameters / base.parameters - 1),
        "flops_per_token": arm.flops,
        "flops_percent": flops,
        "step_seconds_median": None if seconds is None else seconds[len(seconds) // 2],
        "step_time_ratio": None if ratio is None else ratio.to_json(),
        "final_loss": _summary(arm, [run.final_loss for run in _of_seeds(arm, seeds)]),
        "score": _summary(arm, [run.judged for run in _of_seeds(arm, seeds)]),
        "best_score": _summary(arm, [run.best_score for run in _of_seeds(arm, seeds)])["mean"],
        "train_loss": _summary(arm, [run.train_loss for run in _of_seeds(arm, seeds)])["mean"],
        "plain_loss": _summary(arm, [run.plain_loss for run in _of_seeds(arm, seeds)])["mean"],
        "train_delta": _loss_delta("train_loss", arm, base, seeds),
        "plain_delta": _loss_delta("plain_loss", arm, base, seeds),
        "runs": [_run_json(arm.runs[seed]) for seed in sorted(arm.runs)],
        "tuning": [_run_json(run) for run in sorted(arm.tuning, key=lambda run: run.lr)],
    }


def _loss_delta(name: str, arm: ArmRecord, base: ArmRecord, seeds: Sequence[int]) -> dict[str, Any] | None:
    """How much lower or higher one of the runs' losses is than the reference's, paired by seed."""
    values = {each.name: [getattr(run, name) for run in _of_seeds(each, seeds)] for each in (arm, base)}
    whole = {key: [value for value in each if _is_number(value)] for key, each in values.items()}
    if arm is base or not any(whole.values()):
        return None  # the reference, or no such loss
    for each, who in ((base, "the reference"), (arm, "it")):
        if len(whole[each.name]) < len(seeds):
            return Estimate(value=None, n=len(seeds), note=f"{who} diverged").to_json()
    return paired_mean([one - two for one, two in zip(*whole.values(), strict=True)]).to_json()


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _run_json(run: Run) -> dict[str, Any]:
    return asdict(run) | {"status": run.status}


def _of_seeds(arm: ArmRecord, seeds: Sequence[int]) -> list[Run]:
    return [] if arm.lr is None else [arm.runs[seed] for seed in seeds]


def _summary(arm: ArmRecord, losses: Sequence[float | None]) -> dict[str, Any]:
    """Mean and standard deviation over seeds; no mean where a run has no number, for it diverged."""
    if arm.lr is None:
        return {"mean": None, "sd": None, "n": 0, "note": "diverged at every rate"}
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < len(losses):
        note = f"diverged in {len(losses) - len(finite)} of {len(losses)} seeds"
        return {"mean": None, "sd": None, "n": len(losses), "note": note}
    if not finite:
        return {"mean": None, "sd": None, "n": 0, "note": "no finished seed"}
    mean = sum(finite) / len(finite)
    sd = None
    if len(finite) > 1:
        sd = math.sqrt(sum((loss - mean) ** 2 for loss in finite) / (len(finite) - 1))
    return {"mean": mean, "sd": sd, "n": len(finite), "note": ""}


# --- where the numbers came from -----------------------------------------------------------------------------


def command_line() -> str:
    """The command of this process, as one starts it afresh, with no path of this machine in it."""
    program = Path(sys.argv[0]).name if sys.argv else ""
    if program in ("", "-c", "-m"):
        return "python"
    words = ["python", program] if program.endswith(".py") else [program]
    arguments = [word for word in sys.argv[1:] if word not in ("--resume", "--overwrite")]
    return shlex.join(clean(word) for word in [*words, *arguments])


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings as one flat mapping with dotted names, as they may be written down (`clean`)."""
    return {name: clean(each) for name, each in flat(value, prefix).items()}


def clean(value: Any) -> Any:
    """What may be written as JSON: absolute paths cut to their last name, NaN and infinity to None."""
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
    if value is None or isinstance(value, bool | int):
        return value
    return str(value)
