"""Climb a ladder: each rung is one comparison, predicted before it is run.

out/ladder.json           what all rungs share, and the text's fingerprint
out/predicted/<rung>.json  learning rates and losses that smaller rungs predict; written once, before the rung is run
out/<rung>/               a comparison's folder
out/results.json          the record of all rungs there are      out/report.md, out/ladder.png   made from it
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nlr_lab.compare import compare
from nlr_lab.compare.model_trials import ModelTrials
from nlr_lab.compare.record import RESULTS, clean, command_line, record_text
from nlr_lab.compare.trial import Plan, TimeLimit
from nlr_lab.compare.workers import check_workers
from nlr_lab.runtime.processes import on_rank_0, rank
from nlr_lab.runtime.storage import AGAIN, disk_errors, read_json, write_json, write_text
from nlr_lab.training.arms import Arm
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .fits import best_rate, transfer
from .ladder import Ladder, Rung
from .record import FORWARD_AND_BACKWARD, build_record, laws_of, read_rungs
from .report import PICTURE, REPORT, draw, render

MARKER, PREDICTED = "ladder.json", "predicted"


def run_ladder(
    ladder: Ladder,
    out: Path | str,
    *,
    workers: int | None = None,
    timing_rounds: int = 30,
    command: str | None = None,
) -> dict[str, Any]:
    """Run every rung that is not finished, smallest first, and return the record of all rungs in the folder.

    A folder that has a ladder continues where it stopped; widths, tokens, arms and seeds may be added.

    Args:
        ladder: its settings.
        out: its folder.
        workers: as `compare` has it.
        timing_rounds: as `compare` has it.
        command: how to repeat this, for the report.

    Raises:
        UserError: a width without a model, arms that make no comparison, other settings or data than the folder's.
            Nothing has been run then.
    """
    path = Path(out)
    rungs = ladder.rungs()
    recipes = {rung: ladder.recipe(rung) for rung in rungs}
    following = ladder.following()
    ladder.recipe(following)
    arms = [Arm.parse(text) for text in ladder.arms]
    check_integer("timing_rounds", timing_rounds, minimum=0)
    if workers is not None:
        check_workers(workers)
    for recipe in recipes.values():  # invalid comparisons raise here
        Plan(ModelTrials(recipe), arms, ladder.seeds, ladder.tune_lr, None, ladder.max_extensions)
    ModelTrials(recipes[rungs[0]]).join(path)
    on_rank_0(lambda: _check(path, ladder))
    options: dict[str, Any] = {"seeds": ladder.seeds, "tune_lr": ladder.tune_lr, "workers": workers}
    options |= {"max_extensions": ladder.max_extensions, "timing_rounds": timing_rounds}
    command = command or command_line()
    for rung in rungs:
        trials = ModelTrials(recipes[rung])
        predicted = predict(path, ladder, rung, arms, trials)
        grids = predicted["rates"]
        chosen = [replace(arm, grid=grids[arm.name]["grid"]) if arm.name in grids else arm for arm in arms]
        folder = path / rung.name
        resume = on_rank_0(folder.exists)
        found = compare(trials.recipe, folder, arms=chosen, resume=resume, command=command, trials=trials, **options)
        if not found.results["n"] and rank() == 0:
            why = "there is no seed that every arm finished; give lower --tune-lr, or leave out the arm that diverges"
            print(f"{rung.name} is not in the report: {why}", file=sys.stderr)
        results = on_rank_0(lambda: write(path, command))
    if len({each["width"] for each in results["rungs"] if each["tokens"] == following.tokens}) > 1:
        predict(path, ladder, following, arms, ModelTrials(ladder.recipe(following)))
    return on_rank_0(lambda: write(path, command))


def write(path: Path, command: str) -> dict[str, Any]:
    """Write record, picture and report of the rungs that the folder has, and return the record."""
    predicted = {file.stem: read_json(file) for file in sorted((path / PREDICTED).glob("*.json"))}
    shared = read_json(path / MARKER, settings=dict)["settings"]
    results = build_record(read_rungs(path), predicted, clean(shared), command)
    with disk_errors(f"the report to {path}", AGAIN):
        write_text(path / RESULTS, record_text(results))
        draw(path / PICTURE, results)
        write_text(path / REPORT, render(results))
    return results


def _check(path: Path, ladder: Ladder) -> None:
    """Raise UserError for a folder of something else, or of a ladder with other settings; begin one where it is new."""
    marker, now = path / MARKER, clean(ladder.shared())
    if marker.exists():
        former = read_json(marker, settings=dict)["settings"]
        for name in sorted({*former, *now}):
            old, new = former.get(name, "(absent)"), now.get(name, "(absent)")
            if old != new:
                raise UserError(
                    f"{name} was {old!r} in {path} and is {new!r} now; use the former value, or another --out"
                )
        reference = Arm.parse(ladder.arms[0]).name
        for rung in read_rungs(path):
            if (old := rung["reference"]) != reference:
                raise UserError(
                    f"the first arm, which others are compared with, was {old!r} in {path / rung['rung']} and is "
                    f"{reference!r} now; put that one first, or use another --out"
                )
    elif path.exists() and any(path.iterdir()):
        raise UserError(f"{path} is not empty and holds no ladder; name another --out")


def predict(path: Path, ladder: Ladder, rung: Rung, arms: Sequence[Arm], trials: ModelTrials) -> dict[str, Any]:
    """Return what smaller rungs say of one: a grid of learning rates and a final loss by arm; write it down first.

    What is written stays. Only arms that the rung has not run are added.
    """
    marker, file = path / MARKER, path / PREDICTED / f"{rung.name}.json"
    predicted: dict[str, Any] = {"width": rung.width, "tokens": rung.tokens, "rates": {}, "losses": {}}
    # Read before rank 0 writes.
    begun, former, rungs = on_rank_0(
        lambda: (marker.exists(), file.exists() and read_json(file, rates=dict, losses=dict), read_rungs(path))
    )
    predicted = former or predicted
    done: Mapping[str, Any] = next((each["arms"] for each in rungs if each["rung"] == rung.name), {})
    wanted = [arm for arm in arms if arm.name not in {*done, *predicted["losses"]}]
    if begun and not wanted:
        return predicted
    trials.prepare(quiet=False)
    if not begun and rank() == 0:
        with disk_errors(str(marker), AGAIN):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(marker, {"settings": clean(ladder.shared()), "fingerprint": trials.fingerprint})
    elif begun and read_json(marker, fingerprint=str)["fingerprint"] != trials.fingerprint:
        raise UserError(f"the runs in {path} used other data; restore them, or use another --out")
    smaller = [each for each in rungs if each["rung"] != rung.name and each["width"] <= rung.width]
    at_same = [each for each in smaller if each["tokens"] == rung.tokens]
    written = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
    for arm in wanted:
        if arm.lr is not None or arm.grid or arm.name in predicted["rates"]:
            continue
        for known in (at_same, smaller):
            if found := _rate(known, arm.name, rung):
                grid = [found["lr"] / 2, found["lr"], 2 * found["lr"]]
                predicted["rates"][arm.name] = {**found, "grid": grid, **written, "rungs": _names(known)}
                break
    if wanted and len({each["width"] for each in at_same}) > 1:
        flops = trials.count_and_time(trials.resolve(arms), 0, TimeLimit(None, time.monotonic)).flops
        train = trials.recipe.train
        tokens = train.steps * train.batch_size * ladder.text.sequence_length
        compute = {name: FORWARD_AND_BACKWARD * tokens * each for name, each in flops.items() if each}
        for name, said in _losses(at_same, wanted, arms[0].name, compute).items():
            predicted["losses"][name] = {**said, **written, "rungs": _names(at_same)}
    if rank() == 0 and (predicted["rates"] or predicted["losses"]):
        with disk_errors(str(file), AGAIN):
            write_json(file, predicted)
    return on_rank_0(lambda: predicted)


def _names(rungs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [each["rung"] for each in rungs]


def _rate(rungs: Sequence[Mapping[str, Any]], name: str, rung: Rung) -> dict[str, Any] | None:
    """Return the learning rate that an arm's rungs predict."""
    known = []
    for each in rungs:
        arm = each["arms"].get(name)
        if arm and arm["tuning"] and (rate := best_rate(arm["tuning"])) is not None:
            known.append((each["width"], rate))
    return transfer(known, rung.width)


def _losses(
    rungs: Sequence[Mapping[str, Any]], arms: Sequence[Arm], reference: str, compute: Mapping[str, float]
) -> dict[str, Any]:
    """Return each arm's final loss, and its difference from the reference's, at the FLOPs of another rung."""
    found: dict[str, Any] = {}
    for name in (arm.name for arm in arms):
        laws = laws_of(rungs, name, reference)
        if laws is None or not {name, reference} <= compute.keys():
            continue
        loss = laws.predict(name, compute[name])
        found[name] = {"law": laws.form, "compute": compute[name], "loss": asdict(loss)}
        if name != reference:
            delta = laws.predict(name, compute[name], (reference, compute[reference]))
            found[name]["delta"] = asdict(delta)
    return found
