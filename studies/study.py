"""The common parts of the scripts under studies/: the command line, resuming, copies, one-line errors."""

import argparse
import io
import json
import lzma
import re
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nlr_lab.compare.record import REPORT, RESULTS
from nlr_lab.compare.report import estimate_text, p_text
from nlr_lab.compare.run import Comparison, compare
from nlr_lab.compare.statistics import holm, paired_mean
from nlr_lab.fields.problem import FieldArm, FieldMethod
from nlr_lab.fields.settings import FieldRecipe
from nlr_lab.runtime.storage import read_json, write_text
from nlr_lab.tasks.images.pretraining import ImagePretrainingTask
from nlr_lab.training.arms import Arm
from nlr_lab.training.recipe import Recipe
from nlr_lab.training.run_folder import RESULT
from nonlinear_lowrank.errors import UserError


def study_parser(
    doc: str | None, name: str, *data: str, seeds: int = 3, sized: bool = False
) -> argparse.ArgumentParser:
    """A study's options: its data, `--seeds`, `--threads` and `--work`; the script adds those of its own.

    Args:
        doc: the script's docstring, printed by `--help` as it is.
        name: of the study; it works in runs/`name` unless `--work` says otherwise.
        data: names of the files or folders to give first; each becomes an absolute Path, of which records keep the last
            name alone.
        seeds: the default of `--seeds`.
        sized: whether the study has two sizes (`--size`) and can be tried in a few steps (`--smoke`).
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for each in data:
        parser.add_argument(each, type=absolute)
    if sized:
        parser.add_argument("--size", choices=("cpu", "gpu"), default="cpu")
        parser.add_argument("--smoke", action="store_true", help="a few steps of everything; copies nothing")
    parser.add_argument("--seeds", type=int, default=seeds, help="beside the one that learning rates are tuned on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("runs") / name, help="where finished runs are kept")
    return parser


def absolute(path: str) -> Path:
    """Make a path given on the command line absolute."""
    return Path(path).absolute()


@contextmanager
def one_line_errors(part: str = "") -> Iterator[None]:
    """End the script with what a UserError says, after the name of the study's part if one is given.

    Raises:
        SystemExit: in the place of a UserError.
    """
    try:
        yield
    except UserError as error:
        raise SystemExit(f"{part}: {error}" if part else str(error)) from None


def run_study(
    recipe: Recipe | FieldRecipe, out: Path, into: Path, name: str, *, smoke: bool = False, **options: Any
) -> None:
    """Compare in `out`, resuming what is there; copy record, report and pictures to `into`; print the tables.

    Args:
        recipe: what the arms share.
        out: the comparison's folder.
        into: an existing folder.
        name: how the copies' names begin.
        smoke: only try it, in the folder `out`-smoke: a few steps, one seed, two learning rates, nothing copied.
        options: what `compare` takes besides.
    """
    if smoke:
        out = out.with_name(f"{out.name}-smoke")
        small = {"seeds": 1, "timing_rounds": 0, "max_extensions": 0}
        options |= small | {"tune_lr": options.get("tune_lr", recipe.tune_lr)[:2]}
        if isinstance(recipe, Recipe):
            recipe = _few_steps(recipe)
    found = compare(recipe, out, resume=out.exists(), **options)
    if not smoke:
        copy(found, into, name)
    print(found)


def copy(found: Comparison, folder: Path, name: str) -> None:
    """Copy what a reader needs, without the runs: `name`.md, .json and -picture.png; such files in `folder` go."""
    text = (found.out / REPORT).read_text(encoding="utf-8")
    for picture in found.trials.pictures:
        text = text.replace(f"({picture})", f"({name}-{picture})")
        (folder / f"{name}-{picture}").unlink(missing_ok=True)
        if (found.out / picture).exists():
            shutil.copyfile(found.out / picture, folder / f"{name}-{picture}")
    shutil.copyfile(found.out / RESULTS, folder / f"{name}.json")
    write_text(folder / f"{name}.md", text)


_RUNS = "runs.tar.xz"
_FOLDERS = re.compile(rb'"/[^"]*/(?=[^"/]+")')  # of the machine's files, which records do not keep
_KEPT = ("ladder.json", "predicted/*", "**/compare.json", "**/timing.json", "**/result.json", "**/scores.json")


@contextmanager
def kept_runs(folder: Path, work: Path) -> Iterator[None]:
    """Keep a long study's finished runs in `folder`, without weights, also when it is interrupted.

    Those that `work` lacks are unpacked first, so that another machine can continue and none is lost; a result that was
    deleted from a run's folder stays deleted, to be recreated. Of training losses, only drawn, four digits are kept, of
    other curves nine.
    """
    archive, part = folder / _RUNS, folder / f"{_RUNS}.part"
    if archive.exists():
        with tarfile.open(archive) as runs:
            missing = [each for each in runs if not (work / each.name).exists()]
            deleted = [each for each in missing if work != (run := (work / each.name).parent) and run.exists()]
            runs.extractall(work, [each for each in missing if each not in deleted], filter="data")
    try:
        yield
    finally:
        if files := sorted(file for pattern in _KEPT for file in work.glob(pattern)):
            with tarfile.open(part, "w:xz", preset=9 | lzma.PRESET_EXTREME) as runs:
                for file in files:
                    text = _FOLDERS.sub(b'".../', file.read_bytes())
                    if file.name == RESULT:
                        data = json.loads(text)
                        for curve in filter(data.get, ("curve", "metric_curve", "score_curve", "train_curve")):
                            digits = 4 if curve == "train_curve" else 9
                            data[curve] = [(step, float(f"{value:.{digits}g}")) for step, value in data[curve]]
                        text = json.dumps(data).encode()
                    entry = tarfile.TarInfo(file.relative_to(work).as_posix())
                    entry.size = len(text)
                    runs.addfile(entry, io.BytesIO(text))
            part.replace(archive)


def noble_arms(wider: float, ranks: Iterable[int]) -> list[Arm]:
    """NOBLE at some ranks, behind the baseline with three dense inits and one whose MLPs are `wider` times as wide."""
    texts = ("baseline", "baseline:init=noble", "baseline:init=kaiming", f"wide-mlp:ratio={wider}")
    return [Arm.parse(text) for text in (*texts, *(f"noble:rank={rank}" for rank in ranks))]


def tuned_arms(record: Path, *, rates: bool = True) -> list[FieldArm]:
    """Return the arms of a comparison of fields, each at the init and learning rate that were best there.

    Arms that diverged at every learning rate are skipped. Without `rates` the inits alone are kept.
    """
    if not record.is_file():
        raise UserError(f"there is no {record}: run the stage it is copied from first")
    return [
        FieldArm(
            method=FieldMethod(**arm["settings"], init=arm["init"]),
            inits=(arm["init"],),
            lr=arm["lr"] if rates else None,
            name=name,
        )
        for name, arm in record_arms(record).items()
        if arm["lr"] is not None
    ]


def record_arms(record: Path) -> dict[str, dict[str, Any]]:
    """The arms of a comparison's record by name; raise UserError where it is damaged, or no record."""
    return {arm["name"]: arm for arm in read_json(record, arms=list)["arms"]}


