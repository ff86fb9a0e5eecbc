"""Run a table at a scale, and write what is published beside what was found.

A table's folder is OUT/<name>/<scale>: `table.json`, `table.md`, and a folder for each comparison. Figures that share a
table's runs have a folder of their own for table.json and table.md alone. The same command continues where it stopped.
"""

import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from nlr_lab.compare.trial import Choice
from nlr_lab.runtime.storage import AGAIN, disk_errors, read_json, write_json, write_text
from nonlinear_lowrank.errors import UserError

from .table import EQUAL_TIME, SCALES, Cells, Compare, Measure, Table, slug

RECORD, PAGE = "table.json", "table.md"
_EVALUATED = "evaluated.json"  # beside a run's result: its scores by kind of source and task
_COMMONSENSE, _MMLU = "commonsense", "mmlu"  # sources of the tests that are asked of every trained model


def run_table(
    table: Table,
    scale: str,
    out: Path,
    *,
    sources: Mapping[str, str] | None = None,
    seeds: int | None = None,
) -> dict[str, Any]:
    """Run what is missing of a table's trials and write its record, which is returned.

    Args:
        table: its rows need trials; a diagram has none.
        scale: demo, small or paper.
        out: folder of all tables.
        sources: other files or folders in the place of data sets and checkpoints, by name.
        seeds: of every comparison, in place of the scale's.

    Raises:
        UserError: the table is a diagram, or what it needs is not there.
    """
    if table.trials is None:
        where = f"; {' and '.join(table.seen_in)} measure what it shows" if table.seen_in else ""
        raise UserError(f"{table.name} is a diagram, with nothing to measure{where}")
    from nlr_lab.runtime.environment import provenance

    started, home, folder = time.monotonic(), out / slug(table.home) / scale, out / slug(table.name) / scale
    found: Cells = {}
    former = _drawn(home)
    parts: list[dict[str, Any]] = []
    others: list[str] = []
    for trial in table.trials(scale):
        if isinstance(trial, Compare):
            if table.home != table.name and not trial.arms.keys() & table.rows.keys() and trial.after is None:
                others.append(trial.part)  # than the figure shows
                continue
            replaced = _replaced(trial.recipe, sources or {})
            trial = replace(trial, recipe=replaced, seeds=trial.seeds if seeds is None else seeds)
            cells, about = run_comparison(trial, home, table.columns, sources or {})
            parts.append(about)
        elif isinstance(trial, Measure):
            cells = trial.function(home)
            parts.append({"part": trial.part, "note": trial.note})
        else:
            absent = {column: {"why": trial.why} for column in trial.columns or table.columns}
            cells = dict.fromkeys(trial.rows or table.rows, absent)
        for row, columns in cells.items():
            if row in table.rows or (not isinstance(trial, Measure) and table.home == table.name):
                known = found.setdefault(row, {})
                known |= {name: each for name, each in columns.items() if each and "value" not in known.get(name, {})}
    _average(table, found)
    record = build_record(table, scale, found)
    files = [path for path, drawn in _drawn(home).items() if drawn != former.get(path)]
    shown = [part["part"] for part in parts if "arms" in part] or others
    files += [path for part in shown for path in _drawn(home / part)]
    record["pictures"] = [Path(os.path.relpath(path, folder)).as_posix() for path in files]
    record |= {"parts": parts, "seconds": round(time.monotonic() - started, 1), **provenance()}
    with disk_errors(f"the table to {folder}", AGAIN):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RECORD, record)
        write_text(folder / PAGE, page(record))
    return record


