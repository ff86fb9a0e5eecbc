"""`nlr inspect MODEL`: what a model costs, layer by layer, without building it; --rank: the rank of its weights."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional

from nlr_lab.recipes import RECIPES, check_name, recipes_of
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .checkpoint import check_parent, find_model
from .options import parse, table_width


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Parameters, FLOPs and saved activations by layer, without building the model.

    Singular values of a checkpoint's matrices, and where to begin with omega: nlr inspect --rank CHECKPOINT.

    Figures 2 and 3 of the sine low-rank paper: nlr inspect --rank-figures OUT. Both have a --help of their own.
    """

    model: Positional[str]
    """A recipe's name, a model folder, the run folder of `nlr train`, or a config.json."""
    rank: int | None = None
    """Add NOBLE branches of this rank; default: the model as it is, a recipe with its own arm."""
    arm: str | None = None
    """Any other change, as in `nlr train`: baseline, noble:rank=64,activation=gelu, module:function."""
    sequence_length: int | None = None
    """Tokens of a sequence; default: the recipe's, or the model's positions up to 1024."""
    batch_size: int = 1
    """Sequences of the saved activations."""
    bf16: bool | None = None
    """Count saved activations as under bfloat16 autocast; default: as the recipe trains."""
    every_layer: FlagCreatePairsOff[bool] = False
    """One row a module; default: repeated layers are folded into one row with their sum."""
    json: FlagCreatePairsOff[bool] = False
    """Print JSON instead of the table, with a row for every module."""


def run_inspect(arguments: list[str]) -> None:
    """Print a table: of costs, or with --rank of ranks."""
    if (rest := _take(arguments, "--rank-figures")) is not None:
        _run_figures(rest)
    elif (rest := _take_checkpoint(arguments)) is not None:
        _run_rank(rest)
    else:
        _print_cost(arguments)


def _print_cost(arguments: list[str]) -> None:
    options = parse(InspectOptions, arguments, command="inspect")
    if options.rank is not None and options.arm is not None:
        raise UserError("--rank is short for --arm noble:rank=...; give one of them")
    path = Path(options.model)
    if options.model not in RECIPES and not path.exists():
        if "/" in options.model or path.suffix:
            raise UserError(f"no such file or folder: {options.model}")
        check_name(options.model)
    if options.model in recipes_of("fit"):
        raise UserError(f"{options.model} fits a field, whose size nlr fit and nlr compare print; inspect takes models")

    from nlr_lab.plan.inspect import format_cost, inspect_model
    from nlr_lab.tasks.task import AdapterSetup
    from nlr_lab.training.arms import Arm

    chosen = options.arm if options.rank is None else f"noble:rank={options.rank}"
    arm = None if chosen is None else Arm.parse(chosen)
    length, bf16 = options.sequence_length, options.bf16
    if options.model in RECIPES:
        from nlr_lab.recipes import get_recipe

        recipe = get_recipe(options.model)
        model: Any = recipe.task.build_on_meta()
        setup = recipe.task.adapter_setup(model)
        arm = recipe.arm if arm is None else arm
        length = recipe.task.sequence_length if length is None else length
        bf16 = recipe.train.bf16 if bf16 is None else bf16
    else:
        model, setup = _from_config(path), AdapterSetup()
    if arm is not None:
        model = arm.apply(model, setup)
    if length is None:
        length = min(getattr(model.config, "max_position_embeddings", None) or 1024, 1024)
    cost = inspect_model(model, length, options.batch_size, bf16=bool(bf16))
    if options.json:
        print(cost.to_json())
    else:
        print(format_cost(cost, every_layer=options.every_layer, width=table_width()))


def _take(arguments: list[str], option: str) -> list[str] | None:
    """Return the arguments without an option, and its value first; None where it is not there."""
    for index, argument in enumerate(arguments):
        if argument == option:
            return [*arguments[:index], *arguments[index + 1 :]]
        if argument.startswith(f"{option}="):
            return [argument.removeprefix(f"{option}="), *arguments[:index], *arguments[index + 1 :]]
    return None


def _take_checkpoint(arguments: list[str]) -> list[str] | None:
    """Return the arguments of `--rank CHECKPOINT`; None for `--rank 64`, NOBLE branches of that rank."""
    index = next((i for i, each in enumerate(arguments) if re.match(r"--rank(=|$)", each)), None)
    if index is None:
        return None
    name, equals, value = arguments[index].partition("=")
    given = value if equals else next(iter(arguments[index + 1 :]), "")
    # A folder may have a number for a name: it is meant where no model is named beside it.
    alone = not equals and len(arguments) == 2 and Path(given).exists()
    return None if re.fullmatch(r"-?\d+", given) and not alone else _take(arguments, name)


def _from_config(path: Path) -> Any:
    """Return the model on meta that a config.json, or the one in a folder, describes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from nlr_lab.plan.inspect import build_on_meta
    from nonlinear_lowrank.hub.storage import read_json

    file = find_model(str(path)) / "config.json" if path.is_dir() else path
    content = read_json(file)
    model_type = content.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{file} is not a model config: it has no model_type")
    if model_type not in CONFIG_MAPPING:
        raise UserError(f"{file}: this transformers version does not know model_type {model_type!r}")
    try:
        return build_on_meta(CONFIG_MAPPING[model_type].from_dict(content))
    except UserError:
        raise
    except Exception as error:  # every config class checks its fields in its own way
        raise UserError(f"{file} describes no model that can be built: {type(error).__name__}: {error}") from error


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


def _run_rank(arguments: list[str]) -> None:
    """Print the table of a checkpoint."""
    options = parse(RankOptions, arguments, command="inspect --rank")
    path = _checkpoint(options.checkpoint)
    if options.plot is not None and Path(options.plot).suffix != ".png":
        raise UserError(f"--plot must end in .png, got {options.plot}")
    check_parent(options.plot, "--plot")

    from nlr_lab.rank.report import format_ranks, rank_report
    from nlr_lab.runtime.environment import choose_device

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
        from nlr_lab.rank.figures import plot_layer_spectra

        plot_layer_spectra(Path(options.plot), report.layers, title=path.name)
    if options.json:
        print(report.to_json())
    else:
        print(format_ranks(report, every_layer=options.every_layer, width=table_width()))


def _run_figures(arguments: list[str]) -> None:
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

    from nlr_lab.rank.figures import format_figures, plot_rank_figures, rank_figures
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
