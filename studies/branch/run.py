"""Trained NOBLE branches: their share of a layer's output, how far from affine and how steep they are, their worth.

    python -m studies.branch.run DATA [--stage biases|inside|layers|regularised|all|ladder] [--seeds 3] [--work FOLDER]

DATA holds ELTeC's English novels as `train.txt.xz` and `valid.txt.xz`. The model is that of studies/llm_small (GLM of
width 128, no biases, 500 steps). Each stage continues where it was interrupted:

    biases    NOBLE of rank 8, plain linears, and plain linears with biases, which no arm of that study has; all with
              NOBLE's dense init, learning rates tuned
    inside    NOBLE measured at five steps of each run on held-out sequences, maps fitted on one half and measured on
              the other, and its losses beside those of the plain model of `biases`: branch.json, branch.png
    layers    the same runs layer by layer: shares, spectra, frequencies along straight paths: layers.json
    regularised  NOBLE and the plain model as they are, and with each of `CONDITIONS`, seeds paired: regularised.json
    ladder    the losses of `inside` of studies/ladder's models of width 96, where runs/ladder has them: ladder.json
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from nlr_lab.compare.record import RESULTS
from nlr_lab.compare.report import estimate_text, p_text
from nlr_lab.compare.statistics import Estimate, holm, paired_mean
from nlr_lab.reproduce.run import model_folder
from nlr_lab.runtime.environment import machine
from nlr_lab.runtime.storage import read_json, write_json
from nlr_lab.training import Arm, Recipe
from nlr_lab.training.arms import apply_arm, build_model
from nlr_lab.training.result import TrainResult
from nlr_lab.training.run import run_training
from nonlinear_lowrank import branches_disabled
from nonlinear_lowrank.hub.loading import load_model
from nonlinear_lowrank.hub.storage import versions
from nonlinear_lowrank.methods.noble.layer import NobleLinear
from nonlinear_lowrank.methods.noble.op import Branch, bottleneck
from studies.study import one_line_errors, record_arms, run_study, study_parser

HERE = Path(__file__).parent
ARMS = ("noble:rank=8", "baseline:init=noble", "studies.branch.run:with_biases,init=noble,name=biases")
RATES = (2e-3, 4e-3, 8e-3)
LR = 4e-3  # NOBLE's best in studies/llm_small
STEPS = (0, 125, 250, 375, 500)
BY_LAYER = (0, 250, 500)
JACOBIANS = 256  # tokens at which the branch's slope is taken
PATHS, POINTS = 8, 17  # straight paths between the embeddings of two held-out sequences, and points on each
HIGH = 4  # half periods a path from which a frequency is high
CONDITIONS: dict[str, dict[str, float]] = {
    "none": {},
    "weight decay 0": {"weight_decay": 0.0},
    "weight decay 0.1": {"weight_decay": 0.1},
    "dropout 0.1": {"dropout": 0.1},
    "label smoothing 0.1": {"label_smoothing": 0.1},
    # Noise of standard deviation 0.23 on embeddings that start at 1.
    "embedding noise 50": {"embedding_noise": 50.0},
}
"""Changes of the training: the backbone's dropout, and fields of `TrainConfig`, whose weight decay is 0.01."""


def main() -> None:
    parser = study_parser(__doc__, "branch", "data")
    names = ("biases", "inside", "layers", "regularised", "all", "ladder")
    parser.add_argument("--stage", choices=names, default="all")
    given = parser.parse_args()
    from studies.llm_small.run import recipe  # a script itself, which `--help` leaves alone

    with one_line_errors(given.stage):
        if given.stage == "ladder":
            of_ladder(Path("runs/ladder/w96-t20"), given)
            return
        base = recipe(given.data, "cpu")
        if given.stage in ("biases", "all"):
            how = f"python -m studies.branch.run DATA --stage biases --seeds {given.seeds}"
            options = {"arms": list(map(Arm.parse, ARMS)), "seeds": given.seeds, "tune_lr": RATES}
            run_study(base, given.work / "biases", HERE, "biases", command=how, timing_rounds=0, **options)
        stages = {"inside": inside, "layers": by_layer, "regularised": regularised}
        for name, stage in stages.items():
            if given.stage in (name, "all"):
                stage(base, given)


