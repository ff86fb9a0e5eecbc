"""Hugging Face folders of torchtitan's models: names and rows of their tensors, export and import."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torchtitan
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.llama3.model import Llama3Model

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.card import Origin
from nonlinear_lowrank.integrations import foreign
from nonlinear_lowrank.surgery.augment import layer_entries
from nonlinear_lowrank.validation import one_line

from .layers import Layer, built


def state_dict_adapter(base: type) -> type:
    """Return a family's adapter that also carries the tensors of our layers.

    They are named like the weight of the same linear. Where the family permutes a weight's rows (query and key of
    Llama, for the rotary embedding), those of the up projection are permuted alike.

    Args:
        base: a `BaseStateDictAdapter` that renames weights and permutes their rows.

    Returns:
        A subclass, for `ModelSpec.state_dict_adapter`.
    """
    if issubclass(base, BranchAdapter):
        return base
    return type(f"Augmented{base.__name__}", (BranchAdapter, base), {})


class BranchAdapter:
    """A mixin in front of a family's adapter."""

    model_config: Any
    fqn_to_index_mapping: dict[Any, int] | None

    @functools.cached_property
    def _layers(self) -> dict[str, Layer]:
        return {name: each for name, each in built(self.model_config).named_modules() if isinstance(each, Layer)}

    @functools.cached_property
    def _own(self) -> dict[str, tuple[str, str]]:
        """Layer and local name of every tensor that the family's adapter does not know, by its whole name."""
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
    foreign.check_state(whole, built(spec.model).state_dict(), "the state")
    origin = Origin(
        title=f"{spec.name} {spec.flavor}, trained with torchtitan",
        summary=f"A model of torchtitan {torchtitan.__version__} ({spec.name}, {spec.flavor}), in the Hugging Face "
        "format.",
        command="nonlinear_lowrank.integrations.torchtitan.export",
    )
    return foreign.write_folder(folder, _adapter(spec).to_hf(whole), config, origin, assets=assets, dtype=dtype)


def read_hf(spec: Any, folder: str | Path) -> dict[str, Tensor]:
    """Return torchtitan's state from a Hugging Face folder (of `export` or `nlr convert`).

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
        raise UserError(f"{folder} does not fit {spec.name} {spec.flavor}: {one_line(error)}") from error
    foreign.check_state(state, built(spec.model).state_dict(), str(folder))
    return state


def read_checkpoint(spec: Any, folder: str | Path, *, allow_torch_checkpoints: bool = False) -> dict[str, Any]:
    """Return the model's state in a checkpoint of torchtitan (`outputs/checkpoint/step-N`), gathered in this process.

    Args:
        spec: the augmented `ModelSpec`.
        folder: the checkpoint.
        allow_torch_checkpoints: read its metadata, a pickle, which can run code; for checkpoints of your own only.

    Returns:
        The state, for `export`.

    Raises:
        UserError: it was not allowed, the folder holds no checkpoint, or not one of this model.
    """
    state = built(spec.model).to_empty(device="cpu").state_dict()
    foreign.read_torch_checkpoint(state, folder, allow=allow_torch_checkpoints)
    return state


def _adapter(spec: Any) -> Any:
    if spec.state_dict_adapter is None:
        raise UserError(f"torchtitan has no Hugging Face format for {spec.name}")
    return state_dict_adapter(spec.state_dict_adapter)(spec.model, None)


def _entries(adapter: Any) -> list[dict[str, Any]]:
    layers = adapter._layers.items()
    return layer_entries({adapter.hf_names[name]: layer.config.method for name, layer in layers})
