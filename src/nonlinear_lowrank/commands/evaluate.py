"""`nlr evaluate CHECKPOINT`: perplexity, bits per byte, lm-eval's tasks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from ..errors import UserError
from .checkpoint import find_model, find_recipe_file, open_model
from .options import parse


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of `nlr evaluate`."""

    checkpoint: Positional[str]
    """A model folder, or the run folder that `nlr train` wrote."""
    text: str | None = None
    """A file, a folder or a data set's name, scored whole; default: the held-out text of the checkpoint's
    own recipe, unless --tasks are given."""
    text_field: str = "text"
    """Field of JSON lines, parquet and data sets that holds the text."""
    sequence_length: int | None = None
    """Tokens per window of --text; default: the model's positions, at most 1024."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval, e.g. hellaswag arc_easy."""
    include_path: str | None = None
    """A folder with lm-eval task files of your own."""
    limit: int | None = None
    """At most this many documents of each task."""
    batch_size: int = 16
    """Sequences per forward pass; the numbers do not depend on it."""
    device: str = ""
    """cpu, cuda or cuda:N; default: the GPU when there is one."""
    output: str | None = None
    """Write the numbers to this JSON file too."""


def run(arguments: list[str]) -> None:
    """Evaluates and prints one line a number."""
    options = parse(
        EvaluateOptions,
        arguments,
        command="evaluate",
        description="Perplexity and bits per byte on held-out text, and lm-eval's tasks.",
    )
    folder = find_model(options.checkpoint)
    _check(options)

    from ..hub import load_tokenizer

    model = open_model(folder, options.device)
    # The held-out text of a recipe is tokens already; a checkpoint in the middle of a run has no tokenizer.
    tokenizer: Any = load_tokenizer(folder) if options.text is not None or options.tasks else None
    results: dict[str, Any] = {"checkpoint": options.checkpoint}
    if options.text is not None or not options.tasks:
        if options.text is None:
            name, score = _score_held_out(model, folder, options)
        else:
            name, score = options.text, _score_text(model, tokenizer, options)
        print(f"{name}: {score}")
        results["text"] = {"source": name, **score.to_json()}
    if options.tasks:
        from ..evaluation import score_tasks

        results["tasks"] = score_tasks(
            model,
            tokenizer,
            options.tasks,
            include_path=options.include_path,
            limit=options.limit,
            batch_size=options.batch_size,
        )
        for task, metrics in results["tasks"].items():
            print(f"{task}: " + "   ".join(f"{key} {value}" for key, value in metrics.items()))
    if options.output is not None:
        Path(options.output).write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")


def _check(options: EvaluateOptions) -> None:
    """What can be refused before a model is loaded."""
    for name in ("sequence_length", "limit", "batch_size"):
        value = getattr(options, name)
        least = 2 if name == "sequence_length" else 1
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise UserError(f"no such folder: {options.include_path} (--include-path)")
    if options.include_path is not None and not options.tasks:
        raise UserError("--include-path does nothing without --tasks")
    if options.output is not None and not Path(options.output).absolute().parent.is_dir():
        raise UserError(f"no such folder: {Path(options.output).parent} (--output)")


def _score_held_out(model: Any, folder: Path, options: EvaluateOptions) -> tuple[str, Any]:
    """The evaluation sequences that the checkpoint's training measured itself on."""
    from ..evaluation import score_sequences
    from ..training.recipe import Recipe

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
    score = score_sequences(
        model, prepared.valid, bytes_per_token=prepared.valid_bytes_per_token, batch_size=options.batch_size
    )
    return f"held-out text of {recipe.name} ({recipe.task.text.source})", score


def _score_text(model: Any, tokenizer: Any, options: EvaluateOptions) -> Any:
    from ..evaluation import score_documents
    from ..tasks.corpus import Corpus

    longest = getattr(model.config, "max_position_embeddings", None) or 1024
    return score_documents(
        model,
        tokenizer,
        Corpus(source=options.text or "", text_field=options.text_field).documents(),
        sequence_length=options.sequence_length or min(longest, 1024),
        separator=tokenizer.eos_token,
        batch_size=options.batch_size,
    )