def run_comparison(
    trial: Compare, home: Path, columns: Sequence[str], sources: Mapping[str, str]
) -> tuple[Cells, dict[str, Any]]:
    """Run or resume one comparison; return its cells and what it was."""
    from nlr_lab.compare import compare
    from nlr_lab.training.recipe import Recipe

    from .measures import COUNTED, MEASURES, Arm

    if trial.before is not None:
        trial = replace(trial, arms={**trial.arms, **trial.before(trial, home)})
    folder, models = home / trial.part, isinstance(trial.recipe, Recipe)
    options: dict[str, Any] = {"seeds": trial.seeds, "tune_lr": trial.tune_lr, "timing_rounds": trial.rounds}
    comparison = compare(trial.recipe, folder, arms=parse_arms(trial), resume=folder.exists(), **options)
    results = comparison.results
    factor = 100.0 if models and results["metric"]["name"] != "loss" else 1.0
    counts = count_parts(trial) if COUNTED & {*columns} else {}
    columns = [*columns, *(f"{column}{EQUAL_TIME}" for column in columns if trial.rounds)]
    cells: Cells = {}
    for row in trial.arms:
        arm = Arm(results, slug(row), counts.get(row, {}), factor)
        cells[row] = {column: MEASURES[column](arm) for column in columns if column in MEASURES}
        if trial.column:
            cells[row][trial.column] = arm.score()
            cells[row] |= {f"{trial.column}{EQUAL_TIME}": arm.score_at_equal_time()} if trial.rounds else {}
        if trial.tasks:
            cells[row] |= _evaluate(trial, folder, arm, sources)
    if trial.after is not None:
        for row, more in trial.after(comparison, trial, home).items():
            cells[row] = cells.get(row, {}) | more
    summary = results["recipe"]["summary"] or results["recipe"]["name"]
    about = {"part": trial.part, "summary": summary.rstrip(".")}
    about |= {"arms": dict(trial.arms), "n": results["n"], "metric": results["metric"]["name"]}
    return cells, about


def _drawn(folder: Path) -> dict[Path, int]:
    """Return the pictures in a folder, each with when it was written."""
    return {path: path.stat().st_mtime_ns for path in sorted(folder.glob("*.png"))}


def parse_arms(trial: Compare) -> list[Any]:
    """Return the arms of a comparison, named by their rows; raise UserError where one cannot be read."""
    from nlr_lab.training.recipe import Recipe

    if isinstance(trial.recipe, Recipe):
        from nlr_lab.training.arms import Arm

        return [replace(Arm.parse(text), name=slug(row)) for row, text in trial.arms.items()]
    from nlr_lab.fields.problem import FieldArm

    return [replace(FieldArm.parse(text), name=slug(row)) for row, text in trial.arms.items()]


def count_parts(trial: Compare) -> dict[str, dict[str, int]]:
    """Count on the meta device each arm's parameters outside the embeddings, and trained ones outside the head."""
    task, found = trial.recipe.task, {}
    for row, arm in zip(trial.arms, parse_arms(trial), strict=True):
        model = task.build_on_meta()
        setup = task.adapter_setup(model)
        model = arm.apply(model, setup)
        head = setup.head if setup is not None else ()
        sizes = [(f".{name}", each) for name, each in model.named_parameters()]
        trained = [each for name, each in sizes if each.requires_grad and not any(f".{own}." in name for own in head)]
        body = sum(each.numel() for name, each in sizes if "embed" not in name and "lm_head" not in name)
        found[row] = {"body": body, "trained_body": sum(each.numel() for each in trained)}
    return found


def model_folder(folder: Path, arm: str, run: Mapping[str, Any]) -> Path:
    """Return where a run of a comparison in `folder` saved its model."""
    choice = Choice(lr=run["lr"], init=run["init"], head_lr=run["head_lr"])
    return folder / "runs" / arm / choice.folder / f"seed-{run['seed']}" / "model"


def _evaluate(trial: Compare, folder: Path, arm: Any, sources: Mapping[str, str]) -> dict[str, Any]:
    """Score every trained model of an arm on the trial's tasks; what is scored already is read."""
    from .measures import over_seeds

    scores: dict[str, list[float | None]] = {column: [] for column in trial.tasks}
    # Answers in generated text are not likelihoods, nor other rows the same task.
    source = sources.get(_kind(trial.tasks.values()), "lm-eval")
    for run in arm.runs:
        model = model_folder(folder, arm.own["name"], run)
        file = model.parent / _EVALUATED
        known = read_json(file, "delete it: it is recreated") if file.is_file() else {}
        own = known.setdefault(source, {})
        if missing := [task for task in trial.tasks.values() if task not in own]:
            own |= score_model(trial.recipe.task, model, missing, sources, trial.shots)
            write_json(file, known)
        for column, task in trial.tasks.items():
            scores[column].append(own.get(task))
    return {column: over_seeds(values, "not scored") for column, values in scores.items()}


