"""Additions to the record of neural fields: sizes, frequencies, and rate-distortion curves of both kinds."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nlr_lab.compare.statistics import late_change
from nonlinear_lowrank.errors import UserError

from .rate_distortion import bd_psnr, bd_rate

Arm = Mapping[str, Any]
KINDS = ("low-rank", "sine")


def field_sections(results: dict[str, Any], dense: int, omegas: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the record with what fields have besides.

    Args:
        results: the record of any trials.
        dense: parameters of the dense network, of which sizes are shares.
        omegas: of the sine, by arm, as the network has it: also where the method leaves it to a published table.
    """
    metrics: Mapping[str, float] = next(
        (run["metrics"] for arm in results["arms"] for run in arm["runs"] if run["metrics"]), {}
    )
    size = "bits_per_pixel" if "bits_per_pixel" in metrics else "parameters"
    arms = []
    for arm in results["arms"]:
        runs = [] if arm["score"]["mean"] is None else [run for run in arm["runs"] if run["seed"] in results["seeds"]]
        late = [change for run in runs if (change := late_change(run["metric_curve"])) is not None]
        means = {name: float(np.mean([run["metrics"][name] for run in runs])) for name in metrics if runs}
        own = {
            "omega": omegas[arm["name"]],
            "percent": 100 * arm["parameters"] / dense,
            "size": float(arm["parameters"]) if size == "parameters" else means.get(size),
            "metrics": means,
            "late_gain": float(np.mean([gain for gain, _ in late])) if late else None,
            "late_share": max(share for _, share in late) if late else None,
            "seconds": float(np.mean([run["seconds"] for run in runs])) if runs else None,
        }
        arms.append(arm | own)
    distances = _rate_distortion(arms, results["seeds"])
    return results | {"arms": arms, "dense_parameters": dense, "size": size, "rate_distortion": distances}


def _rate_distortion(arms: Sequence[Arm], seeds: Sequence[int]) -> dict[str, Any]:
    """The two kinds' curves and how far apart they are: of the means, and seed by seed."""
    curves = {kind: _curve(arms, kind) for kind in KINDS}
    lost = [arm["name"] for curve in curves.values() for arm in curve if arm["score"]["mean"] is None]

    def points(score: Callable[[Arm], float]) -> list[list[tuple[float, float]]]:
        return [[(arm["size"], score(arm)) for arm in curves[kind]] for kind in KINDS]

    def of_seed(seed: int) -> Callable[[Arm], float]:
        return lambda arm: next(run["score"] for run in arm["runs"] if run["seed"] == seed)

    found: dict[str, Any] = {kind: [arm["name"] for arm in curve] for kind, curve in curves.items()}
    for name, delta in (("bd_rate", bd_rate), ("bd_score", bd_psnr)):
        by_seed: list[float | None] = []
        try:
            if lost:  # without its worst point a curve flatters
                raise UserError(f"{' and '.join(lost)} diverged")
            value, note = delta(*points(lambda arm: arm["score"]["mean"]), names=KINDS), ""
            for seed in seeds:
                try:
                    by_seed.append(delta(*points(of_seed(seed))))
                except UserError:
                    by_seed.append(None)
        except UserError as error:
            value, note = None, str(error)
        found |= {name: value, f"{name}_note": note, f"{name}_by_seed": by_seed}
    return found


def _curve(arms: Sequence[Arm], kind: str) -> list[Arm]:
    """Arms of a kind by rising size; of several at one size (omegas) that which was best where choices were made.

    Where one of them was not tuned, that which ended best. An arm that diverged is on its curve, without a
    score: it has none to be left out for.
    """
    by_size: dict[int, list[Arm]] = {}
    for arm in arms:
        diverged = any(run["status"] == "diverged" for run in (*arm["runs"], *(arm["tuning"] if not arm["lr"] else ())))
        if arm["settings"]["kind"] == kind and (arm["score"]["mean"] is not None or diverged):
            by_size.setdefault(arm["parameters"], []).append(arm)
    curve = []
    for _, equal in sorted(by_size.items()):
        values = [_or_lowest(arm["score"]["mean"]) for arm in equal]
        if all(arm["tuning"] for arm in equal):
            values = [max(_or_lowest(run["score"]) for run in arm["tuning"]) for arm in equal]
        curve.append(equal[values.index(max(values))])
    return curve


def _or_lowest(value: float | None) -> float:
    return -math.inf if value is None else value
