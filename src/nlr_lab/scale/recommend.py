"""Prediction of each arm's gain for a model by the laws of a ladder, at equal tokens and in equal hours.

The laws are of the loss in training FLOPs, along sizes that are trained on as many tokens a parameter. In equal hours
the plain model is one that takes as long as the arm: FLOPs times the arm's time of a step over the plain one's, spent
on size and tokens alike, as the law has it.

An arm's difference is of laws over the rungs that it shares with the plain model. Where these end below the ladder's
largest, the plain model's law may be one that the larger refute: such an arm is listed and not recommended, nor is one
that diverged at a rung. For a model far above the ladder nothing is.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nlr_lab.training.arms import Arm
from nonlinear_lowrank.analysis.cost import ModelCost, model_cost
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import method_of_layer
from nonlinear_lowrank.methods.noble import NobleConfig
from nonlinear_lowrank.surgery.augment import augment
from nonlinear_lowrank.surgery.budget import parse_budget

from .fits import Interval, log_normal
from .ladder import inner_parameters
from .record import FORWARD_AND_BACKWARD, Record, laws_of, rungs_of_both

FAR = 10.0
"""Times the FLOPs of the largest rung from which on nothing is recommended: laws may bend on the way."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Predicted gain and cost of one arm."""

    arm: str
    """Its name in the ladder."""
    method: str
    """What it changes, as `Arm` names it."""
    text: str
    """Its short form, as nlr compare takes it."""
    parameters: float
    """Parameters added, as a share of the model's."""
    flops: float
    """FLOPs added, as a share of the model's."""
    step_time: float | None
    """Time of a step over the plain model's at `timed_width`."""
    timed_width: int | None
    """Width of the largest rung at which the arm was timed."""
    fits: bool
    """True within the budget, or without one."""
    delta: Interval
    """Loss less the plain model's, after as many tokens."""
    hours: Interval | None
    """The same in equal hours."""
    widths: tuple[int, ...]
    """Widths of the rungs that these laws are of."""
    lacks: str
    """Why these laws say too little to recommend the arm; empty if they do not."""

    @property
    def gains(self) -> bool:
        """True where the interval of the loss in equal hours lies below zero."""
        return self.hours is not None and self.hours.high is not None and self.hours.high < 0


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Predictions for a model, and what they rest on."""

    size: int
    """Parameters outside embeddings and head."""
    tokens: float
    compute: float
    """Training FLOPs of the plain model."""
    times: float
    """These over the FLOPs of the ladder's largest rung."""
    widths: tuple[int, ...]
    seeds: int
    choices: tuple[Choice, ...]
    rank_ratio: float | None
    """Highest rank of NOBLE within the budget, over a linear's smaller width, where all of the ladder's are above."""
    skipped: tuple[str, ...]
    """Arms without a prediction, with the reason."""

    @property
    def candidates(self) -> tuple[Choice, ...]:
        """The arms that may be recommended, whether or not they gain."""
        return () if self.times > FAR else tuple(each for each in self.choices if each.fits and not each.lacks)

    @property
    def best(self) -> Choice | None:
        """The candidate that gains most in equal hours; None if none does."""
        gaining = [each for each in self.candidates if each.gains]
        return min(gaining, key=lambda each: each.hours.value if each.hours else 0.0, default=None)

    @property
    def highest(self) -> Choice | None:
        """The highest rank of NOBLE within the budget that the ladder has, where it has higher ones too."""
        nobles = [each for each in self.choices if each.method == NobleConfig.method]
        within = [each for each in nobles if each.fits]
        return max(within, key=lambda each: each.parameters) if within and len(within) < len(nobles) else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"best": self.best and self.best.arm}


