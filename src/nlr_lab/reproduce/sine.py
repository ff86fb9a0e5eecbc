"""The tables of sine_lowrank.txt. Demos: MiniLM and SmolLM2 where they are installed, digits, a knot, three balls."""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from .measures import cell
from .noble import recipe, shared
from .table import Absent, Cells, Compare, Measure, Trial, at, runs, slug

# --- language -----------------------------------------------------------------------------------------------------

GLUE = {"CoLA": "cola", "MRPC": "mrpc", "STS-B": "stsb", "SST-2": "sst2", "RTE": "rte"}
GLUE |= {"QNLI": "qnli", "MNLI": "mnli", "QQP": "qqp"}
TESTS = {"BoolQ": "boolq", "PIQA": "piqa", "SIQA": "social_iqa", "HS": "hellaswag", "WG": "winogrande"}
TESTS |= {"ARC-e": "arc_easy", "ARC-c": "arc_challenge", "OBQA": "openbookqa"}
ELSEWHERE = "not embedded: see the last column, or --scale small with --source"


def glue_recipe(task: str, checkpoint: str) -> Any:
    """Return a task of GLUE with an encoder; MiniLM's is three epochs of at most 5,000 rows."""
    own = recipe(f"glue-{task}")
    if checkpoint == own.task.model.checkpoint:
        return own
    found = replace(own.task, model=replace(own.task.model, checkpoint=checkpoint, targets=("query", "value")))
    if checkpoint != "minilm":
        return replace(own, task=found)
    train = replace(own.train, epochs=3, lr=1e-3, head_lr=1e-3, bf16=False, group_by_length=True)
    return replace(own, task=replace(found, glue=replace(found.glue, train_rows=5000, held_out=0.1)), train=train)


def glue_trials(scale: str, arms: Mapping[str, str], tasks: Mapping[str, str], checkpoint: str) -> list[Trial]:
    """Compare arms on tasks of GLUE by column, with MiniLM below the paper's scale; a demo is on embedded data."""
    known = shared(scale) | ({"tune_lr": (1e-3, 3e-3, 1e-2)} if scale == "small" else {})
    if scale == "demo":
        from .embedded import acceptability

        own = glue_recipe("cola", "minilm")
        own = replace(own, task=replace(own.task, glue=replace(own.task.glue, source=acceptability(), max_length=64)))
        column = "embedded acceptability"
        return [
            Compare(part="demo", recipe=own, arms=arms, column=column, **known),
            Absent(columns=(*tasks, "avg"), why=ELSEWHERE),
        ]
    names = {column: glue_recipe(task, "minilm" if scale == "small" else checkpoint) for column, task in tasks.items()}
    return [Compare(part=slug(column), recipe=own, arms=arms, column=column, **known) for column, own in names.items()]


@runs("sine/table1", takes=("15 min of 2 cores, MiniLM", "2 days of 2 cores, MiniLM", "one GPU of 24 GB, a week"))
def glue(scale: str) -> list[Trial]:
    """LoRA and sine LoRA on query and value."""
    lr = at(scale, ",lr=1e-3", ",grid=3e-4/1e-3/3e-3", "")
    arms: dict[str, str] = {}
    for r in (1, 2, 4, 8):
        arms |= {f"LoRA k={r}": f"lora:r={r}", f"sine LoRA k={r}": f"sine-lora:r={r},omega=200{lr}"}
    return glue_trials(scale, arms, GLUE, "microsoft/deberta-v3-base")


def commonsense(scale: str) -> Any:
    """Return the recipe of commonsense reasoning; the demo's is SmolLM2 on embedded docstrings."""
    if scale == "paper":
        return recipe("llama3-commonsense")
    own = recipe("instruct-smollm2")
    rows: dict[str, Any] = {"rows": 80, "max_length": 128}
    if scale == "small":
        rows = {"source": "zwhe99/commonsense_170k", "template": "alpaca", "rows": 4000, "held_out": 0.02}
    task = replace(own.task, instructions=replace(own.task.instructions, **rows))
    return replace(own, task=task, train=replace(own.train, eval_every=at(scale, 9, 100, 0)))


