"""`nlr evaluate CHECKPOINT`: perplexity, bits per byte, lm-eval's tasks, MMLU and commonsense over local rows."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .checkpoint import check_parent, find_model, find_recipe_file, open_language_model, open_tokenizer
from .options import parse


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Perplexity and bits per byte on held-out text, and lm-eval's tasks; of other models, the numbers of their
    recipe's held-out data."""

    checkpoint: Positional[str]
    """A model folder, an adapter of peft, or the run folder that `nlr train` wrote."""
    base: str | None = None
    """Folder or name of an adapter's base model, where it is not what the adapter names."""
    text: str | None = None
    """A file, a folder or a data set's name, scored whole; default: the held-out text of the checkpoint's
    own recipe, unless --tasks are given."""
    text_field: str = "text"
    """Field of JSON lines, parquet and data sets that holds the text."""
    sequence_length: int | None = None
    """Tokens per window of --text; default: the model's positions, at most 1024."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval, e.g. hellaswag arc_easy; or over the files of --data: mmlu_local (also mmlu_local_stem,
    mmlu_local_anatomy, ...), commonsense_local (also boolq_local, piqa_local, siqa_local, hellaswag_local,
    winogrande_local, arc_easy_local, arc_challenge_local, openbookqa_local)."""
    data: str | None = None
    """The folder of the local tasks' files; with both kinds, it holds mmlu and commonsense."""
    format: Literal["choices", "generate"] = "choices"
    """Form of the local commonsense tests: choices compared by log-likelihood, as lm-eval does, or the
    answer looked for in generated text, as LLM-Adapters, DoRA and the sine papers do."""
    prompt: Literal["alpaca", "llm-adapters"] = "alpaca"
    """With --format generate: the prompt that the model was tuned with, that of nlr finetune or that of LLM-Adapters'
    release, which is indented."""
    beams: int = 4
    """With --format generate: beams of the search; 1 is greedy."""
    num_fewshot: int | None = None
    """Answered examples in front of each question; default: 5 for mmlu_local, else as the task has it."""
    split: Literal["dev", "test"] | None = None
    """The labelled split of GLUE on which a tuned model is scored; default: that of its recipe."""
    include_path: str | None = None
    """A folder with lm-eval task files of your own."""
    limit: int | None = None
    """At most this many questions of each task, and of each subject of MMLU."""
    batch_size: int = 16
    """Sequences per forward pass; the numbers do not depend on it, but for rounding."""
    device: str = ""
    """cpu, cuda or cuda:N; default: the GPU when there is one."""
    output: str | None = None
    """Write the numbers to this JSON file too."""


def run_evaluate(arguments: list[str]) -> None:
    """Evaluate and print one line a number."""
    options = parse(EvaluateOptions, arguments, command="evaluate")
    folder = find_model(options.checkpoint, adapters=True)
    _check(options)
    recipe = None if options.text is not None or options.tasks else _other_recipe(folder)
    if recipe is not None:
        results = _score_held_out(recipe, folder, options)
    elif options.split is not None:
        raise UserError("--split is for the run of nlr finetune on a task of GLUE, without --text and --tasks")
    else:
        results = _score_language_model(folder, options)
    results = {"checkpoint": options.checkpoint, **results, "versions": _versions()}
    if options.output is not None:
        Path(options.output).write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")


def _check(options: EvaluateOptions) -> None:
    """Refuse what can be refused before a model is loaded."""
    for name, least in (("sequence_length", 2), ("limit", 1), ("batch_size", 1), ("beams", 1), ("num_fewshot", 0)):
        if (value := getattr(options, name)) is not None:
            check_integer(f"--{name.replace('_', '-')}", value, minimum=least)
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise UserError(f"no such folder: {options.include_path} (--include-path)")
    for name in ("include_path", "data", "num_fewshot", "limit"):
        if getattr(options, name) is not None and not options.tasks:
            raise UserError(f"--{name.replace('_', '-')} does nothing without --tasks")
    check_parent(options.output, "--output")


def _other_recipe(folder: Path) -> Any:
    """Return the recipe that made the model, unless it is a language model trained on text or image tokens; or None."""
    from nlr_lab.training.recipe import Recipe
    from nonlinear_lowrank.hub.loading import check_causal, is_adapter

    file = find_recipe_file(folder)
    if file is None:
        return None
    recipe = Recipe.from_json(file.read_text(encoding="utf-8"))
    if not (hasattr(recipe.task, "text") or hasattr(recipe.task, "tokens")):
        return recipe
    if not is_adapter(folder):  # one that lies there is peft's own, on what the recipe made
        try:
            check_causal(folder)
        except UserError:
            return recipe
    return None


def _score_held_out(recipe: Any, folder: Path, options: EvaluateOptions) -> dict[str, Any]:
    """Masked language models, classifiers and tuned models: the held-out data of their own recipe."""
    from nlr_lab.evaluation.losses import score_saved
    from nlr_lab.runtime.environment import choose_device

    scores = score_saved(
        recipe.task,
        folder,
        base=options.base,
        split=options.split,
        device=str(choose_device(options.device)),
        batch_size=options.batch_size,
    )
    measure = recipe.task.measure
    unit = measure.unit if measure.is_loss else "squared error" if "pearson" in scores else "nats"
    loss = f"loss {scores['loss']:.4f} {unit}"
    others = [f"{name} {value:.4f}" for name, value in scores.items() if name != "loss"]
    where = "held-out data" if options.split is None else f"split {options.split} of the data"
    print(f"{where} of {recipe.name}: {'   '.join([*others, loss])}")
    return {"split": options.split, "held_out": scores}


