"""Masked language models with and without NOBLE branches (noble.txt, section 4.1.2).

A EuroBERT backbone: the language model's block (separate q, k, v, o; GeGLU; RMSNorm; rotary positions; no biases;
untied head) with attention to both sides. 15 % of the tokens are predicted, of which 80 % are hidden behind
[MASK], 10 % replaced by a random token and 10 % left. The width of the GeGLU is not printed; it is 8/3 of the
width, a multiple of 64, as in section 4.1.1. Embeddings have standard deviation 1, as in `llm`.
"""

from typing import Any

from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import EncoderBackbone, MaskedLanguageModelTask
from nlr_lab.training.recipe import Recipe, TrainConfig

from .shared import BASELINES, EVERY_2000, FAST, NOBLE_ARMS, OPENWEBTEXT, named


def mlm_demo() -> Recipe:
    """A masked language model small enough for two CPU cores, on the running Python's own library sources.

    Command: `nlr compare mlm-demo --max-minutes 9`, or `nlr train mlm-demo`.
    Hardware: 2 CPU cores, 2 GB of memory, no network; a WordPiece of 2048 tokens is trained on the text first.
    Time: about two minutes for an arm on one core, under ten minutes for one seed of all four arms.
    Expect: an evaluation loss near 5 nats per masked token in every arm. 400 steps are far too few to flatten the
    curves: this shows the tool at work, it is no evidence for or against the method.
    """
    text: dict[str, Any] = {"source": "stdlib", "tokenizer": "wordpiece", "vocab_size": 2048}
    return named(
        Recipe,
        "mlm-demo",
        task=MaskedLanguageModelTask(
            text=TextData(**text, sequence_length=128, eval_sequences=128),
            backbone=EncoderBackbone(layers=4, width=128, heads=4, hidden=344, embedding_std=1.0),
        ),
        arm="noble:rank=16",
        train=TrainConfig(steps=400, batch_size=8, lr=2e-3, warmup_steps=40, eval_every=40, save_every=200),
        arms=(*BASELINES, "noble:rank=16"),
    )


def mlm_base() -> Recipe:
    """The paper's BERT: 12 layers, width 768, 100,000 steps of OpenWebText (section 4.1.2).

    Command: `torchrun --nproc-per-node 8 -m nlr_lab train mlm-base --arm noble:rank=64`, or
    `nlr compare mlm-base --seeds 1`; the batch is the same whatever the number of processes.
    Hardware: the paper's is not printed; 65,536 tokens a step fit one GPU of 80 GB, or several smaller ones.
    OpenWebText in BERT's tokens is about 18 GB in the cache.
    Time: not measured yet.
    Expect: the paper's evaluation losses, 1.414 for the baseline and 1.393 / 1.371 / 1.351 at rank 64 / 128 / 256
    (step speedup 1.10 / 1.17 / 1.26). 131,835,648 parameters. Not repeated by us at this size.
    """
    text: dict[str, Any] = {**OPENWEBTEXT, "tokenizer": "bert-base-uncased", "vocab_size": 30522}
    return named(
        Recipe,
        "mlm-base",
        task=MaskedLanguageModelTask(
            text=TextData(**text, sequence_length=1024, eval_sequences=2048),
            backbone=EncoderBackbone(layers=12, width=768, heads=12, hidden=2048, embedding_std=1.0),
        ),
        arm="noble:rank=64",
        train=TrainConfig(steps=100_000, batch_size=64, lr=3e-4, warmup_steps=1000, **FAST, **EVERY_2000),
        arms=NOBLE_ARMS,
        seeds=1,
    )
