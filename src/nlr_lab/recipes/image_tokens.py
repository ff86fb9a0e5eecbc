"""Autoregressive image tokens with and without NOBLE branches (noble.txt, section 4.2.2 and appendix B).

The language model's backbone on grids of image codes: a class token, the codes in raster order, 2-D rotary positions,
no dropout and no augmentation, AdamW(0.9, 0.98) with weight decay 0.01. Warm-up and linear decay are those of the
language model, which the paper calls structurally identical; of the warm-up it prints nothing here. Embeddings have
standard deviation 1 and the first three arms are the baseline and its controls, as in `recipes.llm`.
"""

from nlr_lab.tasks.images.tokens import ImageTokenData, ImageTokenTask
from nlr_lab.tasks.text.language_model import GlmBackbone
from nlr_lab.training.recipe import Recipe, TrainConfig

from .shared import BASELINES, EVERY_2000, FAST, NOBLE_ARMS, named


def image_tokens_demo() -> Recipe:
    """Handwritten digits as 4 x 4 grids of patches; everything is embedded.

    Command: `nlr train image-tokens-demo`, then `nlr generate runs/image-tokens-demo`; or
    `nlr compare image-tokens-demo`.
    Hardware: 2 CPU cores, 1 GB of memory, no network.
    Time: about a minute for an arm; the 128 mean patches are fitted on first use, some seconds.
    Expect: an evaluation loss near 2.3 nats a token in every arm, and pictures in which many digits can be read.
    1,438 images are learned by heart after 300 steps: this shows the task at work and tells no arms apart.
    """
    return named(
        Recipe,
        "image-tokens-demo",
        task=ImageTokenTask(
            tokens=ImageTokenData(source="digits", size=8, patch=2, codes=128, classes=10, eval_images=359),
            backbone=GlmBackbone(layers=4, width=128, heads=4, hidden=344, embedding_std=1.0),
        ),
        arm="noble:rank=16",
        train=TrainConfig(steps=300, batch_size=32, lr=2e-3, warmup_steps=30, eval_every=20, save_every=150),
        arms=(*BASELINES, "noble:rank=16"),
    )


def image_tokens_cifar10() -> Recipe:
    """CIFAR-10 as 8 x 8 grids of 512 mean patches, small enough for a CPU.

    Command: `nlr compare image-tokens-cifar10 --tune-lr 5e-4 1e-3 2e-3`, or `nlr train image-tokens-cifar10`; a local
    copy by `--source cifar10.npz`.
    Hardware: 2 CPU cores and 2 GB of memory, or any GPU.
    Time: encoding takes two minutes, once; then about 5 minutes an arm (a step takes 0.30 s of one core without
    branches, 0.39 s at rank 24).
    Expect: losses not measured yet. The 64 tokens of an image keep 22.6 dB of it.
    """
    return named(
        Recipe,
        "image-tokens-cifar10",
        task=ImageTokenTask(
            tokens=ImageTokenData(source="uoft-cs/cifar10", size=32, patch=4, codes=512, classes=10, eval_images=512),
            backbone=GlmBackbone(layers=4, width=192, heads=6, hidden=512, embedding_std=1.0),
        ),
        arm="noble:rank=24",
        train=TrainConfig(steps=1200, batch_size=16, lr=1e-3, warmup_steps=100, eval_every=60, save_every=300),
        arms=(*BASELINES, "noble:rank=12", "noble:rank=24", "noble:rank=48"),
    )


def image_tokens_base() -> Recipe:
    """The paper's image token model: the base language model on 1,024 codes of amused-512 an image (section 4.2.2).

    Command: `torchrun --nproc-per-node 8 -m nlr_lab train image-tokens-base --arm noble:rank=64`, or
    `nlr compare image-tokens-base --seeds 1`; a folder of images by `--source imagenet/`.
    Hardware: several large GPUs, and `pip install 'nonlinear-lowrank[images]'`. ImageNet-1k is encoded once by one
    GPU, in parts that survive an interruption; the tokens are 2.6 GB in the cache.
    Time: not measured by us; sequences are as long as those of llm-base, whose steps take 309 to 373 ms on 8 H100.
    Expect: the paper's evaluation losses, 6.723 for the baseline and 6.699 / 6.690 / 6.682 at rank 64 / 128 / 256.
    Not repeated by us at this size.
    """
    tokens = ImageTokenData(
        source="ILSVRC/imagenet-1k",
        size=512,
        tokenizer="amused/amused-512",
        patch=16,
        codes=8192,
        classes=1000,
        eval_images=2048,
    )
    return named(
        Recipe,
        "image-tokens-base",
        task=ImageTokenTask(
            tokens=tokens, backbone=GlmBackbone(layers=12, width=1024, heads=8, hidden=2752, embedding_std=1.0)
        ),
        arm="noble:rank=64",
        train=TrainConfig(steps=250_000, batch_size=64, lr=3e-4, warmup_steps=2000, **FAST, **EVERY_2000),
        arms=NOBLE_ARMS,
        seeds=1,
    )
