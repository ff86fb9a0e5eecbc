"""Hugging Face folders of torchtitan's models: names and rows of their tensors, export and import."""

import copy
import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torchtitan
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.llama3.model import Llama3Model
from transformers import AutoModelForCausalLM, LlamaConfig

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.card import write_card
from nonlinear_lowrank.hub.classes import in_files, listed_problems, register
from nonlinear_lowrank.hub.conversion import copy_companions
from nonlinear_lowrank.hub.registration import FIELD
from nonlinear_lowrank.hub.storage import check_folder, check_model_folder, check_output, staged_output, weight_files
from nonlinear_lowrank.methods.base import all_methods
from nonlinear_lowrank.surgery.augment import layer_entries, read_entry
from nonlinear_lowrank.validation import one_line

from .job import Layer, built

# Settings that change what a layer computes; the others concern its init and training.
_FUNCTION = {"rank", "rank_ratio", "activation", "depth", "fusion", "up_bias", "output_scale", "share_down"}
_FUNCTION |= {"omega", "gain"}


def state_dict_adapter(base: type) -> type:
    """Return a subclass of a family's `BaseStateDictAdapter`, for a ModelSpec, that carries our layers' tensors too.

    They are named like the weight of the same linear. Where the family permutes a weight's rows (query and key of
    Llama, for the rotary embedding), those of the up projection are permuted alike.
    """
    if issubclass(base, BranchAdapter):
        return base
    return type(f"Augmented{base.__name__}", (BranchAdapter, base), {})


