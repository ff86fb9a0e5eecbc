"""The record of a comparison of fields, `results.json`: the fits' numbers, their statistics, where they came from.

The record holds everything that the report and the plot need, and nothing of the machine but its kind.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from nlr_lab.bench.timing import paired_ratios
from nlr_lab.fields.problem import FieldMethod, Init
from nlr_lab.runtime.environment import machine, versions
from nonlinear_lowrank.errors import UserError

from .rate_distortion import bd_psnr, bd_rate
from .record import clean
from .statistics import Estimate, claim_cautions, holm, late_change, paired_mean

FORMAT = 1

UNITS = {"psnr": "dB", "iou": "%"}
"""Of scores that have one."""


@dataclass(frozen=True, kw_only=True)
class FieldRun:
    """One fit. Without a score it has diverged, or has not been fitted."""

    init: Init
    lr: float
    seed: int
    score: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    curve: Sequence[Mapping[str, float]] = ()
    seconds: float = 0.0
    diverged: int | None = None
    """The step at which it did."""

    @property
    def value(self) -> float | None:
        """The score; None where it diverged."""
        return None if self.score is None else self.metrics[self.score]

    @property
    def late(self) -> tuple[float, float] | None:
        """The change of the score over the last steps, and their share of all: see `late_change`."""
        return None if self.score is None else late_change(self.points)

    @property
    def points(self) -> list[tuple[float, float]]:
        """(step, score) of its evaluations."""
        return [] if self.score is None else [(entry["step"], entry[self.score]) for entry in self.curve]


@dataclass(frozen=True, kw_only=True)
class FieldArmRecord:
    """One arm with all that was found out about it; `choice` is None where every choice diverged."""

    name: str
    method: FieldMethod
    choice: tuple[Init, float] | None
    parameters: int
    omega: float | None = None
    """Of the sine, as the network has it: also where the method leaves it to a published table."""
    runs: tuple[FieldRun, ...]
    tuning: tuple[FieldRun, ...]


def build_record(
    *,
    name: str,
    problem: str,
    settings: Mapping[str, Any],
    fingerprint: str,
    arms: Sequence[FieldArmRecord],
    dense: int,
    seeds: Sequence[int],
    tuning_seed: int,
    times: Mapping[str, Sequence[float]] | None,
    notes: Sequence[str],
    command: str,
    seconds: float,
) -> dict[str, Any]:
    """The whole record.

    Args:
        name: the recipe's.
        problem: what was fitted.
        settings: every setting, flat.
        fingerprint: of the data.
        arms: in the order of the tables.
        dense: parameters of the dense network, of which sizes are shares.
        seeds: that were asked for; those that every arm has count.
        tuning_seed: on which inits and rates were chosen.
        times: seconds of interleaved steps by arm, or None.
        notes: sentences for the report.
        command: how to repeat it.
        seconds: that this session took.
    """
    going = [arm for arm in arms if arm.choice is not None]
    whole = [seed for seed in seeds if going and all(any(run.seed == seed for run in arm.runs) for arm in going)]
    scores = [run.score for arm in arms for run in arm.runs if run.score is not None]
    score = scores[0] if scores else "score"
    metrics = next((run.metrics for arm in arms for run in arm.runs if run.value is not None), {})
    rate = "bits_per_pixel" if "bits_per_pixel" in metrics else "parameters"
    base = next((arm.name for arm in arms if arm.method.kind == "dense"), arms[0].name)
    ratios = {} if times is None else {each: ratio.to_json() for each, ratio in paired_ratios(times, base).items()}
    curves = {arm.name: [run.points for run in arm.runs if run.seed in whole] for arm in arms}
    records = [_arm(arm, whole, rate, dense, ratios.get(arm.name)) for arm in arms]
    return {
        "format": FORMAT,
        "recipe": name,
        "problem": problem,
        "settings": clean(dict(settings)),
        "fingerprint": fingerprint,
        "score": score,
        "unit": UNITS.get(score, ""),
        "rate": rate,
        "dense_parameters": dense,
        "step_time_base": base if times is not None else None,
        "seeds": whole,
        "n": len(whole),
        "tuning_seed": tuning_seed,
        "arms": records,
        "pairs": _pairs(records, curves),
        "rate_distortion": _rate_distortion(records, whole),
        "notes": list(notes),
        "command": command,
        "seconds": seconds,
        "machine": machine(settings.get("train.threads")),
        "versions": versions(),
    }


def _arm(
    arm: FieldArmRecord, seeds: Sequence[int], rate: str, dense: int, step_time: Mapping[str, Any] | None
) -> dict[str, Any]:
    runs = [run for run in arm.runs if run.seed in seeds]
    values = {run.seed: run.value for run in runs}
    diverged = [run.seed for run in runs if run.value is None]
    whole = [run for run in runs if run.value is not None] if not diverged else []
    numbers = [run.value for run in whole if run.value is not None]
    late = [found for run in whole if (found := run.late) is not None]
    means = {key: float(np.mean([run.metrics[key] for run in whole])) for key in (whole[0].metrics if whole else ())}
    return {
        "name": arm.name,
        "method": asdict(arm.method) | {"init": None if arm.choice is None else arm.choice[0]},
        "init": None if arm.choice is None else arm.choice[0],
        "lr": None if arm.choice is None else arm.choice[1],
        "omega": arm.omega,
        "parameters": arm.parameters,
        "percent": 100 * arm.parameters / dense,
        "rate": float(arm.parameters) if rate == "parameters" else means.get(rate),
        "scores": {str(seed): value for seed, value in values.items()},
        "diverged": diverged,
        "mean": float(np.mean(numbers)) if numbers else None,
        "sd": float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None,
        "n": len(numbers),
        "metrics": means,
        "late_gain": float(np.mean([gain for gain, _ in late])) if late else None,
        "late_share": max(share for _, share in late) if late else None,
        "seconds": float(np.mean([run.seconds for run in whole])) if whole else None,
        "step_time": step_time,
        "curves": [[dict(entry) for entry in run.curve] for run in runs],
        "tuning": [{"init": run.init, "lr": run.lr, "value": run.value} for run in arm.tuning if _fitted(run)],
    }


def _fitted(run: FieldRun) -> bool:
    return run.value is not None or run.diverged is not None


def _pairs(
    arms: Sequence[Mapping[str, Any]], curves: Mapping[str, Sequence[Sequence[tuple[float, float]]]]
) -> list[dict[str, Any]]:
    """Sine minus plain low rank at equal rank, paired by seed; p by Holm over all of them."""
    pairs = []
    for sine in (arm for arm in arms if arm["method"]["kind"] == "sine"):
        for low in (arm for arm in arms if arm["method"]["kind"] == "low-rank"):
            if low["parameters"] != sine["parameters"]:
                continue
            lost = [arm["name"] for arm in (sine, low) if _is_lost(arm)]
            if lost:
                delta = Estimate(value=None, n=0, note=f"{' and '.join(lost)} diverged")
            elif sine["mean"] is None or low["mean"] is None:
                continue  # not fitted yet
            else:
                delta = paired_mean([sine["scores"][seed] - low["scores"][seed] for seed in sine["scores"]])
            names = {"sine": sine["name"], "low_rank": low["name"], "rank": sine["method"]["rank"]}
            of_both = {arm["name"]: curves[arm["name"]] for arm in (low, sine)}
            cautions = () if delta.value is None else claim_cautions(delta.value, of_both, higher_is_better=True)
            pairs.append({**names, "delta": delta, "cautions": list(cautions)})
    adjusted = holm([pair["delta"].p_value for pair in pairs])
    return [pair | {"delta": pair["delta"].to_json(), "p_holm": p} for pair, p in zip(pairs, adjusted, strict=True)]


def _rate_distortion(arms: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> dict[str, Any]:
    """The two kinds' curves and how far apart they are: of the means, and seed by seed."""
    curves = {kind: _curve(arms, kind) for kind in ("low-rank", "sine")}
    lost = [arm["name"] for curve in curves.values() for arm in curve if _is_lost(arm)]

    def points(kind: str, value: Callable[[Mapping[str, Any]], float]) -> list[tuple[float, float]]:
        return [(arm["rate"], value(arm)) for arm in curves[kind]]

    found: dict[str, Any] = {kind: [arm["name"] for arm in curve] for kind, curve in curves.items()}
    for name, delta in (("bd_rate", bd_rate), ("bd_score", bd_psnr)):
        try:
            if lost:  # without its worst point a curve flatters
                raise UserError(f"{' and '.join(lost)} diverged")
            found[name] = delta(points("low-rank", _mean), points("sine", _mean), names=("low-rank", "sine"))
            found[f"{name}_note"] = ""
        except UserError as error:
            found[name], found[f"{name}_note"] = None, str(error)
        by_seed: list[float | None] = []
        for seed in seeds if found[name] is not None else ():
            try:
                by_seed.append(delta(*(points(kind, _of_seed(seed)) for kind in ("low-rank", "sine"))))
            except UserError:
                by_seed.append(None)
        found[f"{name}_by_seed"] = by_seed
    return found


