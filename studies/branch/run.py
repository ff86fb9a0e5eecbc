"""Trained NOBLE branches: their share of a layer's output, how far from affine and how steep they are, their worth.

    python -m studies.branch.run DATA [--stage biases|inside|all] [--seeds 3] [--work FOLDER]

DATA holds ELTeC's English novels as `train.txt.xz` and `valid.txt.xz`. The model is that of studies/llm_small (GLM of
width 128, no biases, 500 steps). Each stage continues where it was interrupted:

    biases    NOBLE of rank 8, plain linears, and plain linears with biases, which no arm of that study has; all with
              NOBLE's dense init, learning rates tuned
    inside    NOBLE measured at five steps of each run on held-out sequences, maps fitted on one half and measured on
              the other, and its losses beside those of the plain model of `biases`: branch.json, branch.png
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from nlr_lab.compare.statistics import paired_mean
from nlr_lab.runtime.environment import machine
from nlr_lab.runtime.storage import write_json
from nlr_lab.training import Arm, Recipe
from nlr_lab.training.arms import apply_arm, build_model
from nlr_lab.training.run import run_training
from nonlinear_lowrank import branches_disabled
from nonlinear_lowrank.hub.loading import load_model
from nonlinear_lowrank.hub.storage import versions
from nonlinear_lowrank.methods.noble.layer import NobleLinear
from nonlinear_lowrank.methods.noble.op import Branch, bottleneck
from studies.study import one_line_errors, run_study, study_parser

HERE = Path(__file__).parent
ARMS = ("noble:rank=8", "baseline:init=noble", "studies.branch.run:with_biases,init=noble,name=biases")
RATES = (2e-3, 4e-3, 8e-3)
LR = 4e-3  # NOBLE's best in studies/llm_small
STEPS = (0, 125, 250, 375, 500)
JACOBIANS = 256  # tokens at which the branch's slope is taken


def main() -> None:
    parser = study_parser(__doc__, "branch", "data")
    parser.add_argument("--stage", choices=("inside", "biases", "all"), default="all")
    given = parser.parse_args()
    from studies.llm_small.run import recipe  # a script itself, which `--help` leaves alone

    with one_line_errors(given.stage):
        base = recipe(given.data, "cpu")
        if given.stage in ("biases", "all"):
            how = f"python -m studies.branch.run DATA --stage biases --seeds {given.seeds}"
            options = {"arms": list(map(Arm.parse, ARMS)), "seeds": given.seeds, "tune_lr": RATES}
            run_study(base, given.work / "biases", HERE, "biases", command=how, timing_rounds=0, **options)
        if given.stage in ("inside", "all"):
            inside(base, given)


def with_biases(model: nn.Module) -> nn.Module:
    """Give every linear of the blocks a bias that starts at 0."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer.bias is None and "lm_head" not in name:
            layer.bias = nn.Parameter(torch.zeros(layer.out_features))
    return model


def inside(base: Recipe, given: Any) -> None:
    """Train NOBLE over seeds and measure its branches."""
    train = replace(base.train, lr=LR, save_every=STEPS[1], keep_checkpoints=len(STEPS), threads=given.threads)
    base = replace(base, name="branch", arm=Arm.parse(ARMS[0]), train=train)
    prepared = base.task.prepare()
    halves = _halves(prepared)
    seeds, plain = {}, []
    for seed in range(1, given.seeds + 1):
        run = replace(base, train=replace(base.train, seed=seed))
        out = given.work / f"seed-{seed}"
        result = run_training(run, out, resume=out.exists(), prepared=prepared, quiet=True)
        models = [apply_arm(run, run.arm, build_model(run, prepared))]
        models += [load_model(out / "checkpoints" / f"step-{step:06d}") for step in STEPS[1:]]
        rows = [measure(model, halves) for model in models]
        _drift(rows)
        seeds[str(seed)] = {"final_loss": result.final_loss, "steps": dict(zip(map(str, STEPS), rows, strict=True))}
        (model,) = given.work.glob(f"biases/runs/baseline-init-noble/lr-{LR:g}/seed-{seed}/model")
        plain.append(_loss(load_model(model).eval(), halves[1]))
        print(f"seed {seed}: final loss {result.final_loss:.4f}")
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


def _halves(prepared: Any) -> tuple[Tensor, Tensor]:
    """Return the held-out sequences in two halves: (N / 2, T) each."""
    tokens = torch.stack([torch.as_tensor(prepared.valid[k]["input_ids"]) for k in range(len(prepared.valid))])
    half = len(tokens) // 2
    return tokens[:half], tokens[half : 2 * half]


@torch.no_grad()
def measure(model: nn.Module, halves: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Return losses of the model with its branches changed, and numbers of each layer."""
    model.eval()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, NobleLinear)}
    fit, test = (_inputs(model, layers, tokens) for tokens in halves)
    affine, mean, rows = {}, {}, {}
    for name, layer in layers.items():
        branch = layer.branch()
        wanted = _branch(fit[name], branch)
        affine[name] = _affine(fit[name], wanted)
        mean[name] = wanted.mean(0)
        rows[name] = _layer(layer, branch, test[name], affine[name])
    losses = {
        "intact": _loss(model, halves[1]),
        "affine": _loss(model, halves[1], _replaced(layers, lambda name, x: _apply(affine[name], x))),
        "mean": _loss(model, halves[1], _replaced(layers, lambda name, x: mean[name])),
        "off": _loss(model, halves[1], branches_disabled(model)),
    }
    return {"losses": losses, "layers": rows}


def _inputs(model: nn.Module, layers: dict[str, NobleLinear], tokens: Tensor) -> dict[str, Tensor]:
    """Return the inputs of every layer: (tokens, d_in)."""
    found: dict[str, list[Tensor]] = {name: [] for name in layers}
    hooks = [
        layer.register_forward_pre_hook(lambda _, given, name=name: found[name].append(given[0].flatten(0, -2)))
        for name, layer in layers.items()
    ]
    _loss(model, tokens)
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
    return {
        "share": _spread(added) / _spread(added + dense),
        "not_affine": rest,
        "angle_1": float(angles[0].std(0).mean()),
        "angle_2": float(angles[1].std(0).mean()),
        "slope": sum(slopes) / len(slopes) / steepest,
        "largest_slope": max(slopes) / steepest,
        "stable_rank_dense": float(layer.dense.weight.square().sum()) / steepest**2,
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
