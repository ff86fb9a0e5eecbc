"""NoRA's tables (nora.txt). Demos: digits by a tiny ViT; docstrings by SmolLM2, where it is installed.

The new head is trained in every arm, as in the paper. Figures 4 to 7 show what Table 1 trained (`nora_figures`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nonlinear_lowrank.validation import install_hint

from .measures import cell
from .noble import recipe, shared
from .nora_figures import adaptability, class_maps, convergence, features
from .sine import AT_ONCE, ELSEWHERE, settings
from .table import Absent, Cells, Compare, Measure, Trial, at, runs

# --- images -------------------------------------------------------------------------------------------------------

DATA = {"CIFAR-100": "vit-cifar100", "CIFAR-10": "vit-cifar10"}  # the first is that of parameter counts
_OWN = "nlr_lab.reproduce.nora_arms"
_VIT = ("3 min of 2 cores", "3 h of one GPU of 24 GB", "one GPU of 16 GB, a day")


def images(
    scale: str,
    arms: Mapping[str, str],
    columns: tuple[str, ...] = tuple(DATA),
    after: Callable[..., Cells] | None = None,
    dtype: str = "float32",
) -> list[Trial]:
    """Compare arms on CIFAR, a tenth of it at the small scale, and in a demo on digits.

    `after` shows something else than scores, and is called with the data's name first (see `Compare.after`); `dtype` is
    that of the pretrained weights.
    """
    known = shared(scale) | ({"tune_lr": (3e-4, 1e-3, 3e-3)} if scale == "small" else {})
    demo = scale == "demo"
    recipes = {name: recipe(DATA[name]) for name in columns} if not demo else {"digits": recipe("vit-digits")}
    trials: list[Trial] = []
    for name, own in recipes.items():
        if scale == "small":
            task = replace(own.task, images=replace(own.task.images, train_rows=5000, test_rows=2000, held_out=0.1))
            own = replace(own, task=task, train=replace(own.train, epochs=10))
        own = in_type(own, dtype)
        column = ("embedded digits" if demo else name) if after is None else ""
        shown = None if after is None else partial(after, name)
        part = name if dtype == "float32" else f"{name}-{dtype}"
        trials.append(Compare(part=part, recipe=own, arms=arms, column=column, after=shown, **known))
    return [*trials, Absent(columns=columns, why=ELSEWHERE)] if demo and after is None else trials


def in_type(own: Any, dtype: str) -> Any:
    """Return a recipe whose pretrained weights are read in a type."""
    return replace(own, task=replace(own.task, model=replace(own.task.model, dtype=dtype)))


def in_4_bits(trials: list[Trial]) -> list[Trial]:
    """Return trials on weights in 4 bits; without bitsandbytes, that their rows are absent."""
    if find_spec("bitsandbytes") is not None:
        return trials
    rows = dict.fromkeys(row for trial in trials if isinstance(trial, Compare) for row in trial.arms)
    return [Absent(rows=tuple(rows), why=f"weights in 4 bits need bitsandbytes: {install_hint('quantized')}")]


def _nora(scale: str, settings: str = "r=2,groups=8") -> str:
    """Return the arm; few numbers that are shifted need a high rate in a demo's few steps."""
    return f"nora:{settings}{at(scale, ',lr=3e-2', '', '')}"


def tuned(scale: str, after: Callable[..., Cells] | None = None, columns: tuple[str, ...] = tuple(DATA)) -> list[Trial]:
    """All ways to tune; learning rates at the paper's scale are those of appendix C.1."""
    lora, both = "lora:r=8,lora_alpha=16", "nora++:r=2,groups=8,lora_r=8,lora_alpha=16"
    arms = {
        "full tuning": f"full{at(scale, ':lr=1e-3', '', '')}",
        "VPT": f"{_OWN}:prompts{at(scale, '', '', ',lr=5e-3')}",
        "Adapter": f"{_OWN}:bottlenecks",
        "LoRA": lora,
        "DoRA": f"dora:r=8,lora_alpha=16{at(scale, '', '', ',lr=5e-4')}",
        "NoRA": _nora(scale),
        "NoRA++": both,
        "control, head alone": "head",
    }
    trials = images(scale, arms, columns, after)
    if after is not None:
        return trials
    quantized = {"QLoRA": lora, "control, NoRA++ in 4 bits": both}
    return trials + in_4_bits(images(scale, quantized, columns, dtype="nf4"))


