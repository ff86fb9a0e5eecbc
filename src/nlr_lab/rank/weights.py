"""The matrices of a checkpoint, one at a time, without building the model.

| what is named                                    | matrices                                                      |
|--------------------------------------------------|---------------------------------------------------------------|
| a folder with config.json, or one .safetensors   | every tensor of two or more dimensions (a kernel as           |
|                                                  | out x the rest); of a sine or low-rank layer the weight that  |
|                                                  | its factors make                                              |
| the model of a fitted field                      | the same; fit.json beside it says what its factors make       |
| an adapter of peft                               | the deltas of LoRA and sine-LoRA; tensors of other methods    |

Only safetensors are read, each tensor when it is asked for.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from peft import PeftConfig
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from torch import Tensor

CHECKPOINTS = "checkpoints"
from nlr_lab.fields.fit import SETTINGS as FIT
from nlr_lab.fields.problem import FieldMethod
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.loading import ADAPTER_CONFIG
from nonlinear_lowrank.hub.loading import ADAPTER_WEIGHTS
from nonlinear_lowrank.hub.loading import is_adapter
from nonlinear_lowrank.hub.storage import read_json, tensor_shapes, weight_files
from nonlinear_lowrank.hub.loading import load_model
from nonlinear_lowrank.hub.registration import FIELD, TYPE_PREFIX
from nonlinear_lowrank.methods.sine.layer import SineLowRankConfig, SineLowRankLinear
from nonlinear_lowrank.methods.sine.lowrank import lowrank_weight
from nonlinear_lowrank.validation import one_line

from .measures import Spectrum, product_spectrum, spectrum

_UP, _DOWN = "sine_up", "sine_down"
_TRANSPOSED = {"gpt2", "openai-gpt", "imagegpt"}  # their linears are Conv1D: (n, m)
_TABLES = re.compile(r"(embed|wte|wpe|lm_head|word_embeddings|position)")  # one row a token: never factored
_FACTORS = {  # by peft's type: how the names of a down and an up factor end
    "LORA": ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B")),
    "NLR_SINE_LORA": ((".nlr_sine_lora_down", ".nlr_sine_lora_up"),),
}
_BRANCHES = re.compile(r"(^|\.)(noble|nlr|lora|query)_\w+$")


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One matrix of a checkpoint."""

    name: str
    """Name of the layer as the file has it, or of the tensor."""
    kind: str
    """"dense", "table" (embeddings, output heads), "kernel" (a convolution's), "branch" (a tensor of a method), "sine",
    "low-rank", "LoRA", ..."""
    shape: tuple[int, int]
    """(m, n)."""
    rank: int | None = None
    """k of a factored weight."""
    omega: float | None = None
    """Frequency of a factored weight that has one."""
    load: Callable[[], Tensor | tuple[Tensor, Tensor, float]]
    """The matrix (m, n); or up (m, k), down (k, n) and a scale whose product it is."""

    def spectrum(self, *, device: str = "cpu", exact_up_to: int, seed: int = 0) -> Spectrum:
        """Return its singular values.

        Raises:
            UserError: a number is not finite; the message names the tensor.
        """
        loaded = self.load()
        try:
            if isinstance(loaded, tuple):
                return product_spectrum(loaded[0].to(device), loaded[1].to(device), loaded[2])
            return spectrum(loaded.to(device), exact_up_to=exact_up_to, seed=seed)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from error


def checkpoint_weights(path: Path, *, omega: float | None = None) -> list[Weight]:
    """Return the matrices that a checkpoint holds, in the natural order of their names.

    Args:
        path: a model's folder (also one without config.json), an adapter's, or a .safetensors file.
        omega: frequency of sine factors about which no config says anything.

    Raises:
        UserError: nothing there, a file that is not whole, or no matrix in it.
    """
    if not path.exists():
        raise UserError(f"no such file or folder: {path}")
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UserError(f"{path} is no .safetensors file; name one, or the folder of a model or an adapter")
        files, config = [path], {}
    elif is_adapter(path):
        if not (path / ADAPTER_WEIGHTS).is_file():
            raise UserError(f"{path} has no {ADAPTER_WEIGHTS}; pickled weights are never read")
        return _found(_adapter(path, _Tensors([path / ADAPTER_WEIGHTS])), path)
    else:
        files = weight_files(path)
        config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    return _found(_model(path, _Tensors(files), config, omega), path)