def with_biases(model: nn.Module) -> nn.Module:
    """Give every linear of the blocks a bias that starts at 0."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer.bias is None and "lm_head" not in name:
            layer.bias = nn.Parameter(torch.zeros(layer.out_features))
    return model


def trained(
    base: Recipe, given: Any, prepared: Any, condition: str, arm: str, seed: int
) -> tuple[Recipe, TrainResult, Path]:
    """Train an arm under a condition, or find it trained; return its recipe, its result and its folder."""
    changes = dict(CONDITIONS[condition])
    backbone = replace(base.task.backbone, dropout=changes.pop("dropout", 0.0))
    train = replace(base.train, lr=LR, seed=seed, threads=given.threads, eval_every=STEPS[-1], **changes)
    train = replace(train, save_every=STEPS[1], keep_checkpoints=len(STEPS) if condition == "none" else 1)
    task = replace(base.task, backbone=backbone)
    run = replace(base, name="branch", arm=Arm.parse(arm), task=task, train=train)
    out = given.work / "runs" / condition.replace(" ", "-") / run.arm.name / f"seed-{seed}"
    result = run_training(run, out, resume=out.exists(), prepared=prepared, quiet=True)
    print(f"{condition}, {run.arm.name}, seed {seed}: {result.final_loss:.4f}, {result.seconds:.0f} s", flush=True)
    return run, result, out


def regularised(base: Recipe, given: Any) -> None:
    """Train both arms under every condition and compare what each does to NOBLE's lead and to its branches' share."""
    prepared = base.task.prepare()
    tokens = _halves(prepared)[1]
    losses: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in ARMS[:2]} for name in CONDITIONS}
    shares: dict[str, list[float]] = {name: [] for name in CONDITIONS}
    for seed in range(1, given.seeds + 1):
        for condition in CONDITIONS:
            for arm in ARMS[:2]:
                _, result, out = trained(base, given, prepared, condition, arm, seed)
                assert result.final_loss is not None
                losses[condition][arm].append(result.final_loss)
                if arm == ARMS[0]:
                    shares[condition].append(_mean_share(load_model(out / "model"), tokens))
    leads = {name: _less(*found.values()) for name, found in losses.items()}
    changed = [name for name in CONDITIONS if name != "none"]
    found = {
        "lead": _tested({name: leads[name] for name in CONDITIONS}),
        "lead_since_none": _tested({name: _less(leads[name], leads["none"]) for name in changed}),
        "share_since_none": _tested({name: _less(shares[name], shares["none"]) for name in changed}),
        **{
            f"{which}_since_none": _tested({name: _less(losses[name][arm], losses["none"][arm]) for name in changed})
            for which, arm in (("noble", ARMS[0]), ("plain", ARMS[1]))
        },
    }
    record = {
        "command": f"python -m studies.branch.run DATA --stage regularised --seeds {given.seeds}",
        "settings": {"lr": LR, "steps": STEPS[-1], "conditions": CONDITIONS},
        "machine": machine(given.threads),
        "versions": versions(),
        "n": given.seeds,
        "losses": losses,
        "shares": shares,
        **found,
    }
    write_json(HERE / "regularised.json", record)
    print("| in training | plain, nats | NOBLE - plain | p, by Holm | less that of none | p, by Holm | share, % |")
    for name in CONDITIONS:
        since = found["lead_since_none"].get(name)
        cells = [name, f"{sum(losses[name][ARMS[1]]) / given.seeds:.3f}", *_cells(found["lead"][name])]
        cells += ["", ""] if since is None else _cells(since)
        print(f"| {' | '.join(cells)} | {100 * sum(shares[name]) / given.seeds:.1f} |")


def _cells(found: dict[str, Any]) -> list[str]:
    return [estimate_text(found, "+.3f"), f"{p_text(found['p_value'])}, {p_text(found['p_holm'])}"]


def _less(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [own - its for own, its in zip(one, other, strict=True)]


def _tested(differences: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Return t intervals and p-values of differences over seeds, adjusted by Holm over the family."""
    found = {name: paired_mean(each) for name, each in differences.items()}
    adjusted = holm([each.p_value for each in found.values()])
    return {name: vars(each) | {"p_holm": p} for (name, each), p in zip(found.items(), adjusted, strict=True)}


@torch.no_grad()
def _mean_share(model: nn.Module, tokens: Tensor) -> float:
    """Return the branches' share of the output's variance, mean over layers."""
    layers = _layers(model.eval())
    inputs = _inputs(layers, lambda: _loss(model, tokens))
    branches = {name: _branch(x, layers[name].branch()) for name, x in inputs.items()}
    return sum(_spread(y) / _spread(y + layers[name].dense(inputs[name])) for name, y in branches.items()) / len(layers)


