"""`nlr evaluate CHECKPOINT`: perplexity, bits per byte, lm-eval's tasks, MMLU and commonsense over local rows."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .checkpoint import check_parent, find_model, open_language_model, open_tokenizer, write_out
from .options import parse


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Perplexity and bits per byte on held-out text, and lm-eval's tasks; for other models, the numbers on their
    recipe's held-out data."""

    checkpoint: Positional[str]
    """A model folder, an adapter of peft, or the run folder that `nlr train` wrote."""
    base: str | None = None
    """Folder or name of an adapter's base model, if not the one that the adapter names."""
    source: str | None = None
    """Text: a file, a folder or a data set's name, scored whole; none: the held-out text of the checkpoint's
    own recipe, unless --tasks are given."""
    text_field: str | None = None
    """With --source: the field of JSON lines, parquet and data sets that holds the text; none: text."""
    sequence_length: int | None = None
    """Tokens per window of --source; none: the model's positions, at most 1024."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval, e.g. hellaswag arc_easy; or over the files of --data: mmlu_local (also mmlu_local_stem,
    mmlu_local_anatomy, ...), commonsense_local (also boolq_local, piqa_local, siqa_local, hellaswag_local,
    winogrande_local, arc_easy_local, arc_challenge_local, openbookqa_local)."""
    data: str | None = None
    """The folder of the local tasks' files; with both kinds, it holds mmlu and commonsense."""
    format: Literal["choices", "generate"] | None = None
    """Form of the local commonsense tests: choices compared by log-likelihood, as lm-eval does, or the
    answer looked for in generated text, as LLM-Adapters, DoRA and the sine papers do; none: choices."""
    prompt: Literal["alpaca", "llm-adapters"] | None = None
    """With --format generate: the prompt that the model was tuned with, nlr finetune's or that of LLM-Adapters'
    release (indented); none: alpaca."""
    beams: int | None = None
    """With --format generate: beams of the search; 1 is greedy; none: 4."""
    num_fewshot: int | None = None
    """Answered examples in front of each question; none: 5 for mmlu_local, else the task's own."""
    split: Literal["dev", "test"] | None = None
    """The labelled split of GLUE on which a tuned model is scored; none: that of its recipe."""
    include_path: str | None = None
    """A folder with lm-eval task files of your own."""
    limit: int | None = None
    """At most this many questions of each task, and of each subject of MMLU."""
    batch_size: int = 16
    """Sequences per forward pass; the numbers do not depend on it, except for rounding."""
    device: str = ""
    """cpu, cuda or cuda:N; empty: the GPU, if there is one."""
    out: str | None = None
    """Write the numbers to this JSON file too."""


def run_evaluate(arguments: list[str]) -> None:
    """Evaluate and print one line a number."""
    options = parse(EvaluateOptions, arguments, command="evaluate")
    folder = find_model(options.checkpoint, adapters=True)
    _check(options)
    recipe, trained_on = (None, None) if options.source is not None or options.tasks else _find_recipe(folder)
    results: dict[str, Any] = {"checkpoint": options.checkpoint}
    if recipe is not None and not _continues_text(recipe, folder):
        results |= _score_held_out(recipe, folder, options, trained_on)
    elif options.split is not None:
        raise UserError("--split is for the run of nlr finetune on a task of GLUE, without --source and --tasks")
    elif recipe is not None:
        results["text"] = _score_own_text(recipe, folder, options, trained_on)
    elif options.source is not None or options.tasks:
        results |= _score_text_and_tasks(folder, options)
    else:
        raise UserError(
            f"{folder} was not made by nlr train (no recipe.json) and has no text of its own; pass --source"
        )

    from nlr_lab.runtime.environment import versions

    results["versions"] = versions() | ({"lm_eval": version("lm_eval")} if options.tasks else {})
    if options.out is not None:
        write_out(options.out, json.dumps(results, indent=2, default=str) + "\n")


