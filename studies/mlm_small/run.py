"""NOBLE on a masked language model: Table 2 of noble.txt (section 4.1.2) in small.

    python -m studies.mlm_small.run DATA [--size cpu|gpu] [--seeds N] [--threads N] [--work FOLDER]

DATA holds ELTeC's English novels as `train.txt.xz` and `valid.txt.xz`, novels joined by lines of '<|endoftext|>', held
out by novel. Arms: the baseline with three dense inits, a wider baseline with the parameters of the middle rank, and
NOBLE at three ranks; width / rank is 16, 8 and 4. Each arm's learning rate is the best of three on seed 0 (at the edge
of the grid it grows, at most twice), then three other seeds. Finished runs are kept in FOLDER and used again; record,
report and pictures are copied beside this file. `--smoke` takes a few steps of everything and copies nothing.
"""

from dataclasses import replace
from pathlib import Path

from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import EncoderBackbone, MaskedLanguageModelTask
from nlr_lab.training import Recipe, TrainConfig
from studies.study import noble_arms, one_line_errors, run_study, study_parser

HERE = Path(__file__).parent
RANKS = {"cpu": (8, 16, 32), "gpu": (48, 96, 192)}
RATES = {"cpu": (2e-3, 4e-3, 8e-3), "gpu": (5e-4, 1e-3, 2e-3)}
# The middle rank's branches have the parameters of so much more GeGLU: (its width) / (the model's).
WIDER = {"cpu": 3.594, "gpu": 3.496}


def recipe(data: Path, size: str, threads: int | None) -> Recipe:
    """The setting of all arms."""
    small = size == "cpu"
    text = TextData(
        source=str(data / "train.txt.xz"),
        valid_source=str(data / "valid.txt.xz"),
        tokenizer="wordpiece",
        vocab_size=1024 if small else 8192,
        sequence_length=128 if small else 512,
        eval_sequences=128 if small else 1024,
    )
    if small:
        backbone = EncoderBackbone(layers=4, width=128, heads=4, hidden=352, embedding_std=1.0)
        train = TrainConfig(steps=500, batch_size=8, lr=4e-3, warmup_steps=50, eval_every=25, save_every=250)
    else:
        backbone = EncoderBackbone(layers=12, width=768, heads=12, hidden=2048, embedding_std=1.0)
        train = TrainConfig(steps=10_000, batch_size=64, lr=1e-3, warmup_steps=1000, eval_every=500, save_every=1000)
        train = replace(train, bf16=True, compile=True)
    return Recipe(
        name=f"mlm_small-{size}",
        description=f"EuroBERT of width {backbone.width} and {backbone.layers} layers on 19th-century English novels",
        task=MaskedLanguageModelTask(text=text, backbone=backbone),
        train=replace(train, tracker="none", threads=threads, eval_batch_size=32),
    )


def main() -> None:
    given = study_parser(__doc__, "mlm_small", "data", sized=True).parse_args()
    base = recipe(given.data, given.size, given.threads if given.size == "cpu" else None)
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
            command=f"python -m studies.mlm_small.run DATA --size {given.size} --seeds {given.seeds}",
        )


if __name__ == "__main__":
    main()
