"""`nlr recommend MODEL`: the best method, rank and place, and the gain to expect, by a ladder's laws."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import FlagCreatePairsOff, Positional

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .inspect import check_described, find_on_meta, sequence_length
from .options import parse, table_width

_BATCHES = 4
_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class RecommendOptions:
    """Predict, by a ladder of sizes, each arm's gain for a language model trained from scratch, within a budget.

    The model is not built. The ladder is this repository's (studies/ladder), or your own: nlr scale --out OUT.
    """

    model: Positional[str]
    """A recipe's name, a model folder, the run folder of `nlr train`, or a config.json."""
    budget: str | None = None
    """Most that may be added: "5%" of the parameters, "5% flops"; none: no limit."""
    tokens: float = 20.0
    """Tokens of training for each parameter outside embeddings and head."""
    ladder: str | None = None
    """A folder of nlr scale, or its results.json; none: the ladder of this repository."""
    source: str | None = None
    """Text on which a trained model's linears are scored: the highest three tenths are named."""
    sequence_length: int | None = None
    """Tokens of a sequence; none: the recipe's, or the model's positions up to 1024."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON instead of the table."""


def run_recommend(arguments: list[str]) -> None:
    """Print a prediction for every arm, and one recommendation."""
    options = parse(RecommendOptions, arguments, command="recommend")
    check_described(options.model)
    if options.sequence_length is not None:
        check_integer("--sequence-length", options.sequence_length, minimum=1)
    if options.source is not None:
        from .checkpoint import find_model

        if not Path(options.source).is_file():
            raise UserError(f"no such file: {options.source} (--source)")
        folder = find_model(options.model)
    rungs = _rungs(options.ladder)

    from nlr_lab.scale.recommend import recommend, sentence
    from nlr_lab.tasks.text.language_model import LanguageModelTask, OptLanguageModelTask

    build, _, recipe = find_on_meta(options.model)
    if recipe is not None and not isinstance(recipe.task, LanguageModelTask | OptLanguageModelTask):
        raise UserError(f"{options.model} does not train a causal language model on text, as a ladder does")
    length = options.sequence_length or sequence_length(build(), recipe)
    found = recommend(build, rungs, sequence_length=length, tokens=options.tokens, budget=options.budget)
    where = [] if options.source is None else _where(folder, options, min(length, 512))
    if options.json:
        print(json.dumps(found.to_json() | {"where": where}, indent=1))
        return
    print(_table(found))
    print("\n".join(["", *(f"skipped {each}" for each in found.skipped), sentence(found, options.budget)]))
    if where:
        print(f"where: {len(where)} linears score highest on {options.source}: {_folded(where)}; --json names them")


def _rungs(ladder: str | None) -> list[dict[str, Any]]:
    """Return the rungs of a ladder's results, the packaged ones without a name."""
    from nlr_lab.runtime.storage import read_json
    from nlr_lab.scale.record import EVIDENCE, RESULTS

    if ladder is None:
        return list(read_json(EVIDENCE, rungs=list)["rungs"])
    path = Path(ladder)
    file = path / RESULTS if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"no ladder in {ladder}: {RESULTS} of nlr scale is missing")
    again = "run nlr scale on its folder again, which writes it"
    rungs: list[Any] = read_json(file, again, rungs=list)["rungs"]
    if not all(map(_is_rung, rungs)):
        raise UserError(f"{file} is not the record of a ladder, or an earlier version wrote it; {again}")
    return rungs


def _is_rung(rung: Any) -> bool:
    if not isinstance(rung, dict) or not {"width", "tokens", "n", "reference"} <= rung.keys():
        return False
    arms = rung.get("arms")
    return isinstance(arms, dict) and rung["reference"] in arms and all("settings" in arm for arm in arms.values())


def _table(found: Any) -> str:
    from nlr_lab.runtime.tables import number_table, render_table

    def interval(each: Any) -> str:
        if each is None:
            return "-"
        return f"{each.value:+.3f}" + ("" if each.low is None else f" [{each.low:+.3f}, {each.high:+.3f}]")

    table = number_table("arm", "parameters", "FLOPs", "step (width)", "nats, equal tokens", "nats, equal hours", "")
    for each in found.choices:
        time = "-" if each.step_time is None else f"{each.step_time:.2f} ({each.timed_width})"
        costs = f"{100 * each.parameters:+.1f} %", f"{100 * each.flops:+.1f} %", time
        note = each.lacks if each.fits else "above the budget"
        table.add_row(each.text, *costs, interval(each.delta), interval(each.hours), note)
    head = (
        f"{found.size:,} parameters outside embeddings, {found.tokens:.3g} tokens, {found.compute:.2g} training FLOPs; "
        "differences to plain (below 0 is better), 95 %"
    )
    return f"{head}\n{render_table(table, table_width())}"


def _where(folder: Path, options: RecommendOptions, length: int) -> list[str]:
    """Return the linears of a trained language model that score highest on a text."""
    from nonlinear_lowrank.analysis import layer_importance, select_layers

    from .checkpoint import open_language_model, open_tokenizer

    model, tokenizer = open_language_model(folder, ""), open_tokenizer(folder)
    text = Path(str(options.source)).read_text(encoding="utf-8-sig")
    wanted = _BATCHES * _ROWS * length
    ids = tokenizer(text[: 40 * wanted], return_tensors="pt", verbose=False)["input_ids"][0][:wanted]
    rows = ids[: len(ids) // length * length].view(-1, length).to(model.device)
    if not len(rows):
        raise UserError(f"{options.source} has {len(ids)} tokens, fewer than one sequence of {length}")
    batches = [{"input_ids": batch, "labels": batch} for batch in rows.split(_ROWS)]
    return select_layers(layer_importance(model, batches))


def _folded(names: list[str]) -> str:
    """Return how many there are of each kind: q_proj 3, down_proj 12."""
    return ", ".join(f"{kind} {count}" for kind, count in Counter(name.rsplit(".", 1)[-1] for name in names).items())
