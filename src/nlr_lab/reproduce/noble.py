"""NOBLE's tables (noble.txt), and those of the notes on it (noble_notes_zh.md).

Ranks keep the paper's width / rank: at width 128, rank 8 stands for 64. Every comparison has the controls of
`recipes.BASELINES`. Demos are on embedded data.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from .table import Cells, Compare, Measure, Trial, at, runs

RANKS = (64, 128, 256)
_TIMED = {"demo": 12, "small": 30, "paper": 30}
_SEEDS = {"demo": 1, "small": 3, "paper": 1}
_RATES = {"demo": (), "small": (5e-4, 1e-3, 2e-3), "paper": ()}


def shared(scale: str, *, timed: bool = True) -> dict[str, Any]:
    """Return seeds, learning rates and timing rounds of a scale."""
    return {"seeds": _SEEDS[scale], "tune_lr": _RATES[scale], "rounds": _TIMED[scale] if timed else 0}


def recipe(name: str, steps: int | None = None, **backbone: int) -> Any:
    """Return a recipe without a tracker: in so many steps, with its schedule; with another backbone."""
    from nlr_lab.compare.trial import shortened
    from nlr_lab.fields.settings import FieldRecipe
    from nlr_lab.recipes import get_recipe

    found = get_recipe(name)
    train = found.train if steps is None else shortened(found.train, steps)
    if isinstance(found, FieldRecipe):
        return replace(found, train=train)
    task = replace(found.task, backbone=replace(found.task.backbone, **backbone)) if backbone else found.task
    return replace(found, task=task, train=replace(train, tracker="none"))


def _arms(ranks: tuple[int, ...], size: str = "") -> dict[str, str]:
    """The baseline, NOBLE at the published ranks' places, and the two controls of the dense init."""
    return {
        f"{size}baseline": "baseline",
        **{f"{size}CosNet r={printed}": f"noble:rank={own}" for printed, own in zip(RANKS, ranks, strict=False)},
        f"{size}control, NOBLE's dense init": "baseline:init=noble",
        f"{size}control, Kaiming init": "baseline:init=kaiming",
    }


@runs(
    *("noble/table1", "noble/fig1", "noble/fig3", "noble/step-times"),
    takes=("10 min of 2 cores", "3 days of one GPU of 24 GB", "8 H100: 5 days (base), 3 weeks (large)"),
)
def language_models(scale: str) -> list[Trial]:
    """Base and large."""
    if scale == "demo":
        large = {"layers": 6, "width": 192, "heads": 6, "hidden": 512}
        sizes = {
            "base": (recipe("llm-demo", 150), (8, 16, 32)),
            "large": (recipe("llm-demo", 150, **large), (6, 12, 24)),
        }
    elif scale == "small":
        large = {"layers": 12, "width": 768, "heads": 12, "hidden": 2048}
        sizes = {"base": (recipe("llm-small"), (32, 64, 128)), "large": (recipe("llm-small", **large), (24, 48, 96))}
    else:
        sizes = {"base": (recipe("llm-base"), RANKS), "large": (recipe("llm-large"), RANKS)}
    return [
        Compare(part=size, recipe=own, arms=_arms(ranks, f"{size}, "), **shared(scale))
        for size, (own, ranks) in sizes.items()
    ]


@runs("noble/table2", takes=("4 min of 2 cores", "1 day of one GPU of 24 GB", "one GPU of 80 GB, a week"))
def masked(scale: str) -> list[Trial]:
    """Masked language models."""
    if scale == "small":
        small = recipe("mlm-base", 10_000)
        sizes = {"vocab_size": 8192, "sequence_length": 512, "tokenizer": "wordpiece", "max_bytes": 2_000_000_000}
        own = replace(small, task=replace(small.task, text=replace(small.task.text, **sizes)))
    else:
        own = recipe("mlm-demo", 150) if scale == "demo" else recipe("mlm-base")
    ranks = {"demo": (8, 16, 32), "small": (48, 96, 192), "paper": RANKS}
    return [Compare(part="mlm", recipe=own, arms=_arms(ranks[scale]), **shared(scale))]


@runs(
    *("noble/table3", "noble/fig4"),
    takes=("8 min of 2 cores", "2 days of one GPU of 24 GB", "several GPUs; 90 epochs of ImageNet, 8 runs"),
)
def vision(scale: str) -> list[Trial]:
    """ViT with Mixup and CutMix, and without."""
    from nlr_lab.tasks.images.sources import ImageSource

    own = recipe("vit-small" if scale == "paper" else "vit-demo")
    if scale == "demo":
        own = replace(own, train=replace(own.train, epochs=10))
    elif scale == "small":
        from nlr_lab.tasks.images.pretraining import VitBackbone

        backbone = VitBackbone(layers=12, width=384, heads=6, hidden=1536, patch=4)
        task = replace(own.task, images=ImageSource(source="uoft-cs/cifar10", size=32), backbone=backbone)
        task = replace(task, augmentation=replace(task.augmentation, flip=True), plain_rows=5000)
        train = replace(recipe("vit-small").train, batch_size=512, lr=6e-4)
        own = replace(own, task=task, train=train)
    rank = 8 if scale == "demo" else 64
    trials: list[Trial] = []
    for part, mixing in (("mixed", {}), ("plain", {"mixup": 0.0, "cutmix": 0.0})):
        task = replace(own.task, augmentation=replace(own.task.augmentation, **mixing))
        arms = _arms((rank,), f"{part}, ")
        trials.append(Compare(part=part, recipe=replace(own, task=task), arms=arms, **shared(scale)))
    return trials