def _check(options: EvaluateOptions) -> None:
    """Check what can be checked before a model is loaded."""
    for name, least in (("sequence_length", 2), ("limit", 1), ("batch_size", 1), ("beams", 1), ("num_fewshot", 0)):
        if (value := getattr(options, name)) is not None:
            check_integer(f"--{name.replace('_', '-')}", value, minimum=least)
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise UserError(f"no such folder: {options.include_path} (--include-path)")
    local, commonsense, others = _sort_tasks(options.tasks)
    examples = "another task: the local commonsense tests are asked without examples"
    conditions: tuple[tuple[tuple[str, ...], object, str], ...] = (
        # Options, what makes them act, and its words.
        (("sequence_length", "text_field"), options.source, "--source"),
        (("data", "format", "num_fewshot", "include_path", "limit"), options.tasks, "--tasks"),
        (("data",), local, "a local task, such as mmlu_local or commonsense_local"),
        (("format",), commonsense, "a local commonsense test, such as commonsense_local"),
        (("prompt", "beams"), options.format == "generate", "--format generate"),
        (("num_fewshot",), len(commonsense) < len(options.tasks), examples),
        (("include_path",), others, "a task of its files or of lm-eval's among --tasks"),
    )
    for names, acts, needed in conditions:
        for name in names:
            if getattr(options, name) is not None and not acts:
                raise UserError(f"--{name.replace('_', '-')} does nothing without {needed}")
    check_parent(options.out, "--out", options.checkpoint, options.source)


