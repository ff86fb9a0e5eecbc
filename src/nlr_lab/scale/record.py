"""A ladder's record: what its rungs' comparisons found, the laws over them, and what became of predictions."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from nlr_lab.compare.record import RESULTS, clean
from nlr_lab.runtime.storage import read_json

from .fits import Interval, Laws
from .joint import JointLaws

Record = Mapping[str, Any]
EVIDENCE = Path(__file__).with_name("evidence.json")
"""Part of studies/ladder/results.json that `nlr recommend` reads."""
FORWARD_AND_BACKWARD = 3
"""Times the FLOPs of a forward pass."""


def read_rungs(path: Path) -> list[dict[str, Any]]:
    """Return the rungs of a folder that have at least one whole seed, by tokens and width."""
    found = []
    for file in path.glob(f"w*-t*/{RESULTS}"):
        match = re.fullmatch(r"w(\d+)-t([\d.e+-]+)", file.parent.name)
        results = read_json(file, "delete it: nlr scale recreates it", arms=list)
        if match and results["n"]:
            found.append(_rung(file.parent.name, int(match[1]), float(match[2]), results))
    return sorted(found, key=lambda each: (each["tokens"], each["width"]))


def _rung(name: str, width: int, tokens: float, results: Record) -> dict[str, Any]:
    settings, seeds = results["recipe"]["settings"], results["seeds"]
    trained = settings["train.steps"] * settings["train.batch_size"] * settings["task.text.sequence_length"]
    reference = results["reference"]
    against = results["against"].get(reference, {})
    arms = {}
    for arm in results["arms"]:
        runs = {run["seed"]: run for run in arm["runs"]}
        losses = [runs[seed]["final_loss"] for seed in seeds if seed in runs]
        flops, pair = arm["flops_per_token"], against.get(arm["name"])
        arms[arm["name"]] = {
            "settings": arm["settings"],
            "parameters": arm["parameters"],
            "flops_per_token": flops,
            "compute": flops and FORWARD_AND_BACKWARD * trained * flops,
            "step_seconds": arm["step_seconds_median"],
            "step_time_ratio": arm["step_time_ratio"],
            "lr": arm["lr"],
            "tuning": [(run["lr"], run["final_loss"]) for run in arm["tuning"]],
            "losses": losses,
            "mean": arm["final_loss"]["mean"],
            "sd": arm["final_loss"]["sd"],
            "seconds": [runs[seed]["seconds"] for seed in seeds if seed in runs],
            "against": pair,
        }
    return {
        "rung": name,
        "width": width,
        "tokens": tokens,
        "summary": results["recipe"]["summary"],
        "steps": settings["train.steps"],
        "trained_tokens": trained,
        "text_tokens": results["data"].get("train", {}).get("tokens"),
        "reference": reference,
        "n": results["n"],
        "seeds": seeds,
        "incomplete_seeds": results["incomplete_seeds"],
        "machine": results["machine"],
        "versions": results["versions"],
        "arms": arms,
        "notes": results["notes"],
    }


def laws_of(rungs: Sequence[Record], arm: str, reference: str) -> Laws | None:
    """Return the laws of an arm and the reference over the rungs that both have; None where these are fewer than two.

    Rungs in which a run of either diverged do not count.
    """
    both = rungs_of_both(rungs, arm, reference)
    if len({rung["width"] for rung in both}) < 2:
        return None
    return Laws(*_numbers(both, arm, reference))


def joint_of(rungs: Sequence[Record], arm: str, reference: str) -> JointLaws | None:
    """Return the joint laws of an arm and the reference over the rungs that both have; None if too few fix them."""
    both = rungs_of_both(rungs, arm, reference)
    lengths, widths = ({rung[key] for rung in both} for key in ("tokens", "width"))
    if len(both) < 5 or len(lengths) < 2 or len(widths) < 3:
        return None
    # A width's longest run has its size to half a step.
    longest = sorted(rungs, key=lambda rung: rung["trained_tokens"])
    sizes = {rung["width"]: rung["trained_tokens"] / rung["tokens"] for rung in longest}
    tokens = np.array([rung["trained_tokens"] for rung in both], dtype=np.float64)
    laws = JointLaws(np.array([sizes[rung["width"]] for rung in both]), tokens, *_numbers(both, arm, reference))
    return laws if laws.determined else None


def rungs_of_both(rungs: Sequence[Record], *names: str) -> list[Record]:
    """Return the rungs in which all of these arms have losses and FLOPs."""
    both = []
    for rung in rungs:
        mine = [rung["arms"].get(name) for name in names]
        if all(each and each["compute"] and each["losses"] and None not in each["losses"] for each in mine):
            both.append(rung)
    return both


def _numbers(rungs: Sequence[Record], *names: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return FLOPs and losses of arms by name."""
    compute = {name: np.array([rung["arms"][name]["compute"] for rung in rungs]) for name in names}
    return compute, {name: [np.array(rung["arms"][name]["losses"]) for rung in rungs] for name in names}