runs("nora/table1", takes=_VIT)(tuned)
_SHARED: dict[str, Any] = {"home": "nora/table1", "takes": _VIT}
runs("nora/fig4", **_SHARED)(partial(tuned, after=adaptability, columns=("CIFAR-100",)))
runs("nora/fig6", **_SHARED)(partial(tuned, after=features, columns=("CIFAR-100",)))
runs("nora/fig7", **_SHARED)(partial(tuned, after=class_maps, columns=("CIFAR-100",)))


@runs("nora/fig5", **_SHARED)
def epochs(scale: str) -> list[Trial]:
    """Epochs until a run is near its best."""
    absent = Absent(columns=tuple(f"epochs, {name}" for name in DATA), why=ELSEWHERE)
    return [*tuned(scale, convergence), *([absent] if scale == "demo" else [])]


@runs("nora/fig2", takes=_VIT)
def groups(scale: str) -> list[Trial]:
    """Groups of channels, at rank 3."""
    return images(scale, {f"groups={g}": _nora(scale, f"r=3,groups={g}") for g in (8, 16, 32, 64)})


@runs("nora/fig3", takes=_VIT)
def ranks(scale: str) -> list[Trial]:
    """Ranks, at 8 groups."""
    return images(scale, {f"r={r}": _nora(scale, f"r={r},groups=8") for r in (1, 2, 3, 4)}, ("CIFAR-100",))


@runs("nora/table3", takes=_VIT)
def activations(scale: str) -> list[Trial]:
    """Other activations in GELU's place."""
    arms = {row: f"{_OWN}:activations,kind={row.lower()}" for row in ("PReLU", "AReLU", "ELU")}
    return images(scale, arms | {"NoRA": _nora(scale), "control, head alone": "head"}, ("CIFAR-100",))


@runs("nora/table4", takes=_VIT)
def tunings(scale: str) -> list[Trial]:
    """Trained parts of rational functions."""
    kinds = {"rational tuning": "rational", "zero-init tuning": "zero_init", "GELU-init tuning": "gelu_init"}
    kinds |= {"const tuning (a0, b0)": "constants", "NoRA": "low_rank", "control, as released": "shared"}
    arms = {row: _nora(scale, f"r=2,groups=8,tuning={kind}") for row, kind in kinds.items()}
    return images(scale, arms, ("CIFAR-100",))


@runs("nora/table5", takes=_VIT)
def sides(scale: str) -> list[Trial]:
    """One side of the fraction alone."""
    only = {"denominator alone": ",denominator_only=true", "numerator alone": ",numerator_only=true", "both": ""}
    return images(scale, {row: _nora(scale, f"r=2,groups=8{more}") for row, more in only.items()})


