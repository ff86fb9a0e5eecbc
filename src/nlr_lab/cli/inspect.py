"""`nlr inspect MODEL`: a model's cost by layer, without building it; --spectrum: its weights' singular values."""

import difflib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional

from nlr_lab.recipes import RECIPES, check_name, recipes_of
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .checkpoint import check_parent, find_model
from .options import parse, table_width, take_option


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Parameters, FLOPs and saved activations by layer, without building the model.

    Singular values of a checkpoint's matrices, and where to begin with omega: nlr inspect --spectrum CHECKPOINT.

    Figures 2 and 3 of the sine low-rank paper: nlr inspect --rank-figures OUT. Both have a --help of their own.
    """

    model: Positional[str]
    """A recipe's name, a model folder, the run folder of `nlr train`, or a config.json."""
    rank: int | None = None
    """Add NOBLE branches of this rank; none: the model as it is, a recipe with its own arm."""
    arm: str | None = None
    """Any other change, as in `nlr train`: baseline, noble:rank=64,activation=gelu, module:function."""
    sequence_length: int | None = None
    """Tokens of a sequence; none: the recipe's, or the model's positions up to 1024."""
    batch_size: int = 1
    """Sequences of the saved activations."""
    bf16: bool | None = None
    """Count saved activations as under bfloat16 autocast; none: as the recipe trains."""
    every_layer: FlagCreatePairsOff[bool] = False
    """One row per module, in place of one with the sum of repeated layers."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON instead of the table, with a row for every module."""


def run_inspect(arguments: list[str]) -> None:
    """Print a table: of costs, or with --spectrum of ranks."""
    for option, run in (("--rank-figures", _run_figures), ("--spectrum", _run_spectrum)):
        value, rest = take_option(option, arguments)
        if value is not None:
            return run([*filter(None, [value]), *rest])
    return _print_cost(arguments)


def _print_cost(arguments: list[str]) -> None:
    options = parse(InspectOptions, arguments, command="inspect")
    if options.rank is not None and options.arm is not None:
        raise UserError("--rank is short for --arm noble:rank=...; give one of them")
    check_described(options.model)

    from nlr_lab.plan.inspect import check_length, format_cost, inspect_model
    from nlr_lab.training.arms import Arm

    chosen = options.arm if options.rank is None else f"noble:rank={options.rank}"
    arm = None if chosen is None else Arm.parse(chosen)
    length, bf16 = options.sequence_length, options.bf16
    build, setup, recipe = find_on_meta(options.model)
    model = build()
    check_length(model, length)
    if recipe is not None:
        arm = recipe.arm if arm is None else arm
        bf16 = recipe.train.bf16 if bf16 is None else bf16
    if length is None:
        length = sequence_length(model, recipe)
    if arm is not None:
        model = arm.apply(model, setup)
    cost = inspect_model(model, length, options.batch_size, bf16=bool(bf16))
    if options.json:
        print(cost.to_json())
    else:
        print(format_cost(cost, every_layer=options.every_layer, width=table_width()))


def check_described(name: str) -> None:
    """Raise UserError where a name is not a model recipe, file or folder, without slow imports."""
    path = Path(name)
    if name not in RECIPES and not path.exists():
        if "/" in name or path.suffix or not difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.5):
            raise UserError(f"no such file, folder or recipe: {name}")
        check_name(name)
    if name in recipes_of("fit"):
        raise UserError(f"{name} fits a field, whose size nlr fit and nlr compare print; this command takes models")


def find_on_meta(name: str) -> tuple[Callable[[], Any], Any, Any]:
    """Return what builds a model on meta, its task's facts for arms, and its recipe if it has one."""
    if name in RECIPES:
        from nlr_lab.recipes import get_recipe

        recipe = get_recipe(name)
        build = recipe.task.build_on_meta
        return build, recipe.task.adapter_setup(build()), recipe

    from nlr_lab.tasks.task import AdapterSetup

    return partial(_from_config, Path(name)), AdapterSetup(), None


def sequence_length(model: Any, recipe: Any) -> int:
    """Return the tokens of a sequence: the recipe's, or the model's positions up to 1024."""
    if recipe is not None and recipe.task.sequence_length is not None:
        return int(recipe.task.sequence_length)
    return min(getattr(model.config, "max_position_embeddings", None) or 1024, 1024)


def _from_config(path: Path) -> Any:
    """Return the model on meta that a config.json, or the one in a folder, describes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from nlr_lab.plan.inspect import build_on_meta
    from nonlinear_lowrank.hub.storage import read_json

    file = find_model(str(path)) / "config.json" if path.is_dir() else path
    content = read_json(file)
    model_type = str(content.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise UserError(f"{file} has no model_type that this transformers version knows: {model_type!r}")
    try:
        return build_on_meta(CONFIG_MAPPING[model_type].from_dict(content))
    except UserError:
        raise
    except Exception as error:  # every config class checks its fields in its own way
        raise UserError(f"{file} describes a model that cannot be built: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class SpectrumOptions:
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
    """Compute all singular values up to this many per matrix; above, the leading 256 by a sketch."""
    device: str = ""
    """Device that computes the spectra; empty: the GPU, if there is one."""
    every_layer: FlagCreatePairsOff[bool] = False
    """One row per matrix, in place of one with the medians of repeated layers."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON instead of the table, with the spectrum of every matrix."""
    picture: str | None = None
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


def _run_spectrum(arguments: list[str]) -> None:
    options = parse(SpectrumOptions, arguments, command="inspect --spectrum")
    path = Path(options.checkpoint).expanduser()
    if (path / "model").is_dir() and not (path / "config.json").exists():
        path /= "model"  # of a run folder
    if options.picture is not None and Path(options.picture).suffix != ".png":
        raise UserError(f"--picture must end in .png, got {options.picture}")
    check_parent(options.picture, "--picture")

    from nlr_lab.rank.report import format_ranks, rank_report
    from nlr_lab.runtime.environment import choose_device

    names = ("for_rank", "init", "tolerances", "include", "omega", "exact_up_to")
    given = {name: getattr(options, name) for name in names}
    report = rank_report(path, device=str(choose_device(options.device)), progress=_progress, **given)
    _progress("")
    if options.picture is not None:
        from nlr_lab.rank.figures import plot_layer_spectra

        plot_layer_spectra(Path(options.picture), report.layers, title=path.name)
    if options.json:
        print(report.to_json())
    else:
        print(format_ranks(report, every_layer=options.every_layer, width=table_width()))


def _run_figures(arguments: list[str]) -> None:
    options = parse(FigureOptions, arguments, command="inspect --rank-figures")
    check_integer("--seeds", options.seeds, minimum=1)
    folder = Path(options.out)
    record, picture = folder / "rank-figures.json", folder / "rank-figures.png"
    for file in (record, picture):
        if file.exists() and not options.overwrite:
            raise UserError(f"{file} exists already; --overwrite replaces it")

    from nlr_lab.rank.figures import format_figures, plot_rank_figures, rank_figures
    from nlr_lab.runtime.storage import write_json

    folder.mkdir(parents=True, exist_ok=True)
    figures = rank_figures(seeds=options.seeds, init=options.init)
    write_json(record, figures)
    plot_rank_figures(picture, figures)
    print(format_figures(figures))
    print(f"written: {record}, {picture}")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:110]}", end="", file=sys.stderr, flush=True)