def score_text(arm: Mapping[str, Any]) -> str:
    """`12.64 +- 0.06 (3)`: an arm's mean, standard deviation over seeds and n."""
    score = arm["score"]
    if score["mean"] is None:
        return "diverged"
    return f"{score['mean']:.2f}" + (f" +- {score['sd']:.2f}" if score["sd"] is not None else "") + f" ({score['n']})"


def difference_cells(pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[tuple[str, str, str]]:
    """First arm minus second, paired by the seeds that both finished: delta with its interval, p, p by Holm over all.

    Arms are as records have them, and may be of different records.
    """
    deltas = []
    for pair in pairs:
        own, other = ({run["seed"]: run["score"] for run in arm["runs"]} for arm in pair)
        deltas.append(paired_mean([own[seed] - other[seed] for seed in own if seed in other]))
    adjusted = holm([delta.p_value for delta in deltas])
    return [
        (estimate_text(delta.to_json(), "+.2f"), p_text(delta.p_value), p_text(p_holm))
        for delta, p_holm in zip(deltas, adjusted, strict=True)
    ]


def _few_steps(recipe: Recipe) -> Recipe:
    """The recipe over four steps, or one pass over a few hundred images."""
    task, train = recipe.task, recipe.train
    if isinstance(task, ImagePretrainingTask):
        task = replace(task, images=replace(task.images, train_rows=300, test_rows=100))
    if train.steps:
        return replace(recipe, task=task, train=replace(train, steps=4, warmup_steps=1, eval_every=2, save_every=4))
    return replace(recipe, task=task, train=replace(train, epochs=1))
