"""GPT-3 small with linear and nonlinear queries (nonlinear_queries.md; arXiv:2603.13381).

An OPT backbone without biases (GELU, no dropout, tied embeddings of std 0.02), next-token prediction on packed text,
AdamW(0.9, 0.95) with weight decay 0.1, warm-up and cosine decay. The learning rate is not printed; "5x higher" is
3e-3, so it is 6e-4, GPT-3's own.

The controls separate what the nonlinear query brings from what its surroundings do: the identity query (no query
weights at all), the residual linear query (the same parameters and norms, no GELU), and the MLP widened to 4.75
(12.5 % more parameters), at the learning rate of the others and at 4 / 4.75
of it (the document says "scaled LR" and not how).
An independent audit found no gain over a linear query at a learning rate of its own: compare with `--tune-lr`.
"""

from typing import Any

from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import OptBackbone, OptLanguageModelTask
from nlr_lab.training.recipe import Recipe, TrainConfig

from .shared import FAST, OPENWEBTEXT_GPT2, named

_ARMS = ("baseline", "identity-query", "residual-linear-query", "wide-mlp:ratio=4.75", "nonlinear-query")
_STABILITY = ("baseline", "identity-query", "nonlinear-query")


def gpt3_demo() -> Recipe:
    """GPT-3's architecture small enough for two CPU cores, on the running Python's own library sources.

    Command: `nlr compare gpt3-demo --max-minutes 9`, or `nlr train gpt3-demo`.
    Hardware: 2 CPU cores, 2 GB of memory, no network.
    Time: about a minute and a half of one core for an arm (a step takes 0.23 s of CPU time on a busy machine).
    Expect: an evaluation loss near 5 nats a token in every arm. 300 steps are far too few to flatten the curves: this
    shows the tool at work, it is no evidence for or against the method.
    """
    text = TextData(source="stdlib", vocab_size=2048, sequence_length=128, eval_sequences=64)
    return named(
        Recipe,
        "gpt3-demo",
        task=OptLanguageModelTask(text=text, backbone=OptBackbone(layers=4, width=128, heads=4, hidden=512)),
        arm="nonlinear-query",
        train=_training(steps=300, batch_size=8, lr=2e-3, warmup_steps=30, eval_every=20, save_every=150),
        arms=_ARMS,
    )


def gpt3_small() -> Recipe:
    """The paper's GPT-3 small: 84,973,056 parameters outside the embeddings, 60,000 steps of OpenWebText.

    Command: `torchrun --nproc-per-node 8 -m nlr_lab train gpt3-small --arm nonlinear-query`, or
    `nlr compare gpt3-small --seeds 1`; the batch is the same whatever the number of processes.
    Hardware: not printed in the document; 480 sequences of 1024 tokens a step, on 8 large GPUs. OpenWebText with
    GPT-2's tokenizer is about 18 GB in the cache.
    Time: not measured by us; 29 billion tokens an arm.
    Expect: the paper's validation losses at 59,000 steps, 2.956 for the baseline, 2.919 for the nonlinear query
    (85,000,704 parameters), 2.927 for the MLP x 4.75 (95,589,888), 2.928 for it with a scaled learning rate. One
    seed, learning rates not tuned, and not repeated by us.
    """
    scaled = f"wide-mlp:ratio=4.75,lr={6e-4 * 4 / 4.75:.3g},name=wide-mlp-4.75-scaled-lr"
    return _small("gpt3-small", (*_ARMS, scaled), lr=6e-4)


def gpt3_stability() -> Recipe:
    """Does GPT-3 small stay stable with weight decay 0.05? A run that diverges is stopped and named, with its step:
    its loss is no longer a number, or it spiked and did not recover (`training.divergence`; `--no-stop-diverged` lets
    such a run go on).

    Command: `nlr compare gpt3-stability --seeds 1`, or `nlr train gpt3-stability --arm baseline`.
    Hardware: as gpt3-small.
    Time: not measured by us; as gpt3-small, less what diverged runs save.
    Expect: the paper's baseline diverges before 20,000 steps. Not repeated by us.
    """
    return _small("gpt3-stability", _STABILITY, weight_decay=0.05, lr=6e-4, stop_diverged=True)


def gpt3_stability_high_lr() -> Recipe:
    """The same with weight decay 0.03 and the learning rate at 3e-3, five times as high.

    Command: `nlr compare gpt3-stability-high-lr --seeds 1`, or `nlr train gpt3-stability-high-lr --arm baseline`.
    Hardware: as gpt3-small.
    Time: not measured by us; as gpt3-small, less what diverged runs save.
    Expect: the paper's nonlinear query is stable to 60,000 steps. Not repeated by us.
    """
    return _small("gpt3-stability-high-lr", _STABILITY, weight_decay=0.03, lr=3e-3, stop_diverged=True)


def _small(name: str, arms: tuple[str, ...], **settings: Any) -> Recipe:
    return named(
        Recipe,
        name,
        task=OptLanguageModelTask(
            text=TextData(**OPENWEBTEXT_GPT2), backbone=OptBackbone(layers=12, width=768, heads=12, hidden=3072)
        ),
        arm="nonlinear-query",
        train=_training(steps=60_000, batch_size=480, warmup_steps=2000, eval_every=1000, **FAST, **settings),
        arms=arms,
        seeds=1,
    )


def _training(*, weight_decay: float = 0.1, **settings: Any) -> TrainConfig:
    return TrainConfig(weight_decay=weight_decay, betas=(0.9, 0.95), schedule="cosine", **settings)