def _reasoning(label: str, omegas: Mapping[int, int], more: str, lr: str, scale: str) -> list[Trial]:
    """LoRA or DoRA, and its sine, at every rank; `more` settings and the paper's `lr` are the sines'."""
    method, lr = label.lower(), lr if scale == "paper" else ",lr=1e-3"
    arms = {f"{label} k={r}": f"{method}:r={r},lora_alpha={2 * r},lora_dropout=0.05" for r in omegas}
    sines = {r: f"sine-{method}:r={r},omega={w},lora_alpha={2 * r}{more}{lr}" for r, w in omegas.items()}
    arms |= {f"sine {label} k={r}": arm for r, arm in sines.items()}
    known = shared(scale, timed=False) | {"tune_lr": ()}
    if scale == "demo":
        own = Compare(part="tuned", recipe=commonsense(scale), arms=arms, column="answer loss", **known)
        return [own, Absent(columns=(*TESTS, "avg"), why=ELSEWHERE)]
    return [Compare(part="tuned", recipe=commonsense(scale), arms=arms, tasks=TESTS, **known)]


_LLAMA = ("15 min of 2 cores, SmolLM2", "2 days of 2 cores, SmolLM2", "one GPU of 80 GB, 3 days")
_LORA, _DORA = {4: 800, 8: 600, 16: 200, 32: 200}, {8: 300, 16: 150, 32: 100}
_DROPOUT, _DORA_LR = ",lora_dropout=0.05", ",lr=6e-05"
runs("sine/table2", takes=_LLAMA)(partial(_reasoning, "LoRA", _LORA, "", ""))
runs("sine/table2-one-dropout", takes=_LLAMA)(partial(_reasoning, "LoRA", _LORA, _DROPOUT, ""))
runs("sine/table7", takes=_LLAMA)(partial(_reasoning, "DoRA", _DORA, "", _DORA_LR))
runs("sine/table7-one-dropout", takes=_LLAMA)(partial(_reasoning, "DoRA", _DORA, _DROPOUT, _DORA_LR))
runs("sine/table7-released", takes=_LLAMA)(
    partial(_reasoning, "DoRA", _DORA, f"{_DROPOUT},activation_sine=true", _DORA_LR)
)

_FOUR = {"LoRA": "lora", "sine LoRA": "sine-lora", "DoRA": "dora", "sine DoRA": "sine-dora"}


@runs("sine/hours", takes=("5 min of 2 cores, SmolLM2", "a day of 2 cores, SmolLM2", "one GPU of 80 GB, 2 days"))
def hours(scale: str) -> list[Trial]:
    """The hours of a run of each at rank 32, evaluations included."""
    arms = {row: f"{arm}:r=32" for row, arm in _FOUR.items()}
    return [Compare(part="hours", recipe=commonsense(scale), arms=arms)]


def _measured_memory(scale: str, folder: Path) -> Cells:
    """Weights and the peak of a step of a small Llama, 8 x 128 tokens, adapters on all linears."""
    from nlr_lab.bench.settings import TrainBenchConfig
    from nlr_lab.bench.training import bench_memory

    width = at(scale, 256, 1024, 0)
    sizes: dict[str, Any] = {"family": "llama", "modes": ("eager",), "width": width, "hidden": 4 * width}
    rows = bench_memory(TrainBenchConfig(**sizes, ranks=(8, 16, 32), methods=tuple(_FOUR.values()))).rows
    taken = {row.arm: (row.figures["weights_bytes"] + row.figures["peak_bytes"]) / 1e9 for row in rows}
    return {row: {f"r{r}": cell(taken[f"{arm} r={r}"]) for r in (8, 16, 32)} for row, arm in _FOUR.items()}


