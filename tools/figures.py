"""Keep the numbers of the README and the documentation equal to those of the studies.

    python tools/figures.py                     # fill in every block of the pages below; `make figures`
    python tools/figures.py --check             # only say which blocks would change
    python tools/figures.py --collect llm_small # put the records that its run.py left into its results.json

A block stands between `<!-- figures: NAME -->` and `<!-- end -->`. Its text is the template of that name in
tools/figures.md, in which a path into `studies/<study>/results.json`, or `benchmarks/results/<name>.json`, stands for
each figure:

    {llm_small/cpu-table/arms/noble-r8/final_loss:.4f}             a number; of a dict its value, mean or median
    {-llm_small/cpu-table/against/baseline/noble-r8/delta:.3f}     with the other sign; {100 * PATH:.1f} as points
    {llm_small/cpu-table/against/baseline/noble-r8/delta:[.3f]}    its interval, `[0.168, 0.184]`
    {nerf/fern/arms/sine-k5/scores - nerf/fern-0.1/arms/low-rank-k5/scores:+.1f}   mean of differences paired by seed
    {max faults/parallel/rows/*/difference:.1e}                    of several numbers (sum, min, max, count)
    {grade llm_small/cpu-table/against/baseline/noble-r8:}         a pair's grade, `5/7`; of several the range
    {tables ladder:}                                               all tables of a ladder's report

An entry of a list is found by its `name`, a pair of fields by its `sine`, a ladder's rung by its `rung`; `*`, `?` and
`[ab]` stand for several.
"""

import argparse
import fnmatch
import json
import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from nlr_lab.compare.grade import grade_cell
from nlr_lab.compare.statistics import paired_mean
from nlr_lab.scale.report import tables

ROOT = Path(__file__).resolve().parents[1]
STUDIES, TEMPLATES = ROOT / "studies", ROOT / "tools" / "figures.md"
BENCHMARKS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), STUDIES / "ladder" / "README.md")

BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_FIGURE = re.compile(
    r"\{(?P<minus>-)?(?:(?P<factor>\d+) \* )?(?:(?P<of>sum|min|max|count|grade|tables) )?(?P<path>[^{} :]+)"
    r"(?: - (?P<less>[^{} :]+))?:(?P<interval>\[)?(?P<form>[^{}\]]*)\]?\}"
)
# What no page states: curves over steps, and what repeats or follows from what is kept.
_DROPPED = {
    *("curve", "curves", "metric_curve", "score_curve", "train_curve"),
    *("looks", "fingerprint", "sha256", "tokenizer_sha256", "format", "status"),
    *("standard_error", "dof", "null", "tokens_per_step", "steps_to_reference_loss", "lr_source"),
    *("matched_speedup", "matched_wall_clock_speedup"),
}