def _measured(
    base: Recipe, given: Any, prepared: Any, seed: int, steps: Sequence[int], measure: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    """Train NOBLE and measure its branches: {step: what `measure` returns}."""
    run, _, out = trained(base, given, prepared, "none", ARMS[0], seed)
    models = [apply_arm(run, run.arm, build_model(run, prepared))]
    models += [load_model(out / "checkpoints" / f"step-{step:06d}") for step in steps[1:]]
    rows = [measure(model, _halves(prepared)) for model in models]
    _drift(rows)
    return dict(zip(map(str, steps), rows, strict=True))


def by_layer(base: Recipe, given: Any) -> None:
    """Measure the branches of NOBLE's runs layer by layer."""
    prepared = base.task.prepare()
    seeds = [
        _measured(base, given, prepared, seed, BY_LAYER, lambda *given: {"layers": numbers(*given, paths=True)[0]})
        for seed in range(1, given.seeds + 1)
    ]
    record = {
        "command": f"python -m studies.branch.run DATA --stage layers --seeds {given.seeds}",
        "settings": {"arm": ARMS[0], "lr": LR, "steps": BY_LAYER, "paths": PATHS, "points": POINTS, "high": HIGH},
        "machine": machine(given.threads),
        "versions": versions(),
        "n": given.seeds,
        "layers": _layer_means(seeds),
        "intervals": _intervals(seeds),
    }
    write_json(HERE / "layers.json", record)
    for name, each in record["intervals"].items():
        print(f"{name}: {estimate_text(each, '.4g')}")


def inside(base: Recipe, given: Any) -> None:
    """Train NOBLE over seeds and measure its branches."""
    prepared = base.task.prepare()
    halves = _halves(prepared)
    seeds, plain = {}, []
    for seed in range(1, given.seeds + 1):
        seeds[str(seed)] = {"steps": _measured(base, given, prepared, seed, STEPS, measure)}
        plain_run = trained(base, given, prepared, "none", ARMS[1], seed)[2]
        plain.append(_loss(load_model(plain_run / "model").eval(), halves[1]))
    last = [seed["steps"][str(STEPS[-1])]["losses"] for seed in seeds.values()]
    record = {
        "command": f"python -m studies.branch.run DATA --stage inside --seeds {given.seeds}",
        "settings": {"arm": ARMS[0], "lr": LR, "steps": STEPS, "tokens": 2 * halves[0].numel()},
        "machine": machine(given.threads),
        "versions": versions(),
        "n": given.seeds,
        "steps": summary(seeds),
        # Held-out loss at the end, less that of the plain model of the same seed.
        "against_plain": {
            change: vars(paired_mean([row[change] - own for row, own in zip(last, plain, strict=True)]))
            for change in last[0]
        },
    }
    write_json(HERE / "branch.json", record)
    draw(record["steps"], HERE / "branch.png")


def of_ladder(folder: Path, given: Any) -> None:
    """Compare NOBLE's models of a rung, their branches changed, with its plain models."""
    arms = record_arms(folder / RESULTS)
    noble, plain = ([model_folder(folder, name, run) for run in arms[name]["runs"]] for name in ("noble", "plain"))
    recipe = Recipe.from_dict(read_json(noble[0].parent / "recipe.json")["recipe"])
    text = {f"{of}source": str(given.data / f"{part}.txt.xz") for of, part in (("", "train"), ("valid_", "valid"))}
    halves = _halves(replace(recipe.task, text=replace(recipe.task.text, **text)).prepare())
    changed = [measure(load_model(each), halves) for each in noble]
    losses = [_loss(load_model(each).eval(), halves[1]) for each in plain]
    record = {
        "command": "python -m studies.branch.run DATA --stage ladder",
        "settings": {"rung": folder.name, "tokens": 2 * halves[0].numel()},
        "machine": machine(given.threads),
        "versions": versions(),
        "n": len(noble),
        "against_plain": {
            change: vars(paired_mean([row["losses"][change] - own for row, own in zip(changed, losses, strict=True)]))
            for change in changed[0]["losses"]
        },
    }
    write_json(HERE / "ladder.json", record)
    for name, each in record["against_plain"].items():
        print(f"{name}: {estimate_text(each, '+.3f')}")


def _halves(prepared: Any) -> tuple[Tensor, Tensor]:
    """Return the held-out sequences in two halves: (N / 2, T) each."""
    tokens = torch.stack([torch.as_tensor(prepared.valid[k]["input_ids"]) for k in range(len(prepared.valid))])
    half = len(tokens) // 2
    return tokens[:half], tokens[half : 2 * half]


@torch.no_grad()
def measure(model: nn.Module, halves: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Return losses of the model with its branches changed, and numbers of each layer."""
    rows, affine, mean = numbers(model, halves)
    layers = _layers(model)
    losses = {
        "intact": _loss(model, halves[1]),
        "affine": _loss(model, halves[1], _replaced(layers, lambda name, x: _apply(affine[name], x))),
        "mean": _loss(model, halves[1], _replaced(layers, lambda name, x: mean[name])),
        "off": _loss(model, halves[1], branches_disabled(model)),
    }
    return {"losses": losses, "layers": rows}


@torch.no_grad()
def numbers(
    model: nn.Module, halves: tuple[Tensor, Tensor], *, paths: bool = False
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor], dict[str, Tensor]]:
    """Return numbers of each layer, with `paths` those of straight paths too; its branch's best affine map (d_in + 1,
    d_out); and its branch's mean (d_out,)."""
    layers = _layers(model.eval())
    fit, test = (_inputs(layers, lambda tokens=tokens: _loss(model, tokens)) for tokens in halves)
    high = _high(model, layers, halves[1]) if paths else {}
    affine, mean, rows = {}, {}, {}
    for name, layer in layers.items():
        branch = layer.branch()
        wanted = _branch(fit[name], branch)
        affine[name] = _affine(fit[name], wanted)
        mean[name] = wanted.mean(0)
        rows[name] = _layer(layer, branch, test[name], affine[name]) | high.get(name, {})
    return rows, affine, mean


def _layers(model: nn.Module) -> dict[str, NobleLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, NobleLinear)}