@runs("noble/table4", takes=("5 min of 2 cores", "5 h of 2 cores", "several large GPUs, a week"))
def image_tokens(scale: str) -> list[Trial]:
    """Image tokens."""
    names = {"demo": "image-tokens-demo", "small": "image-tokens-cifar10", "paper": "image-tokens-base"}
    ranks = {"demo": (8, 16, 32), "small": (12, 24, 48), "paper": RANKS}
    own = recipe(names[scale], 150 if scale == "demo" else None)
    return [Compare(part="tokens", recipe=own, arms=_arms(ranks[scale]), **shared(scale))]


@runs(*("noble/table5", "noble/fig5"), takes=("6 min of 2 cores", "3 days of one GPU of 24 GB", "8 H100, 6 days"))
def activations(scale: str) -> list[Trial]:
    """Bottlenecks, beside a baseline with NOBLE's dense init (of the paper's baseline none is printed)."""
    own, rank = {
        "demo": lambda: (recipe("llm-demo", 150), 8),
        "small": lambda: (recipe("llm-small"), 32),
        "paper": lambda: (recipe("llm-base", 150_000), 64),
    }[scale]()
    if scale == "paper":
        own = replace(own, train=replace(own.train, batch_size=32))
    arms = {"baseline": "baseline:init=noble", "control, transformers' init": "baseline"}
    for activation in ("tanh", "leaky_relu", "gelu", "cosine"):
        for depth, layers in ((1, "1 layer"), (2, "2 layers")):
            arms[f"{activation}, {layers}"] = f"noble:rank={rank},activation={activation},depth={depth}"
    arms["cosine, 3 layers"] = f"noble:rank={rank},depth=3"
    return [Compare(part="ablation", recipe=own, arms=arms, **shared(scale))]


# --- the notes ----------------------------------------------------------------------------------------------------

NOTES = "noble:rank_ratio={ratio},activation=silu,depth=1,fusion=gated,up_bias=true,dense_scale=1.0"
"""The notes' layer: SiLU, a learned mixture of both paths, a rank of a quarter of the width."""


@runs("notes/c4", takes=("8 min of 2 cores", "3 days of one GPU of 24 GB", "8 large GPUs, days"))
def c4(scale: str) -> list[Trial]:
    """Two sizes. A ratio of 1/16 gives about the notes' 10 to 12 % more parameters; their code's 1/4 gives 50 %."""
    trials: list[Trial] = []
    for size, (layers, width, heads, hidden) in {
        "demo": {"small": (4, 128, 4, 344), "medium": (6, 192, 6, 512)},
        "small": {"small": (6, 512, 8, 1376), "medium": (12, 768, 12, 2048)},
        "paper": {"small": (12, 768, 12, 2048), "medium": (24, 1024, 16, 2752)},
    }[scale].items():
        sizes = {"layers": layers, "width": width, "heads": heads, "hidden": hidden}
        name, steps = {"demo": ("llm-demo", 150), "small": ("llm-small", None), "paper": ("llm-base", 100_000)}[scale]
        own = recipe(name, steps, **sizes)
        if scale != "demo":
            text = replace(own.task.text, source="allenai/c4:en")
            own = replace(own, task=replace(own.task, text=text))
        arms = {
            f"{size}, standard": "baseline:init=kaiming",
            f"{size}, noble": NOTES.format(ratio=0.0625),
            f"{size}, ratio 0.25 as in the notes' code": NOTES.format(ratio=0.25),
            f"{size}, CosNet (the paper's)": "noble:rank_ratio=0.0625",
        }
        trials.append(Compare(part=size, recipe=own, arms=arms, **shared(scale)))
    return trials


@runs("notes/4.2", takes=("5 min of 2 cores", "1 day of one GPU of 24 GB", "8 large GPUs, days"))
def selection(scale: str) -> list[Trial]:
    """Parts of a block by name, and the linears with the highest scores in a short run of the standard model."""
    name = {"demo": "llm-demo", "small": "llm-small", "paper": "llm-base"}[scale]
    own = recipe(name, 150 if scale == "demo" else None)
    base = NOTES.format(ratio=0.0625)
    arms = {
        "standard": "baseline:init=kaiming",
        "all layers": base,
        "queries and feed-forwards": f"{base},select=query/feed_forward",
        "queries": f"{base},select=query",
        "most important 30 %": base,  # see `_important`
    }
    return [Compare(part="selection", recipe=own, arms=arms, before=_important, **shared(scale))]