def _planned_memory(folder: Path) -> Cells:
    """Llama-3-8B's by `nlr plan`'s count: 16 sequences of 256 at once, not recomputed (the paper prints neither)."""
    from nlr_lab.plan.estimate import PlanConfig, arm_cost, lay_out
    from nlr_lab.plan.presets import find_hardware
    from nlr_lab.training.arms import Arm

    task, found = recipe("llama3-commonsense").task, Cells()
    config = PlanConfig(hardware=find_hardware("h100"), memory=96.0, batch_size=16, steps=1)
    for row, arm in _FOUR.items():
        for r in (8, 16, 32):
            model = task.build_on_meta().bfloat16()
            model = Arm.parse(f"{arm}:r={r}").apply(model, task.adapter_setup(model))
            cost = arm_cost(model, arm, task.sequence_length)
            total = lay_out(cost, config, sharding=1, micro_batch=16, recompute=False).total
            found.setdefault(row, {})[f"r{r}"] = cell(total / 1e9)
    return found


@runs("sine/table6", takes=("2 min of 2 cores", "10 min of 2 cores", "2 min of 2 cores: computed from shapes"))
def memory(scale: str) -> list[Trial]:
    """Measured on a small Llama, computed for Llama-3-8B."""
    if scale == "paper":
        note = "Ours are computed by `nlr plan` from shapes, not measured."
        return [Measure(part="memory", function=_planned_memory, note=note)]
    return [Measure(part="memory", function=partial(_measured_memory, scale))]


# --- settings -----------------------------------------------------------------------------------------------------

AT_ONCE = ("seconds", "seconds", "seconds")


def settings(cells: Mapping[str, Mapping[str, Any]]) -> list[Trial]:
    """Return the settings of this tool's recipes, by row and column."""
    note = "Ours are settings of this tool's recipes, which take them from the paper: nothing is measured."
    found = {row: {column: {"value": value} for column, value in own.items()} for row, own in cells.items()}
    return [Measure(part="settings", function=lambda folder: found, note=note)]


@runs("sine/table4", takes=AT_ONCE)
def glue_settings(scale: str) -> list[Trial]:
    """Learning rates and epochs of the recipes glue-*."""
    trains = {column: recipe(f"glue-{task}").train for column, task in GLUE.items()}
    return settings({column: {"lr": train.lr, "epochs": train.epochs} for column, train in trains.items()})


def _llama_settings(label: str, method: str, scale: str) -> list[Trial]:
    from nlr_lab.training.arms import Arm

    own = recipe("llama3-commonsense")
    arms = [arm for arm in map(Arm.parse, own.arms) if arm.method == method]
    shown = {f"{label} k={arm.settings['r']}": (arm.settings["omega"], arm.lr or own.train.lr) for arm in arms}
    return settings({row: {"omega": w, "lr": lr, "epochs": own.train.epochs} for row, (w, lr) in shown.items()})


runs("sine/table5", takes=AT_ONCE)(partial(_llama_settings, "sine LoRA", "sine-lora"))
runs("sine/table8", takes=AT_ONCE)(partial(_llama_settings, "sine DoRA", "sine-dora"))


@runs("sine/table9", takes=AT_ONCE)
def vit_settings(scale: str) -> list[Trial]:
    """The library's tables of frequencies."""
    from nonlinear_lowrank.methods.sine.layer import OMEGA_BY_RANK

    names = {"ViT-Small": "vit-small-cifar100", "ViT-Base": "vit-base-imagenet"}
    pairs = [(row, *pair) for row, name in names.items() for pair in OMEGA_BY_RANK[name].items()]
    return settings({f"{row} k={k}": {"omega": w} for row, k, w in pairs})


# --- images -------------------------------------------------------------------------------------------------------

_MLPS, _LAST = r"include=.*mlp\.fc[12]", r"include=.*stages\.3\..*pwconv[12]"


def _images(kind: str, scale: str, **backbone: int) -> Any:
    """A recipe of images: digits for a few epochs, CIFAR-10 for 30, or the paper's."""
    if scale == "paper":
        return recipe("sine-vit-base" if backbone else f"{kind}-cifar100")
    own = recipe(f"{kind}-{at(scale, 'demo', 'cifar100', '')}", **backbone)
    if scale == "demo":
        return replace(own, train=replace(own.train, epochs=4))
    images = replace(own.task.images, source="uoft-cs/cifar10")
    return replace(own, task=replace(own.task, images=images), train=replace(own.train, epochs=30))


