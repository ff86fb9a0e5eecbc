"""Pictures of ranks: Figures 2 and 3 of sine_lowrank.txt again, and the spectra of a checkpoint's matrices.

Figure 2: |weights| of 128 x 128 matrices: Kaiming uniform, U V at k = 1, and its sine at omega = 100 and 2000.
Figure 3: normalised singular values of 256 x 256 matrices: Kaiming uniform, U V at k = 5, and phi(omega U V); left
for each phi, right for the sine at several omegas. The paper says Kaiming uniform and gives no omega for Figure 3;
here every phi is measured at every one of `OMEGAS`, and the left side shows `LEFT_OMEGA`.

Everything is float64 and a function of the seeds alone.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from nlr_lab.runtime.tables import COLOURS, GREYS, fold_numbers, new_figure, number_table, render_table, save

from .measures import ACTIVATIONS, curve_places, kaiming_factors, kaiming_uniform, random_stable_rank, spectrum
from .report import TOLERANCES, LayerRank

LEFT_OMEGA = 300.0
OMEGAS = (1.0, 10.0, 30.0, 100.0, LEFT_OMEGA, 1000.0, 3000.0)

_Make = Callable[[Tensor, Tensor], Tensor]  # of the dense matrix and the product U V, the matrix that is measured
_PLAIN: dict[str, _Make] = {"dense": lambda dense, product: dense, "U V": lambda dense, product: product}


def _activated(name: str, omega: float) -> dict[str, _Make]:
    phi = ACTIVATIONS[name]
    return {f"{name}, omega={omega:g}": lambda dense, product: phi(omega * product)}


_HEAT_SIZE, _HEAT_RANK, _HEATS = 128, 1, _PLAIN | _activated("sine", 100.0) | _activated("sine", 2000.0)
_SIZE, _RANK, _LINES = 256, 5, dict(_PLAIN)
for _name in ACTIVATIONS:
    for _omega in OMEGAS:
        _LINES |= _activated(_name, _omega)


def rank_figures(*, seeds: int = 5, init: str = "kaiming_sqrt5") -> dict[str, Any]:
    """Return both figures, ready for JSON: mean, lowest and highest over draws, and mean spectra as [i, s_i / s_1]."""
    return {
        "source": "sine_lowrank.txt, Figures 2 and 3",
        "init": init,
        "seeds": seeds,
        "tolerances": list(TOLERANCES),
        "left_omega": LEFT_OMEGA,
        "omegas": list(OMEGAS),
        "figure_2": _figure(_HEAT_SIZE, _HEAT_RANK, _HEATS, seeds, init),
        "figure_3": _figure(_SIZE, _RANK, _LINES, seeds, init),
    }


def format_figures(figures: Mapping[str, Any]) -> str:
    """Return the numbers of both figures as text."""
    lines = []
    for title, figure in (("Figure 2", figures["figure_2"]), ("Figure 3", figures["figure_3"])):
        lines.append(
            f"{title}: {figure['size']} x {figure['size']}, k = {figure['rank']}, {figures['init']}, "
            f"n = {figures['seeds']} draws; mean (lowest to highest)"
        )
        table = number_table("matrix", "stable rank", *(f"rank({each:g})" for each in figures["tolerances"]))
        for name, measured in figure["matrices"].items():
            cells = [measured["stable_rank"], *measured["ranks"].values()]
            table.add_row(name, *(f"{cell['mean']:.1f} ({cell['low']:.1f} to {cell['high']:.1f})" for cell in cells))
        lines.append(render_table(table, 120))
        lines.append(f"independent entries would have stable rank {figure['independent']:.1f}")
    return "\n".join(lines)


def _draw(size: int, rank: int, seed: int, init: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dense = kaiming_uniform((size, size), generator, init=init)
    up, down = kaiming_factors((size, size), rank, generator, init=init)
    return dense, up @ down


def _figure(size: int, rank: int, matrices: Mapping[str, _Make], seeds: int, init: str) -> dict[str, Any]:
    found: dict[str, list] = {name: [] for name in matrices}
    for seed in range(seeds):
        dense, product = _draw(size, rank, seed, init)
        for name, make in matrices.items():
            found[name].append(spectrum(make(dense, product)))
    measured = {}
    for name, spectra in found.items():
        mean = torch.stack([each.normalised for each in spectra]).mean(0)
        measured[name] = {
            "stable_rank": _spread([each.stable_rank for each in spectra]),
            "ranks": {f"{each:g}": _spread([one.rank(each) for one in spectra]) for each in TOLERANCES},
            "spectrum": [[place, float(f"{mean[place - 1]:.4g}")] for place in curve_places(len(mean))],
        }
    return {"size": size, "rank": rank, "independent": random_stable_rank((size, size)), "matrices": measured}


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}


def plot_rank_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Draw Figure 2 above, as heat maps of one draw, and Figure 3 below, as mean spectra, into a PNG."""
    figure = Figure(figsize=(11.0, 6.8), layout="constrained")
    above, below = np.ravel(figure.subfigures(2, 1, height_ratios=(1.0, 1.25)))  # type: ignore[arg-type]
    drawn, measured = _draw(_HEAT_SIZE, _HEAT_RANK, 0, figures["init"]), figures["figure_2"]["matrices"]
    shades = colormaps["viridis"].resampled(16)  # noise in 256 colours makes a large file
    above.suptitle(f"Figure 2: |weights|, k = {figures['figure_2']['rank']}, one draw")
    for axes, (name, make) in zip(np.ravel(above.subplots(1, len(_HEATS))), _HEATS.items(), strict=True):
        heat = make(*drawn).abs()
        axes.imshow((heat / heat.max()).numpy(), cmap=shades, vmin=0, vmax=1, interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks([])
        stable = measured[name]["stable_rank"]["mean"]
        axes.set_title(f"{name}\nstable rank {stable:.1f} (n = {figures['seeds']})", fontsize=9)
    spectra, rank = figures["figure_3"]["matrices"], figures["figure_3"]["rank"]
    below.suptitle(f"Figure 3: singular values over the largest, k = {rank}, mean of {figures['seeds']} draws")
    left, right = below.subplots(1, 2)
    at_omega = [name for name in spectra if name.endswith(f"omega={figures['left_omega']:g}")]
    sines = [name for name in spectra if name.startswith("sine")]
    for axes, shown in ((left, at_omega), (right, sines)):
        styles = [(name, grey, "--") for name, grey in zip(_PLAIN, GREYS, strict=False)]
        for name, colour, style in [*styles, *((name, each, "-") for name, each in zip(shown, COLOURS, strict=False))]:
            curve = zip(*spectra[name]["spectrum"], strict=True)
            axes.plot(*curve, linewidth=1.5, label=name, color=colour, linestyle=style)
        _style(axes)
        axes.legend(frameon=False, fontsize=8)
    left.set_ylabel("s_i / s_1")
    save(figure, path)


def plot_layer_spectra(path: Path, layers: Sequence[LayerRank], *, title: str = "") -> None:
    """Draw normalised spectra of a checkpoint's matrices into a PNG, coloured by the name without layer numbers."""
    figure, axes = new_figure(9.0, 5.4)
    groups: dict[str, int] = {}
    for layer in layers:
        group = fold_numbers(layer.name)
        label = "_" if group in groups else group
        index = groups.setdefault(group, len(groups))
        colour, style = COLOURS[index % len(COLOURS)], ("-", "--", ":", "-.")[index // len(COLOURS) % 4]
        axes.plot(
            *zip(*layer.spectrum, strict=True), color=colour, linestyle=style, linewidth=1.0, alpha=0.7, label=label
        )
    _style(axes)
    axes.set_xscale("log")
    axes.set_ylabel("s_i / s_1")
    axes.set_title(title, parse_math=False)
    axes.legend(frameon=False, fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)


def _style(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.set_ylim(1e-4, 1.3)
    axes.set_xlabel("i")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.5)