def recommend(
    build: Callable[[], Any],
    rungs: Sequence[Record],
    *,
    sequence_length: int,
    tokens: float,
    budget: str | None = None,
) -> Recommendation:
    """Return predictions for a causal language model that is trained from scratch.

    Args:
        build: makes the plain model, which is not run: on meta will do.
        rungs: of a ladder's results.
        sequence_length: tokens that each token attends to.
        tokens: of training for each parameter outside embeddings and head; the ladder must have climbed there.
        budget: "5%" of the parameters or "5% flops"; arms above it are listed, not recommended.

    Raises:
        UserError: the ladder has fewer than two widths at so many tokens, or its first arm is no plain model; the model
            is not a plain causal language model; or the budget cannot be read, or met by NOBLE of rank 1.
    """
    share, kind = (None, "") if budget is None else parse_budget(budget)
    own = [rung for rung in rungs if rung["tokens"] == tokens]
    if len({rung["width"] for rung in own}) < 2:
        counts = Counter(tokens for tokens, _ in {(rung["tokens"], rung["width"]) for rung in rungs})
        known = ", ".join(f"{each:g}" for each, widths in sorted(counts.items()) if widths > 1)
        fix = f"choose --tokens among {known}, or climb" if known else "climb"
        raise UserError(f"the ladder has no two widths at {tokens:g} tokens a parameter; {fix} there with nlr scale")
    reference = own[0]["reference"]
    if (first := _arm(own, reference)) is not None and first.method != "baseline":
        raise UserError(f"the ladder compares with {first}, and not with a plain model; climb one whose first arm is")
    plain = build()
    _check(plain)
    size, base = inner_parameters(plain), model_cost(plain, sequence_length)
    trained = tokens * size
    compute = FORWARD_AND_BACKWARD * trained * base.flops
    costs: dict[str, tuple[float, float]] = {}
    choices, skipped = [], []
    arms = {name: _arm(own, name) for rung in own for name in rung["arms"] if name != reference}
    for name, arm in sorted(arms.items(), key=lambda item: item[1] is not None and "match" in item[1].settings):
        laws, widths, lacks = laws_of(own, name, reference), *_reach(own, name, reference)
        if laws is None or arm is None:
            skipped.append(f"{name}: {'no two widths' if laws is None else 'its settings differ between the rungs'}")
            continue
        if ":" in arm.method:
            skipped.append(f"{name}: calls {arm.method}, code that the ladder only names")
            continue
        try:
            costs[name] = _added(arm, build, base, costs)
        except UserError as error:
            skipped.append(f"{name}: {error}")
            continue
        parameters, flops = costs[name]
        against = reference, compute
        width, timed = _timed(own, name)
        ratio = None if timed is None else log_normal(timed["median"], timed["low"], timed["high"])
        longer = None if ratio is None else (reference, compute * ratio)
        spent = flops if kind == "flops" else parameters
        choices.append(
            Choice(
                arm=name,
                method=arm.method,
                text=str(arm),
                parameters=parameters,
                flops=flops,
                step_time=None if timed is None else timed["median"],
                timed_width=width,
                fits=share is None or spent <= share,
                delta=laws.predict(name, compute * (1 + flops), against),
                hours=None if longer is None else laws.predict(name, compute * (1 + flops), longer),
                widths=widths,
                lacks=lacks,
            )
        )
    budgeted: Any = None
    if budget is not None and {each.fits for each in choices if each.method == NobleConfig.method} == {False}:
        budgeted = augment(build(), NobleConfig(), budget=budget, verbose=False).config
    return Recommendation(
        size=size,
        tokens=trained,
        compute=compute,
        times=compute / max(rung["arms"][reference]["compute"] for rung in own),
        widths=tuple(rung["width"] for rung in own),
        seeds=min(rung["n"] for rung in own),
        choices=tuple(choices),
        rank_ratio=float(budgeted.rank_ratio) if budgeted else None,
        skipped=tuple(skipped),
    )


def _arm(rungs: Sequence[Record], name: str) -> Arm | None:
    """Return an arm as its rungs have it; None where these differ."""
    found = set()
    for settings in (rung["arms"][name]["settings"] for rung in rungs if name in rung["arms"]):
        own = dict(settings["settings"])
        if "match" in own:
            own.pop("hidden", None)  # what matched, a width for each rung
        found.add(Arm(**{key: each for key, each in settings.items() if key != "code"} | {"settings": own}))
    return found.pop() if len(found) == 1 else None