def _inputs(layers: dict[str, NobleLinear], run: Callable[[], Any]) -> dict[str, Tensor]:
    """Return the inputs that every layer has in a run of the model: (tokens, d_in)."""
    found: dict[str, list[Tensor]] = {name: [] for name in layers}
    hooks = [
        layer.register_forward_pre_hook(lambda _, given, name=name: found[name].append(given[0].flatten(0, -2)))
        for name, layer in layers.items()
    ]
    run()
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def _branch(x: Tensor, branch: Branch) -> Tensor:
    """Return the branch's output: (tokens, d_out)."""
    return bottleneck(x @ branch.down.T, branch) @ branch.up.T


def _affine(x: Tensor, y: Tensor) -> Tensor:
    """Return the affine map of least squares from x to y: (d_in + 1, d_out)."""
    ones = torch.cat((x, torch.ones(len(x), 1)), 1).double()
    return torch.linalg.lstsq(ones, y.double()).solution.float()


def _apply(affine: Tensor, x: Tensor) -> Tensor:
    return x @ affine[:-1] + affine[-1]


def _spread(x: Tensor) -> float:
    """Return the variance over tokens, summed over channels."""
    return float(x.double().var(0).sum())


def _layer(layer: NobleLinear, branch: Branch, x: Tensor, affine: Tensor) -> dict[str, float]:
    """Return a layer's numbers on tokens that the affine map was not fitted on."""
    added, dense = _branch(x, branch), layer.dense(x)
    rest = _spread(added - _apply(affine, x)) / _spread(added)
    angles = _angles(x, branch)
    slopes = [_slope([angle[k] for angle in angles], branch) for k in range(0, len(x), max(1, len(x) // JACOBIANS))]
    steepest = float(torch.linalg.matrix_norm(layer.dense.weight, 2))
    of_mean, of_dense, within = _spectra(angles, branch, layer.dense.weight)
    first = of_dense[: len(of_mean)]
    return {
        "share": _spread(added) / _spread(added + dense),
        "not_affine": rest,
        "angle_1": float(angles[0].std(0).mean()),
        "angle_2": float(angles[1].std(0).mean()),
        "slope": sum(slopes) / len(slopes) / steepest,
        "largest_slope": max(slopes) / steepest,
        # Of the mean Jacobian, and of the dense weight, whole and in its first r directions.
        "slope_of_mean": float(of_mean[0]) / steepest,
        "stable_rank": _stable_rank(of_mean),
        "stable_rank_dense": _stable_rank(of_dense),
        "stable_rank_dense_first": _stable_rank(first),
        "first_dense": float(first.square().sum() / of_dense.square().sum()),
        "within_first": within,
        "within_first_by_chance": len(first) / branch.down.shape[1],
        "frequency_1": branch.frequencies[0].tolist(),
        "frequency_2": branch.frequencies[1].tolist(),
    }


def _angles(x: Tensor, branch: Branch) -> list[Tensor]:
    """Return the arguments of both cosines, radians: (tokens, r) each."""
    first = x @ branch.down.T * branch.frequencies[0] + branch.phases[0]
    return [first, first.cos() @ branch.mixes[0].T * branch.frequencies[1] + branch.phases[1]]


def _slope(angles: list[Tensor], branch: Branch) -> float:
    """Return the operator norm of the branch's Jacobian at one token."""
    outer, inner = (-angle.sin() * w for angle, w in zip(reversed(angles), reversed(branch.frequencies), strict=True))
    up, down = torch.linalg.qr(branch.up).R, torch.linalg.qr(branch.down.T).R
    return float(torch.linalg.matrix_norm(up * outer @ branch.mixes[0] * inner @ down.T, 2))


def _spectra(angles: list[Tensor], branch: Branch, weight: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return the singular values (r,) of the branch's Jacobian, mean over tokens, all of the dense weight, and the
    share of that Jacobian's square that is in the r input directions which the dense weight amplifies most."""
    inner, outer = (-angle.sin() * w for angle, w in zip(angles, branch.frequencies, strict=True))
    jacobian = branch.up @ (outer.T @ inner / len(inner) * branch.mixes[0]) @ branch.down
    _, values, directions = torch.linalg.svd(weight, full_matrices=False)
    within = (jacobian @ directions[: len(branch.down)].T).square().sum() / jacobian.square().sum()
    return torch.linalg.svdvals(jacobian)[: len(branch.down)], values, float(within)


def _stable_rank(values: Tensor) -> float:
    return float(values.square().sum() / values[0] ** 2)


@torch.no_grad()
def _high(model: Any, layers: dict[str, NobleLinear], tokens: Tensor) -> dict[str, dict[str, float]]:
    """Return, of the power with which branch and dense path change along straight paths between the embeddings of two
    sequences, the share at HIGH half periods a path and above; of a straight line it is 0.002."""
    points = torch.arange(POINTS)
    basis = torch.cos(math.pi / POINTS * torch.arange(1, POINTS)[:, None] * (points + 0.5))  # the DCT's, but its mean
    power = {name: torch.zeros(2, POINTS - 1) for name in layers}
    embed, weight = model.get_input_embeddings(), (points / (POINTS - 1))[:, None, None]
    for one, other in zip(tokens[:PATHS], tokens[PATHS : 2 * PATHS], strict=True):
        path = embed(one) * (1 - weight) + embed(other) * weight
        inputs = _inputs(layers, lambda path=path: model(inputs_embeds=path, use_cache=False))
        for name, x in inputs.items():
            for row, y in zip(power[name], (_branch(x, layers[name].branch()), layers[name].dense(x)), strict=True):
                row += (basis @ y.reshape(POINTS, -1)).square().sum(1)
    high = {name: each[:, HIGH - 1 :].sum(1) / each.sum(1) for name, each in power.items()}
    return {name: {"high": float(own), "high_dense": float(dense)} for name, (own, dense) in high.items()}


@torch.no_grad()
def _loss(model: nn.Module, tokens: Tensor, within: Any = None) -> float:
    """Return nats a token."""
    with within or nullcontext():
        parts = [float(model(input_ids=rows, labels=rows, use_cache=False).loss) for rows in tokens.split(32)]
    sizes = [len(rows) for rows in tokens.split(32)]
    return sum(part * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes)


@contextmanager
def _replaced(layers: dict[str, NobleLinear], branch: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Put a function of a layer's name and input in the place of its branch."""
    hooks = [
        layer.register_forward_hook(lambda layer, given, _, name=name: layer.dense(given[0]) + branch(name, given[0]))
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _drift(rows: list[dict[str, Any]]) -> None:
    """Put the mean change of the frequencies since the start in the place of the frequencies."""
    start = {name: layer.copy() for name, layer in rows[0]["layers"].items()}
    for row in rows:
        for name, layer in row["layers"].items():
            moved = [
                abs(now - then)
                for key in ("frequency_1", "frequency_2")
                for now, then in zip(layer.pop(key), start[name][key], strict=True)
            ]
            layer["drift"] = sum(moved) / len(moved)


def summary(seeds: dict[str, Any]) -> dict[str, Any]:
    """Return, by step, what each change of the branches adds to the loss, with its interval, and means over layers."""
    found = {}
    for step in map(str, STEPS):
        rows = [seed["steps"][step] for seed in seeds.values()]
        keys = next(iter(rows[0]["layers"].values()))
        layers = [layer for row in rows for layer in row["layers"].values()]
        found[step] = {
            "loss": sum(row["losses"]["intact"] for row in rows) / len(rows),
            **{
                change: vars(paired_mean([row["losses"][change] - row["losses"]["intact"] for row in rows]))
                for change in ("affine", "mean", "off")
            },
            **{key: sum(layer[key] for layer in layers) / len(layers) for key in keys},
            "kinds": _by_kind(rows),
        }
    return found


def _by_kind(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return share and rest of the projections of one name, averaged over blocks and seeds."""
    kinds: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        for name, layer in row["layers"].items():
            kinds.setdefault(name.rpartition(".")[2], []).append(layer)
    return {
        kind: {key: sum(each[key] for each in found) / len(found) for key in ("share", "not_affine", "slope")}
        for kind, found in kinds.items()
    }


_OVER_STEPS = ("share", "not_affine", "slope", "high", "high_dense")


def _layer_means(seeds: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return numbers of each layer, means over seeds in the layers' order: all at the end, some at every step."""
    found: dict[str, dict[str, Any]] = {}
    for step in map(str, BY_LAYER):
        rows = [seed[step]["layers"] for seed in seeds]
        keys = next(iter(rows[0].values())) if step == str(BY_LAYER[-1]) else _OVER_STEPS
        found[step] = {
            key: [float(f"{sum(row[name][key] for row in rows) / len(rows):.3g}") for name in rows[0]] for key in keys
        }
    return {"names": {str(place): name for place, name in enumerate(rows[0])}, **found}


def _intervals(seeds: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return means over layers with their t intervals over seeds: at the end, since the start, and the branch less the
    dense path."""
    start, end = (
        [
            {key: sum(layer[key] for layer in layers) / len(layers) for key in layers[0]}
            for seed in seeds
            if (layers := list(seed[str(step)]["layers"].values()))
        ]
        for step in (BY_LAYER[0], BY_LAYER[-1])
    )
    own, dense = ([[row[key] for row in rows] for rows in (start, end)] for key in ("high", "high_dense"))
    found: dict[str, Estimate] = {key: paired_mean([row[key] for row in end]) for key in end[0]}
    found |= {
        "high less dense, start": paired_mean(_less(own[0], dense[0])),
        "high less dense": paired_mean(_less(own[1], dense[1])),
        "high since the start": paired_mean(_less(own[1], own[0])),
        "high_dense since the start": paired_mean(_less(dense[1], dense[0])),
        "stable_rank less that of the dense weight's first": paired_mean(
            [row["stable_rank"] - row["stable_rank_dense_first"] for row in end]
        ),
    }
    return {name: {key: vars(each)[key] for key in ("value", "low", "high", "n")} for name, each in found.items()}


def draw(found: dict[str, Any], file: Path) -> None:
    """Draw share and rest by kind of layer, and the loss that each change costs, over steps."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for kind in found[str(STEPS[-1])]["kinds"]:
        for axes, key in ((left, "share"), (middle, "not_affine")):
            axes.plot(STEPS, [100 * found[str(step)]["kinds"][kind][key] for step in STEPS], marker="o", label=kind)
    left.set_ylabel("branch's share of the output's variance, %")
    middle.set_ylabel("of it not affine in the input, %")
    left.legend(fontsize=8)
    for change, text in (("affine", "its best affine map"), ("mean", "its mean"), ("off", "nothing")):
        right.plot(STEPS, [found[str(step)][change]["value"] for step in STEPS], marker="o", label=text)
    right.set_ylabel("nats lost with this in the branches' place")
    right.legend(fontsize=8)
    for axes in (left, middle, right):
        axes.set_xlabel("step")
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    main()
