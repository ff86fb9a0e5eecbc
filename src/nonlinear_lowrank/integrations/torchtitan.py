"""Training with torchtitan: branches in its configs, multipliers in its optimizer, export to Hugging Face and back.

    # my_job.py; torchrun ... -m torchtitan.train --module my_job --config llama3_noble
    def llama3_noble():
        return augment(llama3_debugmodel(), nlr.NobleConfig(rank=64))

It stands on torchtitan's own places to extend it, and replaces nothing at run time:

| torchtitan's           | ours                   | does                                                          |
|------------------------|------------------------|---------------------------------------------------------------|
| `ModelConfigConverter` | `AugmentConverter`     | swaps configs of linears before a model is built and sharded  |
| `Module.init_states`   | `TitanNobleLinear` ... | the layers' own init, after a build on the meta device        |
| `ParamGroupConfig`     | `optimizer_config`     | a group for each multiplier of `nlr.param_groups`, by pattern |
| `BaseStateDictAdapter` | `state_dict_adapter`   | branch tensors beside the weights, rows permuted as theirs    |

torchtitan's fused query, key and value projection is three linears here (`QKVLinear`, in the same checkpoint format),
as it is in the Hugging Face model and in the paper: each has a branch, and a learning rate, of its own.
"""

import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.card import Origin
from nonlinear_lowrank.hub.saving import layer_entries
from nonlinear_lowrank.methods.base import Method, method_of_config
from nonlinear_lowrank.methods.noble import NobleLinear
from nonlinear_lowrank.methods.sine import SineLowRankLinear
from nonlinear_lowrank.optim import parameter_roles
from nonlinear_lowrank.surgery.augment import measure_plain
from nonlinear_lowrank.surgery.report import AugmentReport
from nonlinear_lowrank.surgery.targets import Patterns, choose_linears
from nonlinear_lowrank.validation import one_line

from . import foreign
from .name_patterns import name_patterns

VERSION = "0.3.0"
"""The only version of torchtitan that this was written for and tested with; its interfaces move."""

try:
    import spmd_types as spmd
    import torchtitan
    from torchtitan.components.optimizer import ParamGroupConfig
    from torchtitan.models.common.attention import FusedQKVLinear, QKVLinear
    from torchtitan.models.common.decoder_sharding import dense_param_placement
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.llama3.model import Llama3Model
    from torchtitan.protocols.model import ModelConfigConverter
    from torchtitan.protocols.module import Module
    from torchtitan.protocols.sharding import ShardingConfig
    from torchtitan.tools.logging import logger
except ImportError as error:
    raise UserError(f"torchtitan needs pip install 'nonlinear-lowrank[torchtitan]' ({one_line(error)})") from error
if torchtitan.__version__ != VERSION:
    raise UserError(f"torchtitan {torchtitan.__version__} is not the tested one: pip install torchtitan=={VERSION}")

__all__ = [
    "AugmentConverter",
    "augment",
    "export",
    "hf_config",
    "optimizer_config",
    "read_checkpoint",
    "read_hf",
    "state_dict_adapter",
]


class _Layer(Module):
    """What makes one of our layers a module of torchtitan."""

    by_rows: tuple[str, ...] = ()  # own tensors whose rows are the layer's outputs, as those of a weight are

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight that it has or stands for: (out_features, in_features)."""
        return self.config.out_features, self.config.in_features

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """A linear's, and the method's. Not a `Linear.Config`, which later converters would take for a plain one."""

        in_features: int
        out_features: int
        bias: bool = False
        method: Any

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features); torchtitan's shardings know the argument by its name."""
        return super().forward(input)

    def _init_self_parameters(self) -> None:
        """Called by `init_states`: the method's init, and torchtitan's own for dense tensors that the method leaves."""
        self.reset_parameters()
        if getattr(self.config.method, "init", "scratch") == "pretrained":
            for name in ("weight", "bias"):
                if (parameter := getattr(self, name)) is not None:
                    self._init_param(name, parameter)

    _sharding_config: Any

    def parallelize(self, parallel_dims: Any) -> None:
        """torchtitan's; the tensors that a plain linear has not are whole on every device."""
        if parallel_dims.tp_enabled:
            raise UserError(
                "layers with branches cannot be split by torchtitan's tensor parallelism; set "
                "--parallelism.tensor_parallel_degree 1 and shard by FSDP"
            )
        if (sharding := self._sharding_config) is not None:
            states = sharding.state_shardings
            whole = {name: dense_param_placement(tp=spmd.R) for name, _ in self.named_parameters(recurse=False)}
            own = {name: states.get(name, whole[name]) for name in whole}
            self._sharding_config = replace(sharding, state_shardings=own)
            for child in self.children():  # NOBLE's dense part
                child._sharding_config = ShardingConfig(state_shardings=states)
        super().parallelize(parallel_dims)