@runs("sine/fig4", takes=("10 min of 2 cores", "3 days of one GPU of 24 GB", "weeks of several GPUs"))
def vision(scale: str) -> list[Trial]:
    """ViT-Small and ViT-Base by rank, frequencies of Table 9."""
    trials: list[Trial] = []
    wide = {"width": 512, "heads": 8, "hidden": 2048} if scale == "small" else {"width": 128, "hidden": 512}
    ranks = (1, 5, 10, 30, 60, 100, 150, 250)
    for label, table, own, sizes in (
        ("ViT-Small", "vit-small-cifar100", ranks[:5], {}),
        ("ViT-Base", "vit-base-imagenet", ranks, wide),
    ):
        made = _images("sine-vit", scale, **sizes)
        width, hidden = made.task.backbone.width, made.task.backbone.hidden
        arms, large = {f"{label}, full rank": "baseline"}, []
        for k in own:
            rows = {f"{label}, low rank k={k}": f"low-rank:rank={k},{_MLPS}"}
            rows |= {f"{label}, sine k={k}": f"sine-lowrank:rank={k},omega={table},{_MLPS}"}
            arms |= rows if k * (width + hidden) < width * hidden else {}
            large += [] if k * (width + hidden) < width * hidden else [*rows]
        trials.append(Compare(part=label, recipe=made, arms=arms, **shared(scale)))
        trials += [Absent(rows=tuple(large), why="saves nothing at this scale's width")] if large else []
    return trials


_VIT = ("2 min of 2 cores", "1 day of one GPU of 24 GB", "one GPU of 24 GB, days")


@runs("sine/table10", takes=_VIT)
def frequencies(scale: str) -> list[Trial]:
    """Rank 1 by frequency, beside full rank and plain low rank."""
    arms = {"control, full rank": "baseline", "control, low rank": f"low-rank:rank=1,{_MLPS}"}
    arms |= {f"omega={w}": f"sine-lowrank:rank=1,omega={w},{_MLPS}" for w in range(100, 800, 100)}
    return [Compare(part="omega", recipe=_images("sine-vit", scale), arms=arms, **shared(scale))]


@runs("sine/table11", takes=_VIT)
def convnext(scale: str) -> list[Trial]:
    """The last stage's pointwise linears."""
    arms = {"full rank": "baseline"}
    for k, w in {1: 400, 5: 300, 20: 300}.items():
        arms |= {f"low rank k={k}": f"low-rank:rank={k},{_LAST}"}
        arms |= {f"sine k={k}, omega={w}": f"sine-lowrank:rank={k},omega={w},{_LAST}"}
    own = _images("sine-convnext", scale)
    return [Compare(part="convnext", recipe=own, arms=arms, **shared(scale))]


# --- fields -------------------------------------------------------------------------------------------------------

SCENES = {"Fern": "fern", "Flower": "flower", "Fortress": "fortress", "Horn": "horns"}
SCENES |= {"Leaves": "leaves", "Orchids": "orchids", "Room": "room", "Trex": "trex"}
MESHES = {"Thai": "thai.ply", "Lucy": "lucy.ply", "Dragon": "dragon.ply"}
_RANKS, _OMEGAS = (1, 5, 10, 30, 60), {1: 200, 2: 100, 5: 50, 20: 20}


def _fields(scale: str, recipes: Mapping[str, Any], arms: Mapping[str, str], columns: Any) -> list[Trial]:
    """One comparison a column; inits are both tried but in a demo, whose columns are absent."""
    known = shared(scale) | {"tune_lr": at(scale, (), (1e-3, 3e-3), ())}
    if scale == "demo":
        arms = {row: f"{arm}{',' if ':' in arm else ':'}init=kaiming_sqrt5" for row, arm in arms.items()}
    trials: list[Trial] = [
        Compare(part=slug(column), recipe=own, arms=arms, column=column, **known) for column, own in recipes.items()
    ]
    return [*trials, Absent(columns=(*columns, "avg"), why=ELSEWHERE)] if scale == "demo" else trials