def _cost(scale: str, folder: Path) -> Cells:
    """Count and time forward passes of ViT-Tiny; neither depends on its weights, which are drawn."""
    import statistics

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForImageClassification

    from nlr_lab.bench.timing import interleaved_step_times
    from nlr_lab.runtime.environment import choose_device
    from nlr_lab.training.arms import Arm

    task, device = recipe("vit-cifar100").task, choose_device("cpu" if scale == "demo" else "")
    config = task.model.config()
    batch = torch.randn(at(scale, 4, 64, 256), 3, config.image_size, config.image_size, device=device)
    tokens = (config.image_size // config.patch_size) ** 2 + 1  # patches and the class token
    found, models = Cells(), dict[str, Any]()
    for row, arm in {"LoRA": "lora:r=4,target_modules=q_proj/v_proj", "NoRA": "nora:r=2,groups=8"}.items():
        base = AutoModelForImageClassification.from_config(config)
        model: Any = Arm.parse(arm).apply(base, task.adapter_setup(base)).to(device).eval()
        models[row] = model
        trained = [each for name, each in model.named_parameters() if each.requires_grad and "classifier" not in name]
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(batch[:1])
        own = tokens * model.base_model.report().flops_added if row == "NoRA" else 0
        sizes = {"trained_body_k": sum(each.numel() for each in trained) / 1e3}
        sizes["gflops"] = (counter.get_total_flops() + own) / 1e9
        found[row] = {name: cell(value) for name, value in sizes.items()}

    def forward(model: Any) -> None:
        with torch.inference_mode():
            model(batch).logits.sum().item()  # waits for a GPU

    steppers = {row: partial(forward, model) for row, model in models.items()}
    for row, times in interleaved_step_times(steppers, at(scale, 12, 30, 30), clock="wall").items():
        found[row]["ms_per_sample"] = cell(1e3 * statistics.median(times) / len(batch), n=len(times))
    return found


@runs("nora/table6", takes=("1 min of 2 cores", "1 min of a GPU", "1 min of a GPU"))
def cost(scale: str) -> list[Trial]:
    """LoRA and NoRA in inference, not merged."""
    note = "Ours are of ViT-Tiny with drawn weights on this machine, adapters not merged, in float32 and eager mode."
    return [Measure(part="cost", function=partial(_cost, scale), note=note)]


# --- instructions -------------------------------------------------------------------------------------------------

SETS = {"Alpaca": "tatsu-lab/alpaca", "MathInstruct": "TIGER-Lab/MathInstruct", "OpenOrca": "Open-Orca/OpenOrca"}
SETS |= {"ShareGPT-Hyper": "totally-not-an-llm/sharegpt-hyperfiltered-3k"}
SETS |= {"UltraChat": "HuggingFaceH4/ultrachat_200k@train_sft"}
CATEGORIES = {"STEM": "stem", "Humanities": "humanities", "Social sciences": "social_sciences", "Other": "other"}


@runs(
    "nora/table2",
    takes=("3 min of 2 cores, SmolLM2", "a day of one GPU of 24 GB, SmolLM2", "one GPU of 80 GB, 2 days"),
)
def instructions(scale: str) -> list[Trial]:
    """LoRA and NoRA++ on a thousand rows of each set, then MMLU."""
    arms = {"LoRA": "lora:r=8", "NoRA++": "nora++:r=2,groups=8,lora_r=8"}
    known = shared(scale, timed=False) | {"tune_lr": ()}
    if scale == "demo":
        own = recipe("instruct-smollm2")
        task = replace(own.task, instructions=replace(own.task.instructions, rows=80, max_length=128))
        own = replace(own, task=task, train=replace(own.train, eval_every=9))
        rows = {f"embedded docstrings, {row}": arm for row, arm in arms.items()}
        return [Compare(part="docstrings", recipe=own, arms=rows, column="answer loss", **known), Absent(why=ELSEWHERE)]
    tasks = {column: f"mmlu_{category}" for column, category in CATEGORIES.items()}
    trials: list[Trial] = []
    for name, source in SETS.items():
        own = recipe("llama3-alpaca" if scale == "paper" else "instruct-smollm2")
        taken: dict[str, Any] = {"source": source, "rows": 1000, "max_length": at(scale, 0, 512, 1024)}
        own = replace(own, task=replace(own.task, instructions=replace(own.task.instructions, **taken)))
        named = {f"{name}, {row}": arm for row, arm in arms.items()}
        scored = {"tasks": tasks, "shots": 5, **known}
        trials.append(Compare(part=name, recipe=own, arms=named, **scored))
        if name == "Alpaca":  # Table 8 names a quantization method, and no bits
            named = {f"control, {row} in 4 bits": arm for row, arm in named.items()}
            trials += in_4_bits([Compare(part=f"{name}-nf4", recipe=in_type(own, "nf4"), arms=named, **scored)])
    return trials


# --- settings -----------------------------------------------------------------------------------------------------


@runs("nora/table7", takes=AT_ONCE)
def image_settings(scale: str) -> list[Trial]:
    """The recipe vit-cifar100's."""
    own = recipe("vit-cifar100")
    train, size = own.train, own.task.images.size or own.task.model.config().image_size
    shown = {"input resolution": size, "epochs": train.epochs, "batch size": train.batch_size}
    shown |= {"learning rate": train.lr, "decay": train.schedule, "optimizer": train.optimizer}
    shown |= {"weight decay": train.weight_decay, "mixed precision": train.bf16}
    return settings({row: {"value": value} for row, value in shown.items()})


@runs("nora/table8", takes=AT_ONCE)
def instruction_settings(scale: str) -> list[Trial]:
    """The recipe llama3-alpaca's."""
    task = recipe("llama3-alpaca").task
    data = task.instructions
    shown = {"cutoff length": data.max_length, "max samples": data.rows, "template": data.template}
    shown |= {"quantization method": f"none, {task.model.dtype}"}
    generation = ("max new tokens", "temperature", "top-p")
    trainer = ("flash attention", "per-device eval batch size", "preprocessing workers", "stage", "trust remote code")
    return [
        *settings({row: {"value": value} for row, value in shown.items()}),
        Absent(rows=generation, why="MMLU is scored by likelihoods: nothing is generated"),
        Absent(rows=trainer, why="settings of the source's trainer, which the recipe does not have"),
    ]