def evidence(results: Record) -> dict[str, Any]:
    """Return the losses, FLOPs and step times of a ladder's results."""
    kept, ends = ("rung", "width", "tokens", "n", "reference"), ("median", "low", "high")
    rungs = []
    for rung in results["rungs"]:
        arms = {
            name: {
                "settings": arm["settings"],
                "compute": arm["compute"],
                "losses": arm["losses"],
                "step_time_ratio": arm["step_time_ratio"] and {end: arm["step_time_ratio"][end] for end in ends},
            }
            for name, arm in rung["arms"].items()
        }
        rungs.append({key: rung[key] for key in kept} | {"arms": arms})
    return {"rungs": rungs}


def build_record(rungs: Sequence[Record], predicted: Record, settings: Record, command: str) -> dict[str, Any]:
    """Build the whole record of a ladder."""
    results = {
        "command": command,
        "settings": settings,
        "rungs": list(rungs),
        "laws": [law for tokens in sorted({rung["tokens"] for rung in rungs}) for law in _laws(rungs, tokens)],
        "joint": _joint(rungs),
        "predicted": {name: _judged(name, each, rungs) for name, each in predicted.items()},
    }
    return clean(results)  # type: ignore[no-any-return]


def _laws(rungs: Sequence[Record], tokens: float) -> list[dict[str, Any]]:
    """Return the law of every arm over the rungs of so many tokens a parameter."""
    own = [rung for rung in rungs if rung["tokens"] == tokens]
    reference, found = own[0]["reference"], []
    for name in dict.fromkeys(name for rung in own for name in rung["arms"]):
        laws = laws_of(own, name, reference)
        if laws is None:
            continue
        law = {"tokens": tokens, "arm": name, "form": laws.form, "rungs": laws.rungs}
        law |= {"first_compute": float(laws.compute[name][0])}
        law |= {key: asdict(value) for key, value in laws.fits(name).items()}
        law["multiplier"] = None if name == reference else asdict(laws.multiplier(name, reference))
        found.append(law)
    return found


def _joint(rungs: Sequence[Record]) -> dict[str, Any] | None:
    """Return the joint law of every arm over all rungs, at the FLOPs of the reference's largest run; None without any.

    An arm's is None where its rungs do not fix it.
    """
    if not rungs:
        return None
    reference, found = rungs[0]["reference"], dict[str, Any]()
    compute = max(rung["arms"][reference]["compute"] or 0 for rung in rungs)
    for name in dict.fromkeys(name for rung in rungs for name in rung["arms"]):
        found[name] = None
        if (laws := joint_of(rungs, name, reference)) is not None:
            fits = laws.fits(name) | laws.optimum(name, compute)
            found[name] = {"rungs": laws.rungs, **{key: asdict(value) for key, value in fits.items()}}
            found[name]["speed"] = None if name == reference else asdict(laws.speed(name, reference, compute))
    return {"compute": compute, "arms": found} if any(found.values()) else None


def _judged(name: str, predicted: Record, rungs: Sequence[Record]) -> dict[str, Any]:
    """Return a prediction with what was measured, and whether that lies in its interval."""
    rung = next((each for each in rungs if each["rung"] == name), None)
    judged = {**predicted, "losses": {arm: dict(each) for arm, each in predicted["losses"].items()}}
    for arm, each in judged["losses"].items():
        measured = rung["arms"].get(arm) if rung else None
        if measured and None in measured["losses"]:
            judged["losses"][arm] = {key: {**guess, "verdict": "diverged"} for key, guess in each.items()}
        delta = measured["against"] and measured["against"]["delta"]["value"] if measured else None
        for key, value in (("loss", measured and measured["mean"]), ("delta", delta)):
            if key in each and value is not None:
                holds = Interval(**each[key]).holds(value)
                verdict = {True: "confirmed", False: "refuted", None: "no interval"}[holds]
                each[key] = {**each[key], "measured": value, "verdict": verdict}
    for arm, each in predicted["rates"].items():
        measured = rung["arms"].get(arm) if rung else None
        if measured and measured["lr"] is not None:
            judged["rates"][arm] = {**each, "best": measured["lr"], "held": abs(measured["lr"] / each["lr"] - 1) < 1e-4}
    return judged
