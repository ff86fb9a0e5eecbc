"""Columns of tables, read from a comparison's record."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nlr_lab.compare.statistics import paired_mean

from .table import EQUAL_TIME

Cell = dict[str, Any]


def cell(value: float | None, *, why: str = "", n: int | None = None, **more: Any) -> Cell:
    """Return a cell; one without a value has a reason."""
    if value is None or not math.isfinite(value):
        return {"why": why or "no number"}
    return {"value": value, **({"n": n} if n is not None else {}), **more}


def over_seeds(values: list[float | None], why: str = "diverged") -> Cell:
    """Return the mean over seeds with its 95 % interval by Student's t, where there are several."""
    if not values or None in values:
        return cell(None, why=why)
    found = paired_mean([value for value in values if value is not None])
    more: Cell = {} if found.low is None else {"low": found.low, "high": found.high}
    return cell(found.value, n=len(values), **more)


class Arm:
    """An arm's part of a comparison's record, and what else its columns are made of."""

    def __init__(self, results: Mapping[str, Any], name: str, counts: Mapping[str, int], factor: float) -> None:
        self.results, self.counts, self.factor = results, counts, factor
        self.own = next(arm for arm in results["arms"] if arm["name"] == name)
        self.base = next(arm for arm in results["arms"] if arm["name"] == results["reference"])
        self.pair = results["against"].get(results["reference"], {}).get(name)
        self.runs = [run for run in self.own["runs"] if run["seed"] in results["seeds"]]
        self.judged = "final_loss" if results["metric"]["name"] == "loss" else "score"

    def seeds(self, number: Callable[[Mapping[str, Any]], float | None]) -> Cell:
        """Return a number of each run over the seeds."""
        return over_seeds([None if run["final_loss"] is None else number(run) for run in self.runs])

    def score(self) -> Cell:
        """Return what the runs are judged by, shares in percent."""
        return self.seeds(lambda run: self.factor * run[self.judged])

    def at_equal_time(self, key: str, number: Callable[[float], float] = float) -> Cell:
        """Return a number of the "final_loss" or "score" that each run has when the reference's has finished.

        Hours are those of the steps, as timed in turn: the reference's last step falls on step (its steps / step time
        ratio) of the arm, where the curve is read, linear between evaluations. An arm that is done by then has its
        final number.
        """
        ratio, ends = self.own["step_time_ratio"], {run["seed"]: run for run in self.base["runs"]}
        if ratio is None:
            return cell(None, why="not timed")
        if not self.runs or not ends or any(run["final_loss"] is None for run in (*self.runs, *ends.values())):
            return cell(None, why="diverged")

        def then(run: Mapping[str, Any]) -> float | None:
            curve = run["curve"] if key == "final_loss" else run["score_curve"] or run["metric_curve"]
            points = [*(point for point in curve if point[0] < run["steps"]), (run["steps"], run[key])]
            step = ends[run["seed"]]["steps"] / ratio["median"]
            steps, values = np.array(points, dtype=np.float64).T
            found = float(np.interp(step, steps, values, left=math.nan))
            return number(found) if math.isfinite(found) else None

        return over_seeds([then(run) for run in self.runs], "no evaluation before the reference had finished")

    def score_at_equal_time(self) -> Cell:
        """Return `score`, at equal time."""
        return self.at_equal_time(self.judged, lambda value: self.factor * value)

    def estimate(self, name: str, factor: float = 1.0) -> Cell:
        """Return a paired statistic against the reference."""
        if self.pair is None:
            return cell(None, why="it is the reference" if self.own is self.base else "diverged")
        found = self.pair[name]
        ends = sorted(factor * found[end] for end in ("low", "high") if found[end] is not None)
        value, interval = found["value"], dict(zip(("low", "high"), ends, strict=False))
        return cell(None if value is None else factor * value, why=found["note"], n=found["n"], **interval)

    def step_time(self) -> Cell:
        """Return the step time over the reference's, percent."""
        ratio = self.own["step_time_ratio"]
        if ratio is None:
            return cell(None, why="not timed")
        values = {name: 100 * (ratio[name] - 1) for name in ("median", "low", "high")}
        return cell(values.pop("median"), n=ratio["n"], **values)

    def counted(self, name: str, unit: float) -> Cell:
        """Return an exact count."""
        value = self.counts.get(name)
        return cell(None if value is None else value / unit, why="not counted")

    def to_baseline(self) -> Cell:
        """Return the steps after which the reference's final loss is reached, in thousands."""
        if self.own is self.base:
            return self.seeds(lambda run: run["steps"] / 1000)
        found = [each["steps_to_reference_loss"] for each in (self.pair or {}).get("seeds", {}).values()]
        return over_seeds([each and each / 1000 for each in found], "not reached")

    def lower_train(self) -> Cell:
        """Return how much lower the training loss is than the reference's, percent."""
        own, base = self.own["train_loss"], self.base["train_loss"]
        return cell(None if not own or not base else 100 * (1 - own / base), n=len(self.runs))

    def diverged(self) -> Cell:
        """Return the first step at which a run diverged."""
        steps = [run["diverged_at"] for run in self.own["runs"] if run["diverged_at"] is not None]
        return {"value": min(steps)} if steps else {"value": "stable", "n": len(self.own["runs"])}