def _sort_tasks(tasks: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the local tasks, the commonsense tests among them, and the tasks that are lm-eval's own."""
    if not tasks:
        return [], [], []
    from nlr_lab.evaluation.local_tasks import COMMONSENSE_NAMES, is_local

    local = [name for name in tasks if is_local(name)]
    return local, [name for name in local if name in COMMONSENSE_NAMES], [name for name in tasks if name not in local]


def _find_recipe(folder: Path) -> tuple[Any, str | None]:
    """Return the recipe of the run that made a model, and the fingerprint of its data: recipe.json beside `model` or
    above `checkpoints/step-N`."""
    from nlr_lab.runtime.storage import read_json
    from nlr_lab.training.recipe import Recipe

    hint = "restore it, or score text with --source FILE"
    for place in (folder, folder.parent, folder.parent.parent):
        if (place / "recipe.json").exists():
            about = read_json(place / "recipe.json", hint, recipe=dict)
            return Recipe.from_dict(about["recipe"]), about.get("fingerprint")
    return None, None


def _continues_text(recipe: Any, folder: Path) -> bool:
    """Return whether a recipe's model, or peft's own adapter on it, continues text or image tokens."""
    from nlr_lab.tasks.images.tokens import ImageTokenTask
    from nlr_lab.tasks.text.language_model import LanguageModelTask, OptLanguageModelTask
    from nonlinear_lowrank.hub.loading import is_adapter

    generates = isinstance(recipe.task, LanguageModelTask | OptLanguageModelTask | ImageTokenTask)
    return generates or (is_adapter(folder) and not recipe.task.pretrained)


def _score_held_out(recipe: Any, folder: Path, options: EvaluateOptions, trained_on: str | None) -> dict[str, Any]:
    """Masked language models, classifiers and tuned models: the held-out data of their own recipe."""
    from nlr_lab.evaluation.losses import score_saved
    from nlr_lab.runtime.environment import choose_device

    where: dict[str, Any] = {"device": str(choose_device(options.device)), "batch_size": options.batch_size}
    scores = score_saved(recipe.task, folder, base=options.base, split=options.split, fingerprint=trained_on, **where)
    measure = recipe.task.measure
    unit = measure.unit if measure.is_loss else "squared error" if "pearson" in scores else "nats"
    loss = f"loss {scores['loss']:.4f} {unit}"
    others = [f"{name} {value:.4f}" for name, value in scores.items() if name != "loss"]
    data = "held-out data" if options.split is None else f"split {options.split} of the data"
    print(f"{data} of {recipe.name}: {'   '.join([*others, loss])}")
    return {"split": options.split, "held_out": scores}


def _score_own_text(recipe: Any, folder: Path, options: EvaluateOptions, trained_on: str | None) -> dict[str, Any]:
    """Score the evaluation sequences of the checkpoint's own training, which are tokens already."""
    from nlr_lab.evaluation.losses import check_data, score_sequences

    model = open_language_model(folder, options.device, options.base)
    what, data = ("text", recipe.task.text) if hasattr(recipe.task, "text") else ("images", recipe.task.tokens)
    others = ", or pass --source FILE" if what == "text" else ""
    try:
        prepared = recipe.task.prepare()
    except UserError as error:
        hint = f"restore it, or run this in the folder that the run was started in{others}"
        raise UserError(f"the {what} of the run cannot be read ({error}); {hint}") from error
    check_data(prepared, trained_on, others)
    if prepared.vocab_size != model.config.vocab_size:
        raise UserError(
            f"the text of {recipe.name} now has a vocabulary of {prepared.vocab_size}, the model one of "
            f"{model.config.vocab_size}: the source or its tokenizer has changed; pass --source"
        )
    size = prepared.valid_bytes_per_token
    score = score_sequences(model, prepared.valid, bytes_per_token=size, batch_size=options.batch_size)
    name = f"held-out {what} of {recipe.name} ({data.source})"
    print(f"{name}: {score}")
    return {"source": name, **score.to_json()}


def _score_text_and_tasks(folder: Path, options: EvaluateOptions) -> dict[str, Any]:
    from nlr_lab.evaluation.local_tasks import LocalTasks, find_local_tasks

    names, _, named = _sort_tasks(options.tasks)
    if names and options.data is None:
        raise UserError(f"{names[0]} reads its questions from files: name their folder with --data FOLDER")
    local = find_local_tasks(names, options.data or "", shots=options.num_fewshot) if names else LocalTasks()
    model = open_language_model(folder, options.device, options.base)
    tokenizer = open_tokenizer(folder, options.base)
    results: dict[str, Any] = {}
    if options.source is not None:
        score = _score_text(model, tokenizer, options)
        print(f"{options.source}: {score}")
        results["text"] = {"source": options.source, **score.to_json()}
    if options.tasks:
        from nlr_lab.evaluation.harness import score_answers, score_tasks, task_table
        from nlr_lab.evaluation.local_tasks import COMMONSENSE_NAMES

        limits: dict[str, Any] = {"limit": options.limit, "batch_size": options.batch_size}
        form = options.format or "choices"
        asked, compared = local.split(COMMONSENSE_NAMES if form == "generate" else ())
        scores: dict[str, Any] = {}
        results["settings"] = {"num_fewshot": options.num_fewshot, **limits, "format": form}
        if asked.tasks:
            search: dict[str, Any] = {"prompt": options.prompt or "alpaca", "beams": options.beams or 4}
            scores |= score_answers(model, tokenizer, asked, progress=_show_progress, **search, **limits)
            results["settings"] |= search
        if compared.tasks or named:
            more: dict[str, Any] = {"include_path": options.include_path, "shots": options.num_fewshot}
            scores |= score_tasks(model, tokenizer, named, local=compared, **more, **limits)
        results["tasks"] = scores
        results["data"] = [asdict(file) for file in local.files]
        print("\n".join(task_table(scores, local.hidden - set(options.tasks))))
    return results


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done:,} of {total:,} questions", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _score_text(model: Any, tokenizer: Any, options: EvaluateOptions) -> Any:
    from nlr_lab.evaluation.losses import score_documents
    from nlr_lab.tasks.text.data import Corpus

    longest = getattr(model.config, "max_position_embeddings", None) or 1024
    length = options.sequence_length or max(2, min(longest, 1024))
    documents = Corpus(source=options.source or "", text_field=options.text_field or "text").documents()
    sizes: dict[str, Any] = {"sequence_length": length, "batch_size": options.batch_size}
    try:
        return score_documents(model, tokenizer, documents, separator=tokenizer.eos_token, **sizes)
    except IndexError as error:  # positions that are an embedding end there; rotary ones do not
        if length <= longest:
            raise
        raise UserError(f"the model has {longest} positions; lower --sequence-length {length} to that") from error