def main() -> int:
    """Return 1 if a block was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--collect", nargs="+", default=[], metavar="STUDY")
    options = parser.parse_args()
    for name in options.collect:
        collect(STUDIES / name)
    stale = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        filled = fill(text)
        if filled != text:
            print(f"{page.relative_to(ROOT)}: {'not ' if options.check else ''}as the studies have it")
            stale = 1
            if not options.check:
                page.write_text(filled, encoding="utf-8")
    return stale if options.check else 0


def fill(text: str) -> str:
    """Return a page with every block as the studies have it."""
    known = templates()
    return BLOCK.sub(lambda block: block[1] + _FIGURE.sub(_figure, known[block[2]]) + block[4], text)


def templates() -> dict[str, str]:
    """Return the texts of blocks, with paths for figures, by name."""
    return {name: body for _, name, body, _ in BLOCK.findall(TEMPLATES.read_text(encoding="utf-8"))}


def _figure(found: re.Match[str]) -> str:
    if found["of"] == "grade":
        return _grade(look_up(f"{found['path']}/grade"))
    value = look_up(found["path"])
    if found["of"] == "tables":
        return "\n\n".join(tables(value)).replace("## ", "### ")
    if found["less"]:
        value = _paired(value, look_up(found["less"]))
    if found["of"]:
        value = {"sum": sum, "min": min, "max": max, "count": len}[found["of"]](_numbers(value))
    scale = int(found["factor"] or 1) * (-1 if found["minus"] else 1)
    if found["interval"]:
        low, high = sorted(scale * value[end] for end in ("low", "high"))
        return f"[{low:{found['form']}}, {high:{found['form']}}]"
    return format(scale * _scalar(value), found["form"]).replace("e-0", "e-")


def _grade(value: Any) -> str:
    """Return the grade of a pair, `5/7`, or of several the lowest and highest."""
    known = [value]
    while isinstance(known[0], dict):
        known = [each for inner in known for each in inner.values()]
    ends = dict.fromkeys(grade_cell(end(known, key=len)) for end in (min, max))
    return " to ".join(ends)


def _scalar(value: Any) -> float:
    if not isinstance(value, dict):
        return value
    known = [value[key] for key in ("value", "mean", "median") if key in value]
    return known[0] if known else statistics.fmean(_numbers(value))


def look_up(path: str) -> Any:
    """Return an entry of a study's results or a benchmark's; `*` gives those of every entry, by key or number.

    Raises:
        KeyError: there is none.
    """
    study, *keys = path.split("/")
    own = STUDIES / study / "results.json"
    file = own if own.exists() else BENCHMARKS / f"{study}.json"
    return _inside(json.loads(file.read_text(encoding="utf-8")), keys)


def _inside(found: Any, keys: list[str]) -> Any:
    if not keys:
        return found
    key, *rest = keys
    if isinstance(found, list):
        names = ("name", "sine", "rung")
        found = {str(next(filter(None, map(each.get, names)), n)): each for n, each in enumerate(found)}
    if key not in found:
        # A pattern, or the beginning of a name with slashes in it.
        fits = fnmatch.filter(found, key)
        inner = {name.removeprefix(f"{key}/"): found[name] for name in found if name.startswith(f"{key}/")}
        if not fits and not inner:
            raise KeyError(key)
        if len(fits) > 1:
            return {name: _inside(found[name], rest) for name in fits}
        return _inside(found[fits[0]] if fits else inner, rest)
    return _inside(found[key], rest)


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in _numbers(each)]
    return [value]


def _paired(one: Any, other: Any) -> dict[str, float]:
    """Return the mean of differences of the same seeds, with its 95 % interval by the t distribution."""
    one, other = (dict(enumerate(each)) if isinstance(each, list) else each for each in (one, other))
    return vars(paired_mean([one[seed] - other[seed] for seed in one if seed in other]))


def collect(study: Path) -> None:
    """Put what the records beside the page say into results.json, without curves, to nine digits; and PNG into WebP."""
    results = study / "results.json"
    parts = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    for file in sorted(study.rglob("*.json")):
        if file != results:
            name = file.relative_to(study).with_suffix("").as_posix()
            parts[name] = _condensed(json.loads(file.read_text(encoding="utf-8")))
    results.write_text("\n".join(_lines(parts, 3)) + "\n", encoding="utf-8")
    for picture in study.glob("*.png"):  # the same pixels in fewer bytes
        Image.open(picture).convert("RGB").save(picture.with_suffix(".webp"), lossless=True, quality=100, method=6)
        picture.unlink()


def _condensed(value: Any) -> Any:
    if isinstance(value, dict):
        inner = {key: _condensed(each) for key, each in value.items() if key not in _DROPPED}
        # No cautions is a finding, which a grade counts.
        return {key: each for key, each in inner.items() if each not in (None, "", {}) or key == "cautions"}
    if isinstance(value, list):
        return [_condensed(each) for each in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _lines(value: Any, depth: int) -> Iterable[str]:
    """Give JSON, a line for each entry down to a depth."""
    if not depth or not value or not isinstance(value, dict | list):
        yield json.dumps(value)
        return
    named = isinstance(value, dict)
    yield "{" if named else "["
    entries = list(value.items()) if named else [("", each) for each in value]
    for index, (key, each) in enumerate(entries):
        first, *rest = _lines(each, depth - 1)
        lines = [f"{json.dumps(key)}: {first}" if named else first, *rest]
        lines[-1] += "," if index + 1 < len(entries) else ""
        yield from (f" {line}" for line in lines)
    yield "}" if named else "]"


if __name__ == "__main__":
    sys.exit(main())
