"""The grade of a claim: which of the conditions that a result of this kind is usually asked for it meets.

| condition     | met where                                                                                         |
|---------------|---------------------------------------------------------------------------------------------------|
| seeds         | three or more, and p after Holm's correction is below 0.05                                        |
| tuned         | the learning rates of both arms were tuned, and no best one lies at the edge of its grid          |
| flattened     | neither curve improved by more than the difference over the last fifth of its steps, nor rose by  |
|               | more from its best                                                                                |
| evaluations   | there are enough to tell that, and to read a speed off: ten a curve, and no crossing at the first |
| equal FLOPs   | the better arm has no more FLOPs than the other, or is better than a control with as many as it   |
| equal hours   | its wall-clock speedup is above 1 (p below 0.05 after Holm's correction), it did not end worse,   |
|               | and the other arm was not below its own final loss well before its end                            |
| downstream    | it is a score on a task, not the loss that was trained, or its logarithm (PSNR)                   |

All is read from the record, in which each pair's `grade` holds those that are met. A condition on which an older
record is silent is not met. "Faster" is said of hours alone, and only where the first six are met.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .statistics import holm

CONDITIONS = ("seeds", "tuned", "flattened", "evaluations", "equal FLOPs", "equal hours", "downstream")
FASTER = CONDITIONS[:-1]
_LEAST_SEEDS, _LEVEL = 3, 0.05
_EQUAL = 1.01  # FLOPs of two arms that count as equal
_TRAINED = ("loss", "psnr")

Record = Mapping[str, Any]


def conditions_met(results: Record, name: str, other: str) -> tuple[str, ...]:
    """Return those of `CONDITIONS` that the difference of an arm from another meets.

    Args:
        results: a comparison's record.
        name: of the arm.
        other: of the arm it is compared with; the record has the pair.
    """
    arms, pair = {arm["name"]: arm for arm in results["arms"]}, results["against"][other][name]
    both, cautions, metric = (arms[name], arms[other]), pair.get("cautions"), _metric(results)
    delta, hours, p_holm = pair["delta"].get("value"), pair["wall_clock_speedup"], pair.get("p_holm")
    hours_p = holm([each["wall_clock_speedup"].get("p_value") for each in results["against"][other].values()])
    p_of = dict(zip(results["against"][other], hours_p, strict=True))
    met = {
        "seeds": pair["n"] >= _LEAST_SEEDS and p_holm is not None and p_holm < _LEVEL,
        "tuned": all(_tuned(arm) for arm in both),
        "flattened": cautions is not None and not {"flattened", "rose", "seldom"} & cautions.keys(),
        "evaluations": cautions is not None and not {"evaluations", "seldom"} & cautions.keys(),
        "equal FLOPs": _equal_flops(results, name, other, delta),
        # A curve that was at an end long before, of either arm, gives no usable speed.
        "equal hours": _better(metric) * (delta or 0) >= 0
        and not pair.get("early")
        and hours["shown"]
        and hours["value"] > 1
        and (p_of[name] or 0.0) < _LEVEL,
        "downstream": metric["name"] not in _TRAINED,
    }
    return tuple(each for each in CONDITIONS if met[each])


def grade_text(met: Sequence[str]) -> str:
    """Return the grade as a sentence."""
    missing = [each for each in CONDITIONS if each not in met]
    text = f"Grade {len(met)} of {len(CONDITIONS)}"
    return f"{text}." if not missing else f"{text}; not shown: {', '.join(missing)}."


def grade_cell(met: Sequence[str]) -> str:
    """Return the grade as a cell of a table: `3/7`."""
    return f"{len(met)}/{len(CONDITIONS)}"


def _metric(results: Record) -> Record:
    """The first records had losses alone, and did not say so."""
    return results.get("metric", {"name": "loss", "higher_is_better": False})  # type: ignore[no-any-return]


def _better(metric: Record) -> int:
    return 1 if metric["higher_is_better"] else -1


def _tuned(arm: Record) -> bool:
    names = ("lr",) if arm.get("head_lr") is None else ("lr", "head_lr")
    tried = [(arm[name], [run[name] for run in arm["tuning"]]) for name in names]
    return bool(arm["tuning"]) and all(min(rates) < best < max(rates) for best, rates in tried)


def _equal_flops(results: Record, name: str, other: str, delta: float | None) -> bool:
    flops: dict[str, Any] = {arm["name"]: arm.get("flops_per_token") for arm in results["arms"]}
    if not flops[name] or not flops[other]:
        return False
    if _better(_metric(results)) * (delta or 0) < 0:
        return bool(flops[other] <= _EQUAL * flops[name])
    if flops[name] <= _EQUAL * flops[other]:
        return True
    for control, pairs in results["against"].items():
        delta = pairs[name]["delta"] if name in pairs else None
        as_many = flops[control] and flops[name] <= _EQUAL * flops[control]
        if as_many and delta and delta["shown"] and _better(_metric(results)) * delta["value"] > 0:
            return True
    return False