class TitanNobleLinear(_Layer, NobleLinear):
    """`NobleLinear` as a module of torchtitan; its config's `method` is a `NobleConfig`."""

    by_rows = ("noble_up", "noble_up_bias")

    @dataclass(kw_only=True, slots=True)
    class Config(_Layer.Config):
        """Builds this class."""

    def __init__(self, config: Any) -> None:
        sizes: dict[str, Any] = {name: getattr(config, name) for name in ("in_features", "out_features", "bias")}
        NobleLinear.__init__(self, **sizes, config=config.method)
        dense = Linear(Linear.Config(**sizes))  # a module of torchtitan too
        dense.reset_parameters, self.dense, self.config = self.dense.reset_parameters, dense, config


class TitanSineLowRankLinear(_Layer, SineLowRankLinear):
    """`SineLowRankLinear` as a module of torchtitan; its config's `method` is a `SineLowRankConfig`."""

    by_rows = ("sine_up",)

    @dataclass(kw_only=True, slots=True)
    class Config(_Layer.Config):
        """Builds this class."""

    def __init__(self, config: Any) -> None:
        sizes = config.in_features, config.out_features, config.bias
        SineLowRankLinear.__init__(self, *sizes, config=config.method, dtype=torch.get_default_dtype())
        self.config = config

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        if self.sine_up.dtype in (torch.bfloat16, torch.float16):  # a phase of 30 rad would be off by 0.1 rad
            raise UserError(
                "FSDP has rounded the factors of sine low-rank weights to 16 bits, and their phases with them; set "
                "--training.mixed_precision_param float32"
            )
        return super().forward(input)


_CLASSES: dict[str, type[_Layer]] = {"noble": TitanNobleLinear, "sine-lowrank": TitanSineLowRankLinear}


class AugmentConverter(ModelConfigConverter):
    """Swaps the configs of linears for a method's, for the `converters` of torchtitan's model registries."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """As the arguments of `nonlinear_lowrank.augment`."""

        method: Any
        """`NobleConfig(rank=64)` or `SineLowRankConfig(...)`. init="auto" is "scratch" here; with "pretrained" dense
        tensors have torchtitan's own init, and the up projections start at zero."""
        include: Patterns = None
        """Regular expression(s) that a linear's whole name must match, e.g. r"layers\\.\\d+\\.attention\\..*"."""
        exclude: Patterns = None
        """The same of names to leave alone."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Change the config in place, and logs what was swapped and what was left.

        Raises:
            UserError: as `nonlinear_lowrank.augment`, or torchtitan cannot have this method, option or place; the
                config is then as it was.
        """
        method, config = _method(self.config.method)
        spread = copy.deepcopy(model_config)
        _unfuse(spread, lambda fqn: True)
        plain = _built(spread)
        names, left = choose_linears(plain, method, config, self.config.include, self.config.exclude)
        places = {name: place for place in _places(spread) for name in place.names}
        for name in names:
            _check_place(name, places.get(name), set(names))
            method.check(name, plain.get_submodule(name), config)
        _unfuse(model_config, lambda fqn: any(f"{fqn}.{own}" in names for own in ("wq", "wk", "wv")))
        for place in _places(model_config):
            if place.names[0] in names:
                fields = {own: getattr(place.config, own) for own in ("in_features", "out_features", "bias")}
                kept = {"param_init": place.config.param_init, "sharding_config": place.config.sharding_config}
                place.put(_CLASSES[method.name].Config(**fields, **kept, method=config))
        logger.info(str(_report(method, config, names, left, plain, _built(model_config))))
        return model_config


