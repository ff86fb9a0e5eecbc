"""Figures 4 to 7 of nora.txt, of models tuned on images: numbers, and pictures beside them.

Each function is a trial's `after`, with the data's name before its arguments; it looks at the first seed's models.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from nlr_lab.runtime.tables import save

from .measures import cell, over_seeds
from .table import Cells, slug

_NEAR = 0.01  # of the accuracy, that a run may be below its best
_IMAGES, _VALUES = 64, 20_000  # that are looked at; of each layer
_CLASSES, _EACH = 10, 40  # of t-SNE
_MAPS = 6


def convergence(name: str, comparison: Any, trial: Any, home: Path) -> Cells:
    """Return the first epoch whose held-out accuracy is within a point of the run's best."""
    found: Cells = {}
    for row in trial.arms:
        own = _arm(comparison, row)
        values: list[float | None] = []
        for run in own["runs"]:
            curve = run["metric_curve"]
            best = max((score for _, score in curve), default=0.0)
            step = next((step for step, score in curve if score >= best - _NEAR), None)
            values.append(None if step is None else trial.recipe.train.epochs * step / run["steps"])
        found[row] = {f"epochs, {name}": over_seeds(values)}
    return found


def adaptability(name: str, comparison: Any, trial: Any, home: Path) -> Cells:
    """Return the mean over layers of the Kolmogorov-Smirnov distance between activations' outputs before and after."""
    from scipy.stats import ks_2samp

    from nonlinear_lowrank.methods.rational.sites import survey

    prepared = comparison.trials.prepared
    batch, before = _batch(prepared, _IMAGES), trial.recipe.task.build_model(prepared)
    sites = [name for name, site in survey(before).sites.items() if not site.skipped]

    def outputs(model: Any) -> list[Any]:
        found = _outputs(model, sites, batch)
        return [found[name].flatten()[:: max(1, found[name].numel() // _VALUES)].numpy() for name in sites]

    plain, found = outputs(before), Cells()
    for row, model in _models(comparison, trial):
        distances = [ks_2samp(*pair).statistic for pair in zip(plain, outputs(model), strict=True)]
        found[row] = {"adaptability": cell(float(sum(distances)) / len(sites), n=1)}
    return found


def features(name: str, comparison: Any, trial: Any, home: Path) -> Cells:
    """Return the silhouette of the classes in t-SNE's plane of the head's inputs, for two arms; draw the planes."""
    import numpy as np
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_score

    prepared = comparison.trials.prepared
    labels = (prepared.test or prepared.valid).images.labels
    classes = range(min(_CLASSES, int(labels.max()) + 1))
    places = np.concatenate([np.flatnonzero(labels == each)[:_EACH] for each in classes])
    batch, found, planes = _batch(prepared, places), Cells(), {}
    for row, model in _models(comparison, trial, ("full tuning", "NoRA")):
        inputs = _outputs(model, ["classifier"], batch, before=True)["classifier"].numpy()
        tsne = TSNE(perplexity=min(30, len(places) // 4), init="pca", random_state=0)
        planes[row] = plane = tsne.fit_transform(inputs)
        found[row] = {"silhouette": cell(float(silhouette_score(plane, labels[places])), n=1)}
    figure = Figure(figsize=(4 * len(planes), 4), layout="constrained")
    for axes, (row, plane) in zip(np.ravel(figure.subplots(1, len(planes))), planes.items(), strict=True):
        axes.scatter(*plane.T, c=labels[places], cmap="tab10", s=8)
        axes.set(title=row, xticks=(), yticks=())
    save(figure, home / f"t-sne-{slug(name)}.png")
    return found


def class_maps(name: str, comparison: Any, trial: Any, home: Path) -> Cells:
    """Return how much of Grad-CAM's map lies in the middle of the pictures, before and after; draw some of them."""
    import torch
    from matplotlib.figure import Figure

    prepared = comparison.trials.prepared
    batch, found = _batch(prepared, _IMAGES), Cells()
    models = [("before tuning", trial.recipe.task.build_model(prepared)), *_models(comparison, trial, ("NoRA",))]
    maps = {row: grad_cam(model, batch) for row, model in models}
    for row, own in maps.items():
        edge = own.shape[-1] // 4
        shares = own[:, edge:-edge, edge:-edge].sum((1, 2)) / own.sum((1, 2))
        found[row] = {"cam_middle_share": cell(float(shares[own.sum((1, 2)) > 0].mean()), n=1)}
    figure = Figure(figsize=(1.5 * _MAPS, 1.5 * (1 + len(maps))), layout="constrained")
    pixels = batch["pixel_values"]
    pictures = (pixels - pixels.amin((1, 2, 3), True)) / (pixels.amax((1, 2, 3), True) - pixels.amin((1, 2, 3), True))
    grid = figure.subplots(1 + len(maps), _MAPS)
    for line, (row, own) in zip(grid, [("", None), *maps.items()], strict=True):
        for axes, number in zip(line, range(_MAPS), strict=True):
            picture = pictures[number].permute(1, 2, 0)
            axes.imshow((picture if own is None else picture.mean(-1)).numpy(), cmap="gray")
            if own is not None:
                size = {"size": pixels.shape[-2:], "mode": "bilinear"}
                shown = torch.nn.functional.interpolate(own[number][None, None], **size)[0, 0]
                axes.imshow(shown.numpy(), cmap="jet", alpha=0.5)
            axes.set(xticks=(), yticks=())
        line[0].set_ylabel(row)
    save(figure, home / f"grad-cam-{slug(name)}.png")
    return found


def grad_cam(model: Any, batch: Any) -> Any:
    """Return Grad-CAM's maps (B, side, side) of the labels' logits, at the norm before the last block's attention: past
    that the class token alone has a gradient (Selvaraju et al., arXiv:1610.02391)."""
    import torch

    kept: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, x: torch.Tensor) -> torch.Tensor:
        kept.append(x.detach().requires_grad_())
        return kept[0]

    last = [module for name, module in model.named_modules() if name.endswith(".layernorm_before")][-1]
    hook = last.register_forward_hook(keep)
    logits = model.eval()(pixel_values=batch["pixel_values"].to(model.device)).logits
    hook.remove()
    chosen = logits.gather(1, batch["labels"].to(model.device)[:, None]).sum()
    (gradient,) = torch.autograd.grad(chosen, kept)
    weights = gradient[:, 1:].mean(1, keepdim=True)  # (B, 1, d), of the patches
    found = (weights * kept[0].detach()[:, 1:]).sum(-1).relu()
    side = round(found.shape[1] ** 0.5)
    return found.view(-1, side, side).cpu()


def _arm(comparison: Any, row: str) -> Any:
    return next(arm for arm in comparison.results["arms"] if arm["name"] == slug(row))


def _models(comparison: Any, trial: Any, rows: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield rows and their models of the first seed; not those of arms that are functions, nor diverged ones."""
    from nlr_lab.evaluation.losses import open_saved

    from .run import model_folder

    for row in rows or tuple(row for row, arm in trial.arms.items() if not arm.startswith("nlr_lab.")):
        run = _arm(comparison, row)["runs"][0]
        if run["final_loss"] is not None:
            folder = model_folder(comparison.out, slug(row), run)
            yield row, open_saved(trial.recipe.task, comparison.trials.prepared, folder)


def _batch(prepared: Any, places: Any) -> Any:
    """Return images that runs are scored on, by their places or the first so many, as the model takes them."""
    examples = prepared.test or prepared.valid
    places = range(min(places, len(examples))) if isinstance(places, int) else places
    return prepared.collate([examples[int(place)] for place in places])


def _outputs(model: Any, names: list[str], batch: Any, *, before: bool = False) -> dict[str, Any]:
    """Return what modules gave, or were given, by the ends of their names."""
    import torch

    kept: dict[str, torch.Tensor] = {}

    def keep(name: str, module: Any, inputs: Any, output: Any = None) -> None:
        kept[name] = (inputs[0] if before else output).detach().cpu()

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    hooks: list[Any] = []
    for name in names:
        module: Any = inner.get_submodule(name)
        register: Callable[..., Any] = module.register_forward_pre_hook if before else module.register_forward_hook
        hooks.append(register(partial(keep, name)))
    with torch.no_grad():
        model.eval()(pixel_values=batch["pixel_values"].to(model.device))
    for hook in hooks:
        hook.remove()
    return kept
