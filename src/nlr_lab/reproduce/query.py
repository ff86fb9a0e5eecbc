"""The tables of nonlinear_queries.md, with the controls that it lacks: no query weights, no GELU, QK-norm."""

from dataclasses import replace
from typing import Any

from .noble import recipe, shared
from .table import Compare, Trial, runs

_CONTROLS = {
    "control, no query weights": "identity-query",
    "control, residual linear query": "residual-linear-query",
    "control, QK-norm": "qk-norm",
}


def _recipe(scale: str) -> Any:
    """GPT-3's architecture at a scale."""
    if scale != "small":
        return recipe("gpt3-small") if scale == "paper" else recipe("gpt3-demo", 150)
    from nlr_lab.tasks.text.language_model import OptBackbone

    own, like = recipe("gpt3-demo"), recipe("llm-small")
    task = replace(own.task, text=like.task.text, backbone=OptBackbone(layers=6, width=512, heads=8, hidden=2048))
    names = ("steps", "batch_size", "lr", "warmup_steps", "eval_every", "save_every", "bf16", "compile", "log_every")
    return replace(own, task=task, train=replace(own.train, **{name: getattr(like.train, name) for name in names}))


@runs("query/results", takes=("8 min of 2 cores", "2 days of one GPU of 24 GB", "8 large GPUs, 2 days an arm"))
def results(scale: str) -> list[Trial]:
    """The wider MLP has 4.75 times the width, and once its learning rate by 1 / sqrt(1.125), as released.

    The best settings are a learning rate of 1.5e-3 and a weight decay of 2^-5 in the paper; they are a comparison of
    their own, whose baseline has them too.
    """
    own = _recipe(scale)
    best = recipe("gpt3-small-best") if scale == "paper" else own
    if scale != "paper":
        best = replace(own, train=replace(own.train, lr=2.5 * own.train.lr, weight_decay=2**-5))
    scaled = f"wide-mlp:ratio=4.75,lr={own.train.lr / 1.125**0.5:.4g}"
    arms = {
        "baseline": "baseline",
        "MLP 4.75": "wide-mlp:ratio=4.75",
        "MLP 4.75, scaled lr": scaled,
        "residual GELU": "nonlinear-query",
        **_CONTROLS,
    }
    known = shared(scale)
    of_best = {"baseline, best settings": "baseline", "residual GELU, best settings": "nonlinear-query"}
    tuned = known | {"tune_lr": ()}
    return [
        Compare(part="results", recipe=own, arms=arms, **known),
        Compare(part="best", recipe=best, arms=of_best, **tuned),
    ]


@runs("query/stability", takes=("4 min of 2 cores", "2 days of one GPU of 24 GB", "8 large GPUs, 2 days an arm"))
def stability(scale: str) -> list[Trial]:
    """The baseline at weight decay 0.05, the nonlinear query at 0.03 and five times the learning rate; both arms."""
    if scale == "paper":
        low, high = recipe("gpt3-stability"), recipe("gpt3-stability-high-lr")
    else:
        own = _recipe(scale)
        train = replace(own.train, stop_diverged=True, weight_decay=0.05)
        low = replace(own, train=train)
        high = replace(own, train=replace(train, weight_decay=2**-5, lr=5 * own.train.lr))
    rows = {"baseline": "baseline", "residual GELU": "nonlinear-query"}
    known = shared(scale, timed=False) | {"tune_lr": ()}
    return [
        Compare(part=part, recipe=own, arms={f"{row}, {how}": arm for row, arm in rows.items()}, **known)
        for part, own, how in (
            ("decay", low, "weight decay 0.05"),
            ("rate", high, "weight decay 0.03, lr 3e-3"),
        )
    ]