class _Tensors:
    """Names, shapes and contents of safetensors files; packed integers are skipped."""

    def __init__(self, files: list[Path]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for file in files:
            tensor_shapes(file)
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # not a dict
                    part = opened.get_slice(name)
                    if part.get_dtype().startswith(("F", "BF")):
                        self.shapes[name], self._files[name] = tuple(part.get_shape()), file

    def get(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as opened:
            return opened.get_tensor(name)

    def take(self, name: str) -> tuple[int, ...]:
        """Return a shape, whose tensor is then not listed again."""
        return self.shapes.pop(name)


def _found(weights: list[Weight], path: Path) -> list[Weight]:
    if not weights:
        raise UserError(f"{path} holds no floating-point tensor of two or more dimensions")
    return sorted(weights, key=lambda weight: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", weight.name)])


def _model(path: Path, tensors: _Tensors, config: Mapping[str, Any], omega: float | None) -> list[Weight]:
    settings = _sine_settings(config)
    ups = [name for name in tensors.shapes if name.rpartition(".")[2] == _UP]
    pairs = [(up, up.removesuffix(_UP) + _DOWN) for up in ups if up.removesuffix(_UP) + _DOWN in tensors.shapes]
    layers = {up: up.removesuffix(_UP).removesuffix(".") for up in ups}
    chosen = {up: _setting(layers[up], settings) for up, _ in pairs} if settings else {}
    fitted = None if settings else _fitted(path)
    if fitted is not None:
        chosen = {up: fitted(tensors.shapes[down][1]) for up, down in pairs}
    if None in chosen.values():
        weights = _built(path, tensors, pairs)
    else:
        weights = [_sine(layers[up], up, down, tensors, chosen.get(up), omega) for up, down in pairs]
    transposed = str(config.get("model_type", "")).removeprefix(TYPE_PREFIX) in _TRANSPOSED
    return weights + _plain(tensors, transposed)


def _built(path: Path, tensors: _Tensors, pairs: list[tuple[str, str]]) -> list[Weight]:
    """Return the sine layers of the model itself: where several settings are listed by names that the file lacks."""
    for name in (name for pair in pairs for name in pair):
        tensors.take(name)
    weights = []
    for name, layer in load_model(path).named_modules():
        if isinstance(layer, SineLowRankLinear):
            config, factors = layer.sine_config, (layer.sine_up.detach(), layer.sine_down.detach())
            weights.append(_weight(name, factors, (layer.out_features, layer.in_features), config))
    return weights


def _plain(tensors: _Tensors, transposed: bool = False) -> list[Weight]:
    weights = []
    for name, shape in tensors.shapes.items():
        m, n = shape[0] if shape else 1, math.prod(shape[1:])
        if len(shape) < 2 or min(m, n) < 2:
            continue
        layer = name.removesuffix(".weight")
        flip = transposed and re.search(r"\.c_(attn|proj|fc)$", layer) is not None
        kind = "table" if _TABLES.search(layer) else "branch" if _BRANCHES.search(layer) else "dense"
        kind = "kernel" if len(shape) > 2 else kind
        load = partial(_matrix, tensors, name, flip)
        weights.append(Weight(name=layer, kind=kind, shape=(n, m) if flip else (m, n), load=load))
    return weights


def _matrix(tensors: _Tensors, name: str, flip: bool) -> Tensor:
    matrix = tensors.get(name).flatten(1)
    return matrix.T if flip else matrix


def _sine(
    layer: str, up_name: str, down_name: str, tensors: _Tensors, config: SineLowRankConfig | None, omega: float | None
) -> Weight:
    (m, rank), (_, n) = tensors.take(up_name), tensors.take(down_name)
    if config is None and omega is None:
        raise UserError(f"{layer} holds sine factors, and no config.json says at which omega; give --omega")
    config = SineLowRankConfig(rank=rank, omega=omega) if config is None else config
    return _weight(layer, (up_name, down_name), (m, n), config, tensors.get)


def _weight(
    name: str, factors: tuple[Any, Any], shape: tuple[int, int], config: SineLowRankConfig, get: Callable = lambda x: x
) -> Weight:
    """Return a factored weight, from its factors or from what `get` gets them by."""
    omega, gain = float(config.omega), config.gain_for(shape[1])  # type: ignore[arg-type]
    plain = config.activation == "identity"

    def load() -> Any:
        up, down = map(get, factors)
        return (up, down, omega / gain) if plain else lowrank_weight(up, down, config.activation, omega, gain)

    kind = "low-rank" if plain else config.activation
    return Weight(name=name, kind=kind, shape=shape, rank=config.rank, omega=omega, load=load)


def _sine_settings(config: Mapping[str, Any]) -> list[tuple[set[str], SineLowRankConfig]]:
    entries = config.get(FIELD) or []
    try:
        return [
            (set(entry["modules"]), SineLowRankConfig(**entry["config"]))
            for entry in entries
            if entry["method"] == SineLowRankConfig.method
        ]
    except (TypeError, KeyError) as error:
        raise UserError(f"config.json lists no methods that can be read in {FIELD!r}: {one_line(error)}") from error


def _fitted(path: Path) -> Callable[[int], SineLowRankConfig] | None:
    """Return, by the number of inputs, the config of the factored layers of a neural field (coordinate network), given
    as the fit's `model`, a checkpoint or their file; None for other models."""
    folder = (path if path.is_dir() else path.parent).absolute().parent
    fit = (folder.parent if folder.name == CHECKPOINTS else folder) / FIT
    if not fit.is_file():
        return None
    try:
        settings = read_json(fit)["settings"]
        problem, method = settings["problem"], FieldMethod(**settings["method"])
        field = problem.get("field", {"activation": ""})  # it says so where the fit was told its problem's settings
        if method.kind == "sine" and method.omega is None and "field" not in problem:
            return None
        table = "nerf" if "rays" in problem else "occupancy"  # for an omega that was left open, as the problems do
        config = method.resolved(table).factors_config()
        if config is None or config.activation != "sine" or field["activation"] != "siren":
            return None if config is None else lambda n: config
        frequency = float(field["frequency"])  # the activation multiplies by it, and the weight has it in its gain
        return lambda n: replace(config, gain=config.gain_for(n) * frequency)
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{fit} does not say what was fitted: {one_line(error)}") from error


def _setting(layer: str, settings: list[tuple[set[str], SineLowRankConfig]]) -> SineLowRankConfig | None:
    """Return the config of a layer by its name in the file, which may lack the model's prefix; None if no name fits."""
    configs = [config for _, config in settings]
    if all(config == configs[0] for config in configs):
        return configs[0]
    fitting = [config for names, config in settings if any(_same(layer, name) for name in names)]
    return fitting[0] if len(fitting) == 1 else None


def _same(one: str, other: str) -> bool:
    return one == other or one.endswith(f".{other}") or other.endswith(f".{one}")


def _adapter(path: Path, tensors: _Tensors) -> list[Weight]:
    try:
        config: Any = PeftConfig.from_pretrained(str(path))
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise UserError(f"{path / ADAPTER_CONFIG} describes no adapter known here: {one_line(error)[:200]}") from error
    kind = getattr(config.peft_type, "value", str(config.peft_type))
    return [*_deltas(kind, config, tensors), *_plain(tensors)]


def _deltas(kind: str, config: Any, tensors: _Tensors) -> Iterator[Weight]:
    """Give the deltas of LoRA and sine-LoRA."""
    for down_end, up_end in _FACTORS.get(kind, ()):
        for down in [name for name in tensors.shapes if name.endswith(down_end)]:
            up = down.removesuffix(down_end) + up_end
            if up not in tensors.shapes or len(tensors.shapes[down]) != 2:
                continue
            layer = down.removeprefix("base_model.model.").removesuffix(down_end)
            load: Callable[[], Any]
            (rank, n), (m, _) = tensors.take(down), tensors.take(up)
            if kind == "LORA":
                patterns: dict[str, float] = config.alpha_pattern or {}
                alpha: float = patterns.get(get_pattern_key(list(patterns), layer), config.lora_alpha)
                scale = alpha / rank ** (0.5 if config.use_rslora else 1)
                load, omega = partial(_lora_factors, tensors, up, down, scale), None
            else:
                own = config.resolve(layer)
                gain = n**0.5 if own.gain is None else own.gain
                gain /= 1.0 if own.lora_alpha is None else own.lora_alpha / own.r
                load, omega = partial(_sine_delta, tensors, up, down, own.omega, gain), own.omega
            title = "LoRA" if kind == "LORA" else "sine-LoRA"
            yield Weight(name=layer, kind=title, shape=(m, n), rank=rank, omega=omega, load=load)


def _lora_factors(tensors: _Tensors, up: str, down: str, scale: float) -> tuple[Tensor, Tensor, float]:
    return tensors.get(up), tensors.get(down), scale


def _sine_delta(tensors: _Tensors, up: str, down: str, omega: float, gain: float) -> Tensor:
    return lowrank_weight(tensors.get(up), tensors.get(down), "sine", omega, gain)
