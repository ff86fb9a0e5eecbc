"""`nlr inspect --rank CHECKPOINT` and `nlr inspect --rank-figures OUT`: ranks and spectra, and the paper's figures."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import FlagCreatePairsOff, Positional

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .checkpoint import check_parent
from .options import parse, table_width


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Singular values of every matrix of a checkpoint: stable rank, rank at tolerances, and an omega."""

    checkpoint: Positional[str]
    """A model's or an adapter's folder, the run folder of `nlr train`, or a .safetensors file."""
    for_rank: int = 8
    """Suggest an omega for sine low-rank weights of this rank in the place of each dense matrix."""
    init: Literal["kaiming_sqrt5", "kaiming_zero"] = "kaiming_sqrt5"
    """The init for which it is suggested."""
    tolerances: tuple[float, ...] = (0.1, 0.01)
    """Singular values above such a share of the largest are counted."""
    include: str | None = None
    """Only matrices whose name matches this regular expression somewhere."""
    omega: float | None = None
    """Frequency of sine factors in a file that no config.json describes."""
    exact_up_to: int = 2048
    """All singular values up to so many a matrix; above, the leading 256 by a sketch."""
    device: str = ""
    """Device that computes the spectra; default: the GPU if there is one."""
    every_layer: FlagCreatePairsOff[bool] = False
    """One row a matrix; default: repeated layers share a row with medians."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON instead of the table, with the spectrum of every matrix."""
    plot: str | None = None
    """Draw the spectra into this PNG too."""


@dataclass(frozen=True, kw_only=True)
class FigureOptions:
    """Figures 2 and 3 of the sine low-rank paper: what an activation does to a product's spectrum."""

    out: Positional[str]
    """The folder that gets rank-figures.json and rank-figures.png."""
    seeds: int = 5
    """Draws; the record has mean, lowest and highest over them."""
    init: Literal["kaiming_sqrt5", "kaiming_zero"] = "kaiming_sqrt5"
    """Kaiming uniform with a = sqrt(5) or a = 0."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Replace the files that are there."""


def run_rank(arguments: list[str]) -> None:
    """Print the table of a checkpoint."""
    options = parse(RankOptions, arguments, command="inspect --rank")
    path = _checkpoint(options.checkpoint)
    if options.plot is not None and Path(options.plot).suffix != ".png":
        raise UserError(f"--plot must end in .png, got {options.plot}")
    check_parent(options.plot, "--plot")

    from nlr_lab.rank.report import format_ranks, rank_report
    from nlr_lab.runtime.resources import choose_device

    device = str(choose_device(options.device))

    report = rank_report(
        path,
        for_rank=options.for_rank,
        init=options.init,
        tolerances=options.tolerances,
        include=options.include,
        omega=options.omega,
        exact_up_to=options.exact_up_to,
        device=device,
        progress=_progress if sys.stderr.isatty() else lambda line: None,
    )
    if sys.stderr.isatty():
        _progress("")
    if options.plot is not None:
        from nlr_lab.rank.plots import plot_layer_spectra

        plot_layer_spectra(Path(options.plot), report.layers, title=path.name)
    if options.json:
        print(report.to_json())
    else:
        print(format_ranks(report, every_layer=options.every_layer, width=table_width()))


def run_figures(arguments: list[str]) -> None:
    """Write Figures 2 and 3 of sine_lowrank.txt, as a record and a picture."""
    options = parse(FigureOptions, arguments, command="inspect --rank-figures")
    check_integer("--seeds", options.seeds, minimum=1)
    folder = Path(options.out)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder for the figures")
    record, picture = folder / "rank-figures.json", folder / "rank-figures.png"
    for file in (record, picture):
        if file.exists() and not options.overwrite:
            raise UserError(f"{file} is there already; --overwrite replaces it")

    from nlr_lab.rank.figures import format_figures, rank_figures
    from nlr_lab.rank.plots import plot_rank_figures
    from nlr_lab.runtime.storage import write_json

    figures = rank_figures(seeds=options.seeds, init=options.init)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(record, figures)
    plot_rank_figures(picture, figures)
    print(format_figures(figures))
    print(f"written: {record}, {picture}")


def _checkpoint(name: str) -> Path:
    """Return what is named, or the model in a run folder."""
    path = Path(name).expanduser()
    if not path.exists():
        raise UserError(f"no such file or folder: {name}")
    model = path / "model"
    begun = [each for each in ("recipe.json", "fit.json") if (path / each).exists()]
    finished = (model / "config.json").exists() or (model.is_dir() and "fit.json" in begun)
    if path.is_dir() and not (path / "config.json").exists() and finished:
        return model
    if path.is_dir() and begun and not any(path.glob("*.safetensors")):
        steps = sorted((path / "checkpoints").glob("step-*"))
        hint = f"; name a checkpoint of it, such as {steps[-1]}" if steps else ""
        raise UserError(f"the run in {path} has not finished{hint}")
    return path


def _progress(text: str) -> None:
    print(f"\r\033[K{text[:110]}", end="", file=sys.stderr, flush=True)