def score_model(
    task: Any, folder: Path, names: Sequence[str], sources: Mapping[str, str], shots: int | None = None
) -> dict[str, float]:
    """Return the percent of right answers of a saved causal model on tasks of lm-eval, all of MMLU or none.

    Where `sources` has "commonsense", the rows of that folder are asked instead, and answered in generated text, as the
    papers' evaluation does it; where it has "mmlu", that folder's rows of MMLU.
    """
    from nlr_lab.evaluation.harness import score_answers, score_tasks
    from nlr_lab.evaluation.local_tasks import find_local_tasks
    from nlr_lab.runtime.environment import choose_device
    from nonlinear_lowrank.hub.loading import is_adapter, load_causal_adapter, load_model, load_tokenizer

    if is_adapter(folder):
        options = task.model.in_files("causal", 0) if task.model.dtype == "nf4" else {}
        model = load_causal_adapter(folder, base=task.model.where(), **options)
    else:
        model = load_model(folder)
    model, tokenizer = model.to(choose_device("")), load_tokenizer(folder)
    asked = {name: name for name in names}
    kind = _kind(names)
    if kind in sources and kind == _MMLU:
        asked = {name: name.replace(_MMLU, f"{_MMLU}_local", 1) for name in names}
        local = find_local_tasks([*asked.values()], sources[kind], shots=shots)
        scored = score_tasks(model, tokenizer, local=local)
    elif kind in sources:
        asked = {name: f"{name.replace('social_iqa', 'siqa')}_local" for name in names}
        scored = score_answers(model, tokenizer, find_local_tasks([*asked.values()], sources[kind]))
    else:
        scored = score_tasks(model, tokenizer, [*names], shots=shots)
    return {name: 100 * _accuracy(scored[own]) for name, own in asked.items()}


def _kind(names: Iterable[str]) -> str:
    """Return the source whose rows stand in for tasks of these names."""
    return _MMLU if all(name.startswith(_MMLU) for name in names) else _COMMONSENSE


def _accuracy(metrics: Mapping[str, Any]) -> float:
    return float(next(metrics[name] for name in ("acc_norm,none", "acc,none") if name in metrics))


def check_options(tables: Sequence[Table], scale: str, names: Sequence[str], seeds: int | None) -> None:
    """Raise UserError for a name of a data set or checkpoint, or seeds, that no table uses at this scale."""
    trials = [trial for table in tables if table.trials is not None for trial in table.trials(scale)]
    compared = [trial for trial in trials if isinstance(trial, Compare)]
    what = tables[0].name if len(tables) == 1 else "these tables"
    if seeds is not None and trials and not compared:
        raise UserError(f"--seeds does nothing for {what} at --scale {scale}; omit it")
    for name in names:
        if any(trial.tasks and name == _kind(trial.tasks.values()) for trial in compared):
            continue
        if not any(_replaced(trial.recipe, {name: name + " "}) is not trial.recipe for trial in compared):
            raise UserError(f"--source {name}: {what} read nothing of that name at --scale {scale}; omit it")


def _replaced(value: Any, sources: Mapping[str, str]) -> Any:
    """Return a dataclass with every text that is a name in `sources` replaced, inside of it too."""
    changes: dict[str, Any] = {}
    for each in fields(value):
        own = vars(value).get(each.name)
        if isinstance(own, str) and own in sources:
            changes[each.name] = sources[own]
            changes |= {"streaming": False} if getattr(value, "streaming", False) else {}
        elif is_dataclass(own) and not isinstance(own, type) and (new := _replaced(own, sources)) is not own:
            changes[each.name] = new
    return replace(value, **changes) if changes else value


def _average(table: Table, found: Cells) -> None:
    """Fill the column "avg": the mean of the scores, where all were measured."""
    from .measures import MEASURES, cell

    scored = [column for column in table.columns if column not in MEASURES and column != "avg"]
    if "avg" not in table.columns:
        return
    for cells in found.values():
        values: list[Any] = [cells.get(column, {}).get("value") for column in scored]
        whole = None not in values
        cells.setdefault("avg", cell(statistics.fmean(values) if whole else None, why="not all columns are measured"))


# --- the record and its page ------------------------------------------------------------------------------------------


def build_record(table: Table, scale: str, found: Cells) -> dict[str, Any]:
    """Return the record: every row, published and ours apart; what is at equal time is beside that at equal steps."""
    names = dict.fromkeys([*table.columns, *(column for cells in found.values() for column in cells)])
    first = [column for column in names if not column.endswith(EQUAL_TIME)]
    columns = [each for column in first for each in (column, column + EQUAL_TIME) if each in names]
    rows = []
    for label in dict.fromkeys([*table.rows, *found]):
        printed = dict(zip(table.columns, table.rows.get(label, ()), strict=False))
        ours = {column: found.get(label, {}).get(column, {"why": "not measured"}) for column in columns}
        rows.append({"row": label, "published": printed, "ours": ours})
    known: list[dict[str, Any]] = [row for row in rows if row["row"] in table.rows]
    cells = [row["ours"][column] for row in known for column in table.columns]
    counts = [each["n"] for each in cells if "n" in each]
    return {
        "table": table.name,
        "scale": scale,
        "title": table.title,
        "published_in": table.section,
        "note": table.note,
        "studies": [f"studies/{name}" for name in table.studies],
        "columns": columns,
        "rows": rows,
        "measured": sum("value" in each for each in cells),
        "cells": len(cells),
        "n": min(counts, default=None),
    }