class BranchAdapter:
    """A mixin in front of a family's adapter."""

    model_config: Any
    fqn_to_index_mapping: dict[Any, int] | None

    @functools.cached_property
    def layers(self) -> dict[str, Layer]:
        """The model's layers, on the meta device."""
        return {name: each for name, each in built(self.model_config).named_modules() if isinstance(each, Layer)}

    @functools.cached_property
    def _own(self) -> dict[str, tuple[str, str]]:
        """Layer and local name of every tensor that the family's adapter does not know, by its whole name."""
        return {
            f"{name}.{own}": (name, own)
            for name, layer in self.layers.items()
            for own, parameter in layer.named_parameters(recurse=False)
            if own not in ("weight", "bias")
        }

    @functools.cached_property
    def hf_names(self) -> dict[str, str]:
        """Module names in the Hugging Face model, by those in torchtitan's."""
        found = {}
        for name, layer in self.layers.items():
            keys = list(super().to_hf({f"{name}.weight": torch.empty(layer.shape, device="meta")}))  # type: ignore[misc]
            if len(keys) != 1 or not keys[0].endswith(".weight"):
                raise UserError(f"{name} has no name in the Hugging Face model; leave it out with exclude=")
            found[name] = keys[0].removesuffix(".weight")
        return found

    def _permuted(self, name: str, own: str, value: Any, back: bool) -> Any:
        """Return a tensor with its rows in the order of the weight's in the other format; a split one becomes whole."""
        layer = self.layers[name]
        if own not in layer.by_rows:
            return value
        orders: dict[Any, Tensor] = vars(self).setdefault("_orders", {})
        kind = (re.sub(r"\d+", "*", name), *layer.shape)
        if kind not in orders:  # which row of a weight the family's adapter puts at each place
            numbers = torch.arange(layer.shape[0], dtype=torch.int32)
            (moved,) = super().to_hf({f"{name}.weight": numbers[:, None].expand(layer.shape)}).values()  # type: ignore[misc]
            if moved.shape != layer.shape or not moved[:, 0].sort().values.equal(numbers):
                raise UserError(f"{name} is changed by more than the order of its rows; leave it out with exclude=")
            orders[kind] = moved[:, 0].long()
        order = orders[kind].argsort() if back else orders[kind]
        if not isinstance(value, DTensor):
            return value[order.to(value.device)]
        whole: Any = [Replicate()] * value.device_mesh.ndim
        local = value.redistribute(value.device_mesh, whole).to_local()
        return DTensor.from_local(local[order.to(local.device)], value.device_mesh, whole, run_check=False)

    def entries(self) -> list[dict[str, Any]]:
        """Return the Hugging Face config's entries for our layers."""
        return layer_entries({self.hf_names[name]: layer.config.method for name, layer in self.layers.items()})

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert from torchtitan's names and row order to Hugging Face's."""
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
        """Convert from Hugging Face's names and row order to torchtitan's."""
        ours = {f"{self.hf_names[name]}.{own}": (name, own) for name, own in self._own.values()}
        plain = {key: value for key, value in hf_state_dict.items() if key not in ours}
        state = super().from_hf(plain)  # type: ignore[misc]
        for key, (name, own) in ours.items():
            if key in hf_state_dict:
                state[f"{name}.{own}"] = self._permuted(name, own, hf_state_dict[key], back=True)
        return state


def hf_config(spec: Any, plain_config: Any = None) -> Any:
    """Return transformers' config of a model with our layers.

    `hf_config(spec).save_pretrained(folder)` completes a folder of weights that torchtitan has written itself
    (`--checkpoint.last_save_in_hf`).

    Args:
        spec: the augmented `ModelSpec`.
        plain_config: that of the plain model, e.g. a `Qwen3Config`; default: made for Llama 3.

    Raises:
        UserError: another family, or a rotary embedding that transformers' Llama does not have, and no plain_config;
            or transformers has no causal language model of this config.
    """
    plain_config = _llama_config(spec) if plain_config is None else plain_config
    config = copy.deepcopy(plain_config)
    if entries := _adapter(spec).entries():
        plain: Any = type(config)
        config.__class__ = register(plain)
        setattr(config, FIELD, entries)
    known: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in known:
        raise UserError(f"{type(plain_config).__name__} is not a causal language model's config")
    config.architectures = [known[type(config)].__name__]
    return config


def _llama_config(spec: Any) -> Any:
    if not isinstance(model := spec.model, Llama3Model.Config):
        raise UserError(f"{spec.name} is not Llama 3; give plain_config=, transformers' config of the plain model")
    first, attention, rope = model.layers[0], model.layers[0].attention, model.layers[0].attention.rope
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": float(rope.theta)}
    positions = rope.max_seq_len  # a run sets it to its sequence length
    if rope.scaling == "llama":
        positions = max(positions, int(rope.scaling_factor * rope.original_max_position_embeddings))
        same = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        rotary |= {"rope_type": "llama3", "factor": rope.scaling_factor, **{name: getattr(rope, name) for name in same}}
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
    config, output = hf_config(spec, plain_config), Path(folder).expanduser().resolve()
    state = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
    _check_state(state, built(spec.model).state_dict(), "the state")
    check_output(output)
    source = None if assets is None else check_folder(assets)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = _adapter(spec).to_hf(state)
    tied: dict[str, str] = model.all_tied_weights_keys
    tensors = {**{name: tensors[of] for name, of in tied.items() if of in tensors}, **tensors}
    whole = in_files(model, tensors, reverse=True)
    _check_state(whole, model.state_dict(), "the exported state")
    if dtype is not None:
        wide = {own for entry in getattr(config, FIELD, None) or [] for own in all_methods()[entry["method"]].float32}
        whole = {key: each if key.rpartition(".")[2] in wide else each.to(dtype) for key, each in whole.items()}
    model.load_state_dict(whole, assign=True)
    model.tie_weights()
    with staged_output(output) as staged:
        model.save_pretrained(staged)
        if source is not None:
            copy_companions(source, staged)
        kind = f"{spec.name}, {spec.flavor}"
        write_card(
            staged,
            title=f"{spec.name} {spec.flavor}, trained with torchtitan",
            summary=f"A model of torchtitan {torchtitan.__version__} ({kind}), in the Hugging Face format.",
            command="nonlinear_lowrank.integrations.torchtitan.export",
        )
    return output


def read_hf(spec: Any, folder: str | Path) -> dict[str, Tensor]:
    """Return torchtitan's state from a Hugging Face folder (of `export` or `nlr convert`), for `load_state_dict`.

    In a run torchtitan does it itself: `--checkpoint.initial_load_in_hf --checkpoint.initial_load_path FOLDER`.

    Args:
        spec: the augmented `ModelSpec`.
        folder: with the same layers of the same method.

    Raises:
        UserError: the folder is not whole, or is of another model, method or settings.
    """
    adapter = _adapter(spec)
    theirs, ours = _settings(check_model_folder(folder).get(FIELD) or []), _settings(adapter.entries())
    if theirs != ours:
        name = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        there, here = (each.get(name, "a plain linear") for each in (theirs, ours))
        raise UserError(f"{folder} has other layers than the model, first at {name}: {there} there, {here} here")
    tensors = {name: each for file in weight_files(check_folder(folder)) for name, each in load_file(file).items()}
    try:
        state = adapter.from_hf(tensors)
    except (KeyError, ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f"{folder} does not fit {spec.name} {spec.flavor}: {one_line(error)}") from error
    _check_state(state, built(spec.model).state_dict(), str(folder))
    return state


def read_checkpoint(spec: Any, folder: str | Path, *, allow_torch_checkpoints: bool = False) -> dict[str, Any]:
    """Return a model's state, for `export`, from a checkpoint of torchtitan (`outputs/checkpoint/step-N`).

    `allow_torch_checkpoints` lets its metadata be read, a pickle, which can run code: for checkpoints of your own only.

    Raises:
        UserError: it was not allowed, the folder holds no checkpoint, or not one of this model.
    """
    path, state = check_folder(folder), built(spec.model).to_empty(device="cpu").state_dict()
    if not (path / ".metadata").is_file():
        raise UserError(f"{path} is not a torch.distributed checkpoint: it has no .metadata")
    if not allow_torch_checkpoints:
        fix = "to read it, pass allow_torch_checkpoints=True"
        raise UserError(f"{path}/.metadata is a pickle, which can run code; {fix}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is what no_dist asks for
            dcp.load(state, checkpoint_id=str(path), no_dist=True)
    except (RuntimeError, ValueError, KeyError, OSError, dcp.CheckpointException) as error:
        raise UserError(f"{path} is not a whole checkpoint of this model: {one_line(error)}") from error
    return state


def _check_state(state: Mapping[str, Any], wanted: Mapping[str, Tensor], where: str) -> None:
    """Raise UserError unless a state has exactly the names and shapes of a model's."""
    missing, extra = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    other = sorted(name for name in wanted.keys() & state.keys() if wanted[name].shape != state[name].shape)
    if words := listed_problems({"missing": missing, "extra": extra, "of another shape": other}):
        raise UserError(f"{where} does not fit the model: tensors {words}")


def _settings(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the settings that decide what each layer computes, by its name."""
    found: dict[str, str] = {}
    for entry in entries:
        method, config = read_entry(entry)
        values = {key: value for key, value in asdict(config).items() if key in _FUNCTION}
        if hasattr(config, "scale"):
            values["output_scale"] = config.scale
        text = f"{method.name}({', '.join(f'{key}={value}' for key, value in values.items())})"
        found |= dict.fromkeys(entry["modules"], text)
    return found


def _adapter(spec: Any) -> Any:
    if spec.state_dict_adapter is None:
        raise UserError(f"torchtitan has no Hugging Face format for {spec.name}")
    return state_dict_adapter(spec.state_dict_adapter)(spec.model, None)
