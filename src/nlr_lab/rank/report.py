"""`nlr inspect --spectrum` (docs/theory.md): ranks of every matrix of a checkpoint, and a first guess of omega.

Only safetensors are read, each tensor when it is asked for.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peft import PeftConfig
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from torch import Tensor

from nlr_lab.fields.fit import SETTINGS as FIT
from nlr_lab.fields.problem import FieldMethod
from nlr_lab.runtime.tables import fold_numbers, number_table, render_table
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.loading import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_adapter, load_model
from nonlinear_lowrank.hub.registration import FIELD, TYPE_PREFIX
from nonlinear_lowrank.hub.storage import read_json, tensor_shapes, weight_files
from nonlinear_lowrank.methods.sine.layer import SineLowRankConfig, SineLowRankLinear
from nonlinear_lowrank.methods.sine.op import lowrank_weight
from nonlinear_lowrank.validation import check_integer, one_line

from .measures import EXACT, OmegaGuess, check_tolerance, curve_places, guess_omega, product_spectrum, spectrum

TOLERANCES = (0.1, 0.01)

_LARGEST_GUESS = 2**26  # entries: beyond, a bisection would take minutes a shape
_UP, _DOWN = "sine_up", "sine_down"
_TRANSPOSED = {"gpt2", "openai-gpt", "imagegpt"}  # their linears are Conv1D: (n, m)
_TRANSPOSED_EXPERTS = {"gpt_oss", "llama4", "llama4_text"}  # (E, n, m), others (E, m, n)
_EXPERTS = re.compile(r"(^|\.)(experts|(input|output)_linear)(\.|_|$)")  # tensors with a matrix for each expert
_TABLES = re.compile(r"(embed|wte|wpe|lm_head|word_embeddings|position)")  # one row a token: never factored
_FACTORS = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))  # ends of peft's names
_BRANCHES = re.compile(r"(^|\.)(noble|nlr|lora|query)_\w+$")


@dataclass(frozen=True, kw_only=True)
class LayerRank:
    """One matrix (m, n) of a checkpoint."""

    name: str
    """Name of the layer as the file has it, or of the tensor."""
    kind: str
    """"dense", "table" (embeddings, output heads), "kernel" (a convolution's), "branch" (a tensor of a method), "sine",
    "low-rank", "LoRA", ..."""
    shape: tuple[int, int]
    rank: int | None = None
    omega: float | None = None
    norm: float
    """The largest singular value."""
    stable_rank: float
    ranks: dict[str, int]
    """By tolerance. From a sketch a lower bound."""
    exact: bool
    """False: a sketch of the leading singular values."""
    spectrum: list[tuple[int, float]]
    """(i, s_i / s_1) at up to 64 places i from 1."""
    omega_guess: OmegaGuess | None = None
    """For the layer's group."""

    @property
    def group(self) -> tuple[Any, ...]:
        """The same for layers that differ by their number alone."""
        return fold_numbers(self.name), self.kind, self.shape, self.rank, self.omega


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """All matrices of a checkpoint; the suggested omegas are for rank `for_rank` and `init`."""

    checkpoint: str
    for_rank: int
    init: str
    tolerances: tuple[float, ...]
    layers: list[LayerRank]

    def to_json(self) -> str:
        """Return strict JSON."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)


def rank_report(
    checkpoint: Path,
    *,
    for_rank: int = 8,
    init: str = "kaiming_sqrt5",
    tolerances: Sequence[float] = TOLERANCES,
    include: str | None = None,
    omega: float | None = None,
    exact_up_to: int = EXACT,
    device: str = "cpu",
    progress: Callable[[str], None] = lambda line: None,
) -> RankReport:
    """Measure every matrix of a checkpoint, in the natural order of names; memory for one of them at a time.

    `checkpoint` is a model's folder (also one without config.json), an adapter's, or a .safetensors file; the other
    settings are those of `nlr inspect --spectrum`. `progress` is called with a line for each matrix.

    Raises:
        UserError: a setting is out of range, nothing is there, a file is not whole, no matrix is found or matches, or
            a weight is not finite; the message names the tensor.
    """
    check_integer("for_rank", for_rank, minimum=1)
    for tolerance in tolerances:
        check_tolerance(tolerance)
    try:
        wanted = re.compile(include or "")
    except re.error as error:
        raise UserError(f"--include {include!r} is not a regular expression: {error}") from error
    found = [(about, load) for about, load in _matrices(checkpoint, omega) if wanted.search(about["name"])]
    if not found:
        named = f" whose name matches {include!r}" if include else ""
        raise UserError(f"{checkpoint} holds no floating-point tensor of two or more dimensions{named}")
    found.sort(key=lambda each: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", each[0]["name"])])
    layers = []
    for index, (about, load) in enumerate(found, 1):
        progress(f"{index}/{len(found)} {about['name']} {about['shape'][0]} x {about['shape'][1]}")
        layers.append(_measured(about, load(), tolerances, device, exact_up_to))
    guesses = _guesses(layers, for_rank, init, progress)
    layers = [replace(layer, omega_guess=guesses.get(layer.group)) for layer in layers]
    return RankReport(
        checkpoint=str(checkpoint), for_rank=for_rank, init=init, tolerances=tuple(tolerances), layers=layers
    )


def format_ranks(report: RankReport, *, every_layer: bool = False, width: int = 120) -> str:
    """Return a table as text: one row a matrix, or one with medians for those that differ by layer number alone."""
    groups: dict[Any, list[LayerRank]] = {}
    for layer in report.layers:
        groups.setdefault(layer.name if every_layer else layer.group, []).append(layer)
    guess = f"omega, k={report.for_rank}"
    tolerances = [f"rank({tolerance:g})" for tolerance in report.tolerances]
    table = number_table("matrix", "n", "shape", "kind", "stable rank", *tolerances, guess)
    for members in groups.values():
        first, stable = members[0], [layer.stable_rank for layer in members]
        title = first.kind if first.rank is None else f"{first.kind} k={first.rank}"
        ranks = [median([layer.ranks[f"{each:g}"] for layer in members]) for each in report.tolerances]
        more = "" if all(layer.exact for layer in members) else ">="
        table.add_row(
            first.name if len(members) == 1 else fold_numbers(first.name),
            str(len(members)),
            f"{first.shape[0]} x {first.shape[1]}",
            title if first.omega is None or first.kind == "low-rank" else f"{title} omega={first.omega:g}",
            f"{median(stable):.1f}" + (f" ({min(stable):.1f} to {max(stable):.1f})" if len(members) > 1 else ""),
            *(f"{more}{rank:.0f}" for rank in ranks),
            _guess_text(first.omega_guess),
        )
    guessed = [layer.omega_guess for layer in report.layers if layer.omega_guess]
    drawn = f"sin(omega U V), drawn by {report.init}, has the matrix's stable rank; where to begin a sweep"
    notes = {
        "stable rank: |W|_F^2 / |W|_op^2; rank(t): singular values above t times the largest; median (range)": True,
        f"{guess}: {drawn}": bool(guessed),
        "U V: plain low rank has that stable rank without a sine": any(each.omega is None for each in guessed),
        ">: the matrix has as much as independent entries; the omega is where the sine nearly has, too": any(
            each.saturated for each in guessed
        ),
        ">=: of the leading singular values, by a randomised sketch": not all(layer.exact for layer in report.layers),
    }
    return "\n".join([render_table(table, width), *(note for note, holds in notes.items() if holds)])


def _guess_text(guess: OmegaGuess | None) -> str:
    if guess is None:
        return "-"
    return "U V" if guess.omega is None else f"{'> ' if guess.saturated else ''}{guess.omega:.3g}"


def _guesses(
    layers: Sequence[LayerRank], rank: int, init: str, progress: Callable[[str], None]
) -> dict[Any, OmegaGuess]:
    """Return one for each group of dense matrices that would get smaller at that rank."""
    groups: dict[Any, list[LayerRank]] = {}
    for layer in layers:
        m, n = layer.shape
        if layer.kind == "dense" and rank * (m + n) < m * n <= _LARGEST_GUESS and layer.norm:
            groups.setdefault(layer.group, []).append(layer)
    guesses = {}
    for index, (group, members) in enumerate(groups.items(), 1):
        progress(f"omega {index}/{len(groups)} {group[0]}")
        target = median([layer.stable_rank for layer in members])
        guesses[group] = guess_omega(members[0].shape, rank, target, init=init)
    return guesses


_Product = tuple[Tensor, Tensor, float]  # up (m, k), down (k, n) and a scale
_Load = Callable[[], Tensor | _Product]  # the matrix (m, n), or what makes it
_Matrices = Iterator[tuple[dict[str, Any], _Load]]  # the first five fields of `LayerRank` each


def _measured(
    about: dict[str, Any], loaded: Tensor | _Product, tolerances: Sequence[float], device: str, exact_up_to: int
) -> LayerRank:
    try:
        if isinstance(loaded, tuple):
            found = product_spectrum(loaded[0].to(device), loaded[1].to(device), loaded[2])
        else:
            found = spectrum(loaded.to(device), exact_up_to=exact_up_to)
    except UserError as error:
        raise UserError(f"{about['name']}: {error}") from error
    zero = found.norm == 0  # an adapter's delta at its start
    places = curve_places(len(found.values))
    normalised = [] if zero else found.normalised[torch.tensor(places) - 1].tolist()
    return LayerRank(
        **about,
        norm=found.norm,
        stable_rank=0.0 if zero else found.stable_rank,
        ranks={f"{tolerance:g}": found.rank(tolerance) for tolerance in tolerances},
        exact=found.exact,
        spectrum=list(zip(places, normalised, strict=False)),
    )


class _Tensors:
    """Names, shapes and contents of safetensors files; packed integers are skipped."""

    def __init__(self, *files: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}  # open: to open one again for each tensor reads all names each time
        for file in files:
            shapes, opened = tensor_shapes(file), safe_open(file, framework="pt")
            for name, shape in shapes.items():
                if opened.get_slice(name).get_dtype().startswith(("F", "BF")):
                    self.shapes[name], self._files[name] = shape, opened

    def get(self, name: str, expert: int | None = None) -> Tensor:
        opened = self._files[name]
        return opened.get_tensor(name) if expert is None else opened.get_slice(name)[expert]

    def pairs(self, down_end: str, up_end: str) -> Iterator[tuple[str, str, str, tuple[int, int], int]]:
        """Give the layer, the names of up and down, (m, n) and k of factors, which are then not listed again."""
        for down in [name for name in self.shapes if name.endswith(down_end)]:
            layer = down.removesuffix(down_end)
            if layer + up_end in self.shapes and len(self.shapes[down]) == 2:
                (rank, n), (m, _) = self.shapes.pop(down), self.shapes.pop(layer + up_end)
                yield layer, layer + up_end, down, (m, n), rank


def _matrices(path: Path, omega: float | None) -> _Matrices:
    config: dict[str, Any] = {}
    if not path.exists():
        raise UserError(f"no such file or folder: {path}")
    if is_adapter(path):
        if not (path / ADAPTER_WEIGHTS).is_file():
            raise UserError(f"{path} has no {ADAPTER_WEIGHTS}; pickled weights are never read")
        tensors = _Tensors(path / ADAPTER_WEIGHTS)
        yield from _deltas(path, tensors)
    else:
        if path.is_file() and path.suffix != ".safetensors":
            raise UserError(f"{path} is not a .safetensors file; name one, or the folder of a model or an adapter")
        tensors = _Tensors(path) if path.is_file() else _Tensors(*weight_files(path))
        if (path / "config.json").is_file():
            config = read_json(path / "config.json")
        yield from _sines(path, tensors, config, omega)
    model_type = str(config.get("model_type", "")).removeprefix(TYPE_PREFIX)
    for name, shape in tensors.shapes.items():
        if len(shape) < 2 or name.endswith("bias"):
            continue
        layer, stacked = name.removesuffix(".weight"), len(shape) == 3 and _EXPERTS.search(name) is not None
        m, n = shape[1:] if stacked else (shape[0], math.prod(shape[1:]))
        if min(m, n) < 2:
            continue
        conv1d = model_type in _TRANSPOSED and re.search(r"\.c_(attn|proj|fc)$", layer) is not None
        flip = model_type in _TRANSPOSED_EXPERTS if stacked else conv1d
        kind = "table" if _TABLES.search(layer) else "branch" if _BRANCHES.search(layer) else "dense"
        kind = "kernel" if len(shape) > 2 and not stacked else kind
        about = {"kind": kind, "shape": (n, m) if flip else (m, n)}
        for expert in range(shape[0]) if stacked else (None,):
            own = layer if expert is None else f"{layer}.{expert}"
            yield {"name": own, **about}, partial(_flat, tensors, name, flip, expert)


def _flat(tensors: _Tensors, name: str, flip: bool, expert: int | None) -> Tensor:
    matrix = tensors.get(name, expert).flatten(1)
    return matrix.T if flip else matrix


def _made(
    get: Callable[[Any], Tensor], up: Any, down: Any, activation: Any, omega: float, gain: float
) -> Tensor | _Product:
    """Return the weight that factors make; of plain low rank the factors."""
    factors = get(up), get(down)
    return (*factors, omega / gain) if activation == "identity" else lowrank_weight(*factors, activation, omega, gain)


def _sines(path: Path, tensors: _Tensors, config: Mapping[str, Any], omega: float | None) -> _Matrices:
    """Give the sine and low-rank layers of a model or a field."""
    try:
        entries = [each for each in config.get(FIELD) or [] if each["method"] == SineLowRankConfig.method]
        configs = [SineLowRankConfig(**entry["config"]) for entry in entries]
    except (TypeError, KeyError) as error:
        raise UserError(f"config.json lists no methods that can be read in {FIELD!r}: {one_line(error)}") from error
    pairs = list(tensors.pairs(_DOWN, _UP))
    if any(each != configs[0] for each in configs):  # by names that the file may lack: the model itself says
        for name, layer in load_model(path).named_modules():
            if isinstance(layer, SineLowRankLinear):
                factors, shape = (layer.sine_up, layer.sine_down), (layer.out_features, layer.in_features)
                yield _sine(name, shape, layer.sine_config, partial(_made, Tensor.detach, *factors))
        return
    fitted = None if configs else _fitted(path)
    for name, up, down, shape, rank in pairs:
        layer = name.removesuffix(".")
        if not configs and fitted is None and omega is None:
            raise UserError(f"{layer} holds sine factors, and no config.json says at which omega; give --omega")
        own = SineLowRankConfig(rank=rank, omega=omega) if fitted is None else fitted(shape[1])
        yield _sine(layer, shape, configs[0] if configs else own, partial(_made, tensors.get, up, down))


def _sine(
    name: str, shape: tuple[int, int], config: SineLowRankConfig, made: Callable[..., Tensor | _Product]
) -> tuple[dict[str, Any], _Load]:
    omega, kind = float(config.omega), config.activation  # type: ignore[arg-type]  # a number by now
    about = {"name": name, "kind": "low-rank" if kind == "identity" else kind, "shape": shape}
    load = partial(made, kind, omega, config.gain_for(shape[1]))
    return {**about, "rank": config.rank, "omega": omega}, load


def _fitted(path: Path) -> Callable[[int], SineLowRankConfig] | None:
    """Return, by the number of inputs, the config of the factored layers of a neural field (coordinate network), given
    as the fit's `model`, a checkpoint or their file; None for other models."""
    folder = (path if path.is_dir() else path.parent).absolute().parent
    fit = (folder.parent if folder.name == "checkpoints" else folder) / FIT
    if not fit.is_file():
        return None
    try:
        settings = read_json(fit)["settings"]
        problem, method = settings["problem"], FieldMethod(**settings["method"])
        field = problem.get("field", {"activation": ""})  # present where the fit recorded its problem's settings
        if method.kind == "dense" or (method.kind == "sine" and method.omega is None and "field" not in problem):
            return None
        table = "nerf" if "rays" in problem else "occupancy"  # for an omega that was left open, as the problems do
        config = method.resolved(table).factors_config()
        if config.activation != "sine" or field["activation"] != "siren":
            return lambda n: config
        frequency = float(field["frequency"])  # the activation multiplies by it, and the weight has it in its gain
        return lambda n: replace(config, gain=config.gain_for(n) * frequency)
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{fit} does not say what was fitted: {one_line(error)}") from error


def _deltas(path: Path, tensors: _Tensors) -> _Matrices:
    """Give the deltas of LoRA and sine-LoRA."""
    try:
        config: Any = PeftConfig.from_pretrained(str(path))
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise UserError(f"{path / ADAPTER_CONFIG} describes no adapter known here: {one_line(error)[:200]}") from error
    kind = getattr(config.peft_type, "value", str(config.peft_type))
    for ends in _FACTORS if kind in ("LORA", "NLR_SINE_LORA") else ():
        for name, up, down, shape, rank in tensors.pairs(*ends):
            layer = name.removeprefix("base_model.model.")
            about, made = {"name": layer, "shape": shape, "rank": rank}, partial(_made, tensors.get, up, down)
            patterns: dict[str, float] = config.alpha_pattern or {}
            alpha: float = patterns.get(get_pattern_key(list(patterns), layer), config.lora_alpha)
            scale = alpha / rank ** (0.5 if config.use_rslora else 1)
            if kind == "LORA":
                yield {**about, "kind": "LoRA"}, partial(made, "identity", scale, 1.0)
                continue
            own, width = config.resolve(layer), shape[0] if "embedding" in ends[0] else shape[1]
            gain = (width**0.5 if own.gain is None else own.gain) / scale
            yield {**about, "kind": "sine-LoRA", "omega": own.omega}, partial(made, "sine", own.omega, gain)