def augment(trainer_config: Any, method: Any, *, include: Patterns = None, exclude: Patterns = None) -> Any:
    """Put a method's layers into a training job: model, optimizer and Hugging Face export.

    Args:
        trainer_config: torchtitan's `Trainer.Config`, with a model and an optimizer; changed in place.
        method: as in `AugmentConverter.Config`.
        include: likewise.
        exclude: likewise.

    Returns:
        The config that was given.

    Raises:
        UserError: as `AugmentConverter` and `optimizer_config`; the config is then as it was.
    """
    if (spec := trainer_config.model_spec) is None:
        raise UserError("the trainer config has no model_spec; set one, e.g. model_registry('debugmodel')")
    if spec.state_dict_adapter and issubclass(spec.state_dict_adapter, _BranchAdapter):
        raise UserError("the job is augmented already; put a second method in by AugmentConverter, before augment")
    converter = AugmentConverter.Config(method=method, include=include, exclude=exclude).build()
    model = converter.convert(copy.deepcopy(spec.model))
    trainer_config.optimizer = optimizer_config(trainer_config.optimizer, model)
    adapter = spec.state_dict_adapter and state_dict_adapter(spec.state_dict_adapter)
    trainer_config.model_spec = replace(spec, model=model, state_dict_adapter=adapter)
    return trainer_config


def optimizer_config(optimizer: Any, model_config: Any) -> Any:
    """The optimizer's config with every group split by the multipliers of `nonlinear_lowrank.param_groups`.

    A learning rate is the group's times the role's multiplier; weight decay is the group's, or 0 for roles that have
    none (frequencies, phases, and as in `param_groups` all vectors: norms and biases).

    Args:
        optimizer: `OptimizersContainer.Config`, e.g. `default_adamw(lr=8e-4)`.
        model_config: the augmented model's config.

    Returns:
        A new config, whose patterns each match the parameters of one group and of one multiplier.

    Raises:
        UserError: a parameter has no group, a pattern matches nothing, a group names no learning rate, or Muon
            would get a branch's tensor.
    """
    roles = parameter_roles(_built(model_config))
    groups = optimizer.param_groups
    of_name = {name: _first(groups, name) for name in roles}
    for place, group in enumerate(groups):
        if place not in of_name.values():
            raise UserError(f"the optimizer's pattern {group.pattern!r} matches no parameter of this model by itself")
        if "lr" not in group.optimizer_kwargs:
            raise UserError(f"the optimizer's group {group.pattern!r} has no lr; add it to its optimizer_kwargs")
    kinds: dict[tuple[int, float, bool], list[str]] = {}
    for name, role in roles.items():
        group = groups[of_name[name]]
        if group.optimizer_name == "DistMuon" and "." in role.name and not role.muon:
            raise UserError(
                f"{name} would go to Muon, which the multipliers of {role.name} blow up; put a group of AdamW with the "
                f"pattern {name.rpartition('.')[2]!r} before {group.pattern!r}"
            )
        kinds.setdefault((of_name[name], role.lr, role.decay), []).append(name)
    patterns = name_patterns(list(kinds.values()))
    split = []
    for (place, lr, decay), pattern in sorted(zip(kinds, patterns, strict=True), key=lambda each: each[0][0]):
        group = groups[place]
        own = {**group.optimizer_kwargs, "lr": group.optimizer_kwargs["lr"] * lr}
        if not decay:
            own["weight_decay"] = 0.0
        split.append(ParamGroupConfig(pattern=pattern, optimizer_name=group.optimizer_name, optimizer_kwargs=own))
    return replace(optimizer, param_groups=split)


def state_dict_adapter(base: type) -> type:
    """A family's adapter, which then also carries the tensors of our layers.

    Their names are the weight's of the same linear. Where the family permutes a weight's rows (query and key of Llama,
    for the rotary embedding) those of the up projection are permuted alike.

    Args:
        base: a `BaseStateDictAdapter` that renames weights and permutes their rows.

    Returns:
        A subclass, for `ModelSpec.state_dict_adapter`.
    """
    if issubclass(base, _BranchAdapter):
        return base
    return type(f"Augmented{base.__name__}", (_BranchAdapter, base), {})


