"""`nlr scale`: a ladder of widths and lengths of training, fits over it, and the next size predicted."""

from dataclasses import dataclass, fields

from nlr_lab.runtime.processes import let_threads_sleep, rank
from nlr_lab.scale.ladder import Ladder, scaled

from .options import parse, take_option


@dataclass(frozen=True, kw_only=True)
class ScaleOptions(Ladder):
    """Climb a ladder: each width is a comparison with its own tuned learning rates, predicted before it is run.

    The same command continues where it stopped; widths, tokens, arms and seeds may be added to a folder.
    """

    scale: str
    """demo (minutes of a core), small (hours of one) or gpu: the settings that the other options begin with."""
    out: str
    """Folder of the ladder: a comparison's folder for each rung, results.json, report.md and ladder.png."""
    timing_rounds: int = 30
    """Interleaved steps of each arm for the step times of a rung; 0 omits them."""
    workers: int | None = None
    """Runs side by side, as in nlr compare; none: one after another."""


def run_scale(arguments: list[str]) -> None:
    """Climb the ladder and print its tables."""
    if not {"-h", "--help"} & set(arguments):
        let_threads_sleep()
    name = take_option("--scale", arguments)[0] or "demo"
    base = scaled(name)
    shared = {each.name: getattr(base, each.name) for each in fields(Ladder)}
    default = ScaleOptions(scale=name, out=f"runs/scale-{name}", **shared)
    options = parse(ScaleOptions, arguments, command="scale", default=default)

    from rich.console import Console
    from rich.markdown import Markdown

    from nlr_lab.scale.report import tables
    from nlr_lab.scale.run import run_ladder

    ladder = Ladder(**{each.name: getattr(options, each.name) for each in fields(Ladder)})
    results = run_ladder(ladder, options.out, workers=options.workers, timing_rounds=options.timing_rounds)
    if rank() == 0:
        Console(width=200).print(Markdown("\n\n".join(tables(results))))
        print(f"In {options.out}: results.json, report.md, ladder.png")
