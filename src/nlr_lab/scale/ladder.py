"""Settings of a ladder, and the recipe of each of its rungs.

A rung is a width and a number of tokens a parameter. Its model is a GLM whose shape follows from its width alone:

| width | layers | heads | MLP  |                              |
|-------|--------|-------|------|------------------------------|
| 48    | 4      | 2     | 128  | 111,024 outside embeddings   |
| 64    | 4      | 2     | 176  | 201,280                      |
| 128   | 4      | 4     | 344  | llm-demo's                   |
| 512   | 6      | 8     | 1376 | llm-small's                  |
| 1024  | 12     | 8     | 2752 | llm-base's, 250M with vocabulary |
| 2048  | 24     | 16    | 5504 | llm-large's, 1.4B            |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from nlr_lab.runtime.storage import flatten
from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import DenseInit, GlmBackbone, LanguageModelTask
from nlr_lab.training.recipe import Recipe, TrainConfig
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer, check_number, check_share

_LEAST_STEPS = 10
_FREE = {"text.source", "text.valid_source", "text.cache_dir", "threads"}
_FREE |= {"gradient_accumulation", "gradient_checkpointing"}
_NOT_SHARED = ("widths", "tokens", "arms", "seeds", "tune_lr", "max_extensions", "next_width")

_OF_TRAINING = (
    *("batch_size", "gradient_accumulation", "gradient_checkpointing", "weight_decay"),
    *("eval_batch_size", "bf16", "compile", "threads"),
)

ARMS = (
    "baseline:name=plain",
    "baseline:init=stock,name=stock",
    "wide-mlp:match=noble,by=flops,name=wide",
    "noble:rank_ratio=0.125,name=noble",
    "baseline:optimizer=muon,name=muon",
    "noble:rank_ratio=0.125,optimizer=muon,name=noble-muon",
    "nonlinear-query:name=query",
    "cola",
    "sltrain",
)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One comparison of the ladder."""

    width: int
    tokens: float
    """Tokens of training for each parameter of the plain model outside its embeddings and its head."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return f"w{self.width}-t{self.tokens:g}"


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Settings shared by all rungs, and the widths and lengths of the rungs."""

    text: TextData
    """The text."""
    widths: tuple[int, ...]
    """Model widths, in any order; a folder's ladder may be extended by more of them later."""
    tokens: tuple[float, ...] = (20.0,)
    """Tokens of training for each parameter of the plain model outside embeddings and head; all arms have as many. The
    first is climbed first."""
    arms: tuple[str, ...] = ARMS
    """Arms as in nlr compare; the first is the reference. A `rank_ratio` grows with the width."""
    seeds: int = 3
    """Paired seeds of every rung."""
    tune_lr: tuple[float, ...]
    """Learning rates tried at the two smallest widths; above these a power law of the width says the middle one of
    three, a factor of two apart. A grid whose best is at its edge is extended."""
    max_extensions: int = 4
    """How often an arm's grid may grow."""
    next_width: int | None = None
    """Width that is predicted after the last rung; None: 1.5 times the largest, a multiple of 16."""
    batch_size: int
    """Sequences of a step, over all processes and micro-batches."""
    gradient_accumulation: int = 1
    """Micro-batches that a process splits its share of a step into; memory and rounding change, and a router's
    balance, which each has of its own."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass, a block at a time: less memory, a third more time."""
    warmup_share: float = 0.05
    """Share of the steps over which the learning rate rises; it then falls linearly to 0."""
    evaluations: int = 40
    """Evaluations of a run, evenly spaced."""
    weight_decay: float = 0.01
    """Weight decay of the roles that decay."""
    embedding_std: float = 1.0
    """Standard deviation of the input embedding in all arms."""
    dense_init: DenseInit = "noble"
    """Init of the plain linears in all arms that do not say otherwise."""
    eval_batch_size: int | None = None
    """Sequences of an evaluation step; None: as in training."""
    bf16: bool = False
    """Autocast to bfloat16."""
    compile: bool = False
    """torch.compile the models."""
    threads: int | None = None
    """CPU threads of a run."""

    def __post_init__(self) -> None:
        for name in ("widths", "tokens", "arms", "tune_lr"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for tokens in self.tokens:
            check_number("tokens", tokens, above=0)
        # As the rung's folder has them, whose name is read back.
        object.__setattr__(self, "tokens", tuple(float(f"{each:g}") for each in self.tokens))
        for name in ("widths", "tokens"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise UserError(f"{name} needs one or more different values; got {list(values)}")
        for width in (*self.widths, *([] if self.next_width is None else [self.next_width])):
            check_integer("width", width, minimum=8)
        if len(set(self.tune_lr)) < 2:
            raise UserError("tune_lr needs at least two different learning rates")
        for rate in self.tune_lr:
            check_number("tune_lr", rate, above=0)
        for name in ("seeds", "batch_size", "evaluations"):
            check_integer(name, getattr(self, name), minimum=1)
        check_share("warmup_share", self.warmup_share)

    def rungs(self) -> list[Rung]:
        """Return the rungs in the order in which they are run."""
        return [Rung(width=width, tokens=tokens) for tokens in self.tokens for width in sorted(self.widths)]

    def following(self) -> Rung:
        """Return the rung that is predicted after the last one."""
        width = self.next_width or max(16, round(1.5 * max(self.widths) / 16) * 16)
        return Rung(width=width, tokens=self.tokens[0])

    def shared(self) -> dict[str, Any]:
        """Return what all rungs of a folder must have in common, flat."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _NOT_SHARED}
        return {name: value for name, value in flatten(own).items() if name not in _FREE}

    def recipe(self, rung: Rung) -> Recipe:
        """Return a rung's comparison; raise UserError for a width without a model, or too few tokens for a run."""
        task = LanguageModelTask(text=self.text, backbone=backbone(rung.width, self.embedding_std, self.dense_init))
        size = inner_parameters(task.build_on_meta())
        steps = round(rung.tokens * size / (self.batch_size * self.text.sequence_length))
        if steps < _LEAST_STEPS:
            raise UserError(
                f"{rung.tokens:g} tokens for each of {size:,} parameters at width {rung.width} are {steps} steps of "
                f"{self.batch_size} x {self.text.sequence_length} tokens; give --tokens or --widths that make at least "
                f"{_LEAST_STEPS}, or a smaller --batch-size"
            )
        train = TrainConfig(
            **{name: getattr(self, name) for name in _OF_TRAINING},
            steps=steps,
            lr=sorted(self.tune_lr)[len(self.tune_lr) // 2],
            warmup_steps=round(self.warmup_share * steps),
            eval_every=max(1, steps // self.evaluations),
            save_every=max(1, steps // 4),
            log_every=max(1, steps // 200),
            tracker="none",
        )
        shape = f"GLM of width {rung.width}, {task.backbone.layers} layers, {size:,} parameters outside embeddings"
        about = f"{shape}, {rung.tokens:g} tokens each"
        return Recipe(name=f"ladder-{rung.name}", description=about, task=task, train=train, arms=self.arms)


def backbone(width: int, embedding_std: float, dense_init: DenseInit) -> GlmBackbone:
    """Return the GLM of a width: the table of this file."""
    wanted = max(2, width // (32 if width < 256 else 64 if width < 1024 else 128))
    heads = next((each for each in range(wanted, 0, -1) if width % (2 * each) == 0), 1)
    return GlmBackbone(
        layers=max(4, round(12 * width / 1024)),
        width=width,
        heads=heads,
        hidden=max(8, 8 * math.floor(43 * width / 128 + 0.5)),
        embedding_std=embedding_std,
        dense_init=dense_init,
    )


def inner_parameters(model: Any) -> int:
    """Return the number of parameters outside embeddings and head of a plain language model."""
    outer = {id(each.weight): each.weight for each in (model.get_input_embeddings(), model.get_output_embeddings())}
    total = sum(parameter.numel() for parameter in model.parameters())
    return int(total - sum(weight.numel() for weight in outer.values()))


def scaled(name: str, **changes: Any) -> Ladder:
    """Return the ladder of a scale's name with some settings changed; raise UserError where there is none."""
    if name not in SCALES:
        raise UserError(f"unknown scale {name!r}; choose from {', '.join(SCALES)}")
    return replace(SCALES[name], **changes)


_FEW: Sequence[str] = ("baseline:name=plain", "wide-mlp:match=noble,by=flops,name=wide", ARMS[3])
_GPU: dict[str, Any] = {"source": "Skylion007/openwebtext", "streaming": True, "tokenizer": "gpt2", "vocab_size": 50257}

SCALES = {
    "demo": Ladder(
        text=TextData(source="stdlib", vocab_size=512, sequence_length=64, eval_sequences=64),
        widths=(16, 24, 32),
        tokens=(5.0,),
        arms=tuple(_FEW),
        seeds=2,
        tune_lr=(8e-3, 1.6e-2),
        batch_size=8,
        evaluations=20,
        threads=1,
    ),
    "small": Ladder(
        text=TextData(source="stdlib", vocab_size=512, sequence_length=128, eval_sequences=128),
        widths=(48, 64),
        tune_lr=(4e-3, 8e-3, 1.6e-2),
        batch_size=8,
        eval_batch_size=32,
        threads=1,
    ),
    "gpu": Ladder(
        text=TextData(**_GPU, sequence_length=1024, eval_sequences=2048),
        widths=(256, 384, 512, 1024, 2048),
        tune_lr=(1e-3, 2e-3, 4e-3),
        batch_size=64,
        gradient_accumulation=8,
        bf16=True,
        compile=True,
    ),
}
"""Ladders by name: minutes of two cores, hours of them, and GPUs."""