class _BranchAdapter:
    """In front of a family's adapter."""

    model_config: Any
    fqn_to_index_mapping: dict[Any, int] | None

    @functools.cached_property
    def _layers(self) -> dict[str, _Layer]:
        return {name: each for name, each in _built(self.model_config).named_modules() if isinstance(each, _Layer)}

    @functools.cached_property
    def _own(self) -> dict[str, tuple[str, str]]:
        """(layer, tensor) of every tensor that the family's adapter does not know, by its whole name."""
        return {
            f"{name}.{own}": (name, own)
            for name, layer in self._layers.items()
            for own, parameter in layer.named_parameters(recurse=False)
            if own not in ("weight", "bias")
        }

    @functools.cached_property
    def hf_names(self) -> dict[str, str]:
        """Module names in the Hugging Face model, by those in torchtitan's."""
        convert = super().to_hf  # type: ignore[misc]
        return {name: foreign.renamed(convert, name, layer.shape) for name, layer in self._layers.items()}

    def _permuted(self, name: str, own: str, value: Any, back: bool) -> Any:
        layer = self._layers[name]
        if own not in layer.by_rows:
            return value
        known: dict[Any, Tensor] = vars(self).setdefault("_known_orders", {})
        kind = (re.sub(r"\d+", "*", name), *layer.shape)
        if kind not in known:
            known[kind] = foreign.row_order(super().to_hf, name, layer.shape)  # type: ignore[misc]
        return foreign.take_rows(value, known[kind].argsort() if back else known[kind])

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """From torchtitan's names and rows to Hugging Face's."""
        plain = {key: value for key, value in state_dict.items() if key not in self._own}
        found = super().to_hf(plain)  # type: ignore[misc]
        index = self.fqn_to_index_mapping
        for key, (name, own) in self._own.items():
            if key in state_dict:
                found[f"{self.hf_names[name]}.{own}"] = self._permuted(name, own, state_dict[key], back=False)
                if index:  # of the plain model's files
                    weight = f"{self.hf_names[name]}.weight"
                    index[f"{self.hf_names[name]}.{own}"] = index.get(weight, max(index.values()))
        for name in self.hf_names.values():
            if index and f"{name}.weight" not in found:  # sine low-rank weights have none
                index.pop(f"{name}.weight", None)
        return found

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """From Hugging Face's names and rows to torchtitan's."""
        ours = {f"{self.hf_names[name]}.{own}": (name, own) for name, own in self._own.values()}
        plain = {key: value for key, value in hf_state_dict.items() if key not in ours}
        state = super().from_hf(plain)  # type: ignore[misc]
        for key, (name, own) in ours.items():
            if key in hf_state_dict:
                state[f"{name}.{own}"] = self._permuted(name, own, hf_state_dict[key], back=True)
        return state


def hf_config(spec: Any, plain_config: Any = None) -> Any:
    """transformers' config of a model, with our layers: `hf_config(spec).save_pretrained(folder)` completes a folder of
    weights that torchtitan has written itself (`--checkpoint.last_save_in_hf`).

    Args:
        spec: the augmented `ModelSpec`.
        plain_config: that of the plain model, e.g. a `Qwen3Config`; default: made for Llama 3.

    Raises:
        UserError: another family, or a rotary embedding that transformers' Llama does not have, and no plain_config.
    """
    plain_config = _llama_config(spec) if plain_config is None else plain_config
    return foreign.config_with(plain_config, _entries(_adapter(spec)))


def _llama_config(spec: Any) -> Any:
    from transformers import LlamaConfig

    if not isinstance(model := spec.model, Llama3Model.Config):
        raise UserError(f"{spec.name} is not Llama 3; give plain_config=, transformers' config of the plain model")
    first, attention, rope = model.layers[0], model.layers[0].attention, model.layers[0].attention.rope
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": float(rope.theta)}
    positions = rope.max_seq_len  # a run makes it its own sequence length
    if rope.scaling == "llama":
        positions = max(positions, int(rope.scaling_factor * rope.original_max_position_embeddings))
        rotary |= {"rope_type": "llama3", "factor": rope.scaling_factor}
        same = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        rotary |= {name: getattr(rope, name) for name in same}
    elif rope.scaling != "none":
        raise UserError(f"transformers' Llama has no {rope.scaling!r} rotary embedding; give plain_config=")
    return LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        intermediate_size=first.feed_forward.w1.out_features,
        num_hidden_layers=len(model.layers),
        num_attention_heads=attention.n_heads,
        num_key_value_heads=attention.n_kv_heads or attention.n_heads,
        head_dim=attention.head_dim or model.dim // attention.n_heads,
        max_position_embeddings=positions,
        rms_norm_eps=model.norm.eps,
        rope_parameters=rotary,
        tie_word_embeddings=model.enable_weight_tying,
        bos_token_id=None,
        eos_token_id=None,
    )