def _score_language_model(folder: Path, options: EvaluateOptions) -> dict[str, Any]:
    local, named = _find_tasks(options)
    model = open_language_model(folder, options.device, options.base)
    # The held-out text of a recipe is tokens already; a checkpoint in the middle of a run has no tokenizer.
    tokenizer: Any = open_tokenizer(folder, options.base) if options.text is not None or options.tasks else None
    results: dict[str, Any] = {}
    if options.text is not None or not options.tasks:
        if options.text is not None:
            name, score = options.text, _score_text(model, tokenizer, options)
        else:
            name, score = _score_own_text(model, folder, options)
        print(f"{name}: {score}")
        results["text"] = {"source": name, **score.to_json()}
    if options.tasks:
        from nlr_lab.evaluation.harness import task_table

        kept = ["num_fewshot", "limit", "batch_size", "format"]
        kept += ["prompt", "beams"] if options.format == "generate" else []
        results["tasks"] = _score_tasks(model, tokenizer, local, named, options)
        results["settings"] = {each: getattr(options, each) for each in kept}
        results["data"] = [asdict(file) for file in local.files]
        print("\n".join(task_table(results["tasks"], local.hidden)))
    return results


def _find_tasks(options: EvaluateOptions) -> tuple[Any, list[str]]:
    """Return local tasks, with their rows read and checked, and the names that are lm-eval's own."""
    from nlr_lab.evaluation import LocalTasks, find_local_tasks
    from nlr_lab.evaluation.local_tasks import COMMONSENSE_NAMES, is_local

    own = [name for name in options.tasks if is_local(name)]
    named = [name for name in options.tasks if name not in own]
    if own and options.data is None:
        raise UserError(f"{own[0]} reads its questions from files: name their folder with --data FOLDER")
    if not own and options.data is not None:
        raise UserError("--data does nothing without a local task, such as mmlu_local or commonsense_local")
    if options.format == "generate" and not set(own) & set(COMMONSENSE_NAMES):
        raise UserError("--format generate is for the local commonsense tests, such as commonsense_local")
    if options.num_fewshot is not None and set(options.tasks) <= set(COMMONSENSE_NAMES):
        raise UserError("--num-fewshot does nothing here: the local commonsense tests are asked without examples")
    if options.data is None:
        return LocalTasks(), named
    return find_local_tasks(own, options.data, shots=options.num_fewshot), named


def _score_tasks(
    model: Any, tokenizer: Any, local: Any, named: list[str], options: EvaluateOptions
) -> dict[str, dict[str, Any]]:
    from nlr_lab.evaluation import score_answers, score_tasks
    from nlr_lab.evaluation.local_tasks import COMMONSENSE_NAMES

    scores: dict[str, dict[str, Any]] = {}
    if options.format == "generate":
        asked, local = local.split(COMMONSENSE_NAMES)
        scores |= score_answers(
            model,
            tokenizer,
            asked,
            prompt=options.prompt,
            beams=options.beams,
            limit=options.limit,
            batch_size=options.batch_size,
            progress=_show_progress,
        )
    if local.tasks or named:
        scores |= score_tasks(
            model,
            tokenizer,
            named,
            local=local,
            include_path=options.include_path,
            shots=options.num_fewshot,
            limit=options.limit,
            batch_size=options.batch_size,
        )
    return scores


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done:,} of {total:,} questions", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    from nlr_lab.runtime.environment import versions

    found = versions()
    for package in ("lm_eval", "peft"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _score_own_text(model: Any, folder: Path, options: EvaluateOptions) -> tuple[str, Any]:
    """Score the evaluation sequences that the checkpoint's training measured itself on."""
    from nlr_lab.evaluation import score_sequences
    from nlr_lab.training.recipe import Recipe

    file = find_recipe_file(folder)
    if file is None:
        raise UserError(
            f"{folder} was not made by nlr train (no recipe.json), so it has no held-out text of its own; pass --text"
        )
    recipe = Recipe.from_json(file.read_text(encoding="utf-8"))
    prepared = recipe.task.prepare()
    if prepared.vocab_size != model.config.vocab_size:
        raise UserError(
            f"the text of {file} now has a vocabulary of {prepared.vocab_size}, the model one of "
            f"{model.config.vocab_size}: the source or its tokenizer has changed; pass --text"
        )
    # Image tokens have no bytes of text.
    size = prepared.valid_bytes_per_token
    score = score_sequences(model, prepared.valid, bytes_per_token=size, batch_size=options.batch_size)
    what, data = ("images", recipe.task.tokens) if size is None else ("text", recipe.task.text)
    return f"held-out {what} of {recipe.name} ({data.source})", score


def _score_text(model: Any, tokenizer: Any, options: EvaluateOptions) -> Any:
    from nlr_lab.evaluation import score_documents
    from nlr_lab.tasks.text.data import Corpus

    longest = getattr(model.config, "max_position_embeddings", None) or 1024
    if longest < 2:
        raise UserError(f"the model has {longest} position; a text needs at least 2: evaluate a model with more")
    length = options.sequence_length or min(longest, 1024)
    try:
        return score_documents(
            model,
            tokenizer,
            Corpus(source=options.text or "", text_field=options.text_field).documents(),
            sequence_length=length,
            separator=tokenizer.eos_token,
            batch_size=options.batch_size,
        )
    except IndexError as error:  # positions that are an embedding end there; rotary ones do not
        if length <= longest:
            raise
        raise UserError(f"the model has {longest} positions; lower --sequence-length {length} to that") from error