def _reach(rungs: Sequence[Record], name: str, reference: str) -> tuple[tuple[int, ...], str]:
    """Return the widths of an arm's laws, and why they say too little to recommend it, empty if they do not."""
    widths = tuple(rung["width"] for rung in rungs_of_both(rungs, name, reference))
    diverged = [rung["width"] for rung in rungs if name in rung["arms"] and None in rung["arms"][name]["losses"]]
    largest = max(rung["width"] for rung in rungs)
    if diverged:
        return widths, f"diverged at {', '.join(map(str, diverged))}"
    return widths, "" if largest in widths else f"not run at {largest}"


def _timed(rungs: Sequence[Record], name: str) -> tuple[int, Record] | tuple[None, None]:
    """Return the width of the largest rung at which an arm was timed, and its step time over the reference's there."""
    for rung in sorted(rungs, key=lambda each: each["width"], reverse=True):
        if timed := (rung["arms"].get(name) or {}).get("step_time_ratio"):
            return rung["width"], timed
    return None, None


def _check(model: Any) -> None:
    """Raise UserError where a model is not of the ladder's kind."""
    if not getattr(model, "can_generate", lambda: False)() or model.config.is_encoder_decoder:
        raise UserError(f"a ladder is of causal language models, not of a {type(model).__name__}; choose another")
    if any(method_of_layer(each) for each in model.modules()):
        raise UserError(f"this {type(model).__name__} has been augmented already; give the plain model")


def _added(
    arm: Arm,
    build: Callable[[], Any],
    base: ModelCost,
    costs: Mapping[str, tuple[float, float]],
) -> tuple[float, float]:
    """Return the parameters and the FLOPs that an arm adds, as shares of the plain model's."""
    if arm.method == "wide-mlp" and (other := arm.settings.get("match")) is not None:
        if other not in costs:
            raise UserError(f"{other}, which it matches, is not in the ladder")
        parameters, flops = costs[other]
        a_parameter = 2 * base.parameters / base.flops  # a weight of a linear takes 2 FLOPs a token
        if arm.settings.get("by") == "flops":
            return flops / a_parameter, flops
        return parameters, parameters * a_parameter
    cost = model_cost(arm.apply(build()), base.sequence_length)
    return cost.parameters / base.parameters - 1, cost.flops / base.flops - 1


def sentence(found: Recommendation, budget: str | None) -> str:
    """Return the recommendation, and what it rests on."""
    within, best = "" if budget is None else f" within {budget}", found.best
    seeds = f"{found.seeds} seed{'s' if found.seeds > 1 else ''} each"
    if not found.choices:
        lines = [f"No arm of the ladder can be predicted (widths {', '.join(map(str, found.widths))}, {seeds})."]
    elif found.times > FAR:
        lines = [
            f"No recommendation: the model takes {found.times:.2g} times the FLOPs of the ladder's largest rung. The "
            "laws are extrapolated that far, and their intervals know nothing of a law that bends. Climb further "
            "first: nlr scale."
        ]
    elif best is None:
        lines = [
            f"Train it plain: no arm{within} that was run up to width {max(found.widths)} has a lower loss predicted "
            f"in equal hours with an interval below 0 ({seeds})."
        ]
    else:
        assert best.hours is not None
        lines = [
            f"{best.text}: {best.hours.value:+.3f} [{best.hours.low:+.3f}, {best.hours.high:+.3f}] nats in equal hours "
            f"are predicted (widths {', '.join(map(str, best.widths))}, {seeds}); the best of {len(found.candidates)} "
            f"that were run up to width {max(found.widths)}, its interval not corrected for their number."
        ]
    if widths := sorted({each.timed_width for each in found.choices if each.timed_width is not None}):
        at = f"width{'s' if len(widths) > 1 else ''} {', '.join(map(str, widths))}"
        lines.append(f"Hours are by step times measured at {at} on the ladder's machine.")
    if unknown := [each.arm for each in found.choices if each.hours is None]:
        lines.append(f"Hours unknown for: {', '.join(unknown)} (no rung has step times of these).")
    if (highest := found.highest) is not None:
        lines.append(f"The highest rank of NOBLE within the budget that was measured: {highest.text}.")
    if found.rank_ratio is not None:
        lines.append(
            f"NOBLE at the ladder's ranks is above the budget; noble:rank_ratio={found.rank_ratio:.3g} is "
            "within it, and no size of that was measured."
        )
    return "\n".join(lines)