def export(
    spec: Any,
    state: Mapping[str, Any],
    folder: str | Path,
    *,
    plain_config: Any = None,
    assets: str | Path | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a model's state as a Hugging Face folder, which `hub.load_model` and the Auto classes load.

    Args:
        spec: the augmented `ModelSpec`.
        state: of the whole model: `model.state_dict()`, or of `read_checkpoint`; DTensors are gathered.
        folder: new or empty; it appears when it is whole.
        plain_config: as in `hf_config`.
        assets: folder whose tokenizer and licence are copied (torchtitan's `hf_assets_path`).
        dtype: of the weights; default: as they are. Sine factors stay float32.

    Returns:
        The folder.

    Raises:
        UserError: tensors are missing, extra or of another shape, the folder is not empty or cannot be written.
    """
    config = hf_config(spec, plain_config)
    whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
    foreign.check_state(whole, _built(spec.model).state_dict(), "the state")
    origin = Origin(
        title=f"{spec.name} {spec.flavor}, trained with torchtitan",
        summary=f"A model of torchtitan {VERSION} ({spec.name}, {spec.flavor}), in the Hugging Face format.",
        command="nonlinear_lowrank.integrations.torchtitan.export",
    )
    return foreign.write_folder(folder, _adapter(spec).to_hf(whole), config, origin, assets=assets, dtype=dtype)


def read_hf(spec: Any, folder: str | Path) -> dict[str, Tensor]:
    """The reverse of `export`: torchtitan's state from a Hugging Face folder, e.g. one of `nlr convert`.

    In a run torchtitan does it itself: `--checkpoint.initial_load_in_hf --checkpoint.initial_load_path FOLDER`.

    Args:
        spec: the augmented `ModelSpec`.
        folder: with the same layers of the same method.

    Returns:
        The state, for `model.load_state_dict`.

    Raises:
        UserError: the folder is not whole, or is of another model, method or settings.
    """
    adapter = _adapter(spec)
    tensors = foreign.read_folder(folder, _entries(adapter))
    try:
        state = adapter.from_hf(tensors)
    except (KeyError, ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f"{folder} does not fit {spec.name} {spec.flavor}: {one_line(error)[:300]}") from error
    foreign.check_state(state, _built(spec.model).state_dict(), str(folder))
    return state


def read_checkpoint(spec: Any, folder: str | Path, *, allow_torch_checkpoints: bool = False) -> dict[str, Any]:
    """The model's state in one of torchtitan's checkpoints (`outputs/checkpoint/step-N`), gathered in this process.

    Args:
        spec: the augmented `ModelSpec`.
        folder: the checkpoint.
        allow_torch_checkpoints: its metadata is a pickle, which can run code: only of your own runs.

    Returns:
        The state, for `export`.

    Raises:
        UserError: it was not allowed, the folder holds no checkpoint, or not one of this model.
    """
    state = _built(spec.model).to_empty(device="cpu").state_dict()
    foreign.read_torch_checkpoint(state, folder, allow=allow_torch_checkpoints)
    return state


class _Place(NamedTuple):
    """Where the config of one linear, or of two, stands."""

    names: tuple[str, ...]  # of the modules that are built from it
    config: Any
    parent: Any
    attribute: Any

    def put(self, config: Any) -> None:
        if isinstance(self.parent, list):
            self.parent[self.attribute] = config
        else:
            setattr(self.parent, self.attribute, config)


def _places(model_config: Any) -> Iterator[_Place]:
    for kind in (Linear.Config, _Layer.Config):
        for fqn, config, parent, attribute in model_config.traverse(kind):
            shared = isinstance(parent, QKVLinear.Config) and attribute == "wkv"
            names = tuple(fqn.removesuffix("wkv") + own for own in ("wk", "wv")) if shared else (fqn,)
            yield _Place(names, config, parent, attribute)


def _check_place(name: str, place: _Place | None, chosen: set[str]) -> None:
    if place is None or place.parent is None:
        raise UserError(f"the model's config has no linear at {name}; leave it out with exclude=")
    if isinstance(place.config, _Layer.Config):
        raise UserError(f"{name} is augmented already; leave it out with exclude=")
    # Subclasses compute in ways of their own, and modules of "dist_gemm" read weights past their linears.
    owner = type(place.parent).__qualname__.removesuffix(".Config")
    if type(place.config) is not Linear.Config or owner.startswith("AllGather"):
        kind = type(place.config).__qualname__.removesuffix(".Config")
        raise UserError(f"{name} is a {kind} in {owner}, where a branch cannot be; leave it out with exclude=")
    if not chosen.issuperset(place.names):
        raise UserError(f"{' and '.join(place.names)} have one config in torchtitan; choose both or neither")


def _method(config: Any) -> tuple[Method, Any]:
    """The method of a config, and the config as torchtitan's models can have it."""
    method = method_of_config(config)
    if method is None or method.name not in _CLASSES:
        named = type(config).__name__ if method is None else method.name
        raise UserError(f"{named} is not for torchtitan; use NobleConfig or SineLowRankConfig")
    if getattr(config, "share_down", "none") != "none" or getattr(config, "fuse_shared_inputs", False):
        raise UserError(
            "share_down and fuse_shared_inputs join layers, which stand alone in torchtitan; leave them out"
        )
    return method, method.initial(config, pretrained=False)


def _unfuse(model_config: Any, wanted: Callable[[str], bool]) -> None:
    """Make three linears of fused query, key and value projections, by the name of the module around them."""
    for fqn, fused, parent, attribute in list(model_config.traverse(FusedQKVLinear.Config)):
        if type(fused) is not FusedQKVLinear.Config or type(fused.wqkv) is not Linear.Config or not wanted(fqn):
            continue
        heads, width = (fused.n_heads, fused.n_kv_heads), fused.head_dim
        linears = {}
        for own, count in (("wq", fused.n_heads), ("wkv", fused.n_kv_heads)):
            of_rows = {
                name: functools.partial(_draw_rows, draw, own, heads, width)
                for name, draw in (fused.wqkv.param_init or {}).items()
            }
            linears[own] = replace(fused.wqkv, out_features=count * width, param_init=of_rows or None)
        setattr(parent, attribute, QKVLinear.Config(head_dim=width, **linears))


def _draw_rows(draw: Callable[[Tensor], Any], own: str, heads: tuple[int, int], width: int, tensor: Tensor) -> None:
    """The init of a fused projection, of which the queries' or the keys' rows are kept."""
    queries, groups = heads
    each = queries // groups
    fused = tensor.new_empty((queries + 2 * groups) * width, *tensor.shape[1:])
    draw(fused)
    blocks = fused.view(groups, each + 2, width, *tensor.shape[1:])
    rows = blocks[:, :each] if own == "wq" else blocks[:, each : each + 1]
    with torch.no_grad():
        tensor.copy_(rows.reshape(-1, *tensor.shape[1:]))


def _built(model_config: Any) -> Any:
    with torch.device("meta"):
        return model_config.build()


def _report(method: Method, config: Any, names: list[str], left: dict[str, str], plain: Any, model: Any) -> Any:
    report = AugmentReport(method=method.name, config=config, swapped=names, skipped=left)
    measure_plain(report, plain, names)
    report.parameters_added = sum(each.numel() for each in model.parameters()) - report.parameters_before
    report.flops_added = sum(method.flops(model.get_submodule(name)) for name in names)
    return report


def _first(groups: list[Any], name: str) -> int:
    """The place of the group that torchtitan gives a parameter to."""
    for place, group in enumerate(groups):
        if re.search(group.pattern, name):
            return place
    raise UserError(f"the optimizer has no group for {name}; end its param_groups with the pattern '.*'")


def _adapter(spec: Any) -> Any:
    if spec.state_dict_adapter is None:
        raise UserError(f"torchtitan has no Hugging Face format for {spec.name}")
    return state_dict_adapter(spec.state_dict_adapter)(spec.model, None)


def _entries(adapter: Any) -> list[dict[str, Any]]:
    layers = adapter._layers.items()
    return layer_entries({adapter.hf_names[name]: layer.config.method for name, layer in layers})