def _scenes(scale: str) -> dict[str, Any]:
    """Recipes by column; the small ones at a sixteenth of the pictures' sides."""
    own = recipe(at(scale, "nerf-demo", "nerf-fern", "nerf-llff"), 200 if scale == "demo" else None)
    if scale == "demo":
        return {"three balls": replace(own, problem=replace(own.problem, frames=0))}
    downscale = at(scale, 1, 16, own.problem.downscale)
    places = {column: {"source": f"nerf_llff_data/{name}", "downscale": downscale} for column, name in SCENES.items()}
    return {column: replace(own, problem=replace(own.problem, **place)) for column, place in places.items()}


@runs(
    *("sine/table3", "sine/fig5", "sine/fig8"),
    takes=("4 min of 2 cores", "2 days of one GPU", "88 fits of a GPU-day each, or of hours on a fast one"),
)
def nerf(scale: str) -> list[Trial]:
    """All scenes and ranks, and the distance of the two rate-distortion curves."""
    arms = {"full rank": "dense"}
    for k in _RANKS:
        arms |= {f"low rank k={k}": f"low-rank:rank={k}", f"sine k={k}": f"sine:rank={k},omega=nerf"}
    scenes = _scenes(scale)

    def distance(folder: Path) -> Cells:
        return {"sine over low rank": rate_distortion([folder / slug(column) for column in scenes])}

    return [*_fields(scale, scenes, arms, SCENES), Measure(part="rate-distortion", function=distance)]


def rate_distortion(folders: list[Path]) -> dict[str, dict[str, Any]]:
    """Bjontegaard's distances of the sine's curve from plain low rank's, of means over scenes and seeds."""
    from nlr_lab.compare.field_report import bd_psnr, bd_rate
    from nlr_lab.compare.record import RESULTS
    from nlr_lab.runtime.storage import read_json
    from nonlinear_lowrank.errors import UserError

    records = [{arm["name"]: arm for arm in read_json(folder / RESULTS, arms=list)["arms"]} for folder in folders]
    curves, lost = [], []
    for kind in ("low rank", "sine"):
        curve = []
        for row in (f"{kind} k={k}" for k in _RANKS):
            own = [record[slug(row)] for record in records]
            scores = [arm["score"]["mean"] for arm in own]
            if None in scores:
                lost.append(row)
            else:
                curve.append((float(own[0]["parameters"]), statistics.fmean(scores)))
        curves.append(curve)
    found = {}
    for name, function in (("bd_rate_pct", bd_rate), ("bd_psnr_db", bd_psnr)):
        if lost:
            found[name] = cell(None, why=f"diverged: {', '.join(lost)}")
            continue
        try:
            found[name] = cell(function(*curves, names=("low rank", "sine")))
        except UserError as error:  # curves that do not overlap, or do not rise
            found[name] = cell(None, why=str(error))
    return found


@runs("sine/fig7", takes=("6 min of 2 cores", "1 day of one GPU", "10 fits of a GPU-day each"))
def nerf_frequencies(scale: str) -> list[Trial]:
    """Rank 1 and 5 by frequency, on the first scene (the paper does not say which)."""
    pairs = [(1, w) for w in range(200, 2000, 400)] + [(5, w) for w in (200, 400, 800, 1200, 1600)]
    arms = {f"k={k}, omega={w}": f"sine:rank={k},omega={w}" for k, w in pairs}
    return _fields(scale, dict([next(iter(_scenes(scale).items()))]), arms, ())


def _nerf_memory(scale: str, folder: Path) -> Cells:
    """Weights, Adam's moments, and the peak of a step beyond them; on a CPU what torch allocates."""
    from nlr_lab.bench.training import peak_bytes
    from nlr_lab.fields.fit import Stepper, build
    from nlr_lab.fields.problem import FieldMethod
    from nlr_lab.fields.settings import FitConfig, NerfSettings
    from nlr_lab.runtime.environment import choose_device

    paper: dict[str, Any] = {"rays": 1024, "samples": 64, "fine_samples": 64}
    more = {"rays": 256} if scale == "demo" else paper
    problem = NerfSettings(source="demo", frames=0, **more).prepare()  # memory does not depend on the scene
    device, found = choose_device("cpu" if scale == "demo" else ""), Cells()
    for row, kind in (("low rank", "low-rank"), ("sine", "sine")):
        for k in _RANKS:
            model = build(problem, FieldMethod.parse(f"{kind}:rank={k}"), 0).to(device)
            stepper = Stepper(problem, model, FitConfig())
            stepper.take(0)  # makes Adam's moments
            kept = 3 * sum(each.nbytes for each in model.parameters())
            taken = kept + peak_bytes(partial(stepper.take, 1), str(device))
            found.setdefault(row, {})[f"k={k}"] = cell(taken / 1e6)
    return found