def _important(trial: Any, home: Path) -> dict[str, str]:
    """Train the standard model for a tenth of the steps, and name the linears that score highest on held-out text."""
    from nlr_lab.compare.trial import shortened
    from nlr_lab.evaluation.losses import open_saved
    from nlr_lab.runtime.environment import choose_device
    from nlr_lab.runtime.storage import read_json, write_json
    from nlr_lab.training.run import run_training
    from nonlinear_lowrank.analysis import layer_importance, select_layers

    row, folder, file = "most important 30 %", home / "importance", home / "importance.json"
    if not file.is_file():
        train = shortened(trial.recipe.train, max(1, trial.recipe.train.steps // 10))
        own = replace(trial.recipe, arm=trial.arms["standard"], train=train)
        prepared = own.task.prepare(progress=False)
        run_training(own, folder, resume=True, prepared=prepared, quiet=True)
        model = open_saved(own.task, prepared, folder / "model").to(choose_device(""))
        rows = [prepared.valid[index] for index in range(min(32, len(prepared.valid)))]
        batches = [{name: each.to(model.device) for name, each in prepared.collate([row]).items()} for row in rows]
        write_json(file, {"linears": select_layers(layer_importance(model, batches))})
    names = "|".join(map(re.escape, read_json(file, "delete it: it is recreated", linears=list)["linears"]))
    return {row: f"{trial.arms[row]},include={names}"}


@runs("notes/5.3", takes=("seconds", "seconds", "seconds"))
def cost(scale: str) -> list[Trial]:
    """Exact counts of the branches."""
    own = recipe({"demo": "llm-demo", "small": "llm-small", "paper": "llm-base"}[scale])

    def count(folder: Path) -> Cells:
        from nlr_lab.training.arms import Arm
        from nonlinear_lowrank.analysis.cost import model_cost

        found: Cells = {}
        for ratio in (0.25, 0.0625):
            model = Arm.parse(NOTES.format(ratio=ratio)).apply(own.task.build_on_meta())
            counted = model_cost(model, own.task.sequence_length)
            ratios = {"params_plus_pct": counted.parameter_ratio, "flops_plus_pct": counted.flop_ratio}
            found[f"rank ratio {ratio}"] = {name: {"value": 100 * (each - 1)} for name, each in ratios.items()}
        return found

    return [Measure(part="cost", function=count)]


@runs("notes/glue", takes=("12 min of 2 cores", "1 day of 2 cores", "one GPU of 24 GB, a week"))
def glue(scale: str) -> list[Trial]:
    """Full tuning, LoRA, and a NOBLE branch beside every linear with LoRA's rank."""
    from .sine import glue_trials

    arms = {
        "roberta": f"full:lr={at(scale, '1e-4', '1e-4', '1e-5')}",
        "lora": "lora:r=8",
        "noble": "noble-adapter:r=8,lr=3e-4",
    }
    tasks = {"MNLI": "mnli", "QQP": "qqp", "QNLI": "qnli", "SST-2": "sst2"}
    return glue_trials(scale, arms, tasks, "FacebookAI/roberta-large")


@runs("notes/latency", takes=("2 min of 2 cores", "a minute of one GPU", "a minute of one GPU"))
def latency(scale: str) -> list[Trial]:
    """Decoding by `nlr bench decode`, NOBLE as in the notes."""
    from nlr_lab.bench.settings import DecodeBenchConfig

    sizes: dict[str, Any] = {
        "demo": {"width": 256, "hidden": 688, "layers": 4, "ranks": (16,)},
        "small": {"width": 768, "hidden": 2048, "layers": 12, "heads": 12, "ranks": (48,)},
        "paper": {"width": 1024, "hidden": 2752, "layers": 24, "heads": 16, "ranks": (64,), "vocab_size": 50257},
    }[scale]
    branch: dict[str, Any] = {"activation": "silu", "depth": 1, "fusion": "gated"}

    def measure(folder: Path) -> Cells:
        import torch

        from nlr_lab.bench.decode import bench_decode

        if torch.cuda.is_available() and scale != "demo":
            branch.update(device="cuda", clock="cuda")
        config = DecodeBenchConfig(**sizes, **branch, optimized=False, rounds=20)
        found: Cells = {}
        for row in bench_decode(config).rows:
            if row.step is not None and row.seconds is not None and row.over_seconds is not None:
                ratio = {"value": 1 / row.step.median, "low": 1 / row.step.high, "high": 1 / row.step.low}
                found[row.panel.split(", ")[1]] = {
                    "standard_ms": {"value": 1000 * row.over_seconds},
                    "noble_ms": {"value": 1000 * row.seconds},
                    "speed_ratio": ratio | {"n": row.step.n},
                }
        return found

    return [Measure(part="decode", function=measure)]
