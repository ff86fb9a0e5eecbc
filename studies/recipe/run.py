"""A better recipe for NOBLE than the paper's table? One change at a time, then the best ones together.

    python -m studies.recipe.run DATA [--stage single|seeds|race|rate|more|all] [--seeds 3] [--work FOLDER]

DATA holds ELTeC's English novels as `train.txt.xz` and `valid.txt.xz`. Rungs of the ladder (studies/ladder), 20 tokens
a parameter; NOBLE of rank width / 8. Each stage continues where it was interrupted:

    single    width 32: the paper's table and every change of it alone, one seed, at NOBLE's best rate in the ladder
    seeds     width 32: the eight best of them, and all fields of the better half of these together, on other seeds
    race      width 48: the three best of these against the table, every arm's learning rate tuned
    rate      width 48: the race's best and the table at one learning rate, on the race's seeds
    more      width 32: ranks, frequencies and Muon on the dense weights, on the seeds of `seeds`; and the table and
              the plain model with two smaller embeddings, learning rates tuned

Choices are made on earlier stages' seeds alone; what a later stage says of an arm is on seeds that did not choose it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from nlr_lab.runtime.storage import read_json
from nlr_lab.scale.ladder import SCALES, Rung
from nlr_lab.training import Arm, Recipe
from studies.study import one_line_errors, run_study, study_parser

HERE = Path(__file__).parent
TABLE, PLAIN = "table", "plain"
CHANGES = {
    # Multipliers of the learning rate.
    "rates-1": "up_lr_power=0,mix_lr_power=0,frequency_lr=1,phase_lr=1",
    "up-rate-1": "up_lr_power=0",
    "mix-rate-1": "mix_lr_power=0",
    "angle-rates-1": "frequency_lr=1,phase_lr=1",
    "angle-rates-10": "frequency_lr=10,phase_lr=10",
    # Inits.
    "dense-0.35": "dense_scale=0.35",
    "dense-0.7": "dense_scale=0.7",
    "dense-1": "dense_scale=1",
    "up-0": "up_scale=0",
    "up-0.1": "up_scale=0.1",
    "up-0.5": "up_scale=0.5",
    "mix-0.5": "mix_scale=0.5",
    "mix-2": "mix_scale=2",
    "phase-1": "phase_std=1",
    # The bottleneck.
    "depth-1": "depth=1",
    "depth-3": "depth=3",
    "biases": "bottleneck_bias=true",
    "gelu": "activation=gelu,depth=1",
    # Places.
    "attention": "select=query/key/value/other",
    "feed-forward": "select=feed_forward",
}
MORE = {
    "rank-16th": "rank_ratio=0.0625",
    "rank-4th": "rank_ratio=0.25",
    "frequencies-0.3-to-3": "frequency_range=0.3/3",
    "frequencies-3-to-9": "frequency_range=3/9",
    "muon": "optimizer=muon,lr=0.016",  # its best in the ladder
}
EMBEDDING_STDS = (0.1, 0.3)  # the ladder's is 1
KEPT, RACED, BEST_RATE = 8, 3, 8e-3


def main() -> None:
    parser = study_parser(__doc__, "recipe", "data")
    parser.add_argument("--stage", choices=("single", "seeds", "race", "rate", "more", "all"), default="all")
    given = parser.parse_args()
    small = SCALES["small"]
    text = replace(small.text, source=str(given.data / "train.txt.xz"), valid_source=str(given.data / "valid.txt.xz"))
    ladder = replace(small, text=text, threads=given.threads)
    with one_line_errors(given.stage):
        if given.stage in ("single", "all"):
            stage("single", ladder.recipe(Rung(width=32, tokens=20)), list(CHANGES), given, seeds=1)
        if given.stage in ("seeds", "all"):
            stage("seeds", ladder.recipe(Rung(width=32, tokens=20)), kept(given.work), given, before=1)
        if given.stage in ("race", "all"):
            best = ranked(given.work, "seeds")[:RACED]
            race = ladder.recipe(Rung(width=48, tokens=20))
            stage("race", race, best, given, before=4, tune_lr=(4e-3, 8e-3, 1.6e-2))
        if given.stage in ("rate", "all"):
            stage("rate", ladder.recipe(Rung(width=48, tokens=20)), ranked(given.work, "race")[:1], given, before=4)
        if given.stage in ("more", "all"):
            stage("more", ladder.recipe(Rung(width=32, tokens=20)), list(MORE), given, before=1)
            for std in EMBEDDING_STDS:
                recipe = replace(ladder, embedding_std=std).recipe(Rung(width=32, tokens=20))
                stage(f"embedding-{std}", recipe, [PLAIN], given, before=1, tune_lr=(4e-3, 8e-3, 1.6e-2))


def stage(name: str, recipe: Recipe, changes: list[str], given: Any, *, before: int = 0, **options: Any) -> None:
    """Compare some changes with the table, which is the reference, on the seeds after `before`."""
    together = changes_together(given.work) if "together" in changes else {}
    recipe = replace(recipe, name=f"recipe-{name}", train=replace(recipe.train, lr=BEST_RATE, seed=before))
    arms = [arm(TABLE, "")] + [arm(each, {**CHANGES, **MORE, PLAIN: "", **together}[each]) for each in changes]
    how = f"python -m studies.recipe.run DATA --stage {given.stage} --seeds {given.seeds}"
    options = {"seeds": given.seeds, "timing_rounds": 0} | options
    run_study(recipe, given.work / name, HERE, name, arms=arms, command=how, **options)


def arm(name: str, settings: str) -> Arm:
    """Return NOBLE with some settings, or the plain model."""
    method = "baseline" if name == PLAIN else "noble"
    rank = "" if name == PLAIN or "rank_ratio" in settings else "rank_ratio=0.125"
    return Arm.parse(f"{method}:" + ",".join(filter(None, (rank, settings, f"name={name}"))))


def ranked(work: Path, name: str) -> list[str]:
    """Return a stage's changes, the best first."""
    arms = read_json(work / name / "results.json")["arms"]
    found = {each["name"]: each["final_loss"]["mean"] for each in arms if each["final_loss"]["mean"] is not None}
    return [each for each in sorted(found, key=lambda each: found[each]) if each != TABLE]


def kept(work: Path) -> list[str]:
    """Return the best changes of `single`, and all of the better half of them in one."""
    return [*ranked(work, "single")[:KEPT], "together"]


def changes_together(work: Path) -> dict[str, str]:
    """Return the better half of the kept changes in one arm; of two that set one field the better one counts."""
    settings: dict[str, str] = {}
    for name in ranked(work, "single")[: KEPT // 2]:
        for field, _, value in (each.partition("=") for each in CHANGES[name].split(",")):
            settings.setdefault(field, value)
    return {"together": ",".join(f"{field}={value}" for field, value in settings.items())}


if __name__ == "__main__":
    main()