def page(record: Mapping[str, Any]) -> str:
    """Return table.md."""
    from nlr_lab.compare.report import markdown_table

    columns = record["columns"]
    printed = [column for column in columns if any(row["published"].get(column) is not None for row in record["rows"])]
    head = ["row"]
    for column in columns:
        head += [f"{column}, published", f"{column}, ours"] if column in printed else [f"{column}, ours"]
    whys: dict[str, int] = {}
    rows = []
    for row in record["rows"]:
        texts = [row["row"]]
        for column in columns:
            texts += [_number(row["published"].get(column))] if column in printed else []
            texts.append(_ours(row["ours"][column], whys))
        rows.append(tuple(texts))
    lines = [
        f"# {record['table']}: {record['title']}",
        f"Published: {record['published_in']}. Ours: scale `{record['scale']}`, in brackets the 95 % interval and the "
        "number n of seeds (of step times: of rounds).",
        _ELSEWHERE if record["scale"] != "paper" and not all(part.get("note") for part in record["parts"]) else "",
        *dict.fromkeys(part["note"] for part in record["parts"] if part.get("note")),
        record["note"],
        record["studies"] and f"At a small scale, in this tool's repository: {', '.join(record['studies'])}.",
        _EQUAL_TIME if any(column.endswith(EQUAL_TIME) for column in columns) else "",
        markdown_table(tuple(head), rows),
        "\n".join(f"({number}) {why}" for why, number in whys.items()),
        "\n".join(
            f"- `{part['part']}`: {part['summary']}, n = {part['n']}" for part in record["parts"] if "arms" in part
        ),
        *(
            f"![{' '.join(path.with_suffix('').parts[-2:])}]({path.as_posix()})"
            for path in map(Path, record["pictures"])
        ),
    ]
    return "\n\n".join(line for line in lines if line) + "\n"


_ELSEWHERE = "Ours are of other models, data and lengths than the published."
_EQUAL_TIME = """\
At equal time: of each arm when the first of its comparison has finished, by step times measured in turn. A slower arm \
is within its schedule then, its learning rate not yet at its end; a faster one is done."""


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _ours(found: Mapping[str, Any], whys: dict[str, int]) -> str:
    """Return a cell as text; reasons are numbered, and listed below the table."""
    if "value" not in found:
        return f"- ({whys.setdefault(found['why'], len(whys) + 1)})"
    about = [f"{found['low']:.4g}, {found['high']:.4g}"] if "low" in found else []
    about += [f"n={found['n']}"] if "n" in found else []
    return _number(found["value"]) + (f" [{'; '.join(about)}]" if about else "")


def state(table: Table, scale: str, out: Path) -> str:
    """Return what has been run of a table."""
    if table.trials is None:
        return "diagram, nothing to measure"
    file = out / slug(table.name) / scale / RECORD
    if not file.is_file():
        trials = (out / slug(table.home) / scale).is_dir()
        return "begun" if trials else "not run"
    record = read_json(file, "delete it: it is recreated", rows=list)
    n = f", n = {record['n']}" if record["n"] else ""
    return f"run: {record['measured']} of {record['cells']} cells{n}"


def overview(tables: Sequence[Table], out: Path) -> None:
    """Print for each table what it measures, what each scale takes, and what has been run."""
    for table in tables:
        print(f"{table.name}  {table.title} ({table.section})")
        if table.trials is None:
            seen = f"; see {', '.join(table.seen_in)}" if table.seen_in else ""
            print(f"    diagram, nothing to measure{seen}")
            continue
        shared = f"; runs of {table.home}" if table.home != table.name else ""
        seen = f"; see {', '.join(f'studies/{name}' for name in table.studies)}" if table.studies else ""
        print(f"    measures {', '.join(table.columns)} of {len(table.rows)} rows{shared}{seen}")
        for scale in SCALES:
            print(f"    {scale:<6} {state(table, scale, out):<32} {table.takes[scale]}")
