"""NOBLE on autoregressive image tokens: Table 4 of noble.txt (section 4.2.2) in small.

    python -m studies.image_tokens.run CIFAR [--size cpu|gpu] [--seeds N] [--threads N] [--work FOLDER]

CIFAR is CIFAR-10 as a .npz file (also .npz.xz), as `nlr train --source` takes it; its images are encoded once as 8 x 8
grids of 512 mean patches. Arms: the baseline with three dense inits, a wider baseline with the parameters of the middle
rank, and NOBLE at three ranks; width / rank is 16, 8 and 4. Each arm's learning rate is the best of three on seed 0 (at
the edge of its grid the grid grows, at most twice), then three other seeds. Finished runs are kept in FOLDER and used
again; record, report and pictures are copied beside this file. `--smoke` takes a few steps of everything and copies
nothing.
"""

from dataclasses import replace
from pathlib import Path

from nlr_lab.tasks.images.tokens import ImageTokenData, ImageTokenTask
from nlr_lab.tasks.text.language_model import GlmBackbone
from nlr_lab.training import Recipe, TrainConfig
from studies.study import noble_arms, one_line_errors, run_study, study_parser

HERE = Path(__file__).parent
RANKS = {"cpu": (8, 16, 32), "gpu": (32, 64, 128)}
RATES = {"cpu": (2e-3, 4e-3, 8e-3), "gpu": (5e-4, 1e-3, 2e-3)}
# The middle rank's branches have the parameters of so much more GeGLU: (its width) / (the model's).
WIDER = {"cpu": 3.547, "gpu": 3.473}


def recipe(source: Path, size: str, threads: int | None) -> Recipe:
    """The setting of all arms."""
    small = size == "cpu"
    tokens = ImageTokenData(source=str(source), size=32, patch=4, codes=512, classes=10, eval_images=256)
    if small:
        backbone = GlmBackbone(layers=4, width=128, heads=4, hidden=352, embedding_std=1.0)
        train = TrainConfig(steps=360, batch_size=16, lr=4e-3, warmup_steps=36, eval_every=20, save_every=180)
    else:
        backbone = GlmBackbone(layers=8, width=512, heads=8, hidden=1376, embedding_std=1.0)
        train = TrainConfig(steps=6000, batch_size=128, lr=1e-3, warmup_steps=600, eval_every=300, save_every=1500)
        train = replace(train, bf16=True, compile=True)
    return Recipe(
        name=f"image_tokens-{size}",
        description=f"a GLM of width {backbone.width} and {backbone.layers} layers on 64 codes a CIFAR-10 image",
        task=ImageTokenTask(tokens=tokens, backbone=backbone),
        train=replace(train, tracker="none", threads=threads, eval_batch_size=64),
    )


def main() -> None:
    given = study_parser(__doc__, "image_tokens", "cifar", sized=True).parse_args()
    base = recipe(given.cifar, given.size, given.threads if given.size == "cpu" else None)
    with one_line_errors():
        run_study(
            base,
            given.work / given.size,
            HERE,
            given.size,
            smoke=given.smoke,
            arms=noble_arms(WIDER[given.size], RANKS[given.size]),
            seeds=given.seeds,
            tune_lr=RATES[given.size],
            max_extensions=2,
            command=f"python -m studies.image_tokens.run CIFAR --size {given.size} --seeds {given.seeds}",
        )


if __name__ == "__main__":
    main()
