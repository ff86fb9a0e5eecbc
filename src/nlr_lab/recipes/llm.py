"""Language models with and without NOBLE branches (noble.txt, section 4.1.1).

All four share one shape: a GLM backbone (separate q, k, v, o; one fused gate-up projection; GeGLU; RMSNorm;
rotary positions on the whole head; no biases; untied output head), next-token prediction on packed text,
AdamW(0.9, 0.98) with weight decay 0.01, linear warm-up and linear decay. Only sizes and text differ.

The input embeddings have standard deviation 1, PyTorch's default, equal in all arms. The paper names no
value; it calls 1/sqrt(d_in) the typical scale of a linear, which is PyTorch's default there, so the embedding
is taken from the same source. With 0.02 (transformers' default; `--embedding-std 0.02`) a tuned baseline
closes most of the gap in small models.

The first three arms are the baseline and its controls (`shared.BASELINES`).
"""

from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import GlmBackbone, LanguageModelTask
from nlr_lab.training.recipe import Recipe, TrainConfig

from .shared import BASELINES, EVERY_2000, FAST, NOBLE_ARMS, OPENWEBTEXT, OPENWEBTEXT_GPT2, named


def llm_demo() -> Recipe:
    """A language model small enough for two CPU cores, on the running Python's own library sources.

    Command: `nlr compare llm-demo --max-minutes 9` (what `make demo` runs), or `nlr train llm-demo`.
    Hardware: 2 CPU cores, 2 GB of memory, no network.
    Time: about half a minute for an arm, under three minutes for one seed of all four arms; on cores that others use
    longer, and where one seed would not end within --max-minutes all runs are shortened.
    Expect: an evaluation loss near 5 nats a token (2.6 bits a byte) in every arm. 300 steps are far too few
    to flatten the curves: this shows the tool at work, it is no evidence for or against the method.
    """
    return named(
        Recipe,
        "llm-demo",
        task=LanguageModelTask(
            text=TextData(source="stdlib", vocab_size=2048, sequence_length=128, eval_sequences=64),
            backbone=GlmBackbone(layers=4, width=128, heads=4, hidden=344, embedding_std=1.0),
        ),
        arm="noble:rank=16",
        train=TrainConfig(steps=300, batch_size=8, lr=2e-3, warmup_steps=30, eval_every=20, save_every=150),
        arms=(*BASELINES, "noble:rank=16"),
    )


def llm_small() -> Recipe:
    """A 35M-parameter language model on a 2 GB slice of OpenWebText, for one small GPU.

    Command: `nlr compare llm-small --tune-lr 5e-4 1e-3 2e-3`, or `nlr train llm-small`.
    Hardware: one GPU of 8 GB or more with bfloat16; the text is streamed once and cached (1 GB of disk).
    Time: not measured yet.
    Expect: not measured yet; ranks 32, 64 and 128 at width 512 keep the paper's width/rank of 16, 8 and 4.
    """
    return named(
        Recipe,
        "llm-small",
        task=LanguageModelTask(
            text=TextData(
                **OPENWEBTEXT, max_bytes=2_000_000_000, vocab_size=16384, sequence_length=512, eval_sequences=512
            ),
            backbone=GlmBackbone(layers=6, width=512, heads=8, hidden=1376, embedding_std=1.0),
        ),
        arm="noble:rank=32",
        train=TrainConfig(
            steps=20_000,
            batch_size=64,
            lr=1e-3,
            warmup_steps=1000,
            bf16=True,
            compile=True,
            eval_every=500,
            log_every=20,
        ),
        arms=(*BASELINES, "noble:rank=32", "noble:rank=64", "noble:rank=128"),
    )


def llm_base() -> Recipe:
    """The paper's base language model: 254,733,312 parameters, 250,000 steps of OpenWebText (section 4.1.1).

    Command: `torchrun --nproc-per-node 8 -m nlr_lab train llm-base --arm noble:rank=64`, or
    `nlr compare llm-base --seeds 1`; the batch is the same whatever the number of processes.
    Hardware: the paper used 8 H100 GPUs; OpenWebText with GPT-2's tokenizer is about 18 GB in the cache.
    Time: the paper's 309 / 332 / 344 / 373 ms a step (baseline, rank 64, 128, 256): 21 to 26 hours an arm.
    Expect: the paper's evaluation losses, 2.850 for the baseline and 2.810 / 2.798 / 2.780 at rank 64 / 128 /
    256 (+5.70 / 11.63 / 24.19 % parameters). Not repeated by us at this size.
    """
    return named(
        Recipe,
        "llm-base",
        task=LanguageModelTask(
            text=TextData(**OPENWEBTEXT_GPT2),
            backbone=GlmBackbone(layers=12, width=1024, heads=8, hidden=2752, embedding_std=1.0),
        ),
        arm="noble:rank=64",
        train=TrainConfig(steps=250_000, batch_size=64, lr=3e-4, warmup_steps=2000, **FAST, **EVERY_2000),
        arms=NOBLE_ARMS,
        seeds=1,
    )


def llm_large() -> Recipe:
    """The paper's large language model: 1,420,204,032 parameters, 200,000 steps of OpenWebText (section 4.1.1).

    Command: `torchrun --nproc-per-node 8 -m nlr_lab train llm-large --arm noble:rank=64`, or
    `nlr compare llm-large --seeds 1`; the batch is the same whatever the number of processes.
    Hardware: the paper used 8 H100 GPUs; OpenWebText with GPT-2's tokenizer is about 18 GB in the cache.
    Time: not printed in the paper; the branches add 6.8 / 11.3 / 14.7 % at rank 64 / 128 / 256.
    Expect: the paper's evaluation losses, 2.513 for the baseline and 2.476 / 2.468 / 2.463 at rank 64 / 128 /
    256 (+4.04 / 8.17 / 16.68 % parameters). Not repeated by us at this size.
    """
    return named(
        Recipe,
        "llm-large",
        task=LanguageModelTask(
            text=TextData(**OPENWEBTEXT_GPT2),
            backbone=GlmBackbone(layers=24, width=2048, heads=16, hidden=5504, embedding_std=1.0),
        ),
        arm="noble:rank=64",
        train=TrainConfig(steps=200_000, batch_size=128, lr=2.5e-4, warmup_steps=2000, **FAST, **EVERY_2000),
        arms=NOBLE_ARMS,
        seeds=1,
    )
