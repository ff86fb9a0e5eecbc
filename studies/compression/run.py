"""Trained weights as sine factors, against singular value decomposition, before and after a short training.

    python -m studies.compression.run weights NOVELS [--work FOLDER]
    python -m studies.compression.run heal GLUE [--seeds 3] [--threads 1] [--work FOLDER]

weights   the feed-forward linears of three blocks of SmolLM2-135M, each as factors of half its size: relative error of
          the weights, and loss on 4,096 tokens of held-out novels (NOVELS: ELTeC's, `valid.txt.xz`)
heal      the feed-forward linears and attention outputs of MiniLM as factors of rank 76, a quarter of the former's
          size, then one epoch of STS-B (GLUE: its files), every arm at the best of its learning rates on one seed;
          three other seeds are compared

`full` is the model that was not compressed. Finished runs are kept in FOLDER and beside this file; records, report and
picture are copied beside this file.
"""

import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import nonlinear_lowrank as nlr
from nlr_lab.recipes import get_recipe
from nlr_lab.runtime.environment import provenance
from nlr_lab.runtime.storage import write_json
from nlr_lab.tasks.finetune.pretrained import Pretrained
from nlr_lab.training import Arm
from studies.study import absolute, kept_runs, one_line_errors, run_study, study_parser

HERE = Path(__file__).parent
_BLOCKS = r".*layers\.(10|11|12)\.mlp\.(gate|up|down)_proj"
_HALF = 209  # of 576 x 1536
_MLP = r".*(intermediate|output)\.dense"
_QUARTER = 76  # of 384 x 1536
_FACTORS = f"rank={_QUARTER},include={_MLP}"
ARMS = (
    "full:grid=3e-5/1e-4/3e-4",
    f"low-rank:{_FACTORS},init=fit,grid=3e-5/1e-4/3e-4,name=svd",
    f"sine-lowrank:{_FACTORS},init=fit,grid=1e-5/3e-5/1e-4,name=sine",
)


def weights(novels: Path) -> dict[str, Any]:
    """Return, by kind of factors, the errors of the weights and the model's loss."""
    pretrained = Pretrained(checkpoint="smollm2")
    with lzma.open(novels / "valid.txt.xz", "rt", encoding="utf-8") as file:
        text = file.read(130_000)[100_000:]
    ids = pretrained.tokenizer()(text, return_tensors="pt").input_ids[:, :4096].view(8, 512)
    found: dict[str, Any] = {}
    for kind, activation in (("plain", None), ("svd", "identity"), ("sine", "sine")):
        model = pretrained.load("causal", 0, 0)
        errors: dict[str, float] = {}
        if activation is not None:
            config = nlr.SineLowRankConfig(rank=_HALF, activation=activation, init="fit")
            swapped = nlr.augment(model, config, include=_BLOCKS, verbose=False).swapped
            errors = {name: model.get_submodule(name).fit_error for name in swapped}
        with torch.no_grad():
            found[kind] = {"loss": model(ids, labels=ids).loss.item(), "errors": errors}
    return found


def main() -> None:
    parser = study_parser(__doc__, "compression")
    parser.add_argument("part", choices=("weights", "heal"))
    parser.add_argument("data", type=absolute)
    given = parser.parse_args()
    if given.part == "weights":
        with one_line_errors():
            write_json(HERE / "weights.json", {"kinds": weights(given.data), **provenance()})
        return
    recipe = get_recipe("glue-minilm")
    task: Any = recipe.task
    recipe = replace(
        recipe,
        task=replace(task, glue=replace(task.glue, task="stsb", source=str(given.data))),
        train=replace(recipe.train, epochs=1, threads=given.threads, tracker="none"),
    )
    with one_line_errors(), kept_runs(HERE, given.work):
        run_study(
            recipe,
            given.work / "heal",
            HERE,
            "heal",
            arms=[Arm.parse(text) for text in ARMS],
            seeds=given.seeds,
            timing_rounds=0,
            max_extensions=1,
            command=f"python -m studies.compression.run heal GLUE --seeds {given.seeds}",
        )


if __name__ == "__main__":
    main()