COUNTED = {"params_body_m", "trained_body_k", "trained_body_m"}
"""Columns that `Arm.counts` has to know."""
MEASURES: dict[str, Callable[[Arm], Cell]] = {
    "params_plus_pct": lambda arm: cell(arm.own["parameters_percent"]),
    "params_m": lambda arm: cell(arm.own["parameters"] / 1e6),
    "params_k": lambda arm: cell(arm.own["parameters"] / 1e3),
    "params_body_m": lambda arm: arm.counted("body", 1e6),
    "trained_m": lambda arm: cell(arm.own["trainable"] / 1e6),
    "trained_body_k": lambda arm: arm.counted("trained_body", 1e3),
    "trained_body_m": lambda arm: arm.counted("trained_body", 1e6),
    "size_pct": lambda arm: cell(arm.own.get("percent", 100 * arm.own["parameters"] / arm.base["parameters"])),
    "step_ms": lambda arm: cell(1e3 * (arm.own["step_seconds_median"] or math.nan), why="not timed"),
    "step_time_plus_pct": Arm.step_time,
    "flops_plus_pct": lambda arm: cell(arm.own["flops_percent"], why="not counted"),
    "eval_loss": lambda arm: arm.seeds(lambda run: run["final_loss"]),
    "train_loss": lambda arm: arm.seeds(lambda run: run["train_loss"]),
    "train_loss_lower_pct": Arm.lower_train,
    "delta_loss": lambda arm: arm.estimate("delta"),
    "step_speedup": lambda arm: arm.estimate("step_speedup"),
    "wallclock_speedup": lambda arm: arm.estimate("wall_clock_speedup"),
    "steps_to_baseline_k": Arm.to_baseline,
    "perplexity": lambda arm: arm.seeds(lambda run: math.exp(run["final_loss"])),
    "relative_gain_pct": lambda arm: arm.estimate("delta", -100 / (arm.base["final_loss"]["mean"] or math.nan)),
    "diverged_step": Arm.diverged,
    "top1_pct": Arm.score,
    "psnr": Arm.score,
    f"eval_loss{EQUAL_TIME}": lambda arm: arm.at_equal_time("final_loss"),
    f"perplexity{EQUAL_TIME}": lambda arm: arm.at_equal_time("final_loss", math.exp),
    f"top1_pct{EQUAL_TIME}": Arm.score_at_equal_time,
    f"psnr{EQUAL_TIME}": Arm.score_at_equal_time,
    "hours": lambda arm: arm.seeds(lambda run: run["seconds"] / 3600),
}
"""Column -> its cell of an arm."""