def _mean(arm: Mapping[str, Any]) -> Any:
    return arm["mean"]


def _of_seed(seed: int) -> Callable[[Mapping[str, Any]], float]:
    return lambda arm: arm["scores"][str(seed)]


def _curve(arms: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """Arms of a kind by rising size; of several at one size (omegas) that which was best where rates were chosen.

    Where one of them had no choice of rates, that which ended best. An arm that diverged is on its curve, without a
    score: it has none to be left out for.
    """
    by_size: dict[int, list[Mapping[str, Any]]] = {}
    for arm in arms:
        if arm["method"]["kind"] == kind and (arm["mean"] is not None or _is_lost(arm)):
            by_size.setdefault(arm["parameters"], []).append(arm)
    curve = []
    for _, equal in sorted(by_size.items()):
        tuned = [[each["value"] for each in arm["tuning"]] for arm in equal]
        values = [max(map(_or_lowest, each)) for each in tuned] if all(tuned) else [_or_lowest(_mean(e)) for e in equal]
        curve.append(equal[values.index(max(values))])
    return curve


def _is_lost(arm: Mapping[str, Any]) -> bool:
    """Whether an arm diverged, with a seed or at every choice of init and rate."""
    return bool(arm["diverged"]) or (arm["lr"] is None and bool(arm["tuning"]))


def _or_lowest(value: float | None) -> float:
    return -math.inf if value is None else value