@runs("sine/table12", takes=("1 min of 2 cores", "1 min of a GPU", "1 min of a GPU"))
def nerf_memory(scale: str) -> list[Trial]:
    """Memory of a step, by rank."""
    return [Measure(part="memory", function=partial(_nerf_memory, scale))]


def _shapes(scale: str, released: bool) -> dict[str, Any]:
    """Recipes by column; `released` follows the paper's code where that differs from its text."""
    own = recipe("occupancy-demo" if scale == "demo" else "occupancy")
    problem, train = own.problem, own.train
    if scale == "small":
        problem = replace(problem, resolution=128, points=1024, held_out=64, mesh_resolution=128)
        train = replace(train, steps=2000)
    if released:
        problem = replace(problem, loss="squared", surface_share=0.0, field=replace(problem.field, spread=0.1))
        if scale == "paper":
            problem, passes = replace(problem, points=200_000), 200  # over the lattice
            # The rate falls to a tenth over as many steps, the first of some 134,000.
            train = replace(train, schedule="constant", lr=train.lr / 10, steps=passes * -(-(512**3) // problem.points))
        else:
            train = replace(train, schedule="exponential", end=0.1)
    places = {"knot": "knot"} if scale == "demo" else MESHES
    return {
        column: replace(own, problem=replace(problem, source=place), train=train) for column, place in places.items()
    }


def _occupancy(scale: str, released: bool) -> list[Trial]:
    arms = {"full rank": "dense"}
    for k, w in _OMEGAS.items():
        arms |= {f"low rank k={k}": f"low-rank:rank={k}", f"sine k={k}, omega={w}": f"sine:rank={k},omega={w}"}
    return _fields(scale, _shapes(scale, released), arms, MESHES)


_FITS = ("4 min of 2 cores", "2 days of 2 cores", "days of one GPU")
runs("sine/table13", "sine/fig6", takes=_FITS)(lambda scale: _occupancy(scale, released=False))
runs("sine/table13-released", takes=_FITS)(lambda scale: _occupancy(scale, released=True))


@runs("sine/fig9", takes=("3 min of 2 cores", "1 day of 2 cores", "days of one GPU"))
def occupancy_frequencies(scale: str) -> list[Trial]:
    """Rank 1 by frequency, on the first shape."""
    arms = {f"omega={w}": f"sine:rank=1,omega={w}" for w in (25, 50, 100, 200, 400, 800)}
    return _fields(scale, dict([next(iter(_shapes(scale, released=False).items()))]), arms, ("Thai",))


# --- spectra ------------------------------------------------------------------------------------------------------


def _spectra(number: str, product: str, scale: str) -> list[Trial]:
    """Stable ranks of five draws, by `nlr inspect --rank-figures`, and its picture."""

    def measure(folder: Path) -> Cells:
        from nlr_lab.rank.figures import plot_rank_figures, rank_figures

        figures = rank_figures(seeds=5)
        folder.mkdir(parents=True, exist_ok=True)
        plot_rank_figures(folder / "rank-figures.png", figures)
        rows, matrices = {"dense": "full rank", "U V": product}, figures[number]["matrices"]
        found = {rows.get(name, name): own["stable_rank"]["mean"] for name, own in matrices.items()}
        return {row: {"stable_rank": cell(value, n=figures["seeds"])} for row, value in found.items()}

    note = "Ours are means of five random draws of the paper's sizes, at every scale."
    return [Measure(part="spectra", function=measure, note=note)]


runs("sine/fig2", takes=("10 s", "10 s", "10 s"))(partial(_spectra, "figure_2", "low rank, k=1"))
runs("sine/fig3", takes=("10 s", "10 s", "10 s"))(partial(_spectra, "figure_3", "low rank, k=5"))
